"""The weight copies of a plan on this rank, the reallocations between them, and those from one plan to another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from usp.parallel import (
    DeltaReallocation,
    ParallelDims,
    ParallelMesh,
    ParamLayout,
    ProcessGroups,
    Reallocation,
    ReallocPlan,
    gather_layout,
    plan_realloc,
)
from usp.parallel.reallocation.realloc_plan import BUCKET_BYTES
from usp.parallel.reallocation.reallocation import Traffic
from usp.rlhf.graph import DataflowGraph
from usp.rlhf.plan.operations import StepWeights, WeightCopy, kept_copies, plan_weights, trained_copy, weight_copies
from usp.rlhf.plan.plan import OWN, ExecutionPlan
from usp.rlhf.roles.engine_model import EngineModel
from usp.rlhf.roles.role_model import BuildRole, RoleModel

from .timeline import Event


@dataclass(frozen=True)
class CopyOptions:
    """How the copies of any plan are built and filled.

    ranks_per_host: for reallocation, which prefers sources on the same host.
    delta_updates: copies keep their memory from step to step, and receive what has changed; for an engine the values
        stay here that it was given last.
    """

    groups: ProcessGroups
    build_role: BuildRole
    device: torch.device
    ranks_per_host: int
    delta_updates: bool = False


class RoleCopies:
    """A model for each role and layout, and the reallocations that fill copies from others of their role.

    Weights that training leaves as they are (the base of adapters) are never reallocated: a copy reads them itself, or
    shares them with the trained copy. Collective over the world.

    Args:
        before: the copies of another plan, between two steps. What both plans have stays, and from the others weights
            and optimizer states move here, exactly, so that `before` cannot be used afterwards. Of one role at a time,
            a rank holds what it had and what it gets.
        event: is filled in with what this rank sends and receives then; given with `before`.

    aliases: copies that share the memory of their role's trained copy.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        options: CopyOptions,
        before: RoleCopies | None = None,
        event: Event | None = None,
    ) -> None:
        self._device, self._groups = device, groups = options.device, options.groups
        self._limits: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, "ranks_per_host": options.ranks_per_host}
        self._plan, self._event, self.delta_updates = plan, event, options.delta_updates
        self._reallocations: dict[tuple[WeightCopy, tuple[WeightCopy, ...]], list[Reallocation]] = {}
        # By which reallocation each copy was last filled, or each round of an engine's; what delta updates gave it.
        self._filled: dict[tuple[WeightCopy, int], Reallocation] = {}
        self._given: dict[tuple[WeightCopy, int], Mapping[str, Tensor]] = {}
        self._models: dict[WeightCopy, RoleModel] = {}
        self._trained = {role: copy for role in graph.roles if (copy := trained_copy(graph, plan, role))}
        self._uses = weight_copies(graph, plan)
        staying = kept_copies(graph, before._plan, plan) if before else frozenset()
        meshes: dict[tuple[tuple[int, ...], ParallelDims], ParallelMesh] = {}
        for role in dict.fromkeys(copy.role for copy in self._uses):
            new = [copy for copy in self._uses if copy.role == role and copy not in staying]
            for copy in new:
                place = (copy.layout.ranks, copy.layout.dims)
                if place not in meshes:
                    meshes[place] = ParallelMesh.create(copy.layout.dims, device.type, copy.layout.ranks, groups)
                if meshes[place].member:
                    train = graph.train_call(role) if copy == self._trained.get(role) else None
                    call = train or self._uses[copy][0]
                    self._models[copy] = options.build_role(call, plan[call.name], meshes[place])
                    if before is None and self._holds_values(copy):
                        self._models[copy].fill()
            if before:
                self._take_over(role, new, before, staying)
        copies = [*self._trained.values(), *(copy for copy in self._uses if copy not in self._trained.values())]
        self._layouts = {copy: gather_layout(self._weights(copy)) for copy in copies}
        frozen = {copy: gather_layout(self._frozen(copy)) for copy in copies}
        shared = before.aliases & staying if before else frozenset()
        unsure = [copy for copy in self._uses if copy not in staying and not self._holds_values(copy)]
        self.aliases: frozenset[WeightCopy] = shared.union(c for c in unsure if self._share(c, frozen))

    @property
    def trained(self) -> dict[str, RoleModel]:
        """The models that this rank trains, by role."""
        return {role: self._models[copy] for role, copy in self._trained.items() if copy in self._models}

    def plan_step(self, graph: DataflowGraph, plan: ExecutionPlan) -> StepWeights:
        """Plan how the copies of a step are filled, and get ready for it. Collective over the world."""
        step = plan_weights(graph, plan, self._layouts, self.aliases, **self._limits, stay=self.delta_updates)
        for copy, fill in step.fills.items():
            parts = [fill] if copy.layout.engine == OWN else layer_plans(fill)
            kind = DeltaReallocation if self.delta_updates else Reallocation
            reallocations = [kind(part, self._groups, self._device) for part in parts]
            self._reallocations[copy, step.sources[copy]] = reallocations
        return step

    def of_role(self, role: str) -> list[RoleModel]:
        """Return this rank's models of a role."""
        return [model for copy, model in self._models.items() if copy.role == role]

    def follow(self, role: str, trained: str, weight: float, event: Event) -> None:
        """Move the weights of an untrained role towards those of a trained one, by this part of the way.

        Collective over the world. A rank needs memory for one layer more. Raises ValueError, before anything moves, if
        the roles have different parameters.
        """
        source = self._trained[trained]
        for copy in (copy for copy in self._uses if copy.role == role):
            if copy in self._models:
                self._models[copy].load()
            weights = self._weights(copy)
            for part in layer_plans(plan_realloc(self._layouts[source], self._layouts[copy], **self._limits)):
                values = {name: torch.empty_like(weights[name]) for name in part.dst.parameters if name in weights}
                reallocation = Reallocation(part, self._groups, self._device)
                reallocation.run(self._weights(source), values)
                for name, of_trained in values.items():
                    share = weight if of_trained.is_floating_point() else 1
                    weights[name].copy_(of_trained if share == 1 else weights[name].lerp(of_trained, share))
                _record(event, reallocation.traffic)
            if copy in self._models and role in self._plan.offload:
                self._models[copy].offload()

    def model(self, copy: WeightCopy) -> RoleModel:
        """Return the model of a copy that this rank has a part of."""
        return self._models[copy]

    def reallocate(self, copy: WeightCopy, sources: tuple[WeightCopy, ...], event: Event) -> None:
        """Allocate a copy and fill it from the trained one and `sources`. Collective over the ranks of all of them."""
        if copy in self._models:
            self._models[copy].allocate()
        reallocations, model = self._reallocations[copy, sources], self._models.get(copy)
        held, others = self._weights(self._trained[copy.role]), [self._weights(source) for source in sources]

        def rounds() -> Iterator[Mapping[str, Tensor]]:
            for place, reallocation in (((copy, number), each) for number, each in enumerate(reallocations)):
                if place in self._given:
                    parts = self._given[place]
                elif isinstance(model, EngineModel):
                    parts = model.parts(list(reallocation.plan.dst.parameters))
                    if self.delta_updates:
                        self._given[place] = parts
                else:
                    parts = self._weights(copy)
                traffic = reallocation.traffic
                if isinstance(reallocation, DeltaReallocation):
                    intact = self._filled.get(place) is reallocation  # evaluations may fill a copy from others
                    traffic = reallocation.update(held, parts, others, intact=intact)
                else:
                    reallocation.run(held, parts, others)
                self._filled[place] = reallocation
                _record(event, traffic)
                yield parts

        if isinstance(model, EngineModel):
            event.sent += model.take(rounds())
        else:
            for _ in rounds():
                pass

    def _holds_values(self, copy: WeightCopy) -> bool:
        """Return whether a copy has its values between steps, instead of being filled where it is needed."""
        return self._trained.get(copy.role, copy) == copy

    def _take_over(self, role: str, new: Sequence[WeightCopy], before: RoleCopies, kept: frozenset[WeightCopy]) -> None:
        """Take the models of a role that stay, and fill the new ones from those of `before`, which are then freed."""
        old = [copy for copy in before._uses if copy.role == role]
        sources = [copy for copy in old if before._holds_values(copy)]
        targets = [copy for copy in new if self._holds_values(copy)]
        loaded = [copy for copy in sources if targets or role not in self._plan.offload]
        for copy in (copy for copy in loaded if copy in before._models):
            before._models[copy].load()
        for copy in targets:
            self._fill_from(before, sources, copy)
        for copy in [copy for copy in old if copy in before._models]:
            model = before._models.pop(copy)
            if copy in kept:
                self._models[copy] = model
            elif isinstance(model, RoleModel) and copy in sources:
                model.discard()
        if role in self._plan.offload:
            for copy in [copy for copy in self._models if copy.role == role]:
                self._models[copy].offload()

    def _fill_from(self, before: RoleCopies, sources: Sequence[WeightCopy], copy: WeightCopy) -> None:
        """Allocate a copy and fill it, a trained one with its optimizer states, from those of another plan."""
        trained = copy in self._trained.values()
        held = [before._values(source, trained) for source in sources]
        if copy in self._models:
            self._models[copy].allocate()
        wanted = self._values(copy, trained)
        layouts, target = [gather_layout(values) for values in held], gather_layout(wanted)
        plan = plan_realloc(layouts[0], target, copies=layouts[1:], **self._limits)
        reallocation = Reallocation(plan, self._groups, self._device)
        reallocation.run(held[0], wanted, held[1:])
        model = self._models.get(copy)
        if trained and isinstance(model, RoleModel):
            model.restore()
        _record(self._event, reallocation.traffic)

    def _values(self, copy: WeightCopy, states: bool) -> Mapping[str, Tensor]:
        """Return all that a copy on this rank has between steps: its weights, and if trained its optimizer's states."""
        model = self._models.get(copy)
        if model is None or not states:
            return self._weights(copy)
        return model.state()

    def _weights(self, copy: WeightCopy) -> Mapping[str, Tensor]:
        return self._models[copy].weights() if copy in self._models else {}

    def _frozen(self, copy: WeightCopy) -> Mapping[str, Tensor]:
        model = self._models.get(copy)
        return model.frozen() if isinstance(model, RoleModel) else {}

    def _share(self, copy: WeightCopy, frozen: Mapping[WeightCopy, ParamLayout]) -> bool:
        """Share the memory of the trained copy where that has the same boxes on every rank of this one. Returns whether
        all weights are shared; if not, the frozen ones may be."""
        source, model = self._trained[copy.role], self._models.get(copy)
        supported = copy.layout.engine == OWN and (model is None or isinstance(model, RoleModel))
        same_frozen = supported and copy.layout.zero == 0 and _holds(frozen[source], frozen[copy])
        same = same_frozen and _holds(self._layouts[source], self._layouts[copy])
        agreed = torch.tensor([same_frozen, same], dtype=torch.int64, device=self._device)
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
        same_frozen, same = agreed.bool().tolist()
        if isinstance(model, RoleModel) and (same or (same_frozen and frozen[copy].parameters)):
            has = {**self._frozen(copy), **self._weights(copy)}  # of a pipeline stage not all that the source has
            shared = {**self._frozen(source), **(self._weights(source) if same else {})}
            model.share({name: weight for name, weight in shared.items() if name in has})
        return same


def layer_plans(plan: ReallocPlan) -> list[ReallocPlan]:
    """Divide a plan by layers, so that a rank needs memory for one layer of `dst` at a time; parameters of no layer are
    each by themselves. Pure. Every part sends the minimum of its parameters, so all of them send that of the model."""

    def layer(name: str) -> str:
        return numbered[0] if (numbered := re.match(r".*?\.\d+\.", name)) else name

    def only(layout: ParamLayout, names: Sequence[str]) -> ParamLayout:
        held = [name for name in names if name in layout.parameters]
        return ParamLayout({n: layout.parameters[n] for n in held}, {n: layout.boxes[n] for n in held})

    plans = []
    for names in (list(group) for _, group in groupby(plan.dst.parameters, layer)):
        src, dst, *copies = (only(layout, names) for layout in (plan.src, plan.dst, *plan.copies))
        options = {"bucket_bytes": plan.bucket_bytes, "ranks_per_host": plan.ranks_per_host}
        plans.append(plan_realloc(src, dst, copies=copies, **options))
    return plans


def _record(event: Event | None, traffic: Traffic) -> None:
    """Add what this rank has sent and received to an event."""
    for name, nbytes in traffic._asdict().items():
        setattr(event, name, getattr(event, name) + nbytes)


def _holds(source: ParamLayout, copy: ParamLayout) -> bool:
    """Return whether every rank that holds something in `copy` holds the same in `source`."""
    return copy.parameters == source.parameters and all(
        source.boxes[name].get(rank) == box for name, boxes in copy.boxes.items() for rank, box in boxes.items()
    )
