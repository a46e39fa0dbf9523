"""Named plans, plans as YAML, their validation, and the schedule that follows from a plan."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import yaml

from tests.usp.rlhf.toy import ppo
from usp.parallel import ParallelDims
from usp.rlhf.algorithms.critic_free import GRPO
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.graph import DataflowGraph, Generate
from usp.rlhf.plan.named_plans import NAMED_PLANS, Facts, named_plan
from usp.rlhf.plan.operations import Operation, copy_of, schedule, trained_copy
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, from_mapping, parse_ranks, to_mapping
from usp.rlhf.runtime.measure import merge, sampling_difference, with_measures
from usp.rlhf.runtime.transfer import StepData, plan_transfer
from usp.rlhf.samples import Samples, fingerprint

FACTS = Facts(world_size=16, ranks_per_host=8, heads=16, layers=4)
EVERYWHERE = tuple(range(16))


def test_a_layout_from_another_process_is_found() -> None:
    layout = CallLayout((0, 1), ParallelDims(dp_shard=2))
    vars(layout)["_hash"] = hash(layout) + 1  # as in a process with other hashes of strings
    assert pickle.loads(pickle.dumps(layout)) in {replace(layout)}


def test_heuristic_is_that_of_real() -> None:
    plan = named_plan("heuristic", ppo(), FACTS)
    dims = ParallelDims(pp=2, tp=8, dp_shard=1)
    for call in ppo().calls:
        layout = plan[call.name]
        assert layout.ranks == EVERYWHERE
        assert layout.zero == 0
        if call.kind != "compute":
            assert layout.dims == dims
            assert layout.tp_sequence_parallel == (call.kind == "train_step")
    assert plan.offload == {"ref", "reward"}
    few_heads = named_plan("heuristic", ppo(), replace(FACTS, heads=4, layers=1))
    assert few_heads["actor_train"].dims == ParallelDims(tp=4, dp_replicate=4, dp_shard=1)


def test_flattening_uses_the_given_degrees_for_every_call() -> None:
    plan = named_plan("flattening", ppo(), replace(FACTS, dims=ParallelDims(ring=2, ulysses=2), zero=3))
    models = [plan[call.name] for call in ppo().calls if call.role]
    assert {(layout.ranks, str(layout.dims)) for layout in models} == {(EVERYWHERE, "dp_shard=4 ring=2 ulysses=2")}
    assert {name: layout.zero for name, layout in plan.calls.items() if layout.zero == 0} == {
        "actor_generate": 0,
        "advantages": 0,
    }


def test_interleaving_splits_the_ranks_between_concurrent_calls() -> None:
    plan = named_plan("interleaving", ppo(), replace(FACTS, dims=ParallelDims(tp=2)))
    names = ("ref_inference", "reward_inference", "critic_inference", "actor_inference")
    assert [plan[name].ranks for name in names] == [tuple(range(4 * n, 4 * n + 4)) for n in range(4)]
    assert {str(plan[name].dims) for name in names} == {"dp_shard=2 tp=2"}
    assert plan["actor_generate"].ranks == plan["actor_train"].ranks == EVERYWHERE
    crowded = named_plan("interleaving", ppo(), replace(FACTS, dims=ParallelDims(tp=8)))
    assert [crowded[name].ranks[0] for name in names] == [0, 8, 0, 8]


def test_separation_trains_on_the_second_half() -> None:
    facts = replace(FACTS, dims=ParallelDims(ulysses=4), rollout_dims=ParallelDims(tp=4), zero=3)
    plan = named_plan("separation", ppo(), facts)
    for call in ppo().calls:
        half = EVERYWHERE[8:] if call.kind == "train_step" else EVERYWHERE[:8]
        assert plan[call.name].ranks == half
    assert str(plan["actor_train"].dims) == "dp_shard=2 ulysses=4"
    assert str(plan["actor_generate"].dims) == "dp_shard=2 tp=4"
    with pytest.raises(ValueError, match="separation requires an even number of ranks, got 3"):
        named_plan("separation", ppo(), replace(FACTS, world_size=3))


@pytest.mark.parametrize("name", NAMED_PLANS)
def test_plan_survives_yaml(name: str) -> None:
    memory = {"ac": "attention-saved", "ac_offload": True, "mlp_tile": 64, "micro_batch_tokens": 0}
    facts = replace(FACTS, dims=ParallelDims(ulysses=2, tp=2), zero=3, tp_sequence_parallel=True, **memory)
    plan = named_plan(name, ppo(), facts)
    assert from_mapping(yaml.safe_load(yaml.safe_dump(to_mapping(plan)))) == plan


def test_memory_options_reach_the_calls_on_which_they_have_an_effect() -> None:
    graph = ppo()
    facts = replace(FACTS, zero=3, ac="full", ac_offload=True, mlp_tile=64, micro_batch_tokens=4096)
    plan = named_plan("flattening", graph, facts)
    for call in graph.calls:
        layout, trains = plan[call.name], call.kind == "train_step"
        assert (layout.ac, layout.ac_offload) == (("full", True) if trains else ("none", False))
        assert layout.mlp_tile == (64 if call.role else 0)
        assert layout.micro_batch_tokens == (4096 if call.kind in ("train_step", "inference") else -1)
    # Checkpointing, micro-batches and chunks do not give a call weights of its own.
    inference = replace(plan["actor_inference"], micro_batch_tokens=0, loss_chunk=64)
    plan = replace(plan, calls={**plan.calls, "actor_inference": inference})
    assert copy_of(graph, plan, graph["actor_inference"]) == trained_copy(graph, plan, "actor")


def test_a_micro_batch_has_16384_tokens_on_each_sequence_parallel_rank_unless_told_otherwise() -> None:
    layout = CallLayout(tuple(range(8)), ParallelDims(ulysses=2, ring=2, dp_shard=2))
    assert [replace(layout, micro_batch_tokens=n).token_budget for n in (-1, 0, 7)] == [65536, 0, 7]


def test_defaults_may_be_left_out_of_a_file() -> None:
    text = "{offload: [ref], calls: {a: {ranks: '0-3,6-9', tp: 2, zero: 3}, b: {ranks: 5}, c: {ranks: [1, 2]}}}"
    plan = from_mapping(yaml.safe_load(text))
    assert plan["a"] == CallLayout((0, 1, 2, 3, 6, 7, 8, 9), ParallelDims(dp_shard=4, tp=2), 3)
    assert (plan["b"].ranks, plan["c"].ranks, plan.offload) == ((5,), (1, 2), {"ref"})
    assert parse_ranks("3") == (3,)


def test_all_violations_of_a_file_are_reported_at_once() -> None:
    text = "{plan: x, offload: ref, calls: {a: {ranks: 0-3-5}, b: {tp: 2}, c: {ranks: 0, tp: '2', cp: 2, zero: true}}}"
    with pytest.raises(ValueError) as caught:
        from_mapping(yaml.safe_load(text))
    for part in (
        "unknown key 'plan'",
        "offload: 'ref' must be a list of roles, or of optimizers such as actor.optimizer",
        "a: ranks: '0-3-5' must be ranks and ranges, such as 0-3,6",
        "b: {'tp': 2} must be a mapping with `ranks`",
        "c: tp = '2' must be an integer; unknown key 'cp'; zero = True must be an integer",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="must be a mapping with `calls`"):
        from_mapping([])


def test_all_violations_of_a_plan_are_reported_at_once() -> None:
    graph = ppo()
    one = CallLayout((0,), ParallelDims(dp_shard=1))
    calls = {call.name: one for call in graph.calls if call.name != "ref_inference"} | {
        "actor_generate": CallLayout((0, 1), ParallelDims(dp_shard=2), zero=3, tp_sequence_parallel=True, loss_chunk=8),
        "actor_train": CallLayout((0, 1, 8, 9), ParallelDims(dp_shard=2), ac="all", mlp_tile=-1),
        "critic_train": CallLayout(
            (1, 1), ParallelDims(), zero=5, micro_batch_tokens=-2, sp_layout="spiral", ac_offload=True
        ),
        "critic_inference": CallLayout((), ParallelDims(dp_shard=1), ac="full"),
        "reward_inference": CallLayout((0, 1), ParallelDims(dp_shard=1, tp=2, ep=4)),
        "advantages": CallLayout((0, 1), ParallelDims(dp_shard=1, tp=2), mlp_tile=8),
        "other": one,
    }
    with pytest.raises(ValueError) as caught:
        ExecutionPlan("mine", calls, frozenset({"actor", "judge", "ref.optimizer", "critic.optimizer"})).check(
            graph, world_size=8
        )
    for part in (
        "plan 'mine': no layout for ref_inference",
        "layouts for unknown calls other: the calls are ",
        "actor_generate: a generate call does not support zero, tp_sequence_parallel, loss_chunk: remove them",
        "actor_train: ac='all' must be one of none, selective, attention-saved, full",
        "actor_train: mlp_tile=-1 must be at least 0",
        "critic_inference: ac and ac_offload keep less for a backward, which only a train_step call has: remove them",
        "advantages: a function supports no options besides ranks and degrees: remove the others",
        "actor_generate: tp_sequence_parallel requires tp >= 2, got tp=1",
        "actor_train: ranks 8-9 are missing from the world of 8 ranks (0-7): launch more ranks, or use others",
        "actor_train: dp_shard=2 x 1 = 2 ranks must equal the call's ranks, 4",
        "critic_train: ranks [1, 1] must be unique and ascending",
        "critic_train: dp_shard=-1 must be resolved",
        "critic_train: zero=5 must be one of 0, 1, 2, 3",
        "critic_train: micro_batch_tokens=-2 must be at least 1, or 0 (no limit) or -1",
        "critic_train: ac_offload offloads what activation checkpointing saves, but ac is none: use ac: full",
        "critic_train: sp_layout='spiral' must be one of",
        "critic_inference: must have at least one rank",
        "reward_inference: ep=4 must divide",
        "advantages: a function supports only data-parallel degrees, got tp=2",
        "offload names 'actor', which is trained: use actor.optimizer",
        "offload names unknown role 'judge': the roles and optimizers are actor, critic, ref, reward, actor.optimizer",
        "offload names unknown role 'ref.optimizer'",
    ):
        assert part in str(caught.value)


# Measurements and fingerprints


def test_samples_of_a_prompt_stay_on_one_rank_where_models_share_it() -> None:
    graph = build_graph("grpo", GRPO(generate=Generate(group_size=4, max_new_tokens=4), mini_batches=2))
    for parts, together in ((2, 4), (4, 2), (8, 1)):
        layout = CallLayout(tuple(range(parts)), ParallelDims(dp_shard=parts))
        plan = ExecutionPlan("", {call.name: layout for call in graph.calls})
        ids = {}
        for share in (False, True):
            step = StepData(replace(graph, share_prefixes=share), plan, 16)
            step.lengths["tokens"] = list(range(16))
            ids[share] = step.partition(graph["actor_train"])
        mini_batches = [sorted(i for part in ids[True] for i in part[number]) for number in (0, 1)]
        assert mini_batches == [list(range(8)), list(range(8, 16))]
        assert all(len({i // together for i in own}) * together == len(own) for part in ids[True] for own in part)
        assert (ids[True] == ids[False]) == (together == 1)


def collected(graph: DataflowGraph, plan: ExecutionPlan) -> set[int]:
    """Return the samples whose tokens rank 0 has for the call `collect`."""
    step = StepData(graph, plan, 8)
    step.lengths |= {"prompt_ids": [3] * 8, "tokens": [4] * 8}
    made, end = (step.transfer_end(graph[name], ("tokens",)) for name in ("actor_generate", "collect"))
    sent = {i for (_, target), message in plan_transfer(made, [end]).items() for _, i in message if target == 0}
    return sent | {i for i in end.ids[0] if i in made.ids[0]}


def test_sampling_difference_runs_where_the_training_layout_recomputes() -> None:
    plan = named_plan("separation", ppo(), FACTS)
    graph, measured = with_measures(ppo(), plan, ("tokens",), print)
    assert measured["sampling_difference"].ranks == plan["actor_inference"].ranks
    assert (graph["collect"].inputs, measured["collect"].ranks) == (("tokens",), (0,))
    measured.check(graph, FACTS.world_size)
    assert collected(graph, measured) > {0, 1} == collected(*with_measures(ppo(), plan, ("tokens",), print, first=2))
    with pytest.raises(ValueError, match=r"collect=\['text'\]: unknown text; keys: advantages"):
        with_measures(ppo(), plan, ("text",), print)


def test_sampling_difference_counts_only_the_response() -> None:
    values = {
        "logprobs": [torch.tensor([9.0, -1.0, -2.0, 0.0]), torch.zeros(1)],
        "old_logprobs": [torch.tensor([0.0, -1.5, -2.0, 0.0]), torch.zeros(1)],
        "mask": [torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.zeros(1)],
    }
    found = sampling_difference(Samples((0, 1), values), lambda x: x)
    assert {key: [float(x) for x in of_key] for key, of_key in found.values.items()} == {
        "difference_max": [0.5, 0.0],
        "difference_sum": [0.5, 0.0],
        "difference_tokens": [2.0, 0.0],
    }
    assert math.isnan(merge([({}, {k: {0: float("nan"), 1: 1.0} for k in found.values})], {})["logprob_difference_max"])


def test_fingerprint_depends_on_values_not_on_addresses() -> None:
    assert fingerprint((ppo(), sampling_difference)) == fingerprint((ppo(), sampling_difference))
    graphs = [ppo(), ppo(temperature=0.5), ppo(mini_batches=1)]
    different = [*graphs, partial(ppo, 1), partial(ppo, 2), {"a", "b"}, {"a": "b"}]
    assert len({fingerprint(value) for value in different}) == len(different)


# The schedule


def operations(name: str, graph: DataflowGraph, facts: Facts = FACTS) -> tuple[Operation, ...]:
    return schedule(graph, named_plan(name, graph, facts), facts.world_size)


def places(found: tuple[Operation, ...], kind: str) -> Iterator[tuple[int, Operation]]:
    return ((place, operation) for place, operation in enumerate(found) if operation.kind == kind)


@pytest.mark.parametrize("name", NAMED_PLANS)
def test_calls_have_weights_and_samples_before_they_start(name: str) -> None:
    graph, facts = ppo(), replace(FACTS, zero=3)
    plan, found = named_plan(name, ppo(), facts), operations(name, ppo(), facts)
    calls = {operation.call: place for place, operation in places(found, "call")}
    assert sorted(calls) == sorted(call.name for call in graph.calls)
    (announced, announce) = next(places(found, "announce"))
    assert announce.calls == ("actor_generate",)
    for call in graph.calls:
        start = calls[call.name]
        assert all(calls[other] < start for other in graph.before(call.name))
        copy, source = copy_of(graph, plan, call), trained_copy(graph, plan, call.role)
        held = call.role and source not in (None, copy)
        moves = [place for kind in ("reallocate", "release") for place, op in places(found, kind) if op.copy == copy]
        assert len(moves) == (2 if held else 0)
        assert not held or moves[0] < start < moves[1]
        for producer in {graph.producers[key] for key in call.inputs if key in graph.producers}:
            sent = [p for p, op in places(found, "transfer") if op.call == producer and call.name in op.calls]
            assert all(max(calls[producer], announced) < place < start for place in sent)
            assert len(sent) == 1 or plan[call.name].ranks == plan[producer].leaders
    offloaded = [operation.copy.role for _, operation in places(found, "offload") if operation.copy]
    assert sorted(offloaded) == sorted(plan.offload)


def test_weights_of_concurrent_calls_move_before_any_of_them_starts() -> None:
    found = operations("interleaving", ppo(), replace(FACTS, zero=3))
    first = min(place for place, operation in places(found, "call") if operation.call.endswith("inference"))
    assert all(place < first for place, _ in places(found, "reallocate"))
