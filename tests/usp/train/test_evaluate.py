"""Evaluation on held-out data: one loss on every layout, training undisturbed, and the best checkpoint kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import usp.train.trainer
from tests.harness.ranks import RankPool
from tests.usp.tiny import drawn_model
from tests.usp.train.test_trainer import launch_of_pool
from usp.config import TrainConfig
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.prepare import prepare
from usp.train.step import Evaluations, HeldOutLoss, perplexity
from usp.train.trainer import Trainer, train

SMALL = TrainConfig(seq_len=64, steps=4, warmup_steps=2, adam_eps=1e-4, device="cpu", hang_timeout=0)
DOCUMENTS = ["def " * 30, "x", "import os\n" * 25, "return 1\n" * 9, "held out " * 14]


@pytest.fixture(autouse=True)
def no_group_stays_open() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("held-out") / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return file


# The loss


def eval_losses(configs: list[TrainConfig], folder: str) -> list[dict[int, float]]:
    """The losses on held-out data by position, that of all targets under 0, after a step that changes nothing."""
    losses = []
    for config in configs:
        still = replace(config, learning_rate=1e-30, weight_decay=0.0, eval_every=1, output=folder)
        record = Trainer(prepare(still, launch_of_pool())).step(1)
        assert record.eval_loss is not None and record.printed and "eval loss" in record.line()
        assert record.eval_perplexity == perplexity(record.eval_loss)
        losses.append({0: record.eval_loss, **record.eval_loss_by_position})
    return losses


DENSE: list[dict[str, Any]] = [
    {"sp_ulysses": 2, "sp_ring": 2},
    {"sp_ring": 2, "batch_size": 3, "sp_layout": "striped", "zero": 2},
    {"tp": 2, "tp_sequence_parallel": True, "sp_ulysses": 2, "zero": 1, "ac": "full"},
    {"tp": 2, "sp_ring": 2, "sp_layout": "contiguous"},
    {"pp": 2, "sp_ring": 2, "batch_size": 4, "micro_batches": 4},
    {
        "pp": 2,
        "dp_shard": 2,
        "batch_size": 4,
        "micro_batches": 2,
        "pp_schedule": "interleaved-1f1b",
        "pp_stages_per_rank": 4,
    },
]
EXPERTS: list[dict[str, Any]] = [
    {"ep": 2, "sp_ulysses": 2, "batch_size": 2, "micro_batches": 2},
    {"pp": 2, "ep": 2, "sp_ring": 2, "batch_size": 2, "micro_batches": 2},
]


@pytest.mark.slow
def test_losses_by_position_are_those_of_plain_transformers_on_every_layout(
    ranks: RankPool, tmp_path: Path, held_out: Path, exhaustive: bool
) -> None:
    """The load-balancing loss of experts is no part of them."""
    deep = load_model_config("tiny")
    deep.num_hidden_layers = 8
    save_weights(dict(drawn_model(deep).named_parameters()), tmp_path / "deep", config=deep)
    config = replace(SMALL, eval_data=str(held_out), tokenizer="bytes")
    for model, layouts in ((str(tmp_path / "deep"), DENSE), ("qwen3-moe-tiny", EXPERTS)):
        layouts = layouts if exhaustive else layouts[1::3]
        configs = [replace(config, model=model, **layout) for layout in layouts]
        expected = pytest.approx(plain_losses(model), rel=1e-6)
        for found in ranks.run(eval_losses, 4, configs, str(tmp_path)):
            assert len(found) == len(layouts) and all(losses == expected for losses in found)


def plain_losses(name: str) -> dict[int, float]:
    """Return `eval_losses`, each part of a document in a row alone through a transformers model."""
    model, losses = drawn_model(load_model_config(name)), dict[int, list[float]]()
    ids = [[byte + 3 for byte in text.encode()] + [1] for text in DOCUMENTS]
    stream, ends = torch.tensor([*chain(*ids)]), list(accumulate(map(len, ids)))
    cuts = sorted({*range(0, ends[-1], SMALL.seq_len), *ends})
    for begin, end in pairwise(cuts):
        part = stream[begin:end]
        with torch.no_grad():
            logits = model(input_ids=part[None]).logits[0, :-1].double()
        found = torch.nn.functional.cross_entropy(logits, part[1:], reduction="none").tolist()
        for position, loss in enumerate(found, start=1):
            for last in (0, next(last for last in (16, 32, 64) if position <= last)):
                losses.setdefault(last, []).append(loss)
    return {last: sum(found) / len(found) for last, found in losses.items()}


@pytest.mark.slow
def test_completions_are_evaluated_whole_as_they_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that the last batch fills up with, and prompts, are no targets; several sets have losses of their own."""
    pairs = [(f"question {number}: " * 2, f"the answer {number} " * (number % 3 + 1)) for number in range(7)]
    for name, rows in (("all", pairs), ("first", pairs[:1])):
        lines = (json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in rows)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sets = ",".join(f"{name}={tmp_path / name}.jsonl" for name in ("all", "first"))
    config = replace(SMALL, steps=1, batch_size=3, eval_data=sets, data_cache=str(tmp_path / "cache"))
    config = replace(config, learning_rate=1e-30, weight_decay=0.0, output=str(tmp_path / "run"), checkpoint_every=0)
    train(prepare(config, Launch()), Launch())
    (numbers,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    model, losses = drawn_model(load_model_config("tiny")), list[list[float]]()
    for prompt, completion in pairs:
        ids = torch.tensor([byte + 3 for byte in f"{prompt}{completion}".encode()] + [1])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[len(prompt) :], reduction="none").tolist())
    expected = {name: torch.tensor([*chain(*losses[:n])]).mean().item() for name, n in (("all", 7), ("first", 1))}
    assert {name: numbers[f"eval_loss/{name}"] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert numbers["eval_loss"] == numbers["eval_loss/all"]
    assert numbers["eval_loss_by_position/first/64"] != numbers["eval_loss_by_position/64"]
    shown = capsys.readouterr().out
    assert "eval loss by set: all " in shown and "packing: eval data all: " in shown
    with pytest.raises(ConfigurationError, match=r"eval_data=.* must be NAME=PATH,NAME=PATH"):
        prepare(replace(config, eval_data=f"{sets},=x"), Launch())


TRAINED: list[dict[str, Any]] = [
    {"sp_ulysses": 2, "batch_size": 2, "micro_batches": 2, "zero": zero} for zero in (1, 3)
]


def steps_with_and_without(layouts: list[dict[str, Any]], data: str, folder: str) -> list[list[tuple[float, ...]]]:
    """(loss, gradient norm, attention's bytes) of two steps, with an evaluation after each, and with none."""
    found = []
    for eval_data in (data, ""):
        for layout in layouts:
            config = replace(SMALL, **layout, eval_data=eval_data, eval_every=int(bool(eval_data)), output=folder)
            trainer = Trainer(prepare(config, launch_of_pool()))
            records = [trainer.step(number) for number in (1, 2)]
            found.append([(r.loss, r.grad_norm, r.attention_sent_bytes) for r in records])
    return found


@pytest.mark.slow
def test_training_is_not_disturbed(ranks: RankPool, tmp_path: Path, held_out: Path) -> None:
    for found in ranks.run(steps_with_and_without, 2, TRAINED, str(held_out), str(tmp_path)):
        assert found[: len(TRAINED)] == found[len(TRAINED) :]


# The best checkpoint


class Scripted:
    """Gives these losses, and remembers the weights that they are of."""

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.weights = iter(losses), list[torch.Tensor]()

    def __call__(self, engine: Any, *_: Any, **__: Any) -> HeldOutLoss:
        self.weights.append(engine.state()["model.lm_head.weight"].full_tensor().clone())
        loss = next(self.losses)
        return HeldOutLoss(loss, {16: loss, 2048: loss + 1})


def kept(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def exported(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.detach()


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_exported(
    tmp_path: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = replace(SMALL, steps=7, eval_data=str(held_out), eval_every=1, checkpoint_every=3, keep_checkpoints=1)
    config = replace(config, output=str(run))
    first = Scripted([3.0, 1.5, 2.0, 1.0, 2.0, 1.0, 4.0])
    monkeypatch.setattr(usp.train.trainer, "held_out_loss", first)
    train(prepare(config, Launch()), Launch())
    assert kept(run) == [4, 7]  # of equal ones the first
    assert torch.equal(exported(run / "best"), first.weights[3]) and torch.equal(
        exported(run / "model"), first.weights[6]
    )
    shown = capsys.readouterr().out
    assert f"best: {run / 'best'}, of step 4, eval loss 1.0000, perplexity 2.718" in shown
    assert "eval data:" in shown and "step 2/7  loss" in shown  # although log lines are ten steps apart
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["eval_loss"] for record in records] == [3.0, 1.5, 2.0, 1.0, 2.0, 1.0, 4.0]
    assert records[1]["eval_loss_by_position/2048"] == 2.5
    assert "eval loss by position: to 16 1.5000  to 2K 2.5000" in shown

    again = Scripted([1.1, 1.2])
    monkeypatch.setattr(usp.train.trainer, "held_out_loss", again)
    train(prepare(replace(config, steps=9, resume="auto"), Launch()), Launch())
    assert kept(run) == [4, 9] and torch.equal(exported(run / "best"), first.weights[3])

    (tmp_path / "other.txt").write_text("something else")
    other = replace(config, steps=10, resume="auto", eval_data=str(tmp_path / "other.txt"))
    last = Scripted([2.0])
    monkeypatch.setattr(usp.train.trainer, "held_out_loss", last)
    train(prepare(other, Launch()), Launch())
    assert kept(run) == [10] and torch.equal(exported(run / "best"), last.weights[0])


@pytest.mark.slow
def test_it_is_evaluated_at_checkpoints_and_at_the_end(
    tmp_path: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usp.train.trainer, "held_out_loss", Scripted([2.0, 1.0, 0.5]))
    config = replace(SMALL, steps=5, eval_data=str(held_out), checkpoint_every=2, output=str(tmp_path))
    train(prepare(config, Launch()), Launch())
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["eval_loss"] for record in records] == [None, 2.0, None, 1.0, 0.5]


@pytest.mark.slow
def test_a_run_ends_early_without_a_lower_loss_and_stays_at_its_end(
    tmp_path: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = replace(SMALL, steps=9, eval_data=str(held_out), eval_every=1, checkpoint_every=3, keep_checkpoints=1)
    config = replace(config, early_stopping_patience=2, output=str(run))
    losses = Scripted([3.0, 1.5, 1.5, 2.0])
    monkeypatch.setattr(usp.train.trainer, "held_out_loss", losses)
    train(prepare(config, Launch()), Launch())
    ended = "early stopping: no lower loss on --eval-data in 2 evaluations, after step 4"
    assert ended in capsys.readouterr().out
    assert kept(run) == [2, 4] and torch.equal(exported(run / "best"), losses.weights[1])
    assert torch.equal(exported(run / "model"), losses.weights[3])

    train(prepare(replace(config, resume="auto"), Launch()), Launch())  # of a Scripted without further losses
    assert ended in capsys.readouterr().out and kept(run) == [2, 4]
    more = Scripted([1.2, 1.4, 1.3, 1.3])
    monkeypatch.setattr(usp.train.trainer, "held_out_loss", more)
    train(prepare(replace(config, resume="auto", early_stopping_patience=3), Launch()), Launch())
    assert len(more.weights) == 4 and kept(run) == [5, 8]


def test_early_stopping_needs_evaluations(held_out: Path) -> None:
    config = replace(SMALL, early_stopping_patience=2)
    with pytest.raises(ConfigurationError, match="--early-stopping-patience = 2 needs data to evaluate on"):
        prepare(config, Launch())
    with pytest.raises(ConfigurationError, match="counts evaluations, of which there is one: give --eval-every"):
        prepare(replace(config, eval_data=str(held_out), checkpoint_every=0), Launch())


def test_losses_of_other_data_are_forgotten() -> None:
    before = Evaluations("a", {2: 0.5, 4: 0.25})
    same, other = Evaluations("a"), Evaluations("b")
    for evaluations in (same, other):
        evaluations.restore(json.loads(json.dumps(before.to_extra())))
    assert same.best_first() == [4, 2] and other.best_first() == []
    assert perplexity(1e4) == float("inf")


# The data


@pytest.mark.slow
def test_epochs_of_a_mixture_are_those_of_each_part(
    tmp_path: Path, held_out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    small.write_text("a" * 63)  # one row of 64 tokens
    large.write_text("b" * 1279)  # 20 rows
    config = replace(SMALL, steps=3, batch_size=4, data=f"{small}=1,{large}=1", data_cache=str(tmp_path / "cache"))
    config = replace(config, output=str(tmp_path / "run"), checkpoint_every=0)
    train(prepare(config, Launch()), Launch())
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for step, record in enumerate(records, start=1):
        assert record[f"epoch/{small}"] + 20 * record[f"epoch/{large}"] == pytest.approx(4 * step)
    times, shown = records[-1][f"epoch/{small}"], capsys.readouterr().out
    assert times > 4 and f"50.0% of the rows, read {times:.2f} times" in shown
    assert f"warning: {small} is read {times:.1f} times in these steps" in shown and f"warning: {large}" not in shown
    assert f"epochs {times:.2f} of {small}, {records[-1][f'epoch/{large}']:.2f} of {large}" in shown


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"the text of {name}")
    config = replace(SMALL, data=str(tmp_path), eval_data=str(tmp_path / "b.txt"))
    prepared = prepare(config, Launch())
    assert prepared.begins_in.batches.packed.sources[0].store.manifest.files == 2
    assert prepared.begins_in.left_out == ("left out: b.txt (held out for evaluation)",)
    with pytest.raises(ConfigurationError, match=r"all files of .* are held out for evaluation"):
        prepare(replace(config, eval_data=str(tmp_path)), Launch())


def test_wrong_flags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--eval-every = 5 needs data to evaluate on: give --eval-data"):
        prepare(replace(SMALL, eval_every=5), Launch())
    missing = tmp_path / "nothing"
    with pytest.raises(ConfigurationError, match=f"eval_data={missing} does not exist"):
        prepare(replace(SMALL, eval_data=str(missing)), Launch())
