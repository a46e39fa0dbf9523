"""Balance of packed documents over a ring: work and traffic of each layout, and the time of the slowest rank.

Documents have log-normal lengths (median 1,000 tokens, sigma 1.5), as web text has: most are short, and a few hold much
of the work. Every rank's steps are timed one after another on one thread, without a network, by the time of its
processor: on one machine, ranks would share processors.

    python -m benchmarks.balance
    python -m benchmarks.balance --windows 0,1024,1024,1024,1024,1024        for Gemma 3; times and saves nothing
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.setup import SilentChannel
from benchmarks.harness.record import Record, finish
from usp.attention import (
    AttentionSpec,
    RingProgram,
    SequenceLayout,
    counted_windows,
    layout_name,
    ring_schedule,
    select_kernel,
)
from usp.attention.keep import compute_now
from usp.attention.ring import RingAttention
from usp.attention.schedule import RingSchedule

SEQ_LEN, MEDIAN, SIGMA, ROWS = 65_536, 1000, 1.5, 8
HEADS, HEAD_DIM = 1, 64
LAYOUTS = ("contiguous", "zigzag", "balanced")
RINGS = (8, 64)
UNEVEN, STEP = 1.05, 64  # of the bound on what a layout sends: the most work of a rank over the mean, and its grid


def documents(seed: int) -> tuple[int, ...]:
    """Return the boundaries of a row's documents; the last one is cut at the end of the row."""
    draw, boundaries = random.Random(seed), [0]
    while boundaries[-1] < SEQ_LEN:
        length = max(16, int(draw.lognormvariate(0, SIGMA) * MEDIAN))
        boundaries.append(min(boundaries[-1] + length, SEQ_LEN))
    return tuple(boundaries)


@dataclass(frozen=True)
class Plan:
    """The schedules of each rank for one row: of layers with each window, and how many these are. seconds: of
    planning."""

    schedules: tuple[tuple[tuple[RingSchedule, int], ...], ...]
    seconds: float

    @staticmethod
    def of(kind: str, ring: int, boundaries: tuple[int, ...], windows: Sequence[int]) -> Plan:
        begin, documents = time.perf_counter(), (boundaries,)
        name = layout_name(kind, windows)
        layout = SequenceLayout(name, SEQ_LEN, ring, documents=documents if kind == "balanced" else None)
        layers = [(AttentionSpec(window=(w - 1, -1), documents=documents), n) for w, n in counted_windows(windows)]
        schedules = [tuple((ring_schedule(layout, spec, 1, rank), n) for spec, n in layers) for rank in range(ring)]
        return Plan(tuple(schedules), time.perf_counter() - begin)

    @property
    def pairs(self) -> list[int]:
        """Visible pairs of each rank."""
        steps = ([(step, n) for each, n in layers for step in each.steps] for layers in self.schedules)
        return [sum(n * task.visible() for step, n in of_rank for task in step.tasks) for of_rank in steps]

    @property
    def sent(self) -> list[int]:
        """Tokens whose keys and values each rank sends."""
        return [sum(n * each.tokens_sent for each, n in layers) for layers in self.schedules]


def least_sent(boundaries: tuple[int, ...], ring: int) -> int:
    """Return a number of tokens below which no layout sends whose ranks have equal tokens and at most `UNEVEN` of the
    mean work.

    A rank receives what precedes its last token of a document, without its own. So all receive, of a document, the sum
    over positions x of the ranks that hold a token from x on, without the document's tokens. N such ranks hold all from
    x on, and the rest of their tokens has at least the pairs of the row's cheapest. Found every `STEP` positions: there
    are fewer at each next one.
    """
    lengths = [end - begin for begin, end in pairwise(boundaries)]
    tokens, pairs = SEQ_LEN // ring, np.arange(max(lengths) + 1)
    most = UNEVEN * sum(n * (n + 1) // 2 for n in lengths) / ring
    having = np.array([0, *(sum(n >= p for n in lengths) for p in pairs[1:])])  # tokens with p pairs
    received = -SEQ_LEN
    for length in lengths:
        for begin in range(0, length, STEP):
            end = min(begin + STEP, length)
            last = length - end + 1  # tokens from the last position of this step on
            work = (length * (length + 1) - end * (end - 1)) / 2
            others = having - ((pairs >= end) & (pairs <= length))
            cheapest, theirs = np.cumsum(others), np.cumsum(others * pairs)
            ranks = np.arange(-(-last // tokens), ring + 1)
            added = ranks * tokens - last
            at = np.searchsorted(cheapest, added).clip(1)
            needed = work + theirs[at - 1] + (added - cheapest[at - 1]) * pairs[at]
            received += (end - begin) * int(ranks[needed <= most * ranks][0])
    return received


def rank_seconds(plan: Plan, rank: int, boundaries: tuple[int, ...]) -> float:
    """Return the processor's time for forward and backward of one rank's ring steps, after a first call."""
    spec, ring = AttentionSpec(documents=(boundaries,)), len(plan.schedules)
    device, dtype = torch.device("cpu"), torch.float32
    kernel, _ = select_kernel("auto", spec, device, dtype, HEAD_DIM)
    program = RingProgram.lower(plan.schedules[rank][0][0], spec, kernel, device, dtype)
    q, k, v, dout = (torch.randn(SEQ_LEN // ring, HEADS, HEAD_DIM) for _ in range(4))
    leaves, channel = [x.requires_grad_() for x in (q, k, v)], SilentChannel(ring)
    times = []
    for _ in range(2):
        begin = time.process_time()
        out = RingAttention.apply(*leaves, None, program, channel, compute_now)[0]
        torch.autograd.grad(out, leaves, dout)
        times.append(time.process_time() - begin)
    return times[-1]


def measure(ring: int, timed: int, windows: Sequence[int]) -> list[dict[str, Any]]:
    """Return what each layout makes of the same rows. timed: rows whose ranks run. windows: of the layers."""
    rows = [documents(seed) for seed in range(ROWS)]
    plans = {kind: [Plan.of(kind, ring, row, windows) for row in rows] for kind in LAYOUTS}
    slowest: dict[str, list[float]] = {kind: [] for kind in LAYOUTS}
    for number in range(timed):
        for kind in LAYOUTS:  # in turns, row by row
            seconds = [rank_seconds(plans[kind][number], rank, rows[number]) for rank in range(ring)]
            slowest[kind].append(max(seconds))
    return [
        {
            "ring": ring,
            "layout": kind,
            "imbalance": [max(plan.pairs) * ring / sum(plan.pairs) for plan in plans[kind]],
            "sent": [sum(plan.sent) for plan in plans[kind]],
            "busiest": [max(plan.sent) for plan in plans[kind]],
            "planning_ms": median(plan.seconds for plan in plans[kind]) * 1e3,
            "least": [least_sent(row, ring) for row in rows] if kind == "balanced" and not any(windows) else [],
            "slowest_seconds": slowest[kind],
            "slowest_of_zigzag": [a / b for a, b in zip(slowest[kind], slowest["zigzag"], strict=True)],
            "sent_of_zigzag": sum(sum(plan.sent) for plan in plans[kind])
            / sum(sum(plan.sent) for plan in plans["zigzag"]),
            "busiest_of_zigzag": sum(max(plan.sent) for plan in plans[kind])
            / sum(max(plan.sent) for plan in plans["zigzag"]),
        }
        for kind in LAYOUTS
    ]


def row(found: dict[str, Any]) -> tuple[str, ...]:
    ratios = found["slowest_of_zigzag"]
    return (
        str(found["ring"]),
        found["layout"],
        f"{mean(found['imbalance']):.2f}",
        f"{max(found['imbalance']):.2f}",
        f"{found['sent_of_zigzag']:.2f}",
        f"{found['busiest_of_zigzag']:.2f}",
        f"{median(ratios):.2f}" if ratios else "",
        f"{found['planning_ms']:.0f}",
    )


def least(data: Sequence[dict[str, Any]]) -> str:
    """Say what no layout can do better; see `least_sent`."""
    said = []
    of_layout = {(found["ring"], found["layout"]): found for found in data}
    for ring in RINGS:
        zigzag, balanced = of_layout[ring, "zigzag"], of_layout[ring, "balanced"]
        of_zigzag = sum(balanced["least"]) / sum(zigzag["sent"])
        more = sum(a > b for a, b in zip(balanced["least"], zigzag["sent"], strict=True))
        said.append(f"{of_zigzag:.2f} of zigzag's tokens over {ring} ranks (in {more} rows, no less than zigzag)")
    return f"No layout with equal tokens and at most {UNEVEN} of the mean work sends less than {' and '.join(said)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timed", type=int, default=3, help="rows whose 8 ranks are timed, without --windows")
    parser.add_argument("--windows", default="0", help="of each layer, 0 for none: work and tokens are sums over them")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    windows = [int(window) for window in arguments.windows.split(",")]
    timed = 0 if any(windows) else arguments.timed
    data = [found for ring in RINGS for found in measure(ring, timed if ring == 8 else 0, windows)]
    record = Record.of(
        "balance",
        "Packed documents over a ring: work and traffic by layout",
        ("ring", "layout", "work, max/mean", "worst row", "sent", "busiest", "slowest rank", "planning, ms"),
        map(row, data),
        (
            f"{ROWS} rows of {SEQ_LEN:,} tokens, causal; all ranks have equal tokens. Lengths: log-normal, median "
            f"{MEDIAN:,}, sigma {SIGMA}.",
            "work: visible pairs of the busiest rank, over the mean of the ranks; mean of the rows, and the worst row.",
            "sent, busiest: tokens whose keys and values all ranks, and the rank that sends most, send; of zigzag's.",
            *([] if any(windows) else [least(data)]),
            f"slowest rank: forward and backward of its ring steps, of zigzag's; median of {timed} rows.",
            "planning: of the layout and all ranks' schedules; a rank plans its own and the layout.",
        ),
        data,
    )
    finish(record, arguments.output, save=not any(windows))


if __name__ == "__main__":
    main()
