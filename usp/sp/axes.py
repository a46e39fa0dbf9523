"""Ring and ulysses axes of a ParallelMesh or a torch DeviceMesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attention import SequenceLayout
from parallel import ParallelMesh, agree


@dataclass(frozen=True)
class SpAxes:
    """Ring and ulysses process groups of this rank; None for a degree of 1."""

    ring_group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None
    device_type: str

    @staticmethod
    def of(mesh: ParallelMesh | DeviceMesh) -> SpAxes:
        """Read the axes named ring and ulysses; if a torch DeviceMesh lacks one, its degree is 1.

        Raises:
            TypeError: for any other type of mesh.
            ValueError: for a DeviceMesh with neither axis.
        """
        if isinstance(mesh, ParallelMesh):
            return SpAxes(_group(mesh.device_mesh("ring")), _group(mesh.device_mesh("ulysses")), mesh.device_type)
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a ParallelMesh or a torch DeviceMesh, got {type(mesh).__name__}")
        names = mesh.mesh_dim_names or ()
        if not {"ring", "ulysses"} & set(names):
            raise ValueError(
                f"DeviceMesh has axes {names or 'without names'}, but must name at least one of ring and ulysses: "
                f"init_device_mesh(device, (2, 4), mesh_dim_names=('ring', 'ulysses'))"
            )
        ring, ulysses = (_group(mesh[axis]) if axis in names else None for axis in ("ring", "ulysses"))
        return SpAxes(ring, ulysses, mesh.device_type)

    @property
    def ring(self) -> int:
        return 1 if self.ring_group is None else self.ring_group.size()

    @property
    def ulysses(self) -> int:
        return 1 if self.ulysses_group is None else self.ulysses_group.size()

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring_group is None else dist.get_rank(self.ring_group)

    @property
    def ulysses_rank(self) -> int:
        return 0 if self.ulysses_group is None else dist.get_rank(self.ulysses_group)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Groups of more than one rank; all-reducing over each in turn covers the grid."""
        return [group for group in (self.ulysses_group, self.ring_group) if group is not None]

    def layout(self, kind: str, seq_len: int) -> SequenceLayout:
        """Return the layout of `seq_len` global tokens over these axes; raises ValueError if they do not divide."""
        return SequenceLayout(kind, seq_len, self.ring, self.ulysses)

    def positions(self, layout: SequenceLayout) -> torch.Tensor:
        """Return the global positions of this rank's tokens, int64 (local_len,)."""
        return layout.positions(self.ring_rank, self.ulysses_rank)

    def agree(self, value: object, what: str) -> None:
        """Raise RanksDisagree on every rank of the grid if `repr(value)` differs between ranks. Collective."""
        agree(value, self.groups, what, self.device_type)


def _group(axis: DeviceMesh) -> dist.ProcessGroup | None:
    return axis.get_group() if axis.size() > 1 else None
