"""A hardware file fitted from a run of two ranks, and the steps of other configurations that it predicts.

The machine is calibrated with the heads of the model, one configuration is trained for some steps, a few of them with a
trace, `usp time --write-hardware` fits the rates by it, and then other configurations are trained and predicted, both
by the fitted file and by the calibrated one, for documents like those of their runs. All but the calibration is done
several times, because the machine is faster in one minute than in the next: each turn fits a file of its own. The first
configuration is trained once more at the end of each turn, to show what that alone makes of a prediction.

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


def errors(seconds: Sequence[float], found: Sequence[float]) -> list[float]:
    return [predicted / measured - 1 for measured, predicted in zip(seconds, found, strict=True)]


def row(name: str, seconds: Sequence[float], *found: Sequence[float]) -> tuple[str, ...]:
    each = (" ".join(f"{error:+.0%}" for error in errors(seconds, of)) for of in found)
    return (name, " ".join(f"{one:.3f}" for one in seconds), *each)


def by_turn(results: Sequence[tuple[Any, ...]], which: int) -> str:
    """Return the errors of a file's predictions of other configurations than the fitted one."""
    each = zip(*(map(abs, errors(of[1], of[which])) for of in results[1:-1]), strict=True)
    return "; ".join(f"{median(of):.1%} and {max(of):.0%}" for of in each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two configurations; save nothing")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    asked = parser.parse_args()
    steps, turns, others = (24, 1, OTHERS[:1]) if asked.quick else (24, TURNS, OTHERS)
    # Of each configuration by turn: measured, and predicted by the fitted file and by the calibrated one.
    results: list[tuple[str, list[float], list[float], list[float]]] = []
    configurations = {" ".join(flags): flags for flags in (RUN, *others)} | {"the first again": RUN}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        calibrated = "h100" if asked.quick else root / "calibrated.json"
        if not asked.quick:
            called(["-m", "usp", "calibrate", *HEADS, "--out", str(calibrated)], RANKS)
        for turn in range(turns):
            for number, flags in enumerate(configurations.values()):
                trained(flags, root / f"{turn}-{number}", steps, *(("--profile", "10:15") if number == 0 else ()))
            against = ("--against", str(root / f"{turn}-0"), "--write-hardware", str(root / f"fitted-{turn}.json"))
            predicted(RUN, calibrated, *against)
        for number, (name, flags) in enumerate(configurations.items()):
            runs = [root / f"{turn}-{number}" for turn in range(turns)]
            found: list[list[float]] = [[], []]
            for turn, run in enumerate(runs):
                for by, file in zip(found, (root / f"fitted-{turn}.json", calibrated), strict=True):
                    by.append(predicted(flags, file, "--against", str(run))["seconds"])
            results.append((name, [measured(run).seconds for run in runs], *found))
            print(row(*results[-1]), flush=True)
    record = Record.of(
        "fitted_rates",
        f"Steps on {RANKS} ranks, predicted by rates that a run of {steps} steps told",
        ("configuration", "measured (s)", "fitted: errors", "calibrated: errors"),
        [row(*each) for each in results],
        (
            f"Each of {turns} turns fits a file by the first row, and predicts {len(others)} other configurations; "
            f"errors of each turn, median and maximum: {by_turn(results, 2)}. By the calibrated file: "
            f"{by_turn(results, 3)}. The last row is the machine's own unsteadiness.",
        ),
        [dict(zip(("flags", "seconds", "fitted", "calibrated"), each, strict=True)) for each in results],
        command="python -m benchmarks.fitted_rates",
    )
    finish(record, asked.output, save=not asked.quick)


if __name__ == "__main__":
    main()
