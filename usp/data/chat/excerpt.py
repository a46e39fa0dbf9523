"""A document on the terminal, with what is trained on in color, or between marks where there is no color."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable

import numpy as np
from rich.console import Console
from rich.text import Text

from .conversation import Ids, Mask

SHOWN = 200  # tokens at each end of a run of tokens that are targets, or that are not
RUNS = 16
OPEN, CLOSE = "⟦", "⟧"


def excerpt(ids: Ids, mask: Mask, show: Callable[[Iterable[int]], str], color: bool) -> str:
    """Return the text of a document, its targets in color or between OPEN and CLOSE; long runs are cut in their middle.

    show: text of ids, with special tokens.
    """
    out = Console(file=io.StringIO(), force_terminal=color, no_color=not color, highlight=False, soft_wrap=True)
    text = Text()
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)
    for run in runs[:RUNS]:
        part = _shortened(ids[run], show)
        if not mask[run[0]]:
            text.append(part, style="dim")
        else:
            text.append(part if color else f"{OPEN}{part}{CLOSE}", style="bold green")
    if len(runs) > RUNS:
        text.append(f" [... {sum(map(len, runs[RUNS:]))} more tokens]")
    out.print(text, end="")
    return out.file.getvalue()  # type: ignore[attr-defined]


def _shortened(ids: Ids, show: Callable[[Iterable[int]], str]) -> str:
    if len(ids) <= 2 * SHOWN:
        return show(ids.tolist())
    return f"{show(ids[:SHOWN].tolist())} [... {len(ids) - 2 * SHOWN} tokens ...] {show(ids[-SHOWN:].tolist())}"
