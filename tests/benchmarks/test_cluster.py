"""Emulated hosts: ranks reach each other, the link between hosts is slower, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.cluster import BURST, DEVICE, Cluster, cluster, unavailable

RATE = 80e6 / 8  # bytes per second
MESSAGE = 1 << 20


@pytest.fixture(scope="module")
def needs_hosts() -> None:
    if reason := unavailable():
        pytest.skip(f"cannot create a cluster: {reason}")


def names() -> set[str]:
    """Return the namespaces of this process, and its devices outside of any namespace."""
    listed = [line.split()[0] for line in _ip("netns", "list")] + [line.split()[1] for line in _ip("-o", "link")]
    return {name for name in listed if name.startswith(f"usp-{os.getpid()}-")}


def _ip(*arguments: str) -> list[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def sum_seconds_and_bytes() -> tuple[float, dict[int, tuple[float, int]]]:
    """Return the sum of all ranks' numbers; the best round trip between rank 0 and ranks 1 and 2."""
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item(), {peer: min(there_and_back(peer) for _ in range(3)) for peer in (1, 2)}


def there_and_back(peer: int) -> tuple[float, int]:
    """Return the seconds of a message to `peer` and back, and the bytes that this host sent meanwhile."""
    message, rank = torch.zeros(MESSAGE, dtype=torch.uint8), dist.get_rank()
    sent = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
    dist.barrier()
    start, before = time.perf_counter(), int(sent.read_text())
    if rank == 0:
        dist.send(message, peer)
        dist.recv(message, peer)
    elif rank == peer:
        dist.recv(message, 0)
        dist.send(message, 0)
    return time.perf_counter() - start, int(sent.read_text()) - before


@pytest.mark.usefixtures("needs_hosts")
@pytest.mark.exhaustive
def test_two_hosts_communicate_and_leave_nothing_behind() -> None:
    before = names()
    with cluster(2, "80mbit") as hosts:
        assert len(names() - before) == 3  # two hosts and their switch, without a device outside
        results = hosts.call(sum_seconds_and_bytes, 2, timeout=600)
    assert names() == before
    assert [total for total, _ in results] == [6.0] * 4
    (_, inside), (between, across) = results[0][1][1], results[0][1][2]
    assert inside < MESSAGE / 2 and across >= MESSAGE
    # The shaper passes at most its rate plus one burst, however busy the machine is.
    assert between > 2 * (MESSAGE - int(BURST.removesuffix("kb")) * 1024) / RATE


@pytest.mark.usefixtures("needs_hosts")
def test_what_fails_on_a_host_is_shown(monkeypatch: pytest.MonkeyPatch, exhaustive: bool) -> None:
    """With --exhaustive on a rank, else in place of the launcher."""
    if not exhaustive:
        monkeypatch.setattr(Cluster, "_start", fails_to_divide)
    failed = pytest.raises(RuntimeError, match=r"host 0 failed.*\n(.*\n)*.*ZeroDivisionError")
    with failed, cluster(1, "1gbit") as host:
        host.call(divmod, 1, 1, 0, timeout=600)


def fails_to_divide(hosts: Cluster, host: int, command: Sequence[str], ranks: int) -> subprocess.Popen[str]:
    inside = ["ip", "netns", "exec", hosts.namespaces[host], sys.executable, "-c", "1 / 0"]
    return subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.usefixtures("needs_hosts")
def test_an_interrupt_leaves_nothing_behind() -> None:
    before = names()
    with pytest.raises(KeyboardInterrupt), cluster(3, "1gbit"):
        raise KeyboardInterrupt
    assert names() == before


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="hosts=0 must be between 1 and 250"), cluster(0, "1gbit"):
        pass
    with pytest.raises(ValueError, match="rate='fast' must be a number"), cluster(2, "fast"):
        pass
