"""What a plan is searched for, with a profile of its calls; and what is said of those that the profile lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

from usp.cost.rlhf.estimates import Estimates
from usp.cost.rlhf.question import Question
from usp.cost.rlhf.shared_processors import SharedSimulator
from usp.cost.rlhf.simulator import Simulation, Simulator
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

from .parts import layout_key
from .profile import Profile
from .profiled_estimates import ProfiledEstimates


@dataclass(frozen=True, kw_only=True)
class ProfiledSimulator(SharedSimulator):
    """A simulator whose calls use the processors that the profile says, and whose steps take what every step does."""

    profiled: ProfiledEstimates

    def run(self, plan: ExecutionPlan) -> Simulation:
        found = super().run(plan)
        return replace(found, seconds=found.seconds + self.profiled.profile.step.seconds)

    def measure(self, plan: ExecutionPlan) -> tuple[float, float]:
        seconds, peak = super().measure(plan)
        return seconds if self.processors else seconds + self.profiled.profile.step.seconds, peak

    def used(self, call: str, layout: CallLayout) -> float:
        timing = self.profiled.timing(call, layout) if self.graph[call].role else None
        if timing is None or not timing.seconds:
            return super().used(call, layout)
        return min(timing.processors / timing.seconds, self.processors)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProfiledQuestion(Question):
    """A question whose calls take what a profile says, and by the hardware's rates what it lacks."""

    profile: Profile

    @staticmethod
    def of(question: Question, profile: Profile) -> ProfiledQuestion:
        """Return the same question with a profile."""
        return ProfiledQuestion(
            **{field.name: getattr(question, field.name) for field in fields(question)}, profile=profile
        )

    @property
    def estimates(self) -> Estimates:
        return self.profiled

    @cached_property
    def profiled(self) -> ProfiledEstimates:
        """The estimates, with what the profile lacks."""
        return ProfiledEstimates(self.profile, self.by_rates, self.graph, self.models, self.workload, self.options)

    def simulator(self, estimates: Estimates) -> Simulator:
        """Return the simulator of steps by the profile."""
        return ProfiledSimulator(
            self.graph,
            estimates,
            self.world_size,
            staleness=self.staleness,
            processors=self.profile.cores,
            profiled=self.profiled,
        )


def said_of(estimates: ProfiledEstimates, plan: ExecutionPlan) -> Iterator[str]:
    """Yield which calls of a plan the profile lacks, and how many layouts it lacked in the search."""
    calls = [call.name for call in estimates.graph.calls if call.role]
    missing = [name for name in calls if estimates.timing(name, plan[name]) is None]
    if missing:
        listed = "; ".join(f"{name} ({layout_key(plan[name])})" for name in missing)
        yield f"NOT IN THE PROFILE, so by the rates of the hardware, not measured: {listed}"
    else:
        yield f"every call of the plan is in the profile, measured on {estimates.profile.device}"
    if estimates.lacking:
        yield f"{len(estimates.lacking)} layouts of calls were searched by the hardware's rates: the profile lacks them"
