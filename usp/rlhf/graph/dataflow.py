"""The dataflow graph of a step. Its edges follow from keys: the producer of a key runs before its consumers.

ReaL (arXiv 2406.14088, section 4). A step uses the weights of the previous step: every call of a role runs before the
role's train step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from .calls import Compute, Generate, Inference, ModelCall, TrainStep

ROLES = ("actor", "critic", "ref", "reward")  # those that the trainer has flags for; an algorithm may have others


@dataclass(frozen=True)
class DataflowGraph:
    """The calls of a step and the keys that it begins with.

    Attributes:
        calls: in any order.
        given: keys of the samples that every rank passes to each step.
        elsewhere: train steps of another graph, whose weights the calls of their roles use.

    Raises:
        ValueError: naming every violation: duplicate names and keys, inputs without a producer, cycles, missing roles,
            unknown kinds, and inputs or outputs that a call's kind does not support.
    """

    calls: tuple[ModelCall, ...]
    given: tuple[str, ...]
    elsewhere: tuple[ModelCall, ...] = ()

    def __post_init__(self) -> None:
        violations = [*self._key_violations(), *(text for call in self.calls for text in _call_violations(call))]
        trained = Counter(call.role for call in self.calls if isinstance(call.work, TrainStep))
        violations += [
            f"role {role} has {number} train steps, expected at most one: use epochs and mini_batches"
            for role, number in trained.items()
            if number > 1
        ]
        sizes = sorted({call.work.group_size for call in self.calls if isinstance(call.work, Generate)})
        if len(sizes) > 1:
            violations.append(f"all generate calls must have the same group_size, got {sizes}")
        if not self.calls:
            violations.append("a graph must have at least one call")
        if violations:
            raise ValueError("; ".join(violations))

    def _key_violations(self) -> Iterator[str]:
        names = Counter(call.name for call in self.calls)
        yield from (f"{number} calls are named {name!r}" for name, number in names.items() if number > 1)
        producers: dict[str, list[str]] = {key: ["the step's given keys"] for key in self.given}
        for call in self.calls:
            for key in call.outputs:
                producers.setdefault(key, []).append(call.name)
        yield from (f"key {key!r} comes from {' and '.join(by)}" for key, by in producers.items() if len(by) > 1)
        known = ", ".join(sorted(producers)) or "none"
        for call in self.calls:
            for key in call.inputs:
                if key not in producers:
                    yield f"call {call.name!r} reads {key!r}, which no call produces (keys: {known})"
        if len(names) == len(self.calls):
            try:
                TopologicalSorter({call.name: self.consumers(call.name) for call in self.calls}).prepare()
            except CycleError as error:
                yield f"calls wait for each other: {' -> '.join(reversed(error.args[1]))}"

    def __getitem__(self, name: str) -> ModelCall:
        return self._calls[name]

    @cached_property
    def _calls(self) -> dict[str, ModelCall]:
        return {call.name: call for call in self.calls}

    @cached_property
    def producers(self) -> dict[str, str]:
        """Map each key to the call that produces it. Given keys are left out."""
        return {key: call.name for call in self.calls for key in call.outputs}

    def consumers(self, name: str) -> tuple[str, ...]:
        """Return the calls that read an output of the call `name`."""
        outputs = set(self[name].outputs)
        return tuple(call.name for call in self.calls if outputs & set(call.inputs))

    def before(self, name: str) -> tuple[str, ...]:
        """Return the calls of the same step that must end first: its producers, and for a train step its role's."""
        call = self[name]
        trains = isinstance(call.work, TrainStep)
        producers = {self.producers.get(key) for key in call.inputs}
        return tuple(
            other.name
            for other in self.calls
            if other is not call and (other.name in producers or (trains and other.role == call.role))
        )

    @cached_property
    def levels(self) -> tuple[tuple[ModelCall, ...], ...]:
        """Group the calls by the earliest time at which they could start, if all took equally long."""
        sorter = TopologicalSorter({call.name: self.before(call.name) for call in self.calls})
        sorter.prepare()
        levels = []
        while ready := sorter.get_ready():
            levels.append(tuple(call for call in self.calls if call.name in ready))
            sorter.done(*ready)
        return tuple(levels)

    @property
    def order(self) -> tuple[ModelCall, ...]:
        """The calls in topological order, each as early as possible."""
        return tuple(call for level in self.levels for call in level)

    @cached_property
    def rollouts(self) -> tuple[ModelCall, ...]:
        """The calls that make the samples of a step, in topological order: those with outputs, so no train steps."""
        return tuple(call for call in self.order if call.outputs)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles that have calls: those of `ROLES` in that order, then others in the order of their calls."""
        called = dict.fromkeys(call.role for call in self.calls if call.role)
        return (*(role for role in ROLES if role in called), *(role for role in called if role not in ROLES))

    @cached_property
    def trained_roles(self) -> tuple[str, ...]:
        """The roles that have a train step."""
        return tuple(role for role in self.roles if self.train_call(role))

    def train_call(self, role: str) -> ModelCall | None:
        """Return the train step of a role, if it has one, be it elsewhere."""
        calls = (*self.calls, *self.elsewhere)
        return next((c for c in calls if c.role == role and isinstance(c.work, TrainStep)), None)

    @property
    def group_size(self) -> int:
        """Samples per prompt. Prompt p becomes samples p * group_size to (p + 1) * group_size - 1."""
        return next((call.work.group_size for call in self.calls if isinstance(call.work, Generate)), 1)


def unit(call: ModelCall) -> int:
    """Return how many samples with consecutive ids must stay on one data-parallel rank of a call."""
    work = call.work
    if isinstance(work, Generate):
        return work.group_size
    if isinstance(work, TrainStep):
        return work.objective.unit
    return work.unit if isinstance(work, Compute) else 1


def _call_violations(call: ModelCall) -> Iterator[str]:
    if not isinstance(call.work, Generate | Inference | TrainStep | Compute):
        yield f"call {call.name!r} is a {type(call.work).__name__}: use Generate, Inference, TrainStep or Compute"
        return
    who = f"{call.kind} call {call.name!r}"
    if isinstance(call.work, Compute) and call.role:
        yield f"{who} has role {call.role!r}, but a function has no model: use role=''"
    if not isinstance(call.work, Compute) and not call.role.isidentifier():
        yield f"{who} has the role {call.role!r}: name the model, such as {', '.join(ROLES)}"
    for what, keys in (("reads", call.inputs), ("produces", call.outputs)):
        yield from (f"{who} {what} {key!r} {n} times" for key, n in Counter(keys).items() if n > 1)
    if isinstance(call.work, Inference) and len(call.outputs) != 1:
        yield f"{who} must produce exactly one key, got {call.outputs}"
    if isinstance(call.work, TrainStep) and call.outputs:
        yield f"{who} must not have outputs, got {call.outputs}: a train step only changes weights"
    if isinstance(call.work, Generate) and call.work.group_size < 1:
        yield f"{who}: group_size={call.work.group_size} must be at least 1"
    if isinstance(call.work, TrainStep) and min(call.work.mini_batches, call.work.epochs) < 1:
        yield f"{who}: mini_batches={call.work.mini_batches} and epochs={call.work.epochs} must be at least 1"
