"""Estimates simple enough to write down, in which every choice of a plan has a price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product

from tests.usp.rlhf.toy import ppo
from usp.hf.models import load_model_config, model_facts, scalar_config
from usp.hf.tensor_parallel import model_shape
from usp.model.facts import ModelShape
from usp.planning.rlhf_search import OptionSpace, Problem, options, work_clock
from usp.planning.simulator import Simulator
from usp.rlhf.graph import DataflowGraph, TrainStep
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

WORK = {"generate": 8.0, "inference": 1.0, "train": 4.0, "advantages": 0.01}  # seconds on one rank


@dataclass(frozen=True)
class Simple:
    """Calls share their work among their ranks; tp helps generation, pp costs a bubble, and each rank some overhead.

    Attributes:
        size: of each role's model, in bytes and as a factor of its calls.
    """

    size: dict[str, float] = field(default_factory=dict, hash=False)
    overhead: float = 0.02
    bandwidth: float = 10.0

    def call_seconds(self, call: str, layout: CallLayout) -> float:
        role, _, kind = call.rpartition("_")
        dims, work = layout.dims, WORK[kind] * self.size.get(role, 1.0)
        ideal = work / len(layout.ranks)
        if kind == "generate":
            ideal *= 1.0 + 0.5 / dims.tp
        exchanged = 0.05 * (dims.tp - 1) + 0.03 * (dims.sp - 1) + 0.02 * layout.zero * (dims.dp_shard > 1)
        recompute = 1.25 if layout.ac != "none" else 1.0
        return ideal * recompute * (1 + 0.1 * (dims.pp - 1)) + exchanged + self.overhead * dims.batch**0.5

    def call_bytes(self, call: str, layout: CallLayout) -> float:
        role = call.rpartition("_")[0]
        return self.size.get(role, 1.0) * (0.2 if layout.ac != "none" else 0.8) / len(layout.ranks)

    def weight_bytes(self, copy: WeightCopy) -> float:
        dims, size = copy.layout.dims, self.size.get(copy.role, 1.0)
        return size / (dims.tp * dims.pp * (dims.dp_shard * dims.sp if copy.layout.zero else 1))

    def state_bytes(self, copy: WeightCopy) -> float:
        return 4 * self.weight_bytes(copy)

    def fill_seconds(self, source: WeightCopy, copy: WeightCopy) -> float:
        return 0.01 + self.weight_bytes(copy) / self.bandwidth * (
            1.0 + 0.1 * abs(source.layout.dims.tp - copy.layout.dims.tp)
        )

    def load_seconds(self, copy: WeightCopy) -> float:
        return self.weight_bytes(copy) / (self.bandwidth / 2)

    def state_load_seconds(self, copy: WeightCopy) -> float:
        return self.state_bytes(copy) / (self.bandwidth / 2)


@cache
def shape(name: str, scalar: bool = False) -> ModelShape:
    config = load_model_config(name)
    config = scalar_config(config) if scalar else config
    return model_shape(model_facts("", config), config)


class Objective:
    head, unit = "logprobs", 1


def graph_of_ppo() -> DataflowGraph:
    """Return PPO whose train steps have the outputs of log-probabilities."""
    toy, work = ppo(group_size=1), TrainStep(Objective(), mini_batches=2)  # type: ignore[arg-type]
    calls = tuple(replace(call, work=work) if call.kind == "train_step" else call for call in toy.calls)
    return replace(toy, calls=calls)


def problem_of(
    graph: DataflowGraph, space: OptionSpace, size: dict[str, float], memory: float, *, offload: tuple[str, ...] = ()
) -> Problem:
    """Return the problem of every option of a space, on a clock that counts work."""
    found = {call.name: list(options(call, space)) for call in graph.calls}
    simulator = Simulator(graph, Simple(size), space.world_size)  # type: ignore[arg-type]
    return Problem(simulator, found, memory, offload, work_clock())


def every_plan(problem: Problem) -> Iterator[ExecutionPlan]:
    """Yield all plans of a small problem."""
    names = problem.offload
    subsets = [frozenset(some) for size in range(len(names) + 1) for some in combinations(names, size)]
    for layouts, offload in product(product(*problem.options.values()), subsets):
        yield ExecutionPlan("any", dict(zip(problem.options, layouts, strict=True)), offload)
