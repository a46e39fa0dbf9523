"""The adversarial transport finds planted faults, and code without faults gives its results on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.parallel.reallocation.test_reallocation import GRIDS, run_pairs
from tests.usp.rlhf.runtime.test_executor import PROMPTS, Alone, derived_seed, ppo, prompts, run_plans
from tests.usp.tiny import FEW_STEPS, train_alone
from tests.usp.train.test_parity import Break, train_sharded
from usp import UnifiedSPAttention
from usp.attention import comm, ring
from usp.parallel import ParallelDims, ParallelMesh

from .adversary import Operation, order_problems
from .ranks import RankError, RankPool

WORLD, OTHER = ("0", (0, 1)), ("1", (0, 1))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(adversarial=True) as pool:
        yield pool


# Orders, on logs


def collective(group: Any, issued: int, name: str = "allreduce_") -> Operation:
    return Operation("collective", name, group, -1, 8, issued, issued, issued + 1)


def message(kind: str, peer: int, issued: int, waited: int | None, elements: int = 8, group: Any = WORLD) -> Operation:
    return Operation(kind, kind, group, peer, elements, issued, issued, waited)


def posted_early(group: Any) -> list[list[Operation]]:
    """Return logs in which rank 1 posts a receive, and both meet in a collective before rank 0 sends."""
    return [
        [collective(group, 0), message("send", 1, 1, 2)],
        [message("receive", 0, 0, 4), replace(collective(group, 1), waited=3)],
    ]


ORDERS: dict[str, tuple[list[list[Operation]], str]] = {
    "another order of collectives": (
        [
            [collective(WORLD, 0), collective(WORLD, 1, "barrier")],
            [collective(WORLD, 0, "barrier"), collective(WORLD, 1)],
        ],
        "operations meet that differ",
    ),
    "two communicators in opposite order": (
        [[collective(WORLD, 0), collective(OTHER, 1)], [collective(OTHER, 0), collective(WORLD, 1)]],
        "streams would deadlock",
    ),
    "a collective behind a posted receive": (posted_early(WORLD), "streams would deadlock"),
    "messages of a pair in another order": (
        [
            [message("send", 1, 0, 1), message("send", 1, 2, 3, elements=5)],
            [message("receive", 0, 0, 1, elements=5), message("receive", 0, 2, 3)],
        ],
        "operations meet that differ",
    ),
    "a message that nobody receives": ([[message("send", 1, 0, 1)], []], r"ranks \[1\] have no counterpart"),
    "a message that nobody waits for": (
        [[message("send", 1, 0, None)], [message("receive", 0, 0, 1)]],
        "rank 0 never waits for send to rank 1",
    ),
    "two messages, each sent after the other is waited for": (
        [
            [message("receive", 1, 0, 1), message("send", 1, 1, 2)],
            [message("receive", 0, 0, 1), message("send", 0, 1, 2)],
        ],
        "streams would deadlock",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_wrong_orders_are_found(name: str) -> None:
    logs, found = ORDERS[name]
    with pytest.raises(AssertionError, match=found):
        problems = list(order_problems(logs))
        assert not problems, problems[0]


def test_right_orders_are_not_reported() -> None:
    together = [[message("send", 1 - rank, 0, 1), message("receive", 1 - rank, 0, 2)] for rank in (0, 1)]
    assert not list(order_problems(together))
    # The receive has a communicator of its own, whose stream waits by itself.
    assert not list(order_problems(posted_early(OTHER)))


# Faults, on ranks


def never_wait(pending: comm.Pending) -> None:
    pending.works, pending.tensors = [], []


def wait_for_sends_only(pending: comm.Pending) -> None:
    for work in pending.works[: len(pending.tensors)]:
        work.wait()


def reuse_sent(original: Callable[..., Any]) -> Callable[..., Any]:
    def post(self: Any, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> comm.Pending:
        pending = original(self, sends, receives)
        for _, x in sends[:1]:
            x.mul_(2)
        return pending

    return post


def swap_on_rank_1(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let rank 1 do a collective before the messages of a group, and the others after them."""

    def post(self: Any, sends: Any, receives: Any) -> comm.Pending:
        if dist.get_rank() == 1:
            dist.all_reduce(torch.zeros(1), group=self.group)
        pending = original(self, sends, receives)
        if dist.get_rank() != 1:
            dist.all_reduce(torch.zeros(1), group=self.group)
        return pending

    return post


def read_before_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(incoming: Any) -> Tensor:
        early = incoming.block.clone()
        original(incoming)
        return early

    return wait


def reuse_exchanged(original: Callable[..., Any]) -> Callable[..., Any]:
    def post(self: Any, x: Tensor, *splits: Any) -> tuple[Tensor, comm.Pending]:
        results = original(self, x, *splits)
        x.mul_(2)
        return results

    return post


def read_early(original: Callable[..., Any]) -> Callable[..., Any]:
    def post(self: Any, x: Tensor, *splits: Any) -> tuple[Tensor, comm.Pending]:
        received, pending = original(self, x, *splits)
        return received.clone(), pending

    return post


FAULTS: dict[str, Callable[[], Any]] = {
    "no wait": lambda: patch.object(comm.Pending, "wait", never_wait),
    "no wait for received messages": lambda: patch.object(comm.Pending, "wait", wait_for_sends_only),
    "a read before the wait": lambda: patch.object(ring._Incoming, "wait", read_before_wait(ring._Incoming.wait)),
    "a reused send buffer": lambda: patch.object(comm.Channel, "post", reuse_sent(comm.Channel.post)),
    "a reused buffer of an exchange": lambda: patch.object(
        comm.Channel, "post_all_to_all", reuse_exchanged(comm.Channel.post_all_to_all)
    ),
    "an exchange read before the wait": lambda: patch.object(
        comm.Channel, "post_all_to_all", read_early(comm.Channel.post_all_to_all)
    ),
    "a collective in another place": lambda: patch.object(comm.Channel, "post", swap_on_rank_1(comm.Channel.post)),
}


def attended(fault: str) -> None:
    """Run attention forward and backward with a fault; raise ValueError for results that are not finite. On two ranks
    with the axis whose messages are at fault, on four with both."""
    axes = {"ulysses"} if "exchange" in fault else {"ring"} if dist.get_world_size() == 2 else {"ulysses", "ring"}
    mesh = ParallelMesh.create(ParallelDims(**dict.fromkeys(axes, 2)))
    attention = UnifiedSPAttention(mesh, head_groups=mesh.size("ulysses"))
    q, k, v = (torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3))
    with FAULTS[fault]() if fault else patch.object(comm, "Pending", comm.Pending):
        out = attention(q, k, v)
        out.sum().backward()
    grads = [x.grad for x in (q, k, v)]
    if not all(x is not None and bool(x.isfinite().all()) for x in (out, *grads)):
        raise ValueError("values that had not arrived were read")


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_messages_are_found(ranks: RankPool, fault: str) -> None:
    with pytest.raises(RankError, match=r"had not arrived|never waits|changed before its wait|deadlock|differ"):
        ranks.run(attended, 2, fault)


def test_attention_without_a_fault_passes(ranks: RankPool) -> None:
    ranks.run(attended, 4, "")


@pytest.mark.slow
def test_training_on_the_transport_is_that_of_one_process(ranks: RankPool) -> None:
    found = ranks.run(train_sharded, 4, "llama", ParallelDims(ulysses=2, ring=2), "zigzag", Break())
    wanted = train_alone("llama", FEW_STEPS)
    for history in found:
        for both, (loss, norm) in zip(history, wanted, strict=True):
            assert both == pytest.approx((loss, norm), rel=1e-5)


@pytest.mark.slow
def test_reallocation_on_the_transport_is_exact(ranks: RankPool) -> None:
    pairs = list(product(GRIDS, GRIDS))[::181]
    assert [wrong for _, wrong in ranks.run(run_pairs, 8, pairs)] == [[]] * 8


@pytest.mark.slow
def test_rlhf_on_the_transport_is_that_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    wanted, _ = Alone().step(ppo(), prompts(PROMPTS, 1), derived_seed(1, "actor_generate"))
    for (run,) in ranks.run(run_plans, 8, tmp_path, "separation"):
        assert {key: run.metrics[0][key] for key in wanted} == pytest.approx(wanted, abs=1e-5)
