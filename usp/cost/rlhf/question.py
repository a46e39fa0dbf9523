"""What a plan is searched for: an RLHF step on a cluster, and the space of its plans. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from parallel import Hardware
from usp.cost.calls.call_cost import CallOptions
from usp.cost.calls.plan_estimates import PlanEstimates
from usp.cost.calls.workload import Workload
from usp.cost.planner.choice import usable
from usp.model.facts import ModelShape
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.named_plans import Facts
from usp.rlhf.plan.plan import optimizer_of

from .estimates import Estimates
from .options import ModelLimits, OptionSpace
from .plan_choice import problem_of
from .plan_search import Problem
from .predictions import Predictions
from .simulator import Simulator

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
    """

    graph: DataflowGraph
    models: Mapping[str, ModelShape]
    workload: Workload
    hardware: Hardware
    world_size: int
    options: CallOptions = field(default_factory=CallOptions)
    max_sequence: int = 8
    staleness: int = 0

    @property
    def ranks_per_host(self) -> int:
        return min(self.hardware.host_devices, self.world_size)

    @cached_property
    def estimates(self) -> Estimates:
        """Predictions from the rates of the hardware."""
        exact = PlanEstimates(self.graph, self.models, self.workload, self.hardware, self.options)
        return Predictions(exact, self.ranks_per_host)

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
        )

    @property
    def facts(self) -> Facts:
        """What named plans depend on."""
        limits = self._limits.values()
        heads = math.gcd(*(math.gcd(limit.heads, limit.kv_heads) for limit in limits))
        return Facts(self.world_size, self.ranks_per_host, heads, min(limit.layers for limit in limits))

    def problem(self, estimates: Estimates | None = None) -> Problem:
        """Return the search for the fastest plan that fits into the memory of the hardware.

        Untrained models and the optimizer states of trained ones may be offloaded.

        Args:
            estimates: instead of those from the hardware's rates.
        """
        simulator = Simulator(self.graph, estimates or self.estimates, self.world_size, staleness=self.staleness)
        trained = self.graph.trained_roles
        offload = (*(role for role in self.graph.roles if role not in trained), *map(optimizer_of, trained))
        return problem_of(simulator, self.space, usable(self.hardware).device, offload)

    @cached_property
    def _limits(self) -> dict[str, ModelLimits]:
        return {
            role: ModelLimits(model.facts.num_heads, model.facts.num_kv_heads, len(model.layers))
            for role, model in self.models.items()
        }
