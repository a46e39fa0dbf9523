"""The order of forwards and backwards on a pipeline rank: torch.distributed.pipelining's own for schedules of two
stages on a rank; torch states none for 1F1B, which starts with one forward per stage from its own to the last."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from .job import Job

_TORCH: dict[str, Any] = {"interleaved-1f1b": ScheduleInterleaved1F1B, "zero-bubble": ScheduleZBVZeroBubble}
_KINDS = {"FULL_BACKWARD": "backward", "BACKWARD_INPUT": "inputs", "BACKWARD_WEIGHT": "weights", "FORWARD": "forward"}


class Action(NamedTuple):
    """A `forward`, a `backward`, or half of one: the gradients of the `inputs` first, those of the `weights` later."""

    kind: str
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
    if pp > 1 and schedule.name in _TORCH:
        sizes = {"n_local_stages": 2, "num_stages": 2 * pp, "pp_group_size": pp, "_n_microbatches": number}
        fields = SimpleNamespace(**sizes, microbatches_per_round=number // max(1, number // pp))
        order = filter(None, _TORCH[schedule.name]._calculate_single_rank_operations(fields, place))
        return tuple(Action(_KINDS[x.computation_type.name], x.stage_index, x.microbatch_index) for x in order)
    ahead = min(number, pp - place)
    alternating = [Action("forward", place, each) for each in range(ahead)]
    for each in range(number):
        alternating.append(Action("backward", place, each))
        alternating += [Action("forward", place, ahead + each)] if ahead + each < number else []
    return tuple(alternating)
