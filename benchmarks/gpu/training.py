"""Correctness of training: steps of the engine, and of train.py, against the CPU in float32."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from usp.predict.job import Data

from .model import SMALL, TOY, configured, engine_step, seeded
from .setup import Setup, on_device

STEPS = 3
ROOT = Path(__file__).parents[2]


@on_device
def steps(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Compare losses and gradient norms of steps in bfloat16 with those of the CPU in float32."""
    tokens = 128 if setup.tiny else 1024
    data = Data(documents=(tokens // 2, tokens // 4, tokens // 8, tokens // 8))
    config = configured(setup, TOY if setup.tiny else SMALL, tokens, dtype="bfloat16")
    found = []
    for each in (config, replace(config, device="cpu", dtype="float32")):
        with engine_step(each, data, seeded) as step:
            found.append([step() for _ in range(STEPS)])
    yield from compared("engine", *found)


def compared(
    what: str, mine: Sequence[tuple[float, float]], cpu: Sequence[tuple[float, float]]
) -> Iterator[tuple[str, float] | str]:
    """Yield the largest relative difference of the losses and gradient norms of steps."""
    for index, name in enumerate(("loss", "gradient norm")):
        errors = [abs(x[index] - y[index]) / abs(y[index]) for x, y in zip(mine, cpu, strict=True)]
        yield f"{what}: error of the {name} in {STEPS} steps", float(torch.tensor(errors).max())
        yield f"{what}: {name}: {shown(mine, index)}; of the CPU in float32: {shown(cpu, index)}"


def shown(found: Sequence[tuple[float, float]], index: int) -> str:
    return ", ".join(f"{step[index]:.5f}" for step in found)


@on_device
def program(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Run three steps of train.py in bfloat16, and beside it on the CPU in float32; compare their metrics."""
    draw, data = random.Random(0), setup.folder / "documents.jsonl"
    words = ("ring", "of", "ranks", "attention", "to", "all", "tokens", "once")
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(5, 90)))}) for _ in range(200)]
    data.write_text("\n".join(lines) + "\n")
    variants = {"mine": (setup.device.type, "bfloat16"), "cpu": ("cpu", "float32")}
    running = {name: started(setup.folder, name, data, *variant) for name, variant in variants.items()}
    codes = {name: process.wait() for name, process in running.items()}
    if any(codes.values()):
        logs = "\n".join((setup.folder / f"{name}.txt").read_text() for name, code in codes.items() if code)
        raise RuntimeError(f"train.py ended with the exit codes {codes}:\n{logs}")
    found = []
    for name in variants:
        records = (setup.folder / name / "metrics.jsonl").read_text().splitlines()
        found.append([(record["loss"], record["grad_norm"]) for record in map(json.loads, records)])
    assert [len(each) for each in found] == [STEPS, STEPS], found
    yield from compared("train.py", *found)


def started(folder: Path, name: str, data: Path, device: str, dtype: str) -> subprocess.Popen[bytes]:
    """Start train.py, whose output goes to NAME.txt, and whose run is in NAME."""
    options: dict[str, Any] = {"data": data, "data-cache": folder / f"{name}-cache", "output": folder / name}
    options |= {"device": device, "dtype": dtype, "steps": STEPS, "seq-len": 512}
    options |= {"warmup-steps": 1, "checkpoint-every": 0, "log-every": 1, "learning-rate": "1e-3"}
    flags = [f"--{key}={value}" for key, value in options.items()]
    with (folder / f"{name}.txt").open("wb") as log:
        return subprocess.Popen([sys.executable, "train.py", *flags], cwd=ROOT, stdout=log, stderr=log)
