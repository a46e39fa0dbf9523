"""The layout of a model's weights from its description equals the one gathered from its ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.parallel.reallocation.layouts import minimum_bytes
from tests.usp.tiny import CONFIGS
from usp.hf.models import load_model_config, model_facts, scalar_config
from usp.hf.tensor_parallel import model_shape
from usp.model.facts import ModelShape, weight_layout
from usp.optimizers import AdamW
from usp.parallel import ParallelDims, ParallelMesh, ParamLayout, gather_layout, plan_realloc
from usp.parallel.reallocation.boxes import Box
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel, RoleSpec

BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A role's model on the last ranks of the world."""

    dims: ParallelDims
    family: str = "llama-4kv"
    zero: int = 0
    trained: bool = False

    @property
    def config(self) -> Any:
        config = CONFIGS[self.family.removesuffix(" scalar")]()
        return scalar_config(config) if self.family.endswith("scalar") else config

    @property
    def shape(self) -> ModelShape:
        return model_shape(model_facts("", self.config), self.config)


def dims(**degrees: int) -> ParallelDims:
    return ParallelDims(**{"dp_shard": 1, **degrees})


CASES = [
    Case(dims(dp_shard=4), zero=3, trained=True),
    Case(dims(dp_shard=4), "llama-4kv scalar", zero=1),  # its head has one row
    Case(dims(ring=2, tp=2), zero=1, trained=True),
    Case(dims(dp_replicate=2, ulysses=2), zero=2, trained=True),
    Case(dims(tp=2, dp_replicate=2), "phi3"),
    Case(dims(pp=2, tp=2), "llama-tied"),
    Case(dims(pp=4), "qwen3-tied-deep", zero=3, trained=True),
    Case(dims(pp=2, dp_shard=2), "llama-deep", zero=0, trained=True),
    Case(dims(dp_shard=2, ring=2, ep=4), "mixtral", zero=3),
    Case(dims(dp_shard=4, ep=2), "qwen3_moe", zero=1),
    Case(dims(dp_shard=2, ulysses=2, ep=2), "mixtral"),
    Case(dims(dp_shard=4), "mixtral", zero=3),
    Case(dims(tp=2), "qwen3"),  # on two of four ranks, so the last
]


def gathered(cases: Sequence[Case]) -> list[ParamLayout | None]:
    found: list[ParamLayout | None] = []
    world_size = torch.distributed.get_world_size()
    for case in cases:
        size = case.dims.pp * case.dims.batch * case.dims.sp * case.dims.tp
        layout = CallLayout(tuple(range(world_size - size, world_size)), case.dims, zero=case.zero)
        if torch.distributed.get_rank() not in layout.ranks:
            found.append(None)
            continue
        mesh = ParallelMesh.create(layout.dims, "cpu", layout.ranks)
        spec = RoleSpec("actor", "tiny", case.config, dtype=BF16, optimizer=AdamW(0.1))
        model = RoleModel(spec, layout, mesh, trained=case.trained)
        whole = size == world_size
        group = None if whole else mesh.group("tp")
        found.append(gather_layout(model.weights(), group))
    return found


@pytest.mark.slow
def test_described_layouts_equal_the_gathered_ones(ranks: RankPool, exhaustive: bool) -> None:
    cases = CASES if exhaustive else CASES[::2]
    *_, found = ranks.run(gathered, 4, cases)
    for case, layout in zip(cases, found, strict=True):
        assert layout is not None
        described = weight_layout(
            case.shape, case.dims, layout.ranks, zero=case.zero, dtype=FP32 if case.trained else BF16
        )
        assert described.parameters == layout.parameters, case
        assert described == layout, case


def test_a_layout_that_does_not_divide_is_refused() -> None:
    shape = Case(dims()).shape
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight of shape \(96, 32\) cannot be divided by tp=5"):
        weight_layout(shape, dims(tp=5), range(5), zero=0, dtype=BF16)


@pytest.mark.slow
def test_70b_on_128_gpus_is_planned_in_seconds() -> None:
    config = load_model_config("llama2-70b")
    shape = model_shape(model_facts("", config), config)
    before, started = range(128), time.process_time()
    train = weight_layout(shape, dims(pp=8, tp=8, dp_shard=2), before, zero=1, dtype=FP32)
    generate = weight_layout(shape, dims(tp=8, dp_replicate=16), before, zero=0, dtype=BF16)
    plan = plan_realloc(train, generate, bucket_bytes=1 << 28, ranks_per_host=8)
    assert time.process_time() - started < 10  # about 1 s on one core
    assert plan.total_bytes == minimum_bytes(plan)
    assert generate.boxes["model.layers.79.mlp.down_proj.weight"][127] == Box((0, 7 * 3584), (8192, 3584))
