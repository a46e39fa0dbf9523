"""What a model is in numbers, and the FLOPs of a training step of it.

They are those of the mathematics, counted once: a causal mask counts its visible half, a document and a window
count what they let through, and recomputation counts nothing. A multiply-add is two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelFacts:
    """The numbers of a causal language model that configuration checks and FLOPs need.

    windows: for each layer, how many positions back a query sees, itself included; 0 means all of them.
    num_experts: of each mixture-of-experts layer; 0 for a dense model.
    dense_mlps: whether some layer has an MLP of `intermediate_size` rather than experts.
    router_jitter: width of the random factor on what a router of experts reads in training; 0 for none.
    tied: whether the output head is the embedding.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int, ...]
    intermediate_size: int = 0
    dense_mlps: bool = True
    num_experts: int = 0
    router_jitter: float = 0.0
    tied: bool = False


def visible_pairs(cu_seqlens: torch.Tensor, window: int) -> int:
    """How many (query, key) pairs a causal mask shows, over rows of packed documents.

    cu_seqlens: (rows, documents + 1). `window` as in `ModelFacts.windows`.
    """
    lengths = cu_seqlens.diff(dim=-1).to(torch.int64)
    seen = lengths if not window else lengths.clamp(max=window)
    # the first `seen` queries of a document see 1, 2, ... seen keys; the later ones see `seen` each
    return int((seen * (seen + 1) // 2 + (lengths - seen) * seen).sum())


def training_flops(facts: ModelFacts, *, matmul_parameters: int, tokens: int, cu_seqlens: torch.Tensor) -> int:
    """FLOPs of forward and backward for one batch of `tokens` tokens in packed rows `cu_seqlens`.

    matmul_parameters: weights that multiply every token (the embedding table does not, the output head does).
    """
    weights = 6 * matmul_parameters * tokens
    pairs = {window: visible_pairs(cu_seqlens, window) for window in set(facts.windows)}
    # per pair and head: 2 * head_dim for the score, 2 * head_dim for the sum of values; the backward takes twice that
    attention = sum(12 * facts.num_heads * facts.head_dim * pairs[window] for window in facts.windows)
    return weights + attention
