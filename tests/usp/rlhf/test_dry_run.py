"""The dry run of RLHF calls against real calls, and the memory of a train step against one of train.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.memory import least_peak
from tests.harness.ranks import RankPool
from usp.__main__ import main
from usp.config import TrainConfig
from usp.parallel import ParallelMesh, ProcessGroups
from usp.predict.meter import OPTIMIZER, PARAMETERS
from usp.rlhf.config import RlhfConfig
from usp.rlhf.dry_run import CallRun, dry_run_calls, samples_of
from usp.rlhf.generation import vllm
from usp.rlhf.graph import Inference, TrainStep
from usp.rlhf.plan.operations import copy_of, trained_copy
from usp.rlhf.prepare import PreparedRlhf, prepare
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.samples import Samples
from usp.run.launch import Launch
from usp.train.dry_run import dry_run

TOKENS, TOLERANCE = 4096, 0.05
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "loss_chunk": 512}
GRPO = RlhfConfig(
    **SMALL,
    tokenizer="bytes",
    sft_steps=0,
    prompts=1,
    group_size=2,
    options="mini_batches=2",
    max_new_tokens=96,
    prompt_tokens=TOKENS - 96,
)


def step_of(config: RlhfConfig, world_size: int, rank: int = 0) -> PreparedRlhf:
    return prepare(config, Launch(rank, world_size, local_world_size=world_size))


def runs_of(config: RlhfConfig, world_size: int) -> list[dict[str, CallRun]]:
    """The dry run of each call, by rank."""
    steps = [step_of(config, world_size, rank) for rank in range(world_size)]
    found = [dry_run_calls(step, torch.device("cpu")) for step in steps]
    return [{call.call: call for call in calls} for calls in found]


def peak_of_call(config: RlhfConfig, name: str, enough: list[float]) -> int:
    """Bytes that a call takes at most beyond parameters and optimizer states; see `least_peak`."""
    step, groups = step_of(config, dist.get_world_size(), dist.get_rank()), ProcessGroups()
    call, layout = step.graph[name], step.plan[name]

    def prepared() -> Callable[[], object]:
        mesh = ParallelMesh.create(layout.dims, "cpu", layout.ranks, groups)
        trained = copy_of(step.graph, step.plan, call) == trained_copy(step.graph, step.plan, call.role)
        model = RoleModel(step.roles[call.role], layout, mesh, trained=trained)
        model.fill()
        if trained:
            model.state()  # makes the optimizer's states, as the first step would
        keys = call.work.objective.keys if isinstance(call.work, TrainStep) else ()
        ids = range(samples_of(step, call))
        values: dict[str, list[Tensor]] = {key: [torch.full((TOKENS,), -6.0) for _ in ids] for key in keys}
        values["tokens"] = [torch.randint(256, (TOKENS,)) for _ in ids]
        samples = Samples(tuple(ids), values)
        if isinstance(call.work, TrainStep):
            return partial(model.train_step, [samples], replace(call.work, mini_batches=1))
        assert isinstance(call.work, Inference)
        return partial(model.inference, samples, call.work, "output")

    return least_peak(prepared, enough)


def beyond_state(run: CallRun) -> int:
    return run.own_bytes - run.by_category[PARAMETERS] - run.by_category[OPTIMIZER]


@pytest.mark.slow
def test_an_engine_has_the_base_of_adapters_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: object())
    monkeypatch.setattr("usp.rlhf.dry_run._call", lambda *args: None)  # which adds no parameters

    def parameters(**changes: Any) -> int:
        config = replace(GRPO, sft_steps=1, **changes)
        return runs_of(config, 1)[0]["actor_generate"].by_category[PARAMETERS]

    base = parameters()
    assert parameters(rollout_engine="vllm") == base
    both = parameters(lora_rank=2) + base  # with the tables of rotary embeddings twice
    assert parameters(rollout_engine="vllm", lora_rank=2) == pytest.approx(both, rel=1e-4)


CASES: list[tuple[int, str, dict[str, Any]]] = [
    (1, "actor_train", {"ac": "full"}),
    (1, "actor_train", {"loss_chunk": 4096, "ac": "attention-saved"}),
    (2, "actor_train", {"sp_ulysses": 2, "ac": "full"}),
    (2, "actor_train", {"sp_ring": 2, "zero": 1, "ac": "full"}),
    (2, "actor_train", {"tp": 2, "tp_sequence_parallel": True}),
    (2, "actor_train", {"pp": 2, "options": "", "prompts": 2}),
    (2, "actor_train", {"model": "qwen3-moe-tiny", "sp_ring": 2, "options": "", "micro_batch_tokens": 4096}),
    (2, "actor_inference", {"sp_ulysses": 2, "options": "old_logprobs=recompute"}),
    (1, "ref_inference", {"zero": 0, "options": ""}),
]


@pytest.mark.exhaustive  # of train.py: tests/usp/predict/test_dry_run.py
@pytest.mark.parametrize(("world_size", "name", "flags"), CASES, ids=[f"{n} {c} {' '.join(f)}" for n, c, f in CASES])
def test_the_peak_of_a_call_equals_that_of_a_real_one(
    ranks: RankPool, world_size: int, name: str, flags: dict[str, Any]
) -> None:
    config = replace(GRPO, **flags)
    added = [beyond_state(runs[name]) for runs in runs_of(config, world_size)]
    peaks = ranks.run(peak_of_call, world_size, config, name, [1.02 * nbytes for nbytes in added], timeout=300.0)
    assert added == pytest.approx(peaks, rel=TOLERANCE)
    if name == "actor_train" and flags.keys() <= {field.name for field in fields(TrainConfig)}:
        of_train_py = TrainConfig(**{**SMALL, "seq_len": TOKENS, **flags})
        runs = [dry_run(of_train_py, world_size, rank) for rank in range(world_size)]
        assert added == pytest.approx([run.peak_bytes - run.start_bytes for run in runs], rel=TOLERANCE)


@pytest.mark.slow
def test_what_other_calls_keep_and_the_cache_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["rlhf-dry-run", "--world-size", "4", "--device", "cpu", "--tokenizer", "bytes", "--sft-steps", "0"]
    words += ["--prompts", "2", "--group-size", "4"]
    words += ["--sp-ulysses", "2", "--prompt-tokens", "128", "--max-new-tokens", "32", "--json"]
    assert main(words) == 0
    calls = {call["call"]: call for call in json.loads(capsys.readouterr().out)}
    assert list(calls) == ["actor_generate", "ref_inference", "actor_train"]
    generate, train = calls["actor_generate"], calls["actor_train"]
    weights, states = train["by_category"]["parameters"], train["by_category"]["optimizer states"]
    assert states == pytest.approx(2 * weights, rel=0.01)
    assert generate["by_category"]["parameters"] == pytest.approx(4 * weights, rel=0.01)  # whole, not sharded
    slots, places, layers, kv_heads, head_dim = 4, (128 + 32) // 2, 2, 4, 16
    assert generate["by_category"]["KV cache"] == slots * places * layers * kv_heads * 2 * head_dim * 4
    monkeypatch.setattr("usp.rlhf.dry_run._call", lambda *args: None)  # what is there without it is all that is read
    assert main([*words, "--cache-tokens", str(3 * (128 + 32) + 1)]) == 0
    (bounded, *_) = json.loads(capsys.readouterr().out)
    assert bounded["by_category"]["KV cache"] * slots == generate["by_category"]["KV cache"] * 3
    # The trained copy and the reference, a quarter each, and Adam's moments.
    assert generate["others_bytes"] == pytest.approx(2 * weights + states, rel=0.01)
    assert train["others_bytes"] == pytest.approx(weights, rel=0.01)
    assert main([*words, "--offload", "--offload-optimizer"]) == 0
    calls = {call["call"]: call for call in json.loads(capsys.readouterr().out)}
    assert calls["actor_generate"]["others_bytes"] == pytest.approx(weights, rel=0.01)
    assert calls["actor_train"]["others_bytes"] == 0
    apart, kept = ["--plan", "separation", "--zero", "3", "--options", "old_logprobs=recompute"], []
    for staleness in ("0", "1"):  # with it, the weights for inference are there while responses are generated
        assert main([*words, *apart, "--staleness", staleness]) == 0
        calls = {call["call"]: call for call in json.loads(capsys.readouterr().out)}
        kept.append(calls["actor_generate"]["others_bytes"])
    assert kept[1] - kept[0] == pytest.approx(calls["actor_inference"]["by_category"]["parameters"], rel=0.01)


def test_invalid_arguments_get_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (([], "give --world-size"), (["--world-size", "2", "--sp-ring", "3"], "must divide the world")):
        assert main(["rlhf-dry-run", *words]) == 1
        shown = capsys.readouterr()
        assert said in shown.err and "Traceback" not in shown.err
