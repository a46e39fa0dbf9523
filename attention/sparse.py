"""Attention to chosen keys: each query attends to the positions that it is given, as far as the mask lets it see them.

DeepSeek Sparse Attention (DeepSeek-V3.2, section 2.1) and its kin, on any layout of the sequence. Where KV heads have
indices of their own, each is computed as a row of its own, with the query heads that share it.

    indices   of the ring rank's queries, gathered from its ulysses ranks
        | one bit for each key of the other ring ranks, whether a query here chose it: all-to-all over the ring axis
    choice    the rows of the other ranks that are received here, and those of this rank that are sent to them
        | one all-to-all of exactly these keys and values
    out, lse  over own and received rows, which are gathered for a tile of queries at a time

The backward receives the same rows again, and returns a gradient of each. Memory grows with the tokens of a rank, the
indices of its queries, and the rows that it receives; no tensor has tokens x tokens elements.

B batch, S tokens of a rank per row, T tokens of a ring rank (row by row), k indices of a query, M own and received
rows, t queries of a tile, N query heads, K KV heads, G query heads per KV head, H head dim, V head dim of the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .accumulate import accumulate_dtype
from .comm import Channel, named
from .keep import Keep, compute_now
from .kernels.base import without_autocast
from .layout import SequenceLayout
from .spec import AttentionSpec
from .tiles import visible_range

TILE = 1 << 24  # elements that are gathered at a time


@dataclass(frozen=True, eq=False)
class SparseProgram:
    """The part of one ring rank's calls that does not depend on the indices.

    first, last: (T,) the lowest and highest position that each query may see; last < first if there is none.
    slots: (B, sequence) the number of each position's token, where the ranks' tokens follow one another.
    kv_index: as in `RingProgram`.
    heads: KV heads with indices of their own, each of which is a row, so that B x heads rows take the place of B; None
        if all heads share the indices.
    each, places: with heads, `HeadPlan.even_places`, the unused of which are zero; 0 and None if all are used.
    block: how many consecutive keys an index stands for.
    """

    spec: AttentionSpec
    ring: int
    rank: int
    first: Tensor
    last: Tensor
    slots: Tensor
    kv_index: Tensor | None = None
    heads: tuple[int, ...] | None = None
    each: int = 0
    places: Tensor | None = None
    block: int = 1

    @staticmethod
    def of(
        layout: SequenceLayout,
        spec: AttentionSpec,
        batch: int,
        rank: int,
        device: torch.device | str = "cpu",
        kv_index: tuple[int, ...] | None = None,
        heads: tuple[int, ...] | None = None,
        places: tuple[int, tuple[int, ...]] | None = None,
        block: int = 1,
    ) -> SparseProgram:
        """Prepare the calls of a ring rank on `batch` rows.

        Raises ValueError for a mask in which what a query sees is not an interval of positions.
        """
        if not spec.in_intervals:
            raise ValueError(
                "attention to indices supports causal, window, chunk and cu_seqlens; not prefix, prefix_tree, joint "
                "tokens, cross attention and a mask_mod that is not of these: leave them out, or the indices"
            )
        first, last, each = list[Tensor](), list[Tensor](), 1 if heads is None else len(heads)
        rows = batch * each
        slots = torch.empty(rows, layout.seq_len, dtype=torch.int32)
        for row in range(rows):
            for owner in range(layout.ring):
                own = layout.ring_positions(owner, row // each)
                begin = (owner * rows + row) * layout.ring_len
                slots[row, own] = torch.arange(begin, begin + len(own), dtype=torch.int32)
                if owner == rank:
                    bounds = visible_range(spec, row // each, layout.seq_len, own)
                    first.append(bounds[0])
                    last.append(bounds[1])
        lowest, highest = (torch.cat(x or [torch.empty(0)]).int().to(device) for x in (first, last))
        each, at = places or (0, None)
        index, even = (None if x is None else torch.tensor(x, device=device) for x in (kv_index, at))
        options = index, heads, each, even, block
        return SparseProgram(spec, layout.ring, rank, lowest, highest, slots.to(device), *options)

    def keys(self, indices: Tensor) -> Tensor:
        """Return the positions (T, k) that queries chose, from the indices of theirs, (tokens, k) or (tokens, K, k)."""
        if self.heads is not None:
            indices = self._as_rows(indices[:, list(self.heads)])
        if self.block == 1:
            return indices
        places = torch.arange(self.block, dtype=indices.dtype, device=indices.device)
        return (indices.unsqueeze(-1) + places).where(indices.unsqueeze(-1) >= 0, -1).flatten(1)

    def to_rows(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (T, N, H), (T, K, H) and (T, K, V), from those of a rank's heads."""
        if self.heads is None:
            return q, k, v
        if self.places is not None:
            q = q.new_zeros(len(q), self.each * len(self.heads), q.shape[2]).index_copy(1, self.places, q)
        queries = self._as_rows(q.unflatten(1, (len(self.heads), -1)))
        return queries, self._as_rows(k).unsqueeze(1), self._as_rows(v).unsqueeze(1)

    def from_rows(self, out: Tensor) -> Tensor:
        """Return results (tokens, N, V) of a rank's heads from those of rows (T, N, V)."""
        if self.heads is None:
            return out
        heads = len(self.heads)
        out = out.unflatten(0, (len(self.slots) // heads, heads, -1)).transpose(1, 2).flatten(0, 1).flatten(1, 2)
        return out if self.places is None else out.index_select(1, self.places)

    def _as_rows(self, x: Tensor) -> Tensor:
        """Return (B x heads x S, ...) from (B x S, heads, ...)."""
        return x.unflatten(0, (len(self.slots) // x.shape[1], -1)).transpose(1, 2).flatten(0, 2)

    def chosen(self, indices_Tk: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots (T, k) of the keys that queries chose and may see, each once and -1 for the others, and for
        each slot (ring, T) whether any query did."""
        tokens, row_len = len(indices_Tk), len(indices_Tk) // len(self.slots)
        slots = torch.empty_like(indices_Tk, dtype=torch.int32)
        none = self.ring * tokens
        any_chose = torch.zeros(none + 1, dtype=torch.bool, device=slots.device)
        for rows in token_tiles(tokens, indices_Tk.shape[1]):
            chosen, order = indices_Tk[rows].sort(-1)
            seen = (chosen >= self.first[rows, None]) & (chosen <= self.last[rows, None])
            seen[:, 1:] &= chosen[:, 1:] != chosen[:, :-1]
            row = torch.arange(rows.start, rows.stop, device=slots.device).div(row_len, rounding_mode="floor")
            at = self.slots[row.unsqueeze(1), chosen.clamp(0, self.slots.shape[1] - 1).long()]
            slots[rows] = torch.empty_like(at).scatter_(1, order, torch.where(seen, at, -1))
            any_chose.index_fill_(0, torch.where(seen, at, none).flatten().long(), True)
        return slots, any_chose[:none].view(self.ring, tokens)


@dataclass(frozen=True, eq=False)
class KeyChoice:
    """The keys that one ring rank's queries attend to, and what ranks exchange of them.

    index: (T, k) int32, the row of each key among own (T) and then received ones, by owner; -1 for none.
    rows: own rows that are sent, by destination. sent, received: numbers of rows to and from each ring rank.
    """

    index: Tensor
    rows: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


def choose(indices: Tensor, program: SparseProgram, ulysses: Channel, ring: Channel) -> KeyChoice:
    """Find what a call exchanges. Collective over both axes.

    indices: (B, S, k), or (B, S, K, k) for each KV head: the positions in its row that each of this rank's queries
        attends to, or where blocks of them begin; what is negative, or not visible by the mask, is no choice, and what
        is repeated counts once.
    """
    of_query = indices.shape[2:]
    if ulysses.size > 1:
        with named("indices of the ring rank's queries"):
            indices = ulysses.all_gather(indices).transpose(0, 1)
    slots, chosen = program.chosen(program.keys(indices.reshape(-1, *of_query)))
    tokens, own = len(slots), program.rank
    if ring.size == 1:
        return KeyChoice(slots, slots.new_empty(0), (0,), (0,))
    bits = _bits(chosen)
    with named("keys that other ranks chose"):
        parts = [bits.shape[1]] * ring.size
        asked = _flags(ring.all_to_all(bits.flatten(), parts, parts).view_as(bits), tokens)
    asked[own] = chosen[own] = False
    table = chosen.flatten().cumsum(0, dtype=torch.int32) + (tokens - 1)
    table[own * tokens : (own + 1) * tokens] = torch.arange(tokens, dtype=torch.int32, device=table.device)
    for rows in token_tiles(tokens, slots.shape[1]):
        at = slots[rows]
        slots[rows] = torch.where(at >= 0, table[at.clamp(min=0).long()], -1)
    sent, received = (tuple(x.sum(1).tolist()) for x in (asked, chosen))
    return KeyChoice(slots, asked.nonzero()[:, 1], sent, received)


def chosen_rows(
    layout: SequenceLayout, spec: AttentionSpec, indices: Tensor, heads: tuple[int, ...] | None = None, block: int = 1
) -> Tensor:
    """Return how many keys of each ring rank (columns) the queries of each other one (rows) choose: what `choose` finds
    on every rank, from the indices of the whole sequence. heads, block: as in `SparseProgram`."""
    batch, numbers = len(indices), torch.zeros(layout.ring, layout.ring, dtype=torch.int64)
    for rank in range(layout.ring):
        program = SparseProgram.of(layout, spec, batch, rank, heads=heads, block=block)
        own = [indices[row, layout.ring_positions(rank, row)] for row in range(batch)]
        numbers[rank] = program.chosen(program.keys(torch.cat(own)))[1].sum(1)
        numbers[rank, rank] = 0
    return numbers


class ChosenAttention(torch.autograd.Function):
    """Attention of a ring rank's queries to the keys that they chose.

    `apply(q_TNH, k_TKH, v_TKV, sinks_N, choice, program, channel, keep, weighed)` -> out_TNV, lse_TN, and if `weighed`
    the weights_Tk of the chosen keys, summed over the heads, else None. sinks: as in `RingAttention`.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, choice: KeyChoice, program: SparseProgram, channel: Channel, keep: Keep, weighed):
        def attention() -> tuple[Tensor, Tensor, Tensor | None]:
            keys = _by_head(*_received(k, v, choice, channel), program.kv_index)
            with named("attention to chosen keys"), without_autocast(q.device):
                return _attend(q, *keys, choice.index, program.spec, sinks, weighed)

        step = ("sparse attention", q.shape, k.shape, v.shape, choice.index.shape)
        out, lse, weights = keep(step, attention)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.choice, ctx.program, ctx.channel = choice, program, channel
        ctx.mark_non_differentiable(*([weights] if weighed else []))
        return out, lse, weights

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse, _):
        q, k, v, out, lse, sinks = ctx.saved_tensors
        program, choice, kv_index = ctx.program, ctx.choice, ctx.program.kv_index
        keys = _by_head(*_received(k, v, choice, ctx.channel), kv_index)
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) - dlse
        with named("attention to chosen keys: backward"), without_autocast(q.device):
            dq, *grads = _attend_backward(dout, q, *keys, lse, delta, choice.index, program.spec)
        if kv_index is not None:
            grads = [x.new_zeros(k.shape[1], *x.shape[1:]).index_add_(0, kv_index, x) for x in grads]
        dk, dv = (x.transpose(0, 1) for x in grads)
        dk, dv = _returned(dk, dv, choice, ctx.channel)
        dsinks = None
        if sinks is not None:
            dsinks = -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(0).to(sinks.dtype)
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None, None


def attend_to_rows(
    q_BSNH: Tensor, rows_MKH: Tensor, index_BSk: Tensor, spec: AttentionSpec, keep: Keep = compute_now
) -> tuple[Tensor, Tensor]:
    """Return out (B, S, N, H) and lse (B, S, N), both differentiable, of attention of each query to its own rows, by
    index, -1 for none, which are keys and values alike. It takes scale and softcap of `spec`. Communicates nothing."""
    none = index_BSk.new_empty(0)
    program = SparseProgram(spec, 1, 0, none, none, none)
    choice = KeyChoice(index_BSk.flatten(0, 1), none, (0,), (0,))
    call = choice, program, Channel(None), keep, False
    out, lse, _ = ChosenAttention.apply(q_BSNH.flatten(0, 1), rows_MKH, rows_MKH, None, *call)
    return out.unflatten(0, q_BSNH.shape[:2]), lse.unflatten(0, q_BSNH.shape[:2])


def _received(k: Tensor, v: Tensor, choice: KeyChoice, channel: Channel) -> tuple[Tensor, Tensor]:
    """Return own (T, ...) and then received keys and values, (M, K, H) and (M, K, V)."""
    if channel.size == 1:
        return k, v
    rows = torch.cat([x.flatten(1) for x in (k, v)], 1)
    with named("chosen keys and values"):
        more = _exchange(rows.index_select(0, choice.rows), choice.sent, choice.received, channel)
    keys, values = torch.cat((rows, more)).split([x[0].numel() for x in (k, v)], 1)
    return keys.unflatten(1, k.shape[1:]), values.unflatten(1, v.shape[1:])


def _returned(dk: Tensor, dv: Tensor, choice: KeyChoice, channel: Channel) -> tuple[Tensor, Tensor]:
    """Return the complete gradients (T, ...) of own keys and values, from those (M, ...) of own and received ones."""
    if channel.size == 1:
        return dk, dv
    tokens = len(dk) - sum(choice.received)
    sent = torch.cat([x[tokens:].flatten(1) for x in (dk, dv)], 1)
    with named("gradients of chosen keys and values"):
        more = _exchange(sent, choice.received, choice.sent, channel)
    parts = more.split([x[0].numel() for x in (dk, dv)], 1)
    first, second = (
        x[:tokens].contiguous().index_add_(0, choice.rows, part.unflatten(1, x.shape[1:]))
        for x, part in zip((dk, dv), parts, strict=True)
    )
    return first, second


def _exchange(rows_nX: Tensor, sent: tuple[int, ...], received: tuple[int, ...], channel: Channel) -> Tensor:
    """Send so many rows to each rank; return those that are received."""
    width = rows_nX.shape[1]
    splits = ([number * width for number in numbers] for numbers in (sent, received))
    return channel.all_to_all(rows_nX.flatten(), *splits).view(-1, width)


def _by_head(k: Tensor, v: Tensor, kv_index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return contiguous keys (K, M, H) and values (K, M, V)."""
    if kv_index is not None:
        k, v = k.index_select(1, kv_index), v.index_select(1, kv_index)
    return k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()


def _attend(
    q_TNH: Tensor, k_KMH: Tensor, v_KMV: Tensor, index_Tk: Tensor, spec: AttentionSpec, sinks: Tensor | None,
    weighed: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return out (T, N, V) in q's dtype, lse (T, N), and if `weighed` the sums of the keys' weights over the heads
    (T, k), else None; queries without a key get 0 and -inf."""
    groups, tokens, heads, dtype = len(k_KMH), *q_TNH.shape[:2], accumulate_dtype(q_TNH.dtype)
    out = q_TNH.new_empty(tokens, heads, v_KMV.shape[-1])
    lse = q_TNH.new_empty(tokens, heads, dtype=dtype)
    sums = q_TNH.new_empty(index_Tk.shape, dtype=dtype) if weighed else None
    own_sinks = None if sinks is None else sinks.to(dtype).view(groups, 1, -1)
    for rows in token_tiles(tokens, _elements(k_KMH, v_KMV, index_Tk)):
        scores, _, _ = _scores(_grouped(q_TNH[rows], groups), k_KMH, index_Tk[rows], spec)
        total = scores.logsumexp(-1)
        if own_sinks is not None:
            total = torch.logaddexp(total, own_sinks)
        weights = torch.exp(scores - total.masked_fill(total.isneginf(), 0.0).unsqueeze(-1))
        result = weights @ _gathered(v_KMV, index_Tk[rows], dtype)
        out[rows], lse[rows] = (x.transpose(0, 1).flatten(1, 2) for x in (result, total))
        if sums is not None:
            sums[rows] = weights.sum((0, 2))
    return out, lse, sums


def _attend_backward(
    dout_TNV: Tensor, q_TNH: Tensor, k_KMH: Tensor, v_KMV: Tensor, lse_TN: Tensor, delta_TN: Tensor, index_Tk: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq (T, N, H) in q's dtype, and dk (K, M, H) and dv (K, M, V) in the dtype of accumulation."""
    groups, tokens, dtype = len(k_KMH), len(q_TNH), accumulate_dtype(q_TNH.dtype)
    dq, scale = torch.empty_like(q_TNH), spec.score_scale(q_TNH.shape[-1])
    dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k_KMH, v_KMV))
    lse_TN = lse_TN.masked_fill(lse_TN.isneginf(), 0.0)
    for rows in token_tiles(tokens, _elements(k_KMH, v_KMV, index_Tk)):
        q, dout, lse, delta = (
            _grouped(x, groups) for x in (q_TNH[rows], dout_TNV[rows], lse_TN[rows, :, None], delta_TN[rows, :, None])
        )
        scores, keys, slope = _scores(q, k_KMH, index_Tk[rows], spec)
        weights = torch.exp(scores - lse)
        dscores = weights * (dout @ _gathered(v_KMV, index_Tk[rows], dtype).mT - delta) * scale
        if slope is not None:
            dscores *= slope
        dq[rows] = (dscores @ keys).transpose(0, 1).flatten(1, 2)
        at = index_Tk[rows].clamp(min=0).flatten()
        dk.index_add_(1, at, (dscores.mT @ q).flatten(1, 2))
        dv.index_add_(1, at, (weights.mT @ dout).flatten(1, 2))
    return dq, dk, dv


def _scores(
    q_KtGH: Tensor, k_KMH: Tensor, index_tk: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return scores (K, t, G, k), -inf without a key, the gathered keys (K, t, k, H), and a softcap's derivative."""
    keys, slope = _gathered(k_KMH, index_tk, q_KtGH.dtype), None
    scores = q_KtGH @ keys.mT * spec.score_scale(q_KtGH.shape[-1])
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
        slope = 1 - (scores / spec.softcap).square()
    return scores.masked_fill_((index_tk < 0).view(1, len(index_tk), 1, -1), float("-inf")), keys, slope


def _gathered(x_KMH: Tensor, index_tk: Tensor, dtype: torch.dtype) -> Tensor:
    rows = x_KMH.index_select(1, index_tk.clamp(min=0).flatten())
    return rows.unflatten(1, index_tk.shape).to(dtype)


def _grouped(x_tNH: Tensor, groups: int) -> Tensor:
    """Return (K, t, G, H) in the dtype of accumulation."""
    return x_tNH.unflatten(1, (groups, -1)).transpose(0, 1).to(accumulate_dtype(x_tNH.dtype))


def _elements(k_KMH: Tensor, v_KMV: Tensor, index_Tk: Tensor) -> int:
    """Return how many elements of keys and values are gathered for a query."""
    return index_Tk.shape[1] * len(k_KMH) * (k_KMH.shape[2] + v_KMV.shape[2])


def token_tiles(tokens: int, elements: int) -> Iterator[slice]:
    """Yield slices of so many tokens that a tensor with `elements` for each has at most `TILE`."""
    size = max(1, TILE // max(1, elements))
    yield from (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _bits(flags: Tensor) -> Tensor:
    """Pack flags (..., n) into bytes (..., n / 8 rounded up)."""
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8)).to(torch.uint8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(-1, dtype=torch.uint8)


def _flags(bits: Tensor, n: int) -> Tensor:
    """Invert `_bits`."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(-1) >> places) & 1).bool().flatten(-2)[..., :n]
