"""What a profile says between its measurements, estimates from it, and steps whose calls share processors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel import ParallelDims
from tests.usp.cost.rlhf.estimates import Simple
from tests.usp.rlhf.toy import ppo
from usp.cost.calls.call_cost import CallOptions
from usp.cost.calls.workload import Workload
from usp.cost.profile.moves import fitted, move_seconds
from usp.cost.profile.parts import DECODE, PREFILL, UPDATE, Part, layout_key, model_key
from usp.cost.profile.profile import Point, Profile, Sizes, Timing
from usp.cost.profile.profiled_estimates import ProfiledEstimates
from usp.cost.profile.profiled_question import ProfiledSimulator
from usp.hf.models import load_model_config, model_facts, scalar_config, with_layers
from usp.hf.shapes import model_shape
from usp.model.facts import ModelShape
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

DTYPE = torch.float32
CONFIG = load_model_config("tiny")
WORKLOAD = Workload.of(prompts=8, group_size=1, prompt_tokens=33, quantiles=(16,))
STEP, GRAIN = 0.25, 0.001


def shape(layers: int, scalar: bool = False) -> ModelShape:
    config = with_layers(scalar_config(CONFIG) if scalar else CONFIG, layers)
    return model_shape(model_facts("", config), config)


def layout(first: int, size: int, **options) -> CallLayout:
    return CallLayout(tuple(range(first, first + size)), ParallelDims(dp_shard=size), **options)


def grid(law, layers=(1, 3), sequences=(2, 8), tokens=(16, 64)) -> tuple[Point, ...]:
    return tuple(
        Point(d, n, t, Timing(law(d, n, t), 2 * law(d, n, t))) for d in layers for n in sequences for t in tokens
    )


def law(layers: float, sequences: float, tokens: float) -> float:
    return 0.5 + GRAIN * layers * (3 + 2 * sequences * (5 + tokens))


def profile(parts: dict[Part, tuple[Point, ...]], cores: int = 0) -> Profile:
    return Profile("here", "float32", 2, cores, Sizes(), parts, Timing(STEP, 0.0), (0.1, 0.01, 1e-6))


def measured(cores: int = 0) -> ProfiledEstimates:
    """Every call on two data-parallel ranks is measured, with the same law."""
    actor, critic, key = model_key(shape(2), DTYPE), model_key(shape(2, scalar=True), DTYPE), layout_key(layout(0, 2))
    works = {actor: (PREFILL, DECODE, "logprobs", "train logprobs"), critic: ("values", "train values")}
    parts = {Part(model, work, key): grid(law) for model, of in works.items() for work in of}
    for model, work in ((actor, "train logprobs"), (critic, "train values")):
        parts[Part(model, UPDATE + work, key)] = tuple(Point(d, 1, 1, Timing(0.125, 0.25)) for d in (1, 3))
    graph, models = ppo(), {"actor": shape(2), "ref": shape(2)}
    models |= {role: shape(2, scalar=True) for role in ("critic", "reward")}
    return ProfiledEstimates(profile(parts, cores), Simple(), graph, models, WORKLOAD, CallOptions(DTYPE))


def test_a_profile_is_linear_between_and_beyond_its_points() -> None:
    part = Part("m", DECODE, "dp=2")
    found = profile({part: grid(law)})
    for layers, sequences, tokens in ((1, 2, 16), (2, 5, 40), (3, 4, 16), (32, 16, 128), (1, 1, 8)):
        timing = found.at(part, layers, sequences, tokens)
        assert timing == pytest.approx((law(layers, sequences, tokens), 2 * law(layers, sequences, tokens)))
    assert found.at(replace(part, layout="dp=4"), 1, 2, 16) is None
    one = profile({part: grid(law, layers=(3,), sequences=(2,), tokens=(16,))})
    assert one.at(part, 3, 4, 8) == one.at(part, 3, 2, 16)  # in proportion to each
    assert one.at(part, 2, 2, 16) is None  # a single depth tells nothing of others


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = profile({Part("m", DECODE, "dp=2"): grid(law), Part("m", PREFILL, "tp=2"): grid(law)}, cores=2)
    path = tmp_path / "profile.json"
    written.save(path)
    assert Profile.load(path) == written
    assert Profile.load(path).points == written.points
    for text in ("{}", "no JSON", '{"version": 7, "parts": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"profile\.json is not a profile of python -m usp rlhf-profile"):
            Profile.load(path)


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
    found, two = measured(), layout(2, 2)
    # Four prompts a rank, in rows of 32 tokens; 16 steps with 41 places in use in the mean (32, and 1 to 16 more).
    generation = law(2, 4, 32) + 16 * law(2, 4, 40.5)
    assert found.call_seconds("actor_generate", two) == pytest.approx(generation)
    assert found.call_seconds("ref_inference", two) == pytest.approx(law(2, 4, 49))
    assert found.call_seconds("reward_inference", two) == pytest.approx(law(2, 4, 49))
    work = found.graph["actor_train"].work
    each = 8 // work.mini_batches / 2
    assert found.call_seconds("actor_train", two) == pytest.approx(work.mini_batches * work.epochs * law(2, each, 49))
    assert not found.lacking
    # Further micro-batches repeat all but the update.
    rows = replace(two, micro_batch_tokens=49)
    once = law(2, 1, 49)
    expected = work.mini_batches * work.epochs * (once + (each - 1) * (once - 0.125))
    assert found.call_seconds("actor_train", rows) == pytest.approx(expected)


def test_what_a_profile_lacks_is_told() -> None:
    found, other = measured(), layout(0, 4)
    assert found.call_seconds("ref_inference", other) == Simple().call_seconds("ref_inference", other)
    assert found.lacking == {("ref_inference", "dp=4")}
    assert found.call_seconds("advantages", other) == Simple().call_seconds("advantages", other)
    assert found.lacking == {("ref_inference", "dp=4")}  # a function has no model


def test_reallocations_take_a_sum_over_their_plan() -> None:
    found = measured()
    copies = [
        WeightCopy("actor", CallLayout((0, 1), dims)) for dims in (ParallelDims(dp_shard=1, tp=2), ParallelDims())
    ]
    copies[1] = WeightCopy("actor", layout(0, 2))
    nbytes = 4 * sum(part.numel for part in (*shape(2).embedding, *shape(2).head, *shape(2).norm))
    nbytes += 4 * sum(part.numel for layer in shape(2).layers for part in layer.parameters)
    seconds = found.fill_seconds(*copies)
    assert 0.1 + 0.02 + 0.9e-6 * nbytes < seconds < 0.1 + 0.02 + 1e-6 * nbytes  # each lacks half of what is sharded
    assert found.fill_seconds(copies[1], copies[1]) == Simple().fill_seconds(copies[1], copies[1])


def test_a_fit_has_no_negative_terms() -> None:
    class Plan:
        def __init__(self, links: int, total: int) -> None:
            self.links, self.shares, self.total_bytes = range(links), 1, total

    plans = [Plan(links, total) for links, total in ((2, 10), (4, 80), (8, 40), (6, 90))]
    exact = [0.5 + 0.1 * len(plan.links) + 0.01 * plan.total_bytes for plan in plans]
    assert fitted(plans, exact) == pytest.approx((0.5, 0.1, 0.01))
    falling = [1.0 + 0.1 * len(plan.links) - 0.001 * plan.total_bytes for plan in plans]
    found = fitted(plans, falling)
    assert min(found) >= 0
    assert move_seconds(found, plans[0]) == pytest.approx(falling[0], rel=0.2)


def test_a_step_of_calls_at_once_on_shared_processors() -> None:
    def plan(second: int) -> ExecutionPlan:
        graph = ppo()
        places = {call.name: layout(0, 2) for call in graph.calls}
        return ExecutionPlan("", places | {name: layout(second, 2) for name in ("critic_inference", "critic_train")})

    found = {}
    for cores in (0, 2):
        estimates = measured(cores)
        simulator = ProfiledSimulator(estimates.graph, estimates, 4, processors=cores, profiled=estimates)
        found[cores] = {second: simulator.run(plan(second)) for second in (0, 2)}
        assert simulator.measure(plan(2))[0] == pytest.approx(found[cores][2].seconds)
    # Each call uses both processors, so nothing is gained by other ranks, and every call waits for its inputs.
    assert found[2][0].seconds == pytest.approx(found[0][0].seconds)
    assert found[0][2].seconds < 0.95 * found[0][0].seconds
    assert found[2][2].seconds == pytest.approx(found[2][0].seconds, rel=0.02)
