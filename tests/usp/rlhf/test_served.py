"""Teachers and references behind HTTP: the same steps as with the model in the run, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.harness.json_api import JsonHandler
from tests.harness.ranks import RankPool
from tests.usp.rlhf.generation.vllm_server import vllm_server
from tests.usp.rlhf.test_supervised import metrics_of
from tests.usp.tiny import drawn_model
from usp.hf.tokenizers import load_tokenizer
from usp.rlhf.checkpoints import RlhfState, resume_violations
from usp.rlhf.config import RlhfConfig
from usp.rlhf.prepare import prepare
from usp.rlhf.served import Model
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch

VOCAB = 257
SIZES: dict[str, Any] = {  # vLLM's attention on CPUs has head dims from 32 on
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
    "bos_token_id": None,
}
CONFIG = RlhfConfig(
    steps=2,
    warmup_steps=0,
    sft_steps=0,
    learning_rate=1e-3,
    max_new_tokens=8,
    prompts=4,
    group_size=2,
    device="cpu",
    dtype="float32",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a teacher, the tokenizer of both, and prompts."""
    folder = tmp_path_factory.mktemp("models")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate([*alphabet, "</s>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, seed in (("policy", 0), ("teacher", 1)):
        model = drawn_model(LlamaConfig(**SIZES), seed)
        model.save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder / name)
    rows = [{"prompt": f"Question {number} of {'x' * number}:", "answer": str(number)} for number in range(12)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


class Handler(JsonHandler):
    """What is used of the API, with the log-probabilities of transformers. broken: requests that fail first."""

    broken = 0
    server: Any

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "teacher"}]})

    def do_POST(self) -> None:
        asked = self.asked()
        if self.path == "/tokenize":
            self.reply({"tokens": self.server.tokenizer.encode(asked["prompt"]).tolist()})
        elif Handler.broken:
            Handler.broken -= 1
            self.send_error(503, "loading")
        else:
            assert self.path == "/v1/completions" and asked["model"] == "teacher" and asked["prompt_logprobs"] == 0
            ids = torch.tensor([asked["prompt"]])
            with torch.no_grad():
                rows = self.server.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
            told = [{str(token): {"logprob": float(row)}} for token, row in zip(asked["prompt"][1:], rows, strict=True)]
            self.reply({"choices": [{"text": "", "prompt_logprobs": [None, *told]}]})


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.model, server.tokenizer = drawn_model(LlamaConfig(**SIZES), 1), load_tokenizer(str(folder / "teacher"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def of(folder: Path, **changes: Any) -> RlhfConfig:
    files = {"data": str(folder / "questions.jsonl"), "model": str(folder / "policy")}
    return replace(CONFIG, **files, tokenizer=str(folder / "policy"), **changes)


def same_steps(ranks: RankPool, folder: Path, tmp_path: Path, url: str, tolerance: float) -> None:
    """Check that a teacher and a reference at `url` give to two ranks the steps of those in a run on one."""
    for algorithm, name, key in (("distillation", "models", "teacher_kl"), ("grpo", "ref", "actor/ref_kl")):
        found = []
        for number, (size, source) in enumerate([(1, str(folder / "teacher")), (2, url)]):
            value = f"teacher={source}" if name == "models" else source
            config = of(folder, algorithm=algorithm, output=str(tmp_path / f"{algorithm}{number}"), **{name: value})
            found.append(ranks.run(metrics_of, size, replace(config, sp_ulysses=size), 2)[0])
        for wanted, step in zip(*found, strict=True):
            for each in (key, "actor/loss", "actor/grad_norm"):
                assert step[each] == pytest.approx(wanted[each], rel=tolerance, abs=tolerance), (algorithm, each)
        assert found[0][0][key] > 0.01


@pytest.mark.slow
def test_a_served_model_gives_the_steps_of_one_in_the_run(
    ranks: RankPool, folder: Path, server: str, tmp_path: Path
) -> None:
    same_steps(ranks, folder, tmp_path, server, 1e-5)


def test_requests_are_tried_again_and_named(server: str) -> None:
    tokens, model = torch.arange(9), Model(server, pause=0.01).named()
    wanted = model.logprobs(tokens)
    Handler.broken = 2
    assert torch.equal(model.logprobs(tokens), wanted)
    Handler.broken = 3
    with pytest.raises(
        ConnectionError, match=rf"the model at {server} failed 3 times: OSError: HTTP Error 503: loading"
    ):
        model.logprobs(tokens)


@pytest.mark.slow
def test_what_a_server_cannot_do_is_refused(folder: Path, server: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    distils = {"algorithm": "distillation", "models": f"teacher={server}"}
    for changes, said in (
        (
            distils | {"temperature": 0.5},
            "--models: teacher=.*: a server's log-probabilities are at temperature 1, not 0.5",
        ),
        (
            distils | {"models": "teacher=http://127.0.0.1:9/v1"},
            "teacher=http://127.0.0.1:9/v1: the model at .* failed",
        ),
        (
            {"ref": server, "options": "kl=0"},
            "--ref: ref=.*: a server gives log-probabilities, and the role ref has no",
        ),
        ({"models": f"judge={server}"}, "--models: judge=.*, and the role judge has no calls"),
        ({"ref": server, "ref_update_every": 2}, "--ref-update-every = 2 needs one call of the role ref"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            prepare(replace(of(folder, output=str(tmp_path / "run")), **changes), Launch())
    monkeypatch.setattr(Model, "tokenize", lambda model, text: [1, 2, 3])
    with pytest.raises(ConfigurationError, match="teacher has another tokenizer than the policy"):
        prepare(of(folder, output=str(tmp_path / "run"), **distils), Launch())


def test_a_run_goes_on_with_servers_elsewhere(folder: Path) -> None:
    here = of(folder, ref="http://127.0.0.1:8000/v1", models="teacher=http://a:1/v1,judge=models/judge")
    saved = RlhfState(1, 8, {}, asdict(here))
    there = replace(here, ref="https://b/v1", models="teacher=http://b:2/v1,judge=models/judge")
    assert not resume_violations(saved, there)
    for changes in ({"ref": "model"}, {"models": "teacher=http://b:2/v1,judge=models/other"}, {"ref": ""}):
        (said,) = resume_violations(saved, replace(there, **changes))
        assert "must not change on resume" in said and next(iter(changes)) in said


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the package vllm is not installed: see .ci/vllm")
@pytest.mark.slow
def test_vllm_serves_a_teacher(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    with vllm_server(folder / "teacher", tmp_path / "log", "--max-model-len", "128") as server:
        same_steps(ranks, folder, tmp_path, server.url, 1e-4)
