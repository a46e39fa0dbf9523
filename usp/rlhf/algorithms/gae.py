"""Sums of rewards along responses, and generalised advantage estimation (Schulman et al., arXiv 1506.02438).

Rows as `responses` has them: (N, R) float64, 0 behind a row's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def discounted_sums(x_NR: Tensor, factor: float) -> Tensor:
    """y[t] = x[t] + factor * y[t + 1], in log2(R) steps (Hillis and Steele, "Data parallel algorithms", 1986)."""
    reach = 1
    while reach < x_NR.shape[1]:
        x_NR = x_NR + factor * pad(x_NR[:, reach:], (0, reach))
        reach, factor = 2 * reach, factor * factor
    return x_NR


def gae(
    rewards_NR: Tensor, values_NR: Tensor, inside_NR: Tensor, last_values_N: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """(N, R) advantages: the sum over k of (gamma lam)^k delta[t + k] (equation 16).

    delta[t] = rewards[t] + gamma * values[t + 1] - values[t].

    Args:
        inside_NR: which entries are tokens.
        last_values_N: of the state behind each row's last token: 0 where the response ended there.
    """
    width = rewards_NR.shape[1]
    is_last_NR = inside_NR & ~pad(inside_NR, (0, 1))[:, 1:]
    next_values_NR = torch.where(is_last_NR, last_values_N[:, None], pad(values_NR, (0, 1))[:, 1 : width + 1])
    deltas_NR = (rewards_NR + gamma * next_values_NR - values_NR).where(inside_NR, 0)
    return discounted_sums(deltas_NR, gamma * lam)
