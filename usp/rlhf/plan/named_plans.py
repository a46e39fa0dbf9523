"""Named plans, built from the graph, the cluster and the models.

    heuristic      every call on all ranks: tp within a host, pp between hosts; the baseline of ReaL (arXiv
                   2406.14088). All layouts are the same, so weights never move
    flattening     every call on all ranks, with the degrees that the user gives
    interleaving   inference calls that can run concurrently split the ranks; otherwise as flattening
    separation     generation and inference on one half of the ranks, training on the other; weights move between them

The last three: "An Adaptive Placement and Parallelism Framework for Accelerating RLHF Training" (arXiv 2312.11819).
Functions are data-parallel over all ranks of their plan, or over the first half under `separation`. With adapters, the
reference is the policy without them, and needs no weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from usp.fields import shared_values
from usp.parallel import ParallelDims, divisors
from usp.rlhf.graph import DataflowGraph, Inference, ModelCall

from .plan import CallLayout, ExecutionPlan


def policy_as_reference(graph: DataflowGraph, plan: ExecutionPlan) -> tuple[DataflowGraph, ExecutionPlan]:
    """Let the actor, with its adapters off, make the calls of the role "ref" wherever it has weights in their layout.
    For an actor that trains adapters of the weights that "ref" has. Calls in other layouts keep the role."""
    layouts = {plan[call.name].of_weights for call in graph.calls if call.role == "actor"}
    train_call = graph.train_call("actor")
    trained = plan[train_call.name] if train_call else None

    # Without ZeRO, another layout with the degrees of the trained copy is in the same memory.
    alike = (trained.ranks, trained.dims, 0) if trained is not None and trained.zero == 0 else ()
    calls = tuple(
        replace(call, role="actor", work=replace(call.work, adapters=False))
        if call.role == "ref"
        and isinstance(call.work, Inference)
        and ((at := plan[call.name]).of_weights in layouts or (at.ranks, at.dims, at.zero) == alike)
        else call
        for call in graph.calls
    )
    graph = replace(graph, calls=calls)
    return graph, replace(plan, offload=plan.offload if "ref" in graph.roles else plan.offload - {"ref"})


_MAX_TP = 8  # of ReaL's heuristic: the ranks of a host in its experiments


@dataclass(frozen=True)
class Facts:
    """The cluster, model and configuration values that named plans depend on.

    Attributes:
        world_size, ranks_per_host: of the run.
        heads: greatest common divisor of all models' attention and key-value heads; tp must divide it.
        layers: of the shallowest model, which bounds pp.
        experts: whether a model has experts, which tp ranks share in training from ZeRO stage 1 on.
        dims: degrees of every call; dp_shard is resolved for the ranks of a call.
        rollout_dims: degrees of generation and inference under `separation`; None: same as `dims`.
        zero, tp_sequence_parallel, micro_batch_tokens: of train and inference calls.
        sp_layout, mlp_tile: of every call of a model.
        ac, ac_offload: of train calls.
    """

    world_size: int
    ranks_per_host: int
    heads: int
    layers: int
    dims: ParallelDims = field(default_factory=ParallelDims)
    rollout_dims: ParallelDims | None = None
    zero: int = 0
    tp_sequence_parallel: bool = False
    micro_batch_tokens: int = -1
    sp_layout: str = "zigzag"
    ac: str = "none"
    ac_offload: bool = False
    mlp_tile: int = 0
    experts: bool = False


def heuristic(graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """Place every call on all ranks: tp within a host (at most 8), pp over hosts; untrained roles offloaded. Training
    uses Megatron's sequence parallelism. Ranks that tp and pp cannot use go to dp_replicate (1 in ReaL)."""
    hosts = max(1, facts.world_size // facts.ranks_per_host)
    tp = math.gcd(divisors(facts.world_size // hosts, _MAX_TP)[-1], facts.heads)
    pp = divisors(hosts, facts.layers)[-1]
    dims = ParallelDims(pp=pp, tp=tp, dp_replicate=facts.world_size // (pp * tp), dp_shard=1)
    facts = replace(facts, zero=0, tp_sequence_parallel=False)
    everything = tuple(range(facts.world_size))

    def layout(call: ModelCall) -> CallLayout:
        chosen = _layout(call, facts, everything, dims)
        if call.kind != "train_step":
            return chosen
        return replace(chosen, tp_sequence_parallel=tp > 1, zero=int(facts.experts and tp > 1))

    untrained = frozenset(graph.roles) - frozenset(graph.trained_roles)
    return ExecutionPlan("heuristic", {call.name: layout(call) for call in graph.calls}, untrained)


def flattening(graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """Place every call on all ranks, with `facts.dims`."""
    everything = tuple(range(facts.world_size))
    return ExecutionPlan("flattening", {c.name: _layout(c, facts, everything, facts.dims) for c in graph.calls})


def interleaving(graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """Split the ranks between the inference calls of a level; place everything else on all ranks. Each call gets a
    multiple of pp x sp x tp ranks; where there are too few, several calls share ranks and run one after another."""
    layouts = dict(flattening(graph, facts).calls)
    replica = facts.dims.pp * facts.dims.sp * facts.dims.tp
    replicas = facts.world_size // replica
    for level in graph.levels:
        concurrent = [call for call in level if call.kind == "inference"]
        parts = min(len(concurrent), replicas)
        sizes = [replicas // parts + (share < replicas % parts) for share in range(parts)]
        bounds = list(accumulate(sizes, initial=0))
        for number, call in enumerate(concurrent):
            share = number % parts
            ranks = tuple(range(bounds[share] * replica, bounds[share + 1] * replica))
            layouts[call.name] = _layout(call, facts, ranks, replace(facts.dims, dp_replicate=1, dp_shard=-1))
    return ExecutionPlan("interleaving", layouts)


def separation(graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """Place training on the second half of the ranks, everything else on the first. Raises ValueError for an odd world
    size."""
    half, rest = divmod(facts.world_size, 2)
    if rest:
        raise ValueError(f"separation requires an even number of ranks, got {facts.world_size}")
    rollout, training = tuple(range(half)), tuple(range(half, 2 * half))

    def layout(call: ModelCall) -> CallLayout:
        if call.kind == "train_step":
            return _layout(call, facts, training, facts.dims)
        return _layout(call, facts, rollout, facts.rollout_dims or facts.dims)

    return ExecutionPlan("separation", {call.name: layout(call) for call in graph.calls})


NAMED_PLANS: dict[str, Callable[[DataflowGraph, Facts], ExecutionPlan]] = {
    plan.__name__: plan for plan in (heuristic, flattening, interleaving, separation)
}


def named_plan(name: str, graph: DataflowGraph, facts: Facts) -> ExecutionPlan:
    """Build and check a named plan. Raises ValueError for degrees that do not fit the ranks."""
    plan = NAMED_PLANS[name](graph, facts)
    plan.check(graph, facts.world_size)
    return plan


def _layout(call: ModelCall, facts: Facts, ranks: tuple[int, ...], dims: ParallelDims) -> CallLayout:
    """Return the layout of a call with the degrees and options that its kind supports."""
    if call.kind == "compute":
        return CallLayout(ranks, ParallelDims(dp_replicate=len(ranks), dp_shard=1))
    options = shared_values(facts, CallLayout) | {"ranks": ranks, "dims": dims.resolve(len(ranks))}
    if call.kind == "generate":
        del options["zero"], options["micro_batch_tokens"], options["tp_sequence_parallel"]
    if call.kind != "train_step":
        del options["ac"], options["ac_offload"]
    return CallLayout(**options)
