"""Which rank holds which part of a model's weights, from its shapes: no tensors, no process groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from parallel import ParallelDims, ParamLayout, rank_stages, stage_layers, stages_per_rank
from parallel.reallocation.described_layout import Described, described_layout
from parallel.reallocation.param_layout import Kind

from .facts import ModelShape, ParameterShape


def weight_layout(
    model: ModelShape,
    dims: ParallelDims,
    ranks: Sequence[int],
    *,
    zero: int,
    dtype: torch.dtype,
    pp_schedule: str = "1f1b",
) -> ParamLayout:
    """Return the layout that the parameters of a model have on `ranks`, by the names that they are stored under.

    Args:
        dims: resolved.
        ranks: global ranks, in the order of the mesh.
        zero: ZeRO stage; 0 for weights that are not sharded over data- and sequence-parallel ranks.
        dtype: of the weights.

    Raises:
        ValueError: if tp or ep does not divide a dim that it shards, and for more stages than layers.
    """
    described = {
        name: Described(Kind(p.shape, dtype), places, None if experts or dims.tp == 1 else p.tp_dim, experts)
        for name, p, places, experts in _placed(model, dims.pp, pp_schedule)
    }
    return described_layout(described, dims, ranks, sharded=zero > 0)


def _placed(model: ModelShape, pp: int, schedule: str) -> Iterator[tuple[str, ParameterShape, tuple[int, ...], bool]]:
    """Yield (name, shape, the pipeline ranks that hold it, whether it is of experts) of each parameter."""
    place = {stage: rank for rank in range(pp) for stage in rank_stages(schedule, pp, rank)}
    cuts, names = stage_layers(len(model.layers), pp * stages_per_rank(schedule)), model.names
    first, last = (place[0],), (place[len(cuts) - 1],)
    ends = tuple(sorted({*first, *last})) if model.facts.tied else first
    for parameters, module, places in (
        (model.embedding, names.embedding, ends),
        (model.norm, names.norm, last),
        (model.head, names.head, last),
    ):
        yield from ((f"{module}.{p.name}", p, places, False) for p in parameters)
    for stage, layers in enumerate(cuts):
        for index in layers:
            layer = model.layers[index]
            for parameters, experts in ((layer.parameters, False), (layer.experts, True)):
                yield from ((f"{names.layers}.{index}.{p.name}", p, (place[stage],), experts) for p in parameters)
