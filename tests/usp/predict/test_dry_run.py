"""A dry run against the real step: tensor accounting, FLOPs; and its command line. Bytes: test_step_traffic."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.ranks import RankPool
from tests.usp.predict.real_step import peak_of_step
from tests.usp.tiny import tiny_model
from usp.__main__ import main
from usp.config import TrainConfig
from usp.hf.models import empty_model, load_model_config, model_facts
from usp.hf.tensor_parallel import model_shape
from usp.run.failures import ConfigurationError
from usp.train.dry_run import dry_run

SMALL = TrainConfig(seq_len=128, dtype="float32", device="cpu", loss_chunk=24)


MEMORY: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2, "tp_sequence_parallel": True, "ac": "attention-saved", "mlp_tile": 256}),
    (2, {"pp": 2, "batch_size": 4, "micro_batches": 4, "seq_len": 512}),
    (2, {"model": "qwen3-moe-tiny", "ep": 2, "sp_ring": 2}),
    # with --exhaustive
    (1, {"dtype": "bfloat16"}),
    (2, {"sp_ring": 2, "zero": 1, "batch_size": 2, "micro_batches": 2}),
    (1, {"ac": "full"}),
    (2, {"sp_ulysses": 2, "ac": "selective"}),
]


@pytest.mark.parametrize(
    ("world_size", "flags"),
    MEMORY,
    ids=[" ".join(map(str, flags)) for _, flags in MEMORY],
)
@pytest.mark.slow(full=3)
def test_the_peak_equals_that_of_a_real_step(ranks: RankPool, world_size: int, flags: dict[str, Any]) -> None:
    config = replace(SMALL, **({"seq_len": 1024, "loss_chunk": 256} | flags))
    runs = [dry_run(config, world_size, rank) for rank in range(world_size)]
    added = [run.peak_bytes - run.start_bytes for run in runs]
    peaks = ranks.run(peak_of_step, world_size, config, [1.02 * nbytes for nbytes in added])
    assert added == pytest.approx(peaks, rel=0.05)
    for run in runs:
        assert sum(run.by_category.values()) == run.peak_bytes
        assert min(run.by_category.values()) >= 0


# A single rank


@pytest.mark.slow
def test_memory_is_labelled_by_category() -> None:
    parameters = sum(parameter.numel() for parameter in empty_model(load_model_config("tiny")).parameters())
    run = dry_run(replace(SMALL, seq_len=1024, loss_chunk=256), 4, 1)
    kept = run.by_category
    assert kept["parameters"] == pytest.approx(parameters, rel=0.001)  # a quarter in float32, plus rotary frequencies
    assert kept["optimizer states"] == pytest.approx(2 * parameters, rel=0.001)
    assert run.start_bytes == kept["parameters"] + kept["optimizer states"]
    layers, hidden = 2, 1024 * 128 * 4
    assert kept["activations"] > layers * 10 * hidden


@pytest.mark.slow
def test_flops_equal_the_model_flops_without_recomputation() -> None:
    config = replace(SMALL, device="auto", dtype="auto", seq_len=512, loss_chunk=256)
    model_config = load_model_config("tiny")
    run = dry_run(config, 1)
    assert (run.config.device, run.config.dtype) == ("cuda", "bfloat16") and "aten-flash" in run.kernel
    pairs, layers, hidden = 512 * 513 // 2, 2, 128
    assert run.attention_flops == 2 * (2 + 5) * pairs * hidden * layers
    norms = 5 * hidden  # weights that multiply no matrix
    products = model_shape(model_facts("tiny", model_config), model_config).matmul_parameters - norms
    assert run.flops - run.attention_flops == 6 * products * 512
    in_float32 = dry_run(replace(config, dtype="float32"), 1)  # its head accumulates the weight gradient in place
    assert in_float32.flops - in_float32.attention_flops == 6 * products * 512
    again = dry_run(replace(config, ac="full"), 1)
    assert again.attention_flops == 2 * (2 + 5 + 2) * pairs * hidden * layers


@pytest.mark.slow
def test_compiled_layers_save_what_selective_ones_do_if_they_are_dense() -> None:
    config = replace(SMALL, device="auto", dtype="auto", seq_len=512)
    eager, compiled, selective = (
        dry_run(replace(config, **x), 1)
        for x in ({}, {"compile": True}, {"ac": "selective", "loss_chunk": config.loss_chunk * 2 // 3})
    )
    assert compiled.peak_bytes == selective.peak_bytes < eager.peak_bytes and compiled.flops == eager.flops
    assert compiled.config == replace(eager.config, compile=True)
    assert dry_run(replace(config, model="qwen3-moe-tiny", compile=True), 1).counted_as == "none"


@pytest.mark.slow
def test_offloaded_activations_and_states_count_as_host_memory(tmp_path: Path) -> None:
    model = tiny_model("llama-deep")
    model.config.max_position_embeddings = 4096
    model.save_pretrained(tmp_path)
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    config = replace(SMALL, device="cuda", seq_len=4096, loss_chunk=1024, ac="full", dtype="auto", model=str(tmp_path))
    here, away = dry_run(config, 2), dry_run(replace(config, ac_offload=True), 2)
    assert here.host_bytes == 0
    of_layer = 4096 * hidden * 2  # its input, in bfloat16
    assert away.host_bytes == layers * of_layer
    # Of two layers, they stay on the device; the peak may be at another moment.
    assert (layers - 3) * of_layer < here.peak_bytes - away.peak_bytes <= (layers - 2) * of_layer
    optimizer = dry_run(replace(config, optim_offload=True), 2)
    states = here.by_category["parameters"] + here.by_category["optimizer states"]
    assert optimizer.start_bytes < 0.01 * states
    assert optimizer.host_bytes == pytest.approx(states * 4 / 3, rel=0.01)  # with gradients
    assert here.peak_bytes - optimizer.peak_bytes >= 0.99 * states


@pytest.mark.slow
def test_the_fake_world_is_destroyed() -> None:
    first = dry_run(SMALL, 1024, 1023)
    assert not dist.is_initialized()
    assert {len(sent.ranks) for sent in first.sent} == {1024}
    assert {len(sent.ranks) for sent in dry_run(replace(SMALL, tp=2), 4).sent} == {2}
    with pytest.raises(ConfigurationError):
        dry_run(replace(SMALL, sp_ring=3), 4)
    assert not dist.is_initialized()


def dry_run_in_a_process_group() -> str:
    try:
        dry_run(SMALL, 2)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_process_with_a_process_group_is_refused(ranks: RankPool) -> None:
    (said,) = ranks.run(dry_run_in_a_process_group, 1)
    assert said == "a dry run creates its own process group, but this process already has one"


# The command line


@pytest.mark.slow
def test_the_command_line_reads_a_file_and_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And prints the same run as JSON and as tables."""
    monkeypatch.setattr("usp.train.dry_run.dry_run", cache(dry_run))
    (tmp_path / "run.yaml").write_text("model: tiny\nseq_len: 256\nsp-ring: 4\n")
    words = ["dry-run", str(tmp_path / "run.yaml"), "--world-size", "16", "--sp-ulysses", "2", "--rank", "3"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world_size"], found["rank"], found["config"]["dp_shard"]) == (16, 3, 2)
    ring = [sent for sent in found["sent"] if sent["axes"] == ["ring"]]
    assert [sent["collective"] for sent in ring] == ["send", "allreduce_"] and ring[0]["ranks"] == [1, 3, 5, 7]
    assert sum(found["by_category"].values()) == found["peak_bytes"]
    assert found["collectives"] == sum(sent["calls"] for sent in found["sent"])
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "ring=4" in shown and "optimizer states" in shown and "alltoall_base" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --world-size"),
        (["--world-size", "4", "--rank", "4"], "--rank = 4 must be one of the 4 ranks: 0 to 3"),
        (["--world-size", "4", "--model", "tinny"], "did you mean 'tiny'"),
        (["--world-size", "4", "--sp-ring", "3"], "must divide the world size 4"),
        (["--world-size", "4", "--seed", "3"], "Unrecognized options: --seed"),
        (["--world-size", "4", "--device", "cpu", "--attention-kernel", "cudnn"], "runs on cuda"),
        (["--world-size", "4", "--fp8", "mx"], "--fp8 mx has no dry run, since torchao's kernels exist"),
        (["--world-siz", "4"], "--world-size"),
        (["nowhere.yaml", "--world-size", "4"], "no such file"),
    ],
)
@pytest.mark.slow(but=3)
def test_invalid_arguments_get_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", *words]) == 1
    shown = capsys.readouterr()
    assert said in shown.err and "Traceback" not in shown.err
