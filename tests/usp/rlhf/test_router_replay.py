"""Router replay: the experts of a rollout are recorded in every layout, and tokens choose them in training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import tiny_config, tiny_model
from tests.usp.rlhf.test_reference import CONFIG as OTHER
from tests.usp.rlhf.test_reference import REWARD, begun, reward_of
from tests.usp.tiny import VOCAB
from tests.usp.train.families.test_families import write
from usp.hf.routers import ChoiceRecorder, replay_choices, replay_problem, routed_width
from usp.rlhf.config import RlhfConfig
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import ROUTED
from usp.rlhf.prepare import prepare
from usp.rlhf.roles import role_model
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch

STEPS = 2  # that are compared, of those of CONFIG
SUPERVISED = ("supervised_weight", "supervised_samples", "supervised_every")
ANSWERS = Path(__file__).with_name("environments") / "answers.py"
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")
CONFIG = replace(
    OTHER,
    router_replay=True,
    steps=3,
    options="mini_batches=2,old_logprobs=recompute",
    router_aux_loss_coef=0.0,
    ref_update_every=0,
    ref_update_weight=1.0,
    checkpoint_every=0,
)
PLANS: dict[str, dict[str, Any]] = {
    "generate tp2, train r2 ep2": {"plan": "separation", "rollout": "tp=2", "sp_ring": 2, "ep": 2, "zero": 1},
    "tp2 pp2": {"tp": 2, "tp_sequence_parallel": True, "pp": 2, "zero": 1, "ac": "full"},
    "u2 r2": {"sp_ulysses": 2, "sp_ring": 2, "zero": 3, "share_prefixes": True, "ac": "full"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    rows = [{"prompt": f"Question {number} of {'x' * number}:", "answer": str(number)} for number in range(12)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(REWARD)
    write("qwen3_moe", folder / "model", vocab_size=384)
    return folder


def asked(folder: Path, **changes: Any) -> RlhfConfig:
    data = str(folder / "questions.jsonl")
    files = {"data": data, "model": str(folder / "model"), "reward_function": reward_of(data), "tokenizer": "bytes"}
    return replace(CONFIG, **{**files, **changes})


@pytest.mark.parametrize(
    "family", [*FAMILIES[:2], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in FAMILIES[2:])]
)
@pytest.mark.slow(but=1)
def test_tokens_choose_what_they_are_told(family: str) -> None:
    assert not replay_problem(tiny_config(family))
    model = tiny_model(family).train()
    ids, recorder = torch.arange(12).view(1, 12) % VOCAB, ChoiceRecorder(model)
    assert recorder.take(5).shape == (5, routed_width(model.config))  # a stage without experts has none
    plain = gradients(model, ids)
    own = recorder.take(12)
    replay_choices(model)
    for layer in model.model.layers:
        layer.forward = checkpointed(layer.forward)
    same = gradients(model, ids, routed_experts=own.unsqueeze(0))
    assert all((same[name] - plain[name]).norm() <= 1e-6 * plain[name].norm() for name in plain)
    other = own.roll(1, dims=0)
    other[3] = 0
    moved = gradients(model, ids, routed_experts=other.unsqueeze(0))
    found = recorder.take(12)
    assert torch.equal(sets(found, model)[4:], sets(other, model)[4:]) and (found[3] > 0).any()
    assert any((moved[name] - plain[name]).norm() > 1e-3 * plain[name].norm() for name in plain)


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **options)


def gradients(model: Any, ids: Tensor, **options: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model.model(input_ids=ids, use_cache=False, **options).last_hidden_state.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sets(routed: Tensor, model: Any) -> Tensor:
    """The experts of each token by layer, in ascending order."""
    layers = model.config.num_hidden_layers
    return routed.unflatten(1, (layers, -1)).sort(-1).values


def metrics_of(config: RlhfConfig, broken: bool = False) -> list[dict[str, float]]:
    with patch.object(role_model, "micro_batches", of_the_next_token if broken else role_model.micro_batches):
        trainer = begun(config)
        return [trainer.step(number).metrics for number in range(1, STEPS + 1)]


def of_the_next_token(*args: Any, **options: Any) -> list[dict[str, Tensor]]:
    batches = MICRO_BATCHES(*args, **options)
    for batch in batches:
        if ROUTED in batch:
            batch[ROUTED] = batch[ROUTED].roll(1, dims=1)
    return batches


MICRO_BATCHES = role_model.micro_batches


def check(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True), start=1):
        for key in ("actor/loss", "actor/grad_norm", "actor/importance_ratio", "score"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=3e-6), (number, key)


@pytest.mark.slow
def test_replayed_steps_are_the_same_in_every_layout(
    ranks: RankPool, folder: Path, tmp_path: Path, exhaustive: bool
) -> None:
    alone = ranks.run(metrics_of, 1, asked(folder, output=str(tmp_path / "alone")))[0]
    free = ranks.run(metrics_of, 1, asked(folder, router_replay=False, output=str(tmp_path / "free")))[0]
    # At first tokens choose by themselves what they chose in the rollout; after an optimizer step others.
    assert alone[0]["logprob_difference_max"] < 1e-5
    assert alone[0]["actor/grad_norm"] != pytest.approx(free[0]["actor/grad_norm"], rel=1e-4)
    for name in PLANS if exhaustive else list(PLANS)[:1]:
        for found in ranks.run(metrics_of, 4, asked(folder, **PLANS[name], output=str(tmp_path / name))):
            check(found, alone)
    shifted = ranks.run(metrics_of, 1, asked(folder, output=str(tmp_path / "shifted")), True)[0]
    with pytest.raises(AssertionError, match=r"grad_norm|loss"):
        check(shifted, alone)


@pytest.mark.exhaustive  # alone: test_supervised.py
def test_supervised_samples_choose_by_themselves(
    ranks: RankPool, folder: Path, tmp_path: Path, exhaustive: bool
) -> None:
    """Beside tokens that are told what to choose, in the same steps."""
    rows = [{"prompt": f"{number} squared: ", "answer": str(number**2)} for number in range(7)]
    (folder / "supervised.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"supervised_data": str(folder / "supervised.jsonl"), "supervised_samples": 5, "supervised_every": 2}
    config = asked(folder, **options, supervised_weight=0.5)
    alone, free, without = (
        ranks.run(metrics_of, 1, replace(config, output=str(tmp_path / name), **changes))[0]
        for name, changes in (
            ("alone", {}),
            ("free", {"router_replay": False}),
            ("without", {"supervised_data": "", **{name: getattr(CONFIG, name) for name in SUPERVISED}}),
        )
    )
    key = "actor/supervised_loss"
    assert [key in step for step in alone] == [False, True]
    assert alone[1]["actor/grad_norm"] != pytest.approx(free[1]["actor/grad_norm"], rel=1e-4)
    assert alone[1]["actor/grad_norm"] != pytest.approx(without[1]["actor/grad_norm"], rel=1e-4)
    for name in PLANS if exhaustive else list(PLANS)[1:2]:
        for found in ranks.run(metrics_of, 4, replace(config, **PLANS[name], output=str(tmp_path / name))):
            check(found, alone)
            assert found[1][key] == pytest.approx(alone[1][key], rel=1e-5)


@pytest.mark.exhaustive
def test_episodes_replay_the_experts_of_all_turns(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    config = asked(folder, reward_function="match", environment=f"{ANSWERS}:Text", max_new_tokens=10, steps=2)
    config = replace(config, max_observation_tokens=40, stop_ids=",".join(map(str, range(3, 384, 4))))
    alone = ranks.run(metrics_of, 1, replace(config, output=str(tmp_path / "alone")))[0]
    assert alone[0]["logprob_difference_max"] < 1e-5 and alone[0]["score"] > 0
    options = PLANS["generate tp2, train r2 ep2"]
    for found in ranks.run(metrics_of, 4, replace(config, **options, output=str(tmp_path / "four"))):
        check(found, alone)


def recorded(config: RlhfConfig) -> list[tuple[Tensor, Tensor]]:
    """Return the sequences of a step with the experts that they chose in generation, on the ranks that lead."""
    found: list[tuple[Tensor, Tensor]] = []
    generate = Generator.generate

    def kept(self: Generator, prompts: Any, *args: Any, **options: Any) -> Any:
        responses = generate(self, prompts, *args, **options)
        found.extend((torch.cat((p, r.tokens)), r.routed) for p, r in zip(prompts, responses, strict=True))
        return responses

    with patch.object(Generator, "generate", kept):
        begun(config).step(1)
    return found


@pytest.mark.slow
def test_recorded_experts_are_those_of_a_whole_forward(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    recorder = ChoiceRecorder(model)
    config = asked(folder, steps=1, sp_ring=2, pp=2, zero=1, slots=3, output=str(tmp_path / "run"))
    for found in ranks.run(recorded, 4, config):
        assert len(found) == CONFIG.prompts * CONFIG.group_size
        for tokens, routed in found:
            with torch.no_grad():
                model(input_ids=tokens[None], use_cache=False)
            wanted = sets(recorder.take(len(tokens)), model)
            assert routed.shape == (len(tokens), routed_width(model.config)) and not routed[-1].any()
            assert torch.equal(sets(routed, model)[:-1], wanted[:-1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny"}, "--router-replay: model_type='llama' has no experts: remove it"),
        ({"partial_rollouts": True}, "--router-replay is not supported with --partial-rollouts and --oversample"),
        ({"rollout_engine": "vllm"}, "--router-replay needs the experts that tokens chose"),
    ],
)
@pytest.mark.slow(but=2)
def test_what_cannot_replay_is_refused(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        prepare(asked(folder, output=str(tmp_path / "run"), **changes), Launch())
