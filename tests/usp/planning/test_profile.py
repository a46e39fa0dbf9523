"""What measurements say between their points, their file, and estimates with their factors."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.rlhf_profile.measuring import save
from tests.usp.rlhf.toy import ppo
from usp.hf.models import load_model_config, model_facts, scalar_config, with_layers
from usp.hf.tensor_parallel import model_shape
from usp.model.facts import ModelShape
from usp.parallel import ParallelDims, load_hardware
from usp.planning.call_cost import CallOptions
from usp.planning.estimates import (
    DECODE,
    PREFILL,
    UPDATE,
    Corrections,
    Estimates,
    Measurements,
    Points,
    TimedPart,
    layout_key,
    model_key,
)
from usp.planning.workload import Workload
from usp.rlhf.plan.plan import CallLayout

DTYPE = torch.float32
CONFIG = load_model_config("tiny")
WORKLOAD = Workload.of(prompts=8, group_size=1, prompt_tokens=33, quantiles=(16,))
GRAIN = 0.001


def shape(layers: int, scalar: bool = False) -> ModelShape:
    config = with_layers(scalar_config(CONFIG) if scalar else CONFIG, layers)
    return model_shape(model_facts("", config), config)


def layout(first: int, size: int, **options) -> CallLayout:
    return CallLayout(tuple(range(first, first + size)), ParallelDims(dp_shard=size), **options)


def grid(law, layers=(1, 3), sequences=(2, 8), tokens=(16, 64)) -> Points:
    return {(d, n, t): law(d, n, t) for d in layers for n in sequences for t in tokens}


def law(layers: float, sequences: float, tokens: float) -> float:
    return 0.5 + GRAIN * layers * (3 + 2 * sequences * (5 + tokens))


def measurements(parts: dict[TimedPart, Points]) -> Measurements:
    return Measurements("here", "float32", 2, {"layers": [1, 2], "counted": 0.5}, parts)


def measured(*layouts: CallLayout) -> Estimates:
    """Every call on two data-parallel ranks is measured, with the same law; factors are those of `layouts`."""
    actor, critic, key = model_key(shape(2), DTYPE), model_key(shape(2, scalar=True), DTYPE), layout_key(layout(0, 2))
    works = {actor: (PREFILL, DECODE, "logprobs", "train logprobs"), critic: ("values", "train values")}
    parts: dict[TimedPart, Points] = {
        TimedPart(model, work, key): grid(law) for model, of in works.items() for work in of
    }
    for model, work in ((actor, "train logprobs"), (critic, "train values")):
        parts[TimedPart(model, UPDATE + work, key)] = {(d, 1, 1): 0.125 for d in (1, 3)}
    graph, models = ppo(), dict.fromkeys(("actor", "ref"), shape(2))
    models |= dict.fromkeys(("critic", "reward"), shape(2, scalar=True))
    estimates = Estimates(graph, models, WORKLOAD, load_hardware("a100"), CallOptions(DTYPE))
    times = measurements(parts).times(estimates, {call.name: layouts for call in graph.calls})
    return replace(estimates, corrections=Corrections().after(times))


def test_measurements_are_linear_between_and_beyond_their_points() -> None:
    part = TimedPart("m", DECODE, "dp=2")
    found = measurements({part: grid(law)})
    for layers, sequences, tokens in ((1, 2, 16), (2, 5, 40), (3, 4, 16), (32, 16, 128), (1, 1, 8)):
        assert found.at(part, layers, sequences, tokens) == pytest.approx(law(layers, sequences, tokens))
    assert math.isnan(found.at(replace(part, layout="dp=4"), 1, 2, 16))
    one = measurements({part: grid(law, layers=(3,), sequences=(2,), tokens=(16,))})
    assert one.at(part, 3, 4, 8) == one.at(part, 3, 2, 16)  # in proportion to each
    assert math.isnan(one.at(part, 2, 2, 16))  # a single depth tells nothing of others


def test_measurements_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = measurements({TimedPart("m", DECODE, "dp=2"): grid(law), TimedPart("m", PREFILL, "tp=2"): grid(law)})
    path = tmp_path / "profile.json"
    save(written, path)
    assert Measurements.load(path) == written
    assert Measurements.load(path).points == written.points
    for text in ("{}", "no JSON", '{"version": 7, "parts": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"profile\.json is not a profile of python -m examples\.rlhf_profile"):
            Measurements.load(path)


def test_keys_tell_what_runs_differently_alone() -> None:
    assert model_key(shape(1), DTYPE) == model_key(shape(3), DTYPE)
    others = {model_key(shape(1, scalar=True), DTYPE), model_key(shape(1), torch.bfloat16)}
    assert len({model_key(shape(1), DTYPE), *others}) == 3
    assert layout_key(layout(0, 2)) == layout_key(layout(6, 2)) == layout_key(layout(0, 2, micro_batch_tokens=7))
    replicas = CallLayout((0, 1), ParallelDims(dp_replicate=2, dp_shard=1))
    assert layout_key(replicas) == layout_key(layout(0, 2))
    keys = {layout_key(layout(0, 2, **one)) for one in ({}, {"zero": 1}, {"zero": 3}, {"ac": "full"}, {"mlp_tile": 8})}
    assert len(keys) == 5
    four = CallLayout((0, 1, 2, 3), ParallelDims(dp_replicate=2, dp_shard=2))
    assert layout_key(four) == layout_key(layout(0, 4))
    assert layout_key(replace(four, zero=1)) != layout_key(layout(0, 4, zero=1))


def test_calls_take_what_their_parts_take() -> None:
    two = layout(2, 2)
    found = measured(two)
    # Four prompts a rank, in rows of 32 tokens; 16 steps with 41 places in use in the mean (32, and 1 to 16 more).
    generation = law(2, 4, 32) + 16 * law(2, 4, 40.5)
    assert found.call_seconds("actor_generate", two) == pytest.approx(generation)
    assert found.call_seconds("ref_inference", two) == pytest.approx(law(2, 4, 49))
    assert found.call_seconds("reward_inference", two) == pytest.approx(law(2, 4, 49))
    work = found.graph["actor_train"].work
    each = 8 // work.mini_batches / 2
    assert found.call_seconds("actor_train", two) == pytest.approx(work.mini_batches * work.epochs * law(2, each, 49))
    # Further micro-batches repeat all but the update.
    rows = replace(two, micro_batch_tokens=49)
    once = law(2, 1, 49)
    expected = work.mini_batches * work.epochs * (once + (each - 1) * (once - 0.125))
    assert measured(rows).call_seconds("actor_train", rows) == pytest.approx(expected)


def test_a_layout_that_was_not_measured_is_predicted_times_the_factor_of_a_similar_one() -> None:
    two, four = layout(0, 2), layout(0, 4)
    found = measured(two, four)
    assert set(found.corrections.factors) == {call.name for call in found.graph.calls if call.role}
    assert found.corrections.factors["ref_inference"].keys() == {"dp=2"}
    (factor,) = found.corrections.factors["ref_inference"].values()
    expected = factor * found.formula("ref_inference", four)
    assert found.call_seconds("ref_inference", four) == pytest.approx(expected)
    assert found.call_seconds("advantages", four) == 0  # a function has no model
