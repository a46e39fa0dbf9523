"""The weight copies of a plan on this rank, and the reallocations between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import ParallelDims, ParallelMesh, ParamLayout, ProcessGroups, Reallocation, gather_layout
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.operations import StepWeights, WeightCopy, trained_copy, weight_copies
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.plan.step_weights import plan_weights
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
        aliases: copies that share the memory of their role's trained copy.
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
        self._device, self._groups, self._ranks_per_host = device, groups, ranks_per_host
        self._reallocations: dict[tuple[WeightCopy, tuple[WeightCopy, ...]], Reallocation] = {}
        self._minimum: dict[tuple[WeightCopy, tuple[WeightCopy, ...]], tuple[int, int]] = {}  # what this rank lacks
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
        layouts = self._layouts = {copy: gather_layout(self._weights(copy)) for copy in copies}
        frozen = {copy: gather_layout(self._frozen(copy)) for copy in copies}
        self.aliases = frozenset(copy for copy in filled if self._share(copy, layouts, frozen))

    def plan_step(self, graph: DataflowGraph, plan: ExecutionPlan, staleness: int = 0) -> StepWeights:
        """Plan how the copies of a step are filled, and get ready for it. Collective over the world."""
        options = {"bucket_bytes": _BUCKET_BYTES, "ranks_per_host": self._ranks_per_host, "staleness": staleness}
        step = plan_weights(graph, plan, self._layouts, self.aliases, **options)
        rank = dist.get_rank()
        for copy, fill in step.fills.items():
            key = copy, step.sources[copy]
            self._reallocations[key] = Reallocation(fill, self._groups, self._device)
            self._minimum[key] = fill.lacking_bytes(rank), fill.host_lacking_bytes(rank)
        return step

    def model(self, copy: WeightCopy) -> Role:
        """Return the model of a copy that this rank has a part of."""
        return self._models[copy]

    def reallocate(self, copy: WeightCopy, sources: tuple[WeightCopy, ...], moved: BytesMoved) -> None:
        """Allocate a copy and fill it from the trained one and `sources`. Collective over the ranks of all of them."""
        if copy in self._models:
            self._models[copy].allocate()
        reallocation, others = self._reallocations[copy, sources], [self._weights(source) for source in sources]
        reallocation.run(self._weights(self._trained[copy.role]), self._weights(copy), others)
        fill, rank = reallocation.plan, dist.get_rank()
        moved.sent, moved.received = fill.sent_bytes.get(rank, 0), fill.received_bytes.get(rank, 0)
        moved.crossed = fill.crossed_bytes.get(rank, 0)
        moved.minimum, moved.host_minimum = self._minimum[copy, sources]

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


def _holds(source: ParamLayout, copy: ParamLayout) -> bool:
    """Return whether every rank that holds something in `copy` holds the same in `source`."""
    return copy.parameters == source.parameters and all(
        source.boxes[name].get(rank) == box for name, boxes in copy.boxes.items() for rank, box in boxes.items()
    )
