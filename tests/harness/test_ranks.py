"""Failures and timeouts of the rank pool, and byte counts against sizes worked out by hand."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from tests.harness.ranks import RankError, RankPool
from usp.parallel.wire import SentBytes


def describe(offset: int) -> tuple[int, int, float, int, int]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item(), torch.get_num_threads(), os.getpid()


def fail_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        raise ValueError(f"rank {bad_rank} cannot")
    dist.barrier()


def die(rank: int, number: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number) if number else os._exit(7)
    dist.barrier()


def hang_in_a_collective() -> None:
    if dist.get_rank() == 0:
        return
    dist.barrier()


def test_results_are_in_rank_order_and_workers_are_reused(ranks: RankPool) -> None:
    first = ranks.run(describe, 4, 1)
    second = ranks.run(describe, 2, 0)
    assert [row[:4] for row in first] == [(rank, 4, 10.0, 1) for rank in range(4)]
    assert [row[:4] for row in second] == [(rank, 2, 1.0, 1) for rank in range(2)]
    assert [row[4] for row in second] == [row[4] for row in first[:2]]


def test_a_failure_names_its_rank_and_omits_lost_peer_errors(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"fail_on on 3 ranks: rank 1 failed(?s:.)*ValueError: rank 1 cannot") as caught:
        ranks.run(fail_on, 3, 1)
    assert list(caught.value.failures) == [1]
    assert ranks.run(describe, 2, 0)[0][2] == 1.0


def test_a_dead_worker_is_reported(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 failed\.\nthe worker died with exit code 7"):
        ranks.run(die, 2, 1, 0)
    with pytest.raises(RankError, match=r"exit code -11\nFatal Python error: Segmentation fault(?s:.)* in die\n"):
        ranks.run(die, 2, 1, signal.SIGSEGV)


@pytest.mark.slow
def test_a_timeout_shows_the_stack_of_every_waiting_rank() -> None:
    with RankPool() as pool:  # not adversarial, where rank 0 waits for the order of the others
        for seconds in (1, 4, 16, 64):  # until all ranks have come as far as they get
            with pytest.raises(TimeoutError) as caught:
                pool.run(hang_in_a_collective, 3, timeout=seconds)
            message = str(caught.value)
            if message.count("in hang_in_a_collective") == 2 and "had finished" in message:
                break
        assert f"ranks [1, 2] did not answer within {seconds} s (ranks [0] had finished)" in message
        assert message.count("in hang_in_a_collective") == 2
        assert pool.run(describe, 3, 0)[2][2] == 3.0


def sent_by_each_collective() -> dict[str, int]:
    """Return the bytes that this rank of 4 sends in each case, for float32 rows of 5 numbers (20 bytes)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    rows = torch.arange(size * 5, dtype=torch.float32).reshape(size, 5)

    def uneven() -> None:  # rank r sends (peer + 1) rows to each peer, and receives r + 1 rows from each
        splits = [peer + 1 for peer in range(size)]
        received = rows.new_empty(size * (rank + 1), 5)
        dist.all_to_all_single(received, rows.new_zeros(sum(splits), 5), [rank + 1] * size, splits)

    def ring() -> None:
        received = torch.empty_like(rows)
        send = dist.P2POp(dist.isend, rows, (rank + 1) % size)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    def one_way() -> None:
        if rank == 0:
            dist.isend(rows, 1).wait()
        elif rank == 1:
            dist.irecv(torch.empty_like(rows), 0).wait()

    def both_ways_of_autograd() -> None:
        x = rows.clone().requires_grad_()
        funcol.all_to_all_single_autograd(x, None, None, group).sum().backward()

    cases = {
        "even": lambda: dist.all_to_all_single(torch.empty_like(rows), rows),
        "uneven": uneven,
        "list": lambda: dist.all_to_all([torch.empty(5) for _ in range(size)], list(rows.unbind())),
        "ring": ring,
        "one way": one_way,
        "gather": lambda: dist.all_gather_into_tensor(rows.new_empty(size * size, 5), rows),
        "scatter": lambda: dist.reduce_scatter_tensor(rows.new_empty(1, 5), rows),
        "reduce": lambda: dist.all_reduce(rows.clone()),
        "functional": lambda: funcol.all_to_all_single(rows, None, None, group).sum(),
        "autograd": both_ways_of_autograd,
        "nothing": dist.barrier,
    }
    totals = {}
    for name, case in cases.items():
        with SentBytes() as sent:
            case()
        totals[name] = sent.total
    return totals


def test_bytes_sent_to_other_ranks_are_counted(ranks: RankPool) -> None:
    all_but_one = {"even": 60, "list": 60, "scatter": 60, "functional": 60, "autograd": 120, "reduce": 120}
    for rank, totals in enumerate(ranks.run(sent_by_each_collective, 4)):
        uneven = 20 * (1 + 2 + 3 + 4 - (rank + 1))
        one_way = 80 if rank == 0 else 0
        rest = {"uneven": uneven, "ring": 80, "one way": one_way, "gather": 240, "nothing": 0}
        assert totals == {**all_but_one, **rest}, f"rank {rank}"


def sent_by_group() -> tuple[dict, dict]:
    """Communicate in the rows and columns of a 2 x 2 grid and in a group of one rank; return bytes and calls."""
    rank, rows = dist.get_rank(), torch.zeros(4, 5)
    groups = {peers: dist.new_group(list(peers)) for peers in ((0, 1), (2, 3), (0, 2), (1, 3), (0,))}
    own = [group for peers, group in groups.items() if rank in peers]
    with SentBytes() as sent:
        for group in own:
            dist.all_reduce(rows, group=group)
        for _ in range(3):
            dist.all_to_all_single(torch.empty_like(rows), rows, group=own[0])
        funcol.all_reduce(rows, "sum", own[1]).sum()
        dist.barrier()
    return dict(sent.by_group), dict(sent.calls)


def test_bytes_and_calls_are_counted_by_group(ranks: RankPool) -> None:
    for rank, (nbytes, calls) in enumerate(ranks.run(sent_by_group, 4)):
        row, column = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        reduced = {(row, "allreduce_"): 80, (column, "allreduce_"): 80, (column, "all_reduce"): 80}
        assert nbytes == {**reduced, (row, "alltoall_base_"): 120}
        assert calls == {key: 3 if key[1] == "alltoall_base_" else 1 for key in nbytes}


def count_a_broadcast() -> None:
    with SentBytes():
        dist.broadcast(torch.zeros(1), 0)


def test_unsupported_collectives_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"SentBytes does not support c10d\.broadcast_"):
        ranks.run(count_a_broadcast, 2)
