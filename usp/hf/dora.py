"""DoRA (arXiv 2402.09353): adapters that change the direction of each row of a weight, and a magnitude of each.

    V = W + scale * B A        output = (magnitude / |V|) * V x + bias

|V| holds the norms of rows, which no gradient passes (section 4.3). Rows are whole on a rank after FSDP2 has gathered
them, except for a linear that tp shards by rows, each of whose ranks has some columns of every row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel import local_tensor


class Magnitude(nn.Module):
    """The magnitudes of a linear, `weight` (out features,); returns those of this rank's rows."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> Tensor:
        return self.weight


class Dora:
    """What peft's linear calls to add an adapter to its result; in place of peft's own, which knows no sharding."""

    @staticmethod
    def forward(module: Any, *, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Return the output, from `result`, that of the base."""
        down, up, base = module.lora_A[active_adapter], module.lora_B[active_adapter], module.base_layer
        scale, dropped = module.scaling[active_adapter], module.lora_dropout[active_adapter](x)
        with torch.no_grad():
            norms = row_norms(
                base.weight, scale * (local_tensor(up.weight).float() @ local_tensor(down.weight).float())
            )
        factor = (module.lora_magnitude_vector[active_adapter]() / norms).to(x.dtype)
        plain = dropped is x and base.bias is None
        product = result if plain else F.linear(dropped, local_tensor(base.weight))
        return result + (factor - 1) * product + factor * scale * up(down(dropped))


def row_norms(weight: Tensor, change: Tensor | float = 0.0) -> Tensor:
    """Return the norms of this rank's rows of `weight`, float32, after `change` is added to its part of them.

    Collective over the ranks that hold other columns of these rows.
    """
    squares = (local_tensor(weight).float() + change).square().sum(1)
    if isinstance(weight, DTensor):
        mesh, there = weight.device_mesh, squares.to(weight.device_mesh.device_type)
        for axis, placement in enumerate(weight.placements):
            if getattr(placement, "dim", 0) == 1:
                dist.all_reduce(there, group=mesh.get_group(axis))
        squares = there.to(squares.device)
    return squares.sqrt()
