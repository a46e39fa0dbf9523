"""Two or more GPUs: attention over all ranks against one device's, and steps that use all communicators at once.

    torchrun --nproc-per-node 8 -m benchmarks.gpus
    torchrun --nproc-per-node 2 -m benchmarks.gpus --device cpu --tiny     # the same code on toy sizes

The exit code is 1 if a figure is out of tolerance.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.model import batch_of, configured, llama_8b, seeded
from benchmarks.gpu.setup import Setup
from benchmarks.harness.checks import Check
from tests.attention.dense import dense_attention, relative_l2
from usp import UnifiedSPAttention, shard_sequence
from usp.parallel import ParallelDims, ParallelMesh
from usp.predict.job import ONE_DOCUMENT
from usp.run.launch import Launch, choose_device, process_group
from usp.train.build import EngineRecipe, build_engine
from usp.train.resolve import resolve
from usp.train.step import backward


def parity(setup: Setup) -> Iterator[Check]:
    """Compare attention over all ranks with one device's in float64, forward and backward. Collective."""
    world_size, dtype = dist.get_world_size(), torch.float32 if setup.tiny else torch.bfloat16
    tokens = 64 * world_size
    torch.manual_seed(0)
    whole = [torch.randn(1, tokens, heads, 32).to(setup.device, dtype) for heads in (4, 2, 2, 4)]
    exact = [x.double().requires_grad_() for x in whole[:3]]
    seen = torch.ones(1, tokens, tokens, dtype=torch.bool, device=setup.device).tril()
    out = dense_attention(exact[0], exact[1], exact[2], seen)
    wanted = [out, *torch.autograd.grad(out, exact, whole[3].double())]
    for ring in (world_size, 1):
        mesh = ParallelMesh.create(ParallelDims(ring=ring, ulysses=world_size // ring), setup.device.type)
        *leaves, dout = (shard_sequence(x, mesh).requires_grad_() for x in whole)
        mine = UnifiedSPAttention(mesh)(*leaves)
        results = [mine, *torch.autograd.grad(mine, leaves, dout)]
        errors = [relative_l2(x, shard_sequence(y, mesh)) for x, y in zip(results, wanted, strict=True)]
        worst = torch.tensor(max(errors), device=setup.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        what = f"ring of {ring} x ulysses of {world_size // ring}: error of out, dq, dk and dv"
        yield Check(what, float(worst), "", 1e-6 if setup.tiny else 1e-2, 0, 1)


def steps(setup: Setup) -> Iterator[Check]:
    """Train with FSDP2, ring and Ulysses at once: communicators in another order on a rank would hang. Collective."""
    changes = {"sp_ring": 2, "sp_ulysses": 2 if dist.get_world_size() % 4 == 0 else 1}
    tokens = setup.tokens("512K" if setup.tiny else "16K")
    resolved = resolve(configured(setup, llama_8b(setup, 4), tokens, **changes), dist.get_world_size(), weights=False)
    _, model, _, dims = resolved.valid([])
    config, mesh = resolved.largest.config, ParallelMesh.create(dims, setup.device.type)
    engine = build_engine(EngineRecipe.of(config, model), mesh, setup.device, seeded)
    local = batch_of(config, model.vocab_size, mesh, ONE_DOCUMENT, setup.device)
    number, begin = (3 if setup.tiny else 200), time.perf_counter()
    norms = []
    for _ in range(number):
        backward(engine, mesh, local, config)
        norms.append(engine.step(1e-4, config.max_grad_norm))
    setup.synchronize()
    each = 1e3 * (time.perf_counter() - begin) / number
    yield Check(f"{number} steps of {tokens:,} tokens, each", each if math.isfinite(sum(norms)) else math.inf, "ms")


def run(device: torch.device, tiny: bool) -> list[Check]:
    """Return all checks; an error ends the run. Collective."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(device, tiny, Path(folder))
        for check in chain(parity(setup), steps(setup)):
            found.append(check)
            if dist.get_rank() == 0:
                print(*check.cells(), sep="  ", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the code")
    args = parser.parse_args()
    launch = Launch.from_environment(os.environ)
    device = choose_device(args.device, launch)
    with process_group(launch, device):
        checks = run(device, args.tiny)
    sys.exit(not all(check.right for check in checks))


if __name__ == "__main__":
    main()
