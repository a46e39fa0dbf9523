"""A run continues from its checkpoint as if it had never stopped, on the ranks and layout it had or on others."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.harness.ranks import RankPool
from tests.usp.tiny import drawn_model
from usp.config import CurriculumStage, TrainConfig
from usp.data.batches import BatchStream
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.parallel import latest
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.checkpoints import CHECKPOINTS, Start, TrainingState, find_start
from usp.train.prepare import PreparedRun, prepare
from usp.train.trainer import Trainer, train

# 4 sequences a step in every layout; eps as in tiny.py: by default rounding decides the first steps.
RUN = TrainConfig(seq_len=64, steps=4, warmup_steps=2, checkpoint_every=2, adam_eps=1e-4, device="cpu", zero=3)
SAVED_ON = {"sp_ulysses": 2, "batch_size": 2}  # dp2 u2
LAYOUTS = [
    (4, SAVED_ON),
    (4, {"tp": 2, "pp": 2, "batch_size": 4, "micro_batches": 2}),
    (4, {"tp": 2, "tp_sequence_parallel": True, "sp_ring": 2, "batch_size": 4, "zero": 1}),
    (4, {"dp_replicate": 2, "sp_ulysses": 2, "batch_size": 2, "sp_layout": "striped"}),
    (1, {"batch_size": 4}),
]


def run(config: TrainConfig) -> None:
    ranks = dist.get_world_size()
    Trainer(prepare(config, Launch(rank=dist.get_rank(), world_size=ranks, local_world_size=ranks))).run()


def metrics_of(folder: Path) -> torch.Tensor:
    """(loss, gradient norm) of each step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(records[0]["step"], RUN.steps + 1))
    return torch.tensor([(record["loss"], record["grad_norm"]) for record in records], dtype=torch.float64)


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that was never stopped, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    ranks.run(run, 4, replace(RUN, **SAVED_ON, output=str(folder)))
    assert [path.name for path in sorted((folder / CHECKPOINTS).iterdir())] == ["step-00000002", "step-00000004"]
    return folder


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
@pytest.mark.slow(full=3)
def test_it_continues_on_any_layout(
    ranks: RankPool, whole: Path, tmp_path: Path, world_size: int, layout: dict[str, int]
) -> None:
    checkpoint = whole / CHECKPOINTS / "step-00000002"
    config = replace(RUN, **layout, output=str(tmp_path / "on"), resume=str(checkpoint))
    ranks.run(run, world_size, config)
    found, wanted = metrics_of(tmp_path / "on"), metrics_of(whole)[2:]
    assert (found / wanted - 1).abs().max() <= (0 if layout == SAVED_ON else 1e-5)


@pytest.mark.exhaustive  # with other degrees: above
def test_it_continues_on_other_stages(ranks: RankPool, tmp_path: Path) -> None:
    """Four stages on each of two ranks; then two, then one rank, and export the same weights."""
    deep = load_model_config("tiny")
    deep.num_hidden_layers = 8
    save_weights(dict(drawn_model(deep).named_parameters()), tmp_path / "deep", config=deep)
    of_four: dict[str, Any] = {"pp": 2, "pp_schedule": "interleaved-1f1b", "pp_stages_per_rank": 4, "micro_batches": 2}
    config = replace(RUN, model=str(tmp_path / "deep"), tokenizer="bytes", batch_size=4, output=str(tmp_path / "whole"))
    ranks.run(run, 2, replace(config, **of_four))
    resumed = replace(config, resume=str(tmp_path / "whole" / CHECKPOINTS / "step-00000002"))
    others = {"two": of_four | {"pp_stages_per_rank": 2}, "one": {}}
    for name, layout in others.items():
        ranks.run(run, 2 if layout else 1, replace(resumed, **layout, output=str(tmp_path / name)))
        assert (metrics_of(tmp_path / name) / metrics_of(tmp_path / "whole")[2:] - 1).abs().max() <= 1e-5
    exported = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", *others)]
    for other in exported[1:]:
        torch.testing.assert_close(other, exported[0], rtol=1e-5, atol=1e-6)


def test_a_finished_run_is_continued_in_its_folder_with_more_steps(whole: Path, tmp_path: Path) -> None:
    alone = replace(RUN, batch_size=4, output=str(tmp_path / "run"), resume=str(whole), steps=8)
    prepared = prepare(alone, Launch())
    assert prepared.start.checkpoint == latest(whole / CHECKPOINTS) == whole / CHECKPOINTS / "step-00000004"
    assert prepare(replace(alone, output=""), Launch()).start.folder == whole


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "qwen3-tiny"}, r"--model = qwen3-tiny is not the model of the checkpoint \(.*model_type"),
        ({"steps": 2}, "--steps = 2 leaves nothing to do: the checkpoint is of step 2; use at least 3"),
        ({"seq_len": 512}, "seq_len = 512, but the checkpoint has 64: use the same as before, or --data-changed"),
        ({"seed": 1}, "seed = 1, but the checkpoint has 0"),
        ({"sp_ring": 2}, r"(?s)divide the world size 1:.* of 4 ranks, and this run has 1: --plan auto .* --nnodes 4 "),
    ],
)
@pytest.mark.slow(but=3)
def test_what_cannot_change_is_refused(whole: Path, tmp_path: Path, changes: dict[str, object], said: str) -> None:
    old = str(whole / CHECKPOINTS / "step-00000002")
    config = replace(RUN, batch_size=4, resume=old, output=str(tmp_path), **changes)
    with pytest.raises(ConfigurationError, match=said):
        prepare(config, Launch())


def test_an_old_checkpoint_needs_another_folder(whole: Path) -> None:
    config = replace(RUN, batch_size=4, resume=str(whole / CHECKPOINTS / "step-00000002"))
    with pytest.raises(
        ConfigurationError, match=r"is not the newest checkpoint of .*: give another --output to the run"
    ):
        prepare(config, Launch())


def test_resume_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no complete checkpoint: give the folder of a run"):
        prepare(replace(RUN, resume=str(tmp_path)), Launch())
    with pytest.raises(ConfigurationError, match="--resume auto continues the run in --output: give --output"):
        prepare(replace(RUN, resume="auto"), Launch())
    assert prepare(replace(RUN, resume="auto", output=str(tmp_path)), Launch()).start.checkpoint is None


def folder_of_a_run(path: Path, *steps: int) -> Path:
    """What `find_start` looks at of a run that has checkpoints of these steps."""
    path.mkdir()
    for step in steps:
        (path / CHECKPOINTS / f"step-{step:08d}").mkdir(parents=True)
    (path / "metrics.jsonl").touch()
    return path


def start_of(attempt: int = 0, **changes: str) -> Start:
    return find_start(replace(RUN, **changes), Launch(attempt=attempt))


def test_a_run_is_not_continued_in_the_folder_of_another(tmp_path: Path) -> None:
    run = folder_of_a_run(tmp_path / "run", 3)
    only_metrics, only_checkpoints = folder_of_a_run(tmp_path / "a"), folder_of_a_run(tmp_path / "b", 1)
    (only_checkpoints / "metrics.jsonl").unlink()
    for other in (only_metrics, only_checkpoints):
        with pytest.raises(ValueError, match="already holds a run: choose another directory"):
            start_of(resume=str(run), output=str(other))
        with pytest.raises(ValueError, match="already holds a run: choose another directory"):
            start_of(output=str(other))
    assert start_of(resume=str(run), output=str(only_metrics), attempt=1).checkpoint == latest(run / CHECKPOINTS)
    assert start_of(resume=str(run), output=str(tmp_path / "run/../run")).checkpoint == latest(run / CHECKPOINTS)


def test_a_restart_after_a_refusal_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder_of_a_run(tmp_path / "run", 3)
    restarted = Launch(attempt=1, agent_store=("localhost", 1))
    monkeypatch.setattr(Launch, "recall", lambda self, key: None)
    with pytest.raises(ValueError, match="already holds a run: choose"):
        find_start(replace(RUN, output=str(run)), restarted)
    monkeypatch.setattr("usp.train.checkpoints.holder", lambda folder: "process 7 on a")
    with pytest.raises(ValueError, match="already holds a run, to which process 7 on a writes: choose"):
        find_start(replace(RUN, output=str(run)), restarted)
    monkeypatch.setattr(Launch, "recall", lambda self, key: str(run))
    assert find_start(replace(RUN, output=str(run)), restarted).checkpoint == latest(run / CHECKPOINTS)


def test_an_old_checkpoint_is_refused_however_its_run_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder_of_a_run(tmp_path / "run", 2, 4)
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    old = f"{CHECKPOINTS}/step-00000002"
    for resume, output in ((f"run/{old}", str(run)), (f"link/{old}", "run"), (f"link/{old}", ""), (f"run/{old}", "")):
        with pytest.raises(ValueError, match="is not the newest checkpoint"):
            start_of(resume=resume, output=output)


def test_a_run_may_be_called_like_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder_of_a_run(tmp_path / "step-test", 3)
    assert start_of(resume=str(run)) == Start(run, run / CHECKPOINTS / "step-00000003")
    monkeypatch.chdir(run / CHECKPOINTS)
    assert start_of(resume="step-00000003").folder == run


def test_checkpoints_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    run = folder_of_a_run(tmp_path / "run", 3)
    (run / CHECKPOINTS).rename(tmp_path / "elsewhere")
    (run / CHECKPOINTS).symlink_to(tmp_path / "elsewhere")
    checkpoint = run / CHECKPOINTS / "step-00000003"
    for resume in (run, run / CHECKPOINTS, checkpoint):
        for output in ("", str(run)):
            assert start_of(resume=str(resume), output=output) == Start(run, checkpoint, named=resume == checkpoint)


@pytest.mark.parametrize("output", ["file", "file/below/it"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output = .* is not writable: .*/file is not a directory"):
        start_of(output=str(tmp_path / output))


# Other data

DOCUMENTS = {"a": 40, "b": 300, "c": 20}


def corpus(folder: Path, letter: str, documents: int) -> str:
    """A file of documents of 63 letters, each with its end a row, whose first letters say which it is."""
    texts = (f"{letter}{number:03}" + letter * 59 for number in range(documents))
    (folder / f"{letter}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(folder / f"{letter}.jsonl")


def drawn(stream: BatchStream, rows: int) -> Counter[str]:
    """The documents of the next rows, and how often each is among them."""
    found = Counter[str]()
    for number in range(stream.next_row, stream.next_row + rows):
        for begin in (row := stream.packed.row(number)).begins.tolist():
            found["".join(chr(token - 3) for token in row.store.read(begin, begin + 4))] += 1
    return found


def after(prepared: PreparedRun, step: int) -> TrainingState:
    """What a checkpoint of this step holds."""
    stage = prepared.stage_of(step)
    stage.batches.next_row += (step - max(stage.first - 1, stage.batches.begun[0])) * stage.sequences
    stream = json.loads(json.dumps(stage.batches.state_dict()))
    config, model = asdict(prepared.config), prepared.model_config.to_dict()
    return TrainingState(step=step, tokens=0, stream=stream, random={}, config=config, model=model, evaluations={})


def continued(config: TrainConfig, saved: TrainingState, monkeypatch: pytest.MonkeyPatch) -> PreparedRun:
    monkeypatch.setattr("usp.train.prepare.read_state", lambda *_: saved)
    return prepare(config, Launch(), Start(Path("run"), Path("run/checkpoints/step")))


@pytest.mark.parametrize(
    ("parts", "batch", "kept", "packing"),
    [
        ({"a": 1, "b": 3}, 8, "ab", "cut"),  # other weights
        ({"a": 1, "b": 1, "c": 2}, 8, "abc", "whole"),
        ({"b": 1}, 4, "b", "cut"),
        ({"c": 1, "b": 1}, 8, "cb", "cut"),
    ],
)
@pytest.mark.slow(full=2)
def test_each_part_of_other_data_begins_an_epoch_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, int], batch: int, kept: str, packing: str
) -> None:
    files = {letter: corpus(tmp_path, letter, count) for letter, count in DOCUMENTS.items()}
    config = replace(RUN, steps=400, data_cache=str(tmp_path / "cache"), packing=packing, batch_size=8)
    config = replace(config, data=f"{files['a']}=1,{files['b']}=1", resume="run")
    saved = after(prepare(replace(config, resume=""), Launch()), step=12)  # 96 rows: about 1.2 epochs of a
    assert saved.stream["row"] == 96 and saved.stream["epoch"] == 1

    data = ",".join(f"{files[letter]}={weight}" for letter, weight in parts.items())
    config = replace(config, data=data if len(parts) > 1 else files[kept], batch_size=batch)
    with pytest.raises(ConfigurationError, match="or --data-changed to begin a new epoch"):
        continued(config, saved, monkeypatch)
    run = continued(replace(config, data_changed=True), saved, monkeypatch)
    stream = run.begins_in.batches
    assert stream.packed.epochs(stream.next_row) == [2.0] * len(kept) and stream.epoch == 2.0
    found = drawn(stream, 300)
    for epoch, letter in zip(stream.packed.epochs(300), kept, strict=True):
        counts = [found[f"{letter}{number:03}"] for number in range(DOCUMENTS[letter])]
        assert sum(counts) / len(counts) == pytest.approx(epoch - 2)
        assert max(counts) - min(counts) <= 1  # none a second time before all others

    later = after(run, step=20)
    again = continued(config, later, monkeypatch).begins_in.batches
    assert again.next_row == 8 * batch and again.state_dict() == later.stream | {"begun": (12, 2)}
    monkeypatch.setattr(stream, "next_row", again.next_row)
    assert drawn(again, 50) == drawn(stream, 50)


def test_other_data_in_a_stage_of_a_curriculum_begins_an_epoch_that_later_stages_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = (CurriculumStage(steps=10, seq_len=64), CurriculumStage(steps=20, seq_len=128, global_batch_size=2))
    config = replace(RUN, steps=30, data_cache=str(tmp_path / "cache"), batch_size=4, packing="cut", resume="run")
    config = replace(config, curriculum=stages, data=corpus(tmp_path, "a", 200))
    saved = after(prepare(replace(config, resume=""), Launch()), step=4)  # 16 rows of the first stage's 40
    changed: dict[str, Any] = {"data": corpus(tmp_path, "b", 100), "data_changed": True}
    run = continued(replace(config, **changed), saved, monkeypatch)
    first, second = (stage.batches for stage in run.stages)
    assert first.packed.epochs(0) == [1.0] and first.begun == (4, 1)
    found = drawn(first, 24)  # of steps 5 to 10
    assert found == drawn(first, 24) and set(found.values()) == {1} and len(found) == 24
    assert second.packed.epochs(0) == [1.24]
    found += drawn(second, 38)  # 76 documents
    assert set(found.values()) == {1} and len(found) == 100

    again = continued(replace(config, **changed | {"data_changed": False}), after(run, step=14), monkeypatch)
    assert again.begins_in.batches.next_row == 8 and drawn(again.begins_in.batches, 5) == drawn(second, 5)


@pytest.mark.slow
def test_the_log_of_a_changed_mixture_goes_on_with_a_whole_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, many = corpus(tmp_path, "a", 10), corpus(tmp_path, "b", 160)
    config = replace(RUN, batch_size=4, data_cache=str(tmp_path / "cache"), output=str(tmp_path / "run"))
    config = replace(config, packing="cut", data=f"{few}=1,{many}=1", steps=3, hang_timeout=0)
    train(prepare(config, Launch()), Launch())
    config = replace(config, steps=6, resume="auto", data=f"{few}=1,{many}=3", data_changed=True)
    train(prepare(config, Launch()), Launch())
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    of_few, of_many = ([record[f"epoch/{path}"] for record in records] for path in (few, many))
    for step, epochs in enumerate(zip(of_few, of_many, strict=True), start=1):
        begun, rows = (0, 4 * step) if step <= 3 else (1, 4 * (step - 3))
        assert 10 * (epochs[0] - begun) + 160 * (epochs[1] - begun) == pytest.approx(rows)
        assert all(begun <= epoch < begun + 1 for epoch in epochs)
    second = capsys.readouterr().out.partition("resumed from")[0].rpartition("data: ")[2]
    assert f"75.0% of the rows, read {of_many[-1] - 1:.2f} times" in second
