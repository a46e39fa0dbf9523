"""Hybrid models train as plain transformers does on mixtures of dp, sp, pp and recomputation, and resume on others."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.harness.ranks import RankError, RankPool
from tests.usp.hf.mixers.hybrids import hybrid
from tests.usp.tiny import drawn_model, loss_and_norm, optimizer_steps
from usp.config import TrainConfig
from usp.hf.export import save_weights
from usp.hf.models import model_facts
from usp.model.facts import NO_ATTENTION, training_flops
from usp.parallel import ParallelMesh
from usp.run.launch import Launch
from usp.sp.sequence import shard_batch
from usp.train.build import EngineRecipe, build_engine, first_weights
from usp.train.checkpoints import CHECKPOINTS
from usp.train.engine import Engine
from usp.train.prepare import prepare
from usp.train.resolve import resolve
from usp.train.step import part_of
from usp.train.trainer import Trainer

VOCAB, ROWS, LENGTH, STEPS = 384, 4, 64, 3
RATE, MAX_NORM, EPS = 3e-3, 0.5, 1e-4
KINDS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]  # the first half: no attention
# Without experts.
DENSE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"num_local_experts": 0},
    "kimi_linear": {"mlp_layer_types": ["dense"] * len(KINDS)},
    "olmo_hybrid": {},
    "qwen3_5_text": {},
    "qwen3_next": {"num_experts": 0},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "dp2 u2, full": {"sp_ulysses": 2, "batch_size": 2, "ac": "full"},
    "pp2 r2, saved": {"pp": 2, "sp_ring": 2, "batch_size": 4, "micro_batches": 2, "ac": "attention-saved", "zero": 1},
    "u2 r2 balanced, offloaded": {
        "sp_ulysses": 2,
        "sp_ring": 2,
        "sp_layout": "balanced",
        "batch_size": 4,
        "micro_batches": 2,
        "ac": "attention-saved",
        "ac_offload": True,
    },
    "u2 r2 striped, products saved": {
        "sp_ulysses": 2,
        "sp_ring": 2,
        "sp_layout": "striped",
        "batch_size": 4,
        "ac": "selective",
    },
    "pp2 u2, split backwards": {
        "pp": 2,
        "sp_ulysses": 2,
        "batch_size": 4,
        "micro_batches": 4,
        "pp_schedule": "zero-bubble",
        "zero": 1,
    },
    "dp1x2 r2, unsharded": {"dp_replicate": 2, "sp_ring": 2, "batch_size": 2, "zero": 0},
    "r4 contiguous": {"sp_ring": 4, "sp_layout": "contiguous", "batch_size": 4, "zero": 2},
}
CHOSEN = {"granitemoehybrid": list(MIXTURES)[1:2]}  # qwen3_next: test_whole_runs.py


def tiny(family: str) -> PreTrainedModel:
    return hybrid(family, vocab_size=VOCAB, num_hidden_layers=len(KINDS), layer_types=KINDS, **DENSE[family])


def write(family: str, folder: Path) -> None:
    model = tiny(family)
    save_weights(dict(model.named_parameters()), folder, config=model.config)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Rows of documents that end inside spans, one of them of a single token."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    cuts = [[0, 5, 24, 25, LENGTH], [0, 33, 40, 59, LENGTH], [0, LENGTH, LENGTH, LENGTH, LENGTH]]
    cu_seqlens = torch.tensor([cuts[(row + step) % 3] for row in range(ROWS)], dtype=torch.int32)
    return {"input_ids": ids, "labels": ids, "cu_seqlens": cu_seqlens}


def loss_alone(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of plain transformers, each document alone."""
    total, targets = torch.zeros(()), 0
    for ids, cuts in zip(batch["input_ids"], batch["cu_seqlens"].tolist(), strict=True):
        for begin, end in pairwise(cuts):
            if end - begin > 1:
                logits = model(input_ids=ids[None, begin:end], use_cache=False).logits[0, :-1]
                labels = ids[begin + 1 : end]
                total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
                targets += len(labels)
    return total / targets


def plain_steps(family: str) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps of the unchanged model."""
    model = tiny(family).train()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim >= 2) == whole] for whole in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPS)
    return optimizer_steps(model, optimizer, STEPS, lambda step: loss_alone(model, batch_of(step)))


def steps(folder: str, flags: dict[str, Any], count: int = STEPS) -> list[tuple[float, float]]:
    """The same with train.py's engine."""
    flags = {"adam_eps": EPS, "learning_rate": RATE, "max_grad_norm": MAX_NORM, "dtype": "float32", **flags}
    asked = TrainConfig(model=folder, seq_len=LENGTH, loss_chunk=24, **flags)
    config, model_config, _, dims = resolve(asked, dist.get_world_size()).valid()
    mesh, device = ParallelMesh.create(dims), torch.device("cpu")
    fill = partial(first_weights, source=folder, seed=0)
    engine = build_engine(EngineRecipe.of(config, model_config), mesh, device, fill)

    history = []
    for step in range(count):
        part = part_of(mesh, config)
        own = {name: value[part.first : part.first + part.rows] for name, value in batch_of(step).items()}
        local = shard_batch(own, mesh, config.sp_layout)
        history.append(loss_and_norm(engine, mesh, local, config, RATE))
    return history


def difference(found: Any, wanted: Any) -> float:
    found, wanted = (torch.tensor(values, dtype=torch.float64) for values in (found, wanted))
    return (found / wanted - 1).abs().max().item()


@pytest.mark.slow
def test_steps_are_those_of_plain_transformers(ranks: RankPool, tmp_path: Path, exhaustive: bool) -> None:
    cases = {family: list(MIXTURES) for family in DENSE} if exhaustive else CHOSEN
    found: dict[tuple[str, str], float] = {}
    for family, mixtures in cases.items():
        write(family, tmp_path / family)
        expected = plain_steps(family)
        for mixture in mixtures:
            steps_of_ranks = ranks.run(steps, 4, str(tmp_path / family), MIXTURES[mixture])
            found[family, mixture] = difference(steps_of_ranks[0], expected)
    assert max(found.values()) <= 1e-5, found


def modes(folder: str) -> tuple[list[int], float, float]:
    """Return the bytes of recurrent layers by activation checkpointing; the loss in bfloat16, and in float32."""
    flags: dict[str, Any] = {"sp_ulysses": 2, "sp_ring": 2, "batch_size": 4}
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        engines = watch_engines(patch)
        for ac in ("none", "attention-saved", "full"):
            ((wanted, _),) = steps(folder, {**flags, "ac": ac}, 1)
            sent.append(engines[-1].stages[0].model.unified_sp_order.channel.sent_bytes)
        ((loss, _),) = steps(folder, {**flags, "dtype": "bfloat16", "ac": "full"}, 1)
        assert {p.dtype for p in engines[-1].parameters.values()} == {torch.float32}
    return sent, loss, wanted


def watch_engines(patch: pytest.MonkeyPatch) -> list[Engine]:
    engines: list[Engine] = []
    build = build_engine

    def watched(*args: Any) -> Engine:
        engines.append(build(*args))
        return engines[-1]

    patch.setitem(globals(), "build_engine", watched)
    return engines


@pytest.mark.exhaustive
def test_messages_are_not_repeated_and_bfloat16_is_near(ranks: RankPool, tmp_path: Path) -> None:
    write("qwen3_5_text", tmp_path)
    found = ranks.run(modes, 4, str(tmp_path))
    for (none, saved, _), loss, wanted in found:
        assert none == saved and loss == pytest.approx(wanted, rel=0.01)
    assert sum(sent[2] for sent, *_ in found) > 1.4 * sum(sent[0] for sent, *_ in found)


@pytest.mark.slow
def test_recurrent_layers_are_refused_under_tp(ranks: RankPool, tmp_path: Path) -> None:
    write("qwen3_5_text", tmp_path)
    flags = {"tp": 2, "sp_ring": 2, "batch_size": 4}
    with pytest.raises(
        RankError, match=r"tp=2 does not divide the recurrent layers of Qwen3_5\w+ \(gated delta rule\)"
    ):
        ranks.run(steps, 4, str(tmp_path), flags)


@pytest.mark.parametrize("family", [*DENSE, "bamba", "falcon_h1", "lfm2", "zamba2"])
@pytest.mark.slow(but=2)
def test_every_parameter_and_buffer_is_initialised(family: str) -> None:
    config = (tiny if family in DENSE else hybrid)(family).config
    ours, theirs = drawn_model(config), AutoModelForCausalLM.from_config(config)
    for name, tensor in (*ours.named_parameters(), *ours.named_buffers()):
        assert tensor.isfinite().all(), name
    for (name, buffer), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(buffer, other), name


@pytest.mark.slow
def test_layers_without_attention_attend_to_nothing() -> None:
    facts = model_facts("", tiny("qwen3_5_text").config)
    assert facts.windows == (NO_ATTENTION, NO_ATTENTION, 0, NO_ATTENTION)
    one, alone = (replace(facts, windows=windows) for windows in ((0,), (NO_ATTENTION,)))
    cu_seqlens = batch_of(0)["cu_seqlens"]
    flops = [training_flops(f, matmul_parameters=10, tokens=7, cu_seqlens=cu_seqlens) for f in (facts, one, alone)]
    assert flops[0] == flops[1] > flops[2] == 6 * 10 * 7


RUN = TrainConfig(
    seq_len=LENGTH,
    steps=4,
    warmup_steps=1,
    checkpoint_every=2,
    learning_rate=RATE,
    adam_eps=EPS,
    tokenizer="bytes",
    device="cpu",
    zero=3,
)
RUNS: list[dict[str, Any]] = [
    {"sp_ulysses": 2, "sp_ring": 2, "batch_size": 4, "ac": "full"},
    {"pp": 2, "sp_ring": 2, "sp_layout": "balanced", "batch_size": 4, "micro_batches": 2, "zero": 1},
]


def run(config: TrainConfig) -> None:
    size = dist.get_world_size()
    Trainer(prepare(config, Launch(rank=dist.get_rank(), world_size=size, local_world_size=size))).run()


def losses_of(folder: Path) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, loss on held-out data or 0) of each step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record["grad_norm"], record.get("eval_loss") or 1.0) for record in records]


@pytest.mark.exhaustive
def test_runs_continue_on_another_mixture_and_export(ranks: RankPool, tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("The states of earlier documents must not be seen here.\n" * 8)
    for family in DENSE:
        folder = tmp_path / family
        write(family, folder / "first")
        config = replace(RUN, model=str(folder / "first"), eval_data=str(held_out), data_cache=str(tmp_path / "cache"))
        ranks.run(run, 4, replace(config, **RUNS[0], output=str(folder / "whole")))
        checkpoint = folder / "whole" / CHECKPOINTS / "step-00000002"
        ranks.run(
            run, 4, replace(config, **RUNS[1], output=str(folder / "resumed"), resume=str(checkpoint)), timeout=600
        )
        assert difference(losses_of(folder / "resumed"), losses_of(folder / "whole")[2:]) <= 1e-5, family
        one, other = (exported(folder / name / "model") for name in ("whole", "resumed"))
        for name, parameter in one.named_parameters():
            assert difference_of(other.get_parameter(name), parameter) <= 1e-5, (family, name)


def exported(folder: Path) -> PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def difference_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-3)).item()
