"""Execution plans: the ranks and the layout of each call of a graph; as YAML:

name: mine
offload: [ref, reward, actor.optimizer]
calls:
  actor_generate: {ranks: 0-3, tp: 4}
  actor_train: {ranks: 0-7, ulysses: 2, zero: 3, ac: full}     # dp_shard defaults to the remaining ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from usp.attention import LAYOUTS
from usp.config import AC_MODES
from usp.fields import AtLeast0, Rule, among, config_from_mapping, names_of, parameter_violations, shared_values
from usp.parallel import ZERO_STAGES, ParallelDims, format_ranks
from usp.rlhf.environments.ready_rewards import HTTP
from usp.rlhf.graph import DataflowGraph, ModelCall, TrainStep

TOKENS_PER_RANK = 16384  # of a micro-batch, on each sequence-parallel rank, where the plan says nothing
OWN, VLLM = ENGINES = ("own", "vllm")  # what a generate call decodes with
ENGINE = Rule(
    lambda name: name in ENGINES or all(url.strip().startswith(HTTP) for url in name.split(",")),
    f"{', '.join(ENGINES)} or URLs of servers",
)


@dataclass(frozen=True)
class CallLayout:
    """The ranks, the parallel layout and the memory options of a call.

    Attributes:
        ranks: global ranks, ascending; ranks[i] is rank i of the mesh `dims`.
        dims: resolved degrees, whose product is len(ranks). A function has only data-parallel degrees.
        zero: ZeRO stage over the dp x sp ranks; 0 for a generate call.
        micro_batch_tokens: maximum tokens per micro-batch and data-parallel rank, unless one sample is longer; -1:
            `TOKENS_PER_RANK` for each of its sp ranks; 0: the fewest micro-batches that fill the pipeline.
        tp_sequence_parallel: shard activations over tp outside of the matrix multiplications.
        sp_layout: how sequences are divided over sp: one of `usp.attention.LAYOUTS`.
        ac, ac_offload: activation checkpointing of a train step; see `apply_activation_checkpointing`.
        mlp_tile: tokens per tile of an MLP; 0: no tiles. Calls that share weights have the same.
        loss_chunk: tokens whose logits exist at a time, of train and inference calls; 0: the run's --loss-chunk.
        engine: one of `ENGINES`, or URLs of servers with commas between them, of a generate call.
    """

    ranks: tuple[int, ...]
    dims: ParallelDims
    zero: Annotated[int, among(ZERO_STAGES)] = 0
    micro_batch_tokens: Annotated[int, Rule(lambda value: value >= -1, "at least 1, or 0 (no limit) or -1")] = -1
    tp_sequence_parallel: bool = False
    sp_layout: Annotated[str, among(tuple(LAYOUTS))] = "zigzag"
    ac: Annotated[str, among(tuple(AC_MODES))] = "none"
    ac_offload: bool = False
    mlp_tile: AtLeast0 = 0
    loss_chunk: AtLeast0 = 0
    engine: Annotated[str, ENGINE] = OWN

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # kept, because a search looks up the same layouts, of many ranks, very often
        return hash((self.ranks, self.dims, *(getattr(self, option) for option in _OPTIONS)))

    def __getstate__(self) -> dict[str, object]:  # hashes of strings differ between processes
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    @cached_property
    def of_weights(self) -> CallLayout:
        """The layout without what concerns only one call: calls that agree in the rest use the same weights."""
        return replace(self, micro_batch_tokens=-1, ac="none", ac_offload=False, loss_chunk=0)

    @property
    def served(self) -> bool:
        """Whether a server decodes, whose memory is not of these ranks."""
        return self.engine.startswith(HTTP)

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that weights are for: of a server, one for each of its workers."""
        return self.groups[0] if self.served else self.ranks

    @cached_property
    def token_budget(self) -> int:
        """The maximum tokens of a micro-batch on a data-parallel rank; 0: no limit."""
        return self.micro_batch_tokens if self.micro_batch_tokens >= 0 else TOKENS_PER_RANK * self.dims.sp

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each data-parallel index, ascending; they share its samples."""
        groups: list[list[int]] = [[] for _ in range(self.dims.batch)]
        for index, rank in enumerate(self.ranks):
            groups[self.dims.coordinates(index)["batch"]].append(rank)
        return tuple(map(tuple, groups))

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The rank of each data-parallel index that returns results: last pipeline stage, first of sp and tp."""
        place = {"pp": self.dims.pp - 1, "sp": 0, "tp": 0}
        by_index = {
            at["batch"]: rank
            for index, rank in enumerate(self.ranks)
            if (at := self.dims.coordinates(index)) and all(at[axis] == value for axis, value in place.items())
        }
        return tuple(by_index[number] for number in range(self.dims.batch))

    def number_of(self, rank: int) -> int:
        """Return the data-parallel index of a global rank."""
        return next(number for number, ranks in enumerate(self.groups) if rank in ranks)

    def __str__(self) -> str:
        zero = f", ZeRO {self.zero}" if self.zero else ""
        return f"ranks {format_ranks(self.ranks)} ({self.dims}{zero})"


_OPTIONS = tuple(name for name in names_of(CallLayout) if name not in ("ranks", "dims"))


@dataclass(frozen=True)
class ExecutionPlan:
    """The layout of each call of a graph.

    offload: untrained roles whose weights are in host memory between calls; "actor.optimizer": of a trained role the
    optimizer's states, which are there between train steps.
    """

    name: str
    calls: Mapping[str, CallLayout]
    offload: frozenset[str] = frozenset()

    def __getitem__(self, call: str) -> CallLayout:
        return self.calls[call]

    def check(self, graph: DataflowGraph, world_size: int) -> None:
        """Raise ValueError, naming every violation, if the plan does not fit the graph and the world size."""
        if violations := list(self.violations(graph, world_size)):
            raise ValueError(f"plan {self.name!r}: " + "; ".join(violations))

    def violations(self, graph: DataflowGraph, world_size: int) -> Iterator[str]:
        """Yield every way in which the plan does not fit the graph and the world size."""
        names = [call.name for call in (*graph.calls, *graph.elsewhere)]
        if missing := [name for name in names if name not in self.calls]:
            yield f"no layout for {', '.join(missing)}"
        if unknown := [name for name in self.calls if name not in names]:
            yield f"layouts for unknown calls {', '.join(unknown)}: the calls are {', '.join(names)}"
        engines = []
        for call in graph.calls:
            if call.name in self.calls:
                layout = self.calls[call.name]
                violations = [*_rank_violations(layout, world_size), *_kind_violations(call, layout)]
                yield from (f"{call.name}: {text}" for text in violations)
                engines += [layout] if layout.engine != OWN and not violations else []
        yield from _engine_violations(engines, world_size)
        optimizers = tuple(map(optimizer_of, graph.trained_roles))
        for name in sorted(self.offload.difference(optimizers)):
            if name not in graph.roles:
                known = ", ".join((*graph.roles, *optimizers))
                yield f"offload names unknown role {name!r}: the roles and optimizers are {known}"
            elif name in graph.trained_roles:
                yield f"offload names {name!r}, which is trained: use {optimizer_of(name)}, or untrained roles"


def with_engine(plan: ExecutionPlan, graph: DataflowGraph, engine: str) -> ExecutionPlan:
    """Return a plan whose generate calls decode with an engine."""
    generates = {call.name for call in graph.calls if call.kind == "generate"} & plan.calls.keys()
    changed = {name: replace(plan[name], engine=engine) for name in generates}
    return replace(plan, calls={**plan.calls, **changed})


def needed_part(plan: ExecutionPlan, graph: DataflowGraph) -> tuple[ExecutionPlan, tuple[str, ...]]:
    """Return a plan without the calls that a graph leaves out and the offloading of their roles, and the names of these
    calls. A plan that lacks a call stays as it is: one too many may be that call, misspelt."""
    names = {call.name for call in (*graph.calls, *graph.elsewhere)}
    unneeded = tuple(name for name in plan.calls if name not in names)
    if not unneeded or not names <= plan.calls.keys():
        return plan, ()
    roles = {name.rpartition("_")[0] for name in unneeded} - set(graph.roles)
    offload = frozenset(name for name in plan.offload if name.partition(".")[0] not in roles)
    calls = {name: layout for name, layout in plan.calls.items() if name in names}
    return replace(plan, calls=calls, offload=offload), unneeded


def staleness_violations(graph: DataflowGraph, plan: ExecutionPlan) -> Iterator[str]:
    """Yield why rollouts cannot run beside the training of an earlier step: they share ranks."""
    trains = {call.name: set(plan[call.name].ranks) for call in graph.calls if isinstance(call.work, TrainStep)}
    training = set().union(*trains.values())
    shared = [call.name for call in graph.rollouts_ahead if training & set(plan[call.name].ranks)]
    if shared:
        yield f"{', '.join(shared)} must not run on ranks {format_ranks(sorted(training))}, of {', '.join(trains)}"


def optimizer_of(role: str) -> str:
    """Return the name of a trained role's optimizer in `ExecutionPlan.offload`."""
    return f"{role}.optimizer"


def _rank_violations(layout: CallLayout, world_size: int) -> Iterator[str]:
    ranks, dims = layout.ranks, layout.dims
    if outside := [rank for rank in ranks if not 0 <= rank < world_size]:
        world = f"the world of {world_size} ranks (0-{world_size - 1})"
        yield f"ranks {format_ranks(outside)} are missing from {world}: launch more ranks, or use others"
    if list(ranks) != sorted(set(ranks)):
        yield f"ranks {list(ranks)} must be unique and ascending"
    if not ranks:
        yield "must have at least one rank"
        return
    try:
        if dims.resolve(len(ranks), "the call's ranks,") != dims:
            yield "dp_shard=-1 must be resolved"
    except ValueError as error:
        yield str(error)


def _kind_violations(call: ModelCall, layout: CallLayout) -> Iterator[str]:
    dims, kind = layout.dims, call.kind
    yield from parameter_violations(layout)
    if kind == "generate":
        refused = {"zero": layout.zero, "tp_sequence_parallel": layout.tp_sequence_parallel}
        refused |= {"micro_batch_tokens": layout.micro_batch_tokens != -1, "loss_chunk": layout.loss_chunk}
        if unsupported := [name for name, value in refused.items() if value]:
            yield f"a generate call does not support {', '.join(unsupported)}: remove them"
    if layout.engine != OWN and kind != "generate":
        yield f"engine={layout.engine!r} decodes, which only a generate call does: remove it"
    elif layout.engine != OWN and ((dims.pp, dims.sp) != (1, 1) or dims.ep not in (1, dims.tp) or layout.mlp_tile):
        yield (
            f"engine={layout.engine!r} divides a model only over tp, and its experts over as many ranks or none, got "
            f"{dims} and mlp_tile={layout.mlp_tile}: use pp=1, ulysses=1, ring=1, ep=1 or {dims.tp}, and no mlp_tile"
        )
    if kind != "train_step" and (layout.ac != "none" or layout.ac_offload):
        yield "ac and ac_offload keep less for a backward, which only a train_step call has: remove them"
    elif layout.ac_offload and layout.ac == "none":
        yield "ac_offload offloads what activation checkpointing saves, but ac is none: use ac: full"
    if layout.mlp_tile and layout.ac == "selective":
        yield "mlp_tile keeps no matrix products of MLPs, and ac: selective keeps all: use ac: attention-saved"
    if layout.tp_sequence_parallel and dims.tp == 1:
        yield f"tp_sequence_parallel requires tp >= 2, got tp={dims.tp}"
    if kind == "compute" and (dims.pp, dims.sp, dims.tp, dims.ep) != (1, 1, 1, 1):
        yield f"a function supports only data-parallel degrees, got {dims}"
    if kind == "compute" and layout != CallLayout(layout.ranks, dims, sp_layout=layout.sp_layout):
        yield "a function supports no options besides ranks and degrees: remove the others"


def _engine_violations(layouts: Sequence[CallLayout], world_size: int) -> Iterator[str]:
    """Yield why the process groups of vLLM, one set in a process, cannot be those of its calls, or why a server with
    one set of weights cannot be theirs."""
    if len({layout.of_weights for layout in layouts}) > 1:
        yield f"calls with an engine must have one layout, got {'; '.join(map(str, dict.fromkeys(layouts)))}"
    for layout in dict.fromkeys(layout for layout in layouts if layout.engine == VLLM):
        tp = layout.dims.tp
        blocks = [list(range(group[0], group[0] + tp)) for group in layout.groups if group[0] % tp == 0]
        if world_size % tp or blocks != list(map(list, layout.groups)):
            yield (
                f"engine='vllm' with tp={tp} takes {tp} consecutive ranks from a multiple of {tp} on, of a number of "
                f"ranks that {tp} divides, got {format_ranks(layout.ranks)} of {world_size}: use other ranks, or tp=1"
            )


PLAN_FILE = "plan.yaml"  # in the folder of a run


def _values(layout: CallLayout) -> dict[str, Any]:
    return shared_values(layout.dims, ParallelDims) | {key: getattr(layout, key) for key in _OPTIONS}


_DEFAULTS = _values(CallLayout((), ParallelDims(dp_shard=1)))
_CHOSEN = _DEFAULTS | {"dp_shard": -1}
_Values: Any = make_dataclass("_Values", [(name, type(value), value) for name, value in _CHOSEN.items()])


def parse_ranks(value: object) -> tuple[int, ...]:
    """Parse 3, "0-3,6" or [0, 1, 2, 3, 6]. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, list) and all(type(rank) is int for rank in value):
        return tuple(value)
    ranks: list[int] = []
    for part in str(value).split(","):
        ends = [end.strip() for end in part.split("-")]
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise ValueError(f"ranks: {value!r} must be ranks and ranges, such as 0-3,6")
        ranks += range(int(ends[0]), int(ends[-1]) + 1)
    return tuple(ranks)


def to_mapping(plan: ExecutionPlan) -> dict[str, Any]:
    """Convert a plan to plain values for YAML, without defaults; the inverse of `from_mapping`."""

    def entry(layout: CallLayout) -> dict[str, Any]:
        changed = {key: value for key, value in _values(layout).items() if value != _DEFAULTS[key]}
        return {"ranks": format_ranks(layout.ranks), **changed}

    calls = {name: entry(layout) for name, layout in plan.calls.items()}
    return {"name": plan.name, "offload": sorted(plan.offload), "calls": calls}


def from_mapping(mapping: object) -> ExecutionPlan:
    """Convert a YAML mapping (see the module docstring) to a plan, with dp_shard resolved. Raises ValueError naming
    every unknown key and every invalid value."""
    if not isinstance(mapping, dict) or not isinstance(mapping.get("calls"), dict):
        raise ValueError("a plan must be a mapping with `calls`, the layout of each call by name")
    violations = [f"unknown key {key!r}" for key in mapping if key not in ("name", "offload", "calls")]
    offload = mapping.get("offload") or []
    if not isinstance(offload, list) or not all(isinstance(role, str) for role in offload):
        violations.append(f"offload: {offload!r} must be a list of roles, or of optimizers such as actor.optimizer")
    layouts: dict[str, CallLayout] = {}
    for name, entry in mapping["calls"].items():
        try:
            layouts[str(name)] = _layout(entry)
        except ValueError as error:
            violations.append(f"{name}: {error}")
    if violations:
        raise ValueError("plan: " + "; ".join(violations))
    return ExecutionPlan(str(mapping.get("name", "file")), layouts, frozenset(offload))


def _layout(entry: object) -> CallLayout:
    if not isinstance(entry, dict) or "ranks" not in entry:
        raise ValueError(f"{entry!r} must be a mapping with `ranks`")
    values = config_from_mapping({key: value for key, value in entry.items() if key != "ranks"}, _Values)
    ranks = parse_ranks(entry["ranks"])
    dims = ParallelDims(**shared_values(values, ParallelDims))
    # Degrees that do not fit stay unresolved: `ExecutionPlan.violations` reports them with everything else.
    fits = dims.dp_shard == -1 and ranks and len(ranks) % (dims.pp * dims.dp_replicate * dims.sp * dims.tp) == 0
    dims = dims.resolve(len(ranks)) if fits else dims
    return CallLayout(ranks, dims, **{key: getattr(values, key) for key in _OPTIONS})
