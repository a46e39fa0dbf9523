"""Time, bytes sent and memory of the unified attention.

Baselines: yunchang, patched to run on CPU (benchmarks/baselines/yunchang_cpu.py), on the same ranks and process group,
and a single process that computes the whole sequence with one thread per core. The three alternate call by call in one
run; the other ranks wait in a barrier while the single process computes. A call is timed from the first rank's start to
the last rank's end.

    python -m benchmarks.attention            # about half an hour on two cores
    python -m benchmarks.attention --quick    # about a minute; saves nothing
    python -m benchmarks.attention --cluster  # two emulated hosts of four ranks, connected by 1 Gbit/s
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.baselines import yunchang_cpu
from benchmarks.harness.cluster import cluster, unavailable
from benchmarks.harness.measure import Runner, median_milliseconds, peak_bytes, sent_bytes, time_in_turns
from benchmarks.harness.record import Record, finish, parser_of
from tests.harness.ranks import RankPool
from usp import Mask, UnifiedSPAttention, shard_sequence
from usp.parallel import ParallelDims, ParallelMesh

BATCH, HEAD_DIM = 1, 64
RATE = "1gbit"  # between the hosts of --cluster
SYSTEMS = ("ours", "yunchang", "one process")
GROUPED = "ours in head groups"


@dataclass(frozen=True)
class Case:
    ulysses: int
    ring: int
    layout: str = "zigzag"
    seq_len: int = 4096
    heads: int = 8
    kv_heads: int = 8
    dtype: str = "float32"

    @property
    def ranks(self) -> int:
        return self.ulysses * self.ring

    @property
    def head_groups(self) -> int:
        """Return in how many groups a rank's KV heads are also exchanged; 0 where it has one."""
        each = self.kv_heads // self.ulysses
        return each if self.ulysses > 1 and each > 1 else 0

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of one activation of the whole sequence: batch x seq x hidden x itemsize."""
        return BATCH * self.seq_len * self.heads * HEAD_DIM * getattr(torch, self.dtype).itemsize


def one_process(q_BSNH: Tensor, k_BSNH: Tensor, v_BSNH: Tensor, *, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSNH, k_BSNH, v_BSNH))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


# On each rank


def measure(case: Case, warmups: int, iterations: int, peer: bool) -> dict[str, Any]:
    """Return this rank's spans, bytes, peak memory and differences from one process, by system. peer: also measure
    yunchang, where it supports the case."""
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(0)
    counts = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    whole = [torch.randn(BATCH, case.seq_len, n, HEAD_DIM, generator=generator).to(dtype) for n in counts]
    mesh = ParallelMesh.create(ParallelDims(ulysses=case.ulysses, ring=case.ring), device_type="cpu")
    attention = UnifiedSPAttention(mesh, layout=case.layout, kernel="auto")

    def runner(system: Callable[..., Tensor]) -> Runner:
        return Runner.make(system, lambda x: shard_sequence(x, mesh, layout=case.layout, dim=1), whole)

    runners: dict[str, Runner | None] = {"ours": runner(attention), "one process": None}
    exposed = {"ours": attention.time_exposed()}
    if groups := case.head_groups:
        grouped = UnifiedSPAttention(mesh, layout=case.layout, head_groups=groups)
        exposed[GROUPED], runners[GROUPED] = grouped.time_exposed(), runner(grouped)
    if peer and case.kv_heads % case.ulysses == 0:  # otherwise yunchang fails in a reshape
        theirs = yunchang_cpu.build(ulysses=case.ulysses, ring=case.ring, layout=case.layout)
        runners["yunchang"] = Runner.make(theirs.attention, theirs.shard, whole)
    if dist.get_rank() == 0:
        alone = Runner.make(one_process, torch.clone, whole)
        runners["one process"] = replace(alone, threads=os.cpu_count() or 1)
    sizes = (torch.Size((BATCH, case.seq_len // attention.ranks, n, HEAD_DIM)) for n in (case.heads, case.kv_heads))
    predicted = attention.plan(Mask(), *sizes).wire_bytes(dtype)
    distributed = {name: runner for name, runner in runners.items() if runner and name != "one process"}
    return {
        "spans": time_in_turns(runners, warmups, iterations, exposed),
        "predicted": {"forward": predicted.forward, "backward": predicted.backward},
        "sent": {name: sent_bytes(runner) for name, runner in distributed.items()},
        "peak": {name: peak_bytes(runner) for name, runner in runners.items() if runner},
        "difference": differences(runners, distributed),
    }


def measure_all(chosen: Sequence[Case], warmups: int, iterations: int, peer: bool) -> list[dict[str, Any]]:
    return [measure(case, warmups, iterations, peer) for case in chosen]


def differences(runners: dict[str, Runner | None], distributed: dict[str, Runner]) -> dict[str, float]:
    """Return the relative L2 difference from one process over this rank's tokens, the worst of out, dq, dk, dv."""
    ours, single = distributed["ours"], runners["one process"]
    shapes = [(BATCH, x.shape[1] * dist.get_world_size(), *x.shape[2:]) for x in (ours.inputs[0], *ours.inputs)]
    expected = single.step() if single else [torch.empty(shape, dtype=ours.dout.dtype) for shape in shapes]
    worst = dict.fromkeys(distributed, 0.0)
    results = {name: runner.step() for name, runner in distributed.items()}
    for index, whole in enumerate(expected):
        whole = whole.contiguous()
        dist.broadcast(whole, 0)
        for name, runner in distributed.items():
            want = runner.shard(whole).double()
            error = ((results[name][index].double() - want).norm() / want.norm()).item()
            worst[name] = max(worst[name], error)
    return worst


# Over all ranks


def summarise(case: Case, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row of data: medians in ms, units sent, peak, worst difference."""
    first = by_rank[0]
    milliseconds = {
        name: {
            kind: median_milliseconds(spans for rank in by_rank if (spans := rank["spans"][name][kind]))
            for kind in ("forward", "step")
        }
        for name in first["spans"]
    }
    exposed = {
        name: statistics.median(map(statistics.mean, zip(*(r["spans"][name]["exposed"] for r in by_rank), strict=True)))
        for name in ("ours", GROUPED)
        if name in first["spans"]
    }
    sent = {name: statistics.mean(rank["sent"][name]["step"] for rank in by_rank) for name in first["sent"]}
    exact = all(
        rank["sent"]["ours"] == {"forward": p["forward"], "step": p["forward"] + p["backward"]}
        for rank in by_rank
        for p in [rank["predicted"]]
    )
    return {
        **asdict(case),
        "milliseconds": milliseconds,
        "exposed_milliseconds": exposed,
        "units": {name: sent[name] / case.unit_bytes for name in sent},
        "sent_as_predicted": exact,
        "peak_bytes": {name: max(rank["peak"].get(name, 0) for rank in by_rank) for name in first["peak"]},
        "difference": {name: max(rank["difference"][name] for rank in by_rank) for name in first["sent"]},
    }


COLUMNS = (
    "u x r", "layout", "tokens", "heads", "dtype", "forward ms", "fwd + bwd ms", "of yunchang", "of 1 process",
    "in head groups", "exposed ms", "units sent", "peak MiB", "difference",
)  # fmt: skip
QUESTIONS = (
    "Is attention faster than yunchang's, and does it send less?",
    "Is it faster on two hosts with 1 Gbit/s between them, too?",
)
READING = (
    "u x r: ulysses x ring ranks. Times: medians of ours / yunchang / one process. Units sent and peak MiB: ours / "
    "yunchang, forward + backward, per rank. One unit is batch x tokens x hidden x itemsize. Both ratios compare "
    "forward + backward times. In head groups: ms of ours with as many groups as a rank has KV heads. Exposed ms: in "
    "which a rank waits for messages (mean over ranks), in one group / in groups. Difference: relative L2 error "
    "against one process, worst of out, dq, dk, dv.",
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    def each(values: dict[str, float], names: Sequence[str], form: str) -> str:
        return " / ".join(format(values[name], form) if name in values else "-" for name in names)

    step = {name: times["step"] for name, times in row["milliseconds"].items()}
    forward = {name: times["forward"] for name, times in row["milliseconds"].items()}
    peak = {name: value / 2**20 for name, value in row["peak_bytes"].items()}
    return (
        f"{row['ulysses']} x {row['ring']}",
        row["layout"],
        f"{row['seq_len']:,}",
        f"{row['heads']}/{row['kv_heads']}",
        row["dtype"],
        each(forward, SYSTEMS, ".0f"),
        each(step, SYSTEMS, ".0f"),
        f"{step['ours'] / step['yunchang']:.2f}" if "yunchang" in step else "-",
        f"{step['ours'] / step['one process']:.2f}" if "one process" in step else "-",
        each(step, (GROUPED,), ".0f"),
        each(row["exposed_milliseconds"], ("ours", GROUPED), ".0f"),
        each(row["units"], SYSTEMS[:2], ".2f"),
        each(peak, SYSTEMS[:2], ".0f"),
        f"{row['difference']['ours']:.0e}",
    )


def of_systems(rows: Sequence[dict[str, Any]], peer: str) -> list[float]:
    """Return our time of forward and backward over that of another system."""
    times = [row["milliseconds"] for row in rows if peer in row["milliseconds"]]
    return [each["ours"]["step"] / each[peer]["step"] for each in times]


def answer(rows: Sequence[dict[str, Any]]) -> str:
    """Return the headline ratios: of 8 ranks' grids on two hosts, or of the standard cases on 4 ranks."""
    standard = [r for r in rows if _is(r, ranks=4, layout="zigzag", dtype="float32", heads=8, kv_heads=8)]
    if not standard:
        ratios = of_systems(rows, "yunchang") or [math.nan]
        return f"It takes {min(ratios):.2f} to {max(ratios):.2f} of yunchang's time over four grids of 8 ranks."
    found = []
    for seq_len in sorted({row["seq_len"] for row in standard}):
        group = [row for row in standard if row["seq_len"] == seq_len]
        each = " and ".join(
            f"{statistics.geometric_mean(ratios):.2f} of {whose} (worst {max(ratios):.2f})"
            for name, whose in (("yunchang", "yunchang's time"), ("one process", "one process's on the same cores"))
            if (ratios := of_systems(group, name))
        )
        found.append(f"{each} at {seq_len:,} tokens")
    exact = sum(row["sent_as_predicted"] for row in rows)
    rings = [" and yunchang ".join(f"{n:.2f}" for n in row["units"].values()) for row in standard if row["ring"] == 4]
    sent = f" In a ring of 4, ours sends {rings[0]} times the activations of a sequence per rank." if rings else ""
    return (
        f"A forward and backward pass on 4 ranks takes {'; '.join(found)}.{sent} Bytes on the wire equal the predicted "
        f"ones in {exact} of {len(rows)} cases."
    )


def _is(row: dict[str, Any], *, ranks: int, **fields: Any) -> bool:
    return row["ulysses"] * row["ring"] == ranks and all(row[name] == value for name, value in fields.items())


def cases(*, quick: bool, hosts: bool = False) -> list[Case]:
    four, eight = ((4, 1), (2, 2), (1, 4)), ((8, 1), (4, 2), (2, 4), (1, 8))
    if hosts:
        lengths = (2048,) if quick else (4096, 8192)
        more_heads = [Case(u, r, seq_len=lengths[0], heads=16, kv_heads=16) for u, r in eight[:2]]
        return [*(Case(u, r, seq_len=seq_len) for seq_len in lengths for u, r in eight), *more_heads]
    if quick:
        return [Case(u, r, seq_len=2048) for u, r in four]
    return [
        *(Case(u, r, seq_len=seq_len) for seq_len in (4096, 8192) for u, r in four),
        *(Case(u, r, layout=layout) for layout in ("contiguous", "striped") for u, r in four),
        *(Case(u, r, kv_heads=2) for u, r in four),
        *(Case(u, r, dtype="bfloat16") for u, r in four),
        *(Case(u, r, kv_heads=2, dtype="bfloat16") for u, r in four),
        *(Case(u, r) for u, r in eight),
        *(Case(u, r, kv_heads=2, dtype="bfloat16") for u, r in eight),
    ]


def on_one_host(chosen: Sequence[Case], iterations: int, peer: bool) -> Iterator[dict[str, Any]]:
    with RankPool() as ranks:
        for case in chosen:
            yield summarise(case, ranks.run(measure, case.ranks, case, 2, iterations, peer, timeout=1800.0))


def on_two_hosts(chosen: Sequence[Case], iterations: int, peer: bool) -> Iterator[dict[str, Any]]:
    with cluster(2, RATE) as hosts:
        by_rank = hosts.call(measure_all, 4, tuple(chosen), 2, iterations, peer, timeout=3600.0)
    for case, results in zip(chosen, zip(*by_rank, strict=True), strict=True):
        yield summarise(case, list(results))


def main() -> None:
    parser = parser_of(__doc__ or "", quick="2,048 tokens, 3 iterations")
    parser.add_argument("--cluster", action="store_true", help=f"two emulated hosts of four ranks, connected by {RATE}")
    parser.add_argument("--iterations", type=int, help="timed rounds per case (default 7, or 3 with --quick)")
    parser.add_argument("--no-peer", action="store_true", help="skip yunchang")
    args = parser.parse_args()
    if not args.no_peer and find_spec("yunchang") is None:
        raise SystemExit('yunchang is not installed: pip install -c constraints.txt -e ".[bench]", or pass --no-peer')
    if args.cluster and (reason := unavailable()):
        raise SystemExit(f"--cluster is not available: {reason}")
    os.environ["KINETO_LOG_LEVEL"] = "99"  # silences the profiler that tracks memory
    on_ranks = on_two_hosts if args.cluster else on_one_host
    rows = []
    for row in on_ranks(
        cases(quick=args.quick, hosts=args.cluster), args.iterations or (3 if args.quick else 7), not args.no_peer
    ):
        rows.append(row)
        print(*cells(row), sep="  ", flush=True)
    patches = () if args.no_peer else (f'yunchang patch "{name}": {why}.' for name, why in yunchang_cpu.PATCHES.items())
    record = Record.of(
        "attention_cluster" if args.cluster else "attention",
        QUESTIONS[args.cluster],
        answer(rows),
        COLUMNS,
        map(cells, rows),
        (*READING, *patches),
        command=f"python -m benchmarks.attention{' --cluster' if args.cluster else ''}",
    )
    finish(record, args)


if __name__ == "__main__":
    main()
