"""Responses during training are those of the weights of the moment, on any layout, and change nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness.ranks import RankPool
from tests.usp.tiny import drawn_model
from tests.usp.train.test_lora import steps_of
from tests.usp.train.test_trainer import launch_of_pool
from usp.config import TrainConfig
from usp.data.tokenizer import ByteTokenizer
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.rlhf.sampling import prepare_sampler
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.prepare import prepare
from usp.train.trainer import Trainer, train

PROMPTS = ["def f(", "import os", "x = "]
TOKENS = 12
RUN = TrainConfig(seq_len=64, steps=3, warmup_steps=1, batch_size=4, adam_eps=1e-4, learning_rate=3e-2, device="cpu")
RUN = replace(RUN, tokenizer="bytes", sample_every=2, sample_tokens=TOKENS, hang_timeout=0)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 u2": (4, {"sp_ulysses": 2, "batch_size": 2, "ac": "full"}),
    "one, adapters": (1, {"lora_rank": 4, "lora_merge": True, "zero": 0, "learning_rate": 0.3}),
    "pp2 tp2, zero 1": (4, {"pp": 2, "tp": 2, "zero": 1, "micro_batches": 2}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    config = load_model_config("qwen3-tiny")
    config.max_position_embeddings = 256
    config.initializer_range = 0.3  # so that responses are not one token again and again
    save_weights(dict(drawn_model(config).named_parameters()), folder / "model", config=config)
    (folder / "prompts.txt").write_text("\n\n".join(PROMPTS))
    return folder


def run_with_and_without(config: TrainConfig) -> None:
    prepared = prepare(config, launch_of_pool())
    Trainer(prepared, sample=prepare_sampler(prepared)).run()
    without = replace(config, sample_every=0, sample_prompts="", sample_tokens=256, output=f"{config.output}-without")
    Trainer(prepare(without, launch_of_pool())).run()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slow(full=1)
def test_responses_are_those_of_the_model_that_is_trained(
    ranks: RankPool, base: Path, tmp_path: Path, name: str
) -> None:
    world_size, layout = LAYOUTS[name]
    files = {"model": str(base / "model"), "sample_prompts": str(base / "prompts.txt")}
    ranks.run(run_with_and_without, world_size, replace(RUN, **files, output=str(tmp_path / "run"), **layout))
    assert torch.equal(steps_of(tmp_path / "run"), steps_of(tmp_path / "run-without"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(step, p) for step in (2, 3) for p in PROMPTS]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model"), ByteTokenizer()
    for line in lines[3:]:
        ids = torch.from_numpy(tokenizer.encode(line["prompt"])).unsqueeze(0)
        wanted = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=tokenizer.eos, pad_token_id=0)
        assert line["response"] == tokenizer.decode(wanted[0, ids.shape[1] :].tolist())
    before, after = ([line["response"] for line in part] for part in (lines[:3], lines[3:]))
    assert before != after and len({*before, *after}) > len(PROMPTS)  # of both steps, and of several prompts


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sample_prompts": ""}, "--sample-every = 2 needs what the model responds to: give --sample-prompts"),
        ({"sample_every": 0, "sample_prompts": ""}, "--sample-tokens = 12 is an option of --sample-every"),
        ({"compile": True}, "for which --compile would compile"),
        ({"sample_prompts": "nowhere.txt"}, "--sample-prompts: .*nowhere.txt"),
        ({"sample_prompts": "long.txt"}, "a prompt of 256 tokens exceeds the model's context"),
        ({"sample_prompts": "chats.jsonl"}, "messages need a chat template"),
    ],
)
@pytest.mark.slow(but=4)
def test_what_cannot_be_generated_is_refused(base: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    (tmp_path / "long.txt").write_text("x" * 256)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}))
    files = {"model": str(base / "model"), "sample_prompts": str(base / "prompts.txt")}
    if changes.get("sample_prompts"):
        changes = {"sample_prompts": str(tmp_path / changes["sample_prompts"])}
    with pytest.raises(ConfigurationError, match=said):
        prepare_sampler(prepare(replace(RUN, **files | changes), Launch()))


@pytest.mark.slow
def test_a_run_that_asks_for_samples_needs_what_generates_them(base: Path, tmp_path: Path) -> None:
    files = {"model": str(base / "model"), "sample_prompts": str(base / "prompts.txt"), "output": str(tmp_path)}
    with pytest.raises(ConfigurationError, match="--sample-every = 2 needs `sample`"):
        train(prepare(replace(RUN, **files), Launch()), Launch())
