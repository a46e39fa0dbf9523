"""ReaL's system on nodes of eight A100s, as its paper and its public code have it: rates, layouts, plans.

micro-batches   one where there is one pipeline stage; otherwise as many as stages, twice as many in training
generation      all samples at a time, a micro-batch for each pipeline stage
training        activations recomputed, Megatron's sequence parallelism, optimizer states sharded over dp
heuristic       tp 8, a pipeline stage on each host, every call on all devices; ref and reward offloaded
gradients       reduced after all backward passes, where nothing hides them (its engines for pipelines and Megatron)
weights         broadcast to a train step before it, and back after it, because a reallocation deletes the copy that it
                reads (`param_realloc` hooks of a train step, `build_reparallelized_layers_async`); those of ref and
                reward are loaded under their forward, layer by layer (`__overlapped_load_forward`)
steps           one after another: a worker answers the master between calls only, and a call ends for the master when
                all ranks that have its inputs or weights have answered, too (`model_rpc_reply_func`, `_poll`), so that
                rollouts begin when both train steps have ended
decoding        eager, without CUDA graphs: the host issues 28 operators a layer, and with tp two all-reduces from
                Python; a token of a micro-batch is sampled with about 60 launches and a full sort on the last stage,
                and pp stages decode pp - 1 tokens more

All this is in the code of openpsi-project/ReaLHF, states deb5cd41 and d5d322e7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

import numpy as np

from benchmarks.rlhf.real_rows import MINI_BATCHES, Cell, models, ppo
from usp.model.facts import ModelShape
from usp.parallel import Hardware, ParallelDims, load_hardware
from usp.planning.call_cost import CallCost, CallOptions, Calls
from usp.planning.estimates import Estimates
from usp.planning.simulator import rank_index
from usp.planning.workload import Workload
from usp.predict.compute import LAYER_LAUNCHES
from usp.rlhf.graph import DataflowGraph, Generate, ModelCall
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

HOST = 8  # devices of a node
DEVICE_BYTES = 80 * 1024**3
OFFLOADED = ("ref", "reward")
_PULL = 0.01  # of the first values, in the fit: a factor of e costs as much as an error of 1% in one cell


@dataclass(frozen=True)
class Constants:
    """ReaL's runtime. The rates of memory and links are those of the hardware file.

    Attributes:
        products: by what the efficiencies of matrix products and attention in the hardware file are multiplied.
        operator: seconds in which the host issues an operator that launches a kernel. gpt-fast decodes 25.5 tokens/s of
            Llama 7B eagerly on an A100 (pytorch.org/blog/accelerating-generative-ai-2), 32 layers of 61 operators as
            torch's dispatcher counts them, views left out.
        layer: operators of a decoding layer: 8 for each of two norms, which are written out, because no launcher sets
            FLASH_MQAT_USE_TE; 3 projections, attention with its cache and rotations, and its output; 5 of an MLP; 2
            sums.
        collective: what the host does for a collective over 8 ranks, in operators as the toolkit counts them, until the
            slowest of them has launched it, too.
        delay: mean of the exponential delays with which ranks reach a collective, of which the slowest counts: eager
            decoding of CodeLlama-34B, with 96 all-reduces a token, takes 29.39 ms on 2 A100 and 32.06 on 4
            (huggingface/text-generation-inference, issue 1315).
        sampling: launches that sample a token of a micro-batch.
        sorted: logits that are sorted in a second: 1,024 rows of 32,768 in 7.53 ms (vllm, pull request 32234).
        message: seconds of the host between a decoding stage's output and its next input: two blocking messages.
        call: seconds of a call besides its work: the master polls every 10 ms, retries every 100, and moves the data.
        clear: seconds in which workers collect garbage and empty their cache after a step ("ALWAYS COST 0.3+ SEC").
        piece: seconds of each received piece of a reallocation, as in its estimator.
    """

    products: float = 1.0
    operator: float = 20e-6
    layer: int = 28
    collective: float = 2.0
    delay: float = 48e-6
    sampling: int = 60
    sorted: float = 4.4e9
    message: float = 2e-3
    call: float = 0.5
    clear: float = 0.3
    piece: float = 0.03

    def hardware(self) -> Hardware:
        """Return the node with these constants."""
        node = load_hardware("a100")
        return replace(
            node,
            matmul=tuple((flops, self.products * part) for flops, part in node.matmul),
            attention={name: rates.scaled(self.products) for name, rates in node.attention.items()},
            launch_seconds=self.operator * self.layer / COUNTED,
        )

    def launches(self, ranks: int) -> float:
        """Return the operators of a collective over fewer ranks, which waits less for the slowest: as long as the
        largest of so many exponential delays exceeds their mean."""
        fewer = self.delay * (_late(HOST) - _late(ranks))
        return max(0.0, self.collective - fewer * COUNTED / (self.operator * self.layer))

    def moves(self, elements: int, has: ParallelDims, wants: ParallelDims, near: bool) -> float:
        """Return the time of a reallocation as ReaL counts it, who hold it against timed ones (profiler,
        param_sync_cost.py): a rank receives its whole shard, the first rank of a host that has a shard broadcasts all
        of it, at 200 Gbit/s for every host that receives, or, `near`, at 1,800 within a host."""
        hosts = [ceil(dims.batch * dims.tp / HOST) for dims in (has, wants)]  # of a stage
        rate = 1800e9 if near else 200e9 / ceil(hosts[1] / hosts[0])
        shards = sum(elements / (dims.pp * dims.tp) for dims in (has, wants))
        return 16 * shards / rate + self.piece * pieces(has, wants)

    def __str__(self) -> str:
        collective = self.collective * self.operator * self.layer / COUNTED
        return (
            f"{self.products:.2f} of the file's efficiency of products, {collective * 1e3:.2f} ms a collective, "
            f"{self.message * 1e3:.2f} ms for what a pipeline stage and the next exchange in decoding"
        )


def _late(ranks: int) -> float:
    """Return by how many means the largest of exponential delays exceeds the mean."""
    return sum(1 / number for number in range(2, ranks + 1))


# What a forward of a Llama's layer launches in the toolkit's count, of which ReaL's is another number.
COUNTED = LAYER_LAUNCHES + 7
MOST = Constants(products=1.0, collective=1e3, message=1.0)  # products are no faster than the best that the file knows
# Where the fit begins: with less, a decode step does not feel it, because other things take longer.
FELT = Constants(collective=30.0)
# Which of them are fitted, to the heuristic, which has tp 8 everywhere; the others are from sources.
FITTED = ("products", "collective", "message")


class RealEstimates(Estimates):
    """Estimates with what ReaL takes besides: to begin and end a call, to sample, to load and to receive weights."""

    def __init__(
        self, graph: DataflowGraph, models: Mapping[str, ModelShape], workload: Workload, constants: Constants
    ) -> None:
        super().__init__(graph, models, workload, constants.hardware(), CallOptions())
        self.constants = constants
        self._cost = cache(lambda call, at: self.cost_of(call, at, workload))

    def cost_of(self, call: str, layout: CallLayout, workload: Workload) -> CallCost:
        launches = self.constants.launches(layout.dims.tp)
        how = CallOptions(slots=len(workload.samples), pipelined=True, collective_launches=launches, prefetches=False)
        return Calls(layout, self.models[self.graph[call].role], workload, self.hardware, how).cost(self.graph[call])

    def _call_seconds(self, call: str, layout: CallLayout) -> float:
        seconds, work, stages = super()._call_seconds(call, layout), self.graph[call].work, layout.dims.pp
        if isinstance(work, Generate):
            tokens = work.max_new_tokens + stages - 1
            seconds *= tokens / work.max_new_tokens
            each = self.constants.sampling * self.constants.operator + self.constants.message * (stages > 1)
            logits = len(self.workload.samples) / layout.dims.batch * self.models["actor"].facts.vocab_size
            seconds += tokens * (stages * each + logits / self.constants.sorted)
        if self.graph[call].role in OFFLOADED:
            seconds = max(seconds, self.load_seconds(WeightCopy(self.graph[call].role, layout.of_weights)))
        return seconds + self.constants.call if seconds else 0.0

    def _fill_seconds(self, source: WeightCopy, copy: WeightCopy) -> float:
        has, wants = source.layout, copy.layout
        if (has.ranks, has.dims) == (wants.ranks, wants.dims):
            return 0.0
        near = len({rank // HOST for layout in (has, wants) for rank in layout.ranks}) == 1
        return self.constants.moves(self.models[copy.role].numel, has.dims, wants.dims, near)


def pieces(has: ParallelDims, wants: ParallelDims) -> int:
    """Return how many pieces of weights a rank receives in a reallocation: one from each shard of each stage that has
    some of its layers."""
    stages = max(ceil((stage + 1) * has.pp / wants.pp) - stage * has.pp // wants.pp for stage in range(wants.pp))
    return max(1, has.tp // wants.tp) * stages


@dataclass(frozen=True)
class Runtime:
    """ReaL's master and workers."""

    graph: DataflowGraph
    estimates: RealEstimates
    devices: int

    def seconds(self, plan: ExecutionPlan) -> float:
        """Return the time of a step: an operation begins when its inputs are there and its ranks are free."""
        free, ended = np.zeros(self.devices), dict[str, float]()

        def run(call: ModelCall, ranks: tuple[int, ...], seconds: float) -> None:
            if seconds:
                at = rank_index(ranks)
                ended[call.name] = free[at] = max(ended[call.name], float(free[at].max())) + seconds

        for level in self.graph.levels:
            there, back = ([(call, *self._move(plan, call, first)) for call in level] for first in (True, False))
            for call in level:
                ended[call.name] = max((ended[name] for name in self.graph.before(call.name)), default=0.0)
            works = [
                (call, plan[call.name].ranks, self.estimates.call_seconds(call.name, plan[call.name])) for call in level
            ]
            for operation in (*there, *works, *back):
                run(*operation)
        return max(ended.values()) + self.estimates.constants.clear

    def _move(self, plan: ExecutionPlan, call: ModelCall, first: bool) -> tuple[tuple[int, ...], float]:
        """Return the ranks and seconds of the weights' way to a train step, or back."""
        if call.kind != "train_step":
            return (), 0.0
        other = next(each for each in self.graph.calls if each.role == call.role and each is not call)
        has, wants = (WeightCopy(call.role, plan[each.name].of_weights) for each in (other, call))
        ranks = tuple(sorted({*has.layout.ranks, *wants.layout.ranks}))
        return ranks, self.estimates.fill_seconds(*((has, wants) if first else (wants, has)))


def runtime(cell: Cell, constants: Constants) -> Runtime:
    """Return the runtime of a cell."""
    graph = ppo(cell.response)
    return Runtime(graph, RealEstimates(graph, models(cell.actor, cell.critic), cell.workload, constants), cell.devices)


def real_layout(call: ModelCall, layout: CallLayout, cell: Cell) -> CallLayout:
    """Return a layout with ReaL's micro-batches and optimizer states."""
    if call.kind == "generate":
        return layout
    dims, trains = layout.dims, call.kind == "train_step"
    number = dims.pp * (2 if trains and dims.pp > 1 else 1)
    samples = cell.samples // (MINI_BATCHES if trains else 1)
    tokens = -(-samples // (dims.batch * number)) * (cell.workload.sequences[0])
    return replace(layout, micro_batch_tokens=tokens, zero=int(trains and dims.dp_shard > 1))


def heuristic(cell: Cell) -> ExecutionPlan:
    """Return the plan of ReaL's baseline."""
    ranks, dims = tuple(range(cell.devices)), ParallelDims(pp=cell.devices // HOST, tp=HOST, dp_shard=1)
    calls = {}
    for call in ppo(cell.response).calls:
        layout = CallLayout(ranks, dims)
        if call.kind == "compute":
            layout = CallLayout((0,), ParallelDims(dp_shard=1))
        elif call.kind == "train_step":
            layout = replace(layout, tp_sequence_parallel=True, ac="full")
        calls[call.name] = real_layout(call, layout, cell) if call.role else layout
    return ExecutionPlan("heuristic", calls, frozenset(OFFLOADED))


def published(cell: Cell) -> ExecutionPlan:
    """Return the one plan of ReaL's search that its history states, of a 7B actor and a 34B critic on 32 devices."""
    layout = CallLayout(tuple(range(32)), ParallelDims(pp=2, tp=2, dp_shard=8))
    plan = heuristic(cell)
    (rollout,) = (call.name for call in ppo(cell.response).calls if call.kind == "generate")
    return replace(plan, calls={**plan.calls, rollout: layout})


def heuristic_seconds(cell: Cell, constants: Constants) -> float:
    """Return the predicted time of a step of the baseline."""
    return runtime(cell, constants).seconds(heuristic(cell))


def errors(chosen: Sequence[Cell], constants: Constants) -> np.ndarray:
    """Return log(predicted / measured) seconds of the heuristic."""
    seconds = np.array([heuristic_seconds(cell, constants) for cell in chosen])
    return np.log(seconds / [cell.heuristic for cell in chosen])


def bounded_step(slopes: np.ndarray, residuals: np.ndarray, damping: float, room: np.ndarray) -> np.ndarray:
    """Return the damped least-squares step: what would exceed its room takes that, and the others make the best of
    it."""
    step, free = np.zeros(len(room)), np.ones(len(room), dtype=bool)
    while free.any():
        of, rest = slopes[:, free], residuals + slopes[:, ~free] @ step[~free]
        step[free] = np.linalg.solve(of.T @ of + damping * np.eye(of.shape[1]), -of.T @ rest)
        over = free & (step > room)
        if not over.any():
            break
        step[over], free = room[over], free & ~over
    return step


def fit(chosen: Sequence[Cell], rounds: int = 20) -> Constants:
    """Return the constants with which the heuristic's log seconds have the least squared error (Levenberg-Marquardt).

    Each is pulled weakly to its first value, which decides where the cells do not.
    """
    base, most = (np.log([getattr(values, name) for name in FITTED]) for values in (Constants(), MOST))

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(chosen, constants(logs)), _PULL * (logs - base)])

    def constants(logs: np.ndarray) -> Constants:
        return replace(Constants(), **dict(zip(FITTED, np.exp(logs).tolist(), strict=True)))

    at, damping = np.log([getattr(FELT, name) for name in FITTED]), 0.01
    here = residuals(at)
    for _ in range(rounds):
        axes = np.where(at + 0.05 > most, -0.05, 0.05)
        slopes = np.stack(
            [(residuals(at + axis * unit) - here) / axis for axis, unit in zip(axes, np.eye(len(at)), strict=True)], 1
        )
        there = at + np.clip(bounded_step(slopes, here, damping, most - at), -1.0, 1.0)
        found = residuals(there)
        if found @ found > here @ here:
            damping *= 10
            continue
        gained, at, here, damping = here @ here - found @ found, there, found, damping / 3
        if gained < 1e-5:
            break
    return constants(at)
