"""Attention of one new token a sequence over keys and values that stay sharded over the sequence.

    prefill    each rank keeps the keys and values of its own tokens, all heads
    decode     the new token's are kept by one rank, in turn; then on every rank
                   its queries over the rank's own keys -> partial (out, lse)
                   | one all-gather
                   merged by lse in rank order: the same bits on every rank

The split over ranks is that of flash decoding over blocks of keys (Dao et al. 2023, "Flash-Decoding for long-context
inference"). Shapes depend on nothing but the slots and on how much of the cache is read.

B slots, each with one sequence; R rows of a prefill, S a rank's tokens of each; N and K query and KV heads, G = N / K;
H head dim; C the tokens of a sequence that a rank has room for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .accumulate import accumulate_dtype

_FREE = torch.iinfo(torch.int64).max  # the position of a place without a token: ahead of every query


@dataclass(frozen=True, eq=False)
class KVCache:
    """One rank's keys and values.

    Attributes:
        keys, values: by layer, (B, K, C, H): heads before tokens, so that any part of the tokens is a
            batch of matrices.
        positions: (B, C) global positions of the tokens, ascending or not; those without a token are ahead of all.
        starts: (B, K) where the tokens of each slot's heads begin, counted in all of a layer's.
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
        """An empty cache for `slots` sequences of at most `capacity` tokens on this rank."""

        def room() -> dict[int, Tensor]:
            # Zeros, because weights of zero times whatever the memory held could be nan.
            shape = (slots, kv_heads, capacity, head_dim)
            return {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in own}

        own = tuple(layers)
        starts = torch.arange(0, slots * kv_heads * capacity, capacity, device=device).view(slots, kv_heads)
        return KVCache(room(), room(), torch.full((slots, capacity), _FREE, device=device), starts)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.nbytes for layers in (self.keys, self.values) for x in layers.values())

    def clear(self, slots: Tensor) -> None:
        """Forget the sequences in these slots."""
        self.positions[slots] = _FREE


@dataclass(frozen=True, eq=False)
class Prefill:
    """A forward over whole prompts whose keys and values are to be kept.

    Attributes:
        positions: (S,) the global positions of this rank's tokens, the same for every row.
        slots, rows: (sequences,) slot slots[i] gets the keys of row rows[i]; a row may go to several slots.
        lengths: (sequences,) tokens of each sequence over all ranks; what lies behind is padding.
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
        """Keep a layer's keys and values, after their rotary embedding."""
        for kept, x in ((self.cache.keys[layer], k_RSKH), (self.cache.values[layer], v_RSKH)):
            kept[self.slots, :, : x.shape[1]] = x.transpose(1, 2)[self.rows]


class DecodeStep:
    """One forward of a token a slot. Every rank of the group must make it with the same tokens.

    Args:
        positions: (B,) the tokens' global positions.
        places: (B,) where in C this rank would keep them.
        own: (B,) bool, which of them it does keep; None: all.
        length: how much of C is read: what is behind holds no token of any slot.
        group: the ranks that share the sequences, None for a lone one.
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
        self._places = (cache.starts + places.unsqueeze(1)).flatten()  # of a layer's heads one after the other
        self._own = None if own is None else own.repeat_interleave(cache.starts.shape[1]).unsqueeze(1)
        self._masks: dict[int | None, Tensor] = {}
        at_B1 = places.unsqueeze(1)
        kept = positions if own is None else positions.where(own, cache.positions.gather(1, at_B1).squeeze(1))
        cache.positions.scatter_(1, at_B1, kept.unsqueeze(1))

    def attend(
        self, layer: int, q_B1NH: Tensor, k_B1KH: Tensor, v_B1KH: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Keep the new keys and values, and attend over all that the ranks hold. Collective over the group.

        Args:
            scale: factor on the scores; None is 1 / sqrt(H).
            window: a token sees itself and window - 1 tokens before it; None sees all.

        Returns:
            (B, 1, N, H) in q's dtype, the same bits on every rank; zero for a slot without any token.
        """
        slots, _, heads, head_dim = q_B1NH.shape
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        for kept, new in ((keys, k_B1KH), (values, v_B1KH)):
            _put(kept.view(-1, head_dim), self._places, new.reshape(-1, head_dim), self._own)
        k_BKLH, v_BKLH = keys[:, :, : self._length], values[:, :, : self._length]
        # The queries of one KV head are the rows of one matrix: no key is repeated.
        q_BKGH = q_B1NH.reshape(slots, k_B1KH.shape[2], -1, head_dim)
        mask = self._mask(window, q_B1NH.dtype)
        if self._group is None:
            out = scaled_dot_product_attention(q_BKGH, k_BKLH, v_BKLH, attn_mask=mask, scale=scale)
        else:
            out = merge_parts(*_gather(*partial_attention(q_BKGH, k_BKLH, v_BKLH, mask, scale), self._group))
        return out.reshape(slots, 1, heads, head_dim).to(q_B1NH.dtype)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(B, 1, 1, L): 0 for keys that a slot's token sees, else -inf. Made once for all layers with this window."""
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
    """out (B, K, G, H) and lse (B, K, G) over these keys, in fp32 or fp64; 0 and -inf for a row that sees none."""
    q, k, v = (x.to(accumulate_dtype(x.dtype)) for x in (q_BKGH, k_BKLH, v_BKLH))
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.mT + mask_B11L
    lse = scores.logsumexp(-1)
    return (scores - _finite(lse).unsqueeze(-1)).exp_() @ v, lse


def merge_parts(out_PBKGH: Tensor, lse_PBKG: Tensor) -> Tensor:
    """What P parts of the keys make together, (B, K, G, H); zero where all saw none."""
    weights = (lse_PBKG - _finite(lse_PBKG.logsumexp(0))).exp()
    return (weights.unsqueeze(-1) * out_PBKGH).sum(0)


def _finite(lse: Tensor) -> Tensor:
    """-inf minus the lowest number is -inf, whose exp is 0; minus -inf it would be nan."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def _gather(out_BKGH: Tensor, lse_BKG: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Every rank's out and lse, in rank order, in one message."""
    mine = torch.cat((out_BKGH, lse_BKG.unsqueeze(-1)), -1)
    every = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather(list(every.unbind()), mine, group=group)
    return every[..., :-1], every[..., -1]


def _put(kept: Tensor, place: Tensor, new: Tensor, own: Tensor | None) -> None:
    """kept[place] = new where `own`; the rest is written back, so that shapes do not depend on who owns what."""
    kept.index_copy_(0, place, new if own is None else new.where(own, kept[place]))
