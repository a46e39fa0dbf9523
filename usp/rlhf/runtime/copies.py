"""The models of a plan on this rank: one for each role and layout, and the reallocations between them, planned once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ParallelDims, ParallelMesh, ParamLayout, ProcessGroups, Reallocation, gather_layout, plan_realloc
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.operations import WeightCopy, trained_copy, weight_copies
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.roles.role import BuildRole, RoleModel, Sharing

from .timeline import Traffic


@dataclass(frozen=True)
class Moving:
    """How weights move.

    Attributes:
        ranks_per_host: a rank takes them from its own host where it can.
        bucket_bytes: of memory that a rank needs for them beside the weights.
    """

    ranks_per_host: int
    bucket_bytes: int = 64 << 20


class RoleCopies:
    """Making one is collective over the world."""

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        groups: ProcessGroups,
        build_role: BuildRole,
        device: torch.device,
        moving: Moving,
    ) -> None:
        self._groups, self._device, self._moving = groups, device, moving
        self._models: dict[WeightCopy, RoleModel] = {}
        self._homes = {role: copy for role in graph.roles if (copy := trained_copy(graph, plan, role))}
        self._reallocations: dict[WeightCopy, Reallocation] = {}
        self._minimum: dict[WeightCopy, int] = {}  # bytes that this rank must receive
        meshes: dict[tuple[tuple[int, ...], ParallelDims], ParallelMesh] = {}
        for copy, calls in weight_copies(graph, plan).items():
            place = (copy.layout.ranks, copy.layout.dims)
            if place not in meshes:
                meshes[place] = ParallelMesh.create(copy.layout.dims, device.type, copy.layout.ranks, groups)
            if meshes[place].member:
                call = graph.train_call(copy.role) if copy == self._homes.get(copy.role) else calls[0]
                assert call
                self._models[copy] = build_role(call, copy.layout, meshes[place])
                if self._homes.get(copy.role, copy) == copy:
                    self._models[copy].fill()
        made = [copy for copy in weight_copies(graph, plan) if self._homes.get(copy.role, copy) != copy]
        layouts = {copy: gather_layout(self._weights(copy)) for copy in [*self._homes.values(), *made]}
        self.aliases = frozenset(copy for copy in made if self._share(copy, layouts))
        for copy in made:
            if copy not in self.aliases:
                self._reallocations[copy] = self._plan(layouts[self._homes[copy.role]], layouts[copy])
                self._minimum[copy] = self._reallocations[copy].plan.lacking_bytes(dist.get_rank())

    def model(self, copy: WeightCopy) -> RoleModel:
        """A copy that this rank has a part of."""
        return self._models[copy]

    @property
    def trained(self) -> Mapping[str, RoleModel]:
        """The copies with an optimiser, by role, that this rank has a part of."""
        return {role: self._models[copy] for role, copy in self._homes.items() if copy in self._models}

    def reallocate(self, copy: WeightCopy, traffic: Traffic) -> None:
        """Make a copy of the trained weights; for the ranks of both."""
        if copy in self._models:
            self._models[copy].allocate()
        reallocation = self._reallocations[copy]
        reallocation.run(self._weights(self._homes[copy.role]), self._weights(copy))
        rank = dist.get_rank()
        traffic.sent = reallocation.plan.sent_bytes.get(rank, 0)
        traffic.received = reallocation.plan.received_bytes.get(rank, 0)
        traffic.minimum = self._minimum[copy]

    def _weights(self, copy: WeightCopy) -> Mapping[str, Tensor]:
        return self._models[copy].weights() if copy in self._models else {}

    def _plan(self, source: ParamLayout, target: ParamLayout) -> Reallocation:
        moving = self._moving
        plan = plan_realloc(source, target, bucket_bytes=moving.bucket_bytes, ranks_per_host=moving.ranks_per_host)
        return Reallocation(plan, self._groups, self._device)

    def _share(self, copy: WeightCopy, layouts: Mapping[WeightCopy, ParamLayout]) -> bool:
        """Let a copy live in the memory of the trained one, where every rank of it has the same boxes of that."""
        source = self._homes[copy.role]
        model = self._models.get(copy)
        same = (
            copy.layout.zero == 0
            and layouts[copy].parameters == layouts[source].parameters
            and all(
                layouts[source].boxes[name].get(rank) == box
                for name, boxes in layouts[copy].boxes.items()
                for rank, box in boxes.items()
            )
        )
        can = torch.tensor(int(same and (model is None or isinstance(model, Sharing))), device=self._device)
        dist.all_reduce(can, dist.ReduceOp.MIN)
        if can and isinstance(model, Sharing):
            model.share(self._models[source].weights())
        return bool(can)
