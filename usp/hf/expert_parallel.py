"""Expert parallelism for unmodified transformers models.

Registers an experts implementation with transformers' `ExpertsInterface`, which the model's configuration selects by
name. An experts module keeps its parameters, whose dim 0 counts experts: with ep > 1 they become DTensors sharded over
ep in that dim. Its attributes say how they are laid out:

    gate_up_proj (E, 2I, H), or without a gate up_proj (E, I, H); down_proj (E, H, I); transposed: the last two dims
    gate_up_proj_bias (E, 2I), or up_proj_bias (E, I); down_proj_bias (E, H)

T tokens of this rank, K experts per token, H hidden size, I an expert's intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from parallel import ParallelMesh, local_tensor
from parallel.expert import grouped_linear, mix_experts
from usp.model.rules import ep_violations

from .models import model_facts
from .structure.experts import expert_modules

NAME = "expert_parallel"


def apply_ep(model: PreTrainedModel, mesh: ParallelMesh, tp_sequence_parallel: bool = True) -> None:
    """Shard the experts of a transformers causal LM over the ep axis, in place; leaves a dense model unchanged.

    Call it before FSDP; supports the meta device. Ranks that have the same tokens, as tp ranks without Megatron's
    sequence parallelism, route a part of them each and gather the results, which supports no gradients. The experts'
    gradients cover the tokens of the rank's ep group and must be summed over efsdp and dp_replicate, as FSDP over
    `expert_modules` does.

    Raises:
        ValueError: naming all `ep_violations`.
    """
    experts_mesh = mesh.expert_mesh("ep")
    violations = ep_violations(model_facts(model.config.model_type, model.config), experts_mesh.size())
    if violations:
        raise ValueError("; ".join(violations))
    modules = expert_modules(model)
    ExpertsInterface.register(NAME, _experts_forward)
    for module in modules:
        module.ep_group = experts_mesh.get_group()  # type: ignore[assignment]
        module.ep_replicas = () if tp_sequence_parallel else (mesh.group("tp"),)  # type: ignore[assignment]
        if experts_mesh.size() == 1:
            continue
        for name, whole in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(whole.detach(), experts_mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    if modules:
        model.set_experts_implementation(NAME)


@contextmanager
def same_tokens(experts: Sequence[Any], groups: tuple[dist.ProcessGroup, ...]) -> Iterator[None]:
    """Run forwards of experts in which the ranks of `groups`, outermost first, have the same tokens."""
    usual = [module.ep_replicas for module in experts]
    for module in experts:
        module.ep_replicas = groups
    try:
        yield
    finally:
        for module, before in zip(experts, usual, strict=True):
            module.ep_replicas = before


def serve_experts(experts: Sequence[Any]) -> None:
    """Take part in a forward of the other ranks of the ep groups, without tokens."""
    for module in experts:
        weight = local_tensor(module.down_proj)
        hidden_size = weight.shape[2 if module.is_transposed else 1]
        tokens = torch.empty(0, hidden_size, dtype=weight.dtype, device=weight.device)
        _experts_forward(module, tokens, torch.empty(0, 1, dtype=torch.int64, device=weight.device), tokens[:, :1])


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of a layer on (T, H), (T, K), (T, K); registered with `ExpertsInterface`."""

    def linear(name: str, rows_GX: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
        weight = local_tensor(getattr(module, name))
        bias = local_tensor(getattr(module, f"{name}_bias")) if module.has_bias else None
        return grouped_linear(rows_GX, weight.transpose(1, 2) if module.is_transposed else weight, rows_of_expert, bias)

    def experts(rows_GH: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
        if module.has_gate:
            inner_GI = module._apply_gate(linear("gate_up_proj", rows_GH, rows_of_expert))
        else:
            inner_GI = module.act_fn(linear("up_proj", rows_GH, rows_of_expert))
        return linear("down_proj", inner_GI, rows_of_expert)

    def mix(hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        group, number = module.ep_group, module.num_experts
        return mix_experts(hidden_TH, index_TK, weights_TK, num_experts=number, group=group, experts=experts)

    replicas = [group for group in module.ep_replicas if group.size() > 1]
    if module.ep_group.size() == 1 or not replicas:
        return mix(hidden_states, top_k_index, top_k_weights)
    return _divided(mix, replicas, hidden_states, top_k_index, top_k_weights)


def _divided(mix: Callable[..., Tensor], groups: Sequence[dist.ProcessGroup], *tokens: Tensor) -> Tensor:
    """Return `mix` of tokens that the ranks of `groups`, outermost first, all have: each mixes a part of them."""
    part, parts, total = 0, 1, len(tokens[0])
    for group in groups:
        part, parts = part * group.size() + dist.get_rank(group), parts * group.size()
    size = -(-total // parts)
    own = slice(min(part * size, total), min((part + 1) * size, total))
    mixed = mix(*(x[own] for x in tokens))
    mixed = torch.cat((mixed, mixed.new_zeros(size - len(mixed), mixed.shape[1])))
    for group in reversed(groups):
        gathered = [torch.empty_like(mixed) for _ in range(group.size())]
        dist.all_gather(gathered, mixed, group=group)
        mixed = torch.cat(gathered)
    return mixed[:total]
