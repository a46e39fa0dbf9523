"""Fake tensors that still know the values on which the control flow of a training step depends.

A fake tensor has a shape and no values. The values that a step reads (positions, `cu_seqlens`, the number of rows per
rank, the optimizer's step count) are integers and scalars derived from other integers and scalars: these are computed
for real beside their fake tensors as long as all inputs are known. All other tensors have no values and need none.

Two results cannot be computed, and are the same on every rank instead:

- Routers choose experts evenly: choice k of token t is expert (t K + k) mod E.
- A floating-point number read from unknown values (the gradient norm) is 1.

In collectives every other rank is assumed to have the values of this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

aten, c10d = torch.ops.aten, torch.ops.c10d

# Operators whose output shapes depend on values.
_SHAPED_BY_VALUES = (aten.nonzero, aten.bincount, aten.masked_select)
_UNKNOWN = "a data-dependent value, which a dry run does not have"


class KnownValues:
    """The known values of fake tensors."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()
        self._lost: dict[int, torch.UntypedStorage] = {}  # kept alive so that no other storage reuses their addresses

    def of(self, x: Tensor) -> Tensor | None:
        """Return a real tensor with the values of `x`, or None if they are unknown."""
        if not isinstance(x, FakeTensor):
            return x if _small(x) and not x.is_meta else None
        value = self._values.get(x)
        return None if value is None or value.untyped_storage()._cdata in self._lost else value

    def numbers(self, x: Tensor) -> list[Any]:
        """Return `x.tolist()` of known values."""
        value = self.of(x)
        assert value is not None, f"the values of this {x.dtype} tensor are unknown"
        with _disable_current_modes():
            return value.tolist()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors, and record the values of its results if they can be known.

        Raises:
            NotImplementedError: if control flow depends on unknown values.
        """
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense:
            return self._number(args[0])
        if packet in _SHAPED_BY_VALUES:
            return self._shaped(func, args, kwargs)
        if packet is aten._grouped_mm and args[0].dtype != torch.bfloat16:  # its fake supports only bfloat16
            rows, matrices, *rest = args
            result = func(rows.bfloat16(), matrices.bfloat16(), *rest, **kwargs).to(rows.dtype)
        else:
            result = func(*args, **kwargs)
        if func.namespace == "c10d":
            self._collective(packet, args)
        elif packet is aten.topk:
            self._values[result[1]] = _even_choice(result[1], args[0].shape[args[2] if len(args) > 2 else -1])
        else:
            self._compute(func, args, kwargs, result)
        return result

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = tensors_of(result)
        if outputs and all(map(_small, outputs)) and all(self.of(x) is not None for x in tensors_of((args, kwargs))):
            real = self._really(func, args, kwargs)
            for x, value in zip(outputs, tensors_of(real), strict=True):
                if isinstance(x, FakeTensor):
                    self._values[x] = value
        elif func._schema.is_mutable:
            self._forget(func, args, kwargs)

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Forget the values of the tensors that an operator wrote to, and of their views."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            for x in tensors_of(written):
                value = self._values.get(x)
                if value is not None:
                    self._lost[value.untyped_storage()._cdata] = value.untyped_storage()

    def _really(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        real_args, real_kwargs = tree_map(lambda x: self.of(x) if isinstance(x, Tensor) else x, (args, kwargs))
        with _disable_current_modes():
            return func(*real_args, **real_kwargs)

    def _shaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.of(args[0]) is None:
            raise NotImplementedError(f"the output shape of {func} depends on {_UNKNOWN}")
        real = self._really(func, args, kwargs)
        fake = torch.empty(real.shape, dtype=real.dtype, device=args[0].device)
        self._values[fake] = real
        return fake

    def _number(self, x: Tensor) -> bool | int | float:
        value = self.of(x)
        if value is not None:
            with _disable_current_modes():
                return value.item()
        if not x.dtype.is_floating_point:
            raise NotImplementedError(f"control flow depends on {_UNKNOWN} ({x.dtype})")
        return 1.0

    def _collective(self, packet: Any, args: tuple[Any, ...]) -> None:
        """Record the values that an all-to-all receives; reductions and gathers keep known values."""
        if packet is not c10d.alltoall_base_:
            return
        output, sent, group = args[0], self.of(args[1]), torch.distributed.ProcessGroup.unbox(args[2])
        if sent is not None and not (args[3] or args[4]):
            with _disable_current_modes():
                own = sent.view(group.size(), -1)[group.rank()]
                self._values[output] = own.repeat(group.size()).view(sent.shape)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results."""
    if isinstance(values, Tensor):
        return [values]
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _small(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or x.numel() == 1


def _even_choice(like: Tensor, experts: int) -> Tensor:
    """Return experts in turn, in the shape (tokens, choices) of `like`."""
    with _disable_current_modes():
        return torch.arange(like.numel()).remainder(experts).view(like.shape)
