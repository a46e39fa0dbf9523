"""Memory of a rank over 1,000 steps of train.py and of rlhf.py: what grows, and whether it stops.

Documents, prompts and responses differ in length from step to step, so that whatever is kept by length shows. After
every 100 steps each rank looks for garbage, and then counts

    resident     the process's resident memory
    in use       bytes that the C library has handed out (mallinfo2), which holds the tensors
    free         bytes of its heaps between those, which it may give back to the system or not
    objects      what Python's garbage collector tracks
    tensors      those among them, and the entries of every lru_cache

A leak shows in the bytes in use or in the objects; resident memory that grows without them is fragmentation. torch's
flight recorder keeps the last 2,000 collectives, about 1.2 KiB each, so that a run grows until it is full.

    python -m benchmarks.growth            # about half an hour on two cores, a rank a thread
    python -m benchmarks.growth --quick    # 60 steps; saves nothing
    TORCH_FR_BUFFER_SIZE=0 python -m benchmarks.growth --output /tmp/without.json    # without the flight recorder
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

from benchmarks.harness.record import Record, finish

ROOT = Path(__file__).parents[1]
STEPS, EVERY = 1000, 100
DOCUMENTS = 4000
REWARD = "def reward(prompt, response, answer):\n    return float(len(response) % 3)\n"
COLUMNS = ("run", "step", "resident MiB", "in use MiB", "free MiB", "objects", "tensors", "cache entries", "threads")
STOPS = ",".join(map(str, range(10, 70)))  # tokens that end a response, so that lengths differ
ROLLOUTS = ["--reward-function", "reward.py:reward", "--prompts", "1", "--group-size", "2", "--max-new-tokens", "12"]


@dataclass(frozen=True)
class Case:
    name: str
    program: str
    ranks: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """What a rank holds after a step; resident, in_use and free in bytes."""

    step: int
    resident: int
    in_use: int
    free: int
    objects: int
    tensors: int
    cached: int
    threads: int


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


# On each rank


def measure(step: int) -> Point:
    gc.collect()
    info = ctypes.CDLL("libc.so.6").mallinfo2
    info.restype = _Heap
    heap = info()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    objects = gc.get_objects()
    caches = [found.cache_info().currsize for found in objects if type(found) is functools._lru_cache_wrapper]
    return Point(
        step,
        int(status["VmRSS"].split()[0]) * 1024,
        heap.uordblks + heap.hblkhd,
        heap.fordblks,
        len(objects),
        sum(issubclass(type(found), torch.Tensor) for found in objects),
        sum(caches),
        int(status["Threads"]),
    )


def watch(program: str, every: int, file: Path, arguments: list[str]) -> int:
    """Run a program in this process, and write a point to `file` after every `every` steps; return its exit code."""
    from usp.rlhf.trainer import RlhfTrainer
    from usp.train.trainer import Trainer

    def watched(step: Any) -> Any:
        def run(self: Any, number: int) -> Any:
            record = step(self, number)
            if number % every == 0:
                with file.open("a") as out:
                    print(json.dumps(asdict(measure(number))), file=out)
            return record

        return run

    for trainer in (Trainer, RlhfTrainer):
        trainer.step = watched(trainer.step)  # type: ignore[method-assign]
    if program == "train.py":
        from usp.commands.train import main as run_program
    else:
        from usp.commands.rlhf import main as run_program
    return run_program(arguments, os.environ)


# In the parent process


def write_data(folder: Path) -> None:
    """Write documents and prompts of many lengths, and a reward function."""
    draw = random.Random(0)
    words = ["".join(draw.choices(ascii_lowercase, k=draw.randint(2, 9))) for _ in range(3000)]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    documents = [json.dumps({"text": text(draw.choice((3, 10, 20, 40)))}) for _ in range(DOCUMENTS)]
    prompts = [json.dumps({"prompt": text(24), "answer": "a"}) for _ in range(DOCUMENTS)]
    (folder / "documents.jsonl").write_text("\n".join(documents))
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    (folder / "reward.py").write_text(REWARD)


def cases() -> Iterator[Case]:
    documents = ("--data", "documents.jsonl", "--data-cache", "cache", "--packing", "whole", "--seq-len", "256")
    prompts = ("--data", "prompts.jsonl", "--sft-steps", "0", "--stop-ids", STOPS, *ROLLOUTS)
    for name, program, flags in (
        ("train.py", "train.py", documents),
        ("rlhf.py, grpo", "rlhf.py", (*prompts, "--algorithm", "grpo")),
    ):
        yield Case(name, program, 1, flags)
        yield Case(f"{name}, ring 2", program, 2, (*flags, "--sp-ring", "2"))


def run(case: Case, steps: int, every: int, folder: Path) -> list[Point]:
    """Return the points of the rank whose resident memory is the largest at the end."""
    command = [sys.executable]
    if case.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    command += ["-m", "benchmarks.growth", "--watch", case.program, str(every), str(folder / "points")]
    command += [*case.flags, "--steps", str(steps), "--checkpoint-every", "0", "--device", "cpu"]
    command += ["--output", str(folder / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{case.name}: exit code {done.returncode}\n{(folder / 'log.txt').read_text()[-4000:]}")
    ranks = [[Point(**json.loads(line)) for line in file.read_text().splitlines()] for file in folder.glob("points-*")]
    return max(ranks, key=lambda points: points[-1].resident)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    sizes = (f"{row[name] / 2**20:.1f}" for name in ("resident", "in_use", "free"))
    numbers = (f"{row[name]:,}" for name in ("objects", "tensors", "cached", "threads"))
    return (row["run"], f"{row['step']:,}", *sizes, *numbers)


def notes(rows: list[dict[str, Any]]) -> Iterator[str]:
    for name in dict.fromkeys(row["run"] for row in rows):
        points = [row for row in rows if row["run"] == name]
        half, last = points[len(points) // 2 - 1], points[-1]
        grown = {key: last[key] - half[key] for key in ("resident", "in_use", "objects", "tensors")}
        yield (
            f"{name}, steps {half['step']:,} to {last['step']:,}: {grown['resident'] / 2**20:+.1f} MiB resident, "
            f"{grown['in_use'] / 2**20:+.2f} MiB in use, {grown['objects']:+,} objects, {grown['tensors']:+,} tensors."
        )


def main() -> int:
    if sys.argv[1:2] == ["--watch"]:  # a rank
        program, often, points, *arguments = sys.argv[2:]
        return watch(program, int(often), Path(f"{points}-{os.environ.get('RANK', 0)}"), arguments)
    parser = argparse.ArgumentParser(description="Memory of a rank over 1,000 steps of train.py and of rlhf.py.")
    parser.add_argument("--quick", action="store_true", help="60 steps; save nothing")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    steps, every = (60, 10) if args.quick else (STEPS, EVERY)
    for case in cases():
        with tempfile.TemporaryDirectory() as folder:
            write_data(Path(folder))
            rows += [{"run": case.name, **asdict(point)} for point in run(case, steps, every, Path(folder))]
        print(*cells(rows[-1]), sep="  ", flush=True)
    question = "Memory of a rank over many steps"
    finish(
        Record.of("growth", question, COLUMNS, map(cells, rows), notes(rows), rows), args.output, save=not args.quick
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
