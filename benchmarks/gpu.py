"""One GPU: tests, attention kernels, a rank's ring steps, training steps, decoding, offloading, process groups.

    python -m benchmarks.gpu                       # one GPU, about ten minutes
    python -m benchmarks.gpu --device cpu --tiny   # the same code on toy sizes; saves nothing

Every figure is printed beside what was expected before any GPU had run it: the rates of the node file, and estimates.
The exit code is 1 if one is out of tolerance. Figures are written to a log as they come; a second run goes on with the
sections that have not ended.

Rates of kernels are also printed as the `attention` of a node file (parallel/cluster/nodes), as fractions of peak.
Attention FLOPs count only the visible half of a causal mask: 2 matmuls forward, 5 backward. MFU counts model FLOPs
(usp.model.facts), without recomputation.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attention import (
    KERNEL_NAMES,
    AttentionSpec,
    Channel,
    Kernel,
    RingProgram,
    SequenceLayout,
    compute_now,
    ring_schedule,
    select_kernel,
)
from attention.comm import Pending
from attention.ring import RingAttention
from benchmarks import gpu_steps
from benchmarks.harness.checks import COLUMNS, Check, Log
from benchmarks.harness.measure import Clock
from benchmarks.harness.record import Record, finish
from parallel import Hardware, load_hardware, node_of, peak_flops
from tests.attention.dense import dense_attention, relative_l2

SPEC, UNMASKED = AttentionSpec(causal=True), AttentionSpec(causal=False)
BLOCKS = {"one block": "", "one block without a mask": "_full"}  # and the suffix of their rates in a node file


@dataclass(frozen=True)
class Sizes:
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    ring: int = 4


FULL = Sizes(lengths=(2048, 8192, 32768), heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
TINY = Sizes(lengths=(128, 256), heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)


@dataclass(frozen=True)
class Row:
    what: str
    kernel: str
    tokens: int
    pairs: float  # visible (query, key) pairs
    forward: float
    step: float
    whole: tuple[float, float] | None = None  # of one kernel with the same work

    def checks(self, sizes: Sizes, hardware: Hardware | None, rated_as: str) -> Iterator[Check]:
        """Yield the rates of both passes, beside those of a node file."""
        flops = 4 * self.pairs * sizes.heads * sizes.head_dim
        passes = {"forward": (flops, self.forward), "backward": (2.5 * flops, max(self.step - self.forward, 1e-9))}
        for name, (work, milliseconds) in passes.items():
            expected = math.nan
            if hardware and self.what in BLOCKS and rated_as in hardware.attention:
                options = {"backward": name == "backward", "full": bool(BLOCKS[self.what])}
                expected = work / hardware.attention_seconds(rated_as, work, self.tokens, "bfloat16", **options) / 1e12
            what = f"{self.what}, {self.kernel}, {self.tokens:,} tokens, {name}"
            yield Check(what, work / milliseconds / 1e9, "TFLOP/s", expected, 0.75, 1.35)


def random_tensors(sizes: Sizes, queries: int, keys: int, device: torch.device) -> list[Tensor]:
    """Return random q, k, v, dout of shape (tokens, heads, head dim)."""
    shapes = ((queries, sizes.heads), (keys, sizes.kv_heads), (keys, sizes.kv_heads), (queries, sizes.heads))
    return [torch.randn(*shape, sizes.head_dim, device=device, dtype=sizes.dtype) for shape in shapes]


def kernels_for(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Kernel | str]]:
    """Yield every backend by name, or why it refuses; without the einsum reference, which is not competitive."""
    for name in KERNEL_NAMES:
        if name in ("auto", "flash", "reference"):
            continue
        try:
            kernel, _ = select_kernel(name, SPEC, device, sizes.dtype, sizes.head_dim)
        except ValueError as error:
            yield name, str(error)
        else:
            yield kernel.name, kernel


class SilentChannel(Channel):
    """A ring axis without a network: messages complete immediately and leave buffers unchanged."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size = size

    def post(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Pending:
        return Pending()


def time_ring_rank(
    sizes: Sizes, kernel: Kernel, layout: SequenceLayout, clock: Clock, spec: AttentionSpec = SPEC
) -> tuple[float, float]:
    """Return the time of all ring steps of rank 0 in ms: (forward, forward + backward)."""
    program = RingProgram.lower(ring_schedule(layout, spec, 1, 0), spec, kernel, clock.device, sizes.dtype)
    q, k, v, dout = random_tensors(sizes, layout.ring_len, layout.ring_len, clock.device)
    leaves, channel = [x.requires_grad_() for x in (q, k, v)], SilentChannel(layout.ring)

    def forward() -> Tensor:
        return RingAttention.apply(q, k, v, None, program, channel, compute_now)[0]

    return time_passes(forward, leaves, dout, clock)


def time_sdpa(sizes: Sizes, tokens: int, clock: Clock) -> tuple[float, float]:
    q, k, v, dout = (x.unsqueeze(0).transpose(1, 2) for x in random_tensors(sizes, tokens, tokens, clock.device))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return time_passes(forward, leaves, dout, clock)


def time_passes(
    forward: Callable[[], Tensor], leaves: Sequence[Tensor], dout: Tensor, clock: Clock
) -> tuple[float, float]:
    """Return (forward, forward + backward) in ms."""
    with torch.no_grad():
        milliseconds = clock.milliseconds(forward)
    return milliseconds, clock.milliseconds(lambda: torch.autograd.grad(forward(), leaves, dout))


def attention_rows(sizes: Sizes, clock: Clock) -> Iterator[Row]:
    """Time torch SDPA and every kernel on one block, then one rank's ring steps against one call with equal work."""
    available = dict(kernels_for(sizes, clock.device))
    kernels = {name: kernel for name, kernel in available.items() if isinstance(kernel, Kernel)}
    for tokens in sizes.lengths:
        pairs = tokens * (tokens + 1) / 2
        if clock.expired:
            return
        yield Row("torch SDPA", "torch's choice", tokens, pairs, *time_sdpa(sizes, tokens, clock))
        for name, kernel in kernels.items():
            for what, spec, visible in zip(BLOCKS, (SPEC, UNMASKED), (pairs, float(tokens**2)), strict=True):
                times = time_ring_rank(sizes, kernel, SequenceLayout("contiguous", tokens), clock, spec)
                yield Row(what, name, tokens, visible, *times)
    ring = sizes.ring
    for tokens in sizes.lengths:
        for name, kernel in kernels.items():
            if clock.expired:
                return
            layout = SequenceLayout("zigzag", tokens * ring, ring=ring)
            steps = ring_schedule(layout, SPEC, 1, 0).steps
            pairs = float(sum(task.visible() for step in steps for task in step.tasks))
            times = time_ring_rank(sizes, kernel, layout, clock)
            # A causal square with equally many visible pairs: side * (side + 1) / 2 = pairs.
            side = round((2 * pairs) ** 0.5)
            whole = time_ring_rank(sizes, kernel, SequenceLayout("contiguous", side), clock)
            yield Row(f"rank 0 of a ring of {ring}", name, tokens, pairs, *times, whole)


def node_rates(rows: Sequence[Row], rated_as: Mapping[str, str], sizes: Sizes, peak: float) -> str:
    """Return the JSON of each kernel's rates by length, as node files have them; `rated_as` are their names there."""
    kernels: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.what in BLOCKS and row.kernel in rated_as:
            flops = 4e3 * row.pairs * sizes.heads * sizes.head_dim / peak
            passes = {"forward": flops / row.forward, "backward": 2.5 * flops / max(row.step - row.forward, 1e-9)}
            for name, rate in passes.items():
                kernels[rated_as[row.kernel]][name + BLOCKS[row.what]].append([row.tokens, round(rate, 3)])
    return json.dumps(kernels)


def resolve_device(name: str, *, tiny: bool) -> torch.device:
    """Return the device, or exit if it is missing or too slow for the sizes."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"benchmarks.gpu needs a CUDA GPU, but torch {torch.__version__} finds none (torch.cuda.is_available() is "
            f"False): run it on a machine with a GPU, or try the code with --device cpu --tiny"
        )
    if device.type != "cuda" and not tiny:
        raise SystemExit(f"--device {name} is only supported for trying the code: add --tiny")
    return device


@dataclass(frozen=True)
class Kernels:
    """The sections of attention. hardware: of the device's node file; None if it has none."""

    clock: Clock
    sizes: Sizes
    hardware: Hardware | None
    tiny: bool

    @property
    def kernels(self) -> dict[str, Kernel]:
        named = kernels_for(self.sizes, self.clock.device)
        return {name: kernel for name, kernel in named if isinstance(kernel, Kernel)}

    def rated_as(self, name: str) -> str:
        kernel = self.kernels.get(name)
        return (kernel.rated_as or name) if kernel else ""

    def tests(self) -> Iterator[Check]:
        """Run the tests marked `gpu`."""
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", "tests/attention"]
        tests = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
        lines = tests.stdout.strip().splitlines() or ["no output"]
        yield Check(f"exit code of the tests marked gpu: {lines[-1]}", 1 + tests.returncode, "", 1, 1, 1)

    def parity(self) -> Iterator[Check]:
        """Compare every kernel, forward and backward, with float64."""
        tokens, spec, half = 96 if self.tiny else 517, SPEC, self.sizes.dtype != torch.float32
        q, k, v, dout = random_tensors(self.sizes, tokens, tokens, self.clock.device)
        exact = [x.double().unsqueeze(0).requires_grad_() for x in (q, k, v)]
        seen = torch.ones(1, tokens, tokens, dtype=torch.bool, device=self.clock.device).tril()
        out = dense_attention(exact[0], exact[1], exact[2], seen)
        wanted = [out, *torch.autograd.grad(out, exact, dout.double().unsqueeze(0))]
        for name, kernel in self.kernels.items():
            layout, leaves = SequenceLayout("contiguous", tokens), [x.detach().requires_grad_() for x in (q, k, v)]
            schedule = ring_schedule(layout, spec, 1, 0)
            program = RingProgram.lower(schedule, spec, kernel, self.clock.device, self.sizes.dtype)
            mine = RingAttention.apply(*leaves, None, program, SilentChannel(1), compute_now)[0]
            results = [mine, *torch.autograd.grad(mine, leaves, dout)]
            worst = max(relative_l2(x, y.squeeze(0)) for x, y in zip(results, wanted, strict=True))
            yield Check(f"{name}: error of out, dq, dk and dv", worst, "", 1e-2 if half else 1e-6, 0, 1)

    def rates(self) -> Iterator[Check]:
        """Time every kernel on one block, and a rank's ring steps against one kernel with the same work."""
        measured = list[Row]()
        for row in attention_rows(self.sizes, self.clock):
            measured.append(row)
            yield from row.checks(self.sizes, self.hardware, self.rated_as(row.kernel))
            for name, mine, whole in zip(
                ("forward", "both passes"), (row.forward, row.step), row.whole or (), strict=False
            ):
                expected = math.nan if self.tiny else 1.1 if row.tokens < 32768 else 1.05
                what = f"{row.what}, {row.kernel}, {row.tokens:,} tokens, {name}, of one kernel"
                yield Check(what, mine / whole, "", expected, 0.8, 1.15)
        peak = peak_flops(device_name(self.clock.device)) or 1e12
        rated = {name: self.rated_as(name) for name in self.kernels}
        print(f"rates for a node file: {node_rates(measured, rated, self.sizes, peak)}")

    def starting_posts(self) -> Iterator[Check]:
        """Time how late a message's kernel starts beside an attention kernel, on streams of both priorities."""
        if self.clock.device.type != "cuda":
            return
        tokens = self.sizes.lengths[-1]
        tensors = random_tensors(self.sizes, tokens, tokens, self.clock.device)
        q, k, v, _ = (x.unsqueeze(0).transpose(1, 2) for x in tensors)
        for priority in (0, -1):
            side, begin = torch.cuda.Stream(self.clock.device, priority=priority), torch.cuda.Event(enable_timing=True)
            started = torch.cuda.Event(enable_timing=True)
            for _ in range(3):
                begin.record()
                side.wait_stream(torch.cuda.current_stream())
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                with torch.cuda.stream(side):
                    torch.empty(1 << 20, device=self.clock.device).fill_(1.0)
                    started.record()
                torch.cuda.synchronize(self.clock.device)
            late, name = 1e3 * begin.elapsed_time(started), "high" if priority else "normal"
            yield Check(f"a kernel beside attention ends after its post, {name} priority", late, "us", 60, 0, 1.5)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def kernel_sections(kernels: Kernels) -> dict[str, Callable[[], Iterable[Check]]]:
    before = {} if kernels.tiny else {"tests": kernels.tests}
    parts = {"parity": kernels.parity, "kernels and ring steps": kernels.rates, "late starts": kernels.starting_posts}
    return {**before, **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tests, kernels, ring steps and training steps on one GPU.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the code; save nothing")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="do not start measurements of kernels after this time"
    )
    parser.add_argument("--log", type=Path, default=Path("gpu.jsonl"), help="figures so far; go on from there")
    parser.add_argument("--sections", nargs="*", help="only these")
    args = parser.parse_args()
    device = resolve_device(args.device, tiny=args.tiny)
    clock, name = Clock(device, time.monotonic() + 60 * args.minutes), device_name(device)
    hardware = load_hardware(node) if device.type == "cuda" and (node := node_of(name)) else None
    log = Log(None if args.tiny else args.log)
    with tempfile.TemporaryDirectory() as folder:
        kernels = Kernels(clock, TINY if args.tiny else FULL, hardware, args.tiny)
        sections = kernel_sections(kernels) | gpu_steps.sections(gpu_steps.Steps(clock, args.tiny, Path(folder)))
        if args.sections:
            sections = {section: checks for section, checks in sections.items() if section in args.sections}
        for section, check in log.run(sections):
            print(f"{section}:", *check.cells(), sep="  ", flush=True)
    rows = [(section, *check.cells()) for section, check in log.checks]
    notes = [f"{kernel}: {reason}" for kernel, reason in kernels_for(kernels.sizes, device) if isinstance(reason, str)]
    data = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    question = "One GPU: figures against those expected beforehand"
    extra = [("gpu", name), ("cuda", str(torch.version.cuda))]
    finish(Record.of("gpu", question, COLUMNS, rows, notes, data, extra=extra), save=not args.tiny)
    sys.exit(not log.right)


if __name__ == "__main__":
    main()
