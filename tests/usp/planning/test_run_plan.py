"""The plan of a run with --plan search, before any communication."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from usp.parallel.cluster.hardware import NODES
from usp.planning.rlhf_question import answer
from usp.planning.rlhf_search import work_clock
from usp.planning.run_plan import SearchedPlan, question_of, run_planner
from usp.rlhf.checkpoints import RlhfState
from usp.rlhf.config import RlhfConfig
from usp.rlhf.plan.plan import ExecutionPlan, staleness_violations, to_mapping
from usp.rlhf.prepare import PreparedRlhf, prepare
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.checkpoints import Start

FOUR = Launch(world_size=4, local_world_size=2)
SMALL = RlhfConfig(
    plan="search",
    hardware="a100",
    search_budget=0.2,
    prompts=4,
    group_size=4,
    prompt_tokens=64,
    sft_steps=0,
    device="cpu",
)


def searched(run: PreparedRlhf, memory: float = 0.0) -> ExecutionPlan:
    question = replace(question_of(run), clock=work_clock())
    if memory:
        question = replace(question, hardware=replace(question.hardware, memory_bytes=memory))
    samples = {"prompts": 16, "pairs": 8, "answers": 4}
    assert len(question.workload.prompts) == samples[run.algorithm.data]
    assert question.ranks_per_host == 2 and question.hardware.memory_bytes < 80 * 2**30
    return answer(question, budget=run.config.search_budget).plan


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "ppo"},
        {"model": "mixtral-tiny"},
        {"staleness": 2, "partial_rollouts": True},
        {"algorithm": "dpo", "group_size": 0},
        {"algorithm": "sft", "group_size": 0},
    ],
    ids=str,
)
@pytest.mark.slow(full=3)
def test_a_run_gets_a_plan_that_its_models_and_flags_allow(changes: dict[str, object], tmp_path: Path) -> None:
    config = replace(SMALL, output=str(tmp_path / "run"), **changes)  # type: ignore[arg-type]
    prepared = prepare(config, FOUR, planner=searched)
    assert prepared.plan.name == "search"
    assert not (config.staleness and list(staleness_violations(prepared.graph, prepared.plan)))


@pytest.mark.slow
def test_the_search_is_refused_for_what_it_does_not_predict(tmp_path: Path) -> None:
    config = replace(SMALL, output=str(tmp_path / "run"))
    for changes, planner, text in (
        ({"offload": True}, searched, "--offload is chosen by --plan search: remove it"),
        ({"lora_rank": 4, "sft_steps": 1}, searched, "does not predict steps of adapters"),
        ({"sp_ulysses": 2}, searched, "--sp-ulysses = 2 is not used by --plan search: remove"),
        ({"search_budget": -1.0}, searched, "--search-budget = -1.0 must be at least 0"),
        ({"plan": "heuristic", "search_budget": 60.0}, None, "--hardware = a100 is only used by --plan search"),
        ({}, None, "is searched by rlhf.py as it starts: give the plan.yaml"),
        ({}, SearchedPlan(), "through torchrun's store: start with torchrun"),
        ({"hardware": "auto"}, searched, "--hardware auto does not know a CPU: measure it with torchrun"),
        ({"max_new_tokens": 10**9, "temperature": -1}, searched, "--temperature = -1"),
        ({}, partial(searched, memory=2**20), r"The nearest: .*actor_train needs .* GiB on ranks .*devices with"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            prepare(replace(config, **changes), FOUR, planner=planner)  # type: ignore[arg-type]


def test_hardware_that_predicts_no_step_is_refused_before_the_first(tmp_path: Path) -> None:
    described = json.loads((NODES / "a100.json").read_text())
    one_host, no_peak = tmp_path / "host.json", tmp_path / "bf16.json"
    one_host.write_text(json.dumps({**described, "tiers": described["tiers"][:1]}))
    no_peak.write_text(json.dumps({**described, "peak_flops": {"bfloat16": 1e14}}))
    config = replace(SMALL, output=str(tmp_path / "run"))
    for file, text in (
        (one_host, r"connects 2 devices, too few for rank 3: add a tier with devices=0"),
        (no_peak, "states no peak_flops for float32, only for bfloat16: add it to its file"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            prepare(replace(config, hardware=str(file)), FOUR, planner=searched)
        asked = replace(config, plan="flattening", search_budget=60.0, hardware=str(file), replan="every=1")
        with pytest.raises(ConfigurationError, match=f"--replan = every=1: .*{text}"):
            run_planner(prepare(asked, FOUR))


def test_the_plan_is_searched_once_and_kept_by_a_resumed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[PreparedRlhf] = []

    def planner(run: PreparedRlhf) -> ExecutionPlan:
        runs.append(run)
        return first(run)

    # On one rank no change helps long before the time is up, so that two searches find the same.
    first, config = SearchedPlan(), replace(SMALL, search_budget=60.0, output=str(tmp_path / "run"))
    plan = prepare(config, Launch(), planner=planner).plan
    said = capsys.readouterr().out
    assert "plan: searching for 1 ranks" in said and "actor_generate" in said and "heuristic" in said
    assert prepare(config, Launch(), planner=planner).plan == plan
    assert not capsys.readouterr().out

    calls = plan.calls | {"actor_train": replace(plan["actor_train"], ac="full", loss_chunk=7)}
    other = replace(plan, calls=calls)
    saved = RlhfState(1, 4, {}, asdict(config), running={"plan": to_mapping(other), "world_size": 1})
    resumed = replace(runs[0], start=Start(tmp_path / "run", tmp_path / "step-00000001"), saved=saved)
    assert SearchedPlan()(resumed).calls == other.calls
    assert f"plan: that of the run, from {tmp_path / 'step-00000001'}" in capsys.readouterr().out
    saved.running["world_size"] = 2  # type: ignore[index]
    assert SearchedPlan()(resumed).calls == plan.calls
