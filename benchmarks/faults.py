"""Fault tolerance: kill -9 of random ranks at random moments, compared bit for bit with an undisturbed run.

    python -m benchmarks.faults                       # 20 kills on 4 ranks, at most eight minutes on two cores
    python -m benchmarks.faults --kills 2 --steps 20 --no-save

    undisturbed   torchrun train.py ... ------------------------------------------> model
    disturbed     torchrun --max-restarts ... --x restart -----x restart ---x ... -> model with the same bits
                                                `- every byte of every checkpoint is read

Three of four kills come after a random step, at a random moment within the next one; the others while ranks start.
Only ranks started by this program's own torchrun are killed.
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

import torch
from safetensors.torch import load_file

from benchmarks.harness.record import Record, finish

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "train.py"
START_SECONDS = 10.0  # range of the random delay while ranks start
STEP_SECONDS = 1.0  # range of the random delay within a step


@dataclass(frozen=True)
class Kill:
    """One kill of a rank.

    Attributes:
        step: the last completed step.
        recovered_seconds: until the resumed run logged a new step; None if the next kill came first.
    """

    step: int
    while_starting: bool
    rank: int
    recovered_seconds: float | None
    checkpoints_read: int


class Launched:
    """A torchrun of train.py that writes to `folder`/run; killed with its ranks when the block ends."""

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
        """Return the process ids of the live ranks, by rank: children of this torchrun that run train.py."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(") ")[2].split()[1])
                ours = parent == self.process.pid and str(TRAIN).encode() in (stat.parent / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue  # the process has exited in the meantime
            if ours:
                found.append(int(stat.parent.name))
        return sorted(found)

    def step(self) -> int:
        """Return the last logged step."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0

    def metrics_file(self) -> int:
        """Return the inode of the metrics file, which a resumed run replaces."""
        file = self.run / "metrics.jsonl"
        return file.stat().st_ino if file.exists() else 0

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, deadline: float) -> None:
        """Wait for success; exit with the end of the log on failure or after the deadline."""
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.process.poll() != 0:
            sys.exit(f"{self.run}: exit code {self.process.poll()}\n{self.log.read_text()[-4000:]}")


def read_checkpoints(run: Path) -> int:
    """Read every byte of every complete checkpoint of a run, and return their number. Raises if one is unreadable."""
    folders = [path.parent for path in (run / "checkpoints").glob("step-*/checkpoint.json")]
    return sum(read_checkpoint(folder) for folder in sorted(folders) if folder.name.removeprefix("step-").isdigit())


def read_checkpoint(folder: Path, tries: int = 3) -> bool:
    """Read a checkpoint; return False if the run has removed it meanwhile. Retry if the run has replaced it."""
    try:
        tensors = json.loads((folder / "checkpoint.json").read_text())["tensors"]
        boxes = [(name, box) for name, tensor in tensors.items() for box in tensor["boxes"]]
        files = {name: load_file(folder / name) for name in {box["file"] for _, box in boxes}}
        for name, box in boxes:
            part = files[box["file"]][f"{name}@{','.join(map(str, box['offset']))}"]
            assert list(part.shape) == box["shape"], (
                f"{folder}: {name}: expected shape {box['shape']}, got {part.shape}"
            )
    except FileNotFoundError:  # removed, or replaced by one of the same step; both are renames
        if not folder.exists():
            return False
        if tries == 1:
            raise
        return read_checkpoint(folder, tries - 1)
    return True


def disturb(launched: Launched, kills: int, steps: int, seed: int, deadline: float) -> Iterator[Kill]:
    """Kill `kills` ranks of a run, one after another."""
    chance = random.Random(seed)
    targets = sorted(chance.randrange(1, steps - 2) for _ in range(kills))
    for number, target in enumerate(targets):
        while_starting, next_while_starting = number % 4 == 3, number % 4 == 2 and number + 1 < kills
        while not while_starting and launched.step() < target:
            _check_running(launched, deadline, number)
        time.sleep(chance.uniform(0, START_SECONDS if while_starting else STEP_SECONDS))
        while not (ranks := launched.ranks()):
            _check_running(launched, deadline, number)
        victim = chance.randrange(len(ranks))
        step, file, begin = launched.step(), launched.metrics_file(), time.monotonic()
        os.kill(ranks[victim], signal.SIGKILL)
        read = read_checkpoints(launched.run)
        while set(launched.ranks()) & set(ranks):
            _check_running(launched, deadline, number + 1)
        if not next_while_starting:
            while launched.metrics_file() == file:  # a resumed run starts with a new metrics file
                _check_running(launched, deadline, number + 1)
            first = launched.step()
            while launched.step() == first:
                _check_running(launched, deadline, number + 1)
        seconds = None if next_while_starting else time.monotonic() - begin
        yield Kill(step, while_starting, victim, seconds, read + read_checkpoints(launched.run))


def _check_running(launched: Launched, deadline: float, kills: int) -> None:
    if launched.ended() or time.monotonic() > deadline:
        sys.exit(f"the run ended or timed out after {kills} kills\n{launched.log.read_text()[-4000:]}")
    time.sleep(0.02)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Load the trained model's tensors by name."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((run / "model").glob("*.safetensors")):
        weights |= load_file(file)
    assert weights, f"{run / 'model'} contains no weights"
    return weights


def different(run: Path, other: Path) -> list[str]:
    """Return the names of tensors and the numbers of steps in which two runs are not bit-identical."""
    ours, theirs = weights_of(run), weights_of(other)
    found = [name for name in ours.keys() | theirs.keys() if not _same_bits(ours.get(name), theirs.get(name))]
    if differing_steps := set(_losses(run)) ^ set(_losses(other)):
        found.append(f"steps: {sorted(differing_steps)[:5]}")
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
    """Return a table with one row per kill."""
    recovered = [kill.recovered_seconds for kill in kills if kill.recovered_seconds is not None]
    result = "bit-identical" if not differing else f"DIFFERENT: {', '.join(differing)}"
    return Record.of(
        "faults",
        f"Recovery from {len(kills)} kills (kill -9) of a random rank",
        ("kill", "at step", "moment", "rank", "next step after", "checkpoints read"),
        (
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
        (
            f"Final weights, losses and gradient norms after {options.steps} steps on {options.ranks} ranks: {result}.",
            f"Every checkpoint present at and after a kill was read to its last byte: "
            f"{sum(kill.checkpoints_read for kill in kills)} reads without a failure.",
            f"Time from a kill to the next new step: median {statistics.median(recovered):.1f} s, mostly to start "
            f"{options.ranks} Python processes. Total: undisturbed {seconds['undisturbed']:.0f} s, disturbed "
            f"{seconds['disturbed']:.0f} s.",
        ),
        [*map(vars, kills), {"identical": not differing, "differing": differing, **seconds}],
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks")
    parser.add_argument("--steps", type=int, default=120, help="training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments and ranks")
    parser.add_argument("--limit", type=float, default=480.0, help="limit for the whole benchmark in seconds")
    parser.add_argument("--no-save", action="store_true", help="print the result without saving it")
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
    finish(record_of(kills, differing, options, seconds), save=not options.no_save)
    if differing:
        sys.exit(1)


if __name__ == "__main__":
    main()
