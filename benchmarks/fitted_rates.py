"""A hardware file fitted from a run of two ranks, and the steps of other configurations that it predicts.

The machine is calibrated with the heads of the model, one configuration is trained for some steps with a trace, `usp
time --write-hardware` fits the rates of compute by it, and then other configurations are trained and predicted, both by
the fitted file and by the calibrated one. Each is trained several times, in turns, because the machine is faster in one
minute than in the next; the median run counts.

    python -m benchmarks.fitted_rates            # two ranks: about twenty minutes
    python -m benchmarks.fitted_rates --quick    # two configurations, from the file h100; saves nothing
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.record import Record, finish
from usp.planning.step_report import measured

ROOT = Path(__file__).parents[1]
RANKS = 2
MODEL = ("--model", "tiny", "--dtype", "float32")
HEADS = ("--heads", "8", "--head-dim", "16")  # of MODEL
RUN = ("--seq-len", "2048", "--sp-ulysses", "2", "--zero", "2")
TURNS = 3
OTHERS: tuple[tuple[str, ...], ...] = (
    ("--seq-len", "2048", "--sp-ring", "2", "--zero", "2"),
    ("--seq-len", "4096", "--sp-ring", "2", "--zero", "1"),
    ("--seq-len", "4096", "--sp-ulysses", "2", "--ac", "full"),
    ("--seq-len", "1024", "--zero", "3"),
    ("--seq-len", "1024", "--zero", "1", "--batch-size", "2"),
    ("--seq-len", "2048", "--zero", "3", "--ac", "full"),
    ("--seq-len", "2048", "--tp", "2"),
    ("--seq-len", "2048", "--tp", "2", "--tp-sequence-parallel"),
    ("--seq-len", "2048", "--sp-ulysses", "2", "--ac", "selective", "--batch-size", "2"),
    ("--seq-len", "1024", "--pp", "2", "--micro-batches", "4", "--batch-size", "4"),
)


def called(command: Sequence[str], ranks: int = 0) -> str:
    """Run Python with a command, under torchrun on `ranks` ranks; return what it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launcher, *command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def trained(flags: Sequence[str], folder: Path, steps: int, *more: str) -> None:
    run = ("--device", "cpu", "--steps", str(steps), "--output", str(folder))
    called([str(ROOT / "train.py"), *MODEL, *flags, *run, *more], RANKS)


def predicted(flags: Sequence[str], hardware: Path | str, *more: str) -> dict[str, Any]:
    place = ("--world-size", str(RANKS), "--hardware", str(hardware), "--json")
    found: dict[str, Any] = json.loads(called(["-m", "usp", "time", *MODEL, *flags, *place, *more]))
    return found


def row(flags: Sequence[str], found: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    seconds = found[0]["measured"]["seconds"]
    each = [text for one in found for text in (f"{one['seconds']:.3f}", f"{one['seconds'] / seconds - 1:+.0%}")]
    return (" ".join(flags), f"{seconds:.3f}", *each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two configurations; save nothing")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    asked = parser.parse_args()
    steps, turns, others = (14, 1, OTHERS[:1]) if asked.quick else (24, TURNS, OTHERS)
    results: list[tuple[tuple[str, ...], list[dict[str, Any]]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        calibrated, fitted = "h100" if asked.quick else root / "calibrated.json", root / "fitted.json"
        if not asked.quick:
            called(["-m", "usp", "calibrate", *HEADS, "--out", str(calibrated)], RANKS)
        trained(RUN, root / "run", steps, "--profile", "10:15")
        against = ("--against", str(root / "run"))
        predicted(RUN, calibrated, *against, "--write-hardware", str(fitted))
        for turn, (number, flags) in product(range(turns), enumerate((RUN, *others))):
            trained(flags, root / f"{number}-{turn}", steps)
        for number, flags in enumerate((RUN, *others)):
            runs = [root / f"{number}-{turn}" for turn in range(turns)]
            middle = sorted(runs, key=lambda run: measured(run).seconds)[turns // 2]
            each = [predicted(flags, file, "--against", str(middle)) for file in (fitted, calibrated)]
            results.append((flags, each))
            print(row(flags, each), flush=True)
    of = [[abs(one["seconds"] / one["measured"]["seconds"] - 1) for one in each] for _, each in results[1:]]
    fits, calibrates = zip(*of, strict=True)
    record = Record.of(
        "fitted_rates",
        f"Steps on {RANKS} ranks, predicted by rates that a run of {steps} steps told",
        ("configuration", "measured (s)", "fitted (s)", "error", "calibrated (s)", "error"),
        [row(*each) for each in results],
        (
            f"{len(of)} other configurations: by the fitted file {median(fits):.1%} (median), {max(fits):.0%} "
            f"(maximum), by the calibrated one {median(calibrates):.1%}, {max(calibrates):.0%}.",
            f"The first row is the fitted configuration, trained again. Measured: the median of {turns} runs of each.",
        ),
        [{"flags": flags, "fitted": each[0], "calibrated": each[1]} for flags, each in results],
        command="python -m benchmarks.fitted_rates",
    )
    finish(record, asked.output, save=not asked.quick)


if __name__ == "__main__":
    main()
