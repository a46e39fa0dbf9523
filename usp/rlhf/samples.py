"""Samples, the values that calls exchange; their seeds, mini-batches and division over data-parallel ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

from torch import Tensor

from usp.data.rows import balanced


@dataclass(frozen=True, eq=False)
class Samples:
    """Values of a subset of the samples of a step, on the CPU.

    Attributes:
        ids: sample ids, ascending; the same id names the same sample in every call.
        values: key -> one tensor per sample: (tokens,) for per-token values, 0-dim for one number per sample.
    """

    ids: tuple[int, ...]
    values: Mapping[str, Sequence[Tensor]]

    def __post_init__(self) -> None:
        violations = [
            f"{key} has {len(values)} values for {len(self.ids)} samples"
            for key, values in self.values.items()
            if len(values) != len(self.ids)
        ]
        if list(self.ids) != sorted(set(self.ids)):
            violations.append(f"ids {self.ids} must be unique and ascending")
        if violations:
            raise ValueError("; ".join(violations))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: str) -> Sequence[Tensor]:
        return self.values[key]

    def only(self, keys: Iterable[str]) -> Samples:
        """Select keys. Raises KeyError for a missing one."""
        return Samples(self.ids, {key: self.values[key] for key in keys})

    def of(self, ids: Sequence[int]) -> Samples:
        """Select samples by id. Raises KeyError for a missing one."""
        place = {sample: index for index, sample in enumerate(self.ids)}
        chosen = [place[sample] for sample in sorted(ids)]
        return Samples(tuple(sorted(ids)), {key: [v[i] for i in chosen] for key, v in self.values.items()})

    def updated(self, other: Samples) -> Samples:
        """Add or replace the keys of `other`, which must hold the same samples."""
        if other.ids != self.ids:
            raise ValueError(f"expected samples {self.ids}, got {other.ids}")
        return Samples(self.ids, {**self.values, **other.values})


def derived_seed(seed: int, key: object) -> int:
    """Return a seed for `key` (a step, a call, a sample), different from those of other keys."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=7).digest(), "big")


def mini_batch_ids(samples: int, mini_batches: int, number: int, unit: int = 1) -> range:
    """Return the consecutive sample ids of mini-batch `number`, split at multiples of `unit`."""
    units = samples // unit
    return range(number * units // mini_batches * unit, (number + 1) * units // mini_batches * unit)


# For each data-parallel index, the sample ids of each mini-batch.
Partition: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]


def batch_violation(samples: int, mini_batches: int, unit: int) -> str:
    """Return why `samples` cannot be split into mini-batches of whole units, or an empty string."""
    if samples % unit:
        return f"{samples} samples must be a multiple of {unit}, the samples that stay on one rank"
    if samples // unit < mini_batches:
        empty = f"would leave {mini_batches - samples // unit} empty"
        use = f"use mini_batches={samples // unit} or fewer, or more samples"
        return f"mini_batches={mini_batches} of {samples} samples in groups of {unit} {empty}: {use}"
    return ""


def balance(ids: Sequence[int], weights: Sequence[int], parts: int, unit: int = 1) -> tuple[tuple[int, ...], ...]:
    """Split ids into parts of similar weight, each ascending, by `usp.data.rows.balanced`.

    Units are consecutive ids that begin at multiples of `unit`. A part is empty only if there are fewer units than
    parts.

    weights: by id.
    """
    units = [tuple(members) for _, members in groupby(ids, lambda number: number // unit)]
    chosen = balanced([sum(weights[i] for i in members) for members in units], parts)
    own: list[list[int]] = [[] for _ in range(parts)]
    for members, part in zip(units, chosen, strict=True):
        own[part] += members
    return tuple(map(tuple, own))


def kept_together(samples: int, group: int, parts: int) -> int:
    """Return how many samples of a prompt's `group` stay on one part, so that none of them is without samples."""
    return next((n for n in range(group, 0, -1) if group % n == 0 and samples >= n * parts), 1)


def partition(weights: Sequence[int], parts: int, mini_batches: int = 1, unit: int = 1, group: int = 1) -> Partition:
    """Balance every mini-batch over the parts separately. weights: of every sample of the step, by id; group: samples
    with a common prompt, which stay together as in `kept_together`."""
    batches = [mini_batch_ids(len(weights), mini_batches, number, unit) for number in range(mini_batches)]
    split = [balance(batch, weights, parts, max(unit, kept_together(len(batch), group, parts))) for batch in batches]
    return tuple(tuple(batch[part] for batch in split) for part in range(parts))


def fingerprint(value: object) -> str:
    """Hash dataclasses, collections and plain values; functions by their names, other objects by their plain fields."""
    return hashlib.blake2b(repr(_plain(value)).encode(), digest_size=16).hexdigest()


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return sorted((repr(_plain(key)), _plain(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return sorted(repr(_plain(item)) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, {field.name: _plain(getattr(value, field.name)) for field in fields(value)}]
    if name := getattr(value, "__qualname__", ""):
        return f"{value.__module__}.{name}"
    plain_fields = {k: v for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, bool | int | float | str)}
    return [type(value).__qualname__, plain_fields]
