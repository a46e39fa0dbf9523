"""Which global positions each sequence-parallel rank owns.

    8 tokens a rank pair, ring = 2:      rank 0                rank 1
      contiguous                         0 1 2 3               4 5 6 7
      zigzag   (balances causal)         0 1 6 7               2 3 4 5
      striped  (balances causal)         0 2 4 6               1 3 5 7

A ring rank's tokens are a few ascending spans. Ulysses rank u of a ring rank holds the u-th equal part of them, in
order, so that the all-to-all rebuilds the ring rank's sequence by concatenation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

LayoutKind = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(LayoutKind)


@dataclass(frozen=True)
class Span:
    """Global positions start, start + step, ... (`length` of them)."""

    start: int
    length: int
    step: int = 1

    def index_range(self, lower: int, upper: int) -> tuple[int, int]:
        """The indices into this span, as a half-open range, whose positions lie in [lower, upper)."""
        first = -((self.start - lower) // self.step)
        last = -((self.start - upper) // self.step)
        return max(0, first), min(self.length, last)


@dataclass(frozen=True)
class SequenceLayout:
    """How `seq_len` global tokens are divided over a ring x ulysses grid of ranks.

    Zigzag (USP paper, Algorithm 2) cuts the sequence into 2 * ring chunks and gives ring rank r the chunks r and
    2 * ring - 1 - r; striped gives it every ring-th token from r.

    Raises:
        ValueError: for an unknown kind, a degree below 1, or a length that the layout cannot divide, naming the
            nearest lengths that it can.
    """

    kind: str
    seq_len: int
    ring: int = 1
    ulysses: int = 1

    def __post_init__(self) -> None:
        if self.kind not in LAYOUTS:
            raise ValueError(f"layout={self.kind!r} must be one of {', '.join(LAYOUTS)}")
        if min(self.ring, self.ulysses, self.seq_len) < 1:
            raise ValueError(
                f"seq_len={self.seq_len}, ring={self.ring} and ulysses={self.ulysses} must each be at least 1"
            )
        multiple = self.multiple_of(self.kind, self.ring, self.ulysses)
        if self.seq_len % multiple:
            below = self.seq_len // multiple * multiple
            nearest = " or ".join(str(n) for n in (below, below + multiple) if n)
            raise ValueError(
                f"seq_len={self.seq_len} cannot be divided by layout={self.kind!r} over ring={self.ring} x "
                f"ulysses={self.ulysses}: it must be a multiple of {multiple}; use {nearest}, or pad"
            )

    @staticmethod
    def multiple_of(kind: str, ring: int, ulysses: int) -> int:
        """The number that must divide the global sequence length."""
        chunks_per_rank = 2 if kind == "zigzag" and ring > 1 else 1
        return ring * math.lcm(chunks_per_rank, ulysses)

    @property
    def ring_len(self) -> int:
        """Tokens of a ring rank, which its ulysses ranks share."""
        return self.seq_len // self.ring

    @property
    def local_len(self) -> int:
        """Tokens of one rank."""
        return self.ring_len // self.ulysses

    def ring_spans(self, ring_rank: int) -> tuple[Span, ...]:
        """The positions of a ring rank, ascending: what it attends with after the Ulysses all-to-all."""
        n = self.ring_len
        if self.kind == "striped":
            return (Span(ring_rank, n, self.ring),)
        if self.kind == "contiguous" or self.ring == 1:
            return (Span(ring_rank * n, n),)
        half, mirrored = n // 2, 2 * self.ring - 1 - ring_rank
        if mirrored == ring_rank + 1:  # the last rank's two chunks touch
            return (Span(ring_rank * half, n),)
        return (Span(ring_rank * half, half), Span(mirrored * half, half))

    def positions(self, ring_rank: int, ulysses_rank: int = 0) -> torch.Tensor:
        """Global positions of one rank's tokens in local order, int64 of shape (local_len,)."""
        parts = [torch.arange(s.start, s.start + s.length * s.step, s.step) for s in self.ring_spans(ring_rank)]
        start = ulysses_rank * self.local_len
        return torch.cat(parts)[start : start + self.local_len]
