"""Convolutions and recurrences over a sharded sequence, in float64, and the plans of what passes between spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.attention.strategies import specs, trees
from tests.harness.ranks import RankPool
from tests.usp.sp.planned_bytes import halo_bytes, state_bytes
from usp import shard_sequence, unshard_sequence
from usp.attention import LAYOUTS, SequenceLayout
from usp.parallel import ParallelDims, ParallelMesh
from usp.sp.in_order import OrderedCall, SequenceOrder, layout_moves
from usp.sp.scan import FromZero
from usp.sp.spans import HaloPlan, SpanPlan, held_spans

TAPS, WIDTH = 4, 3
KINDS = [*product(LAYOUTS, (False, True))]  # without --exhaustive, every third in turn


@dataclass(frozen=True)
class Plain:
    """state <- A_t state + b_t with A_t a matrix or, element by element, a factor; the output is the state itself."""

    mixing: bool
    state: tuple[int, ...] = (WIDTH, WIDTH)

    def __call__(self, inputs: Sequence[Tensor], carried: bool) -> FromZero:
        change, added = inputs
        outs, reads = [torch.zeros_like(added[:, 0])], [torch.ones_like(added[:, 0])]
        if self.mixing:
            reads = [torch.eye(WIDTH, dtype=added.dtype).expand_as(added[:, 0])]
        identity = reads[0]
        for token in range(added.shape[1]):
            step = identity + change[:, token]  # a token of zeros leaves the state as it is
            outs.append((step @ outs[-1] if self.mixing else step * outs[-1]) + added[:, token])
            reads.append(step @ reads[-1] if self.mixing else step * reads[-1])
        out, read = torch.stack(outs[1:], 1), torch.stack(reads[1:], 1)
        if not carried:
            return FromZero(out, outs[-1], None, None)
        apply = torch.matmul if self.mixing else torch.mul
        return FromZero(out, outs[-1], reads[-1], lambda states: apply(read, states.unsqueeze(1)))


def layer(weight: Tensor, mixing: bool, x: Tensor, call: OrderedCall | None) -> Tensor:
    """Return a convolution, then a recurrence; without a call, on x as one document."""

    def convolution(channels: Tensor) -> Tensor:
        return F.conv1d(F.pad(channels, (TAPS - 1, 0)), weight, groups=weight.shape[0])

    turned = x.transpose(1, 2)
    mixed = convolution(turned) if call is None else call.convolve(turned, TAPS, convolution)
    change, added = mixed.transpose(1, 2).unflatten(2, (2, WIDTH, WIDTH)).unbind(2)
    inputs, recurrence = (0.3 * torch.tanh(change) - 0.2, added), Plain(mixing)
    out = recurrence(inputs, False).out if call is None else call.scan(inputs, recurrence)
    return out.flatten(2)


def alone(
    weight: Tensor, mixing: bool, x: Tensor, cuts: Sequence[int], parents: Sequence[int], document: int
) -> Tensor:
    """Return the layer's outputs for one document of a row after those that it continues."""
    path, at = [x[cuts[document] : cuts[document + 1]]], parents[document]
    while at >= 0:
        path, at = [x[cuts[at] : cuts[at + 1]], *path], parents[at]
    length, whole = len(path[-1]), torch.cat(path).unsqueeze(0)
    return (
        layer(weight, mixing, whole, None)[:, whole.shape[1] - length :] if length else whole.new_zeros(1, 0, WIDTH**2)
    )


def largest_error(
    dims: ParallelDims,
    seq_len: int,
    documents: Sequence[Sequence[int]] | None,
    torch_mesh: bool,
    parents: Sequence[Sequence[int]] | None = None,
    kinds: Sequence[tuple[str, bool]] = KINDS,
) -> float:
    """Return the largest difference in outputs and gradients from each document alone, after those that it continues,
    over kinds of layouts and recurrences."""
    mesh = ParallelMesh.create(dims)
    used = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring")) if torch_mesh else mesh
    generator, errors = torch.Generator().manual_seed(0), []
    width = 2 * WIDTH * WIDTH
    x, shares = (torch.randn(2, seq_len, n, generator=generator, dtype=torch.float64) for n in (width, WIDTH**2))
    weight = torch.randn(width, 1, TAPS, generator=generator, dtype=torch.float64)
    cuts = [(*row, seq_len) for row in documents] if documents else [(0, seq_len)] * 2
    cu_seqlens = torch.tensor(documents) if documents else None
    tree = torch.tensor(parents) if parents else None
    ends = [[*row, -1] for row in parents] if parents else [[-1] * seq_len] * 2  # what is left over continues nothing
    divided = {"cu_seqlens": torch.tensor([0, seq_len]) if cu_seqlens is None else cu_seqlens}
    for kind, mixing in kinds:
        want_x, want_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        rows = [
            torch.cat([alone(want_w, mixing, row, cut, end, at) for at in range(len(cut) - 1)], dim=1)
            for row, cut, end in zip(want_x, cuts, ends, strict=True)
        ]
        want = torch.cat(rows)
        (want * shares).sum().backward()
        got_x, got_w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        own = shard_sequence(got_x, used, kind, **divided)
        out = SequenceOrder(used, kind).run(own, cu_seqlens, partial(layer, got_w, mixing), tree)
        (out * shard_sequence(shares, used, kind, **divided)).sum().backward()
        for grad in (got_x.grad, got_w.grad):
            torch.distributed.all_reduce(grad)
        found = (unshard_sequence(out.detach(), used, kind, **divided), got_x.grad, got_w.grad)
        for one, other in zip(found, (want, want_x.grad, want_w.grad), strict=True):
            errors.append(float((one - other).detach().norm() / other.detach().norm()))
    return max(errors)


CUTS = [[0, 5, 6, 17, 25], [0, 12, 12, 23, 31]]  # ends inside spans and at their ends, single tokens, an empty document
CASES = [
    (ParallelDims(), 32, CUTS, False),
    (ParallelDims(ring=4), 32, None, False),
    (ParallelDims(ring=4), 32, CUTS, False),
    (ParallelDims(ring=2, ulysses=3), 48, CUTS, False),  # a rank's part goes on in its other span
    (ParallelDims(ring=4, ulysses=2), 16, [[0, 3, 3], [0, 9, 14]], False),  # spans shorter than the halo
    (ParallelDims(ring=2, ulysses=2, sp_order="ulysses-outer"), 32, CUTS, False),
    (ParallelDims(ring=2, ulysses=2), 32, CUTS, True),
]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.slow(but=1)
def test_layers_in_order_equal_one_process(ranks: RankPool, exhaustive: bool, number: int) -> None:
    kinds = KINDS if exhaustive else KINDS[number % 3 :: 3]
    assert max(ranks.run(largest_error, CASES[number][0].sp, *CASES[number], None, kinds)) < 1e-10


# Chains, siblings near and far, a parent without tokens, one that ends a span, and one over several spans.
TREES = [
    (ParallelDims(), 32, CUTS, [[-1, 0, 1, 0], [-1, 0, 1, 2]]),
    (ParallelDims(ring=2), 32, CUTS, [[-1, 0, 0, 1], [-1, 0, 0, 0]]),
    (ParallelDims(ring=4), 32, CUTS, [[-1, 0, 1, 0], [-1, 0, 1, 0]]),
    (ParallelDims(ring=2, ulysses=3), 48, CUTS, [[-1, 0, 0, 2], [-1, -1, 1, 1]]),
    (
        ParallelDims(ring=4, ulysses=2),
        16,
        [[0, 2, 3, 5, 6, 9], [0, 1, 4, 4, 8, 16]],
        [[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 0]],
    ),
    (ParallelDims(ring=2, ulysses=2, sp_order="ulysses-outer"), 32, CUTS, [[-1, -1, 0, 0], [-1, 0, -1, 2]]),
    (ParallelDims(ulysses=4), 32, CUTS, [[-1, 0, 0, 0], [-1, 0, 0, 0]]),
]


@pytest.mark.parametrize("number", range(len(TREES)))
@pytest.mark.slow(but=2)
def test_documents_continue_the_state_of_their_parent(ranks: RankPool, exhaustive: bool, number: int) -> None:
    dims, seq_len, documents, parents = TREES[number]
    kinds = KINDS if exhaustive else KINDS[number % 3 :: 3]
    assert max(ranks.run(largest_error, dims.sp, dims, seq_len, documents, False, parents, kinds)) < 1e-10


def of_the_document_before(plan: SpanPlan) -> tuple[dict[int, int], ...]:
    return tuple(
        {start: starts[starts.index(start) - 1] for start in continued}
        for starts, continued in zip(plan.starts, CONTINUED(plan), strict=True)
    )


def of_the_neighbour(halo: HaloPlan) -> tuple[tuple[int, int, int, int], ...]:
    starts = [segment.start for segment in halo.spans.everywhere]
    return tuple((d, n, s, max(0, starts[n] - 1) if s == d else index) for d, n, s, index in NEEDS(halo))


CONTINUED, NEEDS = SpanPlan.continued.func, HaloPlan.needs.func
BROKEN: dict[str, Callable[[], AbstractContextManager]] = {
    "the state of the document before": lambda: patch.object(SpanPlan, "continued", property(of_the_document_before)),
    "the tokens beside a document": lambda: patch.object(HaloPlan, "needs", property(of_the_neighbour)),
    "the gradient of one child": lambda: patch.object(
        Tensor, "index_add_", lambda x, dim, index, of: x.index_copy_(dim, index, of)
    ),
}


def broken_error(fault: str, *case: Any) -> float:
    with BROKEN[fault]():
        return largest_error(*case)


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_broken_on_purpose_is_noticed(ranks: RankPool, fault: str) -> None:
    dims, seq_len, documents, parents = TREES[1]
    assert max(ranks.run(broken_error, dims.sp, fault, dims, seq_len, documents, False, parents)) > 1e-3


@st.composite
def plans(draw: st.DrawFn) -> list[SpanPlan]:
    """Return the plans of all ranks."""
    kind, ring, ulysses = (
        draw(st.sampled_from(("contiguous", "zigzag"))),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )
    multiple = SequenceLayout.multiple_of(kind, ring, ulysses)
    layout = SequenceLayout(kind, multiple * draw(st.integers(1, 3)), ring, ulysses)
    rows = draw(st.integers(1, 3))
    spec = draw(specs(layout.seq_len, rows) | trees(layout.seq_len, rows))
    return [SpanPlan(layout, spec.documents, rows, rank, spec.parents) for rank in range(ring * ulysses)]


@pytest.mark.slow
@given(plans())
@settings(max_examples=60)
def test_what_one_rank_sends_another_receives(ranked: list[SpanPlan]) -> None:
    layout, rows = ranked[0].layout, ranked[0].rows
    positions = [layout.positions(*divmod(rank, layout.ulysses)).tolist() for rank in range(len(ranked))]
    for span in held_spans(layout):
        held = positions[span.rank][span.offset : span.offset + span.length]
        assert held == list(range(span.start, span.end))
    halos = [HaloPlan(plan, TAPS) for plan in ranked]
    for rank, halo in enumerate(halos):
        lengths = [segment.length for segment in ranked[rank].segments]
        assert sum(lengths) == rows * layout.local_len and min(lengths) > 0
        assert [*map(len, halo.moves.receives)] == [len(other.moves.sends[rank]) for other in halos]
    for planned in ([state_bytes(plan, 4) for plan in ranked], [halo_bytes(halo, 1) for halo in halos]):
        assert sum(forward for forward, _ in planned) == sum(backward for _, backward in planned)
    carried = sum(segment.before > 0 for plan in ranked for segment in plan.segments)
    assert carried == sum(len(into) for message in ranked[0].messages for into in message.values())


def test_zigzag_passes_a_state_over_each_boundary_between_ranks() -> None:
    layout = SequenceLayout("zigzag", 64, ring=4)
    spans = held_spans(layout)
    assert [span.rank for span in spans] == [0, 1, 2, 3, 2, 1, 0]  # the last rank's chunks are adjacent
    sent = [state_bytes(SpanPlan(layout, None, 2, rank), 40)[0] for rank in range(4)]
    assert sent == [80, 160, 160, 80]
    documents = ((0, 16, 32, 48, 64), (0, 64))  # the first row's boundaries are two of the seven spans' ends
    assert sum(state_bytes(SpanPlan(layout, documents, 2, rank), 40)[0] for rank in range(4)) == 40 * 10


def test_spans_need_consecutive_tokens() -> None:
    for kind in ("striped", "balanced"):
        with pytest.raises(ValueError, match="reshard to contiguous first"):
            held_spans(SequenceLayout(kind, 8, ring=2))


@pytest.mark.parametrize(("kind", "documents"), [("striped", None), ("balanced", ((0, 20, 24, 24), (0, 3, 8, 21)))])
def test_resharding_moves_each_token_once(kind: str, documents: tuple[tuple[int, ...], ...] | None) -> None:
    layouts = [SequenceLayout(kind, 24, 3, 2, documents), SequenceLayout("contiguous", 24, ring=3, ulysses=2)]
    held = [
        [torch.cat([each.positions(*divmod(rank, 2), row) + row * 24 for row in range(2)]) for rank in range(6)]
        for each in layouts
    ]
    ranked = [layout_moves(*layouts, rank, rows=2) for rank in range(6)]
    for rank, plan in enumerate(ranked):
        placed = torch.full((8,), -1)
        for peer, sender in enumerate(ranked):
            placed[plan.receives[peer]] = held[0][peer][sender.sends[rank]]
        assert placed.tolist() == held[1][rank].tolist()
        assert sorted(torch.cat(plan.sends).tolist()) == list(range(8))
