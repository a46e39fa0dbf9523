"""What a run with --plan tries: the planner's best, those of other kinds, and what is best with corrected rates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from usp.config import TrainConfig
from usp.hf.models import load_model_config, model_facts
from usp.parallel import load_hardware
from usp.planning.choice import choose
from usp.planning.corrections import Measured, fitted, scaled
from usp.planning.tune import TRIED, replanned, tuner_for
from usp.predict.seconds import step_seconds
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.tuning import Trial
from usp.train.validate import violations

H100 = load_hardware("h100")
ASKED = TrainConfig(plan="auto", hardware="h100", global_batch_size=8, seq_len=4096, device="cpu", steps=7)
HERE = Launch(world_size=8, local_world_size=8)


def test_auto_tries_one_plan_on_a_host_and_tune_several_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = tuner_for(ASKED, HERE, False).trials
    assert "the simplest within 18% of the fastest" in capsys.readouterr().out
    several = tuner_for(replace(ASKED, plan="tune"), HERE, False).trials
    assert several[0] == one and len(several) == TRIED and len({each.name for each in several}) == TRIED
    assert tuner_for(ASKED, replace(HERE, local_world_size=4), False).trials == several
    for config in (each.config for each in several):
        assert (config.plan, config.hardware, config.global_batch_size, config.steps) == ("none", "auto", 0, 7)
        assert not violations(config, 8, model_facts("tiny", load_model_config("tiny")))
    capsys.readouterr()
    assert tuner_for(ASKED, replace(HERE, rank=3), False).trials == [one] and capsys.readouterr().out == ""
    with pytest.raises(ConfigurationError, match="--hardware auto does not know a CPU"):
        tuner_for(replace(ASKED, hardware="auto"), HERE, False)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"base": "h100", "device": "other"}))
    with pytest.raises(ConfigurationError, match="states no peak_flops for bfloat16"):
        tuner_for(replace(ASKED, hardware=str(other), dtype="bfloat16"), HERE, False)


@pytest.mark.slow
def test_rank_0_plans_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, store = tuner_for(ASKED, HERE, False).trials, dist.HashStore()
    monkeypatch.setattr(Launch, "store", lambda launch: store)
    assert tuner_for(ASKED, HERE, False).trials == alone
    monkeypatch.setattr("usp.planning.choice.choose", None)  # no other rank searches
    assert tuner_for(ASKED, replace(HERE, rank=3), False).trials == alone
    wrong = replace(HERE, attempt=1)
    for rank in (0, 1):
        with pytest.raises(ConfigurationError, match="'h900' must be a file or one of"):
            tuner_for(replace(ASKED, hardware="h900" if rank == 0 else "h100"), replace(wrong, rank=rank), False)


@pytest.mark.parametrize(("compute", "links"), [(1.0, 16.0), (2.0, 1.0), (1.5, 8.0)])
def test_measured_steps_correct_rates_and_plan(compute: float, links: float) -> None:
    asked = replace(ASKED, model="qwen3-8b", seq_len=2**13, global_batch_size=32, plan="tune")
    rates = dict.fromkeys(("products", "attention", "memory", "launches"), 1 / compute)
    choice, real = choose(asked, 8, H100), scaled(H100, messages=1 / links, **rates)
    jobs = [choice.step(each).job for each in choice.shown[:TRIED]]
    took = [step_seconds(job, real).total for job in jobs]
    measured = [Measured("step", "", seconds, 0.0) for seconds in took]
    found = fitted(H100, measured, lambda hardware: [step_seconds(job, hardware).total for job in jobs])
    product, faster = (each.matmul_seconds(1e12, "bfloat16") for each in (found, H100))
    assert product / faster == pytest.approx(compute, rel=0.03)
    assert 0.5 <= H100.tiers[0].send.bytes_per_second / found.tiers[0].send.bytes_per_second / links <= 2
    trials = [
        Trial(each.config, "", each.seconds, (its,)) for each, its in zip(choice.shown[:TRIED], took, strict=True)
    ]
    wanted = choose(asked, 8, real).result.best[0]
    known = any(each.options == Trial(wanted.config, "", 0.0).options for each in trials[:2])
    new = replanned(choice, asked, trials[:2])
    assert known or (new and new[0].config == wanted.config)
    assert not new or new[0].seconds < min(took[:2])
