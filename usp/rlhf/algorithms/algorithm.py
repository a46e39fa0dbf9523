"""The parts of every algorithm: its options, its calls, and what the trainer must know to run it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from usp.fields import AtLeast1, Rule, parameter_violations
from usp.rlhf.graph import Compute, DataflowGraph, Inference, ModelCall, Objective, TrainStep

GIVEN = ("prompt_ids", "prompt_index", "tokens", "mask")  # keys that a step can begin with
Share = Annotated[float, Rule(lambda value: 0 <= value <= 1, "from 0 to 1")]
Above0 = Annotated[float, Rule(lambda value: 0 < value < math.inf, "above 0")]
NONZERO = Rule(lambda value: 0 < abs(value) < math.inf, "nonzero: rewards would all be equal")


def above(bound: float, why: str) -> Rule:
    """Return the rule of an option that is infinite, or above a bound, and why it must be."""
    return Rule(lambda value: value > bound, f"above {bound:g}: {why}")


@dataclass(frozen=True)
class Options:
    """Options of every algorithm. mini_batches, epochs: a step has mini_batches * epochs optimizer steps."""

    never: ClassVar[Mapping[str, str]] = {}  # options that have no effect, and where
    mini_batches: AtLeast1 = 1
    epochs: AtLeast1 = 1

    @property
    def unused(self) -> dict[str, str]:
        """Return the options that have no effect beside the others, and where."""
        return {**self.never}

    def violations(self) -> Iterator[str]:
        """Yield one message per invalid option."""
        yield from parameter_violations(self)
        for name, where in self.unused.items():
            if (value := getattr(self, name)) != getattr(type(self), name):
                yield f"{name}={value} has no effect {where}: remove it"

    def drawn(self, prompts: int) -> int:
        """Return how many prompts are drawn for a step that trains on `prompts` of them."""
        return prompts

    def step_violations(self, samples: int) -> Iterator[str]:
        """Yield why the options do not allow steps of `samples` samples."""
        return iter(())


@dataclass(frozen=True)
class Algorithm:
    """An algorithm as the trainer runs it.

    Attributes:
        options: class of its options, each with a default; for "prompts" a subclass of `policy.PolicyOptions`.
        data: kind of examples: "prompts" to respond to, "answers" to train on, or "pairs", where sample 2i is preferred
            to sample 2i + 1. Calls read `prompt_ids` and `prompt_index` of prompts, `tokens` and `mask` of the others.
        learning_rate: default peak learning rate for the presets' random weights; pretrained_rate: for a directory.
        model_role: role that is initialized from the configuration's `model`.
        scores: it trains on the scores of responses; otherwise they are metrics, and examples need no answers.
    """

    options: type[Options]
    calls: Callable[[Any], tuple[ModelCall, ...]]
    data: Literal["prompts", "answers", "pairs"] = "prompts"
    learning_rate: float = 2e-3
    pretrained_rate: float = 1e-6
    warmup_steps: int = 5
    model_role: str = "actor"
    scores: bool = True

    def graph(self, options: Options) -> DataflowGraph:
        """Return the graph of a step, given the keys that its calls read and do not produce."""
        calls = self.calls(options)
        read = {key for call in calls for key in call.inputs} - {key for call in calls for key in call.outputs}
        # Where --staleness is more than 1, partial rollouts begin so many steps ahead, and are complete one step ahead.
        depth = min(1, getattr(options, "staleness", 0))
        return DataflowGraph(calls, tuple(key for key in GIVEN if key in read), depth=depth)


@runtime_checkable
class Stateful(Protocol):
    """A function of samples with state, which must be the same on every rank of its call."""

    def state_dict(self) -> dict[str, float]:
        """Return all that later steps depend on."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from the result of `state_dict`. Raises ValueError naming missing and unknown keys."""


def stateful(graph: DataflowGraph) -> dict[str, Stateful]:
    """Return the functions whose state a checkpoint must hold, by the name of their call."""
    functions: dict[str, object] = {c.name: c.work.function for c in graph.calls if isinstance(c.work, Compute)}
    return {name: function for name, function in functions.items() if isinstance(function, Stateful)}


def logprobs(role: str, output: str, temperature: float = 1.0, more: tuple[str, ...] = ()) -> ModelCall:
    """Return the call for a role's log-probabilities of the `tokens` in `mask`, which reads `more`, too."""
    inputs = ("tokens", "mask", *more)
    return ModelCall(f"{role}_inference", role, Inference("logprobs", temperature), inputs, (output,))


def train(
    role: str,
    objective: Objective,
    options: Options,
    stop_above: tuple[str, float] | None = None,
    more: tuple[str, ...] = (),
) -> ModelCall:
    """Return the train step of a role, which reads `more` than its objective does."""
    work = TrainStep(objective, options.mini_batches, options.epochs, stop_above)
    return ModelCall(f"{role}_train", role, work, ("tokens", *objective.keys, *more))


def at_least(options: object, least: int, *names: str) -> Iterator[str]:
    """Yield a message for each named option below `least`, nan included."""
    return _not(options, names, f"at least {least}", lambda value: value >= least)


def fraction(options: object, *names: str) -> Iterator[str]:
    """Yield a message for each named option outside [0, 1]."""
    return _not(options, names, "from 0 to 1", lambda value: 0 <= value <= 1)


def one_of(options: object, name: str, choices: tuple[str, ...]) -> Iterator[str]:
    """Yield a message if the named option is not one of `choices`."""
    return _not(options, (name,), f"one of {', '.join(choices)}", choices.__contains__)


def _not(options: object, names: tuple[str, ...], words: str, holds: Callable[[Any], bool]) -> Iterator[str]:
    yield from (f"{n}={v!r} must be {words}" for n in names if not holds(v := getattr(options, n)))
