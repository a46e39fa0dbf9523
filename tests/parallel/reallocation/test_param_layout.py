"""Parameter layouts: gathering them from all ranks, refusing invalid ones, and finding the holders of each box."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.harness.ranks import RankPool
from usp.parallel import ParamLayout, gather_layout
from usp.parallel.reallocation.boxes import Box
from usp.parallel.reallocation.param_layout import Kind, holdings

FLOAT = torch.float32


def layout(boxes: dict[int, Box], shape: tuple[int, ...] = (6, 4)) -> ParamLayout:
    return ParamLayout({"p": Kind(shape, FLOAT)}, {"p": boxes})


def test_equal_layouts_have_equal_digests() -> None:
    upper, lower = Box((0, 0), (3, 4)), Box((3, 0), (3, 4))
    one = layout({0: upper, 1: lower})
    assert one == layout({1: lower, 0: upper, 2: Box((6, 0), (0, 4))})  # empty boxes are removed
    assert one.ranks == (0, 1)
    two = ParamLayout({"q": Kind((1,), FLOAT), **one.parameters}, {**one.boxes, "q": {}})
    turned = ParamLayout(dict(reversed(two.parameters.items())), two.boxes)
    assert two.digest == turned.digest
    others = [two, layout({0: lower, 1: upper}), layout({0: upper}), layout({0: upper, 1: lower}, (7, 4))]
    others.append(ParamLayout({"p": Kind((6, 4), torch.bfloat16)}, one.boxes))
    assert len({one.digest, *(other.digest for other in others)}) == 6


def test_boxes_outside_the_parameter_are_refused() -> None:
    with pytest.raises(ValueError, match=r"p of shape \(6, 4\) cannot have Box\(offset=\(4, 0\), sizes=\(3, 4\)\)"):
        layout({0: Box((4, 0), (3, 4))})
    with pytest.raises(ValueError, match=r"q must be both in parameters and in boxes"):
        ParamLayout({"q": Kind((1,), FLOAT)}, {})


def test_holdings_are_split_where_the_holders_change() -> None:
    boxes = {0: Box((0, 0), (4, 4)), 1: Box((2, 0), (4, 4)), 2: Box((2, 0), (4, 4)), 3: Box((3, 1), (1, 2))}
    parts = holdings([*boxes.items(), (0, Box((3, 0), (1, 4)))])  # rank 0 holds one row twice
    held = torch.zeros(6, 4, dtype=torch.int64)
    for box, ranks in parts:
        assert not held[box.slices()].any()
        held[box.slices()] = sum(1 << rank for rank in ranks)
    expected = torch.zeros(6, 4, dtype=torch.int64)
    expected[:4] += 1
    expected[2:] += 2 + 4
    expected[3, 1:3] += 8
    assert torch.equal(held, expected)


def gathered() -> tuple[ParamLayout, str, int]:
    """Gather stages, a tensor sharded twice, and a subgroup; then parameters that differ between ranks."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    half = dist.new_group([1, 3])
    tensors = {f"stage{rank // 2}": torch.zeros(3, dtype=torch.bfloat16)}
    tensors["both"] = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1), Shard(0)])
    found = gather_layout(tensors)
    ranks = gather_layout(tensors, half).ranks if rank in (1, 3) else ()
    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial(), Replicate()])
    bad = {"stage0": torch.zeros(3 + rank % 2), "both": partial}
    with pytest.raises(ValueError) as error:
        gather_layout(bad if rank else {})
    return found, str(error.value), len(ranks)


@pytest.mark.slow
def test_every_rank_gets_the_same_layout_or_the_same_refusal(ranks: RankPool) -> None:
    results = ranks.run(gathered, 4)
    found, message, _ = results[0]
    assert [result[:2] for result in results] == [(found, message)] * 4
    assert [size for _, _, size in results] == [0, 2, 0, 2]
    assert found.parameters == {
        "stage0": Kind((3,), torch.bfloat16),
        "both": Kind((6, 4), FLOAT),
        "stage1": Kind((3,), torch.bfloat16),
    }
    whole = Box((0,), (3,))
    assert found.boxes == {
        "stage0": {0: whole, 1: whole},
        "both": {rank: Box((rank % 2 * 3, rank // 2 * 2), (3, 2)) for rank in range(4)},
        "stage1": {2: whole, 3: whole},
    }
    assert message.startswith("ranks must hold boxes of the same parameters: both: placements")
    assert message.endswith("stage0 is (4,) torch.float32 on ranks [1, 3] and (3,) torch.float32 on ranks [2]")
