"""Everything that a simulation of a plan asks for, of PPO with a 70B actor and a 7B critic on 64 GPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.usp.rlhf.toy import ppo
from usp.hf.models import load_model_config, model_facts, scalar_config
from usp.hf.tensor_parallel import model_shape
from usp.model.facts import ModelShape
from usp.parallel import ParallelDims, load_hardware
from usp.planning.call_cost import CallOptions
from usp.planning.estimates import Estimates
from usp.planning.workload import Workload
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout

LINK = 20e9


@cache
def shape(name: str, scalar: bool = False) -> ModelShape:
    config = load_model_config(name)
    config = scalar_config(config) if scalar else config
    return model_shape(model_facts("", config), config)


def layout(first: int, size: int, zero: int = 0, **degrees: int) -> CallLayout:
    return CallLayout(tuple(range(first, first + size)), ParallelDims(**degrees).resolve(size), zero=zero)


def estimates() -> Estimates:
    models = {"actor": shape("llama2-70b"), "ref": shape("llama2-70b")}
    models |= {role: shape("llama2-7b", scalar=True) for role in ("critic", "reward")}
    load = Workload.of(prompts=512, group_size=1, prompt_tokens=128, quantiles=(128,))
    node = replace(load_hardware("a100"), host_link_bytes_per_second=LINK)
    return Estimates(ppo(), models, load, node, CallOptions(torch.bfloat16, slots=64))


def test_every_number_of_a_plan_is_predicted() -> None:
    found, everywhere = estimates(), layout(0, 64, tp=8, pp=8)
    for call in found.graph.calls:
        if call.role:
            assert 0 < found.call_seconds(call.name, everywhere) < 200
            assert found.call_bytes(call.name, everywhere) > 0
        else:
            assert found.call_seconds(call.name, layout(0, 64)) == 0
    train, generate = WeightCopy("actor", everywhere), WeightCopy("actor", layout(0, 64, tp=8))
    numel = shape("llama2-70b").numel
    assert found.weight_bytes(generate) == pytest.approx(2 * numel / 8, rel=0.01)
    # The first and the last of eight stages have the embedding and the head.
    assert found.weight_bytes(train) == pytest.approx(2 * numel / 64, rel=0.05)
    total = found.weight_bytes(train) + found.state_bytes(train)
    assert total == 6 * found.weight_bytes(train)  # float32 weights and two moments
    assert found.load_seconds(train) == found.weight_bytes(train) / LINK
    assert found.state_load_seconds(train) == 4 * found.load_seconds(train)


def test_moving_takes_time_where_layouts_differ() -> None:
    found = estimates()
    train, generate = WeightCopy("critic", layout(0, 16, 1, tp=8)), WeightCopy("critic", layout(0, 16, tp=4))
    apart = WeightCopy("critic", layout(32, 16, tp=4))
    assert found.fill_seconds(train, train) == 0
    assert 0 < found.fill_seconds(train, generate) < found.fill_seconds(train, apart)
