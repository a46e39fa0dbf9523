"""Masks by function: bands where they are bands, else tiles, on grids of 4 and 8 ranks, against dense fp64 attention.

Tiles have 8 tokens here, so that short sequences have many. The bytes sent are compared with the prediction.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.ranks import RankPool
from usp import UnifiedSPAttention
from usp.attention import LAYOUTS, AttentionSpec, HeadPlan, SequenceLayout, ring_schedule, tiles, with_mask_mod
from usp.attention.bands import Tasks
from usp.attention.kernels.dense import DenseLaunch, DenseLowering
from usp.attention.kernels.flash import FlashAttn2Kernel
from usp.attention.kernels.select import Device
from usp.parallel import ParallelDims, ParallelMesh

from .calls import called
from .dense import visible
from .strategies import layouts, specs
from .test_bands import assert_messages_match, pairs
from .test_search import MASKS, Draw, assert_exact, made, on_grid, search

SEQ_LEN, CPU = 96, torch.device("cpu")
MIXED = torch.tensor([0, 1, 2] * 10 + [3] * 40 + [0, 4] * 13)  # documents that are not in one piece
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "checkers": lambda b, h, q, k: (q // 5 + k // 7) % 2 == 0,
    "dilated": lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k),
    "documents in pieces": lambda b, h, q, k: (MIXED[q] == MIXED[k]) & (q >= k),
    "windows of heads": lambda b, h, q, k: (q - k <= 4 * h) & (q >= k - h),
    "other rows": lambda b, h, q, k: (k - 20 * b <= q) & ((q + k) % 8 < 7),
    "global tokens": lambda b, h, q, k: ((q - k).abs() < 9) | (k < 10),
    "queries without a key": lambda b, h, q, k: (k // 2 == 11) & (q % 4 < 2) & ((h > 1) | (q > 50)),
    "far blocks": lambda b, h, q, k: (q // 24 + k // 24 == 3) & ((q > 30) | (k != 80)),
    "window": lambda b, h, q, k: (q - k < 20) & (q >= k),  # bands
}
OTHERS: dict[str, dict[str, Any]] = {
    "": {},
    "documents and a window": {"window": (40, 11), "documents": (((0, 13, 90, 96), (0, 30, 60, 77)), None, None)},
    "causal": {"causal": True, "documents": (((0, 61, 89),), None, None)},  # with padding
}
GRIDS = [(1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
TURNS = [*GRIDS[:3] * 2, (2, 4)]  # of cases, without --exhaustive; fewer for what takes 8 ranks


def cases(exhaustive: bool) -> list[Draw]:
    """Return calls of all functions and layouts, with the other masks and heads in turn."""

    def case(function: str, other: str, layout: str, heads: tuple[int, int], **fields: Any) -> Draw:
        return made(tokens=SEQ_LEN, mask_mod=function, layout=layout, heads=heads, **OTHERS[other] | fields)

    every = [
        case(function, list(OTHERS)[(row + column) % 3], layout, ((6, 3), (8, 2), (4, 4))[(row + 2 * column) % 3])
        for (row, function), (column, layout) in product(enumerate(FUNCTIONS), enumerate(LAYOUTS))
    ]
    every = [Draw(each | {"sinks": number % 4 == 0}) for number, each in enumerate(every)]
    every = [each for number, each in enumerate(every) if exhaustive or number % 8 in (0, 5)]
    for number, function in enumerate(FUNCTIONS):
        layout, other = LAYOUTS[number % len(LAYOUTS)], list(OTHERS)[number % 3]
        others = (
            case(function, other, layout, (8, 2), dtype=torch.bfloat16, tolerance=1e-2),
            case(function, other, layout, (6, 3), dtype=torch.float64, tolerance=1e-13, kernel="reference"),
        )
        every += others if exhaustive else others[number % 2 :][:1]
    return every


def grouped(draw: Draw) -> Draw:
    """Return a call in as many groups of heads as it can have."""
    heads = HeadPlan(*draw.heads, draw.grid[1])
    by_head = draw.mask_mod in ("windows of heads", "queries without a key")
    groups = max(map(heads.kv_width, range(heads.ulysses))) if heads.ulysses > 1 and not by_head else None
    return Draw(draw | {"head_groups": groups})


def wrong_of(draws: list[Draw]) -> list[str]:
    functions = mock.patch.dict(MASKS, FUNCTIONS)
    with functions, mock.patch.object(tiles, "TILE", 8), mock.patch.object(tiles, "WIDE", 3):
        return search(draws)


@pytest.mark.parametrize(
    ("ulysses", "ring"), [pytest.param(*grid, marks=() if grid in TURNS else pytest.mark.exhaustive) for grid in GRIDS]
)
@pytest.mark.slow
def test_matches_dense_attention_and_its_own_byte_count(
    ranks: RankPool, exhaustive: bool, ulysses: int, ring: int
) -> None:
    turns = enumerate(cases(exhaustive))
    chosen = [case for n, case in turns if exhaustive or TURNS[n % len(TURNS)] == (ulysses, ring)]
    assert_exact(ranks, [grouped(on_grid(case, ulysses, ring)) for case in chosen], wrong_of)


def mask_of(spec: AttentionSpec, seq_len: int, batch: int) -> Tensor:
    """Return the pairs of a mask of bands (batch, query, key)."""
    rows, prefixes = (None if x is None else torch.tensor(x) for x in (spec.documents, spec.prefixes))
    return visible(batch, seq_len, causal=spec.causal, window=spec.window, cu_seqlens=rows, prefix=prefixes)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_function_of_bands_becomes_their_mask_and_no_other_does(data: st.DataObject) -> None:
    seq_len, batch = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 2))
    spec = data.draw(specs(seq_len, batch))
    table = mask_of(spec, seq_len, batch)
    some = with_mask_mod(AttentionSpec(causal=False), lambda b, h, q, k: table[b, q, k], batch, 3, seq_len, CPU)
    assert some.function is None
    assert torch.equal(mask_of(some, seq_len, batch), table)
    at = tuple(data.draw(st.integers(0, n - 1)) for n in table.shape)
    apart = table.unsqueeze(1).repeat(1, 2, 1, 1)
    apart[at[0], data.draw(st.integers(0, 1)), at[1], at[2]] ^= True  # for one head
    differ = with_mask_mod(AttentionSpec(causal=False), lambda b, h, q, k: apart[b, h, q, k], batch, 2, seq_len, CPU)
    assert differ.function is not None and differ.function.by_head
    table[at] ^= True
    other = with_mask_mod(AttentionSpec(causal=False), lambda b, h, q, k: table[b, q, k], batch, 3, seq_len, CPU)
    if other.function is None:
        assert torch.equal(mask_of(other, seq_len, batch), table)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_schedules_compute_each_visible_pair_once_and_send_keys_of_tiles_with_any(data: st.DataObject) -> None:
    layout, size = data.draw(layouts()), data.draw(st.integers(1, 5))
    batch, draw = data.draw(st.integers(1, 2)), random.Random(data.draw(st.integers(0, 10**6)))
    spec = AttentionSpec(causal=draw.random() < 0.5, window=(draw.choice((-1, 6)), -1))
    if draw.random() < 0.5:
        spec = replace(spec, documents=((0, *sorted(draw.choices(range(layout.seq_len + 1), k=3))),))
        layout = replace(layout, documents=spec.documents if layout.kind in ("balanced", "auto") else None)
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    coarse = torch.rand(batch, 2, layout.seq_len, layout.seq_len, generator=generator) < draw.choice((0.02, 0.5, 0.98))
    if draw.random() < 0.3:
        coarse[:, 1] = coarse[:, 0]
    every = spec.documents or ((0, layout.seq_len),)
    table = coarse & mask_of(replace(spec, documents=every), layout.seq_len, batch).unsqueeze(1)
    with mock.patch.object(tiles, "TILE", size), mock.patch.object(tiles, "WIDE", 2):
        found = with_mask_mod(spec, lambda b, h, q, k: coarse[b, h, q, k], batch, 2, layout.seq_len, CPU)
        if found.function is None:
            assert torch.equal(mask_of(found, layout.seq_len, batch), table[:, 0])
            return
        if found.function.by_head:
            found = replace(found, function=replace(found.function, heads=(0, 2)))
        schedules = [ring_schedule(layout, found, batch, rank) for rank in range(layout.ring)]
    own = [
        [(row, at) for row in range(batch) for at in layout.positions(rank, row=row).tolist()]
        for rank in range(layout.ring)
    ]
    counted = torch.zeros_like(table, dtype=torch.int)
    for rank, schedule in enumerate(schedules):
        for step in schedule.steps:
            block, sent = own[step.owner], range(len(own[rank]))
            if step.owner != rank:
                with mock.patch.object(tiles, "TILE", size), mock.patch.object(tiles, "WIDE", 2):
                    needed = tiles.tile_tasks(layout, found, found.function, batch, rank, step.owner).needed_keys()
                sent = [at for start, stop in needed.tolist() for at in range(start, stop)]
                block = [block[at] for at in sent]
                seen = table.any(1)[[row for row, _ in own[rank]], [at for _, at in own[rank]]].any()
                assert seen or not step.keys
            assert step.keys == len(block) or step.owner == rank
            for i, j in (pair for task in step.tasks for pair in pairs(task)):
                assert own[rank][i][0] == block[j][0]
                counted[block[j][0], :, own[rank][i][1], block[j][1]] += 1
            for tile in step.tasks.tiles:
                assert all(tile.mask.any(0).any(dim)[[0, -1]].all() for dim in (0, 1))
                for head, i, j in tile.mask.expand(2, -1, -1).nonzero().tolist():
                    (row, query), (same, key) = own[rank][tile.q_start + i], block[tile.k_start + j]
                    assert row == same
                    counted[row, head, query, key] += 1
    assert torch.equal(counted, table.int())
    assert_messages_match(schedules)


def test_ranks_without_a_visible_pair_send_nothing() -> None:
    layout, spec = SequenceLayout("contiguous", 512, 4), AttentionSpec(causal=False)
    own = with_mask_mod(spec, lambda b, h, q, k: (q // 128 == k // 128) & ((q + k) % 3 > 0), 1, 1, 512, CPU)
    assert own.function is not None
    assert [ring_schedule(layout, own, 1, rank).tokens_sent for rank in range(4)] == [0] * 4
    one = with_mask_mod(spec, lambda b, h, q, k: (q >= 384) & (k < 100) & ((q + k) % 3 > 0), 1, 1, 512, CPU)
    assert [ring_schedule(layout, one, 1, rank).tokens_sent for rank in range(4)] == [100, 0, 0, 0]


def disagree(dims: ParallelDims) -> list[str]:
    """Return the errors of calls that cannot be, and of one with another mask on the last rank."""
    mesh = ParallelMesh.create(dims)
    attention = UnifiedSPAttention(mesh)
    q = torch.zeros(1, 8, 2, 4)
    last, dilated = mesh.rank("sp") == mesh.size("sp") - 1, FUNCTIONS["dilated"]
    calls: list[dict[str, Any]] = [
        {"mask_mod": lambda b, h, q, k: q - k},
        {"mask_mod": dilated, "prefix": torch.tensor([3])},
        {"mask_mod": dilated, "joint": (None, q, q)},
        {"mask_mod": dilated, "sparse": {"indices": torch.zeros(1, 8, 2, dtype=torch.int64)}},
        {"mask_mod": FUNCTIONS["checkers"] if last else dilated},
    ]
    errors = []
    for call in calls:
        try:
            called(attention, q, q, q, **call)
        except (ValueError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_what_cannot_be_is_refused_on_every_rank(ranks: RankPool) -> None:
    for errors in ranks.run(disagree, 4, ParallelDims(ring=2, ulysses=2)):
        result, prefix, joint, indices, other = errors
        assert "mask_mod must return a bool" in result and "int64" in result
        assert "mask_mod supports causal, window, chunk and cu_seqlens" in prefix and prefix == joint
        assert "attention to indices supports" in indices and "RanksDisagree" in other
    spec = with_mask_mod(AttentionSpec(), FUNCTIONS["dilated"], 1, 1, 32, CPU)
    refusal = FlashAttn2Kernel().refuses(spec, Device("cuda", (9, 0)), torch.bfloat16, 64, 64)
    assert refusal is not None and "mask_mod is not of bands" in refusal


def test_small_masks_are_made_float_once_and_large_ones_in_each_pass() -> None:
    spec = with_mask_mod(AttentionSpec(causal=False), FUNCTIONS["dilated"], 1, 2, SEQ_LEN, CPU)
    tasks = ring_schedule(SequenceLayout("zigzag", SEQ_LEN), spec, 1, 0).steps[0].tasks
    tasks = Tasks(tasks.rows, [*tasks.tiles, *tasks.tiles])
    with mock.patch("usp.attention.kernels.dense.KEPT", 0):
        large = DenseLowering(CPU, torch.float32).lower(tasks)
    small = DenseLowering(CPU, torch.float32).lower(tasks)
    for launches, dtype in ((large, torch.bool), (small, torch.float32)):
        masks = [launch.mask for launch in launches if isinstance(launch, DenseLaunch) and launch.mask is not None]
        assert {mask.dtype for mask in masks} == {dtype}
        assert len({mask.data_ptr() for mask in masks}) * 2 <= len(masks)
    biases = [[each.bias(torch.float32) for each in of if isinstance(each, DenseLaunch)] for of in (large, small)]
    torch.testing.assert_close(*biases, rtol=0, atol=0)
