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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness.pages import Block, blocks
from tests.harness.ranks import RankPool
from tests.usp.hf.vision import tiny_vlm
from usp import shard_sequence
from usp.hf.models import load_model_config
from usp.rlhf import api
from usp.rlhf.algorithms.registry import build_graph
from usp.rlhf.graph import TrainStep

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
    batch, logits = names_after(code, names, ("batch", "logits"))
    return (logits - whole[:, batch["position_ids"][0]]).abs().max().detach()


def test_the_snippet_of_the_readme_runs(ranks: RankPool) -> None:
    (snippet,) = (block.text for block in blocks(README) if block.language == "python")
    assert max(ranks.run(sharded_logits, 8, snippet)) < 1e-5


def snippets(page: str) -> list[str]:
    return [block.text for block in blocks(DOCS / page) if block.language == "python" and not block.title]


def names_after(code: str, names: Mapping[str, Any], wanted: Sequence[str]) -> list[Any]:
    """Run code on this rank with names, and return the values of others."""
    exec(code, names := dict(names))
    return [names[name] for name in wanted]


def test_the_call_of_the_page_about_attention_is_exact(ranks: RankPool) -> None:
    (code,) = snippets("guides/attention.md")
    ((q, k, v, out),) = ranks.run(names_after, 1, code, {}, ("q", "k", "v", "out"))
    mask = torch.ones(16, 16).tril().triu(-7).bool()
    heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    exact = scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, exact)


def sharded_rows(code: str) -> tuple[int, ...]:
    (mesh,) = names_after(code.replace('"cuda"', '"cpu"'), {}, ("mesh",))
    return tuple(shard_sequence(torch.arange(16), mesh, layout="contiguous", dim=0).tolist())


def test_the_mesh_of_the_page_about_migrating_divides_a_sequence(ranks: RankPool) -> None:
    (code,) = snippets("migrating.md")
    assert sorted(ranks.run(sharded_rows, 8, code)) == [(token, token + 1) for token in range(0, 16, 2)]


def test_adapters_load_as_the_page_about_them_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(load_model_config("tiny")).save_pretrained("models/Llama-3.1-8B")
    base = AutoModelForCausalLM.from_pretrained("models/Llama-3.1-8B")
    trained = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    trained.save_pretrained("RUN/adapter")
    (code,) = snippets("guides/lora.md")
    (loaded,) = names_after(code, {}, ("model",))
    ids = torch.arange(8).unsqueeze(0)
    assert torch.equal(loaded(ids).logits, trained(ids).logits)


def test_the_text_model_is_taken_out_as_the_page_about_models_says(tmp_path: Path) -> None:
    model = tiny_vlm("llava").float()
    (code,) = snippets("models.md")
    names_after(code, {"model": model, "folder": tmp_path, "AutoModelForCausalLM": AutoModelForCausalLM}, ())
    ids = torch.arange(8).unsqueeze(0)
    text = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(text(ids).logits, model(input_ids=ids).logits)


def test_the_algorithm_of_the_page_is_one_and_a_teacher_is_a_call_more() -> None:
    objective, teacher = snippets("algorithms.md")
    (unclipped,) = names_after(objective, {}, ("UNCLIPPED",))
    graph = build_graph("unclipped", unclipped.options(), {"unclipped": unclipped})
    (trained,) = (call.work.objective for call in graph.calls if isinstance(call.work, TrainStep))
    assert type(trained).__name__ == "Unclipped"
    options, advantages = unclipped.options(), object()
    (calls,) = names_after(
        f"calls = {teacher}", {**vars(api), "options": options, "advantages": advantages}, ("calls",)
    )
    assert [call.role for call in calls].count("teacher") == 1


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
