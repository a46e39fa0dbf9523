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
from usp.config import CommonConfig, TrainConfig
from usp.fields import flag, names_of
from usp.rlhf.algorithms.registry import ALGORITHMS
from usp.rlhf.config import RlhfConfig, violations
from usp.rlhf.trainer import train_rlhf
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch, StopRequest
from usp.train import validate
from usp.train.prepare import prepare
from usp.train.trainer import train

PROGRAMS = ["train", *ALGORITHMS]
# One of each kind of data, of a critic, and of a model that is trained.
KINDS = ["train", "grpo", "ppo", "sft", "dpo", "reward_model"]
# What copies, compares, prints or settles a configuration reads its fields to no effect.
RULES = (rules_of_fields, validate, sys.modules[RlhfConfig.__module__])
COPIES = ("dataclasses.py", "<string>", *(str(module.__file__) for module in RULES))
SETTLES = ("_with_rates", "settled_lora", "settle_batch", "resume_violations", "sft_violations", "lora_violations")
READ: set[str] = set()


class _Recorded:
    """Records the fields that are read to some effect, also those of copies."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            frame: Any = sys._getframe(1)
            code, values = frame.f_code, frame.f_locals
            if code.co_name == "shared_values":  # into another dataclass
                copied = issubclass(values["kind"], CommonConfig)
            else:
                copied = code.co_filename.endswith(COPIES) or code.co_name in SETTLES
            if not copied:
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
        candidates = iter([*(rule.choices if rule else ()), "other"])
    elif not isinstance(default, bool):
        candidates = (type(default)(number) for number in (1, 2, 0.5, 3))
    return next(value for value in candidates if value != default and (rule is None or rule.holds(value)))


@pytest.mark.parametrize("program", PROGRAMS)
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
    assert set(re.findall(r"^  \d+\. (--[a-z-]+) ", str(refused.value), re.MULTILINE)) == set(map(flag, found))
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(asdict(config) | others))
    assert parse([*words, "--config", str(file)], kind) == config
    ignored = capsys.readouterr().err
    for name in found:
        assert re.search(rf"^warning: {file}: {flag(name)} .*: ignored$", ignored, re.MULTILINE), name


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("All work and no play makes a model overfit. " * 200)
    return str(tmp_path / "corpus.txt")


@pytest.mark.parametrize("program", KINDS)
def test_every_flag_is_read_or_has_no_effect(program: str, tmp_path: Path, corpus: str) -> None:
    READ.clear()
    shared: dict[str, Any] = {"output": str(tmp_path / "run"), "device": "cpu", "steps": 1}
    if program == "train":
        run: Any = RecordedTrain(**shared, data=corpus, data_cache=str(tmp_path), seq_len=64)
        train(prepare(run, Launch()), Launch())
    else:
        data: dict[str, Any] = {}
        if ALGORITHMS[program].data == "pairs":
            (tmp_path / "pairs.jsonl").write_text(
                '{"prompt": "a", "chosen": "b", "rejected": "c", "answer": "d"}\n' * 4
            )
            data = {"data": str(tmp_path / "pairs.jsonl")}
        elif ALGORITHMS[program].data == "prompts":
            data = {"group_size": 2, "max_new_tokens": 2}
        run = RecordedRlhf(algorithm=program, **shared, **data, prompts=2, sft_steps=0, options="mini_batches=1")
        train_rlhf(run, Launch(), StopRequest(), None)
    plain = config_of(program)
    unused = {name for name in names_of(plain.__class__) if name not in READ and name not in plain.without_effect()}
    assert not unused, f"neither read nor refused with {program}: {', '.join(sorted(unused))}"
