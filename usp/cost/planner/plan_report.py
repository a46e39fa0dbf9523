"""What a plan says: the best configurations with their reasons, advice, and what would change the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table

from .advice import bound, broken_tips, degrees, savings_of, seconds, why_slower
from .choice import GIB, Choice
from .search import Candidate, Found


def table(found: Found) -> Table:
    """The best, the fastest first."""
    shown = Table("", "degrees", "saves memory by", "step", "MFU", "GiB", box=box.SIMPLE_HEAD)
    for number, candidate in enumerate(found.best, start=1):
        shown.add_row(
            str(number),
            degrees(candidate.config),
            savings_of(candidate.config),
            seconds(candidate.time.total),
            f"{candidate.time.mfu:.2f}",
            f"{candidate.peak_bytes / GIB:.1f}",
        )
    return shown


def verdicts(first: Candidate, others: Sequence[tuple[str, Candidate | None]]) -> list[str]:
    """For each supposition what would be fastest then, where that is something else."""
    told = []
    for supposed, best in others:
        if best is None:
            told.append(f"{supposed}: nothing would fit")
        elif best.config != first.config:
            told.append(
                f"{supposed}: {degrees(best.config)} ({savings_of(best.config)}), {seconds(best.time.total)} a step"
            )
    return told or ["none of what was supposed (twice or half the links between hosts, or the memory) changes it"]


def report(choice: Choice, others: Sequence[tuple[str, Candidate | None]]) -> Group:
    """All of it; `others` is what would be fastest otherwise."""
    found, memory_bytes = choice.found, choice.memory_bytes
    lines = [f"{found.layouts} layouts, {found.tried} of them held against {memory_bytes / GIB:.0f} GiB of memory"]
    lines.append(f"1 is bound by {bound(choice.best, memory_bytes)}")
    others_told = enumerate(found.best[1:], start=2)
    lines += [f"{number} is slower by: {why_slower(candidate, choice.best)}" for number, candidate in others_told]
    lines += [f"warning: {tip}" for tip in broken_tips(choice.best.config, choice.facts)]
    lines += [f"what would change it: {line}" for line in verdicts(choice.best, others)]
    return Group(table(found), *lines)
