"""Tiny vision-language models, and packed batches of documents with zero, one and several images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from usp.hf.prune import backbone

VOCAB, IMAGE = 96, 95
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "depth": 2,
    "patch_size": 2,
    "out_hidden_size": 64,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "patch_size": 2}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4)
DELTA |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
QWEN3_5 = {**DELTA, "layer_types": ["linear_attention", "full_attention"]}
QWEN3_5 |= {"rope_parameters": {**AXES["rope_parameters"], "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}}
DEEPSTACK = {**VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
GLM = {**VISION, "image_size": 16}
HALF = {"rope_parameters": {**AXES["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
SLIDING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
SIGLIP = {**TOWER, "image_size": 8, "vision_use_head": False}
SIGLIP16 = {**SIGLIP, "image_size": 16}
BLOCKS = {"layer_types": ["minimax_m3_sparse", "full_attention"], "index_n_heads": 2, "index_head_dim": 16}
BLOCKS |= {"index_block_size": 4, "index_topk_blocks": 3}
BLOCKS |= {"dense_intermediate_size": 48, "shared_intermediate_size": 24}

# By model type: fields of the text's configuration, of the encoder's, and of the whole.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (AXES, {**VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, {}),
    "qwen2_5_vl": (AXES, {**VISION, "window_size": 8, "fullatt_block_indexes": [1]}, {}),
    "qwen3_vl": (AXES, DEEPSTACK, {}),
    "qwen3_vl_moe": (AXES | EXPERTS, DEEPSTACK, {}),
    "qwen3_5": (QWEN3_5, {**VISION, "num_position_embeddings": 64}, {}),
    "qwen3_5_moe": (
        QWEN3_5 | EXPERTS | {"shared_expert_intermediate_size": 24},
        {**VISION, "num_position_embeddings": 64},
        {},
    ),
    "glm4v": (AXES, GLM, {}),
    "glm4v_moe": (
        HALF | EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        GLM,
        {},
    ),
    "glm46v": ({"model_type": "glm4v_text", **AXES}, {"model_type": "glm4v_vision", **GLM}, {}),
    "gemma3": (SLIDING, SIGLIP, {"mm_tokens_per_image": 16}),
    "gemma4": (
        SLIDING
        | {
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "global_head_dim": 32,
        },
        {**TOWER, "head_dim": 8, "num_key_value_heads": 4, "pooling_kernel_size": 2, "position_embedding_size": 64},
        {},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {**TOWER, "image_size": [16, 16], "patch_size": [2, 2]},
        {"image_seq_length": 16},
    ),
    "llama4": (
        {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 16, "no_rope_layers": [1, 0]},
        {
            **TOWER,
            "image_size": 16,
            "intermediate_size": 128,
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
        {},
    ),
    "llava": (
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", **TOWER, "image_size": 8},
        {"image_seq_length": 16},
    ),
    "vipllava": (
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", **TOWER, "image_size": 8},
        {"vision_feature_layers": [-1, -2]},
    ),
    "glm_ocr": ({"model_type": "glm_ocr_text", **AXES}, GLM, {}),
    "minimax_m3_vl": (
        BLOCKS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        TOWER,
        {"projector_hidden_size": 40},
    ),
    "aya_vision": ({"model_type": "cohere2", **SLIDING}, {"model_type": "siglip_vision_model", **SIGLIP16}, {}),
    "cohere2_vision": (
        {"model_type": "cohere2", **SLIDING},
        {"model_type": "siglip_vision_model", **SIGLIP16},
        {"alignment_intermediate_size": 48},
    ),
}
# Documents as lengths of text and, as strings, numbers of images: none, one, and several.
ROWS = (((7,), (3, "0", 5), (2, "1", 1, "2", 4)), ((9, "3", 11), (4,)))


def tiny_config(kind: str, vocab: int = VOCAB, image: int = IMAGE, layer_types: Sequence[str] = ()) -> PretrainedConfig:
    """Return the configuration of `tiny_vlm`."""
    text, vision, whole = FAMILIES[kind]
    kinds = {"layer_types": [*layer_types], "num_hidden_layers": len(layer_types)} if layer_types else {}
    return AutoConfig.for_model(
        kind,
        text_config={**TEXT, **text, **kinds, "vocab_size": vocab},
        vision_config=vision,
        image_token_id=image,
        tie_word_embeddings=False,
        **whole,
    )


def tiny_vlm(kind: str, vocab: int = VOCAB, image: int = IMAGE, layer_types: Sequence[str] = ()) -> PreTrainedModel:
    """Return a model of a type with random weights, the same on all ranks. image: the id of its tokens for images.
    layer_types: of its layers, if not those of `FAMILIES`."""
    torch.manual_seed(0)
    config = tiny_config(kind, vocab, image, layer_types)
    model = AutoModelForImageTextToText.from_config(config, experts_implementation="eager").double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # first weights of some encoders are zero, and hide errors
            parameter.add_(torch.randn_like(parameter) * 0.05)
            if name.endswith("A_log"):
                parameter.sub_(4)  # states that last for many tokens
    return model


def images_of(
    model: PreTrainedModel, sizes: Sequence[tuple[int, int]] = ()
) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Return four images as a processor does, and their numbers of tokens, which the model finds. sizes: (height,
    width) of each where these may differ, in merged or pooled patches."""
    torch.manual_seed(1)
    config, images = model.config.vision_config, list[dict[str, Tensor]]()
    if model.config.model_type == "gemma4":
        pool, patch = config.pooling_kernel_size, 3 * config.patch_size**2
        for height, width in [(h * pool, w * pool) for h, w in sizes or ((2, 2), (4, 4), (2, 3), (1, 1))]:
            places = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), -1)
            padding = torch.full((16 * pool**2 - height * width, 2), -1)
            places = torch.cat((places.reshape(-1, 2), padding)).unsqueeze(0)
            images.append({"pixel_values": torch.rand(1, 16 * pool**2, patch).double(), "image_position_ids": places})
    elif hasattr(config, "spatial_merge_size"):
        pixels, merge = 3 * config.temporal_patch_size * config.patch_size**2, config.spatial_merge_size
        for h, w in [(h * merge, w * merge) for h, w in sizes or ((2, 2), (4, 7), (2, 3), (1, 2))]:
            grid = torch.tensor([[1, h, w]])
            images.append({"pixel_values": torch.randn(h * w, pixels).double(), "image_grid_thw": grid})
    else:
        height, width = [config.image_size] * 2 if isinstance(config.image_size, int) else config.image_size
        images = [{"pixel_values": torch.randn(1, 3, height, width).double()} for _ in range(4)]
    return images, [_features(model, image) for image in images]


@torch.no_grad()
def _features(model: PreTrainedModel, image: dict[str, Tensor]) -> int:
    owner = backbone(model) if hasattr(backbone(model), "get_image_features") else model
    output: Any = type(owner).get_image_features(owner, **image)  # not that of a sharded model
    found = output.last_hidden_state if output.get("pooler_output") is None else output.pooler_output
    return sum(x.flatten(0, -2).shape[0] for x in (found if isinstance(found, tuple | list) else (found,)))


def documents(
    model: PreTrainedModel, rows: Sequence[Sequence[Sequence[int | str]]] = ROWS, sizes: Sequence[tuple[int, int]] = ()
) -> list[list[dict[str, Tensor]]]:
    """Return the documents of each row, each a batch of its own, with labels for two thirds of its text. sizes: of
    images, as in `images_of`."""
    (images, tokens), placeholder = images_of(model, sizes), model.config.image_token_id
    generator = torch.Generator().manual_seed(2)
    found: list[list[dict[str, Tensor]]] = []
    for row in rows:
        found.append([])
        for parts in row:
            ids: list[int] = []
            used = [images[int(part)] for part in parts if isinstance(part, str)]
            for part in parts:
                number = part if isinstance(part, int) else 0
                drawn = torch.randint(1, placeholder, (number,), generator=generator).tolist()
                ids += drawn if isinstance(part, int) else [placeholder] * tokens[int(part)]
            input_ids = torch.tensor([ids])
            ignored = (input_ids == placeholder) | (torch.rand(input_ids.shape, generator=generator) < 1 / 3)
            media = {name: torch.cat([image[name] for image in used]) for name in (used[0] if used else ())}
            found[-1].append({"input_ids": input_ids, "labels": input_ids.masked_fill(ignored, -100), **media})
    return found


def packed(rows: Sequence[Sequence[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Return these documents as a batch."""
    length = max(sum(document["input_ids"].shape[1] for document in row) for row in rows)
    number = max(map(len, rows))
    batch: dict[str, Tensor] = {}
    for name, filler in (("input_ids", 0), ("labels", -100)):
        whole = torch.full((len(rows), length), filler)
        for place, row in enumerate(rows):
            joined = torch.cat([document[name][0] for document in row])
            whole[place, : len(joined)] = joined
        batch[name] = whole
    ends = [[document["input_ids"].shape[1] for document in row] for row in rows]
    ends = [row + [0] * (number - len(row)) for row in ends]
    batch["cu_seqlens"] = torch.nn.functional.pad(torch.tensor(ends).cumsum(1), (1, 0))
    every = [document for row in rows for document in row]
    for name in {name for document in every for name in document} - {"input_ids", "labels"}:
        batch[name] = torch.cat([document[name] for document in every if name in document])
    return batch


# The argument that tells images from text, by type.
_KINDS = dict.fromkeys(FAMILIES, "mm_token_type_ids")
_KINDS |= dict.fromkeys(
    ("internvl", "llama4", "llava", "vipllava", "aya_vision", "cohere2_vision", "minimax_m3_vl"), ""
)
_KINDS["gemma3"] = "token_type_ids"


def logits_alone(model: PreTrainedModel, rows: Sequence[Sequence[dict[str, Tensor]]]) -> list[list[Tensor]]:
    """Return the logits (tokens, vocabulary) of each document by itself, in one process, by transformers."""

    def logits(document: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in document.items() if name != "labels"}
        kinds = {_KINDS[model.config.model_type]: (inputs["input_ids"] == model.config.image_token_id).int()}
        kinds = {name: value for name, value in kinds.items() if name}
        found: Tensor = model(**inputs, **kinds, use_cache=False).logits[0]
        return found

    return [[logits(document) for document in row] for row in rows]


def loss_alone(model: PreTrainedModel, rows: Sequence[Sequence[dict[str, Tensor]]]) -> Tensor:
    """Return the mean loss of all labels in one process, by transformers, each document by itself."""
    logits = [x[:-1] for row in logits_alone(model, rows) for x in row]
    targets = torch.cat([document["labels"][0, 1:] for row in rows for document in row])
    return torch.nn.functional.cross_entropy(torch.cat(logits), targets, ignore_index=-100)
