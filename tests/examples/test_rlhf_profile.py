"""python -m examples.rlhf_profile: a file that rlhf-plan uses where it can, and says where it cannot; and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.rlhf_profile.__main__ import RlhfProfileConfig, _calls, main
from examples.rlhf_profile.measuring import Measuring, Sizes
from tests.e2e.processes import ONE_THREAD
from usp.__main__ import main as usp
from usp.parallel import ProcessGroups, load_hardware
from usp.planning.corrections import Profile
from usp.predict.rounds import Rounds
from usp.rlhf.roles.role_model import RoleModel
from usp.run.launch import Launch

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
    first, begun = Profile.load(out, "H100").corrections.factors, capsys.readouterr().err.splitlines()
    assert len(begun) == 3 and first
    assert main(again, ONE_THREAD) == 0
    said = capsys.readouterr()
    assert f"{out}: 3 calls on up to 1 ranks" in said.out
    assert begun[2] in said.err and not {*begun[:2]} & {*said.err.splitlines()}  # what was kept is not measured again
    made, factors = vars(Profile.load(out, "H100")).values()
    assert factors.factors.keys() == {"actor_generate", "ref_inference", "actor_train"}
    for call, of in factors.factors.items():
        assert of.keys() == ({"one rank", "ac=full"} if call == "actor_train" else {"one rank"})
        assert min(of.values()) > 0 and first.get(call, {}).items() <= of.items()
    assert (made["device"], made["dtype"], made["ranks"], made["hardware"]) == ("CPU", "float32", 1, "H100")
    assert main(again, ONE_THREAD) == 0 and "actor_train" not in capsys.readouterr().err
    assert Profile.load(out, "H100").corrections == factors
    assert main([*again, "--tokens", "16"], ONE_THREAD) == 1
    dist.destroy_process_group()
    assert "exists, and was made with tokens [16, 32]: name another file, or remove it" in capsys.readouterr().err
    grpo = ["--algorithm", "grpo", "--reward", "function", "--group-size", "2"]
    assert usp([*PLAN, *grpo, "--profile", str(out)], {}) == 0
    said = capsys.readouterr()
    assert "every call of the plan is in the profile" in said.out
    assert usp([*PLAN, *grpo, "--profile", str(out), "--hardware", "a100"], {}) == 1
    assert "it corrects predictions for --hardware H100, not A100" in capsys.readouterr().err
    assert usp([*PLAN, "--profile", str(out)], {}) == 0
    (told,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("NOT IN THE PROFILE"))
    assert "critic_inference (one rank)" in told and "actor_inference" in told and "actor_train" not in told


def test_factors_are_of_the_whole_depth() -> None:
    """What the embedding and the head take does not hide that each layer takes three times as long as predicted."""
    asked = RlhfProfileConfig(actor="qwen3-8b", algorithm="grpo")
    calls = _calls(asked, torch.bfloat16, 8, (0,), Launch(world_size=2, local_world_size=2))
    rounds, shape = Rounds(torch.device("cpu"), 3, 0.02), (4, 1024)
    measuring = Measuring(Sizes((1, 2), (8,), (1024,)), load_hardware("h100"), rounds, ProcessGroups())
    assert {one.call.name for one in calls} == {"actor_generate", "ref_inference", "actor_train"}
    for one in {(each.call.name, each.layout.dims): each for each in calls}.values():
        first, second = (measuring.predicted(one, layers, *shape) for layers in (1, 2))
        took = {1: {shape: first}, 2: {shape: first + 3 * (second - first)}}
        (found,) = measuring.compared(one, took)
        assert 2 < found.seconds / found.predicted < 3
        (found,) = measuring.compared(one, {2: {shape: 3 * second}})  # one depth tells nothing of others
        assert found.seconds == pytest.approx(3 * found.predicted) and found.predicted == second


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", "no/such/profile.json"], "is not a directory"),
        (["--layers", "0"], "--layers, --samples and --tokens must be at least 1"),
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
