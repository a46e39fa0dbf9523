"""Process groups by axis name: one object, passed down. Several may live side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .agree import agree
from .dims import ParallelDims

# The same ranks under coarser axes, named by their use. Each derived axis joins neighbouring axes, in either sp_order.
_DERIVED_AXES = {
    "sp": ("ring", "ulysses"),  # what a sequence is sharded over
    "batch": ("dp_replicate", "dp_shard"),  # what sees different data
    "fsdp": ("dp_shard", "ring", "ulysses"),  # what parameters are sharded over
    "loss": ("dp_replicate", "dp_shard", "ring", "ulysses"),  # what token counts are summed over
}
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
    views: tuple[DeviceMesh, ...]

    @staticmethod
    def create(dims: ParallelDims, device_type: str = "cpu") -> ParallelMesh:
        """Make the process groups. Collective over all ranks; needs an initialised default process group.

        Raises:
            ValueError: if the degrees do not multiply to the world size, before any group is made.
            RuntimeError: without a default process group.
        """
        if not dist.is_initialized():
            raise RuntimeError("ParallelMesh.create needs torch.distributed.init_process_group to have been called")
        dims = dims.resolve(dist.get_world_size())
        degrees = {**dims.degrees(), "ep": dims.ep, "efsdp": dims.efsdp, "alone": 1}

        def view(axes: tuple[str, ...]) -> DeviceMesh:
            sizes = [math.prod(degrees[a] for a in _DERIVED_AXES.get(axis, (axis,))) for axis in axes]
            return init_device_mesh(device_type, tuple(sizes), mesh_dim_names=axes)

        return ParallelMesh(dims, device_type, (view(tuple(dims.degrees())), *map(view, _VIEWS)))

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
