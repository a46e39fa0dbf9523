"""A hardware file fitted from a run of two ranks, and the steps of other configurations that it predicts.

The machine is calibrated with the heads of the model, one configuration is trained for some steps, a few of them with a
trace, examples/fit_hardware.py fits the rates by it, and other configurations are trained and predicted, both by the
fitted file and by the calibrated one, for documents like those of their runs. All runs of a turn train at once, a step
of each after the other, because the machine is faster in one minute than in the next; a second run of the first
configuration shows what is left of that. Each of several turns fits a file of its own.

    python -m benchmarks.fitted_rates            # two ranks: about a quarter of an hour
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

import torch

from benchmarks.harness.record import Record, finish
from usp.commands.flags import parse
from usp.config import TrainConfig
from usp.planning.step_report import measured
from usp.run.launch import Launch, process_group
from usp.run.metrics import METRICS_FILE
from usp.train.prepare import prepare
from usp.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
RANKS = 2
MODEL = ("--model", "tiny", "--dtype", "float32")
HEADS = ("--heads", "8", "--head-dim", "16")  # of MODEL
RUN = ("--seq-len", "2048", "--sp-ulysses", "2", "--zero", "2")
TURNS, STEPS, TRACED = 3, 24, range(10, 16)
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


def train_in_turns(folder: Path, configurations: Sequence[Sequence[str]]) -> None:
    """Train a run of each configuration in a folder of its number, a step of each after the other, on this rank. The
    traced steps of the first one follow each other, so that a trace has no other run."""
    launch = Launch.from_environment(os.environ)
    with process_group(launch, torch.device("cpu")):
        runs = []
        for number, flags in enumerate(configurations):
            trace = () if number else ("--profile", f"{TRACED[0]}:{TRACED[-1]}")
            more = ("--device", "cpu", "--steps", str(STEPS), "--output", str(folder / str(number)), *trace)
            runs.append(Trainer(prepare(parse([*MODEL, *flags, *more], TrainConfig), launch)))
            if runs[-1].is_writer:
                runs[-1].folder.mkdir(parents=True)
                runs[-1].write_files()
        for step in range(1, STEPS + 1):
            for run in runs:
                traced = run is runs[0] and step in TRACED
                for number in (TRACED if step == TRACED[0] else ()) if traced else (step,):
                    with run.trace(number):
                        record = run.step(number)
                    if run.is_writer:
                        with (run.folder / METRICS_FILE).open("a") as file:
                            print(json.dumps({"step": number, **record.numbers()}), file=file)


def predicted(
    flags: Sequence[str], hardware: Path | str, *more: str, program: Sequence[str] = ("usp", "time")
) -> dict[str, Any]:
    place = ("--world-size", str(RANKS), "--hardware", str(hardware), "--json")
    found: dict[str, Any] = json.loads(called(["-m", *program, *MODEL, *flags, *place, *more]))
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
    parser.add_argument("--train", type=Path, default=None, help=argparse.SUPPRESS)  # under torchrun: in this folder
    asked = parser.parse_args()
    turns, others = (1, OTHERS[:1]) if asked.quick else (TURNS, OTHERS)
    # Of each configuration by turn: measured, and predicted by the fitted file and by the calibrated one.
    results: list[tuple[str, list[float], list[float], list[float]]] = []
    configurations = {" ".join(flags): flags for flags in (RUN, *others)} | {"the first again": RUN}
    if asked.train:
        train_in_turns(asked.train, [*configurations.values()])
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        calibrated = "h100" if asked.quick else root / "calibrated.json"
        if not asked.quick:
            called(["-m", "usp", "calibrate", *HEADS, "--out", str(calibrated)], RANKS)
        for turn in range(turns):
            quick = ["--quick"] if asked.quick else []
            called(["-m", "benchmarks.fitted_rates", "--train", str(root / str(turn)), *quick], RANKS)
            against = ("--against", str(root / str(turn) / "0"), "--write-hardware", str(root / f"fitted-{turn}.json"))
            predicted(RUN, calibrated, *against, program=("examples.fit_hardware",))
        for number, (name, flags) in enumerate(configurations.items()):
            runs = [root / str(turn) / str(number) for turn in range(turns)]
            found: list[list[float]] = [[], []]
            for turn, run in enumerate(runs):
                for by, file in zip(found, (root / f"fitted-{turn}.json", calibrated), strict=True):
                    by.append(predicted(flags, file, "--against", str(run))["seconds"])
            results.append((name, [measured(run).seconds for run in runs], found[0], found[1]))
            print(row(*results[-1]), flush=True)
    record = Record.of(
        "fitted_rates",
        f"Steps on {RANKS} ranks, predicted by rates that a run of {STEPS} steps told",
        ("configuration", "measured (s)", "fitted: errors", "calibrated: errors"),
        [row(*each) for each in results],
        (
            f"Each of {turns} turns fits a file by the first row, and predicts {len(others)} other configurations; "
            f"errors of each turn, median and maximum: {by_turn(results, 2)}. By the calibrated file: "
            f"{by_turn(results, 3)}.",
            "The last row, a second run of the first, is not among them.",
        ),
        [dict(zip(("flags", "seconds", "fitted", "calibrated"), each, strict=True)) for each in results],
        command="python -m benchmarks.fitted_rates",
    )
    finish(record, asked.output, save=not asked.quick)


if __name__ == "__main__":
    main()
