"""Runs beside predictions, and hardware files by runs, against records of machines whose rates are known."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.fit_hardware import (
    ATTENTION,
    LAUNCHES,
    MEMORY,
    MESSAGES,
    PRODUCTS,
    WAITS,
    even_documents,
    main,
    measured,
    scaled_by,
    with_rates,
)
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.parallel.cluster.hardware import Hardware, hardware_from_mapping, hardware_values, load_hardware
from usp.predict.job import ONE_DOCUMENT, Data
from usp.predict.seconds import StepTime, step_seconds
from usp.run.failures import ConfigurationError
from usp.train.resolve import job_of

RUN = TrainConfig(model="llama3-8b", seq_len=32768, sp_ulysses=8, ac="full")
FLAGS = ["--model", "llama3-8b", "--seq-len", "32K", "--sp-ulysses", "8", "--ac", "full", "--world-size", "8"]
OTHERS = (  # configurations and numbers of devices
    (replace(RUN, seq_len=131072), 8),
    (replace(RUN, seq_len=8192, ac="none", batch_size=2), 16),
    (replace(RUN, sp_ulysses=2, sp_ring=4, seq_len=65536), 16),
    (replace(RUN, model="qwen3-8b", ac="selective"), 8),
    (replace(RUN, sp_ulysses=1, tp=4, tp_sequence_parallel=True, zero=1), 8),
    (replace(RUN, model="llama2-7b", pp=2, batch_size=8, micro_batches=8, sp_ulysses=4), 8),
)
UNLIKE = {PRODUCTS: 0.7, ATTENTION: 0.5, MEMORY: 0.8}


def rated(values: dict[str, Any], factors: dict[str, float]) -> dict[str, Any]:
    return with_rates(values, scaled_by(hardware_from_mapping(values, "a test"), factors))


def predicted(config: TrainConfig, world_size: int, hardware: Hardware, data: Data = ONE_DOCUMENT) -> StepTime:
    return step_seconds(job_of(config, load_model_config(config.model), world_size, data=data), hardware)


def report(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main([*FLAGS, "--json", *more]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    found: dict[str, Any] = json.loads(shown.out)
    return found


def test_a_run_stands_beside_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = [60.0, 9.0, 8.0, 6.0, 5.0, 7.0]  # the first three are left out
    records = [{"seconds": value, "mfu": 0.4, "memory_bytes": 15 * 2**30} for value in seconds]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = report(capsys, "--against", str(tmp_path))
    expected = {"steps": 3, "seconds": 6.0, "mfu": 0.4, "memory_bytes": 15 * 2**30, "document_tokens": None}
    assert found["measured"] == expected and found["seconds"] == predicted(RUN, 8, load_hardware("h100")).total
    assert main([*FLAGS, "--against", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "6.00 s" in shown.out and "15.00" in shown.out and "median of 3 steps)" in shown.out
    assert f"{found['seconds'] / 6 - 1:+.1%}" in shown.out and not shown.err


def test_a_run_of_documents_is_predicted_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"seconds": 6.0, "mfu": 0.4, "memory_bytes": 15 * 2**30, "document_tokens": 4096.0}
    (tmp_path / "metrics.jsonl").write_text(6 * (json.dumps(record) + "\n"))
    against = ("--against", str(tmp_path))
    found, told, other = (
        report(capsys, *against, *more) for more in ((), ("--document-tokens", "4096"), ("--document-tokens", "32K"))
    )
    assert found["parts"] == told["parts"] and found["parts"]["attention"] < 0.25 * other["parts"]["attention"]
    assert main([*FLAGS, *against]) == 0
    assert "of 3 steps, documents of 4,096 tokens)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("tokens", [1.0, 777.7, 1000.0, 2047.0, 2049.0, 3500.0, 4096.0])
def test_even_documents_have_the_pairs_of_the_average(tokens: float) -> None:
    lengths = torch.tensor(Data((even_documents(tokens, 4096),)).boundaries(4096)).diff()
    assert lengths.square().sum().item() == pytest.approx(4096 * tokens, rel=2e-3)
    assert (lengths == lengths[0]).sum() >= len(lengths) - 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no metrics.jsonl: give the folder of a run of train.py"),
        ('{"seconds": 1.0, "mfu": null, "memory_bytes": 1}\n', "has 1 steps, and the first 3 are left out"),
        ('{"score": 1.0}\n' * 4, "is no log of train.py: KeyError('mfu')"),
    ],
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main([*FLAGS, "--against", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


def write_run(
    folder: Path, truth: dict[str, Any], steps: int = 20, *, trace: bool, seconds: float = 0.0, documents: int = 0
) -> StepTime:
    """Write what train.py would record of RUN on a machine, where step 6 has documents of half as many tokens."""
    data = Data((documents,)) if documents else ONE_DOCUMENT
    time = predicted(RUN, 8, hardware_from_mapping(truth, "truth"), data)
    pieces = torch.tensor([data.boundaries(RUN.seq_len)]).diff().double()
    usual = (pieces.square().sum() / pieces.sum()).item()
    noise = [1.0, 0.97, 1.05]
    records = [
        {
            "step": step + 1,
            "seconds": (seconds or time.total) * noise[step % 3] + 0.5,
            "data_seconds": 0.5,
            "mfu": 0.3,
            "memory_bytes": 2**30,
            **({"document_tokens": usual / (1 + (step == 5))} if documents else {}),
        }
        for step in range(3 + steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if trace:
        attention = {5: time.parts[ATTENTION], 6: time.parts[ATTENTION] / (1 + bool(documents))}
        step = {"cat": "user_annotation", "dur": 1e6 * time.total, "tid": 1}
        events: list[dict[str, Any]] = [{**step, "name": f"step {n}", "ts": 1e12 * n} for n in attention]
        for name, took in (
            ("nvjet_hsh_128", time.parts[PRODUCTS]),
            ("void flash_fwd_kernel", attention),
            ("void at::native::elementwise_kernel", time.parts[MEMORY] + time.optimizer),
            ("ncclDevKernel_AllGather_RING_LL", 0.3),
        ):
            by_step = took if isinstance(took, dict) else dict.fromkeys(attention, took)
            times = [{"ts": 1e12 * (n + at / 4), "dur": 1e6 * of / 2} for n, of in by_step.items() for at in (1, 2)]
            events += [{"cat": "kernel", "name": name, "tid": f"{name} {each['ts']}", **each} for each in times]
        events.append({"cat": "cpu_op", "name": "aten::mm", "dur": 5e6, "ts": 0, "tid": 1})  # only launches a kernel
        write_trace(folder, events)
    return time


def write_trace(folder: Path, events: list[dict[str, Any]], rank: int = 0) -> None:
    path = folder / "profile" / f"rank-{rank}.json.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


@pytest.mark.parametrize(
    ("truth", "trace", "told"),
    [
        (UNLIKE, True, "matrix products 0.70, attention 0.50, memory-bound operators 0.80"),
        (dict.fromkeys(UNLIKE, 1.6), False, "matrix products 1.60, attention 1.60, memory-bound operators 1.60"),
    ],
)
@pytest.mark.slow
def test_a_run_tells_the_rates_of_its_machine(
    truth: dict[str, float], trace: bool, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = rated(hardware_values("h100"), truth)
    write_run(tmp_path, values, trace=trace)
    file = tmp_path / "fitted.json"
    assert main([*FLAGS, "--against", str(tmp_path), "--write-hardware", str(file)]) == 0
    assert told in " ".join(capsys.readouterr().err.split())
    fitted, true = load_hardware(str(file)), hardware_from_mapping(values, "truth")
    for config, world_size in OTHERS:
        expected = predicted(config, world_size, true).total
        assert predicted(config, world_size, fitted).total == pytest.approx(expected, rel=5e-3)
        assert predicted(config, world_size, load_hardware("h100")).total != pytest.approx(expected, rel=0.05)


CPU = {**hardware_values("h100"), "streams": False, "launch_seconds": 0.0}


def write_cpu_traces(folder: Path, time: StepTime, waits: float) -> None:
    """Write the traces of two ranks, each of which waits `waits` seconds for the other in one of two collectives."""
    memory, launches = time.parts[MEMORY] + time.optimizer, time.parts[LAUNCHES]
    rest = time.total - sum(time.parts[name] for name in (PRODUCTS, ATTENTION)) - memory - launches
    sent = (rest - waits) / 2, (rest + waits) / 2
    events: list[dict[str, Any]] = []
    at = 0.1 * launches
    for outer, own, name, seconds in (
        ("aten::linear", 0.2 * memory, "aten::addmm", time.parts[PRODUCTS]),
        ("aten::scaled_dot_product_attention", 0.3 * memory, "aten::_flash_attention_for_cpu", time.parts[ATTENTION]),
        ("autograd::engine::evaluate_function: CrossEntropy", 0.6 * launches, "aten::mul", 0.5 * memory),
        ("SelfAttentionBackward", rest / 2, "c10d::alltoall_base_", rest / 2),
    ):
        events += [{"name": outer, "ts": at, "dur": own + seconds}, {"name": name, "ts": at + own / 2, "dur": seconds}]
        at += own + seconds + 0.1 * launches
    events.append({"cat": "user_annotation", "name": "step 5", "ts": 0, "dur": at - 0.1 * launches})
    for rank in (0, 1):
        kept = [{"cat": "cpu_op", "tid": 7, **event} for event in events]
        for n, seconds in enumerate((sent[rank], sent[1 - rank])):
            kept.append({"cat": "user_annotation", "tid": 8 + n, "name": "gloo:all_to_all", "ts": n, "dur": seconds})
        timed, begin = [], 0.0
        for slower in (1.5e6, 6e6, 1.5e6):  # us of a second of a traced step
            timed += [{**event, "ts": begin + slower * event["ts"], "dur": slower * event["dur"]} for event in kept]
            begin += slower * at
        write_trace(folder, timed, rank)


def test_traces_of_a_cpu_tell_what_its_operators_take_besides_their_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What autograd takes and what no operator does is the host's, which issues them: as much for short sequences as
    for long ones. The rest goes to messages, which take what the last rank to a collective takes, and to waiting for
    it. A traced step that is slower than the others does not count."""
    (tmp_path / "cpu.json").write_text(json.dumps(CPU))
    truth = {**rated(CPU, {**UNLIKE, MESSAGES: 0.4}), "launch_seconds": 3e-4, "wait_fraction": 0.15}
    time = write_run(tmp_path, truth, trace=False)
    write_cpu_traces(tmp_path, time, time.parts[WAITS])
    file = tmp_path / "fitted.json"
    base = [*FLAGS, "--hardware", str(tmp_path / "cpu.json")]
    assert main([*base, "--against", str(tmp_path), "--write-hardware", str(file)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "memory-bound operators 0.80; launches take 300 us each, links 0.40, waiting" in said, said
    assert "waiting for other ranks 15% of the compute" in said
    fitted, true = load_hardware(str(file)), hardware_from_mapping(truth, "truth")
    for config, world_size in OTHERS:
        expected = predicted(config, world_size, true).total
        assert predicted(config, world_size, fitted).total == pytest.approx(expected, rel=5e-3)


def test_a_run_of_documents_tells_the_same_rates(tmp_path: Path) -> None:
    """A fit knows which documents the run and each of its traced steps had."""
    values = rated(hardware_values("h100"), UNLIKE)
    write_run(tmp_path, values, trace=True, documents=12000)
    file = tmp_path / "fitted.json"
    assert main([*FLAGS, "--against", str(tmp_path), "--write-hardware", str(file)]) == 0
    fitted, true = load_hardware(str(file)), hardware_from_mapping(values, "truth")
    for config, world_size in OTHERS:
        expected = predicted(config, world_size, true).total
        assert predicted(config, world_size, fitted).total == pytest.approx(expected, rel=5e-3)


def test_traced_steps_do_not_count(tmp_path: Path) -> None:
    write_run(tmp_path, hardware_values("h100"), trace=False)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    slow = [{**line, "seconds": line["seconds"] * (10 if 5 <= line["step"] <= 20 else 1)} for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slow))
    assert measured(tmp_path).seconds > 5
    (tmp_path / "config.yaml").write_text("profile: '5:20'\n")
    assert measured(tmp_path).seconds < 5
    assert measured(tmp_path).steps == 4
    (tmp_path / "config.yaml").write_text("actor: other\n")  # not of train.py
    with pytest.raises(ConfigurationError, match="is no log of train"):
        measured(tmp_path)


def test_one_factor_is_not_three(tmp_path: Path) -> None:
    """Without a trace, a run on a machine with other proportions is met, and only runs like it."""
    values = rated(hardware_values("h100"), UNLIKE)
    time = write_run(tmp_path, values, trace=False)
    file = tmp_path / "fitted.json"
    assert main([*FLAGS, "--against", str(tmp_path), "--write-hardware", str(file)]) == 0
    assert predicted(RUN, 8, load_hardware(str(file))).total == pytest.approx(time.total, rel=1e-3)
    longer, world_size = OTHERS[0]
    expected = predicted(longer, world_size, hardware_from_mapping(values, "truth")).total
    assert predicted(longer, world_size, load_hardware(str(file))).total != pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("steps", "seconds", "flags", "said"),
    [
        (9, 0.8, ["--against"], "has 9 steps after the first ones"),
        (20, 0.03, ["--against"], "takes all of its"),
        (20, 0.8, [], "--against is missing: give the folder of a run"),
    ],
)
@pytest.mark.slow(but=1)
def test_runs_that_tell_no_rates_are_refused(
    steps: int, seconds: float, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, hardware_values("h100"), steps, trace=False, seconds=seconds)
    against = [*flags, str(tmp_path)] if flags else []
    assert main([*FLAGS, *against, "--write-hardware", str(tmp_path / "fitted.json")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "fitted.json").exists()
