from __future__ import annotations

import pytest

from usp.parallel import ParallelDims


def test_dp_shard_takes_the_rest() -> None:
    dims = ParallelDims(ulysses=4, ring=2).resolve(32)
    assert (dims.dp_shard, dims.sp, dims.batch) == (4, 8, 4)
    assert str(dims) == "dp_shard=4 ring=2 ulysses=4"


def test_degrees_are_in_mesh_order() -> None:
    assert list(ParallelDims().degrees()) == ["pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp"]
    inside = ParallelDims(sp_order="ulysses-outer")
    assert list(inside.degrees()) == ["pp", "dp_replicate", "dp_shard", "ulysses", "ring", "tp"]


def test_degrees_must_multiply_to_the_world_size() -> None:
    with pytest.raises(ValueError, match=r"ring=2 x ulysses=4 = 8 ranks must divide the world size 12"):
        ParallelDims(ulysses=4, ring=2).resolve(12)
    with pytest.raises(ValueError, match=r"dp_shard=3 x ring=2 = 6 ranks must equal the world size 8: use dp_shard=4"):
        ParallelDims(ring=2, dp_shard=3).resolve(8)


def test_all_invalid_degrees_are_reported_together() -> None:
    with pytest.raises(
        ValueError, match=r"dp_shard=-2 must .* \(or -1 for the rest\); ring=0 must .*sp_order='inside'"
    ):
        ParallelDims(ring=0, dp_shard=-2, sp_order="inside")
