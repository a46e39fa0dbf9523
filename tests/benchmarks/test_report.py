"""docs/benchmarks.md, the tables beside it and the README's table match the results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.record import Record
from benchmarks.report import DOCUMENT, README, SECTIONS, TABLES, document, load, readme, table


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


def test_only_the_readme_section_is_replaced() -> None:
    columns = ("u x r", "layout", "tokens", "heads", "dtype", "forward ms", "fwd + bwd ms")
    columns += ("of yunchang", "of 1 process", "units sent")
    standard = ("2 x 2", "zigzag", "4,096", "8/8", "float32", "1 / 2 / 3", "4 / 5 / 6", "0.80", "0.67", "2.12 / 3.00")
    eight_ranks = ("4 x 2", *standard[1:])
    machine = {"processor": "P", "cores": "2", "torch": "2", "date": "2026-01-01"}
    record = Record("attention", "", "", "", machine, columns, (standard, eight_ranks), ())
    text = readme("# A\n\n## Benchmarks\n\nold\n\n## More\n\nend\n", record)
    assert text.startswith("# A\n\n## Benchmarks\n\n") and text.endswith("\n\n## More\n\nend\n")
    assert "| 2 x 2 | 4,096 | 1 / 2 / 3 | 4 / 5 / 6 | 0.80 | 0.67 | 2.12 / 3.00 |" in text
    assert "old" not in text and "4 x 2" not in text


def test_documents_are_up_to_date() -> None:
    records, run = load(), "run `python -m benchmarks.report`"
    assert DOCUMENT.read_text() == document(records), run
    assert README.read_text() == readme(README.read_text(), records["attention"]), run
    assert {path.stem: path.read_text() for path in TABLES.glob("*.md")} == {
        name: table(record) for name, record in records.items()
    }, run


def test_every_record_is_on_one_page() -> None:
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(load())
    assert len(DOCUMENT.read_text().splitlines()) <= 150
