"""The layouts that a call of an RLHF step may have: its ranks, and the degrees and the memory options on them. Pure.

The ranks and degrees of ReaL (arXiv 2406.14088, section 5 and its public code): part of a host, of a size that divides
the host and at a multiple of that size, or whole consecutive hosts; a pipeline stage is within a host or has whole
hosts. `OptionSpace.real` counts as many options as ReaL has; ring and Ulysses degrees, ZeRO stages and activation
checkpointing are beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

from parallel import ParallelDims, divisors
from usp.rlhf.graph.calls import ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout

_STAGES_BESIDE_HOSTS = 8  # ReaL: pp is at most the number of hosts, or this if there are fewer


@dataclass(frozen=True)
class ModelLimits:
    """What the model of a role allows: tp divides both kinds of heads, tp x ulysses is at most `heads`, pp at most
    `layers`."""

    heads: int
    kv_heads: int
    layers: int


@dataclass(frozen=True)
class OptionSpace:
    """The layouts to choose from.

    Attributes:
        world_size, ranks_per_host: of the cluster.
        samples: of a step.
        smallest: the fewest ranks of a call.
        even: whole hosts are as many as divide all of them, from a multiple of that number.
        max_tp: the highest tensor-parallel degree.
        max_sequence: the highest ring x ulysses; 1: no sequence parallelism.
        zero: ZeRO stages of train and inference calls where there is more than one rank to shard over.
        recompute: activation checkpointing of train steps: (--ac, --ac-offload).
        train_within_host: keep dp x tp of a train step within a host, as ReaL does.
        limits: by role; a role that is missing has none.
        allowed: whether the model of a call can have a layout, beyond these limits.

    Raises:
        ValueError: for ranks that are not whole hosts.
    """

    world_size: int
    ranks_per_host: int
    samples: int
    smallest: int = 1
    even: bool = False
    max_tp: int = 8
    max_sequence: int = 1
    zero: tuple[int, ...] = (0,)
    recompute: tuple[tuple[str, bool], ...] = (("none", False),)
    train_within_host: bool = False
    limits: dict[str, ModelLimits] = field(default_factory=dict, hash=False)
    allowed: Callable[[ModelCall, CallLayout], bool] = field(default=lambda call, layout: True, compare=False)

    def __post_init__(self) -> None:
        if self.world_size > self.ranks_per_host and self.world_size % self.ranks_per_host:
            raise ValueError(f"{self.world_size} ranks must be whole hosts of {self.ranks_per_host}")

    @staticmethod
    def real(world_size: int, samples: int, smallest: int = 4) -> OptionSpace:
        """Return the space that ReaL searches, on hosts of 8 ranks."""
        recompute = (("full", False),)
        return OptionSpace(world_size, 8, samples, smallest, recompute=recompute, train_within_host=True)

    @property
    def hosts(self) -> int:
        return max(1, self.world_size // self.ranks_per_host)


def rank_sets(space: OptionSpace) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that a call may have, smaller sets first."""
    host = min(space.ranks_per_host, space.world_size)
    for size in (size for size in divisors(host) if space.smallest <= size < host):
        yield from (tuple(range(first, first + size)) for first in range(0, space.world_size, size))
    for hosts in divisors(space.hosts) if space.even else range(1, space.hosts + 1):
        if hosts * host >= space.smallest:
            for first in range(0, space.hosts - hosts + 1, hosts if space.even else 1):
                yield tuple(range(first * host, (first + hosts) * host))


def degrees(ranks: int, space: OptionSpace) -> Iterator[ParallelDims]:
    """Yield the ways to divide a number of ranks, all data-parallel ranks in dp_shard."""
    host = space.ranks_per_host
    for tp in divisors(ranks, min(space.max_tp, host)):
        if host % tp:
            continue
        for pp in divisors(ranks // tp):
            stage = ranks // pp
            if host % stage and stage % host:
                continue
            for sequence in divisors(stage // tp, space.max_sequence):
                for ulysses in divisors(sequence):
                    shards = stage // tp // sequence
                    yield ParallelDims(pp, 1, shards, sequence // ulysses, ulysses, tp)


def options(call: ModelCall, space: OptionSpace) -> Iterator[CallLayout]:
    """Yield every layout of a call.

    A function (`compute`) has the data-parallel ranks alone. Generation has ZeRO stage 0 and its weights complete on
    each data-parallel rank.
    """
    if call.kind == "compute":
        for ranks in rank_sets(space):
            yield CallLayout(ranks, ParallelDims(dp_replicate=len(ranks), dp_shard=1))
        return
    for ranks in rank_sets(space):
        for dims in degrees(len(ranks), space):
            if allows(call, dims, space):
                yield from (one for one in _with_memory(call, ranks, dims, space) if space.allowed(call, one))


def allows(call: ModelCall, dims: ParallelDims, space: OptionSpace) -> bool:
    """Return whether the model and the batch of a call allow degrees."""
    if call.kind == "compute":
        return True
    limit = space.limits.get(call.role)
    if limit and (
        math.gcd(limit.heads, limit.kv_heads) % dims.tp
        or dims.tp * dims.ulysses > limit.heads
        or dims.pp > limit.layers
    ):
        return False
    if dims.pp > max(space.hosts, _STAGES_BESIDE_HOSTS):
        return False
    if not isinstance(call.work, TrainStep):
        return space.samples >= dims.batch * dims.pp
    if space.train_within_host and dims.tp * dims.batch > space.ranks_per_host:
        return False
    return space.samples >= 2 * dims.batch * dims.pp * call.work.mini_batches


def _with_memory(
    call: ModelCall, ranks: tuple[int, ...], dims: ParallelDims, space: OptionSpace
) -> Iterator[CallLayout]:
    """Yield the memory options of a call on given ranks and degrees."""
    trains = call.kind == "train_step"
    shards = dims.dp_shard * dims.sp
    stages = space.zero if shards > 1 and call.kind != "generate" else (0,)
    recompute = space.recompute if trains else (("none", False),)
    for zero, (ac, offload) in product(stages, recompute):
        sequence_parallel = trains and dims.tp > 1
        yield CallLayout(ranks, dims, zero, tp_sequence_parallel=sequence_parallel, ac=ac, ac_offload=offload)
