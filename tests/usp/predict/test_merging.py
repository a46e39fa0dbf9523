"""The time of merging a ring step's results: the bytes that `usp.attention.accumulate` reads and writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from usp.attention import AttentionSpec, ring_schedule
from usp.attention.accumulate import AttentionSum, GradientSum, Rows
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.parallel import load_hardware
from usp.predict.compute import ring_step_seconds
from usp.predict.fake_world import HostMemory, stand_ins
from usp.train.resolve import job_of

RANKS, HEADS, TOKENS, DIM = 16, 32, 64, 16


class Traffic(TorchDispatchMode):
    """The bytes of tensors of `numel` elements that operators read and write."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.nbytes = numel, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor) and x.numel() == self.numel]
            self.nbytes += sum(x.numel() * x.itemsize for x in tensors)
        return out


def merged_bytes(dtype: torch.dtype, backward: bool) -> float:
    """Return the bytes per element of adding a launch's results to those of two others, which are sums already."""
    part, rows, lse = torch.randn(1, TOKENS, 2, DIM, dtype=dtype), Rows.of(0, TOKENS), torch.zeros(1, 2, TOKENS)
    gradients, outputs = GradientSum(part[0]), AttentionSum(part[0], DIM)

    def add(found: torch.Tensor) -> None:
        if backward:
            gradients.add(rows, found)
        else:
            outputs.merge(rows, found, lse.clone())

    add(part.clone())
    add(part.clone())
    with Traffic(part.numel()) as counted:
        add(part)
    return counted.nbytes / part.numel()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_a_ring_step_takes_the_bytes_of_what_merges_it(dtype: str, backward: bool, device: str) -> None:
    config = TrainConfig(model="llama3-8b", seq_len=65536, zero=1, sp_ring=RANKS, dtype=dtype)
    made = job_of(config, load_model_config(config.model), RANKS)
    ring = ring_schedule(made.layout, AttentionSpec(causal=True), 1, 0)
    there = device == "cuda"
    slow = replace(load_hardware("a800"), memory_bytes_per_second=1e9, memory_efficiency=1.0, streams=there)
    fast = replace(slow, memory_bytes_per_second=1e30)
    times = [
        ring_step_seconds(made, hardware, ring, HEADS, "flash-attn-2", backward=backward)[1]
        for hardware in (slow, fast)
    ]
    predicted = (times[0] - times[1]) * 1e9 / (made.tokens * HEADS * made.model.facts.value_dim)
    with stand_ins(torch.device(device), HostMemory()):
        assert predicted == pytest.approx(merged_bytes(made.dtype, backward))
    if there:
        assert predicted == pytest.approx(2 * 4 + made.dtype.itemsize)  # the sum is read and written, and the part read
