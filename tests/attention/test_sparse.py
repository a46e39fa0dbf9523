"""Attention to chosen keys on ring x ulysses grids, against dense fp64 attention with the mask that the indices make.

The bytes sent are compared with the prediction, and with those of attention to all keys.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.harness.ranks import RankPool
from usp import Mask, SparseAttention, UnifiedSPAttention
from usp.attention import (
    LAYOUTS,
    AttentionSpec,
    Channel,
    SequenceLayout,
    SparseProgram,
    chosen_rows,
    compute_now,
    ring_schedule,
)
from usp.attention import sparse as module_of_sparse
from usp.attention.sparse import ChosenAttention, _bits, _flags, choose
from usp.parallel import ParallelDims, ParallelMesh

from .dense import visible
from .test_search import Draw, assert_exact, made, on_grid

SEQ_LEN, K = 64, 9
DEGREES = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 2), (2, 4)]  # ulysses, ring
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "documents": {"causal": True, "documents": (((0, 3, 40, 41, 64), (0, 30, 50, 50, 50)), None, None)},
    "window": {"window": (20, 3)},
}
# heads, KV heads, head dims of q and k, and of v: grouped, those of latent attention, and few for many ranks
HEADS = [(8, 2, 16, 16), (6, 6, 24, 16), (3, 3, 8, 12)]


def case(layout: str, heads: tuple[int, int, int, int], mask: str, block: int = 0, **fields: Any) -> Draw:
    """Return a call. block: of blocks of keys for each KV head."""
    indices = {"indices": ("KV heads", 4, block) if block else ("tokens", K, 1)}
    return made(tokens=SEQ_LEN, layout=layout, heads=heads[:2], head_dims=heads[2:], **MASKS[mask] | indices | fields)


EXTRAS = {"sinks": True, "softcap": 3.0, "return_weights": True}
DOUBLE = {"dtype": torch.float64, "tolerance": 1e-13}
CASES = [
    case(layout, HEADS[(number + column) % 3], mask, **EXTRAS if number == column else {})
    for (number, layout), (column, mask) in product(enumerate(LAYOUTS), enumerate(MASKS))
]
CASES += [case("zigzag", HEADS[0], "documents", dtype=torch.bfloat16, tolerance=1e-2)]
CASES += [case("striped", HEADS[1], "causal", **DOUBLE)]
# With an odd number, so that half of the degrees take the others: heads that ulysses divides evenly, and unevenly.
CASES += [case("zigzag", HEADS[0], "documents", 4, **DOUBLE)]
CASES += [case("balanced", (6, 2, 16, 8), "documents", 1, **DOUBLE)]
CASES += [case("striped", (6, 3, 8, 8), "causal", 3, **DOUBLE)]


def drawn_indices(batch: int, seq_len: int, k: int, seed: int = 0) -> Tensor:
    """Return indices (B, S, k) as they may come: in any order, some repeated, some masked out, some none at all."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-1, seq_len, (batch, seq_len, k), generator=generator)
    indices[:, ::2, 0] = torch.arange(0, seq_len, 2)  # half of the queries choose themselves
    indices[:, 5] = -1
    return indices.int()


def mask_of(indices: Tensor) -> Tensor:
    """Return the pairs (B, query, key) that indices name."""
    keys = torch.arange(indices.shape[1])
    return torch.stack([(row.unsqueeze(-1) == keys).any(1) for row in indices])


@pytest.mark.parametrize(
    ("ulysses", "ring"),
    [pytest.param(*degrees, marks=pytest.mark.exhaustive if degrees == (4, 2) else ()) for degrees in DEGREES],
)
@pytest.mark.slow(but=2)
def test_matches_dense_attention_and_sends_only_what_is_chosen(
    ranks: RankPool, exhaustive: bool, ulysses: int, ring: int
) -> None:
    stride = 1 if exhaustive else 4 if ulysses * ring < 8 else 7
    cases = CASES[DEGREES.index((ulysses, ring)) % stride :: stride]
    assert_exact(ranks, [on_grid(case, ulysses, ring) for case in cases])


@pytest.mark.slow
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_what_travels_is_the_union_of_what_is_chosen_and_visible(data: st.DataObject) -> None:
    ring, ulysses = data.draw(st.sampled_from((1, 2, 4))), data.draw(st.sampled_from((1, 2)))
    kind = data.draw(st.sampled_from(("contiguous", "zigzag", "striped")))
    length = 8 * data.draw(st.integers(1, 6))
    cut, window = data.draw(st.integers(0, length)), data.draw(st.sampled_from(((-1, -1), (3, 2))))
    spec = AttentionSpec(data.draw(st.booleans()), window, documents=((0, cut, length),))
    layout = SequenceLayout(kind, length, ring, ulysses)
    indices = drawn_indices(2, length, 3, seed=data.draw(st.integers(0, 99)))
    seen = visible(2, length, causal=spec.causal, window=window, cu_seqlens=torch.tensor([0, cut, length]))
    pairs = seen & mask_of(indices)
    owned = [torch.cat([layout.positions(rank, u) for u in range(ulysses)]) for rank in range(ring)]
    expected = torch.tensor([[int(pairs[:, a][:, :, b].any(1).sum()) for b in owned] for a in owned])
    assert torch.equal(chosen_rows(layout, spec, indices), expected.fill_diagonal_(0))
    for rank, received in enumerate(expected.sum(1).tolist()):  # keys, of which as many gradients are sent
        dense = ring_schedule(layout, spec, 2, rank)
        assert received <= sum(message.tokens for step in dense.steps for message in step.receive)
        assert received <= dense.grad_tokens_sent


@pytest.mark.parametrize("n", [1, 8, 13])
def test_flags_are_packed_eight_to_a_byte(n: int) -> None:
    flags = torch.arange(3 * n).view(3, n) % 3 == 0
    assert _bits(flags).shape == (3, -(-n // 8))
    assert torch.equal(_flags(_bits(flags), n), flags)


def test_tiles_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, generator = SequenceLayout("contiguous", 24), torch.Generator().manual_seed(0)
    program, alone = SparseProgram.of(layout, AttentionSpec(), 1, 0), Channel(None)
    q, k, v = (torch.randn(24, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def results() -> list[Tensor]:
        choice = choose(drawn_indices(1, 24, 4), program, alone, alone)
        out, *_ = ChosenAttention.apply(q, k, v, None, choice, program, alone, compute_now, True)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    whole = results()
    monkeypatch.setattr(module_of_sparse, "TILE", 5 * 4 * 2 * 16)
    for part, expected in zip(results(), whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


def test_flops_grow_as_the_tokens_do() -> None:
    alone, flops = Channel(None), []
    for tokens in (24, 48, 96):
        program = SparseProgram.of(SequenceLayout("contiguous", tokens), AttentionSpec(), 1, 0)
        q, k, v = (torch.randn(tokens, 2, 8, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as counter:
            choice = choose(drawn_indices(1, tokens, 4), program, alone, alone)
            out, *_ = ChosenAttention.apply(q, k, v, None, choice, program, alone, compute_now, True)
            out.sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] > 0 and flops == [flops[0], 2 * flops[0], 4 * flops[0]]


def refusals() -> list[str]:
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    x, indices = torch.randn(1, 4, 2, 8), torch.zeros(1, 4, 3, dtype=torch.int64)

    def layer(kernel: str = "auto") -> SparseAttention:
        return SparseAttention(UnifiedSPAttention(mesh, kernel=kernel))

    calls = [
        lambda: layer()(x, x, x, indices[:, :2]),
        lambda: layer()(x, x, x, indices.float()),
        lambda: layer()(x, x, x, indices, Mask(prefix=torch.tensor([3]))),
        lambda: layer("sdpa")(x, x, x, indices),
        lambda: layer()(x, x, x, indices.unsqueeze(2).expand(-1, -1, 3, -1), index_block=0),
        lambda: layer()(x, x, x, indices.unsqueeze(2).expand(-1, -1, 2, -1), sinks=x[0, 0, :, 0]),
        lambda: layer()(x, x, x, indices[..., : 1 + dist.get_rank()]),
    ]
    messages = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


@pytest.mark.slow
def test_other_calls_are_refused_on_every_rank(ranks: RankPool) -> None:
    for messages in ranks.run(refusals, 2):
        shape, dtype, prefix, kernel, heads, sinks, unequal = messages
        assert "indices (1, 4, 3, 3) must be" in heads and "index_block=0 must be at least 1 position" in heads
        assert "sinks and return_weights are not supported with indices of each KV head" in sinks
        assert "indices (1, 2, 3) must be (batch, tokens, k) or (batch, tokens, num_kv_heads, k) for q (1, 4" in shape
        assert "indices must be int32 or int64 on cpu, got torch.float32" in dtype
        assert "attention to indices supports causal, window, chunk and cu_seqlens; not prefix" in prefix
        assert "kernel='sdpa' cannot attend to indices: use kernel='auto'" in kernel
        assert "the attention call must be the same on all ranks" in unequal
