"""The two sequence-parallel axes of whatever mesh a caller brings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attention import SequenceLayout
from parallel import ParallelMesh, agree


@dataclass(frozen=True)
class SpAxes:
    """This rank's place in the ring x ulysses grid, and the process groups of both axes (None for a degree of 1)."""

    ring_group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None
    device_type: str

    @staticmethod
    def of(mesh: ParallelMesh | DeviceMesh) -> SpAxes:
        """The axes named ring and ulysses; a torch DeviceMesh may lack one of them, which is then of degree 1.

        Raises:
            TypeError: for another kind of mesh.
            ValueError: for a DeviceMesh with neither axis.
        """
        if isinstance(mesh, ParallelMesh):
            return SpAxes(_group(mesh.device_mesh("ring")), _group(mesh.device_mesh("ulysses")), mesh.device_type)
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a ParallelMesh or a torch DeviceMesh, not {type(mesh).__name__}")
        names = mesh.mesh_dim_names or ()
        if not {"ring", "ulysses"} & set(names):
            raise ValueError(
                f"the DeviceMesh has the axes {names or 'without names'}: it must name at least one of ring and "
                f"ulysses, as in init_device_mesh(device, (2, 4), mesh_dim_names=('ring', 'ulysses'))"
            )
        ring, ulysses = (_group(mesh[axis]) if axis in names else None for axis in ("ring", "ulysses"))
        return SpAxes(ring, ulysses, mesh.device_type)

    @property
    def ring(self) -> int:
        return _size(self.ring_group)

    @property
    def ulysses(self) -> int:
        return _size(self.ulysses_group)

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring_group is None else dist.get_rank(self.ring_group)

    @property
    def ulysses_rank(self) -> int:
        return 0 if self.ulysses_group is None else dist.get_rank(self.ulysses_group)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Those of more than one rank; over all of them a sum is one over the grid."""
        return [group for group in (self.ulysses_group, self.ring_group) if group is not None]

    def layout(self, kind: str, seq_len: int) -> SequenceLayout:
        """How `seq_len` global tokens lie on these axes; raises ValueError where they cannot."""
        return SequenceLayout(kind, seq_len, self.ring, self.ulysses)

    def positions(self, layout: SequenceLayout) -> torch.Tensor:
        """The global positions of this rank's tokens, int64 (local_len,)."""
        return layout.positions(self.ring_rank, self.ulysses_rank)

    def agree(self, value: object, what: str) -> None:
        """Raise RuntimeError on every rank of the grid if `repr(value)` differs between them. Collective."""
        agree(value, self.groups, what, self.device_type)


def _group(axis: DeviceMesh) -> dist.ProcessGroup | None:
    return axis.get_group() if axis.size() > 1 else None


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)
