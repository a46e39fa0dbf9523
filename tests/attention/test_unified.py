"""Unified attention on every ring x ulysses grid of 1, 2, 4 and 8 ranks, against dense fp64 attention.

The bytes sent are compared with the prediction. Batches of two rows exchange as many groups of heads as they can.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankPool
from usp import UnifiedSPAttention, shard_sequence
from usp.attention import LAYOUTS, HeadPlan
from usp.parallel import SP_ORDERS, ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes

from .calls import called, plan_of
from .dense import dense_attention, relative_l2, visible, worst

SEQ_LEN, LONG, ODD, HEAD_DIM = 96, 1200, 89, 16
DEGREES = [(u, n // u) for n in (1, 2, 4, 8) for u in (1, 2, 4, 8) if n % u == 0]
# With one axis of degree 1 both nestings are the same ranks.
GRIDS = [(u, r, order) for u, r in DEGREES for order in SP_ORDERS if order == "ring-outer" or min(u, r) > 1]
OF_EIGHT = [(8, 1, "ring-outer"), (2, 4, "ring-outer"), (4, 2, "ulysses-outer")]  # without --exhaustive
TURNS = OF_EIGHT + [grid for grid in GRIDS if grid[0] * grid[1] < 8] * 3  # of cases; fewer for what takes 8 ranks
HEADS = [(8, 8), (8, 2), (6, 3), (8, 1)]
DIFFERENT_ROWS = "documents that differ by row"
MASKS = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": (7, 0)},
    "window wider than a rank": {"window": (60, -1)},
    "two-sided window": {"causal": False, "window": (5, 9)},
    "documents shorter and longer than a share": {"cu_seqlens": [0, 3, 50, 51, 52, 96]},
    DIFFERENT_ROWS: {"cu_seqlens": [[0, 1, 2, 3, 4, 96], [0, 90, 90, 90, 90, 90]]},
    "bidirectional documents": {"causal": False, "cu_seqlens": [0, 13, 14, 96]},
    "empty rows and a window": {"window": (4, -1), "cu_seqlens": [0, 0, 30, 77]},
}
PREFIXES = {
    "prefix": {"prefix": [41]},
    "prefixes of documents and a window": {
        "window": (20, 9),
        "cu_seqlens": [[0, 50, 51, 96], [0, 90, 90, 90]],
        "prefix": [[30, 1, 45], [13, 0, 0]],
    },
}
MANY = {
    "many bidirectional documents": {"causal": False, "cu_seqlens": [0, 5, 11, 14, 17, 29, 50, 51, 53, 58, 60, 90, 96]}
}
ODDS = {
    "one document of odd length": {"causal": False, "cu_seqlens": [0, 89]},
    "documents of odd length": {"cu_seqlens": [0, 40, 88]},
}
TREES = {
    "prefix tree": {"cu_seqlens": [0, 40, 49, 70, 80, 96], "prefix_tree": [-1, 0, 0, 2, 0]},
    "prefix trees of rows and a window": {
        "window": (30, -1),
        "cu_seqlens": [[0, 5, 5, 60, 61, 90], [0, 20, 30, 50, 96, 96]],
        "prefix_tree": [[-1, 0, 1, 2, 0], [-1, -1, 1, 0, -1]],
    },
    "bidirectional images in causal text, and a window": {
        "window": (24, -1),
        "cu_seqlens": [0, 9, 40, 44, 60, 96],
        "prefix_tree": [-1, 0, 1, 2, -1],
        "prefix": [0, 31, 0, 16, 0],
    },
}


def drawn_tree(seed: int) -> dict[str, Any]:
    """Return the documents and parents of two rows, some empty, perhaps with a window or prefixes."""
    draw = random.Random(seed)
    count = draw.randint(2, 9)
    rows = [[0, *sorted(draw.randint(0, SEQ_LEN) for _ in range(count))] for _ in range(2)]
    tree = [[draw.randint(-1, number - 1) for number in range(count)] for _ in rows]
    mask: dict[str, Any] = {"cu_seqlens": rows, "prefix_tree": tree}
    if draw.random() < 0.5:
        mask["window"] = (draw.randint(1, 60), -1)
    if draw.random() < 0.3:
        mask["prefix"] = [[draw.randint(0, b - a) for a, b in pairwise(row)] for row in rows]
    return mask


DRAWN = {f"random trees {seed}": drawn_tree(seed) for seed in range(16)}


@dataclass(frozen=True)
class Case:
    """One call; `tolerance` bounds the relative L2 of out, dq, dk, dv (and dsinks). `head_dims`: of q and k, of v."""

    layout: str
    heads: tuple[int, int]
    mask: str
    batch: int
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-6
    softcap: float | None = None
    sinks: bool = False
    seq_len: int = SEQ_LEN
    head_dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM)

    def mask_arguments(self) -> dict:
        mask = (MASKS | PREFIXES | TREES | DRAWN | ODDS | MANY)[self.mask]
        return {k: torch.tensor(v, dtype=torch.int32) if isinstance(v, list) else v for k, v in mask.items()}


def cases(everything: bool = False) -> list[Case]:
    """Return all masks in fp32 with all head counts and layouts (`everything`: each with each, and each batch).

    Each mask is also in bf16, fp64, or with softcap (`everything`: in each); some have another head dim of v
    (`everything`: all masks and layouts), or are long.
    """
    every = [
        Case(layout, heads, mask, batch)
        for (row, heads), (column, mask), (number, layout), batch in product(
            enumerate(HEADS), enumerate(MASKS), enumerate(LAYOUTS), (1, 2)
        )
        if (mask, batch) != (DIFFERENT_ROWS, 1)
        and (everything or ((row + column + number) % 4 == 0 and (mask == DIFFERENT_ROWS or batch == 1 + row % 2)))
    ]
    masks = list(MASKS)
    in_turn = [masks] * 3 if everything else [masks[kind::3] for kind in range(3)]
    every += [Case("zigzag", (8, 2), mask, 2, torch.bfloat16, 1e-2) for mask in in_turn[0]]
    every += [Case("striped", (8, 2), mask, 2, torch.float64, 1e-13) for mask in in_turn[1]]
    every += [Case("zigzag", (8, 2), mask, 2, softcap=3.0, sinks=True) for mask in in_turn[2]]
    narrower, wider = (24, 16), (8, 24)
    others = [
        Case("", (6, 3), "", 2, head_dims=narrower),
        Case("", (8, 2), "", 2, torch.bfloat16, 1e-2, head_dims=narrower),
        Case("", (8, 1), "", 2, head_dims=wider),
        Case("", (8, 2), "", 2, softcap=3.0, sinks=True, head_dims=wider),
    ]
    every += [
        replace(other, layout=layout, mask=mask)
        for (row, other), (column, mask), (number, layout) in product(*map(enumerate, (others, MASKS, LAYOUTS)))
        if everything or ((row + column) % 2 == 0 and (row + column + number) % 5 == 0)
    ]
    every += [
        Case(layout, (6, 3), mask, 2)
        for (row, layout), (column, mask) in product(enumerate(LAYOUTS), enumerate(PREFIXES | TREES))
        if everything or (row + column) % 2 == 0
    ]
    # One KV head, whose gradients come from ranks with different numbers of query heads.
    every += [
        Case(layout, (heads, 1), "window", batch)
        for (number, layout), heads, batch in product(enumerate(LAYOUTS), (5, 6), (1, 2))
        if everything or (number + heads + batch) % 2 == 0
    ]
    every += [
        Case(LAYOUTS[number % len(LAYOUTS)], HEADS[number % len(HEADS)], mask, 2, torch.float64, 1e-13)
        for number, mask in enumerate(DRAWN)
    ]
    every += [
        Case(layout, (6, 3), mask, 2, torch.float64, 1e-13)
        for layout, mask in product(("balanced:0x1,16x5", "auto:16x1"), ("window", DIFFERENT_ROWS))
    ]
    every += [Case(layout, (8, 2), mask, 2, seq_len=ODD) for layout, mask in product(LAYOUTS, ODDS)]
    every += [Case(layout, (8, 2), "many bidirectional documents", 2) for layout in LAYOUTS]  # slices are received
    # Long enough for triangles that the CPU kernel splits, chunked bands, and messages of several slices.
    every += [
        Case(layout, (4, 2), mask, 1, seq_len=LONG)
        for number, layout in enumerate(LAYOUTS)
        for column, mask in enumerate(("causal", "window", "two-sided window"))
        if everything or number % 3 == column
    ]
    # In an order in which grids that take turns get all head counts, masks, layouts, dtypes and head dims.
    return sorted(every, key=lambda case: (case.heads, case.mask, case.head_dims))


def exact(case: Case) -> dict[str, list[Tensor]]:
    """Return inputs (q, k, v, dout; sinks) and the results of dense fp64 attention (out, dq, dk, dv; dsinks)."""
    generator = torch.Generator().manual_seed(1)
    (heads, kv_heads), (head_dim, v_head_dim) = case.heads, case.head_dims
    sizes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim), (heads, v_head_dim)]
    shapes: list[tuple[int, ...]] = [(case.batch, case.seq_len, *size) for size in sizes]
    shapes += [case.heads[:1]] if case.sinks else []
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes]
    q, k, v, dout, *sinks = (x.double().clone() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v, *sinks)]
    seen = visible(case.batch, case.seq_len, **case.mask_arguments())
    out = dense_attention(q, k, v, seen, softcap=case.softcap, sinks=sinks[0] if sinks else None)
    out.backward(dout)
    return {"inputs": inputs, "results": [out.detach(), *(x.grad for x in leaves)]}


@pytest.fixture(scope="module")
def oracle() -> Callable[[Case], dict[str, list[Tensor]]]:
    """Return `exact`, which computes once for all grids and layouts."""
    return cache(lambda case: exact(replace(case, layout="")))


def grid_errors(dims: ParallelDims, cases: list[Case], path: Path) -> list[tuple[Case, float, int, int]]:
    """Return, for each case, the largest relative L2 error, the bytes sent and the bytes predicted."""
    mesh = ParallelMesh.create(dims)
    known = torch.load(path, mmap=True, weights_only=True)
    return [(case, *_run(case, mesh, **results)) for case, results in zip(cases, known, strict=True)]


def _run(case: Case, mesh: ParallelMesh, inputs: list[Tensor], results: list[Tensor]) -> tuple[float, int, int]:
    arguments = case.mask_arguments()
    shard = partial(
        shard_sequence,
        mesh=mesh,
        layout=case.layout,
        cu_seqlens=arguments.get("cu_seqlens", torch.tensor([0, case.seq_len])),
    )
    q, k, v, dout = map(shard, inputs[:4])
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *inputs[4:])]
    heads = HeadPlan(*case.heads, mesh.size("ulysses"))
    groups = max(map(heads.kv_width, range(heads.ulysses))) if heads.ulysses > 1 and case.batch == 2 else 1
    module = UnifiedSPAttention(mesh, case.layout, head_groups=groups)
    options = {"softcap": case.softcap, "sinks": leaves[3] if case.sinks else None}
    with torch.no_grad():  # builds the plan and compares it across ranks, which sends bytes too
        called(module, *leaves[:3], **arguments, options=options)
    with SentBytes() as sent:
        out = called(module, *leaves[:3], **arguments, options=options)
        out.backward(dout)
    q_size, k_size = ((case.batch, case.seq_len, number, case.head_dims[0]) for number in case.heads)
    planned = plan_of(module, q_size, k_size, **arguments).wire_bytes(case.dtype, case.head_dims[1])

    found = [out.detach(), *(x.grad for x in leaves)]
    assert all(x.dtype == case.dtype for x in found)
    parts = map(shard, results[:4])
    squares = torch.stack([(x.double() - y).square().sum() for x, y in zip(found, parts, strict=False)])
    dist.all_reduce(squares, group=mesh.group("sp"))
    errors = [float(square.sqrt() / whole.norm()) for square, whole in zip(squares, results, strict=False)]
    if case.sinks:
        total = found[4].clone()
        dist.all_reduce(total, group=mesh.group("sp"))
        errors.append(relative_l2(total, results[4]))
    return worst(errors), sent.total, planned.total


@pytest.mark.parametrize(
    ("ulysses", "ring", "order"),
    [pytest.param(*grid, marks=() if grid in TURNS else pytest.mark.exhaustive) for grid in GRIDS[::-1]],
)
@pytest.mark.slow(but=2)
def test_matches_dense_attention_and_its_own_byte_count(
    ranks: RankPool, oracle: Callable, tmp_path: Path, exhaustive: bool, ulysses: int, ring: int, order: str
) -> None:
    dims, grid = ParallelDims(ring=ring, ulysses=ulysses, sp_order=order), (ulysses, ring, order)
    # Each case runs on one grid; with --exhaustive on all of fewer than 8 ranks, and on two of 8.
    if exhaustive:
        stride = 3 if ulysses * ring == 8 else 1
        chosen = cases(exhaustive)[GRIDS.index(grid) % stride :: stride]
    else:
        chosen = [case for number, case in enumerate(cases()) if TURNS[number % len(TURNS)] == grid]
    torch.save([oracle(case) for case in chosen], tmp_path / "exact.pt")
    per_rank = ranks.run(grid_errors, ulysses * ring, dims, chosen, tmp_path / "exact.pt")
    wrong = [(rank, *row) for rank, rows in enumerate(per_rank) for row in rows if not row[1] <= row[0].tolerance]
    assert not wrong, "rank, case, relative L2:\n" + "\n".join(
        f"{r}  {case}  {error:.2e}" for r, case, error, *_ in wrong
    )
    miscounted = [(rank, *row) for rank, rows in enumerate(per_rank) for row in rows if row[2] != row[3]]
    assert not miscounted, "rank, case, sent, planned:\n" + "\n".join(map(str, miscounted))


def zigzag_units(dims: ParallelDims) -> float:
    """Return the bytes sent by a causal forward and backward, in units of batch x seq x hidden x itemsize."""
    mesh, seq_len, heads = ParallelMesh.create(dims), 256, 4
    module = UnifiedSPAttention(mesh, "zigzag")
    q, k, v = (torch.randn(1, seq_len // mesh.size("sp"), heads, HEAD_DIM, requires_grad=True) for _ in range(3))
    module(q, k, v)
    with SentBytes() as sent:
        module(q, k, v).sum().backward()
    return sent.total / (seq_len * heads * HEAD_DIM * 4)


@pytest.mark.slow
def test_a_causal_zigzag_ring_of_four_sends_the_minimum(ranks: RankPool) -> None:
    units = ranks.run(zigzag_units, 4, ParallelDims(ring=4))
    # Each rank receives 3/4 of a full ring's traffic: K and V forward, K and V backward, and the same in gradients.
    assert sum(units) / 4 == pytest.approx(3 * 0.75 * 2 * 3 / 4)
    assert sum(units) / 4 <= 3.5
