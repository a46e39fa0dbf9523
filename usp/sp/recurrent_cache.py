"""What recurrent layers keep of each sequence while it is generated, in `KVCache.states`.

    prefill    the state after the last token of each prompt; the padding behind it is a document of its own
    decode     one token of each sequence, from that state to the next

A convolution keeps its last K - 1 inputs, on every rank. A recurrence keeps its state sharded by head: all ranks know
the token that is decoded, each computes its own heads, and they exchange the outputs.

B slots, R rows of a prefill, C channels, H heads (or channels) of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from attention import DecodeStep, Prefill

from .in_order import OrderedCall
from .scan import Recurrence, scan_with_states
from .spans import Segment


def prompt_documents(prefill: Prefill, padded: int) -> Tensor:
    """Return the boundaries (R, 3) of each row's prompt and padding, `padded` tokens over all ranks."""
    lengths = prefill.row_lengths.cpu()
    return torch.stack((torch.zeros_like(lengths), lengths, torch.full_like(lengths, padded)), dim=1)


def own_heads(heads: int, group: dist.ProcessGroup | None) -> slice:
    """Return the heads of a state that this rank of the group keeps; the first ranks have one more if uneven."""
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    each, more = divmod(heads, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


@dataclass(frozen=True)
class PrefillCall(OrderedCall):
    """A layer's call on prompts, which keeps their states.

    Attributes:
        layer: name of the layer.
    """

    prefill: Prefill
    layer: str
    _names: Iterator[int] = field(default_factory=count)

    def convolve(self, x: Tensor, taps: int, convolution: Callable[[Tensor], Tensor]) -> Tensor:
        own = self.plan.layout.positions(*divmod(self.plan.rank, self.plan.layout.ulysses)).to(x.device)
        last_RK = self.prefill.row_lengths.unsqueeze(1) + torch.arange(1 - taps, 0, device=x.device)
        found_RK, index_RK = (own == last_RK.unsqueeze(2)).byte().max(-1)
        inputs_RCK = x.gather(2, index_RK.unsqueeze(1).expand(-1, x.shape[1], -1))
        self._keep(inputs_RCK.where(found_RK.unsqueeze(1) > 0, 0), slice(None))
        return super().convolve(x, taps, convolution)

    def scan(self, inputs: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
        plan, channel = self.plan, self.order.channel
        lengths = self.prefill.row_lengths.tolist()
        last = [number for number, one in enumerate(plan.segments) if self._end(one) == lengths[one.row]]
        program = self.order.states(plan, inputs[0].device)
        out, states = scan_with_states([x.flatten(0, 1) for x in inputs], program, channel, recurrence, tuple(last))
        states_RH = states.new_zeros(plan.rows, *recurrence.state)
        states_RH[[plan.segments[number].row for number in last]] = states
        self._keep(states_RH, own_heads(recurrence.state[0], channel.group))
        return out.unflatten(0, (plan.rows, -1))

    def _end(self, segment: Segment) -> int:
        """Return the global position after a segment's last token."""
        span = self.plan.spans[segment.span]
        return span.start + segment.start - segment.row * self.plan.layout.local_len - span.offset + segment.length

    def _keep(self, states_RH: Tensor, own: slice) -> None:
        """Store what the ranks found, each its part of the rows and zeros elsewhere."""
        states_RH, cache = states_RH.contiguous(), self.prefill.cache
        if self.order.channel.group is not None:
            dist.all_reduce(states_RH, group=self.order.channel.group)
        kept = states_RH[:, own]
        state = cache.state((self.layer, next(self._names)), tuple(kept.shape[1:]), kept.dtype)
        state[self.prefill.slots] = kept[self.prefill.rows]


@dataclass(frozen=True)
class DecodeCall:
    """A layer's call on one token of each sequence, the same on all ranks that share them."""

    step: DecodeStep
    layer: str
    _names: Iterator[int] = field(default_factory=count)

    def convolve(self, x: Tensor, taps: int, convolution: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the convolution's output (B, C, 1) for the token x (B, C, 1)."""
        state = self._state((x.shape[1], taps - 1), x.dtype)
        window = torch.cat((state, x), dim=2)
        state.copy_(window[:, :, 1:])
        return convolution(window)[:, :, -1:]

    def scan(self, inputs: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
        """Return the recurrence's output (B, 1, ...) for the token's inputs (B, 1, ...). Collective."""
        heads, *rest = recurrence.state
        own = own_heads(heads, self.step.group)
        state = self._state((own.stop - own.start, *rest), torch.float32)
        out_BH, after = recurrence.step([x.squeeze(1) for x in inputs], state, own)
        state.copy_(after)
        if self.step.group is not None:
            whole = out_BH.new_zeros(out_BH.shape[0], heads, *out_BH.shape[2:])
            whole[:, own] = out_BH  # a sum with zeros is exact, and heads need not divide evenly
            dist.all_reduce(whole, group=self.step.group)
            out_BH = whole
        return out_BH.unsqueeze(1)

    def _state(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        name: Hashable = (self.layer, next(self._names))
        return self.step.cache.state(name, shape, dtype)
