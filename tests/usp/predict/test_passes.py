"""Jobs on any ranks and in any weight dtype, and the memory of forwards alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.usp.rlhf.test_dry_run import GRPO, step_of
from usp.config import TrainConfig
from usp.hf.models import load_model_config, model_facts
from usp.hf.tensor_parallel import model_shape
from usp.parallel import load_hardware
from usp.predict.job import Job
from usp.predict.memory import forward_memory
from usp.predict.seconds import step_seconds
from usp.rlhf.dry_run import dry_run_calls
from usp.train.resolve import job_of

A800 = load_hardware("a800")


def job(world_size: int = 8, **flags: object) -> Job:
    config = TrainConfig(**{"model": "llama3-8b", "seq_len": 32768, **flags})  # type: ignore[arg-type]
    return job_of(config, load_model_config(config.model), world_size)


def test_links_are_those_of_the_global_ranks() -> None:
    made = job(sp_ulysses=8, zero=1)
    here, there, across = (
        step_seconds(replace(made, placed=tuple(range(first, first + 8))), A800) for first in (0, 8, 4)
    )
    assert here == step_seconds(made, A800) == there
    assert across.communication["ulysses"].exposed > 4 * here.communication["ulysses"].exposed


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
@pytest.mark.slow
def test_the_peak_of_inference_is_that_of_its_dry_run(world_size: int, flags: dict[str, Any]) -> None:
    config = replace(GRPO, **flags)
    step = step_of(config, world_size)
    (run,) = (call for call in dry_run_calls(step, torch.device("cpu")) if call.call == "ref_inference")
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
