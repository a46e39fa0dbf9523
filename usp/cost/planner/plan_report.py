"""The planner's report: the fastest configurations, why each is slower, warnings, and what would change the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group

from usp.cost.grid import GIB, Grid

from .advice import bound, degrees, memory_options, seconds, why_slower
from .choice import Choice, contradicted
from .search import Candidate, Found


def _configurations(found: Found) -> Grid:
    rows = (
        (
            str(number),
            degrees(candidate.config),
            memory_options(candidate.config),
            seconds(candidate.time.total),
            f"{candidate.time.mfu:.2f}",
            f"{candidate.peak_bytes / GIB:.1f}",
            f"{candidate.host_bytes / GIB:.1f}",
        )
        for number, candidate in enumerate(found.best, start=1)
    )
    kernels = ", ".join(sorted({kernel for candidate in found.best for kernel in candidate.time.kernels}))
    title = f"Fastest configurations, one for each set of axes; MFU with attention by {kernels}"
    return Grid(title, ("", "degrees", "memory options", "step", "MFU", "GiB", "host GiB"), tuple(rows))


def _alternatives(first: Candidate, others: Sequence[tuple[str, Candidate | None]]) -> list[str]:
    """Return one line for each supposition under which another configuration would be the fastest."""
    lines = []
    for supposed, best in others:
        if best is None:
            lines.append(f"{supposed}: nothing would fit")
        elif best.config != first.config:
            step = seconds(best.time.total)
            lines.append(f"{supposed}: {degrees(best.config)} ({memory_options(best.config)}), {step} per step")
    return lines or ["neither half nor twice the memory or the bandwidth between hosts changes the plan"]


def render_plan(choice: Choice, others: Sequence[tuple[str, Candidate | None]]) -> Group:
    """Return the report for rich to print; `others` is what `suppose` returns."""
    found, memory = choice.found, choice.memory
    host = f" and {memory.host / GIB:.0f} GiB of a host" if math.isfinite(memory.host) else ""
    lines = [f"{found.layouts} layouts, {found.tried} checked against {memory.device / GIB:.0f} GiB of a device{host}"]
    lines.append(f"1 is bound by {bound(choice.best, memory.device)}")
    slower = enumerate(found.best[1:], start=2)
    lines += [f"{number} is slower by: {why_slower(candidate, choice.best)}" for number, candidate in slower]
    lines += [f"warning: {words}" for words in contradicted(choice)]
    lines += [f"what if: {line}" for line in _alternatives(choice.best, others)]
    return Group(_configurations(found).table(), *lines)
