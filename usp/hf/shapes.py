"""Parameter shapes, read off an empty transformers model."""

from __future__ import annotations

import re

from torch import nn
from transformers import PretrainedConfig

from usp.model.facts import LayerShape, ModelFacts, ModelShape, ModuleNames, ParameterShape

from .experts import expert_modules
from .integrate import decoder_layers
from .models import empty_model, experts_per_token
from .prune import backbone, backbone_name, model_parts
from .tensor_parallel import tp_plan


def model_shape(facts: ModelFacts, config: PretrainedConfig) -> ModelShape:
    """Return the parameter shapes of the model of `config`, whose facts are `facts`. Builds it on the meta device.
    Supports models of `usp.hf.models.FAMILIES`, with the head of a causal LM or a scalar one."""
    model = empty_model(config)
    plan = [(re.compile(re.escape(name).replace(r"\*", r"[^.]+")), style) for name, style in tp_plan(model).items()]
    experts = {id(p) for module in expert_modules(model) for p in module.parameters()}
    names = {id(module): name for name, module in model.named_modules()}

    def shapes(module: nn.Module, routed: bool = False) -> tuple[ParameterShape, ...]:
        """Return the shapes of the experts, or of all other parameters."""
        of_kind = []
        for name, parameter in module.named_parameters():
            owner = f"{names[id(module)]}.{name}".rpartition(".")[0]
            style = next((style for pattern, style in plan if pattern.fullmatch(owner)), "replicated")
            if routed == (id(parameter) in experts):
                of_kind.append(ParameterShape(name, tuple(parameter.shape), "untouched" if routed else style))
        return tuple(of_kind)

    parts, base = model_parts(model), backbone_name(model)
    head = model.get_submodule(parts.head)
    known: dict[LayerShape, LayerShape] = {}
    layers = [LayerShape(shapes(layer), shapes(layer, routed=True)) for layer in decoder_layers(model)]
    return ModelShape(
        facts=facts,
        hidden_size=config.hidden_size,
        embedding=shapes(model.get_input_embeddings()),
        layers=tuple(known.setdefault(layer, layer) for layer in layers),
        norm=shapes(getattr(backbone(model), parts.norm)),
        head=() if facts.tied else shapes(head),
        experts_per_token=experts_per_token(config) if facts.num_experts else 0,
        names=ModuleNames(f"{base}.{parts.embedding}", f"{base}.{parts.layers}", f"{base}.{parts.norm}", parts.head),
    )
