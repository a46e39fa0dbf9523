"""What `pip install` of a wheel gives: every package and its data, nothing else, console scripts, and dependencies."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, packages_distributions
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch

import usp.__main__

ROOT = Path(__file__).parents[1]
PACKAGES = ("attention", "parallel", "usp")
OPTIONAL = {"wandb", "trackio", "mlflow", "triton"}  # used where it is installed; no feature needs it


@pytest.fixture(scope="module")
def packaged() -> dict[str, Any]:
    """The arguments of setup() in setup.py."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", found.update)
        runpy.run_path("setup.py")
    return found


def name_of(folder: Path) -> str:
    """Return the name that a folder is imported by: usp.attention for attention/."""
    parts = folder.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "usp" else ("usp", *parts))


def test_every_folder_with_code_is_a_package(packaged: dict[str, Any]) -> None:
    with_code = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert set(map(name_of, with_code)) == set(packaged["packages"])


def test_every_file_beside_the_code_is_packaged(packaged: dict[str, Any]) -> None:
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    expected = {path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts}
    patterns = [(package, pattern) for package, all_ in packaged["package_data"].items() for pattern in all_]
    found = {path for package, pattern in patterns for path in (ROOT / package.replace(".", "/")).glob(pattern)}
    assert {path.resolve() for path in found} == expected


@pytest.mark.slow
def test_every_import_is_a_dependency(packaged: dict[str, Any]) -> None:
    declared = {name for extra in packaged["extras_require"].values() for name in map(_name, extra)}
    declared |= set(map(_name, packaged["install_requires"]))
    distributions = packages_distributions()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for module in _imports(ast.parse(path.read_text())) - {*sys.stdlib_module_names, *PACKAGES, *OPTIONAL}:
                names = distributions.get(module, [module])
                assert declared & set(map(_name, names)), f"{path.relative_to(ROOT)} imports {module}"


def _name(requirement: str) -> str:
    """Return the normalized name in a requirement such as `PyYAML>=6; python_version > "3"`."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _imports(tree: ast.Module) -> set[str]:
    """Return the first parts of all absolute imports."""
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.split(".")[0] for name in found}


PLAN = ["plan", "--model=tiny", "--seq-len=4K", "--world-size=2", "--global-batch-size=2"]
SCRIPTS = {"usp": ["plan"], "usp-train": [], "usp-rlhf": []}


def test_the_console_scripts_are_functions(packaged: dict[str, Any]) -> None:
    scripts = [EntryPoint(*re.split(r" *= *", line), "") for line in packaged["entry_points"]["console_scripts"]]
    assert [script.name for script in scripts] == list(SCRIPTS)
    assert all(callable(script.load()) for script in scripts)


@pytest.mark.parametrize(("script", "command"), SCRIPTS.items())
@pytest.mark.slow(but=2)
def test_the_help_of_a_console_script_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, script: str, command: Sequence[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{script}", *command, "--help"])
    with pytest.raises(SystemExit) as stop:
        getattr(usp.__main__, script.replace("-", "_"))()
    assert not stop.value.code
    assert capsys.readouterr().out.startswith(f"usage: {' '.join([script, *command])} [-h]")


def test_every_command_has_a_program_of_its_name() -> None:
    for command in usp.__main__.COMMANDS:
        assert callable(usp.__main__.command_module(command).main)


@pytest.mark.parametrize("program", [["train.py"], ["-m", "usp", "plan"]], ids=" ".join)
@pytest.mark.slow
def test_help_whose_reader_has_gone_is_no_error(program: list[str]) -> None:
    """As in `train.py --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *program, "--help"]
    ended = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow
def test_a_start_imports_nothing_slow_that_it_does_not_need() -> None:
    """Neither help nor, after it in the same process, a plan."""
    slow = (
        (["plan", "--help"], {"transformers", "torch.distributed.tensor", "torch.distributed.pipelining"}),
        (PLAN, {"transformers.trainer", "usp.train.dry_run"}),  # it builds the model, without memory
    )
    code = f"""
import contextlib, sys
from usp.__main__ import main
for words, slow in {slow}:
    with contextlib.suppress(SystemExit):
        main(words)
    print("slow:", *sorted(slow & {{*sys.modules}}))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    said = [line for line in ended.stdout.splitlines() if line.startswith("slow:")]
    assert (ended.returncode, said) == (0, ["slow:"] * 2), ended.stderr


USERS = """
import attention, parallel
from usp import UnifiedSPAttention
from usp.attention import SequenceLayout
from usp.parallel import ParallelMesh
import usp
assert attention.MINE and parallel.MINE
print(usp.__file__)
"""


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.slow(but=1)
def test_modules_of_a_user_are_called_what_they_want(tmp_path: Path, installed: bool) -> None:
    """attention.py and parallel.py beside a script that imports usp, from the repository or a wheel."""
    (user := tmp_path / "user").mkdir()
    for name in ("attention", "parallel"):
        (user / f"{name}.py").write_text("MINE = True\n")
    (user / "script.py").write_text(USERS)
    place = ROOT
    if installed:
        tree = tmp_path / "tree"
        shutil.copytree(ROOT / "usp", tree / "usp", ignore=shutil.ignore_patterns("__pycache__"))  # links as folders
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        place = tmp_path / "installed"
        options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--target", str(place)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, str(tree)], check=True, timeout=600)
    environment = {**os.environ, "PYTHONPATH": str(place)}
    command = [sys.executable, "script.py"]
    ended = subprocess.run(command, cwd=user, env=environment, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (0, f"{place / 'usp' / '__init__.py'}\n"), ended.stderr


OPERATOR = """
import sys
for name in ("tyro", "rich", "pyarrow", "matplotlib", "PIL"):
    sys.modules[name] = None  # as where it is missing
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from usp.attention import SequenceLayout
from usp.parallel import ParallelDims, ParallelMesh
from usp import UnifiedSPAttention, apply_unified_sp, shard_batch, unshard_sequence

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = ParallelMesh.create(ParallelDims())
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
model = apply_unified_sp(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), mesh, layout="zigzag")
batch = shard_batch({"input_ids": torch.arange(8)[None]}, mesh, layout="zigzag")
model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits.sum().backward()
q = torch.randn(1, 8, 2, 8)
print(tuple(unshard_sequence(UnifiedSPAttention(mesh, layout="zigzag")(q, q, q), mesh, layout="zigzag").shape))
"""


@pytest.mark.slow
def test_the_operator_and_models_need_no_package_of_the_commands() -> None:
    ended = subprocess.run([sys.executable, "-c", OPERATOR], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (0, "(1, 8, 2, 8)\n"), ended.stderr


@pytest.mark.parametrize(
    ("package", "oldest", "older", "file"),
    [
        ("torch", "2.11", "2.10.1+cu130", "attention/versions.py"),
        ("transformers", "5.17", "5.16.0.dev0", "usp/hf/__init__.py"),
    ],
)
def test_a_version_that_is_too_old_is_refused_on_import(
    packaged: dict[str, Any], monkeypatch: pytest.MonkeyPatch, package: str, oldest: str, older: str, file: str
) -> None:
    assert f"{package}>={oldest}" in packaged["install_requires"]
    for version in (f"{oldest}.0", older):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(importlib.metadata, "version", {package: version}.__getitem__)
        if version != older:
            runpy.run_path(str(ROOT / file))
    with pytest.raises(
        ImportError, match=f"^{package} {re.escape(older)} is installed, .* needs {package} {oldest} or"
    ):
        runpy.run_path(str(ROOT / file))
