"""Lowering for variable-length kernels, and aten's flash attention for CUDA.

Each task becomes one packed sequence of queries and keys, with a window aligned to the bottom right corner, as in
FlashAttention. A block takes one launch per kind of window, two or three in total.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from usp.attention.accumulate import Rows
from usp.attention.bands import FAR, Task, Tasks, layers
from usp.attention.intervals import Array, expanded
from usp.attention.spec import AttentionSpec

from .base import Device, Kernel, KernelLaunch

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class VarlenLaunch(KernelLaunch):
    """cu_seqlens of queries and keys (int32, on the device), longest runs, and the (left, right) window.

    Query i of m sees key j of n iff i + n - m - left <= j <= i + n - m + right; -1 for no limit, as in FlashAttention.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    left: int
    right: int

    @property
    def windows(self) -> dict[str, int]:
        return {"window_size_left": self.left, "window_size_right": self.right}


def lower_varlen(tasks: Sequence[Task], device: torch.device) -> Iterator[VarlenLaunch]:
    """Yield one launch per window and per layer of disjoint query ranges."""
    rows = Tasks.of(tasks).rows
    order, layer = layers(rows)
    q_start, q_stop, k_start, k_stop, lowest, highest = rows[order].T
    corner = q_stop - k_stop  # i - j at the bottom right; that pair or one left of it is visible
    left, right = np.where(highest == FAR, -1, highest - corner), np.where(lowest == -FAR, -1, corner - lowest)
    by_window = np.lexsort((right, left, layer))
    windows = np.stack((layer, left, right))[:, by_window]
    changes = np.flatnonzero((windows[:, 1:] != windows[:, :-1]).any(0)) + 1
    for bucket in np.split(by_window, changes) if len(rows) else ():
        q_rows, cu_q, max_q = _packed(q_start[bucket], q_stop[bucket], device)
        k_rows, cu_k, max_k = _packed(k_start[bucket], k_stop[bucket], device)
        window = int(left[bucket[0]]), int(right[bucket[0]])
        yield VarlenLaunch(q_rows, k_rows, cu_q, cu_k, max_q, max_k, *window)


def _packed(starts: Array, stops: Array, device: torch.device) -> tuple[Rows, Tensor, int]:
    """Concatenate runs, as a slice if they are adjacent; return their cu_seqlens and the longest one too."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    cu_seqlens = torch.tensor(np.append(0, ends), dtype=torch.int32, device=device)
    rows = Rows.of(int(starts[0]), int(stops[-1]))
    if (stops[:-1] != starts[1:]).any():
        index = torch.tensor(expanded(starts, stops), device=device)
        rows = Rows(len(index), index=index.unsqueeze(0))
    return rows, cu_seqlens, int(lengths.max())


class VarlenKernel(Kernel):
    """Base of the variable-length kernels, on packed tensors (total, heads, head_dim) with lse (heads, total).

    Attributes:
        widest: its largest head dim.
        softcaps: whether it supports a softcap.
    """

    packed = True
    device_type = "cuda"
    widest = 256
    softcaps = False

    def pads(self, head_dim: int, v_head_dim: int, backward: bool) -> bool:
        return True

    def refuses_call(
        self, spec: AttentionSpec, device: Device, dtype: torch.dtype, head_dim: int, v_head_dim: int
    ) -> str | None:
        if dtype not in (torch.bfloat16, torch.float16):
            return f"dtype={dtype} must be bfloat16 or float16"
        if spec.softcap is not None and not self.softcaps:
            return f"softcap={spec.softcap} is not supported by the op"
        if spec.function is not None:
            return "mask_mod is not of bands, and the op takes no other mask"
        for name, size in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
            if size > self.widest or size % 8:
                return f"{name}={size} must be a multiple of 8, at most {self.widest}"
        return None

    def lower(self, tasks: Sequence[Task], device: torch.device, dtype: torch.dtype) -> tuple[KernelLaunch, ...]:
        return tuple(lower_varlen(tasks, device))

    def forward(self, q_nANH, k_nBKH, v_nBKV, launch, spec):
        assert isinstance(launch, VarlenLaunch)
        q, k, v = (x.squeeze(0) for x in (q_nANH, k_nBKH, v_nBKV))
        out, lse = self._forward(q, k, v, launch, spec)
        return out.unsqueeze(0), lse.unsqueeze(0)

    def backward(self, dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV, lse_nNA, launch, spec):
        assert isinstance(launch, VarlenLaunch)
        dout, q, k, v, out = (x.squeeze(0) for x in (dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV))
        grads = self._backward(dout, q, k, v, out, lse_nNA.squeeze(0), launch, spec)
        dq, dk, dv = (grad.unsqueeze(0) for grad in grads)
        return dq, dk, dv

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, launch: VarlenLaunch, spec: AttentionSpec): ...

    @abstractmethod
    def _backward(self, dout, q, k, v, out, lse, launch: VarlenLaunch, spec: AttentionSpec): ...


class AtenFlashKernel(VarlenKernel):
    """The FlashAttention 2 that torch ships for CUDA, in its variable-length form."""

    name = "aten-flash"
    rated_as = "flash-attn-2"

    def missing(self) -> str | None:
        # Activation is a state of the process that replaces these ops by another package's, with other limits and
        # rates. The back ends of those packages call them directly instead, and leave torch's attention as it is.
        other = current_flash_attention_impl()
        if other is None:
            return None
        return (
            f"torch.nn.attention.activate_flash_attention_impl({other!r}) replaced its ops in this process: call "
            f"restore_flash_attention_impl(), or use kernel='flash'"
        )

    def _forward(self, q, k, v, launch, spec):
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k, 0.0, False, False,
            scale=spec.score_scale(q.shape[-1]), **launch.windows,
        )  # fmt: skip
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, launch, spec):
        unused = torch.empty((), dtype=torch.uint64, device=q.device)  # dropout's random state
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k, 0.0, False, unused, unused,
            scale=spec.score_scale(q.shape[-1]), **launch.windows,
        )  # fmt: skip
