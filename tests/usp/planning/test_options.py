"""The layouts of calls: as many as ReaL has, and what a model and a batch allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.rlhf.real_search import real_space
from tests.usp.rlhf.toy import ppo
from usp.model.facts import ModelFacts
from usp.planning.rlhf_search import OptionSpace, degrees, options, rank_sets

GRAPH = ppo(mini_batches=4)


@pytest.mark.parametrize(
    ("hosts", "of_one", "of_four"), [(1, 42, 22), (2, 98, 58), (4, 256, 176), (8, 780, 620), (16, 2784, 2464)]
)
def test_every_call_has_as_many_options_as_in_real(hosts: int, of_one: int, of_four: int) -> None:
    counts = []
    for smallest in (1, 4):
        space = real_space(8 * hosts, samples=512, smallest=smallest)
        counts.append(sum(len(list(degrees(len(ranks), space))) for ranks in rank_sets(space)))
    assert counts == [of_one, of_four]


@pytest.mark.parametrize(("hosts", "inference", "train"), [(8, 520, 356), (16, 2095, 1147)])
def test_as_many_are_left_after_the_filters_of_real(hosts: int, inference: int, train: int) -> None:
    space = real_space(8 * hosts, samples=512)
    for name in ("actor_generate", "ref_inference"):
        assert len(list(options(GRAPH[name], space))) == inference
    assert len(list(options(GRAPH["actor_train"], space))) == train


def test_options_are_valid_plans_for_any_number_of_ranks() -> None:
    models = {role: ModelFacts("", 6, 6, 16, 256, (0,) * 3) for role in GRAPH.roles}
    space = OptionSpace(12, 6, 64, max_sequence=4, zero=(0, 1, 3), recompute=(("none", False), ("full", True)))
    space = replace(space, models=models)
    found = {call.name: list(options(call, space)) for call in GRAPH.calls}
    for name, layouts in found.items():
        assert len(set(layouts)) == len(layouts), name
        for layout in layouts:
            assert layout.dims.resolve(len(layout.ranks)) == layout.dims
            assert 6 % layout.dims.tp == 0
            assert layout.dims.tp * layout.dims.ulysses <= 6
            assert layout.dims.pp <= 3
    trained = found["actor_train"]
    assert {layout.zero for layout in trained} == {0, 1, 3}
    assert {layout.dims.sp for layout in trained} == {1, 2, 3, 4}
    assert {layout.zero for layout in found["actor_generate"]} == {0}
    assert {len(layout.ranks) for layout in trained} == {1, 2, 3, 6, 12}
