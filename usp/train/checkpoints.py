"""What a checkpoint of a training run holds beyond its tensors, and what must hold where the run is resumed.

The learning rate is a function of step and configuration, so it needs no state. Nothing in a training step draws a
random number (attention with dropout is refused), and every rank is seeded alike: one state of the generators, the
first rank's, serves every layout.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from usp.config import TrainConfig, config_to_mapping, flag

# What transformers notes in a model's configuration about who wrote it and how it is run, not about its function.
_NOT_THE_MODEL = {
    "_name_or_path",
    "_attn_implementation",
    "_experts_implementation",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_NOT_THE_RUN = {"output", "resume"}


@dataclass(frozen=True)
class TrainingState:
    """A run after a step.

    Args:
        step: how many optimiser steps are done.
        tokens: how many tokens they have read, over all ranks.
        stream: `BatchStream.state_dict()`.
        random: `random_state()`.
        config: the resolved configuration, as `config_to_mapping` gives it.
        model: the model's configuration, as transformers' `to_dict` gives it.
    """

    step: int
    tokens: int
    stream: Mapping[str, Any]
    random: Mapping[str, Any]
    config: Mapping[str, Any]
    model: Mapping[str, Any]

    def to_extra(self) -> dict[str, Any]:
        """For `Checkpointer.save`."""
        extra = {field.name: getattr(self, field.name) for field in fields(self)}
        return extra | {"model": _as_json(self.model)}

    @staticmethod
    def from_extra(extra: Mapping[str, Any]) -> TrainingState:
        """Of what `read_extra` gives. Raises ValueError when that is not of a training run."""
        names = [field.name for field in fields(TrainingState)]
        if missing := [name for name in names if name not in extra]:
            raise ValueError(f"the checkpoint is of no training run: it lacks {', '.join(missing)}")
        return TrainingState(**{name: extra[name] for name in names})


def resume_violations(
    saved: TrainingState, config: TrainConfig, model: Mapping[str, Any], finished_too: bool = False
) -> list[str]:
    """What keeps a run of `config`, its model of the configuration `model`, from continuing `saved`; one message each.

    finished_too: a run whose steps are all done may be continued, to its end.

    Layout, number of ranks, engine, batch and schedule may differ. The data, seq_len and seed must not, which
    `BatchStream.load_state_dict` sees to.
    """
    found = []
    here, there = _as_json(model), _as_json(saved.model)
    keys = sorted((here.keys() | there.keys()) - _NOT_THE_MODEL)
    if differing := [key for key in keys if here.get(key) != there.get(key)]:
        values = ", ".join(f"{key} = {here.get(key)} (checkpoint: {there.get(key)})" for key in differing)
        found.append(f"{flag('model')} = {config.model} is not the model of the checkpoint: {values}: use that model")
    return found + steps_violations(saved.step, config.steps, finished_too)


def steps_violations(saved: int, steps: int, finished_too: bool) -> list[str]:
    """Why a run of so many steps cannot continue a checkpoint of step `saved`; one of the last step may count."""
    least = saved if finished_too else saved + 1
    if steps >= least:
        return []
    return [f"--steps = {steps} leaves nothing to do: the checkpoint is of step {saved}; use at least {least}"]


def resume_changes(saved: TrainingState, config: TrainConfig) -> list[str]:
    """The fields that `config` has otherwise than the run that is continued: allowed, and worth a line."""
    here = config_to_mapping(config)
    return [
        f"{flag(name)} = {value} (checkpoint: {saved.config[name]})"
        for name, value in here.items()
        if name not in _NOT_THE_RUN and name in saved.config and saved.config[name] != value
    ]


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators of Python, numpy, torch and, where `device` is one, the CUDA device."""
    version, numbers, gauss = random.getstate()
    numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    return {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": numpy | {"state": {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to what `random_state` gave; the one of a device of another kind stays as it is."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    key = np.asarray(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}})
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def _as_json(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping as JSON brings it back, so that a saved one and a live one compare."""
    return json.loads(json.dumps(dict(mapping), default=str))
