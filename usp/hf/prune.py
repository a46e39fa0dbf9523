"""Pruning of a transformers model to the layers of one pipeline stage.

The whole model is built on the meta device, and modules of other stages are removed before memory is allocated.
Parameters keep their names on every stage, such as "model.layers.7.self_attn.q_proj.weight".
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification


class OtherStagesLayer(nn.Module):
    """Placeholder for a layer of another stage, without parameters; returns hidden states unchanged."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def head_name(model: PreTrainedModel) -> str:
    """Return the name of the output head's module."""
    return "score" if isinstance(model, GenericForSequenceClassification) else "lm_head"


def prune_to_stage(model: PreTrainedModel, layers: range, first: bool, last: bool) -> None:
    """Remove the modules of other stages from a model, in place.

    Keeps `layers`, the embedding on the first stage, and the final norm and the head on the last. The other layers are
    replaced by `OtherStagesLayer` at their index.

    Raises:
        ValueError: if the model ties its head to its embedding, or `layers` are not consecutive layers of it.
    """
    backbone = cast(Any, model.base_model)
    if model.config.tie_word_embeddings and head_name(model) == "lm_head" and not (first and last):
        raise ValueError(
            f"{type(model).__name__} ties its output head to its embedding (tie_word_embeddings), which would be on "
            f"different stages: use one stage"
        )
    if not (0 <= layers.start < layers.stop <= len(backbone.layers) and layers.step == 1):
        raise ValueError(f"{layers} must be consecutive ones of the model's {len(backbone.layers)} layers")
    for index in range(len(backbone.layers)):
        if index not in layers:
            backbone.layers[index] = OtherStagesLayer()
    if not first:
        backbone.embed_tokens = None
    if not last:
        backbone.norm = nn.Identity()
        setattr(model, head_name(model), None)
