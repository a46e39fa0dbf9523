"""What calls take: batching as in generation, bytes that are read, and how layouts and lengths change seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.usp.planning.estimates import Objective, shape
from usp.model.facts import ModelShape
from usp.parallel import Hardware, ParallelDims, load_hardware
from usp.planning.call_cost import CallCost, CallOptions, CallRows, Calls, packed_rows
from usp.planning.workload import Sample, Workload, batching
from usp.rlhf.generation.decoding import Rollout, Slots
from usp.rlhf.graph import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.rows import pack_lengths, prefix_families
from usp.rlhf.samples import Samples, partition

NODE = load_hardware("a100")
A100 = replace(NODE, launch_seconds=0.0)  # so that what is read and sent is exact


LLAMA = shape("llama3-8b")


WORKS: dict[str, Any] = {
    "generate": Generate(group_size=4, max_new_tokens=1024),
    "inference": Inference("logprobs"),
    "train": TrainStep(Objective(), mini_batches=2),  # type: ignore[arg-type]
}
LOAD = Workload.of(prompts=32, group_size=4, prompt_tokens=512, quantiles=(64, 256, 1024))


def cost(
    kind: str,
    load: Workload = LOAD,
    ranks: Any = range(8),
    model: ModelShape = LLAMA,
    node: Hardware = A100,
    options: CallOptions | None = None,
    **how: Any,
) -> CallCost:
    of_layout = {name: how.pop(name) for name in ("zero", "ac", "tp_sequence_parallel") if name in how}
    layout = CallLayout(tuple(ranks), ParallelDims(**how).resolve(len(ranks)), **of_layout)
    return Calls(layout, model, load, node, options or CallOptions()).cost(ModelCall(kind, "actor", WORKS[kind], ()))


def stepped(samples: list[Sample], slots: int, ranks: int, multiple: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Run the slots of generation one token at a time: (steps, tokens, prefills)."""
    rollouts = [Rollout([s.group] * s.prompt, 0, s.response) for s in samples]
    running, steps, tokens, prefills = Slots(rollouts, slots), 0, 0, []
    while running.pending:
        groups = running.prefill_groups(running.admit(), multiple, 16384)
        prefills += [(len(group.prompts), group.padded) for group in groups]
        tokens += sum(rollout is not None for rollout in running.active)
        running.issue()
        steps += 1
    return steps, tokens, prefills


def test_batching_takes_the_steps_of_generation() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, 90, (60, 2), generator=generator).tolist()
    samples = [Sample(n // 4, drawn[n // 4 * 4][0], response) for n, (_, response) in enumerate(drawn)]
    for slots, ranks in ((7, 1), (64, 2), (1, 4)):
        found = batching(samples, 100, slots=slots, ranks=ranks, multiple=16)
        steps, tokens, prefills = stepped(samples, slots, ranks, 16)
        assert sum(stretch.steps for stretch in found.stretches) == steps
        assert sum(stretch.steps * stretch.active for stretch in found.stretches) == tokens
        assert tokens == sum(sample.response for sample in samples)
        assert [prefill for stretch in found.stretches for prefill in stretch.prefills] == prefills
        assert found.slots == min(slots, len(samples))
        longest = max(sample.prompt for sample in samples) - 1
        assert found.places == -(-longest // 16) * 16 // ranks + -(-100 // ranks)


def packed(load: Workload, layout: CallLayout) -> CallRows:
    """Pack samples with tokens as the ranks of a run do that share prefixes."""
    tokens = [
        torch.tensor([*range(-s.prompt, 0), *[number] * s.response]).add(1000 * s.group)
        for number, s in enumerate(load.samples)
    ]
    (parts,) = zip(*partition(load.sequences, layout.dims.batch, group=load.group_size), strict=True)
    rows, pairs = [], []
    for part in parts:
        own = Samples(part, {"tokens": [tokens[index] for index in part]})
        families, lengths = prefix_families(own, layout.token_budget), [len(each) for each in own["tokens"]]
        squares = [length**2 for length in lengths]
        for members, shared in families:
            for index in members[1:]:
                lengths[index] -= shared
                squares[index] -= shared**2
        ids = [number for number, (members, _) in enumerate(families) for _ in members]
        places = pack_lengths(ids, lengths, budget=layout.token_budget)
        rows.append([sum(lengths[index] for index in row) for row in places])
        pairs.append(sum(squares))
    number, longest = max(map(len, rows)), max(map(max, rows))
    return CallRows(number, longest, min(1.0, max(pairs) / (number * longest**2)))


@pytest.mark.parametrize("budget", [0, 400])
@pytest.mark.parametrize(("prompts", "group"), [(4, 3), (8, 2), (2, 6), (1, 4)])
def test_shared_prompts_are_counted_once_as_rows_have_them(prompts: int, group: int, budget: int) -> None:
    generator = torch.Generator().manual_seed(prompts)
    lengths = torch.randint(20, 90, (prompts,), generator=generator).repeat_interleave(group).tolist()
    load = Workload(
        tuple(lengths), tuple(torch.randint(1, 60, (prompts * group,), generator=generator).tolist()), group, 60
    )
    layout = CallLayout((0, 1, 2, 3), ParallelDims(dp_shard=4), micro_batch_tokens=budget)
    found = packed_rows(load.samples, layout, share=True)
    assert found == packed(load, layout)
    assert (
        found.tokens * found.number < (whole := packed_rows(load.samples, layout)).tokens * whole.number or group == 4
    )


def test_a_decode_step_reads_the_weights_and_the_cache() -> None:
    """One sequence on one device: 16 GB of weights without the embedding, and the keys and values of all tokens."""
    load = Workload.of(prompts=1, group_size=1, prompt_tokens=4096, quantiles=(1024,))
    found = cost("generate", load, ranks=range(1))
    weights = 2 * (LLAMA.numel - sum(p.numel for p in LLAMA.embedding))
    cached = 32 * 8 * 2 * 128 * 2 * (4096 + 512)
    expected = 1024 * A100.memory_seconds(weights + cached)
    assert found.seconds["decode"] == pytest.approx(expected, rel=0.02)
    assert found.cache_bytes == 32 * 8 * 2 * 128 * 2 * (4096 + 1024)
    shared = cost("generate", load, ranks=range(4), ring=4)
    assert shared.cache_bytes == pytest.approx(found.cache_bytes / 4, rel=0.01)


def test_a_call_takes_the_host_as_long_as_it_launches() -> None:
    load = Workload.of(prompts=1, group_size=1, prompt_tokens=64, quantiles=(16,))

    def decode(node: Hardware, model: ModelShape = LLAMA, **options: Any) -> float:
        return cost("generate", load, model=model, node=node, options=CallOptions(**options), tp=8).seconds["decode"]

    found, without = decode(NODE), decode(A100)
    assert without < found == pytest.approx(16 * (32 * (38 + 2 * 2) + 2) * NODE.launch_seconds)
    # 7 of 38 operators are products; two sums of each layer and one of the embedding, each with a wait
    experts = replace(LLAMA, facts=replace(LLAMA.facts, experts_per_token=1))
    assert decode(NODE, cuda_graphs=True) == pytest.approx(without), "a GPU launches a step at once,"
    assert decode(NODE, experts, cuda_graphs=True) == pytest.approx(found), "but not with experts"
    both = decode(replace(NODE, streams=False), cuda_graphs=True)
    assert both > found + 0.9 * without, "a CPU issues an operator, then computes it"
    load = Workload.of(prompts=8, group_size=1, prompt_tokens=8, quantiles=(8,))
    for kind, launches, rest in (("inference", 38, 0), ("train", 2 * 114, 2 * 200)):  # of a layer; two mini-batches

        def seconds(node: Hardware, collective: float, kind: str = kind) -> float:
            found = cost(kind, load, node=node, options=CallOptions(collective_launches=collective), tp=8)
            return found.total - found.seconds.get("update", 0.0)

        found = seconds(NODE, 0.0)
        assert seconds(A100, 0.0) < found == pytest.approx((32 * launches + rest) * NODE.launch_seconds)
        sums = (seconds(NODE, 5.0) - found) / (5 * NODE.launch_seconds)
        assert sums >= 2 * 32 and sums == pytest.approx(round(sums))


def test_gradients_are_exposed_where_nothing_is_prefetched() -> None:
    hidden, exposed = (cost("train", options=CallOptions(prefetches=by), zero=1) for by in (True, False))
    sent = 2 * 2 * 7 / 8 * 2 * LLAMA.numel / 300e9  # two mini-batches' reductions and gathers, in bfloat16
    assert exposed.seconds["passes"] - hidden.seconds["passes"] == pytest.approx(sent, rel=0.5)


def test_pipelined_generation_keeps_all_stages_busy() -> None:
    """A step reads all weights, but at each of four stages a fourth of the cache."""
    load = Workload.of(prompts=16, group_size=4, prompt_tokens=2048, quantiles=(512,))
    in_turn, pipelined = (
        cost("generate", load, range(4), options=CallOptions(pipelined=by), pp=4) for by in (False, True)
    )
    cache = in_turn.cache_bytes * 4 * 2304 / 2560
    head = 2 * sum(p.numel for p in LLAMA.head)  # on the last stage, which sets the pace
    saved = in_turn.seconds["decode"] - pipelined.seconds["decode"]
    # Of 64 rows, unlike 16, products with keys and values take longer than their bytes: 4% of what is saved.
    assert saved == pytest.approx(512 * A100.memory_seconds(3 / 4 * cache - 3 * head), rel=0.08)
    # Forwards of 8 x 2048 tokens in four parts: each passes four stages in turn, or one follows another.
    ratio = pipelined.seconds["prefill"] / in_turn.seconds["prefill"]
    assert ratio == pytest.approx((4 + 3) / 16, rel=0.15)
    assert pipelined.cache_bytes == in_turn.cache_bytes


def test_layouts_change_generation_as_they_should() -> None:
    whole, tp, pp = cost("generate"), cost("generate", tp=8), cost("generate", pp=8)
    assert tp.seconds["decode"] > 0.1 * whole.seconds["decode"]
    assert pp.seconds["decode"] > 0 and pp.cache_bytes < whole.cache_bytes
    long = Workload.of(prompts=1, group_size=1, prompt_tokens=131072, quantiles=(64,))
    alone, ulysses = (cost("generate", long, **how) for how in ({"dp_replicate": 8, "dp_shard": 1}, {"ulysses": 8}))
    assert ulysses.seconds["prefill"] < alone.seconds["prefill"] / 5
    longer = Workload.of(prompts=32, group_size=4, prompt_tokens=512, quantiles=(64, 512, 2048))
    assert cost("generate", longer).total > 1.5 * whole.total


def test_calls_scale_with_their_work() -> None:
    inference, train = cost("inference", zero=3), cost("train", zero=3)
    # Without the update a step is about three forwards; the logits are computed twice.
    assert 2.5 < (train.total - train.seconds["update"]) / inference.total < 4.5
    full = cost("train", zero=3, ac="full")
    assert full.total > 1.1 * train.total and full.work_bytes < train.work_bytes
    staged = cost("inference", pp=4)
    assert 0 < staged.seconds["bubble"] < staged.total
    twice = Workload.of(prompts=64, group_size=4, prompt_tokens=512, quantiles=(64, 256, 1024))
    assert cost("inference", twice, zero=3).total == pytest.approx(2 * inference.total, rel=0.15)


def test_a_call_may_be_on_any_ranks() -> None:
    assert cost("train", tp=8, tp_sequence_parallel=True) == cost(
        "train", ranks=range(8, 16), tp=8, tp_sequence_parallel=True
    )
    across = cost("train", ranks=range(4, 12), tp=8, tp_sequence_parallel=True)
    assert across.total > 1.3 * cost("train", tp=8, tp_sequence_parallel=True).total


def test_workloads_follow_their_distribution() -> None:
    load = Workload.of(prompts=100, group_size=8, prompt_tokens=16, quantiles=(10, 20, 100))
    assert sorted(load.responses)[400] == pytest.approx(20, abs=1)
    assert min(load.responses) == 10 and 98 <= max(load.responses) <= 100 == load.limit
    with pytest.raises(ValueError, match=r"responses of \[7\] tokens must have 1 to limit=5"):
        Workload((1,), (7,), 1, 5)
    with pytest.raises(ValueError, match="3 prompts and 3 responses must be as many, in groups of 2"):
        replace(load, prompts=(1,) * 3, responses=(1,) * 3, group_size=2)
