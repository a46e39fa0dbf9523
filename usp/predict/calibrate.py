"""Calibration of this machine: rates of matrix products, attention and memory, and alpha-beta of its links.

All ranks measure at the same time, because in training they compute at the same time: processes that share a memory
bus or a network adapter also share it here. Two message sizes give a link's alpha and beta; one rank sending by itself
and all ranks sending together give the bandwidth that the ranks of a host share. Everything is measured in turns
(`rounds`), and what no machine can do is refused rather than written to a file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from usp.attention import AttentionSpec, Device, select_kernel
from usp.attention.comm import all_gather, reduce_scatter
from usp.parallel import Link, ParallelDims, ParallelMesh, load_hardware, node_of
from usp.sp.sp_attention import UnifiedSPAttention

from .compute import BACKWARD, FORWARD, dtype_name
from .devices import device_memory_bytes
from .rounds import Estimate, OtherLoad, Rounds, Timed
from .traffic import FLOAT32

SMALL, LARGE = 1 << 10, 1 << 22  # bytes that a rank sends
CALLS = {SMALL: 8, LARGE: 1}  # in a turn
KINDS = ("send", "gather", "reduce", "exchange")
TOGETHER = "send from every device"
UNCACHED = 1 << 28  # bytes, more than any cache holds
WIDE, USELESS = 0.15, 0.6  # relative spread of a time: warned of, refused
TOLERANCE = 1.1  # a rate above its physical bound by less is measurement error
OTHERS = 0.1  # of the processors' time
MEMORY, TO_HOST, FROM_HOST, LAUNCHES = "memory", "copy to the host", "copy from the host", "launches"  # names of times
PINNED, ISSUED = 1 << 28, 256  # bytes of a copy, launches of a call
AGAIN = "Measure again while the machine does nothing else"
MASKS = {"": True, "_full": False}  # suffix of a curve's name: causal
PASSES = {"forward": FORWARD, "backward": BACKWARD}  # of attention: products


@dataclass(frozen=True)
class LinkTier:
    """The ranks that one tier of links connects."""

    name: str
    devices: int  # of the tier in a hardware file; 0 for any number
    group: dist.ProcessGroup  # of this rank
    ranks: int  # of the group
    host_size: int
    shared: bool = False  # whether the ranks of a host share the link; then one of them is measured by itself, too

    @staticmethod
    def all(ranks: int, host_size: int) -> list[LinkTier]:
        """Return the tiers that connect `ranks`, with `host_size` neighbours on each host. Collective."""
        hosts = [list(range(first, first + host_size)) for first in range(0, ranks, host_size)]
        across = [list(range(place, ranks, host_size)) for place in range(host_size)]
        every = (("inside a host", host_size, hosts, False), ("between hosts", 0, across, True))
        return [
            LinkTier(name, devices, dist.new_subgroups_by_enumeration(groups)[0], len(groups[0]), host_size, shared)  # pyright: ignore[reportArgumentType]
            for name, devices, groups, shared in every
            if len(groups[0]) > 1
        ]

    def timed(self, device: torch.device) -> Iterator[Timed]:
        """Yield the messages of both sizes and all kinds; of a shared link, from every rank as well."""
        first = not self.shared or dist.get_rank() % self.host_size == 0
        kinds = (*KINDS, *([TOGETHER] if self.shared else []))
        for kind, (nbytes, calls) in itertools.product(kinds, CALLS.items()):
            call = self._transfer(device, kind, nbytes) if first or kind == TOGETHER else None
            yield Timed(self._name(kind, nbytes), call, calls)

    def _name(self, kind: str, nbytes: int) -> str:
        return f"{self.name}, {kind} of {nbytes} bytes"

    def _transfer(self, device: torch.device, kind: str, nbytes: int) -> Callable[[], object]:
        """Return a call in which each rank of the group sends `nbytes`."""
        if kind in ("send", TOGETHER):
            begin = self._message(device, nbytes)
            return lambda: _finish(begin())
        shard = torch.zeros(nbytes // (self.ranks - 1) // FLOAT32, device=device)
        whole, gathered = shard.repeat(self.ranks), shard.repeat(self.ranks)
        if kind == "gather":
            return lambda: all_gather(gathered, shard, group=self.group)
        if kind == "reduce":
            return lambda: reduce_scatter(shard, whole, group=self.group)
        return lambda: dist.all_to_all_single(gathered, whole, group=self.group)

    def _message(self, device: torch.device, nbytes: int) -> Callable[[], list[dist.Work]]:
        """Return a call that starts to send `nbytes` to the next rank and to receive as many from the previous one."""
        data, here = torch.zeros(nbytes, dtype=torch.uint8, device=device), dist.get_rank(self.group)
        operations = [
            dist.P2POp(dist.isend, data, group=self.group, group_peer=(here + 1) % self.ranks),
            dist.P2POp(dist.irecv, torch.empty_like(data), group=self.group, group_peer=(here - 1) % self.ranks),
        ]
        return lambda: dist.batch_isend_irecv(operations)

    def overlapping(
        self, device: torch.device, product: Callable[[], object], seconds: float, times: Mapping[str, float]
    ) -> list[Timed]:
        """Return a message, products that take as long by `seconds` of one and `times` of `timed`, and both at once."""
        number = max(1, round(times[self._name(TOGETHER if self.shared else "send", LARGE)] / seconds))
        begin = self._message(device, LARGE)

        def compute() -> None:
            for _ in range(number):
                product()

        def both() -> None:
            works = begin()
            compute()
            _finish(works)

        calls = {"message": lambda: _finish(begin()), "products": compute, "both": both}
        return [Timed(f"{self.name}, overlap: {name}", call, CALLS[LARGE]) for name, call in calls.items()]

    def values(self, times: Mapping[str, float]) -> dict[str, Any]:
        """Return the tier of a hardware file from the times of everything above."""
        links = {kind: self._link(kind, times) for kind in KINDS}
        message, compute, both = (times[f"{self.name}, overlap: {name}"] for name in ("message", "products", "both"))
        tier = {"name": self.name, "devices": self.devices, **{kind: asdict(link) for kind, link in links.items()}}
        if self.shared:
            together = self.host_size * self._link(TOGETHER, times).bytes_per_second
            tier["shared_bytes_per_second"] = max(links["send"].bytes_per_second, together)
        return {**tier, "overlap": min(1.0, max(0.0, (message + compute - both) / min(message, compute)))}

    def _link(self, kind: str, times: Mapping[str, float]) -> Link:
        steps = self.ranks - 1 if kind in KINDS[1:] else 1
        small, large = (times[self._name(kind, nbytes)] for nbytes in (SMALL, LARGE))
        if large <= small:
            raise ValueError(
                f"{self._name(kind, LARGE)} took {large:.2g} s, and {SMALL} bytes {small:.2g} s: no bandwidth follows "
                f"from that. {AGAIN}"
            )
        rate = (LARGE - SMALL) / (large - small)
        return Link(max(0.0, small - SMALL / rate) / steps, rate)


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


@dataclass(frozen=True)
class Plan:
    """The sizes to measure."""

    device: torch.device
    host_size: int  # ranks per host, which are neighbours
    heads: int  # of attention
    head_dim: int
    sizes: tuple[int, ...]  # of square matrices
    lengths: tuple[int, ...]  # tokens of a sequence in attention
    stream_bytes: int  # of each operand in the memory bandwidth measurement
    rounds: int = 64  # turns of each measurement
    seconds: float = 0.005  # of a turn, without communication

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

    @property
    def trained(self) -> torch.dtype:
        return self.dtypes[-1]


@dataclass(frozen=True)
class CallTimes:
    """The seconds of every call, of these kernels and tiers."""

    times: Mapping[str, Estimate]  # over all ranks
    kernels: Mapping[str, str]  # the --attention-kernel of each by the name that has its rates
    tiers: list[LinkTier]
    other_load: float  # the fraction of the processors' time that other programs used


def measure(plan: Plan) -> CallTimes:
    """Time everything. Collective over the default process group, if there is one."""
    load, rounds = OtherLoad(), Rounds(plan.device, plan.rounds, plan.seconds)
    kernels, tiers = _kernels(plan), LinkTier.all(_ranks(), plan.host_size)
    sizes = itertools.product(plan.dtypes, plan.sizes)
    local = [Timed(_of_product(n, dtype), _product(plan, n, dtype)) for dtype, n in sizes]
    local += [*_attention(plan, kernels), _memory(plan), *_host(plan)]
    turns = rounds.turns([*local, *(timed for tier in tiers for timed in tier.timed(plan.device))])
    seconds = {name: each.seconds for name, each in rounds.estimates(turns).items()}
    n, dtype = plan.sizes[-2], plan.trained
    product = _product(plan, n, dtype), seconds[_of_product(n, dtype)]
    turns |= rounds.turns([timed for tier in tiers for timed in tier.overlapping(plan.device, *product, seconds)])
    return CallTimes(rounds.estimates(turns), kernels, tiers, load.share())


def contents(plan: Plan, name: str, measured: CallTimes) -> dict[str, Any]:
    """Return the contents of a hardware file; raise ValueError if the times that a rate follows from differ too much
    between turns, or a rate is above what is possible."""
    times = measured.times
    # Latencies depend on who runs first: they are warned of, like any wide spread.
    wide = {name: time for name, time in times.items() if time.spread > USELESS}
    if useless := [f"{name} ({time.spread:.0%})" for name, time in wide.items() if f" of {SMALL} bytes" not in name]:
        raise ValueError(
            f"times differ by more than {USELESS:.0%} between thirds of their turns: {', '.join(useless)}. {AGAIN}"
        )
    values = {"name": name, **_values(plan, measured, {name: time.seconds for name, time in times.items()})}
    if problems := _impossible(plan, values):
        raise ValueError("; ".join(problems) + f". {AGAIN}")
    spread = {name: round(time.spread, 3) for name, time in times.items()}
    return {**values, "measured": {"turns": plan.rounds, "other_load": round(measured.other_load, 3), "spread": spread}}


def cautions(found: Mapping[str, Any]) -> list[str]:
    """Return what to say about the trust in a calibration: its wide spreads, and other work on the machine."""
    measured = found["measured"]
    widest = sorted(measured["spread"].items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} ({spread:.0%})" for name, spread in widest if spread > WIDE)
    said = [f"times of a call differ by more than {WIDE:.0%} between turns: {listed}"] if listed else []
    if (share := measured["other_load"]) > OTHERS:
        said.append(f"other programs used {share:.0%} of the processors meanwhile: rates may be too low")
    return said


def _values(plan: Plan, measured: CallTimes, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the values of a hardware file."""
    products = {
        dtype: [(2 * n**3, 2 * n**3 / seconds[_of_product(n, dtype)]) for n in plan.sizes] for dtype in plan.dtypes
    }
    peaks = {dtype_name(dtype): max(rate for _, rate in rates) for dtype, rates in products.items()}
    peak = peaks[dtype_name(plan.trained)]

    host: dict[str, Any] = {}  # the system tells the size of its memory, and not how fast that is
    if LAUNCHES in seconds:
        host = {
            "host_devices": plan.host_size,
            "host_memory_bytes": psutil.virtual_memory().total,
            "host_link_bytes_per_second": PINNED / max(seconds[TO_HOST], seconds[FROM_HOST]),
            "launch_seconds": seconds[LAUNCHES] / ISSUED,
        }

    def curves(kernel: str) -> Iterator[tuple[str, list[list[float]]]]:
        for (kind, products), (suffix, causal) in itertools.product(PASSES.items(), MASKS.items()):
            points = []
            for length in plan.lengths:
                pairs = length * (length + 1) // 2 if causal else length**2  # visible ones
                flops = 2 * products * (max(plan.lengths) // length * plan.heads) * plan.head_dim * pairs
                points.append([length, flops / (seconds[f"{kernel} {kind}{suffix} of {length} tokens"] * peak)])
            yield f"{kind}{suffix}", points

    return {
        "source": [f"python -m usp calibrate: {_ranks()} ranks, {plan.host_size} on a host, torch {torch.__version__}"],
        "device": _device_name(plan),
        "compute_capability": Device.of(plan.device).capability,
        "peak_flops": peaks,
        "memory_bytes": device_memory_bytes(plan.device, plan.host_size),
        "memory_bytes_per_second": 3 * plan.stream_bytes / seconds[MEMORY],
        **host,
        # a hardware file must have a tier, and a single process sends nothing
        "tiers": [tier.values(seconds) for tier in measured.tiers]
        or [{"name": "none", "devices": 0, "alpha_seconds": 0.0, "bytes_per_second": 1e9}],
        "parallel_rings": plan.device.type == "cuda",
        "streams": plan.device.type == "cuda",
        "efficiency": {
            "matmul": [[flops, rate / peak] for flops, rate in products[plan.trained]],
            "attention": {kernel: dict(curves(kernel)) for kernel in measured.kernels},
        },
    }


def _impossible(plan: Plan, found: dict[str, Any]) -> list[str]:
    """Return the rates that no machine has; lower those that exceed a bound by no more than measurement error."""
    problems, memory, peaks = [], found["memory_bytes_per_second"], found["peak_flops"]
    node = node_of(_device_name(plan)) if plan.device.type == "cuda" else None
    sheet = {} if node is None else vars(load_hardware(node))  # the datasheet's rates
    known = sheet.get("peak_flops", {})
    limits = [(f"{dtype} products", peak, "the device's peak", known.get(dtype)) for dtype, peak in peaks.items()]
    limits.append(("memory", memory, "the device's", sheet.get("memory_bytes_per_second")))
    for tier, kind in itertools.product(found["tiers"], KINDS):
        if kind in tier:
            limits.append((f"{tier['name']}, {kind}", tier[kind]["bytes_per_second"], "memory", memory))
    for what, rate, bound, limit in limits:
        if limit is not None and rate > TOLERANCE * limit:
            problems.append(f"{what} measured at {rate:.3g} per second is faster than {bound} of {limit:.3g}")
    for kernel, curves in found["efficiency"]["attention"].items():
        for name, point in ((name, point) for name, curve in curves.items() for point in curve):
            if point[1] > TOLERANCE:
                problems.append(f"{kernel} {name} of {point[0]} tokens is {point[1]:.1f} times the fastest product")
            point[1] = min(point[1], 1.0)
    return problems


# What is timed


def _of_product(n: int, dtype: torch.dtype) -> str:
    return f"product of {n} in {dtype_name(dtype)}"


def _product(plan: Plan, n: int, dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(n, n, device=plan.device).to(dtype) for _ in range(2))
    return lambda: torch.mm(a, b)


def _kernels(plan: Plan) -> dict[str, str]:
    """Return the --attention-kernel of every kernel to measure, by the name that has its rates."""
    found: dict[str, str] = {}
    for name in ("flash4", "flash3", "flash2", "cudnn", "sdpa"):
        with suppress(ValueError):
            kernel, _ = select_kernel(name, AttentionSpec(), plan.device, plan.trained, plan.head_dim)
            found.setdefault(kernel.rated_as or kernel.name, name)
    return found


def _attention(plan: Plan, kernels: Mapping[str, str]) -> Iterator[Timed]:
    """Time `UnifiedSPAttention` on one rank, with as many tokens at every length, as in FlashAttention's benchmarks
    (arXiv 2307.08691, section 4.1): a batch of short sequences keeps a device as busy as one long sequence."""
    mesh = ParallelMesh.create(ParallelDims(dp_shard=_ranks()), device_type=plan.device.type)
    for rated, kernel in kernels.items():
        attention = UnifiedSPAttention(mesh, layout="contiguous", kernel=kernel)
        for suffix, causal in MASKS.items():
            for length in plan.lengths:
                for kind, call in zip(PASSES, _passes(plan, attention, length, causal), strict=True):
                    yield Timed(f"{rated} {kind}{suffix} of {length} tokens", call)


def _passes(plan: Plan, attention: UnifiedSPAttention, length: int, causal: bool) -> list[Callable[[], object]]:
    """Return a forward, and the backward of one forward that has run. A difference of times would double the noise."""
    shape = (max(plan.lengths) // length, length, plan.heads, plan.head_dim)
    qkv = [torch.randn(shape, device=plan.device, dtype=plan.trained, requires_grad=True) for _ in range(3)]
    out = attention(*qkv, causal=causal)
    dout = torch.randn_like(out)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return attention(*qkv, causal=causal)

    return [forward, lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True)]


def _memory(plan: Plan) -> Timed:
    """Time multiplying two vectors into a third, cycling over more than any cache holds; the output is preallocated, as
    the caching allocator's memory is after a model's first step."""
    number = max(3, UNCACHED // plan.stream_bytes)
    # Ones, because the pages of a vector of zeros may all be the same physical page.
    vectors = [torch.ones(plan.stream_bytes // 4, device=plan.device) for _ in range(number)]
    turns = itertools.cycle(zip(vectors, vectors[1:], vectors[2:], strict=False))

    def multiply() -> torch.Tensor:
        x, y, product = next(turns)
        return torch.mul(x, y, out=product)

    return Timed(MEMORY, multiply)


def _host(plan: Plan) -> Iterator[Timed]:
    """Time copies between a GPU and pinned memory, and launches, which tiny kernels do not hide."""
    if plan.device.type != "cuda":
        return
    there = torch.empty(PINNED, dtype=torch.uint8, device=plan.device)
    here, one = torch.empty(PINNED, dtype=torch.uint8, pin_memory=True), torch.zeros(1, device=plan.device)

    def launches() -> None:
        for _ in range(ISSUED):
            one.add_(1.0)

    yield Timed(TO_HOST, lambda: here.copy_(there, non_blocking=True))
    yield Timed(FROM_HOST, lambda: there.copy_(here, non_blocking=True))
    yield Timed(LAUNCHES, launches)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _device_name(plan: Plan) -> str:
    return torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else "CPU"
