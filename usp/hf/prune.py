"""The parts of a transformers model, and its pruning to those of one pipeline stage.

The whole model is built on the meta device, and modules of other stages are removed before memory is allocated.
Parameters keep their names on every stage, such as "model.layers.7.self_attn.q_proj.weight".

Where the head is tied to the embedding, the first stage has the embedding, and the last a copy of it as its head.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PreTrainedModel

HANDED = ("position_ids", "cu_seqlens", "prefix_tree", "prefix", "kv_cache")


class OtherStagesLayer(nn.Module):
    """Placeholder for a layer of another stage, without parameters; returns hidden states unchanged.

    received: returned instead, once: what the stage before sent. What the base model does to its inputs before its
        layers, such as scaling embeddings, the first stage has done.
    layer: whose place it takes; its attributes that are text, such as its kind, are kept.
    outputs: how many values the layer returns in a tuple; 0 if it returns only hidden states.
    """

    received: Tensor | None = None

    def __init__(self, layer: nn.Module, outputs: int = 0) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(layer).items() if isinstance(value, str)})
        self.outputs = outputs

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        if self.received is not None:
            hidden_states, self.received = self.received, None
        return (hidden_states, *[None] * (self.outputs - 1)) if self.outputs else hidden_states


class FirstStagesPositions(nn.Module):
    """Placeholder for learned positions, without parameters; hidden states of the first stage have them already."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


@dataclass(frozen=True)
class ModelParts:
    """The parts by which a model is divided into stages: names of modules in its decoder, and of its `head`.
    positions: learned embeddings of positions, which are added to that of the ids."""

    embedding: str
    positions: tuple[str, ...]
    layers: str
    norm: str
    head: str


def backbone(model: PreTrainedModel) -> Any:
    """Return the model below the output head, which returns hidden states: itself, if it has no head."""
    from transformers import PreTrainedModel

    inner = model._modules.get("language_model")
    if isinstance(inner, PreTrainedModel) and inner.get_output_embeddings() is not None:  # Llama 4
        return backbone(inner)
    return model.base_model if model.base_model is not model else model._modules.get("model", model)


def decoder(model: PreTrainedModel) -> Any:
    """Return the module that has the embedding, the layers and the norm: the backbone, or in it the decoder (OPT) or
    the language model beside an encoder of images."""
    base = backbone(model)
    return base._modules.get("language_model") or base._modules.get("decoder") or base


def name_of(model: nn.Module, part: nn.Module) -> str:
    """Return the name of a module of a model."""
    return next(name for name, module in model.named_modules() if module is part)


def hand_on(outer: nn.Module, inner: nn.Module) -> None:
    """Let `inner` take what `outer`, whose forward calls it, takes of `HANDED` and does not pass on. Not by hooks:
    a layer that is recomputed does not run them again."""
    held: dict[str, Any] = {}
    outer_forward, inner_forward = outer.forward, inner.forward

    @wraps(outer_forward)
    def hold(*args: Any, **kwargs: Any) -> Any:
        held.update({name: kwargs[name] for name in HANDED if name in kwargs})
        try:
            return outer_forward(*args, **kwargs)
        finally:
            held.clear()

    @wraps(inner_forward)
    def take(*args: Any, **kwargs: Any) -> Any:
        return inner_forward(*args, **{**held, **kwargs})

    outer.forward, inner.forward = hold, take


def stage_inputs(model: PreTrainedModel, x: Tensor, first: bool) -> dict[str, Tensor]:
    """Return the arguments by which the base model takes `x`: ids on the first stage, else hidden states (B, S, H)."""
    if first:
        return {"input_ids": x}
    for before, layer in pairwise(getattr(decoder(model), model_parts(model).layers)):
        if isinstance(before, OtherStagesLayer) and not isinstance(layer, OtherStagesLayer):
            before.received = x
    return {"inputs_embeds": x}


def model_parts(model: PreTrainedModel) -> ModelParts:
    """Find the parts of a model with an output head, by what they are rather than by their names. Raises ValueError,
    naming what the model lacks."""
    known = getattr(model, "parts", None)
    if isinstance(known, ModelParts):  # of a stage, which lacks some
        return known
    from transformers.modeling_layers import GenericForSequenceClassification

    base, depth = decoder(model), model.config.get_text_config().num_hidden_layers
    names, before, after = dict[str, str](), list[str](), list[str]()
    for name, module in base.named_children():
        if module is base.get_input_embeddings():
            names["an embedding of ids"] = name
        elif isinstance(module, nn.ModuleList) and len(module) == depth:
            names["a list of layers"] = name
        elif "norm" in type(module).__name__.lower():
            (after if "a list of layers" in names else before).append(name)
    if norms := [*before[-1:], *after[:1]]:
        names["a norm after its layers"] = norms[-1]  # that it comes last, the probe verifies
    scalar = isinstance(model, GenericForSequenceClassification)
    output = cast(Any, model).score if scalar else model.get_output_embeddings()
    for name, module in model.named_children():
        if module is output and isinstance(module, nn.Linear):
            names["an output head"] = name
    wanted = ("an embedding of ids", "a list of layers", "a norm after its layers", "an output head")
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"{type(model).__name__} lacks {', '.join(missing)}, by which it would be divided into stages")
    embedding, layers, norm, head = (names[name] for name in wanted)
    others = ((name, module) for name, module in base.named_children() if name != embedding)
    positions = tuple(name for name, module in others if isinstance(module, nn.Embedding))
    return ModelParts(embedding, positions, layers, norm, head)


def prune_to_stage(model: PreTrainedModel, layers: range, first: bool, last: bool, outputs: int = 0) -> None:
    """Remove the modules of other stages from a model, in place.

    Keeps `layers`, the embeddings on the first stage, and the final norm and the head on the last. The other layers are
    replaced by `OtherStagesLayer` at their index. See `tied_ends` for a head that is tied to the embedding.

    outputs: of its layers, as in `OtherStagesLayer`.

    Raises ValueError if the model shares other parameters between stages, or has other parts than these.
    """
    base, parts = decoder(model), model_parts(model)
    stack = getattr(base, parts.layers)
    aliases: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[parameter].append(name)
    tied = aliases[getattr(base, parts.embedding).weight]
    ends = tied if len(tied) == 2 and f"{parts.head}.weight" in tied else []
    for index in range(len(stack)):
        if index not in layers:
            stack[index] = OtherStagesLayer(stack[index], outputs)
    if not first:
        setattr(base, parts.embedding, None)
        for name in parts.positions:
            setattr(base, name, FirstStagesPositions())
    if not last:
        setattr(base, parts.norm, nn.Identity())
        setattr(model, parts.head, None)
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    parted = [names for names in aliases.values() if names != ends and 0 < len(present & {*names}) < len(names)]
    if parted:
        shared = "; ".join(" and ".join(names) for names in parted)
        raise ValueError(f"{shared} of {type(model).__name__} are one parameter, but on different stages: use pp=1")
    model.parts = parts  # type: ignore[assignment]
    if first != last:
        model.tied_ends = {name: ends[0] for name in ends if name in present}  # type: ignore[assignment]


def tied_ends(model: nn.Module) -> dict[str, str]:
    """Return {name: name under which it is stored} of a stage's parameter that another stage has a copy of. That is the
    embedding of the first stage, or the head of the last, stored as that embedding."""
    return getattr(model, "tied_ends", {})
