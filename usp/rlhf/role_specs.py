"""The models of an RLHF run by role, from the flags that name them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attention import AttentionSpec, select_kernel
from usp.config import flag
from usp.data.tokenizer import Tokenizer
from usp.hf.models import ModelHead, formula_violation, load_model_config, model_facts
from usp.presets import PRESETS
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.roles.role_spec import RoleSpec
from usp.train.engines.base import AdamW
from usp.train.resolve import lora_of, lora_problems

from .algorithms.algorithm import Algorithm
from .config import RlhfConfig


def role_specs(config: RlhfConfig, algorithm: Algorithm, dtype: torch.dtype) -> dict[str, RoleSpec]:
    """Return the model of every role that a graph of `algorithm` may have, computing in `dtype`.

    Adapters are those of the actor. A critic trains all of its weights: its scalar head, which is new in most runs, is
    no linear that gets an adapter.

    Raises:
        ValueError: naming what cannot be loaded, and what cannot have adapters.
    """

    def spec(role: str, fields: tuple[str, ...], head: ModelHead, learning_rate: float) -> RoleSpec:
        """Load the first of `fields` that is set."""
        name = next((name for name in fields if getattr(config, name)), fields[-1])
        source = getattr(config, name)
        new_head = head == "scalar" and source not in PRESETS and not _is_reward_model(source)
        try:
            model = load_model_config(source, head, new_head)
            if violation := formula_violation(source, model):
                raise ValueError(violation)
        except ValueError as error:
            raise ValueError(str(error).replace(f"model={source}", f"{flag(name)} = {source}", 1)) from error
        return RoleSpec(
            role,
            source,
            model,
            new_head=new_head,
            seed=config.seed,
            dtype=dtype,
            optimizer=AdamW(config.weight_decay, betas=(0.9, 0.95)),
            learning_rate=learning_rate,
            max_grad_norm=config.max_grad_norm,
            kernel=config.attention_kernel,
            loss_chunk=config.loss_chunk,
        )

    actor = spec("actor", ("model",), "lm", config.learning_rate)
    if found := list(lora_problems(config, actor.config)):
        raise ValueError("; ".join(found))
    roles = {"actor": replace(actor, lora=lora_of(config, actor.config))}
    roles["ref"] = spec("ref", ("ref", "model"), "lm", config.learning_rate)
    reward = "model" if algorithm.model_role == "reward" else "reward_model"
    if getattr(config, reward):
        roles["reward"] = spec("reward", (reward,), "scalar", config.learning_rate)
    roles["critic"] = spec("critic", ("critic", "reward_model", "model"), "scalar", config.critic_learning_rate)
    return roles


def _is_reward_model(directory: str) -> bool:
    try:
        load_model_config(directory, "scalar")
    except ValueError:
        return False
    return True


def kernel_choice(config: RlhfConfig, actor: RoleSpec, device: torch.device) -> str:
    """Return the line that names the attention kernel. Raises ValueError if the requested one is not supported."""
    facts = model_facts(actor.source, actor.config)
    spec, head_dims = AttentionSpec(), (facts.head_dim, facts.value_dim)
    return select_kernel(config.attention_kernel, spec, device, actor.dtype, *head_dims)[1]


def vocabulary_violations(specs: dict[str, RoleSpec], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield which models have a smaller vocabulary than the tokenizer."""
    for role, spec in specs.items():
        if tokenizer.vocab_size > spec.config.vocab_size:
            yield (
                f"--tokenizer = {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the vocabulary of the "
                f"{role} {spec.source} has {spec.config.vocab_size}: use the model's own tokenizer"
            )


def unused_models(config: RlhfConfig, algorithm: Algorithm, graph: DataflowGraph) -> Iterator[str]:
    """Yield which flags name a model that no call of the graph uses."""
    for name, role in (("critic", "critic"), ("ref", "ref"), ("reward_model", "reward")):
        if getattr(config, name) and (role not in graph.roles or role == algorithm.model_role):
            value = getattr(config, name)
            yield f"{flag(name)} = {value} is not used by {config.algorithm} with these options: remove it"
