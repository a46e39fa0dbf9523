"""The documentation's pages: their length, the site's navigation, and the reference of public names."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOST_LINES = 300
PUBLIC = {  # by page: the module whose public names it lists, and the file that says which they are
    "usp": ("usp", "usp/__init__.py"),
    "attention": ("usp.attention", "attention/__init__.py"),
    "parallel": ("usp.parallel", "parallel/__init__.py"),
    "rlhf": ("usp.rlhf.api", "usp/rlhf/api.py"),
}


def page_names() -> list[str]:
    return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def listed(entries: Any) -> Iterator[str]:
    """Yield the pages of a navigation, whose entries are pages, or titles with pages or entries."""
    for entry in entries:
        below = [*entry.values()] if isinstance(entry, dict) else [entry]
        yield from (page for each in below for page in ([each] if isinstance(each, str) else listed(each)))


def public_names(file: str) -> list[str]:
    """Return the public names of a module: what __all__ says, else what it imports from this repository and defines."""
    found: list[str] = []
    for node in ast.parse((ROOT / file).read_text()).body:
        for inner in node.body if isinstance(node, ast.If) else [node]:
            if isinstance(inner, ast.ImportFrom) and (inner.level or (inner.module or "").startswith("usp.")):
                found += [alias.asname or alias.name for alias in inner.names]
            elif isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                if inner.targets[0].id == "__all__":
                    return list(ast.literal_eval(inner.value))
                found.append(inner.targets[0].id)
    return [name for name in found if not name.startswith("_")]


def documented(page: str) -> tuple[list[str], list[str]]:
    """Return the names that a page of the reference takes from their docstrings, and those in its table."""
    text = (DOCS / "reference" / "api" / f"{page}.md").read_text()
    module = re.escape(PUBLIC[page][0])
    return re.findall(rf"^::: {module}\.(\w+)$", text, re.MULTILINE), re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def has_docstring(module: str, name: str) -> bool:
    value = inspect.unwrap(getattr(import_module(module), name))
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return False
    return bool(value.__doc__) and not value.__doc__.startswith(f"{name}(")  # which a dataclass gets without one


@pytest.mark.parametrize("page", page_names())
def test_a_page_can_be_read_at_once(page: str) -> None:
    lines = (DOCS / page).read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[0].startswith("# ")


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert Counter(listed(navigation)) == Counter(page_names())


def test_nested_entries_of_a_navigation_are_found() -> None:
    navigation = [{"Home": "index.md"}, {"Guides": ["guides/index.md", {"Data": "data.md"}, {"More": [{"A": "a.md"}]}]}]
    assert [*listed(navigation)] == ["index.md", "guides/index.md", "data.md", "a.md"]


@pytest.mark.parametrize("page", PUBLIC)
def test_each_public_name_is_in_the_reference_once(page: str) -> None:
    module, file = PUBLIC[page]
    by_docstring, in_table = documented(page)
    assert Counter(by_docstring + in_table) == Counter(public_names(file))
    assert [name for name in by_docstring if not has_docstring(module, name)] == []
    assert [name for name in in_table if has_docstring(module, name) and name != "ObjectiveDefaults"] == []
