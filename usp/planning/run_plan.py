"""The plan of a run: searched before its first step (--plan search), and between steps (--replan) by what calls took
and what a change costs: the exact reallocations of weights and optimizer states in `usp.rlhf.runtime.copies`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from rich.console import Console

from usp.fields import shared_values
from usp.model.facts import weight_layout
from usp.parallel import ReallocPlan, plan_realloc, realloc_seconds
from usp.parallel.cluster.links import level_between
from usp.parallel.reallocation.realloc_plan import BUCKET_BYTES
from usp.predict.compute import dtype_name
from usp.predict.devices import hardware_here, of_launch
from usp.rlhf.checkpoints import running_plan
from usp.rlhf.config import SEARCH
from usp.rlhf.datasets import example_indices, sequences_of
from usp.rlhf.graph import ModelCall
from usp.rlhf.plan.operations import kept_copies, trained_copy, weight_copies
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, from_mapping, optimizer_of, to_mapping
from usp.rlhf.prepare import PreparedRlhf
from usp.rlhf.replanning import Factors, MeasuredStep, ReplanOptions
from usp.rlhf.role_specs import call_violations
from usp.run.failures import ConfigurationError
from usp.run.output import working
from usp.train.tuning import Decision

from .call_cost import CallOptions
from .corrections import Corrections, Measured
from .estimates import layout_key
from .question import from_rank_0
from .rlhf_question import RlhfQuestion, answer, model_shapes, render_choice
from .rlhf_search import baselines, search
from .workload import Workload

_WIDTH = 150  # of what is printed, at least: logs of torchrun report 80 columns
_STATES = 3  # the float32 tensors of a trained parameter: its values and two moments, sharded alike


@dataclass
class SearchedPlan:
    """The planner of a run, which searches once, or takes the plan of the run that is resumed: what the run prepares
    again, as after its supervised steps, gets the same plan."""

    _plan: ExecutionPlan | None = None

    def __call__(self, run: PreparedRlhf) -> ExecutionPlan:
        """Return the same plan on every rank, collectively through torchrun's store; raise ValueError on every rank for
        unknown hardware, models without formulas, and if no plan fits."""
        if self._plan is None:
            if run.launch.world_size > 1 and run.launch.agent_store is None:
                raise ValueError(
                    f"--plan = {SEARCH} hands its plan to all ranks through torchrun's store: start with torchrun, or "
                    f"give the file that python -m usp rlhf-plan --out writes"
                )
            self._plan = from_mapping(from_rank_0(run.launch, "rlhf-plan", lambda: _searched(run)))
        return self._plan


def _searched(run: PreparedRlhf) -> dict[str, Any]:
    """Return the plan as plain values, and say on screen what it is."""
    if resumed := running_plan(run.saved, run.config, run.launch.world_size):
        print(f"plan: that of the run, from {run.start.checkpoint}", flush=True)
        return to_mapping(resumed)
    print(f"plan: searching for {run.launch.world_size} ranks", flush=True)
    try:
        with working("searching a plan") as say:
            choice = answer(question_of(run), seed=run.config.seed, budget=run.config.search_budget, say=say)
    except ValueError as error:
        raise ValueError(f"--plan = {SEARCH}: {error}") from error
    Console(width=max(Console().width, _WIDTH)).print(render_choice(choice))
    return to_mapping(choice.plan)


def question_of(run: PreparedRlhf) -> RlhfQuestion:
    """Return the question of a run: the samples of its first step, with responses of --max-new-tokens; raise ValueError
    for hardware that is unknown, does not connect all ranks or lacks the dtype, and for models without formulas."""
    config, dtype = run.config, run.roles[next(iter(run.graph.trained_roles))].dtype
    hardware = of_launch(hardware_here(config.hardware, run.device, run.launch), run.device, run.launch)
    level_between(hardware, 0, run.launch.world_size - 1)
    hardware.peak(dtype_name(dtype))

    @cache
    def allowed_as(role: str, layout: CallLayout, trained: bool) -> bool:
        return not any(call_violations(layout, run.roles[role], trained=trained))

    def allowed(call: ModelCall, layout: CallLayout) -> bool:
        return not call.role or allowed_as(call.role, replace(layout.of_weights, ranks=()), call.kind == "train_step")

    own = {"dtype": dtype, "kernel": config.attention_kernel, "cuda_graphs": not config.eager_decoding}
    return RlhfQuestion(
        graph=run.graph,
        models=model_shapes({role: (spec.source, spec.config) for role, spec in run.roles.items()}),
        workload=_workload(run),
        hardware=hardware,
        world_size=run.launch.world_size,
        options=CallOptions(**shared_values(config, CallOptions) | own),
        allowed=allowed,
    )


def _workload(run: PreparedRlhf) -> Workload:
    """Return the lengths of the first step's samples; a response that is generated has as many as it may."""
    examples = [run.examples[index] for index in example_indices(0, run.drawn, len(run.examples), run.config.seed)]
    group, limit = run.graph.group_size, run.config.max_new_tokens
    if run.algorithm.data == "prompts":
        prompts = [len(example.prompt) for example in examples for _ in range(group)]
    else:
        pairs = run.algorithm.data == "pairs"
        prompts = [len(ids) - 1 for example in examples for ids, _ in sequences_of(example, run.tokenizer, pairs)]
        group, limit = 2 if pairs else 1, 1
    return Workload(tuple(prompts), (limit,) * len(prompts), group, limit)


def moves(question: RlhfQuestion, before: ExecutionPlan, after: ExecutionPlan) -> Iterator[tuple[ReallocPlan, int]]:
    """Yield the reallocations between two plans, of trained copies and of untrained ones that only `after` has, each
    with the number of tensors per parameter that it runs for."""
    graph, options = question.graph, {"bucket_bytes": BUCKET_BYTES, "ranks_per_host": question.ranks_per_host}
    stay = kept_copies(graph, before, after)
    for role in graph.roles:
        model, trains, layouts = question.models[role], graph.train_call(role) is not None, []
        dtype = torch.float32 if trains else question.options.dtype
        for plan, without in ((before, ()), (after, stay)):  # of the copies that have their values between steps
            copies = [c for c in weight_copies(graph, plan) if c.role == role and c not in without]
            at = [c.layout for c in copies if trained_copy(graph, plan, role) in (None, c)]
            layouts.append([weight_layout(model, each.dims, each.ranks, dtype=dtype, zero=each.zero) for each in at])
        held, wanted = layouts
        for target in wanted:
            yield plan_realloc(held[0], target, copies=held[1:], **options), _STATES if trains else 1


@dataclass(frozen=True, eq=False)
class SearchingPlanner:
    """A `usp.rlhf.replanning.Replanner` that searches from the running plan and the named ones."""

    question: RlhfQuestion  # of the run; a step has other lengths
    options: ReplanOptions
    seed: int
    completed: Callable[[ExecutionPlan], ExecutionPlan]  # returns a plan with what is not searched as the run has it

    def __call__(
        self, running: ExecutionPlan, measured: Sequence[MeasuredStep], factors: Factors
    ) -> tuple[Decision[ExecutionPlan], Factors]:
        """See `Replanner`. Lengths are expected to stay as those of the last step."""
        begin, number, load = time.perf_counter(), measured[-1].number, self.question.workload
        questions = [replace(self.question, workload=replace(load, **vars(step.lengths))) for step in measured]
        corrections = Corrections(factors).after(
            Measured(call, layout_key(layout), seconds, question.estimates.formula(call, layout))
            for step, question in zip(measured, questions, strict=True)
            for call, layout in running.calls.items()
            if (seconds := step.seconds.get(call))
        )
        question = replace(questions[-1], corrections=corrections)
        try:
            problem = question.problem()
        except ValueError as error:  # by prediction nothing fits, and yet the plan runs
            return Decision(number, 0, running, 0.0, 0.0, why_not=str(error)), corrections.factors
        running_seconds = problem.simulator.run(running).seconds
        best, best_seconds, why_not = running, running_seconds, ""
        named = [one.plan for one in baselines(problem, question.space, question.facts) if one.plan]
        seed, starts = self.seed + number, [running, *named]
        for _, found in search(problem, seed=seed, budget=self.options.budget, starts=starts).best:
            plan = self.completed(found)
            if (seconds := problem.simulator.run(plan).seconds) >= running_seconds:
                break
            why_not = next(plan.violations(question.graph, question.world_size), "")
            best, best_seconds = plan, seconds
            if not why_not:
                break
        moved = list(moves(question, running, best))
        decision = Decision(
            number,
            0,
            best,
            running_seconds,
            best_seconds,
            self.options.gain,
            nbytes=sum(times * plan.total_bytes for plan, times in moved),
            switch_seconds=sum(times * realloc_seconds(plan, question.hardware).total for plan, times in moved),
            search_seconds=time.perf_counter() - begin,
            why_not=why_not,
        )
        return decision, corrections.factors


def run_planner(prepared: PreparedRlhf) -> SearchingPlanner:
    """Return what `train_rlhf` needs for --replan; raise ConfigurationError as `question_of`."""
    config, graph = prepared.config, prepared.graph
    names = ("micro_batch_tokens", "sp_layout", "mlp_tile", "loss_chunk")
    weights = set(graph.roles) - set(graph.trained_roles) if config.offload else set()
    states = list(map(optimizer_of, graph.trained_roles)) if config.offload_optimizer else []

    def completed(plan: ExecutionPlan) -> ExecutionPlan:
        same = {call: {name: getattr(prepared.plan[call], name) for name in names} for call in plan.calls}
        calls = {call: replace(layout, **same[call]) for call, layout in plan.calls.items()}
        return ExecutionPlan(plan.name, calls, plan.offload.union(weights, states))

    try:
        return SearchingPlanner(question_of(prepared), ReplanOptions.parse(config.replan), config.seed, completed)
    except ValueError as error:
        raise ConfigurationError(f"--replan = {config.replan}: {error}") from error
