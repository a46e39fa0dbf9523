"""docs/benchmarks.md and the README's table are what the results say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.record import RESULTS, Record
from benchmarks.report import DOCUMENT, README, document, readme


def test_a_record_survives_its_file_and_becomes_a_table(tmp_path: Path) -> None:
    record = Record(
        name="x",
        question="How fast?",
        command="python -m benchmarks.x",
        machine={"cores": "2"},
        columns=("a", "b"),
        rows=(("1", "x | y"),),
        notes=("Of note.",),
        data=[{"a": 1}],
    )
    record.save(tmp_path / "x.json")
    assert Record.load(tmp_path / "x.json") == record
    text = document([record])
    assert "## How fast?\n\n`python -m benchmarks.x` (cores 2)\n\n| a | b |\n| --- | --- |\n| 1 | x \\| y |\n" in text
    assert text.endswith("- Of note.\n")


def test_the_documents_are_up_to_date() -> None:
    records = [Record.load(path) for path in sorted(RESULTS.glob("*.json"))]
    assert DOCUMENT.read_text() == document(records), "run `python -m benchmarks.report`"
    attention = next(record for record in records if record.name == "attention")
    assert README.read_text() == readme(README.read_text(), attention), "run `python -m benchmarks.report`"
