"""References that follow the policy: the same under every plan and after a resume, and what cannot follow."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from tests.harness.ranks import RankPool
from tests.usp.tiny import SIZES, drawn_model
from usp.rlhf.config import RlhfConfig
from usp.rlhf.prepare import prepare
from usp.rlhf.trainer import RlhfTrainer
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch, StopRequest
from usp.run.watchdog import Watchdog
from usp.train.checkpoints import CHECKPOINTS

CONFIG = RlhfConfig(
    max_new_tokens=6,
    steps=4,
    warmup_steps=0,
    sft_steps=0,
    learning_rate=1e-2,
    prompts=4,
    group_size=2,
    device="cpu",
    options="kl=0.2,mini_batches=2",
    ref_update_every=2,
    ref_update_weight=0.6,
    checkpoint_every=2,
)
REWARD = "def odd(prompt, response, answer):\n    return sum(map(ord, response)) % 5 + len(response) / 8\n"
PLANS: dict[str, dict[str, Any]] = {
    "r2, rollouts tp2, offloaded": {"plan": "separation", "rollout": "tp=2", "sp_ring": 2, "zero": 1, "offload": True},
    "u2 r2": {"sp_ulysses": 2, "sp_ring": 2, "zero": 3},
    "tp2 pp2": {"tp": 2, "pp": 2, "zero": 1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"prompt": f"Question {number} of {'x' * number}:", "answer": str(number)} for number in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    path.with_name("reward.py").write_text(REWARD)
    return str(path)


def reward_of(data: str) -> str:
    return f"{Path(data).with_name('reward.py')}:odd"


def begun(config: RlhfConfig) -> RlhfTrainer:
    Path(config.output).mkdir(exist_ok=True)
    launch = Launch(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    return RlhfTrainer(prepare(config, launch), launch, StopRequest(), Watchdog(Launch(), seconds=0))


def run(config: RlhfConfig) -> list[dict[str, float]]:
    """Train, and return the metrics of all steps."""
    begun(config).run()
    dist.barrier()
    return [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]


def weights(trainer: RlhfTrainer, role: str) -> dict[str, Tensor]:
    (model,) = [model for model in trainer.executor.copies.of_role(role) if role == "ref" or model.trained]
    return {name: weight.detach().clone() for name, weight in model.weights().items()}


def distances(config: RlhfConfig) -> list[float]:
    """Return how far the reference is from what its updates should give, by step."""
    trainer, found = begun(config), []
    wanted = weights(trainer, "ref")
    for number in range(1, config.steps + 1):
        trainer.step(number)
        if number % config.ref_update_every == 0:
            policy, share = weights(trainer, "actor"), config.ref_update_weight
            wanted = {name: (1 - share) * of + share * policy[name] for name, of in wanted.items()}
        reference = weights(trainer, "ref")
        found.append(max(float((reference[name] - wanted[name]).norm()) for name in wanted))
    return found


def check(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [step["step"] for step in found] == [step["step"] for step in wanted]
    for one, other in zip(found, wanted, strict=True):
        for key in ("actor/loss", "actor/ref_kl", "score", "actor/grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=2e-6), (one["step"], key)


@pytest.mark.slow
def test_updates_are_the_same_under_every_plan_and_after_a_resume(
    ranks: RankPool, data: str, tmp_path: Path, exhaustive: bool
) -> None:
    config = replace(CONFIG, data=data, reward_function=reward_of(data))
    alone = ranks.run(run, 1, replace(config, output=str(tmp_path / "alone")))[0]
    still = ranks.run(run, 1, replace(config, output=str(tmp_path / "still"), ref_update_every=0, ref_update_weight=1))
    assert (
        still[0][1]["actor/ref_kl"] == alone[1]["actor/ref_kl"]
        and still[0][2]["actor/ref_kl"] > 1.2 * alone[2]["actor/ref_kl"]
    )
    for name, plan in list(PLANS.items())[: None if exhaustive else 1]:
        folder = tmp_path / name
        asked = replace(config, **plan, output=str(folder))
        for found in ranks.run(run, 4, asked):
            check(found, alone)
        shutil.rmtree(max((folder / CHECKPOINTS).iterdir()))  # that of the last step
        (after,) = ranks.run(run, 1, replace(config, output=str(folder), resume="auto"))[:1]
        check(after, alone)


@pytest.mark.slow
def test_the_reference_is_the_mean_that_was_asked_for(ranks: RankPool, data: str, tmp_path: Path) -> None:
    config = replace(
        CONFIG, data=data, reward_function=reward_of(data), checkpoint_every=0, output=str(tmp_path / "mean")
    )
    assert max(ranks.run(distances, 1, config)[0]) < 1e-6
    config = replace(config, ref_update_every=1, ref_update_weight=1.0, output=str(tmp_path / "equal"))
    assert ranks.run(distances, 1, config)[0] == [0.0] * config.steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": "kl=0"}, "--ref-update-every = 2 needs one call of the role ref"),
        ({"lora_rank": 4}, "--ref-update-every = 2 is not supported with --lora-rank"),
        ({"ref_update_every": 0}, "--ref-update-weight = 0.6 is an option of --ref-update-every"),
        ({"ref_update_weight": 0.0}, "--ref-update-weight = 0.0 must be above 0 and at most 1"),
    ],
)
@pytest.mark.slow(but=1)
def test_what_cannot_be_updated_is_refused(data: str, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        prepare(replace(CONFIG, data=data, output=str(tmp_path / "run"), **changes), Launch())


def test_another_model_is_no_reference_that_follows(data: str, tmp_path: Path) -> None:
    sizes = LlamaConfig(**SIZES | {"vocab_size": 384, "max_position_embeddings": 2048})
    drawn_model(sizes).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"needs a reference like the policy, and --ref = .* has another"):
        prepare(replace(CONFIG, data=data, ref=str(tmp_path / "other"), output=str(tmp_path / "run")), Launch())
