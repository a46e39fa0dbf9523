"""Dropout masks are those of independent coin tosses, and a function of token, feature, linear and seed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from usp.hf.dropout import CurrentTokens, TokenDropout, dropout_mask

FEATURES, P = 300, 0.25
NUMBERS = torch.arange(2**32 - 700, 2**32 + 700)  # beyond 32 bits


def masks_of(seed: int = 0, name: str = "a", numbers: Tensor = NUMBERS) -> Tensor:
    return dropout_mask(P, TokenDropout(P, seed, name, CurrentTokens()).key, numbers, 0, FEATURES)


@pytest.mark.parametrize(
    "other",
    [
        {},  # of itself, moved by a feature or a token
        {"seed": 1},
        {"name": "b"},
        {"numbers": NUMBERS + len(NUMBERS)},
    ],
    ids=str,
)
def test_masks_are_independent_with_the_probability_asked_for(other: dict) -> None:
    mask, second = masks_of(), masks_of(**other)
    for first, again in [(mask, second)] if other else [(mask[:, 1:], mask[:, :-1]), (mask[1:], mask[:-1])]:
        assert again.float().mean().item() == pytest.approx(P, abs=0.005)  # ten standard deviations
        assert (first & again).float().mean().item() == pytest.approx(P**2, abs=0.005)
    by_token, by_feature = mask.float().mean(1), mask.float().mean(0)
    assert by_token.std() == pytest.approx((P * (1 - P) / FEATURES) ** 0.5, rel=0.15)
    assert by_feature.std() == pytest.approx((P * (1 - P) / len(NUMBERS)) ** 0.5, rel=0.2)


def test_a_mask_is_that_of_its_tokens_and_features_alone() -> None:
    order, whole = torch.randperm(len(NUMBERS), generator=torch.Generator().manual_seed(0)), masks_of()
    assert torch.equal(masks_of(numbers=NUMBERS[order]), whole[order])
    key = TokenDropout(P, 0, "a", CurrentTokens()).key
    assert torch.equal(dropout_mask(P, key, NUMBERS, 100, 200), whole[:, 100:])
    assert torch.equal(dropout_mask(P, key, NUMBERS.repeat(20), 0, FEATURES), whole.repeat(20, 1))  # in several pieces


def test_what_is_kept_has_the_expected_value_of_the_input() -> None:
    tokens = CurrentTokens(NUMBERS.view(2, -1))
    dropout, x = TokenDropout(P, 0, "a", tokens, shard=1), torch.ones(2, len(NUMBERS) // 2, FEATURES // 3)
    dropped = dropout_mask(P, dropout.key, NUMBERS, FEATURES // 3, FEATURES // 3).view(x.shape)
    torch.testing.assert_close(dropout(x), torch.where(dropped, 0.0, 1 / (1 - P)))
    assert torch.equal(dropout.eval()(x), x)
    with pytest.raises(RuntimeError, match="needs the first_tokens of all of its tokens"):
        dropout.train()(x[:, :5])
