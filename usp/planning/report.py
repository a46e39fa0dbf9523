"""The planner's report: the fastest configurations, why each is slower, warnings, and what would change the plan.
A chosen RLHF plan as tables and lines of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType

from parallel import format_ranks
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.run.metrics import seconds, size
from usp.run.tables import GIB, Grid

from .choice import Choice, bound, candidate_text, contradicted, degrees, memory_options, why_slower
from .question import what_if_line
from .rlhf_question import RlhfChoice
from .search import Candidate, SearchResult


def render_plan(choice: Choice, supposed: Sequence[tuple[str, Candidate | None]]) -> Group:
    """Return the report for rich to print; `supposed` is what `suppose` returns."""
    result, memory, first = choice.result, choice.question.usable, choice.best
    host = f" and {memory.host / GIB:.0f} GiB of a host" if math.isfinite(memory.host) else ""
    lines = [
        f"{result.layouts} layouts, {result.tried} checked against {memory.device / GIB:.0f} GiB of a device{host}",
        f"1 is bound by {bound(first, memory.device)}",
    ]
    if proof := choice.proof:
        sent = max(sum(sent.nbytes for sent in run.sent) for run in proof.runs)
        lines.append(
            f"1 by a dry run, because {choice.job.approximate}: {size(proof.memory.peak.total)} at the peak, "
            f"{size(sent)} sent by a rank, {seconds(proof.time.total)} per step"
        )
    slower = enumerate(result.best[1:], start=2)
    lines += [f"{number} is slower by: {why_slower(candidate, first)}" for number, candidate in slower]
    lines += [f"warning: {words}" for words in contradicted(choice)]
    for words, best in supposed:
        plan = f"{candidate_text(best)}, {seconds(best.time.total)} per step" if best else None
        lines.append(what_if_line(words, plan, same=best is not None and best.config == first.config))
    return Group(_configurations(result).table(), *lines)


def _configurations(result: SearchResult) -> Grid:
    rows = (
        (
            str(number),
            degrees(candidate.config),
            memory_options(candidate.config),
            seconds(candidate.time.total),
            f"{candidate.time.mfu:.2f}",
            f"{candidate.memory.device / GIB:.1f}",
            f"{candidate.memory.host / GIB:.1f}",
        )
        for number, candidate in enumerate(result.best, start=1)
    )
    kernels = ", ".join(sorted({kernel for candidate in result.best for kernel in candidate.time.kernels}))
    title = f"Fastest configurations, one for each set of axes; MFU with attention by {kernels}"
    return Grid(title, ("", "degrees", "memory options", "step", "MFU", "GiB", "host GiB"), tuple(rows))


def render_choice(
    choice: RlhfChoice, supposed: Sequence[tuple[str, ExecutionPlan | None, float]] = ()
) -> RenderableType:
    """Return the report of a choice for rich to print; `supposed` is what `suppose` yields."""
    found, plan = choice.found, choice.plan
    lines = [
        f"{choice.problem.plans:.1g} plans, {found.simulated} simulated in {found.seconds:.1f} s",
        f"offloaded between calls: {', '.join(sorted(plan.offload)) or 'nothing'}",
    ]
    for words, other, loss in supposed:
        same = other is not None and (other.calls, other.offload) == (plan.calls, plan.offload)
        lines.append(what_if_line(words, _verdict(plan, other, loss) if other else None, same=same))
    return Group(_calls(choice).table(), _plans(choice).table(), *lines)


def _calls(choice: RlhfChoice) -> Grid:
    took = {event.name: event.seconds for event in choice.simulation.events}
    rows = []
    for call in choice.problem.simulator.graph.order:
        layout, slower = choice.plan[call.name], ""
        if call.name in choice.next_best:
            longer, other = choice.next_best[call.name]
            slower = f"{layout_text(other)}: +{longer / choice.simulation.seconds - 1:.1%}"
        rows.append((call.name, format_ranks(layout.ranks), degrees_text(layout), seconds(took[call.name]), slower))
    headings = ("call", "ranks", "layout", "time", "next best, and how much longer a step takes then")
    return Grid(f"Plan: {seconds(choice.simulation.seconds)} a step", headings, tuple(rows))


def _plans(choice: RlhfChoice) -> Grid:
    memory, best = choice.problem.memory_bytes, choice.simulation.seconds
    rows = [("search", seconds(best), "1.00", f"{choice.simulation.peak_bytes / GIB:.1f}", "")]
    for named in choice.named:
        if named.plan is None:
            rows.append((named.name, "", "", "", named.why))
            continue
        over = "" if named.peak_bytes <= memory else f"does not fit into {memory / GIB:.0f} GiB"
        peak = f"{named.peak_bytes / GIB:.1f}"
        rows.append((named.name, seconds(named.seconds), f"{named.seconds / best:.2f}", peak, over))
    return Grid("Named plans, with their best degrees", ("plan", "step", "ratio", "GiB", ""), tuple(rows))


def _verdict(plan: ExecutionPlan, other: ExecutionPlan, loss: float) -> str:
    changed = [f"{name} {layout_text(layout)}" for name, layout in other.calls.items() if layout != plan[name]]
    changed += [f"offload {', '.join(sorted(other.offload)) or 'nothing'}"] if other.offload != plan.offload else []
    cost = "this plan would not fit, but" if loss == float("inf") else f"this plan would be {loss:.0%} slower than"
    return f"{cost} {'; '.join(changed)}"


def layout_text(layout: CallLayout) -> str:
    """Return the ranks and the degrees of a layout in a few words."""
    return f"ranks {format_ranks(layout.ranks)} {degrees_text(layout)}"


def degrees_text(layout: CallLayout) -> str:
    """Return the degrees and the memory options of a layout in a few words."""
    dims = layout.dims
    parts = {"pp": dims.pp, "dp": dims.batch, "ring": dims.ring, "ulysses": dims.ulysses, "tp": dims.tp}
    words = [f"{axis}={degree}" for axis, degree in parts.items() if degree > 1]
    words += [f"ZeRO {layout.zero}"] if layout.zero else []
    words += [layout.ac + (" offloaded" if layout.ac_offload else "")] if layout.ac != "none" else []
    return " ".join(words) or "one rank"
