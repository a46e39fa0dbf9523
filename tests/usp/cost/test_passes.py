"""The passes of a step and of forwards alone: what each takes, on any ranks, in any weight dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel import load_hardware
from tests.usp.cost.dry_run.test_rlhf_calls import GRPO, runs_of, step_of
from usp.config import TrainConfig
from usp.cost.job import PASSES, Job, job_of
from usp.cost.memory.footprint import footprint
from usp.cost.memory.forward_memory import forward_memory
from usp.cost.passes import pass_costs
from usp.cost.time.step_time import step_seconds
from usp.cost.traffic.step_traffic import step_traffic
from usp.hf.models import load_model_config, model_facts
from usp.hf.shapes import model_shape

A800 = load_hardware("a800")


def job(world_size: int = 8, **flags: object) -> Job:
    config = TrainConfig(**{"model": "llama3-8b", "seq_len": 32768, **flags})  # type: ignore[arg-type]
    return job_of(config, load_model_config(config.model), world_size)


def test_a_step_has_five_passes_and_forwards_alone_have_one() -> None:
    made = job(sp_ulysses=4, zero=3, ac="full", batch_size=2, micro_batches=2)
    costs = pass_costs(made, A800, 0)
    assert sum(sent.nbytes for cost in costs.values() for sent in cost.traffic) == sum(
        sent.nbytes for sent in step_traffic(made, 0)
    )
    assert max(cost.peak_bytes for cost in costs.values()) == footprint(made, 0).peak.total
    # The loss computes its gradients in the forward, so that is longer than what is computed again.
    assert 0 < costs["recompute"].flops < costs["forward"].flops < costs["backward"].flops
    assert costs["count"].flops == 0 and costs["update"].seconds.compute.total > 0
    alone = pass_costs(replace(made, config=replace(made.config, ac="none"), trained=False, output="logprobs"), A800, 0)
    assert all(not alone[kind].traffic and alone[kind].peak_bytes == 0 for kind in PASSES if kind != "forward")
    assert sum(cost.seconds.total for cost in alone.values()) == alone["forward"].seconds.total
    assert alone["forward"].flops < costs["forward"].flops
    assert not any("reduce_scatter" in sent.collective for sent in alone["forward"].traffic)
    with pytest.raises(ValueError, match="forwards alone have no balance=False and no ac=full"):
        replace(made, trained=False)


def test_links_are_those_of_the_global_ranks() -> None:
    made = job(sp_ulysses=8, zero=1)
    here, there, across = (
        step_seconds(replace(made, placed=tuple(range(first, first + 8))), A800) for first in (0, 8, 4)
    )
    assert here == step_seconds(made, A800) == there
    assert across.communication["ulysses"].exposed > 4 * here.communication["ulysses"].exposed
    with pytest.raises(ValueError, match="must be 8 different ranks"):
        replace(made, placed=(0, 1))


def test_weights_take_memory_in_their_dtype() -> None:
    made = replace(job(zero=0), trained=False, output="logprobs", weights=torch.bfloat16)
    master = replace(made, weights=torch.float32)
    stored, more = forward_memory(made, 0), forward_memory(master, 0)
    assert more.parameters == 2 * stored.parameters == 4 * made.model.numel
    assert (stored.whole, more.whole) == (0, 2 * made.model.numel)  # weights in another dtype are copied


CASES: list[Any] = [
    (2, {"sp_ulysses": 2}),
    pytest.param(1, {"zero": 0, "dtype": "bfloat16"}, marks=pytest.mark.exhaustive),
    pytest.param(2, {"tp": 2, "zero": 0}, marks=pytest.mark.exhaustive),
    pytest.param(2, {"pp": 2, "prompts": 2}, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("world_size", "flags"), CASES, ids=str)
def test_the_peak_of_inference_is_that_of_its_dry_run(world_size: int, flags: dict[str, Any]) -> None:
    config = replace(GRPO, **flags)
    run, step = runs_of(config, world_size)[0]["ref_inference"], step_of(config, world_size)
    layout, spec = step.plan["ref_inference"], step.roles["ref"]
    row = run.tokens * run.samples // run.micro_batches
    train = TrainConfig(
        seq_len=row,
        batch_size=run.micro_batches,
        micro_batches=run.micro_batches,
        zero=layout.zero,
        dtype=str(spec.dtype).removeprefix("torch."),
        tp_sequence_parallel=layout.tp_sequence_parallel,
        loss_chunk=config.loss_chunk,
    )
    shape = model_shape(model_facts("", spec.config), spec.config)
    made = Job(train, shape, layout.dims, trained=False, output="logprobs", weights=spec.dtype)
    assert forward_memory(made, 0).total == pytest.approx(run.own_bytes, rel=0.05)
