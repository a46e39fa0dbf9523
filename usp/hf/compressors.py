"""Compressors of sparse attention under sequence parallelism, in unmodified transformers models.

A compressor (DeepSeek-V4, section 2.3) makes an entry of each window of tokens. Queries attend to a few tokens before
them and, as further keys, to the entries of the windows before them: to all (HCA), or to those that an indexer chooses,
which has a smaller compressor of its own (CSA). Both run their own forward here with a cache that stands between them
and the other ranks:

    tokens    a rank projects its own; those of windows that ranks share are sent to one of them (`sp.in_order.Windows`)
    entries   of the rank's windows; then they are gathered over the ranks, and gradients are returned in the backward
    indices   for a tile of queries of one document at a time, with a cache that returns all entries of the document

All ranks hold all entries, which are few, so that attention to them sends nothing: with HCA they are joint keys
(`UnifiedSPAttention`), with CSA rows of which each query has its own, merged with the window by lse. Windows begin anew
in each document, as if it were alone. In generation all ranks keep the projections of the last windows, and the rank
with the last token of a window its entry.

B batch, S a rank's tokens of each row, D size of an entry, k indices of a query, M entries of all rows, N query heads,
H head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from usp.attention import (
    AttentionSpec,
    Channel,
    DecodeStep,
    Keep,
    Prefill,
    attend_to_rows,
    compute_now,
    merge_parts,
    token_tiles,
)
from usp.sp.in_order import Reshard, SequenceOrder, Windows
from usp.sp.mask import Mask
from usp.sp.sequence import documents_of
from usp.sp.sp_attention import JointAttention, UnifiedSPAttention

from .indexers import CausalMask

_OF_COMPRESSORS = {"hidden_states", "q_residual", "position_ids", "past_key_values", "layer_idx"}


def compressors(model: nn.Module) -> dict[str, nn.Module]:
    """Return the compressors of a model that this file can run, by name: those that take what DeepSeek-V4's take."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Compressor")
        and inspect.signature(type(module).forward).parameters.keys() >= _OF_COMPRESSORS
    }


def apply_compressors(base: nn.Module, attention: UnifiedSPAttention, order: SequenceOrder) -> None:
    """Let the compressors of a backbone make entries of all tokens of the sequence, in place."""
    for name, module in compressors(base).items():
        owner = base.get_submodule(name.rpartition(".")[0])
        sharded = ShardedCompressor(module, attention, order)
        module.forward = owner.sharded_compressor = sharded  # type: ignore[assignment]
        owner.forward = partial(_with_documents, owner.forward)


def _with_documents(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **{**kwargs, "past_key_values": Documents(*map(kwargs.get, ("cu_seqlens", "kv_cache")))})


class Documents(CausalMask):
    """Takes the place of an attention module's cache, which its compressor gets as well."""

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return keys, values


@dataclass(frozen=True, eq=False)
class Entries:
    """What a compressor made: entries (M, H), by row and document, and which of them the rank's queries attend to, (B,
    S, k), -1 for none; None for all before them. made: also by the indexer's."""

    entries: Tensor
    plan: Windows
    indices: Tensor | None
    made: tuple[_WholeWindows, ...]


class ShardedCompressor:
    """The forward of a compressor whose tokens are sharded, and the attention to the entries that it made."""

    def __init__(self, module: nn.Module, attention: UnifiedSPAttention, order: SequenceOrder) -> None:
        self.attention, self.order = attention, order
        self.run, self.made = CompressorRun(module), cast(Entries | None, None)
        self.joint = JointAttention(attention, every=self.run.rate)
        self.decoded: tuple[Tensor, Tensor] | None = None  # entries of this rank, and which of them each token sees

    def __call__(
        self,
        hidden_states: Tensor,
        q_residual: Tensor,
        position_ids: Tensor,
        past_key_values: Documents,
        layer_idx: int,
    ) -> tuple[Tensor, None]:
        """Make the entries; return none, and no mask, to the attention module. Collective."""
        (rows, tokens, _), axes, cache = hidden_states.shape, self.order.axes, past_key_values.kv_cache
        if isinstance(cache, DecodeStep):
            self.decoded = self._decoded((hidden_states, q_residual, position_ids), cache)
            return hidden_states.new_empty(rows, 1, 0, self.decoded[0].shape[-1]), None
        documents = documents_of(past_key_values.cu_seqlens)
        layout = axes.layout(self.order.layout, tokens * axes.ranks, documents)
        if cache is not None:
            documents = tuple((0, length) for length in cache.row_lengths.tolist())
        own = layout, documents, rows, self.order.channel.rank
        self.made = self.run.entries(
            (hidden_states, q_residual, position_ids),
            self.order.windows(*own, self.run.rate, self.run.overlap, hidden_states.device),
            self.order.channel,
            self.order.keep,
        )
        for number, made in enumerate(self.made.made if cache is not None else ()):
            self._store(cast(Prefill, cache), number, made)
        return hidden_states.new_empty(rows, 1, 0, self.made.entries.shape[-1]), None

    def _store(self, prefill: Prefill, number: int, made: _WholeWindows) -> None:
        """Cache each entry on the rank with the last token of its window, and on all ranks the projections of the last
        windows, of which a token has the place of its position modulo their length."""
        rate, positions, lengths = self.run.rate, prefill.positions, prefill.row_lengths.unsqueeze(1)
        tokens = made.tokens.view(len(lengths), len(positions), -1)
        first = torch.from_numpy(made.plan.cuts)[:, :1].to(positions.device)
        entries = torch.cat((made.entries, made.entries.new_zeros(1, made.entries.shape[-1])))
        index = (first + (positions + 1) // rate - 1).clamp(0, len(made.entries))
        prefill.store((self, number), entries[index].unsqueeze(2))
        recent = (positions >= (lengths // rate + 1 - self.run.windows) * rate) & (positions < lengths)
        state = tokens.new_zeros(len(lengths), self.run.windows * rate, tokens.shape[-1])
        state.index_add_(1, positions % state.shape[1], tokens.where(recent.unsqueeze(-1), 0))
        if self.order.channel.group is not None:
            dist.all_reduce(state, group=self.order.channel.group)
        kept = prefill.cache.state((self, number), tuple(state.shape[1:]), state.dtype)
        kept[prefill.slots] = state[prefill.rows]

    def _decoded(self, call: Sequence[Tensor], step: DecodeStep) -> tuple[Tensor, Tensor]:
        """Return the entries (B, 1, L, H) of this rank, and which of them the new tokens attend to, (B, L)."""
        rate, flat = self.run.rate, [x.transpose(0, 1) for x in call]
        made = _LastWindows(step, (self, 0), self.run)
        self.run.compress(*flat, made, 0)
        seen = step.seen() & ((step.at + 1) % rate == 0)
        indexer: Any = self.run.indexer
        if indexer is None:
            return made.entries, seen
        keys = _LastWindows(step, (self, 1), self.run)
        self.run.choose(*flat, keys, 0)
        found: list[Tensor] = []
        hook = indexer.scorer.register_forward_hook(lambda module, args, scores: found.append(scores))
        self.run.choose(*call, _AllEntries(keys.entries.squeeze(1)), 0)
        hook.remove()
        scores = step.of_all_ranks(found[0].squeeze(1).masked_fill(~seen, float("-inf")))
        of_windows = scores[:, rate - 1 :: rate]
        top = of_windows.topk(min(int(indexer.index_topk), of_windows.shape[1]))
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(1, top.indices * rate + rate - 1, ~top.values.isneginf())
        return made.entries, seen & chosen.gather(1, step.at.clamp(max=scores.shape[1] - 1))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, sinks: Tensor | None, scale: float, softcap: float | None
    ) -> Tensor:
        """Return the attention to keys and values and to the entries of the last call. Collective."""
        assert self.made is not None
        made, self.made = self.made, None
        entries, cuts = made.entries.to(q.dtype).unsqueeze(1), made.plan.cuts
        options = {"scale": scale, "softcap": softcap}
        if not len(entries):
            return self.attention(q, k, v, mask, sinks=sinks, **options)
        if made.indices is None:
            in_row = torch.from_numpy(cuts - cuts[:, :1])
            place = torch.from_numpy(cuts[:, :1]) + torch.arange(int(in_row.max()))
            joint = entries[place.clamp(max=len(entries) - 1).to(q.device)]  # what is beyond a row's is in no document
            mask = replace(mask, joint_cu_seqlens=in_row)
            return self.joint(q, k, v, None, joint, joint, mask, sinks=sinks, **options)
        out, lse = self.attention(q, k, v, mask, return_lse=True, **options)
        spec = AttentionSpec(scale=scale, softcap=softcap)
        more = attend_to_rows(q, entries, made.indices, spec, self.attention.keep)
        outs, lses = (torch.stack(parts) for parts in zip((out, lse), more, strict=True))
        return merge_parts(outs, lses, sinks).to(q.dtype)


class CompressorRun:
    """The forward of a compressor, which is replaced in its modules, over the windows of any tokens."""

    def __init__(self, module: Any) -> None:
        self.rate: int = module.compress_rate
        # Of two series, the first of which is for the next window.
        self.overlap: bool = module.position_bias.shape[-1] > module.head_dim
        self.windows = 1 + self.overlap  # of which an entry is made
        self.compress, self.indexer = module.forward, getattr(module, "indexer", None)
        if self.indexer is not None:
            self.choose = self.indexer.forward
            self.indexer.forward = lambda x, *_: x.new_empty(*x.shape[:2], 0, dtype=torch.int64)  # chooses none

    def entries(self, call: Sequence[Tensor], plan: Windows, channel: Channel, keep: Keep) -> Entries:
        """Return the entries of all tokens. Collective.

        call: hidden states (B, S, X), residuals of queries (B, S, Y), and positions in documents (B, S).
        """
        rows, tokens = call[0].shape[:2]
        flat = [x.expand(rows, *x.shape[1:]).flatten(0, 1).unsqueeze(0) for x in call]
        made = _WholeWindows(plan, self.overlap, channel, keep)
        self.compress(*flat, made, 0)
        if self.indexer is None:
            return Entries(made.entries, plan, None, (made,))
        with torch.no_grad():
            keys = _WholeWindows(plan, self.overlap, channel, compute_now)
            indices = keep(("indices", call[0].shape), lambda: (self._indices(flat, keys),))[0]
        return Entries(made.entries, plan, indices.unflatten(0, (rows, tokens)), (made, keys))

    def _indices(self, flat: Sequence[Tensor], keys: _WholeWindows) -> Tensor:
        """Return the entries (B * S, k) that the indexer chooses for each query."""
        indexer: Any = self.indexer
        self.choose(*flat, keys, 0)
        cuts = keys.plan.cuts
        most = min(int(indexer.index_topk), int((cuts[:, 1:] - cuts[:, :-1]).max()))
        indices = flat[0].new_full((flat[0].shape[1], most), -1, dtype=torch.int32)
        for row, document, begin, end in keys.plan.runs:
            first, last = cuts[row, document : document + 2].tolist()
            entries = _AllEntries(keys.entries[first:last].unsqueeze(0))
            for part in token_tiles(end - begin, (last - first) * indexer.num_heads) if last > first else ():
                own = slice(begin + part.start, begin + part.stop)
                chosen = self.choose(*(x[:, own] for x in flat), entries, 0)[0]
                indices[own, : chosen.shape[-1]] = torch.where(chosen >= 0, chosen + first, -1).int()
        return indices


class _Layer:
    """A layer of a cache, and the cache that has only this one, as compressors take both."""

    @property
    def layers(self) -> tuple[_Layer]:
        return (self,)

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        return None, None


class _WholeWindows(_Layer):
    """A layer that gives a compressor the tokens of a rank's windows, and keeps the entries of all ranks. transformers
    takes every whole window for one that follows the one before, which is true of those that overlap: an empty one,
    whose first series has no weight, is at the start of a document. Their entries are left out."""

    tokens: Tensor
    entries: Tensor

    def __init__(self, plan: Windows, overlap: bool, channel: Channel, keep: Keep) -> None:
        self.plan, self.overlap, self._on = plan, overlap, (channel, keep)

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.tokens = torch.cat((kv, gate), -1)
        kv, gate = Reshard.apply(self.tokens, self.plan.tokens, *self._on).chunk(2, -1)
        return kv, _without(gate, self.plan.empty) if self.overlap else gate, self.plan.shifts

    def update_compressor_states(self, name: str, entries: Tensor) -> Tensor:
        """Return one of them: what the module makes of them is not used."""
        own = entries.index_select(1, self.plan.own)
        self.entries = Reshard.apply(own, self.plan.entries, *self._on).squeeze(0)
        return entries[:, :1]


def _without(gate: Tensor, empty: Tensor) -> Tensor:
    """Return the gates of two series, (1, n, X), in which the first has no weight for tokens that are `empty` (n,)."""
    first, second = gate.chunk(2, -1)
    return torch.cat((first.masked_fill(empty.unsqueeze(-1), float("-inf")), second), -1)


class _LastWindows(_Layer):
    """A layer that gives a compressor the last windows of each sequence, up to a new token, and keeps their entries:
    they are whole where it is the last of a window, and are not read elsewhere."""

    entries: Tensor

    def __init__(self, step: DecodeStep, key: Any, run: CompressorRun) -> None:
        self.step, self.key, self.run = step, key, run

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        at, (rate, windows), tokens = self.step.positions, (self.run.rate, self.run.windows), torch.cat((kv, gate), -1)
        state = self.step.cache.state(self.key, (windows * rate, tokens.shape[-1]), tokens.dtype)
        slots = torch.arange(len(at), device=at.device)
        state[slots, at % state.shape[1]] = tokens[0]
        numbers = (at // rate).unsqueeze(1) + torch.arange(1 - windows, 1, device=at.device)
        last = state.unflatten(1, (windows, rate))[slots.unsqueeze(1), numbers % windows]
        kv, gate = last.flatten(0, 2).unsqueeze(0).chunk(2, -1)
        shifts = (numbers.flatten() - torch.arange(numbers.numel(), device=at.device)) * rate
        return kv, _without(gate, (numbers < 0).flatten().repeat_interleave(rate)) if windows > 1 else gate, shifts

    def update_compressor_states(self, name: str, entries: Tensor) -> Tensor:
        own = entries[0, self.run.windows - 1 :: self.run.windows]
        (self.entries,) = self.step.store(self.key, own[:, None, None])
        return entries[:, :1]


@dataclass(frozen=True)
class _AllEntries(_Layer):
    """A layer that has all entries (1, entries, D) of a document already."""

    entries: Tensor

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        return kv[:, :0], gate[:, :0], 0

    def update_compressor_states(self, name: str, entries: Tensor) -> Tensor:
        return self.entries
