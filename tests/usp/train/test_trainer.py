"""Training runs: their folder, their numbers on every mesh, and how they stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GenerationConfig, PreTrainedModel

from tests.harness.ranks import RankPool
from tests.usp.tiny import drawn_model
from usp.commands.flags import parse
from usp.config import TrainConfig
from usp.data.batches import Part, TokenBatch, read_batch
from usp.fields import AUTO_RATE
from usp.hf.export import save_weights
from usp.hf.models import load_model_config
from usp.parallel import RanksDisagree
from usp.parallel.wire import SentBytes
from usp.run.failures import ConfigurationError, TrainingDiverged
from usp.run.launch import Launch
from usp.train.prepare import prepare
from usp.train.trainer import Trainer, train

SMALL = TrainConfig(seq_len=256, steps=4, warmup_steps=2, device="cpu")


@pytest.fixture(autouse=True)
def no_group_stays_open() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# One process


def test_a_run_leaves_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(SMALL, steps=12, output=str(tmp_path / "run"), log_every=5)
    train(prepare(config, Launch()), Launch())
    records = metrics_of(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, 13))
    assert records[-1]["loss"] < records[0]["loss"] - 1
    kept = parse(["--config", str(tmp_path / "run" / "config.yaml")], TrainConfig)
    assert kept == replace(config, tokenizer="bytes", dp_shard=1, learning_rate=3e-3)
    shown = capsys.readouterr().out
    assert "float32 on cpu" in shown and "learning rate: 0.003, after 2 warmup steps" in shown
    assert "step 5/12  loss" in shown and str(tmp_path / "run") in shown
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").config.use_cache


@pytest.mark.slow
def test_the_written_configuration_fits_other_machines_and_the_checkpoint_says_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(SMALL, device="auto", steps=1, output=str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    train(prepare(config, Launch()), Launch())
    written = parse(["--config", str(tmp_path / "config.yaml")], TrainConfig)
    assert (written.device, written.dtype, written.export_dtype) == ("auto", "auto", "auto")
    capsys.readouterr()
    train(prepare(replace(written, steps=2, resume="auto", dtype="bfloat16"), Launch()), Launch())
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed: ")]
    wanted = ["changed: --dtype = bfloat16 (checkpoint: float32)", "changed: --steps = 2 (checkpoint: 1)"]
    assert sorted(shown) == wanted


EXPORTS = [("bfloat16", "auto", "bfloat16"), ("bfloat16", "float32", "float32"), ("float32", "auto", "float32")]


@pytest.mark.parametrize(("computed", "asked", "written"), EXPORTS)
@pytest.mark.slow(full=2)
def test_a_model_is_exported_in_the_compute_dtype_or_the_one_asked_for(
    tmp_path: Path, computed: str, asked: str, written: str
) -> None:
    config = replace(SMALL, dtype=computed, steps=1)
    train(prepare(replace(config, export_dtype="float32", output=str(tmp_path / "trained")), Launch()), Launch())
    train(prepare(replace(config, export_dtype=asked, output=str(tmp_path / "run")), Launch()), Launch())
    trained, model = (AutoModelForCausalLM.from_pretrained(tmp_path / run / "model") for run in ("trained", "run"))
    assert str(model.dtype) == f"torch.{written}"
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["dtype"] == written
    for own, weight in zip(model.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(own, weight.to(model.dtype), rtol=0.0, atol=0.0)


@pytest.mark.slow
def test_the_default_learning_rate_is_that_of_random_or_pretrained_weights(tmp_path: Path) -> None:
    config = load_model_config("tiny")
    save_weights(dict(drawn_model(config).named_parameters()), tmp_path, config=config)
    folder = str(tmp_path)
    given = ("tiny", AUTO_RATE, 3e-3), (folder, AUTO_RATE, 1e-5), (folder, 1e-4, 1e-4), (folder, 0.0, 0.0)
    for model, asked, rate in given:
        prepared = prepare(replace(SMALL, model=model, tokenizer="bytes", learning_rate=asked), Launch())
        assert prepared.config.learning_rate == prepared.reusable.learning_rate == rate


@pytest.mark.slow
def test_the_written_configuration_repeats_the_run(tmp_path: Path) -> None:
    train(prepare(replace(SMALL, output=str(tmp_path / "a")), Launch()), Launch())
    again = parse(["--config", str(tmp_path / "a" / "config.yaml"), "--output", str(tmp_path / "b")], TrainConfig)
    train(prepare(again, Launch()), Launch())
    first, second = metrics_of(tmp_path / "a"), metrics_of(tmp_path / "b")
    assert [r["loss"] for r in first] == [r["loss"] for r in second]
    assert [r["grad_norm"] for r in first] == [r["grad_norm"] for r in second]


@pytest.mark.slow
def test_a_continued_run_exports_how_its_model_generates(tmp_path: Path) -> None:
    config = load_model_config("tiny")
    weights = dict(drawn_model(config).named_parameters())
    save_weights(weights, tmp_path / "model", config=config)
    # As published with well-known models: a temperature that transformers warns of, for nothing is sampled.
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    asked = replace(SMALL, model=str(tmp_path / "model"), tokenizer="bytes", output=str(tmp_path / "run"), steps=1)
    train(prepare(asked, Launch()), Launch())
    train(prepare(replace(asked, steps=2, resume="auto"), Launch()), Launch())
    assert GenerationConfig.from_pretrained(tmp_path / "run" / "model").temperature == 0.6


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigurationError, match="already holds a run"):
        train(prepare(replace(SMALL, output=str(tmp_path)), Launch()), Launch())


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_stops_the_run_and_keeps_the_last_good_weights(tmp_path: Path) -> None:
    config = replace(SMALL, learning_rate=1e30, warmup_steps=0, output=str(tmp_path))
    with pytest.raises(TrainingDiverged) as stop:
        train(prepare(config, Launch()), Launch())
    said = str(stop.value)
    assert "step 2 has loss = " in said and "gradient norm = nan, and both must be finite" in said
    assert f"The last good step is 1, and its weights are in {tmp_path / 'last-good'}" in said
    assert "Lower --learning-rate (now 1e+30)" in said
    assert [record["step"] for record in metrics_of(tmp_path)] == [1]
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "last-good")
    assert all(torch.isfinite(parameter).all() for parameter in kept.parameters())
    assert not (tmp_path / "model").exists()


def test_a_broken_checkpoint_is_not_called_good(tmp_path: Path) -> None:
    model_config = load_model_config("tiny")
    model = drawn_model(model_config)
    torch.nn.init.constant_(model.lm_head.weight[0], torch.nan)
    save_weights(dict(model.named_parameters()), tmp_path / "broken", config=model_config)
    config = replace(SMALL, model=str(tmp_path / "broken"), tokenizer="bytes", output=str(tmp_path / "run"))
    with pytest.raises(TrainingDiverged, match=r"step 1 has loss = nan.*No step came before, so nothing was saved"):
        train(prepare(config, Launch()), Launch())
    assert not (tmp_path / "run" / "last-good").exists()


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    config = replace(SMALL, model="tinny", data=str(tmp_path / "nothing"), sp_ring=3, tokenizer="nowhere", seq_len=100)
    with pytest.raises(ConfigurationError) as refused:
        prepare(config, Launch())
    for part in ("4 problems:", "did you mean 'tiny'", "world size 1", "does not exist", "--tokenizer nowhere"):
        assert part in str(refused.value)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    model_config = load_model_config("tiny")
    model_config.vocab_size = 100
    model = drawn_model(model_config)
    save_weights(dict(model.named_parameters()), tmp_path, config=model_config)
    with pytest.raises(ConfigurationError, match=r"bytes has ids up to 383, .* has a vocabulary of 100"):
        prepare(replace(SMALL, model=str(tmp_path), tokenizer="bytes"), Launch())


# Many ranks


def step_and_batch(config: TrainConfig, folder: str) -> tuple[float, float, TokenBatch]:
    """Loss and gradient norm of step 1, and the global batch that it saw."""
    prepared = prepare(replace(config, output=folder), launch_of_pool())
    rows = prepared.begins_in.batches.rows
    batch = read_batch(prepared.begins_in.batches.packed, range(rows), Part.whole(rows, config.seq_len))
    record = Trainer(prepared).step(1)
    return record.loss, record.grad_norm, batch


@pytest.mark.parametrize("packing", ["chats", "whole", "cut"])
@pytest.mark.slow(full=2)
def test_a_step_is_that_of_plain_transformers(ranks: RankPool, tmp_path: Path, packing: str) -> None:
    """Each document alone through the unchanged model; the mean over all their targets. With padding on most ranks."""
    config = replace(SMALL, sp_ulysses=2, sp_ring=2, seq_len=2048)
    if packing == "whole":
        lines = [json.dumps({"text": f"{number} is a number. " * 12}) for number in range(3)]
        (tmp_path / "data.jsonl").write_text("\n".join(lines))
        config = replace(config, packing=packing, data=str(tmp_path / "data.jsonl"))
    elif packing == "chats":
        turns = [("user", "Count!"), ("assistant", "one two three"), ("user", "Go on!"), ("assistant", "four")]
        messages = [{"role": role, "content": content} for role, content in turns]
        rows = [{"messages": messages[:2] * number + messages} for number in (0, 3, 9)]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "chat.jinja").write_text(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
        config = replace(config, data=str(tmp_path / "data.jsonl"), chat_template=str(tmp_path / "chat.jinja"))
    loss, grad_norm, batch = ranks.run(step_and_batch, 4, config, str(tmp_path))[0]
    found = loss, grad_norm
    expected = plain_step(drawn_model(load_model_config("tiny"), config.seed), batch)
    if packing == "chats":  # what the assistant writes, each with an end of sequence
        assert (batch.shift_labels != -100).sum() == len(batch.input_ids) * (15 * 14 + 3 * 5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


def plain_step(model: PreTrainedModel, batch: TokenBatch) -> tuple[float, float]:
    """Return loss and gradient norm of each document alone through a transformers model."""
    targets, total = 0, torch.zeros(())
    for row, labels, boundaries in zip(batch.input_ids, batch.shift_labels, batch.cu_seqlens.tolist(), strict=True):
        for begin, end in (pair for pair in pairwise(boundaries) if pair[1] > pair[0]):
            logits = model(input_ids=row[begin:end].unsqueeze(0)).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, labels[begin:end], reduction="sum")
            targets += int((labels[begin:end] != -100).sum())
    (total / targets).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    return total.item() / targets, norm.item()


LIMIT, LONGER = 128, 512
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SCALED: dict[str, dict[str, Any]] = {
    "yarn": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LIMIT},
    "linear": ROPE | {"rope_type": "linear", "factor": 4.0},
    "ntk": ROPE | {"rope_theta": 1e4 * 4 ** (16 / 14)},
}
LONG_MESHES = {
    "yarn": {"sp_ulysses": 2, "sp_ring": 2},
    "linear": {"tp": 2, "sp_ring": 2},
    "ntk": {"pp": 2, "sp_ring": 2, "batch_size": 2, "micro_batches": 2},
}


@pytest.mark.parametrize(
    "scaling", ["yarn", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("linear", "ntk"))]
)
@pytest.mark.slow
def test_a_longer_context_is_trained_and_exported_as_transformers_computes_it(
    ranks: RankPool, tmp_path: Path, scaling: str
) -> None:
    short, long = load_model_config("tiny"), load_model_config("tiny")
    short.max_position_embeddings = LIMIT
    long.max_position_embeddings, long.rope_parameters = LONGER, SCALED[scaling]
    save_weights(dict(drawn_model(short).named_parameters()), tmp_path / "short", config=short)
    config = replace(SMALL, model=str(tmp_path / "short"), tokenizer="bytes", seq_len=LONGER, rope_scaling=scaling)
    many = replace(config, **LONG_MESHES[scaling])
    loss, grad_norm, batch = ranks.run(step_and_batch, 4, many, str(tmp_path / "many"))[0]
    torch.testing.assert_close((loss, grad_norm), plain_step(drawn_model(long), batch), rtol=1e-5, atol=0.0)

    run = replace(config, learning_rate=1e-30, weight_decay=0.0, steps=1, output=str(tmp_path / "run"))
    train(prepare(run, Launch()), Launch())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert exported.config.max_position_embeddings == LONGER
    assert exported.config.rope_parameters == pytest.approx(SCALED[scaling])
    ids = batch.input_ids[:1]
    with torch.no_grad():
        torch.testing.assert_close(exported(input_ids=ids).logits, drawn_model(long)(input_ids=ids).logits)
    train(prepare(replace(run, steps=2, resume="auto"), Launch()), Launch())
    other = "linear" if scaling != "linear" else "yarn"
    with pytest.raises(ConfigurationError, match=r"is not the model of the checkpoint .*rope_parameters = "):
        prepare(replace(run, steps=3, resume="auto", rope_scaling=other), Launch())


def test_a_context_beyond_the_limit_is_refused_without_a_scaling(tmp_path: Path) -> None:
    short = load_model_config("tiny")
    short.max_position_embeddings = LIMIT
    save_weights(dict(drawn_model(short).named_parameters()), tmp_path, config=short)
    refused = f"--seq-len {LONGER} is beyond the model's max_position_embeddings={LIMIT}.* --rope-scaling yarn"
    with pytest.raises(ConfigurationError, match=refused):
        prepare(replace(SMALL, model=str(tmp_path), seq_len=LONGER), Launch())
    with pytest.raises(ConfigurationError, match="--rope-scaling yarn is not used, because random weights need none"):
        prepare(replace(SMALL, rope_scaling="yarn"), Launch())


def steps_on(config: TrainConfig, folder: str, layout: str = "") -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step on this rank. layout: its expected name; "": that of the configuration."""
    trainer = Trainer(prepare(replace(config, output=folder), launch_of_pool()))
    assert trainer.engine.stages[0].model.unified_sp.layout == (layout or config.sp_layout)
    records = [trainer.step(number) for number in range(1, config.steps + 1)]
    for record in records:
        assert (record.balanced_rows is None) == (config.sp_layout != "auto") and 0 <= (record.balanced_rows or 0) <= 1
        if dist.get_world_size() == 1:  # whose rank has all rows
            rows = range((record.step - 1) * config.batch_size, record.step * config.batch_size)
            boundaries = [torch.tensor(trainer.stage.batches.packed.row(row).boundaries) for row in rows]
            lengths = torch.cat([each.diff() for each in boundaries])
            assert record.document_tokens == pytest.approx((lengths.square().sum() / lengths.sum()).item())
    return [(record.loss, record.grad_norm) for record in records]


def launch_of_pool() -> Launch:
    return Launch(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())


MESHES = [
    pytest.param(4, {"sp_ulysses": 2, "sp_ring": 2}, id="u2 r2"),
    pytest.param(4, {"sp_ring": 2, "sp_layout": "balanced", "batch_size": 2, "balance_rows": True}, id="r2 dp2"),
    pytest.param(4, {"sp_ring": 2, "sp_layout": "auto", "batch_size": 2}, id="r2 auto dp2"),
    pytest.param(4, {"sp_ulysses": 2, "dp_replicate": 2, "dp_shard": 1, "batch_size": 2}, id="u2 replicate2"),
]


SEQUENCES = 4


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    config = replace(SMALL, steps=2, batch_size=SEQUENCES)
    return ranks.run(steps_on, 1, config, str(tmp_path_factory.mktemp("alone")))[0]


@pytest.mark.parametrize(("world_size", "degrees"), MESHES)
@pytest.mark.slow(but=1, full=2)
def test_every_mesh_trains_as_one_process(
    ranks: RankPool, alone: list[tuple[float, float]], tmp_path: Path, world_size: int, degrees: dict[str, int]
) -> None:
    many = replace(SMALL, steps=2, **degrees)
    dp = world_size // (many.sp_ulysses * many.sp_ring)
    many = replace(many, batch_size=SEQUENCES // dp)
    for own in ranks.run(steps_on, world_size, many, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(alone), rtol=1e-5, atol=0.0)


ODD = {"seq_len": 251, "packing": "whole", "lora_rank": 4}


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ("tiny", {"sp_ulysses": 2, "sp_ring": 2} | ODD),
        ("mixtral-tiny", {"sp_ring": 4, "seq_len": 241, "router_aux_loss_coef": 0.1}),
        ("tiny", {"sp_ring": 2, "sp_layout": "balanced", "batch_size": 2, "seq_len": 255}),
    ],
)
@pytest.mark.slow(full=2)
def test_a_length_that_ranks_cannot_divide_trains_as_one_process(
    ranks: RankPool, tmp_path: Path, model: str, degrees: dict[str, Any]
) -> None:
    """With adapters, and routers, whose loss counts tokens; and with rows that end before their length."""
    drawn_model(load_model_config(model), 0).save_pretrained(tmp_path / "model")
    many = replace(SMALL, model=str(tmp_path / "model"), tokenizer="bytes", steps=2, **degrees)
    one = replace(many, sp_ulysses=1, sp_ring=1, batch_size=4 // (many.sp_ulysses * many.sp_ring) * many.batch_size)
    expected = torch.tensor(ranks.run(steps_on, 1, one, str(tmp_path))[0])
    for own in ranks.run(steps_on, 4, many, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(own), expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("layout", ["balanced", "auto"])
@pytest.mark.slow(full=1)
def test_layers_with_windows_are_balanced_and_train_as_one_process(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """Gemma 3, whose layers have a window but every sixth."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocab_size = load_model_config("tiny").vocab_size
    gemma = Gemma3TextConfig(**sizes, head_dim=8, num_hidden_layers=6, vocab_size=vocab_size, sliding_window=16)
    drawn_model(gemma, 0).save_pretrained(tmp_path / "model")
    one = replace(SMALL, model=str(tmp_path / "model"), tokenizer="bytes", steps=2, batch_size=2)
    many = replace(one, sp_ulysses=2, sp_ring=2, sp_layout=layout)
    expected = torch.tensor(ranks.run(steps_on, 1, one, str(tmp_path))[0])
    for own in ranks.run(steps_on, 4, many, str(tmp_path), f"{layout}:0x1,16x5"):
        torch.testing.assert_close(torch.tensor(own), expected, rtol=1e-5, atol=0.0)


def sent_in_steps(configs: list[TrainConfig], folder: str) -> list[tuple[int, int, int, int]]:
    """What a step of each says it sent (attention, FSDP), and what was counted on the wire."""
    return [sent_in_a_step(config, folder) for config in configs]


def sent_in_a_step(config: TrainConfig, folder: str) -> tuple[int, int, int, int]:
    trainer = Trainer(prepare(replace(config, output=folder), launch_of_pool()))
    with SentBytes() as sent:
        record = trainer.step(1)
    # With sequence parallelism over tp, no functional all-reduce but that of partial gradients.
    fsdp = sum(sent.by_op[name] for name in ("_allgather_base_", "_reduce_scatter_base_", "all_reduce"))
    if config.dp_replicate > 1:
        fsdp += sent.by_group[tuple(dist.get_process_group_ranks(trainer.mesh.group("dp_replicate"))), "allreduce_"]
    attention = sum(sent.by_op[name] for name in ("alltoall_base_", "send"))
    return record.attention_sent_bytes, record.fsdp_sent_bytes, attention, fsdp


SENDING = [
    {"dp_replicate": 2, "sp_ring": 2, "zero": 2, "micro_batches": 2, "batch_size": 2},
    {"tp": 2, "tp_sequence_parallel": True, "sp_ulysses": 2, "zero": 1},
    {"pp": 2, "sp_ulysses": 2, "micro_batches": 2, "batch_size": 2},
    {"sp_ulysses": 2, "sp_ring": 2, "seq_len": 253},
]


@pytest.mark.slow
def test_the_bytes_in_a_record_are_those_on_the_wire(ranks: RankPool, tmp_path: Path) -> None:
    configs = [replace(SMALL, **flags) for flags in SENDING]
    counted = ranks.run(sent_in_steps, 4, configs, str(tmp_path))
    for flags, *own in zip(SENDING, *counted, strict=True):
        for said_attention, said_fsdp, _, fsdp in own:
            assert said_fsdp == fsdp > 0, flags
            if "pp" not in flags:  # a pipeline sends hidden states too
                assert said_attention == round(sum(sent for _, _, sent, _ in own) / 4) > 0, flags


def meet_other_data(config: TrainConfig, folder: str) -> str:
    """A step in which rank 1 reads other data than the rest."""
    prepared = prepare(replace(config, output=folder), launch_of_pool())
    if dist.get_rank() == 1:
        prepared.begins_in.batches.next_row += 1
    try:
        Trainer(prepared).step(1)
    except RanksDisagree as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_ranks_that_read_different_data_all_stop(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(meet_other_data, 2, replace(SMALL, sp_ring=2), str(tmp_path)):
        assert "the data of step 1 must be the same on all ranks" in said and " on rank 1" in said
