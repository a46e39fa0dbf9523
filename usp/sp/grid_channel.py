"""Messages between any two ranks of the ring x ulysses grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attention import Channel
from attention.comm import Pending
from parallel import ParallelMesh


class GridChannel(Channel):
    """A channel over the whole grid, in which rank ring_rank * ulysses + ulysses_rank has that number.

    Attributes:
        members: the rank in the process group of each rank of the grid.
    """

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
