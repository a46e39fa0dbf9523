"""The memory of a training step by category: which tensor storages are alive, and their sizes.

A storage counts from the operator that creates it until its last reference is gone, and resizing is tracked, by which
FSDP2 frees gathered parameters. Workspaces inside an operator and allocator overhead are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .fake_world import HostMemory

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer states"
WHOLE, ACTIVATIONS, TRANSIENT = "whole parameters and gradients", "activations", "transient"
_HOST = "host"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, WHOLE, ACTIVATIONS, TRANSIENT)


@dataclass(eq=False)
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    born: int
    changed: int  # time of the last change of size
    nbytes: int = 0
    category: str = TRANSIENT


class LiveMemory:
    """The storages that are alive, and those that were alive at the peak.

    Args:
        host: counts the storages that `offload` moves.

    Attributes:
        peak_bytes: the maximum since `restart`.
        at_peak: the peak by category; a storage counts under its last label, even if that came after the peak.
        now: a clock, the number of `see` calls so far.
    """

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
                reference = weakref.ref(storage, lambda _, key=key: self._gone(key))  # type: ignore[misc]
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

    def _gone(self, key: int) -> None:
        self._resize(self._storages.pop(key), 0)

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
