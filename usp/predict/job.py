"""A training step, or only forwards, as numbers: the model's shapes, the degrees, every option that affects memory or
traffic, and the order of forwards and backwards on a pipeline rank.

`usp.train.resolve.job_of` reads it from a configuration; all predictions are pure functions of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from itertools import accumulate, cycle, takewhile
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from usp.attention import OF_DOCUMENTS, SequenceLayout, layout_name
from usp.config import TrainConfig
from usp.model.facts import LayerShape, ModelShape, ParameterShape, ep_chunks
from usp.optimizers import OPTIMIZERS, Optimizer
from usp.parallel import ParallelDims, PipelineSchedule, rank_stages, stage_layers
from usp.parallel.dims import DERIVED_AXES

Pass = Literal["count", "forward", "recompute", "backward", "update"]
PASSES: tuple[Pass, ...] = get_args(Pass)
Output = Literal["loss", "logprobs", "values", "cache"]


@dataclass(frozen=True)
class Data:
    """What a prediction assumes of the data, where bytes and time depend on it."""

    documents: tuple[int, ...] = ()  # tokens of each, repeated until a sequence is full; empty: one document
    router_imbalance: float = 1.0  # tokens that the busiest expert-parallel rank computes, relative to the mean

    def __post_init__(self) -> None:
        if min(self.documents, default=1) < 1:
            raise ValueError(f"documents={min(self.documents)} must be at least 1")
        if not 1 <= self.router_imbalance < math.inf:
            raise ValueError(
                f"router_imbalance={self.router_imbalance:g} must be at least 1: the maximum over the mean"
            )

    def boundaries(self, seq_len: int) -> tuple[int, ...]:
        """Return the `cu_seqlens` of a sequence, whose last document is cut."""
        ends = takewhile(lambda end: end < seq_len, accumulate(cycle(self.documents)))
        return (0, *ends, seq_len)


@dataclass(frozen=True)
class Stack:
    """What a training system fuses and hides. A fused kernel reads every input and writes every output once; all else
    is done by transformers' operators."""

    fused: bool = False  # norms with their residuals, and activations
    fused_rotary: bool = False
    fused_experts: bool = False  # activations and permutations
    fused_loss: bool = False
    sums_gradients: bool = False  # products add gradients of weights to their float32 sums
    exposed_tensor: float = 1.0  # seconds of tp's messages that no compute hides, relative to all of this toolkit's
    exposed_experts: float = 1.0  # likewise of ep


EAGER, COMPILED = Stack(), Stack(fused=True, fused_rotary=True, fused_loss=True)  # of this toolkit; experts stay eager


class Action(NamedTuple):
    """A `forward`, a `backward`, or half of one: the gradients of the `inputs` first, those of the `weights` later."""

    kind: str
    stage: int
    micro_batch: int


class Schedule(NamedTuple):
    """What determines the actions of a rank: `place` is its own of `pp` pipeline ranks."""

    pipeline: PipelineSchedule
    place: int
    pp: int
    micro_batches: int


_TORCH: dict[str, Any] = {"interleaved-1f1b": ScheduleInterleaved1F1B, "zero-bubble": ScheduleZBVZeroBubble}
_KINDS = {"FULL_BACKWARD": "backward", "BACKWARD_INPUT": "inputs", "BACKWARD_WEIGHT": "weights", "FORWARD": "forward"}


@lru_cache(maxsize=256)
def actions(schedule: Schedule) -> tuple[Action, ...]:
    """Return the actions of a step, in order: torch's own, but for 1F1B, of which it states none: it starts with one
    forward per stage from its own to the last."""
    place, pp, number = schedule.place, schedule.pp, schedule.micro_batches
    name, each = schedule.pipeline.name, schedule.pipeline.stages_per_rank
    if pp > 1 and name in _TORCH:
        sizes = {"n_local_stages": each, "num_stages": each * pp, "pp_group_size": pp, "_n_microbatches": number}
        fields = SimpleNamespace(**sizes, microbatches_per_round=number // max(1, number // pp))
        order = filter(None, _TORCH[name]._calculate_single_rank_operations(fields, place))
        return tuple(Action(_KINDS[x.computation_type.name], x.stage_index, x.microbatch_index) for x in order)
    ahead = min(number, pp - place)
    alternating = [Action("forward", place, each) for each in range(ahead)]
    for each in range(number):
        alternating.append(Action("backward", place, each))
        alternating += [Action("forward", place, ahead + each)] if ahead + each < number else []
    return tuple(alternating)


F = TypeVar("F", bound=Callable[..., Any])
ADAPTER = ".lora_"  # in the names of the parameters of `adapted`
ONE_DOCUMENT = Data()  # in each sequence, and routers that choose experts evenly


@dataclass(frozen=True, eq=False)  # hashed by identity, so that results for a job can be cached
class Job:
    """One optimizer step of an `Engine`, or the forwards of one. Its ranks are those of its mesh, from 0; only links
    between devices depend on the global ranks. The output of the last stage is the loss of train.py, the
    log-probability or the value of each token with a loss of these if the job is trained, or only a KV cache."""

    config: TrainConfig  # with the batch size of a rank
    model: ModelShape
    dims: ParallelDims  # resolved
    balance: bool = False  # whether routers have a load-balancing loss
    trained: bool = True  # False for forwards alone, without gradients and optimizer
    output: Output = "loss"
    weights: torch.dtype = torch.float32  # in which ranks store their shards of the weights
    placed: tuple[int, ...] | None = None  # the global rank of each rank of the mesh; None: the same
    data: Data = ONE_DOCUMENT
    visible: float = 1.0  # the part of a causal sequence's attention that is computed, as in rows of packed samples
    approximate: str = ""  # why predictions are approximate, to be proved by a dry run; empty if they are not
    system: Stack | None = None  # another system's; None: this toolkit's

    @property
    def stack(self) -> Stack:
        # A compiled loss stays eager where it communicates.
        return self.system or (replace(COMPILED, fused_loss=self.dims.tp == 1) if self.config.compile else EAGER)

    @cached_property
    def world_size(self) -> int:
        return math.prod(self.extents["pp"])  # the stages, and the ranks of each

    @cached_property
    def dtype(self) -> torch.dtype:
        """The compute dtype; master weights and reductions are float32. `auto` is a GPU's, except with device=cpu."""
        auto = torch.float32 if self.config.device == "cpu" else torch.bfloat16
        return auto if self.config.dtype == "auto" else getattr(torch, self.config.dtype)

    @property
    def optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.config.optimizer]

    @property
    def frozen(self) -> bool:
        """Whether only adapters are trained."""
        return self.config.lora_rank > 0

    @property
    def counts_choices(self) -> bool:
        """Whether forwards without gradients count the routers' choices before the step (`usp.train.passes`)."""
        return self.balance and self.config.router_balance == "step" and self.config.micro_batches > 1

    @cached_property
    def layout(self) -> SequenceLayout:
        """The layout of a sequence on ring x ulysses."""
        config, dims = self.config, self.dims
        documents = self.documents if config.sp_layout in OF_DOCUMENTS else None
        name = layout_name(config.sp_layout, self.model.facts.windows)
        return SequenceLayout(name, config.padded_len, dims.ring, dims.ulysses, documents).decided

    @cached_property
    def documents(self) -> tuple[tuple[int, ...]] | None:
        """`boundaries`, if a sequence is more than one document or ends before the last token of its ranks."""
        several = self.data.documents or self.config.padded_len > self.config.seq_len
        return (self.boundaries,) if several else None

    @property
    def rows(self) -> int:
        """Sequences of one micro-batch on one data-parallel rank."""
        return self.config.batch_size // self.config.micro_batches

    @cached_property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank of ring x ulysses."""
        return self.rows * self.layout.local_len

    @cached_property
    def outer_tokens(self) -> int:
        """Tokens of one micro-batch on one rank outside of attention and MLP, which tp ranks may share."""
        return self.tokens // self.dims.tp if self.config.tp_sequence_parallel else self.tokens

    def labelled_tokens(self, rank: int) -> int:
        """Return the tokens of one micro-batch on `rank` that have a next token in their sequence."""
        spans = self.layout.local_spans(self.place("ring", rank), self.place("ulysses", rank))
        ranges = (span.index_range(0, self.config.seq_len - 1) for span in spans)
        return self.rows * sum(max(0, last - first) for first, last in ranges)

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The `cu_seqlens` of each sequence."""
        return self.data.boundaries(self.config.seq_len)

    @cached_property
    def micro_batch(self) -> object:
        """The same object for all jobs with the same work of a layer and a micro-batch, apart from recomputation."""
        dims, config = self.dims, self.config
        axes = dims.ring, dims.ulysses, dims.tp, dims.ep, self.ep_chunks, config.tp_sequence_parallel, config.sp_layout
        sizes = self.rows, config.seq_len, self.trained, self.frozen, config.fp8, config.emulates_float8, config.compile
        return _same((self.model, self.dtype, *sizes, *axes, self.data, config.attention_kernel, self.system))

    @cached_property
    def work(self) -> object:
        """The same object for all jobs with the same work of a micro-batch, with recomputation, head and routers."""
        config, routers = self.config, (self.balance, self.counts_choices)
        saving = config.ac, config.mlp_tile, config.loss_chunk
        return _same((self.micro_batch, *saving, *routers, self.output, self.visible))

    @cached_property
    def sharding(self) -> object:
        """The same object for all jobs whose stages are sharded alike."""
        over = (self.degree("fsdp"), self.degree("efsdp")) if self.config.zero else (1, 1)
        across = self.dims.ep, self.dims.tp, self.config.tp_sequence_parallel, self.frozen, self.config.fp8
        return _same((self.model, *over, *across, self.dims.pp, self.pipeline))

    def expert_rows(self, tokens: int) -> int:
        """Return the rows that the busiest expert-parallel rank gets where each rank sends so many tokens."""
        return math.ceil(tokens * self.model.facts.experts_per_token * min(self.data.router_imbalance, self.dims.ep))

    @cached_property
    def pipeline(self) -> PipelineSchedule:
        """The schedule of the pipeline, and its stages."""
        return self.config.pipeline

    @property
    def ep_chunks(self) -> int:
        """The chunks of a rank's experts, each with messages of its own; generation has one."""
        return 1 if self.output == "cache" else ep_chunks(self.model.facts, self.dims.ep, self.config.ep_chunks)

    @property
    def splits_backwards(self) -> bool:
        """Whether backwards are split into one for the inputs and a later one for the weights."""
        return self.config.pp_schedule == "zero-bubble" and self.dims.pp > 1

    @cached_property
    def stage_layers(self) -> tuple[range, ...]:
        """The layers of each pipeline stage."""
        return _stage_layers(len(self.model.layers), self.dims.pp * self.pipeline.stages_per_rank)

    @cached_property
    def last_stage(self) -> int:
        return len(self.stage_layers) - 1

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the pipeline stages of a rank."""
        return _rank_stages(self.pipeline, self.dims.pp, self.place("pp", rank))

    def schedule(self, rank: int) -> Schedule:
        return Schedule(self.pipeline, self.place("pp", rank), self.dims.pp, self.config.micro_batches)

    def kinds(self, *stages: int) -> tuple[tuple[int, int], ...]:
        """Return (a layer, how many equal it: `ModelShape.alike`) of the layers of stages."""
        return _kinds(self.model, len(self.stage_layers), stages)

    @property
    def global_ranks(self) -> Sequence[int]:
        """The global ranks, in the order of the mesh."""
        return range(self.world_size) if self.placed is None else self.placed

    def linked(self, axis: str, rank: int) -> Sequence[int]:
        """Return the global ranks of the group of `rank` along an axis, which determine the links between them."""
        ranks = self.ranks(axis, rank)
        return ranks if self.placed is None else tuple(self.placed[each] for each in ranks)

    @cached_property
    def slowest_ranks(self) -> tuple[int, ...]:
        """One rank per pipeline stage: the one with the most attention of those that share a sequence."""
        inside = max(self.ranks("ring", 0)) if self.config.sp_layout == "contiguous" else 0
        return tuple(first + inside for first in self.ranks("pp", 0))

    def degree(self, axis: str) -> int:
        """Return the number of ranks along an axis: derived ones, efsdp, ep and the two `ends` of pp included."""
        return self.extents[axis][0]

    def ranks(self, axis: str, rank: int) -> range:
        """Return the ranks of the group of `rank` along an axis, ascending."""
        degree, stride = self.extents[axis]
        first = rank - self.place(axis, rank) * stride
        return range(first, first + degree * stride, stride)

    def place(self, axis: str, rank: int) -> int:
        """Return the coordinate of `rank` along an axis."""
        degree, stride = self.extents[axis]
        return rank // stride % degree

    @cached_property
    def extents(self) -> Mapping[str, tuple[int, int]]:
        return _extents(self.dims)


@lru_cache(maxsize=4096)
def _extents(dims: ParallelDims) -> Mapping[str, tuple[int, int]]:
    """Return the degree of each axis, and the distance between neighbours along it."""
    found, stride = {"efsdp": (dims.efsdp, dims.ep), "ep": (dims.ep, 1)}, 1
    for axis, degree in reversed(dims.degrees().items()):
        found[axis] = degree, stride
        stride *= degree
    for axis, parts in DERIVED_AXES.items():  # the parts of a derived axis are adjacent
        degrees, strides = zip(*(found[part] for part in parts), strict=True)
        found[axis] = math.prod(degrees), min(strides)
    pp, stride = found["pp"]
    found["ends"] = (2, stride * (pp - 1)) if pp > 1 else (1, stride)
    return found


_same = lru_cache(maxsize=1 << 16)(lambda key: object())  # hashed faster than the key, which may hold lengths of data
_stage_layers = lru_cache(maxsize=4096)(stage_layers)
_rank_stages = lru_cache(maxsize=4096)(rank_stages)


@lru_cache(maxsize=4096)
def _kinds(model: ModelShape, number: int, stages: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    layers = _stage_layers(len(model.layers), number)
    return tuple(Counter(model.alike[index] for stage in stages for index in layers[stage]).items())


def adapted(model: ModelShape, rank: int, targets: Collection[str], saved: Collection[str] = ()) -> ModelShape:
    """Return a model with LoRA adapters of the linears whose names end with one of `targets`, whose parameters called
    `saved` around its layers are trained, too: they are named as parts of adapters."""

    def adapters(p: ParameterShape) -> Iterator[ParameterShape]:
        yield p
        if len(p.shape) == 2 and p.name.removesuffix(".weight").rpartition(".")[2] in targets:
            styles = [p.style if p.tp_dim == dim else "replicated_with_grad_allreduce" for dim in (1, 0)]
            yield ParameterShape(f"{p.name}{ADAPTER}A", (rank, p.shape[1]), styles[0])
            yield ParameterShape(f"{p.name}{ADAPTER}B", (p.shape[0], rank), styles[1])

    def layer(shape: LayerShape) -> LayerShape:
        return LayerShape(tuple(q for p in shape.parameters for q in adapters(p)), shape.experts)

    def around(parameters: tuple[ParameterShape, ...], module: str) -> tuple[ParameterShape, ...]:
        return tuple(replace(p, name=f"{p.name}{ADAPTER}") if f"{module}.{p.name}" in saved else p for p in parameters)

    different = {index: layer(model.layers[index]) for index in set(model.alike)}
    embedding, _, norm, head = model.names
    return replace(
        model,
        embedding=around(model.embedding, embedding),
        layers=tuple(different[index] for index in model.alike),
        norm=around(model.norm, norm),
        head=around(model.head, head),
    )


def shared(key: Callable[..., Hashable]) -> Callable[[F], F]:
    """Cache a function by the `key` of its arguments, which stay alive, so a key may have the `id` of their parts."""

    def decorate(function: F) -> F:
        results: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

        @wraps(function)
        def cached(*arguments: Any) -> Any:
            known = results.get(found := key(*arguments))
            if known is None:
                if len(results) >= 2**14:
                    results.clear()
                known = results[found] = function(*arguments), arguments
            return known[0]

        return cast(F, cached)

    return decorate
