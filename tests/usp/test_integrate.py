"""What a transformers model asks for and sequence parallelism cannot honour is refused, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from parallel import ParallelDims, ParallelMesh
from parallel.testing import RankPool
from usp import apply_unified_sp, shard_batch

from .tiny import SIZES, packed_batch, tiny_model


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def refused_models() -> list[str]:
    mesh = ParallelMesh.create(ParallelDims())
    dropout = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, attention_dropout=0.1))
    dropout.config._attn_implementation = "eager"
    dropout.config.output_attentions = True
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9))
    twice = apply_unified_sp(tiny_model("llama"), mesh)
    return [
        refusal(apply_unified_sp, nn.Linear(1, 1), mesh),
        refusal(apply_unified_sp, gpt2, mesh),
        refusal(apply_unified_sp, dropout, mesh),
        refusal(apply_unified_sp, twice, mesh),
        refusal(apply_unified_sp, tiny_model("llama"), mesh, "strip"),
        refusal(apply_unified_sp, tiny_model("llama"), mesh, "zigzag", "falsh"),
    ]


def test_models_that_cannot_be_honoured(ranks: RankPool) -> None:
    kind, family, both, twice, layout, kernel = ranks.run(refused_models, 1)[0]
    assert "must be a transformers PreTrainedModel, not Linear" in kind
    assert "model_type='gpt2' is not among the families" in family
    assert "attention_dropout=0.1" in both and "output_attentions=True" in both
    assert "already has unified sequence parallel attention" in twice
    assert "layout='strip' must be one of" in layout
    assert "did you mean 'flash'?" in kernel


def too_many_ranks() -> str:
    config = LlamaConfig(**{**SIZES, "num_attention_heads": 2})
    return refusal(
        apply_unified_sp, AutoModelForCausalLM.from_config(config), ParallelMesh.create(ParallelDims(ulysses=4))
    )


def test_more_ulysses_ranks_than_heads(ranks: RankPool) -> None:
    assert all(
        "ulysses=4 exceeds the 2 query heads: 2 of 4 ranks would idle" in message
        for message in ranks.run(too_many_ranks, 4)
    )


def refused_forwards() -> dict[str, str]:
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    model = apply_unified_sp(tiny_model("llama"), mesh)
    good = shard_batch(packed_batch(0), mesh)
    labels = good.pop("shift_labels")
    model(**good, attention_mask=torch.ones_like(labels))  # a mask that hides nothing is no padding
    padding = torch.ones_like(labels)
    padding[:, -1] = 0

    def without(key: str) -> dict[str, torch.Tensor]:
        return {name: value for name, value in good.items() if name != key}

    cases = {
        "labels": {**good, "labels": labels},
        "padding": {**good, "attention_mask": padding},
        "4d mask": {**good, "attention_mask": torch.zeros(1, 1, 4, 4)},
        "no positions": without("position_ids"),
        "no borders": without("cu_seqlens"),
        "cache": {**good, "use_cache": True},
        "weights": {**good, "output_attentions": True},
        "unknown": {**good, "block_tables": labels},
    }
    messages = {name: refusal(model, **arguments) for name, arguments in cases.items()}
    model.config._attn_implementation = "sdpa"
    messages["unpatched"] = refusal(model, **good)
    return messages


def test_forwards_that_cannot_be_honoured(ranks: RankPool) -> None:
    found = ranks.run(refused_forwards, 2)[0]
    wanted = {
        "labels": "give shard_batch the labels",
        "padding": "attention_mask hides padding",
        "4d mask": "ready-made attention_mask",
        "no positions": "position_ids must be given",
        "no borders": "position_ids are not those of layout='zigzag' with the given cu_seqlens",
        "cache": "a KV cache",
        "weights": "output_attentions=True",
        "unknown": "block_tables is not known to unified_sp",
        "unpatched": "0 of 2 attention layers went through unified sequence parallelism",
    }
    assert {name: wanted[name] in message for name, message in found.items()} == dict.fromkeys(wanted, True), found
