"""What an attention call computes: the mask and the numbers, validated once, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

Documents = tuple[int, ...]


@dataclass(frozen=True)
class AttentionSpec:
    """The mask and the score function of one attention call, in global positions.

    Query position i sees key position j of the same document iff j <= i (where `causal`),
    i - j <= window[0] and j - i <= window[1] (where not -1).

    Attributes:
        causal: hide the future.
        window: (left, right) reach in tokens, -1 for no limit; (W - 1, 0) is a causal window of W tokens.
        scale: factor on the scores; None for 1 / sqrt(head_dim).
        softcap: scores become softcap * tanh(scores / softcap); None for none.
        documents: ascending borders of the packed documents (cu_seqlens), one tuple for every row of the
            batch or one tuple per row. None for one document a row. Tokens behind the last border belong to
            no document: they see nothing and nothing sees them, and their output and gradients are zero.

    Raises:
        ValueError: naming every violation.
    """

    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float | None = None
    documents: tuple[Documents, ...] | None = None

    def __post_init__(self) -> None:
        violations = []
        if len(self.window) != 2 or any(reach < -1 for reach in self.window):
            violations.append(f"window={self.window} must be (left, right), each a number of tokens or -1 for no limit")
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            violations.append(f"scale={self.scale} must be a positive number; None is 1 / sqrt(head_dim)")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            violations.append(f"softcap={self.softcap} must be a positive number; None turns it off")
        for borders in self.documents or ():
            ascending = all(a <= b for a, b in pairwise(borders))
            if len(borders) < 2 or borders[0] != 0 or not ascending:
                shown = f"{borders[:8]}{'...' if len(borders) > 8 else ''}"
                violations.append(f"cu_seqlens={shown} must start at 0, ascend, and hold at least two borders")
        if violations:
            raise ValueError("; ".join(violations))

    def document_violation(self, batch: int, seq_len: int) -> str | None:
        """Why the documents do not fit `batch` rows of `seq_len` tokens, or None."""
        if self.documents is None:
            return None
        if len(self.documents) not in (1, batch):
            return (
                f"cu_seqlens holds {len(self.documents)} rows for a batch of {batch}: "
                f"give one row for all, or {batch} rows padded by repeating the last border"
            )
        last = max(borders[-1] for borders in self.documents)
        if last > seq_len:
            return (
                f"cu_seqlens ends at {last}, behind the {seq_len} tokens of a row: borders are global positions "
                f"within a row; for different documents per row give a (batch, documents + 1) tensor"
            )
        return None

    def row_documents(self, row: int, seq_len: int) -> Documents:
        """The borders of one row of the batch."""
        if self.documents is None:
            return (0, seq_len)
        return self.documents[row if len(self.documents) > 1 else 0]

    def difference_range(self) -> tuple[int | None, int | None]:
        """(lowest, highest) visible `query position - key position`, None for no limit."""
        left, right = self.window
        lowest = None if right < 0 else -right
        if self.causal:
            lowest = 0
        return lowest, None if left < 0 else left

    def score_scale(self, head_dim: int) -> float:
        """The factor on the scores for heads of `head_dim`."""
        return self.scale if self.scale is not None else 1 / math.sqrt(head_dim)
