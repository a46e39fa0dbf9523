"""The ring and ulysses axes of any mesh, and messages between any two ranks of their grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attention import Channel, SequenceLayout
from attention.comm import Pending
from parallel import ParallelMesh, agree


@dataclass(frozen=True)
class SpAxes:
    """Ring and ulysses process groups of this rank; None for a degree of 1."""

    ring_group: dist.ProcessGroup | None
    ulysses_group: dist.ProcessGroup | None
    device_type: str

    @staticmethod
    def of(mesh: ParallelMesh | DeviceMesh) -> SpAxes:
        """Read the axes named ring and ulysses; if a torch DeviceMesh lacks one, its degree is 1. Raises TypeError for
        any other type of mesh, and ValueError for a DeviceMesh with neither axis."""
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


class GridChannel(Channel):
    """A channel over the whole grid, in which rank ring_rank * ulysses + ulysses_rank has that number. members: the
    rank in the process group of each rank of the grid."""

    def __init__(self, group: dist.ProcessGroup | None, members: Sequence[int]) -> None:
        super().__init__(group)
        self.members = tuple(members)
        self.rank = self.members.index(self.rank)

    def post(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Pending:
        return super().post(*([(self.members[peer], x) for peer, x in part] for part in (sends, receives)))

    @staticmethod
    def of(mesh: ParallelMesh | DeviceMesh) -> GridChannel:
        """Return the channel of a mesh with the axes of `SpAxes`. Collective for a torch DeviceMesh of both axes."""
        if isinstance(mesh, ParallelMesh):
            names = tuple(axis for axis in mesh.dims.degrees() if axis in ("ring", "ulysses"))
            grid, group = mesh.device_mesh(*names), mesh.group("sp")
        else:
            names = tuple(axis for axis in mesh.mesh_dim_names or () if axis in ("ring", "ulysses"))
            grid = mesh[names]
            group = (grid if len(names) == 1 else grid._flatten("sp")).get_group()
        if grid.size() == 1:
            return GridChannel(None, (0,))
        ranks = grid.mesh.t() if names == ("ulysses", "ring") else grid.mesh
        in_group = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
        return GridChannel(group, [in_group[rank] for rank in torch.flatten(ranks).tolist()])
