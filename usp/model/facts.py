"""A model in numbers: configuration, parameter shapes, training FLOPs, the degrees that it allows, and who holds what.

FLOPs are model FLOPs: a multiply-add counts two, a mask only the pairs it shows, and recomputation nothing. Messages
name parameters, never flags.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from usp.attention import band_pairs
from usp.parallel import ParallelDims, ParamLayout, Violation, divisors, option, stage_layers
from usp.parallel.reallocation.param_layout import Described, Kind, described_layout

NO_ATTENTION = -1
FLOAT8_DIMS = {"tensor": 16, "row": 16, "mx": 32}  # by --fp8: what dims of a product must be multiples of
# Families with formulas of activation memory (`usp.predict`).
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


@dataclass(frozen=True)
class ModelFacts:
    """What a causal language model is: `usp.hf.models.model_facts` reads it from a configuration, once for all who ask.

    windows: per layer, the sliding window in tokens, the query included; 0 for full attention, NO_ATTENTION for a layer
        of another kind.
    intermediate_size: of the dense MLPs; 0 where every layer has experts.
    num_experts: per mixture-of-experts layer; 0 for a dense model.
    router_jitter: width of the random factor on the router's input in training; 0 if disabled.
    balancing_loss: whether transformers defines a load-balancing loss for its experts.
    tied: whether the output head shares the embedding's weight.
    v_head_dim: of the values; 0 where it is `head_dim`, that of queries and keys.
    in_stages: whether the model can be divided into pipeline stages.
    divides_experts: whether ep divides its experts, which go through transformers' `ExpertsInterface`.
    widths: per layer, heads x (head_dim + v_head_dim) where layers differ, and the numbers above are the fewest heads
        and the largest sizes; empty where they do not.
    chosen: per layer, how many keys an indexer chooses for each query, 0 for all; empty for a model without indexers.
    index_size: heads x head dim of the indexers of all layers. index_block: keys that they choose together.
    aux_loss_coef: weight of that loss; 0 without one. experts_per_token: 0 for a dense model.
    compressed: whether layers attend to compressed keys.
    latent: elements of a token that a cache of generation has of latent attention without tp; 0 for its heads.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int, ...]
    intermediate_size: int = 0
    num_experts: int = 0
    router_jitter: float = 0.0
    balancing_loss: bool = False
    tied: bool = False
    v_head_dim: int = 0
    in_stages: bool = True
    divides_experts: bool = True
    widths: tuple[int, ...] = ()
    chosen: tuple[int, ...] = ()
    index_size: int = 0
    index_block: int = 1
    latent: int = 0
    # not in the keys of stored measurements (`usp.planning.estimates`), which have the repr of the fields above
    model_type: str = field(default="", repr=False)
    experts_per_token: int = field(default=0, repr=False)
    aux_loss_coef: float = field(default=0.0, repr=False)
    compressed: bool = field(default=False, repr=False)

    @property
    def formula_violation(self) -> str:
        """Why there are no formulas for the model; empty if there are."""
        known = f"has model_type={self.model_type!r}, but formulas are only known for {', '.join(FAMILIES)}"
        return "" if self.model_type in FAMILIES else f"model={self.name} {known}"

    def balance(self, coefficient: float) -> float:
        """Return the weight of the auxiliary loss: `coefficient`, or for -1 the configuration's. A model has one where
        transformers defines it: not DeepSeek-V3 and its like, which balance by other means."""
        return (self.aux_loss_coef if coefficient == -1 else coefficient) if self.num_experts else 0.0

    @cached_property
    def reaches(self) -> tuple[int, ...]:
        """Per layer, to how many keys a query attends at most, as in `windows`."""
        pairs = zip(self.windows, self.chosen or (0,) * len(self.windows), strict=True)
        return tuple(min(window, chosen) or max(window, chosen) if window >= 0 else window for window, chosen in pairs)

    @property
    def value_dim(self) -> int:
        """Head dim of the values."""
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True)
class ParameterShape:
    """Shape of one parameter.

    name: in transformers, relative to its layer or top-level module.
    style: of its module in the tensor-parallel plan (`usp.parallel.tensor`); "replicated" if the plan omits it.
    linear: whether it is the weight of a linear of a layer that is no router.
    """

    name: str
    shape: tuple[int, ...]
    style: str = "replicated"
    linear: bool = False

    @property
    def tp_dim(self) -> int | None:
        """The dim sharded over tp; None if every tp rank holds the whole parameter."""
        if self.style.startswith("colwise") or self.style == "embedding_rowwise":
            return 0
        return 1 if self.style.startswith("rowwise") and len(self.shape) > 1 else None

    def local(self, tp: int) -> tuple[int, ...]:
        """Return the shape on one of `tp` tensor-parallel ranks."""
        return tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

    def float8(self, fp8: str, tp: int) -> bool:
        """Return whether it multiplies in float8 with this `--fp8`, by the dims of its part on a tp rank."""
        return self.linear and fp8 in FLOAT8_DIMS and not any(size % FLOAT8_DIMS[fp8] for size in self.local(tp))

    def partial_gradient(self, sequence_parallel: bool) -> bool:
        """Return whether each tp rank computes a part of the gradient, which must be summed over tp."""
        if self.style == "untouched" or self.tp_dim is not None:
            return False
        return sequence_parallel or self.style != "replicated"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LayerShape:
    """Parameters of a decoder layer; `experts` have the experts in dim 0, and are empty in a dense layer."""

    parameters: tuple[ParameterShape, ...]
    experts: tuple[ParameterShape, ...] = ()

    def float8_experts(self, fp8: str) -> bool:
        """Return whether its experts multiply in float8 with this `--fp8`: in MXFP8, by the dims of their matrices."""
        dims = [size for p in self.experts if len(p.shape) == 3 for size in p.shape[1:]]
        return fp8 == "mx" and bool(dims) and not any(size % FLOAT8_DIMS[fp8] for size in dims)

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normalized."""
        return any(p.name.endswith("q_norm.weight") for p in self.parameters)


@dataclass(frozen=True)
class ModelShape:
    """Parameter shapes of a causal language model.

    layers: in order; equal layers may be the same object. head: empty if tied to the embedding. names: dotted ones, of
    the embedding, the layers, the norm, and the head.
    """

    facts: ModelFacts
    hidden_size: int
    embedding: tuple[ParameterShape, ...]
    layers: tuple[LayerShape, ...]
    norm: tuple[ParameterShape, ...]
    head: tuple[ParameterShape, ...]
    names: tuple[str, str, str, str]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # kept, because it is that of all parameters
        return hash((self.facts, self.embedding, self.layers, self.norm, self.head))

    def __getstate__(self) -> dict[str, object]:  # hashes of strings differ between processes
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    def around_layers(self, first: bool, last: bool) -> tuple[ParameterShape, ...]:
        """Return the parameters of a pipeline stage besides its layers; the last one has a copy of a tied embedding."""
        head = self.embedding if self.facts.tied and not first else self.head
        return (self.embedding if first else ()) + (self.norm + head if last else ())

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each layer, the first one with the same shapes and window; only that one needs to be computed."""
        first: dict[tuple[LayerShape, int], int] = {}
        layers = zip(self.layers, self.facts.windows, strict=True)
        return tuple(first.setdefault(layer, index) for index, layer in enumerate(layers))

    @cached_property
    def expert_size(self) -> int:
        """Intermediate size of one expert; 0 for a dense model."""
        experts = (parameter for layer in self.layers for parameter in layer.experts)
        return next((parameter.shape[-1] for parameter in experts if parameter.name.endswith("down_proj")), 0)

    @cached_property
    def numel(self) -> int:
        layers = (part for layer in self.layers for part in (*layer.parameters, *layer.experts))
        return sum(part.numel for part in (*self.embedding, *layers, *self.norm, *self.head))

    def uneven_float8(self, tp: int, shards: int) -> list[str]:
        """Return the float8 weights whose rows on a tp rank so many shards do not divide: torchao casts what a rank
        holds, without the padding that FSDP2 gives to parts that are smaller than others."""
        weights = {p: p.local(tp)[0] for layer in self.layers for p in layer.parameters if p.float8("tensor", tp)}
        return [f"{p.name} ({rows} rows)" for p, rows in weights.items() if rows % shards]

    def adapter_parameters(self, rank: int, targets: Collection[str]) -> int:
        """Return the parameters of LoRA adapters: rank x (in + out) for each linear whose name ends with a target."""
        linears = [
            part.shape
            for layer in self.layers
            for part in layer.parameters
            if len(part.shape) == 2 and part.name.removesuffix(".weight").rpartition(".")[2] in targets
        ]
        return rank * sum(sum(shape) for shape in linears)

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply each token: all but the input embedding, including a tied output head. Of a layer's
        experts, as many as a token is routed to."""
        experts = sum(part.numel for layer in self.layers for part in layer.experts)
        idle = experts // max(1, self.facts.num_experts) * (self.facts.num_experts - self.facts.experts_per_token)
        return self.numel - idle - (0 if self.facts.tied else sum(part.numel for part in self.embedding))


def visible_pairs(cu_seqlens: torch.Tensor, window: int) -> int:
    """Count the (query, key) pairs that a causal mask shows in rows of packed documents.

    cu_seqlens: (rows, documents + 1). window: as in `ModelFacts.windows`.
    """
    if window == NO_ATTENTION:
        return 0
    documents = Counter(cu_seqlens.diff(dim=-1).flatten().tolist())
    farthest = window - 1 if window else None
    return sum(count * band_pairs(length, length, 0, 0, farthest) for length, count in documents.items())


def training_flops(
    facts: ModelFacts, *, matmul_parameters: int, tokens: int, cu_seqlens: torch.Tensor, adapter_parameters: int = 0
) -> int:
    """Return the FLOPs of forward and backward for a batch of `tokens` tokens in packed rows `cu_seqlens`.

    Recurrences and convolutions count as nothing beyond their projections: theirs are few.

    matmul_parameters: weights that multiply each token; excludes the embedding, includes the output head.
    adapter_parameters: of LoRA adapters; with them, the other weights are frozen, and have no gradients.
    """
    pairs = {reach: visible_pairs(cu_seqlens, reach) for reach in {*facts.reaches, 0}}
    # per pair and head: 2 * head_dim for the score, 2 * value_dim for the sum of values; the backward takes twice that
    widths = facts.widths or (facts.num_heads * (facts.head_dim + facts.value_dim),) * len(facts.reaches)
    attention = sum(6 * width * pairs[reach] for width, reach in zip(widths, facts.reaches, strict=True))
    attention += 2 * facts.index_size * pairs[0]  # scores, which have no gradient
    products = (4 if adapter_parameters else 6) * matmul_parameters + 6 * adapter_parameters
    return products * tokens + attention


def tp_violations(facts: ModelFacts, tp: int, tp_sequence_parallel: bool, trained: bool = True) -> list[Violation]:
    """Return why the model cannot be divided over `tp` ranks, one message per violation."""
    if tp == 1:
        shards = option("tp_sequence_parallel", True) + " shards tokens over tp ranks: use " + option("tp", "2 or more")
        return [shards] * tp_sequence_parallel
    if facts.widths or not facts.divides_experts:
        what = "layers differ in their heads" if facts.widths else "experts do not go through ExpertsInterface"
        return [option("tp", tp) + f": in {facts.name}, {what}: use " + option("tp", 1)]
    divided = {
        "vocab_size": facts.vocab_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "intermediate_size": facts.intermediate_size,
    }
    given = option("tp", tp)
    violations = [
        given + f" must divide {name}={size} of {facts.name}: use " + option("tp", _listed(divisors(size, tp)))
        for name, size in divided.items()
        if size % tp
    ]
    if facts.num_experts and trained and not tp_sequence_parallel:
        needed = given + f" with the mixture of experts {facts.name} needs " + option("tp_sequence_parallel", True)
        violations.append(needed + " in training, so that each tp rank routes different tokens")
    return violations


def ep_chunks(facts: ModelFacts, ep: int, chunks: int = 0) -> int:
    """Return the number of chunks of the experts of one of `ep` ranks: `chunks`, or for 0 the most up to 4 that divide
    them, as more would hide little more."""
    return 1 if ep == 1 else chunks or divisors(facts.num_experts // ep, 4)[-1]


def ep_violations(facts: ModelFacts, ep: int, chunks: int = 0) -> list[Violation]:
    """Return why the model's experts cannot be sharded over `ep` ranks in `chunks` each, one message per violation."""
    given = option("ep", ep)
    if not facts.num_experts:
        return [given + f" shards experts, and {facts.name} has none: use " + option("ep", 1)] if ep > 1 else []
    violations = []
    if ep > 1 and not facts.divides_experts:
        why = f": the experts of {facts.name} do not go through ExpertsInterface: use "
        violations.append(given + why + option("ep", 1))
    if facts.num_experts % ep:
        fitting = option("ep", _listed(divisors(facts.num_experts)))
        violations.append(given + f" must divide the {facts.num_experts} experts of {facts.name}: use " + fitting)
    elif ep > 1 and chunks not in (0, *(numbers := divisors(facts.num_experts // ep))):
        why = f" must divide the {numbers[-1]} experts of a rank ({facts.num_experts} / ep {ep}): use "
        violations.append(option("ep_chunks", chunks) + why + option("ep_chunks", _listed(numbers)))
    if facts.router_jitter:
        noise = f"router_jitter_noise={facts.router_jitter} of {facts.name}"
        violations.append(Violation((f"{noise} makes routing depend on the rank and the layout: set it to 0",)))
    return violations


def pp_violations(facts: ModelFacts, stages: int) -> list[Violation]:
    """Return why the model cannot be cut into `stages` pipeline stages, one message per violation."""
    if stages > 1 and not facts.in_stages:
        return [
            f"{facts.name} cannot be divided into pipeline stages: its layers take more than the hidden states of the "
            f"layer before, or more than a norm follows them; use " + option("pp", 1)
        ]
    if stages > len(facts.windows):
        needed = f"{stages} pipeline stages need as many layers, but {facts.name} has {len(facts.windows)}"
        return [Violation((needed,))]
    return []


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def weight_layout(
    model: ModelShape, dims: ParallelDims, ranks: Sequence[int], *, zero: int, dtype: torch.dtype
) -> ParamLayout:
    """Return the layout that the parameters of a model have on `ranks`, by the names that they are stored under.

    dims: resolved. ranks: global ranks, in the order of the mesh. zero: ZeRO stage; 0 for weights that are not sharded
    over data- and sequence-parallel ranks.

    Raises ValueError if tp or ep does not divide a dim that it shards, and for more stages than layers.
    """
    described = {
        name: Described(Kind(p.shape, dtype), places, None if experts or dims.tp == 1 else p.tp_dim, experts)
        for name, p, places, experts in _placed(model, dims.pp)
    }
    return described_layout(described, dims, ranks, sharded=zero > 0)


def _placed(model: ModelShape, pp: int) -> Iterator[tuple[str, ParameterShape, tuple[int, ...], bool]]:
    """Yield (name, shape, the pipeline ranks that hold it, whether it is of experts) of each parameter. A rank holds
    one stage, as under the schedule 1f1b."""
    embedding, stack, norm, head = model.names
    first, last = (0,), (pp - 1,)
    ends = tuple(sorted({*first, *last})) if model.facts.tied else first
    for parameters, module, places in (
        (model.embedding, embedding, ends),
        (model.norm, norm, last),
        (model.head, head, last),
    ):
        yield from ((f"{module}.{p.name}", p, places, False) for p in parameters)
    for stage, layers in enumerate(stage_layers(len(model.layers), pp)):
        for index in layers:
            layer = model.layers[index]
            for parameters, experts in ((layer.parameters, False), (layer.experts, True)):
                yield from ((f"{stack}.{index}.{p.name}", p, (stage,), experts) for p in parameters)
