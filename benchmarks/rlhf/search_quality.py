"""The search for an RLHF plan in a minute, predictions included, beside a longer search.

Seconds are those of one core's CPU, so that other programs disturb them little. The long search starts anew with
another seed where it finds nothing better, and ends early when it is interrupted.

    python -m benchmarks.rlhf.search_quality              # 40 minutes
    python -m benchmarks.rlhf.search_quality --long 300   # 10 minutes
    python -m benchmarks.rlhf.search_quality --quick      # a small cluster, seconds; saves nothing
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.record import Record, finish
from usp.parallel import load_hardware
from usp.planning.rlhf_question import RlhfQuestion, model_shapes, role_config
from usp.planning.rlhf_search import Baseline, Found, Problem, baselines, search
from usp.planning.workload import Workload
from usp.rlhf.algorithms.ppo import PPO
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.graph import Generate

COLUMNS = ("search", "seed", "CPU s", "plans simulated", "s per step", "above the long search")
_EACH = 120.0  # seconds of one of the long search's searches
PROMPTS, TOKENS = 512, 1024  # per step; of a prompt, and of a response


@dataclass(frozen=True)
class Case:
    """PPO on a cluster of A100s."""

    actor: str = "llama2-70b"
    critic: str = "llama2-7b"
    world_size: int = 128
    max_sequence: int = 8

    def __str__(self) -> str:
        return f"{self.actor} with a critic like {self.critic} on {self.world_size} A100s"


def problem(case: Case) -> tuple[Problem, tuple[Baseline, ...]]:
    """Return the problem with every call predicted, and the named plans."""
    graph = build_graph("ppo", PPO(generate=Generate(max_new_tokens=TOKENS)))
    names = {role: case.actor if role in ("actor", "ref") else case.critic for role in graph.roles}
    question = RlhfQuestion(
        graph=graph,
        models=model_shapes({role: (name, role_config(role, name)) for role, name in names.items()}),
        workload=Workload.of(PROMPTS, 1, TOKENS, (TOKENS,)),
        hardware=load_hardware("a100"),
        world_size=case.world_size,
        max_sequence=case.max_sequence,
    )
    made = question.problem()
    return made, baselines(made, question.space, question.facts)


def long_search(made: Problem, named: tuple[Baseline, ...], budget: float, seed: int) -> tuple[Found, int]:
    """Return the best of as many searches as the budget allows, and how many plans they simulated."""
    begin, best = time.process_time(), run(made, named, min(budget, _EACH), seed)
    simulated = best.simulated
    try:
        while (left := budget - (time.process_time() - begin)) > 0:
            seed += 1000
            found = run(made, named, min(left, _EACH), seed)
            simulated += found.simulated
            best = min(best, found, key=lambda one: one.best[0][0])
            print(f"{budget - left:.0f} s: {found.best[0][0]:.3f}, {best.best[0][0]:.3f} s per step", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    return best, simulated


def run(made: Problem, named: tuple[Baseline, ...], budget: float, seed: int) -> Found:
    starts = [one.plan for one in named if one.plan]
    return search(made, seed=seed, budget=budget, starts=starts, clock=time.process_time)


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality of RLHF plans found in a minute.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the short searches")
    parser.add_argument("--short", type=float, default=60.0, help="seconds, with predictions and named plans")
    parser.add_argument("--long", type=float, default=1800.0, help="seconds of the long search")
    parser.add_argument("--quick", action="store_true", help="a small cluster and short searches; save nothing")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    args = parser.parse_args()
    case = Case("llama3-8b", "llama3-8b", 16, 2) if args.quick else Case()
    short, long, seeds = (10.0, 10.0, [0]) if args.quick else (args.short, args.long, args.seeds)
    begin = time.process_time()
    made, named = problem(case)
    predicted = time.process_time() - begin
    print(f"{case}: {made.plans:.1e} plans, predictions and named plans {predicted:.1f} s", flush=True)
    data: list[dict[str, Any]] = []
    for seed in seeds:
        begin = time.process_time()
        found = run(made, named, short - predicted, seed)
        seconds = predicted + time.process_time() - begin
        data.append({"search": "short", "seed": seed, "cpu": seconds, "simulated": found.simulated})
        data[-1] |= {"step": found.best[0][0], "history": found.history}
        print(data[-1] | {"history": len(found.history)}, flush=True)
    begin = time.process_time()
    best, simulated = long_search(made, named, long, seeds[0])
    least = best.best[0][0]
    data.append({"search": "long", "seed": seeds[0], "cpu": time.process_time() - begin, "simulated": simulated})
    data[-1] |= {"step": least, "history": best.history}
    rows = [
        (
            row["search"],
            str(row["seed"]),
            f"{row['cpu']:.0f}",
            f"{row['simulated']:,}",
            f"{row['step']:.3f}",
            f"{row['step'] / least - 1:.2%}",
        )
        for row in data
    ]
    data += [{"search": one.name, "step": one.seconds, "bytes": one.peak_bytes} for one in named]
    rows += [
        (one.name, "", "", "", f"{one.seconds:.3f}", f"{one.seconds / least - 1:.2%}")
        for one in named
        if one.plan and one.peak_bytes <= made.memory_bytes
    ]
    notes = (
        f"PPO of {case}, {PROMPTS} prompts and responses of {TOKENS} tokens: {made.plans:.1e} plans, ring and Ulysses "
        "among them.",
        f"Short: {short:.0f} seconds with predictions and named plans, which take {predicted:.1f} of them. Long: "
        "searches from further seeds, without predictions, the best of all.",
        "Steps are simulated. Named plans have their best degrees.",
    )
    record = Record.of(
        "search_quality",
        "RLHF plans found in a minute, beside a longer search",
        COLUMNS,
        rows,
        notes,
        data,
        command="python -m benchmarks.rlhf.search_quality",
    )
    finish(record, None if args.quick else args.output, save=not args.quick)


if __name__ == "__main__":
    main()
