"""Dropout of what adapters read, by a hash of the token and the feature instead of a state of a random generator.

A token's number in the run is that of its row times the sequence length, plus its position. So a mask depends on
neither layout nor world size nor the step at which a run is resumed, and recomputation in a backward finds it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from usp.sp.sequence import documents_of
from usp.sp.sp_attention import UnifiedSPAttention

_ELEMENTS_AT_A_TIME = 2**22  # of a mask, whose hash takes 8 bytes for each
_WORD = 2**32


@dataclass
class CurrentTokens:
    """The numbers of the tokens that a layer computes, int64 (B, S); None where it was not told them."""

    numbers: Tensor | None = None


class TokenDropout(nn.Module):
    """Dropout of a linear's input (..., features), whose tokens are those of `tokens` in their order.

    p: probability of an element to become 0; the others are divided by 1 - p.
    seed, name: two linears, or two seeds, have independent masks.
    shard: of its input's features, which of several equal parts this rank has.
    """

    def __init__(self, p: float, seed: int, name: str, tokens: CurrentTokens, shard: int = 0) -> None:
        super().__init__()
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        words = [int.from_bytes(half, "big") for half in (digest[:4], digest[4:])]
        # A tensor, because torch.compile would make another graph for each number.
        self.p, self.key, self.tokens, self.shard = p, torch.tensor(words, device="cpu"), tokens, shard

    def forward(self, x: Tensor) -> Tensor:
        """Raises RuntimeError if the layer was not told the numbers of exactly these tokens."""
        if not self.training:
            return x
        numbers, features = self.tokens.numbers, x.shape[-1]
        if numbers is None or numbers.numel() * features != x.numel():
            raise RuntimeError(f"dropout of x {tuple(x.shape)} needs the first_tokens of all of its tokens")
        dropped = dropout_mask(self.p, self.key, numbers.flatten(), self.shard * features, features)
        return x.masked_fill(dropped.view(x.shape), 0.0) * (1 / (1 - self.p))


def dropout_mask(p: float, key: Tensor, numbers: Tensor, first: int, features: int) -> Tensor:
    """Return which elements are dropped, bool (tokens, features).

    key: two words of 32 bits, int64, on the CPU. numbers: int64 (tokens,). first: number of the first feature.
    """
    high, low = key
    own = torch.arange(first, first + features, device=numbers.device)
    own = _mixed(_signed((own ^ high) % _WORD))
    tokens = _mixed(_mixed(_signed((numbers ^ low) % _WORD)) + _signed((numbers >> 32) % _WORD))
    parts, least = tokens.split(max(1, _ELEMENTS_AT_A_TIME // features)), round(p * _WORD) - _WORD // 2
    return torch.cat([_mixed(part.unsqueeze(1) + own) < least for part in parts])


def _signed(words: Tensor) -> Tensor:
    """Return integers below 2^32 as int32 of the same bits."""
    return torch.where(words < _WORD // 2, words, words - _WORD).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """Return a permutation of all int32 that looks random: the 32-bit mixer with the multipliers 0x7feb352d and
    0x846ca68b of Wellons (2018, "Prospecting for Hash Functions")."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - _WORD)
    return x ^ ((x >> 16) & 0xFFFF)


def tell_tokens(layers: Iterable[nn.Module], tokens: CurrentTokens) -> None:
    """Make layers take `token_numbers` and tell `tokens`, in place; again where they are recomputed. Call it after
    compilation, whose graphs would take what they are told for part of the layer, and before activation checkpointing.
    """
    for layer in layers:
        layer.forward = _telling(layer.forward, tokens)


def _telling(forward: Callable[..., Any], tokens: CurrentTokens) -> Callable[..., Any]:
    def run(*args: Any, token_numbers: Tensor | None = None, **kwargs: Any) -> Any:
        tokens.numbers = token_numbers
        return forward(*args, **kwargs)

    return run


def numbers_of(
    first_tokens: Tensor, local_len: int, attention: UnifiedSPAttention, cu_seqlens: Tensor | None
) -> Tensor:
    """Return the numbers of this rank's tokens, int64 (B, local_len), from that of each row's first token (B,)."""
    axes, seq_len = attention.axes, local_len * attention.ranks
    local = axes.positions(axes.layout(attention.layout, seq_len, documents_of(cu_seqlens))).to(first_tokens.device)
    return first_tokens.unsqueeze(1) + local
