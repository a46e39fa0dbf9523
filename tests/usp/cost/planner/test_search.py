"""The planner's search against an exhaustive one, and its reports."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

from parallel import load_hardware, node_of
from usp.__main__ import main
from usp.config import TrainConfig, config_from_mapping
from usp.cost.grid import GIB
from usp.cost.job import job_of
from usp.cost.planner.advice import broken_tips, degrees, parts, seconds, why_slower
from usp.cost.planner.choice import choose, contradicted, planned, predictor_for
from usp.cost.planner.layouts import Question, layouts, savings
from usp.cost.planner.search import FAMILIES, Candidate, Memory, Predictor, family, search, tightest
from usp.cost.time.compute import Seconds
from usp.cost.time.step_time import StepTime, step_seconds
from usp.cost.time.transfers import TransferSeconds
from usp.hf.models import load_model_config, model_facts
from usp.model.facts import ModelFacts
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.resolve import resolve
from usp.train.validate import parallel_dims, violations

DENSE = ModelFacts("dense", 8, 4, 16, 256, (0,) * 4, intermediate_size=64)
EXPERTS = replace(DENSE, name="experts", num_experts=4)
H100 = load_hardware("h100")
LONG = Question(TrainConfig(seq_len=2**17), sequences=8, world_size=16, ranks_per_host=4, optim_offload=True)


def time_of(compute: float, ring: float = 0.0, bubble: float = 0.0) -> StepTime:
    return StepTime(Seconds(compute), {"ring": TransferSeconds(ring)}, bubble, 0.0, 1.0, 1.0)


@cache
def chance(config: TrainConfig) -> float:
    """Return a number from 0 to 1 that depends only on the layout, not on what is sharded over dp."""
    whole = replace(config, dp_replicate=1, dp_shard=config.dp_replicate * config.dp_shard)
    dims = (parallel_dims(whole, config.ep), config.micro_batches, config.pp_schedule)
    return int(hashlib.blake2b(repr(dims).encode(), digest_size=4).hexdigest(), 16) / 2**32


def made_up() -> Predictor:
    """Return a predictor in which every option that saves memory costs time."""

    def kept(config: TrainConfig) -> float:
        ac = {"none": 0.0, "selective": 0.5, "attention-saved": 1.0, "full": 2.0}[config.ac]
        return ac + 0.3 * config.ac_offload + 0.1 * bool(config.mlp_tile) + 0.5 * config.optim_offload

    def saved(config: TrainConfig) -> float:
        return kept(config) + 0.2 * (config.zero - 1) + 0.1 / config.dp_replicate

    def peak(config: TrainConfig) -> int:
        return round(1000 * (1 + chance(config)) / (1 + saved(config) + 1.5 * config.optim_offload))

    def seconds(config: TrainConfig) -> StepTime:
        return time_of(1 + chance(config) + 0.1 * saved(config))

    return Predictor(
        seconds,
        least_seconds=lambda config: 1 + 0.6 * chance(config) + 0.1 * kept(config),
        least_sharded_seconds=lambda config: seconds(config).total - 0.2 * chance(config),
        peak_bytes=peak,
        least_bytes=lambda config: peak(config) // 2,
        least_saved_bytes=lambda config: round(1000 * (1 + chance(config)) / (4.5 + 2 * config.optim_offload)),
        host_bytes=lambda config: (config.ac_offload + config.optim_offload) * round(1000 * chance(config)),
    )


@cache
def every_candidate(facts: ModelFacts) -> list[tuple[tuple[str, ...], float, int, int]]:
    """Return the family, seconds, bytes and host bytes of every configuration under the made-up predictor."""
    predictor, found = made_up(), []
    for layout in layouts(LONG, facts):
        for config in savings(layout, LONG, facts):
            assert not violations(config, LONG.world_size, facts)
            memory = predictor.peak_bytes(config), predictor.host_bytes(config)
            found.append((family(config), predictor.seconds(config).total, *memory))
    return found


@pytest.mark.parametrize("facts", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("memory", [Memory(300), Memory(600, host=500), Memory(1100)], ids=lambda memory: memory.device)
def test_the_search_finds_what_an_exhaustive_search_finds(facts: ModelFacts, memory: Memory) -> None:
    fastest: dict[tuple[str, ...], float] = {}
    for kind, time, peak, on_host in every_candidate(facts):
        if peak <= memory.device and on_host <= memory.host:
            fastest[kind] = min(time, fastest.get(kind, time))
    found = search(LONG, facts, made_up(), memory)
    assert [candidate.time.total for candidate in found.best] == pytest.approx(sorted(fastest.values())[:FAMILIES])
    assert all(candidate.time.total == pytest.approx(fastest[family(candidate.config)]) for candidate in found.best)
    assert all(one.peak_bytes <= memory.device and one.host_bytes <= memory.host for one in found.best)
    assert found.tried <= found.layouts


@pytest.mark.parametrize(
    ("asked", "world_size"),
    [
        (TrainConfig(model="qwen3-8b", seq_len=2**15, global_batch_size=8, dtype="bfloat16"), 8),
        (TrainConfig(model="llama3-70b", seq_len=2**13, global_batch_size=8, dtype="bfloat16"), 8),
        (TrainConfig(model="mixtral-8x7b", seq_len=2**13, global_batch_size=8, dtype="bfloat16"), 16),
    ],
    ids=lambda value: getattr(value, "model", ""),
)
def test_the_bounds_hold_and_the_optimum_is_that_of_every_configuration(
    asked: TrainConfig, world_size: int, exhaustive: bool
) -> None:
    choice = choose(asked, world_size, H100)
    predictor = predictor_for(choice.job, H100)
    fastest: dict[tuple[str, ...], float] = {}
    every = list(layouts(choice.question, choice.facts))
    for layout in every if exhaustive else every[::61]:
        for config in savings(layout, choice.question, choice.facts):
            time, peak = predictor.seconds(config).total, predictor.peak_bytes(config)
            assert predictor.least_seconds(config) <= predictor.least_sharded_seconds(config) <= time * (1 + 1e-9)
            saved = predictor.least_saved_bytes(replace(layout, optim_offload=config.optim_offload))
            assert max(predictor.least_bytes(config), saved) <= peak
            assert not config.optim_offload or time >= predictor.seconds(replace(config, optim_offload=False)).total
            if peak <= choice.memory.device and predictor.host_bytes(config) <= choice.memory.host:
                fastest[family(config)] = min(time, fastest.get(family(config), time))
    if exhaustive:
        found = [candidate.time.total for candidate in choice.found.best]
        assert found == pytest.approx(sorted(fastest.values())[:FAMILIES], rel=1e-9)
    else:
        assert choice.best.time.total <= min(fastest.values()) * (1 + 1e-9)
    assert choice.best.config.optim_offload == (asked.model == "llama3-70b")


def test_without_a_pipeline_one_micro_batch_may_be_the_fastest() -> None:
    asked = TrainConfig(model="llama3-8b", seq_len=1024, global_batch_size=512)
    best = choose(asked, 64, H100).best
    assert (best.config.pp, best.config.dp_shard, best.config.batch_size, best.config.micro_batches) == (1, 64, 8, 1)


def test_the_number_of_devices_that_an_error_names_is_enough() -> None:
    asked = TrainConfig(model="llama3-8b", seq_len=2**20, global_batch_size=1)
    with pytest.raises(ConfigurationError, match="does not fit 2 x H100") as error:
        choose(asked, 2, H100)
    enough = re.search(r"use (\d+) devices, or fewer tokens", str(error.value))
    assert enough and choose(asked, int(enough[1]), H100).best.peak_bytes < H100.memory_bytes


def test_a_plan_fits_the_memory_of_its_host() -> None:
    asked = TrainConfig(model="llama3-8b", seq_len=2**21, global_batch_size=1, dtype="bfloat16")
    large, given = (choose(asked, 8, replace(H100, host_memory_bytes=size)) for size in (4e12, 2e12))
    too_large = [found for found in large.found.best if found.host_bytes > 0.9 * 2e12]
    activations = 2312 * GIB  # attention-saved, with q, k and v after Ulysses' exchange
    optimizer = 3 * 4 * large.job.model.numel
    for found in too_large:  # tensor parallelism replicates the norms
        assert found.host_bytes == pytest.approx(activations + found.config.optim_offload * optimizer, rel=1e-5)
    assert {(found.config.ac, found.config.ac_offload) for found in too_large} == {("attention-saved", True)}
    assert {found.config.optim_offload for found in too_large} == {False, True}
    assert not {found.config for found in too_large} & {found.config for found in given.found.best}
    assert all(0 < found.host_bytes < 0.9 * 2e12 for found in given.found.best)


def test_a_broken_tip_names_the_fastest_that_follows_it_or_that_none_fits() -> None:
    asked = TrainConfig(model="llama3-8b", seq_len=2**20, global_batch_size=16)
    *_, slower = contradicted(choose(asked, 8, H100))
    assert slower.startswith("tip 2") and re.search(r"The fastest that follows it, .*, takes .* \(slower by: ", slower)
    *_, forbidden = contradicted(choose(replace(asked, seq_len=2**21), 8, H100))
    assert forbidden.startswith("tip 2") and re.search(r"None of the \d+ layouts that follow it fits", forbidden)


def test_rank_0_plans_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TrainConfig(plan="auto", hardware="h100", global_batch_size=8, seq_len=4096, device="cpu")
    alone, store = planned(asked, Launch(world_size=8)), dist.HashStore()
    monkeypatch.setattr(Launch, "store", lambda launch: store)
    assert planned(asked, Launch(world_size=8)) == alone
    monkeypatch.setattr("usp.cost.planner.choice.choose", None)  # no other rank searches
    assert planned(asked, Launch(rank=3, world_size=8)) == alone
    wrong = Launch(world_size=8, attempt=1)
    for rank in (0, 1):
        with pytest.raises(ConfigurationError, match="'h900' must be a file or one of"):
            planned(replace(asked, hardware="h900" if rank == 0 else "h100"), replace(wrong, rank=rank))


def test_every_layout_uses_all_ranks_and_divides_the_batch() -> None:
    found = list(layouts(LONG, EXPERTS))
    assert len(set(found)) == len(found)
    for config in found:
        dims = parallel_dims(config, config.ep).resolve(LONG.world_size)
        assert dims.batch * config.batch_size == LONG.sequences
        assert config.tp <= LONG.ranks_per_host and config.sp_ulysses * config.tp <= EXPERTS.num_heads
    degrees_found = {(config.tp, config.pp, config.sp_ring, config.sp_ulysses, config.ep) for config in found}
    alone = {(config.batch_size, config.micro_batches) for config in found if config.pp == 1}
    assert {(8, 1), (8, 2), (8, 4), (8, 8), (2, 1)} <= alone
    assert {(4, 1, 1, 1, 1), (1, 4, 2, 1, 1), (1, 1, 16, 1, 4), (1, 1, 2, 8, 2), (2, 2, 2, 2, 4)} <= degrees_found


def test_shards_may_stay_on_a_part_of_the_ranks() -> None:
    layout = next(found for found in layouts(LONG, EXPERTS) if (found.dp_shard, found.tp, found.ep) == (8, 2, 4))
    sharded = {(found.dp_replicate, found.dp_shard, found.zero) for found in savings(layout, LONG, EXPERTS)}
    # Experts regroup the ranks of a replica; without sharding over them there is nothing to replicate.
    assert sharded == {(replicas, 8 // replicas, zero) for replicas in (1, 2, 4) for zero in (1, 2, 3)}


def test_if_nothing_fits_the_smallest_is_named() -> None:
    predictor = made_up()
    found = search(LONG, DENSE, predictor, Memory(1))
    smallest = tightest(LONG, DENSE, predictor)
    assert found.best == () and smallest is not None and found.tried == found.layouts
    least = min(
        predictor.peak_bytes(config) for layout in layouts(LONG, DENSE) for config in savings(layout, LONG, DENSE)
    )
    assert smallest.peak_bytes == least


def test_reasons_are_the_components_that_take_longer() -> None:
    first = Candidate(replace(LONG.base, sp_ring=2, sp_ulysses=8), time_of(1.0, ring=0.1), 10)
    slower = Candidate(replace(LONG.base, pp=2, sp_ring=8), time_of(0.9, ring=0.4, bubble=0.5), 10)
    assert sum(parts(slower.time).values()) == pytest.approx(slower.time.total)
    assert why_slower(slower, first) == "pipeline bubble +500.0 ms, exposed ring attention +300.0 ms"
    assert why_slower(first, first) == "equally fast" and degrees(slower.config) == "pp 2 ring 8"


@dataclass(frozen=True)
class Tip:
    number: int
    config: TrainConfig


@pytest.mark.parametrize(
    "tip",
    [
        Tip(1, TrainConfig(sp_ring=8)),
        Tip(2, TrainConfig(sp_ulysses=4, batch_size=2)),
        Tip(3, TrainConfig(sp_ulysses=4, zero=0)),
        Tip(4, TrainConfig(tp=4, sp_ring=1)),
        Tip(7, TrainConfig(sp_ulysses=2, sp_ring=4, sp_order="ulysses-outer")),
    ],
    ids=lambda tip: f"tip {tip.number}",
)
def test_tips_that_a_plan_contradicts_are_named(tip: Tip) -> None:
    (broken,) = broken_tips(tip.config, DENSE)
    follows = TrainConfig(dp_shard=4, sp_ulysses=1)
    assert (
        broken.words.startswith(f"tip {tip.number}:") and not broken.followed(tip.config) and broken.followed(follows)
    )
    assert not list(broken_tips(TrainConfig(sp_ulysses=4, sp_ring=2), DENSE))


def test_training_accepts_the_file_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.yaml"
    flags = ["--model", "tiny", "--seq-len", "65536", "--world-size", "8", "--global-batch-size", "2"]
    assert main(["plan", *flags, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "host GiB" in shown and "of a device and 1676 GiB of a host" in shown and "1 is bound by" in shown
    assert "2 is slower by" in shown and f"written: {out}" in shown
    config = config_from_mapping(yaml.safe_load(out.read_text()), TrainConfig)
    dims = parallel_dims(config, config.ep).resolve(8)
    assert dims.batch * config.batch_size == 2
    assert not violations(config, 8, model_facts("tiny", load_model_config("tiny")))
    job = job_of(config, load_model_config("tiny"), 8)
    time = step_seconds(job, load_hardware("h100")).total
    assert (seconds(time) + " ") in shown  # the written configuration is the one that is shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "2", "--zero", "1"], "--tp = 2, --zero = 1: chosen by the planner, remove it"),
        (["--world-size", "0", "--global-batch-size", "0"], "--world-size = 0 must be at least 1"),
        (
            ["--global-batch-size", "3", "--world-size", "16", "--seq-len", "15"],
            "no layout of 16 devices fits --global-batch-size 3 and --seq-len 15",
        ),
        (["--model", "llama2-70b", "--seq-len", "1048576"], "does not fit 8 x H100 in any of"),
        (["--dtype", "bflot16"], "--dtype = 'bflot16' must be one of auto, float32, bfloat16"),
        (["--sp-layout", "zigzg"], "--sp-layout = 'zigzg' must be one of contiguous, zigzag, striped (did you mean"),
        (["--learning-rate", "-1"], "--learning-rate = -1.0 must be positive and finite, or 0 for the default"),
        (["--seq-len", "1", "--tp", "2"], "--seq-len = 1 must be at least 2: a token and the next one"),
        (["--hardware", "h900"], "'h900' must be a file or one of"),
        (["--engine", "deepspeed"], "--engine = deepspeed is not modelled"),
        (["--out", "plan.txt"], "--out plan.txt must end in .yaml or .yml"),
    ],
)
def test_an_impossible_plan_states_the_reason(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "tiny", "--seq-len", "65536", "--world-size", "8", *flags]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and "Traceback" not in shown.err


def test_training_with_plan_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = TrainConfig(plan="auto", hardware="h100", global_batch_size=8, seq_len=4096, device="cpu", steps=7)
    config = planned(asked, Launch(world_size=8))
    assert (config.plan, config.hardware, config.global_batch_size, config.steps) == ("none", "auto", 0, 7)
    assert not violations(config, 8, model_facts("tiny", load_model_config("tiny")))
    assert "the fastest of" in capsys.readouterr().out
    assert planned(asked, Launch(rank=3, world_size=8)) == config and capsys.readouterr().out == ""
    assert planned(config, Launch(world_size=8)) is config
    with pytest.raises(ConfigurationError, match="--hardware auto does not know a CPU"):
        planned(replace(asked, hardware="auto"), Launch(world_size=8))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"base": "h100", "device": "other"}))
    with pytest.raises(ConfigurationError, match="states no peak_flops for bfloat16"):
        planned(replace(asked, hardware=str(other), dtype="bfloat16"), Launch(world_size=8))


def test_a_gpu_is_known_by_its_name() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA L20": "l20",
        "NVIDIA H200": "h200",
    }
    assert {name: node_of(name) for name in names} == names
    assert [node_of(name) for name in ("NVIDIA H100 PCIe", "NVIDIA GB200", "NVIDIA L4", "CPU")] == [None] * 4


def test_a_configuration_without_weights_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model_config("tiny").save_pretrained(tmp_path)
    flags = ["--model", str(tmp_path), "--seq-len", "1K"]
    assert main(["plan", *flags, "--world-size", "2"]) == 0
    assert main(["cost", *flags, "--devices", "2", "--methods", "usp"]) == 0
    assert main(["dry-run", *flags, "--world-size", "2", "--sp-ring", "2"]) == 0
    assert "1 x 1024 tokens" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigurationError, match=r"has no \.safetensors weights"):
        resolve(TrainConfig(model=str(tmp_path)), 1).valid()
