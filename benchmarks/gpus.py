"""Two or more GPUs: steps that use all communicators at once, exposed messages of a ring, bandwidths, reallocation.

    torchrun --nproc-per-node 8 -m benchmarks.gpus
    torchrun --nproc-per-node 2 -m benchmarks.gpus --device cpu --tiny     # the same code on toy sizes

Prints every figure beside what was expected beforehand; the exit code is 1 if one is out of tolerance.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from benchmarks.gpu.model import batch_of, configured, llama_8b, seeded
from benchmarks.gpu.ring import time_ring_rank
from benchmarks.gpu.setup import CAUSAL, Setup
from benchmarks.harness.checks import Check
from tests.attention.dense import dense_attention, relative_l2
from usp import UnifiedSPAttention, shard_sequence
from usp.attention import SequenceLayout, select_kernel
from usp.parallel import (
    Hardware,
    ParallelDims,
    ParallelMesh,
    ProcessGroups,
    Reallocation,
    gather_layout,
    load_hardware,
    local_tensor,
    node_of,
    plan_realloc,
)
from usp.predict.job import ONE_DOCUMENT
from usp.run.launch import Launch, choose_device, process_group
from usp.train.build import EngineRecipe, build_engine
from usp.train.resolve import resolve
from usp.train.step import train_step


@dataclass(frozen=True)
class Together:
    """The sections, each collective. hardware: of the device's node file; None if it has none."""

    setup: Setup
    hardware: Hardware | None
    host_ranks: int

    @property
    def device(self) -> torch.device:
        return self.setup.device

    @property
    def tiny(self) -> bool:
        return self.setup.tiny

    @cached_property
    def dims(self) -> ParallelDims:
        ulysses = 2 if dist.get_world_size() % 4 == 0 else 1
        return ParallelDims(ulysses=ulysses, ring=2)

    @property
    def link(self) -> float:
        """GB/s of the links between the ranks by the node file; nan without one."""
        if self.hardware is None:
            return math.nan
        inside = dist.get_world_size() <= self.host_ranks
        return self.hardware.tiers[0 if inside else -1].exchange.bytes_per_second / 1e9

    def slowest(self, call: Callable[[], object]) -> float:
        """Return the milliseconds of a call on the slowest rank."""
        dist.barrier()
        most = torch.tensor(self.setup.wall_milliseconds(call, 5), dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def parity(self) -> Iterator[Check]:
        """Compare attention over all ranks with one device's in float64, forward and backward."""
        world_size, dtype = dist.get_world_size(), torch.float32 if self.tiny else torch.bfloat16
        tokens = 64 * world_size
        torch.manual_seed(0)
        whole = [torch.randn(1, tokens, heads, 32).to(self.device, dtype) for heads in (4, 2, 2, 4)]
        exact = [x.double().requires_grad_() for x in whole[:3]]
        seen = torch.ones(1, tokens, tokens, dtype=torch.bool, device=self.device).tril()
        out = dense_attention(exact[0], exact[1], exact[2], seen)
        wanted = [out, *torch.autograd.grad(out, exact, whole[3].double())]
        for ring in (world_size, 1):
            mesh = ParallelMesh.create(ParallelDims(ring=ring, ulysses=world_size // ring), self.device.type)
            *leaves, dout = (shard_sequence(x, mesh).requires_grad_() for x in whole)
            mine = UnifiedSPAttention(mesh)(*leaves)
            results = [mine, *torch.autograd.grad(mine, leaves, dout)]
            errors = [relative_l2(x, shard_sequence(y, mesh)) for x, y in zip(results, wanted, strict=True)]
            worst = torch.tensor(max(errors), device=self.device)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            what = f"ring of {ring} x ulysses of {world_size // ring}: error of out, dq, dk and dv"
            yield Check(what, float(worst), "", 1e-6 if self.tiny else 1e-2, 0, 1)

    def steps(self) -> Iterator[Check]:
        """Train with FSDP2, ring and Ulysses at once: communicators in another order on some rank would hang."""
        changes = {"sp_ring": self.dims.ring, "sp_ulysses": self.dims.ulysses}
        tokens = self.setup.tokens("512K" if self.tiny else "16K")
        config = configured(self.setup, llama_8b(self.setup, 4), tokens, **changes)
        resolved = resolve(config, dist.get_world_size(), weights=False)
        _, model, _, dims = resolved.valid([])
        config, mesh = resolved.largest.config, ParallelMesh.create(dims, self.device.type)
        recipe = EngineRecipe.of(config, model)
        engine = build_engine(recipe, mesh, self.device, seeded)
        local = batch_of(config, model.vocab_size, mesh, ONE_DOCUMENT, self.device)
        number, begin = (3 if self.tiny else 200), time.perf_counter()
        norms = [train_step(engine, mesh, local, config, 1e-4)[1] for _ in range(number)]
        self.setup.synchronize()
        each = 1e3 * (time.perf_counter() - begin) / number
        yield Check(
            f"{number} steps of {config.seq_len:,} tokens, each", each if math.isfinite(sum(norms)) else math.inf
        )

    def exposed(self) -> Iterator[Check]:
        """Compare a ring's passes with the same kernels without messages."""
        world_size, (num_heads, kv_heads, head_dim) = dist.get_world_size(), self.setup.heads
        mesh = ParallelMesh.create(ParallelDims(ring=world_size), self.device.type)
        attention = UnifiedSPAttention(mesh)
        for tokens in map(self.setup.tokens, ("2K", "8K", "32K")):
            kernel, _ = select_kernel("auto", CAUSAL, self.device, self.setup.dtype, head_dim)
            layout = SequenceLayout("zigzag", tokens * world_size, ring=world_size)
            silent = time_ring_rank(self.setup, kernel, layout)[1]
            shapes = (num_heads, kv_heads, kv_heads)
            q, k, v = (self.setup.randn(1, tokens, heads, head_dim).requires_grad_() for heads in shapes)
            both = self.slowest(lambda q=q, k=k, v=v: torch.autograd.grad(attention(q, k, v).sum(), (q, k, v)))  # type: ignore[misc]
            what = f"ring of {world_size}, {tokens:,} tokens a rank, both passes, of the kernels alone"
            yield Check(what, both / silent, "", math.nan if self.tiny else 1.05, 0.8, 1.2)

    def bandwidth(self) -> Iterator[Check]:
        """Time an all-to-all and a ring's messages."""
        world_size, size = dist.get_world_size(), 1 << (16 if self.tiny else 28)
        x = torch.zeros(size, dtype=torch.uint8, device=self.device)
        received = torch.empty_like(x)
        milliseconds = self.slowest(lambda: dist.all_to_all_single(received, x))
        rate = size * (world_size - 1) / world_size / milliseconds / 1e6
        yield Check("all-to-all, sent by a rank", rate, "GB/s", self.link, 0.6, 1.1)
        after, before = (dist.get_rank() + 1) % world_size, (dist.get_rank() - 1) % world_size

        def hop() -> None:
            posts = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, received, before)]
            for work in dist.batch_isend_irecv(posts):
                work.wait()

        yield Check("a ring's messages, sent by a rank", size / self.slowest(hop) / 1e6, "GB/s", self.link, 0.6, 1.1)

    def reallocation(self) -> Iterator[Check]:
        """Time weights that move from a layout sharded by columns to one sharded by rows."""
        rows, layers = (64, 2) if self.tiny else (8192, 16)
        groups, mesh = ProcessGroups(), ParallelMesh.create(ParallelDims(), self.device.type)
        fsdp = mesh.device_mesh("fsdp")

        def sharded(dim: int, value: float) -> dict[str, Tensor]:
            shape = [rows, rows]
            shape[dim] //= dist.get_world_size()
            part = torch.full(shape, value, device=self.device, dtype=torch.bfloat16)
            return {f"w{i}": DTensor.from_local(part.clone(), fsdp, [Shard(dim)]) for i in range(layers)}

        held, targets = sharded(1, 1.0), sharded(0, 0.0)
        plan = plan_realloc(
            gather_layout(held), gather_layout(targets), bucket_bytes=64 << 20, ranks_per_host=self.host_ranks
        )
        move = Reallocation(plan, groups, self.device)
        milliseconds = self.slowest(lambda: move.run(held, targets))
        wrong = any(bool((local_tensor(x) != 1).any()) for x in targets.values())
        nbytes = 2 * layers * rows**2 / dist.get_world_size() * (1 - 1 / dist.get_world_size())
        rate = nbytes / milliseconds / 1e6 if not wrong else math.inf
        yield Check("reallocation, columns to rows, sent by a rank", rate, "GB/s", 0.7 * self.link, 0.7, 1.4)

    def sections(self) -> dict[str, Callable[[], Iterator[Check]]]:
        return {
            "parity": self.parity,
            "steps": self.steps,
            "exposed messages": self.exposed,
            "bandwidth": self.bandwidth,
            "reallocation": self.reallocation,
        }


def run(device: torch.device, tiny: bool, host_ranks: int) -> list[tuple[str, Check]]:
    """Run all sections, and return their checks; an error ends the run. Collective."""
    node = node_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    hardware, found = load_hardware(node) if node else None, list[tuple[str, Check]]()
    with tempfile.TemporaryDirectory() as folder:
        together = Together(Setup(device, tiny, Path(folder)), hardware, host_ranks)
        for section, checks in together.sections().items():
            for check in checks():
                found.append((section, check))
                if dist.get_rank() == 0:
                    print(f"{section}:", *check.cells(), sep="  ", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the code")
    args = parser.parse_args()
    launch = Launch.from_environment(os.environ)
    device = choose_device(args.device, launch)
    with process_group(launch, device):
        checks = run(device, args.tiny, launch.local_world_size)
    sys.exit(not all(check.right for _, check in checks))


if __name__ == "__main__":
    main()
