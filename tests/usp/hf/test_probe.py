"""The probe finds what begins at a length, wherever the number stands, and says which numbers it could not try."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2RotaryEmbedding
from transformers.models.phi.modeling_phi import PhiMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from examples.models import tiny_config, verdict
from usp.hf import probe
from usp.hf.integrate import rotary_switch
from usp.hf.probe import Structure, structure
from usp.hf.shrink import WINDOWS, large_numbers, shrink

AT = 4096  # the probe's few tokens never reach it
Change = Callable[[Tensor, int], Tensor]


def grown(x: Tensor, at: int) -> Tensor:
    steps = torch.floor((torch.arange(x.shape[1]) + 1) / at)
    return x * (1 + torch.log1p(steps)).view(1, -1, 1)


def windowed(x: Tensor, at: int) -> Tensor:
    return torch.cat((x[:, :-at] * 0, x[:, -at:]), dim=1)


def by_chunk(x: Tensor, at: int) -> Tensor:
    return x + 0.1 * (torch.arange(x.shape[1]) // at).view(1, -1, 1)


def switched(positions: Tensor, at: int) -> Tensor:
    return positions * (2 if positions.shape[-1] > at else 1)


def pooled(x: Tensor, at: int) -> Tensor:
    """Each block's mean added to its tokens; a last block that is not full stays as it is."""
    full = x.shape[1] // at * at
    means = x[:, :full].unflatten(1, (-1, at)).mean(2).repeat_interleave(at, dim=1)
    return torch.cat((x[:, :full] + means, x[:, full:]), dim=1)


def blocks_only(x: Tensor, at: int) -> Tensor:
    """The same for whole blocks, which fails for any other length beyond one."""
    return x if x.shape[1] < at else x + x.unflatten(1, (-1, at)).mean(2).repeat_interleave(at, dim=1)


PLANTED: dict[str, tuple[str, type[nn.Module], str, Change]] = {  # the model, and which argument of what is changed
    "scale": ("llama", LlamaAttention, "hidden_states", grown),
    "window": ("qwen2", Qwen2MLP, "", windowed),
    "chunk": ("gemma", GemmaMLP, "", by_chunk),
    "rope switch": ("olmo2", Olmo2RotaryEmbedding, "position_ids", switched),
    "block": ("phi", PhiMLP, "", pooled),
    "whole blocks": ("phi", PhiMLP, "", blocks_only),
}


def plant(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], argument: str, change: Callable[..., Tensor]) -> None:
    forward: Any = kind.forward

    @wraps(forward)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if argument in kwargs:
            kwargs[argument] = change(self, kwargs[argument])
        elif argument == "position_ids":
            args = (args[0], change(self, args[1]))
        else:
            args = (change(self, args[0]), *args[1:])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", changed)


def found(model_type: str, **fields: Any) -> Structure:
    config = tiny_config(model_type)
    config.update(fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return structure(type(model), model.config)


@pytest.mark.parametrize("what", PLANTED)
def test_what_begins_at_a_length_of_the_configuration_is_found(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    model_type, kind, argument, change = PLANTED[what]
    assert not found(model_type, planted=AT).problems
    # Rotary embeddings and attention have the configuration; MLPs of some types, too.
    plant(monkeypatch, kind, argument, lambda self, x: change(x, self.config.planted))
    (problem,) = found(model_type, planted=AT, what=what).problems
    assert "its layers depend on tokens" in problem or "its layers fail on a part" in problem or "mix tokens" in problem


@pytest.mark.parametrize("name", ["from_tokens", "token_limit", "layer_window_begins", "layers_limit"])
@pytest.mark.slow(but=2)
def test_numbers_of_any_name_are_tried(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, LlamaAttention, "hidden_states", lambda self, x: windowed(x, getattr(self.config, name)))
    assert "its layers depend on tokens" in found("llama", **{name: AT}).problems[0]


def test_ids_vocabularies_and_numbers_of_layers_are_no_lengths() -> None:
    none = ("eos_token_id", "image_token_index", "bad_ids", "vocab_end", "rope_theta", "max_window_layers", "n_layer")
    assert [*large_numbers(dict.fromkeys((*none, "a_length"), AT), probe.LENGTH)] == ["a_length"]


OPTIONS: dict[str, Callable[[LlamaAttention, int], Any]] = {
    "scaling": lambda module, tokens: module.head_dim**-0.5 * (1.5 if tokens > module.config.planted else 1),
    "softcap": lambda module, tokens: 30.0 if tokens > module.config.planted else None,
    "s_aux": lambda module, tokens: torch.full((4,), float(tokens > module.config.planted)),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_attention_that_changes_with_the_length_is_found(
    monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Of which queries, keys and values say nothing."""
    forward: Any = LlamaAttention.forward

    def changed(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        value = OPTIONS[option](self, hidden_states.shape[1])
        if option == "scaling":
            self.scaling = value
        else:
            kwargs[option] = value
        return forward(self, hidden_states, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", changed)
    (problem,) = found("llama", planted=AT, option=option).problems
    assert problem == f"LlamaAttention's {option} depends on the tokens of a forward"


def test_a_window_that_begins_beyond_a_length_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number lowered, it is there for every length that the copy runs."""

    def window(self: Any, mask: Tensor) -> Tensor:
        query, key = torch.arange(mask.shape[-1]).unsqueeze(1), torch.arange(mask.shape[-1])
        near = query - key < WINDOWS["sliding_window"]
        return mask & near if mask.shape[-1] > self.config.planted else mask

    plant(monkeypatch, LlamaAttention, "attention_mask", window)
    (problem,) = found("llama", planted=AT, other=AT, what="window").problems
    assert problem == "its masks depend on whether there are more tokens than planted"


def test_tokens_that_are_counted_are_found_whatever_the_number_in_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, LlamaAttention, "hidden_states", lambda self, x: grown(x, AT))
    assert "its layers depend on tokens" in found("llama", planted="in the code").problems[0]


@pytest.mark.slow
def test_numbers_that_cannot_be_lowered_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("gpt2").untried == ()  # no sequence is longer than its table of positions

    def at_least(self: Any, x: Tensor) -> Tensor:
        assert self.config.planted >= AT
        return x

    plant(monkeypatch, LlamaAttention, "hidden_states", at_least)
    assert found("llama", planted=AT, other=AT).untried == ("planted",)


def test_of_a_refused_type_copies_are_not_built_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blenderbot does not run with its numbers lowered, and is refused with none of them lowered."""
    built, build = list[Any](), vars(probe)["_structure_of"]

    def counted(*args: Any) -> Structure:
        built.append(args)
        return build(*args)

    monkeypatch.setattr(probe, "_KNOWN", {})
    monkeypatch.setattr(probe, "_structure_of", counted)
    assert verdict("blenderbot-small")[0] == "refused" and len(built) == 2


def test_a_scale_that_switches_at_a_length_follows_documents() -> None:
    """Phi-3.5-MoE's rotary embeddings scale by the longest position, whatever their type."""
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    config = shrink(AutoConfig.for_model("phimoe", rope_parameters=rope | {"short_mscale": 1.1, "long_mscale": 1.2}), 2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert structure(type(model), model.config).problems == ()
    assert rotary_switch(config) == 4096
