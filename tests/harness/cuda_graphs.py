"""CUDA graphs without a GPU.

A capture records the operators of a block and undoes what they wrote; a replay runs them again on the memory that they
had, whatever Python would do now. So a step that depends on anything but static tensors gives other results when it is
replayed: on a number of the host, on a tensor that moved, on something that the capture has advanced.

What a capture does not permit raises `NotCapturable`: values that the host reads, shapes that depend on values, and
copies between devices. Fake tensors have no values to undo or replay; two captures of them are compared by `records`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from usp.predict.fake_world import tensors_of, written

aten = torch.ops.aten
_PLAIN = {Tensor, torch.nn.Parameter, FakeTensor}
_FORBIDDEN = {
    **dict.fromkeys((aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal), "the host reads a value"),
    **dict.fromkeys((aten.nonzero, aten.masked_select, aten.bincount), "a shape depends on values"),
    **dict.fromkeys((aten._unique2, aten.unique_dim, aten.unique_consecutive), "a shape depends on values"),
}
_COLLECTIVES = "c10d"  # operators whose schema does not say that they write to their first argument


class NotCapturable(RuntimeError):
    """Raised for an operator that no graph can have."""


@dataclass(frozen=True)
class Call:
    """An operator. record: its name and arguments, with tensors by shape, dtype and memory."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    record: tuple[Any, ...]


class Capture(TorchDispatchMode):
    """The operators of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._made: dict[int, int] = {}  # storages of the block, numbered; the calls keep them alive
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # others, and what they held
        self._patch = patch.object(Tensor, "tolist", _refuse)

    def __enter__(self) -> Capture:
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._patch.stop()
        for storage, held in self._before.values():
            storage.copy_(held)

    @property
    def records(self) -> list[tuple[Any, ...]]:
        return [call.record for call in self.calls]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if not _PLAIN.issuperset(types):
            return NotImplemented
        _check(func, args, kwargs)
        record = func, tree_map(self._described, args), tree_map(self._described, tuple(sorted(kwargs.items())))
        changed = args[0] if func.namespace == _COLLECTIVES else list(written(func, args, kwargs))
        for x in tensors_of(changed):
            storage = x.untyped_storage()
            if storage._cdata not in self._made and not isinstance(x, FakeTensor):
                self._before.setdefault(storage._cdata, (storage, storage.clone()))
        known = {x.untyped_storage()._cdata for x in tensors_of((args, kwargs))}
        result = func(*args, **kwargs)
        for x in tensors_of(result):
            if (made := x.untyped_storage()._cdata) not in known:
                self._made.setdefault(made, len(self._made))
        self.calls.append(Call(func, args, kwargs, result, record))
        return result

    def _described(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()._cdata
            memory = ("made", self._made[storage]) if storage in self._made else ("static", storage)
            return memory, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device.type
        return x if isinstance(x, int | float | str | bool | torch.dtype | torch.device | None) else type(x).__name__

    def replay(self) -> None:
        for call in self.calls:
            result = call.function(*call.args, **call.kwargs)
            for x in tree_leaves(result):
                if isinstance(x, torch.ScriptObject):
                    dist.Work.unbox(x).wait()
            if call.function.namespace == "_c10d_functional":
                result = tree_map(torch.ops._c10d_functional.wait_tensor, result)
            for x, again in zip(tensors_of(call.result), tensors_of(result), strict=True):
                if x.untyped_storage()._cdata != again.untyped_storage()._cdata:
                    x.copy_(again)


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packet = func.overloadpacket
    if packet in _FORBIDDEN:
        raise NotCapturable(f"{_FORBIDDEN[packet]}: {func}")
    indices = args[1] if packet in (aten.index, aten.index_put, aten.index_put_) else ()
    fills = packet in (aten.index_put, aten.index_put_) and args[2].dim() == 0 and args[2].device.type == "cpu"
    if not fills and any(index is not None and index.dtype == torch.bool for index in indices):
        raise NotCapturable(f"a boolean mask: {func}")
    if packet is aten.repeat_interleave and isinstance(args[-1], Tensor) and kwargs.get("output_size") is None:
        raise NotCapturable(f"a shape depends on values: {func}")
    copies, target = packet in (aten._to_copy, aten.copy_, aten.to), kwargs.get("device")
    # Kernels take the number of a tensor of the host without dimensions as an argument.
    devices = {x.device.type for x in tensors_of((args, kwargs)) if x.dim() or copies}
    devices |= {torch.device(target).type} if copies and target is not None else set()
    if len(devices) > 1:
        raise NotCapturable(f"a copy between devices: {func}")


def _refuse(x: Tensor) -> None:
    raise NotCapturable("the host reads values: tolist")


class ReplayedGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operators, self.replays = Capture(), 0

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.operators.__enter__()

    def capture_end(self) -> None:
        self.operators.__exit__(None, None, None)

    def replay(self) -> None:
        self.replays += 1
        self.operators.replay()


class _Stream:
    def __init__(self, *device: Any) -> None:
        pass

    def wait_stream(self, other: _Stream) -> None:
        pass


@contextmanager
def graphs_on_cpu() -> Iterator[list[ReplayedGraph]]:
    """Let code that captures CUDA graphs work on CPU tensors in the block; the graphs are listed. Waiting for a device
    fails, and so does returning memory to it, of which it has plenty."""
    graphs: list[ReplayedGraph] = []

    def made() -> ReplayedGraph:
        graphs.append(ReplayedGraph())
        return graphs[-1]

    replacements: dict[str, Callable[..., Any]] = {
        "CUDAGraph": made,
        "graph_pool_handle": object,
        "mem_get_info": lambda device: (1 << 40, 1 << 40),
        "empty_cache": lambda: pytest.fail("memory is returned to the device"),
        "synchronize": lambda *device: pytest.fail("the host waits for the device"),
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": nullcontext,
    }
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(patch.object(torch.cuda, name, replacement))
        yield graphs
