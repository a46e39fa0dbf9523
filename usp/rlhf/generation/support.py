"""Which models `Generator` supports, found from what they do."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from usp.hf.models import ModelConfig, empty_model, model_facts
from usp.hf.stage import logit_transform
from usp.hf.structure.probe import MaskKind, structure


def generation_problems(config: ModelConfig) -> str:
    """Return why responses cannot be generated with the causal LM of `config`; empty if they can.

    Raises:
        ValueError: if a tiny copy of the model cannot be run, so that nothing is known.
    """
    if config.get_text_config() is not config:
        return "its text model is one of several parts: save and use that alone"
    model: Any = empty_model(config, causal=True)
    found = structure(type(model), model.config)
    problems = [*found.problems, *cache_problems({mask.kind for mask in found.masks.values()})]
    try:
        logit_transform(model)
    except (AttributeError, ValueError) as error:
        problems.append(str(error))
    try:
        model_facts("", config)
    except Exception as error:  # of any kind: it is transformers' code that runs
        problems.append(f"its configuration does not give one size for all layers: {error}")
    return "; ".join(problems)


def cache_problems(masks: Collection[MaskKind]) -> list[str]:
    """Return why a model with these kinds of masks cannot go on from cached keys and values."""
    return ["its attention sees later tokens"] if "bidirectional" in masks else []
