"""Measuring reallocations between layouts of a model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from parallel import ParallelMesh, ProcessGroups, Reallocation, gather_layout, plan_realloc
from usp.cost.calls.plan_estimates import BUCKET_BYTES
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.roles.role_spec import RoleSpec

from .moves import Moves, fitted

TURNS = 6
PAIRS = 8  # at most


def pairs_of(layouts: Iterable[CallLayout]) -> list[tuple[CallLayout, CallLayout]]:
    """Return pairs of layouts that hold a model's weights differently, spread over all of them."""
    found = list(dict.fromkeys(layout.of_weights for layout in layouts))
    if len(found) < 2:
        return []
    pairs = list(itertools.pairwise([*found, found[0]]))
    return pairs[:: -(-len(pairs) // PAIRS)]


def measure_moves(
    spec: RoleSpec, pairs: Sequence[tuple[CallLayout, CallLayout]], groups: ProcessGroups, device: torch.device
) -> Moves:
    """Return what reallocations take, from those of a model between pairs of layouts. Collective over the world."""
    plans, seconds = [], []
    for pair in pairs:
        meshes = [ParallelMesh.create(layout.dims, device.type, layout.ranks, groups) for layout in pair]
        models = [
            RoleModel(spec, layout, mesh) if mesh.member else None for layout, mesh in zip(pair, meshes, strict=True)
        ]
        for model in models:
            if model is not None:
                model.allocate()
        source, target = ({} if model is None else model.weights() for model in models)
        layouts = gather_layout(source), gather_layout(target)
        plan = plan_realloc(*layouts, bucket_bytes=BUCKET_BYTES, ranks_per_host=dist.get_world_size())
        reallocation, turns = Reallocation(plan, groups, device), []
        for _ in range(1 + TURNS):
            dist.barrier()
            begin = time.perf_counter()
            reallocation.run(source, target, [])
            turns.append(time.perf_counter() - begin)
        longest = torch.tensor(turns[1:], dtype=torch.float64, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        plans.append(plan)
        seconds.append(median(longest.tolist()))
    return fitted(plans, seconds)
