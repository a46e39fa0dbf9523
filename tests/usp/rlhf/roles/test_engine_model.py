"""Weights reach a rollout engine: every step under an engine of the interface of vLLM's is that of our own decoding.

The stand-in takes what vLLM's loaders are given, keeps what vLLM's ranks would read of it, and decodes with all of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.parallel.reallocation.layouts import minimum_bytes
from tests.usp.rlhf.test_numerics import ALGORITHMS, alone, builder, given
from usp.hf.disk import DiskTensor, disk_layout, stored_tensors
from usp.hf.lora import Lora
from usp.parallel import ParallelDims, ParallelMesh, ProcessGroups, plan_realloc
from usp.parallel.reallocation.boxes import Box
from usp.parallel.reallocation.param_layout import Described, Kind, described_layout
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.generation import vllm
from usp.rlhf.generation.decoding import GeneratedResponse
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import DataflowGraph, Generate, ModelCall
from usp.rlhf.plan.operations import copy_of
from usp.rlhf.plan.plan import OWN, VLLM, CallLayout, ExecutionPlan, with_engine
from usp.rlhf.roles import engine_model
from usp.rlhf.roles.engine_model import EngineModel
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.runtime.copies import CopyOptions, layer_plans
from usp.rlhf.runtime.executor import Executor
from usp.rlhf.runtime.measure import SENT_BYTES, WHOLE_BYTES
from usp.rlhf.served import WeightPiece

STEPS, RANKS = 2, 4
ALL, FIRST, LAST = (0, 1, 2, 3), (0, 1), (2, 3)
# the layouts of training and of generation, and the family
CASES: dict[str, tuple[str, CallLayout, CallLayout]] = {
    "u2 r2, engine of tp 2": (
        "llama-4kv",
        CallLayout(ALL, ParallelDims(ulysses=2, ring=2, dp_shard=1), zero=3),
        CallLayout(ALL, ParallelDims(tp=2, dp_shard=2)),
    ),
    "tp2 pp2, engines of tp 1": (
        "llama-tied",
        CallLayout(ALL, ParallelDims(tp=2, pp=2, dp_shard=1), zero=1, tp_sequence_parallel=True),
        CallLayout(ALL, ParallelDims(dp_shard=4)),
    ),
    "other ranks, experts": (
        "qwen3_moe",
        CallLayout(FIRST, ParallelDims(ulysses=2, dp_shard=1), zero=3),
        CallLayout(LAST, ParallelDims(tp=2, ep=2, dp_shard=1)),
    ),
    "adapters, tp2 pp2, engine of tp 2": (
        "llama-4kv",
        CallLayout(ALL, ParallelDims(tp=2, pp=2, dp_shard=1), zero=1, tp_sequence_parallel=True),
        CallLayout(ALL, ParallelDims(tp=2, dp_shard=2)),
    ),
}
LORA = Lora(rank=4, alpha=64, targets=("down_proj", "q_proj", "v_proj"))


class StandIn:
    """Decodes with the weights of a tensor-parallel group, each part from the rank whose part it is."""

    receives = True

    def __init__(self, spec: RoleSpec, mesh: ParallelMesh, alone: ParallelMesh) -> None:
        self.spec, self.mesh, self.awake = spec, mesh, False
        layout = CallLayout((dist.get_rank(),), ParallelDims(dp_shard=1))
        self.whole = RoleModel(replace(spec, lora=None), layout, alone)
        self.whole.allocate()

    def wake(self) -> None:
        self.awake = True

    def sleep(self) -> None:
        self.awake = False
        for weight in self.whole.weights().values():
            weight.fill_(math.nan)

    def load(self, pieces: Iterator[WeightPiece]) -> int:
        assert self.awake
        model, group = self.whole.stage.model, self.mesh.group("tp")
        shapes = {name: tensor.shape for name, tensor in stored_tensors(model).items()}
        layout = disk_layout(model, shapes)
        places = {tensor.name: tensor for tensors in layout.values() for tensor in tensors}
        own = self.whole.weights()
        for piece in pieces:
            name, value = piece.name, piece.whole()
            parts = [torch.empty_like(value) for _ in range(group.size())]
            dist.all_gather(parts, value.contiguous(), group=group)
            for part in parts:
                value = value.where(~value.isnan(), part)
            place = places.pop(name)
            own[place.parameter][place.box.slices()] = value.view(place.box.sizes)
        assert not places, f"not given: {list(places)}"
        return 0

    def generate(self, *prompts: Any, **begun: Any) -> list[GeneratedResponse]:
        assert self.awake
        return Generator.of(self.whole.stage, self.whole.mesh, slots=5).generate(*prompts, **begun)


def steps_of(
    name: str, engine: str, groups: ProcessGroups, delta: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[list[tuple[dict, list[Tensor]]], list[int]]:
    """What rank 0 is told of each step, with our own decoding on it alone; bytes that this rank received for the
    engine, and that it lacked."""
    family, train, generate = CASES[name]
    trained: dict[str, RoleModel] = {}
    graph = build_graph("grpo", ALGORITHMS["grpo"])
    plan = alone(graph) if engine == OWN else with_engine(plan_of(graph, train, generate), graph, engine)
    one = ParallelDims(dp_shard=1)
    own = [ParallelMesh.create(one, "cpu", (rank,), groups) for rank in range(RANKS)][dist.get_rank()]
    build = builder(trained, dtype, family=family, lora=LORA if name.startswith("adapters") else None)

    def build_role(call: ModelCall, layout: CallLayout, mesh: ParallelMesh) -> RoleModel:
        model = build(call, layout, mesh)
        return EngineModel(model.spec, layout, mesh, stand_in(model.spec, mesh)) if layout.engine == VLLM else model

    def stand_in(spec: RoleSpec, mesh: ParallelMesh) -> Any:
        return StandIn(spec, mesh, own)

    executor = Executor(
        graph,
        plan,
        CopyOptions(groups, build_role, torch.device("cpu"), RANKS, delta),
        collect=("tokens", "advantages"),
    )
    told, moved = [], [0, 0]
    for number in range(1, STEPS + 1):
        for model in trained.values() if dtype == torch.bfloat16 else ():
            model.learning_rate = 1e-5  # which leaves most weights as they are
        result = executor.run_step(given("grpo", number), number, seed=number)
        for event in result.events:
            if event.kind == "reallocate" and "generate" in event.name:
                moved = [moved[0] + event.received, moved[1] + event.minimum]
        if result.samples is not None:
            told.append((result.metrics, [*result.samples["tokens"], *result.samples["advantages"]]))
    return told, moved


def plan_of(graph: DataflowGraph, train: CallLayout, generate: CallLayout) -> ExecutionPlan:
    here = CallLayout(train.ranks, train.dims)
    functions = CallLayout(train.ranks, ParallelDims(dp_shard=len(train.ranks)))
    by_kind = {"generate": generate, "train_step": train, "inference": here, "compute": functions}
    return ExecutionPlan("mine", {call.name: by_kind[call.kind] for call in graph.calls})


def swap_halves(parts: Any, boxes: Any, on_disk: Any) -> Iterator[WeightPiece]:
    """As if the halves of fused parameters were taken for each other."""
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    for piece in vllm.pieces_of(parts, boxes, on_disk):
        yield piece._replace(name=re.sub("|".join(other), lambda found: other[found[0]], piece.name))


def run_all(names: Iterable[str], broken: bool = False) -> dict[str, list[Any]]:
    groups = ProcessGroups()
    if broken:
        with patch.object(engine_model, "pieces_of", swap_halves):
            return {"broken": [steps_of(FEW[0], VLLM, groups)]}
    return {name: [steps_of(name, engine, groups) for engine in (OWN, VLLM)] for name in names}


DELTAS = ("u2 r2, engine of tp 2", "other ranks, experts")
FEW = ("tp2 pp2, engines of tp 1", "other ranks, experts")  # without --exhaustive


def run_deltas(names: tuple[str, ...]) -> dict[str, list[Any]]:
    groups = ProcessGroups()
    return {name: [steps_of(name, VLLM, groups, delta, torch.bfloat16) for delta in (False, True)] for name in names}


@pytest.fixture(scope="module")
def deltas(ranks: RankPool) -> list[dict[str, list[Any]]]:
    return ranks.run(run_deltas, RANKS, DELTAS)


@pytest.mark.parametrize("name", DELTAS)
@pytest.mark.exhaustive  # to other ranks: ../generation/test_server.py
def test_an_engine_is_sent_what_has_changed(deltas: list[dict[str, list[Any]]], name: str) -> None:
    (told, _), (others, _) = deltas[0][name]
    sizes = [(step.pop(SENT_BYTES), step.pop(WHOLE_BYTES)) for step, _ in others]
    for (metrics, values), (of_deltas, same) in zip(told, others, strict=True):
        assert of_deltas == metrics and all(map(torch.equal, values, same))
    assert sizes[0][0] == sizes[0][1] > 0
    assert all(sent < 0.6 * needed for sent, needed in sizes[1:])


@pytest.fixture(scope="module")
def results(ranks: RankPool, exhaustive: bool) -> list[dict[str, list[Any]]]:
    return ranks.run(run_all, RANKS, CASES if exhaustive else FEW)


def differences(wanted: Any, found: Any) -> float:
    assert len(wanted) == len(found) == STEPS
    errors = [0.0]
    for (metrics, values), (others, compared) in zip(wanted, found, strict=True):
        if not all(
            x.shape == y.shape and bool((x - y).abs().max() < 1e-4) for x, y in zip(values, compared, strict=True)
        ):
            return math.inf
        errors += [abs(metrics[key] - others[key]) for key in metrics if key.endswith(("loss", "grad_norm"))]
        errors.append(others["logprob_difference_max"])
    return max(errors)


OF_CASES = [pytest.param(name, marks=() if name in FEW else pytest.mark.exhaustive) for name in CASES]


@pytest.mark.parametrize("name", OF_CASES)
@pytest.mark.slow
def test_steps_with_an_engine_are_those_with_our_own_decoding(results: list[dict[str, list[Any]]], name: str) -> None:
    (own, _), (engine, _) = results[0][name]
    assert differences(own, engine) < 1e-5
    assert own[0][0]["actor/grad_norm"] > 0


@pytest.mark.slow
def test_a_wrong_weight_is_noticed(results: list[dict[str, list[Any]]], ranks: RankPool) -> None:
    broken = ranks.run(run_all, RANKS, FEW, True)[0]["broken"][0][0]
    assert differences(results[0][FEW[0]][0][0], broken) > 1e-2
    assert broken[0][0]["logprob_difference_max"] > 1e-3, "the drift between engine and trainer is a metric"


@pytest.mark.parametrize("name", OF_CASES)
@pytest.mark.slow
def test_a_rank_receives_what_it_lacks(results: list[dict[str, list[Any]]], name: str) -> None:
    moved = [result[name][1][1] for result in results]
    assert all(received == minimum for received, minimum in moved)
    assert sum(received for received, _ in moved) > 0


def test_the_plans_of_layers_send_what_the_whole_plan_sends() -> None:
    places = (0,)
    kinds = {f"model.layers.{n}.{name}": (48, 16) for n in range(3) for name in ("q", "o")} | {"model.embed": (80, 16)}
    described = {
        name: Described(Kind(shape, torch.float32), places, None if name.endswith("o") else 0)
        for name, shape in kinds.items()
    }
    src = described_layout(described, ParallelDims(ulysses=2, ring=2, dp_shard=1), range(4), sharded=True)
    dst = described_layout(described, ParallelDims(tp=2, dp_shard=2), range(4), sharded=False)
    whole = plan_realloc(src, dst, bucket_bytes=1 << 20, ranks_per_host=4)
    plans = layer_plans(whole)
    assert [len(plan.dst.parameters) for plan in plans] == [2, 2, 2, 1]
    assert sum(plan.total_bytes for plan in plans) == whole.total_bytes == minimum_bytes(whole) > 0


def test_only_a_ranks_part_has_values() -> None:
    box = Box((2, 0), (2, 3))
    on_disk = {
        "w": [DiskTensor("a", "w", Box((0, 0), (3, 3)), (3, 3)), DiskTensor("b", "w", Box((3, 0), (1, 3)), (3,))]
    }
    parts = {"w": torch.arange(6.0).view(2, 3)}
    first, second = (piece.whole() for piece in vllm.pieces_of(parts, {"w": box}, on_disk))
    assert first.isnan().all(1).tolist() == [True, True, False] and first[2].tolist() == [0, 1, 2]
    assert second.tolist() == [3, 4, 5]


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        (CallLayout(ALL, ParallelDims(ring=2, dp_shard=2), engine=VLLM), "divides a model only over tp"),
        (CallLayout(ALL, ParallelDims(tp=2, ep=4, dp_shard=2), engine=VLLM), "ep=1 or 2"),
        (CallLayout((1, 2), ParallelDims(tp=2, dp_shard=1), engine=VLLM), "from a multiple of 2 on"),
        (CallLayout(ALL, ParallelDims(dp_shard=4), engine="other"), "must be own, vllm"),
    ],
)
def test_layouts_that_vllm_does_not_have_are_refused(generate: CallLayout, message: str) -> None:
    graph = build_graph("grpo", ALGORITHMS["grpo"])
    train = CallLayout(ALL, ParallelDims(dp_shard=4), zero=3)
    assert message in "; ".join(plan_of(graph, train, generate).violations(graph, RANKS))
    wrong = plan_of(graph, CallLayout(ALL, ParallelDims(dp_shard=4), engine=VLLM), train)
    assert "decodes, which only a generate call does" in "; ".join(wrong.violations(graph, RANKS))


def test_sampling_whose_log_probabilities_vllm_lacks_is_refused() -> None:
    def problems(*works: Generate) -> str:
        with patch.object(vllm, "find_spec", lambda name: object()):
            return "; ".join(vllm.sampling_problems(works))

    assert not problems(Generate(temperature=0.7), Generate(temperature=0)), "log-probabilities as sampled"
    assert not problems(Generate(top_k=5), Generate(temperature=0)), "log-probabilities at temperature 1"
    assert "needs those at temperature=0.7" in problems(Generate(top_p=0.9), Generate(temperature=0.7))
    assert "temperature=0.001 is below" in problems(Generate(temperature=0.001))


def test_an_engines_copy_is_its_own() -> None:
    graph = build_graph("grpo", ALGORITHMS["grpo"])
    layout = CallLayout(ALL, ParallelDims(dp_shard=4))
    plan = plan_of(graph, layout, layout)
    call = next(call for call in graph.calls if call.kind == "generate")
    engines = with_engine(plan, graph, VLLM)
    assert copy_of(graph, engines, call) != copy_of(graph, plan, call)
    assert engines["actor_train"].engine == OWN
