"""Seconds of a GRPO step with --staleness 0 and 1, on two emulated hosts: one makes samples, the other trains.

python -m benchmarks.rlhf.staleness
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.harness.cluster import cluster, unavailable
from benchmarks.harness.measure import in_turns
from benchmarks.harness.record import Record, finish
from usp.rlhf.config import RlhfConfig
from usp.rlhf.prepare import prepare
from usp.rlhf.runtime.timeline import Event, activities, rank_times, read_events
from usp.rlhf.trainer import RlhfTrainer
from usp.run.launch import Launch, StopRequest
from usp.run.watchdog import Watchdog
from usp.train.checkpoints import Start

RATE = "1gbit"  # between the hosts
WARMUP = 2  # steps that are not counted; the first makes the samples of two steps
SYSTEMS = (0, 1)  # --staleness
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 128, 48  # making these samples takes about as long as training


def trainer(config: RlhfConfig, folder: Path) -> RlhfTrainer:
    launch = Launch(dist.get_rank(), dist.get_world_size())
    return RlhfTrainer(prepare(config, launch, Start(folder)), launch, StopRequest(), Watchdog(launch, 0.0))


def balanced(staleness: int, steps: int) -> RlhfConfig:
    return RlhfConfig(
        plan="separation",
        staleness=staleness,
        prompts=PROMPTS,
        group_size=GROUP,
        prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=NEW_TOKENS,
        steps=WARMUP + steps + 1,  # the last makes no samples
        sft_steps=0,
        device="cpu",
        tokenizer="bytes",
    )


@dataclass
class Measured:
    """The counted steps of a system on a rank."""

    seconds: list[float]
    cpu_seconds: list[float]  # that this rank's process used
    metrics: list[dict[str, float]]


def measure(systems: Mapping[str, RlhfConfig], steps: int, folder: str) -> dict[str, Measured]:
    """Return the counted steps of each system, one step of each in turn."""
    torch.set_num_threads(1)
    trainers = {name: trainer(config, Path(folder, name)) for name, config in systems.items()}
    measured = {name: Measured([], [], []) for name in systems}
    for round_, name in in_turns(tuple(systems), WARMUP + steps):
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        record = trainers[name].step(round_ + 1)
        if round_ >= WARMUP:
            measured[name].seconds.append(time.perf_counter() - begin)
            measured[name].cpu_seconds.append(time.process_time() - used)
            measured[name].metrics.append(record.metrics)
    for one in trainers.values():
        for file in one.logs():
            file.close()
    return measured


def worked(events: Sequence[Event]) -> list[list[float]]:
    """Return by rank the seconds of work in each counted step."""
    steps = sorted({event.step for event in events})[WARMUP:]
    times = [rank_times(activities([event for event in events if event.step == step])) for step in steps]
    return [[of_step[rank].work for of_step in times] for rank in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(f"emulated hosts are not available: {reason}")
    with tempfile.TemporaryDirectory() as folder, cluster(2, RATE) as hosts:
        systems = {str(staleness): balanced(staleness, arguments.steps) for staleness in SYSTEMS}
        measured = hosts.call(measure, 1, systems, arguments.steps, folder, timeout=1800.0)[0]
        seconds = [measured[name].seconds for name in systems]
        work = [worked(read_events(Path(folder, str(staleness)))) for staleness in SYSTEMS]
    ratio = median(ahead / in_turn for in_turn, ahead in zip(*seconds, strict=True))
    rows = [
        (str(staleness), *(f"{median(numbers):.3f}" for numbers in (of_steps, *by_rank)), shown)
        for staleness, of_steps, by_rank, shown in zip(SYSTEMS, seconds, work, ("1", f"{ratio:.2f}"), strict=True)
    ]
    record = Record.of(
        "staleness",
        f"GRPO steps on two hosts of one rank, {RATE} between them: samples made in turn with training, and beside it",
        ("--staleness", "step (s)", "rollout rank works (s)", "training rank works (s)", "step, of 0"),
        rows,
        (
            f"Preset tiny, --plan separation, one thread per rank: {PROMPTS} prompts of up to {PROMPT_TOKENS} tokens, "
            f"{GROUP} responses each of up to {NEW_TOKENS} tokens.",
            f"Medians of {arguments.steps} steps, one of each in turn on the same ranks; the ratio is the median of "
            "theirs. Work includes moving weights and samples, but not waiting.",
        ),
        [
            {"staleness": staleness, "seconds": of_steps, "work": by_rank}
            for staleness, of_steps, by_rank in zip(SYSTEMS, seconds, work, strict=True)
        ],
        command="python -m benchmarks.rlhf.staleness",
    )
    finish(record, arguments.output)


if __name__ == "__main__":
    main()
