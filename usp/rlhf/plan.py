"""Which ranks and which layout each call of a graph has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallel import ParallelDims


@dataclass(frozen=True)
class CallLayout:
    """Where a call runs.

    Attributes:
        ranks: global ranks, ascending; rank ranks[i] is number i of the grid `dims`.
        dims: resolved degrees, whose product is len(ranks).
        zero: what dp x sp ranks share between calls: 0, each holds all that tp and pp leave it; 3, parameters too.
            A generate call has 0.
        micro_batch_tokens: at most this many tokens of a data-parallel rank pass at a time, unless one sample is
            longer; 0: as few micro-batches as the pipeline needs to be full.
        tp_sequence_parallel, sp_layout: as train.py's flags of these names.
    """

    ranks: tuple[int, ...]
    dims: ParallelDims
    zero: int = 0
    micro_batch_tokens: int = 0
    tp_sequence_parallel: bool = False
    sp_layout: str = "zigzag"


@dataclass(frozen=True)
class ExecutionPlan:
    """A layout for each call of a graph, by the call's name; roles whose weights wait on the host between calls."""

    name: str
    calls: Mapping[str, CallLayout]
    offload: frozenset[str] = frozenset()
