"""Expert parallelism gives the results of one rank with all experts, and sends the bytes that the plan implies."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankPool
from usp.parallel.expert import ExpertRows, grouped_linear, mix_experts, plan_dispatch, sorted_by_expert
from usp.parallel.wire import SentBytes

EXPERTS, TOKENS, TOP_K, HIDDEN = 4, 5, 2, 8


def inputs(rank: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a rank's tokens, distinct choices and weights.

    "spread" uses all experts, "empty" only the first half, "one" the experts of a single rank.
    """
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
    assert plan.rows.counts == [sum(rows) for rows in zip(*plan.received, strict=True)]
    assert plan.rows.ends.tolist() == list(accumulate(plan.rows.counts))
    assert plan.receive_splits == [sum(rows) for rows in plan.received]
    with SentBytes() as sent:
        out = mix_experts(
            tokens,
            choices,
            weights,
            num_experts=EXPERTS,
            group=group,
            experts=lambda x, rows: grouped_linear(x, own, rows),
        )
    splits = enumerate(zip(plan.send_splits, plan.receive_splits, strict=True))
    rows = HIDDEN * 8 * sum(sum(both) for peer, both in splits if peer != rank)  # dispatch and combine
    counts = (world - 1) * EXPERTS // world * 8  # in int64
    assert sent.total == rows + counts
    with SentBytes() as sent:
        out.square().sum().backward()
    assert sent.total == rows
    grads = {"tokens": tokens.grad, "weights": weights.grad, "experts": own.grad}
    return {"out": out.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def dense(world: int, kind: str) -> dict[str, Tensor]:
    """Compute every expert on every token in one process."""
    each = [inputs(rank, kind) for rank in range(world)]
    tokens, choices, weights = (torch.cat(parts).detach() for parts in zip(*each, strict=True))
    all_matrices = matrices().requires_grad_()
    results = torch.einsum("th,eoh->teo", tokens.requires_grad_(), all_matrices)
    chosen = results.gather(1, choices.unsqueeze(2).expand(-1, -1, HIDDEN))
    out = (chosen * weights.requires_grad_().unsqueeze(2)).sum(dim=1)
    out.square().sum().backward()
    return {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad, "experts": all_matrices.grad}


@pytest.mark.parametrize(("world", "kind"), [(1, "spread"), (2, "empty"), (4, "spread"), (4, "empty"), (2, "one")])
@pytest.mark.slow(but=1)
def test_expert_parallel_results_match_one_rank(ranks: RankPool, world: int, kind: str) -> None:
    found, wanted = ranks.run(mixed, world, kind), dense(world, kind)
    for name, tensor in wanted.items():
        together = torch.cat([result[name] for result in found])  # a missing gradient is a KeyError
        torch.testing.assert_close(together, tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize(("rows", "size_in"), [([3, 0, 5], 8), ([0, 0, 0], 8), ([3, 0, 5], 7), ([0, 0, 0], 7)])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_linear_matches_one_matmul_per_expert(rows: list[int], size_in: int, transposed: bool) -> None:
    x = torch.randn(sum(rows), size_in, requires_grad=True)
    of_experts = ExpertRows(rows, torch.tensor(rows).cumsum(0, dtype=torch.int32))
    matrices = torch.randn(3, size_in, 4) if transposed else torch.randn(3, 4, size_in)
    bias = torch.randn(3, 4, requires_grad=True)
    weight = matrices.requires_grad_().transpose(1, 2) if transposed else matrices.requires_grad_()
    out = grouped_linear(x, weight, of_experts, bias)
    wanted = torch.cat([part @ weight[e].T + bias[e] for e, part in enumerate(x.split(rows))])
    upstream = torch.randn_like(wanted)
    torch.testing.assert_close(out, wanted)
    without = wanted - bias.repeat_interleave(torch.tensor(rows), 0)
    torch.testing.assert_close(grouped_linear(x, weight, of_experts), without)
    for found, expected in zip(
        torch.autograd.grad(out, (x, matrices, bias), upstream),
        torch.autograd.grad(wanted, (x, matrices, bias), upstream),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_rows_are_sorted_by_expert_and_counted() -> None:
    choices = torch.tensor([2, 0, 2, 5, 0, 2])
    order, counts = sorted_by_expert(choices, 5)  # the last is no expert's
    assert order.tolist() == [1, 4, 0, 2, 5, 3]
    assert counts.tolist() == [2, 0, 3, 0, 0]
