"""Whether a model type of the installed transformers is exact with sequence parallelism, or why it is refused."""

from __future__ import annotations

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from .probe import structure
from .shrink import shrink

LONGEST = 160  # characters of a reason


def causal_lm_types() -> list[str]:
    """Return the model types of causal LMs in the installed transformers."""
    return sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return a tiny version of a type's default configuration, for a decoder."""
    config = shrink(AutoConfig.for_model(model_type), layers=4)
    for part in (config, config.get_text_config()):
        if "is_decoder" in vars(part):
            part.is_decoder = True
    return config


def verdict(model_type: str) -> tuple[str, str]:
    """Return "exact" and the masks and recurrent layers of a type's default configuration, or "refused" and why."""
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        found = structure(type(model), model.config)
    except Exception as error:  # of any kind: it is transformers' code that runs
        cause = error.__cause__ or error
        return "refused", f"No tiny copy: {type(cause).__name__}: {_cell(str(cause))}"
    if found.problems:
        return "refused", _cell("; ".join(found.problems))
    return "exact", ", ".join(dict.fromkeys((*(mask.kind for mask in found.masks.values()), *found.mixers)))


def _cell(text: str) -> str:
    """Return the beginning of a text as a cell of a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
