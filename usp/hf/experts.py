"""The experts and routers of a model, by what transformers declares of them.

Experts under transformers' `ExpertsInterface` say in attributes how their parameters are laid out, and run a function
that is registered. Of a model with a load-balancing loss, `_can_record_outputs` names the routers and their logits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.utils.output_capturing import OutputRecorder

from .shrink import VOCAB, shrink

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PreTrainedModel

_PARAMETERS = {"gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold experts, which FSDP shards over (dp_replicate, efsdp) instead of fsdp."""
    # set by transformers' decorator use_experts_implementation
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


def router_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the routers of a model with a load-balancing loss, one per layer with experts."""
    recorder = _recorder(model)
    return [] if recorder is None else [m for m in model.modules() if isinstance(m, recorder.target_class)]


def expert_tables(model: nn.Module) -> list[tuple[torch.Tensor, int]]:
    """Return the tables of routers that look the experts of a token id up, (ids, chosen experts), and how many there
    are."""
    routers = [m for m in model.modules() if hasattr(m, "num_experts") and hasattr(m, "top_k")]
    buffers = [(x, cast(int, m.num_experts)) for m in routers for x in m.buffers(recurse=False) if x.dim() == 2]
    return [(x, experts) for x, experts in buffers if not x.is_floating_point()]


def logits_index(model: PreTrainedModel) -> int:
    """Return which of a router's outputs are its logits (T, E), the input of the load-balancing loss's softmax."""
    recorder = _recorder(model)
    return 0 if recorder is None else recorder.index


def has_balancing_loss(config: PretrainedConfig) -> bool:
    """Return whether transformers defines a load-balancing loss for the causal LM of `config`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return kind is not None and hasattr(sys.modules[cast(type, kind).__module__], "load_balancing_loss_func")


def expert_problems(model: PreTrainedModel, num_experts: int) -> list[str]:
    """Return why the experts of a causal LM, `num_experts` in each layer that has some, cannot be trained, if so."""
    modules = expert_modules(model)
    problems = []
    if others := ", ".join(_other_experts(model, modules)):
        problems.append(f"its experts ({others}) are modules of their own, which not every rank may call")
    if num_experts and has_balancing_loss(model.config) and _recorder(model) is None:
        problems.append("its load-balancing loss is of several kinds of routers")
    for kind, module in {type(module): module for module in modules}.items():
        parameters = dict(module.named_parameters())
        if unknown := sorted(parameters.keys() - _PARAMETERS):
            problems.append(f"its experts ({kind.__name__}) have parameters besides projections: {', '.join(unknown)}")
    sizes = {parameter.shape[0] for module in modules for parameter in module.parameters()}
    if sizes - {num_experts}:
        listed = " or ".join(map(str, sorted(sizes)))
        problems.append(f"its layers have {listed} experts, and its configuration says {num_experts}")
    if modules and not problems and _draws(model):
        problems.append("its layers draw random numbers in training, which would depend on the layout")
    return problems


def _other_experts(model: nn.Module, known: list[nn.Module]) -> list[str]:
    """Return the kinds of modules that hold a list of routed experts, outside of the interface: not those in which the
    experts share parameters, which are sharded as those of any other module are."""
    inside = {id(part) for experts in known for part in experts.modules()}
    above = {id(m) for m in model.modules() if any(id(part) in inside for part in m.modules())}
    kinds: dict[str, None] = {}
    seen: list[str] = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        holds = "expert" in last or "Expert" in type(module).__name__
        listed = any(isinstance(part, nn.ModuleList) for part in module.modules())
        if not holds or not listed or id(module) in above or "shared" in name or name.startswith(tuple(seen)):
            continue
        seen.append(f"{name}.")
        kinds[type(module).__name__] = None
    return list(kinds)


def _draws(model: PreTrainedModel) -> bool:
    """Return whether a tiny copy draws random numbers in training, as routers do that sample experts."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        tiny = cast(Any, type(model))._from_config(shrink(model.config, layers=4)).train()
        before = torch.get_rng_state()
        with torch.no_grad():
            tiny.base_model(input_ids=torch.arange(8).unsqueeze(0) % VOCAB, use_cache=False)
        return not torch.equal(before, torch.get_rng_state())


def _recorder(model: PreTrainedModel) -> OutputRecorder | None:
    """Return what transformers records as the logits of routers; None for a model without a load-balancing loss."""
    recorded = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    return recorded if isinstance(recorded, OutputRecorder) and has_balancing_loss(model.config) else None
