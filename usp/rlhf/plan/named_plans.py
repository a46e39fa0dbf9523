"""Plans that have a name, as functions of the graph, the machine and the model.

    heuristic      every call on all ranks: tensor parallel within a host, pipeline between hosts; what the comparison
                   of ReaL (arXiv 2406.14088) calls heuristic. Identical layouts, so no parameter ever moves
    flattening     every call on all ranks, with the degrees that the user gives
    interleaving   inference calls that could run at the same time share the ranks; the rest as in flattening
    separation     generation and inference on one half of the ranks, training on the other; weights cross over

The last three: "An Adaptive Placement and Parallelism Framework for Accelerating RLHF Training" (arXiv 2312.11819).
Functions are data-parallel over the ranks of the calls around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from parallel import ParallelDims, divisors
from usp.rlhf.graph.calls import ModelCall
from usp.rlhf.graph.dataflow import DataflowGraph

from .plan import CallLayout, ExecutionPlan

_MOST_TP = 8  # ReaL's heuristic: a host of its experiments


@dataclass(frozen=True)
class Facts:
    """What a named plan is made of beside the graph.

    Attributes:
        world_size, ranks_per_host: of the run.
        heads: what tp must divide: the greatest common divisor of all models' attention and key-value heads.
        layers: of the shallowest model, which bounds pp.
        dims: degrees of every call; dp_shard is filled in for the ranks that a call gets.
        rollout_dims: degrees of generation and inference under `separation`; None: as `dims`.
        zero, tp_sequence_parallel: of train and inference calls.
        micro_batch_tokens, sp_layout: of every call of a model.
    """

    world_size: int
    ranks_per_host: int
    heads: int
    layers: int
    dims: ParallelDims = field(default_factory=ParallelDims)
    rollout_dims: ParallelDims | None = None
    zero: int = 0
    tp_sequence_parallel: bool = False
    micro_batch_tokens: int = 0
    sp_layout: str = "zigzag"


def heuristic(graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """Every call on all ranks: tp a host's ranks (at most 8), pp the hosts; Megatron's sequence parallelism in
    training, untrained roles offloaded.

    What heads or layers do not allow goes to dp_replicate, of which ReaL's has 1.
    """
    hosts = max(1, facts.world_size // facts.ranks_per_host)
    tp = math.gcd(divisors(facts.world_size // hosts, _MOST_TP)[-1], facts.heads)
    pp = divisors(hosts, facts.layers)[-1]
    dims = ParallelDims(pp=pp, tp=tp, dp_replicate=facts.world_size // (pp * tp), dp_shard=1)
    facts = replace(facts, dims=dims, zero=0, tp_sequence_parallel=False)
    everything = tuple(range(facts.world_size))

    def layout(call: ModelCall) -> CallLayout:
        chosen = _layout(call, facts, everything, dims)
        return replace(chosen, tp_sequence_parallel=tp > 1) if call.kind == "train_step" else chosen

    untrained = frozenset(graph.roles) - frozenset(graph.trained_roles)
    return ExecutionPlan("heuristic", {call.name: layout(call) for call in graph.calls}, untrained)


def flattening(graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """Every call on all ranks, with `facts.dims`."""
    everything = tuple(range(facts.world_size))
    return ExecutionPlan("flattening", {c.name: _layout(c, facts, everything, facts.dims) for c in graph.calls})


def interleaving(graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """Inference calls that wait for the same calls divide the ranks; everything else is on all ranks.

    Each gets a multiple of the ranks that the degrees beside data parallelism need; where there are too few, several
    calls have the same ranks, one after another.
    """
    layouts = dict(flattening(graph, facts).calls)
    needed = _least_ranks(facts.dims)
    replicas = facts.world_size // needed
    for level in graph.levels:
        together = [call for call in level if call.kind == "inference"]
        shares = _shares(replicas, min(len(together), replicas))
        starts = [sum(shares[:number]) for number in range(len(shares))]
        for number, call in enumerate(together):
            start, share = starts[number % len(shares)], shares[number % len(shares)]
            ranks = tuple(range(start * needed, (start + share) * needed))
            layouts[call.name] = _layout(call, facts, ranks, replace(facts.dims, dp_replicate=1, dp_shard=-1))
    return ExecutionPlan("interleaving", layouts)


def separation(graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """Training on the second half of the ranks, everything else on the first.

    Raises:
        ValueError: for an odd world.
    """
    half, rest = divmod(facts.world_size, 2)
    if rest:
        raise ValueError(f"separation divides the ranks in two halves, but there are {facts.world_size}: use an even")
    rollout, training = tuple(range(half)), tuple(range(half, 2 * half))

    def layout(call: ModelCall) -> CallLayout:
        if call.kind == "train_step":
            return _layout(call, facts, training, facts.dims)
        return _layout(call, facts, rollout, facts.rollout_dims or facts.dims)

    return ExecutionPlan("separation", {call.name: layout(call) for call in graph.calls})


NAMED_PLANS: dict[str, Callable[[DataflowGraph, Facts], ExecutionPlan]] = {
    "heuristic": heuristic,
    "flattening": flattening,
    "interleaving": interleaving,
    "separation": separation,
}


def named_plan(name: str, graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """The plan of a name, checked.

    Raises:
        ValueError: for an unknown name, and for degrees that do not fit the ranks.
    """
    if name not in NAMED_PLANS:
        raise ValueError(f"plan {name!r} must be one of {', '.join(NAMED_PLANS)}, or a YAML file")
    plan = NAMED_PLANS[name](graph, facts)
    plan.check(graph, facts.world_size)
    return plan


def _layout(call: ModelCall, facts: Facts, ranks: tuple[int, ...], dims: ParallelDims) -> CallLayout:
    """The layout of a call with the user's degrees, as far as its kind has them."""
    if call.kind == "compute":
        return CallLayout(ranks, ParallelDims(dp_replicate=len(ranks), dp_shard=1))
    whole = call.kind == "generate"
    dims = replace(dims, ep=1) if whole else dims
    return CallLayout(
        ranks,
        dims.resolve(len(ranks)),
        zero=0 if whole else facts.zero,
        micro_batch_tokens=facts.micro_batch_tokens,
        tp_sequence_parallel=facts.tp_sequence_parallel and not whole,
        sp_layout=facts.sp_layout,
    )


def _least_ranks(dims: ParallelDims) -> int:
    """Ranks of one data-parallel replica."""
    return dims.pp * dims.sp * dims.tp


def _shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` nearly equal shares."""
    return [total // parts + (number < total % parts) for number in range(parts)] if parts else []
