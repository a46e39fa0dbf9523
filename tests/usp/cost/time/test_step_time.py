"""The time model: FLOPs are those of a dry run, what overlaps is hidden, and more of a thing takes longer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel import bubble_fraction, load_hardware
from usp.config import TrainConfig
from usp.cost.dry_run.dry_run import dry_run
from usp.cost.job import Job, job_of
from usp.cost.time.compute import held_elements, step_flops
from usp.cost.time.step_time import Overlap, Traffic, hidden_behind, in_pieces, step_seconds
from usp.hf.models import load_model_config

A800 = load_hardware("a800")


def job(world_size: int = 1, **flags: object) -> Job:
    config = TrainConfig(**flags)  # type: ignore[arg-type]
    return job_of(config, load_model_config(config.model), world_size)


def llama(world_size: int = 16, **flags: object) -> Job:
    return job(world_size, **{"model": "llama3-8b", "seq_len": 65536, "zero": 1, **flags})


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
        (2, {"pp": 2, "batch_size": 2, "micro_batches": 2}),
    ],
    ids=str,
)
def test_flops_are_those_of_the_dry_run(world_size: int, flags: dict[str, object]) -> None:
    config = TrainConfig(**{"seq_len": 2048, "dtype": "bfloat16", "device": "cpu", **flags})  # type: ignore[arg-type]
    made = job_of(config, load_model_config(config.model), world_size)
    assert step_flops(made, 0) == dry_run(config, world_size).flops


def test_what_is_hidden() -> None:
    assert hidden_behind([3.0, 1.0], [2.0, 2.0]) == Traffic(exposed=1.0, hidden=3.0)
    assert hidden_behind([3.0, 1.0], []) == Traffic(exposed=4.0, hidden=0.0)
    assert in_pieces(4.0, 8.0, 4) == Traffic(exposed=1.0, hidden=3.0)
    assert in_pieces(4.0, 0.0, 4) == Traffic(exposed=4.0, hidden=0.0)
    assert in_pieces(8.0, 4.0, 4) == Traffic(exposed=5.0, hidden=3.0)


def test_what_processors_copy_costs_compute_though_it_is_hidden() -> None:
    assert Traffic(1.0, 3.0).beside(1.0) == Traffic(1.0, 3.0)
    assert Traffic(1.0, 3.0).beside(0.25) == Traffic(3.25, 0.75)
    copied = replace(A800, tiers=tuple(replace(tier, overlap=0.0) for tier in A800.tiers))
    free, paid = (step_seconds(llama(sp_ring=8), hardware) for hardware in (A800, copied))
    hidden = sum(traffic.hidden for traffic in free.communication.values())
    assert hidden > 0 and paid.total == pytest.approx(free.total + hidden)


def test_who_waits_leaves_shared_processors_to_the_others() -> None:
    crowded = replace(A800, crowding=4.0)
    contiguous = llama(sp_ring=8, sp_layout="contiguous")
    alone, shared = (step_seconds(contiguous, hardware) for hardware in (A800, crowded))
    even = step_seconds(llama(sp_ring=8), A800)
    assert shared.compute.attention == pytest.approx(even.compute.attention, rel=0.1)
    assert alone.compute.attention > 1.5 * shared.compute.attention
    pipeline = llama(pp=4, batch_size=4, micro_batches=4)
    assert step_seconds(pipeline, A800).bubble > 0 and step_seconds(pipeline, crowded).bubble == 0
    assert step_seconds(pipeline, replace(A800, crowding=1.01)).bubble > 0


def test_without_streams_parameters_are_waited_for() -> None:
    one_thread = replace(A800, streams=False)
    free, waits = (step_seconds(llama(dp_shard=16), hardware).communication["fsdp"] for hardware in (A800, one_thread))
    assert free.hidden > 0 and waits == Traffic(free.exposed + free.hidden, 0.0)


def test_ulysses_waits_and_the_ring_hides() -> None:
    ulysses, ring = (step_seconds(llama(**{axis: 8}), A800) for axis in ("sp_ulysses", "sp_ring"))
    assert ulysses.communication["ulysses"].hidden == 0 and "ring" not in ulysses.communication
    assert ring.communication["ring"].hidden > 10 * ring.communication["ring"].exposed
    waiting = step_seconds(llama(sp_ring=8), A800, Overlap(ring=False, fsdp=False))
    assert all(traffic.hidden == 0 for traffic in waiting.communication.values())
    assert waiting.total > ring.total


def test_the_slowest_rank_of_a_contiguous_causal_ring_has_most_of_the_work() -> None:
    balanced, contiguous = (step_seconds(llama(sp_ring=8, sp_layout=kind), A800) for kind in ("zigzag", "contiguous"))
    assert 1.7 < contiguous.compute.attention / balanced.compute.attention < 2.0


def test_most_of_a_long_ring_has_no_mask() -> None:
    full = replace(A800, attention_forward_full=((1.0, 1.0),), attention_backward_full=((1.0, 1.0),))

    def left(made: Job) -> float:
        return step_seconds(made, full).compute.attention / step_seconds(made, A800).compute.attention

    assert left(llama(sp_ulysses=8)) == 1 > left(llama(sp_ring=2)) > left(llama(sp_ring=8))


def test_a_pipeline_waits_for_its_bubble_and_both_counts_of_flops() -> None:
    made = llama(pp=4, batch_size=8, micro_batches=8, tp=4, tp_sequence_parallel=True)
    found = step_seconds(made, A800)
    busy = found.compute.total + found.exposed
    assert found.bubble / (busy + found.bubble) == pytest.approx(bubble_fraction("1f1b", 4, 8))
    assert found.mfu < found.mfu_full < 1
    assert found.total == pytest.approx(busy + found.bubble + found.optimizer)
    assert found.bound == "compute"


def test_more_takes_longer() -> None:
    base = step_seconds(llama(sp_ulysses=8, sp_ring=2), A800).total
    mores: tuple[dict[str, Any], ...] = ({"seq_len": 131072}, {"ac": "full"}, {"batch_size": 2})
    for more in mores:
        assert step_seconds(llama(sp_ulysses=8, sp_ring=2, **more), A800).total > 1.1 * base
    slow = replace(A800, link_efficiency=0.1)
    assert step_seconds(llama(sp_ulysses=8, sp_ring=2), slow).total > base


def test_the_optimiser_updates_what_a_rank_keeps() -> None:
    whole = llama(1, model="tiny", zero=0).model.numel
    assert held_elements(llama(2, model="tiny", zero=0, sp_ring=2), 0) == whole
    assert held_elements(llama(2, model="tiny", zero=1, sp_ring=2), 0) == whole // 2
