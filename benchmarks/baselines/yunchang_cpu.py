"""yunchang 0.6.4 patched to run correctly on CPU with gloo: the baseline of benchmarks/attention.py.

The published package does not run there: its kernels require CUDA, and its float32 gradients are wrong on any device.
`PATCHES` lists every change; none adds work. The kernel is the fastest in torch for CPUs (aten's flash attention, with
grouped heads read in place), which our backend uses as well.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VERSION = "0.6.4"
LAYOUTS = {"contiguous": "basic", "zigzag": "zigzag", "striped": "strip"}  # ours -> ring_impl_type
PATCHES = {
    "cpu kernel": "block attention calls aten's CPU flash kernels, forward and backward; lse stays float32",
    "no self send": "a ring of one rank keeps its dK/dV instead of sending them to itself, which gloo does not support",
    "copied buffers": "float32 gradient accumulators copy the kernel's buffers instead of aliasing them",
    "dq dtype": "the basic ring returns dq in the dtype of q instead of always bfloat16",
}
_RINGS = ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn")
_REWRITES = (
    # (patch, affected rings, published text, replacement)
    ("copied buffers", _RINGS, "_buffer.to(torch.float32)", "_buffer.to(torch.float32, copy=True)"),
    ("dq dtype", _RINGS[:1], "dq.to(torch.bfloat16)", "dq.to(q.dtype)"),
)


@dataclass(frozen=True)
class YunchangAttention:
    """Patched LongContextAttention on this rank, with yunchang's sharding.

    Attributes:
        attention: `attention(q, k, v, causal=)` of local tensors (batch, seq / ranks, heads, head dim).
        shard: returns this rank's shard of a global tensor.
    """

    attention: Callable[..., Tensor]
    shard: Callable[[Tensor], Tensor]


def build(*, ulysses: int, ring: int, layout: str) -> YunchangAttention:
    """Patch yunchang and initialize it over all ranks of the default group; collective.

    Raises:
        RuntimeError: the installed yunchang is not `VERSION`.
    """
    yunchang = importlib.import_module("yunchang")
    if yunchang.__version__ != VERSION:
        raise RuntimeError(f"expected yunchang {VERSION}, got {yunchang.__version__}: install yunchang=={VERSION}")
    for ring_name in _RINGS:
        _patch(importlib.import_module(f"yunchang.ring.{ring_name}"))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    yunchang.set_seq_parallel_pg(ulysses, ring, rank, world_size)
    kernels = importlib.import_module("yunchang.kernels")
    attention = yunchang.LongContextAttention(ring_impl_type=LAYOUTS[layout], attn_type=kernels.AttnType.TORCH_FLASH)
    extract = yunchang.EXTRACT_FUNC_DICT[LAYOUTS[layout]]

    def shard(x: Tensor) -> Tensor:
        return extract(x, rank, world_size=world_size, rd=ring, ud=ulysses).detach().clone()

    return YunchangAttention(attention, shard)


def _patch(ring: Any) -> None:
    """Apply `PATCHES` to one of yunchang's ring modules; idempotent."""
    if ring.select_flash_attn_impl is _select_kernel:
        return
    ring.select_flash_attn_impl = _select_kernel
    ring.RingComm = _without_self_send(ring.RingComm)
    name = ring.__name__.rsplit(".", 1)[1]
    backward = f"{name}_backward"
    source = inspect.getsource(getattr(ring, backward))
    for patch, rings, published, fixed in _REWRITES:
        if name in rings:
            if published not in source:
                raise RuntimeError(f"patch {patch!r}: {backward} does not contain {published!r}")
            source = source.replace(published, fixed)
    exec(compile(source, ring.__file__, "exec"), vars(ring))


def _select_kernel(attn_type: Any, stage: str = "fwd-bwd", attn_processor: Any = None) -> Callable[..., Any]:
    kernels: dict[str, Callable[..., Any]] = {"fwd-only": _forward, "bwd-only": _backward}
    return kernels[stage]


def _forward(
    q_BSNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, dropout_p: float, softmax_scale: float, *, causal: bool, **rest: Any
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q_BSNH, k_BSNH, v_BSNH))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout_p, causal, scale=softmax_scale
    )
    return out.transpose(1, 2), lse


def _backward(*args: Any, rng_state: Any) -> None:
    dout, q, k, v, out, lse, dq, dk, dv, dropout_p, softmax_scale, causal, *_ = args
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, dropout_p, causal, scale=softmax_scale
    )
    for buffer, gradient in zip((dq, dk, dv), gradients, strict=True):
        buffer.copy_(gradient.transpose(1, 2))


def _without_self_send(ring_comm: Any) -> Any:
    class RingComm(ring_comm):
        def send_recv(self, to_send: Tensor, recv_tensor: Tensor | None = None) -> Tensor:
            return to_send if self.world_size == 1 else super().send_recv(to_send, recv_tensor)

        def commit(self) -> None:
            if self.world_size > 1:
                super().commit()

        def wait(self) -> None:
            if self.world_size > 1:
                super().wait()

    return RingComm
