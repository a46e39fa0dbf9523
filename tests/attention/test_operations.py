"""What an attention call does besides its kernels: copies and conversions, counted in torch's dispatcher."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from usp.attention import (
    AttentionOp,
    AttentionSpec,
    Channel,
    HeadPlan,
    RingProgram,
    SequenceLayout,
    UnifiedPlan,
    unified_attention,
)
from usp.attention.comm import Pending
from usp.attention.keep import compute_now
from usp.attention.kernels.sdpa import CpuFlashKernel
from usp.attention.ulysses import HeadsToSeq, SeqToHeads

aten = torch.ops.aten


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], object]) -> Counter[str]:
    with Operators() as operators:
        call()
    return operators.counts


class Loopback(Channel):
    """A channel of `size` ranks that all send what this one sends."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size = size

    def post_all_to_all(self, x: Tensor, send_splits: list[int], receive_splits: list[int]) -> tuple[Tensor, Pending]:
        assert send_splits == receive_splits
        return x.clone(), Pending()


def test_one_launch_converts_nothing() -> None:
    heads, spec = HeadPlan(4, 4), AttentionSpec(causal=True)
    plan = UnifiedPlan.make(SequenceLayout("zigzag", 64, 1, 1), spec, heads, 1, 0, 0)
    q, k, v = (torch.randn(1, 64, 4, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    program = RingProgram.lower(plan.ring, spec, CpuFlashKernel(), q.device, q.dtype)
    alone = Channel(None)
    out: list[Tensor] = []
    forward = counted(lambda: out.extend(unified_attention(q, k, v, AttentionOp(plan, program, alone, alone))))
    backward = counted(lambda: out[0].backward(torch.ones_like(out[0])))
    assert forward["_to_copy"] == 0, forward
    assert backward["_to_copy"] == 0, backward


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 8), (8, 2), (16, 4)])
def test_even_heads_take_one_copy_into_a_message(heads: int, kv_heads: int, batch: int) -> None:
    """With several rows, one more in each direction orders the tokens of all ranks by row."""
    plan, channel, rows = HeadPlan(heads, kv_heads, 8), Loopback(8), int(batch > 1)
    q, k, v = (torch.randn(batch, 4, n, 16, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    parts: list[Tensor] = []
    forward = counted(lambda: parts.extend(SeqToHeads.apply(plan, channel, compute_now, q, k, v)))
    backward = counted(lambda: torch.autograd.backward(parts, [torch.ones_like(x) for x in parts]))
    back = counted(lambda: HeadsToSeq.apply(parts[0].detach().contiguous(), plan, batch, channel, compute_now))
    # Besides, the channel of this test copies each message, and the test what it takes apart.
    assert moved(forward) == 1 + rows + 1, forward
    assert moved(backward) == 1 + 3 + 1, backward
    assert moved(back) == rows + 1 + 1 + 1, back


def moved(operators: Counter[str]) -> int:
    return sum(operators[name] for name in ("copy_", "clone", "cat", "sum", "_to_copy", "add_"))
