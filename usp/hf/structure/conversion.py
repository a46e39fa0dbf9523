"""What `save_pretrained` writes for each tensor of a model, found by running transformers' weight conversion.

The conversion runs on parts that know only which box of which tensor they are:

    experts.gate_up_proj (E, 2I, H) -> experts.N.gate_proj.weight (I, H), experts.N.up_proj.weight (I, H), ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from parallel.reallocation.boxes import Box


@dataclass(frozen=True)
class DiskTensor:
    """Tensor `name` in a file: the part `box` of a parameter, without its leading dims of size 1."""

    name: str
    parameter: str
    box: Box
    shape: tuple[int, ...]


def disk_layout(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[DiskTensor]]:
    """Return the tensors on disk that make up each tensor of a whole `model`, by its name.

    shapes: of its parameters and persistent buffers.

    Raises:
        ValueError: if files hold something else than parts of single tensors.
    """
    whole = {name: _Part(name, Box.whole(tuple(shape)), len(shape)) for name, shape in shapes.items()}
    layout: dict[str, list[DiskTensor]] = defaultdict(list)
    try:
        written = revert_weight_conversion(model, whole)  # type: ignore[arg-type]
    except AttributeError as error:  # an operation that is a method of tensors
        raise ValueError(f"files hold more than parts of single parameters, which is not supported: {error}") from error
    for name, part in written.items():
        layout[part.tensor].append(DiskTensor(name, part.tensor, part.box, part.shape))
    return {name: sorted(layout[name], key=lambda tensor: tensor.box.offset) for name in shapes}


@dataclass(frozen=True)
class _Part:
    """Stands for the part `box` of a tensor, without its leading dims of size 1: its last `dims` dims."""

    tensor: str
    box: Box
    dims: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.sizes[len(self.box.sizes) - self.dims :]

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> _Part:
        return self

    def squeeze(self, dim: int) -> _Part:
        if dim or self.shape[0] != 1:
            raise ValueError(f"files hold {self.tensor} without dim {dim}, which is not supported")
        return replace(self, dims=self.dims - 1)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[_Part, ...]:
        at, size = len(self.box.sizes) - self.dims + dim, -(-self.shape[dim] // chunks)
        begin, end = self.box.offset[at], self.box.end[at]

        def part(start: int) -> _Part:
            offset, sizes = list(self.box.offset), list(self.box.sizes)
            offset[at], sizes[at] = start, min(size, end - start)
            return replace(self, box=Box(tuple(offset), tuple(sizes)))

        return tuple(part(start) for start in range(begin, end, size))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.chunk:
            return args[0].chunk(*args[1:], **(kwargs or {}))
        raise ValueError(f"files hold tensors that {function.__name__} makes of parameters, which is not supported")
