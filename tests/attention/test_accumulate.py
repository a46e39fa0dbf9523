from __future__ import annotations

import torch

from usp.attention.accumulate import AttentionSum, Rows


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    total = AttentionSum(torch.zeros(1, 1, 2), 2)
    for out, lse in parts:
        total.merge(Rows.of(0, 1), out.clone().view(1, 1, 1, 2), lse.clone().view(1, 1, 1))
    return total.result()


def test_merging_handles_empty_parts() -> None:
    empty = torch.zeros(2), torch.tensor(float("-inf"))
    some = torch.tensor([1.0, 3.0]), torch.tensor(0.5)
    for parts in ([empty, some], [some, empty], [empty, some, empty]):
        out, lse = merged(parts)
        assert out.flatten().tolist() == [1.0, 3.0] and lse.item() == 0.5
    out, lse = merged([empty, empty])
    assert out.flatten().tolist() == [0.0, 0.0] and lse.item() == float("-inf")


def test_merging_weights_by_log_sum_exp_without_overflow() -> None:
    low, high = (torch.tensor([1.0, 0.0]), torch.tensor(1000.0)), (torch.tensor([0.0, 1.0]), torch.tensor(1000.0))
    out, lse = merged([low, high])
    assert torch.allclose(out.flatten(), torch.tensor([0.5, 0.5]))
    assert torch.allclose(lse, torch.tensor(1000.0) + torch.tensor(2.0).log())
    out, _ = merged([low, (torch.tensor([0.0, 1.0]), torch.tensor(-1000.0))])
    assert out.flatten().tolist() == [1.0, 0.0]
