"""A small model with odd sizes, and its layouts over grids of ranks, as boxes and as torch DTensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from usp.parallel import ParallelDims, ParallelMesh, ParamLayout, ProcessGroups, ReallocPlan
from usp.parallel.reallocation.boxes import Box
from usp.parallel.reallocation.param_layout import Kind

LAYER = {
    "q": (16, 16),
    "k": (8, 16),
    "v": (8, 16),
    "o": (16, 16),
    "gate": (24, 16),
    "up": (24, 16),
    "down": (16, 24),
    "norm": (7,),
    "scale": (1,),
    "experts": (8, 5, 3),
}
COLUMNS = ("o", "down")  # sharded over tp by columns; norm and scale are replicated, experts are sharded over ep
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (40, 16),
    **{f"layers.{n}.{name}": shape for n in range(4) for name, shape in LAYER.items()},
    "norm": (7,),
    "head": (40, 16),
}


def dtype_of(name: str) -> torch.dtype:
    """Return one of two dtypes, so that elements in a message may be unaligned."""
    return torch.bfloat16 if name.endswith(("experts", "norm")) else torch.float32


KINDS = {name: Kind(shape, dtype_of(name)) for name, shape in SHAPES.items()}


def values() -> dict[str, Tensor]:
    """Return the model's parameters, with random values."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype_of(name)) for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class Grid:
    """A grid of pp x replicate x shard x tp ranks, tp innermost; experts are sharded over ep inside a stage."""

    ranks: tuple[int, ...]
    pp: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    ep: int = 1

    def box(self, name: str, number: int) -> Box | None:
        """Return the box that rank `number` of the grid holds."""
        stage, rest = divmod(number, len(self.ranks) // self.pp)
        fsdp, tp = divmod(rest % (self.shard * self.tp), self.tp)
        first = stage * len(SHAPES) // self.pp
        if list(SHAPES).index(name) not in range(first, (stage + 1) * len(SHAPES) // self.pp):
            return None
        box, last = Box.whole(SHAPES[name]), name.rpartition(".")[2]
        if last == "experts":
            efsdp = max(1, self.shard * self.tp // self.ep)
            return cut(cut(box, 0, self.ep, rest % self.ep), 0, efsdp, rest // self.ep % efsdp)
        if last not in ("norm", "scale"):
            box = cut(box, int(last in COLUMNS), self.tp, tp)
        return cut(box, 0, self.shard, fsdp)

    def layout(self) -> ParamLayout:
        boxes: dict[str, dict[int, Box]] = {name: {} for name in SHAPES}
        for name in SHAPES:
            for number, rank in enumerate(self.ranks):
                if box := self.box(name, number):
                    boxes[name][rank] = box
        return ParamLayout(KINDS, boxes)


def cut(box: Box, dim: int, pieces: int, piece: int) -> Box:
    """Split a box as torch does: all pieces have the same size, except the last ones."""
    step = -(-box.sizes[dim] // pieces)
    begin = min(piece * step, box.sizes[dim])
    size = min(step, box.sizes[dim] - begin)
    offset = (*box.offset[:dim], box.offset[dim] + begin, *box.offset[dim + 1 :])
    return Box(offset, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))


ALL, LOW, HIGH, MIDDLE = tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7), (2, 3, 4, 5)
GRIDS = {
    "dp8": Grid(ALL, replicate=8),
    "zero8": Grid(ALL, shard=8),
    "hsdp 2x4": Grid(ALL, replicate=2, shard=4),
    "tp8": Grid(ALL, tp=8),
    "tp4 dp2": Grid(ALL, replicate=2, tp=4),
    "tp2 dp4": Grid(ALL, replicate=4, tp=2),
    "tp4 zero2": Grid(ALL, shard=2, tp=4),
    "ulysses2 ring2 tp2": Grid(ALL, shard=4, tp=2),
    "pp2 dp4": Grid(ALL, pp=2, replicate=4),
    "pp2 zero4": Grid(ALL, pp=2, shard=4),
    "pp4 tp2": Grid(ALL, pp=4, tp=2),
    "pp2 tp2 dp2": Grid(ALL, pp=2, replicate=2, tp=2),
    "pp8": Grid(ALL, pp=8),
    "low tp4": Grid(LOW, tp=4),
    "low zero4": Grid(LOW, shard=4),
    "low tp2 dp2": Grid(LOW, replicate=2, tp=2),
    "low pp2 tp2": Grid(LOW, pp=2, tp=2),
    "high tp4": Grid(HIGH, tp=4),
    "high pp2 tp2": Grid(HIGH, pp=2, tp=2),
    "middle tp4": Grid(MIDDLE, tp=4),
    "first": Grid((0,)),
    "last": Grid((7,)),
    "three zero3": Grid((1, 4, 6), shard=3),
    "ep4 efsdp2": Grid(ALL, shard=8, ep=4),
    "ep2 efsdp4": Grid(ALL, shard=8, ep=2),
    "ep8, the rest whole": Grid(ALL, replicate=8, ep=8),
    "ep4 dp2, the rest whole": Grid(ALL, replicate=8, ep=4),
}


def plain_tensors(layout: ParamLayout, rank: int) -> dict[str, Tensor]:
    """Return a rank's boxes as plain tensors."""
    whole = values()
    return {name: whole[name][boxes[rank].slices()].clone() for name, boxes in layout.boxes.items() if rank in boxes}


REAL = {
    "zero8": ParallelDims(),
    "hsdp 2x4": ParallelDims(dp_replicate=2),
    "tp8": ParallelDims(tp=8),
    "tp4 dp2": ParallelDims(dp_replicate=2, dp_shard=1, tp=4),
    "tp4 zero2": ParallelDims(tp=4),
    "ulysses2 ring2 tp2": ParallelDims(ulysses=2, ring=2, tp=2),
    "ep4 efsdp2": ParallelDims(ep=4),
}


def dtensors(dims: ParallelDims, groups: ProcessGroups) -> dict[str, Tensor]:
    """Return the model sharded with tensor parallelism and FSDP2. Collective over the world."""
    mesh = ParallelMesh.create(dims, groups=groups)
    replicas = ("dp_replicate",) if dims.dp_replicate > 1 else ()
    tp, ep = mesh.parameter_mesh("tp"), mesh.expert_mesh("ep")
    dense, experts = {}, {}
    for name, value in values().items():
        last = name.rpartition(".")[2]
        if last == "experts":
            experts[name] = value if ep.size() == 1 else distribute_tensor(value, ep, [Shard(0)], src_data_rank=None)
        elif last in ("norm", "scale") or tp.size() == 1:
            dense[name] = value
        else:
            dense[name] = distribute_tensor(value, tp, [Shard(int(last in COLUMNS))], src_data_rank=None)
    held = _fully_sharded(dense, mesh.parameter_mesh(*replicas, "fsdp"))
    return held | _fully_sharded(experts, mesh.expert_mesh(*replicas, "efsdp"))


def _fully_sharded(tensors: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    module = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors.values()])
    fully_shard(module, mesh=mesh)
    return dict(zip(tensors, module.parameters(), strict=True))


def minimum_bytes(plan: ReallocPlan) -> int:
    """Return what any plan has to send at least, computed from the layouts without the transfers."""
    return sum(map(plan.lacking_bytes, plan.dst.ranks))


def extra_bytes(plan: ReallocPlan) -> int:
    """Return the largest additional memory of a rank: messages of up to two rounds, sent and received."""
    message = min(plan.bucket_bytes, max((*plan.sent_bytes.values(), *plan.received_bytes.values()), default=0))
    return message * 2 * min(plan.rounds, 2)
