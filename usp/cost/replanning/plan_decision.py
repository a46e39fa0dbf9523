"""Search another plan for the steps that remain, and decide whether to change to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from usp.cost.rlhf.baselines import baselines
from usp.cost.rlhf.plan_search import Problem, search
from usp.cost.rlhf.question import Question
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.replan.measured_steps import MeasuredStep
from usp.rlhf.replan.replan_decision import Decision, SwitchCost
from usp.rlhf.replan.replan_options import ReplanOptions
from usp.rlhf.runtime.step_lengths import StepLengths

from .corrected import CallSeconds, CorrectedEstimates, Corrections, over_fast_links
from .switching import move_bytes, move_seconds, moves


class SearchingPlanner:
    """A `usp.rlhf.replan.replanning.Replanner` that searches from the running plan and the named ones.

    Args:
        question: returns the step and the devices for the lengths of a step's samples.
        completed: returns a plan that was found with what flags say of all calls.

    Attributes:
        corrections: of the estimates, after the last decision.
    """

    def __init__(
        self,
        question: Callable[[StepLengths], Question],
        options: ReplanOptions,
        seed: int,
        completed: Callable[[ExecutionPlan], ExecutionPlan],
    ) -> None:
        self._question, self._options, self._seed = question, options, seed
        self._completed = completed
        self.corrections = Corrections()

    def decide(
        self, running: ExecutionPlan, measured: Sequence[MeasuredStep], remaining: int, build_seconds: float
    ) -> Decision:
        """See `Replanner`. Lengths are expected to stay as those of the last step."""
        begin, number = time.perf_counter(), measured[-1].number
        predicted = [self._predicted(running, step) for step in measured]
        self.corrections = self.corrections.after([step.seconds for step in measured], predicted)
        question = self._question(measured[-1].lengths)
        estimates = replace(_uncorrected(question), corrections=self.corrections)
        stays = Decision(number, remaining, running, 0.0, 0.0, SwitchCost(), self._options.gain)
        try:
            problem = question.problem(estimates)
        except ValueError as error:  # by prediction nothing fits, and yet the plan runs
            return replace(stays, why_not=str(error))
        seconds = problem.simulator.measure(running)[0]
        stays = replace(stays, running_seconds=seconds, best_seconds=seconds)
        decision = self._best(problem, question, stays)
        moved = list(
            moves(
                question.graph,
                running,
                decision.best,
                question.models,
                question.options.dtype,
                question.ranks_per_host,
            )
        )
        searched = time.perf_counter() - begin
        cost = SwitchCost(move_bytes(moved), move_seconds(moved, question.hardware), build_seconds, searched)
        return replace(decision, cost=cost)

    def _best(self, problem: Problem, question: Question, stays: Decision) -> Decision:
        """Search, and return the fastest plan that the run can have; with `why_not` if it can have none of them."""
        named = [one.plan for one in baselines(problem, question.space, question.facts) if one.plan]
        seed, starts = self._seed + stays.step, [stays.best, *named]
        found = search(problem, seed=seed, budget=self._options.budget, starts=starts)
        decision = stays
        for each in (plan for _, plan in found.best):
            plan = self._completed(each)
            if (seconds := problem.simulator.measure(plan)[0]) >= stays.running_seconds:
                break
            why_not = next(plan.violations(question.graph, question.world_size), "")
            decision = replace(stays, best=plan, best_seconds=seconds, why_not=why_not)
            if not why_not:
                break
        return decision

    def _predicted(self, running: ExecutionPlan, step: MeasuredStep) -> dict[str, CallSeconds]:
        """Return the seconds of each call of a step that ran, without corrections."""
        question = self._question(step.lengths)
        estimates = _uncorrected(question)
        return {call.name: estimates.predicted(call.name, running[call.name]) for call in question.graph.calls}


def _uncorrected(question: Question) -> CorrectedEstimates:
    fast = replace(question, hardware=over_fast_links(question.hardware))
    return CorrectedEstimates(question.estimates, fast.estimates)
