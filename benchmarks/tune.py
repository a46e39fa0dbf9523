"""The layout that `--plan tune` ends with, beside each of its candidates alone.

Six jobs on two emulated hosts of four ranks (benchmarks/harness/cluster.py) are planned with the rates of an H100,
wrong here by orders of magnitude. A tuned run races the candidates; then each of them trains alone, from the start.

    python -m benchmarks.tune
    python -m benchmarks.tune --quick    # one job on two ranks
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.cluster import cluster
from benchmarks.harness.record import Record, finish, parser_of
from usp.config import TrainConfig
from usp.hf.export import save_weights
from usp.hf.models import empty_model, load_model_config, materialise
from usp.hf.weights import initialise
from usp.planning.choice import unplanned
from usp.planning.tune import tuner_for
from usp.run.launch import Launch
from usp.train.prepare import prepare
from usp.train.trainer import Trainer
from usp.train.tuning import TUNE_FILE

QUESTION = "Is the layout that --plan tune ends with the fastest of its candidates?"
COLUMNS = ("job", "candidates", "chosen, ms alone", "fastest, ms alone", "of it", "race, steps", "loss differs by")
RATE, HOSTS, STEPS = "100mbit", 2, 60  # so slow that messages, not two cores for eight ranks, decide
ALONE, TURNS = 8, 2  # steps of a candidate in each of its turns alone, of which the first three do not count
BASE: dict[str, Any] = {"plan": "tune", "hardware": "h100", "tune_budget": 0.9, "device": "cpu", "dtype": "float32"}
BASE |= {"learning_rate": 3e-4}  # at the preset's rate rounding grows tenfold in as many steps
JOBS: dict[str, dict[str, Any]] = {
    "dense, short": {"seq_len": 512, "global_batch_size": 16},
    "dense, long": {"seq_len": 2048, "global_batch_size": 4},
    "packed": {"seq_len": 1024, "global_batch_size": 8, "sp_layout": "balanced"},
    "experts": {"model": "qwen3-moe-tiny", "seq_len": 512, "global_batch_size": 8},
    "LoRA": {"model": "FOLDER", "seq_len": 512, "global_batch_size": 8, "lora_rank": 8},
    "one sequence": {"seq_len": 4096, "global_batch_size": 1},
}


def train(config: TrainConfig, host_size: int) -> list[dict[str, Any]]:
    """Train as train.py does, with a race if `config` has a plan, and return the metrics of its steps on rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    launch = Launch(rank=rank, world_size=world, local_rank=rank % host_size, local_world_size=host_size)
    tuner = tuner_for(config, launch, compiles=False) if config.plan != "none" else None
    Trainer(prepare(tuner.trials[0].config if tuner else config, launch), tuner=tuner).run()
    dist.barrier()
    return [json.loads(line) for line in Path(config.output, "metrics.jsonl").read_text().splitlines()]


def measured(config: TrainConfig, host_size: int, steps: int, alone: int) -> dict[str, Any]:
    """Race the candidates of a job, run each of them alone, and return what was found; called on every rank."""
    folder = Path(config.output)
    losses = [each["loss"] for each in train(replace(config, steps=steps, output=str(folder / "tuned")), host_size)]
    line = json.loads((folder / "tuned" / TUNE_FILE).read_text())
    found = [{"layout": each["layout"], "chosen": each["config"] == line["chosen"]} for each in line["trials"]]
    plain = list[float]()  # losses of a run without a race
    for turn, (number, trial) in product(range(TURNS), enumerate(line["trials"])):
        own = replace(unplanned(config), **trial["config"], output=str(folder / f"{number}-{turn}"))
        ran = train(replace(own, steps=alone if plain else steps), host_size)
        plain = plain or [each["loss"] for each in ran]
        seconds = median(each["seconds"] - each["data_seconds"] for each in ran[3:alone])
        found[number]["alone"] = min(seconds, found[number].get("alone", seconds))
    differs = max(abs(a / b - 1) for a, b in zip(losses, plain, strict=True))
    (chosen,) = (each["alone"] for each in found if each["chosen"])
    return {"candidates": found, "chosen": chosen, "cost": line["cost_seconds"] / chosen, "differs": differs}


def cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    best = min(each["alone"] for each in row["candidates"])
    times = (f"{row['chosen'] * 1e3:.0f}", f"{best * 1e3:.0f}", f"{row['chosen'] / best:.2f}")
    return name, str(len(row["candidates"])), *times, f"{row['cost']:.1f}", f"{row['differs']:.0e}"


def answer(rows: dict[str, dict[str, Any]]) -> str:
    ratios = [row["chosen"] / min(each["alone"] for each in row["candidates"]) for row in rows.values()]
    steps = ", ".join(f"{row['cost']:.0f}" for row in rows.values())
    return (
        f"Within 3% of the fastest in {sum(ratio <= 1.03 for ratio in ratios)} of {len(ratios)} jobs, and at most "
        f"{max(ratios) - 1:.0%} slower. The races cost {steps} steps of the chosen layout."
    )


def main() -> None:
    args = parser_of(__doc__ or "", quick="one job on two ranks").parse_args()
    host_size, chosen, steps, alone = (1, ["dense, short"], 20, 5) if args.quick else (4, list(JOBS), STEPS, ALONE)
    with tempfile.TemporaryDirectory(prefix="tune-") as name, cluster(HOSTS, RATE) as hosts:
        folder, model = Path(name), empty_model(load_model_config("tiny"))
        materialise(model, torch.device("cpu"))
        initialise(model, 0)
        save_weights(dict(model.named_parameters()), folder / "model", config=model.config)
        rows = {}
        for job in chosen:
            flags: dict[str, Any] = {k: str(folder / "model") if v == "FOLDER" else v for k, v in JOBS[job].items()}
            config = TrainConfig(**BASE, **flags, tokenizer="bytes", output=str(folder / job))
            rows[job], *_ = hosts.call(measured, host_size, config, host_size, steps, alone, timeout=1800.0)
            print(*cells(job, rows[job]), sep=", ", flush=True)
    notes = (
        f"{HOSTS} hosts of {host_size} ranks on two processors, {RATE} between them, gloo, float32; {steps} steps, of "
        f"which the race may cost any part; candidates alone: the lower median of {TURNS} turns of {alone - 3} steps.",
    )
    table = [cells(name, row) for name, row in rows.items()]
    finish(Record.of("tune", QUESTION, answer(rows), COLUMNS, table, notes, list(rows.values())), args)


if __name__ == "__main__":
    main()
