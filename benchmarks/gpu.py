"""One GPU: the tests marked `gpu`, attention kernels, a rank's ring steps, and a training step with its MFU.

    python -m benchmarks.gpu                       # one GPU, at most eight minutes
    python -m benchmarks.gpu --device cpu --tiny   # the same code on toy sizes; saves nothing

Rates of kernels are also printed as the `attention` of a node file (parallel/cluster/nodes), as fractions of peak.
Attention FLOPs count only the visible half of a causal mask: 2 matmuls forward, 5 backward. MFU counts model FLOPs
(usp.model.facts), without recomputation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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
from benchmarks.harness.measure import Clock
from benchmarks.harness.record import Record, finish
from benchmarks.training_step import training_rows
from parallel import peak_flops

COLUMNS = ("what", "kernel", "tokens", "forward ms", "fwd + bwd ms", "TFLOP/s fwd", "TFLOP/s fwd + bwd", "note")
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
    note: str = ""

    def cells(self, sizes: Sizes) -> tuple[str, ...]:
        flops = 4 * self.pairs * sizes.heads * sizes.head_dim
        rates = (f"{factor * flops / ms / 1e9:.1f}" for factor, ms in ((1, self.forward), (3.5, self.step)))
        return (
            self.what,
            self.kernel,
            f"{self.tokens:,}",
            f"{self.forward:.2f}",
            f"{self.step:.2f}",
            *rates,
            self.note,
        )


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
        return RingAttention.apply(q, k, v, None, program, channel, compute_now)

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
            note = f"one kernel with the same work: {whole[0]:.2f} / {whole[1]:.2f} ms"
            yield Row(f"rank 0 of a ring of {ring}", name, tokens, pairs, *times, note)


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


def run_gpu_tests() -> str:
    """Run the tests marked `gpu`, and return the last line of their output."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    finished = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=180)
    lines = finished.stdout.strip().splitlines()
    return f"tests marked gpu (exit code {finished.returncode}): {lines[-1] if lines else 'no output'}"


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Tests, kernels, ring steps and a training step on one GPU.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the code; save nothing")
    parser.add_argument("--minutes", type=float, default=7.0, help="do not start measurements after this time")
    args = parser.parse_args()
    device = resolve_device(args.device, tiny=args.tiny)
    sizes = TINY if args.tiny else FULL
    clock = Clock(device, time.monotonic() + 60 * args.minutes)
    notes = [] if args.tiny else [run_gpu_tests()]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    measured: list[Row] = []

    def attention() -> Iterator[tuple[str, ...]]:
        for row in attention_rows(sizes, clock):
            measured.append(row)
            yield row.cells(sizes)

    rows = []
    for cells in chain(attention(), training_rows(clock, peak_flops(name), tiny=args.tiny)):
        rows.append(cells)
        print(*cells, sep="  ", flush=True)
    if (peak := peak_flops(name)) or args.tiny:
        available = [kernel for _, kernel in kernels_for(sizes, device) if isinstance(kernel, Kernel)]
        own = {kernel.name: kernel.name for kernel in available if not kernel.rated_as}
        others = {
            kernel.name: kernel.rated_as for kernel in available if kernel.rated_as and kernel.rated_as not in own
        }
        notes.append(f"rates for a node file: {node_rates(measured, {**own, **others}, sizes, peak or 1e12)}")
        print(notes[-1])
    notes += [f"{kernel}: {reason}" for kernel, reason in kernels_for(sizes, device) if isinstance(reason, str)]
    record = Record.of(
        "gpu",
        "One GPU: attention kernels, a rank's ring steps, and a training step",
        COLUMNS,
        rows,
        notes,
        [dict(zip(COLUMNS, row, strict=True)) for row in rows],
        extra=[("gpu", name), ("cuda", str(torch.version.cuda))],
    )
    finish(record, save=not args.tiny)


if __name__ == "__main__":
    main()
