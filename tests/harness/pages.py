"""The fenced blocks of a page of the documentation, which tests run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its title (a file name), its text."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r'^( *)```(\w*)(?: title="(.*?)")?\n(.*?)^\1```$', page.read_text(), re.DOTALL | re.MULTILINE)
    return [
        Block(language, title, re.sub(f"^{indent}", "", text, flags=re.M)) for indent, language, title, text in found
    ]
