"""Tensor and expert parallelism reject degrees that a model does not support."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import MixtralConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from usp.hf.models import load_model_config, model_facts
from usp.model.facts import ModelFacts, ep_chunks, ep_violations, tp_violations


def test_tp_must_divide_every_sharded_size() -> None:
    facts = ModelFacts("m", num_heads=6, num_kv_heads=3, head_dim=4, vocab_size=99, windows=(0,), intermediate_size=62)
    assert list(map(str, tp_violations(facts, 4, False))) == [
        "tp=4 must divide vocab_size=99 of m: use tp=1, 3",
        "tp=4 must divide num_attention_heads=6 of m: use tp=1, 2, 3",
        "tp=4 must divide num_key_value_heads=3 of m: use tp=1, 3",
        "tp=4 must divide intermediate_size=62 of m: use tp=1, 2",
    ]
    qwen3 = model_facts("qwen3", Qwen3Config())
    assert tp_violations(qwen3, 1, False) == tp_violations(qwen3, 2, True) == []
    assert "use tp=2 or more" in str(tp_violations(qwen3, 1, True)[0])


@pytest.mark.parametrize("config", [MixtralConfig(intermediate_size=5), Qwen3MoeConfig(intermediate_size=5)])
def test_tp_with_experts_needs_sequence_parallelism(config: PretrainedConfig) -> None:
    facts = model_facts("m", config)
    assert tp_violations(facts, 2, True) == []
    (violation,) = tp_violations(facts, 2, False)
    assert "tp=2 with the mixture of experts m needs tp_sequence_parallel=True" in str(violation)


def test_ep_must_divide_the_experts() -> None:
    facts = model_facts("m", load_model_config("mixtral-tiny"))
    assert not ep_violations(facts, 4)
    divisibility, jitter = ep_violations(replace(facts, router_jitter=0.1), 3)
    assert str(divisibility) == "ep=3 must divide the 8 experts of m: use ep=1, 2, 4, 8"
    assert [ep_chunks(facts, ep) for ep in (1, 2, 4, 8)] == [1, 4, 2, 1] and ep_chunks(facts, 2, 2) == 2
    assert not any(ep_violations(facts, 2, chunks) for chunks in (0, 1, 2, 4))
    for chunks in (3, 8, -2):
        (violation,) = ep_violations(facts, 2, chunks)
        assert (
            str(violation)
            == f"ep_chunks={chunks} must divide the 4 experts of a rank (8 / ep 2): use ep_chunks=1, 2, 4"
        )
    assert "router_jitter_noise=0.1" in str(jitter)
    dense = model_facts("tiny", load_model_config("tiny"))
    assert list(map(str, ep_violations(dense, 2))) == ["ep=2 shards experts, and tiny has none: use ep=1"]
    assert not ep_violations(dense, 1)
