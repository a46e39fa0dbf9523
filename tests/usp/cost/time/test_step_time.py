"""The time model: FLOPs equal those of a dry run, transfers overlap with compute, and more work takes longer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel import bubble_fraction, load_hardware
from usp.config import TrainConfig
from usp.cost.dry_run.dry_run import dry_run
from usp.cost.job import Job, job_of
from usp.cost.time.compute import attention_work, head_products, held_elements, layer_products
from usp.cost.time.kernel_flops import BACKWARD, FORWARD
from usp.cost.time.step_time import (
    Overlap,
    StepTime,
    TransferSeconds,
    exposure,
    overlapped,
    overlapped_in_pieces,
    step_seconds,
)
from usp.cost.traffic.step_traffic import attention_plan
from usp.hf.models import load_model_config

A800 = load_hardware("a800")


def job(world_size: int = 1, **flags: object) -> Job:
    config = TrainConfig(**flags)  # type: ignore[arg-type]
    return job_of(config, load_model_config(config.model), world_size)


def llama(world_size: int = 16, **flags: object) -> Job:
    return job(world_size, **{"model": "llama3-8b", "seq_len": 65536, "zero": 1, **flags})


def flops_of_step(made: Job, rank: int) -> float:
    """Sum the matrix products and attention tasks that the time model counts on a rank."""
    total, windows = 0.0, made.model.facts.windows
    for stage in made.stages(rank):
        for index in made.stage_layers[stage]:
            forward, again = layer_products(made, made.model.layers[index])
            plan = attention_plan(made, rank, windows[index])
            products = FORWARD * (2 if made.config.ac == "full" else 1) + BACKWARD
            work = attention_work(made, plan.ring, plan.heads.q_width(plan.ulysses_rank), products)
            total += 3 * sum(p.flops for p in forward) + sum(p.flops for p in again)
            total += sum(flops for tasks in work for flops, _ in tasks)
            if made.counts_choices:
                once = attention_work(made, plan.ring, plan.heads.q_width(plan.ulysses_rank), FORWARD)
                total += sum(p.flops for p in forward) + sum(flops for tasks in once for flops, _ in tasks)
        if stage == len(made.stage_layers) - 1:
            total += sum(p.flops for p in head_products(made))
    return total * made.config.micro_batches


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (4, {"sp_ring": 2, "sp_ulysses": 2}),
        (2, {"tp": 2, "tp_sequence_parallel": True}),
        (1, {"ac": "full"}),
        (1, {"ac": "attention-saved"}),
        (1, {"mlp_tile": 256}),
        (1, {"mlp_tile": 300, "ac": "full"}),
        (2, {"model": "qwen3-moe-tiny", "ep": 2, "sp_ring": 2}),
        (2, {"model": "qwen3-moe-tiny", "pp": 2, "batch_size": 2, "micro_batches": 2}),
        (2, {"pp": 2, "batch_size": 2, "micro_batches": 2}),
    ],
    ids=str,
)
def test_flops_equal_those_of_the_dry_run(world_size: int, flags: dict[str, object]) -> None:
    config = TrainConfig(**{"seq_len": 2048, "dtype": "bfloat16", "device": "cpu", **flags})  # type: ignore[arg-type]
    made = job_of(config, load_model_config(config.model), world_size)
    assert flops_of_step(made, 0) == dry_run(config, world_size).flops


def test_counting_the_choices_of_a_step_takes_a_forward() -> None:
    options = {"model": "mixtral-8x7b", "ep": 8, "sp_ring": 8, "batch_size": 4, "micro_batches": 4, "zero": 3}
    counted, alone = (step_seconds(llama(**options, router_balance=b), A800) for b in ("step", "micro-batch"))
    assert 1.25 < counted.compute.total / alone.compute.total < 4 / 3  # the loss has no extra forward
    for axis in ("ep", "efsdp"):
        more = sum(
            (seconds.communication[axis].exposed + seconds.communication[axis].overlapped) * sign
            for seconds, sign in ((counted, 1), (alone, -1))
        )
        assert more > 0, axis


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


@pytest.mark.parametrize(
    "flags",
    [
        {"sp_ulysses": 8, "zero": 3},
        {"sp_ring": 8, "dp_replicate": 2},
        {"sp_ring": 2, "zero": 0},
        {"pp": 4, "batch_size": 8, "micro_batches": 8, "tp": 4, "tp_sequence_parallel": True},
        {"model": "mixtral-8x7b", "ep": 8, "zero": 2},
    ],
    ids=str,
)
def test_exposure_is_what_the_time_model_does(flags: dict[str, object]) -> None:
    for axis, transfers in step_seconds(llama(**flags), A800).communication.items():
        scalars_only = axis == "loss" and flags.get("zero") != 0  # sums of scalars are exposed on every axis
        assert (transfers.overlapped > 0) == (exposure(axis) != "exposed" and not scalars_only), axis
    assert exposure("pp") == "exposed" and exposure("ring").startswith("overlaps with the attention")


def test_waiting_ranks_leave_shared_processors_to_the_others() -> None:
    crowded = replace(A800, crowding=4.0)
    contiguous = llama(sp_ring=8, sp_layout="contiguous")
    alone, shared = (step_seconds(contiguous, hardware) for hardware in (A800, crowded))
    even = step_seconds(llama(sp_ring=8), A800)
    assert shared.compute.attention == pytest.approx(even.compute.attention, rel=0.1)
    assert alone.compute.attention > 1.5 * shared.compute.attention
    pipeline = llama(pp=4, batch_size=4, micro_batches=4)
    assert step_seconds(pipeline, A800).bubble > 0 and step_seconds(pipeline, crowded).bubble == 0
    assert step_seconds(pipeline, replace(A800, crowding=1.01)).bubble > 0


def test_parameters_are_exposed_without_streams() -> None:
    one_thread = replace(A800, streams=False)
    free, waits = (step_seconds(llama(dp_shard=16), hardware).communication["fsdp"] for hardware in (A800, one_thread))
    assert free.overlapped > 0 and waits == TransferSeconds(free.exposed + free.overlapped, 0.0)


def test_ulysses_is_exposed_and_the_ring_overlaps() -> None:
    ulysses, ring = (step_seconds(llama(**{axis: 8}), A800) for axis in ("sp_ulysses", "sp_ring"))
    assert ulysses.communication["ulysses"].overlapped == 0 and "ring" not in ulysses.communication
    assert ring.communication["ring"].overlapped > 10 * ring.communication["ring"].exposed
    waiting = step_seconds(llama(sp_ring=8), A800, Overlap(ring=False, fsdp=False))
    assert all(transfers.overlapped == 0 for transfers in waiting.communication.values())
    assert waiting.total > ring.total


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


def test_a_step_of_a_pipeline_includes_its_bubble() -> None:
    made = llama(pp=4, batch_size=8, micro_batches=8, tp=4, tp_sequence_parallel=True)
    found = step_seconds(made, A800)
    busy = found.compute.total + found.exposed
    assert found.bubble / (busy + found.bubble) == pytest.approx(bubble_fraction("1f1b", 4, 8))
    assert 0 < found.mfu < 1 and found.mfu == found.causal_flops / found.total / A800.peak("bfloat16")
    assert found.total == pytest.approx(busy + found.bubble + found.optimizer)
    assert found.bound == "compute"


def test_more_takes_longer() -> None:
    base = step_seconds(llama(sp_ulysses=8, sp_ring=2), A800).total
    mores: tuple[dict[str, Any], ...] = ({"seq_len": 131072}, {"ac": "full"}, {"batch_size": 2})
    for more in mores:
        assert step_seconds(llama(sp_ulysses=8, sp_ring=2, **more), A800).total > 1.1 * base
    slow = replace(A800, link_efficiency=0.1)
    assert step_seconds(llama(sp_ulysses=8, sp_ring=2), slow).total > base


def test_a_rank_updates_its_shard() -> None:
    whole = llama(1, model="tiny", zero=0).model.numel
    assert held_elements(llama(2, model="tiny", zero=0, sp_ring=2), 0) == whole
    assert held_elements(llama(2, model="tiny", zero=1, sp_ring=2), 0) == whole // 2
