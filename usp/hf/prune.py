"""A transformers causal LM, or one with a scalar head, cut down to the layers of one pipeline stage.

The model is built whole on the meta device, where it costs nothing, and what other stages hold is taken out before
anything is materialised. What stays keeps its name: "model.layers.7.self_attn.q_proj.weight" on whichever stage.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification


class OtherStagesLayer(nn.Module):
    """In the place of a layer that another stage has: no parameters, and hidden states go through untouched."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def head_name(model: PreTrainedModel) -> str:
    """What the module behind the final norm is called: a causal LM's head, or a scalar one."""
    return "score" if isinstance(model, GenericForSequenceClassification) else "lm_head"


def prune_to_stage(model: PreTrainedModel, layers: range, first: bool, last: bool) -> None:
    """Take everything out of a model that other stages hold, in place.

    Keeps `layers`, the embedding on the first stage, and the final norm and the head on the last one. The other layers
    become `OtherStagesLayer`s at their index.

    Raises:
        ValueError: if the model ties its head to its embedding, or has no such layers.
    """
    backbone = cast(Any, model.base_model)
    if model.config.tie_word_embeddings and head_name(model) == "lm_head" and not (first and last):
        raise ValueError(
            f"the embedding and the output head of {type(model).__name__} are one matrix (tie_word_embeddings), but "
            f"the first stage would hold one and the last stage the other: use one stage"
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
