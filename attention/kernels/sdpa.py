"""The fused attention ops behind torch's scaled_dot_product_attention, called directly to get the log-sum-exp.

These ops do not support variable lengths; see varlen.py for those that do. All expect heads before the sequence
(n, N, A, H); transposed views suffice, so nothing is copied.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from usp.attention.bands import Task
from usp.attention.spec import AttentionSpec

from .base import Device, Kernel, KernelLaunch
from .dense import DenseLaunch, DenseLowering
from .reference import ReferenceKernel

aten = torch.ops.aten

CUDNN_WIDE = 91000  # version from which head dims up to 256 are supported, on Hopper
LONG = 768  # queries from which the CPU's backward takes 256 at a time, else 64
LEAF = 64  # fastest of 32 to 256, forward and backward, for triangles of 512 to 8,192 tokens


class _DenseKernel(Kernel):
    """Base of the dense kernels: checks of device, dtype and score function, lowering, transposition."""

    device_type: str
    dtypes: tuple[torch.dtype, ...]
    grouped_heads = True  # the op supports K < N

    def refuses_call(
        self, spec: AttentionSpec, device: Device, dtype: torch.dtype, head_dim: int, v_head_dim: int
    ) -> str | None:
        if dtype not in self.dtypes:
            return f"dtype={dtype} must be one of {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}"
        if spec.softcap is not None:
            return f"softcap={spec.softcap} is not supported by the op"
        return None

    def lower(self, tasks: Sequence[Task], device: torch.device, dtype: torch.dtype) -> tuple[KernelLaunch, ...]:
        return DenseLowering(device, dtype).lower(tasks)

    def forward(self, q_nANH, k_nBKH, v_nBKV, launch, spec):
        assert isinstance(launch, DenseLaunch)
        q, k, v = (x.transpose(1, 2) for x in (q_nANH, k_nBKH, v_nBKV))
        if not self.grouped_heads:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out, lse = self._forward(q, k, v, launch, spec.score_scale(q.shape[-1]))
        if launch.empty is not None:
            out, lse = out.masked_fill(launch.empty.unsqueeze(-1), 0.0), lse.masked_fill(launch.empty, float("-inf"))
        return out.transpose(1, 2), lse

    def backward(self, dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV, lse_nNA, launch, spec):
        assert isinstance(launch, DenseLaunch)
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV))
        kv_heads = k.shape[1]
        if launch.empty is not None:  # with no key in any other launch either
            lse_nNA = lse_nNA.masked_fill(lse_nNA.isneginf(), 0.0)
        folded = self._folded(q, kv_heads, launch)
        if folded > 1:
            dout, q, out, lse_nNA = (x.unflatten(1, (-1, folded)).flatten(2, 3) for x in (dout, q, out, lse_nNA))
        # Summing over a group of heads in half precision inside the op loses accuracy with every token.
        if (not self.grouped_heads or q.dtype.itemsize < 4) and q.shape[1] > kv_heads:
            k, v = (x.repeat_interleave(q.shape[1] // kv_heads, 1) for x in (k, v))
        dq, dk, dv = self._backward(dout, q, k, v, out, lse_nNA, launch, spec.score_scale(q.shape[-1]))
        if dk.shape[1] != kv_heads:
            dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2, dtype=lse_nNA.dtype) for x in (dk, dv))
        if folded > 1:
            dq = dq.unflatten(2, (folded, -1)).flatten(1, 2)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _folded(self, q: Tensor, kv_heads: int, launch: DenseLaunch) -> int:
        """Return how many query heads of a KV head the backward takes as further queries of one head."""
        return 1

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, launch: DenseLaunch, scale: float): ...

    @abstractmethod
    def _backward(self, dout, q, k, v, out, lse, launch: DenseLaunch, scale: float): ...


class CpuFlashKernel(_DenseKernel):
    """aten's flash attention for CPU."""

    name = "sdpa"
    device_type = "cpu"
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def pads(self, head_dim: int, v_head_dim: int, backward: bool) -> bool:
        return True

    def lower(self, tasks: Sequence[Task], device: torch.device, dtype: torch.dtype) -> tuple[KernelLaunch, ...]:
        # The op's causal mode skips only whole blocks of 512 keys, so small triangles cost twice their visible pairs.
        # In half precision, its small squares are even slower.
        leaf = LEAF if dtype in (torch.float32, torch.float64) else None
        return DenseLowering(device, dtype, leaf).lower(tasks)

    def _folded(self, q: Tensor, kv_heads: int, launch: DenseLaunch) -> int:
        # Gradients of keys are rounded after each block of queries: four times as many are as few blocks.
        queries, group = q.shape[2], q.shape[1] // kv_heads
        if q.dtype.itemsize >= 4 or launch.causal or launch.mask is not None or queries >= LONG:
            return 1
        return next((heads for heads in (2, 3, 4) if group % heads == 0 and heads * queries >= LONG), 1)

    def _forward(self, q, k, v, launch, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, launch.causal, attn_mask=launch.bias(q.dtype), scale=scale
        )

    def _backward(self, dout, q, k, v, out, lse, launch, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, launch.causal, attn_mask=launch.bias(q.dtype), scale=scale
        )


class EfficientKernel(_DenseKernel):
    """aten's memory-efficient attention for CUDA, which supports fp32."""

    name = "efficient"
    device_type = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    grouped_heads = False

    def _forward(self, q, k, v, launch, scale):
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            q, k, v, _bias(launch, q, k, q.shape[1]), True, 0.0, launch.causal, scale=scale
        )
        return out, lse[:, :, : q.shape[2]]

    def _backward(self, dout, q, k, v, out, lse, launch, scale):
        # The op expects lse rows padded to a multiple of 32. Without dropout it does not read the random state.
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        seed = torch.zeros((), dtype=torch.int64)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, _bias(launch, q, k, q.shape[1]), out, lse, seed, seed, 0.0, [True, True, True, False],
            launch.causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class CudnnKernel(_DenseKernel):
    """cuDNN's attention for CUDA."""

    name = "cudnn"
    device_type = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    grouped_heads = False

    def missing(self) -> str | None:
        absent = torch.version.hip is not None or (torch.version.cuda and not torch.backends.cudnn.is_available())
        return "this torch has no cuDNN" if absent else None

    def refuses_call(
        self, spec: AttentionSpec, device: Device, dtype: torch.dtype, head_dim: int, v_head_dim: int
    ) -> str | None:
        # The limits of torch's `can_use_cudnn_attention`, which direct calls of the op do not pass.
        known = device.capability or (8, 0)
        if known < (8, 0):
            return f"needs a GPU of compute capability 8.0, this has {known[0]}.{known[1]}"
        if spec.function is not None:
            return "mask_mod is not of bands, and rows without a key are not supported by the op"
        wide = known == (9, 0) and (torch.backends.cudnn.version() or CUDNN_WIDE) >= CUDNN_WIDE
        for name, size in (("head_dim", head_dim), ("v_head_dim", v_head_dim)):
            if size > (widest := 256 if wide else 128) or size % 8:
                return f"{name}={size} must be a multiple of 8, at most {widest}"
        return super().refuses_call(spec, device, dtype, head_dim, v_head_dim)

    def forward(self, q_nANH, k_nBKH, v_nBKV, launch, spec):
        if k_nBKH.shape[1] == 1:  # which cuDNN does not support
            return ReferenceKernel().forward(q_nANH, k_nBKH, v_nBKV, launch, spec)
        return super().forward(q_nANH, k_nBKH, v_nBKV, launch, spec)

    def backward(self, dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV, lse_nNA, launch, spec):
        if 1 in (k_nBKH.shape[1], q_nANH.shape[1]):  # torch fails to build a graph for one query
            return ReferenceKernel().backward(dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV, lse_nNA, launch, spec)
        return super().backward(dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV, lse_nNA, launch, spec)

    def _forward(self, q, k, v, launch, scale):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, _bias(launch, q, k, 1), True, 0.0, launch.causal, False, scale=scale
        )
        return out, lse.squeeze(-1) if lse.dim() == 4 else lse

    def _backward(self, dout, q, k, v, out, lse, launch, scale):
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # read only with dropout
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), seed, seed, _bias(launch, q, k, 1), None, None, q.shape[2],
            k.shape[2], 0.0, launch.causal, scale=scale,
        )  # fmt: skip


def _bias(launch: DenseLaunch, q: Tensor, k: Tensor, heads: int) -> Tensor | None:
    """Expand the launch's mask to (n, heads or 1 for all of them, A, B), aligned to 16 elements as the ops require."""
    if (mask := launch.bias(q.dtype)) is None:
        return None
    columns = k.shape[2]
    aligned = torch.nn.functional.pad(mask, (0, -columns % 16))[..., :columns]
    return aligned.expand(q.shape[0], heads, q.shape[2], columns)
