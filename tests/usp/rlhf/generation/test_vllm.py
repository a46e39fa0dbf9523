"""The real vLLM as rollout engine, on CPUs (.ci/vllm): greedy responses are those of our own decoding."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from usp.data.tokenizer import BYTE_EOS, BYTE_VOCAB
from usp.hf.models import empty_model, materialise
from usp.hf.weights import initialise

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
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
}
TRAIN_U2_R2 = {"ranks": "0-3", "ulysses": 2, "ring": 2, "zero": 3}
TRAIN_TP2_PP2 = {"ranks": "0-3", "tp": 2, "pp": 2, "zero": 1, "tp_sequence_parallel": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama, u2 r2, engine of tp 2": ("llama", TRAIN_U2_R2, {"ranks": "0-3", "tp": 2}),
    "qwen2, tp2 pp2, engines of tp 1": ("qwen2", TRAIN_TP2_PP2, {"ranks": "0-3"}),
    "llama, ranks of its own": ("llama", {"ranks": "0-1", "ulysses": 2, "zero": 3}, {"ranks": "2-3", "tp": 2}),
}
REWARD = """
def odd(prompt, response, answer):
    data = response.encode("utf-8", "replace")
    return sum(byte % 2 for byte in data) / (1 + len(data))
"""


@pytest.mark.parametrize("name", CASES)
def test_greedy_responses_are_those_of_our_own_decoding(name: str, tmp_path: Path) -> None:
    family, train, generate = CASES[name]
    model: Any = empty_model(FAMILIES[family])
    materialise(model, torch.device("cpu"))
    initialise(model, 0)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    inference = {key: value for key, value in train.items() if key not in ("zero", "tp_sequence_parallel")}
    calls = {
        "actor_generate": {**generate, "engine": "vllm"},
        "actor_train": train,
        "ref_inference": inference,
        "reward": {"ranks": generate["ranks"]},
        "advantages": {"ranks": generate["ranks"]},
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"name": "mine", "calls": calls}))
    options = {
        "model": str(tmp_path / "model"),
        "plan": str(tmp_path / "plan.yaml"),
        "reward_function": f"{tmp_path / 'reward.py'}:odd",
        "tokenizer": "bytes",
        "prompts": 4,
        "group_size": 2,
        "prompt_tokens": 64,
        "steps": STEPS,
        "learning_rate": 3e-3,
        "warmup_steps": 0,
        "eval_every": STEPS,
        "eval_prompts": 8,
        "eval_temperature": 0.0,
        "rollout_cache": CACHE,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(SCRIPT)]
    run = subprocess.run([*command, str(tmp_path), json.dumps(options), str(STEPS)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for moment in ("before", "after"):
        assert all(told[0][moment]["same"]) and told[0][moment]["same"], moment
        assert told[0][moment]["difference"] < 1e-4
    assert max(told[0]["drift"]) < 1e-4
    for freed in filter(None, (each["freed"] for each in told)):
        assert freed[0] > CACHE * 2**30 * 0.9 and freed[1] == 0
