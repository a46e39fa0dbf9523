"""The pages that list every flag, and the help of the programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import pytest

from examples.reference import FOLDER, GROUPS, Entry, pages, programs, tables

TABLES = {"train.py": "train", "rlhf.py": "rlhf"}  # all other programs have a section of the page of commands
FLAG = r"`(--[a-z][a-z0-9-]*)`"


@pytest.fixture(scope="module")
def written() -> Mapping[str, str]:
    return {name: (FOLDER / f"{name}.md").read_text() for name in pages()}


def test_the_pages_are_current(written: Mapping[str, str]) -> None:
    assert written == pages(), "run python -m examples.reference"


@pytest.mark.parametrize("program", [*programs()])
def test_each_flag_of_the_help_is_there_once(
    program: str, written: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        programs()[program](["--help"])
    of_help = re.findall(r"^..(--[a-z][a-z0-9-]*)", capsys.readouterr().out, re.MULTILINE)
    text = written[TABLES.get(program, "usp")]
    section = text if program in TABLES else re.split(rf"\n## {program}\n", text)[1].split("\n## ")[0]
    in_rows = re.findall(rf"^\| {FLAG} \|", section, re.MULTILINE)
    _, _, shared = section.partition("It also takes these flags")
    assert of_help
    assert Counter([*in_rows, *re.findall(FLAG, shared)]) == Counter(of_help)


def test_a_flag_without_a_subject_is_refused() -> None:
    assert "## LoRA" in tables([Entry("lora_rank", "`--lora-rank`", "", "", "", "")])
    with pytest.raises(ValueError, match="--unheard-of` has no subject"):
        tables([Entry("unheard_of", "`--unheard-of`", "", "", "", "")])
    assert len(GROUPS) == len({*GROUPS.values()})
