"""A transformers model's configuration as a `ModelShape`."""

from __future__ import annotations

import re

from torch import nn
from transformers import PretrainedConfig

from usp.model.facts import ModelFacts
from usp.model.shapes import LayerShape, ModelShape, ParameterShape

from .expert_parallel import expert_modules
from .integrate import decoder_layers
from .models import empty_model
from .tensor_parallel import tp_plan


def model_shape(facts: ModelFacts, config: PretrainedConfig) -> ModelShape:
    """The shapes of the model that `config` describes, whose facts are `facts`; built on the meta device.

    Takes causal LMs of `usp.hf.integrate.FAMILIES`.
    """
    model = empty_model(config)
    plan = [(re.compile(re.escape(name).replace(r"\*", r"[^.]+")), style) for name, style in tp_plan(model).items()]
    experts = {id(p) for module in expert_modules(model) for p in module.parameters()}
    names = {id(module): name for name, module in model.named_modules()}

    def shapes(module: nn.Module) -> list[ParameterShape]:
        found = []
        for name, parameter in module.named_parameters():
            owner = f"{names[id(module)]}.{name}".rpartition(".")[0]
            style = next((style for pattern, style in plan if pattern.fullmatch(owner)), "replicated")
            found.append(
                ParameterShape(name, tuple(parameter.shape), "untouched" if id(parameter) in experts else style)
            )
        return found

    layers: list[LayerShape] = []
    known: dict[LayerShape, LayerShape] = {}
    for layer in decoder_layers(model):
        routed = {id(parameter): id(parameter) in experts for parameter in layer.parameters()}
        parts = list(zip(shapes(layer), routed.values(), strict=True))
        shape = LayerShape(
            tuple(part for part, expert in parts if not expert), tuple(part for part, expert in parts if expert)
        )
        layers.append(known.setdefault(shape, shape))
    return ModelShape(
        facts=facts,
        hidden_size=config.hidden_size,
        embedding=tuple(shapes(model.get_input_embeddings())),
        layers=tuple(layers),
        norm=tuple(shapes(model.base_model.get_submodule("norm"))),
        head=() if facts.tied else tuple(shapes(model.get_output_embeddings())),
        experts_per_token=config.num_experts_per_tok if facts.num_experts else 0,
        expert_size=next((e.shape[-1] for layer in layers for e in layer.experts if e.name.endswith("down_proj")), 0),
    )
