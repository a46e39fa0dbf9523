"""Calibration of this machine: rates of matrix products, attention and memory, and alpha-beta of its links.

All ranks measure at the same time, because in training they compute at the same time: processes that share a core, a
memory bus or a network adapter also share it here. Times are means over calls and ranks rather than medians, because
waiting for a shared core is part of them. Two message sizes give a link's alpha and beta; one rank sending by itself
and all ranks sending together give the bandwidth that the ranks of a host share.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from attention import AttentionSpec, Device, select_kernel
from parallel import Link, ParallelDims, ParallelMesh
from usp.cost.traffic.sharding import FLOAT32
from usp.sp.sp_attention import UnifiedSPAttention

from .compute import dtype_name
from .kernel_flops import BACKWARD, FORWARD

SMALL, LARGE = 1 << 10, 1 << 22  # bytes that a rank sends
UNCACHED = 1 << 28  # bytes, more than any cache holds
LEAST_CALLS = 4  # timed calls at least
REPEATS = 16  # timed calls of a collective, the same number on every rank


@dataclass(frozen=True)
class Plan:
    """The sizes to measure.

    Attributes:
        host_size: ranks per host; the ranks of a host are neighbours.
        heads, head_dim: of attention. sizes: of square matrices. lengths: tokens of a sequence in attention.
        stream_bytes: size of each operand in the memory bandwidth measurement.
        seconds: duration of each measurement without communication: long enough for many turns on a shared core.
    """

    device: torch.device
    host_size: int
    heads: int
    head_dim: int
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    stream_bytes: int
    seconds: float = 0.4

    @staticmethod
    def of(device: torch.device, host_size: int, heads: int, head_dim: int) -> Plan:
        """Choose sizes that take about a minute in total on this kind of device."""
        if device.type == "cuda":
            return Plan(device, host_size, heads, head_dim, (512, 1024, 2048, 4096, 8192), (512, 2048, 8192), 1 << 30)
        return Plan(device, host_size, heads, head_dim, (64, 128, 256, 512, 1024), (256, 1024, 4096), 1 << 23)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes to measure; the last one is the compute dtype of training."""
        return (torch.float32, torch.bfloat16) if self.device.type == "cuda" else (torch.float32,)


def calibrate(plan: Plan, name: str) -> dict[str, Any]:
    """Measure the contents of a hardware file. Collective over the default process group, if there is one."""
    products = {dtype: [(2 * n**3, _matmul_rate(plan, n, dtype)) for n in plan.sizes] for dtype in plan.dtypes}
    peaks = {dtype_name(dtype): max(rate for _, rate in found) for dtype, found in products.items()}
    attention = {
        rated: {
            suffix: [(length, *_attention_rates(plan, name, length, causal)) for length in plan.lengths]
            for suffix, causal in (("", True), ("_full", False))
        }
        for rated, name in _kernels(plan).items()
    }
    # Attention may be faster than any measured matrix product, so the peak includes its rates.
    trained = dtype_name(plan.dtypes[-1])
    measured = (found for by_mask in attention.values() for found in by_mask.values())
    peaks[trained] = max(peaks[trained], *(max(rates) for found in measured for _, *rates in found))
    peak = peaks[trained]
    together = products[plan.dtypes[-1]][-2][1]
    return {
        "name": name,
        "source": [f"python -m usp calibrate: {_ranks()} ranks, {plan.host_size} on a host, torch {torch.__version__}"],
        "device": torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "CPU",
        "compute_capability": Device.of(plan.device).capability,
        "peak_flops": peaks,
        "memory_bytes": _memory_bytes(plan),
        "memory_bytes_per_second": _memory_rate(plan),
        "tiers": _tiers(plan),
        "parallel_rings": plan.device.type == "cuda",
        "streams": plan.device.type == "cuda",
        "crowding": max(1.0, _matmul_rate(plan, plan.sizes[-2], plan.dtypes[-1], alone=True) / together),
        "efficiency": {
            "matmul": [[flops, rate / peak] for flops, rate in products[plan.dtypes[-1]]],
            "attention": {
                kernel: {
                    f"{name}{suffix}": [[length, rates[place] / peak] for length, *rates in found]
                    for suffix, found in by_mask.items()
                    for place, name in enumerate(("forward", "backward"))
                }
                for kernel, by_mask in attention.items()
            },
        },
    }


def _matmul_rate(plan: Plan, n: int, dtype: torch.dtype, alone: bool = False) -> float:
    """Measure the FLOP/s of a rank while all ranks compute, or with `alone` of the first while the others wait."""
    a, b = (torch.randn(n, n, device=plan.device).to(dtype) for _ in range(2))
    waits = alone and dist.is_initialized() and dist.get_rank() > 0
    return 2 * n**3 / _seconds(plan, None if waits else lambda: torch.mm(a, b))


def _kernels(plan: Plan) -> dict[str, str]:
    """Return the --attention-kernel of every kernel to measure, by the name that has its rates."""
    found: dict[str, str] = {}
    for name in ("flash4", "flash3", "flash2", "cudnn", "sdpa"):
        with suppress(ValueError):
            kernel, _ = select_kernel(name, AttentionSpec(), plan.device, plan.dtypes[-1], plan.head_dim)
            found.setdefault(kernel.rated_as or kernel.name, name)
    return found


def _attention_rates(plan: Plan, kernel: str, length: int, causal: bool) -> tuple[float, float]:
    """Measure the (forward, backward) FLOP/s of `UnifiedSPAttention` on one rank, counting visible pairs only.

    The number of tokens is constant over lengths, as in FlashAttention's benchmarks (arXiv 2307.08691, section 4.1): a
    batch of short sequences keeps a device as busy as one long sequence.
    """
    mesh = ParallelMesh.create(ParallelDims(dp_shard=_ranks()), device_type=plan.device.type)
    attention = UnifiedSPAttention(mesh, layout="contiguous", kernel=kernel)
    rows = max(plan.lengths) // length
    shape = (rows, length, plan.heads, plan.head_dim)
    q, k, v = (torch.randn(shape, device=plan.device, dtype=plan.dtypes[-1], requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def forward() -> torch.Tensor:
        return attention(q, k, v, causal=causal)

    with torch.no_grad():
        alone = _seconds(plan, forward)
    both = _seconds(plan, lambda: forward().backward(dout))
    pairs = length * (length + 1) // 2 if causal else length**2
    product = 2 * rows * plan.heads * plan.head_dim * pairs
    return FORWARD * product / alone, BACKWARD * product / max(both - alone, 0.1 * both)


def _memory_rate(plan: Plan) -> float:
    """Measure the bytes per second of multiplying two vectors into a third, cycling over more than any cache holds.

    The output is preallocated, as the caching allocator's memory is after a model's first step.
    """
    number = max(3, UNCACHED // plan.stream_bytes)
    # Ones, because the pages of a vector of zeros may all be the same physical page.
    vectors = [torch.ones(plan.stream_bytes // 4, device=plan.device) for _ in range(number)]
    turns = itertools.cycle(zip(vectors, vectors[1:], vectors[2:], strict=False))

    def multiply() -> torch.Tensor:
        x, y, product = next(turns)
        return torch.mul(x, y, out=product)

    return 3 * plan.stream_bytes / _seconds(plan, multiply)


# Links


def _tiers(plan: Plan) -> list[dict[str, Any]]:
    ranks, size = _ranks(), plan.host_size
    hosts = [tuple(range(first, first + size)) for first in range(0, ranks, size)]
    tiers: list[dict[str, Any]] = []
    if size > 1:
        group = _group(hosts)
        inside = {**_kinds(plan, group, size), "overlap": _overlap(plan, group, size)}
        tiers.append({"name": "inside a host", "devices": size, **inside})
    if len(hosts) > 1:
        across = [tuple(range(place, ranks, size)) for place in range(size)]
        group = _group(across)
        alone = _kinds(plan, group if dist.get_rank() % size == 0 else None, len(hosts))
        together = _link(plan, group, len(hosts), "send")
        link = Link(**alone["send"])
        shared = max(link.bytes_per_second, size * together.bytes_per_second)
        outside = {**alone, "shared_bytes_per_second": shared, "overlap": _overlap(plan, group, len(hosts))}
        tiers.append({"name": "between hosts", "devices": 0, **outside})
    if not tiers:  # a single process sends nothing, but a hardware file must have a tier
        rate = {"alpha_seconds": 0.0, "bytes_per_second": 1e9}
        tiers.append({"name": "none", "devices": 1 if ranks > 1 else 0, **rate})
    return tiers


def _group(of: list[tuple[int, ...]]) -> dist.ProcessGroup:
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in of])
    assert group is not None
    return group


def _kinds(plan: Plan, group: dist.ProcessGroup | None, ranks: int) -> dict[str, dict[str, float]]:
    return {kind: asdict(_link(plan, group, ranks, kind)) for kind in ("send", "gather", "reduce", "exchange")}


def _link(plan: Plan, group: dist.ProcessGroup | None, ranks: int, kind: str) -> Link:
    """Measure alpha and rate from two message sizes; a rank without a group waits and gets the others' result."""
    steps = 1 if kind == "send" else ranks - 1
    small, large = (_seconds(plan, _transfer(plan, group, ranks, kind, nbytes), group) for nbytes in (SMALL, LARGE))
    rate = (LARGE - SMALL) / max(large - small, 1e-9)
    return Link(max(0.0, small - SMALL / rate) / steps, rate)


def _overlap(plan: Plan, group: dist.ProcessGroup, ranks: int) -> float:
    """Measure the fraction of a message's time that overlaps with matrix products of the same duration for free."""
    size = plan.sizes[-2]
    a, b = (torch.randn(size, size, device=plan.device).to(plan.dtypes[-1]) for _ in range(2))
    begin = _message(plan, group, ranks, LARGE)
    message = _seconds(plan, lambda: _finish(begin()), group)
    product = _seconds(plan, lambda: torch.mm(a, b))
    number = max(1, round(message / product))

    def compute() -> None:
        for _ in range(number):
            torch.mm(a, b)

    def both() -> None:
        works = begin()
        compute()
        _finish(works)

    alone, together = _seconds(plan, compute, group), _seconds(plan, both, group)
    return min(1.0, max(0.0, (message + alone - together) / min(message, alone)))


def _message(plan: Plan, group: dist.ProcessGroup, ranks: int, nbytes: int) -> Callable[[], list[dist.Work]]:
    """Return a call that starts to send `nbytes` to the group's next rank and to receive as many from the previous."""
    one = torch.zeros(nbytes, dtype=torch.uint8, device=plan.device)
    here, came = dist.get_rank(group), torch.empty_like(one)
    operations = [
        dist.P2POp(dist.isend, one, group=group, group_peer=(here + 1) % ranks),
        dist.P2POp(dist.irecv, came, group=group, group_peer=(here - 1) % ranks),
    ]
    return lambda: dist.batch_isend_irecv(operations)


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _transfer(
    plan: Plan, group: dist.ProcessGroup | None, ranks: int, kind: str, nbytes: int
) -> Callable[[], object] | None:
    """Return a call in which each rank of the group sends `nbytes`; None without a group."""
    if group is None:
        return None
    if kind == "send":
        begin = _message(plan, group, ranks, nbytes)
        return lambda: _finish(begin())
    one = torch.zeros(nbytes // (ranks - 1) // FLOAT32, device=plan.device)
    whole, gathered = one.repeat(ranks), one.repeat(ranks)
    if kind == "gather":
        return lambda: dist.all_gather_into_tensor(gathered, one, group=group)
    if kind == "reduce":
        return lambda: dist.reduce_scatter_tensor(one, whole, group=group)
    return lambda: dist.all_to_all_single(gathered, whole, group=group)


# Time


def _seconds(plan: Plan, call: Callable[[], object] | None, group: dist.ProcessGroup | None = None) -> float:
    """Return the mean time of a call over the ranks that have one; they start together. Collective over all ranks."""
    calls, elapsed = 0, 0.0
    if call is not None:
        call()
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    while call is not None and (calls < REPEATS if group else calls < LEAST_CALLS or elapsed < plan.seconds):
        call()
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)
        calls, elapsed = calls + 1, time.perf_counter() - begin
    found = torch.tensor([elapsed / calls, 1.0] if calls else [0.0, 0.0], dtype=torch.float64)
    if dist.is_initialized():
        found = found.to(plan.device)
        dist.all_reduce(found)
    return float(found[0] / found[1])


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _memory_bytes(plan: Plan) -> int:
    """Return the device's memory; on a CPU this rank's share of the host's."""
    if plan.device.type == "cuda":
        return torch.cuda.get_device_properties(plan.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // plan.host_size
