"""Pipelines as data: which stages a rank holds, which layers a stage has, and what a schedule needs and wastes.

    schedule           stages per rank   placement over 2 ranks   source
    1f1b               1                 0 | 1                    arXiv 2104.04473, section 2.2.1
    interleaved-1f1b   2                 0 2 | 1 3                arXiv 2104.04473, section 2.2.2
    zero-bubble        2                 0 3 | 1 2                arXiv 2401.10241, section 6 (ZB-V)

ZB-V rather than the looped zero-bubble schedule: it splits the backward too, and as every rank has an early stage and
a late one, all ranks keep equally many activations, no more than 1F1B's first rank. Half of its turning points need no
message.
"""

from __future__ import annotations

from itertools import count

PP_SCHEDULES = ("1f1b", "interleaved-1f1b", "zero-bubble")


def stages_per_rank(schedule: str) -> int:
    """Stages that each pipeline rank holds."""
    return 1 if schedule == "1f1b" else 2


def rank_stages(schedule: str, pp: int, rank: int) -> tuple[int, ...]:
    """The stages of one of `pp` ranks, ascending. Stage 0 takes the ids, the last stage gives the loss."""
    if schedule == "zero-bubble":
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * stages_per_rank(schedule), pp))


def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Each stage's layers: consecutive, all of them once, and as even as they go.

    Where they do not go evenly, stages in the middle take one more, then the first, and last of all the last: those two
    have the embedding and, at the cost of some layers, the vocabulary loss.

    Raises:
        ValueError: if a stage would have no layer.
    """
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot fill {num_stages} stages: use {num_layers} stages or fewer")
    each, left = divmod(num_layers, num_stages)
    takers = [*range(1, num_stages - 1), 0, num_stages - 1][:left]
    borders = [0]
    for stage in range(num_stages):
        borders.append(borders[-1] + each + (stage in takers))
    return tuple(map(range, borders[:-1], borders[1:]))


def micro_batch_violation(schedule: str, pp: int, micro_batches: int) -> str | None:
    """Why a step of `micro_batches` cannot keep `pp` ranks busy under this schedule, with the next number that does."""
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
    return f"the micro-batches of {schedule} over {pp} ranks must be {rule}, not {micro_batches}: use {fitting}"


def _fits(schedule: str, pp: int, micro_batches: int) -> bool:
    if schedule == "zero-bubble":
        return micro_batches >= 2 * pp - 1
    return micro_batches >= pp and (schedule == "1f1b" or micro_batches % (micro_batches // pp) == 0)


def bubble_fraction(schedule: str, pp: int, micro_batches: int) -> float:
    """The idle part of a rank's step: messages take no time, a backward twice a forward, each of its halves the same.

    Under zero-bubble what remains is the first micro-batch's way down, which the step's one gradient norm makes every
    rank wait for.
    """
    work = {"1f1b": 1, "interleaved-1f1b": 2, "zero-bubble": 6}[schedule] * micro_batches
    return (pp - 1) / (work + pp - 1)
