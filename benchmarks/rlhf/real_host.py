"""What tensor parallelism costs ReaL's host in a decoding layer, in operators: measured, for `Constants.branch`.

A layer as ReaL's eager code runs it, on tensors so small that only the host takes time: with `nn.Linear`, and, with
tensor parallelism, with five linears that are autograd functions with casts of amp, and two all-reduces of a process
group that sends nothing, each inside an autograd function.

    python -m benchmarks.rlhf.real_host
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import custom_fwd
from torch.testing._internal.distributed.fake_pg import FakeStore

HIDDEN, ROUNDS, LAYERS = 8, 15, 200
LINEARS, OPERATORS = 5, 18  # of a layer: q, kv, o, gate with up, down; all, with norms, rotations, attention, cache


class Linear(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *flags: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.use_bias, ctx.flags = bias is not None, flags
        return torch.matmul(x, weight.t())


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x


class Layer(nn.Module):
    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(LINEARS))
        self.parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        for number, linear in enumerate(self.linears):
            if self.parallel:
                x = Linear.apply(x, linear.weight, None, False, True, False)
                x = Reduce.apply(x) if number in (2, 4) else x
            else:
                x = linear(x)
        for _ in range(OPERATORS - LINEARS):
            x = x + 1.0
        return x


@torch.no_grad()
def seconds(layer: Layer, x: Tensor) -> float:
    begin = time.perf_counter()
    for _ in range(LAYERS):
        layer(x)
    return (time.perf_counter() - begin) / LAYERS


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    layers, x = [Layer(parallel) for parallel in (False, True)], torch.zeros(4, HIDDEN)
    turns = [[seconds(layer, x) for layer in layers] for _ in range(ROUNDS)][1:]
    plain, parallel = (median(each) for each in zip(*turns, strict=True))
    print(
        f"{plain * 1e6:.0f} us a layer, {parallel * 1e6:.0f} with tensor parallelism: as of "
        f"{OPERATORS * (parallel / plain - 1):.1f} operators more"
    )


if __name__ == "__main__":
    main()
