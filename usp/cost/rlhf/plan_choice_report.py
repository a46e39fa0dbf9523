"""A chosen RLHF plan as tables and lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType

from parallel import format_ranks
from usp.cost.grid import GIB, Grid
from usp.cost.planner.advice import seconds
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan

from .plan_choice import RlhfChoice


def render_choice(
    choice: RlhfChoice, supposed: Sequence[tuple[str, ExecutionPlan | None, float]] = ()
) -> RenderableType:
    """Return the report of a choice for rich to print; `supposed` is what `suppose` yields."""
    found, plan = choice.found, choice.plan
    lines = [
        f"{choice.problem.plans:.1g} plans, {found.simulated} simulated in {found.seconds:.1f} s",
        f"offloaded between calls: {', '.join(sorted(plan.offload)) or 'nothing'}",
    ]
    lines += [f"what if {what}: {_verdict(plan, other, loss)}" for what, other, loss in supposed]
    return Group(_calls(choice).table(), _plans(choice).table(), *lines)


def _calls(choice: RlhfChoice) -> Grid:
    spans = {span.name: span for span in choice.simulation.spans if span.step == 0}
    rows = []
    for call in choice.problem.simulator.graph.order:
        layout, other = choice.plan[call.name], choice.next_best.get(call.name)
        took = spans[call.name].end - spans[call.name].start
        slower = f"{layout_text(other.layout)}: +{other.seconds / choice.simulation.seconds - 1:.1%}" if other else ""
        rows.append((call.name, format_ranks(layout.ranks), degrees_text(layout), seconds(took), slower))
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


def _verdict(plan: ExecutionPlan, other: ExecutionPlan | None, loss: float) -> str:
    if other is None:
        return "no plan would fit"
    if other.calls == plan.calls and other.offload == plan.offload:
        return "the same plan"
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
