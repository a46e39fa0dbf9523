"""The planner's search against an exhaustive one, and its reports."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from examples.models import tiny_config
from usp.__main__ import main
from usp.config import AC_MODES, TrainConfig
from usp.fields import config_from_mapping
from usp.hf.models import empty_model, load_model_config
from usp.hf.tensor_parallel import tp_problems
from usp.model.facts import ModelFacts
from usp.parallel import load_hardware, node_of
from usp.planning.choice import choose, predictor_for
from usp.planning.search import (
    CLOSE,
    FAMILIES,
    Predictor,
    Question,
    Search,
    family,
    layouts,
    recomputations,
    shardings,
    simplicity,
)
from usp.predict.compute import Seconds
from usp.predict.devices import Memory
from usp.predict.seconds import StepTime, TransferSeconds, step_seconds
from usp.run.failures import ConfigurationError
from usp.run.metrics import seconds
from usp.run.tables import GIB
from usp.train.resolve import job_of, resolve
from usp.train.validate import parallel_dims, violations

DENSE = ModelFacts("dense", 8, 4, 16, 256, (0,) * 4, intermediate_size=64)
EXPERTS = replace(DENSE, name="experts", num_experts=4)
H100 = load_hardware("h100")


def question(facts: ModelFacts, device: float = 300, host: float = math.inf) -> Question:
    """Return the question of 16 devices, 4 on a host, with so many usable bytes."""
    inner, outer = H100.tiers
    hardware = replace(
        H100,
        memory_bytes=math.ceil(device / 0.9),
        host_memory_bytes=host / 0.9,
        tiers=(replace(inner, devices=4), outer),
    )
    return Question(hardware=hardware, world_size=16, base=TrainConfig(seq_len=2**17), facts=facts, sequences=8)


def time_of(compute: float, bubble: float = 0.0, **exposed: float) -> StepTime:
    communication = {axis: TransferSeconds(value) for axis, value in exposed.items()}
    return StepTime(Seconds(compute), communication, bubble, 0.0, 1.0, 1.0)


@cache
def chance(config: TrainConfig) -> float:
    """Return a number from 0 to 1 that depends only on the layout, not on what is sharded over dp."""
    whole = replace(config, dp_replicate=1, dp_shard=config.dp_replicate * config.dp_shard)
    dims = (parallel_dims(whole), config.micro_batches, config.pp_schedule)
    return int(hashlib.blake2b(repr(dims).encode(), digest_size=4).hexdigest(), 16) / 2**32


def made_up() -> Predictor:
    """Return a predictor in which every option that saves memory costs time."""

    def kept(config: TrainConfig) -> float:
        ac = {"none": 0.0, "selective": 0.5, "attention-saved": 1.0, "full": 2.0}[config.ac]
        return ac + 0.3 * config.ac_offload + 0.1 * bool(config.mlp_tile) + 0.5 * config.optim_offload

    def sent(config: TrainConfig) -> float:
        return 0.2 * (config.zero - 1) + 0.1 / config.dp_replicate

    def on_device(config: TrainConfig) -> int:
        saved = kept(config) + sent(config) + 1.5 * config.optim_offload
        rows = config.batch_size / config.micro_batches
        return round((1000 + 50 * rows) * (1 + chance(replace(config, micro_batches=1))) / (1 + saved))

    return Predictor(
        lambda config: time_of(1 + chance(config) + 0.1 * kept(config), fsdp=0.1 * sent(config)),
        least_seconds=lambda config: 1 + 0.5 * chance(config) + 0.1 * kept(config),
        device_bytes=on_device,
        host_bytes=lambda config: (config.ac_offload + config.optim_offload) * round(1000 * chance(config)),
    )


def savings(layout: TrainConfig, facts: ModelFacts) -> Iterator[TrainConfig]:
    """Yield a layout with every way to save memory."""
    for option in recomputations(layout, facts):
        for sharded in chain(*shardings(option)):
            yield from (sharded, replace(sharded, optim_offload=True))


@pytest.mark.parametrize("facts", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "asked",
    [{"compile": True}, {"lora_rank": 8}, {"fp8": "row"}, {"optimizer": "adamw-bf16"}],
    ids=lambda asked: [*asked][-1],
)
def test_plans_are_valid_with_what_is_asked(asked: dict[str, Any], facts: ModelFacts) -> None:
    given = replace(question(facts), base=TrainConfig(seq_len=2**17, **asked))
    every = [config for layout in [*layouts(given)][::23] for config in recomputations(layout, facts)]
    assert {config.ac for config in every} == {*AC_MODES} - ({"selective"} if "compile" in asked else set())
    assert not any(violations(config, given.world_size, facts) for config in every)


class Made(NamedTuple):
    config: TrainConfig
    seconds: float
    memory: Memory


@cache
def every_candidate(facts: ModelFacts) -> list[Made]:
    """Return every configuration under the made-up predictor."""
    predictor, long = made_up(), question(facts)
    every = [config for layout in layouts(long) for config in savings(layout, facts)]
    assert not any(violations(config, long.world_size, facts) for config in every)
    return [Made(config, predictor.seconds(config).total, predictor.memory(config)) for config in every]


@pytest.mark.parametrize("facts", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("memory", [Memory(300), Memory(600, host=500), Memory(1100)], ids=lambda memory: memory.device)
@pytest.mark.slow(full=4)
def test_the_search_finds_what_an_exhaustive_search_finds(facts: ModelFacts, memory: Memory) -> None:
    def fits(needed: Memory) -> bool:
        return needed.device <= memory.device and needed.host <= memory.host

    fastest: dict[tuple[str, ...], float] = {}
    for each in every_candidate(facts):
        if fits(each.memory):
            kind = family(each.config)
            fastest[kind] = min(each.seconds, fastest.get(kind, each.seconds))
    long = question(facts, *memory)
    result = Search(long, made_up(), tuple(layouts(long))).run()
    assert [candidate.time.total for candidate in result.best] == pytest.approx(sorted(fastest.values())[:FAMILIES])
    assert all(candidate.time.total == pytest.approx(fastest[family(candidate.config)]) for candidate in result.best)
    assert all(each.memory.device <= memory.device and each.memory.host <= memory.host for each in result.best)
    assert result.tried <= result.layouts
    slowest = (1 + CLOSE) * min(fastest.values())
    near = [each for each in every_candidate(facts) if fits(each.memory) and each.seconds <= slowest]
    assert result.preferred is not None
    assert simplicity(result.preferred.config) == min(simplicity(each.config) for each in near)
    assert result.preferred.time.total <= slowest


@pytest.mark.parametrize(
    ("asked", "world_size"),
    [
        (TrainConfig(model="qwen3-8b", seq_len=2**15, global_batch_size=8, dtype="bfloat16"), 8),
        (TrainConfig(model="llama3-70b", seq_len=2**13, global_batch_size=8, dtype="bfloat16"), 8),
        (TrainConfig(model="mixtral-8x7b", seq_len=2**13, global_batch_size=8, dtype="bfloat16"), 16),
    ],
    ids=lambda value: getattr(value, "model", ""),
)
@pytest.mark.slow(full=2)
def test_the_bound_holds_and_the_optimum_is_that_of_every_configuration(
    asked: TrainConfig, world_size: int, exhaustive: bool
) -> None:
    choice = choose(asked, world_size, H100)
    predictor, usable = predictor_for(choice.job, H100), choice.search.question.usable
    fastest: dict[tuple[str, ...], float] = {}
    every = list(layouts(choice.search.question))
    for layout in every if exhaustive else every[::61]:
        for config in savings(layout, choice.search.question.facts):
            time, needed = predictor.seconds(config), predictor.memory(config)
            option = replace(config, optim_offload=False)
            assert predictor.least_seconds(option) <= time.total * (1 + 1e-9)
            if needed.device <= usable.device and needed.host <= usable.host:
                fastest[family(config)] = min(time.total, fastest.get(family(config), time.total))
    if exhaustive:
        times = [candidate.time.total for candidate in choice.result.best]
        assert times == pytest.approx(sorted(fastest.values())[:FAMILIES], rel=1e-9)
    else:
        assert choice.result.best[0].time.total <= min(fastest.values()) * (1 + 1e-9)
        assert choice.best.time.total <= (1 + CLOSE) * choice.result.best[0].time.total
    assert choice.best.config.optim_offload == (asked.model == "llama3-70b")


def test_the_number_of_devices_that_an_error_names_is_enough() -> None:
    asked = TrainConfig(model="llama3-8b", seq_len=2**20, global_batch_size=1)
    with pytest.raises(ConfigurationError, match="does not fit 2 x H100") as error:
        choose(asked, 2, H100)
    enough = re.search(r"use (\d+) devices, or fewer tokens", str(error.value))
    assert enough and choose(asked, int(enough[1]), H100).best.memory.device < H100.memory_bytes


def test_a_plan_fits_the_memory_of_its_host() -> None:
    asked = TrainConfig(model="llama3-8b", seq_len=2**21, global_batch_size=1, dtype="bfloat16")
    large, given = (choose(asked, 8, replace(H100, host_memory_bytes=size)) for size in (4e12, 2e12))
    too_large = [each for each in large.result.best if each.memory.host > 0.9 * 2e12]
    activations = 2312 * GIB  # attention-saved, with q, k and v after Ulysses' exchange
    optimizer = 3 * 4 * large.job.model.numel
    for each in too_large:  # tensor parallelism replicates the norms
        assert each.memory.host == pytest.approx(activations + each.config.optim_offload * optimizer, rel=1e-5)
    assert {(each.config.ac, each.config.ac_offload) for each in too_large} == {("attention-saved", True)}
    assert not {each.config for each in too_large} & {each.config for each in given.result.best}
    assert all(0 < each.memory.host < 0.9 * 2e12 for each in given.result.best)


def test_every_layout_uses_all_ranks_and_divides_the_batch() -> None:
    long = question(EXPERTS)
    every = list(layouts(long))
    assert len(set(every)) == len(every)
    for config in every:
        dims = parallel_dims(config).resolve(long.world_size)
        assert dims.batch * config.batch_size == long.sequences
        assert config.tp <= 4 and config.sp_ulysses * config.tp <= EXPERTS.num_heads
    found = {(config.tp, config.pp, config.sp_ring, config.sp_ulysses, config.ep) for config in every}
    unpiped = {(config.batch_size, config.micro_batches) for config in every if config.pp == 1}
    assert {(8, 1), (8, 2), (8, 4), (8, 8), (2, 1)} <= unpiped
    assert {(4, 1, 1, 1, 1), (1, 4, 2, 1, 1), (1, 1, 16, 1, 4), (1, 1, 2, 8, 2), (2, 2, 2, 2, 4)} <= found


def test_shards_may_stay_on_a_part_of_the_ranks() -> None:
    every = (each for each in layouts(question(EXPERTS)) if (each.dp_shard, each.tp, each.ep) == (8, 2, 4))
    layout = replace(next(every), batch_size=2, micro_batches=2)
    sharded = {(each.dp_replicate, each.dp_shard, each.zero) for each in chain(*shardings(layout))}
    # Experts regroup the ranks of a replica; without sharding over them there is nothing to replicate.
    assert sharded == {(replicas, 8 // replicas, zero) for replicas in (1, 2, 4) for zero in (1, 2, 3)}


@pytest.mark.slow
def test_if_nothing_fits_the_smallest_is_named() -> None:
    nothing = question(DENSE, device=1)
    search = Search(nothing, made_up(), tuple(layouts(nothing)))
    result, smallest = search.run(), search.tightest()
    assert result.best == () and smallest is not None and result.tried == result.layouts
    assert smallest.memory.device == min(needed.device for _, _, needed in every_candidate(DENSE))


@pytest.mark.slow
def test_muon_stays_on_the_device() -> None:
    """Check what train.py refuses to offload."""
    for optimizer, offloads in (("adamw", True), ("muon", False)):
        tight = replace(question(DENSE), base=TrainConfig(seq_len=2**17, optimizer=optimizer))
        best = Search(tight, made_up(), tuple(layouts(tight))).run().best
        assert best and any(each.config.optim_offload for each in best) == offloads


@pytest.mark.parametrize("compiles", [[], ["--compile"]], ids=str)
@pytest.mark.slow
def test_training_accepts_the_file_of_a_plan(
    compiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    flags = ["--model", "tiny", "--seq-len", "65536", "--world-size", "8", "--global-batch-size", "2", *compiles]
    assert main(["plan", *flags, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "of a device and 1676 GiB of a host" in shown and "2 compared with 1" in shown
    config = config_from_mapping(yaml.safe_load(out.read_text()), TrainConfig)
    dims = parallel_dims(config).resolve(8)
    assert dims.batch * config.batch_size == 2 and config.compile == bool(compiles)
    assert not resolve(config, 8).problems
    job = job_of(config, load_model_config("tiny"), 8)
    time = step_seconds(job, load_hardware("h100")).total
    assert (seconds(time) + " ") in shown  # the written configuration is the one that is shown


def test_an_impossible_plan_states_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--tp", "2"], "nrecognized options: --tp"),
        (["--world-size", "0", "--global-batch-size", "0"], "--world-size = 0 must be at least 1"),
        (["--out", "plan.txt"], "--out plan.txt must end in .yaml or .yml"),
        (
            ["--model", "llama3-70b", "--seq-len", "8192", "--world-size", "1", "--global-batch-size", "1"],
            "does not fit 1 x H100 in any of 1 layouts. The smallest is one rank",
        ),
    ):
        assert main(["plan", "--model", "tiny", "--seq-len", "65536", "--world-size", "8", *flags]) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and message in shown.err and "Traceback" not in shown.err


@pytest.mark.slow
def test_a_dry_run_proves_a_plan_by_approximate_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "tiny", "--seq-len", "4K", "--world-size", "2", "--global-batch-size", "2"]
    assert main(["plan", *flags, "--optimizer", "muon"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 by a dry run, because temporaries of Muon are estimated: " in shown and " sent by a rank, " in shown


@pytest.mark.slow
def test_a_model_that_cannot_be_divided_is_planned_without_tp(tmp_path: Path) -> None:
    for model_type, divided in (("gpt_oss", False), ("deepseek_v3", False), ("olmo_hybrid", False), ("glm4_moe", True)):
        assert bool(tp_problems(empty_model(tiny_config(model_type)), 2, True)) is not divided, model_type
    tiny_config("gpt_oss").save_pretrained(tmp_path)
    for model, wanted in ((str(tmp_path), {1}), ("tiny", {1, 2, 4})):
        choice = choose(TrainConfig(model=model, seq_len=64, global_batch_size=4, device="cpu"), 4, H100)
        assert {layout.tp for layout in choice.search.every} == wanted


def test_a_gpu_is_known_by_its_name() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L20", "NVIDIA H200")
    assert [node_of(name) for name in names] == ["h100", "a100", "l20", "h200"]
    assert [node_of(name) for name in ("NVIDIA H100 PCIe", "NVIDIA GB200", "NVIDIA L4", "CPU")] == [None] * 4
