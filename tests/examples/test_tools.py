"""The tools of examples/tools.py: what they answer, and what they do not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.tools import calculate, search


def test_the_calculator_calculates_and_runs_nothing_else() -> None:
    assert [calculate(text) for text in ("12 * 7", " (3 + 4) * -2 ", "7 / 2", "sqrt(16)")] == ["84", "-14", "3.5", "4"]
    for text in ("2 +", "__import__('os').getpid()", "9 ** 9", "'a' * 9", "x", "1 +" * 400):
        with pytest.raises((SyntaxError, ValueError)):
            calculate(text)


def test_search_finds_the_passage_with_most_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.md").write_text("The cat sat.\n\nThe dog and the zebra.\n")
    monkeypatch.setenv("TEXTS", str(tmp_path))
    assert search("a zebra, a dog") == "The dog and the zebra." and search("unicorn") == "(nothing found)"
