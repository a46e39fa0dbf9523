"""Process groups by axis name: one object, passed down. Several may live side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .agree import agree
from .dims import DERIVED_AXES, ParallelDims
from .groups import ProcessGroups

_PARAMETERS = ("pp", "dp_replicate", "fsdp", "tp")
_EXPERTS = ("pp", "dp_replicate", "efsdp", "ep")
_REPLICAS = ("pp", "loss", "alone", "tp")  # alone: one rank, the shards of what is not sharded
_VIEWS = (("pp", "batch", "sp", "tp"), _PARAMETERS, _REPLICAS, _EXPERTS)


@dataclass(frozen=True)
class ParallelMesh:
    """The ranks of a `ParallelDims` grid, as torch device meshes: the finest, then the views with derived axes.

    Axes: pp, dp_replicate, dp_shard, ring, ulysses, tp (nesting: `ParallelDims.degrees`). Derived: sp = ring x
    ulysses, batch = dp_replicate x dp_shard, fsdp = dp_shard x sp, loss = batch x sp, and for expert parameters
    efsdp x ep = fsdp x tp.
    """

    dims: ParallelDims
    device_type: str
    ranks: tuple[int, ...]
    views: tuple[DeviceMesh, ...]

    @staticmethod
    def create(
        dims: ParallelDims,
        device_type: str = "cpu",
        ranks: Sequence[int] | None = None,
        groups: ProcessGroups | None = None,
    ) -> ParallelMesh:
        """Make the process groups. Collective over the world; needs an initialised default process group.

        Args:
            ranks: ascending global ranks, number by number of the grid; None: the whole world. A rank that is not among
                them gets a mesh that it is no `member` of, which knows its dims and ranks alone.
            groups: those that exist already, from which the mesh takes what it can use.

        Raises:
            ValueError: if the degrees do not multiply to the number of ranks, before any group is made.
            RuntimeError: without a default process group.
        """
        if not dist.is_initialized():
            raise RuntimeError("ParallelMesh.create needs torch.distributed.init_process_group to have been called")
        ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        dims = dims.resolve(len(ranks))
        degrees = {**dims.degrees(), "ep": dims.ep, "efsdp": dims.efsdp, "alone": 1}
        groups = ProcessGroups() if groups is None else groups

        views = [tuple(dims.degrees()), *_VIEWS]
        made = [_view(axes, degrees, ranks, groups, device_type) for axes in views]
        return ParallelMesh(dims, device_type, ranks, tuple(view for view in made if view is not None))

    @property
    def member(self) -> bool:
        """Whether this rank is one of the mesh's."""
        return bool(self.views)

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """The torch mesh of some axes that one view has, such as ("ring", "ulysses") or ("dp_replicate", "fsdp").

        Raises:
            ValueError: if no view has all of them.
        """
        for view in self.views:
            if set(axes) <= set(view.mesh_dim_names or ()):
                return view[axes]
        known = "; ".join(", ".join(view.mesh_dim_names or ()) for view in self.views)
        raise ValueError(f"axes {', '.join(axes)} must be of one view of the mesh: {known}")

    def parameter_mesh(self, *axes: str) -> DeviceMesh:
        """The torch mesh of some of pp, dp_replicate, fsdp, tp, of one root: DTensors over several need that."""
        return self._view(_PARAMETERS)[axes]

    def expert_mesh(self, *axes: str) -> DeviceMesh:
        """The torch mesh of some of pp, dp_replicate, efsdp, ep, of one root: where expert parameters live."""
        return self._view(_EXPERTS)[axes]

    def _view(self, axes: tuple[str, ...]) -> DeviceMesh:
        return next(view for view in self.views if view.mesh_dim_names == axes)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.device_mesh(axis).size()

    def rank(self, axis: str) -> int:
        """This rank's coordinate along an axis."""
        return self.device_mesh(axis).get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along an axis."""
        return self.device_mesh(axis).get_group()

    def agree(self, value: object, what: str, axes: tuple[str, ...] = ("pp", "loss", "tp")) -> None:
        """Raise RuntimeError on every rank if `repr(value)` differs between the ranks of the axes. Collective."""
        agree(value, [self.group(axis) for axis in axes], what, self.device_type)


def _view(
    axes: tuple[str, ...], degrees: Mapping[str, int], ranks: Sequence[int], groups: ProcessGroups, device_type: str
) -> DeviceMesh | None:
    """The ranks under these axes; None on a rank that is not among them."""
    sizes = [math.prod(degrees[a] for a in DERIVED_AXES.get(axis, (axis,))) for axis in axes]
    grid = torch.tensor(ranks).view(sizes)
    own: list[dist.ProcessGroup] = []
    for number, axis in enumerate(axes):
        # Attention's messages must not queue behind parameters that are gathered ahead.
        lane = "attention" if axis in ("ring", "ulysses") else ""
        made = [groups.get(peers, lane) for peers in grid.movedim(number, -1).reshape(-1, sizes[number]).tolist()]
        own += [group for group in made if group is not None]
    return DeviceMesh.from_group(own, device_type, mesh=grid, mesh_dim_names=axes) if own else None
