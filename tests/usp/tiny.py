"""Tiny transformers models, packed data, and the training step of one plain process, shared by tests."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

VOCAB, ROWS, SEQ_LEN, STEPS, MAX_NORM = 96, 4, 64, 10, 0.5
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-tied": lambda: LlamaConfig(
        **SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=11),
    "qwen2": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
}


def tiny_model(family: str, implementation: str = "eager") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=implementation)


def optimiser(model: torch.nn.Module) -> torch.optim.AdamW:
    # With the default eps the first steps are the sign of gradients near zero, and rounding decides that.
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)


def packed_batch(step: int) -> dict[str, Tensor]:
    """Rows of documents of random lengths, with labels that are ignored at random: more in the first rows."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, SEQ_LEN), generator=generator)
    cuts = [torch.randperm(SEQ_LEN - 1, generator=generator)[:3].add(1).sort().values.tolist() for _ in range(ROWS)]
    labels = ids.clone()
    ignored = torch.tensor([0.6, 0.3, 0.1, 0.0]).unsqueeze(1)
    labels[torch.rand(ROWS, SEQ_LEN, generator=generator) < ignored] = -100
    cu_seqlens = torch.tensor([[0, *cut, SEQ_LEN] for cut in cuts], dtype=torch.int32)
    return {"input_ids": ids, "labels": labels, "cu_seqlens": cu_seqlens}


def train_alone(family: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step on one process: eager attention under explicit masks, a mean cross-entropy."""
    model = tiny_model(family)
    optimizer, history = optimiser(model), []
    for step in range(STEPS):
        batch = packed_batch(step)
        position = torch.arange(SEQ_LEN)
        document = torch.stack([torch.bucketize(position, cu[1:].long(), right=True) for cu in batch["cu_seqlens"]])
        same = document.unsqueeze(2) == document.unsqueeze(1)
        distance = position.unsqueeze(1) - position
        seen = same & (distance >= 0)
        masks = {"full_attention": _float(seen), "sliding_attention": _float(seen)}
        window = getattr(model.config, "sliding_window", None)
        if window is not None:
            masks["sliding_attention"] = _float(seen & (distance < window))
        starts = torch.stack([cu.long()[doc] for cu, doc in zip(batch["cu_seqlens"], document, strict=True)])
        mask = masks if family.startswith("qwen") else masks["sliding_attention"]
        out = model(input_ids=batch["input_ids"], position_ids=position - starts, attention_mask=mask, use_cache=False)
        targets = batch["labels"][:, 1:].masked_fill(document[:, 1:] != document[:, :-1], -100)
        loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


def _float(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf")).unsqueeze(1)
