"""Causal convolutions over a sharded sequence: each span fetches the last tokens before it (a halo).

T tokens of this rank (its rows one after another), C channels, K taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from attention import Channel, Keep, compute_now

from .spans import HaloPlan


@dataclass(frozen=True)
class HaloProgram:
    """A `HaloPlan` as index tensors on a device.

    Attributes:
        plan: what it was lowered from.
        gather: (padded tokens,) index into a zero, this rank's tokens and the received ones.
        own: (T,) where this rank's tokens stand in the padded sequence.
        sends: by rank, the indices of the tokens that it needs.
    """

    plan: HaloPlan
    gather: Tensor
    own: Tensor
    sends: dict[int, Tensor]

    @staticmethod
    def lower(plan: HaloPlan, device: torch.device) -> HaloProgram:
        gather, own = plan.padded_index()
        sends = {peer: torch.tensor(indices, device=device) for peer, indices in plan.sends.items()}
        return HaloProgram(plan, gather.to(device), own.to(device), sends)


def convolve(
    x_TC: Tensor,
    program: HaloProgram,
    channel: Channel,
    convolution: Callable[[Tensor], Tensor],
    keep: Keep = compute_now,
) -> Tensor:
    """Apply a causal convolution over the whole sequence to this rank's tokens. Collective over the grid.

    Equal to the convolution of each document alone, forward and backward.

    Args:
        channel: the grid's process group, ranked as in the plan.
        convolution: a causal convolution of (1, C, tokens) of `plan.kernel` taps, with zeros before the first token.
        keep: saves or replays the received tokens for activation checkpointing.

    Returns:
        (T, C).
    """
    padded = WithHalo.apply(x_TC, program, channel, keep).index_select(0, program.gather)
    return convolution(padded.t().unsqueeze(0)).squeeze(0).t().index_select(0, program.own)


class WithHalo(torch.autograd.Function):
    """`apply(x_TC, program, channel, keep)` -> (1 + T + received, C): a zero, this rank's tokens, and received ones.

    The backward returns the gradients of received tokens to their ranks.
    """

    @staticmethod
    def forward(ctx, x: Tensor, program: HaloProgram, channel: Channel, keep: Keep) -> Tensor:
        ctx.program, ctx.channel, ctx.tokens = program, channel, x.shape[0]
        received = keep(("halo", x.shape), lambda: _fetch(x, program, channel))
        return torch.cat((x.new_zeros(1, x.shape[1]), x, *received))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        program, channel = ctx.program, ctx.channel
        counts = program.plan.receives
        grad_x, *returned = grad[1:].contiguous().split((ctx.tokens, *counts.values()))
        received = {peer: grad.new_empty(len(indices), grad.shape[1]) for peer, indices in program.sends.items()}
        with record_function("halo gradients"):
            channel.post(list(zip(counts, returned, strict=True)), list(received.items())).wait()
        for peer, indices in program.sends.items():
            grad_x.index_add_(0, indices, received[peer])
        return grad_x, None, None, None


def _fetch(x: Tensor, program: HaloProgram, channel: Channel) -> tuple[Tensor, ...]:
    received = {peer: x.new_empty(count, x.shape[1]) for peer, count in program.plan.receives.items()}
    sent = {peer: x.index_select(0, indices) for peer, indices in program.sends.items()}
    with record_function("halo"):
        channel.post(list(sent.items()), list(received.items())).wait()
    return tuple(received.values())
