"""A curriculum: other lengths, data and degrees in every stage train as in one process, and resume in any of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.harness.ranks import RankPool
from usp.commands.flags import parse
from usp.config import CurriculumStage, TrainConfig, by_stage, read_stages
from usp.fields import config_from_mapping
from usp.parallel import load_hardware
from usp.planning.choice import choose
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.train.checkpoints import CHECKPOINTS, find_start, settled
from usp.train.prepare import prepare
from usp.train.resolve import job_of, resolve, trained_model
from usp.train.trainer import Trainer

SHORT = CurriculumStage(steps=2, seq_len=128, global_batch_size=8)
LONG = CurriculumStage(steps=2, seq_len=256, global_batch_size=4)
ALONE = (SHORT, LONG)
SHARDED = (  # on two ranks
    replace(SHORT, global_batch_size=0, batch_size=4),
    replace(LONG, sp_ring=2, micro_batches=2, ac="full"),
)
RUN = TrainConfig(warmup_steps=2, checkpoint_every=1, keep_checkpoints=9, adam_eps=1e-4, device="cpu", eval_every=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run on two files of text, with a third to evaluate on."""
    folder = tmp_path_factory.mktemp("text")
    for number, name in enumerate(("a", "b", "held")):
        lines = [
            f"line {number * 1000 + line} of {name}, " * (1 + line % 40) for line in range(300 if number < 2 else 5)
        ]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    data = f"{folder / 'a.txt'}=0.6,{folder / 'b.txt'}=0.4"
    return replace(RUN, data=data, eval_data=str(folder / "held.txt"), data_cache=str(folder / "cache"))


def run(config: TrainConfig) -> None:
    ranks = dist.get_world_size()
    Trainer(prepare(config, Launch(rank=dist.get_rank(), world_size=ranks, local_world_size=ranks))).run()


def run_from_sound(config: TrainConfig) -> None:
    """Run from the newest checkpoint that is sound, as train.py does."""
    launch = Launch(rank=dist.get_rank(), world_size=dist.get_world_size(), local_world_size=dist.get_world_size())
    prepared = prepare(config, launch)
    assert prepared.start.folder is not None
    ready = settled(
        prepared,
        prepared.start.folder,
        lambda damaged: find_start(config, launch, damaged=damaged),
        lambda start: prepare(config, launch, start),
    )
    Trainer(ready).run()


def each(configs: list[TrainConfig]) -> None:
    for config in configs:
        run(config)


def metrics_of(folder: Path) -> torch.Tensor:
    """(step, stage, seq_len, tokens, loss, gradient norm, learning rate, loss on held-out data) of each step."""
    names = ("step", "stage", "seq_len", "tokens", "loss", "grad_norm", "learning_rate", "eval_loss")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([[record[name] for name in names] for record in records], dtype=torch.float64)


@pytest.mark.slow
def test_stages_are_those_of_one_process_and_resume_anywhere(
    ranks: RankPool, base: TrainConfig, tmp_path: Path, exhaustive: bool
) -> None:
    sharded = replace(base, curriculum=SHARDED, output=str(tmp_path / "sharded"))
    resumed = [
        replace(
            sharded,
            output=str(tmp_path / f"from-{step}"),
            resume=str(tmp_path / f"sharded/{CHECKPOINTS}/step-{step:08}"),
        )
        for step in (1, 2, 3)
    ]
    alone = replace(base, curriculum=ALONE, output=str(tmp_path / "alone"))
    on_one = replace(resumed[0], curriculum=ALONE, output=str(tmp_path / "on-one"))
    again = (1, 2, 3) if exhaustive else (2, 3)  # in the first stage, one process goes on as well
    ranks.run(each, 2, [sharded, *(resumed[step - 1] for step in again)])
    stages = (replace(SHARDED[0], sp_ulysses=2, ac="full"), LONG)  # the first has ended: its degrees do not matter
    smaller = replace(resumed[1], curriculum=stages, output=str(tmp_path / "smaller"))
    ranks.run(each, 1, [alone, on_one, smaller])
    # The newest checkpoint is damaged: the one before it is used, in which the first stage has ended, too.
    damaged = replace(smaller, output=str(tmp_path / "sharded-too"), resume="auto")
    shutil.copytree(tmp_path / "sharded", tmp_path / "sharded-too")
    (tmp_path / "sharded-too" / CHECKPOINTS / "step-00000004" / "checkpoint.json").write_text("{")
    ranks.run(run_from_sound, 1, damaged)
    whole, wanted = metrics_of(tmp_path / "sharded"), metrics_of(tmp_path / "alone")
    assert whole[:, :4].tolist() == [[n, 1, 128, 1024] for n in (1, 2)] + [[n, 2, 256, 1024] for n in (3, 4)]
    assert (whole / wanted - 1).abs().max() <= 1e-5
    for step in again:
        assert torch.equal(metrics_of(tmp_path / f"from-{step}"), whole[step:])
    assert (metrics_of(tmp_path / "on-one") / wanted[1:] - 1).abs().max() <= 1e-5
    assert (metrics_of(tmp_path / "smaller") / wanted[2:] - 1).abs().max() <= 1e-5
    assert (metrics_of(tmp_path / "sharded-too") / wanted - 1).abs().max() <= 1e-5
    assert list((tmp_path / "sharded-too" / CHECKPOINTS).glob("*.damaged*"))
    written = yaml.safe_load((tmp_path / "sharded/config.yaml").read_text())
    read = config_from_mapping(written, TrainConfig)
    assert read.curriculum == SHARDED and by_stage(read) == by_stage(replace(read, curriculum=SHARDED))

    last = replace(sharded, output=str(tmp_path / "x"), resume=str(tmp_path / f"sharded/{CHECKPOINTS}/step-{3:08}"))
    for stages, said in (
        ((replace(SHARDED[0], steps=1), SHARDED[1]), "stages of --curriculum that end before the checkpoint must have"),
        ((replace(SHARDED[0], seq_len=256), SHARDED[1]), "stages of --curriculum that end before the checkpoint must"),
        ((replace(SHORT, global_batch_size=4), SHARDED[1]), "the same steps, seq_len, data and global_batch_size as"),
        ((SHARDED[0], replace(SHARDED[1], seq_len=512)), "seq_len = 512, but the checkpoint has 256"),
        ((SHARDED[0], replace(SHARDED[1], steps=9)), "data = .*tokens [0-9]+ to [0-9]+ of .*, but the checkpoint has"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            prepare(replace(last, curriculum=stages), Launch(world_size=2, local_world_size=2))


@pytest.mark.slow
def test_a_curriculum_is_read_from_a_file_or_a_configuration(base: TrainConfig, tmp_path: Path) -> None:
    text = "- {steps: 2, seq-len: 8K, data: 'a=0.7,b=0.3', sp_ulysses: 2}\n- {steps: 3, batch_size: 4}\n"
    (tmp_path / "stages.yaml").write_text(text)
    (tmp_path / "run.yaml").write_text(f"batch_size: 2\ncurriculum:\n{text}")
    stages = (CurriculumStage(2, 8192, "a=0.7,b=0.3", 2), CurriculumStage(3, batch_size=4))
    assert parse(["--curriculum", str(tmp_path / "stages.yaml")], TrainConfig).curriculum == stages
    config = parse(["--config", str(tmp_path / "run.yaml"), "--sp-ring", "2"], TrainConfig)
    assert config.curriculum == stages
    first, second = by_stage(config)
    assert (first.steps, first.seq_len, first.batch_size, first.sp_ring, first.data) == (5, 8192, 2, 2, "a=0.7,b=0.3")
    assert (second.steps, second.seq_len, second.batch_size, second.sp_ulysses) == (5, 4096, 4, 1)
    for wrong, said in (
        ("- {step: 2}", r"stage 1 of the curriculum: unknown key 'step' .*'steps'\?\); its keys are steps, seq_len"),
        ("- {seq_len: 8K}", "stage 1 of the curriculum needs its number of steps"),
        ("- {steps: 1}\n- {steps: 2, seq_len: 8Q}", "8Q must be a number of tokens"),
        ("- {steps: two}", "stage 1 of the curriculum: steps = 'two' must be an integer"),
        ("steps: 3", "a curriculum is a list of stages"),
    ):
        (tmp_path / "wrong.yaml").write_text(wrong)
        with pytest.raises(ValueError, match=said):
            read_stages(str(tmp_path / "wrong.yaml"))
    with pytest.raises(ConfigurationError, match="a curriculum is a list of stages"):
        parse(["--curriculum", str(tmp_path / "wrong.yaml")], TrainConfig)
    with pytest.raises(ValueError, match=r"is not a curriculum: .*No such file"):
        read_stages(str(tmp_path / "none.yaml"))


def test_what_a_curriculum_cannot_be_is_refused_naming_the_stage(base: TrainConfig) -> None:
    config = replace(base, curriculum=(SHORT, SHARDED[1]))
    for changes, said in (
        ({"steps": 7}, "--steps = 7 and --curriculum, of 4 steps, both set the length of the run"),
        ({"train_tokens": 7}, "--train-tokens = 7 and --curriculum both set"),
        (
            {"curriculum": (SHORT, replace(LONG, sp_ring=3))},
            "stage 2 of the curriculum: --sp-ring 3 = 3 ranks must divide",
        ),
        ({"curriculum": (replace(SHORT, sp_ulysses=3), LONG)}, "stage 1 of the curriculum: --sp-ulysses 3 = 3 ranks"),
        ({"adam_beta1": 2.0}, "^--adam-beta1 = 2.0 must be at least 0 and below 1$"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            resolve(replace(config, **changes), 4).valid()
    assert resolve(config, 4).largest.config.seq_len == 128  # 256 tokens on a rank, then 128 in a micro-batch
    with pytest.raises(ConfigurationError, match="the planner chooses one layout, and its stages have different steps"):
        choose(replace(config, global_batch_size=8), 4, load_hardware("h100"))
    job = job_of(config, trained_model(config), 4)
    assert (job.config.seq_len, job.dims.ulysses, job.dims.dp_shard, job.tokens) == (128, 1, 4, 256)
