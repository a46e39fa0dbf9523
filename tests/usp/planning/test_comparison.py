"""The comparison of methods: names, errors, tables, and the generated document."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cost_tables import DOCUMENT, document
from usp.__main__ import main
from usp.config import TrainConfig
from usp.fields import token_count
from usp.hf.models import load_model_config
from usp.parallel import load_hardware
from usp.planning.comparison import Compared, Setting, compare, judge
from usp.planning.methods import Method
from usp.planning.step_report import StepReport
from usp.predict.traffic import step_traffic
from usp.train.resolve import job_of

TINY = ["cost", "--model", "tiny", "--seq-len", "1K", "--world-size", "4", "--global-batch-size", "4"]


def setting(devices: int = 4, batch: int = 4, model: str = "tiny", rows: int = 1, seq_len: int = 1024) -> Setting:
    return Setting(
        hardware=load_hardware("h100"),
        world_size=devices,
        base=TrainConfig(model=model, seq_len=seq_len, dtype="bfloat16"),
        model_config=load_model_config(model),
        sequences=batch,
        rows=rows,
    )


def compared(names: str, **changes: Any) -> tuple[dict[str, Compared], dict[str, str]]:
    feasible, problems = compare(map(Method.parse, names.split(",")), setting(**changes))
    return {each.method: each for each in feasible}, problems


def test_names_become_degrees() -> None:
    feasible, _ = compared("tp-sp2+ring,ulysses2+dp2+zero3,zero2,usp", batch=4)
    assert [each.degrees for each in feasible.values()] == [
        "ring=2 tp=2 zero=1",
        "dp_shard=2 ulysses=2 zero=3",
        "dp_shard=4 zero=2",
        "ulysses=4 zero=0",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ulises4", r"unknown part 'ulises4' \(did you mean 'ulysses'\?\)"),
        ("ring+ulysses", "at most one part may omit its degree; without a degree: ring, ulysses"),
        ("ring0", "degrees must be at least 1"),
        ("zero4", "zero must be followed by its stage"),
        ("usp+ring2", "usp chooses ulysses and ring itself"),
        ("tp2+tp2", "tp is given twice"),
    ],
)
def test_invalid_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Method.parse(name)


def test_infeasible_methods_state_the_reason() -> None:
    feasible, problems = compared("dp,tp8+dp1,ep,pp,ring", devices=8, batch=1)
    needs = "--global-batch-size 1 must be a multiple of the 8 data-parallel ranks: use --global-batch-size 8"
    assert problems["dp"] == needs and list(feasible) == ["ring"]
    assert "must divide num_key_value_heads=4" in problems["tp8+dp1"]
    assert problems["pp"].startswith("pp=8 needs 8 micro-batches")


def test_every_method_has_micro_batches_of_the_same_size() -> None:
    names = "usp,usp+zero3,ulysses2+zero2,pp2+usp"
    (one, _), (two, _), (whole, problems) = (compared(names, batch=8, rows=rows) for rows in (1, 2, 8))
    for name in ("usp", "usp+zero3"):  # a block's activations are sent once per sequence, whatever a micro-batch is
        sizes = [each[name].step.memory.activations for each in (one, two, whole)]
        assert sizes == sorted(set(sizes)) and len(sizes) == 3
        assert len({sum(s.nbytes for s in each[name].block_activations) for each in (one, two, whole)}) == 1
    assert "multiple of the 2 data-parallel ranks x --micro-batch 8" in problems["ulysses2+zero2"]
    assert "pp2+usp" in one and "pp2+usp" in two
    assert problems["pp2+usp"] == (
        "pp=2 needs 2 micro-batches, --global-batch-size 8 gives 1: use --global-batch-size 16"
    )


def test_the_bytes_are_those_of_the_busiest_rank() -> None:
    base = TrainConfig(model="llama2-7b", seq_len=2**17, dtype="bfloat16", micro_batches=8, batch_size=8, zero=1, pp=8)
    job = job_of(base, load_model_config("llama2-7b"), 8)
    found = compared("pp8", devices=8, batch=8, model="llama2-7b", seq_len=2**17)[0]["pp8"]
    by_rank = [sum(sent.nbytes for sent in step_traffic(job, rank)) for rank in range(8)]
    assert found.sent_bytes == max(by_rank) > 1.9 * by_rank[0] and found.sender not in (0, 7) and found.rank == 0


def test_what_does_not_fit_names_the_memory_of_the_device_or_of_the_host() -> None:
    large = setting(devices=1, batch=1, model="llama3-8b", seq_len=4096)
    small = replace(large, hardware=replace(large.hardware, host_memory_bytes=5e10))
    methods = [Method.parse("usp+zero1")]
    (verdict,) = judge(compare(methods, small)[0])
    assert not verdict.step.fits
    assert " of a device " in verdict.reason and "host's memory" not in verdict.reason
    offloaded = small.job(replace(verdict.step.job.config, optim_offload=True))
    on_host = replace(verdict, step=StepReport(offloaded, small.hardware))
    assert on_host.reason == "Needs 119.7 GiB of a host's memory where 41.9 GiB are usable."


@pytest.mark.slow
def test_the_fastest_that_fits_comes_first_and_others_say_why_they_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["cost", "--seq-len", "128K", "--methods", "ring,ring+zero3,usp+zero3,usp+zero1,ep", "--hardware", "h100"]
    assert main([*asked, "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert "Sent in a step by the busiest rank" in shown and "| ep | " in shown
    assert main([*asked, "--json"]) == 0
    lines = {line["method"]: line for line in json.loads(capsys.readouterr().out)}
    assert lines.pop("ep").keys() == {"method", "problem"}
    assert {name: line["fits"] for name, line in lines.items()} == {
        "ring": False,
        "ring+zero3": True,
        "usp+zero3": True,
        "usp+zero1": False,
    }
    for line in lines.values():
        assert line["sent"] == sum(sent["nbytes"] for sent in line["step"])
        assert sum(line["parts"].values()) == pytest.approx(line["seconds"])
        assert line["fits"] == (line["memory"]["peak"] <= line["memory_limit_bytes"]) == (line["reason"] == "")
    assert "most for optimizer states" in lines["ring"]["reason"]


def test_nonsense_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    negative = ["--world-size", "0", "--global-batch-size", "-1"], "--global-batch-size = -1 must be at least 1"
    for arguments, message in (negative, (["--json", "--markdown"], "give one")):
        assert main([*TINY, *arguments]) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1 and message in shown.err


def test_sequence_lengths_are_parsed() -> None:
    assert [token_count(text) for text in ("131072", "128K", "1m")] == [131072, 131072, 2**20]
    for text in ("many", "K", "1.5K"):
        with pytest.raises(ValueError, match="must be a number of tokens such as 131072, 128K or 1M"):
            token_count(text)


@pytest.mark.slow
def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run `python -m benchmarks.cost_tables`"
