"""Choose an execution plan for RLHF, and what a person asks about it: what calls take, and what the named plans would.

A question is an RLHF step on a cluster: that of flags (`described_graph`, `model_shapes`) or of a run (`run_plan`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rich.console import Group, RenderableType

from usp.fields import parse_options
from usp.hf.models import ModelConfig, ModelHead, load_model_config, model_facts
from usp.model.facts import ModelShape
from usp.parallel import format_ranks
from usp.rlhf.algorithms.registry import ALGORITHMS, build_graph
from usp.rlhf.algorithms.rewards import ScoreWith
from usp.rlhf.graph import DataflowGraph, Generate, ModelCall
from usp.rlhf.plan.named_plans import Facts
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, optimizer_of
from usp.run.failures import ConfigurationError
from usp.run.metrics import seconds
from usp.run.tables import GIB, Grid

from .call_cost import CallOptions
from .corrections import Corrections
from .estimates import Estimates, layout_key
from .question import Devices, Tried, silent
from .rlhf_search import Baseline, Found, NothingFits, OptionSpace, Problem, Progress, baselines, options, search
from .simulator import Simulation, Simulator
from .workload import Workload

_NO_DEGREES = "no degrees fit the ranks, the heads, the layers and the batch"
_EVEN_FROM = 8  # hosts: with more, only even divisions of them are searched


@dataclass(frozen=True, eq=False, kw_only=True)
class RlhfQuestion(Devices):
    """A step of RLHF, and the devices that it has."""

    graph: DataflowGraph
    models: Mapping[str, ModelShape]  # by role
    workload: Workload
    options: CallOptions = field(default_factory=CallOptions)
    max_sequence: int = 8  # the highest ring x ulysses degree; 1: no sequence parallelism
    allowed: Callable[[ModelCall, CallLayout], bool] = lambda call, layout: True  # whether a model can have a layout
    corrections: Corrections = field(default_factory=Corrections)  # by what calls took on these devices
    clock: Callable[[], float] = time.monotonic  # of every `until` and budget

    @cached_property
    def space(self) -> OptionSpace:
        """The layouts to choose from; raise ValueError for devices that are not whole hosts."""
        hosts = self.world_size // self.ranks_per_host
        return OptionSpace(
            self.world_size,
            self.ranks_per_host,
            len(self.workload.prompts),
            smallest=self.ranks_per_host if hosts > 1 else 1,
            even=hosts > _EVEN_FROM,
            max_sequence=self.max_sequence,
            zero=(0, 1, 3),
            recompute=(("none", False), ("full", False)),
            models={role: model.facts for role, model in self.models.items()},
            allowed=self.allowed,
        )

    @cached_property
    def layouts(self) -> dict[str, list[CallLayout]]:
        """The layouts of each call."""
        return {call.name: list(options(call, self.space)) for call in self.graph.calls}

    @cached_property
    def estimates(self) -> Estimates:
        """What the calls of a plan take."""
        return Estimates(self.graph, self.models, self.workload, self.hardware, self.options, self.corrections)

    @property
    def facts(self) -> Facts:
        """What named plans depend on."""
        models = self.space.models.values()
        heads = math.gcd(*(number for facts in models for number in (facts.num_heads, facts.num_kv_heads)))
        layers = min(len(facts.windows) for facts in models)
        return Facts(self.world_size, self.ranks_per_host, heads, layers, experts=any(f.num_experts for f in models))

    def problem(self, until: float = math.inf, report: Tried = silent) -> Problem:
        """Return the search for the fastest plan that fits into the memory of the hardware, which may offload untrained
        models and optimizer states; `until` and `report` as in `Problem.that_fit`. Raise NothingFits naming the calls
        that no layout fits, and ValueError for devices that are not whole hosts, or not connected."""
        simulator = Simulator(self.graph, self.estimates, self.world_size)
        trained = self.graph.trained_roles
        offload = (*(role for role in self.graph.roles if role not in trained), *map(optimizer_of, trained))
        return Problem(simulator, self.layouts, self.usable.device, offload, self.clock).that_fit(until, report)

    def not_measured(self, plan: ExecutionPlan) -> Iterator[str]:
        """Yield which calls of a plan were not measured in its layouts, and how many layouts were not."""
        measured = {(name, key) for name, of_call in self.corrections.factors.items() for key in of_call}
        calls = [call.name for call in self.graph.calls if call.role]
        if missing := [key for name in calls if (key := (name, layout_key(plan[name]))) not in measured]:
            listed = "; ".join(f"{name} ({layout})" for name, layout in missing)
            yield f"NOT IN THE PROFILE, so by their most similar layouts there, or the rates of the hardware: {listed}"
        else:
            yield "every call of the plan is in the profile"
        every = {(name, layout_key(layout)) for name in calls for layout in self.layouts[name]}
        if every > measured:
            yield f"{len(every - measured)} layouts of calls were searched that the profile lacks"


@dataclass(frozen=True)
class RlhfChoice:
    """A chosen plan."""

    problem: Problem
    found: Found  # with at least one plan that fits
    simulation: Simulation  # of the best plan
    named: tuple[Baseline, ...]  # at their best

    @property
    def plan(self) -> ExecutionPlan:
        """The best plan."""
        return self.found.best[0][1]


def answer(
    question: RlhfQuestion, *, seed: int = 0, budget: float = 60.0, say: Callable[[str], object] = silent
) -> RlhfChoice:
    """Search the fastest plan in `budget` seconds, half of which may predict layouts, and `say` how far it is.
    Raise as `Question.problem`, and NothingFits with the plan that needs least memory."""

    def predicted(tried: int, every: int) -> None:
        say(f"predicting: {tried} of {every} layouts of calls")

    def found(_: float, plans: int, best: float) -> None:
        say(f"searching: {plans} plans simulated, a step takes {best:.2f} s")

    begin = question.clock()
    try:
        problem = question.problem(until=begin + budget / 2, report=predicted)
        left = begin + budget - question.clock()
        return choose_plan(problem, question.space, question.facts, seed=seed, budget=left, report=found)
    except NothingFits as error:
        help = "more ranks, devices with more memory, fewer --slots, or shorter or fewer samples"
        raise NothingFits(f"{error}. Use {help}") from None


def choose_plan(
    problem: Problem, space: OptionSpace, facts: Facts, *, seed: int = 0, budget: float = 60.0, report: Progress
) -> RlhfChoice:
    """Measure the named plans and search from them in `budget` seconds, and simulate the best plan in full; raise
    NothingFits with the plan that needs least memory."""
    begin = problem.clock()
    named = baselines(problem, space, facts, begin + budget / 2)
    starts, left = [one.plan for one in named if one.plan], begin + budget - problem.clock()
    found = search(problem, seed=seed, budget=left, starts=starts, progress=report)
    if not found.best:
        if found.nearest is None:
            raise NothingFits("no plan keeps rollouts and training on different ranks, as --staleness needs")
        needed, plan = found.nearest
        layouts = "; ".join(f"{name} {layout}" for name, layout in plan.calls.items())
        fits = f"no plan fits into {problem.memory_bytes / GIB:.1f} GiB per rank"
        raise NothingFits(f"{fits}. The nearest needs {needed / GIB:.1f} GiB: {layouts}")
    return RlhfChoice(problem, found, problem.simulator.run(found.best[0][1]), named)


def described_graph(
    algorithm: str, options: str, *, group_size: int, max_new_tokens: int, staleness: int, function: bool
) -> DataflowGraph:
    """Return the graph of an algorithm by the flags of rlhf.py; a `function` or a reward model scores the responses.
    Raise ConfigurationError for an algorithm that does not generate, and ValueError for wrong options."""
    if algorithm not in ALGORITHMS or ALGORITHMS[algorithm].data != "prompts":
        raise ConfigurationError(f"--algorithm = {algorithm} must be one that generates: see --help")
    kind = ALGORITHMS[algorithm].options
    generate = Generate(group_size=group_size or vars(kind())["generate"].group_size, max_new_tokens=max_new_tokens)
    reward = ScoreWith(lambda *_: 0.0, str, str) if function else None
    values = parse_options(options, kind, "--options", without=("generate", "reward", "staleness"))
    built = kind(**values, generate=generate, reward=reward, staleness=staleness)  # type: ignore[call-arg]
    return build_graph(algorithm, built)


def role_config(role: str, source: str) -> ModelConfig:
    """Return the configuration of a role's model; critic and reward have a scalar head, whatever is in `source`."""
    head: ModelHead = "scalar" if role in ("critic", "reward") else "lm"
    return load_model_config(source, head, new_head=True, weights=False)


def model_shapes(sources: Mapping[str, tuple[str, ModelConfig]]) -> dict[str, ModelShape]:
    """Return the shapes of each role's model, given by name and configuration; roles of one model share them, which
    shortens predictions. Raise ValueError for a model that there are no formulas for."""
    from usp.hf.tensor_parallel import model_shape

    shapes: dict[str, ModelShape] = {}
    by_role = {}
    for role, (source, config) in sources.items():
        facts = model_facts(source, config)
        if violation := facts.formula_violation:
            raise ValueError(f"the {role}'s model: {violation}")
        key = repr((source, config.to_dict()))
        by_role[role] = shapes[key] = shapes.get(key) or model_shape(facts, config)
    return by_role


def render_choice(choice: RlhfChoice) -> RenderableType:
    """Return the report of a choice for rich to print."""
    found, plan = choice.found, choice.plan
    lines = [f"{found.simulated} plans simulated in {found.seconds:.1f} s"]
    lines.append(f"offloaded between calls: {', '.join(sorted(plan.offload)) or 'nothing'}")
    return Group(_calls(choice).table(), _plans(choice).table(), *lines)


def _calls(choice: RlhfChoice) -> Grid:
    took = {event.name: event.seconds for event in choice.simulation.events}
    rows = []
    for call in choice.problem.simulator.graph.order:
        layout = choice.plan[call.name]
        rows.append((call.name, format_ranks(layout.ranks), layout_key(layout), seconds(took[call.name])))
    return Grid(f"Plan: {seconds(choice.simulation.seconds)} a step", ("call", "ranks", "layout", "time"), tuple(rows))


def _plans(choice: RlhfChoice) -> Grid:
    memory, best, own = choice.problem.memory_bytes, choice.simulation.seconds, choice.plan
    plans = {one.name: one.plan for one in choice.named if one.plan}
    same = [name for name, plan in plans.items() if (plan.calls, plan.offload) == (own.calls, own.offload)]
    name = f"this plan, {same[0]}" if same else "this plan"
    rows: list[tuple[str, ...]] = [(name, seconds(best), "1.00", f"{choice.simulation.peak_bytes / GIB:.1f}", "")]
    for named in choice.named:
        over = "" if named.peak_bytes <= memory else f"does not fit into {memory / GIB:.0f} GiB"
        step = seconds(named.seconds), f"{named.seconds / best:.2f}", f"{named.peak_bytes / GIB:.1f}", over
        rows.append((named.name, *(step if named.plan else ("", "", "", _NO_DEGREES))))
    return Grid("Named plans, with their best degrees", ("plan", "step", "ratio", "GiB", ""), tuple(rows))
