"""Ring attention, forward and backward: one loop over a schedule for every layout and mask.

Ring Attention (arXiv 2310.01889) with the messages of schedule.py. The messages of the next step are posted before
computing the current one, which hides them.

T tokens of a rank (batch x ring_len), B tokens of a block, N query heads, K KV heads, H head dim, V head dim of the
values. Keys and values are sent together, interleaved by token: kv_BX with X = K * (H + V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .accumulate import AttentionSum, GradientSum, accumulate_dtype, converted
from .comm import Channel, Pending, named
from .keep import Keep
from .kernels.base import Kernel, KernelLaunch, Taken, attend, attend_backward, without_autocast
from .schedule import Message, RingSchedule, Step
from .spec import AttentionSpec

Slices = tuple[tuple[int, int], ...]
# Of each step: its launches, and keys and values.
Blocks = Iterator[tuple[tuple[KernelLaunch, ...], tuple[Tensor, Tensor]]]
Between = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class RingProgram:
    """One rank's schedule, lowered for one kernel."""

    steps: tuple[Step, ...]
    spec: AttentionSpec
    kernel: Kernel
    launches: tuple[tuple[KernelLaunch, ...], ...]  # per step
    kv_index: Tensor | None = None  # the KV head of each query head where standard GQA grouping is wrong (heads.py)
    merged: Slices = ()  # joint queries: see `RingSchedule`
    by_group: tuple[RingProgram, ...] = ()  # of each group of heads; empty for a single one

    @staticmethod
    def lower(
        schedule: RingSchedule,
        spec: AttentionSpec,
        kernel: Kernel,
        device: torch.device,
        dtype: torch.dtype,
        kv_index: tuple[int, ...] | None = None,
        kv_index_by_group: Sequence[tuple[int, ...] | None] = (),
    ) -> RingProgram:
        def on_device(heads: tuple[int, ...] | None) -> Tensor | None:
            return None if heads is None else torch.tensor(heads, device=device)

        launches = tuple(kernel.lower(step.tasks, device, dtype) for step in schedule.steps)
        steps = tuple(step.on(device) for step in schedule.steps)
        program = RingProgram(steps, spec, kernel, launches, on_device(kv_index), schedule.merged)
        groups = tuple(replace(program, kv_index=on_device(each)) for each in kv_index_by_group)
        return replace(program, by_group=groups) if groups else program


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries over the keys of all ring ranks.

    `apply(q_TNH, k_BKH, v_BKV, sinks_N, program, channel, keep)` -> out_TNV, lse_TN. `sinks` are per-head logits added
    to each row's softmax, without a value (None to disable). Gradients of the results of joint queries are summed over
    the ranks; each rank gets a share of the gradients of sinks and of joint q, k and v.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, program: RingProgram, channel: Channel, keep: Keep):
        step = ("ring attention", q.shape, k.shape, v.shape)
        out, lse = keep(step, lambda: ring_forward(q, k, v, sinks, program, channel))
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.program, ctx.channel = program, channel
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return *ring_backward(dout, dlse, q, k, v, out, lse, sinks, ctx.program, ctx.channel)(), None, None, None


def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    program: RingProgram,
    channel: Channel,
    blocks: Blocks | None = None,
    between: Between | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the out and lse of `RingAttention`.

    blocks: those of `start_ring`, if it has been called. between: called with the number of each step when it has been
    computed, to post or collect what is not of this call.
    """
    merged = program.merged
    total, steps, taken = AttentionSum(q, v.shape[-1]), len(program.launches), Taken()
    with without_autocast(q.device):
        for index, (launches, block) in enumerate(blocks or _blocks(program, channel, k, v), 1):
            with named("ring step {}/{}: compute", index, steps):
                keys, values = _select_heads(block, program.kv_index)
                attend(program.kernel, launches, q, keys, values, program.spec, total, taken)
            if between is not None:
                between(index)
        out, lse = total.result()
        if merged:
            rows = torch.cat((_rows(out, merged).to(lse.dtype), _rows(lse, merged).unsqueeze(-1)), -1)
            with named("merge joint queries"):
                rows = channel.combine(rows, _merged)
            _set_rows(out, merged, rows[..., :-1])
            _set_rows(lse, merged, rows[..., -1])
        if sinks is not None:
            joined = torch.logaddexp(lse, sinks.to(lse.dtype))
            # Not exp(lse - joined): sigmoid scales down the rounding of lse with the share of the sink.
            out, lse = out * torch.sigmoid(lse - sinks.to(lse.dtype)).unsqueeze(-1), joined
        return converted(out, q.dtype), lse


def ring_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    sinks: Tensor | None, program: RingProgram, channel: Channel, blocks: Blocks | None = None,
    between: Between | None = None,
) -> Callable[[], tuple[Tensor, Tensor, Tensor, Tensor | None]]:  # fmt: skip
    """Compute the gradients of q, k, v and sinks from those of `ring_forward`'s results; return what waits for the last
    messages and returns them. dlse: None for zero."""
    merged, kv_index, steps = program.merged, program.kv_index, program.steps
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # the gradient of a sum is an expanded scalar
    if merged:
        dout = _summed_rows(dout, merged, channel)
        dlse = None if dlse is None else _summed_rows(dlse, merged, channel)
    dq, grads, taken = GradientSum(q), _GradientRing(program, channel, k, v), Taken()
    with without_autocast(q.device):
        for index, (launches, block) in enumerate(blocks or _blocks(program, channel, k, v), 1):
            step = steps[index - 1]
            with named("ring step {}/{}: compute", index, len(steps)):
                dkv = grads.block(step)
                keys, values = _select_heads(block, kv_index)
                sums = dkv if kv_index is None else (GradientSum(keys), GradientSum(values))
                tensors = (dout, q, keys, values, out, lse)
                attend_backward(program.kernel, launches, *tensors, program.spec, (dq, *sums), dlse, taken)
                if kv_index is not None:
                    for total, part in zip(dkv, sums, strict=True):
                        total.total.index_add_(1, kv_index, part.total)
            with named("ring step {}/{}: wait for gradients", index, len(steps)):
                grads.pass_on(step)
            if between is not None:
                between(index)
    dsinks = None
    if sinks is not None:
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        delta = delta if dlse is None else delta - dlse
        if merged and channel.rank:  # the first rank counts what all have
            _set_rows(delta, merged, torch.zeros_like(_rows(delta, merged)))
        dsinks = -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(0).to(sinks.dtype)

    def finish() -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dk, dv = grads.finish()
        return dq.result(q.dtype), dk.result(k.dtype), dv.result(v.dtype), dsinks

    return finish


def _merged(parts: Tensor) -> Tensor:
    """Merge the (ranks, ..., V + 1) partial outputs, each followed by its lse, into (..., V + 1)."""
    out, lse = parts[..., :-1], parts[..., -1:]
    weights = lse.softmax(0).nan_to_num_(nan=0.0)  # nan where no rank has a key
    return torch.cat(((weights * out).sum(0), lse.logsumexp(0)), -1)


def _rows(x: Tensor, slices: Slices) -> Tensor:
    return torch.cat([x[start:stop] for start, stop in slices])


def _set_rows(x: Tensor, slices: Slices, rows: Tensor) -> None:
    for (start, stop), part in zip(slices, rows.split([stop - start for start, stop in slices]), strict=True):
        x[start:stop] = part


def _summed_rows(x: Tensor, slices: Slices, channel: Channel) -> Tensor:
    """Return x with these rows summed over the ranks."""
    x = x.clone(memory_format=torch.contiguous_format)
    dtype = accumulate_dtype(x.dtype)
    with named("sum gradients of joint queries"):
        _set_rows(x, slices, channel.combine(_rows(x, slices), lambda parts: parts.sum(0, dtype=dtype).to(x.dtype)))
    return x


def _select_heads(kv: tuple[Tensor, Tensor], kv_index: Tensor | None) -> tuple[Tensor, Tensor]:
    return kv if kv_index is None else (kv[0].index_select(1, kv_index), kv[1].index_select(1, kv_index))


def start_ring(program: RingProgram, channel: Channel, k: Tensor, v: Tensor) -> Blocks:
    """Post the first messages of a ring; return the blocks for `ring_forward` or `ring_backward`."""
    blocks = _blocks(program, channel, k, v)
    return chain((next(blocks),), blocks)


def _blocks(program: RingProgram, channel: Channel, k: Tensor, v: Tensor) -> Blocks:
    """Yield each step's launches and (k, v), after posting the messages of the next step."""
    steps = program.steps
    own = held = _interleaved(k, v) if any(step.send_held or step.send_own for step in steps) else None
    block = (k, v)
    for index, launches in enumerate(program.launches, 1):
        incoming = None if index == len(steps) else _Incoming(steps[index], channel, own, held, like=(k, v))
        yield launches, block
        if incoming is not None:
            with named("ring step {}/{}: wait", index, len(steps)):
                held = incoming.wait()
            block = _separated(held, k, v)


class _Incoming:
    """The next step's keys and values, in flight."""

    def __init__(
        self, step: Step, channel: Channel, own: Tensor | None, held: Tensor | None, like: tuple[Tensor, Tensor]
    ) -> None:
        block = self.block = like[0].new_empty(step.keys, _features(*like))
        self.parts = [  # a message that is one slice of the block is received there
            (m, _slice(block, m) if m.index is None else block.new_empty(m.tokens, *block.shape[1:]))
            for m in step.receive
        ]
        sends = [(m.peer, _packed(held, m)) for m in step.send_held]
        sends += [(m.peer, _packed(own, m)) for m in step.send_own]
        self.pending = channel.post(sends, [(m.peer, buffer) for m, buffer in self.parts])

    def wait(self) -> Tensor:
        self.pending.wait()
        for message, buffer in self.parts:
            if message.index is not None:
                self.block.index_copy_(0, message.index, buffer)
        return self.block


class _GradientRing:
    """Partial sums of dK and dV, passed from rank to rank and finally back to the owner of each block."""

    def __init__(self, program: RingProgram, channel: Channel, k: Tensor, v: Tensor) -> None:
        self.steps, self.channel, self.index, self.like = program.steps, channel, -1, (k, v)
        self.own = self.current = GradientSum(k), GradientSum(v)
        self.buffer: Tensor | None = None  # memory of the current sums, as it is sent; none for own tokens
        self.pending = Pending()
        self.arriving: list[tuple[Message, Tensor, bool]] = []  # (message, buffer, whether for our own tokens)

    def block(self, step: Step) -> tuple[GradientSum, GradientSum]:
        """Return the accumulators of this step's dK (B, K, H) and dV (B, K, V)."""
        self.index += 1
        if self.index:
            k, v = self.like
            self.buffer = self._empty(step.keys)
            dk, dv = _separated(self.buffer, k, v)
            self.current = GradientSum(k, dk), GradientSum(v, dv)
        return self.current

    def pass_on(self, step: Step) -> None:
        """Add received partial sums, then send this step's sums to the next rank that adds to them, or to the owner."""
        self._collect()
        following = self.steps[self.index + 1].grad_receive if self.index + 1 < len(self.steps) else ()
        self.arriving = [(m, self._empty(m.tokens), False) for m in following]
        self.arriving += [(m, self._empty(m.tokens), True) for m in step.grad_home]
        sends = []
        if step.grad_send:
            assert self.buffer is not None
            _ = [each.total for each in self.current]  # zero where nothing was added
            sends = [(m.peer, _packed(self.buffer, m)) for m in step.grad_send]
        self.pending = self.channel.post(sends, [(m.peer, buffer) for m, buffer, _ in self.arriving])

    def finish(self) -> tuple[GradientSum, GradientSum]:
        """Return the complete dK (T, K, H) and dV (T, K, V) of this rank's own tokens."""
        self._collect()
        return self.own

    def _collect(self) -> None:
        self.pending.wait()
        for message, received, home in self.arriving:
            sums = [each.total for each in (self.own if home else self.current)]
            if home:
                for total, more in zip(sums, _separated(received, *self.like), strict=True):
                    _add(total, message, more)
            else:
                assert self.buffer is not None
                _add(self.buffer, message, received)
        self.arriving = []

    def _empty(self, tokens: int) -> Tensor:
        k, v = self.like
        return k.new_empty(tokens, _features(k, v), dtype=accumulate_dtype(k.dtype))


def _features(k: Tensor, v: Tensor) -> int:
    """Return the number of elements of a token's keys and values."""
    return k.shape[1] * (k.shape[2] + v.shape[2])


def _interleaved(k_BKH: Tensor, v_BKV: Tensor) -> Tensor:
    """Copy keys and values to one buffer (B, X)."""
    kv = k_BKH.new_empty(k_BKH.size(0), _features(k_BKH, v_BKV))
    for part, x in zip(_separated(kv, k_BKH, v_BKV), (k_BKH, v_BKV), strict=True):
        part.copy_(x)
    return kv


def _separated(kv_BX: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the keys and values in a buffer, with the heads and head dims of `k` and `v`."""
    tokens, features, first = *kv_BX.shape, kv_BX.storage_offset()
    (_, heads, head_dim), v_head_dim = k.shape, v.shape[2]
    keys = kv_BX.as_strided((tokens, heads, head_dim), (features, head_dim, 1), first)
    values = (tokens, heads, v_head_dim), (features, v_head_dim, 1), first + heads * head_dim
    return keys, kv_BX.as_strided(*values)


def _packed(buffer: Tensor | None, message: Message) -> Tensor:
    """Return a message's tokens from a (T, ...) buffer, contiguous; a view if the message is one slice."""
    assert buffer is not None
    return _slice(buffer, message) if message.index is None else buffer.index_select(0, message.index)


def _add(buffer: Tensor, message: Message, part: Tensor) -> None:
    """Add received tokens to those in a buffer."""
    if message.index is None:
        _slice(buffer, message).add_(part)
    else:
        buffer.index_add_(0, message.index, part.to(buffer.dtype))


def _slice(buffer: Tensor, message: Message) -> Tensor:
    tokens = message.tokens
    return buffer if tokens == buffer.size(0) else buffer.narrow(0, message.start, tokens)
