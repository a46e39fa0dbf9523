"""A new algorithm is one file, named by --algorithm: the trainer runs it, under any plan, with the same numbers."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.harness.ranks import RankPool
from usp.parallel import latest, read_extra
from usp.rlhf.checkpoints import RlhfState
from usp.rlhf.config import RlhfConfig
from usp.rlhf.trainer import train_rlhf
from usp.run.launch import Launch, StopRequest

TOLERANCE = 1e-5
PLANS = ("flattening", "separation")
ALGORITHM = f"{Path(__file__).parents[3] / 'examples' / 'running_mean_reinforce.py'}:RUNNING_MEAN_REINFORCE"


def train(folder: Path) -> None:
    """Two steps under each plan; the ranks of a pool have a process group already."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    launch = Launch(rank, world_size, local_rank=rank, local_world_size=world_size)
    for plan in PLANS:
        config = RlhfConfig(
            algorithm=ALGORITHM,
            plan=plan,
            options="mini_batches=2",
            reward_function=f"{folder / 'reward.py'}:reward",
            prompt_tokens=64,
            prompts=4,
            max_new_tokens=4,
            sft_steps=0,
            steps=2,
            device="cpu",
            output=str(folder / plan),
            hang_timeout=0.0,
        )
        with patch("usp.rlhf.trainer.process_group", lambda *_: nullcontext()):
            train_rlhf(config, launch, StopRequest(), None)


def test_an_algorithm_outside_the_registry_trains_alike_under_two_plans(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def reward(prompt, response, answer):\n    return len(set(response)) / 4\n")
    ranks.run(train, 2, tmp_path)
    records, weights = {}, {}
    for plan in PLANS:
        records[plan] = [json.loads(line) for line in (tmp_path / plan / "metrics.jsonl").read_text().splitlines()]
        weights[plan] = load_file(tmp_path / plan / "model" / "model.safetensors")
        first, second = records[plan]
        assert first["baseline"] == 0 and first["reward"] > 0 and first["actor/grad_norm"] > 0
        assert second["baseline"] == pytest.approx(first["reward"], rel=TOLERANCE)  # ref is the actor: no penalty yet
        checkpoint = latest(tmp_path / plan / "checkpoints")
        assert checkpoint is not None
        state = RlhfState.from_extra(read_extra(checkpoint)).functions["advantages"]
        assert state["count"] == 8 and state["total"] > 0
    for one, other in zip(*records.values(), strict=True):
        for key in ("score", "reward", "kl", "baseline", "actor/loss", "actor/grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=TOLERANCE, abs=TOLERANCE), key
    one, other = weights.values()
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value - other[name]).norm() < TOLERANCE * value.norm(), name
        assert torch.isfinite(value).all()
