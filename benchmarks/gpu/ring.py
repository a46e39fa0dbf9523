"""A rank's ring steps without a network, merges alone, and how late a message's kernel starts beside attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from usp.attention import AttentionSpec, Kernel, RingProgram, SequenceLayout, compute_now, ring_schedule
from usp.attention.accumulate import merge
from usp.attention.ring import RingAttention

from .setup import CAUSAL, Setup, SilentChannel, kernels, on_device

RING = 4
LENGTHS = ("8K", "32K")
KERNELS = ("sdpa", "aten-flash", "cudnn", "flash-attn-3", "flash-attn-4")


def time_ring_rank(
    setup: Setup, kernel: Kernel, layout: SequenceLayout, spec: AttentionSpec = CAUSAL
) -> tuple[float, float]:
    """Return the time of all ring steps of rank 0 in ms: (forward, forward + backward)."""
    program = RingProgram.lower(ring_schedule(layout, spec, 1, 0), spec, kernel, setup.device, setup.dtype)
    q, k, v, dout = setup.qkv(layout.ring_len, layout.ring_len)
    leaves, channel = [x.requires_grad_() for x in (q, k, v)], SilentChannel(layout.ring)

    def forward() -> torch.Tensor:
        return RingAttention.apply(q, k, v, None, program, channel, compute_now)[0]

    return setup.passes(forward, leaves, dout)


@on_device
def steps(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Time merges, and a rank's ring steps against one kernel with the same work."""
    yield from merges(setup)
    for name, kernel in kernels(setup):
        if isinstance(kernel, str) or name not in KERNELS:
            continue
        for length in LENGTHS:
            layout = SequenceLayout("zigzag", setup.tokens(length) * RING, ring=RING)
            schedule = ring_schedule(layout, CAUSAL, 1, 0).steps
            pairs = float(sum(task.visible() for step in schedule for task in step.tasks))
            # A causal square with equally many visible pairs: side * (side + 1) / 2 = pairs.
            whole = SequenceLayout("contiguous", round((2 * pairs) ** 0.5))
            mine, one = (time_ring_rank(setup, kernel, each) for each in (layout, whole))
            for index, passed in enumerate(("forward", "both passes")):
                yield f"ring of {RING}, {name}, {length} a rank, {passed}, of one kernel", mine[index] / one[index]
    yield from late_starts(setup)


def merges(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Time the merge of a hop, 8K x 32 heads, and an addition that moves as many bytes; nothing else is timed."""
    tokens, (heads, _, width) = setup.tokens("8K"), setup.heads
    out, lse = setup.randn(1, tokens, heads, width, dtype=torch.float32), setup.randn(1, tokens, heads).float()
    part = setup.randn(1, tokens, heads, width)
    part_lse = setup.randn(1, heads, tokens).float().transpose(1, 2)
    milliseconds = setup.milliseconds(lambda: merge(out, lse, part, part_lse))
    nbytes = 2 * out.nbytes + part.nbytes + 3 * lse.nbytes
    yield "merge of a hop, 8K x 32 heads", milliseconds
    yield "merge of a hop, bytes read and written", nbytes / milliseconds / 1e9
    added = setup.milliseconds(lambda: out.add_(part))
    yield "merge of a hop, of an addition", milliseconds / added


def late_starts(setup: Setup) -> Iterator[tuple[str, float]]:
    """Time how late a message's kernel ends beside an attention kernel, on streams of both priorities."""
    if not setup.cuda:
        return
    tokens = setup.tokens("32K")
    q, k, v, _ = (x.unsqueeze(0).transpose(1, 2) for x in setup.qkv(tokens, tokens))
    for name, priority in (("normal", 0), ("high", -1)):
        side = torch.cuda.Stream(setup.device, priority=priority)
        begin, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            begin.record()
            side.wait_stream(torch.cuda.current_stream())
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            with torch.cuda.stream(side):
                torch.empty(1 << 20, device=setup.device).fill_(1.0)
                ended.record()
            torch.cuda.synchronize(setup.device)
        yield f"a kernel beside attention, {name} priority", 1e3 * begin.elapsed_time(ended)
