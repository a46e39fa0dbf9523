"""The time to fill a copy of a model's weights from another one without planning every message: for searches, which ask
for thousands of pairs of layouts. `parallel.realloc_seconds` has the time of the real plan. Pure.

A model is a square: layers one way, and the values of a layer the other way. A pipeline stage, a tensor-parallel part
and a shard of ZeRO hold a rectangle of it, and ranks hold equal or disjoint rectangles of the same layout. What no rank
of a host holds crosses to it once, and each rank receives what it lacks, at the same time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel import Hardware
from usp.rlhf.plan.plan import CallLayout

Floats = NDArray[np.float64]


class _Parts(NamedTuple):
    """The rectangle of each rank: fractions of the layers and of a layer, and how many ranks of its host have it."""

    ranks: NDArray[np.int64]
    layers: Floats  # (ranks, 2): begin and end
    values: Floats
    copies: Floats


@lru_cache(1 << 14)
def _parts(layout: CallLayout, ranks_per_host: int) -> _Parts:
    dims, shards = layout.dims, layout.dims.dp_shard * layout.dims.sp if layout.zero else 1
    places = [dims.coordinates(place) for place in range(len(layout.ranks))]
    stage = np.array([at["pp"] for at in places])
    value = np.array([at["tp"] * shards + (at["fsdp"] if shards > 1 else 0) for at in places])
    ranks, parts = np.array(layout.ranks), dims.tp * shards
    whole = np.stack([ranks // ranks_per_host, stage, value])
    _, which, number = np.unique(whole, axis=1, return_inverse=True, return_counts=True)
    layers = np.stack([stage, stage + 1], axis=1) / dims.pp
    values = np.stack([value, value + 1], axis=1) / parts
    return _Parts(ranks, layers, values, number[which.reshape(-1)].astype(float))


def fill_seconds(
    source: CallLayout, target: CallLayout, nbytes: float, hardware: Hardware, ranks_per_host: int
) -> float:
    """Return the time to fill the copy of `target` from that of `source`.

    Args:
        nbytes: of the model.
    """
    held, wanted = _parts(source, ranks_per_host), _parts(target, ranks_per_host)
    size = _length(wanted.layers) * _length(wanted.values)
    common = _common(wanted.layers, held.layers) * _common(wanted.values, held.values)  # (target ranks, source ranks)
    own = (common * (wanted.ranks[:, None] == held.ranks[None])).sum(axis=1)
    host = wanted.ranks // ranks_per_host
    here = host[:, None] == (held.ranks // ranks_per_host)[None]
    missing = np.maximum(0.0, size - (common * here / held.copies).sum(axis=1)) / wanted.copies
    crossing = np.bincount(host, missing)
    inside, outside = hardware.tiers[0], hardware.tiers[-1]
    receiving, sending = (
        np.minimum(outside.shared_bytes_per_second, outside.send.bytes_per_second * np.bincount(one))
        for one in (host, held.ranks // ranks_per_host)
    )
    arriving = crossing[crossing > 0] / receiving[crossing > 0]
    across = max(arriving.max(initial=0.0), crossing.sum() / sending.sum())
    within = max(0.0, float((size - own).max())) / inside.send.bytes_per_second
    kept = hardware.memory_seconds(2 * nbytes * float(own.max()))  # copied while the rest arrives
    latency = (outside if across else inside).send.alpha_seconds if within else 0.0
    return max(kept, nbytes * float(across + within) / hardware.link_efficiency + latency)


def _length(spans: Floats) -> Floats:
    return spans[:, 1] - spans[:, 0]


def _common(some: Floats, others: Floats) -> Floats:
    """Return the length that each of some spans has in common with each of the others."""
    ends = np.minimum(some[:, None, 1], others[None, :, 1])
    begins = np.maximum(some[:, None, 0], others[None, :, 0])
    found: Floats = np.maximum(0.0, ends - begins)
    return found
