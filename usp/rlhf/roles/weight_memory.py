"""Free, restore, offload or share the memory of a model's weights while the model object stays in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.reallocation.boxes import local_box, local_part
from usp.hf.models import kept_names
from usp.hf.prune import tied_ends


class WeightMemory:
    """The memory of parameters: plain tensors or DTensors, those of FSDP2 included (between forwards).

    Storages are resized in place, as FSDP2 does with gathered parameters, so that parameters, hooks, views and
    optimizers keep referring to the same tensors.

    Args:
        weights: returns the parameters, always in the same order.
    """

    def __init__(self, weights: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._weights = weights
        self._freed: list[int] = []  # sizes of the freed storages
        self._host: list[Tensor] = []

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
        """Move the values to pinned host memory. Does nothing for weights on the CPU."""
        if self._host or self._freed or all(storage.device.type == "cpu" for storage in self._storages()):
            return
        self._host = [_bytes(storage).to("cpu").pin_memory() for storage in self._storages()]
        self.release()

    def load(self) -> None:
        """Move offloaded values back to the device."""
        if not self._host:
            return
        self.allocate()
        for storage, values in zip(self._storages(), self._host, strict=True):
            _bytes(storage).copy_(values, non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        self._host = []

    def _storages(self) -> list[torch.UntypedStorage]:
        return [local_part(weight).untyped_storage() for weight in self._weights()]


def alias_parameters(model: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Replace parameters of an empty model by views of `weights`, by stored names; allocate its buffers and the others.

    What is allocated is not initialized.

    Raises:
        ValueError: naming parameters of which `weights` has another box or dtype than this rank's model.
    """
    kept, ends = kept_names(model), tied_ends(model)
    own_weights = {ends.get(name, name): own for name, own in model.named_parameters()}
    mismatched = [
        name
        for name, shared in weights.items()
        if (own := own_weights.get(name)) is None or local_box(shared) != local_box(own) or shared.dtype != own.dtype
    ]
    if mismatched:
        raise ValueError(f"the weights to share must have the same boxes and dtype for {', '.join(mismatched[:5])}")
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


def alias_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Replace buffers of a model, by name."""
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer


def _placed_like(own: Tensor, values: Tensor) -> Tensor:
    if not isinstance(own, DTensor):
        return values
    shape, stride = own.shape, own.stride()
    return DTensor.from_local(values, own.device_mesh, own.placements, run_check=False, shape=shape, stride=stride)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
