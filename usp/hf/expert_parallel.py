"""Expert parallelism inside unchanged transformers models.

transformers sends the experts of a mixture through a registry of functions (`ExpertsInterface`); it gets one entry,
found by the name in the model's configuration. An experts module keeps its three-dimensional parameters gate_up_proj
(E, 2I, H) and down_proj (E, H, I) under their names: with ep > 1 each rank holds those of E / ep experts, as a DTensor
sharded in dim 0.

T tokens of this rank, K choices of each, H hidden size, I an expert's intermediate size, E experts.
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
from usp.model.degrees import ep_violations

from .models import model_facts

NAME = "expert_parallel"
PARAMETERS = ("gate_up_proj", "down_proj")


def apply_ep(model: PreTrainedModel, mesh: ParallelMesh) -> None:
    """Spread the experts of a transformers causal LM over the ep axis, in place; a dense model stays as it is.

    Works on the meta device, before FSDP. Each rank must route tokens of its own: with tp, that needs Megatron's
    sequence parallelism. The experts' gradients cover the tokens of the rank's ep group: sum them over efsdp and
    dp_replicate, which FSDP over `expert_modules` does.

    Raises:
        ValueError: naming everything about the model that does not fit, see `ep_violations`.
    """
    experts_mesh = mesh.expert_mesh("ep")
    violations = list(ep_violations(model_facts(type(model).__name__, model.config), experts_mesh.size()))
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
    """The modules whose parameters are experts: FSDP shards them over (dp_replicate, efsdp), and not over fsdp."""
    return [module for module in model.modules() if isinstance(module, (MixtralExperts, Qwen3MoeExperts))]


def router_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that give (logits (T, E), weights (T, K), chosen experts (T, K)), a layer each."""
    return [module for module in model.modules() if isinstance(module, (MixtralTopKRouter, Qwen3MoeTopKRouter))]


def _experts_forward(module: nn.Module, hidden_TH: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
    """The registry's entry."""
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
