"""The plan of a run with --plan search: rank 0 searches and hands it to the others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from parallel import Hardware
from usp.cost.calls.call_cost import CallOptions
from usp.cost.calls.workload import Workload
from usp.cost.planner.choice import hardware_here
from usp.cost.time.calibrate import device_memory_bytes
from usp.hf.models import formula_violation, model_facts
from usp.hf.shapes import model_shape
from usp.model.facts import ModelShape
from usp.rlhf.config import SEARCH
from usp.rlhf.data.datasets import example_indices, sequences_of
from usp.rlhf.graph.calls import ModelCall
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.plan.plan_text import PLAN_FILE, from_mapping, to_mapping
from usp.rlhf.prepare import Unplanned
from usp.rlhf.role_specs import call_violations
from usp.rlhf.roles.role_spec import RoleSpec
from usp.run.launch import Launch

from .plan_choice_report import render_choice
from .question import Question, answer

_WIDTH = 150  # of what is printed, at least: logs of torchrun report 80 columns


class SearchedPlan:
    """The planner of a run: the plan that was searched, or found in the folder of a run that is resumed.

    It is searched once: what the run prepares again, as after its supervised steps, gets the same plan.
    """

    def __init__(self) -> None:
        self._plan: ExecutionPlan | None = None

    def __call__(self, run: Unplanned) -> ExecutionPlan:
        """Return the same plan on every rank. Collective through torchrun's store.

        Raises:
            ValueError: on every rank, for unknown hardware, models without formulas, and if no plan fits.
        """
        if self._plan is None:
            if run.launch.world_size > 1 and run.launch.agent_store is None:
                raise ValueError(
                    f"--plan = {SEARCH} hands its plan to all ranks through torchrun's store: start with torchrun, or "
                    f"give the file that python -m usp rlhf-plan --out writes"
                )
            told = run.launch.from_first("rlhf-plan", lambda: _found(run))
            if problem := told.get("problem"):
                raise ValueError(f"--plan = {SEARCH}: {problem}")
            self._plan = from_mapping(told["plan"])
        return self._plan


def _found(run: Unplanned) -> dict[str, Any]:
    """Return the plan as plain values, or the `problem` with it; say on screen what it is."""
    try:
        if plan := _of_resumed(run):
            print(f"plan: that of the run, from {plan[0]}", flush=True)
            return {"plan": to_mapping(plan[1])}
        print(f"plan: searching for {run.launch.world_size} ranks", flush=True)
        choice = answer(
            question_of(run),
            seed=run.config.seed,
            budget=run.config.search_budget,
            report=lambda seconds, simulated, best: None,
        )
    except ValueError as error:
        return {"problem": str(error)}
    Console(width=max(Console().width, _WIDTH)).print(render_choice(choice))
    return {"plan": to_mapping(choice.plan)}


def _of_resumed(run: Unplanned) -> tuple[Path, ExecutionPlan] | None:
    """Return the searched plan in the folder of the run that is resumed, if it is of as many ranks."""
    if run.start.checkpoint is None:
        return None
    file = run.start.checkpoint.parent.parent / PLAN_FILE
    try:
        plan = from_mapping(yaml.safe_load(file.read_text()))
        plan.check(run.graph, run.launch.world_size)
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return None
    ranks = {rank for layout in plan.calls.values() for rank in layout.ranks}
    return (file, plan) if plan.name == SEARCH and len(ranks) == run.launch.world_size else None


def question_of(run: Unplanned) -> Question:
    """Return the question of a run: the samples of its first step, with responses of --max-new-tokens.

    Raises:
        ValueError: for unknown hardware, and models that there are no formulas for.
    """
    actor = run.roles[next(iter(run.graph.trained_roles))]
    options = CallOptions(
        dtype=actor.dtype,
        slots=run.config.slots,
        loss_chunk=run.config.loss_chunk,
        kernel=run.config.attention_kernel,
    )
    hardware = _of_launch(hardware_here(run.config.hardware, run.device, run.launch), run.device, run.launch)

    @cache
    def allowed_as(role: str, layout: CallLayout, trained: bool) -> bool:
        return not any(call_violations(layout, run.roles[role], trained=trained))

    def allowed(call: ModelCall, layout: CallLayout) -> bool:
        alike = replace(layout.of_weights, ranks=())
        return not call.role or allowed_as(call.role, alike, call.kind == "train_step")

    return Question(
        run.graph,
        _shapes(run.roles),
        _workload(run),
        hardware,
        run.launch.world_size,
        options,
        staleness=run.config.staleness,
        allowed=allowed,
    )


def _of_launch(hardware: Hardware, device: torch.device, launch: Launch) -> Hardware:
    """Return the hardware with the ranks per host of a launch, and no more memory than its devices have."""
    inner, *outer = hardware.tiers
    tiers = (replace(inner, devices=launch.local_world_size), *outer) if inner.devices else hardware.tiers
    memory = min(device_memory_bytes(device, launch.local_world_size), hardware.memory_bytes)
    return replace(hardware, tiers=tiers, memory_bytes=memory, host_devices=launch.local_world_size)


def _shapes(roles: dict[str, RoleSpec]) -> dict[str, ModelShape]:
    """Return the shapes of each role's model; roles of one model share them, which shortens predictions."""
    known: dict[str, ModelShape] = {}
    found = {}
    for role, spec in roles.items():
        if violation := formula_violation(spec.source, spec.config):
            raise ValueError(f"the {role}'s model: {violation}")
        key = repr((spec.source, spec.config.to_dict()))
        if key not in known:
            known[key] = model_shape(model_facts(spec.source, spec.config), spec.config)
        found[role] = known[key]
    return found


def _workload(run: Unplanned) -> Workload:
    """Return the lengths of the first step's samples; a response that is generated has as many as it may."""
    drawn = example_indices(0, run.drawn, len(run.examples), run.config.seed)
    examples = [run.examples[index] for index in drawn]
    group, limit = run.graph.group_size, run.config.max_new_tokens
    if run.algorithm.data == "prompts":
        prompts = tuple(len(example.prompt) for example in examples for _ in range(group))
        return Workload(prompts, (limit,) * len(prompts), group, limit)
    pairs = run.algorithm.data == "pairs"
    whole = [len(ids) for example in examples for ids, _ in sequences_of(example, run.tokenizer, pairs)]
    return Workload(tuple(length - 1 for length in whole), (1,) * len(whole), 2 if pairs else 1, 1)
