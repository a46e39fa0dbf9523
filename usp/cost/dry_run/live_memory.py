"""Which tensor storages live, how large they are, and what they are for: the memory of a training step by category.

Storage counts from the operator that makes it until its last reference goes, and follows resizing, by which FSDP2 gives
gathered parameters up. What an operator takes and gives back while it runs is not seen, nor what an allocator adds.
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

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer states"
WHOLE, ACTIVATIONS, TRANSIENT = "whole parameters and gradients", "activations", "transient"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, WHOLE, ACTIVATIONS, TRANSIENT)


@dataclass(eq=False)
class _Storage:
    reference: weakref.ref[torch.UntypedStorage]
    born: int
    changed: int  # when its size last was another
    nbytes: int = 0
    category: str = TRANSIENT


class LiveMemory:
    """What lives now, and what lived when most did.

    Attributes:
        peak_bytes: the most at one time since `restart`.
        at_peak: its parts by category; every storage under the last one it was given, even if that came later.
        now: the number of `see` calls so far, as a clock.
    """

    def __init__(self) -> None:
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
        """Say what the storages of some tensors are for. `again`: those too that are for something already."""
        for x in tensors:
            storage = self._storages.get(x.untyped_storage()._cdata)
            if storage is not None and (again or storage.category == TRANSIENT):
                self._move(storage, category)

    def label_since(self, time: int, category: str) -> None:
        """Say what all storages are for that live, were made after `time` and belong to nothing yet."""
        for storage in self._storages.values():
            if storage.born > time and storage.category == TRANSIENT:
                self._move(storage, category)

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = -1
        self._note_peak()

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Inside, storages that are resized are followed; operators do not show that."""
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
        self._bytes[storage.category] += more
        self.current_bytes += more
        self._note_peak()

    def _note_peak(self) -> None:
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_time, self.at_peak = self.current_bytes, self.now, dict(self._bytes)

    def _move(self, storage: _Storage, category: str) -> None:
        places = [self._bytes]
        if storage.changed <= self._peak_time:  # it was there at the peak, of this size
            places.append(self.at_peak)
        for place in places:
            place[storage.category] -= storage.nbytes
            place[category] += storage.nbytes
        storage.category = category
