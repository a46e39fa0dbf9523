"""rlhf.py --replan as a user runs it, with a planner that always changes the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.e2e.processes import ROOT, Run
from tests.e2e.test_rlhf_cli import SMALL, scores_of
from usp.parallel import read_extra

# Each decision changes between one layout and the other. A rank dies once, when it has received what a role has.
SCRIPT = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path

import usp.planning.run_plan as planners
from usp.parallel import ParallelDims
from usp.commands.rlhf import main
from usp.rlhf.roles.role_model import RoleModel
from usp.train.tuning import Decision

FATE = Path("died")
changes = []

class Planner:
    def __init__(self, prepared):
        self.graph = prepared.graph

    def __call__(self, running, measured, factors):
        sequences = running["actor_train"].dims.sp == 1
        dims = ParallelDims(ulysses=2, dp_shard=1) if sequences else ParallelDims(dp_shard=2)
        calls = {
            name: layout if self.graph[name].kind == "compute" else replace(layout, dims=dims, zero=int(sequences))
            for name, layout in running.calls.items()
        }
        for name in calls:
            if self.graph[name].kind == "generate":
                calls[name] = replace(calls[name], zero=0)
        set(calls.values())  # hashed on this rank, as in a search
        best = replace(running, name=f"plan after {measured[-1].number}", calls=calls)
        factors = {"decisions": {"so far": factors.get("decisions", {}).get("so far", 0.0) + 1}}
        return Decision(measured[-1].number, 0, best, 2e6, 1e6, 0.05), factors  # building costs less

def discard(self, of_model=RoleModel.discard):
    if os.environ["RANK"] == "1" and os.environ.get("DEADLY") and int(os.environ["DEADLY"]) == len(changes):
        if not FATE.exists():
            FATE.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    changes.append(1)
    of_model(self)

planners.run_planner = Planner
RoleModel.discard = discard
if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    if code:
        os._exit(code)
"""
REWARD = "def reward(prompt, response, answer):\n    return len(set(response)) / 8\n"


@pytest.mark.exhaustive  # that values move exactly: tests/usp/rlhf/test_switching.py
def test_a_rank_killed_during_a_change_of_plans_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "changing.py"
    script.write_text(SCRIPT)
    (tmp_path / "reward.py").write_text(REWARD)
    args = [*SMALL, "--steps", "6", "--checkpoint-every", "1", "--reward-function", "reward.py:reward"]
    with Run([*args, "--output", "calm"], tmp_path, ranks=2, script=ROOT / "rlhf.py") as run:
        assert run.end().exit_code == 0, run.err.read_text()
    args += ["--replan", "every=2", "--output", "deadly", "--keep-checkpoints", "6"]
    args += ["--eval-every", "3", "--eval-prompts", "2"]  # changes no number
    monkeypatch.setenv("DEADLY", "3")  # in the second change: the first moves the actor and ref
    with Run(args, tmp_path, ranks=2, script=script, torchrun=("--max-restarts", "1")) as run:
        ended = run.end()
    assert ended.exit_code == 0 and (tmp_path / "died").exists(), ended.err
    assert "resumed from: deadly/checkpoints/step-0000000" in ended.out and "plan plan after 2" in ended.out
    calm, deadly = tmp_path / "calm", tmp_path / "deadly"
    assert len(scores_of(calm)) == 6
    for (number, score, loss), (same, its_score, its_loss) in zip(scores_of(calm), scores_of(deadly), strict=True):
        assert (same, its_score) == (number, score) and its_loss == pytest.approx(loss, rel=1e-5, abs=1e-5)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (deadly, calm))
    assert ours.keys() == theirs.keys()
    assert all(torch.dist(ours[name], theirs[name]) < 1e-5 * theirs[name].norm() for name in ours)
    running = [read_extra(path)["running"] for path in sorted((deadly / "checkpoints").iterdir())]
    named = [each["plan"]["name"] for each in running]
    assert [each["factors"].get("decisions", {}).get("so far", 0.0) for each in running] == [0, 1, 1, 2, 2, 2]
    assert named == ["flattening", *["plan after 2"] * 2, *["plan after 4"] * 3]
    assert yaml.safe_load((deadly / "plan.yaml").read_text())["name"] == "plan after 4"
    decisions = [json.loads(line) for line in (deadly / "replan.jsonl").read_text().splitlines()]
    assert [one["step"] for one in decisions] == [2, 4, 4] and all(one["replan/switched"] for one in decisions)
