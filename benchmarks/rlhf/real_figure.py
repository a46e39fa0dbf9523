"""ReaL's figure: predicted seconds of its heuristic plan, and how much faster a searched plan is, in every cell.

Three constants of ReaL's software are fitted to the heuristic's seconds at responses of 128 and 384 tokens; the others
are from sources, and everything else is predicted: ReaL's plan is the one that its own search finds by its own
estimates, and its seconds are ours. Nothing is fitted to the seconds of ReaL's plans.

    python -m benchmarks.rlhf.real_figure            # on one core, some minutes
    python -m benchmarks.rlhf.real_figure --quick    # the cells of up to 16 devices at one length
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import numpy as np

from benchmarks.harness.record import Record, finish, parser_of
from benchmarks.rlhf.real_rows import LENGTHS, Cell, cells
from benchmarks.rlhf.real_search import reals_plan
from benchmarks.rlhf.real_system import Constants, fit, heuristic, published, runtime

CALIBRATED = LENGTHS[:2]
MISS = 0.15  # of the heuristic's seconds, and of the ratio: what the goal allows on average
SEARCHES = 5  # with other random numbers
WHY = (
    "ReaL's plans are not published but one. Predicted are those that its code finds: its search, by its estimates, "
    "which add a profile of layers on 1 to 8 devices to a step without messages, gradient reductions and offloads. The "
    "profile is not published either, and ours stands in. The search walks by chance and met about one plan in 10^2 to "
    "10^12, so that other walks end in other plans.",
    "What is left: ReaL's step of 7B + 7B on 16 devices takes 34 ms a token from 128 to 384 tokens and 22 from there "
    "to 896, that of 7B + 70B 31 and 11: no lines that one plan makes, so that these cells ran other plans than the "
    "walks here find. The stated plan is predicted to gain less than was measured; the history names no run of it, and "
    "the plans found for its cells are near.",
    "Sources: that waiting for the slowest rank grows with tp as eager decoding takes longer on 4 A100 than on 2 in "
    "another system (huggingface/text-generation-inference, issue 1315); how long a host takes for an operator, of "
    "which a layer has 28 as ReaL's code is written, gpt-fast's eager decoding, whose layers have 61 (both counted by "
    "torch's dispatcher). By ReaL's code weights are broadcast to a train step before it and back after it, gradients "
    "are reduced after all backward passes, rollouts wait for both train steps, because a call ends when all ranks "
    "that have its inputs have answered, and they answer between calls, and each token is sampled by a full sort (its "
    "rate: vllm, pull request 32234); 0.5 s a call for the master and data, 0.3 s a step to empty caches, 0.03 s a "
    "piece of weights.",
    "The model's structure was revised with some of these cells in view.",
)


@dataclass(frozen=True)
class Result:
    """A cell with its predictions.

    Attributes:
        heuristic: seconds of the heuristic's step.
        searched: seconds of each plan that ReaL's search finds.
    """

    cell: Cell
    heuristic: float
    searched: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.heuristic / self.cell.heuristic - 1

    @property
    def ratio(self) -> float:
        return self.heuristic / mean(self.searched)

    @property
    def off(self) -> float:
        """By how much the predicted ratio differs from the measured one."""
        return self.ratio - self.cell.ratio


def result(cell: Cell, constants: Constants) -> Result:
    timed = runtime(cell, constants)
    plans = [reals_plan(cell, timed.estimates, seed)[1] for seed in range(SEARCHES)]
    seconds, *searched = (timed.seconds(plan) for plan in (heuristic(cell), *plans))
    each = ", ".join(f"{took:.1f}" for took in searched)
    print(f"{cell.name} on {cell.devices}, {cell.response}: {seconds:.1f} s; {each}", flush=True)
    return Result(cell, seconds, tuple(searched))


COLUMNS = ("actor + critic", "GPUs", "response", "heuristic s", "predicted", "error", "ReaL's gain", "predicted", "off")


def row(one: Result) -> tuple[str, ...]:
    cell = one.cell
    return (
        cell.name,
        str(cell.devices),
        str(cell.response),
        f"{cell.heuristic:.1f}",
        f"{one.heuristic:.1f}",
        f"{one.error:+.0%}" + (" (fitted)" if cell.response in CALIBRATED else ""),
        f"{cell.ratio:.2f}",
        f"{one.ratio:.2f}",
        f"{one.off:+.2f}",
    )


def ranks_of(values: Sequence[float]) -> np.ndarray:
    """Return the rank of each value; equal ones share their mean rank."""
    array = np.array(values)
    return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])


def spearman(some: Sequence[float], others: Sequence[float]) -> float:
    return float(np.corrcoef(ranks_of(some), ranks_of(others))[0, 1])


def gain(results: Sequence[Result], measured: bool) -> float:
    """Return the mean gain over the heuristic, weighted by devices as the paper does."""
    weights = [one.cell.devices * one.cell.bars for one in results]
    ratios = [one.cell.ratio if measured else one.ratio for one in results]
    return float(np.average(ratios, weights=weights)) - 1


def of_gains(results: Sequence[Result]) -> str:
    off = [abs(one.off) for one in results]
    order = spearman([one.cell.ratio for one in results], [one.ratio for one in results])
    return (
        f"Gain of ReaL's plan over {len(results)} different cells: off by {mean(off):.2f} on average, by "
        f"{max(off):.2f} at most; Spearman's correlation {order:.2f}; GPU-weighted mean {gain(results, False):.1%} "
        f"(measured {gain(results, True):.1%})."
    )


def notes(results: Sequence[Result], constants: Constants) -> Iterable[str]:
    """Yield the errors of predictions, and what is missed."""
    lengths = " and ".join(map(str, CALIBRATED))
    yield f"Fitted to the heuristic at {lengths} tokens: {constants}. All else is as in the hardware file a100."
    for length in LENGTHS:
        if of := [one for one in results if one.cell.response == length]:
            errors = [abs(one.error) for one in of]
            yield (
                f"Heuristic at {length} tokens: mean absolute error {mean(errors):.1%}, worst {max(errors):.1%}"
                f"{' (fitted)' if length in CALIBRATED else ''}."
            )
    yield "With the heuristic's seconds as measured: " + of_gains(
        [replace(one, heuristic=one.cell.heuristic) for one in results]
    )
    yield (
        "With the fastest of the searches, as the figure shows the fastest of up to 12 runs of ReaL's plans, and of "
        "the heuristic the slowest (scripts/auto_ppo_parselog.py; how many there were is not published): "
        + of_gains([replace(one, searched=(min(one.searched),)) for one in results])
    )
    missed = [f"{one.cell.name} at {one.cell.response} ({one.off:+.2f})" for one in results if abs(one.off) > 2 * MISS]
    yield f"Gains that are off by more than {2 * MISS:.2f}: {', '.join(missed) or 'none'}."
    missed = [
        f"{one.cell.name} on {one.cell.devices} at {one.cell.response} ({one.error:+.0%})"
        for one in results
        if abs(one.error) > MISS
    ]
    yield f"Heuristic seconds that are off by more than {MISS:.0%}: {', '.join(missed) or 'none'}."
    spreads = [(max(one.searched) - min(one.searched)) / mean(one.searched) for one in results]
    yield (
        f"The plans of {SEARCHES} searches differ by {mean(spreads):.0%} in seconds on average, {max(spreads):.0%} at "
        "most; gains are those of their mean."
    )
    if known := [one for one in results if (one.cell.actor, one.cell.critic) == (7, 34)]:
        steps = [runtime(one.cell, constants).seconds(published(one.cell)) for one in known]
        gains = ", ".join(
            f"{one.cell.ratio:.2f} at {one.cell.response} tokens (predicted {one.heuristic / step:.2f})"
            for one, step in zip(known, steps, strict=True)
        )
        yield (
            "The one plan that ReaL's history states, of 7B + 34B (rollouts with tp 2, pp 2 and dp 8, all else as the "
            f"heuristic), gains {gains}."
        )


def answer(results: Sequence[Result]) -> str:
    def error(fitted: bool) -> str:
        errors = [abs(one.error) for one in results if (one.cell.response in CALIBRATED) == fitted]
        return f"{mean(errors):.1%}" if errors else "unknown"

    return (
        f"Its heuristic plan is predicted within {error(False)} after a fit at shorter lengths ({error(True)}). "
        + of_gains(results)
    )


def record_of(results: Sequence[Result], constants: Constants) -> Record:
    return Record.of(
        "real_figure",
        "How far are predictions from ReaL's published steps?",
        answer(results),
        COLUMNS,
        map(row, results),
        (*notes(results, constants), *WHY),
        command="python -m benchmarks.rlhf.real_figure",
    )


def main() -> None:
    arguments = parser_of(__doc__ or "", quick="few cells").parse_args()
    every = list(cells())
    if arguments.quick:
        every = [cell for cell in every if cell.devices <= 16 and cell.response == LENGTHS[0]]
    constants = fit([cell for cell in every if cell.response in CALIBRATED])
    print(constants, flush=True)
    finish(record_of([result(cell, constants) for cell in every], constants), arguments)


if __name__ == "__main__":
    main()
