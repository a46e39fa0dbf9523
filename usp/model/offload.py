"""Saved activations in host memory: copied there while later layers compute, and back before their backward begins.

    forward    layer i computes   | copies what layers i - 1 and i save to the host; what i - 2 saved is freed
    backward   layer i recomputes | copies back what layer i - 1 saved; what i + 1 saved is freed

So at most two layers' saved tensors are on the device, and a layer waits for a copy only if it takes longer than the
compute of a layer. The last two layers are still there when the backward begins, and are not copied back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


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

    def to_host(self, x: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        copy = torch.empty_like(x, device="cpu", pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            copy.copy_(x, non_blocking=True)
        return copy, self.out.record_event()

    def to_device(self, copies: Sequence[Tensor], after: torch.cuda.Event) -> tuple[list[Tensor], torch.cuda.Event]:
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


class Packed:
    """A tensor that a layer has saved, for as long as somebody may ask for it.

    copy: on the host. tensor: on the device; None if it is not there.
    """

    def __init__(self, layer: LayerSaved, tensor: Tensor, copy: Any) -> None:
        self.layer, self.tensor, self.copy = layer, cast("Tensor | None", tensor), copy


class LayerSaved:
    """What one forward of a layer saves. `pack` and `unpack` are hooks of autograd and of `attention.KeepResults`.

    device: of the tensors that are copied; others stay where they are.
    previous: what the layer before has saved, whose backward is next; None for the first layer.
    """

    def __init__(self, offload: Offload, device: torch.device, copier: Copier, previous: LayerSaved | None) -> None:
        self._offload, self._device, self._copier, self._previous = offload, device, copier, previous
        self._packed: list[weakref.ref[Packed]] = []
        self._copied: Any = None  # event: all copies are on the host
        self._arriving: Any = None  # event: all are on the device again; None where nobody needs to wait

    def pack(self, x: Tensor) -> Packed | Tensor:
        """Begin to copy a tensor of this layer to the host."""
        if x.device != self._device:
            return x
        x = x.detach()
        copy, self._copied = self._copier.to_host(x)
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
