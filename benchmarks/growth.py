"""Memory of a rank over 1,000 steps of train.py and of rlhf.py: what grows, and whether it stops.

Documents, prompts and responses differ in length from step to step, so that whatever is kept by length shows. After
every 100 steps each rank looks for garbage, and then counts its resident memory, what Python's garbage collector
tracks, the tensors among it, and the entries of every lru_cache. A leak shows in the objects; resident memory that
grows without them is fragmentation, or torch's flight recorder, which keeps the last 2,000 collectives, about 1.2 KiB
each (TORCH_FR_BUFFER_SIZE=0 turns it off).

    python -m benchmarks.growth --output growth.json    # about half an hour on two cores, a rank a thread
    python -m benchmarks.growth --quick                 # 60 steps
"""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

from benchmarks.harness.record import ROOT, Record, finish, parser_of

DOCUMENTS = 4000
REWARD = "def reward(prompt, response, answer):\n    return float(len(response) % 3)\n"
COUNTED = ("step", "MiB", "objects", "tensors", "cache entries")
STOPS = ",".join(map(str, range(10, 70)))  # tokens that end a response, so that lengths differ
TRAIN = ("--data", "documents.jsonl", "--data-cache", "cache", "--packing", "whole", "--seq-len", "256")
RLHF = (
    *("--data", "prompts.jsonl", "--sft-steps", "0", "--stop-ids", STOPS, "--algorithm", "grpo", "--prompts", "1"),
    *("--reward-function", "reward.py:reward", "--group-size", "2", "--max-new-tokens", "12"),
)
CASES = [(program, ranks) for program in ("train.py", "rlhf.py") for ranks in (1, 2)]


# On each rank


def measure(step: int) -> dict[str, float]:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    objects = gc.get_objects()
    tensors = sum(issubclass(type(found), torch.Tensor) for found in objects)
    cached = sum(found.cache_info().currsize for found in objects if type(found) is functools._lru_cache_wrapper)
    counts = (step, int(status["VmRSS"].split()[0]) / 1024, len(objects), tensors, cached)
    return dict(zip(COUNTED, counts, strict=True))


def watch(program: str, every: int, file: Path, arguments: list[str]) -> int:
    """Run a program in this process, and write a point to `file` after every `every` steps; return its exit code."""
    from usp.commands import rlhf, train
    from usp.rlhf.trainer import RlhfTrainer
    from usp.train.trainer import Trainer

    def watched(step: Any) -> Any:
        def run(self: Any, number: int) -> Any:
            record = step(self, number)
            if number % every == 0:
                with file.open("a") as out:
                    print(json.dumps(measure(number)), file=out)
            return record

        return run

    for trainer in (Trainer, RlhfTrainer):
        trainer.step = watched(trainer.step)  # type: ignore[method-assign]
    return (train if program == "train.py" else rlhf).main(arguments, os.environ)


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


def run(program: str, ranks: int, steps: int, every: int, folder: Path) -> list[dict[str, float]]:
    """Return the points of the rank whose resident memory is the largest at the end."""
    write_data(folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "benchmarks.growth", "--watch", program, str(every), str(folder / "points")]
    command += [*(TRAIN if program == "train.py" else RLHF), "--sp-ring", str(ranks), "--steps", str(steps)]
    command += ["--checkpoint-every", "0", "--device", "cpu", "--output", str(folder / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{program} on {ranks}: exit code {done.returncode}\n{done.stdout[-4000:]}")
    points = [[json.loads(line) for line in file.read_text().splitlines()] for file in folder.glob("points-*")]
    return max(points, key=lambda found: found[-1]["MiB"])


def main() -> int:
    if sys.argv[1:2] == ["--watch"]:  # a rank
        program, often, points, *arguments = sys.argv[2:]
        return watch(program, int(often), Path(f"{points}-{os.environ['RANK']}"), arguments)
    args = parser_of(__doc__ or "", quick="60 steps").parse_args()
    steps, every = (60, 10) if args.quick else (1000, 100)
    rows, grown = [], []
    for program, ranks in CASES:
        with tempfile.TemporaryDirectory() as folder:
            measured = run(program, ranks, steps, every, Path(folder))
        cells = [(program, str(ranks), *(f"{point[name]:,.0f}" for name in COUNTED)) for point in measured]
        half, last = measured[len(measured) // 2 - 1], measured[-1]
        rows += cells
        grown.append(
            f"{program} on {ranks}: "
            + ", ".join(f"{last[name] - half[name]:+,.1f} {name}" for name in ("MiB", "objects", "tensors"))
        )
        print(*cells[-1], sep="  ", flush=True)
    answer = f"In the second half of {steps:,} steps: {'; '.join(grown)}."
    finish(Record.of("growth", "Does the memory of a rank grow?", answer, ("run", "ranks", *COUNTED), rows), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
