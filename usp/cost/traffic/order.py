"""In which order a rank runs forwards and backwards of its pipeline stages, as torch.distributed.pipelining does.

Schedule1F1B starts with as many forwards as there are stages from its own on; ScheduleInterleaved1F1B takes
micro-batches in rounds through its stages; ScheduleZBVZeroBubble splits backwards in two (arXiv 2401.10241, section 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Literal

from usp.cost.job import Job


@dataclass(frozen=True)
class Action:
    """forward, backward, or one half of a backward: that of the inputs first, that of the weights later."""

    kind: Literal["forward", "backward", "inputs", "weights"]
    stage: int
    micro_batch: int


def actions(job: Job, rank: int) -> list[Action]:
    """All of a step on `rank`, in order."""
    place, pp = job.place("pp", rank), job.dims.pp
    if job.splits_backwards:
        return _zero_bubble(place, pp, job.micro_batches)
    if job.pp_schedule == "interleaved-1f1b" and pp > 1:
        return _interleaved(place, pp, job.micro_batches)
    ahead = min(job.micro_batches, pp - place)
    forwards = [Action("forward", place, number) for number in range(job.micro_batches)]
    backwards = [Action("backward", place, number) for number in range(job.micro_batches)]
    return _alternate(forwards, backwards, ahead)


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += [backward, *forwards[ahead + number : ahead + number + 1]]
    return order


def _interleaved(place: int, pp: int, micro_batches: int) -> list[Action]:
    each = micro_batches // max(1, micro_batches // pp)  # micro-batches of a round
    ahead = min(each + 2 * (pp - 1 - place), 2 * micro_batches)
    forwards, backwards = [], []
    for step in range(2 * micro_batches):
        pass_through, number = divmod(step, each)
        micro_batch = pass_through // 2 * each + number
        forwards.append(Action("forward", place + pass_through % 2 * pp, micro_batch))
        backwards.append(Action("backward", place + (1 - pass_through % 2) * pp, micro_batch))
    # From here on a forward comes before its backward.
    return _alternate(forwards, backwards, min(ahead + 1, 2 * micro_batches))


def _zero_bubble(place: int, pp: int, micro_batches: int) -> list[Action]:
    early, late = place, 2 * pp - 1 - place
    numbers = {(kind, stage): count() for kind in ("forward", "inputs", "weights") for stage in (early, late)}
    order: list[Action] = []

    def add(stage: int, *kinds: Literal["forward", "inputs", "weights"]) -> None:
        order.extend(Action(kind, stage, next(numbers[kind, stage])) for kind in kinds)

    for _ in range(2 * (pp - place) - 1):
        add(early, "forward")
    for _ in range(place):
        add(late, "forward")
        add(early, "forward")
    for _ in range(pp - place):
        add(late, "forward", "inputs", "weights")
    done = 2 * (pp - place) - 1 + place
    for number in range(micro_batches - (pp - place) - place):
        if done + number < micro_batches:
            add(early, "forward")
        add(early, "inputs", "weights")
        add(late, "forward", "inputs", "weights")
    for _ in range(place):
        add(early, "inputs")
        add(late, "inputs")
    for _ in range(pp - place):
        add(early, "inputs", "weights")
    for stage in (late, early):
        missing = micro_batches - sum(action.kind == "weights" and action.stage == stage for action in order)
        for _ in range(missing):
            add(stage, "weights")
    return order
