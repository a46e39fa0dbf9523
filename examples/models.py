"""Which models of transformers run with sequence parallelism, and why others do not: a table.

python -m examples.models                                # docs/models.md, in some minutes
python -m examples.models --types gemma3_text,gpt_oss
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from tyro.conf import arg

from usp.hf.images import TRAINED, sees_images
from usp.hf.models import ModelConfig, empty_model, model_facts, training_problems
from usp.hf.probe import structure
from usp.hf.shrink import dropouts, shrink
from usp.hf.tensor_parallel import tp_problems
from usp.model.facts import FAMILIES
from usp.rlhf.generation.generate import generation_problems
from usp.run.launch import leave
from usp.run.tables import Grid

# By model type: a public repository, `source`, and fields of its `config` that differ from transformers' defaults.
RELEASES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("releases.json").read_text())

HEADING = """# Models

Every type of causal language model in transformers {version}, and those that train.py trains with images: accepted by
`apply_unified_sp`, which is then exact on any ring x ulysses mesh, or refused with the reason. A model is accepted for
what its layers do, not for its name: a tiny copy of it runs once on all tokens and once on some of them
(`usp/hf/probe.py`). Its configuration is that of the release in the second column where that differs from transformers'
defaults in what matters here (`examples/releases.json`), else the default. "No tiny copy" means that this gives no
decoder that runs on text alone; another configuration may. Numbers of the configuration at which something may begin
are tried below and above the copy's few tokens; "not tried at a length" are those that the copy cannot have below. What
begins at a constant in the code, such as `if length > 4096`, the copy does not reach: of types whose code compares the
number of tokens with one, "exact" holds below it. "With ... set to 0" names dropout of the configuration, with which
`apply_unified_sp` refuses it. An indexer in the list chooses the keys that each query attends to, a compressor makes
further keys of windows of tokens (see [sparse attention](guides/sparse.md)).

The next column says whether train.py trains it: a model with an embedding, layers, a norm and a head. It names the
degrees that divide the model besides data and sequence parallelism; ep divides experts that go through transformers'
`ExpertsInterface`, and tp of a mixture of experts needs `--tp-sequence-parallel`. `--disable-dropout` is named where
the configuration has dropout, which would depend on the layout, and which `apply_unified_sp` refuses too. Buffers that
checkpoints hold, such as the biases by which routers choose experts, are saved with the weights and not trained. The
last column says whether it generates responses, token for token as transformers does, on sharded ranks. rlhf.py takes
models that do both; `usp cost` knows {known}.

"With images" are models of several parts that train.py trains as a whole ([images](guides/vision.md)). The text model
of the others is trained as one of its own. `model.get_decoder().save_pretrained(folder)` writes it if its head is tied
to its embedding, as in Gemma 3; with a head of its own:

```python
text = AutoModelForCausalLM.from_config(model.config.get_text_config())
text.base_model.load_state_dict(model.get_decoder().state_dict())
text.get_output_embeddings().load_state_dict(model.get_output_embeddings().state_dict())
text.save_pretrained(folder)
```

This file is written by `python -m examples.models > docs/models.md`.
"""
LONGEST = 160  # characters of a reason


def causal_lm_types() -> list[str]:
    """Return the model types of causal LMs in the installed transformers."""
    return sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING})


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return a tiny configuration of a decoder as a release sets it, by `releases.json`, else as transformers does."""
    release = AutoConfig.for_model(model_type, **copy.deepcopy(RELEASES.get(model_type, {}).get("config", {})))
    config = shrink(release, layers=4)
    for part in (config, config.get_text_config()):
        if "is_decoder" in vars(part):
            part.is_decoder = True
    return config


@dataclass(frozen=True)
class ModelsConfig:
    """Print a Markdown table of model types: their masks, or why they are refused. All of them take some minutes."""

    types: Annotated[str, arg(metavar="TYPE,TYPE,...", help_behavior_hint="(default: all)")] = ""
    """Model types of transformers, such as gemma3_text,gpt_oss."""


def table(types: Iterable[str]) -> Grid:
    head = ("model type", "as in", "", "attention and recurrent layers, or reason", "train.py", "generation")
    return Grid("", head, tuple(map(_row, types)))


def _row(model_type: str) -> tuple[str, ...]:
    found, why = verdict(model_type)
    source = RELEASES.get(model_type, {}).get("source", "")
    if found != "exact":
        return model_type, source, found, why, "", ""
    config = tiny_config(model_type)
    trained, dropped = training_problems(config, images=True), dict(dropouts(config))
    if trained and dropped:
        why += f"; with {' and '.join(dropped)} set to 0"
    if not trained:
        flags = "; with `--disable-dropout`" if dropped else ""
        degrees = () if sees_images(config) else _degrees(config)
        trained = f"yes{', with images' * sees_images(config)}: {', '.join(degrees)}".removesuffix(": ") + flags
    return model_type, source, found, why, trained, generation_problems(config) or "yes"


def _degrees(config: ModelConfig) -> Iterator[str]:
    model = empty_model(config, causal=True)
    if model_facts("", config).in_stages:
        yield "pp"
    if not all(tp_problems(model, 2, shared) for shared in (False, True)):
        yield "tp"
    if (facts := model_facts("", config)).num_experts and facts.divides_experts:
        yield "ep"


def verdict(model_type: str) -> tuple[str, str]:
    """Return "exact" and the masks, recurrent layers and untried numbers of a type as `tiny_config` has it, or
    "refused" and why."""
    try:
        config = tiny_config(model_type)
        kind: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
        with torch.device("meta"):
            model = kind.from_config(config)
        known = structure(type(model), model.config)
    except Exception as error:  # of any kind: it is transformers' code that runs
        cause = error.__cause__ or error
        return "refused", f"No tiny copy: {type(cause).__name__}: {_cell(str(cause))}"
    if known.problems:
        return "refused", _cell("; ".join(known.problems))
    parts = *(mask.kind for mask in known.masks.values()), *known.mixers, *known.indexers
    kinds = ", ".join(dict.fromkeys(parts))
    return "exact", kinds + (f"; not tried at a length: {', '.join(known.untried)}" if known.untried else "")


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def main(argv: Sequence[str]) -> int:
    """Print the table that `argv` asks for; return 0, or 1 after printing which types are unknown."""
    asked = tyro.cli(ModelsConfig, args=argv, prog="python -m examples.models")
    known = sorted({*causal_lm_types(), *TRAINED})
    types = [name.strip() for name in asked.types.split(",")] if asked.types else known
    if unknown := sorted(set(types) - set(known)):
        print(
            f"error: types={', '.join(unknown)}: transformers {version('transformers')} has no such model",
            file=sys.stderr,
        )
        return 1
    try:
        print(HEADING.format(version=version("transformers"), known=", ".join(FAMILIES)))
        print(table(types).markdown(), end="")
    except BrokenPipeError:  # the reader of the output, such as `head`, has gone
        pass
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
