"""Decode steps under CUDA graphs: a capture permits them, and replays give the same tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from tests.attention.cuda_calls import CheckCalls, DispatchedOps
from tests.attention.test_decode import device_of
from tests.harness.cuda_graphs import Capture, NotCapturable, ReplayedGraph, graphs_on_cpu
from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import TYPES, tiny_config
from tests.usp.tiny import CONFIGS, SIZES, drawn_model
from usp.attention import DecodeStep, KVCache
from usp.hf.expert_parallel import apply_ep
from usp.hf.integrate import apply_unified_sp
from usp.hf.models import empty_model, materialise
from usp.hf.tensor_parallel import apply_tp
from usp.parallel import ParallelDims, ParallelMesh, local_tensor
from usp.predict.fake_world import fake_world, tensors_of
from usp.rlhf.config import RlhfConfig
from usp.rlhf.generation import generate
from usp.rlhf.generation.decoding import read_length
from usp.rlhf.generation.generate import Generator
from usp.rlhf.generation.graphs import StepGraphs, decoding_notes, eager_reason
from usp.rlhf.graph import Generate
from usp.rlhf.prepare import prepare
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.roles.weight_memory import WeightMemory
from usp.run.launch import Launch

from .test_families import GRIDS, built, generated, prompts

CPU = torch.device("cpu")
GREEDY = Generate(max_new_tokens=9, temperature=0)
SAMPLED = Generate(max_new_tokens=9, temperature=0.8, top_k=30, top_p=0.9)
CAPTURED = {  # grids of two ranks, or one
    "llama": ("alone", "tp2", "u2"),
    "gemma2": ("r2",),  # softcap, windows, capped logits
    "gemma3_text": ("u2",),  # windows with rotary frequencies of their own
    "falcon_h1": ("u2",),  # Mamba-2 beside attention: states that every step changes
    "mamba": ("r2",),
    "stablelm": ("r2",),  # layers that do not pass the cache on
}
EAGER = {
    "gpt_oss": "experts get as many rows as tokens choose them",
    "qwen3_next": "experts get as many rows as tokens choose them",
    "deepseek_v32": "scores of all tokens so far choose keys",
    "deepseek_v4": "scores of all tokens so far choose keys",
    "dynamic": "rotary embeddings turn by the longest sequence",
}
ON_GPUS = {  # whose kernels want heads of 16 bytes or more
    "llama": lambda: LlamaConfig(**SIZES, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=16, sliding_window=11),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
}
Responses = list[tuple[list[int], list[float]]]


def by_16(places: int, multiple: int = 0) -> int:
    return -(-places // 16) * 16


def responses(
    model_type: str, name: str, mesh: ParallelMesh, work: Generate, captures: bool
) -> tuple[Responses, int, list[Any]]:
    """Tokens and log-probabilities by prompt, the steps that were replayed, and `unknown_memory`."""
    generator, given = built(model_type, GRIDS[name], mesh), prompts(model_type)
    apply_ep(generator._model, mesh, tp_sequence_parallel=False)
    generator._captures = captures
    with graphs_on_cpu() as graphs, patch.object(generate, "read_length", by_16):
        found = generator.generate(given, work, list(range(len(given))))
    assert not captures or len(graphs) > 1
    replays, unknown = sum(each.replays for each in graphs), unknown_memory(generator, graphs)
    return [(each.tokens.tolist(), each.logprobs.tolist()) for each in found], replays, unknown


def unknown_memory(generator: Generator, graphs: list[ReplayedGraph]) -> list[Any]:
    """Operators of kept graphs that read memory which no step makes and whose moving the generator does not notice."""
    if generator._kept is None:  # steps send messages
        return []
    model, known = generator._model, set[int]()
    for x in map(local_tensor, (*model.parameters(), *model.buffers())):
        known.add(x.untyped_storage()._cdata)
    if generator._samples:
        known.add(generator._token_keys.untyped_storage()._cdata)
    for x in generator._kept[0].tensors:
        known.add(x.untyped_storage()._cdata)
    return [
        call.record
        for graph in graphs
        for call in graph.operators.calls
        for x in tensors_of((call.args, call.kwargs))
        if (storage := x.untyped_storage()._cdata) not in known and storage not in graph.operators._made
    ]


def replayed(model_type: str, name: str, mesh: ParallelMesh, work: Generate) -> str:
    """What is wrong with the responses of replayed steps."""
    eager, *_ = responses(model_type, name, mesh, work, captures=False)
    try:
        found, replays, unknown = responses(model_type, name, mesh, work, captures=True)
    except (RuntimeError, IndexError) as error:  # of what is forbidden, or of an indexer without the number of tokens
        return str(error)
    if [tokens for tokens, _ in found] != [tokens for tokens, _ in eager]:
        return "other tokens"
    if unknown:
        return f"memory that may move: {unknown[0]}"
    return ("" if found == eager else "other log-probabilities") if replays > 10 else "hardly a step was replayed"


# Faults


def before_attending(act: Callable[[Tensor], object]) -> Callable[[], Any]:
    attend = DecodeStep.attend

    def faulty(self: DecodeStep, layer: Any, q: Tensor, *args: Any, **options: Any) -> Tensor:
        act(q)
        return attend(self, layer, q, *args, **options)

    return lambda: patch.object(DecodeStep, "attend", faulty)


def inputs_that_move() -> Any:
    decode = Generator._decode

    def faulty(self: Generator, static: Any, *args: Any) -> None:
        object.__setattr__(static, "inputs", static.inputs.clone())
        decode(self, static, *args)

    return patch.object(Generator, "_decode", faulty)


def cache_that_moves() -> Any:
    layer = KVCache.layer

    def faulty(self: KVCache, name: Any, *tokens: Tensor) -> tuple[Tensor, ...]:
        self.layers[name] = tuple(x.clone() for x in layer(self, name, *tokens))
        return self.layers[name]

    return patch.object(KVCache, "layer", faulty)


def number_of_the_host() -> Any:
    numbers, draw = count(), generate.sample

    def faulty(logits: Tensor, keys_B: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return draw(logits, keys_B + 2 * next(numbers), *args)

    return patch.object(generate, "sample", faulty)


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "": (nullcontext, ""),
    "item": (before_attending(lambda q: q.sum().item()), "the host reads a value"),
    "condition": (before_attending(lambda q: bool((q > 0).all())), "the host reads a value"),
    "tolist": (before_attending(lambda q: q.sum((1, 2, 3)).tolist()), "the host reads values"),
    "nonzero": (before_attending(lambda q: q.nonzero()), "a shape depends on values"),
    "boolean mask": (before_attending(lambda q: q[q > 0]), "a boolean mask"),
    "inputs that move": (inputs_that_move, "other tokens"),
    "cache that moves": (cache_that_moves, "other tokens"),
    "number of the host": (number_of_the_host, "other tokens"),
}


# Replayed on CPUs


def on_ranks(cases: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    meshes: dict[str, ParallelMesh] = {}
    for _, name in cases:
        if name not in meshes:
            meshes[name] = ParallelMesh.create(GRIDS[name].dims)
    works = {False: GREEDY, True: SAMPLED}
    return {(kind, name): replayed(kind, name, meshes[name], works[kind == "llama"]) for kind, name in cases}


@pytest.mark.slow
def test_replayed_steps_give_the_same_responses(ranks: RankPool, exhaustive: bool) -> None:
    cases = [(kind, name) for kind, names in CAPTURED.items() for name in names]
    if exhaustive:
        dense = [kind for kind in TYPES if generated(kind) and not reason_of(kind)]
        assert len(dense) > 40
        cases += [(kind, "alone") for kind in dense]
    alone = [case for case in cases if case[1] == "alone"]
    found = ranks.run(on_ranks, 1, alone) + ranks.run(on_ranks, 2, [case for case in cases if case not in alone])
    assert not [(case, problem) for of_rank in found for case, problem in of_rank.items() if problem]


@pytest.mark.slow
def test_what_runs_eagerly_could_not_be_captured(ranks: RankPool) -> None:
    (found,) = ranks.run(on_ranks, 1, [(kind, "alone") for kind in EAGER])
    assert all(found.values()), found


def with_faults() -> dict[str, str]:
    mesh, found = ParallelMesh.create(GRIDS["alone"].dims), {}
    for name, (fault, _) in FAULTS.items():
        with fault():
            found[name] = replayed("llama", "alone", mesh, SAMPLED)
    return found


@pytest.mark.slow
def test_faults_of_a_step_are_noticed(ranks: RankPool) -> None:
    (found,) = ranks.run(with_faults, 1)
    missed = {name: found[name] for name, (_, text) in FAULTS.items() if not found[name].startswith(text)}
    assert not missed and not found[""], found


# Kept from call to call


@torch.inference_mode()
def update(generator: Generator) -> None:
    for weight in generator._model.parameters():
        weight.mul_(1.01)


def moved(x: Tensor) -> None:
    x.data = x.data * 1.01 if x.is_floating_point() else x.data.clone()


def weight_moves(generator: Generator) -> None:
    moved(list(generator._model.parameters())[-1])


def buffer_moves(generator: Generator) -> None:
    moved(next(generator._model.buffers()))


@torch.inference_mode()
def cache_moves(generator: Generator) -> None:
    for x in generator._kept[0].cache.tensors[1:2] if generator._kept else ():
        x.set_(x.clone())


BETWEEN: dict[str, tuple[Callable[[Generator], None], bool]] = {  # two calls; whether graphs stay
    "nothing": (lambda generator: None, True),
    "update": (update, True),
    "weight": (weight_moves, False),
    "messages": (lambda generator: None, False),  # of two ranks in each step
    "buffer": (buffer_moves, False),
    "cache": (cache_moves, False),
    "forgotten": (Generator.forget, False),
}


def captures_of_calls(name: str, between: str, works: list[Generate]) -> list[int]:
    """Captures of each call. Checks its responses, and that nothing is kept in memory but graphs."""
    mesh, given, found = ParallelMesh.create(GRIDS[name].dims), prompts("llama"), list[int]()
    captured, eager = (built("llama", GRIDS[name], mesh) for _ in range(2))
    captured._captures = True
    same_memory = patch.object(torch.UntypedStorage, "resize_", lambda storage, size: storage)
    with graphs_on_cpu() as graphs, patch.object(generate, "read_length", by_16):
        for work in works:
            before = len(graphs)
            with same_memory if between else nullcontext():  # an allocator that gives out the same memory again
                pair = [each.generate(given, work, list(range(len(given)))) for each in (captured, eager)]
            for one, other in zip(*pair, strict=True):
                assert (one.tokens.tolist(), one.logprobs.tolist()) == (other.tokens.tolist(), other.logprobs.tolist())
            found.append(len(graphs) - before)
            assert (captured._kept is None) == (between == "messages")
            assert between or not any(x.untyped_storage().nbytes() for x in captured._kept[0].tensors)
            for each in (captured, eager):
                BETWEEN[between or "nothing"][0](each)
    return found


@pytest.mark.exhaustive  # with messages: replayed steps, below
def test_graphs_are_kept_while_nothing_moves(ranks: RankPool) -> None:
    for between, (_, stay) in BETWEEN.items():
        world, grid = (2, "u2") if between == "messages" else (1, "alone")
        for first, *others in ranks.run(captures_of_calls, world, grid, between, [GREEDY] * 3):
            assert first > 1 and others == ([0, 0] if stay else [first, first]), between


@pytest.mark.exhaustive
def test_other_sampling_has_graphs_of_its_own_and_freed_memory_returns(ranks: RankPool) -> None:
    works = [GREEDY, SAMPLED, replace(GREEDY, stop_ids=(95,)), SAMPLED]
    ((first, second, *others),) = ranks.run(captures_of_calls, 1, "alone", "nothing", works)
    assert first == second > 1 and others == [0, 0]
    ((first, *_),) = ranks.run(captures_of_calls, 1, "alone", "", [GREEDY] * 2)
    assert first > 1


@pytest.mark.exhaustive
def test_a_cache_serves_calls_that_need_a_little_less(ranks: RankPool) -> None:
    works = [GREEDY, replace(GREEDY, max_new_tokens=7), GREEDY, replace(GREEDY, max_new_tokens=60)]
    ((first, *others, longer),) = ranks.run(captures_of_calls, 1, "alone", "nothing", works)
    assert first > 1 and others == [0, 0] and longer > first


@pytest.mark.parametrize(("free", "returned"), [(1 << 40, 0), (1 << 30, 2)])
def test_a_capture_returns_memory_only_where_a_graph_may_lack_it(free: int, returned: int) -> None:
    memory = patch.multiple(torch.cuda, mem_get_info=lambda device: (free, 1 << 40), empty_cache=DEFAULT)
    found = torch.zeros(2, dtype=torch.int64)
    with graphs_on_cpu() as graphs, memory as patched:
        steps = StepGraphs(lambda place: found[place : place + 1].add_(1), CPU)
        for place in (0, 1, 0, 1, 0, 1):
            steps(place)
    assert found.tolist() == [3, 3] and [each.replays for each in graphs] == [2, 2]
    assert patched["empty_cache"].call_count == returned


@pytest.mark.parametrize("method", ["release", "offload", "discard"])
def test_weights_that_leave_take_graphs_with_them(method: str) -> None:
    model, forgets = RoleModel.__new__(RoleModel), MagicMock()
    model._memory, model._generator, model.engine = WeightMemory(), forgets, None
    model._stored = tuple  # no weights
    getattr(model, method)()
    forgets.forget.assert_called_once_with()


def lengths_read(own: bool) -> list[int]:
    """The lengths that the steps of this rank read. own: of its own part of the cache."""
    prefill, step, found = Generator._prefill, Generator._step, []

    def of_this_rank(self: Generator, cache: Any, group: Any, active: Any) -> None:
        prefill(self, cache, group, active)
        for slot in group.slots:
            active[slot].most_cached = active[slot].cached

    def recorded(self: Generator, static: Any, work: Any, length: int, tokens: int) -> None:
        found.append(length)
        step(self, static, work, length, tokens)

    generator = built("llama", replace(GRIDS["u2"], layout="contiguous"), ParallelMesh.create(GRIDS["u2"].dims))
    with (
        patch.object(Generator, "_step", recorded),
        patch.object(Generator, "_prefill", of_this_rank) if own else nullcontext(),
        patch.object(generate, "read_length", lambda places, multiple=0: places),
    ):
        given = prompts("llama")
        generator.generate(given, GREEDY, [0] * len(given))
    return found


@pytest.mark.slow
def test_ranks_that_communicate_capture_the_same_shapes(ranks: RankPool) -> None:
    for own in (False, True):
        first, second = ranks.run(lengths_read, 2, own)
        assert (first == second) != own


def test_lengths_are_few_and_little_is_read_in_vain() -> None:
    lengths = [read_length(places) for places in range(1, 1 << 15)]
    assert all(places <= read < places + max(64, places / 8) for places, read in enumerate(lengths, 1))
    assert len({*lengths}) == 16 + 5 * 8
    assert len({read_length(places, 512) for places in range(1, 1 << 15)}) == 16 + 2 * 8


# On fake CUDA tensors


@contextmanager
def fake_cuda(model_type: str, dims: ParallelDims) -> Iterator[Generator]:
    """A generator of rank 0 with slots for three sequences, in bfloat16."""
    ranks = dims.tp * dims.ring * dims.ulysses
    capability = patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with fake_world(ranks, 0), capability, device_of(132, 16):  # which splits 64 keys
        mesh = ParallelMesh.create(dims, "cuda")
        model = empty_model(ON_GPUS[model_type]()).to(torch.bfloat16)
        apply_unified_sp(model, mesh)
        apply_tp(model, mesh, sequence_parallel=False)
        with FakeTensorMode(allow_non_fake_inputs=True), DispatchedOps(), torch.no_grad():
            materialise(model, torch.device("cuda"))
            yield Generator(model, mesh, slots=3)


def steps(model_type: str, dims: ParallelDims, work: Generate, fault: Callable[[], Any]) -> list[Any]:
    """The records of three steps after the first one, and the attention kernels."""
    with fake_cuda(model_type, dims) as generator, CheckCalls() as calls:
        assert generator._captures
        static, captures = generate._Static(3, 64, generator._device), []
        with fault():
            for _ in range(4):
                with Capture() as capture:
                    generator._step(static, work, 64, 0)
                captures.append(capture)  # which keeps memory from being used again
        assert {x.dtype for stored in static.cache.layers.values() for x in stored} == {torch.bfloat16}
    assert {*calls.called} == {"_scaled_dot_product_efficient_attention"}
    return [capture.records for capture in captures[1:]]


def copy_to_the_host(q: Tensor) -> Tensor:
    return q.to("cpu")


def number_in_a_shape() -> Any:
    numbers = count()
    return before_attending(lambda q: q.new_zeros(next(numbers)))()


def number_in_an_operator() -> Any:
    numbers = count()
    return before_attending(lambda q: q + next(numbers))()


FAKE_FAULTS: dict[str, Callable[[], Any]] = {
    **{name: fault for name, (fault, _) in FAULTS.items() if name not in ("inputs that move", "number of the host")},
    "copy to the host": before_attending(copy_to_the_host),
    "shape of the host": number_in_a_shape,
    "number in an operator": number_in_an_operator,
}


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(tp=2), ParallelDims(ring=2, ulysses=2)], ids=str)
@pytest.mark.parametrize("work", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.slow(full=3)
def test_steps_on_a_gpu_repeat_the_same_operators_on_the_same_memory(dims: ParallelDims, work: Generate) -> None:
    found = steps("mistral", dims, work, nullcontext)
    assert len(found[0]) > 100
    assert all(one == other for one, other in pairwise(found))


@pytest.mark.parametrize("name", [name for name in FAKE_FAULTS if name != "tolist"])
def test_faults_on_a_gpu_are_noticed(name: str) -> None:
    try:
        found = steps("llama", ParallelDims(), SAMPLED, FAKE_FAULTS[name])
    except NotCapturable:
        assert name
        return
    assert all((one == other) != bool(name) for one, other in pairwise(found))


# Which steps are captured


def reason_of(model_type: str) -> str:
    return eager_reason(empty_model(tiny_config(model_type), causal=True), ParallelDims())


@pytest.mark.slow
def test_what_no_graph_can_have_is_named() -> None:
    assert not any(reason_of(model_type) for model_type in CAPTURED)
    assert all(text in reason_of(model_type) for model_type, text in EAGER.items() if model_type != "dynamic")
    config = tiny_config("llama")
    for kind in ("dynamic", "longrope"):
        config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
        config.rope_parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
        assert eager_reason(empty_model(config, causal=True), ParallelDims()) == EAGER["dynamic"]
    assert "pp" in eager_reason(empty_model(CONFIGS["llama"](), causal=True), ParallelDims(pp=2))


def test_a_run_says_how_it_decodes(tmp_path: Path) -> None:
    config = RlhfConfig(output=str(tmp_path / "run"), device="cpu", sft_steps=0)
    for changes, eager, text in (
        ({}, False, "under CUDA graphs"),
        ({}, True, "operator by operator: as asked"),
        ({"model": "mixtral-tiny"}, False, "operator by operator: experts get as many rows as tokens choose them"),
    ):
        run = prepare(replace(config, **changes), Launch())
        configs = {role: spec.config for role, spec in run.roles.items()}
        assert list(decoding_notes(run.graph, run.plan, configs, eager)) == [f"actor_generate: decodes {text}"]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ON_GPUS)
def test_a_gpu_replays_what_it_computes_eagerly(family: str, tmp_path: Path) -> None:
    """The same lengths of the cache are read in both, so that kernels get the same shapes."""
    replay, replays = torch.cuda.CUDAGraph.replay, count()

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        next(replays)
        replay(graph)

    lengths, drawn = (40, 1, 3, 151, 65, 2, 33, 150, 9), torch.Generator().manual_seed(0)
    given = [torch.randint(96, (length,), generator=drawn) for length in lengths]
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = drawn_model(ON_GPUS[family]()).to("cuda", torch.bfloat16)
        mesh = ParallelMesh.create(ParallelDims())
        apply_unified_sp(model, mesh)
        generators = [Generator(model, mesh, slots=4, eager=eager) for eager in (True, False)]
        assert [generator._captures for generator in generators] == [False, True]
        for work in (replace(GREEDY, max_new_tokens=100), replace(SAMPLED, max_new_tokens=100)):
            with (
                patch.object(generate, "_GRAPH_MULTIPLE", 64),
                patch.object(torch.cuda.CUDAGraph, "replay", counted),
            ):
                found = [generator.generate(given, work, list(range(len(given)))) for generator in generators]
            for eager, captured in zip(*found, strict=True):
                assert eager.tokens.tolist() == captured.tokens.tolist()
                assert torch.equal(eager.logprobs, captured.logprobs)
        assert next(replays) > 2 * 100
    finally:
        dist.destroy_process_group()
