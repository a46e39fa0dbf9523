"""What a checkpoint of an RLHF run holds beyond its tensors, and what must hold where the run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from usp.config import config_to_mapping, flag
from usp.train.checkpoints import steps_violations

from .config import RlhfConfig

# What makes another run of it: the models, the data, what is learned from them.
_DATA = ("data", "prompt_tokens", "tokenizer", "seed")
_THE_RUN = ("algorithm", "reward_model", "critic", "ref", "reward_function", *_DATA)
# What makes other supervised steps before it: key of their configuration -> the flag that it comes from.
_THE_SFT = {"steps": "sft_steps", "learning_rate": "sft_learning_rate"} | {name: name for name in ("model", *_DATA)}


@dataclass(frozen=True)
class RlhfState:
    """A run after a step.

    Attributes:
        step: how many steps are done.
        examples: how many examples they have taken.
        functions: what functions of samples remember, by call.
        config: the resolved configuration.
    """

    step: int
    examples: int
    functions: Mapping[str, Mapping[str, float]]
    config: Mapping[str, Any]

    def to_extra(self) -> dict[str, Any]:
        """For `Checkpointer.save`."""
        return asdict(self)

    @staticmethod
    def from_extra(extra: Mapping[str, Any]) -> RlhfState:
        """Of what `read_extra` gives. Raises ValueError when that is not of an RLHF run."""
        names = [field.name for field in fields(RlhfState)]
        if missing := [name for name in names if name not in extra]:
            raise ValueError(f"the checkpoint is of no RLHF run: it lacks {', '.join(missing)}")
        return RlhfState(**{name: extra[name] for name in names})


def resume_violations(
    saved: RlhfState, config: RlhfConfig, finished_too: bool = False, other_model: bool = False
) -> list[str]:
    """What keeps a run of `config` from continuing `saved`; plan, degrees and number of ranks may differ.

    other_model: whether the model may, because supervised steps put theirs in its place.
    """
    found = [
        f"{flag(name)} = {getattr(config, name)} (checkpoint: {saved.config.get(name)}): a run goes on with its own"
        for name in (*_THE_RUN, *(() if other_model else ("model",)))
        if saved.config.get(name) != getattr(config, name)
    ]
    return found + steps_violations(saved.step, config.steps, finished_too)


def sft_violations(saved: Mapping[str, Any], config: RlhfConfig, steps: int) -> list[str]:
    """What keeps a run of `config` from going on with supervised steps of the configuration `saved`.

    steps: how many it has.
    """
    asked = {**config_to_mapping(config), "sft_steps": steps}
    return [
        f"{flag(name)} = {asked[name]} (its supervised steps: {saved.get(key)}): a run goes on with its own"
        for key, name in _THE_SFT.items()
        if saved.get(key) != asked[name]
    ]
