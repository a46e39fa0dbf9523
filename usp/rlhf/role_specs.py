"""The models of an RLHF run by role, from the flags that name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from usp.fields import flag, shared_values
from usp.hf.models import (
    ModelHead,
    empty_model,
    load_model_config,
    model_facts,
    scalar_violation,
    without_dropout,
)
from usp.hf.tensor_parallel import tp_problems
from usp.model.facts import ep_violations, pp_violations
from usp.optimizers import AdamW
from usp.parallel import Violation, violation_of
from usp.presets import PRESETS
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.roles.role_model import RoleSpec
from usp.train.resolve import lora_of, lora_problems
from usp.train.validate import balance_violations

from .algorithms.algorithm import Algorithm
from .config import RlhfConfig
from .environments.ready_rewards import HTTP
from .graph import ROLES, DataflowGraph


def role_specs(config: RlhfConfig, algorithm: Algorithm, dtype: torch.dtype) -> dict[str, RoleSpec]:
    """Return the model of every role that a graph of `algorithm` may have, computing in `dtype`.

    Adapters are those of the actor. A critic trains all of its weights: its scalar head, which is new in most runs, is
    no linear that gets an adapter. There is no critic if it would be the actor with a scalar head, and transformers has
    none; see `missing_models`. Models of --models have a scalar head if they are reward models.

    Raises ValueError naming what cannot be loaded, and what cannot have adapters.
    """

    def spec(role: str, fields: tuple[str, ...], head: ModelHead, learning_rate: float) -> RoleSpec:
        """Load the first of `fields` that is set."""
        name = next((name for name in fields if getattr(config, name)), fields[-1])
        return load(role, getattr(config, name), f"{flag(name)} = {getattr(config, name)}", head, learning_rate)

    def load(role: str, source: str, shown: str, head: ModelHead, learning_rate: float) -> RoleSpec:
        new_head = head == "scalar" and source not in PRESETS and not _is_reward_model(source)
        try:
            model = without_dropout(load_model_config(source, head, new_head), config.disable_dropout)
        except ValueError as error:
            named = violation_of(error).shown(lambda name, value: shown if name == "model" else f"{name}={value}")
            raise ValueError(named) from error
        different = {
            "dtype": dtype,
            "optimizer": AdamW(config.weight_decay, betas=(0.9, 0.95)),
            "learning_rate": learning_rate,
            "kernel": config.attention_kernel,
            "balance": model_facts(source, model).balance(config.router_aux_loss_coef),
            "router_replay": config.router_replay and role == "actor",
        }
        return RoleSpec(role, source, model, new_head, **shared_values(config, RoleSpec) | different)

    actor = spec("actor", ("model",), "lm", config.learning_rate)
    if problems := list(lora_problems(config, actor.config)):
        raise ValueError("; ".join(problems))
    roles = {"actor": replace(actor, lora=lora_of(config, actor.config))}
    served = served_models(config)
    if "ref" not in served:
        roles["ref"] = spec("ref", ("ref", "model"), "lm", config.learning_rate)
    reward = "model" if algorithm.model_role == "reward" else "reward_model"
    if getattr(config, reward):
        roles["reward"] = spec("reward", (reward,), "scalar", config.learning_rate)
    if config.critic or config.reward_model or not scalar_violation(roles["actor"].config):
        roles["critic"] = spec("critic", ("critic", "reward_model", "model"), "scalar", config.critic_learning_rate)
    for role, source in ((role, of) for role, of in other_models(config.models).items() if role not in served):
        head: ModelHead = "scalar" if source not in PRESETS and _is_reward_model(source) else "lm"
        roles[role] = load(role, source, f"--models {role}={source}", head, config.learning_rate)
    return roles


def served_models(config: RlhfConfig) -> dict[str, str]:
    """Return the roles whose models a server has, with its url. Raises as `other_models`."""
    return {role: of for role, of in {"ref": config.ref, **other_models(config.models)}.items() if of.startswith(HTTP)}


def other_models(text: str) -> dict[str, str]:
    """Parse NAME=PATH,... of --models. Raises ValueError naming every part that is wrong."""
    models: dict[str, str] = {}
    problems = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, _, source = (side.strip() for side in part.partition("="))
        if not role.isidentifier() or not source:
            problems.append(f"{part!r} must be NAME=PATH")
        elif role in ROLES or role in models:
            problems.append(f"{role!r} {'is named twice' if role in models else 'has a flag of its own'}")
        models[role] = source
    if problems:
        raise ValueError(f"--models = {text}: {'; '.join(problems)}")
    return models


def missing_models(specs: dict[str, RoleSpec], graph: DataflowGraph) -> Iterator[str]:
    """Yield why a role of a graph has no model."""
    for role in graph.roles:
        if role not in specs and role != "critic":
            given = "--reward-model PATH" if role == "reward" else f"--models {role}=PATH"
            yield f"the role {role!r} has no model: name it with {given}"
    if "critic" in graph.roles and "critic" not in specs:
        why = f"cannot be the critic's initial model: {scalar_violation(specs['actor'].config)}"
        yield f"--model = {specs['actor'].source} {why}; name another with --critic, or use an algorithm without one"


def layout_violations(graph: DataflowGraph, plan: ExecutionPlan, specs: dict[str, RoleSpec]) -> Iterator[str]:
    """Yield why the model of a call cannot have the layout that the plan gives it."""
    calls: dict[Violation | str, str] = {}  # the first call with each violation
    for call in graph.calls:
        if call.role in specs:
            for text in call_violations(plan[call.name], specs[call.role], trained=call.kind == "train_step"):
                calls.setdefault(text, call.name)
    yield from (f"{name}: {text}" for text, name in calls.items())


def call_violations(layout: CallLayout, spec: RoleSpec, *, trained: bool) -> Iterator[Violation | str]:
    """Yield why a model cannot have a layout. trained: in a train step."""
    facts, dims = model_facts(spec.source, spec.config), layout.dims
    yield from ep_violations(facts, dims.ep)
    yield from pp_violations(facts, dims.pp)
    if dims.tp > 1:
        yield from tp_problems(empty_model(spec.config), dims.tp, layout.tp_sequence_parallel, trained)
    if trained and facts.num_experts and layout.zero == 0 and dims.ep * dims.tp > 1:
        yield f"zero=0 replicates every expert, but ep={dims.ep} x tp={dims.tp} ranks share them: use zero=1"
    if trained and spec.share_prefixes and spec.balance:
        loss = f"the load-balancing loss of {spec.source}, whose coefficient is {spec.balance}"
        yield f"share_prefixes counts a shared token once in {loss}: use router_aux_loss_coef=0, or leave it out"
    if spec.share_prefixes and facts.index_size:
        yield f"share_prefixes is not supported by {spec.source}, whose indexers choose keys by position: leave it out"
    if spec.share_prefixes and facts.compressed:
        yield f"share_prefixes is not supported by {spec.source}, whose compressed windows it would cut: leave it out"
    if layout.mlp_tile and facts.num_experts:
        yield f"mlp_tile={layout.mlp_tile} tiles dense MLPs, and those of {spec.source} are experts: remove it"


def _is_reward_model(directory: str) -> bool:
    try:
        load_model_config(directory, "scalar")
    except ValueError:
        return False
    return True


def router_violations(config: RlhfConfig, graph: DataflowGraph, specs: Mapping[str, RoleSpec]) -> Iterator[str]:
    """Yield why no trained model, or not each with experts, can have the load-balancing loss that flags ask for."""
    facts = [model_facts(specs[role].source, specs[role].config) for role in graph.trained_roles]
    for model in [each for each in facts if each.num_experts] or facts[:1]:
        yield from balance_violations(config, model)


def unused_models(config: RlhfConfig, algorithm: Algorithm, graph: DataflowGraph) -> Iterator[str]:
    """Yield which flags name a model that no call of the graph uses."""
    for name, role in (("critic", "critic"), ("ref", "ref"), ("reward_model", "reward")):
        unused = role not in graph.roles or role == algorithm.model_role
        if (value := getattr(config, name)) and unused and role not in served_models(config):
            yield f"{flag(name)} = {value} is not used by {config.algorithm} with these options: remove it"
    for role in other_models(config.models):
        if role not in (*graph.roles, *served_models(config)):
            roles = ", ".join(graph.roles)
            yield f"--models = {config.models}: {config.algorithm} has the roles {roles}, not {role!r}: remove it"
