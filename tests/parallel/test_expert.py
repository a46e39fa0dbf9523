"""Dispatch and combine are what one rank with all experts computes, and send what the plan says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.expert import DispatchPlan, grouped_linear, mix_experts, plan_dispatch
from parallel.testing import RankPool, count_sent_bytes

EXPERTS, TOKENS, TOP_K, HIDDEN = 4, 5, 2, 8


def inputs(rank: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens, distinct choices and weights. "empty": only experts of the first half; "one": one rank's."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(TOKENS + rank, HIDDEN, generator=generator, dtype=torch.float64)
    among = {"spread": EXPERTS, "empty": EXPERTS // 2, "one": EXPERTS // 2}[kind]
    scores = torch.rand(TOKENS + rank, among, generator=generator)
    choices = scores.argsort(dim=1)[:, :TOP_K]
    if kind == "one" and rank:
        choices += EXPERTS // 2  # rank 0 chooses the first half, the others the second
    return tokens.requires_grad_(), choices, torch.rand(choices.shape, generator=generator, dtype=torch.float64)


def matrices() -> Tensor:
    return torch.randn(EXPERTS, HIDDEN, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(99))


def mixed(kind: str) -> dict[str, Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, choices, weights = inputs(rank, kind)
    weights.requires_grad_()
    own = matrices().chunk(world)[rank].clone().requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    plan = plan_dispatch(torch.bincount(choices.flatten(), minlength=EXPERTS), group)
    with count_sent_bytes() as sent:
        out = mix_experts(
            tokens,
            choices,
            weights,
            num_experts=EXPERTS,
            group=group,
            experts=lambda x, rows_of_expert: grouped_linear(x, own, rows_of_expert),
        )
    rows, counts = plan.sent_bytes(rank, row_bytes=HIDDEN * 8), (world - 1) * EXPERTS // world * 8  # in int64
    assert sent.total == rows + counts
    with count_sent_bytes() as sent:
        out.square().sum().backward()
    assert sent.total == rows
    grads = {"tokens": tokens.grad, "weights": weights.grad, "experts": own.grad}
    return {"out": out.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def dense(world: int, kind: str) -> dict[str, Tensor]:
    """Every expert on every token, one process."""
    each = [inputs(rank, kind) for rank in range(world)]
    tokens, choices, weights = (torch.cat(parts).detach() for parts in zip(*each, strict=True))
    all_matrices = matrices().requires_grad_()
    results = torch.einsum("th,eoh->teo", tokens.requires_grad_(), all_matrices)
    chosen = results.gather(1, choices.unsqueeze(2).expand(-1, -1, HIDDEN))
    out = (chosen * weights.requires_grad_().unsqueeze(2)).sum(dim=1)
    out.square().sum().backward()
    return {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad, "experts": all_matrices.grad}


@pytest.mark.parametrize(("world", "kind"), [(1, "spread"), (2, "empty"), (4, "spread"), (4, "empty"), (2, "one")])
def test_mixed_experts_are_those_of_one_rank(ranks: RankPool, world: int, kind: str) -> None:
    found, wanted = ranks.run(mixed, world, kind), dense(world, kind)
    for name, tensor in wanted.items():
        together = torch.cat([result[name] for result in found])  # a missing gradient is a KeyError
        torch.testing.assert_close(together, tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(("rows", "size_in"), [([3, 0, 5], 8), ([0, 0, 0], 8), ([3, 0, 5], 7), ([0, 0, 0], 7)])
def test_one_matrix_for_each_expert_aligned_or_not(rows: list[int], size_in: int) -> None:
    x = torch.randn(sum(rows), size_in, requires_grad=True)
    weight = torch.randn(3, 4, size_in, requires_grad=True)
    out = grouped_linear(x, weight, rows)
    wanted = torch.cat([part @ weight[e].T for e, part in enumerate(x.split(rows))])
    upstream = torch.randn_like(wanted)
    torch.testing.assert_close(out, wanted)
    for found, expected in zip(
        torch.autograd.grad(out, (x, weight), upstream), torch.autograd.grad(wanted, (x, weight), upstream), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_a_plan_says_what_a_rank_sends() -> None:
    plan = DispatchPlan(sent=((1, 2), (3, 4)), received=((5, 0), (7, 8)))
    assert plan.send_splits == [3, 7]
    assert plan.receive_splits == [5, 15]
    assert plan.rows_of_expert == [12, 8]
    assert plan.sent_bytes(0, row_bytes=10) == 10 * (7 + 15)
    assert plan.sent_bytes(1, row_bytes=10) == 10 * (3 + 5)
