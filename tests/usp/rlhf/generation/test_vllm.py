"""The real vLLM as rollout engine, on CPUs (.ci/vllm): greedy responses are those of our own decoding."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.e2e.processes import ROOT, Ended, Run
from tests.usp.rlhf.generation.vllm_server import vllm_server
from usp.data.tokenizer import BYTE_EOS, BYTE_VOCAB
from usp.hf.models import empty_model, materialise
from usp.hf.weights import initialise
from usp.rlhf.environments.ready_rewards import post
from usp.rlhf.served import WORKER

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="the package vllm is not installed: see .ci/vllm"
)
SCRIPT, STEPS, CACHE = Path(__file__).with_name("vllm_case.py"), 5, 0.0625
SIZES: dict[str, Any] = {  # vLLM's attention on CPUs has head dims from 32 on
    "vocab_size": BYTE_VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": BYTE_EOS,
    "bos_token_id": None,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}
TIED = {"tie_word_embeddings": True}
# What an engine shares, packs or derives from weights as it loads them: heads that are embeddings, fused and packed
# linears with biases and without, experts, norms of heads, scaled embeddings, softcaps, windows.
DERIVED: dict[str, PretrainedConfig] = FAMILIES | {
    "llama, tied": LlamaConfig(**SIZES, **TIED, attention_bias=True, mlp_bias=True),
    "qwen2, tied": Qwen2Config(**SIZES, **TIED),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "qwen3, tied": Qwen3Config(**SIZES, **TIED, head_dim=32),
    "qwen3_moe, tied": Qwen3MoeConfig(**SIZES, **EXPERTS, **TIED, head_dim=32),
    "mixtral, tied": MixtralConfig(**SIZES, **TIED, num_local_experts=4),
    "gemma2, tied": Gemma2Config(**SIZES, head_dim=32, query_pre_attn_scalar=32, sliding_window=32),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "olmo2": Olmo2Config(**SIZES),
    "granite, tied": GraniteConfig(**SIZES, **TIED, embedding_multiplier=2.0, logits_scaling=3.0),
}
U2_R2 = {"ulysses": 2, "ring": 2, "zero": 3}
TP2_PP2 = {"tp": 2, "pp": 2, "zero": 1, "tp_sequence_parallel": True}
# the family and the algorithm; the degrees of training, on ranks 0-3 unless they say so; the engine's layout
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama, u2 r2, engine of tp 2": ("llama", "grpo", U2_R2, {"ranks": "0-3", "tp": 2}),
    "qwen2, ppo, tp2 pp2, engines of tp 1": ("qwen2", "ppo", TP2_PP2, {"ranks": "0-3"}),
    "llama, ppo, u2 r2, an engine of tp 2 on ranks of its own": ("llama", "ppo", U2_R2, {"ranks": "4-5", "tp": 2}),
    "qwen3_moe, tp2 pp2, engine of tp 2": ("qwen3_moe", "grpo", TP2_PP2, {"ranks": "0-3", "tp": 2}),
    "qwen3_moe, ppo, u2 r2, engines of tp 1": ("qwen3_moe", "ppo", U2_R2, {"ranks": "0-3"}),
    "qwen3, tied, ppo, u2 r2, engines of tp 1": ("qwen3, tied", "ppo", U2_R2, {"ranks": "0-3"}),
    "mixtral, tp2 pp2, engines of tp 1 on ranks of their own": ("mixtral", "grpo", TP2_PP2, {"ranks": "4-5"}),
}
ADAPTERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama, adapters, u2 r2, engine of tp 2": ("llama", "grpo", U2_R2, {"ranks": "0-3", "tp": 2}),
    "qwen3_moe, adapters, tp2 pp2, engine of tp 2": ("qwen3_moe", "ppo", TP2_PP2, {"ranks": "0-3", "tp": 2}),
}
CHANGES = {"llama, changed weights alone, u2 r2, engine of tp 2": CASES["llama, u2 r2, engine of tp 2"]}
STOPS = ",".join(map(str, range(0, BYTE_VOCAB, 6)))
TURNS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama, turns, u2 r2, engine of tp 2": ("llama", "grpo", U2_R2, {"ranks": "0-3", "tp": 2}),
    "qwen2, turns, ppo, u2, engines of tp 1 on ranks of their own": (
        *("qwen2", "ppo"),
        {"ranks": "0-1", "ulysses": 2, "zero": 3},
        {"ranks": "2-3"},
    ),
}
# by server, which runs ask one after another: with as many workers as the tp of their generate calls
SERVED: dict[str, dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]]] = {
    "llama, tp 2": {
        "whole weights, u2 r2": ("llama", "grpo", U2_R2, {"ranks": "0-3", "tp": 2}),
        "turns, changed weights alone, ppo, tp2 pp2": ("llama", "ppo", TP2_PP2, {"ranks": "0-3", "tp": 2}),
        "adapters, u2 r2": ("llama", "grpo", U2_R2, {"ranks": "0-3", "tp": 2}),
    },
    "qwen3_moe, tp 1": {"whole weights, ppo, tp2 pp2": ("qwen3_moe", "ppo", TP2_PP2, {"ranks": "0-3"})},
    "qwen3, tied, tp 1": {
        "whole weights, u2 r2": ("qwen3, tied", "grpo", U2_R2, {"ranks": "0-3"}),
        "changed weights alone, u2 r2": ("qwen3, tied", "grpo", U2_R2, {"ranks": "0-3"}),
        "adapters, u2 r2": ("qwen3, tied", "grpo", U2_R2, {"ranks": "0-3"}),
    },
}
ROLLOUTS = ["--skip-tokenizer-init", "--generation-config", "vllm", "--max-model-len", "512", "--block-size", "32"]
ROLLOUTS += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", WORKER]
EPISODES = {"max_new_tokens": 40, "stop_ids": STOPS, "max_observation_tokens": 192, "reward_failure": "zero"}
ENVIRONMENT = """
import json
import os

from usp.rlhf.environments.tools import Toolbox, ToolEnvironment


SCHEMA = {"name": "calculator", "parameters": {"properties": {"expression": {"type": "string"}}}}


class Lengths(ToolEnvironment):
    def __init__(self):
        toolbox = Toolbox([lambda expression: str(eval(expression))], [{"function": SCHEMA}])
        super().__init__(toolbox, None, chat=False)
        self.turns = 0

    def step(self, turn):
        self.turns += 1
        if self.turns == 2 and self._sample["prompt_index"] % 4 == 3:
            os._exit(7)  # a tool that takes its environment with it
        call = {"name": "calculator", "arguments": {"expression": f"{len(turn)} ** 3 + {self.turns}"}}
        answer, _, _ = super().step(f"<tool_call>{json.dumps(call)}</tool_call>")
        return answer.replace("tool_response", "r"), len(turn) % 3 / 2, self.turns == 5
"""
REWARD = """
def odd(prompt, response, answer):
    data = response.encode("utf-8", "replace")
    return sum(byte % 2 for byte in data) / (1 + len(data))
"""


def whole_model(family: str) -> Any:
    model = empty_model(DERIVED[family])
    materialise(model, torch.device("cpu"))
    initialise(model, 0)
    return model


def options_of(case: tuple[str, str, dict[str, Any], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Write the model, the reward and the plan of a case; return its options."""
    family, algorithm, degrees, generate = case
    whole_model(family).save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    train = {"ranks": "0-3"} | degrees
    inference = {key: value for key, value in train.items() if key not in ("zero", "tp_sequence_parallel")}
    calls = {
        "actor_generate": {"engine": "vllm", **generate},
        "actor_train": train,
        "ref_inference": inference,
        "reward": {"ranks": generate["ranks"]},
        "advantages": {"ranks": generate["ranks"]},
    }
    if algorithm == "ppo":
        calls |= {"actor_inference": inference, "critic_inference": inference, "critic_train": train}
    (folder / "plan.yaml").write_text(yaml.safe_dump({"name": "mine", "calls": calls}))
    return {
        "algorithm": algorithm,
        "model": str(folder / "model"),
        "plan": str(folder / "plan.yaml"),
        "reward_function": f"{folder / 'reward.py'}:odd",
        "tokenizer": "bytes",
        "prompts": 4,
        "group_size": 2 if algorithm == "grpo" else 0,
        "prompt_tokens": 64,
        "steps": STEPS,
        "learning_rate": 3e-3,
        "warmup_steps": 0,
        "rollout_cache": CACHE,
    }


@pytest.mark.parametrize("name", CASES | ADAPTERS | TURNS | CHANGES)
def test_greedy_responses_are_those_of_our_own_decoding(name: str, tmp_path: Path) -> None:
    told = compared(name, (CASES | ADAPTERS | TURNS | CHANGES)[name], tmp_path)
    for awake, asleep, resident in filter(None, (each["freed"] for each in told)):
        assert awake > CACHE * 2**30 * 0.9 and asleep == 0
        assert resident > awake * 0.9


@pytest.mark.parametrize("name", SERVED)
def test_greedy_responses_of_a_server_are_those_of_our_own_decoding(name: str, tmp_path: Path) -> None:
    """One server for runs that follow each other; and responses that stop and go on, where it has one worker."""
    cases = SERVED[name]
    family, _, _, generate = next(iter(cases.values()))
    tp, model = generate.get("tp", 1), whole_model(family)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()  # what it is started with does not matter
    model.save_pretrained(tmp_path / "other")
    whole = sum(weight.nbytes // (tp if weight.ndim > 1 else 1) for weight in model.parameters())
    with vllm_server(tmp_path / "other", tmp_path / "log", *ROLLOUTS, "--tensor-parallel-size", str(tp)) as server:
        for number, (case, (*others, rollouts)) in enumerate(cases.items()):
            (folder := tmp_path / f"{number}").mkdir()
            told = compared(case, (*others, {**rollouts, "engine": server.url}), folder, served=True)
            for first, *rest in (each["left"] for each in told[:tp]):
                if "adapters" in case:  # with the first factors
                    assert whole < first < 1.1 * whole and {*rest} == {first - whole}
                else:
                    assert first == whole
                    assert {*rest} == {whole} if "whole" in case else 0 < max(rest) <= whole
            assert not any(sent for each in told[tp:] for sent in each["left"])
        if tp == 1:
            alone("vllm_partial", tmp_path, family, server.url)


@pytest.mark.parametrize(
    "name", [name for name in DERIVED if name != "olmo2"]
)  # which vLLM has no class of its own for
def test_tokens_after_updates_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    alone("vllm_updates", tmp_path, name)


@pytest.mark.parametrize("name", [name for name in DERIVED if "tied" in name or "moe" in name or name == "olmo2"])
def test_tokens_of_a_server_after_updates_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """And it is taken for a server of the policy, also where its files repeat a head that is the embedding."""
    model = whole_model(name)
    model.save_pretrained(tmp_path / "served")
    if "tied" in name and "gemma2" not in name:  # of which vLLM takes no head
        file = tmp_path / "served" / "model.safetensors"
        tensors = load_file(file)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    with vllm_server(tmp_path / "served", tmp_path / "log", *ROLLOUTS) as server:
        alone("vllm_updates", tmp_path, name, server.url)


def test_a_cache_that_is_too_small_is_named_by_its_flag(tmp_path: Path) -> None:
    before = {*Path("/dev/shm").glob("*-cpushm_*")}
    case = ("llama", "grpo", {"ranks": "0-1", "ulysses": 2}, {"ranks": "0-1", "tp": 2})
    options = options_of(case, tmp_path) | {"rollout_cache": 2e-5, "output": "run", "dtype": "float32"}
    flags = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    with Run(flags, tmp_path, ranks=2, script=ROOT / "rlhf.py") as run:
        ended = run.end()
    assert ended.exit_code != 0 and "GiB has no room for the longest sequence, of 72 tokens" in ended.err
    assert {*Path("/dev/shm").glob("*-cpushm_*")} <= before


def compared(
    name: str, case: tuple[str, str, dict[str, Any], dict[str, Any]], tmp_path: Path, served: bool = False
) -> list[Any]:
    """Run a case, compare its tokens, log-probabilities and bytes; return what its ranks wrote."""
    adapters, changes, turns = (word in name for word in ("adapters", "changed weights", "turns"))
    ranks = 6 if case[3]["ranks"].startswith("4") else 4
    options = options_of(case, tmp_path) | {"eval_every": STEPS, "eval_prompts": 8, "eval_temperature": 0.0}
    options |= {"lora_rank": 4} if adapters else {"delta_updates": changes}
    if served:
        del options["rollout_cache"]
    if turns:
        (tmp_path / "lengths.py").write_text(ENVIRONMENT)
        del options["reward_function"]
        options |= EPISODES | {"environment": f"{tmp_path / 'lengths.py'}:Lengths"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    run = subprocess.run([*command, str(tmp_path), json.dumps(options), str(STEPS)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for moment in ("before", "after"):
        assert all(told[0][moment]["same"]) and told[0][moment]["same"], moment
        assert told[0][moment]["difference"] < 1e-4
        if turns:  # two of eight prompts have an environment that dies, and no other episode is part of that
            answered = told[0][moment]["answered"]
            assert 4 * answered.count(0) == len(answered) and max(answered) == 5, answered
            assert told[0][moment]["failures"] == answered.count(0)
    assert max(told[0]["drift"]) < 1e-4
    if changes:  # with their numbers
        assert all(received <= 1.001 * minimum for each in told for received, minimum in each["moved"])
    else:
        assert all(received == minimum for each in told for received, minimum in each["moved"])
    assert sum(received for each in told for received, _ in each["moved"]) > 0
    return told


def alone(script: str, tmp_path: Path, *engine: str) -> None:
    """Run a script beside this file, in which an engine decodes in one process."""
    command = [sys.executable, "-m", f"tests.usp.rlhf.generation.{script}", str(tmp_path / "store"), *engine]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr[-4000:]


def test_a_response_goes_on_with_its_tokens_and_the_weights_at_hand(tmp_path: Path) -> None:
    alone("vllm_partial", tmp_path, "llama")


# How an engine ends: the degrees of training, its layout, the rank that it dies on, options. A step has a checkpoint by
# its third call; by its sixth, where it is two steps ahead.
U2 = {"ranks": "0-1", "ulysses": 2, "zero": 3}
DEATHS: dict[str, tuple[dict[str, Any], dict[str, Any], int, dict[str, Any]]] = {
    "killed beside training": (U2, {"ranks": "0-1", "tp": 2}, 1, {}),
    "killed on ranks of its own": (U2, {"ranks": "2"}, 2, {}),
    "raising on ranks of its own": (U2, {"ranks": "2-3", "tp": 2}, 3, {}),
    "killed in partial rollouts": (
        U2,
        {"ranks": "0"},
        0,
        {
            "plan": "separation",
            "rollout_engine": "vllm",
            "staleness": 2,
            "partial_rollouts": True,
            "stop_ids": STOPS,
            "steps": 6,
        },
    ),
}
DIES = """
import os, signal
from itertools import count
from usp.rlhf.generation.vllm import VllmEngine

def dying(self, *args, call=VllmEngine._decode_all, calls=count(1)):
    if os.environ["RANK"] == os.environ.get("DEADLY") and next(calls) == int(os.environ["DEADLY_CALL"]):
        if "killed" in os.environ["DEATH"]:
            os.kill(os.getpid(), signal.SIGKILL)
        raise IndexError("no such block")
    return call(self, *args)

VllmEngine._decode_all = dying
"""


@pytest.mark.parametrize("name", DEATHS)
def test_an_engine_that_dies_is_named_and_the_run_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = f"{'[0-9a-f]' * 16}-*-cpushm_*"  # of engines; those of servers begin with a port
    others = {*Path("/dev/shm").glob(segments)}
    train, generate, rank, more = DEATHS[name]
    options = options_of(("llama", "grpo", train, generate), tmp_path) | {"steps": 4, "checkpoint_every": 1} | more
    ranks = 1 + max(int(of["ranks"][-1]) for of in (train, generate))
    (tmp_path / "reward.py").write_text(DIES + REWARD)
    given = {f"--{key.replace('_', '-')}": value for key, value in options.items()}
    flags = [text for flag, value in given.items() for text in ([flag] if value is True else [flag, str(value)])]

    def ended(output: str, *more: str) -> Ended:
        args = [*flags, "--dtype", "float32", "--output", output, *more]
        with Run(args, tmp_path, ranks=ranks, script=ROOT / "rlhf.py") as run:
            return run.end()

    def steps(output: str) -> list[Any]:
        records = map(json.loads, (tmp_path / output / "metrics.jsonl").read_text().splitlines())
        return [(record["step"], record["score"], record["actor/loss"]) for record in records]

    calm = ended("calm")
    assert calm.exit_code == 0, calm.err
    with monkeypatch.context() as dies:
        dies.setenv("DEADLY", str(rank))
        dies.setenv("DEATH", name)
        dies.setenv("DEADLY_CALL", "6" if "partial" in name else "3")
        dead = ended("deadly")
    said = f"the rollout engine vLLM of ranks {generate['ranks']} for actor_generate "
    said += f"died on rank {rank} while it decoded" if "killed" in name else f"failed on rank {rank} while it decoded: "
    said += "" if "killed" in name else "IndexError: no such block"
    cause = dead.err.partition("Root Cause")[2]  # of torchrun's summary
    assert dead.exit_code != 0 and f"rank      : {rank} " in cause and said in cause, dead.err
    resumed = ended("deadly", "--resume", "auto")
    assert resumed.exit_code == 0 and "resumed from: deadly/checkpoints/step-0000000" in resumed.out, resumed.err
    assert steps("deadly") == steps("calm") and len(steps("calm")) == options["steps"]
    assert {*Path("/dev/shm").glob(segments)} <= others, "shared memory of engines that are gone"


def test_a_server_that_is_killed_is_named_and_the_run_resumes_with_another(tmp_path: Path) -> None:
    whole_model("llama").save_pretrained(tmp_path / "served")

    def begin(output: str, url: str, *more: str, **others: Any) -> Run:
        options = options_of(("llama", "grpo", U2, {"ranks": "0-1", "engine": url}), tmp_path)
        options |= {"steps": 4, "checkpoint_every": 1, "output": output, "dtype": "float32"} | others
        del options["rollout_cache"]
        flags = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
        return Run([*flags, *more], tmp_path, ranks=2, script=ROOT / "rlhf.py")

    def steps(output: str) -> list[Any]:
        file = tmp_path / output / "metrics.jsonl"
        records = map(json.loads, file.read_text().splitlines() if file.exists() else ())
        return [(record["step"], record["score"], record["actor/loss"]) for record in records]

    with vllm_server(tmp_path / "served", tmp_path / "log", *ROLLOUTS) as server:
        with begin("calm", server.url) as run:
            calm = run.end()
        assert calm.exit_code == 0, calm.err
        ahead = {"plan": "separation", "rollout_engine": server.url, "staleness": 2, "stop_ids": STOPS}
        with begin("ahead", server.url, "--partial-rollouts", **ahead) as run:
            partial = run.end()
        assert partial.exit_code == 0 and len(steps("ahead")) == 4, partial.err
        lags = [json.loads(line)["staleness_max"] for line in (tmp_path / "ahead/metrics.jsonl").open()]
        assert max(lags) > 0, "no token is of earlier weights"
        with begin("deadly", server.url) as run:
            until = time.monotonic() + 200
            while len(steps("deadly")) < 2 and time.monotonic() < until:
                time.sleep(0.05)
            server.kill()
            dead = run.end()
    assert dead.exit_code != 0 and f"the rollout server {server.url} for actor_generate failed on rank" in dead.err
    with (
        vllm_server(tmp_path / "served", tmp_path / "log", *ROLLOUTS) as server,
        begin("deadly", server.url, "--resume", "auto") as run,
    ):
        resumed = run.end()
    assert resumed.exit_code == 0 and "resumed from: deadly/checkpoints/step-0000000" in resumed.out, resumed.err
    assert steps("deadly") == steps("calm") and len(steps("calm")) == 4


def test_a_pool_loses_and_regains_servers(tmp_path: Path) -> None:
    """Of three servers one is killed, one replaced by one without the policy's weights, and one decodes a sequence at a
    time: responses of the likeliest tokens get the scores of a run on sound servers."""
    whole_model("llama").save_pretrained(tmp_path / "served")
    hold, flags = tmp_path / "hold", (*ROLLOUTS, "--logprobs-mode", "raw_logprobs")

    def begin(output: str, urls: list[str]) -> Run:
        options = options_of(("llama", "ppo", {"ranks": "0-1"}, {"ranks": "0-1", "engine": ",".join(urls)}), tmp_path)
        waits = f"\n    while os.path.exists({str(hold)!r}):\n        time.sleep(0.1)\n    data"
        (tmp_path / "reward.py").write_text("import os, time\n" + REWARD.replace("\n    data", waits, 1))
        options |= {"steps": 8, "prompts": 8, "output": output, "dtype": "float32", "top_k": 1}
        options |= {"max_new_tokens": 16}
        del options["rollout_cache"]
        args = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
        return Run([*args, "--delta-updates"], tmp_path, ranks=2, script=ROOT / "rlhf.py")

    def steps(output: str) -> list[Any]:
        file = tmp_path / output / "metrics.jsonl"
        records = map(json.loads, file.read_text().splitlines() if file.exists() else ())
        return [[record[key] for key in ("step", "score", "actor/loss")] for record in records]

    def reached(step: int) -> None:
        until = time.monotonic() + 300
        while len(steps("disturbed")) < step and time.monotonic() < until:
            time.sleep(0.05)

    with (
        vllm_server(tmp_path / "served", tmp_path / "log0", *flags) as killed,
        vllm_server(tmp_path / "served", tmp_path / "log1", *flags) as replaced,
        vllm_server(tmp_path / "served", tmp_path / "log2", *flags, "--max-num-seqs", "1") as slow,
    ):
        urls = [server.url for server in (killed, replaced, slow)]
        with begin("calm", urls) as run:
            calm = run.end()
        assert calm.exit_code == 0, calm.err
        with begin("disturbed", urls) as run:
            reached(2)
            killed.kill()
            reached(4)
            hold.touch()
            replaced.kill()
            with vllm_server(tmp_path / "served", tmp_path / "log3", *flags, url=replaced.url):
                hold.unlink()
                disturbed = run.end()
                version = post(f"{replaced.url.removesuffix('/v1')}/weight_info", None, 10)["weight_version"]
    assert disturbed.exit_code == 0 and f"the rollout server at {killed.url} failed" in disturbed.err, disturbed.err
    assert version.endswith("-8"), "it has not come back"
    assert torch.tensor(steps("disturbed")).allclose(torch.tensor(steps("calm")), rtol=1e-4, atol=1e-6)
