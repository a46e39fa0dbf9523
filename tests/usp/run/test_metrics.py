"""Step records, the log of a run, and the FLOPs of a step."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import re
import resource
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from usp.config import TrainConfig
from usp.model.facts import ModelFacts, training_flops, visible_pairs
from usp.run.metrics import TRACKERS, RunLog, StepRecord, count, open_trackers, peak_memory, size, tracker_problems

RECORD = StepRecord(
    step=1,
    loss=2.5,
    grad_norm=0.5,
    learning_rate=1e-3,
    epoch=0.5,
    tokens=4096,
    seconds=0.5,
    data_seconds=0.0,
    tokens_per_second=8192.0,
    mfu=None,
    memory_bytes=3 * 2**30,
    attention_sent_bytes=2**20,
    fsdp_sent_bytes=512,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_shows_every_metric() -> None:
    line = RECORD.line()
    for part in ("loss 2.5000", "grad norm 0.500", "8.2k tokens/s", "3.0 GiB", "attention sent 1.0 MiB (0% exposed)"):
        assert part in line
    assert replace(RECORD, indexer_loss=0.25).line().startswith("loss 2.5000  indexer loss 0.2500  grad norm")
    assert "rows balanced 25%" in replace(RECORD, balanced_rows=0.25).line() and "balanced" not in line
    assert "MFU" not in line
    assert "MFU 41.3% (cudnn)" in replace(RECORD, mfu=0.4132, attention_kernels=("cudnn",)).line()


def test_a_line_is_printed_every_log_every_steps(tmp_path: Path) -> None:
    out = io.StringIO()
    with RunLog(tmp_path, steps=25, log_every=10, out=out) as log:
        for step in range(1, 26):
            log.record(replace(RECORD, step=step))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/25", "10/25", "20/25", "25/25"]


def test_a_terminal_shows_a_bar_below_the_lines(tmp_path: Path) -> None:
    shown = []
    for out in (Terminal(), io.StringIO()):
        with RunLog(tmp_path, steps=2, log_every=1, out=out, phase=lambda: "sending [weights]") as log:
            log.record(RECORD)
            log.record(replace(RECORD, step=2, loss=1.25))
        assert "step 2/2  loss 1.2500" in out.getvalue()
        shown.append(("━" in out.getvalue(), "sending [weights]" in out.getvalue()))
    assert shown == [(True, True), (False, False)]


def test_every_step_is_written(tmp_path: Path) -> None:
    with RunLog(tmp_path, steps=2, log_every=1, out=io.StringIO()) as log:
        log.record(RECORD)
        log.record(replace(RECORD, step=2, loss=1.25))
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record.pop("ranks") for record in kept] == [1, 1]
    assert [StepRecord(**record) for record in kept] == [RECORD, replace(RECORD, step=2, loss=1.25)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("loss")] == [2.5, 1.25]


def test_a_resumed_run_logs_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was killed after logging two steps past the checkpoint, and half of a third."""
    # TensorBoard orders files of one second by a process-wide number as text, so that 10 would come before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    out = io.StringIO()
    with RunLog(tmp_path, steps=6, log_every=1, out=out) as log:
        for step in range(1, 5):
            log.record(replace(RECORD, step=step, loss=float(step)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    os.utime(tmp_path / "metrics.jsonl", (0.0, time.time() - 90))
    with RunLog(tmp_path, steps=6, log_every=9, out=(again := io.StringIO()), after=2, ranks=2) as log:
        for step in range(3, 7):
            log.record(replace(RECORD, step=step, loss=10.0 * step))
    said, _ = again.getvalue().splitlines()  # and the last step
    assert re.fullmatch(
        r"resumed: step 3 ended \d+\.\d\d s after step 4, on 2 ranks, before on 1; it repeats steps 3-4", said
    )
    assert float(said.split()[4]) >= 90
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in kept] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50), (6, 60)]
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1), (2, 2), (3, 30), (4, 40), (5, 50), (6, 60),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_does_not_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """The limit on the size of files is that of a full disk for both; TensorBoard writes when it is closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))
    out = io.StringIO()
    with RunLog(tmp_path, steps=4, log_every=1, out=out) as log:
        log.record(RECORD)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, hard))
        for step in (2, 3, 4):
            log.record(replace(RECORD, step=step))
    said = capsys.readouterr().err
    assert "step 4/4" in out.getvalue()
    assert said.count(f"warning: {tmp_path / 'metrics.jsonl'} cannot be written") == 1
    assert f"warning: {tmp_path / 'metrics.jsonl'} lacks the lines of steps 2-4" in said
    assert said.count(f"warning: {tmp_path / 'tensorboard'} cannot be written") == 1
    assert said.count(f"warning: {tmp_path / 'tensorboard'} lacks what came after step ") == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    with RunLog(tmp_path, steps=4, log_every=1, out=out, after=0) as log:  # a new start on a disk that is still full
        assert (tmp_path / "metrics.jsonl").read_text() == ""
        log.record(RECORD)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.record(replace(RECORD, step=2))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    said = capsys.readouterr().err
    assert "lacks what came after step 0" in said and "lacks the lines" not in said


FAKE_WANDB = """
told = []

class _Run:
    def log(self, numbers, step):
        told.append((step, numbers))
    def finish(self, exit_code=0):
        told.append(("finish", exit_code))

def init(**arguments):
    told.append(("init", arguments))
    return _Run()
"""
FAKE_MLFLOW = """
from types import SimpleNamespace

told = []

def set_experiment(name):
    told.append(("experiment", name))

def start_run(run_id, run_name):
    told.append(("start", run_id, run_name))
    return SimpleNamespace(info=SimpleNamespace(run_id="7"))

def log_dict(values, name):
    told.append((name, values))

def log_metrics(numbers, step):
    told.append((step, numbers))

def end_run(status):
    told.append(("end", status))
"""
PROJECTS = {"wandb_project": "attention", "trackio_project": "long", "mlflow_experiment": "lab"}


def test_trackers_get_the_same_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for name in (packages := tuple(TRACKERS.values())):
        (tmp_path / f"{name}.py").write_text(FAKE_MLFLOW if name == "mlflow" else FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: [sys.modules.pop(name, None) for name in packages])
    folder = tmp_path / "run"
    folder.mkdir()
    config = TrainConfig(seed=3, **PROJECTS)
    assert not [*tracker_problems(config)] and not open_trackers(TrainConfig(), folder)
    for after, numbers in ((0, (1, 2)), (1, (2, 3))):  # step 2 is repeated
        trackers = open_trackers(config, folder)
        with (
            suppress(KeyboardInterrupt),
            RunLog(folder, steps=3, log_every=1, out=io.StringIO(), after=after, trackers=trackers) as log,
        ):
            for step in numbers:
                log.record(replace(RECORD, step=step))
            if after:
                raise KeyboardInterrupt
    wandb, trackio, mlflow = (importlib.import_module(name).told for name in packages)
    for told, project in ((wandb, "attention"), (trackio, "long")):
        first, step_1, step_2, _, second, step_3, _ = told
        assert first == second and first[1]["project"] == project and first[1]["config"] == asdict(config)
        assert [each[0] for each in (step_1, step_2, step_3)] == [1, 2, 3]
        assert step_1[1]["loss"] == 2.5 and "step" not in step_1[1] and "mfu" not in step_1[1]
    identity = (folder / "wandb-id").read_text()
    assert (wandb[0][1]["id"], trackio[0][1]["name"]) == (identity, f"run-{identity}")
    assert (wandb[3], wandb[-1]) == (("finish", 0), ("finish", 1))
    assert [each for each in mlflow if each[0] in ("start", "end")] == [
        ("start", None, "run"),
        ("end", "FINISHED"),
        ("start", "7", "run"),
        ("end", "FAILED"),
    ]
    assert [step for step, numbers in (each for each in mlflow if len(each) == 2) if step in (1, 2, 3)] == [1, 2, 3]


def test_a_project_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()  # left by an earlier run; not the package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert not [*tracker_problems(TrainConfig())]
    said = [*tracker_problems(TrainConfig(**PROJECTS))]
    assert len(said) == 3 and "--wandb-project attention needs the package wandb, which is not installed" in said[0]


def test_sizes_and_counts_are_short() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 5 * 2**30, 3 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "3.0 TiB",
    ]  # fmt: skip
    assert [count(n) for n in (12.4, 999, 1000, 836736, 8.03e9)] == ["12", "999", "1.0k", "836.7k", "8.0G"]


def test_peak_memory_of_this_process() -> None:
    assert peak_memory(torch.device("cpu")) > 2**20


def pairs_by_hand(boundaries: list[int], window: int) -> int:
    return sum(
        1
        for begin, end in itertools.pairwise(boundaries)
        for query in range(begin, end)
        for key in range(begin, query + 1)
        if not window or query - key < window
    )


@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_visible_pairs_are_those_of_the_mask(window: int) -> None:
    rows = [[0, 1, 7, 7, 20], [0, 20, 20, 20, 20]]
    expected = sum(pairs_by_hand(boundaries, window) for boundaries in rows)
    assert visible_pairs(torch.tensor(rows, dtype=torch.int32), window) == expected


def test_flops_count_a_causal_mask_once() -> None:
    facts = ModelFacts("m", num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=10, windows=(0, 16))
    length = 64
    full, windowed = length * (length + 1) // 2, 16 * 17 // 2 + (length - 16) * 16
    call = {"matmul_parameters": 1000, "tokens": length, "cu_seqlens": torch.tensor([[0, length]], dtype=torch.int32)}
    assert training_flops(facts, **call) == 6 * 1000 * length + 12 * 4 * 8 * (full + windowed)
    narrower = replace(facts, v_head_dim=5)
    assert training_flops(narrower, **call) == 6 * 1000 * length + 6 * 4 * (8 + 5) * (full + windowed)


def test_flops_of_chosen_keys_grow_with_tokens_and_those_of_an_indexer_with_pairs() -> None:
    facts = ModelFacts("m", num_heads=4, num_kv_heads=4, head_dim=8, vocab_size=10, windows=(0, 0), chosen=(16, 16))
    assert facts.reaches == (16, 16)
    cuts = [torch.tensor([[0, length]], dtype=torch.int32) for length in (64, 128, 192)]
    few, more, most = (training_flops(facts, matmul_parameters=0, tokens=0, cu_seqlens=cut) for cut in cuts)
    assert more - few == most - more == 2 * 12 * 4 * 8 * 64 * 16
    indexed = training_flops(replace(facts, index_size=3), matmul_parameters=0, tokens=0, cu_seqlens=cuts[0])
    assert indexed - few == 2 * 3 * 64 * 65 // 2
    assert replace(facts, windows=(4, -1)).reaches == (4, -1)
