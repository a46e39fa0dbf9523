"""Sample tokens from logits, with noise of each sequence, position and token, so that the layout changes nothing.

    token = argmax_v p_v / E_v,    E_v exponential noise of token v: token v with probability p_v / sum p

This is Gumbel-max (argmax of log p + g, g = -log E; Maddison et al. 2014, "A* Sampling", section 2) without logarithms
of p. A token's noise does not depend on the logits, so logits that change by up to r (by rounding, in another layout)
change the choice only if the best two log p - log E are within 2 r of each other: with a probability of at most 2 r. So
in float32 sequences are the same in every layout, and in bfloat16 about one token in 50 differs. The sets of top-k and
top-p have boundaries of their own; a token that rounding moves across one changes the choice only if it would win.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from usp.rlhf.graph.calls import Generate

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
# From |int64| to [0, 1), where float32 rounds nothing up to 1.
_UNIT = (1 - 2.0**-24) * 2.0**-63


def sequence_key(seed: int, number: int) -> int:
    """Return the key of token `number` of a sequence, an odd int64."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True) | 1


def token_keys(vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the key of each token, odd int64 (V,): the output of SplitMix64 (Steele et al. 2014, figure 17)."""
    keys = torch.arange(1, vocabulary + 1, device=device) * _signed(_MULTIPLIERS[0])
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS[1:], 1), strict=True):
        keys ^= (keys >> shift) & ((1 << (64 - shift)) - 1)  # a logical shift
        keys *= _signed(multiplier)
    return keys | 1


def exponential(keys_B: Tensor, keys_V: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the noise of each token of each sequence, exponential with mean 1, (B, V) of `dtype`.

    The product of two keys modulo 2**64 is the same number everywhere; only the logarithm of it is rounded. For random
    keys of sequences, the products of any few tokens are independent unless a sum of small multiples of their keys is 0
    modulo 2**64. Small values, which win, have full relative precision.
    """
    product = keys_B.unsqueeze(1) * keys_V
    return product.to(dtype).abs_().mul_(-_UNIT).log1p_().neg_()


def sample(logits_BV: Tensor, keys_B: Tensor, keys_V: Tensor, work: Generate) -> tuple[Tensor, Tensor]:
    """Return the next tokens, int64 (B,), and their log-probabilities before top-k and top-p, float32 (B,).

    Logits that are not finite give a nan log-probability and an arbitrary token.

    Args:
        logits_BV: float32 or float64.
        keys_B: of `sequence_key`; unused at temperature 0, which takes the most likely token. keys_V: of `token_keys`.
    """
    if work.temperature == 0:
        logits = logits_BV.float()
        chosen_logit, tokens = logits.max(-1)
        return tokens, chosen_logit - logits.logsumexp(-1)
    if work.temperature != 1:
        # The largest becomes 0, as it does in softmax, so that dividing by a low temperature rounds little.
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).div_(work.temperature)
    probs = logits_BV.softmax(-1)
    mass_B = probs.sum(-1, dtype=torch.float64)  # of a float32 softmax, 1 only up to the rounding of long sums
    noise = exponential(keys_B, keys_V, probs.dtype)
    race = torch.div(probabilities(probs, work.top_k, work.top_p), noise, out=noise)
    tokens_B1 = race.argmax(-1, keepdim=True)
    return tokens_B1.squeeze(1), (probs.gather(1, tokens_B1).squeeze(1) / mass_B).log().float()


def probabilities(probs_BV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the probabilities, zero outside of the `top_k` most likely tokens and the nucleus; no longer normalized.

    The nucleus is the smallest set of most likely tokens with at least `top_p` of the mass after top-k (Holtzman et al.
    2020, "The Curious Case of Neural Text Degeneration", section 3.1). Ties with the k-th token stay.
    """
    if 0 < top_k < probs_BV.shape[1]:
        lowest = probs_BV.topk(top_k).values[:, -1:]
        probs_BV = probs_BV.masked_fill(probs_BV < lowest, 0)
    if top_p < 1:
        ordered, order = probs_BV.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.double()
        likelier = ordered.cumsum(-1) - ordered
        outside = likelier >= top_p * ordered.sum(-1, keepdim=True)
        probs_BV = probs_BV.masked_fill(torch.empty_like(outside).scatter_(1, order, outside), 0)
    return probs_BV


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def work_violations(work: Generate) -> list[str]:
    """Return one message for each invalid sampling option."""
    rules = {
        f"max_new_tokens={work.max_new_tokens} must be at least 1": work.max_new_tokens >= 1,
        f"temperature={work.temperature} must be positive, or 0 for greedy decoding": work.temperature >= 0,
        f"top_k={work.top_k} must be positive, or 0 to disable": work.top_k >= 0,
        f"top_p={work.top_p} must be above 0 and at most 1": 0 < work.top_p <= 1,
    }
    return [message for message, holds in rules.items() if not holds]
