"""Rollouts by a server, here a stand-in for vLLM's: steps are those of our own decoding, errors are named.

The stand-in has the interface of a vLLM server in development mode. Its workers are `Worker`s, which receive weights as
vLLM's do, and it decodes with transformers and the noise of our own decoding.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from http.server import ThreadingHTTPServer
from io import BytesIO
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from tests.harness.json_api import JsonHandler
from tests.harness.ranks import RankError, RankPool
from tests.usp.rlhf.test_reference import begun
from tests.usp.tiny import SIZES, drawn_model
from usp.data.tokenizer import BYTE_VOCAB
from usp.hf.disk import disk_layout, stored_tensors
from usp.hf.routers import ChoiceRecorder
from usp.rlhf.config import RlhfConfig
from usp.rlhf.dry_run import CallRun, dry_run_calls
from usp.rlhf.environments import ready_rewards
from usp.rlhf.generation.decoding import sample, sequence_key, token_keys
from usp.rlhf.generation.vllm import ServedEngine, most_drift
from usp.rlhf.graph import Generate
from usp.rlhf.prepare import prepare
from usp.rlhf.runtime.executor import Executor
from usp.rlhf.served import (
    Requests,
    RolloutServer,
    Values,
    WeightPiece,
    Worker,
    all_renewed,
    received_pieces,
    send_pieces,
    server_for,
)
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch

OF_BYTES = SIZES | {"vocab_size": BYTE_VOCAB, "num_key_value_heads": 4}
MODEL = LlamaConfig(**OF_BYTES)
TIED = LlamaConfig(**OF_BYTES, tie_word_embeddings=True)
EXPERTS = Qwen3MoeConfig(**OF_BYTES, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
RUN, LOAD = Executor.run, ServedEngine.load
KEYS = token_keys(BYTE_VOCAB)
CONFIG = RlhfConfig(
    algorithm="grpo",
    tokenizer="bytes",
    max_new_tokens=6,
    steps=2,
    warmup_steps=0,
    sft_steps=0,
    learning_rate=3e-3,
    prompts=4,
    group_size=2,
    zero=1,
    device="cpu",
    dtype="float32",
)
APART: dict[str, Any] = {"plan": "separation", "rollout": "tp=2", "sp_ulysses": 2}
# ranks, tensor-parallel size of the server, options of the run
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one rank": (1, 1, {}),
    "two data-parallel ranks": (2, 1, {}),
    "tp 2 on ranks of its own": (4, 2, APART),
}


class Packing:
    """vLLM's way with linears on CPUs: what decodes is a copy in a layout of its own, made where weights are loaded."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: torch.nn.functional.linear(x, weight, layer.bias)


def packed(model: Any) -> Any:
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.quant_method = Packing()
            layer.quant_method.process_weights_after_loading(layer)
            layer.forward = lambda x, layer=layer: layer.cpu_linear(x)
    return model


def loaded(model: Any, values: dict[str, Tensor]) -> None:
    """Load tensors of files, all of them, and pack the layers that they are of."""
    own = stored_tensors(model)
    for tensor in chain(*disk_layout(model, {name: x.shape for name, x in own.items()}).values()):
        with torch.no_grad():
            own[tensor.parameter][tensor.box.slices()] = values[tensor.name].view(tensor.box.sizes)
    for name in own:
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, torch.nn.Linear):
            layer.quant_method.process_weights_after_loading(layer)


class StandIn(Worker):
    """Loads weights if it is the only one, else `Stub` does of all."""

    device = torch.device("cpu")

    def __init__(self, server: Stub, rank: int) -> None:
        self.rank, self.server = rank, server
        self.held: dict[str, Tensor] = {}
        own = server.model if server.tp == 1 else torch.nn.Linear(1, 1)
        self.model_runner = SimpleNamespace(get_model=lambda: own)
        of_model = {
            "dtype": server.model.dtype,
            "max_model_len": 256,
            "generation_config": "vllm",
            "quantization": None,
            "hf_config": server.model.config,
        }
        of_model |= {"logprobs_mode": "processed_logprobs"}
        told = SimpleNamespace(enable_return_routed_experts=server.recorder is not None)
        parallel = {"tensor_parallel_size": server.tp, "world_size_across_dp": server.tp}
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(**of_model),
            parallel_config=SimpleNamespace(**parallel, enable_expert_parallel=False),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            aux_output_config=told,
        )

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        for number, (name, value) in enumerate(weights_iterator):
            self.held[name] = value
            if self.server.breaks == "worker" and number == 3:
                raise IndexError("no such block")
        if self.server.tp == 1:
            other = self.server.breaks == "other"
            loaded(self.server.model, {name: x.flip(0) if other else x for name, x in self.held.items()})


class Stub(ThreadingHTTPServer):
    """breaks: what goes wrong. fails: how the next requests for tokens fail. sizes: bytes that arrived, by update.
    dies, forgets: after how many updates, in the middle of a request or at its start. steady: noise is by place."""

    daemon_threads = True

    def __init__(self, tp: int, dtype: torch.dtype, config: PretrainedConfig, routed: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tp, self.version, self.paused = tp, "default", False
        self.model = packed(drawn_model(config, 5).to(dtype))
        self.recorder, self.forward = ChoiceRecorder(self.model) if routed else None, threading.Lock()
        self.breaks, self.fails, self.sizes, self.asked = "", list[str](), list[int](), list[dict[str, Any]]()
        self.updates = list[list[dict[str, Tensor]]]()
        self.dies, self.forgets, self.dead, self.steady = 0, 0, False, False
        self.workers = [StandIn(self, rank) for rank in range(tp)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def forget(self) -> None:
        """Be another server at the same URL, which was started a moment ago."""
        self.version, self.forgets = "default", 0
        for worker in self.workers:
            worker.held, worker._usp_given = {}, ("", {})
        with torch.no_grad():
            loaded(self.model, {name: -x for name, x in stored_tensors(self.model).items()})

    def die(self) -> None:
        if not self.dead:
            self.dead = True
            self.shutdown()
            self.server_close()

    def rpc(self, method: str, args: dict[str, Any]) -> list[Any]:
        with ThreadPoolExecutor(self.tp) as pool:
            found = list(pool.map(lambda worker: getattr(worker, method)(**args), self.workers))
        if method == "usp_receive":
            assert self.paused
            for worker in self.workers if self.breaks == "forgotten" else ():
                worker._usp_given = ("another run's", {})
            parts = [worker.held for worker in self.workers]
            self.updates.append([{name: x.clone() for name, x in held.items()} for held in parts])
            self.sizes.append(sum(int((~x.isnan()).sum()) * x.itemsize for held in parts for x in held.values()))
            whole = dict(parts[0])
            for name, value in whole.items():
                for part in parts[1:]:
                    whole[name] = value = value.where(~value.isnan(), part[name])
                assert not value.isnan().any(), name
            if self.tp > 1:
                loaded(self.model, whole)
        return found


@contextmanager
def stub(
    tp: int = 1, dtype: torch.dtype = torch.float32, config: PretrainedConfig = MODEL, routed: bool = False
) -> Iterator[Stub]:
    server = Stub(tp, dtype, config, routed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.die()


class Handler(JsonHandler):
    server: Stub

    def handle(self) -> None:
        if not self.server.dead:
            super().handle()

    def do_GET(self) -> None:
        told = {"/v1/models": {"data": [{"id": "policy"}]}, "/weight_info": {"weight_version": self.server.version}}
        self.reply(told[self.path])

    def do_POST(self) -> None:
        asked = self.asked()
        path, _, query = self.path.partition("?")
        if path == "/collective_rpc":
            try:
                self.reply({"results": self.server.rpc(asked["method"], asked.get("kwargs", {}))})
            except Exception as error:
                self.send_error(500, f"{type(error).__name__}: {error}")
        elif path in ("/pause", "/resume"):
            assert path == "/resume" or query == "mode=abort&clear_cache=true"
            self.server.paused = path == "/pause"
            self.reply({})
        elif path == "/update_weight_version":
            self.server.version = "default" if self.server.breaks == "restarted" else asked["new_version"]
            self.reply({})
        else:
            assert path == "/v1/completions" and asked["model"] == "policy" and not self.server.paused
            self.complete(asked)

    def complete(self, asked: dict[str, Any]) -> None:
        with self.server.forward:
            self.server.asked.append(asked)
            if 0 < self.server.forgets == len(self.server.sizes):
                self.server.forget()
        fails = self.server.fails.pop(0) if self.server.fails else ""
        if fails == "503":
            self.send_error(503, "loading")
            return
        if streams := asked["stream"]:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        assert asked["return_token_ids"] and asked["ignore_eos"] and asked["logprobs"] == 0
        work = Generate(temperature=asked["temperature"], top_k=asked["top_k"], top_p=asked["top_p"])
        ids, logprobs = list(asked["prompt"]), []
        for number in range(asked["max_tokens"]):
            if number == 2 and 0 < self.server.dies == len(self.server.sizes):
                time.sleep(0.5)  # until the tokens before are read
                self.server.die()
            if (number == 2 and fails == "cut") or self.server.dead:
                return
            if self.server.breaks == "slow":
                time.sleep(0.005)
            logits = self.logits(ids)[:, -1].float()
            key = sequence_key(asked["seed"] + number, 0) if self.server.steady else sequence_key(asked["seed"], number)
            token, logprob = sample(logits, torch.tensor([key]), KEYS, work)
            ids.append(int(token))
            logprobs.append(None if fails == "nan" else float(logprob))
            stops = ids[-1] in asked["stop_token_ids"]
            end = "stop" if stops else "length" if number + 1 == asked["max_tokens"] else None
            choice = {"token_ids": ids[-1:], "logprobs": {"token_logprobs": logprobs[-1:]}, "finish_reason": end}
            if streams:
                line = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            if stops:
                break
        if streams:
            self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        choice |= {"token_ids": ids[len(asked["prompt"]) :], "logprobs": {"token_logprobs": logprobs}}
        self.reply({"choices": [choice | {"routed_experts": self.experts(ids[:-1])}]})

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        with self.server.forward:
            return self.server.model(torch.tensor([ids])).logits

    def experts(self, ids: list[int]) -> str:
        """What tokens choose, as vLLM writes it."""
        recorder, config, file = self.server.recorder, self.server.model.config, BytesIO()
        assert recorder is not None
        with self.server.forward, torch.no_grad():
            self.server.model(torch.tensor([ids]))
            chosen = recorder.take(len(ids)) - 1
        if self.server.breaks == "experts":
            chosen = chosen.roll(1, 0)
        np.save(file, chosen.view(len(ids), config.num_hidden_layers, -1).numpy().astype(np.uint8))
        return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    drawn_model(MODEL).save_pretrained(folder / "model")
    drawn_model(TIED).save_pretrained(folder / "tied")
    drawn_model(EXPERTS).save_pretrained(folder / "experts")
    rows = [{"prompt": f"Question {number} of {'x' * number}:", "answer": str(number)} for number in range(12)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "reward.py").write_text(
        "def odd(prompt, response, answer):\n    return sum(map(ord, response)) % 5 + len(response) / 8\n"
    )
    (folder / "lengths.py").write_text(
        "class Lengths:\n    def reset(self, sample):\n        self.turns = 0\n\n    def step(self, turn):\n"
        "        self.turns += 1\n        return str(len(turn) ** 3), len(turn) % 3 / 2, self.turns == 3\n"
    )
    return folder


def of(folder: Path, output: Path, **changes: Any) -> RlhfConfig:
    files = {"data": str(folder / "questions.jsonl"), "model": str(folder / "model")}
    files |= {"reward_function": f"{folder / 'reward.py'}:odd", "output": str(output)}
    return replace(CONFIG, **files | changes)


def steps_of(config: RlhfConfig) -> list[dict[str, Any]]:
    moved: list[tuple[int, int]] = []
    left: list[int] = []

    def moving(self: Executor, *others: Any) -> Any:
        result = RUN(self, *others)
        events = [] if result is None else result.events
        updates = [event for event in events if event.kind == "reallocate" and "generate" in event.name]
        moved.extend((event.received, event.minimum) for event in updates)
        return result

    def loading(self: ServedEngine, pieces: Any) -> int:
        left.append(LOAD(self, pieces))
        return left[-1]

    at_once = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)  # before a request is tried again
    with (
        patch.object(Executor, "run", moving),
        patch.object(ServedEngine, "load", loading),
        patch.object(ready_rewards, "time", at_once),
    ):
        trainer = begun(config)
        steps = [trainer.step(number).metrics for number in range(1, config.steps + 1)]
        return [metrics | {"moved": moved, "left": left} for metrics in steps]


def same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for key in ("actor/loss", "actor/grad_norm", "score"):
            assert one[key] == pytest.approx(other[key], rel=1e-5, abs=2e-6), key
        assert one["logprob_difference_max"] < 1e-5
        assert all(received == minimum for received, minimum in one["moved"])


SAME = {"actor/loss", "actor/grad_norm", "score", "logprob_difference_max"}
Own = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def own(ranks: RankPool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Own:
    """Return the function from options to steps with our own decoding on one rank, which are run once."""

    @cache
    def steps(**options: Any) -> list[dict[str, Any]]:
        return ranks.run(steps_of, 1, of(folder, tmp_path_factory.mktemp("own"), **options))[0]

    return steps


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slow(but=1)
def test_steps_are_those_of_our_own_decoding(
    ranks: RankPool, folder: Path, own: Own, tmp_path: Path, name: str
) -> None:
    """And another server of the pool, one of whose workers fails in every update, is asked for nothing."""
    size, tp, options = LAYOUTS[name]
    stops = {"stop_ids": ",".join(map(str, range(0, BYTE_VOCAB, 9)))}
    wanted = own(**stops)
    with stub(tp) as server, stub(tp) as broken:
        broken.breaks = "worker"
        config = of(folder, tmp_path / "served", rollout_engine=f"{broken.url},{server.url}", **stops, **options)
        for found in ranks.run(steps_of, size, config):
            same(found, wanted)
        assert not broken.asked and not broken.sizes and broken.version == "default"
    model = drawn_model(MODEL)
    divided = [x.nbytes // (tp if x.ndim > 1 else 1) for x in model.parameters()]
    assert server.sizes == [tp * sum(divided)] * CONFIG.steps
    assert len(server.asked) == CONFIG.steps * CONFIG.prompts * CONFIG.group_size
    assert all(asked["stop_token_ids"] for asked in server.asked), "else it would decode what is thrown away"


@pytest.mark.slow
def test_a_head_that_is_the_embedding_is_that_of_each_update(
    ranks: RankPool, folder: Path, own: Own, tmp_path: Path
) -> None:
    """Of which an update has no tensor, and the server a copy in another layout."""
    tied: dict[str, Any] = {"model": str(folder / "tied"), "learning_rate": 3e-2}
    with stub(config=TIED) as server:
        (found,) = ranks.run(steps_of, 1, of(folder, tmp_path / "served", rollout_engine=server.url, **tied))
        assert all("lm_head.weight" not in update[0] for update in server.updates)
    same(found, own(**tied))


def test_no_weight_survives_that_an_update_leaves_out() -> None:
    untied = packed(drawn_model(MODEL))
    with pytest.raises(ValueError, match="no weights for the engine's lm_head"), all_renewed(untied):
        del untied.lm_head.weight  # as vLLM does, once it is packed
        untied.lm_head.quant_method = SimpleNamespace(process_weights_after_loading=lambda layer: None)
        loaded(untied.model, {name: torch.zeros(x.shape) for name, x in stored_tensors(untied.model).items()})
    embedding, norm = torch.nn.Embedding(3, 2), torch.nn.LayerNorm(2)
    with all_renewed(torch.nn.ModuleList([embedding, norm])), torch.no_grad():
        embedding.weight.zero_()
    assert not embedding.weight.any() and all(x.isnan().all() for x in norm.parameters())


def sent_by(found: list[list[dict[str, Any]]]) -> list[int]:
    """The bytes that all ranks sent to a server, by update."""
    return [sum(of_ranks) for of_ranks in zip(*filter(None, (steps[0]["left"] for steps in found)), strict=True)]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.mark.slow
def test_workers_are_sent_what_has_changed(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """Training and the two workers have other layouts; most weights keep their bits in a step."""
    updates, steps, left = [], [], []
    for delta in (False, True):
        with stub(2, torch.bfloat16) as server:
            options = APART | {"delta_updates": delta, "dtype": "bfloat16", "learning_rate": 1e-5}
            config = of(folder, tmp_path / f"{delta}", rollout_engine=server.url, **options)
            found = ranks.run(steps_of, 4, config)
        steps.append([[step[key] for key in ("actor/loss", "score")] for step in found[0]])
        left.append(sent_by(found))
        updates.append(server.updates)
    assert steps[0] == steps[1]
    for whole, changed in zip(*updates, strict=True):
        for one, other in zip(whole, changed, strict=True):
            assert one.keys() == other.keys() and all(torch.equal(bits(one[name]), bits(other[name])) for name in one)
    assert any(not torch.equal(bits(x), bits(updates[1][-1][0][name])) for name, x in updates[1][0][0].items())
    assert left[1][0] == left[0][0] > 0
    assert all(0 < changed < 0.6 * whole for whole, changed in zip(left[0][1:], left[1][1:], strict=True))


POOL: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "adapters": (torch.float32, {"lora_rank": 4, "lora_targets": "q_proj,down_proj", "learning_rate": 3e-2}),
    "changes": (torch.bfloat16, {"dtype": "bfloat16", "delta_updates": True, "learning_rate": 1e-5}),
}


@pytest.mark.parametrize("name", POOL)
@pytest.mark.slow(full=2)
def test_a_pool_loses_and_regains_servers(ranks: RankPool, folder: Path, tmp_path: Path, name: str) -> None:
    """Of three servers one is killed, one replaced by one without weights, one slow, for two data-parallel ranks: steps
    have the bits of a run whose servers are sound, and the replaced one alone is sent all weights again."""
    dtype, options = POOL[name]
    steps, left, asked = [], [], []
    for disturbed in (False, True):
        with stub(1, dtype) as killed, stub(1, dtype) as replaced, stub(1, dtype) as slow:
            servers = (killed, replaced, slow)
            for server in servers:
                server.steady = True
            if disturbed:
                killed.dies, replaced.forgets, slow.breaks = 2, 3, "slow"
            urls = ",".join(server.url for server in servers)
            config = of(folder, tmp_path / f"{disturbed}", rollout_engine=urls, steps=4, **options)
            found = ranks.run(steps_of, 2, config)
            updates = [len(server.sizes) for server in servers]
        steps.append([{key: x for key, x in each.items() if key in SAME} for each in found[0]])
        left.append(sent_by(found))
        asked.append([server.asked for server in servers])
        assert updates == ([2, 4, 4] if disturbed else [4, 4, 4])
    assert steps[0] == steps[1] and steps[0][0].keys() == SAME and all(asked[0])
    assert {each["max_tokens"] for each in chain(*asked[1])} == {CONFIG.max_new_tokens, CONFIG.max_new_tokens - 2}
    whole, *changes = (each // 3 for each in left[0])
    assert max(changes) < 0.6 * whole
    assert left[1] == [3 * whole, 3 * changes[0], 2 * changes[1], changes[2] + whole]


def test_an_episode_stays_and_others_go_to_the_least_loaded() -> None:
    loads = {"a": 2, "b": 1, "c": 1}
    assert server_for(loads, {}, "") == "b" and server_for(loads, {}, "a") == "a"
    assert server_for(loads, {"a": "lost", "b": "lost"}, "a") == "c"
    assert server_for(loads, {"c": "lost", "a": "lost", "b": "lost"}, "a") == "c", "that was lost first"


IN_TWO = [pytest.param("one rank", marks=pytest.mark.exhaustive), "tp 2 on ranks of its own"]


@pytest.mark.parametrize("name", IN_TWO)
@pytest.mark.slow
def test_workers_are_sent_adapters_alone(ranks: RankPool, folder: Path, own: Own, tmp_path: Path, name: str) -> None:
    size, tp, options = LAYOUTS[name]
    lora: dict[str, Any] = {"lora_rank": 4, "lora_targets": "q_proj,down_proj", "learning_rate": 3e-2}
    wanted = own(**lora)
    with stub(tp) as server:
        found = ranks.run(steps_of, size, of(folder, tmp_path / "served", rollout_engine=server.url, **lora | options))
    for steps in found:
        same(steps, wanted)
    of_layer = (32 + tp * 32) + (
        tp * 32 + 64
    )  # numbers of q_proj's factors on all workers, and of down_proj's, by rank
    factors = MODEL.num_hidden_layers * 4 * of_layer * 4
    assert sent_by(found) == [server.sizes[0] + factors, *[factors] * (CONFIG.steps - 1)]


@pytest.mark.parametrize("name", IN_TWO)
@pytest.mark.slow
def test_experts_of_a_server_are_replayed(ranks: RankPool, folder: Path, own: Own, tmp_path: Path, name: str) -> None:
    size, tp, options = LAYOUTS[name]
    replay: dict[str, Any] = {"model": str(folder / "experts"), "router_replay": True, "router_aux_loss_coef": 0.0}
    replay |= {"options": "mini_batches=2,old_logprobs=recompute", "stop_ids": ",".join(map(str, range(0, 384, 9)))}
    wanted = own(**replay)
    with stub(tp, config=EXPERTS, routed=True) as server:
        config = of(folder, tmp_path / "served", rollout_engine=server.url, **replay | options)
        for found in ranks.run(steps_of, size, config):
            same(found, wanted)
        server.breaks = "experts"
        (broken, *_), *_ = ranks.run(steps_of, size, replace(config, steps=1, output=str(tmp_path / "broken")))
        assert broken["logprob_difference_max"] > 1e-3
    with stub(config=EXPERTS) as server, pytest.raises(ConfigurationError, match="it needs --enable-return-routed"):
        prepare(replace(config, rollout_engine=server.url), Launch(0, size, local_world_size=size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.slow
def test_pieces_have_the_bits_that_were_sent(dtype: torch.dtype) -> None:
    """And their bytes are at most those of all values, after a hundred updates."""
    draw = torch.Generator().manual_seed(3)
    values = {f"{n}": torch.randn(size, generator=draw).to(dtype) for n, size in enumerate((0, 1, 63, 300, 70_000))}
    given: tuple[Values, Values] = ({}, {})
    nbytes = []
    for number in range(100):
        share = 1.0 if number % 10 == 9 else 0.3 ** (number % 10 + 1)
        for x in values.values():
            other = torch.rand(x.shape, generator=draw) < share
            x[other] = torch.randn(x.shape, generator=draw).to(dtype)[other]
        pieces = [WeightPiece(name, x.shape, x.shape, ((0, len(x)),), x) for name, x in values.items()]
        one, two = socket.socketpair()
        with one, two, ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send_pieces, {"worker": (one, True)}, pieces, given[0])
            found = {piece.name: piece.whole() for piece in received_pieces(two, given[1])}
            nbytes.append(sent.result()[0])
        assert all(torch.equal(bits(found[name]), bits(x)) for name, x in values.items()), number
    whole = sum(x.nbytes for x in values.values())
    assert nbytes[0] == whole == max(nbytes) and min(nbytes) < 0.01 * whole
    assert given[0].keys() == given[1].keys() == values.keys()


def evaluated(config: RlhfConfig) -> tuple[dict[str, float], list[list[int]]]:
    """The metrics of an evaluation, and its responses on rank 0."""
    trainer = begun(config)
    assert trainer.evaluator is not None
    metrics, samples = trainer.evaluator.run(0)
    responses = [] if samples is None else [each.tolist() for each in samples["tokens"]]
    return {key: value for key, value in metrics.items() if not key.endswith("seconds")}, responses


@pytest.mark.slow
def test_turns_go_on_and_stop_strings_end(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """At temperature 0, where noise does not matter. Turns on ranks of their own, and strings on one rank."""
    turns = {"environment": f"{folder / 'lengths.py'}:Lengths", "max_observation_tokens": 40}
    turns |= {"reward_function": RlhfConfig.reward_function, "stop_ids": ",".join(map(str, range(0, BYTE_VOCAB, 5)))}
    strings = {"stop": json.dumps([chr(code) for code in range(32, 80)])}
    for number, (options, name) in enumerate(((turns, "tp 2 on ranks of its own"), (strings, "one rank"))):
        size, tp, layout = LAYOUTS[name]
        options |= {"eval_every": 1, "eval_prompts": 4, "eval_temperature": 0.0, "max_new_tokens": 12}
        wanted, responses = ranks.run(evaluated, 1, of(folder, tmp_path / f"own{number}", **options))[0]
        with stub(tp) as server, stub(tp) as other:
            urls = f"{server.url}, {other.url}/"
            config = of(folder, tmp_path / f"served{number}", rollout_engine=urls, **options, **layout)
            found = ranks.run(evaluated, size, config)
        prompts = [[asked["prompt"] for asked in each.asked] for each in (server, other)]
        for one, two in (prompts, prompts[::-1]):
            assert one and not any(ids != begin and ids[: len(begin)] == begin for ids in one for begin in two)
        assert found[0][1] == responses and responses
        assert all(metrics == pytest.approx(wanted) for metrics, _ in found)


@pytest.mark.exhaustive  # with our own decoding: test_partial.py
def test_partial_rollouts_go_on(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    with stub(2) as server:
        server.breaks = "slow"
        options = APART | {
            "staleness": 2,
            "partial_rollouts": True,
            "oversample": 1.5,
            "max_new_tokens": 24,
            "slots": 3,
            "steps": 3,
        }
        options |= {"stop_ids": ",".join(map(str, range(0, BYTE_VOCAB, 20)))}
        for found in ranks.run(steps_of, 4, of(folder, tmp_path / "run", rollout_engine=server.url, **options)):
            assert len(found) == 3 and all(step["actor/grad_norm"] > 0 for step in found)
        begun = [asked for asked in server.asked if asked["max_tokens"] < 24]
        assert begun, "no response went on"


def answers(*servers: Stub, prompts: int = 1) -> Tensor:
    """The tokens of requests, and their log-probabilities."""
    pool = [RolloutServer(server.url, pause=0.01).named() for server in servers]
    requests, found = Requests(pool, 2, "default", {}, False), dict[str, list[Any]]()
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 3, "stop_token_ids": [], "ignore_eos": True}
    for number in range(prompts):
        requests.begin(str(number), number, range(4 + number), 5, sampling | {"logprobs": 0})
        found[str(number)] = []
    left = prompts
    try:
        while left:
            for written in requests.step():
                found[written.request] += written.tokens
                left -= written.end is not None
    finally:
        requests.close()
    return torch.tensor(list(found.values()))


@pytest.mark.slow
def test_requests_are_tried_again_and_go_on_where_they_broke() -> None:
    with stub() as server, stub() as other:
        wanted = answers(server, prompts=5)
        assert wanted.shape == (5, 5, 2)
        server.fails = ["503", "cut", "503"]
        torch.testing.assert_close(answers(server, prompts=5), wanted)
        assert any(asked["max_tokens"] == 3 and len(asked["prompt"]) > 5 for asked in server.asked)
        server.fails = ["503"] * 3
        with pytest.raises(
            ConnectionError, match=r"the rollout server at http.*/v1 failed: OSError: HTTP Error 503: loading"
        ):
            answers(server)
        server.fails, other.version = ["503"] * 9, "another run's"
        with pytest.raises(
            ConnectionError,
            match=r"at http.*/v1 failed: .* of version another .*; .*/v1 failed: OSError: HTTP Error 503",
        ):
            answers(other, server)


BREAKS = {
    "worker": r"the rollout server http.*/v1 for actor_generate failed on rank 0 while its weights were updated: "
    r"ConnectionError: the rollout server at http.* failed: OSError: HTTP Error 500: IndexError: no such block",
    "forgotten": r"failed on rank 0 while its weights were updated: ConnectionError: .* failed: OSError: .*: "
    r"ValueError: the weights that changes were sent to are not this server's last update",
    "restarted": r"while it decoded: .* failed: ConnectionError: its weights are of version default and not \w+-1",
    "nan": r"logits of response \d+ are not finite",
    "gone": r"the rollout server .* failed on rank 0 while it decoded: ConnectionError: "
    r"the rollout server at http.* failed: OSError: HTTP Error 503",
}


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.slow(full=3)
def test_a_server_that_fails_is_named(ranks: RankPool, folder: Path, tmp_path: Path, breaks: str) -> None:
    with stub() as server:
        server.breaks = breaks
        server.fails = {"nan": ["nan"] * 8, "gone": ["503"] * 99}.get(breaks, [])
        begin = time.monotonic()
        with pytest.raises(RankError, match=BREAKS[breaks]):
            delta = breaks == "forgotten"
            ranks.run(steps_of, 1, of(folder, tmp_path / "run", rollout_engine=server.url, delta_updates=delta))
        assert time.monotonic() - begin < 100, "noticed by the end of a request, not by a limit of time"


def refused(config: RlhfConfig, said: str, size: int = 1) -> None:
    with pytest.raises(ConfigurationError, match=said):
        prepare(config, Launch(0, size, local_world_size=size))


@pytest.mark.slow
def test_what_a_server_cannot_do_is_refused(folder: Path, tmp_path: Path) -> None:
    def check(said: str, tp: int = 1, size: int = 1, **changes: Any) -> None:
        with stub() as server:
            server.workers[0].vllm_config.parallel_config.tensor_parallel_size = tp
            refused(of(folder, tmp_path / "run", **{"rollout_engine": server.url} | changes), said, size)

    check(r"it needs --tensor-parallel-size 1, the tp of its generate call, and has 2", tp=2)
    check(r"it needs the policy's --dtype, and has float32", dtype="bfloat16")
    check(r"it needs --logprobs-mode raw_logprobs, and has processed_logprobs", top_k=5)
    check(r"it needs the policy's model, and has another: .*hidden_size = 32 instead of 128", model="tiny")
    check(r"--rollout-cache = 2.0 is that of vLLM, which no call decodes with", rollout_cache=2.0)
    check(r"divides a model only over tp", size=2, sp_ulysses=2)
    check(r"--rollout-engine = 'sglang' must be own, vllm or URLs of servers", rollout_engine="sglang")
    check(r"--rollout-engine = 'http://a,vllm' must be own, vllm or URLs of servers", rollout_engine="http://a,vllm")
    check(
        r"the rollout server at http://127.0.0.1:9/v1 failed: .* --worker-extension-cls usp.rlhf.served.Worker",
        rollout_engine="http://127.0.0.1:9/v1",
    )
    with stub() as server:
        prepare(of(folder, tmp_path / "run", rollout_engine=f"http://127.0.0.1:9/v1,{server.url}"), Launch())
    check(r"do not predict calls with --rollout-engine = http.*, whose devices they do not know", plan="search")


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "rope theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        r"another: rope_parameters.rope_theta = 500.0 instead of 10000.0",
    ),
    "rope scaling": ({"rope_parameters": YARN}, r"another: rope_parameters.rope_type = yarn instead of default"),
    "epsilon": ({"rms_norm_eps": 1e-5}, r"another: rms_norm_eps = 1e-05 instead of 1e-06"),
    "heads": (
        {"num_attention_heads": 4, "head_dim": 4},
        r"another: num_attention_heads = 4 instead of 8",
    ),
    "KV heads": ({"num_key_value_heads": 2}, r"another: num_key_value_heads = 2 instead of 4"),
    "activation": ({"hidden_act": "gelu"}, r"another: hidden_act = gelu instead of silu"),
    "bias": ({"attention_bias": True}, r"another: attention_bias = True instead of False"),
    "tied": ({"tie_word_embeddings": True}, r"another: tie_word_embeddings = True instead of False"),
    "nothing that decides numbers": (
        {
            "attention_dropout": 0.5,
            "bos_token_id": 7,
            "use_cache": False,
            "architectures": ["Mine"],
            "dtype": "float16",
        },
        "",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.slow
def test_a_server_of_another_model_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    changes, said = OTHERS[name]
    with stub() as server:
        server.workers[0].vllm_config.model_config.hf_config = LlamaConfig(**OF_BYTES | changes)
        config = of(folder, tmp_path / "run", rollout_engine=server.url)
        if said:
            refused(config, f"it needs the policy's model, and has {said}")
        else:
            prepare(config, Launch())


@pytest.mark.slow
def test_a_server_of_other_numbers_is_refused(folder: Path, tmp_path: Path) -> None:
    """And not one whose files repeat a tied head, or whose cache is of the dtype by name."""
    with stub(config=TIED) as server:
        config, held = (
            of(folder, tmp_path / "run", model=str(folder / "tied"), rollout_engine=server.url),
            server.workers,
        )
        model, cache = held[0].vllm_config.model_config, held[0].vllm_config.cache_config
        model.hf_config = LlamaConfig(**OF_BYTES)
        model.word_embeddings_untied_by_checkpoint, cache.cache_dtype = True, "float32"
        prepare(config, Launch())
        cache.cache_dtype = "fp8_e4m3"
        refused(config, "it needs --kv-cache-dtype auto, and has fp8_e4m3")
        cache.cache_dtype, model.quantization = "auto", "fp8"
        refused(config, "it needs weights as they are trained, without --quantization, and has fp8")


def drifts(config: RlhfConfig) -> dict[str, float]:
    return begun(config).step(1).metrics


@pytest.mark.slow
def test_rollouts_of_other_weights_stop_the_run(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """Before anything is saved, whether log-probabilities are recomputed or not; at low temperatures, too."""
    spread = LlamaConfig(**OF_BYTES, initializer_range=0.2)
    drawn_model(spread).save_pretrained(folder / "spread")
    with stub(config=spread) as server:
        config = of(folder, tmp_path / "run", model=str(folder / "spread"), rollout_engine=server.url, temperature=0.5)
        (sound,) = ranks.run(drifts, 1, config)
        assert sound["logprob_difference_mean"] < 1e-5
        server.breaks = "other"
        for options in ("", "old_logprobs=recompute,mini_batches=2"):
            with pytest.raises(
                RankError,
                match=r"TrainingDiverged: step 1: the log-probabilities of engine http.* differ from those in training "
                r"by [\d.]+ in the mean of its tokens, and rounding in float32 explains at most 0.125",
            ):
                ranks.run(drifts, 1, replace(config, options=options, output=str(tmp_path / f"other {len(options)}")))


def test_the_drift_that_rounding_explains() -> None:
    assert most_drift(torch.bfloat16, 1.0) == 0.5 and most_drift(torch.bfloat16, 0.5) == 1.0
    assert most_drift(torch.float16, 1.0) == most_drift(torch.float32, 2.0) == most_drift(torch.float32, 0.0) == 1 / 16


@pytest.mark.slow
def test_ranks_need_no_memory_for_a_server(folder: Path, tmp_path: Path) -> None:
    """But what updates keep: the values that are compared, or the base of adapters."""

    def generates(**options: Any) -> CallRun:
        options |= {"plan": "separation", "rollout": "dp_shard=1"}
        config = of(folder, tmp_path / "run", rollout_engine=server.url, **options)
        run = prepare(config, Launch(0, 2, local_world_size=2))
        assert run.plan["actor_generate"].ranks == (0,)
        (generate,) = (call for call in dry_run_calls(run, torch.device("cpu")) if call.call == "actor_generate")
        return generate

    whole = sum(weight.nbytes for weight in drawn_model(MODEL).parameters())
    with stub() as server:
        plain, changes = generates(), generates(delta_updates=True)
        adapters = generates(lora_rank=4, lora_targets="q_proj")
    assert not plain.by_category and plain.others_bytes == whole  # of the reference
    assert not changes.by_category and changes.others_bytes == 2 * whole
    assert adapters.own_bytes == whole + 2 * 2 * 4 * 32 * 4


@pytest.mark.slow
def test_workers_need_torch_alone() -> None:
    """An environment of vLLM has neither the packages of a trainer nor its versions of them."""
    code = "import sys, usp.rlhf.served; print({'transformers', 'tyro', 'safetensors'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_piece_is_a_part_of_a_tensor() -> None:
    piece = WeightPiece("x", (6,), (2, 3), ((1, 2), (0, 2)), torch.tensor([[1.0, 2.0]]))
    assert piece.whole()[3:5].tolist() == [1, 2] and int(piece.whole().isnan().sum()) == 4
