"""Activation checkpointing, offloading of what it saves, tiled MLPs, and torch.compile of decoder layers.

Saved activations in host memory are copied there while later layers compute, and back before their backward begins:

    forward    layer i computes   | copies what layers i - 1 and i save to the host; what i - 2 saved is freed
    backward   layer i recomputes | copies back what layer i - 1 saved; what i + 1 saved is freed

So at most two layers' saved tensors are on the device, and a layer waits for a copy only if it takes longer than the
compute of a layer. The last two layers are still there when the backward begins, and are not copied back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._functorch import config as aot_config
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from usp.attention import Keep, KeepResults
from usp.sp.in_order import SequenceOrder
from usp.sp.sp_attention import UnifiedSPAttention


def compile_layers(
    layers: Iterable[nn.Module],
    backend: str,
    eager: Iterable[nn.Module] = (),
    saves_all: bool = False,
    options: dict[str, Any] | None = None,
) -> None:
    """Compile decoder layers, in place, when they are first called. Call it before activation checkpointing and FSDP2.

    backend: of torch.compile, such as inductor. eager: modules inside the layers that stay out of the graphs, because
    what they compute depends on values (a routing of tokens), or because they communicate. saves_all: save all that the
    backward reads, also what element-wise operators and norms compute from other saved tensors. options: of inductor.
    """
    for module in eager:
        module.forward = torch.compiler.disable(module.forward, reason=f"{type(module).__name__} stays eager")
    layers = list(layers)
    # A layer whose submodules have hooks, such as those of tensor parallelism, shares no graphs with other layers.
    limit = torch._dynamo.config.recompile_limit * len(layers)
    for layer in layers:
        layer.forward = _compiled(layer.forward, backend, limit, saves_all, options)


def _compiled(
    forward: Callable[..., Any], backend: str, limit: int, saves_all: bool, options: dict[str, Any] | None
) -> Callable[..., Any]:
    compiled: Any = torch.compile(forward, backend=backend, options=options)
    # Otherwise torch saves what a product of the backward reads, though fused kernels could write it again.
    lean = {x: False for x in ["ban_recompute_materialized_backward"] if hasattr(aot_config, x) and not saves_all}

    def run(*args: Any, **kwargs: Any) -> Any:
        for documents in (kwargs.get("cu_seqlens"), kwargs.get("prefix_tree")):
            if documents is not None:  # another number of them shall not need another graph
                torch._dynamo.maybe_mark_dynamic(documents, documents.dim() - 1)
        # Layers with other numbers (DiffLlama) would get a graph that takes the number, and that a recomputation of the
        # first one would find before its own, which saves other tensors.
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=limit), aot_config.patch(lean):
            return compiled(*args, **kwargs)

    return run


# Passes steps of a layer to a `Keep` in the context that it returns, while a checkpointed layer runs.
Keeping: TypeAlias = Callable[[Keep], AbstractContextManager[Any]]


def apply_activation_checkpointing(
    layers: Iterable[nn.Module],
    mode: str,
    attention: UnifiedSPAttention | None = None,
    offload: bool = False,
    order: SequenceOrder | None = None,
) -> None:
    """Apply activation checkpointing (arXiv 1604.06174) to decoder layers, in place. Call it before FSDP2, and do not
    compile layers with `selective`: their graphs could not be divided at their products.

    `full` saves the input of each layer, one hidden state per token. `attention-saved` additionally saves the tensors
    that are expensive to recompute, so that no kernel, all-to-all or ring hop of `attention` runs twice. Per token of
    this rank, with N query and K KV heads of size H (V for v):

    - ulysses = 1: attention's output (N * V) and lse (N, fp32); q, k and v are recomputed by the projections;
    - ulysses > 1: also q, k, v after their all-to-all (N * H + K * (H + V), more if KV heads are replicated) and the
      output after its own (N * V).

    `selective` saves what `attention-saved` saves, and the output of every linear and of every product of experts; but
    not that of the layer's last linear, which usually nothing needs (and which otherwise is recomputed).

    Recurrent layers and convolutions are recomputed, but their messages are not sent again: incoming states and halos
    are saved, which are small, and with striped tokens on a ring their layers' inputs and outputs.

    Several forwards may precede their backwards. A backward may be split in two (inputs, then weights); each part
    recomputes. Forward hooks inside a layer run again in its backward.

    attention: the attention layer that all `layers` share; required by `selective` and `attention-saved`.
    offload: store saved tensors in host memory; see above.
    order: what recurrent layers and convolutions run through, if `layers` have any.
    """
    if mode == "none":
        return
    saved = () if mode == "full" else (attention, order)
    kept: list[Keeping] = [part.keeping for part in saved if part is not None]
    if mode == "selective":
        kept.append(_Products)
    away = Offload() if offload else None
    for index, layer in enumerate(layers):
        layer.forward = _checkpointed(layer.forward, kept, away, first=index == 0)


def _checkpointed(
    forward: Callable[..., Any], kept: Sequence[Keeping], offload: Offload | None, first: bool
) -> Callable[..., Any]:
    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        saved = offload.layer(hidden.device, first) if offload else None

        def passes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            keep = KeepResults(saved.pack, saved.unpack) if saved else KeepResults()
            return _During(kept, lambda: keep), _During(kept, keep.replay)

        # Around the checkpoint, not inside, so that the hooks offload what it saves: its input.
        with saved_tensors_hooks(saved.pack, saved.unpack) if saved else nullcontext():
            return checkpoint(forward, hidden, *args, use_reentrant=False, context_fn=passes, **kwargs)

    return run


class _During:
    """Context of one pass of a checkpointed layer; each time it is entered, a new `keep` takes the layer's steps."""

    def __init__(self, kept: Sequence[Keeping], keep: Callable[[], Keep]) -> None:
        self.kept, self.keep = kept, keep

    def __enter__(self) -> None:
        self.stack, keep = ExitStack(), self.keep()
        for part in self.kept:
            self.stack.enter_context(part(keep))

    def __exit__(self, *error: Any) -> None:
        self.stack.close()


_LINEAR = "linear"
_PRODUCTS = {torch.ops.aten.mm: _LINEAR, torch.ops.aten.addmm: _LINEAR, torch.ops.aten._grouped_mm: "experts"}


class _Products(TorchDispatchMode):
    """Dispatch mode that passes the matrix products of linears and of experts to `keep`, below autograd: their backward
    is as if everything were saved."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.keep = keep

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if isinstance(self.keep, KeepResults):
            # What a layer computes last is added to its input, so that no backward reads it.
            self.keep.forget_last(_LINEAR)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        def compute() -> tuple[Any]:
            return (func(*args, **(kwargs or {})),)

        if func.overloadpacket not in _PRODUCTS:
            return compute()[0]
        shapes = tuple(tuple(x.shape) for x in args if isinstance(x, Tensor))
        # Without this key, a detached result would not share its version, which tells of changes in place.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            return self.keep((_PRODUCTS[func.overloadpacket], *shapes), compute)[0]


def apply_tiled_mlp(layers: Iterable[nn.Module], tile_tokens: int, backend: str = "") -> None:
    """Run each layer's `mlp` on tiles of `tile_tokens` tokens per row, in place, so that only one tile's intermediate
    activations exist (as in Arctic Long Sequence Training, arXiv 2506.13996, section 3.1.2). Call it before FSDP2. With
    a `backend` of torch.compile, the computation of a tile is a graph; `compile_layers` must leave `mlp` eager.

    Each tile is recomputed in the backward. Inside a checkpointed layer, the MLP's forward runs three times, and still
    only one tile's intermediates exist. Raises ValueError for layers without an `mlp`.
    """
    mlps: list[Any] = [getattr(layer, "mlp", None) for layer in layers]
    if None in mlps:
        raise ValueError("tiled MLPs: every layer must have its feed-forward block in `mlp`")
    for mlp in mlps:
        mlp.forward = _tiled(torch.compile(mlp.forward, backend=backend) if backend else mlp.forward, tile_tokens)


def _tiled(forward: Callable[[Tensor], Tensor], tile_tokens: int) -> Callable[[Tensor], Tensor]:
    def run(x_BSH: Tensor) -> Tensor:
        return torch.cat([checkpoint(forward, x, use_reentrant=False) for x in x_BSH.split(tile_tokens, 1)], dim=1)

    return run


class Copier:
    """Copier between the device and host memory. The device's compute goes on until it is told to wait. This one is for
    tensors in host memory, and leaves them there."""

    def to_host(self, x: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy `x`, which must be kept until the end; return (the copy, an event: its end)."""
        return x, None

    def to_device(self, copies: Sequence[Tensor], after: Any) -> tuple[list[Tensor], Any]:
        """Begin to copy back, after an event of `to_host`; return (new tensors, an event: the end of all copies)."""
        return list(copies), None

    def wait(self, event: Any) -> None:
        """Let what is computed from now on wait for an event."""


class PinnedCopier(Copier):
    """Copier of a GPU's tensors to pinned host memory and back, on a stream for each direction.

    Must be used on the stream of the computation, as hooks of autograd are: that stream allocates the tensors that are
    copied in both directions.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.out, self.back = device, torch.cuda.Stream(device), torch.cuda.Stream(device)

    def to_host(self, x: Tensor) -> tuple[Tensor, Any]:
        copy = torch.empty_like(x, device="cpu", pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            copy.copy_(x, non_blocking=True)
        return copy, self.out.record_event()

    def to_device(self, copies: Sequence[Tensor], after: Any) -> tuple[list[Tensor], Any]:
        tensors = [torch.empty_like(copy, device=self.device, pin_memory=False) for copy in copies]
        # The new memory may be that of tensors which the device still computes with.
        self.back.wait_stream(torch.cuda.current_stream(self.device))
        self.back.wait_event(after)
        with torch.cuda.stream(self.back):
            for x, copy in zip(tensors, copies, strict=True):
                x.copy_(copy, non_blocking=True)
                x.record_stream(self.back)  # it may be freed unread, before any wait
        return tensors, self.back.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


def copier_for(device: torch.device) -> Copier:
    """Return the copier of a device."""
    return PinnedCopier(device) if device.type == "cuda" else Copier()


@dataclass(eq=False)
class Packed:
    """A tensor that a layer has saved, for as long as somebody may ask for it.

    copy: on the host. tensor: on the device; None if it is not there.
    """

    layer: LayerSaved
    tensor: Tensor | None
    copy: Tensor


class LayerSaved:
    """What one forward of a layer saves. `pack` and `unpack` are hooks of autograd and of `usp.attention.KeepResults`.

    device: of the tensors that are copied; others stay where they are.
    previous: what the layer before has saved, whose backward is next; None for the first layer.
    """

    def __init__(self, offload: Offload, device: torch.device, copier: Copier, previous: LayerSaved | None) -> None:
        self._offload, self._device, self._copier, self._previous = offload, device, copier, previous
        self._packed: list[weakref.ref[Packed]] = []
        self._copied: Any = None  # event: all copies are on the host
        self._arriving: Any = None  # event that the backward waits for: no copies to or from the host are left

    def pack(self, x: Tensor) -> Packed | Tensor:
        """Begin to copy a tensor of this layer to the host."""
        if x.device != self._device:
            return x
        x = x.detach()
        copy, self._copied = self._copier.to_host(x)
        self._arriving = self._copied  # a backward that comes before the end frees what is being copied
        packed = Packed(self, x, copy)
        self._packed.append(weakref.ref(packed))
        return packed

    def unpack(self, packed: Packed | Tensor) -> Tensor:
        """Return the tensor on the device, and begin to copy back those of the layer before."""
        if isinstance(packed, Tensor):
            return packed
        layer = packed.layer
        self._offload.on_device([layer._previous, layer] if layer._previous else [layer])
        if layer._arriving is not None:
            layer._copier.wait(layer._arriving)
            layer._arriving = None
        assert packed.tensor is not None
        return packed.tensor

    def load(self) -> None:
        """Begin to copy back what is not on the device."""
        if away := [packed for packed in self._alive() if packed.tensor is None]:
            found, self._arriving = self._copier.to_device([packed.copy for packed in away], self._copied)
            for packed, x in zip(away, found, strict=True):
                packed.tensor = x

    def release(self) -> None:
        """Free the tensors on the device, once their copies are on the host."""
        if present := [packed for packed in self._alive() if packed.tensor is not None]:
            self._copier.wait(self._copied)
            for packed in present:
                packed.tensor = None
        self._arriving = None

    def _alive(self) -> list[Packed]:
        return [packed for reference in self._packed if (packed := reference()) is not None]


class Offload:
    """Offloader of what the checkpointed layers of one model save. Several forwards may precede their backwards."""

    def __init__(self) -> None:
        self._copiers: dict[torch.device, Copier] = {}
        # Layers that have tensors on the device, the last one last; autograd's graph keeps them.
        self._present: list[weakref.ref[LayerSaved]] = []

    def layer(self, device: torch.device, first: bool) -> LayerSaved:
        """Begin the forward of a layer; `first`: of the first one of the model or stage."""
        if device not in self._copiers:
            self._copiers[device] = copier_for(device)
        before = self._present[-1]() if self._present else None
        layer = LayerSaved(self, device, self._copiers[device], None if first else before)
        self.on_device([before, layer] if before else [layer])
        return layer

    def on_device(self, layers: Sequence[LayerSaved]) -> None:
        """Have the tensors of these layers on the device, the last one's first, and no others."""
        for reference in self._present:
            other = reference()
            if other is not None and other not in layers:
                other.release()
        for layer in reversed(layers):
            layer.load()
        self._present = [weakref.ref(layer) for layer in layers]
