"""PPO steps under the searched plan and under the named ones: three ratios of models, three lengths, two clusters.

Emulated hosts (benchmarks/harness/cluster.py) are calibrated, then every cell, a ratio of actor to critic and a length
of responses, is searched with the calibration alone, and run under the plan that is found and under the named ones with
the degrees that are predicted to serve them best: one step of each plan per round on the same ranks, so that other work
slows all of them alike. All plans train on the same samples. Intervals are of 95%, by bootstrap over the rounds.

    python -m benchmarks.rlhf.searched_plans            # 8 ranks: about 50 minutes on two otherwise idle cores
    python -m benchmarks.rlhf.searched_plans --quick    # 4 ranks, one cell on each cluster
"""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.harness.cluster import cluster, unavailable
from benchmarks.harness.measure import calibrated, in_turns
from benchmarks.harness.record import Record, finish, parser_of
from usp.parallel import ProcessGroups
from usp.planning.rlhf_question import answer as planned
from usp.planning.rlhf_question import layout_text
from usp.planning.run_plan import question_of
from usp.predict.calibrate import Plan
from usp.predict.rounds import OtherLoad
from usp.rlhf.config import RlhfConfig
from usp.rlhf.plan.named_plans import NAMED_PLANS
from usp.rlhf.plan.plan import PLAN_FILE, ExecutionPlan, from_mapping, to_mapping
from usp.rlhf.prepare import PreparedRlhf, prepare
from usp.rlhf.trainer import RlhfTrainer
from usp.run.launch import Launch, StopRequest
from usp.run.watchdog import Watchdog
from usp.train.checkpoints import Start

SEARCH, PLANS = "search", ("search", *NAMED_PLANS)
RATE = "1gbit"  # between two hosts
HEADS, LAYERS, VOCABULARY = 8, 4, 2048  # so many ids that random weights hardly end a response early
HIDDEN = {"small": 128, "large": 256}  # four times the parameters of a layer
RATIOS = {"1:1": ("small", "small"), "4:1": ("large", "small"), "1:4": ("small", "large")}  # actor, critic
LENGTHS = (16, 48, 128)  # tokens of a response
PROMPTS, PROMPT_TOKENS = 16, 64
WARMUP = 1  # steps that are not counted
DRAWS = 2000  # of the bootstrap


@dataclass(frozen=True)
class Cell:
    """A step to plan: hosts, the ratio of actor to critic, and the length of responses."""

    hosts: int
    ratio: str
    length: int

    @property
    def cluster(self) -> str:
        return "one host" if self.hosts == 1 else f"{self.hosts} hosts, {RATE}"


@dataclass(frozen=True)
class Planned:
    """A plan of a cell, and the predicted seconds of its step."""

    plan: ExecutionPlan
    seconds: float


def write_models(folder: Path) -> None:
    """Write a causal LM of each size, with random weights."""
    for name, hidden in HIDDEN.items():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=3 * hidden,  # which tp divides
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            vocab_size=VOCABULARY,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=1,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)


# On each rank


def measure(
    cells: Sequence[Cell], rounds: int, folder: str, host_size: int, budget: float
) -> tuple[list[dict[str, Any]], float]:
    """Return the plans of every cell with predicted and measured seconds, and the share of other programs."""
    load, root = OtherLoad(), Path(folder)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    launch = Launch(rank, world_size, rank % host_size, host_size)
    hardware = root / f"hardware-{cells[0].hosts}.json"
    plan = Plan.of(torch.device("cpu"), host_size, HEADS, HIDDEN["small"] // HEADS)
    plan = replace(plan, lengths=(64, 256, 1024), rounds=2 * plan.rounds)  # of shorter samples, and many turns of each
    found = calibrated(plan, cells[0].cluster)
    if rank == 0:
        hardware.write_text(json.dumps(found))
    dist.barrier()
    groups, results = ProcessGroups(), []
    for number, cell in enumerate(cells):
        config = config_of(cell, root, hardware, WARMUP + rounds)
        plans = searched(config, launch, budget)
        place = root / f"{cell.hosts}-{number}"
        trainers = {name: trainer(config, one.plan, launch, place / name, groups) for name, one in plans.items()}
        seconds = step_seconds(trainers, rounds)
        for one in trainers.values():
            for file in one.logs():
                file.close()
        trainers.clear()
        gc.collect()
        if rank == 0:
            print(cell, {name: round(median(times), 2) for name, times in seconds.items()}, flush=True)
        results.append(
            {
                "cluster": cell.cluster,
                "ratio": cell.ratio,
                "length": cell.length,
                "plans": {
                    name: {"predicted": one.seconds, "seconds": seconds[name], "plan": to_mapping(one.plan)}
                    for name, one in plans.items()
                },
            }
        )
    return results, load.share()


def config_of(cell: Cell, root: Path, hardware: Path, steps: int) -> RlhfConfig:
    actor, critic = RATIOS[cell.ratio]
    return RlhfConfig(
        algorithm="ppo",
        options="mini_batches=1",
        model=str(root / actor),
        critic=str(root / critic),
        tokenizer="bytes",
        plan=SEARCH,
        hardware=str(hardware),
        prompts=PROMPTS,
        group_size=1,
        prompt_tokens=PROMPT_TOKENS,
        max_new_tokens=cell.length,
        steps=steps,
        sft_steps=0,
        device="cpu",
        dtype="float32",
    )


def searched(config: RlhfConfig, launch: Launch, budget: float) -> dict[str, Planned]:
    """Return the searched plan and the named ones, the same on every rank: rank 0 searches."""
    found: dict[str, Planned] = {}

    def planner(run: PreparedRlhf) -> ExecutionPlan:
        told: list[Any] = [None]
        if launch.rank == 0:
            choice = planned(question_of(run), budget=budget, report=lambda *_: None)
            best = (SEARCH, choice.plan, choice.simulation.seconds)
            named = [(one.name, one.plan, one.seconds) for one in choice.named if one.plan]
            told = [[(name, to_mapping(plan), seconds) for name, plan, seconds in (best, *named)]]
        dist.broadcast_object_list(told)
        found.update({name: Planned(from_mapping(plan), seconds) for name, plan, seconds in told[0]})
        return found[SEARCH].plan

    prepare(config, launch, Start(), planner=planner)
    return found


def trainer(
    config: RlhfConfig, plan: ExecutionPlan, launch: Launch, folder: Path, groups: ProcessGroups
) -> RlhfTrainer:
    file = folder / PLAN_FILE
    if launch.rank == 0:
        folder.mkdir(parents=True)
        file.write_text(yaml.safe_dump(to_mapping(plan)))
    dist.barrier()
    config = replace(config, plan=str(file), hardware="auto")
    prepared = prepare(config, launch, Start(folder))
    return RlhfTrainer(prepared, launch, StopRequest(), Watchdog(launch, 0.0), groups=groups)


def step_seconds(trainers: dict[str, RlhfTrainer], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every counted step, from the first rank that begins to the last that ends."""
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for round_, name in in_turns(tuple(trainers), WARMUP + rounds):
        dist.barrier()
        begin = time.perf_counter()
        trainers[name].step(round_ + 1)
        dist.barrier()
        seconds[name].append(time.perf_counter() - begin)
    return {name: times[WARMUP:] for name, times in seconds.items()}


# Over all cells


def interval(values: Sequence[float], statistic: Callable[[Sequence[float]], float] = median) -> tuple[float, float]:
    """Return the 95% interval of a statistic of values, by bootstrap."""
    chance = random.Random(0)
    drawn = sorted(statistic(chance.choices(values, k=len(values))) for _ in range(DRAWS))
    return drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]


def behind(result: dict[str, Any], names: Sequence[str]) -> float:
    """Return how much longer the searched plan takes than the best of some plans, by medians; negative if less."""
    medians = {name: median(one["seconds"]) for name, one in result["plans"].items()}
    return medians[SEARCH] / min(medians[name] for name in names if name in medians) - 1


COLUMNS = ("cluster", "actor:critic", "tokens", "plan", "step (s)", "95%", "predicted (s)", "of search")


def rows(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for result in results:
        own = result["plans"][SEARCH]["seconds"]
        for name in PLANS:
            where = (result["cluster"], result["ratio"], str(result["length"]), name)
            if name not in result["plans"]:
                yield (*where, "no degrees fit", "", "", "")
                continue
            one = result["plans"][name]
            low, high = interval(one["seconds"])
            ratio = median(other / mine for other, mine in zip(one["seconds"], own, strict=True))
            spread = f"{low:.2f} to {high:.2f}"
            yield (*where, f"{median(one['seconds']):.2f}", spread, f"{one['predicted']:.2f}", f"{ratio:.2f}")


def answer(results: Sequence[dict[str, Any]]) -> str:
    regrets, named = ([behind(result, names) for result in results] for names in (PLANS, tuple(NAMED_PLANS)))
    errors = [abs(p["predicted"] / median(p["seconds"]) - 1) for r in results for p in r["plans"].values()]
    return (
        f"Over {len(results)} cells it takes {mean(regrets):.1%} longer than the fastest measured plan on average and "
        f"{max(regrets):.1%} at worst, and {-mean(named):.1%} less than the best named one (at worst {max(named):.1%} "
        f"more). Predicted seconds, from rates only, are off by {median(errors):.0%} in the median."
    )


def notes(results: Sequence[dict[str, Any]], loads: Sequence[float]) -> tuple[str, ...]:
    worst = max(results, key=lambda result: behind(result, tuple(NAMED_PLANS)))
    chosen = from_mapping(worst["plans"][SEARCH]["plan"])
    layouts = "; ".join(f"{name} {layout_text(layout)}" for name, layout in chosen.calls.items())
    return (
        f"PPO steps, {PROMPTS} prompts of up to {PROMPT_TOKENS} tokens. Named plans have the degrees predicted "
        "to serve them best. Ratios are medians over rounds.",
        f"It gains least with {worst['cluster']}, {worst['ratio']}, {worst['length']} tokens: {layouts}.",
        f"Other programs used {', '.join(f'{load:.0%}' for load in loads)} of the processors.",
    )


def main() -> None:
    parser = parser_of(__doc__ or "", quick="4 ranks, one cell on each cluster")
    parser.add_argument("--rounds", type=int, default=5, help="counted steps of each plan")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of a search")
    asked = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(f"emulated hosts are not available: {reason}")
    world_size, grid = (4, [("4:1", 16)]) if asked.quick else (8, list(product(RATIOS, LENGTHS)))
    results, loads = [], []
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        for hosts in (1, 2):
            cells, ranks = [Cell(hosts, *one) for one in grid], world_size // hosts
            with cluster(hosts, RATE) as made:
                found = made.call(measure, ranks, cells, asked.rounds, folder, ranks, asked.budget, timeout=3600.0)
            results += found[0][0]
            loads.append(found[0][1])
    finish(
        Record.of(
            "searched_plans",
            "Is the searched plan the fastest when measured?",
            answer(results),
            COLUMNS,
            rows(results),
            notes(results, loads),
            command="python -m benchmarks.rlhf.searched_plans",
        ),
        asked,
    )


if __name__ == "__main__":
    main()
