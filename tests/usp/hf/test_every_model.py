"""Every causal LM type of the installed transformers: exact on a ring x ulysses mesh, or refused with a reason."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaModel,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from examples import models
from tests.harness.ranks import RankPool, on_first_rank
from usp import apply_unified_sp, shard_batch
from usp.hf.probe import structure
from usp.hf.shrink import VOCAB, shrink
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh
from usp.sp.sequence import SpAxes

TYPES = models.causal_lm_types()
# State spaces, full, sliding and chunked masks, sinks, softcap, learned positions from 0 and from 1, experts, scales
# that grow, two calls in a layer; keys chosen by an indexer in some layers, windows in others. More are trained in
# ../train/families/test_families.py.
CHOSEN = ["bamba", "gpt2", "gpt_oss", "diffllama", "roberta", "dots3_note_text"]  # others: test_held_out.py
# Configurations as larger releases set them: in full layers, fewer KV heads, whose keys are the values as well.
_GEMMA4 = {"attention_k_eq_v": True, "head_dim": 256, "global_head_dim": 512, "use_bidirectional_attention": "vision"}
_GEMMA4 |= {"sliding_window": 1024, "final_logit_softcapping": 30.0}
_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


def _heads(hidden_size: int, layers: int, *heads: int) -> dict[str, int]:
    names = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": layers, "hidden_size_per_layer_input": 0}
    return sizes | dict(zip(names, heads, strict=True))


RELEASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-12B": ("gemma4_unified_text", _GEMMA4 | _heads(3840, 48, 16, 8, 1)),
    "gemma4-26B-A4B": ("gemma4_text", _GEMMA4 | _EXPERTS | _heads(2816, 30, 16, 8, 2)),
    "gemma4-31B": ("gemma4_text", _GEMMA4 | _heads(5376, 60, 32, 16, 4)),
}
LENGTH, CUTS = 32, [0, 11, 19, 32]
CALLS = [("zigzag", CUTS), ("striped", [0, LENGTH])]


def tiny_config(model_type: str) -> PretrainedConfig:
    """A tiny decoder without anything random, of a type or one of RELEASES."""
    if model_type in RELEASES:
        kind, fields = RELEASES[model_type]
        config = shrink(AutoConfig.for_model(kind, **fields), layers=4)
    else:
        config = models.tiny_config(model_type)
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if ("dropout" in name or name.endswith("pdrop") or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
        if "floor_scale" in vars(part):  # of Llama 4: where its queries begin to be scaled
            part.floor_scale = 4
        if "index_topk" in vars(part):  # fewer than the tokens of a document
            part.index_topk = 6
    if model_type == "zamba2":
        config.layer_types, config.hybrid_layer_ids = ["linear_attention", "hybrid"] * 2, [1, 3]
    return config


def tiny_model(model_type: str) -> PreTrainedModel:
    # With 0, Jamba's second and third expert for a token differ by rounding alone.
    torch.manual_seed({"jamba": 1}.get(model_type, 0))
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            # biases, of experts too, and sinks are zero, and scales are one
            if (tensor.dim() < 2 or name.endswith("bias")) and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
            if model_type.startswith("gemma4") and name.endswith("q_norm.weight"):
                tensor.mul_(0.2)  # what scales its scores: with 1, rounding grows tenfold in every step
    return model


def reason(model_type: str) -> str:
    """Why a type is refused; empty if it is not."""
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        return f"no tiny model: {type(error).__name__}"
    try:
        return "; ".join(structure(type(model), model.config).problems)
    except ValueError as error:
        return str(error)


def errors(model_type: str) -> list[tuple[float, float, float]]:
    """The relative errors of logits, loss and gradients for each of CALLS."""
    mesh = ParallelMesh.create(ParallelDims(ring=2, ulysses=2))
    return [error_of(model_type, mesh, layout, cuts) for layout, cuts in CALLS]


def error_of(model_type: str, mesh: ParallelMesh, layout: str, cuts: list[int]) -> tuple[float, float, float]:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % (VOCAB - 4) + 3
    logits, loss, wanted = on_first_rank(alone, model_type, ids, cuts)
    model = apply_unified_sp(tiny_model(model_type), mesh, layout)
    batch = {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor(cuts, dtype=torch.int32)}
    local = shard_batch(batch, mesh, layout)
    labels = local.pop("shift_labels")
    own_logits = model(**local, use_cache=False).logits
    share = causal_lm_loss(own_logits, labels, global_token_count(labels, mesh))
    share.backward()
    own_loss, axes = share.detach().clone(), SpAxes.of(mesh)
    dist.all_reduce(own_loss)
    gradients = summed_gradients(model)
    (positions,) = axes.positions(axes.layout(layout, LENGTH))
    return (
        relative(own_logits, logits[:, positions]),
        relative(own_loss, loss),
        relative(gradients, wanted),
    )


def alone(model_type: str, ids: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, loss and gradients of the unchanged model."""
    whole = tiny_model(model_type)
    logits, loss = plain(whole, ids, cuts)
    return logits.detach(), loss, torch.cat([gradient_of(parameter) for parameter in whole.parameters()])


def plain(model: PreTrainedModel, ids: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Each document alone through the unchanged model: all logits, and the mean loss, whose gradients are set."""
    parts, targets, total = [], 0, torch.zeros(())
    for begin, end in pairwise(cuts):
        logits = model(input_ids=ids[:, begin:end], use_cache=False).logits
        labels = ids[:, begin + 1 : end].flatten()
        total = total + torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        targets += len(labels)
        parts.append(logits)
    (total / targets).backward()
    return torch.cat(parts, dim=1), total.detach() / targets


def summed_gradients(model: PreTrainedModel) -> Tensor:
    gradients = torch.cat([gradient_of(parameter) for parameter in model.parameters()])
    dist.all_reduce(gradients)
    return gradients


def gradient_of(parameter: Tensor) -> Tensor:
    return (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()


def relative(own: Tensor, expected: Tensor) -> float:
    return ((own - expected).norm() / expected.norm()).item()


@pytest.fixture
def types(request: pytest.FixtureRequest) -> list[str]:
    return TYPES if request.config.getoption("--exhaustive") else CHOSEN


@pytest.mark.slow
def test_accepted_models_are_exact(ranks: RankPool, types: list[str]) -> None:
    accepted = [model_type for model_type in types if not reason(model_type)]
    assert not inexact(ranks, accepted)
    assert len(accepted) >= (110 if len(types) == len(TYPES) else len(CHOSEN))


@pytest.mark.slow
def test_larger_releases_and_layers_that_share_keys_are_exact(ranks: RankPool, exhaustive: bool) -> None:
    types = [*list(RELEASES)[:: 1 if exhaustive else 3], "gemma3n_text"]
    assert {name: why for name in types if (why := reason(name))} == {}
    assert not inexact(ranks, types)


def inexact(ranks: RankPool, types: list[str]) -> dict[str, Any]:
    """Return the errors of those types that are not exact on 2 x 2 ranks."""
    found = {model_type: ranks.run(errors, 4, model_type) for model_type in types}
    worst = {name: max(max(max(call) for call in of_rank) for of_rank in of_type) for name, of_type in found.items()}
    return {name: found[name] for name, error in worst.items() if not error <= 5e-6}


REFUSED = {
    "rwkv": "RwkvSelfAttention mix tokens outside of transformers' AttentionInterface",
    "falcon": "its attention does not go through transformers' AttentionInterface",
    "doge": "DogeAttention: its mask adds to the scores",
    "bart": "its layers depend on tokens, or on positions, that other ranks hold",
}


@pytest.mark.parametrize(("model_type", "why"), REFUSED.items())
@pytest.mark.slow(but=1)
def test_other_models_are_refused_with_what_stands_in_the_way(model_type: str, why: str) -> None:
    assert why in reason(model_type)


def applied(kind: type[PreTrainedModel], config: PretrainedConfig, **inputs: Tensor) -> str:
    """What is said about a tiny model when sequence parallelism is applied to it or, with `inputs`, in a forward."""
    mesh = ParallelMesh.create(ParallelDims())
    try:
        model = apply_unified_sp(kind(shrink(config, layers=2)), mesh)
        if inputs:
            batch = shard_batch({"input_ids": torch.arange(8).unsqueeze(0)}, mesh)
            model(**batch, **inputs)
    except ValueError as error:
        return str(error)
    return ""


def other_classes() -> dict[str, str]:
    # Other tests import this file with a transformers that has no such type.
    from transformers.models.dots3_note import Dots3NoteConfig, Dots3NoteForConditionalGeneration

    image = torch.zeros(1, 3, 16, 16)
    return {
        "t5": applied(T5ForConditionalGeneration, T5Config(dropout_rate=0.0)),
        "vit": applied(ViTForImageClassification, ViTConfig()),
        "dots3_note": applied(Dots3NoteForConditionalGeneration, Dots3NoteConfig()),
        "gemma3": applied(Gemma3ForConditionalGeneration, Gemma3Config(), pixel_values=image),
        "kinds": applied(Gemma3ForConditionalGeneration, Gemma3Config(), token_type_ids=torch.arange(8).unsqueeze(0)),
        "qwen2_vl": applied(Qwen2VLForConditionalGeneration, Qwen2VLConfig()),
        "qwen2_5_vl": applied(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig()),
    }


@pytest.mark.exhaustive
def test_models_of_other_kinds_are_accepted_or_refused_with_a_reason(ranks: RankPool) -> None:
    (said,) = ranks.run(other_classes, 1)
    assert "it is an encoder and a decoder" in said["t5"] and "it takes pixel_values" in said["vit"]
    assert "pixel_values is not supported: images come from shard_image_batch" in said["gemma3"]
    assert "token_type_ids is not supported: images come from shard_image_batch" in said["kinds"]
    assert said["qwen2_vl"] == said["qwen2_5_vl"] == said["dots3_note"] == ""


def hidden_states() -> tuple[Tensor, Tensor]:
    """Of a base model without a head, whole and sharded."""
    torch.manual_seed(0)
    model = LlamaModel(shrink(LlamaConfig(), layers=2))
    ids, mesh = torch.arange(16).unsqueeze(0) + 3, ParallelMesh.create(ParallelDims(ulysses=2))
    whole = model(ids).last_hidden_state
    batch = shard_batch({"input_ids": ids}, mesh)
    local = apply_unified_sp(model, mesh)(**batch).last_hidden_state
    return whole[:, batch["position_ids"][0]].detach(), local.detach()


def test_a_base_model_is_exact_without_a_head(ranks: RankPool) -> None:
    for whole, local in ranks.run(hidden_states, 2):
        assert relative(local, whole) <= 5e-6


@pytest.mark.slow
def test_models_whose_layers_take_more_than_hidden_states_are_not_divided() -> None:
    """Zamba's later layers take the embeddings too; Granite scales embeddings, which happens on the first stage."""
    for model_type, divided in (("granite", True), ("falcon_h1", True), ("zamba", False), ("nanochat", False)):
        config = tiny_config(model_type)
        assert structure(type(AutoModelForCausalLM.from_config(config)), config).in_stages == divided, model_type


def test_masks_are_found_by_layer() -> None:
    config = tiny_config("gemma3_text")
    config.layer_types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    found = structure(type(AutoModelForCausalLM.from_config(config)), config)
    assert [mask.kind for mask in found.masks.values()] == ["sliding", "causal", "causal", "sliding"]
    assert {mask.field for mask in found.masks.values()} == {"", "sliding_window"}
    chunked = tiny_config("llama4_text")
    found = structure(type(AutoModelForCausalLM.from_config(chunked)), chunked)
    assert [(mask.kind, mask.field) for mask in found.masks.values()].count(("chunked", "attention_chunk_size")) == 3
