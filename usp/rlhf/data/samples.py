"""What model calls exchange: values by sample and key, so that data moves between layouts by whole samples.

Per-token values have one entry per token of the sample, and entry t is about the prediction made AT token t, of token
t + 1: its log-probability, the value of the state it is made in, its advantage, whether it counts (`mask`). The last
token predicts nothing, and its entry is 0; of values it is that of the state behind the last token, where a response
that was cut would go on. So log-probabilities, masks and advantages are sharded as the ids are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Samples:
    """Values of some samples of a step, on the CPU.

    Attributes:
        ids: which samples of the step, ascending; the same id names the same sample in every call.
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
            violations.append(f"ids {self.ids} must ascend, each once")
        if violations:
            raise ValueError("; ".join(violations))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: str) -> Sequence[Tensor]:
        return self.values[key]

    def only(self, keys: Iterable[str]) -> Samples:
        """The same samples with some keys. Raises KeyError for one that is missing."""
        return Samples(self.ids, {key: self.values[key] for key in keys})

    def of(self, ids: Sequence[int]) -> Samples:
        """Some of the samples, with all keys. Raises KeyError for one that is missing."""
        place = {sample: index for index, sample in enumerate(self.ids)}
        chosen = [place[sample] for sample in sorted(ids)]
        return Samples(tuple(sorted(ids)), {key: [v[i] for i in chosen] for key, v in self.values.items()})

    def updated(self, other: Samples) -> Samples:
        """These samples with `other`'s keys added or replaced; `other` must be of the same samples."""
        if other.ids != self.ids:
            raise ValueError(f"samples {other.ids} are not {self.ids}")
        return Samples(self.ids, {**self.values, **other.values})
