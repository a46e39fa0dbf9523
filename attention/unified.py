"""Unified sequence-parallel attention: ring attention inside Ulysses (USP, arXiv 2405.07719, Algorithm 1).

    q, k, v: this rank's tokens, all heads
        | all-to-all over the ulysses axis
    q, k, v: the ring rank's tokens, this rank's heads
        | ring attention over the ring axis
    out: the ring rank's tokens, this rank's heads
        | all-to-all back
    out: this rank's tokens, all heads

Joint tokens, which all ranks hold, join the ring rank's tokens after the first all-to-all. Their keys are not sent; the
results of their queries are merged over the ring axis, and return to every rank in the second all-to-all.

B batch, S tokens per row of a rank, N query heads, K KV heads, H head dim, V head dim of the values, T tokens of a ring
rank, J joint tokens per row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .accumulate import accumulate_dtype
from .comm import Channel, combined_shares, named
from .heads import HeadPlan, Range
from .keep import Keep, compute_now
from .layout import SequenceLayout
from .ring import Blocks, RingAttention, RingProgram, ring_backward, ring_forward, start_ring
from .schedule import RingSchedule, local_schedule, ring_schedule
from .sparse import ChosenAttention, SparseProgram, choose, chosen_rows
from .spec import AttentionSpec
from .ulysses import HeadsToSeq, SeqToHeads, SequenceTotal, post_to_heads, separated_heads


@dataclass(frozen=True)
class WireBytes:
    """Payload bytes that one rank sends to others per call.

    Attributes:
        seq_to_heads, heads_to_seq: of q, k and v, and of the output, over the ulysses axis in the forward.
        dout_to_heads, grads_to_seq: of their gradients in the backward.
        keys: of keys and values over the ring axis, in the forward and again in the backward.
        grads: of their partial gradients.
        chosen: with indices, of these over the ulysses axis, and of a bit per key over the ring axis; in the forward.
        joint, joint_grads: over the ring axis, of the partial results of joint queries in the forward, and of the
            gradients of their results in the backward.
    """

    seq_to_heads: int
    heads_to_seq: int
    dout_to_heads: int
    grads_to_seq: int
    keys: int
    grads: int
    joint: int = 0
    joint_grads: int = 0
    chosen: int = 0

    @property
    def forward(self) -> int:
        return self.seq_to_heads + self.heads_to_seq + self.keys + self.joint + self.chosen

    @property
    def backward(self) -> int:
        return self.dout_to_heads + self.grads_to_seq + self.keys + self.grads + self.joint_grads

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class UnifiedPlan:
    """One rank's part of one attention call, as plain data derived independently on every rank."""

    layout: SequenceLayout
    spec: AttentionSpec
    heads: HeadPlan
    batch: int
    ulysses_rank: int
    ring: RingSchedule
    key_layout: SequenceLayout | None = None

    @staticmethod
    def make(
        layout: SequenceLayout,
        spec: AttentionSpec,
        heads: HeadPlan,
        batch: int,
        ring_rank: int,
        ulysses_rank: int,
        key_layout: SequenceLayout | None = None,
    ) -> UnifiedPlan:
        """Plan a call on (batch, local_len) tokens of one rank.

        key_layout: of cross attention, whose `spec` has `key_documents`; None if queries and keys are of the same
        tokens. Attention to joint keys only needs no other rank: its plan has all heads.

        Raises:
            ValueError: if the documents do not fit the batch and the sequences.
        """
        if violation := spec.document_violation(batch, layout.seq_len, key_layout.seq_len if key_layout else None):
            raise ValueError(violation)
        if spec.joint is not None and spec.joint.only:
            heads = HeadPlan(heads.num_heads, heads.num_kv_heads)
            alone = local_schedule(layout, spec, batch, ring_rank, ulysses_rank)
            return UnifiedPlan(layout, spec, heads, batch, 0, alone)
        of_rank = spec
        if spec.function is not None and spec.function.by_head:
            of_rank = replace(spec, function=replace(spec.function, heads=heads.q_ranges[ulysses_rank]))
        ring = ring_schedule(layout, of_rank, batch, ring_rank, key_layout)
        return UnifiedPlan(layout, spec, heads, batch, ulysses_rank, ring, key_layout)

    @property
    def of_itself(self) -> bool:
        """Whether a sequence attends to itself alone, in one or more groups of heads."""
        return self.key_layout is None and self.spec.joint is None

    @property
    def sparse_heads(self) -> tuple[int, ...]:
        """The `SparseProgram.heads` of this rank; any head where it has none."""
        return tuple(range(*self.heads.kv_ranges[self.ulysses_rank])) or (0,)

    @property
    def joint_queries(self) -> int:
        """Number of joint queries in each row."""
        return 0 if self.spec.joint is None else self.spec.joint.query_tokens

    def wire_bytes(
        self,
        head_dim: int,
        dtype: torch.dtype,
        v_head_dim: int | None = None,
        lse: bool = False,
        indices: Tensor | None = None,
        weights: bool = False,
        block: int = 1,
    ) -> WireBytes:
        """Predict the bytes that this rank sends to others.

        v_head_dim: that of v, None for `head_dim`. lse: the call returns lse, which has a gradient.
        indices: (B, sequence, k) or (B, sequence, K, k), of all queries of the sequence, each of so many
        consecutive keys as `block`. weights: the call returns theirs.
        """
        if not self.batch:
            return WireBytes(0, 0, 0, 0, 0, 0)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        heads, mine, size = self.heads, self.ulysses_rank, dtype.itemsize
        others = [rank for rank in range(heads.ulysses) if rank != mine]
        queries, keys = self.batch * self.layout.local_len, self.batch * (self.key_layout or self.layout).local_len
        results, exact = queries + self.batch * self.joint_queries, accumulate_dtype(dtype).itemsize
        of_result = v_head_dim * size + exact * lse

        def inputs(rank: int) -> int:
            of_key = heads.kv_width(rank) * (head_dim + v_head_dim)
            return (queries * heads.q_width(rank) * head_dim + keys * of_key) * size

        joint, sent = sum(stop - start for start, stop in self.ring.merged), 0
        if joint and heads.q_width(mine):
            shares = combined_shares(joint, self.layout.ring)
            own = shares[self.ring.rank]
            sent = (joint - own + own * (len(shares) - 1)) * heads.q_width(mine)
        per_token = heads.kv_width(mine) * (head_dim + v_head_dim)
        keys_sent, grads_sent, chosen = self.ring.tokens_sent, self.ring.grad_tokens_sent, 0
        if indices is not None:
            by_head = self.sparse_heads if indices.dim() == 4 else None
            tokens = self.batch * self.layout.ring_len * len(by_head or (0,))
            per_token //= heads.kv_width(mine) or 1 if by_head else 1
            rows = chosen_rows(self.layout, self.spec, indices, by_head, block)
            keys_sent, grads_sent = int(rows[:, self.ring.rank].sum()), int(rows[self.ring.rank].sum())
            of_indices = queries * indices[0, 0].numel() * (indices.element_size() + exact * weights)
            chosen = of_indices * len(others) + (self.layout.ring - 1) * -(-tokens // 8)
        return WireBytes(
            seq_to_heads=sum(map(inputs, others)),
            heads_to_seq=results * len(others) * heads.q_width(mine) * of_result,
            dout_to_heads=results * sum(map(heads.q_width, others)) * of_result,
            grads_to_seq=len(others) * inputs(mine),
            keys=keys_sent * per_token * size,
            grads=grads_sent * per_token * exact,
            joint=sent * (v_head_dim + 1) * exact,
            joint_grads=sent * of_result,
            chosen=chosen,
        )


class AttentionOp(NamedTuple):
    """What a rank does in calls of attention: a plan, its ring lowered for a kernel or the attention to chosen keys
    (sparse.py), the channels of both axes, and what saves or replays results for activation checkpointing (keep.py)."""

    plan: UnifiedPlan
    program: RingProgram | SparseProgram
    ulysses: Channel
    ring: Channel
    keep: Keep = compute_now


def unified_attention(
    q_BSNH: Tensor,
    k_BSKH: Tensor | None,
    v_BSKV: Tensor | None,
    operation: AttentionOp,
    *,
    sinks: Tensor | None = None,
    joint: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    return_lse: bool = False,
    indices: Tensor | None = None,
    return_weights: bool = False,
) -> list[Tensor]:
    """Compute exact, differentiable attention of this rank's queries over the whole sequence.

    `sinks` (N,) are logits added to every row's softmax without a value; each rank gets a partial gradient of them, to
    be summed over ranks.

    joint: q (B, J, N, H), k and v of the joint tokens, for those that `plan.spec.joint` has; each rank gets a partial
        gradient of them as well, and gradients of their results are summed over the ranks. Without other keys, `k_BSKH`
        and `v_BSKV` are None.

    Returns:
        out (B, S, N, V); for joint queries also theirs (B, J, N, V); with `return_lse` also the log-sum-exps of the
        scores (B, S, N) and, for joint queries, (B, J, N), in the dtype of accumulation; with `return_weights` the
        weights (B, S, k) of the keys at `indices`, summed over the heads and blocks, in that dtype and without a
        gradient; a key of several indices counts for one of them.
    """
    plan, program, ulysses, ring, keep = operation
    if not len(q_BSNH):
        tensors = q_BSNH, k_BSKH, v_BSKV, *joint, sinks
        return _no_rows(tensors, plan.joint_queries, return_lse, indices if return_weights else None)
    if isinstance(program, RingProgram) and plan.of_itself and not return_lse:
        assert k_BSKH is not None and v_BSKV is not None
        if not torch.is_grad_enabled():
            return [unified_forward(q_BSNH, k_BSKH, v_BSKV, operation, sinks)[0]]
        return [SelfAttention.apply(q_BSNH, k_BSKH, v_BSKV, sinks, operation)]
    batch, heads, rank = len(q_BSNH), plan.heads, plan.ulysses_rank
    given = _heads_contiguous(*(x for x in (q_BSNH, k_BSKH, v_BSKV) if x is not None))
    if heads.ulysses == 1:
        own: Sequence[Tensor] = [x.flatten(0, 1) for x in given]
    elif plan.key_layout is None:
        own = SeqToHeads.apply(heads, ulysses, keep, *given)
    else:
        own = *SeqToHeads.apply(heads, ulysses, keep, given[0]), *SeqToHeads.apply(heads, ulysses, keep, *given[1:])
    ranges = (heads.q_ranges[rank], heads.kv_ranges[rank], heads.kv_ranges[rank])
    q, k, v = (_with_joint(x, y, batch, part) for x, y, part in zip((*own, None, None), joint, ranges, strict=False))
    own_sinks = _own_sinks(sinks, heads, plan)
    choice = choose(cast(Tensor, indices), program, ulysses, ring) if isinstance(program, SparseProgram) else None
    weights: Tensor | None = None
    if heads.q_width(rank) == 0:  # there are more ulysses ranks than query heads
        # Adding these empty sums gives every rank gradients and a backward in which to exchange heads.
        zero = q.sum() + k.sum() + v.sum() + (0 if own_sinks is None else own_sinks.sum())
        out = v.new_zeros(len(q), 0, v.shape[-1]) + zero.to(v.dtype)
        lse = out[..., 0].to(accumulate_dtype(out.dtype))
        if choice is not None:
            weights = lse.new_zeros(choice.index.shape)
    elif isinstance(program, SparseProgram):
        rows = program.to_rows(q, k, v)
        out, lse, weights = ChosenAttention.apply(*rows, own_sinks, choice, program, ring, keep, return_weights)
        out = program.from_rows(out)
    else:
        out, lse = RingAttention.apply(q, k, v, own_sinks, program, ring, keep)

    to_sequence = partial(_to_sequence, plan=plan, ulysses=ulysses, keep=keep)
    results = [*to_sequence(out)]
    if return_lse:
        results += [x.squeeze(-1) for x in to_sequence(lse.unsqueeze(-1))]
    if return_weights:
        assert weights is not None and isinstance(program, SparseProgram)
        of_indices = weights.unflatten(1, (-1, program.block)).sum(2)
        results.append(_over_heads(of_indices.unflatten(0, (batch, -1)), ulysses))
    return results


def _no_rows(given: Sequence[Tensor | None], shared: int, lse: bool, indices: Tensor | None) -> list[Tensor]:
    """Return the results of `unified_attention` of a batch without rows, with which no rank sends anything. given: q,
    k, v, the joint ones and sinks, each of which gets a gradient. indices: if their weights are returned."""
    q, _, v, *_, joint_v, _ = given
    values = joint_v if v is None else v
    assert q is not None and values is not None
    zero = torch.stack([0 * x.sum() for x in given if x is not None]).sum()
    lengths, exact = (q.shape[1], shared) if shared else (q.shape[1],), accumulate_dtype(q.dtype)
    results = [q.new_zeros(0, length, q.shape[2], values.shape[3]) + zero for length in lengths]
    results += [x[..., 0].to(exact) for x in results] if lse else []
    return results if indices is None else [*results, q.new_zeros(indices.shape, dtype=exact)]


def _to_sequence(x_TwV: Tensor, plan: UnifiedPlan, ulysses: Channel, keep: Keep) -> tuple[Tensor, ...]:
    """Return all heads (B, S, N, V) of this rank's tokens and, if there are joint queries, (B, J, N, V) of theirs."""
    x, shared, ranks = x_TwV.unflatten(0, (plan.batch, -1)), plan.joint_queries, plan.heads.ulysses
    if ranks > 1:
        if shared:  # as tokens of every rank
            mine, everyones = x[:, :-shared].unflatten(1, (ranks, -1)), x[:, None, -shared:]
            x = torch.cat((mine, everyones.expand(-1, ranks, -1, -1, -1)), 2).flatten(1, 2)
        x = HeadsToSeq.apply(x.flatten(0, 1), plan.heads, plan.batch, ulysses, keep)
    return (x[:, :-shared], x[:, -shared:]) if shared else (x,)


def _over_heads(weights_BTk: Tensor, ulysses: Channel) -> Tensor:
    """Return the sums (B, S, k) over the ulysses ranks of the weights of this rank's tokens."""
    if ulysses.size == 1:
        return weights_BTk
    parts = weights_BTk.unflatten(1, (ulysses.size, -1)).transpose(0, 1)
    sizes = [parts[0].numel()] * ulysses.size
    with named("weights of chosen keys"):
        return ulysses.all_to_all(parts.flatten(), sizes, sizes).view_as(parts).sum(0)


def _with_joint(x_TNH: Tensor | None, joint_BJNH: Tensor | None, batch: int, heads: Range) -> Tensor:
    """Return the tokens of a rank's heads, in each row followed by the joint ones."""
    if joint_BJNH is None:
        assert x_TNH is not None
        return x_TNH
    joint = _heads_contiguous(joint_BJNH)[0][:, :, slice(*heads)]
    return (joint if x_TNH is None else torch.cat((x_TNH.unflatten(0, (batch, -1)), joint), 1)).flatten(0, 1)


class SelfAttention(torch.autograd.Function):
    """`unified_attention` of a sequence to itself: `apply(q_BSNH, k_BSKH, v_BSKV, sinks_N, operation)` -> out_BSNV."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, operation: AttentionOp):
        out, *saved = unified_forward(q, k, v, operation, sinks)
        ctx.save_for_backward(sinks, *(saved if operation.ulysses.size > 1 else (out, *saved, q, k, v)))
        ctx.head_dim, ctx.operation = q.shape[-1], operation._replace(keep=compute_now)  # which holds results
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        sinks, *saved = ctx.saved_tensors
        grads = unified_backward(dout, saved, ctx.head_dim, ctx.operation, sinks)
        return *grads, *[None] * (5 - len(grads))


def unified_forward(
    q_BSNH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, operation: AttentionOp, sinks: Tensor | None = None
) -> Sequence[Tensor]:
    """Compute `unified_attention` of a sequence to itself for a caller that saves tensors itself. While one group of
    heads computes, the next one's q, k and v arrive, and the previous one's results leave.

    Returns:
        out (B, S, N, V); without ulysses also lse (T, N), else of each group of heads lse (T, w) for the w heads of
        this rank, its q, k and v (T, X), and its part of out (T, w, V). None shares memory with another or with the
        arguments.
    """
    plan, program, ulysses, ring, keep = operation
    assert isinstance(program, RingProgram)

    def compute() -> tuple[Tensor, ...]:
        batch, tensors = q_BSNH.shape[0], _heads_contiguous(q_BSNH, k_BSKH, v_BSKV)
        if ulysses.size == 1:
            q, k, v = (x.flatten(0, 1) for x in tensors)
            out, lse = ring_forward(q, k, v, sinks, program, ring)
            return out.view(batch, -1, *out.shape[1:]), lse
        programs, head_dims = program.by_group or (program,), [x.shape[-1] for x in tensors]

        def start(number: int, qkv: Tensor) -> tuple[Tensor, Sequence[Tensor], Blocks | None]:
            q, k, v = separated_heads(qkv, plan.heads.by_group[number], ulysses.rank, *head_dims)
            return qkv, (q, k, v), start_ring(programs[number], ring, k, v) if q.shape[1] else None

        total = SequenceTotal(plan.heads, batch, ulysses, q_BSNH.shape[1], (v_BSKV,))
        arrivals = _Arrivals(plan.heads.by_group, lambda heads: post_to_heads(tensors, heads, ulysses), start)
        saved, leaving = [], []
        for number, heads in enumerate(plan.heads.by_group):
            qkv, (q, k, v), blocks = arrivals.take(number)
            if blocks is not None:
                call = _own_sinks(sinks, heads, plan), programs[number], ring, blocks
                out, lse = ring_forward(q, k, v, *call, partial(arrivals.between, number, ring.size))
            else:  # a rank with fewer heads than there are groups or ranks
                out, lse = v.new_zeros(len(q), 0, v.shape[-1]), v.new_zeros(len(q), 0, dtype=accumulate_dtype(v.dtype))
                arrivals.between(number, ring.size, max(1, ring.size - 1))
            saved += [lse, qkv, out]
            leaving.append(total.post(heads, saved[-1:]))
        for finish in leaving:
            finish()
        return *total.result(), *saved

    return keep(("attention", q_BSNH.shape, k_BSKH.shape, v_BSKV.shape), compute)


def unified_backward(
    dout_BSNV: Tensor, saved: Sequence[Tensor], head_dim: int, operation: AttentionOp, sinks: Tensor | None = None
) -> list[Tensor]:
    """Return the gradients of q, k, v and, if given, of sinks, without shared memory.

    saved: with ulysses all results of `unified_forward` but the first, else both results and its arguments q, k and v.
    """
    plan, program, ulysses, ring, _ = operation
    assert isinstance(program, RingProgram)
    batch, tokens, v_head_dim = dout_BSNV.shape[0], dout_BSNV.shape[1], dout_BSNV.shape[-1]
    (dout_BSNV,) = _heads_contiguous(dout_BSNV)
    if ulysses.size == 1:
        out, lse, *inputs = saved
        q, k, v, out, dout = (x.flatten(0, 1) for x in (*_heads_contiguous(*inputs), out, dout_BSNV))
        *grads, dsinks = ring_backward(dout, None, q, k, v, out, lse, sinks, program, ring)()
        grads = [x.view(batch, -1, *x.shape[1:]) for x in grads]
        return grads if dsinks is None else [*grads, dsinks]
    groups, programs, head_dims = plan.heads.by_group, program.by_group or (program,), (head_dim, head_dim, v_head_dim)

    def start(number: int, dout: Tensor) -> tuple[Tensor, Sequence[Tensor], Blocks | None]:
        q, k, v = separated_heads(saved[3 * number + 1], groups[number], ulysses.rank, *head_dims)
        blocks = start_ring(programs[number], ring, k, v) if q.shape[1] else None
        return separated_heads(dout, groups[number], ulysses.rank, v_head_dim)[0], (q, k, v), blocks

    arrivals = _Arrivals(groups, lambda heads: post_to_heads((dout_BSNV,), heads, ulysses), start)
    total = SequenceTotal(plan.heads, batch, ulysses, tokens, [dout_BSNV.new_empty(0, size) for size in head_dims])
    computed: list[Callable[[], tuple[Any, ...]]] = []
    leaving, all_dsinks = [], None if sinks is None else torch.zeros_like(sinks)

    def leave(number: int) -> None:
        *grads, dsinks = computed.pop()()
        if dsinks is not None and all_dsinks is not None:
            all_dsinks[slice(*groups[number].q_ranges[ulysses.rank])] = dsinks
        leaving.append(total.post(groups[number], grads))

    def between(number: int, step: int) -> None:
        if step == 1 and len(leaving) < number:
            leave(number - 1)
        arrivals.between(number, ring.size, step)

    for number, heads in enumerate(groups):
        dout, (q, k, v), blocks = arrivals.take(number)
        lse, _, out = saved[3 * number : 3 * number + 3]
        if blocks is not None:
            call = _own_sinks(sinks, heads, plan), programs[number], ring, blocks
            computed.append(ring_backward(dout, None, q, k, v, out, lse, *call, partial(between, number)))
            del dout, blocks  # their memory
        else:
            computed.append(partial(tuple, (q, k, v, None)))
            for step in range(1, ring.size + 1):
                between(number, step)
        if ring.size == 1:
            leave(number)  # else its last messages travel during the first step of the next group
    if ring.size > 1:
        leave(len(groups) - 1)
    for finish in leaving:
        finish()
    return [*total.result(), *([] if all_dsinks is None else [all_dsinks])]


class _Arrivals:
    """The exchanges of the groups of heads of a call, each posted when the one before has arrived. post: starts an
    exchange, as `post_to_heads`. start: called with what a group has received, to post the first messages of its ring;
    its result is what `take` returns."""

    def __init__(
        self,
        groups: Sequence[HeadPlan],
        post: Callable[[HeadPlan], Callable[[], Tensor]],
        start: Callable[[int, Tensor], tuple[Tensor, Sequence[Tensor], Blocks | None]],
    ) -> None:
        self._groups, self._post, self._start, self._begun = groups, post, start, 0
        self._arriving: list[Callable[[], Tensor]] = [post(groups[0])]
        self._started: list[tuple[Tensor, Sequence[Tensor], Blocks | None]] = []

    def take(self, number: int) -> tuple[Tensor, Sequence[Tensor], Blocks | None]:
        """Return what has been started for a group, in `between` or now, and forget it."""
        self._begin(number)
        return self._started.pop()

    def between(self, number: int, ring: int, step: int) -> None:
        """Start the next group after a step of this one, before its last step if there are several."""
        if step == max(1, ring - 1) and number + 1 < len(self._groups):
            self._begin(number + 1)

    def _begin(self, number: int) -> None:
        if number == self._begun:
            self._started.append(self._start(number, self._arriving.pop()()))
            self._begun += 1
            if self._begun < len(self._groups):
                self._arriving.append(self._post(self._groups[self._begun]))


def _heads_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Make head dims contiguous, which fused kernels assume without checking."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _own_sinks(sinks: Tensor | None, heads: HeadPlan, plan: UnifiedPlan) -> Tensor | None:
    return None if sinks is None else sinks[slice(*heads.q_ranges[plan.ulysses_rank])]
