"""The structure of the code, checked on its source: imports, sizes, names, and the map in docs/architecture.md.

Every rule is a function that yields violations of what it is given, so each rule is also tested on a bad example.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("attention", "parallel", "usp")
CODE = (*PACKAGES, "benchmarks", "examples", "tests")
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 12
INTERFACES = {"_attention_forward", "_merge_kernel"}  # of transformers, and of a Triton kernel, which has no structs
MAX_PHRASE_WORDS = 12  # of a line in the map
BUDGETS = {  # lines of a room at most: who adds, deletes
    "attention": 5339,
    "parallel": 4049,
    "usp/commands": 1175,
    "usp/data": 2908,
    "usp/hf": 6838,
    "usp/model": 717,
    "usp/planning": 2976,
    "usp/predict": 3508,
    "usp/rlhf": 13950,
    "usp/run": 1413,
    "usp/sp": 2349,
    "usp/train": 3897,
    "usp": 41549,
}
MAP = ROOT / "docs" / "architecture.md"


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


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def imports(source: Source, inside: ast.AST | None = None) -> Iterator[tuple[str, int]]:
    """Yield (absolute dotted name, line) of every import by its folder: usp.attention is attention/."""
    for name, line in written_imports(source, inside):
        yield re.sub(r"^usp\.(?=(?:attention|parallel)\b)", "", name), line


def written_imports(source: Source, inside: ast.AST | None = None) -> Iterator[tuple[str, int]]:
    """Yield (absolute dotted name, line) of every import; `from a import b` gives a.b, whether b is a module or not."""
    for node in nodes(inside or source.tree):
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
    """attention and parallel import only torch, the standard library and safetensors, attention also numpy: not each
    other, and not usp."""
    if not in_package(source.path, "attention", "parallel"):
        return
    for name, line in imports(source):
        top = name.split(".")[0]
        optional = top in ("flash_attn", "flash_attn_interface", "flash_attn_3", "triton")  # see `optional_packages`
        known = {"torch", "safetensors", source.package} | ({"numpy"} if source.package == "attention" else set())
        if top not in known and top not in sys.stdlib_module_names and not optional:
            yield f"{source.path}:{line} imports {name}: {source.package}/ knows only torch and the standard library"


def one_import_name(source: Source) -> Iterator[str]:
    """usp alone is imported, so that a user's own attention.py, and another package of that name, are not ours."""
    for node in nodes(source.tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            if name.split(".")[0] in ("attention", "parallel"):
                yield f"{source.path}:{node.lineno} imports {name}: import usp.{name}"


def optional_packages(source: Source) -> Iterator[str]:
    """transformers only in usp/hf, peft in usp/hf/lora.py, torchao in usp/hf/float8.py, DeepSpeed nowhere,
    optional kernels in load()."""
    if not in_package(source.path, *PACKAGES):
        return
    inside_load = {
        line
        for node in nodes(source.tree)
        if isinstance(node, ast.FunctionDef) and node.name == "load"
        for _, line in imports(source, node)
    }
    for name, line in imports(source):
        top = name.split(".")[0]
        if top in ("transformers", "tokenizers") and not source.path.startswith("usp/hf/"):
            yield f"{source.path}:{line} imports {name}: transformers belongs in usp/hf/"
        if top == "peft" and source.path != "usp/hf/lora.py":
            yield f"{source.path}:{line} imports {name}: peft belongs in usp/hf/lora.py"
        if top == "torchao" and source.path != "usp/hf/float8.py":
            yield f"{source.path}:{line} imports {name}: torchao belongs in usp/hf/float8.py"
        if top == "deepspeed":
            yield f"{source.path}:{line} imports {name}: there is one engine, and examples show DeepSpeed"
        if top == "vllm" and source.path != "usp/rlhf/generation/vllm.py":
            yield f"{source.path}:{line} imports {name}: vLLM belongs in usp/rlhf/generation/vllm.py"
        if top == "triton" and source.path != "attention/fused.py":
            yield f"{source.path}:{line} imports {name}: Triton kernels belong in attention/fused.py"
        if top.startswith("flash_attn") and line not in inside_load:
            yield f"{source.path}:{line} imports {name}: an optional kernel is imported inside load()"


def public_names(source: Source) -> Iterator[str]:
    """Programs that users would write (train.py, examples, benchmarks) use only public names."""
    if "/" in source.path and not in_package(source.path, "benchmarks", "examples"):
        return
    for name, line in imports(source):
        parts = name.split(".")
        if parts[0] in PACKAGES and any(part.startswith("_") for part in parts):
            yield f"{source.path}:{line} imports {name}: use public names only"


def environment(source: Source) -> Iterator[str]:
    """Only scripts read the environment and pass it down. Setting a variable for a library is allowed."""
    if not in_package(source.path, *PACKAGES) or source.path == "usp/__main__.py":  # a script
        return
    writes = {
        id(node.value)
        for node in nodes(source.tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    for node in nodes(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and id(node) not in writes:
            yield f"{source.path}:{node.lineno} reads the environment: pass the value down from the script"


def no_globals(source: Source) -> Iterator[str]:
    for node in nodes(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno} has `global {', '.join(node.names)}`: pass state as an argument"


def short_functions(source: Source) -> Iterator[str]:
    for node in nodes(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{source.path}:{node.lineno} {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def few_parameters(source: Source) -> Iterator[str]:
    """What belongs together is one argument."""
    for node in nodes(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and in_package(source.path, *PACKAGES):
            number = len((*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
            if number > MAX_PARAMETERS and node.name not in INTERFACES:
                yield f"{source.path}:{node.lineno} {node.name} has {number} parameters, more than {MAX_PARAMETERS}"


def names_of_files(source: Source) -> Iterator[str]:
    if source.path in ("usp/attention.py", "usp/parallel.py"):
        yield f"{source.path} shadows the package of that name where usp/ is on the path: choose another name"


def bounded_caches(source: Source) -> Iterator[str]:
    """A cache that lives as long as the process has a bound, or keys that a program has only few of: names and types.

    Others grow with every length of a document or response. One inside of a function ends with its call.
    """
    if not in_package(source.path, *PACKAGES):
        return
    waiting: list[ast.AST] = [source.tree]
    while waiting:
        node, unbounded = waiting.pop(), False
        if isinstance(node, ast.FunctionDef):
            kinds = [ast.unparse(arg.annotation) if arg.annotation else "" for arg in node.args.args]
            waiting += [] if set(kinds) <= {"str", "type"} else node.decorator_list
        elif not isinstance(node, ast.Lambda | ast.Import | ast.ImportFrom):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            unbounded = ast.unparse(node) in ("cache", "functools.cache")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("lru_cache", "functools.lru_cache"):
            sizes = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "maxsize")]
            unbounded = any(isinstance(size, ast.Constant) and size.value is None for size in sizes)
        if unbounded:
            yield f"{source.path}:{node.lineno} caches without a bound for the life of the process: set maxsize"


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (
    layers,
    one_import_name,
    optional_packages,
    public_names,
    environment,
    no_globals,
    short_functions,
    few_parameters,
    names_of_files,
    bounded_caches,
)


# Files in a folder form a line


def stated_order(docstring: str, modules: set[str]) -> list[str]:
    """Return the modules in the order in which the first paragraph that names all of them names them; else []."""
    for paragraph in docstring.split("\n\n"):
        named = [word for word in re.findall(r"\w+", paragraph) if word in modules]
        if set(named) == modules:
            return sorted(modules, key=named.index)
    return []


def out_of_order(package: str, order: list[str], files: list[Source]) -> Iterator[str]:
    """Yield imports inside `package` (a folder) of a later child of it, at any depth, or of the package itself."""
    dotted = package.replace("/", ".")
    for source in files:
        if not source.path.startswith(f"{package}/"):
            continue
        own = source.path.removeprefix(f"{package}/").split("/")[0].removesuffix(".py")
        if own == "__init__":
            continue
        for name, line in imports(source):
            if name != dotted and not name.startswith(f"{dotted}."):
                continue
            target = name.removeprefix(dotted).removeprefix(".").split(".")[0]
            if target not in order:
                yield f"{source.path}:{line} imports {name} through {dotted}/__init__.py: import the file that has it"
            elif order.index(target) > order.index(own):
                yield f"{source.path}:{line} imports {dotted}.{target}, which comes after {own} in {dotted}'s order"


def package_folders() -> list[str]:
    """Return every folder of the packages that holds Python files."""
    return sorted({source.path.rsplit("/", 1)[0] for source in sources() if in_package(source.path, *PACKAGES)})


def children_of(package: str) -> set[str]:
    children = (ROOT / package).iterdir()
    names = {
        path.stem for path in children if path.suffix == ".py" or (any(path.glob("*.py")) and not path.is_symlink())
    }
    return names - {"__init__"}


@cache
def order_of(package: str) -> list[str]:
    """Return the children of a folder in the order that its `__init__` states; [] if it does not name all of them."""
    file = ROOT / package / "__init__.py"
    docstring = ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None
    return stated_order(docstring or "", children_of(package))


# Budgets and the map


def over_budget(lines: Mapping[str, int], budgets: Mapping[str, int]) -> Iterator[str]:
    """Yield the rooms that have more lines than their budget, from the lines of each file."""
    for room, most in budgets.items():
        count = sum(number for path, number in lines.items() if path.startswith(f"{room}/"))
        if count > most:
            yield f"{room}/ has {count} lines, more than its budget of {most}: delete as many as you add"


def map_entries(document: str) -> list[tuple[str, str]]:
    """Return (path, phrase) of each line of the tree in the document's section "The map"; folders end with a slash."""
    tree = document.split("## The map", 1)[1].split("```")[1].strip("\n")
    entries, folders = [], []
    for line in tree.splitlines():
        name, _, phrase = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        entries.append(("".join(folders), phrase.strip()))
    return entries


def map_violations(document: str, orders: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield what is wrong with the map: missing, repeated, unknown or unexplained entries, and a folder's order.

    The map lists every folder, and of files those that a user of the toolkit extends.

    Args:
        orders: the children of each folder in import order.
    """
    entries = map_entries(document)
    paths = [path for path, _ in entries]
    yield from (f"{folder}/ is missing in the map" for folder in orders if f"{folder}/" not in paths)
    yield from (f"{path} stands in the map {paths.count(path)} times" for path in set(paths) if paths.count(path) > 1)
    for path, phrase in entries:
        if in_package(path, *PACKAGES):
            folder, _, name = path.removesuffix("/").rpartition("/")
            if path.removesuffix("/") not in orders and name.removesuffix(".py") not in orders.get(folder, ()):
                yield f"{path} is in the map and does not exist"
        if not 1 <= len(phrase.split()) <= MAX_PHRASE_WORDS:
            yield f"{path} needs a phrase of at most {MAX_PHRASE_WORDS} words in the map"
    for folder, order in orders.items():
        inside = [path.removeprefix(f"{folder}/").removesuffix("/") for path in paths if path.startswith(f"{folder}/")]
        listed = [name.removesuffix(".py") for name in inside if name and "/" not in name]
        expected = [name for name in order if name in listed]
        if sorted(listed) == sorted(expected) and listed != expected:
            yield f"{folder}/ stands in the map as {', '.join(listed)}; its import order is {', '.join(expected)}"


def missing_paths(document: str) -> Iterator[str]:
    """Yield paths of this repository that a document mentions in backticks and that do not exist."""
    for path in re.findall(rf"`((?:{'|'.join((*CODE, 'docs'))})/[\w./-]*)`", document):
        if not (ROOT / path).exists():
            yield path


# Slow tests

SHOWN_ELSEWHERE = {  # files whose tests are all slow, and where the fast lane shows their subject
    "tests/e2e/test_survival.py": "tests/usp/train/test_resume.py",
    "tests/e2e/test_train_cli.py": "tests/usp/train/test_trainer.py",
    "tests/usp/rlhf/generation/test_families.py": "tests/usp/rlhf/generation/test_graphs.py",
    "tests/usp/rlhf/test_ahead.py": "tests/usp/rlhf/runtime/test_staleness.py",
    "tests/usp/rlhf/test_switching.py": "tests/usp/rlhf/replan/test_replan_decision.py",
    "tests/usp/train/families/test_whole_runs.py": "tests/usp/train/families/test_families.py",
    "tests/usp/train/test_golden.py": "tests/usp/train/test_parity.py",
}


def all_slow(source: Source) -> bool:
    """Return whether all tests of the file are marked slow, none with cases for the fast lane, or exhaustive."""
    tests = [node for node in source.tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    marks = [{ast.unparse(decorator) for decorator in test.decorator_list} for test in tests]
    slow = [any(mark.startswith("pytest.mark.slow") and "but=" not in mark for mark in each) for each in marks]
    return any(slow) and all(
        is_slow or "pytest.mark.exhaustive" in each for is_slow, each in zip(slow, marks, strict=True)
    )


# The checks


def test_every_subject_is_in_the_fast_lane() -> None:
    files = {source.path: all_slow(source) for source in sources() if source.path.startswith("tests/")}
    assert {path for path, slow in files.items() if slow} == SHOWN_ELSEWHERE.keys()
    assert not any(files[path] for path in SHOWN_ELSEWHERE.values())


@pytest.mark.parametrize(
    ("mark", "slow"),
    [
        ("@pytest.mark.slow\n", True),
        ("@pytest.mark.slow(full=2)\n", True),
        ("@pytest.mark.slow(but=1, full=2)\n", False),
        ("", False),
    ],
)
def test_a_file_is_slow_if_each_of_its_tests_is(mark: str, slow: bool) -> None:
    text = f"@pytest.mark.slow\n@given(x)\ndef test_a(): ...\ndef helper(): ...\n{mark}def test_b(): ..."
    text += "\n@pytest.mark.exhaustive\ndef test_c(): ..."
    assert all_slow(parse("tests/test_x.py", text)) is slow


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Callable[[Source], Iterator[str]]) -> None:
    broken = [message for source in sources() for message in rule(source)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("package", package_folders())
def test_children_of_a_folder_form_a_line(package: str) -> None:
    children = children_of(package)
    order = order_of(package)
    assert order or not children, (
        f"no paragraph of {package}/__init__.py's docstring names every child of the folder in import order: "
        f"{', '.join(sorted(children))}"
    )
    broken = list(out_of_order(package, order, sources()))
    assert not broken, "\n".join(broken)


def doubled_classes(parsed: Iterable[Source]) -> Iterator[str]:
    """Yield the names that several classes of the packages have: one name is one thing."""
    places = defaultdict[str, list[str]](list)
    for source in parsed:
        for node in nodes(source.tree):
            if isinstance(node, ast.ClassDef) and in_package(source.path, *PACKAGES):
                places[node.name].append(f"{source.path}:{node.lineno}")
    yield from (f"class {name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1)


def test_classes_have_names_of_their_own() -> None:
    assert not list(doubled_classes(sources()))
    assert list(doubled_classes([parse("usp/x.py", "class A: ..."), parse("attention/y.py", "class A: ...")]))


def test_rooms_keep_their_budgets() -> None:
    paths = [source.path for source in sources() if in_package(source.path, *PACKAGES)]
    broken = list(over_budget({path: len((ROOT / path).read_text().splitlines()) for path in paths}, BUDGETS))
    assert not broken, "\n".join(broken)


def test_a_room_over_its_budget_is_named() -> None:
    lines = {"usp/x/a.py": 60, "usp/x/y/b.py": 41, "usp/xy.py": 900}
    assert not list(over_budget(lines, {"usp/x": 101}))
    assert list(over_budget(lines, {"usp/x": 100})) == [
        "usp/x/ has 101 lines, more than its budget of 100: delete as many as you add"
    ]


def test_the_map_is_complete() -> None:
    broken = list(map_violations(MAP.read_text(), {package: order_of(package) for package in package_folders()}))
    assert not broken, "docs/architecture.md:\n" + "\n".join(broken)


def test_documents_mention_existing_paths() -> None:
    documents = (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    broken = [f"{file} mentions {path}" for file in documents for path in missing_paths(file.read_text())]
    assert not broken, "\n".join(broken)


BAD_FILES = [
    (layers, "attention/x.py", "from parallel import ParallelMesh"),
    (layers, "attention/x.py", "from ..parallel import ParallelMesh"),
    (layers, "parallel/x.py", "import numpy as np"),
    (one_import_name, "usp/x.py", "from parallel import ParallelMesh"),
    (one_import_name, "attention/x.py", "def f():\n    import attention.spec"),
    (optional_packages, "usp/x.py", "def f():\n    from transformers import AutoModel"),
    (optional_packages, "usp/x.py", "import deepspeed"),
    (optional_packages, "attention/accumulate.py", "import triton"),
    (optional_packages, "usp/hf/x.py", "from peft import LoraConfig"),
    (optional_packages, "attention/kernels/flash.py", "import flash_attn"),
    (public_names, "train.py", "from usp.train.trainer import _step"),
    (environment, "parallel/x.py", "import os\nrank = os.environ['RANK']"),
    (environment, "usp/x.py", "import os\nrank = os.getenv('RANK')"),
    (no_globals, "benchmarks/x.py", "def f():\n    global state\n    state = 1"),
    (short_functions, "usp/x.py", "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES),
    (few_parameters, "usp/x.py", f"def f({', '.join(f'x{n}' for n in range(MAX_PARAMETERS))}, *, last):\n    pass"),
    (names_of_files, "usp/attention.py", ""),
    (bounded_caches, "usp/x.py", "same = lru_cache(maxsize=None)(lambda key: object())"),
    (bounded_caches, "usp/x.py", "@lru_cache(None)\ndef f(x: int):\n    pass"),
    (bounded_caches, "usp/x.py", "@functools.cache\ndef f(lengths: tuple):\n    pass"),
    (bounded_caches, "usp/x.py", "class A:\n    @cache\n    def f(self):\n        pass"),
]
GOOD_FILES = [
    (layers, "usp/x.py", "from parallel import ParallelMesh\nimport numpy"),
    (layers, "parallel/x.py", "from safetensors.torch import save_file"),
    (layers, "attention/x.py", "import math\nimport numpy as np\nimport torch.nn\nfrom attention.spec import Joint"),
    (
        one_import_name,
        "usp/x.py",
        "from usp.parallel import ParallelMesh\nimport usp.attention\nfrom ..attention import x",
    ),
    (optional_packages, "attention/kernels/flash.py", "def load():\n    import flash_attn"),
    (environment, "parallel/x.py", "import os\nos.environ['GLOO_SOCKET_IFNAME'] = 'lo'"),
    (short_functions, "usp/x.py", "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)),
    (few_parameters, "usp/x.py", f"def f({', '.join(f'x{n}' for n in range(MAX_PARAMETERS))}, **rest):\n    pass"),
    (bounded_caches, "usp/x.py", "@cache\ndef f(name: str, kind: type):\n    pass"),
    (bounded_caches, "usp/x.py", "def f(x):\n    @cache\n    def g(y: int):\n        pass"),
    (bounded_caches, "usp/x.py", "@lru_cache(maxsize=64)\ndef f(x: int):\n    cache = x\n    return cache"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD_FILES, ids=lambda value: getattr(value, "__name__", None))
def test_a_rule_rejects_bad_files(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    assert len(list(rule(parse(path, text)))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), GOOD_FILES, ids=lambda value: getattr(value, "__name__", None))
def test_a_rule_accepts_good_files(rule: Callable[[Source], Iterator[str]], path: str, text: str) -> None:
    assert not list(rule(parse(path, text)))


def test_the_order_is_read_from_one_paragraph() -> None:
    docstring = "The ring, after the layout.\n\nOrder: spec, layout (positions),\nthen ring."
    assert stated_order(docstring, {"layout", "ring", "spec"}) == ["spec", "layout", "ring"]
    assert stated_order(docstring, {"layout", "ring", "spec", "unified"}) == []


def test_imports_against_the_order_are_rejected() -> None:
    def broken(path: str, text: str) -> list[str]:
        return list(out_of_order("attention", ["spec", "kernels", "ring"], [parse(path, text)]))

    assert not broken("attention/ring.py", "from attention.spec import S\nfrom .kernels.base import K")
    assert not broken("attention/kernels/base.py", "from ..spec import S\nfrom .sdpa import K")
    assert not broken("attention/__init__.py", "from attention.ring import ring")
    assert broken("attention/spec.py", "from attention.ring import ring")
    assert broken("attention/spec.py", "from . import ring")
    assert broken("attention/kernels/base.py", "from ..ring import ring")
    assert broken("attention/ring.py", "from attention import SequenceLayout")
    assert broken("attention/ring.py", "import attention")
    assert broken("attention/kernels/deep/base.py", "def f():\n    from ...ring import ring")


@pytest.mark.parametrize("package", [folder for folder in package_folders() if len(order_of(folder)) > 1])
def test_an_import_of_the_next_child_is_rejected_at_every_level(package: str) -> None:
    """Reject imports of the next child from any depth, in every form of the import statement."""
    dotted = package.replace("/", ".")
    for low, high in pairwise(order_of(package)):
        for text in (f"from {dotted}.{high} import x", f"import {dotted}.{high}.x", f"from ...{high} import x"):
            source = parse(f"{package}/{low}/below/x.py", text)
            assert list(out_of_order(package, order_of(package), [source])), f"{source.path}: {text}"


def test_a_missing_path_is_rejected() -> None:
    assert list(missing_paths("`usp/train/prepare.py` and **`usp/costs.py`**, `usp/hf/`")) == ["usp/costs.py"]


MAP_ORDERS = {"usp": ["data", "config"], "usp/data": ["stream"]}
GOOD_MAP = """
# Title

## The map

```
usp/            the toolkit
  data/         documents
    stream.py   batches
  config.py     flags
```
"""


def test_a_complete_map_is_accepted() -> None:
    assert not list(map_violations(GOOD_MAP, MAP_ORDERS))


CONFIG_LINE, STREAM_LINE = "  config.py     flags\n", "    stream.py   batches\n"
BAD_MAPS = [  # (replaced in the good map, by, the violation's beginning)
    (f"  data/         documents\n{STREAM_LINE}", "", "usp/data/ is missing in the map"),
    (CONFIG_LINE, 2 * CONFIG_LINE, "usp/config.py stands in the map 2 times"),
    (CONFIG_LINE, f"{CONFIG_LINE}  old.py  gone\n", "usp/old.py is in the map and does not exist"),
    (CONFIG_LINE, "  config.py\n", "usp/config.py needs a phrase"),
    ("batches", "word " * (MAX_PHRASE_WORDS + 1), "usp/data/stream.py needs a phrase"),
    (f"  data/         documents\n{STREAM_LINE}{CONFIG_LINE}", f"{CONFIG_LINE}  data/ d\n{STREAM_LINE}", "usp/ stands"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD_MAPS, ids=[message for *_, message in BAD_MAPS])
def test_an_incomplete_map_is_rejected(old: str, new: str, message: str) -> None:
    assert old in GOOD_MAP
    found = list(map_violations(GOOD_MAP.replace(old, new), MAP_ORDERS))
    assert found and found[0].startswith(message)
