"""Boxes: their operations, and the part of a tensor that each rank holds under FSDP2, tensor parallelism and both."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.harness.ranks import RankPool
from usp.parallel.reallocation.boxes import Box, local_box, local_part

SHAPES = ((8, 3), (7, 3), (3, 5), (1, 4), (9,), (4, 6, 5))


def test_overlap_is_the_intersection() -> None:
    first, second = Box((0, 2), (4, 5)), Box((3, 0), (6, 4))
    assert first.overlap(second) == second.overlap(first) == Box((3, 2), (1, 2))
    assert first.overlap(Box((4, 2), (1, 1))) is None
    assert first.overlap(Box((1, 3), (0, 2))) is None
    assert first.overlap(Box.whole((9, 9))) == first


def test_slices_index_the_whole_tensor_or_a_box() -> None:
    whole = torch.arange(63).view(7, 9)
    outer, inner = Box((2, 3), (4, 5)), Box((3, 4), (2, 2))
    assert torch.equal(whole[outer.slices()][inner.slices(outer)], whole[inner.slices()])
    assert inner.numel == whole[inner.slices()].numel()


def test_differences_and_runs_are_disjoint_boxes() -> None:
    outer = Box((1, 2, 0), (4, 3, 2))
    for other in (Box((2, 3, 0), (2, 1, 1)), Box((0, 0, 0), (3, 4, 2)), Box((9, 9, 9), (1, 1, 1)), outer):
        covered = torch.zeros(6, 6, 3, dtype=torch.int64)
        for part in outer.minus(other):
            covered[part.slices()] += 1
        expected = torch.zeros(6, 6, 3, dtype=torch.int64)
        expected[outer.slices()] = 1
        expected[other.slices()] = 0
        assert torch.equal(covered, expected), other
    whole = torch.arange(6 * 6 * 3).view(6, 6, 3)
    elements = whole[outer.slices()].flatten()
    for begin in range(outer.numel):
        for end in range(begin + 1, outer.numel + 1):
            found = [whole[part.slices()].flatten() for part in outer.run(begin, end)]
            assert torch.equal(torch.cat(found), elements[begin:end]), (begin, end)
    assert outer.run(5, 5) == [] and Box((), ()).run(0, 1) == [Box((), ())]


def values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def check(tensor: torch.Tensor, whole: torch.Tensor) -> int:
    """Check that the local part is the tensor's box, and return its number of elements."""
    box = local_box(tensor)
    assert torch.equal(local_part(tensor), whole[box.slices()]), (box, tensor)
    return box.numel


def held_under_fsdp(replicas: int, shards: int, dim: int, shapes: tuple[tuple[int, ...], ...]) -> list[int]:
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("r", "s"))
    module = nn.ParameterList([nn.Parameter(values(shape)) for shape in shapes])
    fully_shard(module, mesh=mesh if replicas > 1 else mesh["s"], shard_placement_fn=lambda _: Shard(dim))
    return [check(p, values(shape)) for p, shape in zip(module.parameters(), shapes, strict=True)]


@pytest.mark.parametrize(
    ("replicas", "shards", "dim", "shapes"), [(1, 4, 0, SHAPES), (2, 2, 0, SHAPES), (1, 2, 1, ((1, 4), (4, 6, 5)))]
)
@pytest.mark.slow
def test_fsdp_shards_are_boxes(
    ranks: RankPool, replicas: int, shards: int, dim: int, shapes: tuple[tuple[int, ...], ...]
) -> None:
    held = ranks.run(held_under_fsdp, replicas * shards, replicas, shards, dim, shapes)
    assert [sum(sizes) for sizes in zip(*held, strict=True)] == [replicas * values(s).numel() for s in shapes]
    if shards == 4:
        assert [sizes[2:5] for sizes in held] == [[5, 4, 3], [5, 0, 3], [5, 0, 3], [0, 0, 0]]  # rows run out


def held_under_fsdp_and_tp() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    held = []
    for shape, placement in [((10, 3), Shard(0)), ((6, 4), Shard(0)), ((5, 6), Shard(1)), ((7, 3), Replicate())]:
        module = nn.ParameterList([nn.Parameter(distribute_tensor(values(shape), mesh["tp"], [placement]))])
        fully_shard(module, mesh=mesh["fsdp"])
        (parameter,) = module.parameters()
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.placements[0], _StridedShard) == (placement == Shard(0))
        held.append(check(parameter, values(shape)))
    return held


def test_fsdp_over_tensor_parallel_shards_gives_boxes(ranks: RankPool) -> None:
    held = ranks.run(held_under_fsdp_and_tp, 4)
    assert [sum(sizes) for sizes in zip(*held, strict=True)] == [30, 24, 30, 42]
    assert [sizes[0] for sizes in held] == [9, 9, 6, 6]  # 5 rows of a tp rank over 2


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    messages = []
    cases: list[tuple[tuple[int, ...], list[Placement]]] = [
        ((8, 3), [Partial(), Replicate()]),
        ((8, 3), [_StridedShard(0, split_factor=2), Replicate()]),
        ((7, 3), [_StridedShard(0, split_factor=2), Shard(0)]),
    ]
    for shape, placements in cases:
        whole = torch.empty(shape, device="meta")
        tensor = DTensor.from_local(whole, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        with pytest.raises(ValueError) as error:
            local_box(tensor)
        messages.append(str(error.value))
    return messages


def test_local_parts_that_are_not_a_box_are_refused(ranks: RankPool) -> None:
    partial, loose, uneven = ranks.run(refusals, 4)[0]
    assert "partial sums" in partial
    assert "rows from 2 places in dim 0 of (8, 3)" in loose and "but split them into 1" in loose
    assert "must split its 7 rows evenly into 2" in uneven
