"""Expert parallelism for unmodified transformers models.

Registers an experts implementation with transformers' `ExpertsInterface`, which the model's configuration selects by
name. An experts module keeps its parameters gate_up_proj (E, 2I, H) and down_proj (E, H, I): with ep > 1 they become
DTensors sharded over ep in dim 0.

T tokens of this rank, K experts per token, H hidden size, I an expert's intermediate size, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from parallel import ParallelMesh, local_tensor
from parallel.expert import grouped_linear, mix_experts
from usp.model.rules import ep_violations

from .models import model_facts

NAME = "expert_parallel"
PARAMETERS = ("gate_up_proj", "down_proj")


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
        for name in PARAMETERS:
            whole = getattr(module, name)
            part = distribute_tensor(whole.detach(), experts_mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    if modules:
        model.set_experts_implementation(NAME)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold experts, which FSDP shards over (dp_replicate, efsdp) instead of fsdp."""
    return [module for module in model.modules() if isinstance(module, (MixtralExperts, Qwen3MoeExperts))]


def router_modules(model: nn.Module) -> list[nn.Module]:
    """Return the routers, one per layer; they output logits (T, E), weights (T, K) and chosen experts (T, K)."""
    return [module for module in model.modules() if isinstance(module, (MixtralTopKRouter, Qwen3MoeTopKRouter))]


def _experts_forward(module: nn.Module, hidden_TH: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
    """Run the experts of a layer; registered with `ExpertsInterface`."""
    gate_up_proj, down_proj = (local_tensor(getattr(module, name)) for name in PARAMETERS)

    def experts(rows_GH: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
        gated_GI = module._apply_gate(grouped_linear(rows_GH, gate_up_proj, rows_of_expert))  # type: ignore[operator]
        return grouped_linear(gated_GI, down_proj, rows_of_expert)

    return mix_experts(
        hidden_TH,
        top_k_index_TK,
        top_k_weights_TK,
        num_experts=module.num_experts,  # type: ignore[arg-type]
        group=module.ep_group,  # type: ignore[arg-type]
        experts=experts,
    )
