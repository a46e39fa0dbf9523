"""Every flag of every program, with every algorithm: it is read where it takes effect, or refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from usp import fields as rules_of_fields
from usp.commands.flags import parse
from usp.commands.rlhf import program as rlhf_program
from usp.commands.train import program as train_program
from usp.config import CommonConfig, TrainConfig
from usp.fields import flag, names_of
from usp.rlhf.algorithms.registry import ALGORITHMS
from usp.rlhf.config import RlhfConfig, violations
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch, StopRequest
from usp.train import validate
from usp.train.resolve import resolve

PROGRAMS = ["train", *ALGORITHMS]
# One of each kind of data, of a critic, and of a model that is trained.
KINDS = ["train", "grpo", "ppo", "sft", "dpo", "reward_model"]
# What copies, compares, prints, checks or settles a configuration reads its fields to no effect.
RULES = (rules_of_fields, validate, sys.modules[RlhfConfig.__module__])
COPIES = ("dataclasses.py", "<string>", *(str(module.__file__) for module in RULES))
SETTLES = ("_with_rates", "settled_lora", "resume_violations", "sft_violations", "lora_violations")
TAKES_EFFECT = ("settle_batch", "parallel_dims", "sft_steps_of", "begun", "episodes")  # though among the rules
READ: set[str] = set()


class _Recorded:
    """Records the fields that are read to some effect, also those of copies."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            frame: Any = sys._getframe(1)
            copies = next((each for each in (frame, frame.f_back) if each.f_code.co_name == "shared_values"), None)
            if copies is not None:
                effect = not issubclass(copies.f_locals["kind"], CommonConfig)
            elif frame.f_code.co_name in TAKES_EFFECT:
                effect = True
            else:
                effect = not frame.f_code.co_filename.endswith(COPIES) and frame.f_code.co_name not in SETTLES
            if effect:
                READ.add(name)
        return super().__getattribute__(name)


class RecordedTrain(_Recorded, TrainConfig): ...


class RecordedRlhf(_Recorded, RlhfConfig): ...


def config_of(program: str, **changes: Any) -> TrainConfig | RlhfConfig:
    return TrainConfig(**changes) if program == "train" else RlhfConfig(**{"algorithm": program} | changes)


def words_of(program: str) -> list[str]:
    return [] if program == "train" else ["--algorithm", program]


def refusals(config: TrainConfig | RlhfConfig) -> str:
    if isinstance(config, TrainConfig):
        return "\n".join(validate.violations(config, 1, None))
    return "\n".join(violations(config, ALGORITHMS))


def other_value(config: Any, name: str) -> Any:
    """Return a value of a field that its rule allows, and that is not its default."""
    default = getattr(config.__class__, name)
    rule = rules_of_fields._rules(config.__class__).get(name)
    candidates: Iterator[Any] = iter([not default] if isinstance(default, bool) else [])
    if isinstance(default, str):
        candidates = iter([*(rule.choices if rule else ()), "vllm"])
    elif not isinstance(default, bool):
        candidates = (type(default)(number) for number in (1, 2, 0.5, 3))
    return next(value for value in candidates if value != default and (rule is None or rule.holds(value)))


@pytest.mark.parametrize(
    "program", [name if name in KINDS else pytest.param(name, marks=pytest.mark.exhaustive) for name in PROGRAMS]
)
@pytest.mark.slow(but=1)
def test_an_option_without_effect_is_refused_and_one_of_a_file_ignored(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(program)
    found = config.without_effect()
    assert found, "some option has no effect beside the defaults"
    words, kind, others = words_of(program), config.__class__, {name: other_value(config, name) for name in found}
    for name, value in others.items():
        assert re.search(rf"^{flag(name)} ", refusals(replace(config, **{name: value})), re.MULTILINE), name
    defaults = {name: getattr(config, name) for name in found}
    given = [
        f"{flag(name)}={'auto' if name.endswith('rate') else default}"
        if not isinstance(default, bool)
        else f"--no-{name.replace('_', '-')}"
        for name, default in defaults.items()
    ]
    with pytest.raises(ConfigurationError) as refused:
        parse([*words, *given], kind)
    assert set(re.findall(r"^  \d+\. (--[a-z0-9-]+) ", str(refused.value), re.MULTILINE)) == set(map(flag, found))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(asdict(config) | others))
    assert parse([*words, "--config", str(file)], kind) == config
    ignored = capsys.readouterr().err
    for name in found:
        assert re.search(rf"^warning: {file}: {flag(name)} .*; it is ignored$", ignored, re.MULTILINE), name


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("All work and no play makes a model overfit. " * 200)
    return str(tmp_path / "corpus.txt")


@pytest.mark.parametrize("program", KINDS)
@pytest.mark.slow
def test_every_flag_is_read_or_has_no_effect(program: str, tmp_path: Path, corpus: str) -> None:
    READ.clear()
    shared: dict[str, Any] = {"output": str(tmp_path / "run"), "device": "cpu", "steps": 1}
    if program == "train":
        run: Any = RecordedTrain(**shared, data=corpus, data_cache=str(tmp_path), seq_len=64, model="mixtral-tiny")
        train_program.run(run, Launch(), StopRequest(), None)
    else:
        data: dict[str, Any] = {}
        if ALGORITHMS[program].data == "pairs":
            (tmp_path / "pairs.jsonl").write_text(
                '{"prompt": "a", "chosen": "b", "rejected": "c", "answer": "d"}\n' * 4
            )
            data = {"data": str(tmp_path / "pairs.jsonl"), "sft_steps": 0}
        elif ALGORITHMS[program].data == "prompts":
            data = {"group_size": 2, "max_new_tokens": 2, "sft_steps": 0}
        run = RecordedRlhf(algorithm=program, **shared, **data, prompts=2, options="mini_batches=1")
        rlhf_program.run(run, Launch(), StopRequest(), None)
    unused = {*names_of(run.__class__)} - READ - {*run.without_effect()}
    assert not unused, f"neither read nor refused with {program}: {', '.join(sorted(unused))}"


@pytest.mark.slow
def test_of_two_options_that_set_the_same_one_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--steps", "100", "--train-tokens", "128"], ["--batch-size=1", "--global-batch-size", "4"]):
        with pytest.raises(ConfigurationError, match="both set the same: give one of them"):
            parse(words, TrainConfig)
    file = tmp_path / "config.yaml"
    file.write_text("{steps: 100, train-tokens: 128}")
    with pytest.raises(ConfigurationError, match="--steps = 100 and --train-tokens = 128 both set the same"):
        parse(["--config", str(file)], TrainConfig)
    assert parse(["--config", str(file), "--steps", "100"], TrainConfig) == TrainConfig(steps=100)
    assert "--steps = 100 and --train-tokens = 128 both set the same; it is ignored" in capsys.readouterr().err
    file.write_text(yaml.safe_dump(asdict(TrainConfig(steps=7, batch_size=3))))  # as a run writes it
    assert parse(["--config", str(file), "--train-tokens", "9"], TrainConfig) == TrainConfig(
        train_tokens=9, batch_size=3
    )
    assert "--steps = 7 and --train-tokens = 9 both set the same; it is ignored" in capsys.readouterr().err
    stages = "curriculum: [{steps: 3}, {steps: 4}]"
    file.write_text(stages)
    with pytest.raises(ConfigurationError, match="--steps = 100 and --curriculum both set the length"):
        parse(["--config", str(file), "--steps", "100"], TrainConfig)


def test_a_switch_that_is_turned_off_takes_its_options_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the file of a run, not those of the same command line."""
    saved = TrainConfig(sample_every=5, sample_prompts="p.txt", sample_tokens=9, eval_data="e.txt", eval_every=3)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(asdict(saved)))
    words = ["--config", str(file), "--sample-every", "0", "--eval-data", ""]
    assert parse(words, TrainConfig) == TrainConfig()
    assert len(re.findall("; it is ignored$", capsys.readouterr().err, re.MULTILINE)) == 3
    kept = parse([*words, "--sample-tokens", "9"], TrainConfig)
    assert "--sample-tokens = 9 is an option of --sample-every" in refusals(kept)


@pytest.mark.slow
def test_a_learning_rate_of_0_is_0_and_auto_the_default() -> None:
    assert parse([], TrainConfig).learning_rate == parse(["--learning-rate", "auto"], TrainConfig).learning_rate
    rates = [resolve(parse(["--learning-rate", rate], TrainConfig), 1).config.learning_rate for rate in ("0", "auto")]
    assert rates == [0.0, 3e-3]
    with pytest.raises(ConfigurationError, match="-1 must be at least 0, or auto"):
        parse(["--learning-rate=-1"], TrainConfig)
    mappings: list[dict[str, Any]] = [{"learning_rate": value} for value in ("auto", 0, 3e-4, "3e-4")]
    read = [rules_of_fields.config_from_mapping(mapping, TrainConfig).learning_rate for mapping in mappings]
    assert read == [TrainConfig.learning_rate, 0.0, 3e-4, 3e-4]
