"""Decoding attention: one new token per sequence over a KV cache that is sharded along the sequence.

    prefill    each rank caches the keys and values of its own tokens, all heads
    decode     ranks take turns caching the new token; then, on every rank,
                   its queries over the rank's own keys -> partial (out, lse)
                   | all-gather
                   merged by lse in rank order: bitwise identical on every rank

Where an indexer chooses the keys, ranks also cache what it scores them by; the largest scores are found among those of
all ranks (`DecodeStep.of_all_ranks`), and each rank attends to the chosen keys that it has.

Ranks split the keys as flash decoding splits them into blocks (Dao et al. 2023, "Flash-Decoding for long-context
inference"). So does each GPU where a kernel, which gives one multiprocessor all keys of a slot and KV head, would leave
most of them idle. Shapes depend only on the number of slots and on how much of the cache is read.

B slots with one sequence each; R rows of a prefill, S tokens per row of a rank; N query heads, K KV heads, G = N / K;
H head dim, V head dim of the values; C capacity of a rank in tokens per sequence, L entries of them that are read; T
tokens of the longest sequence; k keys that are chosen; P parts of the keys.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .accumulate import accumulate_dtype
from .comm import gather_rows

aten = torch.ops.aten

_FREE = torch.iinfo(torch.int64).max  # position of an empty entry: after every query, so never visible
_PART = 256  # keys of a part, at least: two tiles of the kernel
_TILE = 64  # queries of a block of threads of the kernel


@dataclass(frozen=True, eq=False)
class KVCache:
    """KV cache of one rank. Layers may differ in their KV heads and head dims.

    Layers without keys keep a state of fixed size per sequence, in `states`.

    Attributes:
        positions: (B, C) global positions of the tokens, in any order; empty entries have the largest int64.
        layers: keys (B, K, C, H) and values (B, K, C, V) of each layer that has stored any, by whatever names it alone,
            or only the keys of an indexer: heads before tokens, so that any range of tokens is a batch of matrices.
        states: (B, ...) by whatever names them; zero for a sequence without tokens.
    """

    positions: Tensor
    layers: dict[Hashable, tuple[Tensor, ...]] = field(default_factory=dict)
    states: dict[Hashable, Tensor] = field(default_factory=dict)

    @staticmethod
    def allocate(slots: int, capacity: int, device: torch.device) -> KVCache:
        """Make an empty cache for `slots` sequences of at most `capacity` tokens on this rank."""
        return KVCache(torch.full((slots, capacity), _FREE, device=device))

    def layer(self, layer: Hashable, *tokens_RSKH: Tensor) -> tuple[Tensor, ...]:
        """Return a layer's cached keys and values; the first call allocates them for tokens like these."""
        if layer not in self.layers:
            slots, capacity = self.positions.shape
            # Zeros, because a zero weight times uninitialised memory could be nan.
            self.layers[layer] = tuple(x.new_zeros(slots, x.shape[2], capacity, x.shape[3]) for x in tokens_RSKH)
        return self.layers[layer]

    def state(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a state (B, *shape); the first call makes it, zero."""
        if name not in self.states:
            slots = len(self.positions)
            self.states[name] = torch.zeros(slots, *shape, dtype=dtype, device=self.positions.device)
        return self.states[name]

    @property
    def tensors(self) -> list[Tensor]:
        """Positions, keys, values and states."""
        return [self.positions, *(x for stored in self.layers.values() for x in stored), *self.states.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states."""
        return sum(x.nbytes for x in self.tensors[1:])

    def clear(self, slots: Tensor) -> None:
        """Drop the sequences in these slots."""
        self.positions[slots] = _FREE
        for state in self.states.values():
            state[slots] = 0


class Prefill:
    """A forward over whole prompts that fills the cache. No dataclass, which FSDP2 would copy for each layer.

    Attributes:
        positions: (S,) global positions of this rank's tokens, the same for every row.
        slots, rows: (sequences,) slot slots[i] gets the keys and values of row rows[i]; a row may fill several slots.
        lengths: (sequences,) length of each sequence over all ranks; later tokens are padding.
    """

    def __init__(self, cache: KVCache, positions: Tensor, slots: Tensor, rows: Tensor, lengths: Tensor) -> None:
        self.cache, self.positions, self.slots, self.rows, self.lengths = cache, positions, slots, rows, lengths
        real = positions < lengths.unsqueeze(1)
        cache.positions[slots, : positions.numel()] = positions.where(real, _FREE)

    @cached_property
    def row_lengths(self) -> Tensor:
        """Length over all ranks of the sequence in each row, (R,)."""
        rows = int(self.rows.max()) + 1
        return self.lengths.new_zeros(rows).index_copy_(0, self.rows, self.lengths)

    def store(self, layer: Hashable, *tokens_RSKH: Tensor) -> None:
        """Cache a layer's keys and values, with rotary embedding already applied."""
        for cached, x in zip(self.cache.layer(layer, *tokens_RSKH), tokens_RSKH, strict=True):
            cached[self.slots, :, : x.shape[1]] = x.transpose(1, 2)[self.rows]


class DecodeStep:
    """One forward of one token per slot, with the same tokens on every rank of the group.

    Args:
        positions: (B,) global positions of the tokens.
        places: (B,) index in C at which this rank would cache each token.
        own: (B,) bool, the tokens that this rank does cache; None for all.
        length: number of entries of C to read; entries beyond must be empty in every slot.
        tokens: of the longest sequence, over all ranks; needed where an indexer chooses keys.
        group: the ranks that share the sequences; None for a single rank.

    Attributes:
        attended: the layers that have attended.
    """

    def __init__(
        self,
        cache: KVCache,
        positions: Tensor,
        places: Tensor,
        own: Tensor | None,
        *,
        length: int,
        group: dist.ProcessGroup | None,
        tokens: int = 0,
    ) -> None:
        self.cache, self.group, self.attended, self.tokens = cache, group, 0, tokens
        self.positions, self._length, self._places, self._own = positions, length, places, own
        self._entries: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._masks: dict[tuple[int | None, ...], tuple[Tensor, Tensor]] = {}
        at_B1 = places.unsqueeze(1)
        cached = positions if own is None else positions.where(own, cache.positions.gather(1, at_B1).squeeze(1))
        cache.positions.scatter_(1, at_B1, cached.unsqueeze(1))

    def attend(
        self,
        layer: Hashable,
        q_B1NH: Tensor,
        k_B1KH: Tensor,
        v_B1KV: Tensor | int,
        *,
        scale: float | None,
        window: int | None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        indices: Tensor | None = None,
        more: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Cache the new keys and values, then attend over the keys of all ranks. Collective over the group.

        Args:
            v_B1KV: the values, or their head dim if they are the beginning of the keys, as in latent attention.
            scale: factor on the scores; None for 1 / sqrt(H).
            window: a token attends to itself and the window - 1 tokens before it; None for no limit.
            chunk: a token attends to the tokens of its chunk of so many, counted from position 0; None for no chunks.
            softcap: scores become softcap * tanh(scores / softcap); None disables it.
            sinks: (N,) logits that join each softmax without a value, the same on every rank.
            indices: (B, 1, k) positions that each token attends to, if it sees them, or (B, 1, K, k) for each KV head,
                -1 for none, what is repeated counts once; the same on every rank.
            more: keys (B, K, M, H) of this rank that are also values, and which of them each token sees, (B, M).

        Returns:
            (B, 1, N, V) in q's dtype, bitwise identical on every rank; without meaning, but finite, for an empty slot.
        """
        self.attended += 1
        slots, _, heads, head_dim = q_B1NH.shape
        k_BKLH, *values = self.store(layer, k_B1KH, *([] if isinstance(v_B1KV, int) else [v_B1KV]))
        v_BKLV = k_BKLH[..., :v_B1KV] if isinstance(v_B1KV, int) else values[0]
        # The queries of one KV head form one matrix, so no key is repeated.
        q_BKGH = q_B1NH.reshape(slots, k_B1KH.shape[2], -1, head_dim)
        seen = None
        if more is not None:
            k_BKLH, v_BKLV = (torch.cat((x, more[0].to(x.dtype)), 2) for x in (k_BKLH, v_BKLV))
            seen = torch.cat((self.seen(window, chunk), more[1]), 1).unsqueeze(1)
        elif indices is not None:
            k_BKLH, v_BKLV, at = self._chosen(k_BKLH, v_BKLV, indices.flatten(1, -2).long())
            seen = self.seen(window, chunk, at)
        parts = key_parts(q_BKGH, k_BKLH.shape[2]) if softcap is None else 1  # with one, products would copy the parts
        mask, blind = self._mask(window, chunk, q_B1NH.dtype, parts, q_BKGH.shape[1], seen)
        # Kernels take parts as heads, and KV heads as slots: both are views of the cache.
        q = q_BKGH.flatten(0, 1).unsqueeze(1).expand(-1, parts, -1, -1)
        k, v = (_in_parts(x, parts).mT.flatten(0, 1) for x in (k_BKLH, v_BKLV))
        out, lse = partial_attention(q, k, v, mask, scale, softcap)
        if parts > 1 or self.group is not None or sinks is not None:  # else nobody reads it
            lse = lse.masked_fill(blind, float("-inf"))
        out, lse = (x.unflatten(0, (slots, -1)).movedim(2, 0) for x in (out, lse))
        if self.group is not None:
            if parts > 1:
                out, lse = merge_parts(out, lse).to(out.dtype).unsqueeze(0), lse.logsumexp(0, keepdim=True)
            out, lse = _gather(out[0], lse[0], self.group)
        if len(out) > 1 or sinks is not None:
            out = merge_parts(out, lse, None if sinks is None else sinks.reshape(q_BKGH.shape[1:3]))
        return out.reshape(slots, 1, heads, -1).to(q_B1NH.dtype)

    def store(self, layer: Hashable, *new_B1KH: Tensor) -> tuple[Tensor, ...]:
        """Cache a layer's new keys and values; return those of all entries that are read."""
        stored = self.cache.layer(layer, *new_B1KH)
        for cached, new in zip(stored, new_B1KH, strict=True):
            self._store(cached, new)
        return tuple(cached[:, :, : self._length] for cached in stored)

    @property
    def at(self) -> Tensor:
        """Positions of the tokens whose keys are read, (B, L), the largest int64 for none."""
        return self.cache.positions[:, : self._length]

    def seen(self, window: int | None = None, chunk: int | None = None, at: Tensor | None = None) -> Tensor:
        """Return which keys the tokens see: those that are read (B, L), or that are `at` these positions."""
        at = self.at if at is None else at
        query = self.positions.view(-1, *[1] * (at.dim() - 1))
        seen = at <= query
        if window is not None:
            seen &= at > query - window
        if chunk is not None:
            seen &= at >= query - query % chunk
        return seen

    def of_all_ranks(self, scores_BxL: Tensor) -> Tensor:
        """Return the scores (B, ..., T) of all positions from those of the keys that this rank reads, -inf for
        positions without a key. Collective over the group: it reduces 4 bytes for each score."""
        at = self.at.clamp(max=self.tokens)  # empty entries are cut off
        at = at.view(len(at), *[1] * (scores_BxL.dim() - 2), -1).expand_as(scores_BxL)
        scores = scores_BxL.new_full((*at.shape[:-1], self.tokens + 1), float("-inf")).scatter_(-1, at, scores_BxL)
        scores = scores[..., : self.tokens].contiguous()
        if self.group is not None:
            dist.all_reduce(scores, dist.ReduceOp.MAX, group=self.group)
        return scores

    @cached_property
    def _entry_of(self) -> Tensor:
        """The entry of each position on this rank, (B, T + 1), -1 for none."""
        at = self.at.clamp(max=self.tokens)
        entries = torch.arange(self._length, device=at.device).expand_as(at)
        table = at.new_full((len(at), self.tokens + 1), -1).scatter_(1, at, entries)
        table[:, self.tokens] = -1
        return table

    def _chosen(self, k_BKLH: Tensor, v_BKLV: Tensor, indices_BKk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys and values at these positions, of each KV head or (B, 1, k) of all, and the positions, after
        all tokens where no key is here."""
        indices_BKk = indices_BKk.sort(-1).values
        repeated = pad(indices_BKk[..., 1:] == indices_BKk[..., :-1], (1, 0))
        known = indices_BKk.clamp(max=self.tokens).where((indices_BKk >= 0) & ~repeated, self.tokens)
        entries = self._entry_of.gather(1, known.flatten(1)).view_as(known)
        rows = entries.clamp(min=0).unsqueeze(-1)
        keys, values = (x.take_along_dim(rows, 2) for x in (k_BKLH, v_BKLV))
        return keys, values, indices_BKk.masked_fill(entries < 0, _FREE)

    def _store(self, cached_BKCH: Tensor, new_B1KH: Tensor) -> None:
        flat, new = cached_BKCH.view(-1, cached_BKCH.shape[-1]), new_B1KH.reshape(-1, new_B1KH.shape[-1])
        _, kv_heads, capacity, _ = cached_BKCH.shape
        if kv_heads not in self._entries:  # of the flattened (B * K * C) entries, those of the new tokens
            starts = torch.arange(0, len(flat), capacity, device=self._places.device)
            own = None if self._own is None else self._own.repeat_interleave(kv_heads).unsqueeze(1)
            self._entries[kv_heads] = starts + self._places.repeat_interleave(kv_heads), own
        entries, own = self._entries[kv_heads]
        # Entries of other ranks are rewritten unchanged, so that shapes do not depend on who owns which token.
        new = new if own is None else new.where(own, flat[entries])
        flat.index_copy_(0, entries, new)

    def _mask(
        self, window: int | None, chunk: int | None, dtype: torch.dtype, parts: int, heads: int, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return `score_mask` of parts of the keys, (B * heads, P, L / P), of which one shows each key that is `seen`:
        None for what the tokens see, which is cached for all layers with this mask."""
        key = window, chunk, parts, heads
        if seen is None and key in self._masks:
            return self._masks[key]
        seen_BKL = self.seen(window, chunk).unsqueeze(1) if seen is None else seen
        shown = _in_parts(seen_BKL, parts).expand(-1, heads, -1, -1).clone().flatten(0, 1)
        shown[:, :-1, seen_BKL.shape[2] // parts :].fill_(False)
        masks = score_mask(shown, dtype)
        return masks if seen is not None else self._masks.setdefault(key, masks)


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; 0 for another device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def key_parts(q_BKGH: Tensor, keys: int) -> int:
    """Return into how many parts the keys of every slot and KV head are split, which shapes and the device decide: as
    many as give each multiprocessor two blocks of threads, one of which loads keys while the other one computes."""
    slots, heads, queries, _ = q_BKGH.shape
    blocks = slots * heads * -(-queries // _TILE)
    return max(1, min(2 * multiprocessors(q_BKGH.device) // blocks, keys // _PART))


def _in_parts(x_BKL: Tensor, parts: int) -> Tensor:
    """Return a view (B, K, P, ..., L / P) of parts of the keys. All have one length and begin at equal distances: where
    `parts` does not divide L, each overlaps with the next one by the remainder."""
    step, rest = divmod(x_BKL.shape[2], parts)
    return x_BKL.unfold(2, step + rest, step)


def score_mask(seen_BKL: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what is added to scores, (B, K, 1, L), 0 for visible keys and -inf for others, and (B, K, 1), True where
    no key is visible. There all of them are: fused kernels differ in what they return for a row without a key. K is 1
    for what all KV heads see."""
    blind_BK1 = ~seen_BKL.any(-1, keepdim=True)
    mask = torch.where(seen_BKL | blind_BK1, 0.0, float("-inf")).to(dtype)
    # The CUDA kernel needs rows that start at multiples of 16 bytes.
    aligned = pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]
    return aligned.unsqueeze(2), blind_BK1


def partial_attention(
    q_BKGH: Tensor, k_BKLH: Tensor, v_BKLV: Tensor, mask_B11L: Tensor, scale: float | None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return out (B, K, G, V) and lse (B, K, G), in fp32 or fp64, over these keys; every row must see one.

    Fused kernels read the cache in its own dtype. Without one for the call, scores exist in fp32.
    """
    scale = q_BKGH.shape[-1] ** -0.5 if scale is None else scale
    if softcap is None and q_BKGH.device.type == "cuda" and q_BKGH.dtype != torch.float64:
        bias = mask_B11L.expand(*q_BKGH.shape[:3], -1)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q_BKGH, k_BKLH, v_BKLV, bias, True, scale=scale)
        return out, lse[:, :, : q_BKGH.shape[2]]
    if softcap is None and q_BKGH.device.type == "cpu" and q_BKGH.shape[-1] == v_BKLV.shape[-1]:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q_BKGH, k_BKLH, v_BKLV, attn_mask=mask_B11L, scale=scale
        )
    scores = _product(q_BKGH, k_BKLH.mT) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask_B11L
    lse = scores.logsumexp(-1)
    return _product((scores - lse.unsqueeze(-1)).exp_().to(v_BKLV.dtype), v_BKLV), lse


def _product(a_BKGX: Tensor, b_BKXY: Tensor) -> Tensor:
    """Return a @ b in fp32 or fp64; on a GPU without a copy of `b` in it."""
    dtype = accumulate_dtype(a_BKGX.dtype)
    if a_BKGX.dtype == dtype or a_BKGX.device.type != "cuda":
        return a_BKGX.to(dtype) @ b_BKXY.to(dtype)
    return torch.bmm(a_BKGX.flatten(0, 1), b_BKXY.flatten(0, 1), out_dtype=dtype).unflatten(0, a_BKGX.shape[:2])


def merge_parts(out_PBKGV: Tensor, lse_PBKG: Tensor, sinks_KG: Tensor | None = None) -> Tensor:
    """Merge the results over P parts of the keys into (B, K, G, V); zero if no key is visible."""
    if sinks_KG is not None:
        lse_PBKG = torch.cat((lse_PBKG, sinks_KG.to(lse_PBKG.dtype).expand(1, *lse_PBKG.shape[1:])))
    weights = lse_PBKG.softmax(0).nan_to_num(nan=0.0)[: len(out_PBKGV)]  # nan where all are -inf
    return (weights.unsqueeze(-1) * out_PBKGV).sum(0)


def _gather(out_BKGV: Tensor, lse_BKG: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """All-gather out and lse in one message, in rank order."""
    mine = torch.cat((out_BKGV, lse_BKG.unsqueeze(-1).view(out_BKGV.dtype)), -1)  # fp32 as two half-precision numbers
    every = gather_rows(mine, group).unflatten(0, (group.size(), -1))
    return every[..., : out_BKGV.shape[-1]], every[..., out_BKGV.shape[-1] :].contiguous().view(lse_BKG.dtype)[..., 0]
