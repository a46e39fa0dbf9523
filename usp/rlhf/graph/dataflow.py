"""The calls of a step as a graph, whose edges follow from keys: who produces a key comes before who takes it.

ReaL (arXiv 2406.14088, section 4). A step reads the weights that the step before it left: every call of a role comes
before the role's train step, and after the train step of the last step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .calls import Compute, Generate, Inference, ModelCall, TrainStep

ROLES = ("actor", "critic", "ref", "reward")


@dataclass(frozen=True)
class DataflowGraph:
    """What a step does.

    Attributes:
        calls: in any order.
        given: the keys that each step begins with, known to every rank.

    Raises:
        ValueError: naming everything that is wrong: names and keys that occur twice, keys that nobody gives, cycles,
            unknown roles and kinds, and what a call's kind does not allow.
    """

    calls: tuple[ModelCall, ...]
    given: tuple[str, ...]

    def __post_init__(self) -> None:
        violations = [*self._key_violations(), *(text for call in self.calls for text in _call_violations(call))]
        trained = Counter(call.role for call in self.calls if isinstance(call.work, TrainStep))
        violations += [
            f"role {role} has {number} train steps, but a step trains a role once: use epochs and mini_batches"
            for role, number in trained.items()
            if number > 1
        ]
        sizes = sorted({call.work.group_size for call in self.calls if isinstance(call.work, Generate)})
        if len(sizes) > 1:
            violations.append(f"generate calls of one graph need the same group_size, but have {sizes}")
        if not self.calls:
            violations.append("a graph needs at least one call")
        if violations:
            raise ValueError("; ".join(violations))

    def _key_violations(self) -> Iterator[str]:
        names = Counter(call.name for call in self.calls)
        yield from (f"{number} calls are named {name!r}" for name, number in names.items() if number > 1)
        givers: dict[str, list[str]] = {key: ["the step's given keys"] for key in self.given}
        for call in self.calls:
            for key in call.outputs:
                givers.setdefault(key, []).append(call.name)
        yield from (f"key {key!r} comes from {' and '.join(by)}" for key, by in givers.items() if len(by) > 1)
        known = ", ".join(sorted(givers)) or "none"
        for call in self.calls:
            for key in call.inputs:
                if key not in givers:
                    yield f"call {call.name!r} takes {key!r}, which nobody gives (keys: {known})"
        if all(number == 1 for number in names.values()) and (cycle := self._cycle()):
            yield f"calls wait for each other: {' -> '.join(cycle)}"

    def _cycle(self) -> list[str]:
        """The names along a cycle, the first one again at its end; [] without one."""
        done: set[str] = set()

        def visit(name: str, path: list[str]) -> list[str]:
            if name in path:
                return [*path[path.index(name) :], name]
            if name in done:
                return []
            for follower in self.consumers(name):
                if cycle := visit(follower, [*path, name]):
                    return cycle
            done.add(name)
            return []

        return next((cycle for call in self.calls if (cycle := visit(call.name, []))), [])

    def __getitem__(self, name: str) -> ModelCall:
        return self._calls[name]

    @cached_property
    def _calls(self) -> dict[str, ModelCall]:
        return {call.name: call for call in self.calls}

    @cached_property
    def producers(self) -> dict[str, str]:
        """Key -> the call that gives it. Given keys have none."""
        return {key: call.name for call in self.calls for key in call.outputs}

    def consumers(self, name: str) -> tuple[str, ...]:
        """The calls that take an output of a call."""
        outputs = set(self[name].outputs)
        return tuple(call.name for call in self.calls if outputs & set(call.inputs))

    def before(self, name: str) -> tuple[str, ...]:
        """The calls of the same step that must have ended: who gives its inputs, and who reads what it trains."""
        call = self[name]
        trains = isinstance(call.work, TrainStep)
        producers = {self.producers.get(key) for key in call.inputs}
        return tuple(
            other.name
            for other in self.calls
            if other is not call and (other.name in producers or (trains and other.role == call.role))
        )

    @cached_property
    def carried(self) -> tuple[tuple[str, str], ...]:
        """(a, b): call b of each step reads weights that call a of the step before has made."""
        trains = {call.role: call.name for call in self.calls if isinstance(call.work, TrainStep)}
        return tuple((trains[call.role], call.name) for call in self.calls if call.role in trains)

    @cached_property
    def levels(self) -> tuple[tuple[ModelCall, ...], ...]:
        """The calls by the earliest time they could start, were each to last as long as the others."""
        level: dict[str, int] = {}

        def of(name: str) -> int:
            if name not in level:
                level[name] = 1 + max((of(other) for other in self.before(name)), default=-1)
            return level[name]

        depth = 1 + max(of(call.name) for call in self.calls)
        return tuple(tuple(call for call in self.calls if level[call.name] == number) for number in range(depth))

    @property
    def order(self) -> tuple[ModelCall, ...]:
        """The calls so that each comes after what it waits for, and early."""
        return tuple(call for level in self.levels for call in level)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """The roles of the graph, in the order of `ROLES`."""
        return tuple(role for role in ROLES if any(call.role == role for call in self.calls))

    @cached_property
    def trained_roles(self) -> tuple[str, ...]:
        """The roles that have a train step."""
        return tuple(role for role in self.roles if self.train_call(role))

    def train_call(self, role: str) -> ModelCall | None:
        """The train step of a role, if it has one."""
        return next((c for c in self.calls if c.role == role and isinstance(c.work, TrainStep)), None)

    @property
    def group_size(self) -> int:
        """Samples made of each prompt. Prompt p becomes samples p * group_size up to (p + 1) * group_size - 1."""
        return next((call.work.group_size for call in self.calls if isinstance(call.work, Generate)), 1)


def unit(call: ModelCall) -> int:
    """How many samples with consecutive ids stay on one data-parallel rank of a call."""
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
        yield f"{who} has role {call.role!r}, but functions have no model: use role=''"
    if not isinstance(call.work, Compute) and call.role not in ROLES:
        yield f"{who} has the unknown role {call.role!r}: use {', '.join(ROLES)}"
    for what, keys in (("takes", call.inputs), ("gives", call.outputs)):
        yield from (f"{who} {what} {key!r} {n} times" for key, n in Counter(keys).items() if n > 1)
    if isinstance(call.work, Inference) and len(call.outputs) != 1:
        yield f"{who} gives {call.outputs}, but must give exactly one key"
    if isinstance(call.work, TrainStep) and call.outputs:
        yield f"{who} gives {call.outputs}, but a train step changes weights alone: give no outputs"
    if isinstance(call.work, Generate) and call.work.group_size < 1:
        yield f"{who} has group_size={call.work.group_size}, which must be at least 1"
    if isinstance(call.work, TrainStep) and min(call.work.mini_batches, call.work.epochs) < 1:
        yield f"{who} has mini_batches={call.work.mini_batches}, epochs={call.work.epochs}: both must be at least 1"
