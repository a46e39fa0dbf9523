"""The bias of routers follows the loads of a step's tokens: as counted by hand, in every layout, after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import tiny_model
from tests.usp.tiny import VOCAB as IDS
from usp.config import TrainConfig
from usp.hf.expert_parallel import apply_ep
from usp.hf.routers import BIAS, RouterBias
from usp.parallel import ParallelDims, ParallelMesh
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.checkpoints import CHECKPOINTS
from usp.train.prepare import prepare

from .families.test_families import write
from .families.test_hybrids import RUN, VOCAB, difference_of, exported, run

RATE, STEPS = 0.05, 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"batch_size": 4}),
    "ep2 dp2 u2": (4, {"ep": 2, "sp_ulysses": 2, "batch_size": 2, "ac": "full"}),
    "pp2 r2, micro-batches": (4, {"pp": 2, "sp_ring": 2, "batch_size": 4, "micro_batches": 2}),
    "tp2 ep2 r2": (4, {"tp": 2, "tp_sequence_parallel": True, "ep": 2, "sp_ring": 2, "batch_size": 4, "zero": 1}),
}


def biases_of(model: Any) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(BIAS)}


@pytest.mark.slow
def test_biases_and_weights_are_those_of_one_process(ranks: RankPool, tmp_path: Path, exhaustive: bool) -> None:
    write("glm4_moe" if exhaustive else "deepseek_v3", tmp_path / "tiny", vocab_size=VOCAB)
    (tmp_path / "text.txt").write_text("".join(f"Line {n} of what is trained on.\n" for n in range(400)))
    files = {"model": str(tmp_path / "tiny"), "data": str(tmp_path / "text.txt"), "data_cache": str(tmp_path / "cache")}
    config = replace(RUN, **files, steps=STEPS, checkpoint_every=1, keep_checkpoints=9, router_bias_update_rate=RATE)
    chosen = tuple(LAYOUTS) if exhaustive else ("one",)
    for name in chosen:
        world_size, flags = LAYOUTS[name]
        ranks.run(run, world_size, replace(config, **flags, output=str(tmp_path / name)))
    checkpoint = tmp_path / chosen[-1] / CHECKPOINTS / "step-00000001"
    world_size, flags = LAYOUTS["ep2 dp2 u2"] if exhaustive else (2, {"ep": 2, "batch_size": 2, "micro_batches": 2})
    resumed = replace(config, **flags, output=str(tmp_path / "resumed"), resume=str(checkpoint))
    ranks.run(run, world_size, resumed)
    whole = exported(tmp_path / "one" / "model")
    wanted, before = biases_of(whole), biases_of(exported(tmp_path / "tiny"))
    moved = torch.cat([((bias - before[name]) / RATE).round() for name, bias in wanted.items()])
    assert moved.abs().max() <= STEPS and (moved != 0).any()
    for name in (*chosen[1:], "resumed"):
        other = exported(tmp_path / name / "model")
        for key, bias in biases_of(other).items():
            assert bias.dtype == torch.float32 and torch.equal(bias, wanted[key]), (name, key)
        for key, parameter in whole.named_parameters():
            assert difference_of(other.get_parameter(key), parameter) <= 1e-5, (name, key)


def update_by_hand(broken: str = "") -> list[tuple[Tensor, Tensor]]:
    """Return each layer's bias after two steps, and as counted from the outputs of the routers."""
    mesh = ParallelMesh.create(ParallelDims())
    model = tiny_model("deepseek_v3").train()
    apply_ep(model, mesh)
    bias = RouterBias(model, mesh, RATE)
    names = [name for name, _ in model.named_modules() if name.endswith("mlp.gate")]
    wanted = {name: model.get_submodule(name).e_score_correction_bias.clone() for name in names}
    chosen: dict[str, Tensor] = {}
    for name in names:
        router = model.get_submodule(name)
        router.register_forward_hook(lambda _, args, out, name=name: chosen.__setitem__(name, out[2]))
    ids, real = torch.randint(0, IDS, (4, 2, 9), generator=torch.Generator().manual_seed(0)), torch.ones(2, 9).bool()
    real[:, 6:] = False
    for step in range(2):
        loads = {name: torch.zeros_like(value) for name, value in wanted.items()}
        for batch in ids[2 * step : 2 * step + 2]:
            with torch.no_grad():
                bias.open(real)
                model(input_ids=batch.flip(1), use_cache=False)
                bias.close()
            bias.open(None if broken == "padding counts" else real)
            loss = model(input_ids=batch, use_cache=False).logits.square().mean()
            bias.close()
            loss.backward()
            for name, choices in chosen.items():
                for choice in choices[real.flatten()].flatten().tolist():
                    loads[name][choice] += 1
        bias.update()
        for name, load in loads.items():
            wanted[name] += RATE * (load.mean() - load).sign()
    assert not any(parameter is buffer for parameter in model.parameters() for buffer in biases_of(model).values())
    return [(model.get_submodule(name).e_score_correction_bias, value) for name, value in wanted.items()]


@pytest.mark.slow
def test_the_update_is_that_of_the_paper(ranks: RankPool) -> None:
    for broken in ("", "padding counts"):
        (layers,) = ranks.run(update_by_hand, 1, broken)
        assert layers and all(torch.equal(found, wanted) for found, wanted in layers) == (not broken), broken


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "tiny"}, "updates the bias of routers, and tiny has none"),
        ({"model": "mixtral-tiny"}, "2 of its 2 routers have no buffer e_score_correction_bias"),
        ({"lora_rank": 2}, "or --lora-rank"),
    ],
)
@pytest.mark.slow(but=2)
def test_what_has_no_bias_to_update_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    write("deepseek_v3", tmp_path / "tiny", vocab_size=VOCAB)
    config = TrainConfig(model=str(tmp_path / "tiny"), tokenizer="bytes", seq_len=64, device="cpu")
    config = replace(config, router_bias_update_rate=RATE, output=str(tmp_path / "run"), **changes)
    with pytest.raises(ConfigurationError, match=said):
        prepare(config, Launch())
