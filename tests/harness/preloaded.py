"""Imported once for all ranks of tests, for what takes a rank longer than most steps: transformers' patterns of every
model's checkpoints, compiled at their first use, the verification of models on a tiny copy, and hypothesis, of which
modules that ranks import have tests."""

import gc

import hypothesis.strategies  # noqa: F401
import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from tests.usp.tiny import CONFIGS
from usp.hf.models import empty_model, load_model_config
from usp.hf.probe import structure

get_checkpoint_conversion_mapping("llama")
torch.set_num_threads(1)  # ranks are forked from this process, which threads would not survive
for config in (load_model_config("tiny"), *(CONFIGS[name]() for name in ("llama", "llama-4kv", "qwen3", "mixtral"))):
    model = empty_model(config)
    structure(type(model), model.config)
gc.collect()
gc.freeze()  # a rank that looks for garbage would walk, and copy, all of what this process holds
gc.set_threshold(20_000)  # and looks for it seldom, for a step makes little
