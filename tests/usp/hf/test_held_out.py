"""Models of configurations that the table was not made with are exact, or refused with a reason that names why."""

from __future__ import annotations

import pytest

from examples.models import tiny_config
from tests.harness.ranks import RankPool
from tests.usp.hf.held_out import CALLS, check, draw, exact_types

# Windows of some layers with biases, chunks, images in both directions, and blocks of keys.
CHOSEN = {"qwen2": 0, "llama4_text": 1, "gemma3": 1, "minimax_m3_vl_text": 0}  # seeds
TOLERANCE = 1e-10


@pytest.fixture
def drawn(exhaustive: bool) -> list[tuple[str, int]]:
    return [*CHOSEN.items(), *((model_type, 0) for model_type in exact_types() if exhaustive)]


@pytest.mark.slow
def test_held_out_configurations_are_exact_or_refused(
    ranks: RankPool, drawn: list[tuple[str, int]], exhaustive: bool
) -> None:
    """Without --exhaustive on one mesh each, in turn."""
    calls = [CALLS if exhaustive else CALLS[number % len(CALLS) :][:1] for number in range(len(drawn))]
    found = {case: check(ranks, draw(*case).config, some) for case, some in zip(drawn, calls, strict=True)}
    wrong = {case: calls for case, calls in found.items() if not all(call.error <= TOLERANCE for call in calls)}
    assert not wrong
    refused = {(name, call.refused) for (name, _), calls in found.items() for call in calls if call.refused}
    assert all(REFUSED.get(name, "another") in why for name, why in refused), refused


# With bidirectional attention, its windows go both ways.
REFUSED = {"gemma3_text": "Gemma3Attention: its mask is none of causal, sliding, chunked and bidirectional"}


def test_a_draw_changes_most_of_what_the_table_was_made_with() -> None:
    drawn, table = draw("qwen2", 0), tiny_config("qwen2")
    assert draw("qwen2", 0).config.to_dict() == drawn.config.to_dict() != draw("qwen2", 1).config.to_dict()
    changed = {name for name in drawn.fields if getattr(drawn.config, name) != getattr(table, name)}
    assert {"hidden_size", "num_attention_heads", "layer_types", "rope_parameters", "sliding_window"} <= changed
