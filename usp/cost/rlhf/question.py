"""What a plan is searched for: an RLHF step on a cluster; the answer, and how it depends on the question. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from parallel import Hardware
from usp.cost.calls.call_cost import CallOptions
from usp.cost.calls.plan_estimates import PlanEstimates
from usp.cost.calls.workload import Workload
from usp.cost.planner.choice import usable
from usp.cost.planner.layouts import suppositions
from usp.model.facts import ModelShape
from usp.rlhf.graph.calls import ModelCall
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.named_plans import Facts
from usp.rlhf.plan.plan import CallLayout, optimizer_of

from .baselines import baselines
from .estimates import Estimates
from .options import ModelLimits, OptionSpace
from .plan_choice import Report, RlhfChoice, choose_plan, problem_of
from .plan_search import NothingFits, Problem, search
from .predictions import Predictions
from .shared_processors import SharedSimulator
from .simulator import Simulator

_MORE_RANKS = (2, 4, 8, 16)  # times those that are too few
_REMEDY_SECONDS = 3.0  # to search a plan on each of these
_EVEN_FROM = 8  # hosts: with more, only even divisions of them are searched
_ZERO = (0, 1, 3)
_RECOMPUTE = (("none", False), ("full", False))


@dataclass(frozen=True, eq=False)
class Question:
    """A step of RLHF, and the devices that it has.

    Attributes:
        models: by role of the graph.
        hardware: of each device; hosts have `hardware.host_devices` of them.
        world_size: number of devices.
        options: what the run sets for all calls.
        max_sequence: the highest ring x ulysses degree; 1: no sequence parallelism.
        staleness: as --staleness of rlhf.py.
        allowed: whether the model of a call can have a layout.
    """

    graph: DataflowGraph
    models: Mapping[str, ModelShape]
    workload: Workload
    hardware: Hardware
    world_size: int
    options: CallOptions = field(default_factory=CallOptions)
    max_sequence: int = 8
    staleness: int = 0
    allowed: Callable[[ModelCall, CallLayout], bool] = lambda call, layout: True

    @property
    def ranks_per_host(self) -> int:
        return min(self.hardware.host_devices, self.world_size)

    @property
    def estimates(self) -> Estimates:
        """What the calls of a plan take."""
        return self.by_rates

    @property
    def processors(self) -> float:
        """How many ranks can compute at once without slowing each other down, where they share processors; else 0."""
        crowding = self.hardware.crowding
        return self.world_size / crowding if crowding > 1 else 0.0

    @cached_property
    def by_rates(self) -> Predictions:
        """Predictions from the rates of the hardware."""
        exact = PlanEstimates(self.graph, self.models, self.workload, self.hardware, self.options)
        return Predictions(exact, self.ranks_per_host, self.world_size)

    @cached_property
    def space(self) -> OptionSpace:
        """The layouts to choose from.

        Raises:
            ValueError: for devices that are not whole hosts.
        """
        hosts = self.world_size // self.ranks_per_host
        return OptionSpace(
            self.world_size,
            self.ranks_per_host,
            len(self.workload.prompts),
            smallest=self.ranks_per_host if hosts > 1 else 1,
            even=hosts > _EVEN_FROM,
            max_sequence=self.max_sequence,
            zero=_ZERO,
            recompute=_RECOMPUTE,
            limits=self._limits,
            allowed=self.allowed,
        )

    @property
    def facts(self) -> Facts:
        """What named plans depend on."""
        limits = self._limits.values()
        heads = math.gcd(*(math.gcd(limit.heads, limit.kv_heads) for limit in limits))
        experts = any(model.facts.num_experts for model in self.models.values())
        layers = min(limit.layers for limit in limits)
        return Facts(self.world_size, self.ranks_per_host, heads, layers, experts=experts)

    def simulator(self, estimates: Estimates) -> Simulator:
        """Return the simulator of plans."""
        return SharedSimulator(
            self.graph, estimates, self.world_size, staleness=self.staleness, processors=self.processors
        )

    def problem(self, estimates: Estimates | None = None) -> Problem:
        """Return the search for the fastest plan that fits into the memory of the hardware.

        Untrained models and the optimizer states of trained ones may be offloaded.

        Args:
            estimates: instead of those of the question.

        Raises:
            NothingFits: naming the calls that no layout fits.
            ValueError: for devices that are not whole hosts, or that the hardware does not connect.
        """
        simulator = self.simulator(estimates or self.estimates)
        trained = self.graph.trained_roles
        offload = (*(role for role in self.graph.roles if role not in trained), *map(optimizer_of, trained))
        return problem_of(simulator, self.space, usable(self.hardware).device, offload)

    @cached_property
    def _limits(self) -> dict[str, ModelLimits]:
        return {
            role: ModelLimits(model.facts.num_heads, model.facts.num_kv_heads, len(model.layers))
            for role, model in self.models.items()
        }


def answer(question: Question, *, seed: int = 0, budget: float = 60.0, report: Report) -> RlhfChoice:
    """Search the fastest plan.

    Args:
        budget: seconds, with the predictions. With fewer than these and named plans take, only these are compared.

    Raises:
        NothingFits: with the plan that needs least memory, and a number of ranks on which one fits.
        ValueError: as `Question.problem`.
    """
    begin = time.monotonic()
    try:
        problem = question.problem()
        left = budget - (time.monotonic() - begin)
        return choose_plan(problem, question.space, question.facts, seed=seed, budget=left, report=report)
    except NothingFits as error:
        enough = _enough_ranks(question)
        more = f"{enough} ranks, where one fits, or " if enough else ""
        raise NothingFits(f"{error}. Use {more}devices with more memory, or shorter or fewer samples") from None


def _enough_ranks(question: Question) -> int | None:
    """Return a number of ranks on which a plan fits, a multiple of those that are too few."""
    for times in _MORE_RANKS:
        larger = replace(question, world_size=times * question.world_size)
        try:
            problem = larger.problem()
            named = [one.plan for one in baselines(problem, larger.space, larger.facts) if one.plan]
            if search(problem, budget=_REMEDY_SECONDS, starts=named).best:
                return larger.world_size
        except NothingFits:
            continue
        except ValueError:  # the hardware connects fewer, or they are not whole hosts
            return None
    return None


def what_ifs(question: Question, problem: Problem) -> dict[str, Callable[[], Problem]]:
    """Return what could change the verdict on `problem`, that of `question`: memory, lengths and bandwidth."""

    def changed(**changes: object) -> Problem:
        return replace(question, **changes).problem()  # type: ignore[arg-type]

    found: dict[str, Callable[[], Problem]] = {}
    for words, hardware, times in suppositions(question.hardware):
        if hardware is question.hardware:
            found[words] = partial(replace, problem, memory_bytes=times * problem.memory_bytes)
        elif question.world_size > question.ranks_per_host:
            found[words] = partial(changed, hardware=hardware)
    for words, times in (("twice", 2.0), ("half", 0.5)):
        found[f"with responses {words} as long"] = partial(changed, workload=question.workload.longer(times))
    return found
