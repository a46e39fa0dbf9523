"""The data that model calls exchange: values by sample and key, so that whole samples move between layouts.

Per-token values have one entry per token of the sample. Entry t describes the prediction made AT token t, of token
t + 1: its log-probability, the value of the state it is made in, its advantage, whether it counts (`mask`). The last
token predicts nothing, so its entry is 0, except for values, where it is the value of the final state, from which a
truncated response would continue. So log-probabilities, masks and advantages are sharded in the same way as the ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


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
