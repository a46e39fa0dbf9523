"""Counts of what passes torch's dispatcher in a step: operators, collectives, and the tensor storages that are alive.

A storage counts from the operator that creates it until its last reference is gone, and resizing is tracked, by which
FSDP2 frees gathered parameters. Workspaces inside an operator and allocator overhead are not seen."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from usp.attention import SparseProgram, sparse
from usp.hf import indexers
from usp.parallel import Hardware
from usp.parallel.wire import SentBytes

from .compute import TILE, Product, Seconds, attention_flops, matmul_flops
from .fake_world import HostMemory, KnownValues, tensors_of, written

aten = torch.ops.aten

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer states"
WHOLE, ACTIVATIONS, TRANSIENT = "whole parameters and gradients", "activations", "transient"
_HOST = "host"
Tiles = Callable[[int, int], Iterator[slice]]
CATEGORIES: tuple[str, ...] = (PARAMETERS, GRADIENTS, OPTIMIZER, WHOLE, ACTIVATIONS, TRANSIENT)


@dataclass(eq=False)
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    born: int
    changed: int  # time of the last change of size
    nbytes: int = 0
    category: str = TRANSIENT


class LiveMemory:
    """The storages that are alive, and those that were alive at the peak; `host` counts those that `offload` moves.
    `peak_bytes` is the maximum since `restart`, `at_peak` the peak by category: a storage counts under its last label,
    even if that came after the peak. `now` is a clock, the number of `see` calls so far."""

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._storages: dict[int, _Storage] = {}
        self._bytes = dict.fromkeys(CATEGORIES, 0)
        self.now = self._peak_time = self.current_bytes = self.peak_bytes = 0
        self.at_peak = dict(self._bytes)

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of an operator's results."""
        self.now += 1
        for x in tensors:
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self._storages:
                reference = weakref.ref(storage, lambda _, key=key: self._resize(self._storages.pop(key), 0))  # type: ignore[misc]
                self._storages[key] = _Storage(reference, self.now, self.now)
                self._resize(self._storages[key], storage.nbytes())

    def label(self, tensors: Iterable[Tensor], category: str, again: bool = True) -> None:
        """Set the category of the storages of `tensors`; `again` also replaces earlier labels."""
        for x in tensors:
            storage = self._storages.get(x.untyped_storage()._cdata)
            if storage is not None and storage.category != _HOST and (again or storage.category == TRANSIENT):
                self._move(storage, category)

    def label_since(self, time: int, category: str) -> None:
        """Set the category of all live storages that were created after `time` and have no label yet."""
        for storage in self._storages.values():
            if storage.born > time and storage.category == TRANSIENT:
                self._move(storage, category)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors` as host memory from now on."""
        for x in tensors:
            storage = self._storages.get(x.untyped_storage()._cdata)
            if storage is not None and storage.category != _HOST:
                nbytes = storage.nbytes
                self._resize(storage, 0)
                storage.category = _HOST
                self._resize(storage, nbytes)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = -1
        self._note_peak()

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Track storages that are resized, which does not go through an operator."""
        resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            found = self._storages.get(storage._cdata)
            if found is not None:
                self._resize(found, storage.nbytes())
            return result

        with patch.object(torch.UntypedStorage, "resize_", followed):
            yield

    def _resize(self, storage: _Storage, nbytes: int) -> None:
        more, storage.nbytes, storage.changed = nbytes - storage.nbytes, nbytes, self.now
        if storage.category == _HOST:
            self._host.add(more)
            return
        self._bytes[storage.category] += more
        self.current_bytes += more
        self._note_peak()

    def _note_peak(self) -> None:
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_time, self.at_peak = self.current_bytes, self.now, dict(self._bytes)

    def _move(self, storage: _Storage, category: str) -> None:
        places = [self._bytes]
        if storage.changed <= self._peak_time:  # it had this size at the peak
            places.append(self.at_peak)
        for place in places:
            place[storage.category] -= storage.nbytes
            place[category] += storage.nbytes
        storage.category = category


_NO_KERNEL = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    *(aten._unsafe_view, aten.lift_fresh, aten.resize_, aten.set_),
}
_ONLY_WRITES = {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.zero_, aten.fill_}
_READS_ROWS = {aten.embedding, aten.gather, aten.index, aten.index_select}
_WRITES_ROWS = {aten.scatter_, aten.scatter_add_, aten.index_add_, aten.index_copy_, aten.index_put_}


@dataclass
class Work:
    """The operators of a rank that take time on a device, and what determines how much."""

    # (FLOPs, elements read and written, bytes of one, "", FLOPs that tiles add) of each matrix product
    products: Counter[tuple[int, int, int, str, int]] = field(default_factory=Counter)
    # (FLOPs, tokens of the shorter side, backward, without a mask) of each attention kernel
    attention: Counter[tuple[int, int, bool, bool]] = field(default_factory=Counter)
    nbytes: int = 0  # read and written by all other operators
    launches: int = 0  # number of operators

    @property
    def attention_flops(self) -> int:
        return sum(number * flops for (flops, *_), number in self.attention.items())

    @property
    def flops(self) -> int:
        return self.attention_flops + sum(number * flops for (flops, *_), number in self.products.items())

    def count(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, known: KnownValues, times: int
    ) -> None:
        """Count equal calls of an operator. What it overwrites is not read: the target of `copy_`, and any `out`."""
        packet = func.overloadpacket
        copies = packet.__name__ in ("split_with_sizes_copy", "chunk_cat")  # FSDP2's
        if (func.namespace != "aten" and not copies) or func.is_view or packet in _NO_KERNEL:
            return
        self.launches += times
        results = tensors_of(result) or tensors_of(list(written(func, args, kwargs)))
        read = tensors_of((args[packet is aten.copy_ :], {name: x for name, x in kwargs.items() if name != "out"}))
        operands, of_vectors = [*read, *results], any(1 in x.shape[-2:] for x in read if x.dim() > 1)
        if flops := attention_flops(func, args, kwargs, known.numbers):
            unmasked = attention_flops(func, tuple(False if x is True else x for x in args), {}, known.numbers)
            backward, lengths = "backward" in str(packet), [x for x in args if type(x) is int]
            side = min(lengths or (x.shape[2] for x in args[backward : backward + 2]))
            self.attention[flops, side, backward, flops == unmasked] += times
        elif not of_vectors and (flops := matmul_flops(func, args, kwargs, result)):
            grouped = packet is aten._grouped_mm  # by the matrix of each group, or its gradient
            matrix = max((x.numel() for x in (args[1], results[0]) if x.dim() == 3), default=0) if grouped else 0
            self.products[flops, sum(x.numel() for x in operands), results[0].itemsize, "", TILE * matrix] += times
        else:
            if packet in _ONLY_WRITES:
                operands = results
            elif packet in _READS_ROWS:
                operands = 2 * results
            elif packet in _WRITES_ROWS:
                operands = 2 * tensors_of(args[1:])
            # The elements of an expanded tensor count once.
            self.nbytes += times * sum(min(x.numel() * x.itemsize, x.untyped_storage().nbytes()) for x in operands)

    def seconds(self, hardware: Hardware, dtype: str, kernel: str) -> Seconds:
        """Return the time of the operators, with the rates of an attention kernel."""
        return Seconds(
            sum(number * Product(*each).seconds(hardware, dtype) for each, number in self.products.items()),
            sum(
                number * hardware.attention_seconds(kernel, flops, side, dtype, backward=backward, full=full)
                for (flops, side, backward, full), number in self.attention.items()
            ),
            hardware.memory_seconds(self.nbytes),
        )


_PLAIN = {Tensor, nn.Parameter, FakeTensor}
FSDP_COLLECTIVES = ("_allgather_base_", "_reduce_scatter_base_")


class StepMeter(TorchDispatchMode):
    """A mode inside `FakeTensorMode` that runs operators and counts them; `host` counts what is offloaded. `memory` has
    the storages of all results, in which FSDP2's buffers are labelled, `wire` the bytes of collectives, `work` the
    operators of forward and backward, and `update` the optimizer's once `counting` is that."""

    def __init__(self, host: HostMemory) -> None:
        super().__init__()
        self.known, self.memory, self.wire = KnownValues(), LiveMemory(host), SentBytes()
        self._times = 1  # that an operator is counted
        self.restart()

    def restart(self) -> None:
        """Forget the operators and the peak so far."""
        self.counting = self.work = Work()
        self.update = Work()
        self.memory.restart()

    @contextmanager
    def abridging_tiles(self) -> Iterator[None]:
        """Run few of the tiles of sparse attention and of its indexers. What they choose is unknown: each key that the
        mask shows to some of a rank's queries is assumed to be chosen by one of these."""
        choose, few = SparseProgram.chosen, partial(self._few, sparse.token_tiles)

        def chosen(program: SparseProgram, indices_Tk: Tensor) -> tuple[Tensor, Tensor]:
            slots, any_chose = choose(program, indices_Tk)
            self.known.know(any_chose, _shown(program, self.known))
            return slots, any_chose

        with (
            patch.object(sparse, "token_tiles", few),
            patch.object(indexers, "token_tiles", few),
            patch.object(SparseProgram, "chosen", chosen),
        ):
            yield

    def _few(self, every: Tiles, tokens: int, elements: int) -> Iterator[slice]:
        """Yield the first tile, the second, which is counted as often as there are others of its size, and the last."""
        first, *rest = every(tokens, elements)
        last, before = rest[1:][-1:], (self._times, self.known.routes)
        for tile, times in zip((first, *rest[:1], *last), (1, len(rest) - len(last), 1), strict=False):
            self._times, self.known.routes = before[0] * times, False
            yield tile
            self._times, self.known.routes = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # a shortcut for the most frequent call
            return args[0].device if not isinstance(args[0], FakeTensor) else args[0].fake_device
        if not _PLAIN.issuperset(types):
            return NotImplemented  # DTensor calls operators on local tensors, which come here again
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return func(*args, **kwargs)  # a device mesh is computed with real tensors
        self.wire.count(func, args, self._times)
        result = self.known.call(func, args, kwargs)
        made = [x for x in tensors_of(result) if isinstance(x, FakeTensor) and x.fake_device.type != "meta"]
        self.memory.see(made)
        if func.namespace == "fsdp" or func.overloadpacket.__name__ in FSDP_COLLECTIVES:
            used = [x for x in tensors_of((args, kwargs)) if isinstance(x, FakeTensor)]
            self.memory.label(used + made, WHOLE, again=False)
        self.counting.count(func, args, kwargs, result, self.known, self._times)
        return result


@_disable_current_modes()
def _shown(program: SparseProgram, known: KnownValues) -> Tensor:
    """Return for each slot (ring, T) whether the mask shows it to any query."""
    first, last, slots = (cast(Tensor, known.of(x)).long() for x in (program.first, program.last, program.slots))
    rows, length = slots.shape
    shown, row = torch.zeros(rows, length + 1), torch.arange(len(first)) // (len(first) // rows)
    seeing = last >= first
    for bound, step in ((first, 1.0), (last + 1, -1.0)):
        shown.index_put_((row[seeing], bound[seeing]), torch.tensor(step), accumulate=True)
    flags = torch.zeros(program.ring * len(first), dtype=torch.bool)
    flags[slots] = shown.cumsum(1)[:, :length] > 0
    return flags.view(program.ring, -1)
