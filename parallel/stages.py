"""Pipeline stages: their placement on ranks, their layers, and the micro-batches and bubbles of each schedule.

    schedule           stages per rank   placement over 2 ranks   source
    1f1b               1                 0 | 1                    arXiv 2104.04473, section 2.2.1
    interleaved-1f1b   2 or more         0 2 | 1 3                arXiv 2104.04473, section 2.2.2
    zero-bubble        2                 0 3 | 1 2                arXiv 2401.10241, section 6 (ZB-V)

zero-bubble is ZB-V rather than the looped variant: as every rank has an early and a late stage, all ranks store the
same amount of activations, no more than 1F1B's first rank, and where the V turns, no message is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, count

_STAGES = {"1f1b": 1, "interleaved-1f1b": 2, "zero-bubble": 2}  # the fewest on a rank
PP_SCHEDULES = tuple(_STAGES)


def stages_violation(schedule: str, stages_per_rank: int) -> str | None:
    """Return why no rank of a schedule can have so many stages, or None. 0 stands for the fewest."""
    if schedule not in _STAGES:
        return f"schedule={schedule} must be one of {', '.join(PP_SCHEDULES)}"
    fewest, more = _STAGES[schedule], schedule == "interleaved-1f1b"
    if stages_per_rank in (0, fewest) or (more and stages_per_rank > fewest):
        return None
    wanted, other = f"{fewest}{' or more' * more}", "1f1b" if stages_per_rank == 1 else "interleaved-1f1b"
    return f"stages per rank of {schedule} must be {wanted}, not {stages_per_rank}: use {other}"


@dataclass(frozen=True)
class PipelineSchedule:
    """One of `PP_SCHEDULES`, and how many stages each pipeline rank has; 0 becomes the fewest of the schedule.

    Raises ValueError for what `stages_violation` refuses."""

    name: str = "1f1b"
    stages_per_rank: int = 0

    def __post_init__(self) -> None:
        if violation := stages_violation(self.name, self.stages_per_rank):
            raise ValueError(violation)
        object.__setattr__(self, "stages_per_rank", self.stages_per_rank or _STAGES[self.name])


ONE_STAGE = PipelineSchedule()


def rank_stages(schedule: PipelineSchedule, pp: int, rank: int) -> tuple[int, ...]:
    """Return the stages of one of `pp` ranks, ascending. Stage 0 gets the token ids, the last stage gives the loss."""
    if schedule.name == "zero-bubble":
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * schedule.stages_per_rank, pp))


def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Divide layers into consecutive ranges, one per stage, as evenly as possible.

    Extra layers go to the middle stages first, then to the first stage, then to the last: the first one also has the
    embedding, and the last one the vocabulary loss, which costs as much as several layers. Raise ValueError if a stage
    would have no layer."""
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} stages: use {num_layers} stages or fewer")
    each, left = divmod(num_layers, num_stages)
    larger = [*range(1, num_stages - 1), 0, num_stages - 1][:left]
    starts = list(accumulate((each + (stage in larger) for stage in range(num_stages)), initial=0))
    return tuple(map(range, starts[:-1], starts[1:]))


def micro_batch_violation(schedule: str, pp: int, micro_batches: int) -> str | None:
    """Return why this schedule cannot run `micro_batches` on `pp` ranks, with the next number it can, or None."""
    if _fits(schedule, pp, micro_batches):
        return None
    fitting = next(number for number in count(micro_batches + 1) if _fits(schedule, pp, number))
    rounds = micro_batches // pp
    if schedule == "zero-bubble":
        rule = f"at least 2 x {pp} - 1 = {2 * pp - 1}"
    elif micro_batches < pp:
        rule = f"at least {pp}"
    else:
        rule = f"a multiple of its {micro_batches} // {pp} = {rounds} rounds"
    return f"micro-batches of {schedule} over {pp} ranks must be {rule}, not {micro_batches}: use {fitting}"


def schedule_violation(schedule: str, torch_version: str) -> str | None:
    """Return why this torch cannot run a schedule, or None."""
    if schedule != "zero-bubble" or tuple(map(int, torch_version.split(".")[:2])) >= (2, 13):
        return None
    return f"zero-bubble needs torch 2.13 or newer, because {torch_version} fails in its split backward: use 1f1b"


def _fits(schedule: str, pp: int, micro_batches: int) -> bool:
    if schedule == "zero-bubble":
        return micro_batches >= 2 * pp - 1
    return micro_batches >= pp and (schedule == "1f1b" or micro_batches % (micro_batches // pp) == 0)


def bubble_fraction(schedule: PipelineSchedule, pp: int, micro_batches: int) -> float:
    """Return the idle fraction of a rank's step, if messages are free and a backward takes twice as long as a forward.

    Both halves of a split backward take equally long. With zero-bubble, only the first micro-batch's pass through the
    stages remains, because all ranks wait for the global gradient norm.
    """
    work = (6 if schedule.name == "zero-bubble" else schedule.stages_per_rank) * micro_batches
    return (pp - 1) / (work + pp - 1)
