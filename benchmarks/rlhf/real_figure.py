"""ReaL's figure: predicted seconds of its heuristic plan, and how much faster a searched plan is, in every cell.

Three constants of ReaL's software are fitted to the heuristic's seconds at responses of 128 and 384 tokens; the others
are from sources, and everything else is predicted. Nothing is fitted to the seconds of ReaL's plans.

    python -m benchmarks.rlhf.real_figure            # on one core
    python -m benchmarks.rlhf.real_figure --quick    # the cells of up to 16 devices at one length; saves nothing
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.harness.record import Record, finish
from benchmarks.rlhf.real_rows import LENGTHS, Cell, cells
from benchmarks.rlhf.real_system import Constants, fit, heuristic, problem
from parallel import format_ranks
from usp.planning.rlhf_search import search
from usp.rlhf.plan.plan import ExecutionPlan

CALIBRATED = LENGTHS[:2]
MISS = 0.15  # of the heuristic's seconds, and of the ratio: what the goal allows on average
EVEN_FROM = 4  # hosts: with more, only even divisions of them are searched
WHY = (
    "Why longer heuristic cells are predicted too slow: at 128 tokens 70B + 7B takes 10.7 s longer than 7B + 70B, "
    "which is 1.7 ms for each of 48 layers and token if all of it is decoding; from 384 to 896 tokens it is 1.2 ms. "
    "Something besides decoding grows with the layers, and one length cannot tell the two apart.",
    "Why gains are missed: by the differences between lengths, the heuristic decodes a token in 42 ms (7B on 8 GPUs), "
    "51 (13B on 16), 66 (34B on 32) and 111 (70B on 64), ReaL's plans in 18, 26, 63 and 107. Small models, which need "
    "no tp, decode twice as fast without it, large ones do not. Here operators bound a decode step in every plan, so "
    "gains that grow with the length are missed.",
    "The heuristic has tp 8 everywhere: if each collective takes 0.7 ms, its column fits as well, and gains of small "
    "models are far too high (by 1.2 to 2 at 7B and 13B).",
    "The model's structure was revised with some of these cells in view, and ReaL's plans are not published.",
)


@dataclass(frozen=True)
class Result:
    """A cell with its predictions: seconds of the heuristic and of the searched plan, and of the search."""

    cell: Cell
    heuristic: float
    searched: float
    plan: ExecutionPlan
    took: float

    @property
    def error(self) -> float:
        return self.heuristic / self.cell.heuristic - 1

    @property
    def ratio(self) -> float:
        return self.heuristic / self.searched

    @property
    def off(self) -> float:
        """By how much the predicted ratio differs from the measured one."""
        return self.ratio - self.cell.ratio


def result(cell: Cell, constants: Constants, budget: float) -> Result:
    begin = time.monotonic()
    searched = problem(cell, constants, even=cell.devices > EVEN_FROM * 8)
    start = heuristic(cell)
    seconds, _ = searched.simulator.measure(start)
    found = search(searched, budget=budget, starts=[start])
    best, plan = found.best[0] if found.best else (seconds, start)
    took = time.monotonic() - begin
    print(f"{cell.name} on {cell.devices}, {cell.response}: {seconds:.1f} s, {best:.1f} s in {took:.0f} s", flush=True)
    return Result(cell, seconds, best, plan, took)


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
        f"Gain of the searched plan over {len(results)} different cells: off by {mean(off):.2f} on average, by "
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
    yield of_gains(results)
    missed = [f"{one.cell.name} at {one.cell.response} ({one.off:+.2f})" for one in results if abs(one.off) > 2 * MISS]
    yield f"Gains that are off by more than {2 * MISS:.2f}: {', '.join(missed) or 'none'}."
    missed = [
        f"{one.cell.name} on {one.cell.devices} at {one.cell.response} ({one.error:+.0%})"
        for one in results
        if abs(one.error) > MISS
    ]
    yield f"Heuristic seconds that are off by more than {MISS:.0%}: {', '.join(missed) or 'none'}."


def data(one: Result) -> dict[str, Any]:
    layouts = {
        name: f"ranks {format_ranks(layout.ranks)} {layout.dims.tp, layout.dims.pp, layout.dims.batch} (tp, pp, dp)"
        for name, layout in one.plan.calls.items()
    }
    found = asdict(one.cell) | {"predicted": one.heuristic, "searched": one.searched, "took": one.took}
    return found | {"plan": layouts, "offload": sorted(one.plan.offload)}


def record_of(results: Sequence[Result], constants: Constants) -> Record:
    return Record.of(
        "real_figure",
        "ReaL's figure: a PPO step under its heuristic plan, and its gain by search, as published and as predicted",
        COLUMNS,
        map(row, results),
        (*notes(results, constants), *WHY),
        [asdict(constants), *map(data, results)],
        command="python -m benchmarks.rlhf.real_figure",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few cells; save nothing")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of each search")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    every = list(cells())
    if arguments.quick:
        every = [cell for cell in every if cell.devices <= 16 and cell.response == LENGTHS[0]]
    calibrated = [cell for cell in every if cell.response in CALIBRATED]
    constants = fit(calibrated)
    print(constants, flush=True)
    results = [result(cell, constants, arguments.budget) for cell in every]
    record = record_of(results, constants)
    finish(record, None if arguments.quick else arguments.output, save=not arguments.quick)


if __name__ == "__main__":
    main()
