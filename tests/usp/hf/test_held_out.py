"""Models of configurations that the table was not made with are exact, or refused with a reason that names why."""

from __future__ import annotations

import pytest

from tests.harness.ranks import RankPool
from tests.usp.hf.held_out import check, draw, exact_types
from usp.hf.probe import tiny_config

# Windows of some layers with biases, softcaps, latent attention with groups of experts, sinks, state spaces.
CHOSEN = ["qwen2", "gemma2", "deepseek_v3", "gpt_oss", "bamba"]
TOLERANCE = 1e-5  # norms and rotary embeddings are in float32 inside of a float64 model


@pytest.fixture
def types(exhaustive: bool) -> list[str]:
    return exact_types() if exhaustive else CHOSEN


def test_held_out_configurations_are_exact_or_refused(ranks: RankPool, types: list[str]) -> None:
    found = {model_type: check(ranks, draw(model_type, 0).config) for model_type in types}
    wrong = {name: calls for name, calls in found.items() if not all(call.error <= TOLERANCE for call in calls)}
    assert not wrong
    refused = {name: {call.refused for call in calls} - {""} for name, calls in found.items()}
    assert {name for name, why in refused.items() if why} <= set(REFUSED)


REFUSED: dict[str, str] = {}


def test_a_draw_changes_most_of_what_the_table_was_made_with() -> None:
    drawn, table = draw("qwen2", 0), tiny_config("qwen2")
    assert draw("qwen2", 0).config.to_dict() == drawn.config.to_dict() != draw("qwen2", 1).config.to_dict()
    changed = {name for name in drawn.fields if getattr(drawn.config, name) != getattr(table, name)}
    assert {"hidden_size", "num_attention_heads", "layer_types", "rope_parameters", "sliding_window"} <= changed
