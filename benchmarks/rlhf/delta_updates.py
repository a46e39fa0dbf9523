"""Bytes of weights that a GRPO step sends with --delta-updates, against whole weights, by learning rate.

python -m benchmarks.rlhf.delta_updates
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.harness.record import Record, finish
from benchmarks.rlhf.staleness import trainer
from tests.harness.ranks import RankPool
from usp.rlhf.config import RlhfConfig
from usp.rlhf.runtime.measure import SENT_BYTES, WHOLE_BYTES

RATES = (1e-6, 1e-5, 1e-4)
DTYPES = ("bfloat16", "float32")


def config(rate: float, dtype: str, steps: int) -> RlhfConfig:
    return RlhfConfig(
        plan="separation",
        delta_updates=True,
        reward_function="regex=[a-z]{2}",  # which about a third of random responses have
        dtype=dtype,
        learning_rate=rate,
        lr_schedule="constant",
        warmup_steps=0,
        prompts=8,
        group_size=8,
        prompt_tokens=64,
        max_new_tokens=48,
        steps=steps + 2,
        sft_steps=0,
        device="cpu",
        tokenizer="bytes",
    )


def shares(rate: float, dtype: str, steps: int, folder: str) -> list[float]:
    """Return, of each step after the first two, the bytes sent by those that ranks lack, counts included."""
    torch.set_num_threads(1)
    run, found = trainer(config(rate, dtype, steps), Path(folder)), list[float]()
    for number in range(1, steps + 3):
        metrics = run.step(number).metrics
        if number > 2:  # the first sends everything; the second follows Adam's first update, the largest
            found.append(metrics[SENT_BYTES] / metrics[WHOLE_BYTES])
    for file in run.logs():
        file.close()
    dist.barrier()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    data = []
    with tempfile.TemporaryDirectory() as folder, RankPool() as pool:
        for dtype in DTYPES:
            for rate in RATES:
                place = str(Path(folder, f"{dtype}-{rate}"))
                found = pool.run(shares, 2, rate, dtype, arguments.steps, place, timeout=600.0)[0]
                data.append({"dtype": dtype, "rate": rate, "shares": found})
    rows = [
        (one["dtype"], f"{one['rate']:g}", *(f"{of(one['shares']):.3f}" for of in (min, median, max))) for one in data
    ]
    record = Record.of(
        "delta_updates",
        "Weights from training to generation with --delta-updates: bytes received, by those of whole weights",
        ("weights", "learning rate", "fewest", "median", "most"),
        rows,
        (
            f"GRPO on the preset tiny, from random weights; {arguments.steps} steps after the first two. One rank "
            "trains and the other generates.",
            "The copy for generation has the values of a whole transfer, bit for bit "
            "(tests/usp/rlhf/runtime/test_delta_updates.py).",
        ),
        data,
        command="python -m benchmarks.rlhf.delta_updates",
    )
    finish(record, arguments.output)


if __name__ == "__main__":
    main()
