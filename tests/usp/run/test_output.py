"""Files of lines lose nothing while a disk is full, except what they say."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import usp.run.output
from usp.run.output import LineFile, working

Limit = Callable[[int], None]


@pytest.fixture
def limit() -> Iterator[Limit]:
    """Limit the size of files, as a full disk does: a part of what is written may still fit. -1: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size < 0 else size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_wait_until_they_can_be_written(tmp_path: Path, limit: Limit, capsys: pytest.CaptureFixture[str]) -> None:
    file = LineFile(tmp_path / "new" / "lines")
    file.append(1, ["one", "and a half"])
    limit(20)
    file.append(2, ["two is cut by the limit"])
    file.append(3, ["three"])
    assert file.path.read_text() == "one\nand a half\n"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"warning: {file.path} cannot be written: ")
    limit(-1)
    file.append(4, ["four"])
    assert file.path.read_text() == "one\nand a half\ntwo is cut by the limit\nthree\nfour\n"
    file.close()
    assert capsys.readouterr().err == ""


def test_the_end_says_which_lines_are_missing(
    tmp_path: Path, limit: Limit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usp.run.output, "WAITING_BYTES", 12)
    file = LineFile(tmp_path / "lines")
    limit(0)
    for step in (1, 2, 3):
        file.append(step, ["12345"])
    limit(-1)
    file.append(5, [])  # writes those that waited
    assert file.path.read_text() == "12345\n12345\n"
    limit(0)
    file.append(7, ["seven"])
    limit(-1)
    file.close()
    assert capsys.readouterr().err.endswith(f"warning: {file.path} lacks the lines of steps 1, 7\n")


@pytest.mark.parametrize(("terminal", "shown"), [(True, True), (True, False), (False, True)])
def test_a_spinner_is_for_terminals_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, shown: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")  # with which rich takes a pipe for a terminal
    with working("planning", shown) as say:
        say("planning: 100 of 200")
        print("a line")
    told = capsys.readouterr()
    assert ("planning" in told.err) == (terminal and shown) and "a line\n" in told.out + told.err
    assert bool(told.err) == (terminal and shown)
