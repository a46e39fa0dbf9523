"""Imported once for all ranks of tests: what many of them import, and what takes a rank longer than most steps, which
are transformers' patterns of every model's checkpoints, compiled at their first use, and the verification of models on
a tiny copy."""

import contextlib
import gc
from importlib import import_module

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")
MODULES = (
    *("usp.train.trainer", "usp.rlhf.trainer", "usp.parallel.pipeline", "peft", "tests.usp.hf.test_every_model"),
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
    *("torch._inductor.compile_fx", "hypothesis.strategies"),  # the latter of tests in modules that ranks import
)


def verify_models() -> None:
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from tests.usp.tiny import CONFIGS
    from usp.hf.models import empty_model, load_model_config
    from usp.hf.probe import structure

    get_checkpoint_conversion_mapping("llama")
    torch.set_num_threads(1)  # ranks are forked from this process, which threads would not survive
    for config in (
        load_model_config("tiny"),
        *(CONFIGS[name]() for name in ("llama", "llama-4kv", "qwen3", "mixtral")),
    ):
        model = empty_model(config)
        structure(type(model), model.config)


gc.disable()  # until all is imported
for name in MODULES:
    with contextlib.suppress(ImportError):
        import_module(name)
verify_models()
gc.enable()
gc.collect()
gc.freeze()  # a rank that looks for garbage would walk, and copy, all of what this process holds
gc.set_threshold(20_000)  # and looks for it seldom, for a step makes little
