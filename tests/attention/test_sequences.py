"""Joint and cross attention and the log-sum-exp, on grids of 4 and 8 ranks, against dense fp64 attention.

Joint tokens are the same on every rank, and their gradients are summed over ranks. The bytes sent are compared with the
prediction.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.ranks import RankPool, on_first_rank
from usp import UnifiedSPAttention, shard_sequence
from usp.attention import LAYOUTS, OF_DOCUMENTS, AttentionSpec, Joint, SequenceLayout, layout_name, ring_schedule
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes

from .calls import called, plan_of
from .dense import worst
from .test_bands import assert_messages_match, pairs

HEAD_DIM = 16


@dataclass(frozen=True)
class Case:
    """One call. `keys`: None for those of the queries' tokens, 0 for joint ones only. `joint`: tokens, for which
    `joint_queries` attend. `documents`: of queries, keys and joint tokens, rows of boundaries."""

    tokens: int
    keys: int | None = None
    joint: int = 0
    joint_queries: bool = True
    strategy: str = "front"
    causal: bool = False
    window: tuple[int, int] | None = None
    documents: tuple[Any, Any, Any] = (None, None, None)
    layout: str = "zigzag"
    heads: tuple[int, int] = (6, 3)
    head_dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM)
    batch: int = 2
    sinks: bool = False
    softcap: float | None = None
    lse: bool = False
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-6
    dkv_dtype: torch.dtype | None = None

    @property
    def mask(self) -> dict[str, Any]:
        names = ("cu_seqlens", "cu_seqlens_k", "joint_cu_seqlens")
        documents = {name: torch.tensor(rows) for name, rows in zip(names, self.documents, strict=True) if rows}
        return {"causal": self.causal, "window": self.window, "joint_strategy": self.strategy, **documents}


def numbers(tokens: int, batch: int, rows: Any) -> Tensor:
    """Return the document of each token (batch, tokens), -1 for none."""
    boundaries = torch.tensor([0, tokens] if rows is None else rows)
    found = torch.full((batch, tokens), -1)
    for row, ends in enumerate(boundaries.expand(batch, -1).tolist()):
        for number, (start, stop) in enumerate(pairwise(ends)):
            found[row, start:stop] = number
    return found


def visible(case: Case) -> Tensor:
    """Return a bool mask (batch, query, key) of [sharded; joint] queries and keys, pair by pair."""
    of_queries, of_keys, of_joint = case.documents
    same = case.keys is None
    keys = case.tokens if case.keys is None else case.keys
    k_doc = numbers(keys, case.batch, of_queries if same else of_keys) if keys else torch.zeros(case.batch, 0)
    joint_doc = numbers(case.joint, case.batch, of_joint)
    shared = case.joint if case.joint_queries else 0
    q_doc = torch.cat((numbers(case.tokens, case.batch, of_queries), joint_doc[:, :shared]), 1)
    k_doc = torch.cat((k_doc, joint_doc), 1)
    seen = (q_doc.unsqueeze(2) == k_doc.unsqueeze(1)) & (q_doc >= 0).unsqueeze(2)
    place = -case.joint if case.strategy == "front" else max(case.tokens, keys)
    joint_at = torch.arange(place, place + case.joint)
    q_at = torch.cat((torch.arange(case.tokens), joint_at[:shared]))
    k_at = torch.cat((torch.arange(keys), joint_at))
    behind = q_at.unsqueeze(1) - k_at.unsqueeze(0)  # query position - key position
    if case.causal:
        seen &= behind >= 0
    if case.window is not None:
        ranked = torch.zeros_like(behind, dtype=torch.bool)
        ranked[: case.tokens, :keys] = True
        for reach, distance in zip(case.window, (behind, -behind), strict=True):
            seen &= ~ranked | (distance <= reach) if reach >= 0 else True
    return seen


def dense(case: Case, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return out and lse of [sharded; joint] queries in fp64."""
    q, k, v = (
        torch.cat([tensors[name] for name in (side, f"joint_{side}") if name in tensors], 1) for side in ("q", "k", "v")
    )
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqnh,bknh->bqnk", q, k) * q.shape[-1] ** -0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~visible(case).unsqueeze(2), float("-inf"))
    if case.sinks:
        scores = torch.cat((scores, tensors["sinks"].view(1, 1, -1, 1).expand(*scores.shape[:3], 1)), -1)
    top = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp(scores - top.masked_fill(top.isneginf(), 0.0))
    total = weights.sum(-1, keepdim=True)
    lse = torch.where(total > 0, total, 1.0).log().squeeze(-1) + top.squeeze(-1)
    weights = weights / torch.where(total > 0, total, 1.0)
    return torch.einsum("bqnk,bknv->bqnv", weights[..., : v.shape[1]], v), lse


def inputs(case: Case) -> dict[str, Tensor]:
    """Return q, k, v, the joint ones, sinks, and gradients of the results, all global."""
    generator = torch.Generator().manual_seed(3)
    (heads, kv_heads), (head_dim, v_head_dim) = case.heads, case.head_dims
    keys, joint = case.tokens if case.keys is None else case.keys, case.joint
    shared = joint if case.joint_queries else 0
    sizes: dict[str, tuple[int, ...]] = {
        "q": (case.tokens, heads, head_dim), "k": (keys, kv_heads, head_dim), "v": (keys, kv_heads, v_head_dim),
        "joint_q": (shared, heads, head_dim), "joint_k": (joint, kv_heads, head_dim),
        "joint_v": (joint, kv_heads, v_head_dim), "dout": (case.tokens + shared, heads, v_head_dim),
        "dlse": (case.tokens + shared, heads),
    }  # fmt: skip
    made = {
        name: torch.randn(case.batch, *size, generator=generator, dtype=torch.float64).to(case.dtype)
        for name, size in sizes.items()
        if size[0]
    }
    return {**made, "sinks": torch.randn(heads, generator=generator).to(case.dtype)} if case.sinks else made


def shard(case: Case, mesh: ParallelMesh, name: str, x: Tensor) -> Tensor:
    """Return this rank's part of a global tensor; all of a joint one."""
    if name.startswith("joint") or name == "sinks":
        return x
    rows = case.documents[0 if case.keys is None or name not in ("k", "v") else 1]
    boundaries = torch.tensor([0, x.shape[1]] if rows is None else rows)
    return shard_sequence(x, mesh, case.layout, cu_seqlens=boundaries)


def run(dims: ParallelDims, cases: list[Case]) -> list[tuple[Case, float, int, int]]:
    """Return for each case the largest relative L2 error of results and gradients, bytes sent and bytes planned."""
    mesh = ParallelMesh.create(dims)
    return [(case, *check(case, mesh)) for case in cases]


def check(case: Case, mesh: ParallelMesh) -> tuple[float, int, int]:
    whole = inputs(case)
    out, lse, exact = on_first_rank(alone, case)
    dout, dlse = whole.pop("dout"), whole.pop("dlse")
    shown = lse.isfinite() if case.lse else torch.zeros_like(lse, dtype=torch.bool)

    leaves = {name: shard(case, mesh, name, x).clone().requires_grad_() for name, x in whole.items()}
    module = UnifiedSPAttention(mesh, case.layout, dkv_dtype=case.dkv_dtype)
    options = {"softcap": case.softcap, "return_lse": case.lse, "sinks": leaves.get("sinks")}
    joint = tuple(leaves.get(f"joint_{name}") for name in "qkv")
    tensors = leaves["q"], leaves.get("k"), leaves.get("v")
    call = partial(called, module, *tensors, joint=joint, options=options, **case.mask)
    call()  # makes the plan and compares it across ranks, which sends bytes too
    split = (case.tokens, out.shape[1] - case.tokens)
    with SentBytes() as sent:
        results = call()
        results = list(results) if isinstance(results, tuple) else [results]
        named = dict(zip(result_names(case), results, strict=True))
        wanted, grads = {}, {}
        for name, (x, dx) in {"out": (out, dout), "lse": (lse, dlse * shown)}.items():
            for prefix, part, grad in zip(("", "joint_"), x.split(split, 1), dx.split(split, 1), strict=True):
                # The gradients of a joint result add up over the ranks.
                share = (1 + mesh.rank("sp")) / sum(range(1, mesh.size("sp") + 1)) if prefix else 1
                wanted[prefix + name] = part
                grads[prefix + name] = shard(case, mesh, prefix + name, grad) * share
        torch.autograd.backward(list(named.values()), [grads[name].to(x.dtype) for name, x in named.items()])
    (n, kv), (size, v_size), keys = case.heads, case.head_dims, case.tokens if case.keys is None else case.keys
    q, k = (case.batch, case.tokens, n, size), (case.batch, keys, kv, size) if keys else None
    plan = plan_of(module, q, k, (case.joint, case.joint_queries, kv), **case.mask)
    planned = plan.wire_bytes(case.dtype, v_size, case.lse)

    errors = []
    for name, x in named.items():
        part = shard(case, mesh, name, wanted[name])
        found, real = x.detach().double(), shard(case, mesh, name, torch.ones_like(wanted[name])) > 0
        found, part = found.where(real, 0), part.where(real, 0)
        hidden = part.isneginf()
        assert torch.equal(hidden, found.isneginf())
        errors.append(distance(found.masked_fill(hidden, 0), part.masked_fill(hidden, 0), mesh))
    for name, leaf in leaves.items():
        assert leaf.grad is not None and leaf.grad.dtype == case.dtype
        grad, target = leaf.grad.double(), exact[name]
        if name.startswith("joint") or name == "sinks":
            dist.all_reduce(grad, group=mesh.group("sp"))
        errors.append(distance(grad, shard(case, mesh, name, target), mesh))
    return worst(errors), sent.total, planned.total


def alone(case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return out, lse and gradients in fp64."""
    whole = inputs(case)
    dout, dlse = whole.pop("dout"), whole.pop("dlse")
    exact = {name: x.double().clone().requires_grad_() for name, x in whole.items()}
    out, lse = dense(case, exact)
    shown = lse.isfinite() if case.lse else torch.zeros_like(lse, dtype=torch.bool)
    ((out * dout.double()).sum() + (lse * dlse.double())[shown].sum()).backward()
    gradients = {}
    for name, x in exact.items():
        assert x.grad is not None
        gradients[name] = x.grad
    return out.detach(), lse.detach(), gradients


def result_names(case: Case) -> list[str]:
    shared = case.joint and case.joint_queries
    names = ["out", "joint_out"] if shared else ["out"]
    return names + ([name.replace("out", "lse") for name in names] if case.lse else [])


def distance(x: Tensor, exact: Tensor, mesh: ParallelMesh) -> float:
    squares = torch.stack([(x - exact).square().sum(), exact.square().sum()])
    dist.all_reduce(squares, group=mesh.group("sp"))
    return float((squares[0] / squares[1]).sqrt()) if squares[1] else float(squares[0])


DIFFERENT = ((0, 30, 61), (0, 58, 58))  # documents of rows of 61 tokens
JOINT = [
    Case(64, joint=7),
    Case(64, joint=7, strategy="rear", causal=True),
    Case(64, joint=7, causal=True, sinks=True),
    Case(64, joint=40, window=(9, 4), head_dims=(24, 16)),
    Case(61, joint=5, documents=((0, 61), None, ((0, 5), (0, 2)))),
    Case(61, joint=9, documents=(DIFFERENT, None, ((0, 4, 9), (0, 7, 7))), causal=True, sinks=True),
    Case(61, joint=9, documents=(DIFFERENT, None, ((0, 4, 9), (0, 0, 7))), strategy="rear", lse=True),
    Case(64, joint=300, heads=(4, 1), batch=1, lse=True, sinks=True),
    Case(64, joint=6, joint_queries=False, softcap=3.0),
    Case(64, joint=6, dtype=torch.bfloat16, tolerance=1.5e-2, lse=True),
    Case(64, joint=6, dtype=torch.float64, tolerance=1e-13, lse=True, sinks=True),
]
CROSS = [
    Case(64, keys=128),
    Case(64, keys=19, documents=(None, (0, 19), None), heads=(8, 2)),
    Case(61, keys=50, documents=(DIFFERENT, ((0, 1, 50), (0, 40, 50)), None), sinks=True, lse=True),
    Case(61, keys=61, documents=(DIFFERENT, ((0, 61, 61), (0, 8, 50)), None), head_dims=(8, 24)),
    Case(64, keys=32, joint=6, lse=True),
    Case(64, keys=32, joint=6, joint_queries=False, dtype=torch.float64, tolerance=1e-13),
    Case(64, keys=0, joint=33, joint_queries=False, lse=True),
    Case(61, keys=0, joint=9, joint_queries=False, documents=(DIFFERENT, None, ((0, 4, 9), (0, 7, 7))), sinks=True),
    Case(64, keys=0, joint=9, joint_queries=False, causal=True, strategy="rear", window=(3, 3), batch=1, lse=True),
]
PLAIN = [
    Case(64, causal=True, lse=True),
    Case(1200, causal=True, window=(70, 0), heads=(2, 1), batch=1, lse=True),
    Case(61, documents=(DIFFERENT, None, None), lse=True, sinks=True, head_dims=(24, 16)),
    Case(64, lse=True, dtype=torch.bfloat16, tolerance=1.5e-2, softcap=3.0),
    Case(64, causal=True, dtype=torch.bfloat16, tolerance=1.5e-2, dkv_dtype=torch.bfloat16),
    Case(64, keys=19, documents=(None, (0, 19), None), dtype=torch.float32, dkv_dtype=torch.float32),
]
GRIDS = [(1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1)]


@pytest.mark.parametrize(
    ("ulysses", "ring"),
    [pytest.param(*grid, marks=pytest.mark.exhaustive if grid in ((1, 8), (8, 1)) else ()) for grid in GRIDS[::-1]],
)
@pytest.mark.slow(but=1)
def test_matches_dense_attention_and_its_own_byte_count(
    ranks: RankPool, exhaustive: bool, ulysses: int, ring: int
) -> None:
    place, cases = GRIDS.index((ulysses, ring)), JOINT + CROSS + PLAIN
    chosen = [
        replace(case, layout=layout)
        for number, case in enumerate(cases)
        for column, layout in enumerate(LAYOUTS)
        # A third of the cases on each grid of 4 ranks, a twelfth on those of 8, in one layout each.
        if exhaustive or (4 * place + number + column) % (12 if ulysses * ring == 4 else 48) == 0
    ]
    assert_exact(ranks.run(run, ulysses * ring, ParallelDims(ring=ring, ulysses=ulysses), chosen))


def random_case(draw: random.Random) -> Case:
    """Return a call of random lengths, documents, heads, layout and options."""
    tokens, batch, joint = draw.randint(1, 70), draw.randint(1, 2), draw.choice((0, draw.randint(1, 30)))
    keys = draw.choice((None, draw.randint(1, 70), 0)) if joint else draw.choice((None, draw.randint(1, 70)))
    count = draw.randint(1, 4)

    def documents(length: int) -> tuple[tuple[int, ...], ...]:
        cuts = [sorted(draw.choices(range(length + 1), k=count)) for _ in range(batch)]
        return tuple((0, *row) for row in cuts)

    group, kv_heads = draw.randint(1, 3), draw.randint(1, 3)
    return Case(
        tokens, keys, joint, keys != 0 and draw.random() < 0.7, draw.choice(("front", "rear")),
        causal=not keys and draw.random() < 0.5, batch=batch,
        window=(draw.randint(0, 40), draw.randint(0, 40)) if not keys and draw.random() < 0.4 else None,
        documents=(documents(tokens), documents(keys) if keys else None, documents(joint) if joint else None),
        layout=layout_name(draw.choice(LAYOUTS), draw.choices((0, 5, 20), k=2)),
        heads=(kv_heads * group, kv_heads), head_dims=(8, draw.choice((8, 16))),
        sinks=draw.random() < 0.3, lse=draw.random() < 0.5, dtype=torch.float64, tolerance=1e-12,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_random_calls(ranks: RankPool, exhaustive: bool, seed: int) -> None:
    draw = random.Random(seed)
    ulysses, ring = GRIDS[draw.randrange(6)]
    cases = [random_case(draw) for _ in range(8 if exhaustive else 4)]
    assert_exact(ranks.run(run, ulysses * ring, ParallelDims(ring=ring, ulysses=ulysses), cases))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_schedules_compute_each_visible_pair_once_and_send_no_joint_key(seed: int, ring: int) -> None:
    case = random_case(random.Random(seed))
    if case.keys == 0:
        return
    multiple = SequenceLayout.multiple_of(case.layout, ring, 1)
    case = replace(case, tokens=-(-case.tokens // multiple) * multiple)
    case = case if case.keys is None else replace(case, keys=-(-case.keys // multiple) * multiple)
    joint = Joint(case.joint, case.joint_queries, False, case.strategy == "front", case.documents[2])
    spec = AttentionSpec(
        case.causal, case.window or (-1, -1), documents=case.documents[0], key_documents=case.documents[1],
        joint=joint if case.joint else None,
    )  # fmt: skip

    def layout(tokens: int, documents: Any) -> SequenceLayout:
        return SequenceLayout(case.layout, tokens, ring, 1, documents if case.layout.startswith(OF_DOCUMENTS) else None)

    queries = layout(case.tokens, case.documents[0])
    keys = None if case.keys is None else layout(case.keys, case.documents[1])
    schedules = [ring_schedule(queries, spec, case.batch, rank, keys) for rank in range(ring)]
    places = [global_places(queries, joint.query_tokens if case.joint else 0, case.batch, rank) for rank in range(ring)]
    key_places = [global_places(keys or queries, case.joint, case.batch, rank) for rank in range(ring)]
    seen = visible(case)
    counted = torch.zeros_like(seen, dtype=torch.int)
    for rank, schedule in enumerate(schedules):
        for step in schedule.steps:
            block = key_places[step.owner]
            if step.owner != rank:
                mine = [(row, at) for row, at in places[rank] if at < case.tokens]
                sharded = case.tokens if case.keys is None else case.keys
                block = [
                    (row, at)
                    for row, at in block
                    if at < sharded and any(seen[row, query, at] for of, query in mine if of == row)
                ]
            assert step.keys == len(block)
            for i, j in (pair for task in step.tasks for pair in pairs(task)):
                assert places[rank][i][0] == block[j][0]
                counted[(*places[rank][i], block[j][1])] += 1
    alone = case.causal and joint.front  # every rank computes joint queries that only see each other
    counted[:, case.tokens :, seen.shape[2] - case.joint :] //= ring if alone else 1
    assert torch.equal(counted, seen.int())
    assert_messages_match(schedules)


def global_places(layout: SequenceLayout, joint: int, batch: int, rank: int) -> list[tuple[int, int]]:
    """Return (row, position) of a ring rank's tokens in local order; joint ones follow the sharded ones."""
    return [
        (row, at)
        for row in range(batch)
        for at in (*layout.positions(rank, row=row).tolist(), *range(layout.seq_len, layout.seq_len + joint))
    ]


def assert_exact(per_rank: list[list[tuple[Case, float, int, int]]]) -> None:
    rows = [(rank, *row) for rank, every in enumerate(per_rank) for row in every]
    wrong = [f"rank {rank}  {error:.2e}  {case}" for rank, case, error, *_ in rows if not error <= case.tolerance]
    assert not wrong, "\n".join(wrong)
    counts = [
        f"rank {rank}  sent {sent}, planned {planned}  {case}"
        for rank, case, _, sent, planned in rows
        if sent != planned
    ]
    assert not counts, "\n".join(counts)
