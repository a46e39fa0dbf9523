"""rlhf.py as a user runs it: to completion, with bad input, a failing reward function, and killed ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import usp.run.failures
from tests.e2e.processes import ONE_THREAD, ROOT, Run, refusals_of, run_here
from tests.harness.ranks import RankPool
from tests.usp.tiny import drawn_model
from usp.commands.rlhf import main
from usp.fields import AUTO_RATE
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.parallel import read_extra
from usp.rlhf.algorithms.rewards import ScoreWith
from usp.rlhf.checkpoints import RlhfState
from usp.rlhf.config import RlhfConfig
from usp.rlhf.graph import Compute
from usp.rlhf.prepare import prepare
from usp.rlhf.runtime.measure import read_lengths
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.checkpoints import Start

SMALL = ["--sft-steps", "0", "--prompts", "2", "--group-size", "2", "--prompt-tokens", "64", "--log-every", "1"]
TILES = ["--mlp-tile", "16"]
OFFLOADING = ["--offload", "--offload-optimizer"]
EIGHT = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
FILES = {
    "empty.jsonl": "\n",
    "bad.jsonl": '{"prompt": "a", "answer": "b"}\n{"prompt": "", "answer": "b"}\n{"prompt": "a"}\nnot json\n',
    "long.jsonl": json.dumps({"prompt": "x" * 200_000, "answer": "b"}),
    "plan.yaml": "calls:\n  actor_generate: {ranks: 0-9, tp: 2}\n  nobody: {ranks: 0}\n",
    "reward.py": "def nothing(prompt, response, answer):\n    return float('nan')\n",
    "teacher.py": "from usp.rlhf.api import GRPO, Algorithm, grpo_algorithm, logprobs\n\n"
    "TAUGHT = Algorithm(GRPO, lambda o: (*grpo_algorithm(GRPO).calls(o), logprobs('teacher', 'teacher_logprobs')))\n",
    "pairs.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
    "needs.py": "import no_such_module\n",
    "grammar.py": "def reward(:\n",
    "leaves.py": "raise SystemExit(3)\n",
    "modern.py": "from __future__ import annotations\nfrom dataclasses import KW_ONLY, dataclass\n\n"
    "@dataclass\nclass Score:\n    _: KW_ONLY\n    value: float = 0.0\n\n"
    "def reward(prompt, response, answer):\n    return Score(value=0.5).value\n",
}
BAD = refusals_of("""
--algorithm grpoo => --algorithm = 'grpoo' must be one of | did you mean 'grpo'
--algorithm reward.py:GRPO => reward.py:GRPO: reward.py has no algorithm GRPO
--algorithm reward.py:nothing => reward.py:nothing must be an Algorithm, got a function
--algorithm teacher.py:TAUGHT => the role 'teacher' has no model: name it with --models teacher=PATH
--models teacher=tiny => --models = teacher=tiny: grpo has the roles actor, ref, not 'teacher'
--models critic=tiny,a => --models = critic=tiny,a: 'critic' has a flag of its own; 'a' must be NAME=PATH
--models teacher=nowhere => --models teacher=nowhere is neither a preset nor a directory
--long-prompts drop => --long-prompts = drop requires a --data file
--algorithm dpo --reward-failure drop => --reward-failure = drop is not used: dpo does not score responses
--plan flatening => --plan = flatening must be one of heuristic, flattening | did you mean 'flattening'
--search-budget 5 => --search-budget = 5.0 is only used by --plan search: give both or neither
--plan plan.yaml => ranks 8-9 are missing from the world of 8 ranks | nobody | actor_train
--plan heuristic --sft-steps 0 --sp-ulysses 2 --zero 1 --rollout tp=2 =>
    --sp-ulysses = 2 is not used by --plan heuristic | --zero = 1 is not | --rollout = tp=2 is only used by
--plan plan.yaml --sft-steps 0 --dp-shard 2 => --dp-shard = 2 is not used by --plan plan.yaml
--rollout tp=2 => --rollout = tp=2 is only used by --plan separation: remove
--critic tiny => --critic = tiny is not used by grpo with these options: remove it
--ref tiny --options kl=0 => --ref = tiny is not used by grpo with these options: remove it
--algorithm dpo --reward-model tiny => --reward-model = tiny is not used by dpo
--model '' => error: --model =  has no config.json
--algorithm dpo --data pairs.jsonl => line 1: no text under 'answer'
--ref nowhere => error: --ref = nowhere is neither a preset nor a directory
--algorithm ppo --critic nowhere => error: --critic = nowhere is neither a preset nor a directory
--data empty.jsonl => --data = empty.jsonl holds no line
--data bad.jsonl => line 2: a prompt of 0 tokens | line 3: no text under 'answer' | line 4: not JSON
--data long.jsonl => line 1: a prompt of 200000 tokens, expected 1 to 131064
--prompt-tokens 200000 => --prompt-tokens = 200000 must be at least 64 | and at most 131064
--options k1=3,mini_batches=x => unknown 'k1' | kl=0.04 | mini_batches = 'x' must be int
--options mini_batches=0 => grpo: mini_batches=0 must be at least 1
--reward-function reward.py:nothin => has no function nothin (did you mean 'nothing'?)
--reward-function needs.py:reward => needs.py cannot be imported: ModuleNotFoundError: No module named 'no_
--reward-function grammar.py:reward => --reward-function = grammar.py:reward | SyntaxError:
--reward-function leaves.py:reward => leaves.py cannot be imported: SystemExit: 3
--prompts -1 --temperature -1 => 2 problems: | --prompts = -1 | --temperature = -1.0
--wrong-answers 0.5 => --wrong-answers = 0.5 requires --data stdlib and --algorithm sft
--algorithm ppo --prompts 3 => --prompts = 3: actor_train: mini_batches=4 of 3 samples
--algorithm dpo --prompts 1 --options mini_batches=2 => --prompts = 1: actor_train
--algorithm ppo --options kl_target=6,kl_horizon=12 => kl_horizon=12 must be above 0.2 times the 64
--eval-every 5 --eval-samples 2 --eval-temperature 0 => 2 problems: | needs prompts | equal
--eval-data pairs.jsonl --keep-best => --eval-data = pairs.jsonl is an option of | --keep-best is
--steps 0 => --steps = 0 only evaluates: add --eval-every 1
--eval-every 5 --eval-data gsm=pairs.jsonl => --eval-data = gsm=pairs.jsonl: gsm must be one of gsm8k, math500,
--eval-every 5 --eval-data gsm8k=pairs.jsonl => --eval-data = gsm8k=pairs.jsonl: line 1: no text under 'question'
--eval-every 5 --eval-data gsm8k=pairs.jsonl --environment x.py:X =>
    has rewards of its own, and --environment scores
--reward-function benchmark => --reward-function = benchmark
--eval-every 5 --eval-data pairs.jsonl => --eval-data = pairs.jsonl: line 1: no text under 'answer'
--algorithm dpo --eval-every 5 --eval-prompts 1 => --eval-every = 5 is for generated responses, and dpo has none
--staleness 1 =>
    samples beside training, on other ranks: with --plan = flattening actor_generate, reward | use --plan separa
--algorithm dpo --staleness 1 => --staleness = 1 is for generated responses, and dpo has none
--cache-tokens 8 => --cache-tokens = 8 holds no sequence
--algorithm dpo --cache-tokens 8 => --cache-tokens = 8 is for generated responses, and dpo has none
--algorithm dpo --share-prefixes => --share-prefixes is for generated responses, and dpo has none
--model mixtral-tiny --share-prefixes => share_prefixes counts a shared token once in the
--staleness 2 => --staleness = 2: whole rollouts are made one step ahead, and earlier ones would only be
--staleness 1 --partial-rollouts --algorithm dpo --oversample 1.5 =>
    --partial-rollouts with --staleness = 1: a response that goes on after |
    --oversample = 1.5 must be at most --staleness = 1 |
    --partial-rollouts is for generated responses, and dpo has none
--staleness 2 --partial-rollouts --environment lookup.py:Lookup --replan every=10 =>
    --replan does not predict how often an environment or agent answers
--oversample 0.5 => --oversample = 0.5 must be at least 1, or 0
--oversample 2 --algorithm remax =>
    choose the prompts of a step by one call, and --algorithm = remax has actor_generate, greedy_generate
--sp-ulysses 3 => ulysses=3
--ac some --micro-batch-tokens -2 => --ac = 'some' must be one of none | --micro-batch-tokens = -2
--router-balance micro-batch => --router-balance micro-batch balances experts, and tiny has none: remove
--ac-offload => --ac-offload offloads what activation checkpointing saves, but --ac is none: use --ac full
--plan plan.yaml --sft-steps 0 --ac full => --ac = full is not used by --plan plan.yaml
--model mixtral-tiny --mlp-tile 64 => mlp_tile=64 tiles dense MLPs, and those of mixtral-tiny
--tp 3 --dp-shard 1 => tp=3
--replan every=0 => --replan = every=0: every=0 must be at least 1
--replan every=150 --lora-rank 4 --algorithm dpo =>
    is for generated responses, and dpo has none | searches after step 150 of --steps = 150 |
    no predictions of calls with adapters
--replan gain=5% --sft-steps 0 => --replan = gain=5%: --hardware auto does not know a CPU: measure
--hardware a100 => --hardware = a100 is only used by --plan search and --replan: give one, or remove it
""")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("args", "said"), BAD, ids=[" ".join(args) for args, _ in BAD])
@pytest.mark.slow(but=2)
def test_bad_input_is_refused_before_any_communication(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], said: list[str]
) -> None:
    monkeypatch.chdir(inputs)
    shown = refusal(args, monkeypatch, capsys)
    for part in said:
        assert part in shown


def refusal(args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of rlhf.py for `args`, raised before any communication."""
    monkeypatch.setattr(usp.run.failures, "LAUNCHER_SECONDS", 0.0)
    exit_code = main(["--device", "cpu", *args], EIGHT | {"RANK": "0", "LOCAL_RANK": "0"})
    said = capsys.readouterr().err
    assert exit_code == 2 and not dist.is_initialized() and said.startswith("error: "), said
    return said


@pytest.mark.slow
def test_supervised_steps_of_another_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sft" / "model").mkdir(parents=True)
    saved = RlhfConfig(algorithm="sft", tokenizer="bytes", steps=100, learning_rate=2e-3, prompt_tokens=64)
    (tmp_path / "sft" / "config.yaml").write_text(yaml.safe_dump(asdict(saved)))
    args = ["--prompt-tokens", "64", "--output", str(tmp_path)]
    said = refusal(args, monkeypatch, capsys)
    assert f"--output = {tmp_path} already holds a run: choose another directory, or continue it with --resume" in said
    other = ["--resume", "auto", "--sft-steps", "50", "--model", "qwen3-tiny", "--seed", "3"]
    said = refusal([*args, *other], monkeypatch, capsys)
    for part in ("--sft-steps = 50 (supervised steps of this run: 100)", "--model = qwen3-tiny", "--seed = 3"):
        assert part in said
    assert "--data" not in said and "--learning-rate" not in said
    prepared = prepare(replace(saved, algorithm="grpo", resume="auto", output=str(tmp_path)), Launch())
    assert prepared.start.folder == tmp_path


@pytest.mark.slow
def test_a_run_resumes_only_with_its_own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(model: str, config: RlhfConfig) -> Start:
        saved = RlhfState(2, 8, {}, asdict(replace(config, model=model)))
        monkeypatch.setattr("usp.train.checkpoints.read_extra", lambda path: asdict(saved))
        return Start(tmp_path, tmp_path / "checkpoints" / "step-00000002")

    config = RlhfConfig(tokenizer="bytes", prompt_tokens=64, sft_steps=0)
    prepare(config, Launch(), started("tiny", config))
    changed = replace(config, model="qwen3-tiny", reward_model="tiny", ref="qwen3-tiny")
    with pytest.raises(ConfigurationError) as refused:
        prepare(changed, Launch(), started("tiny", config))
    for part in ("--model = qwen3-tiny (checkpoint: tiny)", "--reward-model = tiny", "--ref = qwen3-tiny"):
        assert part in str(refused.value)
    prepare(replace(config, sft_steps=100), Launch(), started("elsewhere/sft/model", config))
    with pytest.raises(ConfigurationError, match="the checkpoint is of step 2; use at least 2"):
        prepare(replace(config, steps=1), Launch(), replace(started("tiny", config), finished_too=True))


def test_flags_of_memory_and_balance_reach_calls_and_roles() -> None:
    config = RlhfConfig(model="mixtral-tiny", algorithm="ppo", tokenizer="bytes", prompt_tokens=64, sft_steps=0)
    usual = prepare(config, Launch())
    assert {role: spec.balance for role, spec in usual.roles.items() if role in ("actor", "critic")} == {
        "actor": 0.02,  # of the model's configuration
        "critic": 0.02,
    }
    assert not usual.plan.offload and usual.plan["actor_train"].ac == "none"
    asked = replace(config, router_aux_loss_coef=0.3, router_balance="micro-batch", ac="full", offload_optimizer=True)
    changed = prepare(replace(asked, offload=True, loss_chunk=64), Launch())
    actor = changed.roles["actor"]
    assert (actor.balance, actor.router_balance, actor.loss_chunk) == (0.3, "micro-batch", 64)
    assert changed.plan.offload == {"ref", "actor.optimizer", "critic.optimizer"}
    assert {changed.plan[name].ac for name in ("actor_train", "critic_train")} == {"full"}


def test_what_scores_nothing_has_no_use_for_a_reward_function() -> None:
    with pytest.raises(
        ConfigurationError, match=r"--reward-function = f\.py:f is not used: sft does not score responses, remove it"
    ):
        prepare(RlhfConfig(algorithm="sft", reward_function="f.py:f"), Launch())


@pytest.mark.slow
def test_default_learning_rates_are_those_of_random_or_pretrained_weights(tmp_path: Path) -> None:
    config = load_model_config("tiny")
    save_weights(dict(drawn_model(config).named_parameters()), tmp_path, config=config)
    asked = RlhfConfig(tokenizer="bytes", prompt_tokens=64, sft_steps=1)

    def rates(**fields: Any) -> tuple[float, float, float]:
        found = prepare(replace(asked, **fields), Launch()).config
        return found.learning_rate, found.critic_learning_rate, found.sft_learning_rate

    assert (
        rates() == (1e-3, AUTO_RATE, 2e-3)
        and rates(algorithm="rloo")[0] == 2e-3
        and rates(algorithm="ppo") == (3e-4, 1e-3, 2e-3)
        and rates(algorithm="ppo", sft_steps=0)[2] == AUTO_RATE
    )
    assert rates(model=str(tmp_path))[::2] == rates(model=str(tmp_path), algorithm="ppo")[::2] == (1e-6, 1e-5)
    assert rates(model=str(tmp_path), algorithm="sft", sft_steps=-1)[0] == 1e-5
    assert rates(model=str(tmp_path), algorithm="reward_model")[0] == 1e-5
    assert rates(algorithm="ppo", critic=str(tmp_path)) == (3e-4, 1e-5, 2e-3)
    assert rates(model=str(tmp_path), algorithm="ppo")[1] == 1e-5
    own = {"learning_rate": 0.0, "critic_learning_rate": 1e-4, "sft_learning_rate": 0.0}
    assert rates(algorithm="ppo", **own) == (0.0, 1e-4, 0.0), "0 is 0"


@pytest.mark.slow
def test_a_run_leaves_its_dtype_and_a_configuration_for_other_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = ["--sft-steps", "1", "--steps", "1", "--prompts", "2", "--group-size", "2", "--prompt-tokens", "64"]
    assert main([*args, "--dtype", "bfloat16", "--output", str(tmp_path)], ONE_THREAD) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "sft" / "model").dtype == torch.float32
    for folder in (tmp_path, tmp_path / "sft"):
        written = yaml.safe_load((folder / "config.yaml").read_text())
        assert (written["device"], written["dtype"]) == ("auto", "bfloat16")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["learning_rate"] == 1e-3  # the preset's
    warmups = [
        yaml.safe_load((folder / "config.yaml").read_text())["warmup_steps"] for folder in (tmp_path, tmp_path / "sft")
    ]
    assert warmups == [20, 5]
    shown = capsys.readouterr().out
    assert f"models: actor {tmp_path / 'sft' / 'model'}" in shown and "bfloat16 on cpu" in shown
    assert shown.count("learning rate: actor 0.002") == shown.count("learning rate: actor 0.001") == 1


def test_an_algorithm_may_have_further_roles(inputs: Path) -> None:
    config = RlhfConfig(sft_steps=0, algorithm=f"{inputs / 'teacher.py'}:TAUGHT", models="teacher=tiny", prompts=1)
    prepared = prepare(config, Launch())
    assert list(prepared.roles) == ["actor", "ref", "teacher"] and prepared.roles["teacher"].source == "tiny"
    assert "teacher_inference" in prepared.plan.calls and prepared.drawn == 1
    sampled = replace(config, algorithm="dapo", models="", options="oversample=3")
    assert (prepare(sampled, Launch()).drawn, prepare(sampled, Launch()).config.prompts) == (3, 1)


def test_a_reward_file_may_hold_dataclasses(inputs: Path) -> None:
    config = RlhfConfig(sft_steps=0, reward_function=f"{inputs / 'modern.py'}:reward")
    (reward,) = (call.work for call in prepare(config, Launch()).graph.calls if call.name == "reward")
    assert isinstance(reward, Compute) and isinstance(reward.function, ScoreWith)
    assert reward.function.reward("", "", "") == 0.5


# Rank 1 fails from its third call on: in the second step that a process runs.
FAILS = """
import os
from itertools import count

calls = count(1)

def reward(prompt, response, answer):
    if os.environ["RANK"] == "1" and next(calls) > 2:
        raise SystemExit("the judge has left")
    return 50.0 + len(response)
"""


@pytest.mark.slow
def test_a_failing_reward_keeps_the_steps_before_it_or_only_loses_its_samples(
    ranks: RankPool, tmp_path: Path, exhaustive: bool
) -> None:
    """With --exhaustive under torchrun, else on ranks that need not start."""
    (tmp_path / "fails.py").write_text(FAILS)
    args = [*SMALL, "--output", "run", "--reward-function", "fails.py:reward", "--reward-retries", "0"]
    args += ["--checkpoint-every", "0", "--options", "max_reward_clip=20"]
    if exhaustive:
        with Run([*args, "--steps", "3"], tmp_path, ranks=2, script=ROOT / "rlhf.py") as run:
            ended = run.end()
    else:
        ended = ranks.run(run_here, 2, "rlhf", [*args, "--steps", "3"], tmp_path, 1)[0]
    assert ended.exit_code == 1 and "error: step 2: the reward function failed for sample " in ended.err, ended.err
    assert "rank 0 failed" not in ended.err and "rank 1 failed" not in ended.err and "lost its conn" not in ended.err
    assert "it raised SystemExit: the judge has left" in ended.err and "2 samples are in run/bad-samples" in ended.err
    assert "checkpoint run/checkpoints/step-00000001: continue with --resume run" in ended.err
    assert ended.err.count("100% of the rewards are clipped by --options max_reward_clip") == 1
    records = [json.loads(line) for line in (tmp_path / "run" / "bad-samples.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 2] and len({record["sample"] for record in records}) == 2
    assert all(record["prompt"].endswith("# mark: ") and "SystemExit" in record["traceback"] for record in records)
    again = ["--steps", "3", "--resume", "auto", "--reward-failure", "drop"]
    ended = ranks.run(run_here, 2, "rlhf", [*args, *again], tmp_path)[0]
    assert "step 3: the reward function failed for sample" in ended.err, ended.err
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(one["step"], one["reward_failures"]) for one in steps] == [(1, 0), (2, 0), (3, 2)]
    assert all(50 <= one["score"] <= 58 and one["reward"] == 20 for one in steps)


def scores_of(run: Path) -> list[tuple[int, float, float]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["score"], record["actor/loss"]) for record in records if record["step"]]


# The first process dies in step 3, while the samples of step 4 are made, with two kills the second one in its second
# train step; later where no checkpoint of an earlier step is complete by then. Partial rollouts die in a decode step of
# resumed responses, and, with eight kills, at seven more moments of a step.
KILLS_AHEAD = """
import os, signal
from itertools import count
from pathlib import Path
from usp.parallel.checkpoint.checkpointer import complete_checkpoints
from usp.rlhf.generation.generate import Generator
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.runtime.executor import Executor
from usp.rlhf.runtime.rollouts import Rollouts

whole = [(RoleModel, "generate", "0", 5), (RoleModel, "train_step", "1", 2)]
partial = [
    (Generator, "_decode", "0", 40),  # ticks of a process: several calls have ended
    (Executor, "run", "0", 3),  # before a step; its rollouts
    (RoleModel, "go_on", "0", 3),  # begin
    (Rollouts, "know_prompts", "0", 4),  # are chosen
    (RoleModel, "inference", "0", 3),
    (RoleModel, "train_step", "1", 2),
    (Rollouts, "end", "1", 3),  # are counted
    (Rollouts, "whole", "1", 3),  # are saved
]
kills = (partial if os.environ.get("PARTIAL") else whole)[: int(os.environ.get("KILLS", 0))]
for attempt, (kind, name, rank, number) in enumerate(kills):
    deadly = (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == (str(attempt), rank)
    def dying(self, *args, call=getattr(kind, name), deadly=deadly, number=number, calls=count(1), **named):
        if next(calls) >= number and deadly and complete_checkpoints(Path("deadly/checkpoints")):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, *args, **named)
    setattr(kind, name, dying)

def reward(prompt, response, answer):
    return len(set(response)) / 8
"""


# Answers come in an order of their own, as the numbers depend on it; the fifth turn ends an episode.
IN_ORDER = """
import sys

if "torch" in sys.modules:
    import importlib.util
    from usp.rlhf.environments.episodes import Processes
    spec = importlib.util.spec_from_file_location("kills", "kills.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def in_order(self, wait, answers=Processes.answers):
        found = answers(self, False)
        while any(process.until for process in self._of_episode.values()):
            found += answers(self, True)
        return sorted(found)

    Processes.answers = in_order

class Environment:
    def reset(self, sample):
        self.turns = 0

    def step(self, turn):
        self.turns += 1
        return f"[{self.turns}]", len(set(turn)) / 8, self.turns == 5 or len(turn) == 2
"""


def samples_of(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what a run shows of each step's samples, the last time that it runs."""
    found: dict[int, list[dict[str, Any]]] = {}
    for record in map(json.loads, (run / "samples.jsonl").read_text().splitlines()):
        if not record["evaluation"]:
            found[record["step"]] = [*found.get(record["step"], ()), record][-2:]
    return found


@pytest.mark.slow
def test_a_killed_rank_loses_and_repeats_no_sample_in_flight(
    ranks: RankPool, launch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exhaustive: bool
) -> None:
    kills = 2 if exhaustive else 1
    (tmp_path / "kills.py").write_text(KILLS_AHEAD)
    args = [*SMALL, "--steps", "5", "--plan", "separation", "--staleness", "1", "--reward-function", "kills.py:reward"]
    ranks.run(run_here, 2, "rlhf", [*args, "--output", "calm"], tmp_path)
    monkeypatch.setenv("KILLS", str(kills))
    args += ["--output", "deadly", "--checkpoint-every", "1", "--keep-checkpoints", "5"]
    args += ["--eval-every", "2", "--eval-prompts", "3"]  # changes no number
    with launch(args, tmp_path, ranks=2, script=ROOT / "rlhf.py", torchrun=("--max-restarts", str(kills))) as run:
        ended = run.end()
    assert ended.exit_code == 0, ended.err
    assert ended.out.count("resumed from: deadly/checkpoints/step-0000000") == kills
    calm, deadly = tmp_path / "calm", tmp_path / "deadly"
    assert scores_of(deadly) == scores_of(calm) and len(scores_of(calm)) == 5
    assert samples_of(deadly) == samples_of(calm) and list(samples_of(calm)) == [1, 2, 3, 4, 5]
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (deadly, calm))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    in_flight = [read_extra(path)["in_flight"] for path in sorted((deadly / "checkpoints").iterdir())]
    assert [one.get("step") for one in in_flight] == [2, 3, 4, 5, None]
    with pytest.raises(ConfigurationError, match=r"--staleness = 0 \(checkpoint: 1\) must not change on resume while"):
        changed = {**yaml.safe_load((deadly / "config.yaml").read_text()), "staleness": 0, "plan": "flattening"}
        prepare(RlhfConfig(**changed), Launch(), Start(deadly, deadly / "checkpoints" / "step-00000002"))


def tickets_of(run: Path) -> dict[int, list[int]]:
    """Return the prompts that each step trained on, the last time that it ran."""
    records = map(json.loads, (run / "timeline" / "lengths.jsonl").read_text().splitlines())
    return {record["step"]: record["tickets"] for record in records}


@pytest.mark.slow
@pytest.mark.parametrize("scorer", [("--reward-function", "kills.py:reward"), ("--environment", "env.py:Environment")])
def test_a_killed_rank_loses_and_repeats_no_partial_rollout(
    ranks: RankPool,
    launch: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exhaustive: bool,
    scorer: tuple[str, str],
) -> None:
    kills, steps = 8 if exhaustive else 1, 16 if exhaustive else 5
    (tmp_path / "kills.py").write_text(KILLS_AHEAD)
    (tmp_path / "env.py").write_text(IN_ORDER)
    monkeypatch.setenv("PARTIAL", "1")
    args = [*SMALL, "--steps", str(steps), "--plan", "separation", "--staleness", "3", "--partial-rollouts"]
    args += [
        "--max-new-tokens",
        "16",
        "--stop-ids",
        "0,1,2,3,4,5,6,7,8,9,10,11",
        *scorer,
    ]
    ranks.run(run_here, 2, "rlhf", [*args, "--output", "calm"], tmp_path)
    monkeypatch.setenv("KILLS", str(kills))
    args += ["--output", "deadly", "--checkpoint-every", "1", "--keep-checkpoints", str(steps)]
    args += ["--eval-every", "2", "--eval-prompts", "3"]  # changes no number
    with launch(args, tmp_path, ranks=2, script=ROOT / "rlhf.py", torchrun=("--max-restarts", str(kills))) as run:
        ended = run.end()
    assert ended.exit_code == 0, ended.err
    assert ended.out.count("resumed from: deadly/checkpoints/step-000000") == kills
    calm, deadly = tmp_path / "calm", tmp_path / "deadly"
    assert scores_of(deadly) == scores_of(calm) and tickets_of(deadly) == tickets_of(calm)
    assert sorted(ticket for of in tickets_of(calm).values() for ticket in of) == [*range(2 * steps)]
    assert samples_of(deadly) == samples_of(calm)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (deadly, calm))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    metrics = [json.loads(line) for line in (calm / "metrics.jsonl").read_text().splitlines()]
    assert max(record["staleness_max"] for record in metrics) in (2, 3)
    saved = [read_extra(path)["rollouts"] for path in sorted((deadly / "checkpoints").iterdir())]
    assert any(tokens > 0 and not done for each in saved for of in each["states"].values() for tokens, done, *_ in of)
    assert not saved[-1]["queue"]["begun"]


@pytest.mark.slow
def test_a_run_resumes_under_another_plan(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "even.py").write_text("def reward(prompt, response, answer):\n    return len(set(response)) % 2\n")
    small = [*SMALL, "--reward-function", "even.py:reward", "--eval-every", "2", "--eval-prompts", "4"]
    small += ["--eval-samples", "2", "--keep-best", "--keep-checkpoints", "1"]
    first = [*small, "--steps", "2", "--output", "run", "--checkpoint-every", "1", "--sp-ulysses", "2"]
    ranks.run(run_here, 2, "rlhf", first, tmp_path)
    again = [*small, "--steps", "4", "--output", "run", "--resume", "auto", "--plan", "separation", *OFFLOADING, *TILES]
    ended = ranks.run(run_here, 2, "rlhf", again, tmp_path)[0]
    assert "resumed from: run/checkpoints/step-00000002" in ended.out, ended.err
    assert [step for step, _, _ in scores_of(tmp_path / "run")] == [1, 2, 3, 4]
    lengths = read_lengths(tmp_path / "run")
    assert len(lengths.prompts) == len(lengths.responses) and lengths.group_size > 1 and min(lengths.responses) > 0
    records = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
    scores = {record["step"]: record["eval/score"] for record in records if "eval/score" in record}
    assert list(scores) == [2, 4]
    best = max((2, 4), key=lambda step: scores[step])  # the first of equal ones
    assert f"best: run/best, of step {best}, eval score {scores[best]:.4g}" in ended.out
    kept = {int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {best, 4}
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best")
