"""Expert parallelism gives the results of one rank with all experts, and sends the bytes that the plan implies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any
from unittest.mock import patch

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
    (plan,) = plan_dispatch(torch.bincount(choices.flatten(), minlength=EXPERTS), group)
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
            experts=lambda x, rows, _: grouped_linear(x, own, rows),
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


# Chunks


MANY = 8  # experts, of which two ranks have two chunks of two or four of one


class Posted:
    """Log of a rank's all-to-alls of rows and of its products, in the order of their calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._exchange = dist.all_to_all_single

    def exchange(self, received: Tensor, sent: Tensor, *args: Any, async_op: bool = False, **options: Any) -> Any:
        work = self._exchange(received, sent, *args, async_op=async_op, **options)
        if work is None:
            self.log.append("all-to-all")
            return None
        number = sum(entry.startswith("post") for entry in self.log)
        self.log.append(f"post {number}")
        return Waited(work, lambda: self.log.append(f"wait {number}"))


class Waited:
    def __init__(self, work: dist.Work, told: Callable[[], None]) -> None:
        self._work, self._told = work, told

    def wait(self) -> None:
        self._told()
        self._work.wait()


def in_chunks(tokens: int, chunks: int) -> tuple[list[Tensor], list[str], int]:
    """Return the result and gradients of a mixture of `MANY` experts, the rank's log, and the bytes that it sent.

    tokens: of rank 0; the other one has none, and no token chooses one of the last two experts.
    """
    rank, posted = dist.get_rank(), Posted()
    draws = torch.Generator().manual_seed(rank)
    tokens_TH = torch.randn(0 if rank else tokens, HIDDEN, generator=draws).requires_grad_()
    choices = torch.rand(len(tokens_TH), MANY - 2, generator=draws).argsort(dim=1)[:, :TOP_K]
    weights = torch.rand(choices.shape, generator=draws).requires_grad_()
    own = torch.randn(MANY, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(9)).chunk(2)[rank].clone()
    of_chunks = own.requires_grad_().chunk(chunks)

    def experts(rows_GH: Tensor, rows: ExpertRows, chunk: int) -> Tensor:
        posted.log.append(f"experts {chunk}")
        out = grouped_linear(rows_GH, of_chunks[chunk], rows)
        out.register_hook(lambda _: posted.log.append(f"experts {chunk}"))
        return out

    group = dist.group.WORLD
    assert group is not None
    with patch.object(dist, "all_to_all_single", posted.exchange), SentBytes() as sent:
        out = mix_experts(tokens_TH, choices, weights, num_experts=MANY, group=group, experts=experts, chunks=chunks)
        out.square().sum().backward()
    grads = [x.grad for x in (tokens_TH, weights, own) if x.grad is not None]
    return [out.detach(), *grads], posted.log, sent.total


@pytest.mark.parametrize("tokens", [11, 1])
def test_chunks_change_no_bit_and_no_byte(ranks: RankPool, tokens: int) -> None:
    whole = ranks.run(in_chunks, 2, tokens, 1)
    for chunks in (2, 4):
        for (found, _, sent), (wanted, _, all_sent) in zip(ranks.run(in_chunks, 2, tokens, chunks), whole, strict=True):
            assert len(found) == len(wanted) == 4 and sent == all_sent
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_messages_of_a_chunk_travel_while_another_computes(ranks: RankPool) -> None:
    (_, log, _), (_, of_other, _) = ranks.run(in_chunks, 2, 11, 2)
    assert log == of_other
    assert log == [
        *("all-to-all", "post 0", "wait 0"),  # counts of rows, and the rows of the first chunk
        *("post 1", "experts 0", "post 2", "wait 1", "experts 1", "post 3", "wait 2", "wait 3"),
        *("post 4", "wait 4", "post 5", "experts 1", "post 6", "wait 5", "experts 0", "post 7", "wait 7", "wait 6"),
    ]


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
