"""The structure of the code, checked on its source: who may import whom, and how large things get.

Every rule is a function from one parsed file to what breaks it, so the rules are tested on bad files too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("attention", "parallel", "usp")
CODE = (*PACKAGES, "benchmarks", "examples", "tests")
MAX_FUNCTION_LINES = 80


@dataclass(frozen=True)
class Source:
    path: str  # relative to the root, with forward slashes
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/")[0]


@cache
def sources() -> list[Source]:
    paths = [*ROOT.glob("*.py"), *(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))]
    return [parse(path.relative_to(ROOT).as_posix(), path.read_text()) for path in sorted(paths)]


def parse(path: str, text: str) -> Source:
    return Source(path, ast.parse(text))


def imports(source: Source, inside: ast.AST | None = None) -> Iterator[tuple[str, int]]:
    """(absolute dotted name, line) of everything imported; `from a import b` gives a.b, a module or not."""
    for node in ast.walk(inside or source.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = source.path.split("/")[: -node.level] if node.level else []
            prefix = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((f"{prefix}.{alias.name}", node.lineno) for alias in node.names)


def in_package(path: str, *packages: str) -> bool:
    return path.split("/")[0] in packages


# The rules


def layers(source: Source) -> Iterator[str]:
    """attention and parallel know torch and the standard library, and nothing of each other or of usp.

    A file format that torch itself reads and writes counts as torch.
    """
    if not in_package(source.path, "attention", "parallel"):
        return
    for name, line in imports(source):
        top = name.split(".")[0]
        optional = top in ("flash_attn", "flash_attn_interface", "flash_attn_3")  # see `optional_packages`
        if top not in ("torch", "safetensors", source.package) and top not in sys.stdlib_module_names and not optional:
            yield f"{source.path}:{line} imports {name}: {source.package}/ knows only torch and the standard library"


def optional_packages(source: Source) -> Iterator[str]:
    """transformers in usp/hf alone, DeepSpeed in its engine, optional kernels in their back end's load()."""
    if not in_package(source.path, *PACKAGES):
        return
    inside_load = {
        line
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef) and node.name == "load"
        for _, line in imports(source, node)
    }
    for name, line in imports(source):
        top = name.split(".")[0]
        if top in ("transformers", "tokenizers") and not source.path.startswith("usp/hf/"):
            yield f"{source.path}:{line} imports {name}: transformers belongs in usp/hf/"
        if top == "deepspeed" and source.path != "usp/train/engines/deepspeed.py":
            yield f"{source.path}:{line} imports {name}: DeepSpeed belongs in usp/train/engines/deepspeed.py"
        if top.startswith("flash_attn") and line not in inside_load:
            yield f"{source.path}:{line} imports {name}: an optional kernel is imported inside load()"


def public_names(source: Source) -> Iterator[str]:
    """What users write (train.py, examples, benchmarks) needs no private name."""
    if "/" in source.path and not in_package(source.path, "benchmarks", "examples"):
        return
    for name, line in imports(source):
        parts = name.split(".")
        if parts[0] in PACKAGES and any(part.startswith("_") for part in parts):
            yield f"{source.path}:{line} imports {name}: use public names only"


def environment(source: Source) -> Iterator[str]:
    """Scripts hand the environment to the command line; setting a variable for a library is not reading."""
    if not in_package(source.path, *PACKAGES) or source.path == "usp/__main__.py":  # a script
        return
    writes = {
        id(node.value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and id(node) not in writes:
            yield f"{source.path}:{node.lineno} reads the environment: pass the value down from the script"


def no_globals(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno} has `global {', '.join(node.names)}`: pass state as an argument"


def short_functions(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{source.path}:{node.lineno} {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def names_of_files(source: Source) -> Iterator[str]:
    if source.path in ("usp/attention.py", "usp/parallel.py"):
        yield f"{source.path} shadows the package of that name where usp/ is on the path: name it otherwise"


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (
    layers,
    optional_packages,
    public_names,
    environment,
    no_globals,
    short_functions,
    names_of_files,
)


# Files in a package form a line


def stated_order(docstring: str, modules: set[str]) -> list[str]:
    """The modules in the order in which the first paragraph that names them all names them; empty if none does."""
    for paragraph in docstring.split("\n\n"):
        named = [word for word in re.findall(r"\w+", paragraph) if word in modules]
        if set(named) == modules:
            return sorted(modules, key=named.index)
    return []


def out_of_order(package: str, order: list[str], files: list[Source]) -> Iterator[str]:
    """Imports inside `package` (a folder) that go to a later module, or to the package as a whole."""
    dotted = package.replace("/", ".")
    for source in files:
        own = source.path.removeprefix(f"{package}/").split("/")[0].removesuffix(".py")
        if own == "__init__":
            continue
        for name, line in imports(source):
            target = name.removeprefix(f"{dotted}.").split(".")[0] if name.startswith(f"{dotted}.") else None
            if target is None:
                continue
            if target not in order:
                yield f"{source.path}:{line} imports {name} through {dotted}/__init__.py: import the file that has it"
            elif order.index(target) > order.index(own):
                yield f"{source.path}:{line} imports {dotted}.{target}, which comes after {own} in {dotted}'s order"


def folders_with_init() -> list[str]:
    return sorted(
        path.parent.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("__init__.py")
    )


def modules_of(package: str) -> set[str]:
    children = (ROOT / package).iterdir()
    return {path.stem for path in children if path.suffix == ".py" or (path / "__init__.py").is_file()} - {"__init__"}


# The checks


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    broken = [message for source in sources() for message in rule(source)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("package", folders_with_init())
def test_files_of_a_package_form_a_line(package: str) -> None:
    modules = modules_of(package)
    docstring = ast.get_docstring(parse(package, (ROOT / package / "__init__.py").read_text()).tree) or ""
    order = stated_order(docstring, modules)
    assert order or not modules, (
        f"no paragraph of {package}/__init__.py's docstring names every module of the package in import order: "
        f"{', '.join(sorted(modules))}"
    )
    files = [source for source in sources() if source.path.startswith(f"{package}/")]
    broken = list(out_of_order(package, order, files))
    assert not broken, "\n".join(broken)


BAD_FILES = [
    (layers, "attention/x.py", "from parallel import ParallelMesh"),
    (layers, "attention/x.py", "from ..parallel import ParallelMesh"),
    (layers, "parallel/x.py", "import numpy as np"),
    (optional_packages, "usp/x.py", "def f():\n    from transformers import AutoModel"),
    (optional_packages, "usp/x.py", "import deepspeed"),
    (optional_packages, "attention/kernels/flash.py", "import flash_attn"),
    (public_names, "train.py", "from usp.train.trainer import _step"),
    (environment, "parallel/x.py", "import os\nrank = os.environ['RANK']"),
    (environment, "usp/x.py", "import os\nrank = os.getenv('RANK')"),
    (no_globals, "benchmarks/x.py", "def f():\n    global state\n    state = 1"),
    (short_functions, "usp/x.py", "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES),
    (names_of_files, "usp/attention.py", ""),
]
GOOD_FILES = [
    (layers, "usp/x.py", "from parallel import ParallelMesh\nimport numpy"),
    (layers, "parallel/x.py", "from safetensors.torch import save_file"),
    (layers, "attention/x.py", "import math\nimport torch.nn\nfrom attention.spec import AttentionSpec"),
    (optional_packages, "attention/kernels/flash.py", "def load():\n    import flash_attn"),
    (environment, "parallel/x.py", "import os\nos.environ['GLOO_SOCKET_IFNAME'] = 'lo'"),
    (short_functions, "usp/x.py", "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD_FILES, ids=lambda value: getattr(value, "__name__", None))
def test_a_rule_catches_what_it_is_for(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    assert len(list(rule(parse(path, text)))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), GOOD_FILES, ids=lambda value: getattr(value, "__name__", None))
def test_a_rule_lets_the_rest_pass(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    assert not list(rule(parse(path, text)))


def test_the_order_is_read_from_one_paragraph() -> None:
    docstring = "The ring, after the layout.\n\nOrder: spec, layout (positions),\nthen ring."
    assert stated_order(docstring, {"layout", "ring", "spec"}) == ["spec", "layout", "ring"]
    assert stated_order(docstring, {"layout", "ring", "spec", "unified"}) == []


def test_imports_against_the_order_are_caught() -> None:
    def broken(path: str, text: str) -> list[str]:
        return list(out_of_order("attention", ["spec", "kernels", "ring"], [parse(path, text)]))

    assert not broken("attention/ring.py", "from attention.spec import S\nfrom .kernels.base import K")
    assert not broken("attention/kernels/base.py", "from ..spec import S\nfrom .sdpa import K")
    assert not broken("attention/__init__.py", "from attention.ring import ring")
    assert broken("attention/spec.py", "from attention.ring import ring")
    assert broken("attention/spec.py", "from . import ring")
    assert broken("attention/kernels/base.py", "from ..ring import ring")
    assert broken("attention/ring.py", "from attention import SequenceLayout")
