"""The state of an RLHF run in a checkpoint besides its tensors, and what must match when the run is resumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from usp.config import ALL_LINEAR
from usp.data.sources import STDLIB
from usp.fields import flag
from usp.presets import PRESETS
from usp.rlhf.plan.plan import ExecutionPlan, from_mapping
from usp.train.checkpoints import lora_violations, steps_violations

from .config import SEARCH, RlhfConfig, SupervisedConfig

_DATA = ("data", "prompt_tokens", "tokenizer", "chat_template", "seed")
# Another value is another run.
_FIXED = ("algorithm", "reward_model", "critic", "ref", "ref_update_every", "models", "reward_function", *_DATA)
_FIXED_SUPERVISED = tuple(field.name for field in fields(SupervisedConfig))
# While rollouts are begun.
_FIXED_WITH_ROLLOUTS = ("partial_rollouts", "oversample", "prompts", "group_size", "max_new_tokens")
# The same for the supervised steps: key of their configuration -> field of the run's.
_FIXED_SFT = {"steps": "sft_steps", "learning_rate": "sft_learning_rate"} | {name: name for name in ("model", *_DATA)}


@dataclass(frozen=True)
class RlhfState:
    """A run after a step; as a mapping, the `extra` of `Checkpointer.save`."""

    step: int  # number of completed steps
    examples: int  # number of examples that they, and the step in flight, consumed; with those that are begun
    functions: Mapping[str, Mapping[str, float]]  # state of functions of samples, by call name
    config: Mapping[str, Any]  # resolved
    evaluations: Mapping[str, Any] = field(default_factory=dict)  # `Evaluations.to_extra()`
    in_flight: Mapping[str, Any] = field(default_factory=dict)  # `StepData.to_extra()`; empty without
    rollouts: Mapping[str, Any] = field(default_factory=dict)  # `Rollouts.to_extra()`; empty without
    running: Mapping[str, Any] = field(default_factory=dict)  # plan, number of ranks; with --replan factors

    @staticmethod
    def from_extra(extra: Mapping[str, Any]) -> RlhfState:
        """Convert from the result of `read_extra`. Raises ValueError if it is not of an RLHF run."""
        names = [one.name for one in fields(RlhfState)]
        later = [one.name for one in fields(RlhfState) if one.default_factory is not MISSING]
        if missing := [name for name in names if name not in (*extra, *later)]:
            raise ValueError(f"the checkpoint is not of an RLHF run: {', '.join(missing)} missing")
        return RlhfState(**{name: extra[name] for name in names if name in extra})


def resume_violations(
    saved: RlhfState, config: RlhfConfig, finished_too: bool = False, other_model: bool = False
) -> list[str]:
    """Return why `config` cannot continue `saved`. Plan, degrees, number of ranks and servers' addresses may differ.

    other_model: allow another `model`, because the supervised steps replace it.
    """
    found = [
        f"{flag(name)} = {getattr(config, name)} (checkpoint: {saved.config.get(name)}) must not change on resume"
        for name in (*_FIXED, *_FIXED_SUPERVISED, *(() if other_model else ("model",)))
        if _placeless(saved.config.get(name, getattr(RlhfConfig, name))) != _placeless(getattr(config, name))
    ]
    found += _held_out_violations(saved.config, config, "checkpoint")
    if saved.in_flight or saved.rollouts:
        waiting = f"the samples of step {saved.in_flight['step']} are" if saved.in_flight else "rollouts are"
        more = _FIXED_WITH_ROLLOUTS if saved.rollouts or config.begins_ahead else ()
        found += [
            f"{flag(name)} = {getattr(config, name)} (checkpoint: {saved.config.get(name)}) must not change on resume "
            f"while {waiting} in flight"
            for name in ("staleness", "options", *more)
            if saved.config.get(name, getattr(RlhfConfig, name)) != getattr(config, name)
        ]
    return found + lora_violations(saved.config, config) + steps_violations(saved.step, config.steps, finished_too)


def _placeless(value: Any) -> Any:
    """Return a value without the addresses of servers, which may be elsewhere when a run goes on."""
    return re.sub(r"\bhttps?://[^,\s]*", "URL", value) if isinstance(value, str) else value


def running_plan(saved: RlhfState | None, config: RlhfConfig, world_size: int) -> ExecutionPlan | None:
    """Return the plan of a checkpoint with which a run goes on that searches plans: where --plan and the number of
    ranks are as then. None: the run begins with the plan that --plan names."""
    searches = config.replan or config.plan == SEARCH
    if saved is None or not (searches and saved.running) or saved.config.get("plan") != config.plan:
        return None
    return from_mapping(saved.running["plan"]) if saved.running["world_size"] == world_size else None


def sft_violations(saved: Mapping[str, Any], config: RlhfConfig, steps: int) -> list[str]:
    """Return why `config`, with `steps` supervised steps, cannot use those with the configuration `saved`."""
    asked = {**asdict(config), "sft_steps": steps}
    found = [
        f"{flag(name)} = {asked[name]} (supervised steps of this run: {saved.get(key)}) must not change on resume"
        for key, name in _FIXED_SFT.items()
        if saved.get(key, "") != asked[name]
    ]
    found += _held_out_violations(saved, config, "supervised steps of this run")
    return found + lora_violations(saved, replace(config, **sft_lora(config)))


def _held_out_violations(saved: Mapping[str, Any], config: RlhfConfig, where: str) -> list[str]:
    """Return why `config` cannot continue a run that trained on all but the prompts that it held out."""

    def held_out(of: Mapping[str, Any]) -> int:
        return 0 if of["data"] == STDLIB or of.get("eval_data") else of.get("eval_prompts", 0)

    before, now = held_out(saved), held_out(asdict(config))
    if before == now:
        return []
    return [f"prompts of --data held out by --eval-prompts = {now} ({where}: {before}) must not change on resume"]


def sft_lora(config: RlhfConfig) -> dict[str, Any]:
    """Return how the supervised steps before those of `config` train adapters: fields of their configuration.

    All of a preset's random weights are trained. Of a directory adapters are, and merged, so that the run begins at a
    model in either case, which is its reference as well.
    """
    if config.lora_rank and config.model in PRESETS:
        return {"lora_rank": 0, "lora_alpha": 0, "lora_targets": ALL_LINEAR, "lora_merge": False}
    return {"lora_merge": config.lora_rank > 0}
