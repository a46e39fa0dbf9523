"""Free, restore, offload or share the memory of weights and optimizer states while their tensors stay in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from usp.hf.disk import kept_names, persistent_buffers
from usp.hf.prune import tied_ends
from usp.parallel.reallocation.boxes import local_part


class WeightMemory:
    """The memory of parameters or optimizer states: plain tensors or DTensors, FSDP2's included (between forwards).

    Storages are resized in place, as FSDP2 does with gathered parameters, so that parameters, hooks, views and
    optimizers keep referring to the same tensors.

    weights: returns the tensors, always in the same order.
    """

    def __init__(self, weights: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._weights = weights
        self._freed: list[int] = []  # sizes of the freed storages
        self._host: list[Tensor] = []
        self._arriving: torch.Stream | None = None

    def release(self) -> None:
        """Free the memory and lose the values. Does nothing if already freed."""
        if not self._freed:
            storages = self._storages()
            self._freed = [storage.nbytes() for storage in storages]
            for storage in storages:
                storage.resize_(0)

    def allocate(self) -> None:
        """Allocate freed memory, without initializing it. Does nothing if allocated."""
        if self._freed:
            for storage, size in zip(self._storages(), self._freed, strict=True):
                storage.resize_(size)
        self._freed = []

    def offload(self) -> None:
        """Move the values to host memory, pinned for a device; from the CPU, to other host memory."""
        if self._freed:
            return
        self.load()  # ends what `prefetch` began
        for storage in self._storages():
            pinned = storage.device.type != "cpu"
            values = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            self._host.append(values.copy_(_bytes(storage), non_blocking=True))
        if torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()
        self.release()

    def load(self) -> None:
        """Move offloaded values back to the device. Does nothing if they are there."""
        self.prefetch()
        if self._arriving is not None:
            self._arriving.synchronize()
        self._host, self._arriving = [], None

    def prefetch(self) -> None:
        """Begin to move offloaded values back, while the device computes; `load` must follow before they are used."""
        if not self._host or not self._freed:
            return
        self.allocate()
        storages = self._storages()
        if storages[0].device.type != "cpu":
            self._arriving = torch.Stream(storages[0].device)
            # The new memory may be that of tensors which the device still computes with.
            self._arriving.wait_stream(torch.accelerator.current_stream(storages[0].device))
        with self._arriving or nullcontext():
            for storage, values in zip(storages, self._host, strict=True):
                _bytes(storage).copy_(values, non_blocking=True)

    def _storages(self) -> list[torch.UntypedStorage]:
        return [local_part(weight).untyped_storage() for weight in self._weights()]


def alias_parameters(model: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Replace parameters of an empty model by views of `weights`, by stored names; allocate its buffers and the others.
    What is allocated is not initialized. Boxes and dtypes in `weights` are those of this rank's model."""
    kept, ends = kept_names(model), tied_ends(model)
    own_weights = {ends.get(name, name): own for name, own in model.named_parameters()}
    new = {  # one per tied parameter, under its first name
        name: nn.Parameter(
            _placed_like(own, local_part(weights[name])) if name in weights else torch.empty_like(own, device=device),
            requires_grad=False,
        )
        for name, own in own_weights.items()
    }
    for prefix, module in model.named_modules():
        for name, own in module._parameters.items():
            if own is not None:
                first = kept[f"{prefix}.{name}"]
                module._parameters[name] = new[ends.get(first, first)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def alias_buffers(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the persistent buffers of a model that `weights` has, by name."""
    for name, _ in list(persistent_buffers(model)):
        if name in weights:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner)._buffers[last] = weights[name]


def _placed_like(own: Tensor, values: Tensor) -> Tensor:
    if not isinstance(own, DTensor):
        return values
    shape, stride = own.shape, own.stride()
    return DTensor.from_local(values, own.device_mesh, own.placements, run_check=False, shape=shape, stride=stride)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
