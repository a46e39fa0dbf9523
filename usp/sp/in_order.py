"""Layers that work in sequence order, a convolution and a recurrence, on a sequence sharded in any layout.

Each span fetches the last tokens before it (a halo). The striped layout, whose spans are single tokens, moves its
tokens to the contiguous one and back, with one message between each pair of ranks.

What these layers keep of each sequence while it is generated is in `KVCache.states`:

    prefill    the state after the last token of each prompt; the padding behind it is a document of its own
    decode     one token of each sequence, from that state to the next

A convolution keeps its last K - 1 inputs, on every rank. A recurrence keeps its state sharded by head: all ranks know
the token that is decoded, each computes its own heads, and they exchange the outputs.

T tokens of this rank (its rows one after another), C channels, K taps, B slots, R rows of a prefill, H heads (or
channels) of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from usp.attention import AttentionSpec, Channel, DecodeStep, Keep, Prefill, SequenceLayout, parse_layout
from usp.attention.intervals import Array
from usp.parallel import ParallelMesh

from .scan import Recurrence, ScanProgram, scan
from .sequence import GridChannel, SpAxes, StepKeeper, documents_of, rows_of
from .spans import UNORDERED, HaloPlan, Segment, SpanPlan, TokenMoves


def layout_moves(source: SequenceLayout, destination: SequenceLayout, rank: int, rows: int = 1) -> TokenMoves:
    """Return the moves of a rank's rows from one layout to another over the same grid. rank: ring_rank * ulysses +
    ulysses_rank."""
    lengths = rows * source.local_len, rows * destination.local_len
    pairs = (source, destination), (destination, source)
    sends, receives = (_shared(*pair, rank, rows) for pair in pairs)
    return TokenMoves(sends, receives, lengths)


def _held(layout: SequenceLayout, rank: int, rows: int) -> Array:
    """Return the positions of a rank's tokens of all rows, counted over the rows."""
    spans = [
        row * layout.seq_len + span.start + span.step * np.arange(span.length)
        for row in range(rows)
        for span in layout.local_spans(*divmod(rank, layout.ulysses), row)
    ]
    return np.concatenate(spans)


def _shared(own: SequenceLayout, others: SequenceLayout, rank: int, rows: int) -> tuple[Tensor, ...]:
    """Return, for each rank, which of `rank`'s tokens under `own` it holds under `others`, in order of position."""
    holder, peers = np.empty(rows * own.seq_len, np.int64), range(own.ring * own.ulysses)
    for peer in peers:
        holder[_held(others, peer, rows)] = peer
    positions = _held(own, rank, rows)
    order = positions.argsort()
    owners = holder[positions[order]]
    return tuple(torch.tensor(order[owners == peer]) for peer in peers)


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of `rate` tokens of each document, one after another from its first, each of which a layer makes an entry
    of. What a document has beyond its last whole window is in none.

    The w-th window of a document is worked on by the rank that has its token w modulo `rate`, so that in the striped
    layout, where all ranks have parts of all windows, all have work. Where windows overlap, a rank also gets the one
    before each of its own, at the start of a document an empty one.

    Attributes:
        tokens: from a rank's tokens, row after row, to those of its windows, of which the first is empty.
        entries: from the entries that a rank makes to those of all ranks, by row and document.
        shifts: (windows,) what is added to the number of each of these windows, times `rate`, for the position of its
            first token in the document.
        empty: (windows * rate,) whether a token is in an empty window.
        own: the windows of which this rank makes the entries.
        cuts: (rows, documents + 1) the first entry of each document, and the end of the last one.
        runs: row, document, begin and end of the runs of a rank's tokens that are in one document.
    """

    tokens: TokenMoves
    entries: TokenMoves
    shifts: Tensor
    empty: Tensor
    own: Tensor
    cuts: Array
    runs: tuple[tuple[int, int, int, int], ...]

    @staticmethod
    def of(
        layout: SequenceLayout,
        documents: tuple[tuple[int, ...], ...] | None,
        rows: int,
        rank: int,
        rate: int,
        overlap: bool,
        device: torch.device | str = "cpu",
    ) -> Windows:
        """Find what a rank works on and what it sends. Pure: all ranks derive matching plans."""
        spec, peers = AttentionSpec(documents=documents), range(layout.ring * layout.ulysses)
        # The last element of each is for what is in no window, number -1.
        holder, place = np.full((2, rows * layout.seq_len + 1), -1)
        held = [_held(layout, peer, rows) for peer in peers]
        for peer, at in enumerate(held):
            holder[at], place[at] = peer, np.arange(len(at))
        bounds = np.array([spec.row_documents(row, layout.seq_len) for row in range(rows)])
        bounds += layout.seq_len * np.arange(rows)[:, None]
        counts = np.diff(bounds) // rate
        ends, many = counts.cumsum().reshape(counts.shape), counts.ravel()
        number = np.append(np.arange(many.sum()) - np.repeat((ends - counts).ravel(), many), 0)
        first = np.append(np.repeat(bounds[:, :-1].ravel(), many), -1) + number * rate
        owner = holder[(first + number % rate)[:-1]]

        def windows_of(peer: int) -> tuple[Array, Array]:
            """Return the windows that a rank gets, -1 for an empty one, and which of them are its own."""
            own = np.flatnonzero(owner == peer)
            before = np.where(number[own] == 0, -1, own - 1)
            taken = np.ones((len(own), 2), bool)
            taken[:, 0] = overlap & ((before < 0) | (np.diff(own, prepend=-2) > 1))
            mine = np.broadcast_to((False, True), taken.shape)[taken]
            return np.append(-1, np.stack((before, own), 1)[taken]), np.flatnonzero(mine) + 1

        def tokens_of(windows: Array) -> Array:
            return np.where(windows[:, None] < 0, -1, first[windows][:, None] + np.arange(rate)).ravel()

        def lowered(index: Any) -> Tensor:
            return torch.tensor(index, device=device)

        windows, own = windows_of(rank)
        wanted = [tokens_of(windows_of(peer)[0]) for peer in peers]
        holders = holder[wanted[rank]]
        sent = tuple(lowered(place[tokens[holder[tokens] == rank]]) for tokens in wanted)
        received = tuple(lowered(np.flatnonzero(holders == peer)) for peer in peers)
        of_all = tuple(lowered(np.flatnonzero(owner == peer)) for peer in peers)
        return Windows(
            tokens=TokenMoves(sent, received, (rows * layout.local_len, len(holders))),
            entries=TokenMoves((lowered(np.arange(len(own))),) * len(peers), of_all, (len(own), len(owner))),
            shifts=lowered((number[windows] - np.arange(len(windows))) * rate),
            empty=lowered(holders < 0),
            own=lowered(own),
            cuts=np.concatenate((ends[:, :1] - counts[:, :1], ends), 1),
            runs=tuple(_runs(np.searchsorted(bounds.ravel(), held[rank], "right") - 1, bounds.shape[1])),
        )


def _runs(documents: Array, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs of equal numbers, each of a row with so many columns, of which the last is of padding."""
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(documents)]):
        row, document = divmod(int(documents[begin]), columns)
        if document < columns - 1:
            yield row, document, begin, end


class Reshard(torch.autograd.Function):
    """`apply(x, moves, channel, keep)`: (rows, tokens, width) before the moves -> the same afterwards. What no rank
    sends is 0, what several send is added. Only what others send is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, moves: TokenMoves, channel: Channel, keep: Keep) -> Tensor:
        ctx.inverse, ctx.channel, tokens = moves.inverse, channel, x.flatten(0, 1)
        received = keep(("reshard", x.shape), lambda: _receive(tokens, moves, channel))
        return _placed(tokens, received, moves, channel).unflatten(0, (len(x), -1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        tokens = grad.flatten(0, 1)
        received = _receive(tokens, ctx.inverse, ctx.channel)
        return _placed(tokens, received, ctx.inverse, ctx.channel).unflatten(0, (len(grad), -1)), None, None, None


def _receive(x: Tensor, moves: TokenMoves, channel: Channel) -> tuple[Tensor, ...]:
    """Send other ranks their tokens of x (n, width); return those of each rank that sends any, by its number."""
    sends, receives = (
        {peer: index for peer, index in enumerate(side) if peer != channel.rank and len(index)}
        for side in (moves.sends, moves.receives)
    )
    outgoing = [(peer, x.index_select(0, index.to(x.device))) for peer, index in sends.items()]
    incoming = [(peer, x.new_empty(len(index), x.shape[1])) for peer, index in receives.items()]
    with record_function("reshard"):
        channel.post(outgoing, incoming).wait()
    return tuple(part for _, part in incoming)


def _placed(x: Tensor, received: Sequence[Tensor], moves: TokenMoves, channel: Channel) -> Tensor:
    """Return the tokens after the moves, (length, width)."""
    out, parts = x.new_zeros(moves.lengths[1], x.shape[1]), iter(received)
    for peer, index in enumerate(moves.receives):
        if peer == channel.rank:
            out.index_add_(0, index.to(x.device), x.index_select(0, moves.sends[peer].to(x.device)))
        elif len(index):
            out.index_add_(0, index.to(x.device), next(parts))
    return out


@dataclass(frozen=True)
class OrderedCall:
    """One call of a layer on this rank's tokens, which are consecutive within each span."""

    plan: SpanPlan
    order: SequenceOrder

    def convolve(self, x: Tensor, taps: int, convolution: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a causal depthwise convolution, (rows, channels, tokens) to the same, to each document by itself.
        Collective.

        convolution: of (1, channels, tokens), with zeros before the first token, and `taps` taps.
        """
        moves, order = self.order.halo(HaloPlan(self.plan, taps), x.device), self.order
        tokens = x.transpose(1, 2).flatten(0, 1).unsqueeze(0)
        padded = Reshard.apply(tokens, moves, order.channel, order.keep)
        own = moves.receives[order.channel.rank][: tokens.shape[1]]
        out = convolution(padded.transpose(1, 2)).squeeze(0).t().index_select(0, own)
        return out.unflatten(0, (self.plan.rows, -1)).transpose(1, 2)

    def scan(self, inputs: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
        """Run a recurrence over (rows, tokens, ...) inputs; returns (rows, tokens, ...). Collective."""
        program = self.order.states(self.plan, inputs[0].device)
        out, _ = scan([x.flatten(0, 1) for x in inputs], program, self.order.channel, recurrence, keep=self.order.keep)
        return out.unflatten(0, (self.plan.rows, -1))


class SequenceOrder(StepKeeper):
    """Runner of layers that work in sequence order over a ring x ulysses mesh, for any sequence layout. Its calls keep
    what they receive from other ranks.

    mesh, layout: as of `UnifiedSPAttention`, which also raises alike.
    """

    def __init__(self, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag") -> None:
        parse_layout(layout)
        self._mesh, self.axes, self.layout, self.channel = mesh, SpAxes.of(mesh), layout, GridChannel.of(mesh)
        # Calls repeat from layer to layer and, without documents, from step to step.
        self.halo = lru_cache(maxsize=16)(lambda plan, device: plan.moves.to(device))
        self.states = lru_cache(maxsize=16)(ScanProgram.lower)
        self.moves = lru_cache(maxsize=16)(self._moves)
        self.windows = lru_cache(maxsize=16)(Windows.of)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceOrder:
        """Share the process groups, which cannot be copied."""
        return SequenceOrder(self._mesh, self.layout)

    def plan(
        self, rows: int, seq_len: int, cu_seqlens: Tensor | None = None, prefix_tree: Tensor | None = None
    ) -> SpanPlan:
        """Plan a layer's call on `rows` rows of `seq_len` global tokens. Raises ValueError if the layout cannot divide
        the sequence, or the documents do not fit it."""
        documents, parents = documents_of(cu_seqlens), rows_of(prefix_tree, "prefix_tree", "documents")
        if violation := AttentionSpec(documents=documents, parents=parents).document_violation(rows, seq_len):
            raise ValueError(violation)
        kind = self.axes.layout(self.layout, seq_len, documents).kind
        ordered = self.axes.layout("contiguous" if kind in UNORDERED else kind, seq_len)
        return SpanPlan(ordered, documents, rows, self.channel.rank, parents)

    def _moves(self, rows: int, layout: SequenceLayout) -> TokenMoves | None:
        """Return how tokens reach the layout in which they are in order; None if they are."""
        if layout.kind not in UNORDERED or self.axes.ring == 1:
            return None
        return layout_moves(layout, self.axes.layout("contiguous", layout.seq_len), self.channel.rank, rows)

    def run(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        layer: Callable[[Tensor, OrderedCall], Tensor],
        prefix_tree: Tensor | None = None,
    ) -> Tensor:
        """Run a layer of (rows, tokens, width) on this rank's tokens, in an order that it can work in. Collective.

        cu_seqlens, prefix_tree: global boundaries of packed documents, and for each the one that it continues, as for
            `UnifiedSPAttention`.
        layer: gets the tokens and what convolves and scans them over the whole sequence.

        Raises ValueError as `plan`, before any communication.
        """
        seq_len = x.shape[1] * self.axes.ranks
        call = OrderedCall(self.plan(x.shape[0], seq_len, cu_seqlens, prefix_tree), self)
        moves = self.moves(x.shape[0], self.axes.layout(self.layout, seq_len, call.plan.documents))
        if moves is None:
            return layer(x, call)
        out = layer(Reshard.apply(x, moves, self.channel, self.keep), call)
        return Reshard.apply(out, moves.inverse, self.channel, self.keep)


def prompt_documents(prefill: Prefill, padded: int) -> Tensor:
    """Return the boundaries (R, 3) of each row's prompt and padding, `padded` tokens over all ranks."""
    lengths = prefill.row_lengths.cpu()
    return torch.stack((torch.zeros_like(lengths), lengths, torch.full_like(lengths, padded)), dim=1)


def own_heads(heads: int, group: dist.ProcessGroup | None) -> slice:
    """Return the heads of a state that this rank of the group keeps; the first ranks have one more if uneven."""
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    each, more = divmod(heads, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


@dataclass(frozen=True)
class PrefillCall(OrderedCall):
    """A layer's call on prompts, which keeps their states."""

    prefill: Prefill
    layer: str
    _names: Iterator[int] = field(default_factory=count)

    def convolve(self, x: Tensor, taps: int, convolution: Callable[[Tensor], Tensor]) -> Tensor:
        layout = self.plan.layout
        own = layout.positions(*divmod(self.plan.rank, layout.ulysses)).to(x.device)
        last_RK = self.prefill.row_lengths.unsqueeze(1) + torch.arange(1 - taps, 0, device=x.device)
        found_RK, index_RK = (own == last_RK.unsqueeze(2)).byte().max(-1)
        inputs_RCK = x.gather(2, index_RK.unsqueeze(1).expand(-1, x.shape[1], -1))
        self._keep(inputs_RCK.where(found_RK.unsqueeze(1) > 0, 0), slice(None))
        return super().convolve(x, taps, convolution)

    def scan(self, inputs: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
        plan, channel = self.plan, self.order.channel
        lengths = self.prefill.row_lengths.tolist()
        last = [number for number, piece in enumerate(plan.segments) if self._end(piece) == lengths[piece.row]]
        program = self.order.states(plan, inputs[0].device)
        out, states = scan([x.flatten(0, 1) for x in inputs], program, channel, recurrence, tuple(last))
        states_RH = states.new_zeros(plan.rows, *recurrence.state)
        states_RH[[plan.segments[number].row for number in last]] = states
        self._keep(states_RH, own_heads(recurrence.state[0], channel.group))
        return out.unflatten(0, (plan.rows, -1))

    def _end(self, segment: Segment) -> int:
        span = self.plan.spans[segment.span]
        return span.start + segment.start - segment.row * self.plan.layout.local_len - span.offset + segment.length

    def _keep(self, states_RH: Tensor, own: slice) -> None:
        """Store the states that the ranks have, each for its part of the rows and zeros elsewhere."""
        states_RH, cache = states_RH.contiguous(), self.prefill.cache
        if self.order.channel.group is not None:
            dist.all_reduce(states_RH, group=self.order.channel.group)
        states_RH = states_RH[:, own]
        state = cache.state((self.layer, next(self._names)), tuple(states_RH.shape[1:]), states_RH.dtype)
        state[self.prefill.slots] = states_RH[self.prefill.rows]


@dataclass(frozen=True)
class DecodeCall:
    """A layer's call on one token of each sequence, the same on all ranks that share them."""

    step: DecodeStep
    layer: str
    _names: Iterator[int] = field(default_factory=count)

    def convolve(self, x: Tensor, taps: int, convolution: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the convolution's output (B, C, 1) for the token x (B, C, 1)."""
        state = self._state((x.shape[1], taps - 1), x.dtype)
        window = torch.cat((state, x), dim=2)
        state.copy_(window[:, :, 1:])
        return convolution(window)[:, :, -1:]

    def scan(self, inputs: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
        """Return the recurrence's output (B, 1, ...) for the token's inputs (B, 1, ...). Collective."""
        heads, *rest = recurrence.state
        own = own_heads(heads, self.step.group)
        state = self._state((own.stop - own.start, *rest), torch.float32)
        out_BH, after = recurrence.step([x.squeeze(1) for x in inputs], state, own)
        state.copy_(after)
        if self.step.group is not None:
            whole = out_BH.new_zeros(out_BH.shape[0], heads, *out_BH.shape[2:])
            whole[:, own] = out_BH  # a sum with zeros is exact, and heads need not divide evenly
            dist.all_reduce(whole, group=self.step.group)
            out_BH = whole
        return out_BH.unsqueeze(1)

    def _state(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.step.cache.state((self.layer, next(self._names)), shape, dtype)
