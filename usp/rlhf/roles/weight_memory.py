"""Free, restore, offload or share the memory of a model's weights while the model object stays in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.reallocation.boxes import local_box, local_part
from usp.hf.models import kept_names


class WeightMemory:
    """The memory of the parameters of `modules`: plain tensors or DTensors, those of FSDP2 included (between forwards).

    Storages are resized in place, as FSDP2 does with gathered parameters, so that parameters, hooks, views and
    optimizers keep referring to the same tensors.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
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
        return [local_part(weight).untyped_storage() for module in self._modules for weight in module.parameters()]


def alias_parameters(model: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Replace the parameters of an empty model by views of `weights`, by name; allocate its buffers uninitialized.

    Raises:
        ValueError: naming parameters for which `weights` has no tensor with this rank's box and dtype.
    """
    kept = kept_names(model)
    mismatched = [
        name
        for name, own in model.named_parameters()
        if name not in weights or local_box(weights[name]) != local_box(own) or weights[name].dtype != own.dtype
    ]
    if mismatched:
        raise ValueError(f"the weights to share must have the same boxes and dtype for {', '.join(mismatched[:5])}")
    shared = {  # one per tied parameter, under its first name
        name: nn.Parameter(_placed_like(own, local_part(weights[name])), requires_grad=False)
        for name, own in model.named_parameters()
    }
    for prefix, module in model.named_modules():
        for name, own in module._parameters.items():
            if own is not None:
                module._parameters[name] = shared[kept[f"{prefix}.{name}"]]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints hold, by name, such as the biases with which DeepSeek-V3 chooses experts."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def alias_buffers(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the persistent buffers of a model by those of `weights`."""
    for name in persistent_buffers(model):
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = weights[name]


def _placed_like(own: Tensor, values: Tensor) -> Tensor:
    if not isinstance(own, DTensor):
        return values
    shape, stride = own.shape, own.stride()
    return DTensor.from_local(values, own.device_mesh, own.placements, run_check=False, shape=shape, stride=stride)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
