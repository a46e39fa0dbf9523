"""python -m usp rlhf-plan: the ranks and the layout of each model call of an RLHF step, on any cluster."""

from __future__ import annotations

import math
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import yaml
from rich.console import Console
from tyro.conf import arg

from parallel import load_hardware, node_names
from usp.commands.flags import output_problem, parse
from usp.config import MODEL_HELP, TOKENS, one_of, token_count
from usp.rlhf.algorithms.registry import ALGORITHMS
from usp.run.failures import ConfigurationError

FUNCTION = "function"
_SEARCHED = 0.8  # of what is left of --budget after the predictions; the rest is for other memory
_EVEN_FROM = 8  # hosts: with more, only even divisions of them are searched


@dataclass(frozen=True)
class RlhfPlanConfig:
    """Search the ranks and the layout of each model call of an RLHF step, for the shortest predicted step.

    Rates are those of a hardware file; nothing runs. The plan is printed beside the named ones, with what it would cost
    to give each call another layout.

    For example: python -m usp rlhf-plan --actor llama2-70b --critic llama2-7b --world-size 128 --hardware a100
    """

    actor: Annotated[str, arg(metavar="PRESET|PATH", help=f"Model to train. {MODEL_HELP}")] = "llama2-7b"
    critic: Annotated[str, arg(metavar="PRESET|PATH", help_behavior_hint="(default: the actor)")] = ""
    """Model whose size the critic has."""
    ref: Annotated[str, arg(metavar="PRESET|PATH", help_behavior_hint="(default: the actor)")] = ""
    """Reference model."""
    reward: Annotated[str, arg(metavar=f"PRESET|PATH|{FUNCTION}", help_behavior_hint="(default: the critic)")] = ""
    """Reward model; function: a function scores the responses."""
    algorithm: Annotated[str, one_of(tuple(name for name, of in ALGORITHMS.items() if of.data == "prompts"))] = "ppo"
    """Training algorithm."""
    options: Annotated[str, arg(metavar="NAME=VALUE,...", help_behavior_hint="(optional)")] = ""
    """Algorithm options, e.g. mini_batches=4."""

    prompts: int = 512
    """Prompts per step."""
    group_size: int = 0
    """Responses per prompt. 0: the algorithm's default."""
    prompt_tokens: Annotated[int, TOKENS] = 1024
    """Tokens of a prompt."""
    response_tokens: Annotated[str, arg(metavar="N|N,N,...")] = "1024"
    """Tokens of a response; several are their lengths at equal steps of probability: minimum,median,maximum."""
    slots: int = 64
    """Maximum sequences decoded concurrently per rank; the rest are queued."""
    staleness: Annotated[int, one_of(("0", "1"))] = 0
    """1: generate the samples of a step while the step before trains."""

    world_size: int = 0
    """Number of devices."""
    hardware: Annotated[
        str, arg(metavar="NODE|PATH.json", help=f"{', '.join(node_names())}, or a file from python -m usp calibrate.")
    ] = "h100"
    max_sp: int = 8
    """Highest ring x ulysses degree. 1: no sequence parallelism."""
    budget: float = 60.0
    """Seconds of the whole command. With fewer than predictions and named plans take, only these are compared."""
    seed: int = 0
    """Seed of the search."""
    out: Annotated[str, arg(metavar="PATH.yaml", help_behavior_hint="(optional)")] = ""
    """Write the plan to this file, for rlhf.py --plan."""
    plot: Annotated[str, arg(metavar="PATH.png", help_behavior_hint="(optional)")] = ""
    """Write the timeline of the predicted step to this file."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    """Print the plan that `argv` asks for, and write --out and --plot; raise ConfigurationError if nothing fits."""
    asked = parse(argv, RlhfPlanConfig, prog)
    out, plot = (Path(path).expanduser() if path else None for path in (asked.out, asked.plot))
    problems = [output_problem("--out", out, ".yaml", ".yml"), output_problem("--plot", plot, ".png")]
    least = {"world_size": 1, "prompts": 1, "prompt_tokens": 1, "slots": 1, "max_sp": 1, "group_size": 0}
    problems += [
        f"--{name.replace('_', '-')} = {value} must be at least {minimum}"
        for name, minimum in least.items()
        if (value := getattr(asked, name)) < minimum
    ]
    if found := [problem for problem in problems if problem]:
        raise ConfigurationError("\n".join(found))

    from usp.cost.rlhf.plan_choice import choose_plan, suppose
    from usp.cost.rlhf.plan_choice_report import render_choice
    from usp.rlhf.plan.plan_text import to_mapping
    from usp.rlhf.runtime.trace import plot as draw

    end = time.monotonic() + asked.budget
    with Console(stderr=True).status("predicting the calls in every layout") as status:
        problem, space, facts = _problem(asked)

        def report(seconds: float, simulated: int, best: float) -> None:
            status.update(f"searching: {simulated} plans simulated, a step takes {best:.2f} s")

        left = _SEARCHED * (end - time.monotonic())
        choice = choose_plan(problem, space, facts, seed=asked.seed, budget=left, report=report)
        plan = choice.plan
        status.update("searching: with other memory")
        memory = {"with half the memory": 0.5, "with twice the memory": 2.0}
        others = {name: replace(problem, memory_bytes=problem.memory_bytes * by) for name, by in memory.items()}
        supposed = list(suppose(others, choice, seed=asked.seed, budget=end - time.monotonic()))
    Console().print(render_choice(choice, supposed))
    if out:
        out.write_text(yaml.safe_dump(to_mapping(plan), sort_keys=False))
        print(f"written: {out} (torchrun ... rlhf.py --plan {out})")
    if plot:
        assert choice.simulation
        draw(list(choice.simulation.events()), plot)
        print(f"written: {plot}")


def _problem(asked: RlhfPlanConfig):
    """Return the problem that is asked for, its space, and what named plans depend on."""
    from usp.cost.calls.call_cost import CallOptions
    from usp.cost.calls.plan_estimates import PlanEstimates
    from usp.cost.calls.workload import Workload
    from usp.cost.planner.choice import usable
    from usp.cost.rlhf.options import ModelLimits, OptionSpace
    from usp.cost.rlhf.plan_choice import problem_of
    from usp.cost.rlhf.predictions import Predictions
    from usp.cost.rlhf.simulator import Simulator
    from usp.rlhf.plan.named_plans import Facts
    from usp.rlhf.plan.plan import optimizer_of

    graph = _graph(asked)
    hardware = load_hardware(asked.hardware)
    per_host = min(hardware.host_devices, asked.world_size)
    quantiles = _quantiles(asked.response_tokens)
    workload = Workload.of(asked.prompts, graph.group_size, asked.prompt_tokens, quantiles)
    models = _models(asked, graph.roles)
    limits = {
        role: ModelLimits(model.facts.num_heads, model.facts.num_kv_heads, len(model.layers))
        for role, model in models.items()
    }
    hosts = asked.world_size // per_host
    space = OptionSpace(
        asked.world_size,
        per_host,
        len(workload.prompts),
        smallest=per_host if hosts > 1 else 1,
        even=hosts > _EVEN_FROM,
        max_sequence=asked.max_sp,
        zero=(0, 1, 3),
        recompute=(("none", False), ("full", False)),
        limits=limits,
    )
    exact = PlanEstimates(graph, models, workload, hardware, CallOptions(slots=asked.slots))
    simulator = Simulator(graph, Predictions(exact, per_host), asked.world_size, staleness=asked.staleness)
    untrained = [role for role in graph.roles if role not in graph.trained_roles]
    offload = (*untrained, *map(optimizer_of, graph.trained_roles))
    heads = [math.gcd(limit.heads, limit.kv_heads) for limit in limits.values()]
    facts = Facts(asked.world_size, per_host, math.gcd(*heads), min(limit.layers for limit in limits.values()))
    return problem_of(simulator, space, usable(hardware).device, offload), space, facts


def _quantiles(text: str) -> tuple[int, ...]:
    try:
        found = tuple(token_count(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"--response-tokens = {text}: {error}") from None
    if min(found) < 1 or list(found) != sorted(found):
        raise ConfigurationError(f"--response-tokens = {text} must be positive and ascending")
    return found


def _graph(asked: RlhfPlanConfig):
    """Return the graph of the algorithm with the given options."""
    from usp.rlhf.algorithms.registry import build_graph
    from usp.rlhf.algorithms.rewards import ScoreWith
    from usp.rlhf.config import default_of, parse_options
    from usp.rlhf.graph.calls import Generate

    if asked.algorithm not in ALGORITHMS or ALGORITHMS[asked.algorithm].data != "prompts":
        raise ConfigurationError(f"--algorithm = {asked.algorithm} must be one that generates: see --help")
    kind = ALGORITHMS[asked.algorithm].options
    group = asked.group_size or default_of(kind, "generate").group_size
    generate = Generate(group_size=group, max_new_tokens=_quantiles(asked.response_tokens)[-1])
    reward = ScoreWith(lambda *_: 0.0, str, str) if asked.reward == FUNCTION else None
    values = parse_options(asked.options, kind, "--options", without=("generate", "reward", "staleness"))
    options = kind(**values, generate=generate, reward=reward, staleness=asked.staleness)  # type: ignore[call-arg]
    return build_graph(asked.algorithm, options)


def _models(asked: RlhfPlanConfig, roles: Sequence[str]):
    """Return the shapes of the model of each role; roles of one size share them."""
    from usp.hf.models import formula_violation, load_model_config, model_facts
    from usp.hf.shapes import model_shape

    critic = asked.critic or asked.actor
    names = {"actor": asked.actor, "ref": asked.ref or asked.actor, "critic": critic, "reward": asked.reward or critic}
    shapes, found = {}, {}
    for role in roles:
        name, head = names[role], "scalar" if role in ("critic", "reward") else "lm"
        if (name, head) not in shapes:
            config = load_model_config(name, head, new_head=True, weights=False)  # type: ignore[arg-type]
            if violation := formula_violation(name, config):
                raise ConfigurationError(f"--{role} = {violation}")
            shapes[name, head] = model_shape(model_facts(name, config), config)
        found[role] = shapes[name, head]
    return found
