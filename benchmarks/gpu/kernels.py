"""Correctness of attention: every kernel and mask against float64, the merge kernel, a ring of four on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.setup import Mail, Setup, SilentChannel, kernels, on_device, tried
from tests.attention.dense import dense_attention, dense_lse, relative_l2, visible, worst
from usp.attention import AttentionSpec, Channel, Kernel, RingProgram, SequenceLayout, compute_now, ring_schedule
from usp.attention.accumulate import merge
from usp.attention.kernels.base import Device
from usp.attention.ring import RingAttention, ring_backward, ring_forward

RING = 4
RAGGED = (0, 1, 5, 9, 40, 41, 90)  # the first boundaries of documents; the last one ends with the sequence


@dataclass(frozen=True)
class Case:
    """A mask. lse: it is returned, and has a gradient."""

    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float | None = None
    starts: tuple[int, ...] = ()  # of documents
    sinks: bool = False
    lse: bool = False

    def spec(self, tokens: int) -> AttentionSpec:
        documents = ((*self.starts, tokens),) if self.starts else None
        return AttentionSpec(self.causal, self.window, softcap=self.softcap, documents=documents)


CASES = {
    "causal": Case(),
    "full": Case(causal=False),
    "documents": Case(starts=RAGGED),
    "one-token documents": Case(starts=tuple(range(70))),
    "window": Case(window=(33, 0)),
    "band": Case(causal=False, window=(40, 17)),
    "window in documents": Case(window=(20, 0), starts=RAGGED),
    "softcap": Case(softcap=3.0),
    "sinks": Case(sinks=True),
    "lse with a gradient": Case(starts=RAGGED, lse=True),
}
RINGS = {"zigzag": "documents", "striped": "window", "contiguous": "sinks"}  # layouts, each with a case


@dataclass(frozen=True)
class Problem:
    """Inputs of a call, and its exact results: out and the gradients of q, k, v, and sinks or lse if it has them."""

    case: Case
    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    sinks: Tensor | None
    exact: tuple[Tensor, ...]

    @staticmethod
    @cache
    def make(setup: Setup, name: str, tokens: int) -> Problem:
        """Draw a problem, the same on every device, and solve it in float64."""
        case, drawn = CASES[name], torch.Generator().manual_seed(0)
        heads, kv_heads, head_dim = (4, 2, 16) if setup.tiny else (8, 2, 128)
        shapes = ((tokens, heads), (tokens, kv_heads), (tokens, kv_heads), (tokens, heads))
        inputs = [torch.randn(*shape, head_dim, generator=drawn) for shape in shapes]
        q, k, v, dout = (x.to(setup.device, setup.dtype) for x in inputs)
        sinks = torch.randn(heads, generator=drawn).to(setup.device) if case.sinks else None
        dlse = torch.randn(tokens, heads, generator=drawn).to(setup.device) if case.lse else None
        spec = case.spec(tokens)
        window = None if case.window == (-1, -1) else case.window
        boundaries = None if spec.documents is None else torch.tensor(spec.documents[0])
        seen = visible(1, tokens, causal=case.causal, window=window, cu_seqlens=boundaries).to(setup.device)
        leaves = [x.detach().double().unsqueeze(0).requires_grad_() for x in (q, k, v)]
        leaves += [] if sinks is None else [sinks.double().requires_grad_()]
        out = dense_attention(
            leaves[0], leaves[1], leaves[2], seen, softcap=case.softcap, sinks=leaves[3] if case.sinks else None
        )
        loss, lse = (out * dout.double()).sum(), None
        if dlse is not None:
            lse = dense_lse(leaves[0], leaves[1], seen, softcap=case.softcap)
            loss = loss + (lse * dlse.double()).sum()
        exact = [out, *torch.autograd.grad(loss, leaves), *([] if lse is None else [lse])]
        exact = [x.detach().squeeze(0) if x.dim() == 4 or x is lse else x.detach() for x in exact]
        return Problem(case, spec, q, k, v, dout, dlse, sinks, tuple(exact))

    def error(self, solve: Callable[..., list[Tensor]], *arguments: Any) -> float:
        """Return the largest relative error (L2) of the results of `solve`."""
        found = solve(self, *arguments)
        return worst([relative_l2(x, y.view_as(x)) for x, y in zip(found, self.exact, strict=True)])


@on_device
def parity(setup: Setup, others: Mapping[str, Kernel] | None = None) -> Iterator[tuple[str, float] | str]:
    """Compare forward and backward of every kernel and mask with float64. others: kernels instead of those here."""
    named = dict(kernels(setup)) if others is None else others
    for name, kernel in named.items():
        if isinstance(kernel, str):
            yield f"{name} is left out: {kernel}"
            continue
        for case in CASES:
            problem = Problem.make(setup, case, 96 if setup.tiny else 517)
            if reason := refusal(setup, kernel, problem.spec):
                yield f"{name} refuses {case}: {reason}"
            else:
                yield from tried(f"{name}, {case}: error", partial(problem.error, solved, setup, kernel))
    if others is None:
        yield from merging(setup)


def refusal(setup: Setup, kernel: Kernel, spec: AttentionSpec) -> str | None:
    head_dim = 16 if setup.tiny else 128
    return kernel.refuses(spec, Device.of(setup.device), setup.dtype, head_dim, head_dim)


def solved(problem: Problem, setup: Setup, kernel: Kernel) -> list[Tensor]:
    """Return a kernel's results, in the order of `Problem.exact`."""
    tokens = len(problem.q)
    schedule = ring_schedule(SequenceLayout("contiguous", tokens), problem.spec, 1, 0)
    program = RingProgram.lower(schedule, problem.spec, kernel, setup.device, setup.dtype)
    leaves = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    sinks = None if problem.sinks is None else problem.sinks.clone().requires_grad_()
    out, lse = RingAttention.apply(*leaves, sinks, program, SilentChannel(1), compute_now)
    results, given = [out], [problem.dout]
    if problem.dlse is not None:
        results, given = [out, lse], [problem.dout, problem.dlse]
    grads = torch.autograd.grad(results, leaves if sinks is None else [*leaves, sinks], given)
    return [out, *grads, *results[1:]]


def merging(setup: Setup) -> Iterator[tuple[str, float]]:
    """Merge two parts of which some rows have seen no key, and compare with float64."""
    drawn, (runs, tokens, heads, width) = torch.Generator().manual_seed(0), (2, 37, 5, setup.heads[2])
    parts = [torch.randn(runs, tokens, heads, width, generator=drawn) for _ in range(2)]
    lses = [3 * torch.randn(runs, tokens, heads, generator=drawn) for _ in range(2)]
    lses[0][:, :9], lses[1][:, 5:14] = float("-inf"), float("-inf")
    parts = [x.masked_fill(lse.isneginf().unsqueeze(-1), 0) for x, lse in zip(parts, lses, strict=True)]
    out, lse = parts[0].to(setup.device), lses[0].to(setup.device)
    more = parts[1].to(setup.device, setup.dtype)
    weights = torch.stack(lses).double().softmax(0).nan_to_num(nan=0.0).unsqueeze(-1)
    exact = weights[0] * parts[0].double() + weights[1] * more.cpu().double()
    total = torch.stack(lses).double().logsumexp(0)
    merge(out, lse, more, lses[1].to(setup.device))
    yield "merge: error of out", relative_l2(out.cpu(), exact)
    same = total.isneginf().equal(lse.cpu().isneginf())
    seen = ~total.isneginf()
    yield "merge: error of lse", relative_l2(lse.cpu()[seen], total[seen]) if same else float("inf")


@on_device
def emulated_ring(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Run four ranks of a ring as threads of this process, with every kernel, and compare with float64."""
    for name, kernel in kernels(setup):
        if isinstance(kernel, str):
            yield f"{name} is left out: {kernel}"
            continue
        for kind, case in RINGS.items():
            problem = Problem.make(setup, case, 96 if setup.tiny else 512)
            if reason := refusal(setup, kernel, problem.spec):
                yield f"{name} refuses {case}: {reason}"
            else:
                what = f"ring of {RING}, {kind}, {case}, {name}: error"
                yield from tried(what, partial(problem.error, ring_of, setup, kernel, kind))


def ring_of(problem: Problem, setup: Setup, kernel: Kernel, kind: str) -> list[Tensor]:
    """Return the results of the ranks of a ring, joined."""
    layout = SequenceLayout(kind, len(problem.q), ring=RING)
    places = [layout.ring_positions(rank).to(setup.device) for rank in range(RING)]

    def rank(channel: Channel) -> list[Tensor]:
        schedule = ring_schedule(layout, problem.spec, 1, channel.rank)
        program = RingProgram.lower(schedule, problem.spec, kernel, setup.device, setup.dtype)
        q, k, v, dout = (x[places[channel.rank]] for x in (problem.q, problem.k, problem.v, problem.dout))
        out, lse = ring_forward(q, k, v, problem.sinks, program, channel)
        *grads, dsinks = ring_backward(dout, None, q, k, v, out, lse, problem.sinks, program, channel)()
        return [out, *grads, *([] if dsinks is None else [dsinks])]

    parts = Mail(RING).each_rank(rank)
    order = torch.cat(places).argsort()
    joined = [torch.cat(shards)[order] for shards in zip(*(part[:4] for part in parts), strict=True)]
    return joined + [torch.stack(shares).sum(0) for shares in zip(*(part[4:] for part in parts), strict=True)]
