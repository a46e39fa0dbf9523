"""Rates of attention, forward and backward: the toolkit's kernels on one block, torch's choice, and flex attention.

FLOPs count only the visible half of a causal mask: 2 products in the forward, 5 in the backward.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from usp.attention import SequenceLayout
from usp.parallel import peak_flops

from .ring import time_ring_rank
from .setup import CAUSAL, FULL, Setup, kernels, on_device, tried

LENGTHS = ("2K", "8K", "32K", "128K")
MASKS = {"causal": (CAUSAL, LENGTHS), "full": (FULL, LENGTHS[:3])}  # and the lengths at which it is measured
FLEX = "32K"
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
        if length == FLEX:
            yield from flex_rates(setup, length)
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
            timed = partial(time_ring_rank, setup, kernel, SequenceLayout("contiguous", tokens), spec)
            pairs = causal_pairs(tokens) if what == "causal" else float(tokens**2)
            found = list(both_rates(setup, f"{name}, {what}, {length}", timed, pairs))
            for passed, item in zip(PASSES, found, strict=False):
                if not isinstance(item, str):
                    key = passed if what == "causal" else f"{passed}_full"
                    node[kernel.rated_as or name][key].append((tokens, round(1e12 * item[1] / peak, 3)))
            yield from found


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


def batched(setup: Setup, tokens: int) -> list[Tensor]:
    """Return random q, k, v, dout of shape (1, heads, tokens, head dim)."""
    q, k, v, dout = (x.unsqueeze(0).transpose(1, 2) for x in setup.qkv(tokens, tokens))
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def sdpa_times(setup: Setup, tokens: int) -> tuple[float, float]:
    """Time what torch chooses."""
    q, k, v, dout = batched(setup, tokens)
    call = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return setup.passes(lambda: call(q, k, v), (q, k, v), dout)


def flex_rates(setup: Setup, length: str) -> Iterator[tuple[str, float] | str]:
    """Yield the rates of compiled flex attention, causal and in four documents; on a CPU of its eager forward."""
    tokens = setup.tokens(length)
    each = tokens // 4

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def packed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i // each == j // each)

    for name, function, pairs in (
        ("causal", causal, causal_pairs(tokens)),
        ("4 documents", packed, 4 * causal_pairs(each)),
    ):
        timed = partial(flex_times, setup, tokens, function)
        yield from both_rates(setup, f"flex, {name}, {length}", timed, pairs)


def flex_times(setup: Setup, tokens: int, function: Callable[..., Tensor]) -> tuple[float, float]:
    q, k, v, dout = batched(setup, tokens)
    mask = create_block_mask(function, None, None, tokens, tokens, device=setup.device.type)
    if not setup.cuda:  # where it has no backward, and inductor would compile for half a minute
        q, k, v = (x.detach() for x in (q, k, v))
        once = setup.milliseconds(lambda: flex_attention(q, k, v, block_mask=mask, enable_gqa=True))
        return once, 3 * once
    call = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        return call(q, k, v, block_mask=mask, enable_gqa=True)

    once = setup.milliseconds(forward)  # with gradients, as without them it would be compiled again
    return once, setup.milliseconds(lambda: torch.autograd.grad(forward(), (q, k, v), dout))
