"""Which ranks and which layout each call of a graph has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from attention import LAYOUTS
from parallel import ZERO_STAGES, ParallelDims, format_ranks
from usp.rlhf.graph.calls import ModelCall
from usp.rlhf.graph.dataflow import DataflowGraph


@dataclass(frozen=True)
class CallLayout:
    """Where a call runs.

    Attributes:
        ranks: global ranks, ascending; rank ranks[i] is number i of the grid `dims`.
        dims: resolved degrees, whose product is len(ranks). A function has data-parallel ranks alone.
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

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each data-parallel index, the ranks that share its samples, ascending."""
        groups: list[list[int]] = [[] for _ in range(self.dims.batch)]
        for index, rank in enumerate(self.ranks):
            groups[self.dims.coordinates(index)["batch"]].append(rank)
        return tuple(map(tuple, groups))

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """For each data-parallel index, the rank that has the results: of the last stage, the first of sp and tp."""
        place = {"pp": self.dims.pp - 1, "sp": 0, "tp": 0}
        found = {
            at["batch"]: rank
            for index, rank in enumerate(self.ranks)
            if (at := self.dims.coordinates(index)) and all(at[axis] == value for axis, value in place.items())
        }
        return tuple(found[number] for number in range(self.dims.batch))

    def number_of(self, rank: int) -> int:
        """The data-parallel index of one of the ranks."""
        return self.dims.coordinates(self.ranks.index(rank))["batch"]

    def __str__(self) -> str:
        zero = f", ZeRO {self.zero}" if self.zero else ""
        return f"ranks {format_ranks(self.ranks)} ({self.dims}{zero})"


@dataclass(frozen=True)
class ExecutionPlan:
    """A layout for each call of a graph, by the call's name; roles whose weights wait on the host between calls."""

    name: str
    calls: Mapping[str, CallLayout]
    offload: frozenset[str] = frozenset()

    def __getitem__(self, call: str) -> CallLayout:
        return self.calls[call]

    def check(self, graph: DataflowGraph, world_size: int) -> None:
        """Raise ValueError, naming everything that is wrong, if the plan does not fit the graph and the world."""
        if violations := list(self.violations(graph, world_size)):
            raise ValueError(f"plan {self.name!r}: " + "; ".join(violations))

    def violations(self, graph: DataflowGraph, world_size: int) -> Iterator[str]:
        """Everything in which the plan does not fit the graph and the world."""
        names = [call.name for call in graph.calls]
        if missing := [name for name in names if name not in self.calls]:
            yield f"no layout for {', '.join(missing)}"
        if unknown := [name for name in self.calls if name not in names]:
            yield f"layouts for {', '.join(unknown)}, which are no calls: the calls are {', '.join(names)}"
        for call in graph.calls:
            if call.name in self.calls:
                layout = self.calls[call.name]
                violations = [*_rank_violations(layout, world_size), *_kind_violations(call, layout)]
                yield from (f"{call.name}: {text}" for text in violations)
        for role in sorted(self.offload):
            if role not in graph.roles:
                yield f"offload names {role!r}: the roles are {', '.join(graph.roles)}"
            elif role in graph.trained_roles:
                yield f"offload names {role!r}, which is trained: its optimiser keeps the weights in place"


def _rank_violations(layout: CallLayout, world_size: int) -> Iterator[str]:
    ranks, dims = layout.ranks, layout.dims
    if outside := [rank for rank in ranks if not 0 <= rank < world_size]:
        yield (
            f"ranks {format_ranks(outside)} are missing from the world of {world_size} ranks "
            f"(0-{world_size - 1}): start more ranks, or name others"
        )
    if list(ranks) != sorted(set(ranks)):
        yield f"ranks {list(ranks)} must ascend, each once"
    if not ranks:
        yield "no ranks"
        return
    try:
        if dims.resolve(len(ranks)) != dims:
            yield "dp_shard=-1 must be resolved"
    except ValueError as error:
        yield str(error).replace("the world size", "the call's ranks,")


def _kind_violations(call: ModelCall, layout: CallLayout) -> Iterator[str]:
    dims, kind = layout.dims, call.kind
    if layout.zero not in ZERO_STAGES:
        yield f"zero={layout.zero} must be one of {', '.join(map(str, ZERO_STAGES))}"
    if layout.micro_batch_tokens < 0:
        yield f"micro_batch_tokens={layout.micro_batch_tokens} must be at least 0"
    if layout.sp_layout not in LAYOUTS:
        yield f"sp_layout={layout.sp_layout!r} must be one of {', '.join(LAYOUTS)}"
    if kind == "generate":
        refused = {"zero": layout.zero, "ep": dims.ep - 1, "tp_sequence_parallel": layout.tp_sequence_parallel}
        if asked := [name for name, value in refused.items() if value]:
            yield f"a generate call keeps whole weights and no sequence: leave out {', '.join(asked)}"
    if layout.tp_sequence_parallel and dims.tp == 1:
        yield "tp_sequence_parallel needs tp of at least 2"
    if kind == "compute" and (dims.pp, dims.sp, dims.tp, dims.ep) != (1, 1, 1, 1):
        yield f"a function has no model to divide, but {dims} was asked: leave only data-parallel degrees"
    if kind == "compute" and (layout.zero or layout.micro_batch_tokens):
        yield "a function has no weights and no micro-batches: leave out zero and micro_batch_tokens"
