"""python -m usp rlhf-plan: the ranks and the layout of each model call of an RLHF step, on any cluster."""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import yaml
from rich.console import Console
from tyro.conf import arg

from usp.config import MODEL_HELP
from usp.fields import TOKENS, AtLeast0, AtLeast1, at_least, flag, one_of, value_violations
from usp.parallel import load_hardware
from usp.rlhf.algorithms.registry import ALGORITHMS
from usp.run.failures import ConfigurationError
from usp.run.output import working

from .flags import Node, check, check_world_size, output_problem, parse, prices_of, token_counts

if TYPE_CHECKING:
    from usp.planning.rlhf_question import RlhfQuestion

FUNCTION = "function"
_LENGTHS = ("prompts", "group_size", "prompt_tokens", "response_tokens")
_SILENT = 5.0  # seconds between lines of progress


@dataclass(frozen=True)
class RlhfPlanConfig:
    """Search the ranks and the layout of each model call of an RLHF step, for the shortest predicted step.

    Rates are those of a hardware file; nothing runs. The plan is printed beside the named ones.

    For example: python -m usp rlhf-plan --actor llama2-70b --critic llama2-7b --world-size 128 --hardware a100
    """

    actor: Annotated[str, arg(metavar="PRESET|PATH", help=f"Model to train. {MODEL_HELP}")] = "llama2-7b"
    critic: Annotated[str, arg(metavar="PRESET|PATH", help_behavior_hint="(default: the actor)")] = ""
    """Model whose size the critic has."""
    ref: Annotated[str, arg(metavar="PRESET|PATH", help_behavior_hint="(default: the actor)")] = ""
    """Reference model."""
    reward: Annotated[str, arg(metavar=f"PRESET|PATH|{FUNCTION}", help_behavior_hint="(default: the critic)")] = ""
    """Reward model; function: a function scores the responses."""
    models: Annotated[str, arg(metavar="NAME=PRESET|PATH,...", help_behavior_hint="(default: the actor)")] = ""
    """Models of further roles, such as the teacher of a distillation."""
    algorithm: Annotated[str, one_of(tuple(name for name, of in ALGORITHMS.items() if of.data == "prompts"))] = "ppo"
    """Training algorithm."""
    options: Annotated[str, arg(metavar="NAME=VALUE,...", help_behavior_hint="(optional)")] = ""
    """Algorithm options, e.g. mini_batches=4."""

    prompts: AtLeast1 = 512
    """Prompts per step."""
    group_size: AtLeast0 = 0
    """Responses per prompt. 0: the algorithm's default."""
    prompt_tokens: Annotated[int, TOKENS, at_least(1)] = 1024
    """Tokens of a prompt."""
    response_tokens: Annotated[str, arg(metavar="N|N,N,...")] = "1024"
    """Tokens of a response; several are their lengths at equal steps of probability: minimum,median,maximum."""
    workload: Annotated[str, arg(metavar="RUN", help_behavior_hint="(optional)")] = ""
    """Output directory of an RLHF run, whose last step has the prompts and the responses to plan for, in place of
    --prompts, --group-size, --prompt-tokens and --response-tokens."""
    slots: AtLeast1 = 64
    """Maximum sequences decoded concurrently per rank; the rest are queued."""
    cache_tokens: AtLeast0 = 0
    """Maximum tokens in the KV cache of the ranks that share a sequence. 0: no bound."""
    share_prefixes: bool = False
    """Compute a prompt once for its responses, in training and for log-probabilities and values."""
    staleness: AtLeast0 = 0
    """1 or more: generate the samples of a step while the step before trains."""

    world_size: int = 0
    """Number of devices."""
    hardware: Node = "h100"
    profile: Annotated[str, arg(metavar="FILE.json", help_behavior_hint="(optional)")] = ""
    """Corrections of predictions by examples.rlhf_profile, with this --hardware; the plan names calls without any."""
    max_sp: AtLeast1 = 8
    """Highest ring x ulysses degree. 1: no sequence parallelism."""
    budget: float = 60.0
    """Seconds of the whole command. What is not predicted by then is left out, first all but the named plans."""
    repeatable: bool = False
    """Count 1,000 steps of work as a second of --budget: the plan depends on neither the machine nor its load."""
    seed: int = 0
    """Seed of the search."""
    out: Annotated[str, arg(metavar="PATH.yaml", help_behavior_hint="(optional)")] = ""
    """Write the plan to this file, for rlhf.py --plan."""
    trace: Annotated[str, arg(metavar="PATH.json", help_behavior_hint="(optional)")] = ""
    """Write the timeline of the predicted step to this file, for chrome://tracing or ui.perfetto.dev."""
    price: Annotated[str, arg(metavar="PRICE|PATH", help_behavior_hint="(optional)")] = ""
    """Price of a device-hour, or a JSON or YAML file of prices by hardware name."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    """Print the plan that `argv` asks for, and write --out and --trace; raise ConfigurationError if nothing fits."""
    begin = time.monotonic()
    asked = parse(argv, RlhfPlanConfig, prog)
    check_world_size(asked.world_size)
    out, trace = (Path(path).expanduser() if path else None for path in (asked.out, asked.trace))
    lengths = [name for name in _LENGTHS if asked.workload and getattr(asked, name) != getattr(RlhfPlanConfig, name)]
    check(
        output_problem("--out", out, ".yaml", ".yml"),
        output_problem("--trace", trace, ".json"),
        *(f"{flag(name)} and --workload exclude each other: remove one" for name in lengths),
        *value_violations(asked).values(),
    )
    prices = prices_of(asked.price)
    _plan(asked, begin + asked.budget, out, trace, prices)


def _plan(asked: RlhfPlanConfig, end: float, out: Path | None, trace: Path | None, prices: dict[str, float]) -> None:
    """Search until `end`, and print and write the plan."""
    from usp.planning.job_cost import Terms, step_cost_text
    from usp.planning.rlhf_question import answer, render_choice
    from usp.planning.rlhf_search import work_clock
    from usp.rlhf.plan.plan import to_mapping
    from usp.rlhf.runtime.trace import write_chrome_trace

    with working("reading the models", every=_SILENT) as say:
        question = _question(asked)
        if asked.repeatable:
            question, end = replace(question, clock=work_clock()), asked.budget
        choice = answer(question, seed=asked.seed, budget=end - question.clock(), say=say)
    Console().print(render_choice(choice))
    if prices:
        name, samples, terms = question.hardware.name, len(question.workload.sequences), Terms(prices=prices)
        print(step_cost_text(choice.simulation.seconds, asked.world_size, samples, name, terms.price(name)))
    for line in question.not_measured(choice.plan) if question.corrections.factors else ():
        print(line)
    if out:
        out.write_text(yaml.safe_dump(to_mapping(choice.plan), sort_keys=False))
        print(f"written: {out} (torchrun ... rlhf.py --plan {out})")
    if trace:
        write_chrome_trace(choice.simulation.events, trace)
        print(f"written: {trace}")


def _question(asked: RlhfPlanConfig) -> RlhfQuestion:
    import torch

    from usp.planning.call_cost import CallOptions
    from usp.planning.corrections import Corrections, Profile
    from usp.planning.rlhf_question import RlhfQuestion, described_graph, model_shapes, role_config
    from usp.planning.workload import Workload
    from usp.rlhf.role_specs import other_models
    from usp.rlhf.runtime.measure import read_lengths

    quantiles = token_counts("--response-tokens", asked.response_tokens)
    if min(quantiles) < 1 or list(quantiles) != sorted(quantiles):
        raise ConfigurationError(f"--response-tokens = {asked.response_tokens} must be positive and ascending")
    run = read_lengths(Path(asked.workload).expanduser()) if asked.workload else None
    hardware = load_hardware(asked.hardware)
    profile = Profile.load(Path(asked.profile).expanduser(), hardware.name) if asked.profile else None
    graph = described_graph(
        asked.algorithm,
        asked.options,
        group_size=run.group_size if run else asked.group_size,
        max_new_tokens=max(run.responses) if run else quantiles[-1],
        staleness=asked.staleness,
        function=asked.reward == FUNCTION,
    )
    if run:
        workload = Workload(**vars(run), limit=max(run.responses))
    else:
        workload = Workload.of(asked.prompts, graph.group_size, asked.prompt_tokens, quantiles)
    critic = asked.critic or asked.actor
    names = {"actor": asked.actor, "ref": asked.ref or asked.actor, "critic": critic, "reward": asked.reward or critic}
    others = other_models(asked.models)
    if unused := ", ".join(sorted(others.keys() - set(graph.roles))):
        raise ConfigurationError(f"--models = {asked.models}: {asked.algorithm} has no {unused}: remove it")
    names = dict.fromkeys(graph.roles, asked.actor) | names | others
    return RlhfQuestion(
        graph=graph,
        models=model_shapes({role: (names[role], role_config(role, names[role])) for role in graph.roles}),
        workload=workload,
        hardware=hardware,
        world_size=asked.world_size,
        options=CallOptions(
            getattr(torch, profile.made["dtype"]) if profile else torch.bfloat16,
            asked.slots,
            share_prefixes=asked.share_prefixes,
            cache_tokens=asked.cache_tokens,
            begun=(1 + max(1, asked.staleness)) / 2,
            cuda_graphs=True,
        ),
        max_sequence=asked.max_sp,
        corrections=profile.corrections if profile else Corrections(),
    )
