"""What a model is in numbers, and what a training step of it costs: FLOPs, and the bytes that FSDP sends.

FLOPs are those of the mathematics, counted once: a causal mask counts its visible half, a document and a window
count what they let through, and recomputation counts nothing. A multiply-add is two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Dense bfloat16 tensor-core peak in FLOP/s, by a part of the device's name; the first match counts.
PEAK_BF16: tuple[tuple[str, float], ...] = (
    ("B300", 2250e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 150e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 5090", 209e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)


@dataclass(frozen=True)
class ModelFacts:
    """The numbers of a causal language model that configuration checks and FLOPs need.

    windows: for each layer, how many positions back a query sees, itself included; 0 means all of them.
    num_experts: of each mixture-of-experts layer; 0 for a dense model.
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


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak of a GPU in FLOP/s; None where it is not known, and for CPUs."""
    return next((peak for part, peak in PEAK_BF16 if part in device_name), None)


def fsdp_sent_bytes(
    *, block: int, root: int, itemsize: int, ranks: int, replicas: int, zero: int, micro_batches: int
) -> int:
    """Bytes that one rank sends in a step to keep parameters sharded as ZeRO stage `zero` does with FSDP2.

    Gathers, in `itemsize` bytes: in stage 3 the blocks' parameters for every forward and every backward and the
    root's once a micro-batch, in stages 1 and 2 all of them once a step. Gradients, in float32, are scattered over the
    `ranks` that share a copy (stages 2 and 3: every micro-batch), then summed over the `replicas` once a step.

    Args:
        block, root: parameter counts, over all blocks together and of the rest.
    """
    shard = (block + root) * 4 // ranks
    blocks, roots = (2 * micro_batches, micro_batches) if zero == 3 else (1, 1)
    gathered = (blocks * block + roots * root) * itemsize * (ranks - 1) // ranks
    scattered = shard * (ranks - 1) * (micro_batches if zero >= 2 else 1)
    return gathered + scattered + 2 * shard * (replicas - 1) // replicas
