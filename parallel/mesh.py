"""Device meshes and process groups by axis name. A process may have several meshes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .dims import DERIVED_AXES, ParallelDims
from .groups import ATTENTION, ProcessGroups, agree

_PARAMETERS = ("pp", "dp_replicate", "fsdp", "tp")
_EXPERTS = ("pp", "dp_replicate", "efsdp", "ep")
_REPLICAS = ("pp", "loss", "unsharded", "tp")  # unsharded: an axis of size 1, to shard over with ZeRO stage 0
_VIEWS = (("pp", "batch", "sp", "tp"), _PARAMETERS, _REPLICAS, _EXPERTS)


@dataclass(frozen=True)
class ParallelMesh:
    """Torch device meshes over the ranks of a `ParallelDims` grid: the finest, then views with derived axes.

    Axes: pp, dp_replicate, dp_shard, ring, ulysses, tp (nesting: `ParallelDims.degrees`). Derived: sp = ring x
    ulysses, batch = dp_replicate x dp_shard, fsdp = dp_shard x sp, loss = batch x sp, and for expert parameters
    efsdp x ep = fsdp x tp.

    Attributes:
        ends: the group of the first and the last rank of this rank's pp axis; None on the others, and without stages.
    """

    dims: ParallelDims
    device_type: str
    ranks: tuple[int, ...]
    views: tuple[DeviceMesh, ...]
    ends: dist.ProcessGroup | None = None
    _known: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def create(
        dims: ParallelDims,
        device_type: str = "cpu",
        ranks: Sequence[int] | None = None,
        groups: ProcessGroups | None = None,
    ) -> ParallelMesh:
        """Create the process groups. Collective over the world; requires a default process group. For `dims` of one
        rank, such as ParallelDims(dp_shard=1), a process that torchrun did not start makes one of itself alone, which
        `torch.distributed.destroy_process_group()` ends.

        Args:
            ranks: ascending global ranks of the grid; None for the whole world. Other ranks get a mesh of which they
                are not a `member`, with only dims and ranks.
            groups: existing groups, which are reused and added to.

        Raises:
            ValueError: if the degrees do not multiply to the number of ranks, before any group is created.
            RuntimeError: without a default process group.
        """
        if not dist.is_initialized():
            if math.prod(dims.degrees().values()) != 1 or dist.is_torchelastic_launched():
                raise RuntimeError(
                    "torch.distributed.init_process_group must be called before ParallelMesh.create; a single process "
                    "that torchrun did not start may give ParallelDims(dp_shard=1) instead"
                )
            dims.resolve(1)
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        dims = dims.resolve(len(ranks))
        degrees = {**dims.degrees(), "ep": dims.ep, "efsdp": dims.efsdp, "unsharded": 1}
        groups = ProcessGroups() if groups is None else groups
        built = [_build_view(axes, degrees, ranks, groups, device_type) for axes in (tuple(dims.degrees()), *_VIEWS)]
        stage = len(ranks) // dims.pp
        ends = groups.own(zip(ranks[:stage], ranks[-stage:], strict=True)) if dims.pp > 1 else None
        return ParallelMesh(dims, device_type, ranks, tuple(view for view in built if view is not None), ends)

    @property
    def member(self) -> bool:
        """True if this rank is part of the mesh."""
        return bool(self.views)

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """Return the torch mesh of axes of one view, such as ("ring", "ulysses") or ("dp_replicate", "fsdp"). Raise
        ValueError if no view has all of them."""
        if axes in self._known:  # slicing a mesh takes torch almost a millisecond
            return self._known[axes]
        for view in self.views:
            if set(axes) <= set(view.mesh_dim_names or ()):
                return self._known.setdefault(axes, view[axes])
        known = "; ".join(", ".join(view.mesh_dim_names or ()) for view in self.views)
        raise ValueError(f"axes {', '.join(axes)} must all belong to one view of the mesh, which are {known}")

    def parameter_mesh(self, *axes: str) -> DeviceMesh:
        """Return a torch mesh of some of pp, dp_replicate, fsdp, tp, with one root, which multi-axis DTensors need."""
        return self._view(_PARAMETERS)[axes]

    def expert_mesh(self, *axes: str) -> DeviceMesh:
        """Return a torch mesh of some of pp, dp_replicate, efsdp, ep, with one root, for expert parameters."""
        return self._view(_EXPERTS)[axes]

    def _view(self, axes: tuple[str, ...]) -> DeviceMesh:
        return next(view for view in self.views if view.mesh_dim_names == axes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.device_mesh(axis).size()

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate along an axis."""
        return self.device_mesh(axis).get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along an axis."""
        return self.device_mesh(axis).get_group()

    def agree(self, value: object, what: str, axes: tuple[str, ...] = ("pp", "loss", "tp")) -> None:
        """Raise RanksDisagree on every rank if `repr(value)` differs between ranks of the axes. Collective."""
        agree(value, [self.group(axis) for axis in axes], what, self.device_type)


def _build_view(
    axes: tuple[str, ...], degrees: Mapping[str, int], ranks: Sequence[int], groups: ProcessGroups, device_type: str
) -> DeviceMesh | None:
    """Build the device mesh of these axes; None on ranks outside it."""
    sizes = [math.prod(degrees[a] for a in DERIVED_AXES.get(axis, (axis,))) for axis in axes]
    grid = torch.tensor(ranks).view(sizes)
    own: list[dist.ProcessGroup] = []
    for number, axis in enumerate(axes):
        # Messages of attention and of recurrent states must not queue behind prefetched parameter all-gathers.
        lane = ATTENTION if axis in ("ring", "ulysses", "sp") else ""
        group = groups.own(grid.movedim(number, -1).reshape(-1, sizes[number]).tolist(), lane)
        own += [] if group is None else [group]
    return DeviceMesh.from_group(own, device_type, mesh=grid, mesh_dim_names=axes) if own else None


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; return other tensors unchanged.

    Of a weight that torchao wraps, so that FSDP2 gathers it in float8, it is the tensor inside.
    """
    from torch.distributed.tensor import DTensor  # takes half a second to import, which plans do not need

    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(local, "_tensor", local)
