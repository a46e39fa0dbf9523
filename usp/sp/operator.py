"""Attention as one operator of a graph that torch.compile builds.

    graph   ... -> q, k, v -> usp::attention -> out -> ...          usp::attention_backward in the backward graph

A compiler sees only its shapes. The kernels, the messages between ranks and the plan of a call, which depends on the
values of `cu_seqlens`, remain eager code, so that different documents need no other graph.

B batch, S a rank's tokens of each row, N and K query and KV heads, H head dim, V head dim of the values.
"""

# No postponed annotations: torch.library reads them as types.
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase


class AttentionLayer(Protocol):
    """What the operators call."""

    def compute(self, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> list[Tensor]: ...

    def shapes(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]: ...

    def gradients(
        self, dout: Tensor, saved: list[Tensor], head_dim: int, kv_heads: int, *options: Any
    ) -> list[Tensor]: ...


class Handle(OpaqueBase):
    """An attention layer as an argument of the operators: graphs take it as an input, so layers share a graph.

    A handle lives as long as its layer: graphs have no reference to it.

    Args:
        shape_facts: what the shapes of `AttentionLayer.shapes` depend on besides the tensors'.
    """

    def __init__(self, layer: AttentionLayer, shape_facts: tuple[int, ...]) -> None:
        self.layer, self.shape_facts = layer, shape_facts

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a part of the key under which inductor stores graphs; it is never loaded."""
        return Handle, (None, self.shape_facts)


# Layers of the same shape facts share graphs, others do not.
register_opaque_type(Handle, typ="reference", guard_fn=lambda handle: [handle.shape_facts])


@torch.library.custom_op("usp::attention", mutates_args=())
def attend(
    handle: Handle,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    prefix: Tensor | None,
    causal: bool,
    scale: float | None,
    window: list[int],
    softcap: float | None,
    chunk: int,
) -> list[Tensor]:
    """Return attention's output (B, S, N, V), and what `attend_backward` needs besides the arguments."""
    return handle.layer.compute(q, k, v, sinks, cu_seqlens, prefix, causal, scale, window, softcap, chunk)


@attend.register_fake
def _(handle, q, k, v, *options):
    return [q.new_empty(shape, dtype=dtype) for shape, dtype in _layer(handle).shapes(q, k, v)]


@torch.library.custom_op("usp::attention_backward", mutates_args=())
def attend_backward(
    handle: Handle,
    dout: Tensor,
    saved: list[Tensor],
    head_dim: int,
    kv_heads: int,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    prefix: Tensor | None,
    causal: bool,
    scale: float | None,
    window: list[int],
    softcap: float | None,
    chunk: int,
) -> list[Tensor]:
    """Return the gradients of q, k, v and, if given, sinks; `saved` as in `attention.unified_backward`."""
    options = (sinks, cu_seqlens, prefix, causal, scale, window, softcap, chunk)
    return handle.layer.gradients(dout, saved, head_dim, kv_heads, *options)


@attend_backward.register_fake
def _(handle, dout, saved, head_dim, kv_heads, sinks, *options):
    rows, tokens, heads, v_head_dim = dout.shape
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim)]
    grads = [dout.new_empty(rows, tokens, *shape) for shape in shapes]
    return grads if sinks is None else [*grads, torch.empty_like(sinks)]


def _save(ctx, inputs, output):
    handle, q, k, v, sinks, cu_seqlens, prefix, *ctx.options = inputs
    ctx.handle, ctx.sizes = handle, (q.shape[-1], k.shape[2])
    out, lse, *exchanged = output
    saved = (lse, *exchanged) if exchanged else (out, lse, q, k, v)
    ctx.save_for_backward(sinks, cu_seqlens, prefix, *saved)


def _backward(ctx, grads):
    sinks, cu_seqlens, prefix, *saved = ctx.saved_tensors
    found = attend_backward(ctx.handle, grads[0], saved, *ctx.sizes, sinks, cu_seqlens, prefix, *ctx.options)
    dq, dk, dv, *dsinks = found
    return None, dq, dk, dv, *(dsinks or [None]), *[None] * 7


attend.register_autograd(_backward, setup_context=_save)


def _layer(handle: Any) -> AttentionLayer:
    """Return the layer of a handle, which is wrapped while a graph is traced."""
    return getattr(handle, "real_obj", handle).layer
