"""The order of forwards and backwards on a pipeline rank, as in torch.distributed.pipelining.

Schedule1F1B starts with one forward per stage from its own to the last; ScheduleInterleaved1F1B takes micro-batches
through its stages in rounds; ScheduleZBVZeroBubble splits backwards in two (arXiv 2401.10241, section 6)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from .job import Job


class Action(NamedTuple):
    """A forward, a backward, or half of a backward: the gradients of the inputs first, those of the weights later."""

    kind: Literal["forward", "backward", "inputs", "weights"]
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """What determines the actions of a rank: `place` is its own of `pp` pipeline ranks."""

    name: str
    place: int
    pp: int
    micro_batches: int

    @staticmethod
    def of(job: Job, rank: int) -> Schedule:
        return Schedule(job.config.pp_schedule, job.place("pp", rank), job.dims.pp, job.config.micro_batches)


@lru_cache(maxsize=256)
def actions(schedule: Schedule) -> tuple[Action, ...]:
    """Return the actions of a step, in order."""
    place, pp, number = schedule.place, schedule.pp, schedule.micro_batches
    if schedule.name == "zero-bubble" and pp > 1:
        return tuple(_zero_bubble(place, pp, number))
    if schedule.name == "interleaved-1f1b" and pp > 1:
        return tuple(_interleaved(place, pp, number))
    forwards = [Action("forward", place, each) for each in range(number)]
    backwards = [Action("backward", place, each) for each in range(number)]
    return tuple(_alternate(forwards, backwards, ahead=min(number, pp - place)))


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Return `ahead` forwards, then backwards and forwards in turn, then the remaining backwards."""
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += [backward, *forwards[ahead + number : ahead + number + 1]]
    return order


def _interleaved(place: int, pp: int, micro_batches: int) -> list[Action]:
    each = micro_batches // max(1, micro_batches // pp)  # micro-batches per round
    ahead = min(each + 2 * (pp - 1 - place), 2 * micro_batches)
    forwards, backwards = [], []
    for step in range(2 * micro_batches):
        pass_through, number = divmod(step, each)
        micro_batch = pass_through // 2 * each + number
        forwards.append(Action("forward", place + pass_through % 2 * pp, micro_batch))
        backwards.append(Action("backward", place + (1 - pass_through % 2) * pp, micro_batch))
    # In the steady state a forward precedes each backward, hence one more forward ahead.
    return _alternate(forwards, backwards, min(ahead + 1, 2 * micro_batches))


def _zero_bubble(place: int, pp: int, micro_batches: int) -> list[Action]:
    early, late = place, 2 * pp - 1 - place
    done: Counter[tuple[str, int]] = Counter()  # micro-batches by kind and stage
    order: list[Action] = []

    def add(stage: int, *kinds: Literal["forward", "inputs", "weights"]) -> None:
        for kind in kinds:
            order.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (pp - place) - 1):
        add(early, "forward")
    for _ in range(place):
        add(late, "forward")
        add(early, "forward")
    for _ in range(pp - place):
        add(late, "forward", "inputs", "weights")
    for _ in range(micro_batches - pp):
        if done["forward", early] < micro_batches:
            add(early, "forward")
        add(early, "inputs", "weights")
        add(late, "forward", "inputs", "weights")
    for _ in range(place):
        add(early, "inputs")
        add(late, "inputs")
    for _ in range(pp - place):
        add(early, "inputs", "weights")
    for stage in (late, early):
        while done["weights", stage] < micro_batches:
            add(stage, "weights")
    return order
