"""Commands and snippets of README, the tutorial and the guides run as they are written, and figures are those measured.

A block whose first line is a comment, `# needs ...` or `# about a minute`, does not run here. A block with title="FILE"
is a file, which later blocks of its page find. The two commands that make an environment are what `.ci/run` runs. The
tutorial and getting started run with --full, the guides with --exhaustive.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness.pages import Block, blocks
from tests.harness.ranks import RankPool

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINKED = ("train.py", "rlhf.py", "examples", "benchmarks", "configs", "docs")
README = ROOT / "README.md"


def runs(block: Block) -> bool:
    ours = block.language == "bash" and not block.text.startswith(("# ", "python3 -m venv"))
    return ours or (block.language == "python" and not block.title)


def shell(block: Block, folder: Path) -> str:
    """Run a block in a folder with the repository's programs, as its reader does."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def read_through(page: Path, folder: Path) -> list[str]:
    """Write the files of a page and run its commands in order; return what they printed."""
    for name in LINKED:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    printed = []
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "bash" and runs(block):
            printed.append(shell(block, folder))
    return printed


@pytest.mark.slow
def test_the_tutorial_runs_as_it_is_written(tmp_path: Path) -> None:
    printed = read_through(DOCS / "tutorial.md", tmp_path)
    (expected,) = (block.text for block in blocks(DOCS / "tutorial.md") if block.language == "text")
    one, replies, four, *_ = printed
    assert replies == expected
    assert last_loss(one) == pytest.approx(last_loss(four), rel=1e-3)  # printed with four decimals
    assert "ulysses" in (tmp_path / "plan.yaml").read_text()


def last_loss(printed: str) -> float:
    return float(re.findall(r"^step .*?loss ([\d.]+)", printed, re.MULTILINE)[-1])


@pytest.mark.slow
def test_getting_started_runs_as_it_is_written(tmp_path: Path) -> None:
    _, loop, operator = read_through(DOCS / "getting-started.md", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", loop)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert operator == "(1, 4096, 8, 64)\n"


GUIDES = sorted(str(page.relative_to(DOCS)) for page in DOCS.glob("guides/**/*.md"))
COMMANDS = ("debugging.md", "planning.md", "cost.md", "dry-run.md")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*COMMANDS, *GUIDES])
def test_commands_of_other_pages_run(tmp_path: Path, name: str) -> None:
    read_through(DOCS / name, tmp_path)


def sharded_logits(code: str) -> torch.Tensor:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=8, num_key_value_heads=4)
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(64).unsqueeze(0)
    whole = model(ids).logits
    names = {"model": model, "ids": ids, "labels": ids, "device_type": "cpu"}
    exec(code, names)
    positions = names["batch"]["position_ids"][0]
    return (names["logits"] - whole[:, positions]).abs().max().detach()


def test_the_snippet_of_the_readme_runs(ranks: RankPool) -> None:
    (snippet,) = (block.text for block in blocks(README) if block.language == "python")
    assert max(ranks.run(sharded_logits, 8, snippet)) < 1e-5


def test_the_readme_is_short_and_its_figures_are_those_of_the_benchmarks() -> None:
    text, measured = README.read_text(), " ".join((DOCS / "benchmarks.md").read_text().split())
    assert len(text.splitlines()) <= 80
    table = text.split("## Figures", 1)[1].split("## ", 1)[0]
    answers = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")][2:]
    figures = [figure for answer in answers for figure in re.findall(r"\d+\.\d+|\d+ times", answer)]
    assert len(figures) >= 8
    assert not [figure for figure in figures if figure not in measured]


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", README.read_text())
    assert not [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()]
