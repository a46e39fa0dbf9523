"""Reallocation: all pairs of layouts on eight ranks, random layouts in one process, properties of plans, refusals."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel import ParamLayout, ProcessGroups, RanksDisagree, Reallocation, ReallocPlan, gather_layout, plan_realloc
from parallel.memory import track_memory
from parallel.reallocation.boxes import Box, local_part
from parallel.reallocation.param_layout import Kind
from parallel.reallocation.reallocation import rank_rounds
from parallel.testing import RankPool, count_sent_bytes
from tests.parallel.reallocation.layouts import GRIDS, KINDS, REAL, dtensors, plain_tensors

CPU = torch.device("cpu")
BUCKET = 16_000


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# All pairs, on eight ranks


def run_pairs(pairs: list[tuple[str, str]]) -> tuple[list[int], list[str]]:
    """Return the bytes that this rank sends for each of these pairs, and those whose result is not bitwise correct."""
    groups, rank = ProcessGroups(), dist.get_rank()
    held = {name: plain_tensors(grid.layout(), rank) for name, grid in GRIDS.items()}
    layouts = {name: grid.layout() for name, grid in GRIDS.items()}
    for name, dims in REAL.items():
        held[name] = dtensors(dims, groups)
        assert gather_layout(held[name]).digest == layouts[name].digest, name
    targets = {
        name: {key: torch.empty_like(tensor) for key, tensor in tensors.items()} for name, tensors in held.items()
    }
    sent, wrong = [], []
    for src, dst in pairs:
        plan = plan_realloc(layouts[src], layouts[dst], bucket_bytes=BUCKET, ranks_per_host=4)
        reallocation = Reallocation(plan, groups, CPU)
        for tensor in targets[dst].values():
            local_part(tensor).fill_(float("nan"))
        with count_sent_bytes() as counted:
            reallocation.run(held[src], targets[dst])
        sent.append(counted.total)
        parts = ((local_part(targets[dst][name]), local_part(held[dst][name])) for name in held[dst])
        if not all(torch.equal(bits(got), bits(expected)) for got, expected in parts):
            wrong.append(f"{src} -> {dst}")
    return sent, wrong


def held_bytes(layout: ParamLayout) -> list[Tensor]:
    """Return, for each rank, a mask of the model's bytes that it holds."""
    masks = []
    for rank in range(8):
        parts = []
        for name, (shape, dtype) in KINDS.items():
            mask = torch.zeros(shape, dtype=torch.bool)
            if rank in layout.boxes[name]:
                mask[layout.boxes[name][rank].slices()] = True
            parts.append(mask.flatten().repeat_interleave(dtype.itemsize))
        masks.append(torch.cat(parts))
    return masks


def test_all_pairs_are_exact_and_send_the_minimum_number_of_bytes(ranks: RankPool, exhaustive: bool) -> None:
    """Without --exhaustive every fourth pair, so each layout still meets a quarter of the others."""
    assert len(GRIDS) % 2, "every fourth pair would leave layouts out"
    pairs = list(itertools.product(GRIDS, GRIDS))[:: 1 if exhaustive else 4]
    results = ranks.run(run_pairs, 8, pairs, timeout=400)
    assert [wrong for _, wrong in results] == [[]] * 8
    masks = {name: held_bytes(grid.layout()) for name, grid in GRIDS.items()}
    assert len({tuple(tuple(mask.tolist()) for mask in held) for held in masks.values()}) == len(GRIDS) >= 25
    for (src, dst), *sent in zip(pairs, *(sent for sent, _ in results), strict=True):
        fewest = sum(int((after & ~before).sum()) for before, after in zip(masks[src], masks[dst], strict=True))
        assert sum(sent) == fewest, (src, dst)


# Random layouts, in one process


@st.composite
def random_layouts(draw: st.DrawFn) -> tuple[ParamLayout, ParamLayout]:
    """Draw two layouts of a few parameters on up to six ranks.

    In the first, each part of a recursively split parameter has an owner, whose box may be larger than the part. In the
    second, ranks hold any box or nothing.
    """
    parameters, wanted, src, dst = {}, {}, {}, {}
    world = draw(st.integers(1, 6))
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        name = f"p{number}"
        parameters[name] = Kind(shape, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])))
        wanted[name] = parameters[name]
        if parameters[name].dtype.is_floating_point:
            wanted[name] = Kind(shape, draw(st.sampled_from([torch.float32, torch.bfloat16])))
        parts = [Box.whole(shape)]
        for _ in range(draw(st.integers(0, world - 1)) if shape else 0):
            part = parts.pop(draw(st.integers(0, len(parts) - 1)))
            end = draw(st.integers(0, part.numel))
            parts += part.run(0, end) + part.run(end, part.numel)
        parts = parts if len(parts) <= world else [Box.whole(shape)]
        owners = draw(st.permutations(range(world)))
        src[name] = {rank: larger(draw, part, shape) for rank, part in zip(owners, parts, strict=False)}
        for rank in owners[len(parts) :]:
            if draw(st.booleans()):
                src[name][rank] = larger(draw, draw(st.sampled_from(parts)), shape)
        seeds = [draw(st.sampled_from(parts)) for _ in range(world)]
        dst[name] = {rank: larger(draw, seeds[rank], shape) for rank in range(world) if draw(st.booleans())}
    return ParamLayout(parameters, src), ParamLayout(wanted, dst)


def larger(draw: st.DrawFn, part: Box, shape: tuple[int, ...]) -> Box:
    if draw(st.booleans()):
        return part
    offset = tuple(draw(st.integers(0, begin)) for begin in part.offset)
    ends = [draw(st.integers(end, size)) for end, size in zip(part.end, shape, strict=True)]
    return Box(offset, tuple(end - begin for end, begin in zip(ends, offset, strict=True)))


def interpret(plan: ReallocPlan) -> tuple[int, list[str]]:
    """Execute a plan in one process. Return the bytes sent, and every "name on rank" with wrong values."""
    whole = {
        name: torch.arange(1.0, 1 + torch.Size(kind.shape).numel()).view(kind.shape)
        for name, kind in plan.dst.parameters.items()
    }
    after: dict[tuple[str, int], Tensor] = {}
    for name, boxes in plan.dst.boxes.items():
        for rank, box in boxes.items():
            after[name, rank] = torch.zeros(box.sizes)
            if common := plan.kept(rank).get(name):
                after[name, rank][common.slices(box)] = whole[name][common.slices()]
    ranks = plan.ranks
    rounds = {rank: rank_rounds(plan, rank) for rank in ranks}
    total = 0
    for number in range(plan.rounds):
        received: Counter[int] = Counter()
        for sender in ranks:
            sends = rounds[sender][number].sends
            for receiver, pieces in sends.items():
                assert pieces == rounds[receiver][number].receives[sender]
                for name, box in pieces:
                    held, wanted = plan.src.boxes[name][sender], plan.dst.boxes[name][receiver]
                    part = torch.zeros(held.sizes)
                    part[box.slices(held)] = whole[name][box.slices()]  # fails for elements that are not held
                    after[name, receiver][box.slices(wanted)] += part[box.slices(held)]  # exposes duplicates
            sizes = [plan.wire_dtype(name).itemsize * box.numel for p in sends.values() for name, box in p]
            assert sum(sizes) <= plan.bucket_bytes
            total += sum(sizes)
            for receiver, pieces in sends.items():
                received[receiver] += sum(plan.wire_dtype(p.name).itemsize * p.box.numel for p in pieces)
        assert max(received.values(), default=0) <= plan.bucket_bytes
    wrong = [
        f"{name} on rank {rank}"
        for (name, rank), tensor in after.items()
        if not torch.equal(tensor, whole[name][plan.dst.boxes[name][rank].slices()])
    ]
    return total, wrong


@settings(max_examples=300, deadline=None)
@given(random_layouts(), st.sampled_from([32, 64, 10**6]), st.integers(1, 3))
def test_random_layouts_are_exact_and_send_the_minimum(
    layouts: tuple[ParamLayout, ParamLayout], bucket_bytes: int, ranks_per_host: int
) -> None:
    plan = plan_realloc(*layouts, bucket_bytes=bucket_bytes, ranks_per_host=ranks_per_host)
    total, wrong = interpret(plan)
    assert not wrong
    assert total == plan.total_bytes == plan.minimum_bytes
    assert sum(plan.sent_bytes.values()) == sum(plan.received_bytes.values()) == total
    assert plan.extra_bytes <= 5 * bucket_bytes


def test_missing_and_repeated_transfers_are_detected() -> None:
    plan = plan_realloc(GRIDS["zero8"].layout(), GRIDS["low tp2 dp2"].layout(), bucket_bytes=BUCKET, ranks_per_host=8)
    assert interpret(plan)[1] == []
    first, *others = plan.moves
    for transfers in (first.transfers[1:], (*first.transfers, first.transfers[0])):
        broken = replace(plan, moves=(replace(first, transfers=transfers), *others))
        receiver = first.transfers[0].receiver
        assert interpret(broken)[1] == [f"{name} on rank {receiver}" for name in first.names]


# Plans

UNITS = [  # layouts (pp, dp, tp) from ReaL's tables, and how many times the model is sent
    ((1, 1, 8), (1, 2, 4), "7/4"),
    ((1, 1, 8), (2, 4, 1), "7/2"),
    ((2, 2, 2), (1, 8, 1), "6"),
    ((1, 2, 2), (2, 4, 1), "3"),
    ((2, 2, 1), (2, 4, 1), "3"),
    ((4, 2, 4), (4, 8, 1), "6"),
    ((8, 1, 8), (8, 8, 1), "7"),
]


def uniform(pp: int, dp: int, tp: int) -> ParamLayout:
    """Return a layout of eight layers of one matrix, sharded by rows over tp; ranks are ordered pp, dp, tp."""
    boxes: dict[str, dict[int, Box]] = {}
    for layer in range(8):
        first = layer * pp // 8 * dp * tp
        rows = 64 // tp
        boxes[str(layer)] = {first + n: Box((n % tp * rows, 0), (rows, 3)) for n in range(dp * tp)}
    return ParamLayout({name: Kind((64, 3), torch.float32) for name in boxes}, boxes)


@pytest.mark.parametrize(("src", "dst", "units"), UNITS)
def test_the_minimum_matches_the_formula(src: tuple[int, int, int], dst: tuple[int, int, int], units: str) -> None:
    plan = plan_realloc(uniform(*src), uniform(*dst), bucket_bytes=1 << 20, ranks_per_host=8)
    assert plan.total_bytes == plan.minimum_bytes == Fraction(units) * 8 * 64 * 3 * 4


def whole_on(ranks: tuple[int, ...], names: int = 12) -> ParamLayout:
    parameters = {f"p{n}": Kind((4, 5), torch.float32) for n in range(names)}
    return ParamLayout(parameters, {name: {rank: Box.whole((4, 5)) for rank in ranks} for name in parameters})


def test_the_nearest_and_then_the_least_loaded_holder_sends() -> None:
    plan = plan_realloc(whole_on((0, 1, 4)), whole_on((2, 3, 5, 8)), bucket_bytes=1 << 20, ranks_per_host=4)
    model = 12 * 80
    assert plan.links[4, 5] == model and (0, 5) not in plan.links  # from the same host, although that rank is busiest
    assert plan.sent_bytes == {0: 4 / 3 * model, 1: 4 / 3 * model, 4: 4 / 3 * model}
    assert plan.received_bytes == {2: model, 3: model, 5: model, 8: model}
    assert plan.rounds == 1 and plan.extra_bytes == 2 * 4 / 3 * model
    inter = sum(size for (sender, receiver), size in plan.links.items() if sender // 4 != receiver // 4)
    assert inter == model  # to rank 8


def test_equal_boxes_need_no_message() -> None:
    layout = GRIDS["tp4 dp2"].layout()
    plan = plan_realloc(layout, layout, bucket_bytes=1, ranks_per_host=8)
    assert plan.ranks == () and plan.rounds == plan.extra_bytes == plan.minimum_bytes == 0
    sharded = GRIDS["zero8"].layout()
    plan = plan_realloc(GRIDS["dp8"].layout(), sharded, bucket_bytes=BUCKET, ranks_per_host=8)
    assert plan.minimum_bytes == 0
    assert plan.kept(3) == {name: boxes[3] for name, boxes in sharded.boxes.items() if 3 in boxes}


def test_impossible_reallocations_are_refused() -> None:
    src = whole_on((0, 1), names=3)
    parameters = {**src.parameters, "p1": Kind((4, 6), torch.float32), "p2": Kind((4, 5), torch.int32)}
    parameters |= {"p3": Kind((1,), torch.float32)}
    half = replace(src, boxes={**src.boxes, "p0": {0: Box((0, 0), (3, 5))}})
    dst = ParamLayout(parameters, {name: {2: Box.whole(kind.shape)} for name, kind in parameters.items()})
    with pytest.raises(ValueError) as error:
        plan_realloc(half, dst, bucket_bytes=1 << 20, ranks_per_host=8)
    assert str(error.value) == (
        "the parameters cannot be reallocated: p1 is (4, 5) torch.float32 in src and (4, 6) torch.float32 in dst; "
        "p2 is (4, 5) torch.float32 in src and (4, 5) torch.int32 in dst; p3 is missing from src; "
        "no rank holds 5 elements of p0 that rank 2 needs"
    )
    with pytest.raises(ValueError, match=r"bucket_bytes=8 must be above 8: 4 bytes for each of up to 2 peers"):
        plan_realloc(src, whole_on((2,), names=3), bucket_bytes=8, ranks_per_host=8)
    with pytest.raises(ValueError, match=r"ranks_per_host=0 must be at least 1"):
        plan_realloc(src, src, bucket_bytes=8, ranks_per_host=0)


# On ranks


def in_many_rounds(plan: ReallocPlan) -> str:
    """Run a plan repeatedly within its memory limit; return this rank's refusal of wrong tensors."""
    groups, rank, names = ProcessGroups(), dist.get_rank(), list(plan.src.parameters)
    reallocation = Reallocation(plan, groups, CPU)
    src = {name: torch.full((4, 5), float(n)) for n, name in enumerate(names)} if rank < 2 else {}
    dst = {name: torch.zeros(4, 5) for name in names} if rank > 0 else {}
    for repeat in range(2):
        with track_memory() as use:
            reallocation.run(src, dst)
        assert use.peak_bytes <= plan.extra_bytes
        assert all(torch.equal(dst[name], torch.full((4, 5), n + 9.0 * repeat)) for n, name in enumerate(names) if dst)
        for tensor in src.values():
            tensor += 9
    with pytest.raises(RanksDisagree, match=r"the plan of a reallocation must be the same on all ranks"):
        Reallocation(replace(plan, bucket_bytes=500 + rank), groups, CPU)
    with pytest.raises(ValueError) as error:
        reallocation.run({}, {"p0": torch.zeros(4, 5), "p1": torch.zeros(5, 4)})
    return str(error.value)


def test_memory_is_bounded_and_wrong_tensors_are_refused(ranks: RankPool) -> None:
    plan = plan_realloc(whole_on((0, 1), names=3), whole_on((1, 2, 3), names=3), bucket_bytes=60, ranks_per_host=8)
    assert plan.rounds > 4 and plan.extra_bytes == 240
    first, _, third, _ = ranks.run(in_many_rounds, 4, plan)
    assert first == "src on rank 0 must match its layout: p0 is missing; p1 is missing; p2 is missing"
    assert third == (
        "dst on rank 2 must match its layout: p1 is (5, 4) torch.float32 but must be (4, 5) torch.float32; "
        "p2 is missing"
    )


def between_dtypes() -> list[bool]:
    """Send rows of two ranks in another dtype to one of them and to a third.

    Return whether bytes sent are minimal and values are rounded once.
    """
    rank, shape = dist.get_rank(), (800, 600)
    rows = {0: Box((0, 0), (400, 600)), 1: Box((400, 0), (400, 600))}
    everywhere = {1: Box.whole(shape), 2: Box((100, 100), (600, 400))}
    found = []
    for before, after in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        src = ParamLayout({"p": Kind(shape, before), "q": Kind(shape, before)}, {"p": rows, "q": rows})
        dst = ParamLayout({"p": Kind(shape, after), "q": Kind(shape, after)}, {"p": everywhere, "q": everywhere})
        plan = plan_realloc(src, dst, bucket_bytes=1 << 20, ranks_per_host=8)
        whole = torch.linspace(-3, 5, 800 * 600).view(shape).to(before)
        held = {name: whole[rows[rank].slices()].clone() for name in "pq"} if rank in rows else {}
        got = {name: torch.zeros(everywhere[rank].sizes, dtype=after) for name in "pq"} if rank in everywhere else {}
        reallocation = Reallocation(plan, ProcessGroups(), CPU)
        with count_sent_bytes() as counted:
            reallocation.run(held, got)
        found.append(counted.total == plan.sent_bytes.get(rank, 0))
        found.append(plan.total_bytes == plan.minimum_bytes == 2 * 2 * (400 * 600 + 600 * 400))
        found += [torch.equal(part, whole[everywhere[rank].slices()].to(after)) for part in got.values()]
    return found


def test_weights_are_rounded_before_they_are_sent(ranks: RankPool) -> None:
    assert all(map(all, ranks.run(between_dtypes, 3)))


def large_pieces() -> tuple[int, bool]:
    """Turn rows of two ranks into the whole tensor, rows, and columns; return bytes of buffers and correctness."""
    rank, shape = dist.get_rank(), (800, 600)
    kind = {"large": Kind(shape, torch.float32)}
    src = {0: Box((0, 0), (400, 600)), 1: Box((400, 0), (400, 600))}
    dst = {1: Box((200, 0), (600, 600)), 2: Box.whole(shape), 3: Box((0, 100), (800, 400))}
    whole = torch.arange(800 * 600.0).view(shape)
    layouts = [ParamLayout(kind, {"large": boxes}) for boxes in (src, dst)]
    plan = plan_realloc(*layouts, bucket_bytes=4 << 20, ranks_per_host=8)
    before = {"large": whole[src[rank].slices()].clone()} if rank in src else {}
    after = {"large": torch.zeros(dst[rank].sizes)} if rank in dst else {}
    reallocation = Reallocation(plan, ProcessGroups(), CPU)
    with track_memory() as use:
        reallocation.run(before, after)
    assert use.peak_bytes <= plan.extra_bytes
    return use.peak_bytes, all(torch.equal(tensor, whole[dst[rank].slices()]) for tensor in after.values())


def test_a_large_piece_needs_a_buffer_only_if_it_is_strided(ranks: RankPool) -> None:
    (first, _), (second, second_arrived), *others = ranks.run(large_pieces, 4)
    columns, rows = 400 * 400 * 4, 200 * 600 * 4  # a message each; the rows are small enough to be copied
    assert columns <= first < columns + 2 * rows and columns <= second < columns + 2 * rows
    assert second_arrived and others == [(0, True), (0, True)]
