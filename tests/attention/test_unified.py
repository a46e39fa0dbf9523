"""Unified attention on every ring x ulysses grid of 1, 2, 4 and 8 ranks, against dense fp64 attention.

The bytes sent are compared with the prediction. Batches of two rows exchange as many groups of heads as they can.
"""

from __future__ import annotations

import random
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from tests.harness.ranks import RankPool
from usp import UnifiedSPAttention
from usp.attention import LAYOUTS, HeadPlan
from usp.parallel import SP_ORDERS, ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes

from .test_search import Draw, assert_exact, made, on_grid

SEQ_LEN, LONG, ODD, HEAD_DIM = 96, 1200, 89, 16
DEGREES = [(u, n // u) for n in (1, 2, 4, 8) for u in (1, 2, 4, 8) if n % u == 0]
# With one axis of degree 1 both nestings are the same ranks.
GRIDS = [(u, r, order) for u, r in DEGREES for order in SP_ORDERS if order == "ring-outer" or min(u, r) > 1]
OF_EIGHT = [(8, 1, "ring-outer"), (2, 4, "ring-outer"), (4, 2, "ulysses-outer")]  # without --exhaustive
TURNS = OF_EIGHT + [grid for grid in GRIDS if grid[0] * grid[1] < 8] * 3  # of cases; fewer for what takes 8 ranks
HEADS = [(8, 8), (8, 2), (6, 3), (8, 1)]
DIFFERENT_ROWS = "documents that differ by row"
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": (7, 0)},
    "window wider than a rank": {"window": (60, -1)},
    "two-sided window": {"causal": False, "window": (5, 9)},
    "documents shorter and longer than a share": {"documents": [[0, 3, 50, 51, 52, 96]]},
    DIFFERENT_ROWS: {"documents": [[0, 1, 2, 3, 4, 96], [0, 90, 90, 90, 90, 90]]},
    "bidirectional documents": {"causal": False, "documents": [[0, 13, 14, 96]]},
    "empty rows and a window": {"window": (4, -1), "documents": [[0, 0, 30, 77]]},
}
PREFIXES = {
    "prefix": {"prefix": [[41]]},
    "prefixes of documents and a window": {
        "window": (20, 9),
        "documents": [[0, 50, 51, 96], [0, 90, 90, 90]],
        "prefix": [[30, 1, 45], [13, 0, 0]],
    },
}
MANY = {
    "many bidirectional documents": {"causal": False, "documents": [[0, 5, 11, 14, 17, 29, 50, 51, 53, 58, 60, 90, 96]]}
}
ODDS = {
    "one document of odd length": {"causal": False, "documents": [[0, 89]]},
    "documents of odd length": {"documents": [[0, 40, 88]]},
}
TREES = {
    "prefix tree": {"documents": [[0, 40, 49, 70, 80, 96]], "prefix_tree": [[-1, 0, 0, 2, 0]]},
    "prefix trees of rows and a window": {
        "window": (30, -1),
        "documents": [[0, 5, 5, 60, 61, 90], [0, 20, 30, 50, 96, 96]],
        "prefix_tree": [[-1, 0, 1, 2, 0], [-1, -1, 1, 0, -1]],
    },
    "bidirectional images in causal text, and a window": {
        "window": (24, -1),
        "documents": [[0, 9, 40, 44, 60, 96]],
        "prefix_tree": [[-1, 0, 1, 2, -1]],
        "prefix": [[0, 31, 0, 16, 0]],
    },
}


def drawn_tree(seed: int) -> dict[str, Any]:
    """Return the documents and parents of two rows, some empty, perhaps with a window or prefixes."""
    draw = random.Random(seed)
    count = draw.randint(2, 9)
    rows = [[0, *sorted(draw.randint(0, SEQ_LEN) for _ in range(count))] for _ in range(2)]
    tree = [[draw.randint(-1, number - 1) for number in range(count)] for _ in rows]
    mask: dict[str, Any] = {"documents": rows, "prefix_tree": tree}
    if draw.random() < 0.5:
        mask["window"] = (draw.randint(1, 60), -1)
    if draw.random() < 0.3:
        mask["prefix"] = [[draw.randint(0, b - a) for a, b in pairwise(row)] for row in rows]
    return mask


DRAWN = {f"random trees {seed}": drawn_tree(seed) for seed in range(16)}
HALF, DOUBLE = {"dtype": torch.bfloat16, "tolerance": 1e-2}, {"dtype": torch.float64, "tolerance": 1e-13}
SCORES = {"softcap": 3.0, "sinks": True}


def case(layout: str, heads: tuple[int, int], name: str, batch: int, tokens: int = SEQ_LEN, **fields: Any) -> Draw:
    """Return a call with a mask of that name, causal by default."""
    mask = (MASKS | PREFIXES | TREES | DRAWN | ODDS | MANY)[name]
    rows = {key: tuple(map(tuple, rows)) for key, rows in mask.items() if isinstance(rows, list)}
    documents = {"documents": (rows.pop("documents", None), None, None)}
    asked = {"layout": layout, "heads": heads, "batch": batch, "tokens": tokens, "causal": True, "name": name}
    return made(**asked | mask | rows | documents | fields)


def cases(everything: bool = False) -> list[Draw]:
    """Return all masks in fp32 with all head counts and layouts (`everything`: each with each, and each batch).

    Each mask is also in bf16, fp64, or with softcap (`everything`: in each); some have another head dim of v
    (`everything`: all masks and layouts), or are long.
    """
    every = [
        case(layout, heads, mask, batch)
        for (row, heads), (column, mask), (number, layout), batch in product(
            enumerate(HEADS), enumerate(MASKS), enumerate(LAYOUTS), (1, 2)
        )
        if (mask, batch) != (DIFFERENT_ROWS, 1)
        and (everything or ((row + column + number) % 4 == 0 and (mask == DIFFERENT_ROWS or batch == 1 + row % 2)))
    ]
    masks = list(MASKS)
    in_turn = [masks] * 3 if everything else [masks[kind::3] for kind in range(3)]
    every += [case("zigzag", (8, 2), mask, 2, **HALF) for mask in in_turn[0]]
    every += [case("striped", (8, 2), mask, 2, **DOUBLE) for mask in in_turn[1]]
    every += [case("zigzag", (8, 2), mask, 2, **SCORES) for mask in in_turn[2]]
    narrower, wider = {"head_dims": (24, 16)}, {"head_dims": (8, 24)}
    others = [((6, 3), narrower), ((8, 2), HALF | narrower), ((8, 1), wider), ((8, 2), SCORES | wider)]
    every += [
        case(layout, heads, mask, 2, **fields)
        for (row, (heads, fields)), (column, mask), (number, layout) in product(
            *map(enumerate, (others, MASKS, LAYOUTS))
        )
        if everything or ((row + column) % 2 == 0 and (row + column + number) % 5 == 0)
    ]
    every += [
        case(layout, (6, 3), mask, 2)
        for (row, layout), (column, mask) in product(enumerate(LAYOUTS), enumerate(PREFIXES | TREES))
        if everything or (row + column) % 2 == 0
    ]
    # One KV head, whose gradients come from ranks with different numbers of query heads.
    every += [
        case(layout, (heads, 1), "window", batch)
        for (number, layout), heads, batch in product(enumerate(LAYOUTS), (5, 6), (1, 2))
        if everything or (number + heads + batch) % 2 == 0
    ]
    every += [
        case(LAYOUTS[number % len(LAYOUTS)], HEADS[number % len(HEADS)], mask, 2, **DOUBLE)
        for number, mask in enumerate(DRAWN)
    ]
    every += [
        case(layout, (6, 3), mask, 2, **DOUBLE)
        for layout, mask in product(("balanced:0x1,16x5", "auto:16x1"), ("window", DIFFERENT_ROWS))
    ]
    every += [case(layout, (8, 2), mask, 2, tokens=ODD) for layout, mask in product(LAYOUTS, ODDS)]
    every += [case(layout, (8, 2), "many bidirectional documents", 2) for layout in LAYOUTS]  # slices are received
    # Long enough for triangles that the CPU kernel splits, chunked bands, and messages of several slices.
    every += [
        case(layout, (4, 2), mask, 1, tokens=LONG)
        for number, layout in enumerate(LAYOUTS)
        for column, mask in enumerate(("causal", "window", "two-sided window"))
        if everything or number % 3 == column
    ]
    # In an order in which grids that take turns get all head counts, masks, layouts, dtypes and head dims.
    return sorted(every, key=lambda case: (case.heads, case.name, case.head_dims))


def on(draw: Draw, ulysses: int, ring: int, order: str) -> Draw:
    """Return a call on a grid, of two rows in as many groups of heads as it can have."""
    heads = HeadPlan(*draw.heads, ulysses)
    groups = max(map(heads.kv_width, range(ulysses))) if ulysses > 1 and draw.batch == 2 else 1
    return Draw(on_grid(draw, ulysses, ring) | {"sp_order": order, "head_groups": groups})


@pytest.mark.parametrize(
    ("ulysses", "ring", "order"),
    [pytest.param(*grid, marks=() if grid in TURNS else pytest.mark.exhaustive) for grid in GRIDS[::-1]],
)
@pytest.mark.slow(but=1)
def test_matches_dense_attention_and_its_own_byte_count(
    ranks: RankPool, exhaustive: bool, ulysses: int, ring: int, order: str
) -> None:
    grid = (ulysses, ring, order)
    # Every second case runs on one grid; with --exhaustive each on all of fewer than 8 ranks, and on two of 8.
    if exhaustive:
        stride = 3 if ulysses * ring == 8 else 1
        chosen = cases(exhaustive)[GRIDS.index(grid) % stride :: stride]
    else:
        chosen = [case for number, case in enumerate(cases()[::2]) if TURNS[number % len(TURNS)] == grid]
    assert_exact(ranks, [on(case, *grid) for case in chosen])


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
