"""The footprint's peak against the dry run's, which tracks every tensor; the order of micro-batches in a pipeline.

The footprint is an estimate that ranks layouts: it sums matrices and known tensors at a few moments and ignores which
of a layer's temporaries are alive together; states and what is offloaded are sums of shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.usp.predict.jobs import job, llama
from tests.usp.rlhf.test_dry_run import GRPO, step_of
from tests.usp.tiny import tiny_model
from usp.config import TrainConfig
from usp.hf.models import model_facts
from usp.hf.tensor_parallel import model_shape
from usp.parallel import PP_SCHEDULES, PipelineSchedule, load_hardware
from usp.predict.job import Action, Job, Schedule, actions
from usp.predict.memory import footprint, forward_memory, rank_host_bytes, stage_bytes
from usp.predict.seconds import least_seconds, step_seconds
from usp.predict.traffic import step_traffic
from usp.rlhf.dry_run import dry_run_calls
from usp.train.dry_run import dry_run

H100 = load_hardware("h100")
_TWO = {"batch_size": 2, "micro_batches": 2}
OFFLOADED: list[tuple[int, dict[str, Any]]] = [
    *((4, {"seq_len": 4096, "optim_offload": True, "zero": zero}) for zero in range(4)),
    *((4, {"seq_len": 4096, "optim_offload": True, "zero": zero} | _TWO) for zero in range(4)),
    *((4, {"seq_len": 4096, "optim_offload": True, "zero": zero, "dp_replicate": 2} | _TWO) for zero in (1, 2)),
    (4, {"seq_len": 4096, "optim_offload": True, "tp": 2, "tp_sequence_parallel": True}),
    (4, {"seq_len": 4096, "optim_offload": True, "pp": 2, "ac": "selective", "ac_offload": True} | _TWO),
    (8, {"model": "llama3-8b", "seq_len": 32768, "sp_ulysses": 8, "optim_offload": True, "ac": "full"}),
    (8, {"model": "llama3-8b", "seq_len": 32768, "sp_ulysses": 8, "ac": "selective"}),
    (8, {"model": "mixtral-8x7b", "seq_len": 32768, "sp_ulysses": 8, "ep": 8, "ac": "selective"}),
]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (8, {"sp_ulysses": 4, "sp_ring": 2, "seq_len": 32768}),
        (4, {"tp": 2, "sp_ulysses": 2, "seq_len": 16384, "zero": 1, "ac": "attention-saved", "model": "qwen3-tiny"}),
        (4, {"tp": 2, "tp_sequence_parallel": True, "sp_ulysses": 2, "seq_len": 16384, "ac": "selective"}),
        (2, {"seq_len": 4096, "sp_ring": 2, "optim_offload": True, "ac": "selective", "ac_offload": True}),
        *(pytest.param(world_size, flags, marks=pytest.mark.exhaustive) for world_size, flags in OFFLOADED),
        (4, {"seq_len": 16384, "zero": 2, "micro_batches": 2, "batch_size": 2}),
        (4, {"seq_len": 16384, "fp8": "tensor", "ac": "attention-saved"}),
        (8, {"model": "llama3-8b", "seq_len": 8192, "sp_ring": 2, "zero": 1, "ac": "none", "compile": True} | _TWO),
        pytest.param(8, {"model": "llama3-8b", "seq_len": 8192, "fp8": "tensor"}, marks=pytest.mark.exhaustive),
        pytest.param(8, {"model": "llama3-8b", "seq_len": 8192, "fp8": "row"}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
@pytest.mark.slow
def test_the_peak_is_near_that_of_the_dry_run(world_size: int, flags: dict[str, Any]) -> None:
    formula = footprint(job(world_size, **flags), 0)
    measured = dry_run(TrainConfig(**flags), world_size, 0)
    assert formula.peak.total == pytest.approx(measured.peak_bytes, rel=0.05)
    assert formula.host == pytest.approx(measured.host_bytes, rel=0.05)
    assert rank_host_bytes(job(world_size, **flags), 0) == formula.host
    states = 0 if measured.config.optim_offload else formula.parameters + formula.optimizer
    assert states == pytest.approx(measured.start_bytes, rel=0.001, abs=2**12)  # buffers stay
    assert not flags.get("compile") or max(formula.peak.total, measured.peak_bytes) < 71 * 2**30  # and 84.2 eager


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        ("llama-deep", {"pp_schedule": "zero-bubble", "zero": 1}),
        ("llama-eight", {"pp_schedule": "interleaved-1f1b", "pp_stages_per_rank": 4}),
    ],
)
def test_the_peak_of_a_pipeline_is_near_that_of_the_dry_run(
    rank: int, family: str, pipeline: dict[str, Any], tmp_path: Path
) -> None:
    """Check zero-bubble, which keeps a micro-batch's graph and output gradients until the weight half, and more
    stages."""
    model = tiny_model(family)
    model.config.max_position_embeddings = 4096
    model.save_pretrained(tmp_path)
    four = {"pp": 2, "micro_batches": 4, "batch_size": 4}
    flags: dict[str, Any] = {"model": str(tmp_path), "seq_len": 4096, **four, **pipeline}
    formula, measured = footprint(job(2, **flags), rank), dry_run(TrainConfig(**flags), 2, rank)
    assert formula.peak.total == pytest.approx(measured.peak_bytes, rel=0.05)


HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "head_dim": 32}
HYBRID |= {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("model_type", "options", "flags", "reason"),
    [
        ("llama", {}, {"lora_rank": 8}, "frozen weights"),
        ("llama", {}, {"optimizer": "muon", "zero": 1}, "Muon"),
        ("qwen3_5_text", HYBRID, {}, "its matrices"),
        ("deepseek_v3", LATENT, {"ac": "full"}, "its matrices"),
        pytest.param("qwen3_5_text", HYBRID, {"ac": "full"}, "its matrices", marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", LATENT, {"lora_rank": 8}, "frozen weights", marks=pytest.mark.exhaustive),
        pytest.param("glm4_moe", LATENT, {"sp_ring": 2}, "its matrices", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_an_approximate_peak_is_near_that_of_the_dry_run(
    model_type: str, options: dict[str, Any], flags: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, **SIZES | options)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    flags = {"model": str(tmp_path), "seq_len": 4096, "dtype": "bfloat16", **flags}
    asked, measured = job(2, **flags), dry_run(TrainConfig(**flags), 2, 0)
    assert reason in asked.approximate and not job(2, model="tiny").approximate
    assert footprint(asked, 0).peak.total == pytest.approx(measured.peak_bytes, rel=0.15)
    states = footprint(asked, 0).parameters + footprint(asked, 0).optimizer
    assert states == pytest.approx(measured.start_bytes, rel=0.01, abs=2**16)
    assert 0 < least_seconds(asked, H100) < step_seconds(asked, H100).total
    assert {sent.axis for sent in step_traffic(asked, 0)} <= {"fsdp", "efsdp", "loss", "ring"}


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.slow
def test_the_last_stage_has_a_copy_of_a_tied_embedding(rank: int, tmp_path: Path) -> None:
    tiny_model("qwen3-tied-deep").save_pretrained(tmp_path)
    flags: dict[str, Any] = {"model": str(tmp_path), "seq_len": 256, "pp": 2, "micro_batches": 2, "batch_size": 2}
    formula, measured = footprint(job(2, **flags), rank), dry_run(TrainConfig(**flags), 2, rank)
    assert formula.parameters + formula.optimizer == pytest.approx(measured.start_bytes, rel=0.001)
    assert formula.peak.total == pytest.approx(measured.peak_bytes, rel=0.05)


def test_frozen_weights_have_no_gradients_to_sum_over_micro_batches() -> None:
    flags: dict[str, Any] = {"model": "llama3-8b", "seq_len": 2048, "ac": "full", "lora_rank": 16} | _TWO
    summed, reduced = (footprint(job(1, **flags, zero=zero), 0).peak.total for zero in (1, 2))
    assert summed == pytest.approx(reduced, rel=0.01)


def test_more_stages_a_rank_save_less_and_idle_less() -> None:
    flags = {"model": "llama3-8b", "pp": 4, "zero": 1, "micro_batches": 8, "batch_size": 8}
    plain, *more = (
        job(4, **flags, pp_schedule=name, pp_stages_per_rank=each)
        for name, each in (("1f1b", 0), *(("interleaved-1f1b", each) for each in (2, 4, 8)))
    )
    for rank in range(3):  # the last also saves what the loss needs
        of_micro_batch = footprint(plain, rank).activations / (4 - rank)  # of a quarter of the layers
        for asked, each in zip(more, (2, 4, 8), strict=True):
            assert len(asked.stages(rank)) == each and len(asked.stage_layers) == 4 * each
            in_flight, found = (each - 1) * 4 + 2 * (3 - rank) + 1, footprint(asked, rank).activations
            assert rank == 0 or found == in_flight * stage_bytes(asked, rank).saved
            assert found == pytest.approx(in_flight / each * of_micro_batch, rel=0.04)  # and the input of each stage
    assert footprint(more[0], 0).activations > footprint(more[1], 0).activations > footprint(more[2], 0).activations
    bubbles = [step_seconds(asked, H100) for asked in (plain, *more)]
    for time, each in zip(bubbles, (1, 2, 4, 8), strict=True):
        busy = time.total - time.bubble - time.optimizer
        assert time.bubble / busy == pytest.approx(3 / (each * 8))


@pytest.mark.parametrize(("schedule", "each"), [*((name, 0) for name in PP_SCHEDULES), ("interleaved-1f1b", 5)])
@pytest.mark.parametrize("micro_batches", [8, 12])
def test_every_micro_batch_passes_each_stage_once(schedule: str, each: int, micro_batches: int) -> None:
    flags = {"zero": 1, "micro_batches": micro_batches, "batch_size": micro_batches, "pp_schedule": schedule}
    asked = job(4, model="llama3-8b", pp=4, **flags, pp_stages_per_rank=each)
    kinds = ("forward", "inputs", "weights") if schedule == "zero-bubble" else ("forward", "backward")
    for rank in range(4):
        order, stages = actions(asked.schedule(rank)), asked.stages(rank)
        assert len(order) == len(set(order)) == len(kinds) * len(stages) * micro_batches
        for stage in stages:
            for number in range(micro_batches):
                places = [order.index(Action(kind, stage, number)) for kind in kinds]
                assert places == sorted(places)


def test_one_forward_per_stage_to_the_last_comes_before_the_first_backward() -> None:
    order = [action.kind[0] for action in actions(Schedule(PipelineSchedule("1f1b"), place=1, pp=4, micro_batches=5))]
    assert "".join(order) == "fffbfbfbbb"


def test_weights_take_memory_in_their_dtype() -> None:
    made = replace(llama(8, zero=0), trained=False, output="logprobs", weights=torch.bfloat16)
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
