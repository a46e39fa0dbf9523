"""The state of a training run besides its tensors, and the checks before a run is resumed.

The learning rate is a function of step and configuration, so it needs no state. Nothing in a training step draws a
random number (attention dropout is refused) and every rank has the same seed, so one state of the random generators,
rank 0's, fits every layout.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from usp.config import LoraConfig, TrainConfig, flag

# Keys of a model's configuration that say who wrote it and how it runs, not what it computes.
_NOT_THE_MODEL = {
    "_name_or_path",
    "_attn_implementation",
    "_experts_implementation",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_LORA = ("lora_rank", "lora_alpha", "lora_targets")  # what an adapter is
_NOT_THE_RUN = {"output", "resume"}


@dataclass(frozen=True)
class TrainingState:
    """The state of a run after a step.

    Attributes:
        step: optimizer steps done.
        tokens: tokens read so far, over all ranks.
        stream: `BatchStream.state_dict()`.
        random: `random_state()`.
        config: the resolved configuration, from `asdict`.
        model: the model's configuration, from transformers' `to_dict`.
        evaluations: `Evaluations.to_extra()`; empty without held-out data.
    """

    step: int
    tokens: int
    stream: Mapping[str, Any]
    random: Mapping[str, Any]
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    evaluations: Mapping[str, Any]

    def to_extra(self) -> dict[str, Any]:
        """Return the mapping that `Checkpointer.save` takes."""
        return {**vars(self), "model": _as_json(self.model)}

    @staticmethod
    def from_extra(extra: Mapping[str, Any]) -> TrainingState:
        """Read the result of `read_extra`. Raises ValueError if the checkpoint is not of a training run."""
        names = [field.name for field in fields(TrainingState)]
        if missing := [name for name in names if name not in extra]:
            raise ValueError(f"the checkpoint is not of a training run: it lacks {', '.join(missing)}")
        return TrainingState(**{name: extra[name] for name in names})


def resume_violations(
    saved: TrainingState, config: TrainConfig, model: Mapping[str, Any], finished_too: bool = False
) -> list[str]:
    """Return why a run of `config` with the model configuration `model` cannot continue `saved`, one message each.

    finished_too: accept a checkpoint of the last step, after which only the model is left to write.

    Layout, world size, engine, batch and schedule may differ. Data, seq_len and seed must not:
    `BatchStream.load_state_dict` checks them.
    """
    found = []
    here, there = _as_json(model), _as_json(saved.model)
    keys = sorted((here.keys() | there.keys()) - _NOT_THE_MODEL)
    if differing := [key for key in keys if here.get(key) != there.get(key)]:
        values = ", ".join(f"{key} = {here.get(key)} (checkpoint: {there.get(key)})" for key in differing)
        found.append(f"{flag('model')} = {config.model} is not the model of the checkpoint ({values}): use that model")
    ended = sum(end <= saved.step for end in accumulate(stage.steps for stage in config.curriculum))
    stages = [asdict(stage) for stage in config.curriculum[:ended]]
    if stages != list(saved.config.get("curriculum", ()))[:ended]:
        found.append("the stages of --curriculum that end before the checkpoint are not those of its run: use the same")
    if (before := saved.config.get("optimizer", "adamw")) != config.optimizer:
        found.append(f"{flag('optimizer')} = {config.optimizer} (checkpoint: {before}) has other states: use the same")
    return found + lora_violations(saved.config, config) + steps_violations(saved.step, config.steps, finished_too)


def lora_violations(saved: Mapping[str, Any], config: LoraConfig) -> list[str]:
    """Return why `config` cannot continue a checkpoint of a run with the configuration `saved`, as to its adapters."""
    lora = {name: getattr(config, name) for name in _LORA}
    trained = {name: saved.get(name, 0) for name in lora}
    if lora == trained or not (config.lora_rank or trained["lora_rank"]):
        return []
    changed = ", ".join(f"{flag(name)} = {lora[name]} (checkpoint: {trained[name]})" for name in _LORA)
    return [f"{changed}: a checkpoint holds only what is trained, so LoRA must be as before; use those values"]


def steps_violations(saved: int, steps: int, finished_too: bool) -> list[str]:
    """Return why a run of `steps` steps cannot continue a checkpoint of step `saved`."""
    least = saved if finished_too else saved + 1
    if steps >= least:
        return []
    return [f"--steps = {steps} leaves nothing to do: the checkpoint is of step {saved}; use at least {least}"]


def resume_changes(saved: TrainingState, config: TrainConfig) -> list[str]:
    """Return the fields that differ from the run that is continued: allowed, and worth a line each."""
    return [
        f"{flag(name)} = {value} (checkpoint: {saved.config[name]})"
        for name, value in _as_json(asdict(config)).items()
        if name not in _NOT_THE_RUN and name in saved.config and saved.config[name] != value
    ]


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the random generators of Python, numpy, torch and the CUDA device, if `device` is one."""
    version, numbers, gauss = random.getstate()
    numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    return {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": numpy | {"state": {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the random generators to `state`, from `random_state`; a device of another type keeps its own."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    key = np.asarray(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}})
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def _as_json(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to what JSON restores, so that saved and live mappings compare."""
    return json.loads(json.dumps(dict(mapping), default=str))
