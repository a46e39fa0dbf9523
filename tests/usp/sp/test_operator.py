"""Attention as an operator of a compiled graph is the attention of eager code, with every option."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.e2e.processes import ROOT
from tests.harness.ranks import RankPool
from usp import Mask, UnifiedSPAttention
from usp.attention import KeepResults
from usp.parallel import ParallelDims, ParallelMesh

pytestmark = pytest.mark.compiles

B, S, H, V = 2, 96, 8, 4
CU_SEQLENS = torch.tensor([[0, 17, 50, 96], [0, 40, 96, 96]])
CASES: list[dict[str, Any]] = [
    {"causal": False, "softcap": 3.0, "scale": 0.7},
    {"window": (12, 0), "sinks": True, "cu_seqlens": CU_SEQLENS},
    {"mask": {"chunk": 16, "cu_seqlens": CU_SEQLENS}},
    {"mask": {"chunk": 40}},
    {"mask": {"prefix": torch.tensor([[9, 0, 5], [30, 1, 0]]), "cu_seqlens": CU_SEQLENS}},
    {"mask": {"cu_seqlens": torch.tensor([0, 5, 9, 21]), "tree": torch.tensor([-1, 0, 0])}},
]


def inputs(heads: int, kv_heads: int, rank: int) -> list[Tensor]:
    generator, tokens = torch.Generator().manual_seed(rank), S // dist.get_world_size()
    shapes = [(B, heads, tokens, H), (B, kv_heads, tokens, H), (B, kv_heads, tokens, V), (heads,)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


class Layer(nn.Module):
    """A layer around attention, with inputs that are not contiguous."""

    def __init__(self, attention: UnifiedSPAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Tensor, sinks: bool = False, mask: Any = None, **options: Any
    ) -> Tensor:
        q, k, v = ((x * 2).transpose(1, 2) for x in (q, k, v))
        given = None if mask is None else Mask(**mask)
        return self.attention(q, k, v, given, sinks=logits if sinks else None, **options).tanh()


def differences(dims: ParallelDims, heads: int, kv_heads: int) -> list[tuple[float, int, int, int]]:
    """Return for each case the largest difference of output or gradients, graphs, graph breaks and excess bytes."""
    from torch._dynamo.utils import counters

    mesh = ParallelMesh.create(dims)
    found = []
    groups = min(2, max(1, kv_heads // dims.ulysses)) if dims.ulysses > 1 else 1
    for options in CASES:
        results, sent = [], []
        for backend in ("", "aot_eager"):
            layer = Layer(UnifiedSPAttention(mesh, "zigzag", head_groups=groups))
            torch.compiler.reset()
            counters.clear()
            run = torch.compile(layer, backend=backend) if backend else layer
            tensors = inputs(heads, kv_heads, dist.get_rank())
            with torch.no_grad():
                alone = run(*tensors, **options)
            out = run(*tensors, **options)
            out.square().sum().backward()
            used = tensors if options.get("sinks") else tensors[:3]
            results.append([alone, out.detach(), *(x.grad for x in used)])
            sent.append(layer.attention.sent_bytes)
        worst = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
        stats = counters["stats"]["unique_graphs"], len(counters["graph_break"])
        found.append((worst, *stats, sent[1] - sent[0]))
    return found


@pytest.mark.slow
def test_every_option_is_that_of_eager_attention(ranks: RankPool, exhaustive: bool) -> None:
    grids = [(ParallelDims(ulysses=2), 5, 5), (ParallelDims(ulysses=2, ring=2), 5, 5), (ParallelDims(ring=4), 4, 2)]
    for dims, heads, kv_heads in grids if exhaustive else grids[:1]:
        for found in ranks.run(differences, dims.ulysses * dims.ring, dims, heads, kv_heads):
            # One graph without gradients, and one with.
            assert found == [(0.0, 2, 0, 0)] * len(CASES)


def one_after_the_other() -> list[float]:
    """Return the differences of layers that run the same code on different grids."""
    torch.compiler.reset()
    found = []
    for dims in (ParallelDims(ring=2), ParallelDims(ulysses=2)):
        layer = Layer(UnifiedSPAttention(ParallelMesh.create(dims), "zigzag"))
        gradients = []
        for run in (layer, torch.compile(layer, backend="aot_eager")):
            tensors = inputs(8, 8, dist.get_rank())
            run(*tensors).square().sum().backward()
            gradients.append(torch.cat([x.grad.flatten() for x in tensors[:3]]))
        found.append(float((gradients[0] - gradients[1]).abs().max()))
    with pytest.raises(ValueError, match="needs a query head on every rank: ulysses=2 exceeds the 1"):
        run(*inputs(1, 1, dist.get_rank()))
    with pytest.raises(ValueError, match="chunk=0 must be at least 1 token"):
        layer(*inputs(8, 8, dist.get_rank()), mask={"chunk": 0})
    return found


def test_other_grids_have_other_graphs(ranks: RankPool) -> None:
    assert ranks.run(one_after_the_other, 2) == [[0.0] * 2] * 2


def kept_results() -> float:
    """Return the difference of a kept result, after a graph that writes over its operator's, from the true one."""
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims()))
    q, k, v = (torch.randn(2, 24, 4, 8) for _ in range(3))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v).cos() @ v.mT

    keep = KeepResults()
    # compiled without trying the instruction sets, or compiling the headers, first
    quickly = {"cpp.simdlen": 1, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}
    with torch.no_grad(), attention.keeping(keep):
        torch.compile(layer, options=quickly)(q, k, v)
    with attention.keeping(keep.replay()):
        kept = attention(q, k, v)
    return float((kept - attention(q, k, v)).abs().max())


@pytest.mark.slow
def test_graphs_never_write_over_kept_results(ranks: RankPool) -> None:
    assert ranks.run(kept_results, 1) == [0.0]


@pytest.mark.exhaustive
def test_no_rank_prints_that_a_name_of_torch_is_deprecated() -> None:
    """In an interpreter of its own, because torch says it once, where it is imported."""
    code = """
import warnings
warnings.simplefilter("error", FutureWarning)
import torch.distributed as dist
import usp.sp.sp_attention
from usp.run.launch import outlast
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
outlast(60.0)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "deprecated" not in ended.stderr, ended.stderr
