"""The planner of an RLHF run: its models on the hardware that it runs on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from usp.cost.calls.call_cost import CallOptions
from usp.cost.calls.workload import Workload
from usp.cost.planner.choice import hardware_here
from usp.cost.rlhf.question import Question
from usp.hf.models import formula_violation, model_facts
from usp.hf.shapes import model_shape
from usp.model.facts import ModelShape
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, optimizer_of, staleness_violations
from usp.rlhf.prepare import PreparedRlhf
from usp.rlhf.replan.measured_steps import Lengths
from usp.rlhf.replan.replan_options import ReplanOptions
from usp.rlhf.role_specs import layout_violations
from usp.rlhf.roles.role_spec import RoleSpec
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch

from .plan_decision import SearchingPlanner


def run_planner(prepared: PreparedRlhf, launch: Launch) -> SearchingPlanner:
    """Return what `train_rlhf` needs for --replan.

    Raises:
        ConfigurationError: for a model that there are no formulas for, or hardware that is not known.
    """
    config, graph, specs = prepared.config, prepared.graph, prepared.roles
    models = _shapes(specs)
    try:
        hardware = hardware_here(config.hardware, prepared.device, launch)
    except ValueError as error:
        raise ConfigurationError(f"--replan = {config.replan}: {error}") from error
    actor = specs["actor"]
    options = CallOptions(actor.dtype, config.slots, config.loss_chunk, config.attention_kernel)

    def question(lengths: Lengths) -> Question:
        workload = Workload(lengths.prompts, lengths.responses, graph.group_size, config.max_new_tokens)
        return Question(graph, models, workload, hardware, launch.world_size, options, staleness=config.staleness)

    def violations(plan: ExecutionPlan) -> Iterator[str]:
        yield from plan.violations(graph, launch.world_size)
        if config.staleness:
            yield from staleness_violations(graph, plan)
        yield from layout_violations(graph, plan, specs)

    return SearchingPlanner(
        question,
        ReplanOptions.parse(config.replan),
        config.seed,
        lambda plan: _completed(plan, prepared),
        violations,
    )


def _shapes(specs: dict[str, RoleSpec]) -> dict[str, ModelShape]:
    """Return the shapes of each role's model; equal models share them."""
    shapes: dict[str, ModelShape] = {}
    for role, spec in specs.items():
        if violation := formula_violation(spec.source, spec.config):
            raise ConfigurationError(f"--replan predicts no steps of {role}: {violation}")
        shape = model_shape(model_facts(spec.source, spec.config), spec.config)
        shapes[role] = next((known for known in shapes.values() if known == shape), shape)
    return shapes


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
