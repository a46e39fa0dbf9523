"""`UnifiedSPAttention`, the attention layer of a ring x ulysses mesh, and its operator in graphs of torch.compile.

    graph   ... -> q, k, v -> usp::attention -> out -> ...          usp::attention_backward in the backward graph

A compiler sees only its shapes. The kernels, the messages between ranks and the plan of a call, which depends on the
values of `cu_seqlens`, remain eager code, so that different documents need no other graph.

B batch, S a rank's tokens of each row (seq / (ring * ulysses)), N and K query and KV heads, H head dim, V head dim of
the values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.distributed.device_mesh import DeviceMesh

from attention import (
    LAYOUTS,
    AttentionSpec,
    Channel,
    HeadPlan,
    KeepResults,
    RingProgram,
    SequenceLayout,
    UnifiedPlan,
    WireBytes,
    accumulate_dtype,
    check_kernel_name,
    unified_attention,
    unified_backward,
    unified_forward,
)
from parallel import ParallelMesh

from .kernel_choice import choose_kernel
from .sequence import SpAxes, StepKeeper, documents_of, rows_of

logger = logging.getLogger(__name__)
Rows = tuple[tuple[int, ...], ...] | None
Described = tuple[torch.Size, torch.dtype, torch.device]


class UnifiedSPAttention(StepKeeper, nn.Module):
    """Exact, parameter-free attention over sequences sharded on a ring x ulysses mesh.

    Ulysses exchanges tokens for heads over the ulysses axis, ring attention passes keys and values around the ring axis
    (USP, arXiv 2405.07719). Results match a single process for every supported mask, head count and degree; anything
    else raises an error. Under torch.compile, a call is one operator of the graph.

    Args:
        mesh: a ParallelMesh, or a torch DeviceMesh with axes named ring and ulysses.
        layout: one of `attention.LAYOUTS`; must match `shard_sequence` and `shard_batch`. balanced divides packed
            documents so that ranks have equal work under a causal mask.
        kernel: auto, or one of `attention.KERNEL_NAMES`.

    Raises ValueError for an unknown layout or kernel.
    """

    def __init__(self, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag", kernel: str = "auto") -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
        check_kernel_name(kernel)
        self._mesh, self.axes, self.layout, self.kernel = mesh, SpAxes.of(mesh), layout, kernel
        self._ulysses, self._ring = Channel(self.axes.ulysses_group), Channel(self.axes.ring_group)
        # Calls repeat from layer to layer and, without documents, from step to step.
        self._prepare = lru_cache(maxsize=16)(self._prepare_uncached)
        self._described = lru_cache(maxsize=16)(self._describe)
        self._last_call, self._last_plan = LastResult(self._look_up), LastResult(self._prepare)
        self._logged: set[str] = set()
        self.calls, self.trees = 0, 0  # trees: calls with a prefix tree
        self.kernels: set[str] = set()  # names of those that calls have used
        self._handle = Handle(self, (self.axes.ulysses, self.axes.ulysses_rank))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        cu_seqlens: Tensor | None = None,
        sinks: Tensor | None = None,
        prefix: Tensor | None = None,
        chunk: int | None = None,
        prefix_tree: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of this rank's queries over the whole sequence. Collective over both axes.

        Args:
            q: (B, S, N, H).
            k: (B, S, K, H); K divides N.
            v: (B, S, K, V); V may differ from H, as in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
                Messages have the true head dims; a kernel that needs equal ones pads the smaller with zeros.
            causal: mask later keys.
            scale: factor on the scores; defaults to 1 / sqrt(H).
            window: (left, right) in global tokens, -1 for no limit.
            softcap: scores become softcap * tanh(scores / softcap).
            cu_seqlens: global boundaries of packed documents, integers, (documents + 1,) for all rows or
                (B, documents + 1) padded by repeating the last. Tokens after the last boundary attend to nothing and
                output zero. Keep it on the CPU: the plan depends on it, so a GPU tensor costs a synchronization.
            sinks: (N,) logits that join each softmax without a value. Their gradient is this rank's share.
            prefix: for a prefix-LM mask, the number of leading tokens of each document that attend to each other in
                both directions (within `window`): integers (documents,) for all rows or (B, documents), one document
                without cu_seqlens. Needs causal=True.
            chunk: tokens attend within their chunk of this many tokens, counted from the document's first token.
            prefix_tree: (documents,) or (B, documents) integers: the index of the earlier document that each one
                continues, or -1. Its tokens also attend to the documents it continues, so that samples with a common
                prefix have it once. Positions and windows count from the root. Needs causal=True and cu_seqlens.

        Returns:
            (B, S, N, V) in q's dtype.

        Raises:
            ValueError: on every rank before any communication, for invalid shapes, lengths or documents, or a call
                that the kernel does not support.
            RanksDisagree: on every rank, if the ranks' calls differ and are new to all of them. Repeated calls are not
                compared: a model's forward compares its `cu_seqlens` (`apply_unified_sp`).
        """
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk} must be at least 1 token")
        options = (cu_seqlens, prefix, prefix_tree, causal, scale, list(_window(window)), softcap, chunk or 0)
        if torch.compiler.is_compiling():
            return attend(self._handle, q, k, v, sinks, *options)[0]
        call = self._call(q, k, v, sinks, *options)
        return unified_attention(q, k, v, **call, sinks=sinks, keep=self.keep)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnifiedSPAttention:
        """Share the process groups, which cannot be copied."""
        return UnifiedSPAttention(self._mesh, self.layout, self.kernel)

    def wire_bytes(
        self,
        *,
        batch: int,
        seq_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        cu_seqlens: Tensor | None = None,
        prefix: Tensor | None = None,
        v_head_dim: int | None = None,
        prefix_tree: Tensor | None = None,
    ) -> WireBytes:
        """Predict the bytes this rank sends in the forward and backward of such a call (global `seq_len`). `v_head_dim`
        is that of v, None for `head_dim`."""
        documents, *rows = _rows(cu_seqlens, prefix, prefix_tree)
        spec = AttentionSpec(causal, _window(window), None, None, documents, *rows)
        heads = HeadPlan(num_heads, num_kv_heads, self.axes.ulysses)
        seq_len += self.axes.padding(self.layout, seq_len) if documents else 0
        layout = self.axes.layout(self.layout, seq_len, documents)
        return self._plan(spec, heads, batch, layout).wire_bytes(head_dim, dtype, v_head_dim)

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.axes.ranks

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent through this module so far."""
        return self._ulysses.sent_bytes + self._ring.sent_bytes

    def extra_repr(self) -> str:
        return f"ring={self.axes.ring}, ulysses={self.axes.ulysses}, layout={self.layout!r}, kernel={self.kernel!r}"

    def _call(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any) -> dict[str, Any]:
        """Check a call and count it; return its plan, its program, and the channels. options: those of `_spec`."""
        shapes = (q.shape, q.dtype, q.device), (k.shape, k.dtype, k.device), (v.shape, v.dtype, v.device)
        call = self._last_call(shapes, None if sinks is None else sinks.shape, *options)
        counts = self.__dict__  # assignment to a module's attribute takes microseconds
        counts["calls"] += 1
        counts["trees"] += call[0].parents is not None
        plan, program = self.keep(("plan", *call), lambda: self._last_plan(*call))
        return {"plan": plan, "program": program, "ulysses": self._ulysses, "ring": self._ring}

    def _look_up(self, shapes: tuple[Described, ...], sinks: torch.Size | None, *options: Any) -> tuple[Any, ...]:
        return self._described(shapes, sinks, *_hashable(*options))

    def _describe(
        self, shapes: tuple[Described, ...], sinks: torch.Size | None, documents: Any, *options: Any
    ) -> tuple[Any, ...]:
        """Check a call and return the arguments of its `_prepare`. documents, options: those of `_spec`."""
        _check_tensors(shapes, sinks)
        (q, dtype, device), (k, *_), (v, *_) = shapes
        heads, seq_len = HeadPlan(q[2], k[2], self.axes.ulysses), q[1] * self.ranks
        layout = self.axes.layout(self.layout, seq_len, documents)
        return _spec(seq_len, documents, *options), heads, q[0], layout, q[3], v[3], dtype, device

    def _plan(self, spec: AttentionSpec, heads: HeadPlan, batch: int, layout: SequenceLayout) -> UnifiedPlan:
        return UnifiedPlan.make(layout, spec, heads, batch, self.axes.ring_rank, self.axes.ulysses_rank)

    def _prepare_uncached(
        self,
        spec: AttentionSpec,
        heads: HeadPlan,
        batch: int,
        layout: SequenceLayout,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[UnifiedPlan, RingProgram]:
        plan = self._plan(spec, heads, batch, layout)
        kernel, choice, slow = choose_kernel(self.kernel, spec, device, dtype, head_dim, v_head_dim, plan.layout)
        self.kernels.add(kernel.name)
        call = (plan.layout, spec, heads, batch, head_dim, v_head_dim, str(dtype), kernel.name)
        self.axes.agree(call, "the attention call")
        self._log(logging.INFO, choice)
        for warning in (slow, *ulysses_violations(heads.num_heads, heads.ulysses)):
            self._log(logging.WARNING, warning)
        kv_index = heads.kv_index(self.axes.ulysses_rank)
        return plan, RingProgram.lower(plan.ring, spec, kernel, device, dtype, kv_index)

    def _log(self, level: int, line: str) -> None:
        if line and line not in self._logged and (not dist.is_initialized() or dist.get_rank() == 0):
            self._logged.add(line)
            logger.log(level, line)


class LastResult:
    """A function that gives its last result again, in microseconds, where its arguments are the same; tensors are if
    their values are."""

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        self._function, self._result = function, ()
        self._arguments: tuple[Any, ...] = ((),)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        if len(arguments) != len(self._arguments) or not all(map(_same, self._arguments, arguments)):
            self._result = self._function(*arguments)
            self._arguments = tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in arguments)
        return self._result


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, Tensor):  # the values of a fake one can be unknown
        return type(a) is type(b) is Tensor and (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    return a is b or (not isinstance(a, Tensor) and a == b)


class Handle(OpaqueBase):
    """An attention layer as an argument of the operators: graphs take it as an input, so layers share a graph.

    A handle lives as long as its layer: graphs have no reference to it.

    shape_facts: what the shapes of the results depend on besides the tensors'. Layers that differ in them share no
    graphs.
    """

    def __init__(self, layer: UnifiedSPAttention, shape_facts: tuple[int, ...]) -> None:
        self.layer, self.shape_facts = layer, shape_facts

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a part of the key under which inductor stores graphs; it is never loaded."""
        return Handle, (None, self.shape_facts)


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
    prefix_tree: Tensor | None,
    causal: bool,
    scale: float | None,
    window: list[int],
    softcap: float | None,
    chunk: int,
) -> list[Tensor]:
    """Return attention's output (B, S, N, V), and what `attend_backward` needs besides the arguments."""
    layer = handle.layer
    if violations := ulysses_violations(q.shape[2], layer.axes.ulysses):
        raise ValueError(f"torch.compile needs a query head on every rank: {'; '.join(violations)}")
    call = layer._call(q, k, v, sinks, cu_seqlens, prefix, prefix_tree, causal, scale, window, softcap, chunk)
    results = unified_forward(q, k, v, **call, sinks=sinks, keep=layer.keep)
    # The graph may write over what the operator returns.
    return [x.clone() for x in results] if isinstance(layer.keep, KeepResults) else results


@attend.register_fake
def _(handle, q, k, v, *options):
    axes = getattr(handle, "real_obj", handle).layer.axes  # a handle is wrapped while a graph is traced
    # Plans divide heads, so that their numbers must not be symbolic.
    heads, rank = HeadPlan(int(q.shape[2]), int(k.shape[2]), axes.ulysses), axes.ulysses_rank
    tokens, width, v_head_dim = q.shape[0] * q.shape[1] * axes.ulysses, heads.q_width(rank), v.shape[3]
    results = [q.new_empty(*q.shape[:3], v_head_dim), q.new_empty(tokens, width, dtype=accumulate_dtype(q.dtype))]
    if axes.ulysses > 1:
        results.append(q.new_empty(tokens, heads.elements(rank, q.shape[3], v_head_dim)))
        results.append(q.new_empty(tokens, width, v_head_dim))
    return results


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
    prefix_tree: Tensor | None,
    causal: bool,
    scale: float | None,
    window: list[int],
    softcap: float | None,
    chunk: int,
) -> list[Tensor]:
    """Return the gradients of q, k, v and, if given, sinks; `saved` as in `attention.unified_backward`."""
    layer = handle.layer
    batch, tokens, num_heads, v_head_dim = dout.shape
    seq_len, heads = tokens * layer.ranks, HeadPlan(num_heads, kv_heads, layer.axes.ulysses)
    documents, *options = _hashable(cu_seqlens, prefix, prefix_tree, causal, scale, window, softcap, chunk)
    spec, layout = _spec(seq_len, documents, *options), layer.axes.layout(layer.layout, seq_len, documents)
    plan, program = layer._prepare(spec, heads, batch, layout, head_dim, v_head_dim, dout.dtype, dout.device)
    channels = {"ulysses": layer._ulysses, "ring": layer._ring}
    return unified_backward(dout, saved, head_dim, plan=plan, program=program, **channels, sinks=sinks)


@attend_backward.register_fake
def _(handle, dout, saved, head_dim, kv_heads, sinks, *options):
    rows, tokens, heads, v_head_dim = dout.shape
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim)]
    grads = [dout.new_empty(rows, tokens, *shape) for shape in shapes]
    return grads if sinks is None else [*grads, torch.empty_like(sinks)]


def _save(ctx, inputs, output):
    handle, q, k, v, sinks, cu_seqlens, prefix, prefix_tree, *ctx.options = inputs
    ctx.handle, ctx.sizes = handle, (q.shape[-1], k.shape[2])
    out, lse, *exchanged = output
    saved = (lse, *exchanged) if exchanged else (out, lse, q, k, v)
    ctx.save_for_backward(sinks, cu_seqlens, prefix, prefix_tree, *saved)


def _backward(ctx, grads):
    sinks, cu_seqlens, prefix, prefix_tree, *saved = ctx.saved_tensors
    tensors = (sinks, cu_seqlens, prefix, prefix_tree)
    dq, dk, dv, *dsinks = attend_backward(ctx.handle, grads[0], saved, *ctx.sizes, *tensors, *ctx.options)
    return None, dq, dk, dv, *(dsinks or [None]), *[None] * 8


attend.register_autograd(_backward, setup_context=_save)


def ulysses_violations(num_heads: int, ulysses: int) -> list[str]:
    """Return a message if some Ulysses ranks would have no query head, else an empty list."""
    if ulysses <= num_heads:
        return []
    return [
        f"ulysses={ulysses} exceeds the {num_heads} query heads: {ulysses - num_heads} of {ulysses} ulysses ranks have "
        f"no head; use ulysses={num_heads} or less and move the remaining ranks to ring"
    ]


def _check_tensors(shapes: tuple[Described, ...], sinks: torch.Size | None) -> None:
    (q, *_), (k, *_), (v, *_) = shapes
    violations = []
    if len(q) != 4 or len(k) != 4 or len(v) != 4 or k[:3] != v[:3]:
        violations.append(
            "q must be (batch, tokens, num_heads, head_dim), k (batch, tokens, num_kv_heads, head_dim), and v the same "
            "as k except for its own head_dim"
        )
    elif (*q[:2], q[3]) != (*k[:2], k[3]):
        violations.append("q, k and v must have the same batch and tokens, q and k the same head_dim")
    if len({each[1:] for each in shapes}) > 1:
        violations.append("q, k and v must have the same dtype and device")
    if sinks is not None and tuple(sinks) != tuple(q[2:3]):
        violations.append(f"sinks {tuple(sinks)} must have one logit per query head")
    if violations:
        listed = ", ".join(f"{name} {tuple(x[0])} {x[1]} {x[2]}" for name, x in zip("qkv", shapes, strict=True))
        raise ValueError(f"{'; '.join(violations)}; got {listed}")


def _hashable(
    cu_seqlens: Tensor | None,
    prefix: Tensor | None,
    prefix_tree: Tensor | None,
    causal: bool,
    scale: float | None,
    window: Sequence[int],
    *rest: Any,
) -> tuple[Any, ...]:
    """Return the arguments of `_spec` after the first."""
    return *_rows(cu_seqlens, prefix, prefix_tree), causal, scale, tuple(window), *rest


def _rows(cu_seqlens: Tensor | None, prefix: Tensor | None, prefix_tree: Tensor | None) -> tuple[Rows, Rows, Rows]:
    """Return the documents, prefixes and parents of `AttentionSpec`."""
    named = (prefix, "prefix"), (prefix_tree, "prefix_tree")
    prefixes, parents = (rows_of(x, name, "documents") for x, name in named)
    return documents_of(cu_seqlens), prefixes, parents


def _spec(
    seq_len: int,
    documents: Rows,
    prefixes: Rows,
    parents: Rows,
    causal: bool,
    scale: float | None,
    window: tuple[int, int],
    softcap: float | None,
    chunk: int,
) -> AttentionSpec:
    spec = AttentionSpec(causal, window, scale, softcap, documents, prefixes, parents)
    if not chunk:
        return spec
    if parents is not None:
        raise ValueError("prefix_tree is not supported with attention in chunks")
    # Attention within chunks is attention within documents.
    rows = documents or ((0, seq_len),)
    cut = [[at for a, b in pairwise(row) for at in range(a, b, chunk)] + [row[-1]] for row in rows]
    longest = max(map(len, cut))
    return replace(spec, documents=tuple(tuple(row + row[-1:] * (longest - len(row))) for row in cut))


def _window(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return (-1, -1)
    if not (isinstance(window, Sequence) and len(window) == 2 and all(type(side) is int for side in window)):
        raise ValueError(f"window={window!r} must be None or (left, right) in tokens, -1 for no limit")
    return (window[0], window[1])
