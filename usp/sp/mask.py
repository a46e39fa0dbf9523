"""`Mask`, which keys each query sees, and `AttentionPlan`, what ranks do about it: once a batch, for all layers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from usp.attention import AttentionSpec, Joint, MaskMod, UnifiedPlan, WireBytes

from .sequence import rows_of

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees, in global positions; the same on every rank.

    Boundaries and numbers of documents are integers for all rows of the batch, or with a first dim of B: tensors, of
    which a mask keeps the numbers. (Inside of a graph of torch.compile it keeps the tensors.)

    Attributes:
        causal: mask later keys.
        window: (left, right) in global tokens, -1 for no limit.
        cu_seqlens: global boundaries of packed documents, (documents + 1,) for all rows or (B, documents + 1) padded by
            repeating the last; later tokens output zero. On a GPU it costs a synchronization.
        prefix: for a prefix-LM mask, how many leading tokens of each document attend to each other in both directions
            (within `window`): (documents,) or (B, documents). Needs causal=True.
        tree: (documents,) or (B, documents): the index of the earlier document that each one continues, or -1. Its
            tokens also attend to the documents it continues, so that samples with a common prefix have it once.
            Positions and windows count from the root. Needs causal=True and cu_seqlens.
        chunk: tokens attend within their chunk of this many tokens, counted from the document's first token.
        function: FlexAttention's mask_mod of row, head, query and key position; both the mask (pass causal=False) and
            it must show a pair. It is evaluated once: another mask needs another function.
        cu_seqlens_k: of cross attention (causal=False, no window), of the keys: document n is seen by document n.
        joint_cu_seqlens: boundaries of the joint tokens of each document, if there are several, or for padding.

    Raises ValueError for what is no window, no chunk or no integers.
    """

    causal: bool = True
    window: tuple[int, int] | None = None
    cu_seqlens: Tensor | Rows | None = None
    prefix: Tensor | Rows | None = None
    tree: Tensor | Rows | None = None
    chunk: int | None = None
    function: MaskMod | None = None
    cu_seqlens_k: Tensor | Rows | None = None
    joint_cu_seqlens: Tensor | Rows | None = None

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return
        window = self.window
        if window is not None:
            if not (isinstance(window, Sequence) and len(window) == 2 and all(type(side) is int for side in window)):
                raise ValueError(f"window={window!r} must be None or (left, right) in tokens, -1 for no limit")
            object.__setattr__(self, "window", None if (*window,) == (-1, -1) else (window[0], window[1]))
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk={self.chunk} must be at least 1 token")
        for name in ("cu_seqlens", "cu_seqlens_k", "joint_cu_seqlens"):
            object.__setattr__(self, name, _numbers(getattr(self, name), name, "documents + 1"))
        for name in ("prefix", "tree"):
            object.__setattr__(self, name, _numbers(getattr(self, name), name, "documents"))

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:  # of thousands of documents it takes as long as a call
            self.__dict__["_hash"] = hash(tuple(getattr(self, each.name) for each in fields(self)))
        return self.__dict__["_hash"]

    def spec(self, seq_len: int, key_len: int | None, joint: Joint | None) -> AttentionSpec:
        """Return the mask of `seq_len` tokens for the kernels, without a function of pairs.

        key_len: None if the keys are of the queries' tokens, 0 if there are only joint ones.
        """
        rows: Any = {"documents": self.cu_seqlens, "prefixes": self.prefix, "parents": self.tree}
        keys: Any = self.cu_seqlens_k or ((0, key_len),) if key_len else self.cu_seqlens_k
        spec = AttentionSpec(self.causal, self.window or (-1, -1), **rows, key_documents=keys, joint=joint)
        return spec if self.chunk is None else _in_chunks(spec, seq_len, self.chunk)


class LastMasks:
    """Makes masks, each once for the same tensors: those of a batch are read in its first layer."""

    def __init__(self) -> None:
        self._rows: tuple[Tensor | None, ...] = (None,) * 3
        self._versions: list[int | None] = []
        self._masks: dict[tuple[Any, ...], Mask] = {}

    def __call__(self, causal: bool, window: tuple[int, int] | None, chunk: int | None, *rows: Tensor | None) -> Mask:
        """rows: cu_seqlens, prefix and tree."""
        key = causal, window, chunk
        if torch.compiler.is_compiling():
            return Mask(causal, window, *cast(Any, (*rows, chunk)))
        versions = [None if not isinstance(x, Tensor) or x.is_inference() else x._version for x in rows]
        if self._versions != versions or not all(map(operator.is_, rows, self._rows)):
            self._rows, self._versions, self._masks = rows, versions, {}
        if key not in self._masks:
            self._masks[key] = Mask(causal, window, *cast(Any, (*rows, chunk)))
        return self._masks[key]


def _numbers(x: Tensor | Rows | None, name: str, columns: str) -> Rows | None:
    rows = isinstance(x, tuple) and all(isinstance(row, tuple) for row in x)  # of another mask
    return x if rows else rows_of(x, name, columns)  # type: ignore[return-value, arg-type]


def _in_chunks(spec: AttentionSpec, seq_len: int, chunk: int) -> AttentionSpec:
    """Return a mask with its chunks of so many tokens: attention within chunks is that within documents."""
    if any(x is not None for x in (spec.parents, spec.key_documents, spec.joint)):
        raise ValueError("attention in chunks does not support a prefix tree, joint tokens and cross attention")
    rows = spec.documents or ((0, seq_len),)
    cut = [([at for a, b in pairwise(row) for at in range(a, b, chunk)] or [0]) + [row[-1]] for row in rows]
    longest = max(map(len, cut))
    return replace(spec, documents=tuple(tuple(row + row[-1:] * (longest - len(row))) for row in cut))


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What ranks do in attention calls with one mask, on q and k of these sizes, of any dtype: for all layers, and in
    both passes. It goes with a batch in the place of its mask.

    made_for: sizes of this rank's tensors, (B, S, N, H) and (B, S, K, H) or None if there are only joint keys, joint
        tokens, layout and ranks; a call that has others is refused.
    of_itself: whether a sequence attends to itself alone, and all heads alike.
    """

    unified: UnifiedPlan
    made_for: dict[str, Any]
    of_itself: bool

    def wire_bytes(
        self, dtype: torch.dtype, v_head_dim: int | None = None, lse: bool = False, **sparse: Any
    ) -> WireBytes:
        """Predict the bytes that this rank sends in the forward and backward of a call. v_head_dim: that of v, None for
        that of q and k. lse: with lse, and its gradient. sparse: `indices`, `weights` and `block` of
        `UnifiedPlan.wire_bytes`."""
        return self.unified.wire_bytes(self.made_for["q"][3], dtype, v_head_dim, lse, **sparse)
