"""Recurrences over a sharded sequence, as an affine scan over its spans.

The layers meant here (Mamba-2, arXiv 2405.21060; gated delta networks, arXiv 2412.06464) are affine in their state:
over any run of tokens,

    final = transition * incoming + final from a zero state
    outputs = read * incoming + outputs from a zero state

So every rank computes its spans at once, from zero states. Then only states travel, in sequence order, and each span
adds what it reads of the state that reached it. The backward sends the gradients of states the other way. Documents
cut spans into segments, and a state goes from a segment to all that continue it: the one in the next span, or the first
ones of documents that continue this one. Their gradients add up.

T tokens of this rank (its rows one after another), n segments, L tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from usp.attention import Channel, Keep, compute_now
from usp.attention.comm import Pending

from .spans import Segment, SpanPlan


@dataclass(frozen=True)
class FromZero:
    """What a recurrence computes of n segments, from zero states.

    out: (n, L, ...) outputs.
    final: (n, ...) states after the last token.
    transition: None if no segment has an incoming state. Else what takes a state over a segment: (n, ..., k, k)
        matrices to multiply from the left if the recurrence is `mixing`, else factors that broadcast to states.
    read: None likewise. Else from incoming states (n, ...) to their share of `out`.
    """

    out: Tensor
    final: Tensor
    transition: Tensor | None
    read: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Recurrence:
    """One kind of recurrence. Tokens whose inputs are all zero must leave the state as it is.

    mixing: transitions are matrices, not factors.
    state: the shape of a state; its first dim are heads, or channels, that are independent of each other.
    """

    mixing: ClassVar[bool] = False
    state: tuple[int, ...]

    def __call__(self, inputs: Sequence[Tensor], carried: bool) -> FromZero:
        """Compute segments (n, L, ...), each from a zero state; `carried`: with transition and read."""
        raise NotImplementedError

    def step(self, inputs: Sequence[Tensor], state: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        """Compute one token, inputs (n, ...), of the heads `own` from their state; return their outputs and state."""
        raise NotImplementedError


@dataclass(frozen=True)
class Bucket:
    """Segments that are computed together, padded to the longest.

    segments: numbers among the plan's segments.
    gather: (n, L) index into a zero token and this rank's tokens.
    tokens: (tokens of the segments,) where they are among the rank's tokens.
    outputs: (the same,) where they are among the n * L outputs.
    run: where the segments' tokens begin among the rank's if they stand there in order, without padding; else None.
    carried: the segments have an incoming state.
    """

    segments: tuple[int, ...]
    gather: Tensor
    tokens: Tensor
    outputs: Tensor
    run: int | None
    carried: bool


@dataclass(frozen=True)
class Hop:
    """A message of states, each of which is the incoming one of some segments.

    finals: on the source, the numbers of its states among the final ones; through: (number among the final ones,
        among the passed segments, among the incoming states) of those that no earlier hop hands on, and whose final
        state depends on the incoming one.
    states, incoming: on the destination, which state of the message is which incoming one.
    """

    source: int
    destination: int
    length: int
    finals: Tensor
    through: tuple[tuple[int, int, int], ...]
    states: Tensor
    incoming: Tensor


@dataclass(frozen=True)
class ScanProgram:
    """A `SpanPlan` as index tensors on a device and this rank's messages in the order of the plan.

    buckets: all segments, those of similar length together.
    finals: segments whose final state is handed on.
    passed: those among them that have an incoming state as well.
    incoming: segments with an incoming state.
    """

    plan: SpanPlan
    buckets: tuple[Bucket, ...]
    finals: tuple[int, ...]
    passed: tuple[int, ...]
    incoming: tuple[int, ...]
    hops: tuple[Hop, ...]

    @staticmethod
    def lower(plan: SpanPlan, device: torch.device) -> ScanProgram:
        handed_on = {segment.source for segment in plan.everywhere}
        finals = tuple(at for at, number in enumerate(plan.own) if number in handed_on)
        incoming = tuple(at for at, segment in enumerate(plan.segments) if segment.before)
        passed = tuple(at for at in finals if plan.segments[at].before)
        hops = _hops(plan, finals, passed, incoming, device)
        return ScanProgram(plan, _buckets(plan.segments, device), finals, passed, incoming, hops)


def _buckets(segments: Sequence[Segment], device: torch.device) -> tuple[Bucket, ...]:
    """Group segments whose lengths have the same power of two, so that padding at most doubles the work."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for number, segment in enumerate(segments):
        groups.setdefault(((segment.length - 1).bit_length(), segment.before > 0), []).append(number)
    buckets = []
    for (_, carried), numbers in groups.items():
        longest = max(segments[number].length for number in numbers)
        gather = torch.zeros(len(numbers), longest, dtype=torch.int64)
        for line, number in enumerate(numbers):
            segment = segments[number]
            gather[line, : segment.length] = torch.arange(segment.start, segment.start + segment.length) + 1
        outputs = gather.flatten().nonzero().squeeze(1)
        tokens = gather.flatten()[outputs] - 1
        begin = segments[numbers[0]].start
        in_order = all(
            segments[number].length == longest and segments[number].start == begin + line * longest
            for line, number in enumerate(numbers)
        )
        gather, tokens, outputs = (index.to(device) for index in (gather, tokens, outputs))
        buckets.append(Bucket(tuple(numbers), gather, tokens, outputs, begin if in_order else None, carried))
    return tuple(buckets)


def _hops(
    plan: SpanPlan, finals: tuple[int, ...], passed: tuple[int, ...], incoming: tuple[int, ...], device: torch.device
) -> tuple[Hop, ...]:
    final, factor, place = ({plan.own[at]: n for n, at in enumerate(part)} for part in (finals, passed, incoming))
    hops, begun = [], set()
    for message in plan.messages:
        first, continuing = next(iter(message.items()))
        source, destination = plan.holder(first), plan.holder(continuing[0])
        if plan.rank not in (source, destination):
            continue
        sent = list(message) if source == plan.rank else []
        through = [(final[n], factor[n], place[n]) for n in sent if n in factor and n not in begun]
        begun.update(sent)
        pairs = [(at, place[n]) for at, into in enumerate(message.values()) for n in into if n in place]
        index = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2)
        places = torch.tensor([final[n] for n in sent], dtype=torch.int64, device=device)
        hops.append(Hop(source, destination, len(message), places, tuple(through), index[:, 0], index[:, 1]))
    return tuple(hops)


def scan(
    inputs: Sequence[Tensor],
    program: ScanProgram,
    channel: Channel,
    recurrence: Recurrence,
    final_of: tuple[int, ...] = (),
    keep: Keep = compute_now,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence over the whole sequence on this rank's tokens, each document by itself. Collective over the
    grid.

    inputs: (T, ...) each.
    channel: the grid's process group, ranked as in the plan.
    keep: saves or replays the incoming states for activation checkpointing.

    Returns the outputs (T, ...), and the states after the last token of the segments `final_of`, without gradients.
    """
    ran = [recurrence([_pick(x, bucket) for x in inputs], bucket.carried) for bucket in program.buckets]
    final = _rows(program, [part.final for part in ran], program.finals)
    transition = _rows(program, [part.transition for part in ran], program.passed)
    local = _scatter(program.buckets, [part.out for part in ran])
    if final is None:
        final = local.new_zeros(0, *recurrence.state, dtype=ran[0].final.dtype)
    # The outputs pass through the exchange, so that its backward runs on ranks that receive no state.
    local, incoming = PassStates.apply(local, final, transition, program, channel, recurrence.mixing, keep)
    states = _final_states(program, ran, incoming, final_of, recurrence)
    out = local
    for bucket, part in zip(program.buckets, ran, strict=True):
        if part.read is not None:
            came = incoming.index_select(0, _places(program.incoming, bucket.segments, incoming.device))
            out = out.index_add(0, bucket.tokens, part.read(came).flatten(0, 1)[bucket.outputs].to(out.dtype))
    return out, states


@torch.no_grad()
def _final_states(
    program: ScanProgram, ran: Sequence[FromZero], incoming: Tensor, final_of: tuple[int, ...], recurrence: Recurrence
) -> Tensor:
    states = _rows(program, [part.final for part in ran], final_of)
    if states is None:
        return incoming.new_zeros(0, *recurrence.state)
    carried = tuple(number for number in final_of if program.plan.segments[number].before)
    transition = _rows(program, [part.transition for part in ran], carried)
    if transition is not None:
        came = incoming.index_select(0, _places(program.incoming, carried, incoming.device))
        through = _advance(transition, came, recurrence.mixing)
        states = states.index_add(0, _places(final_of, carried, states.device), through.to(states.dtype))
    return states


def _pick(x: Tensor, bucket: Bucket) -> Tensor:
    """Return (n, L, ...) of a bucket's segments, zero where they are shorter."""
    if bucket.run is not None:
        return x[bucket.run : bucket.run + bucket.gather.numel()].unflatten(0, bucket.gather.shape)
    padded = torch.cat((x.new_zeros(1, *x.shape[1:]), x))
    return padded.index_select(0, bucket.gather.flatten()).unflatten(0, bucket.gather.shape)


def _scatter(buckets: Sequence[Bucket], outs: Sequence[Tensor]) -> Tensor:
    """Return the outputs of all buckets in the order of this rank's tokens."""
    joined = torch.cat([out.flatten(0, 1)[bucket.outputs] for bucket, out in zip(buckets, outs, strict=True)])
    order = torch.cat([bucket.tokens for bucket in buckets])
    return joined.index_select(0, order.argsort())


def _rows(program: ScanProgram, parts: Sequence[Tensor | None], chosen: tuple[int, ...]) -> Tensor | None:
    """Return the rows of some segments, in that order, from the buckets' tensors; None if there are none."""
    if not chosen:
        return None
    held = [(bucket, part) for bucket, part in zip(program.buckets, parts, strict=True) if part is not None]
    numbers = [number for bucket, _ in held for number in bucket.segments]
    joined = torch.cat([part for _, part in held])
    return joined.index_select(0, _places(numbers, chosen, joined.device))


def _places(numbers: Sequence[int], chosen: Sequence[int], device: torch.device) -> Tensor:
    """Return where each of the chosen segments is among `numbers`."""
    place = {number: index for index, number in enumerate(numbers)}
    return torch.tensor([place[number] for number in chosen], device=device)


class PassStates(torch.autograd.Function):
    """Pass states from segments to those that continue them, and the sums of their gradients back.

    `apply(local, final, transition, program, channel, mixing, keep)` -> local, incoming: `local` unchanged, `final`
    (n, ...) of `program.finals` from zero states, `transition` of `program.passed`, `incoming` (n, ...) of
    `program.incoming`.
    """

    @staticmethod
    def forward(ctx, local, final, transition, program: ScanProgram, channel: Channel, mixing: bool, keep: Keep):
        ctx.program, ctx.channel, ctx.mixing = program, channel, mixing
        (incoming,) = keep(("states", final.shape), lambda: (_receive(final, transition, program, channel, mixing),))
        ctx.save_for_backward(incoming, transition)
        return local, incoming

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_local: Tensor, grad_incoming: Tensor):
        program, channel = ctx.program, ctx.channel
        incoming, transition = ctx.saved_tensors
        grad_incoming = grad_incoming.clone(memory_format=torch.contiguous_format)
        grad_final = grad_incoming.new_zeros(len(program.finals), *grad_incoming.shape[1:])
        grad_transition = torch.zeros_like(transition) if transition is not None else incoming.new_zeros(0)
        pending = []
        with record_function("gradients of states"):
            for hop in reversed(program.hops):
                gradients = grad_incoming.new_zeros(hop.length, *grad_incoming.shape[1:])
                if hop.destination == program.plan.rank:
                    gradients.index_add_(0, hop.states, grad_incoming.index_select(0, hop.incoming))
                if hop.source != program.plan.rank:
                    pending.append(channel.post([(hop.source, gradients)], []))
                    continue
                if hop.destination != hop.source:
                    channel.post([], [(hop.destination, gradients)]).wait()
                grad_final.index_add_(0, hop.finals, gradients)
                for final, passed, place in hop.through:
                    factor, state = transition[passed], incoming[place]  # pyright: ignore[reportOptionalSubscript]
                    grad = grad_final[final]
                    if ctx.mixing:  # the gradients of `_advance`
                        into_state, grad_transition[passed] = factor.mT @ grad, grad @ state.mT
                    else:
                        into_state, grad_transition[passed] = factor * grad, (grad * state).sum_to_size(factor.shape)
                    grad_incoming[place] += into_state
            for message in pending:
                message.wait()
        return grad_local, grad_final, None if transition is None else grad_transition, None, None, None, None


def _receive(final: Tensor, transition: Tensor | None, program: ScanProgram, channel: Channel, mixing: bool) -> Tensor:
    """Return the incoming states, and send on what becomes of them."""
    final, incoming = final.clone(), final.new_empty(len(program.incoming), *final.shape[1:])
    receiving: list[tuple[Hop, Tensor, Pending]] = []
    pending: list[Pending] = []

    def receive() -> None:
        for hop, states, message in receiving:
            message.wait()
            incoming[hop.incoming] = states[hop.states]
        receiving.clear()

    with record_function("states"):
        for hop in program.hops:
            if hop.source != program.plan.rank:
                states = final.new_empty(hop.length, *final.shape[1:])
                receiving.append((hop, states, channel.post([], [(hop.source, states)])))
                continue
            if hop.through:
                receive()
            for at, passed, place in hop.through:
                assert transition is not None
                final[at] += _advance(transition[passed], incoming[place], mixing)
            states = final.index_select(0, hop.finals)
            if hop.destination == hop.source:
                incoming[hop.incoming] = states[hop.states]
            else:
                pending.append(channel.post([(hop.destination, states)], []))
        receive()
        for message in pending:
            message.wait()
    return incoming


def _advance(transition: Tensor, state: Tensor, mixing: bool) -> Tensor:
    return transition @ state if mixing else transition * state
