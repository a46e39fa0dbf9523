"""`step_traffic` against the wire, to the byte: every axis by itself, every pair, and larger combinations."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.ranks import RankPool
from tests.usp.tiny import SEQ_LEN, VOCAB, tiny_model, train_step
from usp import shard_batch
from usp.config import TrainConfig
from usp.hf.experts import router_modules
from usp.hf.models import load_model_config
from usp.parallel import ParallelMesh
from usp.parallel.wire import SentBytes
from usp.predict.job import Job
from usp.predict.traffic import Sent, attention_plan, attention_traffic, merged, step_traffic
from usp.train.build import EngineRecipe, build_engine, first_weights
from usp.train.resolve import job_of
from usp.train.validate import parallel_dims

TIED = "qwen3-tied-deep"
GroupOp = tuple[tuple[int, ...], str]
Flags = dict[str, Any]

AXES: dict[str, Flags] = {
    "pp": {"pp": 2, "micro_batches": 2, "batch_size": 2},
    "dp_replicate": {"dp_replicate": 2},
    "dp_shard": {"dp_shard": -1},  # the ranks that are left
    "ring": {"sp_ring": 2},
    "ulysses": {"sp_ulysses": 2},
    "tp": {"tp": 2, "tp_sequence_parallel": True},
    "ep": {"ep": 2, "model": "mixtral", "router_aux_loss_coef": 0.02},
}
ODD: Flags = {"sp_ring": 2, "sp_layout": "striped", "seq_len": SEQ_LEN - 1}
SINGLE: list[Flags] = [*AXES.values(), {"tp": 2}, {"zero": 0}, AXES["ep"] | {"ep_chunks": 2, "ac": "full"}, ODD]
PAIRS: list[Flags] = [AXES[a] | AXES[b] for a, b in combinations(AXES, 2)]
FLOAT8: list[Flags] = [  # of the tiny models, keys and values stay in bfloat16
    {"fp8": "tensor"},
    {"fp8": "tensor", "sp_ring": 2, "dtype": "float32"},
    {"fp8": "tensor", "tp": 2, "tp_sequence_parallel": True, "zero": 1, "micro_batches": 2, "batch_size": 2},
    {"fp8": "tensor", "dp_replicate": 2, "pp": 2, "micro_batches": 2, "batch_size": 2},
    {"fp8": "tensor", "model": "mixtral", "ep": 2},
    {"fp8": "tensor", "zero": 0, "lora_rank": 2},
    {"fp8": "row", "sp_ulysses": 2},
    {"fp8": "mx", "model": "mixtral", "ep": 2},
]
FOUR_STAGES: Flags = {"pp": 2, "pp_schedule": "interleaved-1f1b", "pp_stages_per_rank": 4, "micro_batches": 4}
MIXTURES: list[Flags] = [
    {"model": "qwen3", "sp_ulysses": 4, "sp_ring": 2},  # 2 key-value heads, so they are replicated
    {"model": "mistral", "sp_ring": 4, "sp_layout": "striped", "ac": "full", "seq_len": SEQ_LEN - 3},
    {
        "model": "qwen2",
        "tp": 2,
        "sp_ring": 2,
        "sp_layout": "balanced",
        "ac": "attention-saved",
        "mlp_tile": 5,
        "dtype": "float32",
    },
    {"model": "qwen3", "tp": 2, "zero": 1, "micro_batches": 2, "batch_size": 2, "loss_chunk": 24},
    {"model": "qwen3_moe", "ep": 4, "tp": 2, "tp_sequence_parallel": True, "sp_ulysses": 2, "ac": "full"},
    {"model": "qwen3_moe", "ep": 4, "tp": 2, "tp_sequence_parallel": True, "sp_ulysses": 2, "ac": "selective"},
    {"model": "mixtral", "ep": 2, "pp": 2, "sp_ring": 2, "micro_batches": 4, "batch_size": 4},
    {"model": "qwen3_moe", "ep": 4, "sp_ulysses": 2, "sp_ring": 2, "micro_batches": 2, "batch_size": 2, "ac": "full"},
    {"model": "mixtral", "sp_ring": 4, "zero": 1, "micro_batches": 2, "batch_size": 2},
    {"model": "mixtral", "micro_batches": 2, "batch_size": 2, "router_balance": "micro-batch"},
    AXES["tp"] | {"model": "qwen3_moe", "ep": 2, "pp": 2, "micro_batches": 2, "batch_size": 2},
    {"model": "mixtral-deep", "pp": 2, "pp_schedule": "interleaved-1f1b", "micro_batches": 4, "batch_size": 4},
    {"model": "mixtral-deep", "pp": 2, "pp_schedule": "zero-bubble", "micro_batches": 4, "batch_size": 4, "zero": 1},
    {"dp_replicate": 2, "sp_ulysses": 2, "zero": 2, "micro_batches": 2, "batch_size": 2},
    {"model": "llama-deep", "pp": 2, "pp_schedule": "interleaved-1f1b", "micro_batches": 4, "batch_size": 4},
    {"model": "llama-deep", "pp": 2, "pp_schedule": "zero-bubble", "micro_batches": 4, "batch_size": 4, "zero": 1},
    # the head is a copy of the embedding, whose 96 rows do not divide by every number of ranks
    {"model": TIED, "pp": 4, "sp_ring": 2, "micro_batches": 4, "batch_size": 4},
    {"model": TIED, "pp": 2, "tp": 2, "dp_replicate": 2, "dp_shard": 1, "micro_batches": 2, "batch_size": 2, "zero": 1},
    {"model": TIED, "pp": 2, "dp_shard": 4, "zero": 0, "micro_batches": 2, "batch_size": 2},
    {"model": TIED, "pp": 2, "pp_schedule": "interleaved-1f1b", "micro_batches": 2, "batch_size": 2},
    {"model": TIED, "pp": 2, "pp_schedule": "zero-bubble", "micro_batches": 4, "batch_size": 4, "zero": 1},
    FOUR_STAGES | {"model": "llama-eight", "batch_size": 4, "ac": "full"},
    FOUR_STAGES | {"model": "mixtral-eight", "batch_size": 4, "zero": 1, "ep": 2},
    FOUR_STAGES | {"model": "llama-eight", "batch_size": 4, "pp_stages_per_rank": 3, "tp": 2},
]


def config_of(flags: Flags, folder: Path) -> TrainConfig:
    model = str(folder / flags.get("model", "llama"))
    return TrainConfig(**{"seq_len": SEQ_LEN, "dtype": "bfloat16", "device": "cpu", **flags, "model": model})


def evenly(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Replace a router's choice: each token gets the next experts."""
    logits, weights, chosen = output
    return logits, weights, torch.arange(chosen.numel()).view_as(chosen) % logits.shape[-1]


def counted(configs: list[TrainConfig]) -> list[dict[GroupOp, tuple[int, int]]]:
    """Return (bytes, calls) of each group and collective in the second step of each configuration."""
    return [_counted(config) for config in configs]


def _counted(config: TrainConfig) -> dict[GroupOp, tuple[int, int]]:
    mesh = ParallelMesh.create(parallel_dims(config))
    recipe, fill = EngineRecipe.of(config, load_model_config(config.model)), partial(first_weights, source=config.model)
    engine = build_engine(recipe, mesh, torch.device("cpu"), partial(fill, seed=config.seed))
    for stage in engine.stages:
        for router in router_modules(stage.model):
            router.register_forward_hook(evenly)
    ids = torch.arange(config.batch_size * config.seq_len).view(config.batch_size, -1) % VOCAB
    boundaries = torch.tensor([[0, config.seq_len]] * config.batch_size, dtype=torch.int32)
    local = shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": boundaries}, mesh, layout=recipe.sp_layout)

    def step() -> None:
        train_step(engine, mesh, local, config, learning_rate=1e-3)

    step()  # the first step has agreements between the ranks that later steps do not repeat
    with SentBytes() as sent:
        step()
    return {key: (sent.by_group[key], calls) for key, calls in sent.calls.items()}


def predicted(job: Job, rank: int) -> dict[GroupOp, tuple[int, int]]:
    """Return the same from the formulas; axes with the same ranks share their groups."""
    nbytes: Counter[GroupOp] = Counter()
    calls: Counter[GroupOp] = Counter()
    for sent in step_traffic(job, rank):
        key = tuple(job.ranks(sent.axis, rank)), sent.collective
        nbytes[key] += sent.nbytes
        calls[key] += sent.calls
    return {key: (nbytes[key], calls[key]) for key in calls}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in (
        "llama",
        "llama-4kv",
        "llama-deep",
        "llama-eight",
        "mistral",
        "qwen2",
        "qwen3",
        "mixtral",
        "mixtral-deep",
        "mixtral-eight",
        "qwen3_moe",
        TIED,
    ):
        tiny_model(family).save_pretrained(folder / family)
    return folder


@pytest.mark.parametrize(
    ("world_size", "mixtures"),
    [(2, SINGLE), (4, PAIRS), pytest.param(8, MIXTURES, marks=pytest.mark.exhaustive)],
    ids=["single", "pairs", "mixtures"],
)
@pytest.mark.slow
def test_every_byte_is_predicted(
    ranks: RankPool, models: Path, exhaustive: bool, world_size: int, mixtures: list[Flags]
) -> None:
    if not exhaustive:
        mixtures = {2: SINGLE[-3:], 4: [*PAIRS[1::6], *MIXTURES[20:22]]}[world_size]  # the latter with dp_shard=2
    configs = [config_of(flags, models) for flags in mixtures]
    jobs = [job_of(config, load_model_config(config.model), world_size) for config in configs]
    for rank, found in enumerate(ranks.run(counted, world_size, configs)):
        for flags, job, wire in zip(mixtures, jobs, found, strict=True):
            assert predicted(job, rank) == wire, f"rank {rank} of {world_size}: {flags}"


@pytest.mark.slow
def test_float8_halves_the_gathers_of_linears_to_the_byte(ranks: RankPool, models: Path, exhaustive: bool) -> None:
    mixtures = FLOAT8 if exhaustive else FLOAT8[2:7:4]
    configs = [config_of(flags, models) for flags in (*mixtures, {"model": "llama-4kv"})]
    configs.append(replace(configs[-1], fp8="tensor"))
    jobs = [job_of(config, load_model_config(config.model), 4) for config in configs]
    found = ranks.run(counted, 4, configs)
    for rank, wires in enumerate(found):
        for job, wire in zip(jobs, wires, strict=True):
            assert predicted(job, rank) == wire, f"rank {rank}: {job.config}"
    gathered = [sum(sent for (_, name), (sent, _) in wire.items() if "gather" in name) for wire in found[0][-2:]]
    layers = jobs[-1].model.layers
    linears = sum(p.numel for layer in layers for p in layer.parameters if p.linear)
    norms = sum(p.numel for layer in layers for p in layer.parameters if not p.linear)
    around = jobs[-1].model.numel - linears - norms  # gathered once, the layers in forward and backward
    assert gathered == [3 * 2 * (2 * (linears + norms) + around) // 4, 3 * 2 * (linears + 2 * norms + around) // 4]


def test_attention_traffic_equals_its_plan(models: Path) -> None:
    config = config_of({"sp_ulysses": 2, "sp_ring": 4, "model": "mistral"}, models)
    job = job_of(config, load_model_config(config.model), 8)
    facts = replace(job.model.facts, v_head_dim=job.model.facts.head_dim // 2)
    for made, v_head_dim in ((job, None), (replace(job, model=replace(job.model, facts=facts)), facts.v_head_dim)):
        for rank in range(8):
            own = attention_plan(made, rank, 11).wire_bytes(facts.head_dim, job.dtype, v_head_dim)
            forward, backward = attention_traffic(made, rank, 11)
            assert sum(sent.nbytes for sent in (*forward, *backward)) == own.total


def test_parts_of_one_axis_and_collective_are_added_up() -> None:
    parts = [Sent("tp", "send", 3), Sent("tp", "send", 4, calls=2).times(2), Sent("pp", "send", 0, calls=0)]
    assert merged(parts) == (Sent("tp", "send", 11, 5),)
