"""Supervised samples in RLHF steps: their gradient, under every plan and after a resume, and what cannot have them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.harness.ranks import RankPool
from tests.usp.rlhf.test_reference import begun, run
from tests.usp.tiny import SIZES, drawn_model
from usp.data.tokenizer import BYTE_VOCAB
from usp.hf.tokenizers import load_tokenizer
from usp.rlhf.config import RlhfConfig
from usp.rlhf.datasets import example_indices
from usp.rlhf.prepare import prepare
from usp.rlhf.samples import derived_seed
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.checkpoints import CHECKPOINTS

ROWS = [{"prompt": f"{number} squared: ", "answer": str(number**2) * (1 + number % 3)} for number in range(7)]
CONFIG = RlhfConfig(
    max_new_tokens=6,
    steps=4,
    warmup_steps=0,
    sft_steps=0,
    learning_rate=1e-3,
    prompts=4,
    group_size=2,
    device="cpu",
    options="mini_batches=2",
    supervised_weight=0.5,
    supervised_samples=5,
    supervised_every=2,
    checkpoint_every=2,
)
PLANS: dict[str, dict[str, Any]] = {
    "u2 r2, several micro-batches": {"sp_ulysses": 2, "sp_ring": 2, "zero": 3, "micro_batch_tokens": 64},
    "dp2 pp2": {"pp": 2, "zero": 1},
    "dp4, ranks without a supervised sample": {"zero": 1},
    "u2, rollouts elsewhere": {"plan": "separation", "rollout": "tp=2", "sp_ulysses": 2, "zero": 1},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    rows = [{"prompt": f"Question {number} of {'x' * number}:", "answer": str(number)} for number in range(12)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "supervised.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (folder / "reward.py").write_text(
        "def odd(prompt, response, answer):\n    return sum(map(ord, response)) % 5 + len(response) / 8\n\n\n"
        "def equal(prompt, response, answer):\n    return 1.0\n"
    )
    drawn_model(LlamaConfig(**SIZES | {"vocab_size": BYTE_VOCAB})).save_pretrained(folder / "model")
    named = {"data": "questions.jsonl", "supervised_data": "supervised.jsonl", "model": "model"}
    return {name: str(folder / path) for name, path in named.items()} | {
        "tokenizer": "bytes",
        "reward_function": f"{folder / 'reward.py'}:odd",
    }


def metrics_of(config: RlhfConfig, steps: int) -> list[dict[str, float]]:
    trainer = begun(config)
    return [{**trainer.step(number).metrics, "step": number} for number in range(1, steps + 1)]


@pytest.mark.slow
def test_without_advantages_the_gradient_is_that_of_the_cross_entropy(
    ranks: RankPool, files: dict[str, str], tmp_path: Path
) -> None:
    """Against transformers in float64."""
    equal = files | {"reward_function": files["reward_function"].replace(":odd", ":equal"), "max_grad_norm": 1e9}
    config = replace(CONFIG, options="kl=0", supervised_every=1, output=str(tmp_path / "run"), **equal)
    tokenizer = load_tokenizer("bytes")
    for number, step in enumerate(ranks.run(metrics_of, 1, replace(config, learning_rate=1e-9), 2)[0]):
        model = drawn_model(LlamaConfig(**SIZES | {"vocab_size": BYTE_VOCAB})).double()
        begin, total, targets = number * config.supervised_samples, torch.zeros((), dtype=torch.float64), 0
        for index in example_indices(begin, 5, len(ROWS), derived_seed(config.seed, "supervised")):
            prompt, answer = (tokenizer.encode(ROWS[index][key]).tolist() for key in ("prompt", "answer"))
            ids = torch.tensor([[*prompt, *answer, tokenizer.eos]])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            total, targets = total - logprobs[len(prompt) - 1 :].sum(), targets + len(answer) + 1
        (config.supervised_weight * total / targets).backward()
        norm = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
        assert step["actor/supervised_loss"] == pytest.approx(total.item() / targets, rel=1e-5)
        assert step["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def check(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [step["step"] for step in found] == [step["step"] for step in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert ("actor/supervised_loss" in one) == ("actor/supervised_loss" in other) == (one["step"] % 2 == 0)
        for key in {"actor/loss", "actor/supervised_loss", "score", "actor/grad_norm"} & one.keys():
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=2e-6), (one["step"], key)


@pytest.mark.slow
def test_steps_are_the_same_under_every_plan_and_after_a_resume(
    ranks: RankPool, files: dict[str, str], tmp_path: Path, exhaustive: bool
) -> None:
    config, output = replace(CONFIG, **files), tmp_path / "last"
    alone = ranks.run(metrics_of, 1, replace(config, output=str(tmp_path / "alone")), 4)[0]
    *plans, last = list(PLANS.values()) if exhaustive else [PLANS["dp4, ranks without a supervised sample"]]
    for number, plan in enumerate(plans):
        check(ranks.run(metrics_of, 4, replace(config, **plan, output=str(tmp_path / str(number))), 2)[0], alone[:2])
    check(ranks.run(run, 4, replace(config, **last, output=str(output)))[0], alone)
    shutil.rmtree(output / CHECKPOINTS / "step-00000004")
    resumed = PLANS["dp2 pp2" if exhaustive else "u2 r2, several micro-batches"]
    again = replace(config, **resumed, output=str(output), resume="auto")
    check(ranks.run(run, 4, again)[0], alone)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"supervised_data": ""}, "--supervised-weight = 0.5 is an option of --supervised-data: give both or neither"),
        ({"algorithm": "sft", "group_size": 0}, "--supervised-data: sft trains on nothing else"),
        ({"algorithm": "reward_model"}, "--supervised-data is for the policy, which --algorithm = reward_model"),
        ({"plan": "search"}, "--plan search and --replan do not predict --supervised-data"),
        ({"options": "mini_batches=8"}, "--supervised-samples = 5 leaves some of mini_batches=8 without"),
        ({"supervised_data": "none.jsonl"}, "--supervised-data = none.jsonl must be"),
    ],
)
@pytest.mark.slow(but=2)
def test_what_cannot_have_supervised_samples_is_refused(
    changes: dict[str, Any], said: str, files: dict[str, str], tmp_path: Path
) -> None:
    pairs = {}
    if changes.get("algorithm") == "reward_model":
        (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
        pairs = {"data": str(tmp_path / "pairs.jsonl"), "reward_function": "match", "group_size": 0, "options": ""}
        pairs["max_new_tokens"] = RlhfConfig.max_new_tokens
    with pytest.raises(ConfigurationError) as raised:
        prepare(replace(CONFIG, output=str(tmp_path / "run"), **files | pairs | changes), Launch())
    assert said in str(raised.value)
