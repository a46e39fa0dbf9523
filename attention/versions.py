"""The oldest versions that work, checked on import: an older torch would fail at a step that needs what it lacks."""

from __future__ import annotations

import re

import torch


def require(package: str, installed: str, oldest: str) -> None:
    """Raise ImportError if the installed version of a package is older than `oldest`, such as 2.11."""
    have, need = (tuple(map(int, re.findall(r"\d+", version)[:2])) for version in (installed, oldest))
    if have < need:
        what = f"{package} {installed} is installed, and usp-toolkit needs {package} {oldest} or newer"
        raise ImportError(f"{what}: pip install '{package}>={oldest}'")


require("torch", torch.__version__, "2.11")
