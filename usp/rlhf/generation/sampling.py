"""Tokens from logits. Noise is a function of a sequence's seed and the token's number alone, whatever the layout.

B sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from usp.rlhf.graph.calls import Generate

_NOISE_BYTES = 6  # 48 bits: all their fractions are float64, and none times a sum of probabilities rounds to the sum


def noise(seed: int, number: int) -> float:
    """Uniform in [0, 1): the noise of token `number` of a sequence."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=_NOISE_BYTES).digest()
    return int.from_bytes(digest, "big") / 256**_NOISE_BYTES


def sample(logits_BV: Tensor, noise_B: Tensor, work: Generate) -> tuple[Tensor, Tensor]:
    """The next token of each sequence, int64 (B,), and its log-probability before top-k and top-p, float32 (B,).

    The token is where the cumulative probability, by ascending id and in float64, passes the noise: logits that differ
    by rounding give the same token, unless the noise is as close to a border. Where logits are not finite the
    log-probability is nan and the token of no meaning.

    Args:
        noise_B: float64 in [0, 1); not read at temperature 0, where the likeliest token is taken.
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
    """What is drawn from, not normalised: zero outside of the `top_k` likeliest tokens and of the nucleus.

    The nucleus is the smallest set of likeliest tokens with at least `top_p` of what top-k leaves (Holtzman et al.
    2020, "The Curious Case of Neural Text Degeneration", section 3.1). Tokens as likely as the k-th stay.
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
    """What about the numbers of a call cannot be honoured, one message each."""
    rules = {
        f"max_new_tokens={work.max_new_tokens} must be at least 1": work.max_new_tokens >= 1,
        f"temperature={work.temperature} must be positive, or 0 for the likeliest token": work.temperature >= 0,
        f"top_k={work.top_k} must be positive, or 0 for all tokens": work.top_k >= 0,
        f"top_p={work.top_p} must be above 0 and at most 1": 0 < work.top_p <= 1,
    }
    return [message for message, holds in rules.items() if not holds]
