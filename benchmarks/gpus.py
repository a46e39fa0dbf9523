"""Two or more GPUs: attention over all ranks against one device's, a layer of experts in one chunk and in more, and
steps that use all communicators at once.

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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.gpu.model import batch_of, configured, llama_8b, seeded
from benchmarks.gpu.setup import Setup
from benchmarks.harness.checks import Check
from tests.attention.dense import dense_attention, relative_l2
from usp import UnifiedSPAttention, shard_sequence
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.expert import ExpertRows, grouped_linear, mix_experts
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


def experts(setup: Setup) -> Iterator[Check]:
    """Time forward and backward of experts over all ranks by number of chunks; results are those of one. Collective."""
    tokens, hidden, inner, own, chosen = (64, 32, 64, 4, 2) if setup.tiny else (8192, 2048, 768, 16, 8)
    torch.manual_seed(dist.get_rank())
    number, found = own * dist.get_world_size(), dict[int, list[Tensor]]()
    choices = torch.rand(tokens, number).topk(chosen).indices.to(setup.device)
    tensors = [(tokens, hidden), (tokens, chosen), (own, inner, hidden), (own, hidden, inner)]
    leaves = [(setup.randn(*shape) / shape[-1] ** 0.5).requires_grad_() for shape in tensors]
    group = dist.group.WORLD
    assert group is not None
    for chunks in (1, 2, 4):
        for repeat in range(2 if setup.tiny else 20):
            if repeat == 1:  # the first one warms up
                setup.synchronize()
                begin = time.perf_counter()
            parts = [matrices.chunk(chunks) for matrices in leaves[2:]]

            def mlp(rows: Tensor, of: ExpertRows, chunk: int, parts: list[Any] = parts) -> Tensor:
                return grouped_linear(silu(grouped_linear(rows, parts[0][chunk], of)), parts[1][chunk], of)

            options: dict[str, Any] = {"num_experts": number, "group": group, "experts": mlp, "chunks": chunks}
            out = mix_experts(leaves[0], choices, leaves[1], **options)
            found[chunks] = [out, *torch.autograd.grad(out.square().sum(), leaves)]
        setup.synchronize()
        each = 1e3 * (time.perf_counter() - begin) / repeat
        yield Check(f"experts of {tokens:,} tokens in chunks: {chunks}, forward and backward", each, "ms")
        errors = [relative_l2(x, y) for x, y in zip(found[chunks], found[1], strict=True)]
        yield Check(f"experts in chunks: {chunks}, difference from one", max(errors), "", 0.0)


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
        for check in chain(parity(setup), experts(setup), steps(setup)):
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
