"""Seconds of messages and of reallocations: the busiest link of each tier, round by round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.reallocation.layouts import GRIDS
from usp.parallel import load_hardware, message_seconds, plan_realloc, realloc_seconds
from usp.parallel.cluster.hardware import Hardware

A800 = load_hardware("a800")


def small(hosts_of: int = 4) -> Hardware:
    """Hosts of four devices: 100 B/s inside, 10 B/s per device between hosts, of which a host has 20 B/s."""
    inside, between = A800.tiers[:2]
    tiers = (
        replace(inside, devices=hosts_of, send=replace(inside.send, alpha_seconds=0.0, bytes_per_second=100.0)),
        replace(
            between,
            devices=0,
            send=replace(between.send, alpha_seconds=0.5, bytes_per_second=10.0),
            shared_bytes_per_second=20.0,
        ),
    )
    tiers = (replace(tiers[0], shared_bytes_per_second=float("inf")), tiers[1])
    return replace(A800, tiers=tiers, link_efficiency=1.0, memory_bytes_per_second=1e12, memory_efficiency=1.0)


def test_the_busiest_link_of_each_tier_counts() -> None:
    hardware = small()
    assert message_seconds(hardware, {(0, 1): 100.0}).links == (1.0, 0.0)
    assert message_seconds(hardware, {(0, 1): 100.0, (1, 0): 100.0}).links == (1.0, 0.0)  # both ways at once
    assert message_seconds(hardware, {(0, 1): 100.0, (2, 1): 100.0}).links == (2.0, 0.0)  # the receiver's link
    assert message_seconds(hardware, {(0, 1): 100.0, (0, 4): 100.0}).links == (1.0, 10.0)
    # Four devices of a host send out over the adapters that they share; four senders of four hosts do not.
    assert message_seconds(hardware, {(rank, 4 + rank): 100.0 for rank in range(4)}).links == (0.0, 20.0)
    assert message_seconds(hardware, {(4 * n, 16 + 4 * n): 100.0 for n in range(4)}).links == (0.0, 10.0)
    assert message_seconds(hardware, {(0, 4): 1.0, (0, 5): 1.0, (0, 6): 1.0}).latency == 1.5
    assert message_seconds(hardware, {}).total == 0.0


@pytest.mark.parametrize(("src", "dst"), [("zero8", "tp4 dp2"), ("low tp4", "high tp4"), ("pp2 tp2 dp2", "dp8")])
def test_a_reallocation_takes_its_bytes_over_its_links(src: str, dst: str) -> None:
    hardware = small()
    plan = plan_realloc(GRIDS[src].layout(), GRIDS[dst].layout(), bucket_bytes=4096, ranks_per_host=4)
    found = realloc_seconds(plan, hardware)
    assert sum(number for _, number in found.rounds) == plan.rounds
    for level in (0, 1):
        busy = sum(number * each.links[level] for each, number in found.rounds)
        whole = message_seconds(hardware, plan.links).links[level]
        assert busy >= whole - 1e-9  # a link is never busier than in one round with everything
    between = plan.tier_bytes.between
    assert found.total >= between / 2 / 20.0  # two hosts' adapters, in both directions at most
    faster = replace(
        hardware, tiers=tuple(replace(t, send=replace(t.send, bytes_per_second=1e9)) for t in hardware.tiers)
    )
    faster = replace(faster, tiers=tuple(replace(t, shared_bytes_per_second=float("inf")) for t in faster.tiers))
    assert realloc_seconds(plan, faster).total < found.total


def test_nothing_to_send_takes_the_copies_alone() -> None:
    layout = GRIDS["tp8"].layout()
    plan = plan_realloc(layout, layout, bucket_bytes=4096, ranks_per_host=4)
    found = realloc_seconds(plan, small())
    assert plan.total_bytes == 0 and not found.rounds and 0 < found.total == found.copies
