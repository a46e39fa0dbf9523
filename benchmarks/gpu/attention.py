"""Rates of attention, forward and backward: the toolkit's kernels on one block, and torch's choice.

FLOPs count only the visible half of a causal mask: 2 products in the forward, 5 in the backward.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from usp.attention import AttentionSpec, Kernel, RingProgram, SequenceLayout, compute_now, ring_schedule
from usp.attention.ring import RingAttention
from usp.parallel import peak_flops

from .setup import CAUSAL, FULL, Setup, SilentChannel, kernels, on_device, tried

LENGTHS = ("2K", "8K", "32K", "128K")
MASKS = {"causal": (CAUSAL, LENGTHS), "full": (FULL, LENGTHS[:3])}  # and the lengths at which it is measured
PASSES = ("forward", "backward")
Times = Callable[[], tuple[float, float]]  # ms of the forward, and of both passes
NodeRates = dict[str, dict[str, list[tuple[int, float]]]]


@on_device
def rates(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Yield TFLOP/s by kernel, the shortest lengths first, and the rates of kernels as a node file has them."""
    node: NodeRates = defaultdict(lambda: defaultdict(list))
    yield from (f"{name} is left out: {kernel}" for name, kernel in kernels(setup) if isinstance(kernel, str))
    for length in LENGTHS:
        yield from kernel_rates(setup, length, node)
        tokens = setup.tokens(length)
        timed = partial(sdpa_times, setup, tokens)
        yield from both_rates(setup, f"torch's choice, causal, {length}", timed, causal_pairs(tokens))
    yield f"rates for a node file: {json.dumps(node)}"


def kernel_rates(setup: Setup, length: str, node: NodeRates) -> Iterator[tuple[str, float] | str]:
    """Yield the rates of the toolkit's kernels on one block, and add them to `node` as fractions of the peak."""
    tokens = setup.tokens(length)
    peak = (peak_flops(torch.cuda.get_device_name(setup.device)) if setup.cuda else None) or 1e12
    for name, kernel in kernels(setup):
        if isinstance(kernel, str) or name == "reference":  # which is for any mask, and slow
            continue
        for what, (spec, lengths) in MASKS.items():
            if length not in lengths:
                continue
            timed = partial(block_times, setup, kernel, tokens, spec)
            pairs = causal_pairs(tokens) if what == "causal" else float(tokens**2)
            found = list(both_rates(setup, f"{name}, {what}, {length}", timed, pairs))
            for passed, item in zip(PASSES, found, strict=False):
                if not isinstance(item, str):
                    key = passed if what == "causal" else f"{passed}_full"
                    node[kernel.rated_as or name][key].append((tokens, round(1e12 * item[1] / peak, 3)))
            yield from found


def block_times(setup: Setup, kernel: Kernel, tokens: int, spec: AttentionSpec) -> tuple[float, float]:
    """Time one kernel on a block."""
    schedule = ring_schedule(SequenceLayout("contiguous", tokens), spec, 1, 0)
    program = RingProgram.lower(schedule, spec, kernel, setup.device, setup.dtype)
    q, k, v, dout = setup.qkv(tokens, tokens)
    leaves, channel = [x.requires_grad_() for x in (q, k, v)], SilentChannel(1)
    return setup.passes(lambda: RingAttention.apply(q, k, v, None, program, channel, compute_now)[0], leaves, dout)


def causal_pairs(tokens: int) -> float:
    return tokens * (tokens + 1) / 2


def both_rates(setup: Setup, what: str, timed: Times, pairs: float) -> Iterator[tuple[str, float] | str]:
    """Yield the TFLOP/s of forward and backward, or why there are none."""
    heads, _, head_dim = setup.heads
    flops, found = 4 * pairs * heads * head_dim, list[float]()

    def forward() -> float:
        found.extend(timed())
        return flops / found[0] / 1e9

    yield from tried(f"{what}, forward", forward)
    if found:
        yield f"{what}, backward", 2.5 * flops / max(found[1] - found[0], 1e-9) / 1e9


def sdpa_times(setup: Setup, tokens: int) -> tuple[float, float]:
    """Time what torch chooses."""
    q, k, v, dout = (x.unsqueeze(0).transpose(1, 2) for x in setup.qkv(tokens, tokens))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return setup.passes(lambda: call(q, k, v), leaves, dout)
