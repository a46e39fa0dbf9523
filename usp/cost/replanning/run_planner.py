"""The planner of an RLHF run: its models on the hardware that it runs on."""

from __future__ import annotations

from dataclasses import replace

from usp.cost.calls.workload import Workload
from usp.cost.rlhf.question import Question
from usp.cost.rlhf.run_plan import question_of
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, optimizer_of
from usp.rlhf.prepare import PreparedRlhf
from usp.rlhf.replan.replan_options import ReplanOptions
from usp.rlhf.runtime.step_lengths import StepLengths
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch

from .plan_decision import SearchingPlanner


def run_planner(prepared: PreparedRlhf, launch: Launch) -> SearchingPlanner:
    """Return what `train_rlhf` needs for --replan.

    Raises:
        ConfigurationError: for a model that there are no formulas for, or hardware that is not known.
    """
    config = prepared.config
    try:
        first = question_of(prepared.unplanned(launch))
    except ValueError as error:
        raise ConfigurationError(f"--replan = {config.replan}: {error}") from error

    def question(lengths: StepLengths) -> Question:
        workload = Workload(lengths.prompts, lengths.responses, lengths.group_size, config.max_new_tokens)
        return replace(first, workload=workload)

    options = ReplanOptions.parse(config.replan)
    return SearchingPlanner(question, options, config.seed, lambda plan: _completed(plan, prepared))


def _completed(plan: ExecutionPlan, prepared: PreparedRlhf) -> ExecutionPlan:
    """Return a plan with what is not searched as the run has it: how calls divide tokens, and offloading by flags."""
    config, graph = prepared.config, prepared.graph

    def like(layout: CallLayout, first: CallLayout) -> CallLayout:
        return replace(
            layout,
            micro_batch_tokens=first.micro_batch_tokens,
            sp_layout=first.sp_layout,
            mlp_tile=first.mlp_tile,
            loss_chunk=first.loss_chunk,
        )

    calls = {name: like(layout, prepared.plan[name]) for name, layout in plan.calls.items()}
    offload = set(plan.offload)
    if config.offload:
        offload |= set(graph.roles) - set(graph.trained_roles)
    if config.offload_optimizer:
        offload |= set(map(optimizer_of, graph.trained_roles))
    return ExecutionPlan(plan.name, calls, frozenset(offload))
