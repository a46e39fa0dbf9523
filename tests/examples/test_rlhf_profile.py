"""python -m examples.rlhf_profile: a file that rlhf-plan uses where it can, and says where it cannot; and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from examples.rlhf_profile.__main__ import main
from tests.e2e.processes import ONE_THREAD
from usp.__main__ import main as usp
from usp.planning.estimates import Measurements
from usp.rlhf.roles.role_model import RoleModel

SIZES = ["--layers", "2", "--samples", "2", "--tokens", "16,32", "--rounds", "3", "--device", "cpu"]
PLAN = ["rlhf-plan", "--actor", "tiny", "--world-size", "1", "--prompts", "2", "--prompt-tokens", "16", "--budget", "0"]
PLAN += ["--response-tokens", "8", "--options", "mini_batches=1", "--repeatable"]


@pytest.mark.slow
def test_a_plan_by_measured_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fill, filled = tmp_path / "profile.json", RoleModel.fill, list[RoleModel]()

    def interrupted(model: RoleModel) -> None:
        filled.append(model)
        if len(filled) == 3:
            raise KeyboardInterrupt
        fill(model)

    again = ["--algorithm", "grpo", "--out", str(out), *SIZES]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(RoleModel, "fill", interrupted)
        main(again, ONE_THREAD)
    dist.destroy_process_group()  # which stays after an error
    first, begun = Measurements.load(out), capsys.readouterr().err.splitlines()
    assert len(begun) == 3 and first.points
    assert main(again, ONE_THREAD) == 0
    said = capsys.readouterr()
    assert f"{out}: 7 parts of calls" in said.out
    assert begun[2] in said.err and not {*begun[:2]} & {*said.err.splitlines()}  # what was kept is not measured again
    measured = Measurements.load(out)
    assert first.points.items() <= measured.points.items()
    assert {part.work for part in measured.points} == {
        *("prefill", "decode", "logprobs", "train logprobs", "update of train logprobs")
    }
    assert {part.layout for part in measured.points} == {"one rank", "ac=full"}
    assert (measured.device, measured.dtype, measured.ranks) == ("CPU", "float32", 1)
    for part, points in measured.points.items():
        assert {layers for layers, _, _ in points} == {2}
        assert min(points.values()) > 0 or part.work in ("prefill", "update of train logprobs")
    assert main(again, ONE_THREAD) == 0 and "train logprobs" not in capsys.readouterr().err
    assert Measurements.load(out).points == measured.points
    assert main([*again, "--tokens", "16"], ONE_THREAD) == 1
    dist.destroy_process_group()
    assert (
        "exists, and was measured by 1 ranks on CPU in float32, with --layers 2 --samples 2 --tokens 16,32 --res"
        in capsys.readouterr().err
    )
    grpo = ["--algorithm", "grpo", "--reward", "function", "--group-size", "2"]
    assert usp([*PLAN, *grpo, "--profile", str(out)], {}) == 0
    said = capsys.readouterr()
    assert "every call of the plan is in the profile, measured on CPU" in said.out
    assert usp([*PLAN, "--profile", str(out)], {}) == 0
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("NOT IN THE PROFILE"))
    assert "critic_inference (one rank)" in told and "critic_train" in told and "actor" not in told


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", "no/such/profile.json"], "is not a directory"),
        (["--layers", "0"], "--layers, --samples and --tokens must be at least 1"),
        (["--tokens", "many"], "--tokens = many: many must be a number of tokens"),
        (["--response-share", "1"], "--response-share = 1.0 must be above 0 and below 1"),
        (["--zero", "0,4"], "--zero = 0,4 must be stages from 0 to 3"),
        (["--rounds", "2"], "--rounds = 2 must be at least 3"),
        (["--actor", "tinny"], "tinny"),
    ],
)
def test_bad_input_is_refused(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "profile.json")]
    assert main([*out, *flags], {}) == 1
    assert said in capsys.readouterr().err
