"""Random command lines: each is either prepared or refused with one message before any rank communicates."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness.ranks import RankPool
from usp.commands.flags import parse
from usp.config import TrainConfig
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.run.metrics import StepRecord
from usp.train.prepare import PreparedRun, prepare
from usp.train.trainer import Trainer

# Values that a user may type, mostly valid ones.
VALUES: dict[str, list[str]] = {
    "--sp-ulysses": ["1", "2", "4", "8", "3", "16", "0", "-1"],
    "--sp-ring": ["1", "2", "4", "8", "3", "x"],
    "--sp-layout": ["zigzag", "striped", "contiguous", "zigzagg"],
    "--sp-order": ["ring-outer", "ulysses-outer", "inner"],
    "--dp-shard": ["-1", "1", "2", "4", "0", "7"],
    "--dp-replicate": ["1", "2", "4", "-2"],
    "--tp": ["1", "2", "4", "8", "3", "0"],
    "--pp": ["1", "2", "4", "8", "5"],
    "--pp-schedule": ["1f1b", "interleaved-1f1b", "zero-bubble", "gpipe"],
    "--pp-stages-per-rank": ["0", "2", "4", "1", "-1"],
    "--ep": ["1", "2", "4", "8", "5", "0"],
    "--zero": ["0", "1", "2", "3", "4", "-1"],
    "--model": ["tiny", "qwen3-tiny", "mistral-tiny", "mixtral-tiny", "qwen3-moe-tiny", "llama3-8b", "nothing"],
    "--seq-len": ["64", "128", "1000", "256", "0"],
    "--batch-size": ["1", "2", "4", "8", "0"],
    "--micro-batches": ["1", "2", "4", "8", "3", "0"],
    "--ac": ["none", "selective", "attention-saved", "full", "some"],
    "--loss-chunk": ["16", "100000", "0"],
    "--mlp-tile": ["0", "7", "-1"],
    "--router-aux-loss-coef": ["-1", "0", "0.1", "-3", "nan"],
    "--router-balance": ["step", "micro-batch", "batch"],
    "--rope-scaling": ["none", "none", "none", "yarn", "warp"],
    "--export-dtype": ["auto", "float32", "bfloat16", "int8"],
    "--optimizer": ["adamw", "adamw-bf16", "muon", "lion"],
    "--adam-eps": ["1e-8", "0", "inf"],
    "--learning-rate": ["1e-3", "0", "nan", "fast"],
    "--steps": ["1", "5", "0"],
    "--checkpoint-every": ["0", "1", "-1"],
    "--keep-checkpoints": ["1", "0"],
    "--hang-timeout": ["0", "10", "-5", "nan"],
    "--profile": ["", "1", "2:3", "3:2", "all"],
    "--wandb-project": ["", "lab"],
    "--resume": ["", "auto", "nowhere"],
    "--dtype": ["float32", "bfloat16", "auto", "int8"],
    "--attention-kernel": ["auto", "sdpa", "reference", "flash", "cudnn", "fast"],
}
SWITCHES = ["--tp-sequence-parallel", "--ac-offload"]
DEGREES = ("--sp-ulysses", "--sp-ring", "--dp-replicate", "--tp", "--pp")


def command_lines(seed: int, number: int) -> Iterator[tuple[int, list[str]]]:
    """Yield world sizes and arguments. Most use only the first values of each flag, which can be valid."""
    draw = random.Random(seed)
    for _ in range(number):
        plausible = draw.random() < 0.6
        chosen = draw.sample(sorted(VALUES), draw.randint(1, 8))
        args = {flag: draw.choice(VALUES[flag][: 3 if plausible else None]) for flag in chosen}
        world_size = draw.choice([1, 2, 4, 8, 8, 16, 6])
        if plausible:  # a world size that fits the degrees
            product = math.prod(int(args.get(flag, "1")) for flag in DEGREES)
            world_size = product * draw.choice([1, 1, 2])
            args.setdefault("--seq-len", "128")
        switches = [switch for switch in SWITCHES if draw.random() < 0.15]
        yield world_size, [*(part for item in args.items() for part in item), *switches]


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("All work and no play makes a model overfit. " * 200)
    return str(tmp_path / "corpus.txt")


def outcome(world_size: int, args: list[str], data: str) -> PreparedRun | ConfigurationError:
    launch = Launch(rank=world_size - 1, world_size=world_size, local_world_size=world_size)
    try:
        return prepare(parse([*args, "--data", data, "--device", "cpu"], TrainConfig), launch)
    except ConfigurationError as error:
        return error


def test_many_random_command_lines(data: str, exhaustive: bool) -> None:
    plans, refusals, number = 0, 0, 1000 if exhaustive else 80
    for world_size, args in command_lines(seed=0, number=number):
        ended = outcome(world_size, args, data)
        if isinstance(ended, PreparedRun):
            plans += 1
            assert math.prod(ended.begins_in.dims.degrees().values()) == world_size, args
        else:
            refusals += 1
            assert str(ended) and "Traceback" not in str(ended), args
    assert min(plans, refusals) > 0.15 * number, (plans, refusals)


def one_step(config: TrainConfig) -> StepRecord:
    launch = Launch(rank=dist.get_rank(), world_size=dist.get_world_size(), local_world_size=dist.get_world_size())
    return Trainer(prepare(config, launch)).step(1)


@pytest.mark.slow
def test_configurations_that_are_accepted_run(ranks: RankPool, data: str, tmp_path: Path, exhaustive: bool) -> None:
    found = 0
    for world_size, args in command_lines(seed=1, number=2000):
        ended = outcome(world_size, args, data) if world_size == 4 and len(args) > 11 else None
        if not isinstance(ended, PreparedRun) or ended.shape.numel > 10**7:
            continue
        config = replace(ended.config, output=str(tmp_path / str(found)))
        assert math.isfinite(ranks.run(one_step, 4, config)[0].loss), args
        found += 1
        if found == (8 if exhaustive else 2):
            return
    raise AssertionError(f"only {found} plans for 4 ranks")
