"""Compares the signatures of the stand-ins in cuda_calls.py with the sources of the packages that they stand for.

python -m tests.attention.signatures FOLDER...    # unpacked sdists, checkouts, or site-packages
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .cuda_calls import FLASH_3_BACKWARD, FLASH_3_FORWARD, flash_2, flash_4

# Source files by path within a package, and the stand-in: a module, or schemas of ops.
SOURCES: dict[str, ModuleType | tuple[str, ...]] = {
    "flash_attn/flash_attn_interface.py": flash_2(),
    "flash_attn/cute/interface.py": flash_4(),
    "hopper/flash_api_stable.cpp": (FLASH_3_FORWARD, FLASH_3_BACKWARD),
    "hopper/flash_api.cpp": (FLASH_3_FORWARD, FLASH_3_BACKWARD),
}


def differences(path: str, text: str) -> list[str]:
    """Return where the stand-in of one of `SOURCES` differs from its text; Python functions may have more arguments
    with defaults."""
    stand_in = SOURCES[path]
    return list(_schemas(stand_in, text) if isinstance(stand_in, tuple) else _functions(stand_in, text))


def _functions(stand_in: ModuleType, text: str) -> Iterator[str]:
    defined = {node.name: node.args for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    for name, function in vars(stand_in).items():
        if not name.startswith("_flash_attn"):
            continue
        if name not in defined:
            yield f"{name} does not exist"
            continue
        arguments = defined[name]
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        required = names[: len(names) - len(arguments.defaults)]
        mine = inspect.signature(function).parameters
        positional = [each.name for each in mine.values() if each.default is inspect.Parameter.empty]
        yield from (f"{name} has no {each}" for each in mine if each not in names)
        if names[: len(positional)] != positional:
            yield f"{name} begins with {names[: len(positional)]}, not {positional}"
        yield from (f"{name} requires {each}" for each in required if each not in positional)


def _schemas(stand_in: tuple[str, ...], text: str) -> Iterator[str]:
    joined = re.sub(r'"\s*"', "", text)
    for schema in stand_in:
        name = schema.split("(")[0]
        found = re.search(rf'm\.def\("({name}\(.*?)"\)', joined, re.DOTALL)
        wanted, here = (re.sub(r"\s+", "", each or "") for each in (schema, found and found.group(1)))
        if wanted != here:
            yield f"{name}( is {here or 'not defined'}, not {wanted}"


def main(folders: list[str]) -> int:
    wrong = 0
    for path in SOURCES:
        for file in (file for folder in folders if (file := Path(folder) / path).exists()):
            found = differences(path, file.read_text())
            wrong += bool(found)
            print(f"{file}: {'; '.join(found) or 'as the stand-in'}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
