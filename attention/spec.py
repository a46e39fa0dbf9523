"""The specification of an attention call: mask and score function, identical on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

Documents = tuple[int, ...]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Joint:
    """Tokens that every rank holds, such as a text beside the image tokens that ranks share.

    They are tokens of the documents like all others, but without a distance: a window does not limit what they see and
    who sees them.

    Attributes:
        tokens: in each row.
        queries: whether they attend; otherwise they are only keys.
        only: whether there are no other keys.
        front: of a causal mask, whether they precede the other tokens of their document, or follow them.
        documents: cu_seqlens of these tokens, as in `AttentionSpec`; document n joins the sharded document n.
        every: if not 0, each token stands for so many of its document, one after another: queries see it from the last
            of these on.
    """

    tokens: int
    queries: bool = True
    only: bool = False
    front: bool = True
    documents: tuple[Documents, ...] | None = None
    every: int = 0

    @property
    def query_tokens(self) -> int:
        """Number of queries in each row."""
        return self.tokens if self.queries else 0


@dataclass(frozen=True)
class MaskFunction:
    """Which of the pairs that a mask of bands shows are visible.

    Attributes:
        function: of the row, the query head, and the positions of the query and the key, as FlexAttention's mask_mod.
        device: of the tensors that it gets.
        by_row, by_head: whether the row and the head make a difference.
        digest: of all pairs, by which ranks compare it.
        heads: the range of query heads that are of interest, if they differ.
    """

    function: MaskMod = field(repr=False)
    device: torch.device = field(repr=False)
    by_row: bool
    by_head: bool
    digest: str
    heads: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class AttentionSpec:
    """Mask and score function of one attention call, in global positions.

    Query position i attends to key position j of the same document iff j <= i (if `causal`, unless both are in the
    document's prefix), i - j <= window[0] and j - i <= window[1] (unless -1).

    Attributes:
        causal: mask out future positions.
        window: (left, right) reach in tokens, -1 for no limit; (W - 1, 0) is a causal window of W tokens.
        scale: factor on the scores; None for 1 / sqrt(head_dim).
        softcap: scores become softcap * tanh(scores / softcap); None disables it.
        documents: cu_seqlens of the packed documents, one tuple for all rows of the batch or one tuple per row; None
            for one document per row. Tokens past the last boundary belong to no document: they are masked out, and
            their output and gradients are zero.
        prefixes: of a prefix-LM mask (Raffel et al. 2020, arXiv 1910.10683, section 3.2.1), the number of leading
            tokens of each document that attend to each other in both directions, one tuple for all rows or one per
            row; None for no prefix.
        parents: of a prefix tree, for each document the index of an earlier one that it continues, -1 for none, one
            tuple for all rows or one per row. A document's tokens also attend to those of its parent, of the parent's
            parent, and so on, and positions (so also windows) count along this path. Needs `causal`.
        key_documents: of cross attention, whose keys are another sequence, the cu_seqlens of the keys: queries of
            document n attend to keys of document n. None if queries and keys are of the same tokens.
        joint: tokens that every rank holds beside its own; None for none.
        function: what else decides which pairs are visible, if bands cannot say it (tiles.py).

    Raises:
        ValueError: listing every violation.
    """

    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float | None = None
    documents: tuple[Documents, ...] | None = None
    prefixes: tuple[tuple[int, ...], ...] | None = None
    parents: tuple[tuple[int, ...], ...] | None = None
    key_documents: tuple[Documents, ...] | None = None
    joint: Joint | None = None
    function: MaskFunction | None = None

    def __post_init__(self) -> None:
        violations = []
        if len(self.window) != 2 or any(reach < -1 for reach in self.window):
            violations.append(f"window={self.window} must be (left, right), each a number of tokens or -1 for no limit")
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            violations.append(f"scale={self.scale} must be a positive number; None is 1 / sqrt(head_dim)")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            violations.append(f"softcap={self.softcap} must be a positive number; None disables it")
        joint_documents = self.joint and self.joint.documents
        for boundaries in (*(self.documents or ()), *(self.key_documents or ()), *(joint_documents or ())):
            ascending = all(a <= b for a, b in pairwise(boundaries))
            if len(boundaries) < 2 or boundaries[0] != 0 or not ascending:
                shown = f"{boundaries[:8]}{'...' if len(boundaries) > 8 else ''}"
                violations.append(f"cu_seqlens={shown} must start at 0, ascend, and have at least two entries")
        if self.prefixes is not None and not self.causal:
            violations.append("prefix has no effect with causal=False: leave one of them out")
        if any(length < 0 for row in self.prefixes or () for length in row):
            violations.append("prefix must be numbers of tokens of at least 0")
        if self.parents is not None and (not self.causal or self.documents is None):
            violations.append("prefix_tree needs causal=True and cu_seqlens")
        if any(not -1 <= parent < number for row in self.parents or () for number, parent in enumerate(row)):
            violations.append("prefix_tree must have for each document the index of an earlier one, or -1")
        if self.key_documents is not None and (self.causal or self.window != (-1, -1)):
            violations.append(
                "keys of another sequence (k has other tokens than q, or there is cu_seqlens_k) have no position among "
                "the queries: cross attention needs causal=False, and no window"
            )
        if self.joint is not None and (self.prefixes is not None or self.parents is not None):
            violations.append("joint tokens are not supported with prefix or prefix_tree: leave one of them out")
        if self.joint is not None and self.joint.every and (self.joint.only or self.joint.queries or not self.causal):
            violations.append(
                "joint_every says which joint keys precede a query: it needs causal=True, k and v, and no joint_q"
            )
        if violations:
            raise ValueError("; ".join(violations))

    def document_violation(self, batch: int, seq_len: int, key_len: int | None = None) -> str | None:
        """Return why documents, prefixes or parents do not fit `batch` rows of `seq_len` tokens, or None if they do.

        key_len: number of keys of cross attention.
        """
        sides = [("cu_seqlens", self.documents, seq_len)]
        if self.key_documents is not None:
            sides.append(("cu_seqlens_k", self.key_documents, seq_len if key_len is None else key_len))
        if self.joint is not None:
            sides.append(("joint_cu_seqlens", self.joint.documents, self.joint.tokens))
        for name, documents, tokens in sides:
            if documents is not None and len(documents) not in (1, batch):
                return (
                    f"{name} has {len(documents)} rows for a batch of {batch}: "
                    f"pass one row for the whole batch, or {batch} rows padded by repeating the last boundary"
                )
            last = max((boundaries[-1] for boundaries in documents or ()), default=0)
            if last > tokens:
                return (
                    f"{name} ends at {last}, past the {tokens} tokens of a row: boundaries are global positions "
                    f"within a row; for different documents per row pass a (batch, documents + 1) tensor"
                )
        numbers = {name: len(rows[0]) - 1 if rows else 1 for name, rows, _ in sides}
        if len(set(numbers.values())) > 1:
            listed = ", ".join(f"{name} {number}" for name, number in numbers.items())
            return f"documents are paired by their number, which must be the same (1 without boundaries): {listed}"
        if self.parents is not None:
            if len(self.parents) not in (1, batch):
                return f"prefix_tree has {len(self.parents)} rows for a batch of {batch}: pass one row, or {batch}"
            for row in range(batch):
                entries, number = len(self.row_parents(row)), len(self.row_documents(row, seq_len)) - 1
                if entries != number:
                    return f"prefix_tree has {entries} entries for the {number} documents of row {row}"
        return self._prefix_violation(batch, seq_len)

    def _prefix_violation(self, batch: int, seq_len: int) -> str | None:
        if self.prefixes is None:
            return None
        if len(self.prefixes) not in (1, batch):
            return f"prefix has {len(self.prefixes)} rows for a batch of {batch}: pass one row, or {batch}"
        for row in range(batch):
            boundaries, prefixes = self.row_documents(row, seq_len), self.row_prefixes(row)
            lengths = [stop - start for start, stop in pairwise(boundaries)]
            if len(prefixes) != len(lengths):
                return f"prefix has {len(prefixes)} entries for the {len(lengths)} documents of row {row}"
            for number, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
                if prefix > length:
                    return f"prefix of {prefix} tokens in document {number} of row {row}, which has {length}"
        return None

    def row_documents(self, row: int, seq_len: int) -> Documents:
        """Return the document boundaries of one row of the batch."""
        if self.documents is None:
            return (0, seq_len)
        return self.documents[row if len(self.documents) > 1 else 0]

    def row_prefixes(self, row: int) -> tuple[int, ...]:
        """Return the length of each document's prefix in one row of the batch; empty if there are none."""
        if self.prefixes is None:
            return ()
        return self.prefixes[row if len(self.prefixes) > 1 else 0]

    def row_parents(self, row: int) -> tuple[int, ...]:
        """Return the parent of each document in one row of the batch; empty if there is no tree."""
        if self.parents is None:
            return ()
        return self.parents[row if len(self.parents) > 1 else 0]

    def row_depths(self, row: int, seq_len: int) -> list[int]:
        """Return how many tokens precede each document of a row in its ancestors."""
        boundaries = self.row_documents(row, seq_len)
        depths = [0] * (len(boundaries) - 1)
        for number, parent in enumerate(self.row_parents(row)):
            if parent >= 0:
                depths[number] = depths[parent] + boundaries[parent + 1] - boundaries[parent]
        return depths

    @property
    def one_sided(self) -> bool:
        """Whether each token sees all others of its document, or all before it."""
        one_side = self.window[0] == -1 and (self.causal or self.window[1] == -1)
        return one_side and not any(map(any, self.prefixes or ())) and self.function is None

    @property
    def in_intervals(self) -> bool:
        """Whether the keys that a query sees are an interval of its own sequence."""
        return all(x is None for x in (self.prefixes, self.parents, self.key_documents, self.joint, self.function))

    @property
    def one_rectangle(self) -> bool:
        """Whether each row is one document, and all of it is visible, or all of its past."""
        return self.one_sided and all(sum(a < b for a, b in pairwise(row)) <= 1 for row in self.documents or ())

    def difference_range(self, in_prefix: bool = False) -> tuple[int | None, int | None]:
        """Return the (lowest, highest) visible `query position - key position`, None for no limit.

        in_prefix: between two tokens of a document's prefix.
        """
        left, right = self.window
        unmasked = None if right < 0 else -right
        return 0 if self.causal and not in_prefix else unmasked, None if left < 0 else left

    def score_scale(self, head_dim: int) -> float:
        """Return the factor applied to the scores."""
        return self.scale if self.scale is not None else 1 / math.sqrt(head_dim)
