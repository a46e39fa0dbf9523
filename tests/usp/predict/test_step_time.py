"""The time model: FLOPs equal those of a dry run, transfers overlap with compute, and more work takes longer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.published.magi import attention_seconds
from tests.usp.predict.jobs import job, llama
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.parallel import load_hardware
from usp.predict.compute import BACKWARD, FORWARD, Product, flops_per_pair, head_products, layer_products, layer_seconds
from usp.predict.job import PASSES, Job, Stack
from usp.predict.seconds import (
    OVERLAPPED,
    PassSeconds,
    StepTime,
    TransferSeconds,
    least_seconds,
    overlapped,
    overlapped_in_pieces,
    pass_seconds,
    step_seconds,
)
from usp.predict.traffic import attention_plan, pass_parts, step_traffic
from usp.train.dry_run import dry_run
from usp.train.resolve import job_of

NODE = load_hardware("a800")
# Overlapped communication is free here, so that what overlaps and what is exposed are exact.
A800 = replace(NODE, tiers=tuple(replace(tier, overlap=1.0) for tier in NODE.tiers))


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (4, {"sp_ring": 2, "sp_ulysses": 2}),
        (2, {"tp": 2, "tp_sequence_parallel": True}),
        (1, {"ac": "attention-saved"}),
        (2, {"model": "qwen3-moe-tiny", "ep": 2, "ac": "selective"}),
        (1, {"mlp_tile": 300, "ac": "full"}),
        (2, {"model": "qwen3-moe-tiny", "pp": 2, "batch_size": 2, "micro_batches": 2}),
        (2, {"fp8": "tensor", "sp_ring": 2, "ac": "full"}),
        (2, {"fp8": "row", "tp": 2, "tp_sequence_parallel": True, "ac": "selective"}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_flops_equal_those_of_the_dry_run(world_size: int, flags: dict[str, object]) -> None:
    config = TrainConfig(**{"seq_len": 2048, "dtype": "bfloat16", "device": "cpu", **flags})  # type: ignore[arg-type]
    made = job_of(config, load_model_config(config.model), world_size)
    assert step_flops(made, 0) == dry_run(config, world_size).flops


def step_flops(job: Job, rank: int) -> float:
    """Return the FLOPs of the products and of attention's visible pairs of which the time is predicted."""
    flops = 0.0
    for stage in job.stages(rank):
        for index, number in job.kinds(stage):
            products, again = (sum(p.flops for p in some) for some in layer_products(job, job.model.layers[index]))
            plan = attention_plan(job, rank, job.model.facts.windows[index])
            pairs = sum(task.visible() for step in plan.ring.steps for task in step.tasks)
            forward, backward = (pairs * flops_per_pair(job, plan.heads.q_width(0), n) for n in (FORWARD, BACKWARD))
            flops += number * (3 * products + again + forward * (2 if job.config.ac == "full" else 1) + backward)
            flops += number * (products + forward) * job.counts_choices
        if stage == len(job.stage_layers) - 1:
            flops += sum(p.flops for parts in head_products(job) for p in parts)
    return job.config.micro_batches * flops


@pytest.mark.parametrize(
    "flags",
    [
        {"sp_ulysses": 4, "sp_ring": 2, "ac": "full", "zero": 3},
        {"model": "mixtral-8x7b", "ep": 8, "sp_ring": 8, "batch_size": 4, "micro_batches": 4, "zero": 3},
        {"pp": 4, "batch_size": 8, "micro_batches": 8, "tp": 4, "tp_sequence_parallel": True},
    ],
    ids=str,
)
def test_a_step_is_the_sum_of_its_passes(flags: dict[str, object]) -> None:
    made = llama(**flags)
    passes = {rank: pass_seconds(made, A800, rank) for rank in made.slowest_ranks}
    sums = [sum(found.values(), PassSeconds()) for found in passes.values()]
    slowest, step = max(sums, key=lambda found: found.total), step_seconds(made, A800)
    assert slowest.total == pytest.approx(step.total - step.bubble, rel=1e-12)
    for axis, transfers in slowest.communication.items():
        assert step.communication[axis] == pytest.approx(transfers)
    times = {kind: passed.compute.total for kind, passed in passes[0].items()}
    again = times["forward"] if made.config.ac == "full" else 0.0
    assert times["recompute"] == pytest.approx(again, rel=0.2) and times["forward"] < times["backward"]
    assert max(found["update"].compute.memory for found in passes.values()) == step.optimizer
    assert (passes[0]["count"].total > 0) == made.counts_choices


def test_forwards_alone_have_one_pass() -> None:
    made = llama(8, sp_ulysses=4, zero=3, batch_size=2, micro_batches=2)
    forwards = replace(made, trained=False, output="logprobs")
    alone, sent = pass_seconds(forwards, A800, 0), pass_parts(forwards, 0)
    assert all(not sent[kind] for kind in PASSES if kind != "forward")
    assert sum(passed.total for passed in alone.values()) == alone["forward"].total
    # The loss of a step computes its gradients in the forward.
    assert alone["forward"].compute.total < pass_seconds(made, A800, 0)["forward"].compute.total
    assert not any("reduce_scatter" in part.collective for part in sent["forward"])


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_compute_is_a_lower_bound_of_a_step_in_any_sharding(micro_batches: int) -> None:
    pipeline = {"pp": 4, "micro_batches": 8, "batch_size": 8, "ac": "full"}
    for flags in ({"sp_ulysses": 4, "sp_ring": 2}, {"tp": 8, "tp_sequence_parallel": True, "ac": "full"}, pipeline):
        batch = {"batch_size": 4, "micro_batches": micro_batches} | flags
        bounds = {least_seconds(llama(**batch | {"zero": zero}), A800) for zero in (1, 2, 3)}
        steps = [step_seconds(llama(**batch | {"zero": zero}), A800).total for zero in (1, 2, 3)]
        assert len(bounds) == 1 and 0.5 * min(steps) < min(bounds) < min(steps)


def test_overlapped_and_exposed_parts_of_transfers() -> None:
    assert overlapped([3.0, 1.0], [2.0, 2.0]) == TransferSeconds(exposed=1.0, overlapped=3.0)
    assert overlapped([3.0, 1.0], []) == TransferSeconds(exposed=4.0, overlapped=0.0)
    assert overlapped_in_pieces(4.0, 8.0, 4) == TransferSeconds(exposed=1.0, overlapped=3.0)
    assert overlapped_in_pieces(4.0, 0.0, 4) == TransferSeconds(exposed=4.0, overlapped=0.0)
    assert overlapped_in_pieces(8.0, 4.0, 4) == TransferSeconds(exposed=5.0, overlapped=3.0)


def test_overlapped_transfers_can_slow_down_compute() -> None:
    assert TransferSeconds(1.0, 3.0).with_free_part(1.0) == TransferSeconds(1.0, 3.0)
    assert TransferSeconds(1.0, 3.0).with_free_part(0.25) == TransferSeconds(3.25, 0.75)
    copied = replace(A800, tiers=tuple(replace(tier, overlap=0.0) for tier in A800.tiers))
    free, paid = (step_seconds(llama(sp_ring=8), hardware) for hardware in (A800, copied))
    hidden = sum(transfers.overlapped for transfers in free.communication.values())
    assert hidden > 0 and paid.total == pytest.approx(free.total + hidden)
    seconds = [attention_seconds(llama(sp_ring=8), hardware)[0] for hardware in (A800, NODE, copied)]
    assert seconds == sorted(set(seconds))


@pytest.mark.parametrize(
    "flags",
    [
        {"sp_ulysses": 8, "zero": 3},
        {"sp_ring": 8, "dp_replicate": 2},
        {"sp_ring": 2, "zero": 0},
        {"pp": 4, "batch_size": 8, "micro_batches": 8, "tp": 4, "tp_sequence_parallel": True},
        {"model": "mixtral-8x7b", "ep": 4, "zero": 2},  # of two experts each, in two chunks
    ],
    ids=str,
)
def test_exposure_is_what_the_time_model_does(flags: dict[str, object]) -> None:
    for axis, transfers in step_seconds(llama(**flags), A800).communication.items():
        scalars_only = axis == "loss" and flags.get("zero") != 0  # sums of scalars are exposed on every axis
        assert (transfers.overlapped > 0) == (axis in OVERLAPPED and not scalars_only), axis


def test_the_ring_overlaps_and_so_do_gathers_that_are_prefetched() -> None:
    ring, waiting = (step_seconds(llama(sp_ring=8), A800, prefetches=by) for by in (True, False))
    assert ring.communication["ring"].overlapped > 10 * ring.communication["ring"].exposed
    assert waiting.communication["fsdp"].overlapped == 0 < ring.communication["fsdp"].overlapped
    assert waiting.total > ring.total


def test_ranks_wait_for_each_other_longest_in_exposed_collectives_of_layers() -> None:
    unsteady = replace(A800, wait_fraction=0.2)
    exposed = ({"sp_ulysses": 8}, {"tp": 8}, {"sp_ulysses": 2, "sp_ring": 4}, {"model": "mixtral-8x7b", "ep": 8})
    for flags in (*exposed, {"sp_ring": 8}, {"zero": 3}):
        steady = step_seconds(llama(**flags), A800)
        longer = step_seconds(llama(**flags), unsteady).total - steady.total
        fraction = 0.2 if flags in exposed else 0.1
        assert longer == pytest.approx(fraction * (steady.compute.total - steady.compute.launch))
    alone = llama(1, zero=0)
    assert step_seconds(alone, unsteady) == step_seconds(alone, A800)


def test_the_slowest_rank_of_a_contiguous_causal_ring_has_most_of_the_work() -> None:
    balanced, contiguous = (step_seconds(llama(sp_ring=8, sp_layout=kind), A800) for kind in ("zigzag", "contiguous"))
    assert 1.7 < contiguous.compute.attention / balanced.compute.attention < 2.0


def test_most_tasks_of_a_long_ring_have_no_mask() -> None:
    rates = A800.attention["flash-attn-2"]
    rates = replace(rates, forward_full=((1.0, 1.0),), backward_full=((1.0, 1.0),))
    full = replace(A800, attention={"flash-attn-2": rates})

    def left(made: Job) -> float:
        return step_seconds(made, full).compute.attention / step_seconds(made, A800).compute.attention

    assert left(llama(sp_ulysses=8)) == 1 > left(llama(sp_ring=2)) > left(llama(sp_ring=8))


def test_attention_takes_the_time_of_the_kernel_that_would_run() -> None:
    h100 = load_hardware("h100")

    def step(**flags: object) -> StepTime:
        return step_seconds(llama(8, sp_ulysses=8, **flags), h100)

    steps = {name: step(attention_kernel=name) for name in ("auto", "flash2", "flash3", "cudnn", "sdpa")}
    assert {name: found.kernels for name, found in steps.items()} == {
        "auto": ("cudnn",),  # packages are not installed here
        "flash2": ("flash-attn-2",),
        "flash3": ("flash-attn-3",),
        "cudnn": ("cudnn",),
        "sdpa": ("flash-attn-2",),
    }
    at_64k = (335, 322), (616, 561)  # TFLOP/s of forward and backward
    slow, fast = (2 / forward + 5 / backward for forward, backward in at_64k)
    ratio = steps["flash2"].compute.attention / steps["flash3"].compute.attention
    assert ratio == pytest.approx(slow / fast, rel=0.001)
    assert step(model="mistral-7b").kernels == ("flash-attn-2",)  # which has windows
    assert step(dtype="float32").kernels == ("efficient as flash-attn-2",)
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability 9\.x, this has 8\.0"):
        step_seconds(llama(8, sp_ulysses=8, attention_kernel="flash3"), A800)


@pytest.mark.slow
def test_float8_halves_products_and_adds_casts_which_a_compiler_fuses() -> None:
    h100 = load_hardware("h100")

    def layer(**flags: Any) -> tuple[float, float]:
        found = layer_seconds(llama(8, seq_len=8192, ac="none", **flags), h100, 0)
        return found.forward.matmul + found.backward.matmul, found.forward.memory + found.backward.memory

    (plain, moved), (halved, fused) = layer(compile=True), layer(compile=True, fp8="tensor")
    assert halved == pytest.approx(plain / 2, rel=0.15) and fused > moved  # smaller products reach less of the peak
    assert moved < fused < layer(compile=True, fp8="row")[1] < layer(fp8="tensor")[1] < layer(fp8="row")[1]
    # torchao computes the gradients of frozen weights
    frozen, trained = (layer(fp8="tensor", lora_rank=rank)[0] for rank in (1, 0))
    assert frozen > trained
    with pytest.raises(ValueError, match="A800 states no peak_flops for float8"):
        step_seconds(llama(8, fp8="tensor"), A800)


@pytest.mark.slow
def test_mxfp8_has_products_of_its_own_and_casts_of_one_kernel() -> None:
    h100, b200 = load_hardware("h100"), load_hardware("b200")
    plain, tensor, mx = (layer_seconds(llama(8, seq_len=8192, fp8=fp8), b200, 0) for fp8 in ("none", "tensor", "mx"))
    assert mx.forward.matmul == tensor.forward.matmul < 0.7 * plain.forward.matmul
    assert plain.forward.memory < mx.forward.memory < tensor.forward.memory and mx.launches < tensor.launches
    with pytest.raises(ValueError, match=r"H100.* states no peak_flops for mxfp8"):
        layer_seconds(llama(8, fp8="mx"), h100, 0)
    mixtures = (job(8, model="mixtral-8x7b", seq_len=8192, ep=8, fp8=fp8) for fp8 in ("none", "tensor", "mx"))
    experts = [layer_seconds(mixture, b200, 0).forward.matmul for mixture in mixtures]
    assert experts[2] < 0.8 * experts[1] < experts[0]  # with scales of tensors, experts stay in bfloat16


@pytest.mark.slow
def test_chunks_of_experts_hide_messages_behind_experts() -> None:
    h100 = load_hardware("h100")
    free = replace(h100, tiers=tuple(replace(tier, overlap=1.0) for tier in h100.tiers))
    jobs = [job(8, model="mixtral-8x7b", seq_len=8192, ep=2, ep_chunks=chunks, ac="full") for chunks in (1, 2, 4)]
    found = [step_seconds(each, free).communication["ep"] for each in jobs]
    assert found[0].overlapped == 0 < found[1].overlapped < found[2].overlapped
    for chunks, transfer in zip((2, 4), found[1:], strict=True):  # products take longer than rows
        assert transfer.exposed == pytest.approx(sum(transfer) / chunks) and found[0].exposed < sum(transfer)
    sent = [[s for s in step_traffic(each, 0) if s.axis == "ep"] for each in jobs]
    assert len({sum(s.nbytes for s in each) for each in sent}) == 1
    assert [sum(s.calls for s in each) for each in sent] == [32 * number for number in (8, 14, 26)]  # 32 layers
    assert all(least_seconds(each, h100) <= step_seconds(each, h100).total for each in jobs)
    assert job(8, model="mixtral-8x7b", ep=2).ep_chunks == 4 and job(8, model="mixtral-8x7b", ep=8).ep_chunks == 1


def test_a_stack_fuses_operators_and_hides_messages() -> None:
    made = llama(2, tp=2, tp_sequence_parallel=True, seq_len=8192, ac="none")
    layers = [layer_seconds(llama(1, seq_len=8192, ac="none", compile=c), A800, 0) for c in (False, True)]
    # Bytes per token and hidden element, in bfloat16: norms and residuals, rotations of q and k, MLP.
    for passed, eager, fused in (("forward", 84 + 25 + 35, 16 + 5 + 21), ("backward", 2 * 144, 16 + 5 + 35)):
        moved = [getattr(layer, passed).memory / A800.memory_seconds(8192 * 4096) for layer in layers]
        assert moved == pytest.approx([eager, fused])
    of = {name: step_seconds(replace(made, system=Stack(**how)), A800) for name, how in STACKS.items()}
    assert of["none"] == step_seconds(made, A800)
    whole, hidden = (of[name].communication["tp"] for name in ("none", "hidden"))
    assert hidden.exposed == pytest.approx(whole.exposed / 4) and sum(hidden) == pytest.approx(sum(whole))
    assert of["summed"].compute.memory < of["none"].compute.memory > of["loss"].compute.memory
    mixture = job(8, model="mixtral-8x7b", seq_len=8192, ep=8)
    plain, experts = (
        step_seconds(replace(mixture, system=Stack(**STACKS[name])), A800) for name in ("none", "experts")
    )
    assert experts.communication["ep"].exposed == pytest.approx(plain.communication["ep"].exposed / 2)
    assert experts.compute.memory < plain.compute.memory and experts.compute.matmul == plain.compute.matmul


STACKS: dict[str, dict[str, Any]] = {
    "none": {},
    "hidden": {"exposed_tensor": 0.25},
    "summed": {"sums_gradients": True},
    "loss": {"fused_loss": True},
    "experts": {"fused_experts": True, "exposed_experts": 0.5},
}


def test_narrow_products_are_slower_on_a_processor_and_not_on_a_gpu() -> None:
    narrow, square = Product.of(1 << 16, 64, 64, 4), Product.of(1 << 10, 1 << 9, 1 << 9, 4)
    assert narrow.flops == square.flops
    fast_memory = replace(A800, memory_bytes_per_second=1e18)
    assert narrow.seconds(fast_memory, "float32") == square.seconds(fast_memory, "float32")
    cpu = replace(fast_memory, streams=False, matmul=((2 * 96**3, 0.5), (2 * 460**3, 1.0)))
    # 64 x 64 beside very many rows has the FLOPs per element of a square of 96; 1024 x 512 x 512 that of 614.
    assert narrow.seconds(cpu, "float32") == pytest.approx(2 * square.seconds(cpu, "float32"), rel=1e-3)


def test_an_all_gather_over_tp_copies_its_output_unless_there_is_one_row() -> None:
    def memory(rows: int, *, backward: bool) -> float:
        split = llama(2, tp=2, tp_sequence_parallel=True, seq_len=8192, batch_size=rows)
        found = layer_seconds(split, A800, 0)
        return (found.backward if backward else found.forward).memory

    read_and_written = 2 * (2 * 8192) * 4096 * 2
    for backward in (False, True):
        more = memory(2, backward=backward) - 2 * memory(1, backward=backward)
        assert more == pytest.approx(A800.memory_seconds(2 * read_and_written))


def test_links_are_those_of_the_global_ranks() -> None:
    made = llama(8, sp_ulysses=8)
    here, there, across = (
        step_seconds(replace(made, placed=tuple(range(first, first + 8))), A800) for first in (0, 8, 4)
    )
    assert here == step_seconds(made, A800) == there
    assert across.communication["ulysses"].exposed > 4 * here.communication["ulysses"].exposed
