"""From flags to what a run does, before any communication."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GenerationConfig, LlamaConfig

from tests.usp.tiny import SIZES, drawn_model
from usp.rlhf.config import RlhfConfig
from usp.rlhf.graph import Generate
from usp.rlhf.prepare import prepare
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch


def generate_of(config: RlhfConfig) -> Generate:
    work = prepare(config, Launch()).graph["actor_generate"].work
    assert isinstance(work, Generate)
    return work


def test_responses_end_as_the_tokenizer_the_generation_config_and_the_flags_say(tmp_path: Path) -> None:
    model = drawn_model(LlamaConfig(**SIZES | {"vocab_size": 384, "max_position_embeddings": 2048}))
    model.generation_config = GenerationConfig(eos_token_id=[5, 9])
    model.save_pretrained(tmp_path / "model")
    config = RlhfConfig(model=str(tmp_path / "model"), tokenizer="bytes", output=str(tmp_path / "run"))
    assert generate_of(config).stop_ids == (1, 5, 9)
    asked = generate_of(replace(config, stop_ids="17, 9", stop='["</a>", "\\n"]'))
    assert asked.stop_ids == (1, 5, 9, 17) and asked.stop_strings == ("</a>", "\n")
    assert generate_of(replace(config, model="tiny", stop="Q:")).stop_strings == ("Q:",)
    for changes, text in (
        ({"stop_ids": "400"}, "stop id 400 must be from 0 to 383"),
        ({"stop_ids": "a"}, "--stop-ids = a must be token ids"),
        ({"stop": "[3]"}, "must be a text, or a JSON list of texts"),
        ({"stop": "x", "algorithm": "sft"}, "sft generates none: remove them"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            prepare(replace(config, **changes), Launch())


def test_plans_are_checked_against_the_models_before_anything_runs(tmp_path: Path) -> None:
    config = RlhfConfig(model="mixtral-tiny", output=str(tmp_path / "run"))
    four = Launch(world_size=4, local_world_size=4)
    for plan in ("heuristic", "flattening"):
        calls = prepare(replace(config, plan=plan), four).plan.calls
        assert (calls["actor_train"].zero, calls["actor_train"].dims.tp) == ((1, 4) if plan == "heuristic" else (3, 1))
    calls = prepare(replace(config, ep=4, sp_ulysses=2), four).plan.calls
    assert {calls[name].dims.ep for name in ("actor_generate", "ref_inference", "actor_train")} == {4}
    for changes, text in (
        ({"ep": 3}, "ep=3 must divide"),
        ({"model": "tiny", "ep": 2}, "ep=2 shards experts, and tiny has none"),
        ({"tp": 2}, "needs tp_sequence_parallel=True in training"),
        ({"ep": 2, "zero": 0}, "use zero=1"),
        ({"ep": 2, "plan": "heuristic", "sft_steps": 0}, "does not use --ep"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            prepare(replace(config, **changes), four)
