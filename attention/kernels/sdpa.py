"""torch's own fused attention ops, called below scaled_dot_product_attention to reach the log-sum-exp.

The dense ops here take no variable lengths; see varlen.py for those that do. Heads stand before the sequence in all of
them (n, N, A, H); transposed views are enough, nothing is copied.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from ..bands import Task
from ..spec import AttentionSpec
from .base import Kernel, Launch
from .dense import DenseLaunch, DenseLowering

aten = torch.ops.aten

LEAF = 64  # fastest of 32 to 256, forward and backward, for triangles of 512 to 8,192 tokens


class _DenseKernel(Kernel):
    """Common part: refusal of score functions, lowering, transposition."""

    device_type: str
    dtypes: tuple[torch.dtype, ...]
    grouped_heads = True  # whether K < N is taken as it is

    def refuses(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        if device.type != self.device_type:
            return f"runs on {self.device_type}, the tensors are on {device.type}"
        if dtype not in self.dtypes:
            return f"dtype={dtype} is not among {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}"
        if spec.softcap is not None:
            return f"softcap={spec.softcap} is not offered by the op"
        return None

    def lower(self, tasks: tuple[Task, ...], device: torch.device, dtype: torch.dtype) -> tuple[Launch, ...]:
        return DenseLowering(device, dtype).lower(tasks)

    def forward(self, q_nANH, k_nBKH, v_nBKH, launch, spec):
        assert isinstance(launch, DenseLaunch)
        q, k, v = (x.transpose(1, 2) for x in (q_nANH, k_nBKH, v_nBKH))
        if not self.grouped_heads:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out, lse = self._forward(q, k, v, launch, spec.score_scale(q.shape[-1]))
        return out.transpose(1, 2), lse

    def backward(self, dout_nANH, q_nANH, k_nBKH, v_nBKH, out_nANH, lse_nNA, launch, spec):
        assert isinstance(launch, DenseLaunch)
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout_nANH, q_nANH, k_nBKH, v_nBKH, out_nANH))
        kv_heads = k.shape[1]
        # Ops that sum over a group of heads in half precision lose digits with every token.
        if not self.grouped_heads or q.dtype.itemsize < 4:
            k, v = (x.repeat_interleave(q.shape[1] // kv_heads, 1) for x in (k, v))
        dq, dk, dv = self._backward(dout, q, k, v, out, lse_nNA, launch, spec.score_scale(q.shape[-1]))
        if dk.shape[1] != kv_heads:
            dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2, dtype=lse_nNA.dtype) for x in (dk, dv))
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    @abstractmethod
    def _forward(self, q: Tensor, k: Tensor, v: Tensor, launch: DenseLaunch, scale: float): ...

    @abstractmethod
    def _backward(self, dout, q, k, v, out, lse, launch: DenseLaunch, scale: float): ...


class CpuFlashKernel(_DenseKernel):
    """aten's flash attention for CPU."""

    name = "sdpa"
    device_type = "cpu"
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def lower(self, tasks: tuple[Task, ...], device: torch.device, dtype: torch.dtype) -> tuple[Launch, ...]:
        # The op's causal case skips blocks of 512 keys alone: small triangles cost twice their pairs. In half precision
        # its small squares are the slower ones.
        leaf = LEAF if dtype in (torch.float32, torch.float64) else None
        return DenseLowering(device, dtype, leaf).lower(tasks)

    def _forward(self, q, k, v, launch, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, launch.causal, attn_mask=launch.mask, scale=scale
        )

    def _backward(self, dout, q, k, v, out, lse, launch, scale):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, launch.causal, attn_mask=launch.mask, scale=scale
        )


class EfficientKernel(_DenseKernel):
    """aten's memory-efficient attention for CUDA: the one with fp32."""

    name = "efficient"
    device_type = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    grouped_heads = False

    def _forward(self, q, k, v, launch, scale):
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(
            q, k, v, _bias(launch, q, k), True, 0.0, launch.causal, scale=scale
        )
        return out, lse[:, :, : q.shape[2]]

    def _backward(self, dout, q, k, v, out, lse, launch, scale):
        # The op reads lse rows padded to a multiple of 32; there is no dropout, so its random state is not read.
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
        seed = torch.zeros((), dtype=torch.int64)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, _bias(launch, q, k), out, lse, seed, seed, 0.0, [True, True, True, False], launch.causal,
            scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class CudnnKernel(_DenseKernel):
    """cuDNN's attention for CUDA."""

    name = "cudnn"
    device_type = "cuda"
    dtypes = (torch.bfloat16, torch.float16)
    grouped_heads = False

    def _forward(self, q, k, v, launch, scale):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, _bias(launch, q, k), True, 0.0, launch.causal, False, scale=scale
        )
        return out, lse.squeeze(-1) if lse.dim() == 4 else lse

    def _backward(self, dout, q, k, v, out, lse, launch, scale):
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.unsqueeze(-1), seed, seed, _bias(launch, q, k), None, None, q.shape[2], k.shape[2],
            0.0, launch.causal, scale=scale,
        )  # fmt: skip


def _bias(launch: DenseLaunch, q: Tensor, k: Tensor) -> Tensor | None:
    """The launch's mask in the (n, N, A, B) form, aligned to 16 elements, that the CUDA ops ask for."""
    if launch.mask is None:
        return None
    columns = k.shape[2]
    aligned = torch.nn.functional.pad(launch.mask, (0, -columns % 16))[..., :columns]
    return aligned.expand(q.shape[0], q.shape[1], q.shape[2], columns)
