"""Layers that work in sequence order, a convolution and a recurrence, on a sharded sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attention import LAYOUTS, AttentionSpec, Keep, compute_now
from parallel import ParallelMesh

from .axes import SpAxes
from .grid_channel import GridChannel
from .halo import HaloProgram, convolve
from .reshard import Reshard, ReshardPlan
from .scan import Recurrence, ScanProgram, scan
from .sp_attention import documents_of
from .spans import HaloPlan, SpanPlan


class LayerCall(Protocol):
    """One call of a layer: what convolves and scans its tokens over the whole sequence."""

    def convolve(self, x: Tensor, taps: int, convolution: Callable[[Tensor], Tensor]) -> Tensor: ...

    def scan(self, inputs: Sequence[Tensor], recurrence: Recurrence) -> Tensor: ...


@dataclass(frozen=True)
class OrderedCall:
    """One call of a layer on this rank's tokens, which are consecutive within each span.

    Attributes:
        plan: the spans and documents of the call.
    """

    plan: SpanPlan
    order: SequenceOrder

    def convolve(self, x: Tensor, taps: int, convolution: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a causal depthwise convolution, (rows, channels, tokens) to the same. Collective.

        Args:
            convolution: of (1, channels, tokens), with zeros before the first token, and `taps` taps.
        """
        program = self.order.halo(HaloPlan(self.plan, taps), x.device)
        out = convolve(x.transpose(1, 2).flatten(0, 1), program, self.order.channel, convolution, self.order.keep)
        return out.unflatten(0, (self.plan.rows, -1)).transpose(1, 2)

    def scan(self, inputs: Sequence[Tensor], recurrence: Recurrence) -> Tensor:
        """Run a recurrence over (rows, tokens, ...) inputs; returns (rows, tokens, ...). Collective."""
        program = self.order.states(self.plan, inputs[0].device)
        out = scan([x.flatten(0, 1) for x in inputs], program, self.order.channel, recurrence, self.order.keep)
        return out.unflatten(0, (self.plan.rows, -1))


class SequenceOrder:
    """Runs layers that work in sequence order over a ring x ulysses mesh, for any sequence layout.

    Args:
        mesh: a ParallelMesh, or a torch DeviceMesh with axes named ring and ulysses.
        layout: contiguous, zigzag or striped, as `shard_batch` divided the sequence.

    Raises:
        ValueError: for an unknown layout.
    """

    def __init__(self, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag") -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
        self._mesh, self.axes, self.layout, self.channel = mesh, SpAxes.of(mesh), layout, GridChannel.of(mesh)
        self.keep: Keep = compute_now
        # Calls repeat from layer to layer and, without documents, from step to step.
        self.halo = lru_cache(maxsize=16)(HaloProgram.lower)
        self.states = lru_cache(maxsize=16)(ScanProgram.lower)
        self._moves = lru_cache(maxsize=16)(self._moves_uncached)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceOrder:
        """Share the process groups, which cannot be copied."""
        return SequenceOrder(self._mesh, self.layout)

    @contextmanager
    def keeping(self, keep: Keep) -> Iterator[None]:
        """Pass what calls receive from other ranks to `keep`, as `UnifiedSPAttention.keeping`."""
        outside, self.keep = self.keep, keep
        try:
            yield
        finally:
            self.keep = outside

    def plan(self, rows: int, seq_len: int, cu_seqlens: Tensor | None = None) -> SpanPlan:
        """Plan a layer's call on `rows` rows of `seq_len` global tokens.

        Raises:
            ValueError: if the layout cannot divide the sequence, or the documents do not fit it.
        """
        documents = documents_of(cu_seqlens)
        if violation := AttentionSpec(documents=documents).document_violation(rows, seq_len):
            raise ValueError(violation)
        kind = "contiguous" if self.layout == "striped" else self.layout
        return SpanPlan(self.axes.layout(kind, seq_len), documents, rows, self.channel.rank)

    def moves(self, seq_len: int) -> ReshardPlan | None:
        """Return how tokens reach the layout in which they are in order; None if they are."""
        return self._moves(seq_len) if self.layout == "striped" and self.axes.ring > 1 else None

    def _moves_uncached(self, seq_len: int) -> ReshardPlan:
        striped, contiguous = (self.axes.layout(kind, seq_len) for kind in ("striped", "contiguous"))
        return ReshardPlan(striped, contiguous, self.channel.rank)

    def run(self, x: Tensor, cu_seqlens: Tensor | None, layer: Callable[[Tensor, OrderedCall], Tensor]) -> Tensor:
        """Run a layer of (rows, tokens, width) on this rank's tokens, in an order that it can work in. Collective.

        Args:
            cu_seqlens: global boundaries of packed documents, as for `UnifiedSPAttention`.
            layer: gets the tokens and what convolves and scans them over the whole sequence.

        Raises:
            ValueError: as `plan`, before any communication.
        """
        seq_len = x.shape[1] * self.axes.ring * self.axes.ulysses
        call = OrderedCall(self.plan(x.shape[0], seq_len, cu_seqlens), self)
        moves = self.moves(seq_len)
        if moves is None:
            return layer(x, call)
        out = layer(Reshard.apply(x, moves, self.channel, self.keep), call)
        return Reshard.apply(out, moves.inverse, self.channel, self.keep)
