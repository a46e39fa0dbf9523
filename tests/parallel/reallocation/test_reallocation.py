"""Reallocation: all pairs of layouts on eight ranks, random layouts in one process, properties of plans, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import chain, product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.memory import track_memory
from tests.harness.ranks import RankPool
from tests.parallel.reallocation.layouts import GRIDS, KINDS, REAL, dtensors, extra_bytes, minimum_bytes, plain_tensors
from usp.parallel import (
    ParamLayout,
    ProcessGroups,
    RanksDisagree,
    Reallocation,
    ReallocPlan,
    gather_layout,
    plan_realloc,
)
from usp.parallel.reallocation.boxes import Box, local_part
from usp.parallel.reallocation.param_layout import Kind
from usp.parallel.reallocation.reallocation import rank_rounds
from usp.parallel.wire import SentBytes

CPU = torch.device("cpu")
BUCKET = 16_000


def minimum_by_tier(plan: ReallocPlan) -> tuple[int, int]:
    """Return what hosts lack, which has to cross between them, and the rest of what ranks lack, which need not."""
    between = sum(map(plan.host_lacking_bytes, plan.dst.ranks))
    return between, minimum_bytes(plan) - between


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# All pairs, on eight ranks


def run_pairs(pairs: list[tuple[str, str]]) -> tuple[list[tuple[int, int]], list[str]]:
    """Return the bytes that this rank sends for each of these pairs, in all and to the other host of four ranks.

    Also return the pairs whose result is not bitwise correct.
    """
    groups, rank = ProcessGroups(), dist.get_rank()
    layouts = {name: GRIDS[name].layout() for name in dict.fromkeys(chain(*pairs))}
    held = {name: plain_tensors(layout, rank) for name, layout in layouts.items()}
    for name in (name for name in REAL if name in layouts):
        held[name] = dtensors(REAL[name], groups)
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
        with SentBytes() as counted, patch.object(dist, "P2POp", counting(crossed := Counter())):
            reallocation.run(held[src], targets[dst])
        sent.append((counted.total, crossed.total()))
        parts = ((local_part(targets[dst][name]), local_part(held[dst][name])) for name in held[dst])
        if not all(torch.equal(bits(got), bits(expected)) for got, expected in parts):
            wrong.append(f"{src} -> {dst}")
    return sent, wrong


def counting(crossed: Counter[int]) -> Callable[..., dist.P2POp]:
    """Return `dist.P2POp` that also counts the bytes sent to each rank of another host of four."""

    def operation(op: Callable, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> dist.P2POp:
        crossed[peer] += tensor.nbytes if op is dist.isend and peer // 4 != dist.get_rank() // 4 else 0
        return POST(op, tensor, peer, group)

    return operation


POST = dist.P2POp


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


@pytest.mark.slow
def test_all_pairs_are_exact_and_send_the_minimum_number_of_bytes(ranks: RankPool, exhaustive: bool) -> None:
    """Without --exhaustive every 25th pair, so that each layout is still a source and a target."""
    pairs = list(product(GRIDS, GRIDS))[:: 1 if exhaustive else 25]
    assert all({*side} == {*GRIDS} for side in zip(*pairs, strict=True)), "every 25th pair leaves layouts out"
    results = ranks.run(run_pairs, 8, pairs)
    assert [wrong for _, wrong in results] == [[]] * 8
    masks = {name: held_bytes(grid.layout()) for name, grid in GRIDS.items()}
    assert len({tuple(tuple(mask.tolist()) for mask in held) for held in masks.values()}) == len(GRIDS) >= 25
    for (src, dst), *sent in zip(pairs, *(sent for sent, _ in results), strict=True):
        assert tuple(map(sum, zip(*sent, strict=True))) == fewest(masks[src], masks[dst]), (src, dst)


def fewest(before: list[Tensor], after: list[Tensor]) -> tuple[int, int]:
    """Return how many bytes ranks lack, and how many hosts of four ranks lack."""
    total = sum(int((new & ~old).sum()) for old, new in zip(before, after, strict=True))
    hosts = ([torch.stack(masks[n : n + 4]).any(0) for n in range(0, 8, 4)] for masks in (before, after))
    return total, sum(int((new & ~old).sum()) for old, new in zip(*hosts, strict=True))


@pytest.mark.slow
def test_all_pairs_are_planned_with_the_fewest_bytes_of_each_tier(exhaustive: bool) -> None:
    """Without --exhaustive every ninth pair, so each layout still meets a ninth of the others; few are executed."""
    assert len(GRIDS) % 5, "every fifth pair would leave layouts out"
    layouts = {name: grid.layout() for name, grid in GRIDS.items()}
    masks = {name: held_bytes(layout) for name, layout in layouts.items()}
    pairs = list(product(GRIDS, GRIDS))[:: 1 if exhaustive else 9]
    for number, (src, dst) in enumerate(pairs):
        plan = plan_realloc(layouts[src], layouts[dst], bucket_bytes=BUCKET, ranks_per_host=4)
        total, between = fewest(masks[src], masks[dst])
        assert plan.tier_bytes == minimum_by_tier(plan) == (between, total - between), (src, dst)
        if exhaustive or number % 4 == 0:
            assert interpret(plan) == (total, between, []), (src, dst)


# Random layouts, in one process


@st.composite
def random_layouts(draw: st.DrawFn) -> tuple[ParamLayout, ParamLayout, tuple[ParamLayout, ...]]:
    """Draw two layouts of a few parameters on up to six ranks, and up to two further copies.

    In the first, each part of a recursively split parameter has an owner, whose box may be larger than the part. In the
    others, ranks hold any box or nothing.
    """
    parameters, wanted, src, dst = {}, {}, {}, {}
    world = draw(st.integers(1, 6))
    copies: list[dict[str, dict[int, Box]]] = [{} for _ in range(draw(st.integers(0, 2)))]
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
        for boxes in (dst, *copies):
            seeds = [draw(st.sampled_from(parts)) for _ in range(world)]
            boxes[name] = {rank: larger(draw, seeds[rank], shape) for rank in range(world) if draw(st.booleans())}
    kinds = [draw(st.sampled_from([parameters, wanted])) for _ in copies]
    return ParamLayout(parameters, src), ParamLayout(wanted, dst), tuple(map(ParamLayout, kinds, copies))


def larger(draw: st.DrawFn, part: Box, shape: tuple[int, ...]) -> Box:
    if draw(st.booleans()):
        return part
    offset = tuple(draw(st.integers(0, begin)) for begin in part.offset)
    ends = [draw(st.integers(end, size)) for end, size in zip(part.end, shape, strict=True)]
    return Box(offset, tuple(end - begin for end, begin in zip(ends, offset, strict=True)))


def interpret(plan: ReallocPlan) -> tuple[int, int, list[str]]:
    """Execute a plan in one process.

    Return the bytes sent, those of them between hosts, and every "name on rank" with wrong values.
    """
    whole = {
        name: torch.arange(1.0, 1 + torch.Size(kind.shape).numel()).view(kind.shape)
        for name, kind in plan.dst.parameters.items()
    }
    parts: list[dict[tuple[str, int], Tensor]] = [
        {
            (name, rank): whole[name][box.slices()] * (index < len(plan.layouts) - 1)
            for name, boxes in layout.boxes.items()
            if name in whole
            for rank, box in boxes.items()
        }
        for index, layout in enumerate(plan.layouts)
    ]
    for rank in plan.dst.ranks:
        for name, index, box in plan.kept(rank):
            held, wanted = (plan.layouts[place].boxes[name][rank] for place in (index, -1))
            parts[-1][name, rank][box.slices(wanted)] += parts[index][name, rank][box.slices(held)]
    rounds = {rank: rank_rounds(plan, rank) for rank in plan.ranks}
    total = between = 0
    in_flight: list[tuple[str, int, Box, Tensor]] = []
    for number in range(plan.rounds):
        posted, received = [], Counter[int]()
        for sender in plan.ranks:
            sent = 0
            for receiver, pieces in rounds[sender][number].sends.items():
                assert pieces == rounds[receiver][number].receives[sender]
                for name, box in pieces:
                    index = plan.source(name, sender, box)
                    held = plan.layouts[index].boxes[name][sender]
                    posted.append((name, receiver, box, parts[index][name, sender][box.slices(held)].clone()))
                    size = plan.wire_dtype(name).itemsize * box.numel
                    sent, received[receiver] = sent + size, received[receiver] + size
                    between += size if plan.host(sender) != plan.host(receiver) else 0
            assert sent <= plan.bucket_bytes
            total += sent
        assert max(received.values(), default=0) <= plan.bucket_bytes
        for name, rank, box, values in in_flight:  # those of the round before: two rounds are in flight
            parts[-1][name, rank][box.slices(plan.dst.boxes[name][rank])] += values  # exposes duplicates
        in_flight = posted
    for name, rank, box, values in in_flight:
        parts[-1][name, rank][box.slices(plan.dst.boxes[name][rank])] += values
    wrong = [
        f"{name} on rank {rank}"
        for (name, rank), tensor in parts[-1].items()
        if not torch.equal(tensor, whole[name][plan.dst.boxes[name][rank].slices()])
    ]
    return total, between, wrong


@pytest.mark.slow
@settings(max_examples=120)
@given(random_layouts(), st.sampled_from([256, 400, 10**6]), st.integers(1, 3))
def test_random_layouts_are_exact_and_send_the_minimum(
    layouts: tuple[ParamLayout, ParamLayout, tuple[ParamLayout, ...]], bucket_bytes: int, ranks_per_host: int
) -> None:
    src, dst, copies = layouts
    plan = plan_realloc(src, dst, copies=copies, bucket_bytes=bucket_bytes, ranks_per_host=ranks_per_host)
    total, between, wrong = interpret(plan)
    assert not wrong
    assert total == plan.total_bytes == minimum_bytes(plan)
    assert plan.tier_bytes == minimum_by_tier(plan) == (between, total - between)
    assert sum(plan.sent_bytes.values()) == sum(plan.received_bytes.values()) == total
    assert extra_bytes(plan) <= 5 * bucket_bytes


def test_missing_and_repeated_transfers_are_detected() -> None:
    plan = plan_realloc(GRIDS["zero8"].layout(), GRIDS["low tp2 dp2"].layout(), bucket_bytes=BUCKET, ranks_per_host=8)
    assert interpret(plan)[-1] == []
    first, *others = plan.moves
    for transfers in (first.transfers[1:], (*first.transfers, first.transfers[0])):
        broken = replace(plan, moves=(replace(first, transfers=transfers), *others))
        receiver = first.transfers[0].route.receiver
        assert interpret(broken)[-1] == [f"{name} on rank {receiver}" for name in first.names]


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
    assert plan.total_bytes == minimum_bytes(plan) == Fraction(units) * 8 * 64 * 3 * 4


def whole_on(ranks: tuple[int, ...], names: int = 12) -> ParamLayout:
    parameters = {f"p{n}": Kind((4, 5), torch.float32) for n in range(names)}
    return ParamLayout(parameters, {name: {rank: Box.whole((4, 5)) for rank in ranks} for name in parameters})


def test_the_nearest_and_then_the_least_loaded_holder_sends() -> None:
    plan = plan_realloc(whole_on((0, 1, 4)), whole_on((2, 3, 5, 8)), bucket_bytes=1 << 20, ranks_per_host=4)
    model = 12 * 80
    assert plan.links[4, 5] == model and (0, 5) not in plan.links  # from the same host, although that rank is busiest
    assert plan.sent_bytes == {0: 4 / 3 * model, 1: 4 / 3 * model, 4: 4 / 3 * model}
    assert plan.received_bytes == {2: model, 3: model, 5: model, 8: model}
    assert plan.rounds == 1 and extra_bytes(plan) == 2 * 4 / 3 * model
    inter = sum(size for (sender, receiver), size in plan.links.items() if sender // 4 != receiver // 4)
    assert inter == model  # to rank 8


def test_equal_boxes_need_no_message() -> None:
    layout = GRIDS["tp4 dp2"].layout()
    plan = plan_realloc(layout, layout, bucket_bytes=1, ranks_per_host=8)
    assert plan.ranks == () and plan.rounds == extra_bytes(plan) == minimum_bytes(plan) == 0
    sharded = GRIDS["zero8"].layout()
    plan = plan_realloc(GRIDS["dp8"].layout(), sharded, bucket_bytes=BUCKET, ranks_per_host=8)
    assert minimum_bytes(plan) == 0
    assert plan.kept(3) == [(name, 0, boxes[3]) for name, boxes in sharded.boxes.items() if 3 in boxes]


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
    with pytest.raises(ValueError, match=r"bucket_bytes=8 must be above 8: 4 bytes for each of up to 2 routes"):
        plan_realloc(src, whole_on((2,), names=3), bucket_bytes=8, ranks_per_host=8)
    rounded = replace(src, parameters={name: Kind((4, 5), torch.bfloat16) for name in src.parameters})
    with pytest.raises(ValueError, match=r"p0 is \(4, 5\) torch.bfloat16 in a copy, but must be as in src or dst; p1"):
        plan_realloc(half, src, copies=(rounded,), bucket_bytes=1 << 20, ranks_per_host=8)
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
        assert use.peak_bytes <= extra_bytes(plan)
        assert all(torch.equal(dst[name], torch.full((4, 5), n + 9.0 * repeat)) for n, name in enumerate(names) if dst)
        for tensor in src.values():
            tensor += 9
    with pytest.raises(RanksDisagree, match=r"the plan of a reallocation must be the same on all ranks"):
        Reallocation(replace(plan, bucket_bytes=500 + rank), groups, CPU)
    with pytest.raises(ValueError) as error:
        reallocation.run({}, {"p0": torch.zeros(4, 5), "p1": torch.zeros(5, 4)})
    return str(error.value)


@pytest.mark.measures_memory
def test_memory_is_bounded_and_wrong_tensors_are_refused(ranks: RankPool) -> None:
    plan = plan_realloc(whole_on((0, 1), names=3), whole_on((1, 2, 3), names=3), bucket_bytes=60, ranks_per_host=8)
    assert plan.rounds > 4 and extra_bytes(plan) == 240
    first, _, third, _ = ranks.run(in_many_rounds, 4, plan)
    assert first == "src on rank 0 must match its layout: p0 is missing; p1 is missing; p2 is missing"
    assert third == (
        "dst on rank 2 must match its layout: p1 is (5, 4) torch.float32 but must be (4, 5) torch.float32; "
        "p2 is missing"
    )


def between_dtypes() -> list[bool]:
    """Send rows of two ranks in another dtype to one of them and to another host, which may have some of them.

    Return whether bytes sent are minimal and values are rounded once.
    """
    rank, shape = dist.get_rank(), (800, 600)
    rows = {0: Box((0, 0), (400, 600)), 1: Box((400, 0), (400, 600))}
    wanted = {1: Box.whole(shape), 2: Box((100, 100), (600, 400)), 3: Box((0, 50), (700, 500))}
    there = {3: Box((200, 0), (300, 300))}
    found = []
    for before, after in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        whole = torch.linspace(-3, 5, 800 * 600).view(shape).to(before)
        old, new = ({name: Kind(shape, dtype) for name in "pq"} for dtype in (before, after))
        src, dst = ParamLayout(old, {"p": rows, "q": rows}), ParamLayout(new, {"p": wanted, "q": wanted})
        copy = ParamLayout({"p": new["p"]}, {"p": there})
        for copies in ((), (copy,)):
            plan = plan_realloc(src, dst, copies=copies, bucket_bytes=1 << 20, ranks_per_host=2)
            reallocation = Reallocation(plan, ProcessGroups(), CPU)
            held = {name: whole[rows[rank].slices()].clone() for name in "pq" if rank in rows}
            kept = {"p": whole[there[rank].slices()].to(after)} if rank in there else {}
            got = {name: torch.zeros(wanted[rank].sizes, dtype=after) for name in "pq" if rank in wanted}
            with SentBytes() as counted:
                reallocation.run(held, got, [kept for _ in copies])
            found.append(counted.total == plan.sent_bytes.get(rank, 0))
            found.append(plan.tier_bytes == minimum_by_tier(plan) and plan.total_bytes == minimum_bytes(plan))
            found.append(any(route.onward for route in plan.routes) and bool(plan.kept(3)) == bool(copies))
            found += [torch.equal(part, whole[wanted[rank].slices()].to(after)) for part in got.values()]
    return found


@pytest.mark.slow
def test_weights_are_rounded_before_they_are_sent(ranks: RankPool) -> None:
    assert all(map(all, ranks.run(between_dtypes, 4)))


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
    assert use.peak_bytes <= extra_bytes(plan)
    return use.peak_bytes, all(torch.equal(tensor, whole[dst[rank].slices()]) for tensor in after.values())


@pytest.mark.measures_memory
@pytest.mark.slow
def test_a_large_piece_needs_a_buffer_only_if_it_is_strided(ranks: RankPool) -> None:
    (first, _), (second, second_arrived), *others = ranks.run(large_pieces, 4)
    columns, rows = 400 * 400 * 4, 200 * 600 * 4  # a message each; the rows are small enough to be copied
    assert columns <= first < columns + 2 * rows and columns <= second < columns + 2 * rows
    assert second_arrived and others == [(0, True), (0, True)]
