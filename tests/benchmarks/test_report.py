"""docs/benchmarks.md and the tables beside it match the results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.record import Record
from benchmarks.report import DOCUMENT, SECTIONS, TABLES, document, load, table


def test_record_round_trips_and_renders_as_a_table(tmp_path: Path) -> None:
    record = Record(
        name="x",
        question="How fast?",
        answer="Twice as fast.",
        command="python -m benchmarks.x",
        machine={"cores": "2"},
        columns=("a", "b"),
        rows=(("1", "x | y"),),
        notes=("Of note.",),
        data=[{"a": 1}],
    )
    record.save(tmp_path / "x.json")
    assert Record.load(tmp_path / "x.json") == record
    text = table(record)
    assert text.startswith("# How fast?\n\nTwice as fast.\n\n`python -m benchmarks.x` (cores 2).")
    assert text.endswith("\n\n| a | b |\n| --- | --- |\n| 1 | x \\| y |\n\n- Of note.\n")


def test_documents_are_up_to_date() -> None:
    records, run = load(), "run `python -m benchmarks.report`"
    assert DOCUMENT.read_text() == document(records), run
    assert {path.stem: path.read_text() for path in TABLES.glob("*.md")} == {
        name: table(record) for name, record in records.items()
    }, run


def test_every_record_is_on_one_page() -> None:
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(load())
    assert len(DOCUMENT.read_text().splitlines()) <= 150
