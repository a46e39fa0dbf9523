"""Seconds of a run whose responses grow 8-fold, with --replan and under fixed plans, on two emulated hosts.

python -m benchmarks.rlhf.replan

Every rank is a host of its own. Short responses are computed faster by one host alone, which sends no gradients; long
ones by both (flattening without ZeRO, which sends the fewest bytes). The link's rate is one at which neither is the
faster throughout: with a link that is much faster or slower, one plan is the best at every length.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import yaml

from benchmarks.harness.cluster import cluster, unavailable
from benchmarks.harness.measure import calibrated, in_turns
from benchmarks.harness.record import Record, finish
from tests.harness.ranks import run_ranks
from usp.parallel import ParallelDims
from usp.planning.run_plan import run_planner
from usp.predict.calibrate import Plan
from usp.rlhf.config import RlhfConfig
from usp.rlhf.graph import Generate
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, to_mapping
from usp.rlhf.prepare import prepare
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.samples import Samples
from usp.rlhf.trainer import RlhfTrainer
from usp.run.launch import Launch, StopRequest
from usp.run.watchdog import Watchdog
from usp.train.checkpoints import Start

MBIT, LATENCY = 14, 2e-4  # of the link between the hosts: a second, and seconds
PROMPTS, GROUP, PROMPT_TOKENS = 8, 8, 64
SHORTEST, GROWTH = 64, (1, 2, 4, 8)  # tokens of a response, and its factor in each quarter of the run
REPLANNED, ALONE, BOTH = "--replan", "one host", "both hosts"
DIVIDED = "one host, reference on both"  # what a search finds for short responses
FIXED = (ALONE, DIVIDED, BOTH)
OPTIONS = "every=5,gain=5%,budget=0.1"
LEARNING_RATE = 1e-5  # low, so that responses of random weights stay as long as they may
REWARD = "def variety(prompt, response, answer):\n    return len(set(response)) / 100\n"


def tokens_of(step: int, steps: int) -> int:
    """Return the tokens of each response in a step (from 1)."""
    return SHORTEST * GROWTH[(step - 1) * len(GROWTH) // steps]


@contextmanager
def responses_of(tokens: int) -> Iterator[None]:
    """Limit responses to a number of tokens; those of random weights rarely end before."""
    generate = RoleModel.generate

    def limited(self: RoleModel, prompts: Samples, work: Generate, seed: int) -> Samples:
        return generate(self, prompts, replace(work, max_new_tokens=tokens), seed)

    with patch.object(RoleModel, "generate", limited):
        yield


def trainer(system: str, steps: int, folder: Path, hardware: Path) -> RlhfTrainer:
    launch = Launch(dist.get_rank(), dist.get_world_size())
    config = RlhfConfig(
        plan="flattening",
        zero=0,
        prompts=PROMPTS,
        group_size=GROUP,
        prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=SHORTEST * GROWTH[-1],
        steps=steps,
        reward_function=f"{folder / 'reward.py'}:variety",
        learning_rate=LEARNING_RATE,
        sft_steps=0,
        device="cpu",
        tokenizer="bytes",
    )
    config = replace(config, replan=OPTIONS, hardware=str(hardware)) if system == REPLANNED else config
    prepared = prepare(config, launch, Start(folder / system))
    if system != BOTH:  # the run with --replan begins on one host
        calls = dict.fromkeys(prepared.plan.calls, CallLayout((0,), ParallelDims(dp_shard=1)))
        if system == DIVIDED:
            calls["ref_inference"] = prepared.plan["ref_inference"]
        prepared = replace(prepared, plan=ExecutionPlan(DIVIDED if system == DIVIDED else ALONE, calls))
    replanner = run_planner(prepared, launch) if config.replan else None
    return RlhfTrainer(prepared, launch, StopRequest(), Watchdog(launch, 0.0), replanner)


def rates() -> dict[str, Any]:
    """Measure two ranks of this machine at work."""
    plan = replace(Plan.of(torch.device("cpu"), 2, 4, 16), rounds=16, seconds=0.1)
    return calibrated(plan, "two emulated hosts")


def measure(steps: int, hardware: Path) -> dict[str, Any]:
    """Return by system the seconds and the metrics of every step, one step of each in turn, with changes of plans."""
    torch.set_num_threads(1)
    systems = (REPLANNED, *FIXED)
    trainers = {system: trainer(system, steps, hardware.parent, hardware) for system in systems}
    found: dict[str, Any] = {system: {"seconds": [], "metrics": []} for system in systems}
    for round_, system in in_turns(systems, steps):
        step = round_ + 1
        dist.barrier()
        begin = time.perf_counter()
        with responses_of(tokens_of(step, steps)):
            record = trainers[system].step(step)
        dist.barrier()
        found[system]["seconds"].append(time.perf_counter() - begin)
        found[system]["metrics"].append(record.metrics)
    for system, one in trainers.items():
        found[system]["plan"] = to_mapping(one.prepared.plan)
        for file in one.logs():
            file.close()
    return found


def rows_of(found: Mapping[str, Any], steps: int) -> list[tuple[str, ...]]:
    """Return of each system the seconds in each quarter and in total, of the best fixed plan, and of changes."""
    quarters = [slice(steps * q // len(GROWTH), steps * (q + 1) // len(GROWTH)) for q in range(len(GROWTH))]
    best = min(sum(found[system]["seconds"]) for system in FIXED)
    rows = []
    for system in (REPLANNED, *FIXED):
        seconds, metrics = found[system]["seconds"], found[system]["metrics"]
        spent = sum(one.get("replan/seconds", 0.0) + one.get("replan/search_seconds", 0.0) for one in metrics)
        each = [f"{sum(seconds[quarter]):.1f}" for quarter in quarters]
        rows.append((system, *each, f"{spent:.1f}", f"{sum(seconds):.1f}", f"{sum(seconds) / best:.3f}"))
    return rows


def data(system: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record keeps of a system: seconds and losses of its steps, decisions by step, and its last plan."""
    decisions = {
        step: {name: value for name, value in metrics.items() if name.startswith("replan/")}
        for step, metrics in enumerate(found["metrics"], 1)
    }
    return {
        "system": system,
        "seconds": found["seconds"],
        "losses": [metrics["actor/loss"] for metrics in found["metrics"]],
        "decisions": {step: of for step, of in decisions.items() if of},
        "plan": found["plan"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="steps of each run")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(f"emulated hosts are not available: {reason}")
    hardware = run_ranks(rates, 2, timeout=300.0)[0]
    # Given, not measured: a message takes seconds, and a calibration's few turns of it differ too much.
    link = {"name": "between hosts", "devices": 0, "alpha_seconds": LATENCY, "bytes_per_second": MBIT * 1e6 / 8}
    with tempfile.TemporaryDirectory() as folder, cluster(2, f"{MBIT}mbit") as hosts:
        file = Path(folder, "hardware.json")
        file.write_text(json.dumps({**hardware, "tiers": [link]}))
        Path(folder, "reward.py").write_text(REWARD)
        found = hosts.call(measure, 1, arguments.steps, file, timeout=3000.0)[0]
    changes = [one for one in found[REPLANNED]["metrics"] if one.get("replan/switched")]
    same = max(
        abs(a["actor/loss"] - b["actor/loss"])
        for a, b in zip(found[REPLANNED]["metrics"], found[ALONE]["metrics"], strict=True)
    )
    lengths = ", ".join(str(SHORTEST * factor) for factor in GROWTH)
    record = Record.of(
        "replan",
        f"GRPO, responses growing from {SHORTEST} to {SHORTEST * GROWTH[-1]} tokens, two hosts of a rank, {MBIT}mbit",
        ("plan", *(f"{SHORTEST * f} tokens (s)" for f in GROWTH), "re-planning (s)", "run (s)", "of the best fixed"),
        rows_of(found, arguments.steps),
        (
            f"Preset tiny, one thread per rank: {PROMPTS} prompts of up to {PROMPT_TOKENS} tokens, {GROUP} responses "
            f"each of {lengths} tokens, {arguments.steps // len(GROWTH)} steps of each length.",
            f"One step of each system in turn. --replan {OPTIONS} begins with the plan of one host alone; searches and "
            f"{len(changes)} changes of plans are part of its run. Its last plan: "
            f"{yaml.safe_dump(found[REPLANNED]['plan']['calls'], default_flow_style=True, width=10**6).strip()}",
            f"Its losses differ from those of one host by at most {same:.1e}.",
        ),
        [data(system, found[system]) for system in (REPLANNED, *FIXED)],
        command="python -m benchmarks.rlhf.replan",
    )
    finish(record, arguments.output)


if __name__ == "__main__":
    main()
