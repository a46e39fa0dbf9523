"""Process groups of a run, by number of ranks: collective calls of the whole world, communicators of a rank, seconds.

    python -m benchmarks.communicators

Every rank's part is computed in one process that acts as some of its ranks, with torch's fake backend, as NCCL with a
device bound to the world would: groups that partition the ranks are made in one split of the world's communicator.
Memory is an estimate for collectives over NVLink: 24 channels with two connections of a 4 MiB buffer each (NCCL's
default NCCL_BUFFSIZE), for each communicator that is used; sends and receives share buffers, and add less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.harness.record import Record, finish
from usp.parallel import ParallelDims, ParallelMesh, ProcessGroups
from usp.predict.fake_world import fake_world

COLUMNS = ("ranks", "what", "calls of the world", "communicators of a rank", "of one rank", "est. MiB of a rank", "s")
MIB_EACH = 24 * 2 * 4
MOST_OF_A_RANK, MOST_CALLS = 12, 40


@dataclass
class Made:
    """Groups that were made. calls: in which every rank takes part. used: with more than one rank, of this rank, the
    world's included. alone: communicators of one rank."""

    calls: int = 0
    used: int = 1
    alone: int = 0
    seconds: float = field(default=0.0, compare=False)


@contextmanager
def counting() -> Iterator[Made]:
    """Count the groups that the block makes, as if NCCL had a device bound to the world."""
    made, new_group, world = Made(), dist.new_group, dist.group.WORLD
    assert world is not None

    def new(ranks: Any = None, *args: Any, use_local_synchronization: bool = False, **named: Any) -> Any:
        ranks = [*range(dist.get_world_size())] if ranks is None else ranks
        made.calls += not use_local_synchronization
        inside = dist.get_rank() in ranks
        made.used += inside and len(ranks) > 1
        made.alone += inside and len(ranks) == 1 and world.bound_device_id is not None
        return new_group(ranks, use_local_synchronization=True)

    def split(parent: Any = None, split_ranks: Any = None, **named: Any) -> Any:
        made.calls += 1
        mine = next((ranks for ranks in split_ranks if dist.get_rank() in ranks), None)
        made.used += mine is not None
        return new_group(mine, use_local_synchronization=True) if mine else None

    world.bound_device_id = torch.device("cuda", 0)
    begin = time.perf_counter()
    with patch.object(dist, "new_group", new), patch.object(dist, "split_group", split):
        yield made
    made.seconds = time.perf_counter() - begin


def readme(world_size: int) -> None:
    """Make the mesh of the README: data parallel outside of ring x ulysses."""
    ring, ulysses = (2, 4) if world_size == 8 else (8, 8) if world_size > 64 else (4, 8)
    ParallelMesh.create(ParallelDims(ring=ring, ulysses=ulysses), "cpu")


def four_axes(world_size: int) -> None:
    """Make a mesh with replicas, ZeRO, ring x ulysses and a pipeline, as far as there are ranks."""
    dims = {8: (1, 2, 2, 2), 64: (2, 2, 4, 4)}.get(world_size, (2, 4, 8, 4))
    replicas, ring, ulysses, pp = dims
    ParallelMesh.create(ParallelDims(dp_replicate=replicas, ring=ring, ulysses=ulysses, pp=pp), "cpu")


def rlhf(world_size: int) -> None:
    """Make the groups of a plan on two halves of the ranks, each with two layouts: meshes, and those of messages."""
    groups, half = ProcessGroups(), world_size // 2
    first, second = range(half), range(half, world_size)
    width = min(8, half)
    for dims, ranks in (
        (ParallelDims(ring=2, ulysses=width // 2), first),
        (ParallelDims(tp=width), second),
        (ParallelDims(ulysses=width), second),
        (ParallelDims(pp=2, tp=width // 2), first),
    ):
        ParallelMesh.create(dims, "cpu", ranks, groups)
    for lane in ("", "transfer"):  # reallocations, and samples
        groups.get(range(world_size), lane)


WHAT: dict[str, Callable[[int], None]] = {
    "README's mesh": readme,
    "4D (replicas, ZeRO, ring x ulysses, pp)": four_axes,
    "RLHF, 4 layouts on 2 halves": rlhf,
}


def measure(make: Callable[[int], None], world_size: int, ranks: int = 4) -> Made:
    """Return the largest counts of a few ranks of the world, from its first to its last, and the seconds of one."""
    most = Made()
    for rank in {round(place * (world_size - 1) / (ranks - 1)) for place in range(ranks)}:
        with fake_world(world_size, rank), counting() as made:
            make(world_size)
        counts = (max(getattr(most, name), getattr(made, name)) for name in ("calls", "used", "alone", "seconds"))
        most = Made(*counts)
    return most


def rows() -> Iterator[tuple[str, ...]]:
    for world_size in (8, 64, 1024):
        for what, make in WHAT.items():
            made = measure(make, world_size)
            counts = (str(made.calls), str(made.used), str(made.alone), f"{made.used * MIB_EACH:,}")
            yield (f"{world_size:,}", what, *counts, f"{made.seconds:.2f}")


def main() -> None:
    table = tuple(rows())
    worst = [row for row in table if int(row[3]) > MOST_OF_A_RANK or int(row[4])]
    calls = max(int(row[2]) for row in table if row[1].startswith("README"))
    notes = [
        f"At most {MOST_OF_A_RANK} communicators of a rank, {MOST_CALLS} calls of the world for the README's mesh, and "
        f"none of one rank: {'held' if not worst and calls <= MOST_CALLS else 'NOT held'} ({calls} calls)."
    ]
    data = [dict(zip(COLUMNS, row, strict=True)) for row in table]
    finish(Record.of("communicators", "How many process groups a run makes", COLUMNS, table, notes, data))


if __name__ == "__main__":
    main()
