"""Joint and cross attention and the log-sum-exp, on grids of 4 and 8 ranks, against dense fp64 attention; and the
schedules of random calls.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.ranks import RankPool
from usp.attention import LAYOUTS, OF_DOCUMENTS, AttentionSpec, Joint, SequenceLayout, ring_schedule

from .test_bands import assert_messages_match, pairs
from .test_search import Draw, Rows, assert_exact, made, on_grid, visible

DIFFERENT = ((0, 30, 61), (0, 58, 58))  # documents of rows of 61 tokens
WHOLE = ((0, 61),)


def case(tokens: int, keys: int | None = None, documents: tuple[Rows | None, ...] = (), **fields: Any) -> Draw:
    """Return a call. keys: None for those of the queries' tokens, 0 for joint ones only, which have queries elsewhere.
    documents: of queries, keys and joint tokens."""
    of = {None: "itself", 0: "none"}.get(keys, "another")
    rows = (*documents, None, None, None)[:3]
    asked = {
        "keys_of": of,
        "other_tokens": keys or 0,
        "documents": rows,
        "joint_queries": "joint" in fields and keys != 0,
    }
    return made(tokens=tokens, **asked | fields)


BFLOAT16 = {"dtype": torch.bfloat16, "tolerance": 1.5e-2}
FLOAT64 = {"dtype": torch.float64, "tolerance": 1e-13}
SHARED = {"joint": 9, "documents": (DIFFERENT, None, ((0, 4, 9), (0, 7, 7)))}
CASES = [
    case(64, joint=7),
    case(64, joint=7, joint_strategy="rear", causal=True),
    case(64, joint=7, causal=True, sinks=True),
    case(64, joint=40, window=(9, 4), head_dims=(24, 16)),
    case(61, joint=5, documents=(WHOLE, None, ((0, 5), (0, 2)))),
    case(61, **SHARED, causal=True, sinks=True),
    case(61, joint=9, documents=(DIFFERENT, None, ((0, 4, 9), (0, 0, 7))), joint_strategy="rear", return_lse=True),
    case(64, joint=300, heads=(4, 1), batch=1, return_lse=True, sinks=True),
    case(64, joint=6, joint_queries=False, softcap=3.0),
    case(64, joint=6, **BFLOAT16, return_lse=True),
    case(64, joint=6, **FLOAT64, return_lse=True, sinks=True),
    case(64, keys=128),
    case(64, keys=19, documents=(None, ((0, 19),)), heads=(8, 2)),
    case(61, keys=50, documents=(DIFFERENT, ((0, 1, 50), (0, 40, 50))), sinks=True, return_lse=True),
    case(61, keys=61, documents=(DIFFERENT, ((0, 61, 61), (0, 8, 50))), head_dims=(8, 24)),
    case(64, keys=32, joint=6, return_lse=True),
    case(64, keys=32, joint=6, joint_queries=False, **FLOAT64),
    case(64, keys=0, joint=33, return_lse=True),
    case(61, keys=0, **SHARED, sinks=True),
    case(64, keys=0, joint=9, causal=True, joint_strategy="rear", window=(3, 3), batch=1, return_lse=True),
    case(64, causal=True, return_lse=True),
    case(1200, causal=True, window=(70, 0), heads=(2, 1), batch=1, return_lse=True),
    case(61, documents=(DIFFERENT,), return_lse=True, sinks=True, head_dims=(24, 16)),
    case(64, return_lse=True, **BFLOAT16, softcap=3.0),
    case(64, causal=True, **BFLOAT16),
]
GRIDS = [(1, 8), (2, 4), (4, 2), (8, 1), (4, 1), (1, 4), (2, 2)]


@pytest.mark.parametrize(
    ("ulysses", "ring"),
    [pytest.param(*grid, marks=pytest.mark.exhaustive if grid in ((1, 8), (8, 1)) else ()) for grid in GRIDS[::-1]],
)
@pytest.mark.slow(but=1)
def test_matches_dense_attention_and_its_own_byte_count(
    ranks: RankPool, exhaustive: bool, ulysses: int, ring: int
) -> None:
    place = GRIDS.index((ulysses, ring))
    chosen = [
        on_grid(Draw(each | {"layout": layout}), ulysses, ring)
        for number, each in enumerate(CASES)
        for column, layout in enumerate(LAYOUTS)
        # A quarter of the cases on each grid of 4 ranks, five of them on those of 8, in one layout each.
        if exhaustive or (4 * place + number + column) % (16 if ulysses * ring == 4 else 24) == 0
    ]
    assert_exact(ranks, chosen)


PLAIN_MASK = {"joint_every": 0, "indices": ("", 0, 1), "chunk": None, "prefix_tree": None, "prefix": None}


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_schedules_compute_each_visible_pair_once_and_send_no_joint_key(seed: int, ring: int) -> None:
    draws = (Draw.of(number, 1) for number in count(seed))
    drawn = next(d for d in draws if d.batch and (d.keys_of == "another" or (d.joint and d.keys_of == "itself")))
    drawn = Draw(drawn | PLAIN_MASK | {"mask_mod": None})
    multiple = SequenceLayout.multiple_of(drawn.layout, ring, 1)
    lengths = {name: -(-drawn[name] // multiple) * multiple for name in ("tokens", "other_tokens")}
    call = Draw(drawn | lengths)
    of_queries, of_keys, of_joint = call.documents
    shared = call.joint if call.joint_queries else 0
    joint = Joint(call.joint, call.joint_queries, False, call.joint_strategy == "front", of_joint)
    spec = AttentionSpec(
        call.causal, call.window or (-1, -1), documents=of_queries, key_documents=of_keys,
        joint=joint if call.joint else None,
    )  # fmt: skip

    def layout(tokens: int, documents: Any) -> SequenceLayout:
        return SequenceLayout(call.layout, tokens, ring, 1, documents if call.layout.startswith(OF_DOCUMENTS) else None)

    queries = layout(call.tokens, of_queries)
    keys = layout(call.other_tokens, of_keys) if call.keys_of == "another" else None
    schedules = [ring_schedule(queries, spec, call.batch, rank, keys) for rank in range(ring)]
    places = [global_places(queries, shared, call.batch, rank) for rank in range(ring)]
    key_places = [global_places(keys or queries, call.joint, call.batch, rank) for rank in range(ring)]
    seen = visible(call, {})[:, 0]
    counted = torch.zeros_like(seen, dtype=torch.int)
    for rank, schedule in enumerate(schedules):
        for step in schedule.steps:
            block = key_places[step.owner]
            if step.owner != rank:
                mine = [(row, at) for row, at in places[rank] if at < call.tokens]
                block = [
                    (row, at)
                    for row, at in block
                    if at < call.key_tokens and any(seen[row, query, at] for of, query in mine if of == row)
                ]
            assert step.keys == len(block)
            for i, j in (pair for task in step.tasks for pair in pairs(task)):
                assert places[rank][i][0] == block[j][0]
                counted[(*places[rank][i], block[j][1])] += 1
    alone = call.causal and joint.front  # every rank computes joint queries that only see each other
    counted[:, call.tokens :, seen.shape[2] - call.joint :] //= ring if alone else 1
    assert torch.equal(counted, seen.int())
    assert_messages_match(schedules)


def global_places(layout: SequenceLayout, joint: int, batch: int, rank: int) -> list[tuple[int, int]]:
    """Return (row, position) of a ring rank's tokens in local order; joint ones follow the sharded ones."""
    return [
        (row, at)
        for row in range(batch)
        for at in (*layout.positions(rank, row=row).tolist(), *range(layout.seq_len, layout.seq_len + joint))
    ]
