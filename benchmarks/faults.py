"""Does a run survive? Kill -9 of a random rank at random moments, and the result held against an undisturbed run.

    python -m benchmarks.faults                       # 20 kills on 4 ranks, at most eight minutes on two cores
    python -m benchmarks.faults --kills 2 --steps 20 --no-save

    undisturbed   torchrun train.py ... ------------------------------------------> model
    disturbed     torchrun --max-restarts ... --x restart -----x restart ---x ... -> model, the same bits
                                                `- every checkpoint that is there is read, every byte of it

Three of four kills come after a random step, at a random moment of the next; the others while the ranks start.
Only ranks are killed that this program's own torchrun has started.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.harness.record import RESULTS, Record, machine

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "train.py"
START_SECONDS = 10.0  # the random moments while ranks start are within these
STEP_SECONDS = 1.0


@dataclass(frozen=True)
class Kill:
    """One kill: after which step, of which rank, and how long until the continued run told its first steps.

    recovered_seconds is None where the next kill came before that.
    """

    step: int
    while_starting: bool
    rank: int
    recovered_seconds: float | None
    checkpoints_read: int


class Launched:
    """torchrun with ranks of train.py, whose folder is `folder`/run; killed with its ranks when the block ends."""

    def __init__(self, folder: Path, ranks: int, restarts: int, arguments: list[str]) -> None:
        self.run, self.log = folder / "run", folder / "log.txt"
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["--max-restarts", str(restarts), str(TRAIN), *arguments, "--output", str(self.run)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        ranks = self.ranks()
        self.process.kill()
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> list[int]:
        """Process ids of the ranks alive, by rank: children of this torchrun that run train.py."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(") ")[2].split()[1])
                ours = parent == self.process.pid and str(TRAIN).encode() in (stat.parent / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if ours:
                found.append(int(stat.parent.name))
        return sorted(found)

    def step(self) -> int:
        """The last step on record."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0

    def told(self) -> int:
        """Which file the metrics are in: a continued run makes a new one."""
        file = self.run / "metrics.jsonl"
        return file.stat().st_ino if file.exists() else 0

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, deadline: float) -> None:
        """Until it has ended well; SystemExit with what it said otherwise."""
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.process.poll() != 0:
            sys.exit(f"{self.run}: exit code {self.process.poll()}\n{self.log.read_text()[-4000:]}")


def read_checkpoints(run: Path) -> int:
    """Read every byte of every whole checkpoint of a run; how many. Raises when one is unreadable."""
    folders = [path.parent for path in (run / "checkpoints").glob("step-*/checkpoint.json")]
    return sum(read_checkpoint(folder) for folder in sorted(folders) if folder.name.removeprefix("step-").isdigit())


def read_checkpoint(folder: Path, tries: int = 3) -> bool:
    """Whether a checkpoint is still there, and then whole; a run may remove or replace it while it is read."""
    try:
        tensors = json.loads((folder / "checkpoint.json").read_text())["tensors"]
        boxes = [(name, box) for name, tensor in tensors.items() for box in tensor["boxes"]]
        files = {name: load_file(folder / name) for name in {box["file"] for _, box in boxes}}
        for name, box in boxes:
            part = files[box["file"]][f"{name}@{','.join(map(str, box['offset']))}"]
            assert list(part.shape) == box["shape"], f"{folder}: {name} has the shape {part.shape}, not {box['shape']}"
    except FileNotFoundError:  # removed, or replaced by one of the same step: both by a rename
        if not folder.exists():
            return False
        if tries == 1:
            raise
        return read_checkpoint(folder, tries - 1)
    return True


def disturb(launched: Launched, kills: int, steps: int, seed: int, deadline: float) -> Iterator[Kill]:
    """Kill ranks of a run until it has been hit `kills` times."""
    chance = random.Random(seed)
    targets = sorted(chance.randrange(1, steps - 2) for _ in range(kills))
    for number, target in enumerate(targets):
        while_starting, next_while_starting = number % 4 == 3, number % 4 == 2 and number + 1 < kills
        while not while_starting and launched.step() < target:
            _still_there(launched, deadline, number)
        time.sleep(chance.uniform(0, START_SECONDS if while_starting else STEP_SECONDS))
        while not (ranks := launched.ranks()):
            _still_there(launched, deadline, number)
        victim = chance.randrange(len(ranks))
        step, told, begin = launched.step(), launched.told(), time.monotonic()
        os.kill(ranks[victim], signal.SIGKILL)
        read = read_checkpoints(launched.run)
        while set(launched.ranks()) & set(ranks):
            _still_there(launched, deadline, number + 1)
        if not next_while_starting:
            while launched.told() == told:  # a continued run begins with a metrics file of its own
                _still_there(launched, deadline, number + 1)
            first = launched.step()
            while launched.step() == first:
                _still_there(launched, deadline, number + 1)
        seconds = None if next_while_starting else time.monotonic() - begin
        yield Kill(step, while_starting, victim, seconds, read + read_checkpoints(launched.run))


def _still_there(launched: Launched, deadline: float, kills: int) -> None:
    if launched.ended() or time.monotonic() > deadline:
        sys.exit(f"the run ended, or time did, after {kills} kills\n{launched.log.read_text()[-4000:]}")
    time.sleep(0.02)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The trained model's tensors by name."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((run / "model").glob("*.safetensors")):
        weights |= load_file(file)
    assert weights, f"{run / 'model'} holds no weights"
    return weights


def different(run: Path, other: Path) -> list[str]:
    """Names of the tensors, and numbers of the steps, in which two runs are not the same to the last bit."""
    ours, theirs = weights_of(run), weights_of(other)
    found = [name for name in ours.keys() | theirs.keys() if not _same_bits(ours.get(name), theirs.get(name))]
    ours_told, theirs_told = _losses(run), _losses(other)
    if ours_told != theirs_told:
        found.append(f"steps: {sorted(set(ours_told) ^ set(theirs_told))[:5]}")
    return sorted(found)


def _same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _losses(run: Path) -> list[tuple[int, float, float]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"], record["grad_norm"]) for record in records]


def record_of(
    kills: list[Kill], differing: list[str], options: argparse.Namespace, seconds: dict[str, float]
) -> Record:
    """The answer as a table: one row for each kill."""
    recovered = [kill.recovered_seconds for kill in kills if kill.recovered_seconds is not None]
    result = "bit-identical" if not differing else f"DIFFERENT: {', '.join(differing)}"
    data: list[dict[str, Any]] = [{**vars(kill)} for kill in kills]
    data.append({"identical": not differing, "differing": differing, **seconds})
    return Record(
        name="faults",
        question=f"Does a run survive kill -9 of a random rank, {len(kills)} times?",
        command="python -m benchmarks.faults",
        machine=machine(),
        columns=("kill", "at step", "moment", "rank", "next step after", "checkpoints read"),
        rows=tuple(
            (
                str(number),
                str(kill.step),
                "while ranks start" if kill.while_starting else "in a step",
                str(kill.rank),
                "killed before" if kill.recovered_seconds is None else f"{kill.recovered_seconds:.1f} s",
                str(kill.checkpoints_read),
            )
            for number, kill in enumerate(kills, start=1)
        ),
        notes=(
            f"Final weights, losses and gradient norms after {options.steps} steps on {options.ranks} ranks: {result}.",
            f"Every checkpoint present at a kill and after it was read to its last byte: "
            f"{sum(kill.checkpoints_read for kill in kills)} readings, none failed.",
            f"From a kill to the next new step: median {statistics.median(recovered):.1f} s, most of it the start of "
            f"{options.ranks} Python processes. Undisturbed {seconds['undisturbed']:.0f} s, disturbed "
            f"{seconds['disturbed']:.0f} s.",
        ),
        data=data,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of the random moments and ranks")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--no-save", action="store_true", help="only print")
    parser.add_argument("extra", nargs="*", help="further flags of train.py, after --")
    options = parser.parse_args(argv)
    arguments = ["--device", "cpu", "--steps", str(options.steps), "--seq-len", "256", "--checkpoint-every", "2"]
    arguments += ["--sp-ulysses", "2", "--sp-ring", "2", *options.extra]
    deadline = time.monotonic() + options.limit
    seconds = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        begin = time.monotonic()
        with Launched(folder / "undisturbed", options.ranks, 0, arguments) as undisturbed:
            undisturbed.wait(deadline)
        seconds["undisturbed"], begin = time.monotonic() - begin, time.monotonic()
        with Launched(folder / "disturbed", options.ranks, 2 * options.kills, arguments) as disturbed:
            kills = []
            for kill in disturb(disturbed, options.kills, options.steps, options.seed, deadline):
                kills.append(kill)
                print(f"kill {len(kills)}/{options.kills}: {kill}", flush=True)
            disturbed.wait(deadline)
        seconds["disturbed"] = time.monotonic() - begin
        read_checkpoints(disturbed.run)
        differing = different(undisturbed.run, disturbed.run)
    record = record_of(kills, differing, options, seconds)
    record.print()
    if not options.no_save:
        record.save(RESULTS / "faults.json")
    if differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
