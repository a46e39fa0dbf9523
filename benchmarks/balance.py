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
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from attention import AttentionSpec, RingProgram, SequenceLayout, layout_name, ring_schedule, select_kernel
from attention.keep import compute_now
from attention.ring import RingAttention
from attention.schedule import RingSchedule
from benchmarks.gpu import SilentChannel
from benchmarks.harness.record import Record, finish

SEQ_LEN, MEDIAN, SIGMA, ROWS = 65_536, 1000, 1.5, 8
HEADS, HEAD_DIM = 1, 64
LAYOUTS = ("contiguous", "zigzag", "balanced")


def documents(seed: int) -> tuple[int, ...]:
    """Return the boundaries of a row's documents; the last one is cut at the end of the row."""
    draw, boundaries = random.Random(seed), [0]
    while boundaries[-1] < SEQ_LEN:
        length = max(16, int(draw.lognormvariate(0, SIGMA) * MEDIAN))
        boundaries.append(min(boundaries[-1] + length, SEQ_LEN))
    return tuple(boundaries)


@dataclass(frozen=True)
class Plan:
    """The schedules of all layers of each rank for one row. seconds: of planning."""

    schedules: tuple[tuple[RingSchedule, ...], ...]
    seconds: float

    @staticmethod
    def of(kind: str, ring: int, boundaries: tuple[int, ...], windows: Sequence[int]) -> Plan:
        begin, documents = time.perf_counter(), (boundaries,)
        name = layout_name(kind, windows)
        layout = SequenceLayout(name, SEQ_LEN, ring, documents=documents if kind == "balanced" else None)
        layers = [AttentionSpec(window=(window - 1, -1), documents=documents) for window in windows]
        schedules = tuple(tuple(ring_schedule(layout, spec, 1, rank) for spec in layers) for rank in range(ring))
        return Plan(schedules, time.perf_counter() - begin)

    @property
    def pairs(self) -> list[int]:
        """Visible pairs of each rank."""
        steps = ([step for each in layers for step in each.steps] for layers in self.schedules)
        return [sum(task.visible() for step in of_rank for task in step.tasks) for of_rank in steps]

    @property
    def sent(self) -> list[int]:
        """Tokens whose keys and values each rank sends."""
        return [sum(each.tokens_sent for each in layers) for layers in self.schedules]


def rank_seconds(plan: Plan, rank: int, boundaries: tuple[int, ...]) -> float:
    """Return the processor's time for forward and backward of one rank's ring steps, after a first call."""
    spec, ring = AttentionSpec(documents=(boundaries,)), len(plan.schedules)
    device, dtype = torch.device("cpu"), torch.float32
    kernel, _ = select_kernel("auto", spec, device, dtype, HEAD_DIM)
    program = RingProgram.lower(plan.schedules[rank][0], spec, kernel, device, dtype)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timed", type=int, default=3, help="rows whose 8 ranks are timed, without --windows")
    parser.add_argument("--windows", default="0", help="of each layer, 0 for none: work and tokens are sums over them")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    windows = [int(window) for window in arguments.windows.split(",")]
    timed = 0 if any(windows) else arguments.timed
    data = [found for ring in (8, 64) for found in measure(ring, timed if ring == 8 else 0, windows)]
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
            f"slowest rank: forward and backward of its ring steps, of zigzag's; median of {timed} rows.",
            "planning: of the layout and all ranks' schedules; a rank plans its own and the layout.",
        ),
        data,
    )
    finish(record, arguments.output, save=not any(windows))


if __name__ == "__main__":
    main()
