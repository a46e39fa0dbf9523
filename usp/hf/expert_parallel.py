"""Expert parallelism for unmodified transformers models.

Registers an experts implementation with transformers' `ExpertsInterface`, which the model's configuration selects by
name. An experts module keeps its parameters, whose dim 0 counts experts: with ep > 1 they become DTensors sharded over
ep in that dim. Its attributes say how they are laid out:

    gate_up_proj (E, 2I, H), or without a gate up_proj (E, I, H); down_proj (E, H, I); transposed: the last two dims
    gate_up_proj_bias (E, 2I), or up_proj_bias (E, I); down_proj_bias (E, H)

T tokens of this rank, K experts per token, H hidden size, I an expert's intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def apply_ep(model: PreTrainedModel, mesh: ParallelMesh) -> None:
    """Shard the experts of a transformers causal LM over the ep axis, in place; leaves a dense model unchanged.

    Call it before FSDP; supports the meta device. Each rank must route different tokens: with tp, that requires
    Megatron's sequence parallelism. The experts' gradients cover the tokens of the rank's ep group and must be summed
    over efsdp and dp_replicate, as FSDP over `expert_modules` does.

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
        if experts_mesh.size() == 1:
            continue
        for name, whole in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(whole.detach(), experts_mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    if modules:
        model.set_experts_implementation(NAME)


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

    return mix_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        num_experts=module.num_experts,
        group=module.ep_group,
        experts=experts,
    )
