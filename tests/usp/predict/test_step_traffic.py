"""`step_traffic` and dry runs against the wire, to the byte: every axis by itself, every pair, and larger mixtures."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import RankPool
from tests.usp.predict.real_step import predicted, sent_by_steps
from tests.usp.tiny import SEQ_LEN, tiny_model
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.predict.traffic import Sent, attention_plan, attention_traffic, merged, step_traffic
from usp.train.dry_run import dry_run
from usp.train.resolve import job_of

TIED = "qwen3-tied-deep"
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

EVERY = [*SINGLE, *PAIRS, *FLOAT8, *MIXTURES]


def config_of(flags: Flags, folder: Path) -> TrainConfig:
    model = str(folder / flags.get("model", "llama"))
    return TrainConfig(**{"seq_len": SEQ_LEN, "dtype": "bfloat16", "device": "cpu", **flags, "model": model})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in {"llama", "llama-4kv", "mistral", *(str(flags.get("model", "llama")) for flags in EVERY)}:
        tiny_model(family).save_pretrained(folder / family)
    return folder


@pytest.mark.parametrize(
    ("world_size", "mixtures", "few"),
    [
        (2, SINGLE, SINGLE[-3:]),
        (4, [*PAIRS, *FLOAT8], [*PAIRS[1::6], *FLOAT8[2:7:4], *MIXTURES[2:3], *MIXTURES[20:22]]),
        pytest.param(8, MIXTURES, (), marks=pytest.mark.exhaustive),
    ],
    ids=["single", "pairs", "mixtures"],
)
@pytest.mark.slow
def test_every_byte_is_predicted(
    ranks: RankPool, models: Path, exhaustive: bool, world_size: int, mixtures: list[Flags], few: list[Flags]
) -> None:
    """By formulas on every rank, and by the dry run of one."""
    chosen = mixtures if exhaustive else few
    configs = [config_of(flags, models) for flags in chosen]
    jobs = [job_of(config, load_model_config(config.model), world_size) for config in configs]
    for rank, found in enumerate(ranks.run(sent_by_steps, world_size, configs)):
        for number, (flags, job, wire) in enumerate(zip(chosen, jobs, found, strict=True)):
            assert predicted(job, rank, step_traffic(job, rank)) == wire, f"rank {rank} of {world_size}: {flags}"
            if rank == 3 * number % world_size and "fp8" not in flags:  # whose first step agrees on more
                run = dry_run(configs[number], world_size, rank)
                assert {(sent.ranks, sent.collective): (sent.nbytes, sent.calls) for sent in run.sent} == wire, flags


@pytest.mark.slow
def test_float8_halves_the_gathers_of_linears_to_the_byte(ranks: RankPool, models: Path) -> None:
    plain = config_of({"model": "llama-4kv"}, models)
    found = ranks.run(sent_by_steps, 4, [plain, replace(plain, fp8="tensor")])
    gathered = [sum(sent for (_, name), (sent, _) in wire.items() if "gather" in name) for wire in found[0]]
    model = job_of(plain, load_model_config(plain.model), 4).model
    linears = sum(p.numel for layer in model.layers for p in layer.parameters if p.linear)
    norms = sum(p.numel for layer in model.layers for p in layer.parameters if not p.linear)
    around = model.numel - linears - norms  # gathered once, the layers in forward and backward
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
