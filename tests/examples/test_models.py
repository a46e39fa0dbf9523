"""python -m examples.models, and the table that it has written."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from examples.models import causal_lm_types, main, table
from usp.hf.images import TRAINED

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
CHOSEN = ["bloom", "gemma3_text", "gemma3n_text", "gpt2", "granite", "rwkv"]
IMAGES = ["gemma3", "llava", "qwen3_vl"]  # blocks in both directions, one axis of positions, three and deeper features


@pytest.mark.slow
def test_the_document_is_current(request: pytest.FixtureRequest) -> None:
    """Of the transformers it was written with; all rows with --exhaustive."""
    text = DOCUMENT.read_text()
    if f"transformers {version('transformers')}," not in text:
        pytest.fail("another transformers is installed: run python -m examples.models > docs/models.md")
    written = [line for line in text.splitlines() if line.startswith("| ")][2:]
    known = sorted({*causal_lm_types(), *TRAINED})
    assert [line.split("|")[1].strip() for line in written] == known
    types = known if request.config.getoption("--exhaustive") else CHOSEN
    assert [line for line in written if line.split("|")[1].strip() in types] == table(types).markdown().splitlines()[2:]


@pytest.mark.slow
def test_types_that_are_trained_with_images_are_named(request: pytest.FixtureRequest) -> None:
    """By what train.py checks: without its answer, and for a type that is not one of them, the row says something
    else. All types with --exhaustive."""
    types = TRAINED if request.config.getoption("--exhaustive") else IMAGES
    rows = {row[0]: row for row in table([*types, "llama4"]).rows}
    assert {name for name, row in rows.items() if row[4] == "yes, with images"} == {*types} <= {*TRAINED}
    assert "one of several parts" in rows["llama4"][4]


def test_the_command_prints_types_and_refuses_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--types", "llama, rwkv"]) == 0
    shown = capsys.readouterr().out
    assert (
        "| llama |  | exact | causal | yes: pp, tp | yes |" in shown
        and "| rwkv |  | refused | RwkvSelfAttention mix" in shown
    )
    assert main(["--types", "lama"]) == 1
    assert "types=lama: transformers" in capsys.readouterr().err
