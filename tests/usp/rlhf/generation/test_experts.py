"""Models with experts generate the same under expert and tensor parallelism as on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import pytest
import torch
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.usp.tiny import CONFIGS, VOCAB, drawn_model
from usp.hf import expert_parallel
from usp.parallel import ParallelDims, ParallelMesh
from usp.rlhf.graph import Generate

from .test_generate import built, logprobs_of

GRIDS = (
    ParallelDims(),
    ParallelDims(ep=2),
    ParallelDims(ep=4),
    ParallelDims(tp=2),
    ParallelDims(tp=2, ep=2),
    ParallelDims(tp=2, ep=4),
    ParallelDims(ulysses=2, ep=2),
    ParallelDims(ring=2, ep=4),
    ParallelDims(tp=2, ring=2, ep=2),
    ParallelDims(tp=2, ulysses=2, ep=4),
    ParallelDims(pp=2, ep=2),
)
ALL_GRIDS = {"mixtral": range(len(GRIDS)), "qwen3_moe": (0, 3, 5, 7, 9)}
ON_GRIDS = {"mixtral": (9, 10), "qwen3_moe": (7,)}
WITHOUT_PROMPTS = {"mixtral": (2,)}  # where most data-parallel ranks have none
LENGTHS = (40, 1, 65, 3, 2, 33, 9)
# Responses of very different lengths, so that data-parallel ranks end at different times.
WORKS = (
    Generate(max_new_tokens=6, temperature=0, stop_ids=tuple(range(0, VOCAB, 4))),
    Generate(max_new_tokens=10, temperature=0.8, stop_ids=tuple(range(0, VOCAB, 6))),
)
Found = list[dict[int, tuple[list[int], Tensor]]]


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def generated(family: str, mesh: ParallelMesh, count: int) -> Found:
    """The responses to the first `count` prompts that are this rank's, by number of the prompt and work."""
    generator = built(CONFIGS[family](), mesh, slots=2)
    own = range(mesh.rank("batch"), count, mesh.size("batch"))
    given, found = [prompts()[number] for number in own], []
    for work in WORKS:
        responses = generator.generate(given, work, list(own))
        found.append({n: (r.tokens.tolist(), r.logprobs) for n, r in zip(own, responses, strict=True)})
    return found


def on_grids(chosen: Mapping[str, Sequence[int]], count: int) -> dict[tuple[str, str], Found]:
    meshes = {number: ParallelMesh.create(GRIDS[number]) for number in sorted({*chain(*chosen.values())})}
    return {
        (family, str(GRIDS[number])): generated(family, meshes[number], count)
        for family, numbers in chosen.items()
        for number in numbers
    }


def alone(family: str) -> Found:
    return generated(family, ParallelMesh.create(ParallelDims()), len(LENGTHS))


@pytest.mark.slow
def test_every_grid_generates_what_one_process_does(ranks: RankPool, exhaustive: bool) -> None:
    wanted = {family: ranks.run(alone, 1, family)[0] for family in ON_GRIDS}
    for family, found in wanted.items():
        model = drawn_model(CONFIGS[family]())
        for number, (tokens, logprobs) in found[0].items():
            exact = logprobs_of(model, torch.cat((prompts()[number], torch.tensor(tokens))))
            assert (exact[len(prompts()[number]) - 1 :] - logprobs).abs().max() <= 1e-5
        assert len({len(tokens) for tokens, _ in found[1].values()}) >= 3
    several, one = (ALL_GRIDS, ALL_GRIDS) if exhaustive else (ON_GRIDS, WITHOUT_PROMPTS)
    for chosen, count in ((several, len(LENGTHS)), (one, 1)):
        for rank, grids in enumerate(ranks.run(on_grids, 4, chosen, count)):
            for (family, dims), works in grids.items():
                for work, responses in enumerate(works):
                    for number, (tokens, logprobs) in responses.items():
                        exact, reference = wanted[family][work][number]
                        where = f"{family}, {dims}, rank {rank}, prompt {number}, work {work}"
                        assert tokens == exact, where
                        assert (logprobs - reference).abs().max() <= 1e-5, where


def rows_sent(dims: ParallelDims) -> int:
    """The rows that this rank's experts get in a call with one prompt of one token and one new token."""
    mesh, rows = ParallelMesh.create(dims), 0
    grouped = expert_parallel.grouped_linear

    def counted(rows_GI: Tensor, *rest: object) -> Tensor:
        nonlocal rows
        rows += len(rows_GI)
        return grouped(rows_GI, *rest)

    expert_parallel.grouped_linear = counted
    try:
        built(CONFIGS["mixtral"](), mesh, slots=2).generate(
            [torch.arange(1)], Generate(max_new_tokens=1, temperature=0), [0]
        )
    finally:
        expert_parallel.grouped_linear = grouped
    return rows


@pytest.mark.parametrize("dims", [ParallelDims(tp=2, ring=2, ep=4), ParallelDims(tp=2, ulysses=2, ep=2)], ids=str)
@pytest.mark.slow(but=1)
def test_a_token_that_ranks_share_goes_to_its_experts_once(ranks: RankPool, dims: ParallelDims) -> None:
    # two layers, two experts of each token, two matrices of an expert
    assert sum(ranks.run(rows_sent, 4, dims)) == 2 * 2 * 2
