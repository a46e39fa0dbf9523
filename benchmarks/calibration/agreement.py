"""Calibrations while other programs run: do repeated ones agree, by what estimate, and do they say so if not?

Each case calibrates several times, one after another, alone and beside a load that computes and pauses for random
times. Estimates of the same turns are compared: the fastest eighth, which `python -m usp calibrate` takes, the fastest
turn, the median and the mean.

    python -m benchmarks.calibration.agreement            # about a quarter of an hour
    python -m benchmarks.calibration.agreement --quick    # two tiny calibrations; saves nothing
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.record import Record, finish
from tests.harness.ranks import RankPool
from usp.predict.calibrate import WIDE, CallTimes, Plan, cautions, contents, measure
from usp.predict.rounds import Estimate

ESTIMATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "fastest eighth": lambda turns: Estimate.of(turns).seconds,
    "fastest turn": min,
    "median": statistics.median,
    "mean": statistics.mean,
}
HEADS, HEAD_DIM = 8, 64
WHOLE_FILE = ("refused", "other programs used")  # beginnings of warnings that concern every time


def burn(seed: int) -> None:
    """Compute and pause in turns of random lengths."""
    torch.set_num_threads(1)
    draw, a = random.Random(seed), torch.randn(256, 256)
    while True:
        end = time.monotonic() + draw.uniform(0.05, 2.0)
        while time.monotonic() < end:
            torch.mm(a, a)
        time.sleep(draw.uniform(0.05, 2.0))


@contextmanager
def load(programs: int) -> Iterator[None]:
    """Run that many `burn` meanwhile."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=burn, args=(seed,), daemon=True) for seed in range(programs)]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def plan_of(host_size: int, quick: bool) -> Plan:
    if quick:
        return Plan(torch.device("cpu"), host_size, 2, 16, (16, 32), (32,), 1 << 16, 6, 0.002)
    return Plan.of(torch.device("cpu"), host_size, HEADS, HEAD_DIM)


def on_a_rank(host_size: int, quick: bool) -> tuple[CallTimes, list[str]]:
    """Return what a calibration measures, without its process groups, and what it says: cautions, or why it refuses."""
    plan = plan_of(host_size, quick)
    measured = measure(plan)
    try:
        said = cautions(contents(plan, "here", measured))
    except ValueError as refusal:
        said = [f"refused: {refusal}"]
    return replace(measured, kernels={}, tiers=[]), said


def disagreement(measured: Sequence[CallTimes], estimate: Callable[[Sequence[float]], float]) -> dict[str, float]:
    """Return how far the estimates of each time lie apart, relative to the smallest."""
    found = {}
    for name in measured[0].turns:
        seconds = [estimate(one.turns[name]) for one in measured]
        found[name] = max(seconds) / min(seconds) - 1
    return found


def row(case: str, measured: Sequence[CallTimes], said: Sequence[Sequence[str]]) -> dict[str, Any]:
    apart = {name: disagreement(measured, estimate) for name, estimate in ESTIMATES.items()}
    ours = apart["fastest eighth"]
    far = [name for name, one in ours.items() if one > WIDE]
    warnings = [text for texts in said for text in texts]
    told = [name for name in far if any(name in text or text.startswith(WHOLE_FILE) for text in warnings)]
    return {
        "case": case,
        "times": len(ours),
        "mean": {name: statistics.mean(one.values()) for name, one in apart.items()},
        "worst": {name: max(one.values()) for name, one in apart.items()},
        "far": {name: ours[name] for name in far},
        "told": told,
        "other_load": [one.other_load for one in measured],
        "said": said,
    }


COLUMNS = (
    "case",
    "other load",
    "times",
    *(f"apart, {name}" for name in ESTIMATES),
    f"beyond {WIDE:.0%}",
    "of them told",
)


def cells(found: dict[str, Any]) -> tuple[str, ...]:
    return (
        found["case"],
        " / ".join(f"{share:.0%}" for share in found["other_load"]),
        str(found["times"]),
        *(f"{found['mean'][name]:.1%} (worst {found['worst'][name]:.0%})" for name in ESTIMATES),
        str(len(found["far"])),
        str(len(found["told"])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Agreement of repeated calibrations beside other programs.")
    parser.add_argument("--quick", action="store_true", help="two tiny calibrations without load; save nothing")
    parser.add_argument("--times", type=int, default=3, help="calibrations of each case")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="ranks that calibrate")
    parser.add_argument("--load", type=int, nargs="+", default=[0, 2], help="programs beside them")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    args = parser.parse_args()
    ranks, loads = ([1], [0]) if args.quick else (args.ranks, args.load)
    data = []
    with RankPool() as pool:
        for number in ranks:
            for programs in loads:
                with load(programs):
                    found = [
                        pool.run(on_a_rank, number, number, args.quick, timeout=1200.0)[0] for _ in range(args.times)
                    ]
                case = f"{number} rank{'s' * (number > 1)}" + f", {programs} other programs" * (programs > 0)
                data.append(row(case, *zip(*found, strict=True)))
                print(*cells(data[-1]), sep="  ", flush=True)
    record = Record.of(
        "calibration",
        "Calibrations beside other programs: how far three in a row lie apart, by the estimate that is taken",
        COLUMNS,
        map(cells, data),
        (
            "Apart: the largest of three estimates of a time relative to the smallest, mean and worst over all times.",
            "Times are the first rank's. Other load: the processor time of other programs during each calibration.",
            "Told: a file's warnings name the time or the other programs, or no file is written.",
        ),
        data,
        command="python -m benchmarks.calibration.agreement",
    )
    finish(record, None if args.quick else args.output, save=not args.quick)


if __name__ == "__main__":
    main()
