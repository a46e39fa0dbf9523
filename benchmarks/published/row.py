"""A published measurement and its prediction."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from usp.config import TrainConfig
from usp.hf.models import ModelConfig, load_model_config
from usp.predict.job import Job, Stack
from usp.train.resolve import job_of

K, M = 1024, 1024**2


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        unit: of both numbers: `s` of a step, `tokens/s` or `TFLOP/s` of a GPU, `tokens` of the longest sequence.
        timed: a step or an attention layer in bfloat16.
    """

    name: str
    unit: str
    measured: float
    predicted: float
    timed: bool = True

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Source:
    """The rows of a publication.

    Attributes:
        reference: where the measurements stand.
        notes: what the source leaves open and is assumed here, and what was looked for and not found.
        year: of the measurements.
        summary: what the answer says of them besides their mean error.
    """

    title: str
    reference: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    year: int = 2024
    summary: str = ""


def mean_error(rows: Sequence[Row]) -> float:
    return statistics.mean(abs(row.error) for row in rows)


def step_job(
    model: str, devices: int, *, like: Mapping[str, Any] | None = None, system: Stack | None = None, **options: Any
) -> Job:
    """Return a step in bfloat16.

    like: values of transformers' configuration that differ from those of the preset `model`.
    system: what ran it; None for transformers' eager operators, or this toolkit's compiled layers.
    """
    config = TrainConfig(model=model, dtype="bfloat16", **options)
    return replace(job_of(config, _changed(load_model_config(model), like or {}), devices), system=system)


def _changed(config: ModelConfig, like: Mapping[str, Any]) -> ModelConfig:
    values = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    return type(config).from_dict({**values, **like}) if like else config
