"""Tiny transformers models, packed data, and a single-process training loop for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from usp.config import TrainConfig
from usp.hf.models import empty_model, materialise
from usp.hf.weights import initialise
from usp.parallel import ParallelMesh
from usp.train.engine import Engine
from usp.train.step import backward, sum_over_ranks

VOCAB, ROWS, SEQ_LEN, STEPS, MAX_NORM = 96, 4, 64, 10, 0.5
FEW_STEPS = 3  # where many grids are compared with one process; the third loss shows the optimizer's states
LEARNING_RATE, ADAM_EPS = 3e-3, 1e-4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
DEEP = SIZES | {"num_hidden_layers": 4}  # layers for four pipeline stages
EIGHT = SIZES | {"num_hidden_layers": 8, "initializer_range": 0.1}  # for eight; with 0.02 rounding grows in ten steps
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-4kv": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama-tied": lambda: LlamaConfig(
        **SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama-deep": lambda: LlamaConfig(**DEEP),
    "llama-eight": lambda: LlamaConfig(**EIGHT),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=11),
    "qwen2": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen2-deep": lambda: Qwen2Config(**DEEP, use_sliding_window=True, sliding_window=9, max_window_layers=2),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "qwen3-tied-deep": lambda: Qwen3Config(**DEEP, head_dim=8, tie_word_embeddings=True),
    "olmo2": lambda: Olmo2Config(**SIZES, initializer_range=0.2),
    "phi3": lambda: Phi3Config(**SIZES, pad_token_id=0, initializer_range=0.2),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=8),
    "mixtral-deep": lambda: MixtralConfig(**DEEP, num_local_experts=8),
    "mixtral-eight": lambda: MixtralConfig(**EIGHT, num_local_experts=8),
    # its first layer is dense, and its experts choose three of eight
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        mlp_only_layers=[0],
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
}


def tiny_model(family: str, implementation: str = "eager") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=implementation)


def drawn_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return the whole model on the CPU, initialized as every layout is."""
    model = empty_model(config)
    materialise(model, torch.device("cpu"))
    initialise(model, seed)
    return model


def optimiser(model: torch.nn.Module) -> torch.optim.AdamW:
    # With the default eps the first steps are the sign of gradients near zero, and rounding decides that.
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=ADAM_EPS)


def packed_batch(step: int) -> dict[str, Tensor]:
    """Return rows of documents of random lengths, with randomly ignored labels, more of them in the first rows."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, SEQ_LEN), generator=generator)
    cuts = [torch.randperm(SEQ_LEN - 1, generator=generator)[:3].add(1).sort().values.tolist() for _ in range(ROWS)]
    labels = ids.clone()
    ignored = torch.tensor([0.6, 0.3, 0.1, 0.0]).unsqueeze(1)
    labels[torch.rand(ROWS, SEQ_LEN, generator=generator) < ignored] = -100
    cu_seqlens = torch.tensor([[0, *cut, SEQ_LEN] for cut in cuts], dtype=torch.int32)
    return {"input_ids": ids, "labels": labels, "cu_seqlens": cu_seqlens}


def train_alone(
    family: str,
    steps: int = STEPS,
    aux_loss_coefficient: float = 0.0,
    parts: int = 1,
    change: Callable[[PreTrainedModel], None] = lambda model: None,
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step on one process, with eager attention under explicit masks.

    The auxiliary loss of a mixture of experts is the mean of those of `parts` of the batch, and part of the loss.
    `change` is called with the model before the first step.
    """
    model = tiny_model(family)
    change(model)
    return optimizer_steps(
        model, optimiser(model), steps, lambda step: loss_alone(model, packed_batch(step), aux_loss_coefficient, parts)
    )


def optimizer_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, loss_of: Callable[[int], Tensor]
) -> list[tuple[float, float]]:
    """Train on one process; return (loss, gradient norm) of each step. loss_of: the loss of a step."""
    history = []
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


def loss_alone(
    model: PreTrainedModel, batch: dict[str, Tensor], aux_loss_coefficient: float = 0.0, parts: int = 1
) -> Tensor:
    """Return the loss of a packed batch, with eager attention under explicit masks. Arguments as in `train_alone`."""
    routers = {"output_router_logits": True} if aux_loss_coefficient else {}
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
    mask = masks if model.config.model_type in ("qwen2", "qwen3") else masks["sliding_attention"]
    inputs = {"input_ids": batch["input_ids"], "position_ids": position - starts, "attention_mask": mask}
    out = model.model(**inputs, **routers, use_cache=False)
    logits = model.lm_head(out.last_hidden_state)
    targets = batch["labels"][:, 1:].masked_fill(document[:, 1:] != document[:, :-1], -100)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
    if aux_loss_coefficient:
        chosen = model.config.num_experts_per_tok
        for router_logits in zip(*(logits.chunk(parts) for logits in out.router_logits), strict=True):
            balance = load_balancing_loss_func(router_logits, model.config.num_experts, chosen)
            loss = loss + aux_loss_coefficient * balance / parts
    return loss


def _float(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf")).unsqueeze(1)


def loss_and_norm(
    engine: Engine, mesh: ParallelMesh, batch: Mapping[str, Tensor], config: TrainConfig, rate: float
) -> tuple[float, float]:
    """Run one optimizer step; return the loss over all ranks and the gradient norm."""
    share = backward(engine, mesh, batch, config)
    (loss,) = sum_over_ranks([share.item()], mesh, share.device)
    return loss, engine.step(rate, config.max_grad_norm)


def train_step(
    engine: Engine, mesh: ParallelMesh, batch: Mapping[str, Tensor], config: TrainConfig, learning_rate: float
) -> float:
    """Run one optimizer step, whatever its loss; return the gradient norm before clipping. Collective."""
    backward(engine, mesh, batch, config)
    return engine.step(learning_rate, config.max_grad_norm)
