"""Short runs against recorded losses, gradient norms, bytes and memory: what drifts in all layouts alike is seen, too.

`python -m tests.usp.train.test_golden` records them again.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from tests.harness.ranks import RankPool, run_ranks
from tests.usp.hf.mixers.hybrids import FAMILIES, SIZES
from tests.usp.tiny import (
    ADAM_EPS,
    CONFIGS,
    FEW_STEPS,
    LEARNING_RATE,
    MAX_NORM,
    ROWS,
    SEQ_LEN,
    VOCAB,
    loss_and_norm,
    packed_batch,
)
from usp import shard_batch
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.hf.weights import initialise
from usp.parallel import ParallelMesh, ProcessGroups
from usp.parallel.wire import SentBytes
from usp.train.build import EngineRecipe, build_engine
from usp.train.dry_run import dry_run
from usp.train.step import part_of
from usp.train.validate import parallel_dims

TINY = TrainConfig(
    seq_len=SEQ_LEN,
    batch_size=ROWS,
    dtype="float32",
    device="cpu",
    loss_chunk=24,
    learning_rate=LEARNING_RATE,
    adam_eps=ADAM_EPS,
    max_grad_norm=MAX_NORM,
)
RECORDED = Path(__file__).with_name("golden.json")
WORLD = 4


def hybrid() -> PretrainedConfig:
    return AutoConfig.for_model(
        "qwen3_next", **SIZES | FAMILIES["qwen3_next"] | {"num_experts": 0, "vocab_size": VOCAB}
    )


RUNS: dict[str, tuple[Callable[[], PretrainedConfig], dict[str, Any]]] = {
    "dense, pp2 u2": (CONFIGS["qwen3"], {"pp": 2, "sp_ulysses": 2, "zero": 1, "micro_batches": 2, "ac": "selective"}),
    "experts, tp2 ep2 r2": (
        CONFIGS["qwen3_moe"],
        {"tp": 2, "tp_sequence_parallel": True, "ep": 2, "sp_ring": 2, "router_aux_loss_coef": 0.02},
    ),
    "hybrid, dp2 r2": (hybrid, {"dp_shard": 2, "sp_ring": 2, "batch_size": 2, "ac": "attention-saved"}),
}


def steps(configs: list[TrainConfig]) -> list[list[tuple[float, float, int]]]:
    """Return loss, gradient norm, and bytes that this rank sends, of each step of each run."""
    groups, histories = ProcessGroups(), []
    for config in configs:
        mesh = ParallelMesh.create(parallel_dims(config), groups=groups)
        recipe = EngineRecipe.of(config, load_model_config(config.model, weights=False))
        engine = build_engine(recipe, mesh, torch.device("cpu"), lambda stage: initialise(stage.model, 0))
        first, history = part_of(mesh, config).first, []
        for step in range(FEW_STEPS):
            own = {name: value[first : first + config.batch_size] for name, value in packed_batch(step).items()}
            with SentBytes() as sent:
                local = shard_batch(own, mesh, config.sp_layout)
                result = loss_and_norm(engine, mesh, local, config, config.learning_rate)
            history.append((*result, sent.total))
        histories.append(history)
    return histories


def measured(run: Callable[..., list[Any]], folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Return what is recorded of each run: by step, by rank, and the peak of the first rank of each stage.

    run: as `RankPool.run`.
    """
    configs = {}
    for name, (model, flags) in RUNS.items():
        model().save_pretrained(folder / name)
        configs[name] = replace(TINY, model=str(folder / name), **flags)
    of_ranks = run(steps, WORLD, list(configs.values()))
    found = {}
    for config, name, *histories in zip(configs.values(), configs, *of_ranks, strict=True):
        losses, norms, _ = zip(*histories[0], strict=True)
        found[name] = {
            "loss": list(losses),
            "gradient norm": list(norms),
            "bytes sent": [[sent for _, _, sent in of_step] for of_step in zip(*histories, strict=True)],
            "peak bytes": [dry_run(config, WORLD, rank).peak_bytes for rank in range(0, WORLD, WORLD // config.pp)],
        }
    return found


@pytest.mark.slow
def test_runs_are_those_recorded(ranks: RankPool, tmp_path: Path) -> None:
    found, recorded = measured(ranks.run, tmp_path), json.loads(RECORDED.read_text())
    assert found.keys() == recorded.keys()
    for name, run in recorded.items():
        for key, values in run.items():
            close = key in ("loss", "gradient norm")
            assert found[name][key] == (pytest.approx(values, rel=1e-6, abs=0) if close else values), f"{name}: {key}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        RECORDED.write_text(json.dumps(measured(run_ranks, Path(folder)), indent=1) + "\n")
