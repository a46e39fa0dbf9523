"""The weight copies of a plan on this rank, and the reallocations between them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy as shallow_copy

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ParallelDims, ParallelMesh, ParamLayout, ProcessGroups, Reallocation, ReallocPlan, gather_layout
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.plan.step_weights import WeightCopy, plan_weights, trained_copy, weight_copies
from usp.rlhf.roles.role import BuildRole, Role, SupportsSharing

from .timeline import BytesMoved

_BUCKET_BYTES = 64 << 20  # buffer memory of a reallocation, per rank


class RoleCopies:
    """A model for each role and layout, and the reallocations that fill copies from others of their role.

    Weights that training leaves as they are (the base of adapters) are never reallocated: a copy reads them itself, or
    shares them with the trained copy. Collective over the world.

    Args:
        ranks_per_host: for reallocation, which prefers sources on the same host.

    Attributes:
        step: which copies share memory, and how the others are filled.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        groups: ProcessGroups,
        build_role: BuildRole,
        device: torch.device,
        ranks_per_host: int,
    ) -> None:
        self._groups, self._device, self._ranks_per_host = groups, device, ranks_per_host
        self._models: dict[WeightCopy, Role] = {}
        self._trained = {role: copy for role in graph.roles if (copy := trained_copy(graph, plan, role))}
        meshes: dict[tuple[tuple[int, ...], ParallelDims], ParallelMesh] = {}
        for copy, calls in weight_copies(graph, plan).items():
            place = (copy.layout.ranks, copy.layout.dims)
            if place not in meshes:
                meshes[place] = ParallelMesh.create(copy.layout.dims, device.type, copy.layout.ranks, groups)
            if meshes[place].member:
                call = graph.train_call(copy.role) if copy == self._trained.get(copy.role) else calls[0]
                assert call
                self._models[copy] = build_role(call, plan[call.name], meshes[place])
                if self._trained.get(copy.role, copy) == copy:
                    self._models[copy].fill()
        filled = [copy for copy in weight_copies(graph, plan) if self._trained.get(copy.role, copy) != copy]
        copies = [*self._trained.values(), *filled]
        self._layouts = {copy: gather_layout(self._weights(copy)) for copy in copies}
        frozen = {copy: gather_layout(self._frozen(copy)) for copy in copies}
        self._aliases = frozenset(copy for copy in filled if self._share(copy, self._layouts, frozen))
        self._plan_step(graph, plan)

    def of_graph(self, graph: DataflowGraph, plan: ExecutionPlan) -> RoleCopies:
        """Return the same copies for the steps of another graph, which needs no others. Collective over the world."""
        other = shallow_copy(self)
        other._plan_step(graph, plan)
        return other

    def _plan_step(self, graph: DataflowGraph, plan: ExecutionPlan) -> None:
        options = {"bucket_bytes": _BUCKET_BYTES, "ranks_per_host": self._ranks_per_host}
        self.step = plan_weights(graph, plan, self._layouts, self._aliases, **options)
        fills = self.step.fills.items()
        self._reallocations = {copy: Reallocation(fill, self._groups, self._device) for copy, fill in fills}
        self._moved = {copy: _moved(fill, dist.get_rank()) for copy, fill in fills}

    def model(self, copy: WeightCopy) -> Role:
        """Return the model of a copy that this rank has a part of."""
        return self._models[copy]

    def reallocate(self, copy: WeightCopy, moved: BytesMoved) -> None:
        """Allocate a copy and fill it from those in memory. Collective over the ranks of all of them."""
        if copy in self._models:
            self._models[copy].allocate()
        others = [self._weights(source) for source in self.step.sources[copy]]
        self._reallocations[copy].run(self._weights(self._trained[copy.role]), self._weights(copy), others)
        for name, size in self._moved[copy].items():
            setattr(moved, name, size)

    def _weights(self, copy: WeightCopy) -> Mapping[str, Tensor]:
        return self._models[copy].weights() if copy in self._models else {}

    def _frozen(self, copy: WeightCopy) -> Mapping[str, Tensor]:
        model = self._models.get(copy)
        return model.frozen() if isinstance(model, SupportsSharing) else {}

    def _share(
        self, copy: WeightCopy, layouts: Mapping[WeightCopy, ParamLayout], frozen: Mapping[WeightCopy, ParamLayout]
    ) -> bool:
        """Share the memory of the trained copy where that has the same boxes on every rank of this one.

        Returns whether all weights are shared; if not, the frozen ones alone may be.
        """
        source, model = self._trained[copy.role], self._models.get(copy)
        supported = model is None or isinstance(model, SupportsSharing)
        same_frozen = supported and copy.layout.zero == 0 and _holds(frozen[source], frozen[copy])
        same = same_frozen and _holds(layouts[source], layouts[copy])
        agreed = torch.tensor([same_frozen, same], dtype=torch.int64, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        same_frozen, same = agreed.bool().tolist()
        if isinstance(model, SupportsSharing) and (same or (same_frozen and frozen[copy].parameters)):
            model.share({**self._frozen(source), **(self._weights(source) if same else {})})
        return same


def _moved(plan: ReallocPlan, rank: int) -> dict[str, int]:
    """Return what a rank's `BytesMoved` says of a reallocation."""
    return {
        "sent": plan.sent_bytes.get(rank, 0),
        "received": plan.received_bytes.get(rank, 0),
        "minimum": plan.lacking_bytes(rank),
        "crossed": plan.crossed_bytes.get(rank, 0),
        "host_minimum": plan.host_lacking_bytes(rank),
    }


def _holds(source: ParamLayout, copy: ParamLayout) -> bool:
    """Return whether every rank that holds something in `copy` holds the same in `source`."""
    return copy.parameters == source.parameters and all(
        source.boxes[name].get(rank) == box for name, boxes in copy.boxes.items() for rank, box in boxes.items()
    )
