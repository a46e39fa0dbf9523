"""Decoding attention: one new token per sequence over a KV cache that is sharded along the sequence.

    prefill    each rank caches the keys and values of its own tokens, all heads
    decode     ranks take turns caching the new token; then, on every rank,
                   its queries over the rank's own keys -> partial (out, lse)
                   | all-gather
                   merged by lse in rank order: bitwise identical on every rank

Ranks split the keys as flash decoding splits them into blocks (Dao et al. 2023, "Flash-Decoding for long-context
inference"). Shapes depend only on the number of slots and on how much of the cache is read.

B slots with one sequence each; R rows of a prefill, S tokens per row of a rank; N query heads, K KV heads, G = N / K;
H head dim; C capacity of a rank in tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .accumulate import accumulate_dtype

_FREE = torch.iinfo(torch.int64).max  # position of an empty entry: after every query, so never visible


@dataclass(frozen=True, eq=False)
class KVCache:
    """KV cache of one rank.

    Attributes:
        keys, values: by layer, (B, K, C, H): heads before tokens, so that any range of tokens is a batch of matrices.
        positions: (B, C) global positions of the tokens, in any order; empty entries have the largest int64.
        starts: (B, K) offset of each slot's and head's tokens in a layer's flattened (B * K * C) entries.
    """

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    positions: Tensor
    starts: Tensor

    @staticmethod
    def allocate(
        layers: Iterable[int],
        slots: int,
        capacity: int,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Allocate an empty cache for `slots` sequences of at most `capacity` tokens on this rank."""
        # Zeros, because a zero weight times uninitialised memory could be nan.
        shape = (slots, kv_heads, capacity, head_dim)
        keys = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in layers}
        values = {layer: torch.zeros_like(x) for layer, x in keys.items()}
        starts = torch.arange(0, slots * kv_heads * capacity, capacity, device=device).view(slots, kv_heads)
        return KVCache(keys, values, torch.full((slots, capacity), _FREE, device=device), starts)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.nbytes for layers in (self.keys, self.values) for x in layers.values())

    def clear(self, slots: Tensor) -> None:
        """Drop the sequences in these slots."""
        self.positions[slots] = _FREE


@dataclass(frozen=True, eq=False)
class Prefill:
    """A forward over whole prompts that fills the cache.

    Attributes:
        positions: (S,) global positions of this rank's tokens, the same for every row.
        slots, rows: (sequences,) slot slots[i] gets the keys and values of row rows[i]; a row may fill several slots.
        lengths: (sequences,) length of each sequence over all ranks; later tokens are padding.
    """

    cache: KVCache
    positions: Tensor
    slots: Tensor
    rows: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        real = self.positions < self.lengths.unsqueeze(1)
        self.cache.positions[self.slots, : self.positions.numel()] = self.positions.where(real, _FREE)

    def store(self, layer: int, k_RSKH: Tensor, v_RSKH: Tensor) -> None:
        """Cache a layer's keys and values, with rotary embedding already applied."""
        for cached, x in ((self.cache.keys[layer], k_RSKH), (self.cache.values[layer], v_RSKH)):
            cached[self.slots, :, : x.shape[1]] = x.transpose(1, 2)[self.rows]


class DecodeStep:
    """One forward of one token per slot, with the same tokens on every rank of the group.

    Args:
        positions: (B,) global positions of the tokens.
        places: (B,) index in C at which this rank would cache each token.
        own: (B,) bool, the tokens that this rank does cache; None for all.
        length: number of entries of C to read; entries beyond must be empty in every slot.
        group: the ranks that share the sequences; None for a single rank.
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
    ) -> None:
        self._cache, self._positions, self._length, self._group = cache, positions, length, group
        self._places = (cache.starts + places.unsqueeze(1)).flatten()  # index into a layer's flattened entries
        self._own = None if own is None else own.repeat_interleave(cache.starts.shape[1]).unsqueeze(1)
        self._masks: dict[int | None, Tensor] = {}
        at_B1 = places.unsqueeze(1)
        cached = positions if own is None else positions.where(own, cache.positions.gather(1, at_B1).squeeze(1))
        cache.positions.scatter_(1, at_B1, cached.unsqueeze(1))

    def attend(
        self, layer: int, q_B1NH: Tensor, k_B1KH: Tensor, v_B1KH: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Cache the new keys and values, then attend over the keys of all ranks. Collective over the group.

        Args:
            scale: factor on the scores; None for 1 / sqrt(H).
            window: a token attends to itself and the window - 1 tokens before it; None for no limit.

        Returns:
            (B, 1, N, H) in q's dtype, bitwise identical on every rank; zero for an empty slot.
        """
        slots, _, heads, head_dim = q_B1NH.shape
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        for cached, new in ((keys, k_B1KH), (values, v_B1KH)):
            self._store(cached.view(-1, head_dim), new.reshape(-1, head_dim))
        k_BKLH, v_BKLH = keys[:, :, : self._length], values[:, :, : self._length]
        # The queries of one KV head form one matrix, so no key is repeated.
        q_BKGH = q_B1NH.reshape(slots, k_B1KH.shape[2], -1, head_dim)
        mask = self._mask(window, q_B1NH.dtype)
        if self._group is None:
            out = scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, attn_mask=mask, scale=scale)
        else:
            out = merge_parts(*_gather(*partial_attention(q_BKGH, k_BKLH, v_BKLH, mask, scale), self._group))
        return out.reshape(slots, 1, heads, head_dim).to(q_B1NH.dtype)

    def _store(self, cached: Tensor, new: Tensor) -> None:
        # Entries of other ranks are rewritten unchanged, so that shapes do not depend on who owns which token.
        new = new if self._own is None else new.where(self._own, cached[self._places])
        cached.index_copy_(0, self._places, new)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return (B, 1, 1, L), 0 for visible keys and -inf for others, cached for all layers with this window."""
        if window not in self._masks:
            at, query = self._cache.positions[:, : self._length], self._positions.unsqueeze(1)
            seen = at <= query
            if window is not None:
                seen &= at > query - window
            mask = torch.where(seen, 0.0, float("-inf")).to(dtype)
            self._masks[window] = mask.view(len(at), 1, 1, -1)
        return self._masks[window]


def partial_attention(
    q_BKGH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask_B11L: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return out (B, K, G, H) and lse (B, K, G) over these keys, in fp32 or fp64; 0 and -inf if none is visible."""
    q, k, v = (x.to(accumulate_dtype(x.dtype)) for x in (q_BKGH, k_BKLH, v_BKLH))
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT + mask_B11L
    lse = scores.logsumexp(-1)
    return (scores - _finite(lse).unsqueeze(-1)).exp_() @ v, lse


def merge_parts(out_PBKGH: Tensor, lse_PBKG: Tensor) -> Tensor:
    """Merge the results over P parts of the keys into (B, K, G, H); zero if no key is visible."""
    weights = (lse_PBKG - _finite(lse_PBKG.logsumexp(0))).exp()
    return (weights.unsqueeze(-1) * out_PBKGH).sum(0)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by the lowest finite number: -inf minus that is -inf, whose exp is 0, and not nan."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def _gather(out_BKGH: Tensor, lse_BKG: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """All-gather out and lse in one message, in rank order."""
    mine = torch.cat((out_BKGH, lse_BKG.unsqueeze(-1)), -1)
    every = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather(list(every.unbind()), mine, group=group)
    return every[..., :-1], every[..., -1]
