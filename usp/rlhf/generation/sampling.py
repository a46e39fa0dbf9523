"""Sample tokens from logits. Noise depends only on a sequence's seed and the token's index, not on the layout.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from usp.rlhf.graph.calls import Generate

_NOISE_BYTES = 6  # 48 bits: exact in float64, and noise times a sum of probabilities never rounds up to the sum


def noise(seed: int, number: int) -> float:
    """Return the noise of token `number` of a sequence, uniform in [0, 1)."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=_NOISE_BYTES).digest()
    return int.from_bytes(digest, "big") / 256**_NOISE_BYTES


def sample(logits_BV: Tensor, noise_B: Tensor, work: Generate) -> tuple[Tensor, Tensor]:
    """Return the next tokens, int64 (B,), and their log-probabilities before top-k and top-p, float32 (B,).

    Inverse transform sampling in float64, over ascending ids: logits that differ by rounding give the same token,
    unless the noise is equally close to a boundary. Logits that are not finite give a nan log-probability and an
    arbitrary token.

    Args:
        noise_B: float64 in [0, 1); unused at temperature 0, which takes the most likely token.
    """
    if work.temperature == 0:
        logits = logits_BV.float()
        chosen_logit, tokens = logits.max(-1)
        return tokens, chosen_logit - logits.logsumexp(-1)
    logprobs = (logits_BV.double() / work.temperature).log_softmax(-1)
    edges = probabilities(logprobs, work.top_k, work.top_p).cumsum(-1)
    passed = noise_B.unsqueeze(1) * edges[:, -1:]
    tokens_B1 = torch.searchsorted(edges, passed, right=True).clamp_(max=edges.shape[1] - 1)
    return tokens_B1.squeeze(1), logprobs.gather(1, tokens_B1).squeeze(1).float()


def probabilities(logprobs_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return unnormalized probabilities: zero outside of the `top_k` most likely tokens and the nucleus.

    The nucleus is the smallest set of most likely tokens with at least `top_p` of the mass after top-k (Holtzman et al.
    2020, "The Curious Case of Neural Text Degeneration", section 3.1). Ties with the k-th token stay.
    """
    if 0 < top_k < logprobs_BV.shape[1]:
        lowest = logprobs_BV.topk(top_k).values[:, -1:]
        logprobs_BV = logprobs_BV.masked_fill(logprobs_BV < lowest, float("-inf"))
    probs = logprobs_BV.softmax(-1)
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        likelier = ordered.cumsum(-1) - ordered
        probs = probs.masked_fill((likelier >= top_p).gather(1, order.argsort(-1)), 0)
    return probs


def work_violations(work: Generate) -> list[str]:
    """Return one message for each invalid sampling option."""
    rules = {
        f"max_new_tokens={work.max_new_tokens} must be at least 1": work.max_new_tokens >= 1,
        f"temperature={work.temperature} must be positive, or 0 for greedy decoding": work.temperature >= 0,
        f"top_k={work.top_k} must be positive, or 0 to disable": work.top_k >= 0,
        f"top_p={work.top_p} must be above 0 and at most 1": 0 < work.top_p <= 1,
    }
    return [message for message, holds in rules.items() if not holds]
