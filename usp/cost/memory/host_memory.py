"""The host memory of a step: what the ranks of a host keep in its memory."""

from __future__ import annotations

from collections import Counter

from usp.cost.job import Job

from .footprint import rank_host_bytes


def host_bytes(job: Job, devices: int) -> int:
    """Return the most bytes that the ranks of one host keep in its memory, `devices` ranks on each host."""
    kept = [rank_host_bytes(job, rank) for rank in job.ranks("pp", 0)]
    hosts: Counter[int] = Counter()
    for rank in range(job.world_size):
        hosts[rank // devices] += kept[job.place("pp", rank)]
    return max(hosts.values())
