"""The time model on an uneven network: predicted and measured training steps, and whether its choice is the fastest.

Two emulated hosts of four ranks (benchmarks/harness/cluster.py) are calibrated, then train the same global batch under
every combination of degrees, one step of each per round. Predictions use only the calibration. As in a calibration, a
step's time is that of its fastest rounds. The processor time of all ranks, divided by the cores, is what a step takes
at least, and hardly depends on other work.

    python -m benchmarks.planner            # about half an hour on two otherwise idle cores
    python -m benchmarks.planner --quick    # two combinations on two ranks
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.cluster import cluster, unavailable
from benchmarks.harness.measure import calibrated
from benchmarks.harness.record import Record, finish, parser_of
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.parallel import ParallelMesh, ProcessGroups
from usp.parallel.cluster.hardware import Hardware, hardware_from_mapping
from usp.predict.calibrate import Plan, cautions
from usp.predict.rounds import Estimate, OtherLoad
from usp.predict.seconds import StepTime, step_seconds
from usp.train.build import EngineRecipe, build_engine, first_weights
from usp.train.dry_run import blank_batch
from usp.train.resolve import job_of
from usp.train.step import backward
from usp.train.validate import parallel_dims

MODEL, HEADS, HEAD_DIM = "tiny", 8, 16  # of the preset
RATE, HOSTS, SEQUENCES, SEQ_LEN = "1gbit", 2, 8, 4096
DEGREES: tuple[dict[str, int], ...] = (
    {},
    *({axis: degree} for axis in ("sp_ulysses", "sp_ring") for degree in (2, 4, 8)),
    *({"sp_ulysses": u, "sp_ring": 8 // u} for u in (2, 4)),
    {"sp_ulysses": 2, "sp_ring": 2},
    *({"tp": tp} for tp in (2, 4)),
    *({"tp": 2, axis: degree} for axis in ("sp_ulysses", "sp_ring") for degree in (2, 4)),
    {"tp": 4, "sp_ring": 2},
    *({"pp": 2, axis: degree} for axis in ("sp_ulysses", "sp_ring") for degree in (2, 4)),
    {"pp": 2},
)
VARIANTS: tuple[dict[str, Any], ...] = ({"zero": 1}, {"dp_replicate": 2}, {"sp_ring": 4, "sp_layout": "contiguous"})


def mixtures(world_size: int, *, quick: bool) -> list[TrainConfig]:
    """Return the configurations, all with the same global batch."""
    if quick:
        return [mixture({"sp_ring": 2}, world_size), mixture({"zero": 1}, world_size)]
    return [mixture(flags, world_size) for flags in (*DEGREES, *VARIANTS)]


def mixture(flags: dict[str, Any], world_size: int) -> TrainConfig:
    config = TrainConfig(model=MODEL, seq_len=SEQ_LEN, dtype="float32", device="cpu", **flags)
    rows, parts = SEQUENCES // parallel_dims(config).resolve(world_size).batch, 2 if config.pp > 1 else 1
    return replace(config, batch_size=rows, micro_batches=parts, tp_sequence_parallel=config.tp > 1)


def name(config: TrainConfig) -> str:
    fields = ("pp", "dp_replicate", "sp_ring", "sp_ulysses", "tp")
    degrees = [
        f"{field.removeprefix('sp_')}={getattr(config, field)}" for field in fields if getattr(config, field) > 1
    ]
    layout = [config.sp_layout] if config.sp_ring > 1 and config.sp_layout != "zigzag" else []
    return " ".join([*degrees, f"zero={config.zero}", *layout])


# On each rank


def step_of(config: TrainConfig, groups: ProcessGroups) -> Callable[[], object]:
    """One training step, of sequences of one document."""
    mesh = ParallelMesh.create(parallel_dims(config), groups=groups)
    recipe = EngineRecipe.of(config, load_model_config(config.model))
    engine = build_engine(recipe, mesh, torch.device("cpu"), partial(first_weights, source=config.model, seed=0))

    def step() -> object:
        backward(engine, mesh, blank_batch(config, mesh), config)
        return engine.step(config.learning_rate, config.max_grad_norm)

    return step


@dataclass(frozen=True)
class Measured:
    """What a rank measured: the calibration, and the seconds of each configuration's steps by round.

    Attributes:
        processor: seconds that this rank's threads ran. other_load: of the processors, while all this was measured.
    """

    calibration: dict[str, Any]
    seconds: list[list[float]]
    processor: list[list[float]]
    other_load: float


def measure(configs: Sequence[TrainConfig], host_size: int, rounds: int) -> Measured:
    """Calibrate, and time each configuration's steps after two warm-up rounds."""
    load = OtherLoad()
    found = calibrated(Plan.of(torch.device("cpu"), host_size, HEADS, HEAD_DIM), "two shaped hosts")
    groups = ProcessGroups()
    steps = [step_of(config, groups) for config in configs]
    seconds: list[list[float]] = [[] for _ in configs]
    processor: list[list[float]] = [[] for _ in configs]
    for round_ in range(2 + rounds):
        for step, times, used in zip(steps, seconds, processor, strict=True):
            dist.barrier()
            begin, busy = time.perf_counter(), time.process_time()
            step()
            dist.barrier()  # a step ends when the slowest rank finishes
            if round_ >= 2:
                times.append(time.perf_counter() - begin)
                used.append(time.process_time() - busy)
    return Measured(found, seconds, processor, load.share())


# Over all ranks


def predicted(config: TrainConfig, hardware: Hardware, world_size: int) -> StepTime:
    return step_seconds(job_of(config, load_model_config(config.model), world_size), hardware)


QUESTION = "How far are predictions from measured steps, and is the chosen layout the fastest?"
COLUMNS = ("mixture", "measured ms", "spread", "processor ms", "predicted ms", "error", "compute ms", "exposed ms")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["mixture"],
        f"{row['measured'] * 1e3:.0f}",
        f"{row['spread']:.0%}",
        f"{row['processor'] * 1e3:.0f}",
        f"{row['predicted'] * 1e3:.0f}",
        f"{row['predicted'] / row['measured'] - 1:+.0%}",
        f"{row['compute'] * 1e3:.0f}",
        f"{row['exposed'] * 1e3:.0f}",
    )


def answer(rows: Sequence[dict[str, Any]]) -> str:
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    pick, best = min(rows, key=lambda row: row["predicted"]), min(rows, key=lambda row: row["measured"])
    return (
        f"On two calibrated CPU hosts, steps of {len(rows)} combinations of degrees are predicted within "
        f"{statistics.mean(errors):.1%} on average and {max(errors):.1%} at worst. The predicted fastest, "
        f"{pick['mixture']}, takes {pick['measured'] / best['measured']:.2f} times the time of the measured fastest, "
        f"{best['mixture']}."
    )


def notes(rows: Sequence[dict[str, Any]], other_load: float) -> tuple[str, ...]:
    return (
        f"Other programs used {other_load:.0%} of the processors. "
        f"Thirds of a step's rounds differ by up to {max(row['spread'] for row in rows):.0%}.",
        "No constant is fitted to these rows; the model's terms were chosen after earlier runs of them.",
    )


def main() -> None:
    parser = parser_of(__doc__ or "", quick="two combinations on two ranks")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each combination")
    args = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(f"emulated hosts are not available: {reason}")
    host_size = 1 if args.quick else 4
    world_size = HOSTS * host_size
    configs = mixtures(world_size, quick=args.quick)
    with cluster(HOSTS, RATE) as hosts:
        by_rank = hosts.call(measure, host_size, configs, host_size, args.rounds, timeout=3600.0)
    calibration, load = by_rank[0].calibration, by_rank[0].other_load
    hardware = hardware_from_mapping(calibration, "as calibrated")
    rows = []
    for number, config in enumerate(configs):
        found = predicted(config, hardware, world_size)
        steps = Estimate.of([max(step) for step in zip(*(rank.seconds[number] for rank in by_rank), strict=True)])
        used = [sum(step) for step in zip(*(rank.processor[number] for rank in by_rank), strict=True)]
        rows.append(
            {
                "mixture": name(config),
                "measured": steps.seconds,
                "spread": steps.spread,
                "processor": Estimate.of(used).seconds / (os.cpu_count() or 1),
                "predicted": found.total,
                "compute": found.compute.total,
                "exposed": found.exposed,
            }
        )
    every = (*notes(rows, load), *cautions(calibration))
    finish(Record.of("planner", QUESTION, answer(rows), COLUMNS, map(cells, rows), every), args)


if __name__ == "__main__":
    main()
