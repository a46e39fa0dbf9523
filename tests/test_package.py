"""What `pip install` of a wheel gives: every package and its data, nothing else, console scripts, and dependencies."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, packages_distributions
from pathlib import Path
from typing import Any

import pytest
import setuptools

import usp.__main__

ROOT = Path(__file__).parents[1]
PACKAGES = ("attention", "parallel", "usp")
OPTIONAL = {"wandb", "triton"}  # used where it is installed; no feature needs it


@pytest.fixture(scope="module")
def packaged() -> dict[str, Any]:
    """The arguments of setup() in setup.py."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", found.update)
        runpy.run_path("setup.py")
    return found


def test_every_folder_with_code_is_a_package(packaged: dict[str, Any]) -> None:
    with_code = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {folder.relative_to(ROOT).as_posix().replace("/", ".") for folder in with_code} == set(packaged["packages"])


def test_every_file_beside_the_code_is_packaged(packaged: dict[str, Any]) -> None:
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    expected = {path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts}
    patterns = [(package, pattern) for package, all_ in packaged["package_data"].items() for pattern in all_]
    found = {path for package, pattern in patterns for path in (ROOT / package.replace(".", "/")).glob(pattern)}
    assert expected == found


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
def test_help_whose_reader_has_gone_is_no_error(program: list[str]) -> None:
    """As in `train.py --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *program, "--help"]
    ended = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_start_imports_nothing_slow_that_it_does_not_need() -> None:
    """Neither help nor, after it in the same process, a plan."""
    slow = (
        (["plan", "--help"], {"transformers", "torch.distributed.tensor", "torch.distributed.pipelining"}),
        (PLAN, {"transformers.modeling_utils", "usp.train.dry_run"}),
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
