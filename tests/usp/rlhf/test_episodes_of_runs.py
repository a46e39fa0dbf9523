"""Runs with an environment: the same on every plan, and what they write and refuse."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import examples.tools
from tests.harness.ranks import RankPool
from tests.usp.rlhf.environments.test_sandbox import needs_protection
from usp.rlhf.config import RlhfConfig
from usp.rlhf.prepare import prepare
from usp.rlhf.roles import rows
from usp.rlhf.trainer import RlhfTrainer
from usp.run.failures import ConfigurationError, UserCodeFailed
from usp.run.launch import Launch, StopRequest
from usp.run.watchdog import Watchdog

FILE = Path(__file__).with_name("environments") / "answers.py"
TOOL = f"{Path(examples.tools.__file__)}:calculate"
CONFIG = RlhfConfig(
    environment=f"{FILE}:Text",
    stop_ids=",".join(map(str, range(3, 384, 4))),
    max_new_tokens=10,
    max_observation_tokens=40,
    steps=2,
    warmup_steps=0,
    sft_steps=0,
    prompts=4,
    group_size=2,
    device="cpu",
    options="mini_batches=2,turn_discount=0.7",
)
PLANS: dict[str, dict[str, Any]] = {
    "u2 r2": {"sp_ulysses": 2, "sp_ring": 2},
    "r2, rollouts tp2": {"plan": "separation", "rollout": "tp=2", "sp_ring": 2, "zero": 1},
    "pp2 u2": {"pp": 2, "sp_ulysses": 2, "zero": 1},
}
ALGORITHMS = {"grpo": CONFIG, "ppo": replace(CONFIG, algorithm="ppo", group_size=0, prompts=8)}
CHOSEN = {"grpo": ("pp2 u2",), "ppo": ("r2, rollouts tp2",)}  # without --exhaustive


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"prompt": f"Question {number} of {'x' * number}:", "answer": str(number)} for number in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def metrics_of(config: RlhfConfig) -> list[dict[str, float]]:
    Path(config.output).mkdir(exist_ok=True)
    launch = Launch(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    trainer = RlhfTrainer(prepare(config, launch), launch, StopRequest(), Watchdog(Launch(), seconds=0))
    return [trainer.step(number).metrics for number in range(1, config.steps + 1)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.slow(full=1)
def test_every_plan_trains_on_the_same_episodes(
    ranks: RankPool, data: str, tmp_path: Path, exhaustive: bool, algorithm: str
) -> None:
    config = replace(ALGORITHMS[algorithm], data=data)
    alone = ranks.run(metrics_of, 1, replace(config, output=str(tmp_path / "alone")))[0]
    assert 0 < alone[0]["finished"] < 1 and alone[0]["score"] > 0 and alone[0]["actor/grad_norm"] > 0
    for name in PLANS if exhaustive else CHOSEN[algorithm]:
        for found in ranks.run(metrics_of, 4, replace(config, **PLANS[name], output=str(tmp_path / name))):
            for one, other in zip(found, alone, strict=True):
                assert one.keys() == other.keys()
                for key in one.keys() - {"logprob_difference_max", "logprob_difference_mean"}:
                    # A loss is a difference of terms around 1.
                    assert one[key] == pytest.approx(other[key], rel=1e-5, abs=2e-6), (name, key)
    (line, *_) = (tmp_path / "alone" / "samples.jsonl").read_text().splitlines()
    assert "[1]" in json.loads(line)["response"]


def ended(config: RlhfConfig) -> str:
    try:
        metrics_of(config)
    except UserCodeFailed as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_failing_environment_stops_the_run_or_leaves_the_sample_out(
    ranks: RankPool, data: str, tmp_path: Path
) -> None:
    config = replace(CONFIG, data=data, environment=f"{FILE}:Fragile", steps=1, prompts=2, sp_ulysses=2)
    for message in ranks.run(ended, 2, replace(config, output=str(tmp_path / "stop"))):
        assert "the environment failed for sample" in message and "it raised RuntimeError: no more" in message
        assert "bad-samples.jsonl" in message
    lines = (tmp_path / "stop" / "bad-samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["error"] for line in lines} == {"it raised RuntimeError: no more"}
    for failure in ("zero", "drop"):
        changed = replace(config, reward_failure=failure, output=str(tmp_path / failure))
        (metrics,) = ranks.run(metrics_of, 2, changed)[0]
        assert metrics["reward_failures"] == len(lines) and torch.tensor(metrics["score"]).isfinite()


@needs_protection
@pytest.mark.slow
def test_a_run_warns_where_the_memory_of_programs_is_bounded_for_each_process_alone(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for tools, found, warned in (("python", None, True), ("python", tmp_path, False), (TOOL, None, False)):
        monkeypatch.setattr("usp.rlhf.prepare.cgroup", lambda found=found: found)
        prepare(replace(CONFIG, data=data, environment="tools", tools=tools, output=str(tmp_path / "run")), Launch())
        said = capsys.readouterr().err
        assert (
            "has no cgroup to bound the memory of a policy's program: it has 1 GiB for each of its 8" in said
        ) == warned


@pytest.mark.slow
def test_pages_and_responses_beyond_scoring_do_not_end_a_run(ranks: RankPool, data: str, tmp_path: Path) -> None:
    config = replace(CONFIG, data=data, environment=f"{FILE}:Pages", prompts=2, sp_ulysses=2, output=str(tmp_path))
    found = ranks.run(metrics_of, 2, config)[0]
    assert len(found) == config.steps == 2 and sum(each["reward_failures"] for each in found) > 0
    lines = [json.loads(line) for line in (tmp_path / "bad-samples.jsonl").read_text("ascii").splitlines()]
    assert len(lines) == sum(each["reward_failures"] for each in found)
    assert {line["blame"] for line in lines} == {"text"}
    assert all("Unscored: no number" in line["error"] and len(line["error"]) < 600 for line in lines)
    assert all(torch.tensor(each["score"]).isfinite() for each in found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": "no.py:Nothing"}, "--environment = no.py:Nothing must be PATH.py:NAME"),
        ({"environment": f"{FILE}:Nothing"}, "has no class Nothing"),
        ({"environment": f"{FILE}:Silent"}, "Silent has no method reset and no method step"),
        ({"environment": "", "max_turns": 3}, "--max-turns = 3 is an option of --environment and --agent: give one"),
        ({"algorithm": "sft"}, "is for generated responses, and sft has none"),
        ({"reward_model": "models/reward"}, "--reward-model = models/reward is not used with --environment"),
        ({"reward_retries": 1}, "--reward-retries = 1 is not used with --environment"),
        ({"tools": "python"}, "--tools = python are those of --environment tools: give both or neither"),
        ({"environment": "tools", "tools": "calc"}, "--tools = calc must be PATH.py:NAME with an existing file"),
        (
            {"environment": "tools", "tools": f"{TOOL},{TOOL}"},
            "must have names of their own, not calculate, c",
        ),
        ({"environment": "tools", "tools": TOOL, "reward_function": "regex=("}, "--reward-function = regex=(:"),
        ({"reward_function": "math"}, "--reward-function = math is not used with --environment"),
        ({"reward_timeout": 3.0}, "--reward-timeout = 3.0 is not used with --environment"),
        ({"environment": "", "agent": "no-such-program x"}, "there is no program no-such-program"),
        ({"environment": "", "agent": "http://agents.example/play"}, "reaches no endpoint: run it on each host"),
        ({"environment": "", "agent": sys.executable}, "chat template"),
        ({"agent": sys.executable, "share_prefixes": True}, "is not supported with --environment: remove one"),
        ({"agent": sys.executable, "share_prefixes": True}, "is not supported with --share-prefixes: remove one"),
        ({"environment": "", "agent": "x", "ref": "http://localhost:1/v1"}, "with a server's log-probabilities (http"),
        (
            {"environment": "", "episode_timeout": 9.0},
            "--episode-timeout = 9.0 is an option of --environment and --agent",
        ),
        (
            {"replan": "every=1", "plan": "search"},
            "--replan does not predict how often an environment or agent answers",
        ),
    ],
)
def test_what_does_not_go_with_an_environment_is_refused(
    changes: dict[str, Any], said: str, data: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        prepare(replace(CONFIG, data=data, output=str(tmp_path / "run"), **changes), Launch())
    assert said in str(refused.value)


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chats(tmp_path: Path) -> RlhfConfig:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    chats = [{"prompt": [{"role": "user", "content": f"{number}?"}], "answer": ""} for number in range(8)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    template, data = str(tmp_path / "template.jinja"), str(tmp_path / "chats.jsonl")
    config = replace(CONFIG, chat_template=template, data=data, options="mini_batches=2", environment="", max_turns=4)
    return replace(config, max_observation_tokens=400)


@pytest.mark.slow
def test_an_agent_trains_as_the_environment_that_does_the_same(
    ranks: RankPool, chats: RlhfConfig, tmp_path: Path
) -> None:
    agent = f"{sys.executable} {FILE.with_name('agent.py')} linear=9"
    wanted = replace(chats, environment=f"{FILE}:Numbers", output=str(tmp_path / "environment"))
    (environment,) = ranks.run(metrics_of, 1, wanted)
    assert 0 < environment[0]["finished"] < 1 and environment[0]["actor/grad_norm"] > 0
    for size, plan in {1: {}, 4: PLANS["r2, rollouts tp2"]}.items():
        for found in ranks.run(metrics_of, size, replace(chats, agent=agent, **plan, output=str(tmp_path / f"{size}"))):
            for one, other in zip(found, environment, strict=True):
                assert one.keys() == other.keys()
                for key in one.keys() - {"logprob_difference_max", "logprob_difference_mean"}:
                    assert one[key] == pytest.approx(other[key], rel=1e-5, abs=2e-6), (size, key)


def as_one(config: RlhfConfig) -> list[dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_ends", lambda samples, index: [len(samples["tokens"][index])])
        return metrics_of(config)


@pytest.mark.slow
def test_conversations_of_an_episode_do_not_see_each_other(ranks: RankPool, chats: RlhfConfig, tmp_path: Path) -> None:
    agent = f"{sys.executable} {FILE.with_name('agent.py')} tree=2"
    config = replace(chats, agent=agent, max_turns=20, max_new_tokens=200, sp_ulysses=2, steps=1, warmup_steps=2)
    gaps = [
        ranks.run(run, 2, replace(config, output=str(tmp_path / run.__name__)))[0][0]["logprob_difference_max"]
        for run in (metrics_of, as_one)
    ]
    assert gaps[0] < 1e-4 < gaps[1]
    (line, *_) = map(json.loads, (tmp_path / "metrics_of" / "samples.jsonl").read_text().splitlines())
    assert sorted(turn["turn"] for turn in line["turns"] if "turn" in turn) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.slow
def test_tools_are_described_in_the_prompt_and_run(ranks: RankPool, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for tool in tools or [] %}[{{ tool['function']['name'] }}]{% endfor %}"
        "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    file, reward = tmp_path / "chats.jsonl", tmp_path / "reward.py"
    rows = [
        {"prompt": [{"role": "user", "content": f"{number} + 1?"}], "answer": str(number + 1)} for number in range(8)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    reward.write_text(
        "def share(prompt, response, answer):\n    return response.count('a') / 8 + ('[calculate]' in prompt)\n"
    )
    config = replace(
        CONFIG,
        environment="tools",
        tools=TOOL,
        reward_function=f"{reward}:share",
        chat_template=str(template),
        data=str(file),
        steps=1,
        output=str(tmp_path / "run"),
    )
    (metrics,) = ranks.run(metrics_of, 1, config)[0]
    assert metrics["score"] >= 1
    (line, *_) = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["turns"][0]["turn"] == 1
    template.write_text(template.read_text().replace("tools or []", "[]"))
    with pytest.raises(ConfigurationError, match="does not describe tools"):
        prepare(replace(config, output=str(tmp_path / "other")), Launch())
