"""Reallocation of weights between layouts, against a raw all-to-all of the same bytes.

The embeddings and one layer of a llama, 163 MB, move between layouts on gloo ranks of this machine. The baseline is one
all_to_all_single with equally many bytes on every link, which neither packs nor unpacks and uses preallocated memory,
in the same run on the same ranks, in alternation. Layouts are (pp, dp, tp), in that order of ranks; zero: parameters
are also sharded over dp.

    python -m benchmarks.realloc            # about three minutes on two cores
    python -m benchmarks.realloc --cluster  # two emulated hosts of four ranks, connected by 1 Gbit/s
    python -m benchmarks.realloc --quick    # one case, a small model; saves nothing

On two hosts, the second baseline is the same reallocation with one fetch per rank: each rank receives what it lacks
from the ranks that hold it, although others of its host receive the same from there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.cluster import cluster, unavailable
from benchmarks.harness.measure import Spans, in_turns, median_milliseconds
from benchmarks.harness.record import Record, finish
from tests.harness.ranks import RankPool
from usp.parallel import ParamLayout, ProcessGroups, Reallocation, ReallocPlan, plan_realloc
from usp.parallel.reallocation.boxes import Box
from usp.parallel.reallocation.param_layout import Kind
from usp.parallel.reallocation.realloc_plan import TierBytes

BUCKET = 64 << 20
RATE = "1gbit"  # between the hosts of --cluster
OURS, RAW, APART = "ours", "raw all-to-all", "one fetch per rank"
COLUMNS = (
    "ranks",
    "from",
    "to",
    "MB moved",
    "of the minimum",
    "ReaL's broadcast",
    "rounds",
    "extra MB per rank",
    "ms",
    "GB/s",
    "of raw",
)
CLUSTER_COLUMNS = (
    "from",
    "to",
    "MB between hosts",
    "one fetch per rank",
    "of the minimum",
    "MB inside hosts",
    "in total of the minimum",
    "rounds",
    "ms",
    "of one fetch per rank",
    "of raw",
)


@dataclass(frozen=True)
class Layout:
    """A layout over pp x dp x tp ranks, starting at rank `first`."""

    pp: int
    dp: int
    tp: int
    zero: bool = False
    first: int = 0

    def __str__(self) -> str:
        shown = f"({self.pp}, {self.dp}, {self.tp})" + (" zero" if self.zero else "")
        return shown + (f" from rank {self.first}" if self.first else "")


@dataclass(frozen=True)
class Case:
    ranks: int
    src: Layout
    dst: Layout
    hidden: int = 1536
    bucket_bytes: int = BUCKET
    hosts: int = 1

    def plan(self) -> ReallocPlan:
        layouts = [param_layout(layout, self.hidden) for layout in (self.src, self.dst)]
        return plan_realloc(*layouts, bucket_bytes=self.bucket_bytes, ranks_per_host=self.ranks // self.hosts)

    @property
    def apart(self) -> Case:
        """The case as if every rank were a host: each fetches what it lacks from the least loaded rank that holds it.

        In the cases here all ranks that do are on one host, but for norms, so none is nearer than another.
        """
        return replace(self, hosts=self.ranks)


CASES = (
    Case(8, Layout(1, 8, 1, zero=True), Layout(1, 2, 4)),
    Case(8, Layout(1, 4, 2, zero=True), Layout(1, 2, 4)),
    Case(8, Layout(1, 1, 8), Layout(2, 4, 1)),
    Case(8, Layout(2, 2, 2), Layout(1, 8, 1)),
    Case(8, Layout(2, 2, 2), Layout(1, 1, 8)),
    Case(8, Layout(1, 2, 2), Layout(1, 2, 2, first=4)),
    Case(4, Layout(1, 4, 1, zero=True), Layout(1, 2, 2)),
    Case(4, Layout(2, 1, 2), Layout(1, 4, 1)),
    Case(4, Layout(1, 2, 1), Layout(1, 1, 2, first=2)),
)

ON_TWO_HOSTS = tuple(
    Case(8, src, dst, hosts=2)
    for src, dst in (
        (Layout(1, 4, 1, zero=True), Layout(1, 4, 1, first=4)),
        (Layout(1, 4, 1, zero=True), Layout(1, 2, 2, first=4)),
        (Layout(1, 8, 1, zero=True), Layout(1, 8, 1)),
        (Layout(1, 8, 1, zero=True), Layout(1, 4, 2)),
        (Layout(2, 2, 2), Layout(1, 8, 1)),
        (Layout(1, 1, 8), Layout(2, 4, 1)),
        (Layout(1, 4, 1, zero=True), Layout(1, 1, 4, first=4)),  # no rank of a host needs what another one needs
        (Layout(1, 8, 1, zero=True), Layout(1, 2, 4)),
    )
)


def shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    inner, vocab = hidden * 8 // 3, 4096
    layer: dict[str, tuple[int, ...]] = {"q": (hidden, hidden), "k": (hidden, hidden), "v": (hidden, hidden)}
    layer |= {"o": (hidden, hidden), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    layer |= {"input_norm": (hidden,), "norm": (hidden,)}
    return {"embed": (vocab, hidden), **layer, "last_norm": (hidden,), "head": (vocab, hidden)}


def param_layout(layout: Layout, hidden: int) -> ParamLayout:
    """Divide the parameters evenly over stages; shard o and down by columns over tp, the others by rows, norms not."""
    kinds = {name: Kind(shape, torch.float32) for name, shape in shapes(hidden).items()}
    boxes: dict[str, dict[int, Box]] = {}
    for index, (name, kind) in enumerate(kinds.items()):
        stage = index * layout.pp // len(kinds)
        first = layout.first + stage * layout.dp * layout.tp
        boxes[name] = {}
        for dp in range(layout.dp):
            for tp in range(layout.tp):
                box = Box.whole(kind.shape)
                if len(kind.shape) > 1:
                    box = divided(box, int(name in ("o", "down")), layout.tp, tp)
                boxes[name][first + dp * layout.tp + tp] = divided(box, 0, layout.dp, dp) if layout.zero else box
    return ParamLayout(kinds, boxes)


def divided(box: Box, dim: int, pieces: int, piece: int) -> Box:
    size = box.sizes[dim] // pieces
    offset = (*box.offset[:dim], box.offset[dim] + piece * size, *box.offset[dim + 1 :])
    return Box(offset, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))


def broadcast_bytes(plan: ReallocPlan) -> int:
    """Return the bytes that ReaL would send, as we model it.

    One holder of each source shard broadcasts the part of each new box that the shard covers to all ranks that hold the
    box in the new layout. The sender is one of the receivers where possible, and then does not send to itself.
    """
    total = 0
    for name, (_, dtype) in plan.dst.parameters.items():
        held: dict[Box, list[int]] = {}
        for rank, box in plan.src.boxes[name].items():
            held.setdefault(box, []).append(rank)
        receivers: dict[tuple[Box, Box], set[int]] = {}
        for source in held:
            for rank, box in plan.dst.boxes[name].items():
                if common := box.overlap(source):
                    receivers.setdefault((source, common), set()).add(rank)
        for (source, part), ranks in receivers.items():
            total += part.numel * dtype.itemsize * (len(ranks) - bool(ranks & set(held[source])))
    return total


# On each rank


def measure(case: Case, warmups: int, iterations: int) -> dict[str, Spans]:
    """Return the spans of all timed calls by system, after checking that the weights arrived."""
    plan, rank = case.plan(), dist.get_rank()
    groups = ProcessGroups()
    src = {name: torch.full(boxes[rank].sizes, 1.0) for name, boxes in plan.src.boxes.items() if rank in boxes}
    dst = {name: torch.zeros(boxes[rank].sizes) for name, boxes in plan.dst.boxes.items() if rank in boxes}
    systems: dict[str, Callable[[], Any]] = {RAW: all_to_all(plan, groups)}
    for name, planned in ((OURS, plan), (APART, case.apart.plan()))[: 2 if case.hosts > 1 else 1]:
        systems[name] = partial(Reallocation(planned, groups, torch.device("cpu")).run, src, dst)
    spans: dict[str, Spans] = {name: [] for name in systems}
    for round_, name in in_turns(tuple(systems), warmups + iterations):
        for tensor in dst.values():
            tensor.zero_()
        dist.barrier()
        start = time.perf_counter_ns()  # all processes of a machine share this clock
        systems[name]()
        if round_ >= warmups:
            spans[name].append((start, time.perf_counter_ns()))
        assert name == RAW or all(bool((tensor == 1).all()) for tensor in dst.values())
    dist.barrier()
    return spans


def measure_all(cases: Sequence[Case], warmups: int, iterations: int) -> list[dict[str, Spans]]:
    return [measure(case, warmups, iterations) for case in cases]


def all_to_all(plan: ReallocPlan, groups: ProcessGroups) -> Callable[[], Any]:
    """Return an all-to-all with as many bytes on every link as the plan."""
    group, rank = groups.get(plan.ranks), dist.get_rank()
    if group is None:
        return lambda: None
    sends = [plan.links.get((rank, peer), 0) for peer in plan.ranks]
    receives = [plan.links.get((peer, rank), 0) for peer in plan.ranks]
    sent, received = (torch.ones(sum(sizes), dtype=torch.uint8) for sizes in (sends, receives))
    return lambda: dist.all_to_all_single(received, sent, receives, sends, group=group)


# In the parent process


def summarise(case: Case, spans: Sequence[Mapping[str, Spans]]) -> dict[str, Any]:
    """Return one row of data from all ranks' spans."""
    plan = case.plan()
    milliseconds = {name: median_milliseconds(rank[name] for rank in spans) for name in spans[0]}
    row = {
        "ranks": case.ranks,
        "src": str(case.src),
        "dst": str(case.dst),
        "bytes": plan.total_bytes,
        "minimum_bytes": plan.minimum_bytes,
        "broadcast_bytes": broadcast_bytes(plan),
        "rounds": plan.rounds,
        "extra_bytes": plan.extra_bytes,
        "milliseconds": milliseconds,
        "of_raw": milliseconds[RAW] / milliseconds[OURS],
    }
    if case.hosts == 1:
        return row
    between = sum(map(plan.host_lacking_bytes, plan.dst.ranks))  # at least, and the rest of what ranks lack inside
    return row | {
        "hosts": case.hosts,
        "tier_bytes": plan.tier_bytes._asdict(),
        "minimum_tier_bytes": TierBytes(between, plan.minimum_bytes - between)._asdict(),
        "between_apart": replace(case.apart.plan(), ranks_per_host=plan.ranks_per_host).tier_bytes.between,
        "of_apart": milliseconds[OURS] / milliseconds[APART],
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    ours, raw = row["milliseconds"][OURS], row["milliseconds"][RAW]
    moved, fewest = row["bytes"], row["minimum_bytes"]
    return (
        str(row["ranks"]),
        row["src"],
        row["dst"],
        f"{moved / 1e6:.0f}",
        f"{moved / fewest:.3f}",
        f"{row['broadcast_bytes'] / fewest:.3f}",
        str(row["rounds"]),
        f"{row['extra_bytes'] / 1e6:.0f}",
        f"{ours:.0f} / {raw:.0f}",
        f"{moved / ours / 1e6:.2f} / {moved / raw / 1e6:.2f}",
        f"{row['of_raw']:.2f}",
    )


def cluster_cells(row: dict[str, Any]) -> tuple[str, ...]:
    between, inside = row["tier_bytes"].values()
    return (
        row["src"],
        row["dst"],
        f"{between / 1e6:.0f}",
        f"{row['between_apart'] / 1e6:.0f}",
        f"{between / row['minimum_tier_bytes']['between']:.3f}",
        f"{inside / 1e6:.0f}",
        f"{row['bytes'] / row['minimum_bytes']:.3f}",
        str(row["rounds"]),
        " / ".join(f"{row['milliseconds'][name]:.0f}" for name in (OURS, APART, RAW)),
        f"{row['of_apart']:.2f}",
        f"{row['of_raw']:.2f}",
    )


def cluster_notes(rows: list[dict[str, Any]]) -> list[str]:
    shared = [row["of_apart"] for row in rows if row["between_apart"] > 1.1 * row["tier_bytes"]["between"]]
    return [
        "ms: medians, after one warm-up round, of ours / one fetch per rank / a raw all-to-all of our bytes on every "
        "link. of raw: ratio of the bandwidths.",
        "The minimum between hosts: what hosts lack. In total: what ranks lack.",
        f"Where replicas of matrices share a host: {statistics.geometric_mean(shared):.2f} of the time of one fetch "
        f"per rank (geometric mean), at most {max(shared):.2f}.",
    ]


def notes(rows: list[dict[str, Any]]) -> list[str]:
    ratios = [row["of_raw"] for row in rows]
    return [
        "ms and GB/s (of all ranks together): medians of ours / raw all-to-all of the same bytes on every link. "
        "of raw: ratio of the bandwidths. Ours also packs, unpacks, copies what stays on a rank, and allocates memory.",
        f"Bandwidth relative to raw: geometric mean {statistics.geometric_mean(ratios):.2f}, worst {min(ratios):.2f}.",
        "of the minimum, ReaL's broadcast: bytes sent, relative to the bytes that ranks lack; modelled for ReaL.",
        f"Buckets of {BUCKET >> 20} MiB; extra MB: peak memory of the messages on a rank.",
    ]


def on_one_host(cases: Sequence[Case], iterations: int) -> Iterator[dict[str, Any]]:
    with RankPool() as ranks:
        for case in cases:
            yield summarise(case, ranks.run(measure, case.ranks, case, 2, iterations, timeout=600))


def on_two_hosts(cases: Sequence[Case], iterations: int) -> Iterator[dict[str, Any]]:
    with cluster(2, RATE) as hosts:
        by_rank = hosts.call(measure_all, 4, cases, 1, iterations, timeout=3600.0)
    yield from (summarise(case, spans) for case, spans in zip(cases, zip(*by_rank, strict=True), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case; save nothing")
    parser.add_argument("--cluster", action="store_true", help=f"two emulated hosts of four ranks, connected by {RATE}")
    parser.add_argument("--iterations", type=int, help="timed calls per system (default 11; 3 with --cluster)")
    arguments = parser.parse_args()
    if arguments.cluster:
        if reason := unavailable():
            raise SystemExit(f"--cluster is not available: {reason}")
        cases = [replace(case, hidden=384) for case in ON_TWO_HOSTS[:1]] if arguments.quick else ON_TWO_HOSTS
        rows, shown = [*on_two_hosts(cases, arguments.iterations or 3)], (CLUSTER_COLUMNS, cluster_cells, cluster_notes)
        name, command = "realloc_cluster", "python -m benchmarks.realloc --cluster"
        question = f"Reallocation of weights on two hosts of four CPU ranks, {RATE} between them"
    else:
        cases = [Case(4, Layout(1, 4, 1, zero=True), Layout(1, 2, 2), hidden=192)] if arguments.quick else CASES
        rows, shown = [*on_one_host(cases, arguments.iterations or 11)], (COLUMNS, cells, notes)
        name, command = "realloc", ""
        question = "Reallocation of weights, against a raw all-to-all of the same bytes"
    columns, of_row, below = shown
    record = Record.of(name, question, columns, map(of_row, rows), below(rows), rows, command=command)
    finish(record, save=not arguments.quick)


if __name__ == "__main__":
    main()
