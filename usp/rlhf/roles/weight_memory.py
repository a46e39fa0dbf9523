"""The memory of a model's weights: taken away and given back while the model stays as it is, or another model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.reallocation.boxes import local_box, local_part
from usp.hf.models import kept_names


class WeightMemory:
    """The memory of the parameters of `modules`, plain or DTensors, FSDP2's included, between its forwards.

    Their storages are resized, as FSDP2 does with what it gathers: parameters, hooks, views and optimisers keep
    referring to the same tensors.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._freed: list[int] = []  # the sizes of storages without memory
        self._host: list[Tensor] = []

    def release(self) -> None:
        """Take the memory away, and with it the values. Nothing to do where it is taken."""
        if not self._freed:
            storages = self._storages()
            self._freed = [storage.nbytes() for storage in storages]
            for storage in storages:
                storage.resize_(0)

    def allocate(self) -> None:
        """Give it back, with any content. Nothing to do where there is memory."""
        if self._freed:
            for storage, size in zip(self._storages(), self._freed, strict=True):
                storage.resize_(size)
        self._freed = []

    def offload(self) -> None:
        """Move the values to pinned memory of the host. Nothing to do for weights on the CPU."""
        if self._host or self._freed or not self._on_device():
            return
        self._host = [_bytes(storage).to("cpu").pin_memory() for storage in self._storages()]
        self.release()

    def load(self) -> None:
        """Move offloaded values back."""
        if not self._host:
            return
        self.allocate()
        for storage, values in zip(self._storages(), self._host, strict=True):
            _bytes(storage).copy_(values, non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        self._host = []

    def _storages(self) -> list[torch.UntypedStorage]:
        return [local_part(weight).untyped_storage() for module in self._modules for weight in module.parameters()]

    def _on_device(self) -> bool:
        return any(storage.device.type != "cpu" for storage in self._storages())


def live_in(model: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Make parameters of an empty model views of `weights`, by name, and give its buffers memory without values.

    Raises:
        ValueError: naming parameters of which `weights` hold no tensor of this rank's box and dtype.
    """
    kept = kept_names(model)
    apart = [
        name
        for name, own in model.named_parameters()
        if name not in weights or local_box(weights[name]) != local_box(own) or weights[name].dtype != own.dtype
    ]
    if apart:
        raise ValueError(f"the weights to live in must hold the boxes of {', '.join(apart[:5])}")
    shared = {  # by the names they are kept under, so that tied parameters stay one
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


def _placed_like(own: Tensor, values: Tensor) -> Tensor:
    if not isinstance(own, DTensor):
        return values
    shape, stride = own.shape, own.stride()
    return DTensor.from_local(values, own.device_mesh, own.placements, run_check=False, shape=shape, stride=stride)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
