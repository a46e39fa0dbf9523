"""A run holds no more after many steps than after a few: counted in objects, of which a leak leaves some every step."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankPool
from tests.usp.rlhf.test_reference import CONFIG, begun
from tests.usp.train.test_trainer import SMALL, launch_of_pool
from usp.train.loop import TrainingLoop
from usp.train.prepare import prepare
from usp.train.trainer import Trainer

WINDOW = 6  # steps between two counts, in which caches by length have filled
LINES = [{"text": "x" * n, "prompt": "y" * n, "answer": "z"} for n in (140, 150, 170, 200)]  # each fills a row
STEADY = {"rich.progress.ProgressSample"}  # of the last 1,000 steps


def growing(first: Counter[str], middle: Counter[str], last: Counter[str], steps: int) -> dict[str, int]:
    """Return the kinds of objects of which every step has left at least one, and how many they have become."""
    grown = {kind: (middle[kind] - first[kind], last[kind] - middle[kind]) for kind in last}
    return {kind: sum(both) for kind, both in grown.items() if min(both) >= steps and kind not in STEADY}


def count() -> Counter[str]:
    gc.collect()
    kinds = map(type, gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def counts(loop: TrainingLoop) -> list[Counter[str]]:
    """Run three windows of steps, and return what there is after each of them."""
    found = []
    for number in range(1, 3 * WINDOW + 1):
        loop.step(number)
        if number % WINDOW == 0:
            found.append(count())
    dist.barrier()
    return found


def of_training(folder: Path) -> list[Counter[str]]:
    config = replace(SMALL, data=str(folder / "data.jsonl"), data_cache=str(folder / "cache"), packing="whole")
    config = replace(config, sp_ring=2, data_field="text", steps=3 * WINDOW, output=str(folder / "run"))
    return counts(Trainer(prepare(config, launch_of_pool())))


def of_rlhf(folder: Path) -> list[Counter[str]]:
    config = replace(CONFIG, algorithm="grpo", data=str(folder / "data.jsonl"), reward_function="regex=a", prompts=2)
    config = replace(config, sp_ring=2, options="kl=0.2", steps=3 * WINDOW, output=str(folder / "run"))
    return counts(begun(config))


@pytest.mark.parametrize("run", [of_training, of_rlhf])
def test_a_step_leaves_nothing(ranks: RankPool, tmp_path: Path, run: Any) -> None:
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    for found in ranks.run(run, 2, tmp_path):
        assert not growing(*found, steps=WINDOW)


def test_a_leak_of_a_tensor_in_every_step_is_found() -> None:
    kept: list[torch.Tensor] = []

    def found() -> Iterator[Counter[str]]:
        for _ in range(3):
            kept.extend(torch.zeros(1) for _ in range(WINDOW))
            yield count()

    assert growing(*found(), steps=WINDOW) == {"torch.Tensor": 2 * WINDOW}
