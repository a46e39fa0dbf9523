"""What a change of plans moves between ranks, from the exact reallocation plans of weights and optimizer states. Pure.

`usp.rlhf.runtime.copies` moves the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from parallel import Hardware, ReallocPlan, plan_realloc, realloc_seconds
from usp.cost.calls.plan_estimates import BUCKET_BYTES
from usp.model.facts import ModelShape
from usp.model.weight_layout import weight_layout
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.operations import WeightCopy, kept_copies, trained_copy, weight_copies
from usp.rlhf.plan.plan import ExecutionPlan

_STATES = 3  # the float32 tensors of a trained parameter: its values and two moments, sharded alike


class Move(NamedTuple):
    """The reallocation that fills a copy of the new plan, which runs for `times` tensors per parameter."""

    plan: ReallocPlan
    times: int


def moves(
    graph: DataflowGraph,
    before: ExecutionPlan,
    after: ExecutionPlan,
    models: Mapping[str, ModelShape],
    dtype: torch.dtype,
    ranks_per_host: int,
) -> Iterator[Move]:
    """Yield the reallocations between two plans: of trained copies, and of untrained ones that only `after` has.

    Args:
        models: by role.
        dtype: of untrained weights.
    """
    kept = kept_copies(graph, before, after)
    for role in graph.roles:
        trains = graph.train_call(role) is not None
        sources, targets = (_with_values(graph, plan, role) for plan in (before, after))
        kind = torch.float32 if trains else dtype
        held, wanted = (
            [weight_layout(models[role], c.layout.dims, c.layout.ranks, zero=c.layout.zero, dtype=kind) for c in copies]
            for copies in (sources, [copy for copy in targets if copy not in kept])
        )
        for target in wanted:
            plan = plan_realloc(
                held[0], target, copies=held[1:], bucket_bytes=BUCKET_BYTES, ranks_per_host=ranks_per_host
            )
            yield Move(plan, _STATES if trains else 1)


def _with_values(graph: DataflowGraph, plan: ExecutionPlan, role: str) -> list[WeightCopy]:
    """Return the copies of a role that have their values between steps."""
    trained = trained_copy(graph, plan, role)
    return [trained] if trained else [copy for copy in weight_copies(graph, plan) if copy.role == role]


def move_bytes(found: Iterable[Move]) -> int:
    """Return the bytes that ranks send each other."""
    return sum(move.times * move.plan.total_bytes for move in found)


def move_seconds(found: Iterable[Move], hardware: Hardware) -> float:
    """Return the time of all moves, one after another."""
    return sum(move.times * realloc_seconds(move.plan, hardware).total for move in found)
