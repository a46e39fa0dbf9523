"""Expert parallelism: tokens are sent to the ranks of the experts they are routed to, and the results sent back.

    rows, one per (token, choice), sorted by expert
      -> counts: number of rows per expert, a small all-to-all -> DispatchPlan
      -> dispatch: all-to-all with those splits; rows from all ranks, sorted by this rank's experts
      -> experts, each on its own rows
      -> combine: the inverse all-to-all -> results of each token, weighted and summed

A rank's experts may be divided into chunks, by which rows are sorted first, so that the rows of one chunk travel while
the experts of another compute. An expert has the same rows as without chunks, so results are the same.

    dispatch 0 | wait, dispatch 1, experts 0, combine 0 | wait, dispatch 2, experts 1, combine 1 | ... | wait for all

GShard (arXiv 2006.16668, section 2) without a capacity limit: no token is dropped, so the splits are uneven.

T tokens of this rank, K choices per token, H hidden size, R = T * K local rows, G rows received, E experts, C chunks, N
ranks, O and I output and input sizes of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function


@dataclass(frozen=True)
class ExpertRows:
    """Rows sorted by expert: how many each expert has, and where they end, int32 on the rows' device."""

    counts: list[int]
    ends: Tensor


Experts: TypeAlias = Callable[[Tensor, ExpertRows, int], Tensor]  # rows sorted by expert, number of the chunk


@dataclass(frozen=True)
class DispatchPlan:
    """Row counts of the all-to-all of a chunk of experts, for one rank of an expert-parallel group.

    Attributes:
        send_splits: number of rows sent to each rank of the group.
        received: for each rank of the group, the number of rows received for each of this rank's experts in the chunk.
        rows: that each of these experts gets from all ranks.
    """

    send_splits: list[int]
    received: list[list[int]]
    rows: ExpertRows

    @property
    def receive_splits(self) -> list[int]:
        return [sum(rows) for rows in self.received]


def plan_dispatch(counts_E: Tensor, group: dist.ProcessGroup, chunks: int = 1) -> list[DispatchPlan]:
    """Make this rank's plan for each chunk of its experts, from its row count for every expert, sorted by chunk, rank
    and expert. Collective over the group: E numbers per rank, and one copy to the host."""
    ranks = dist.get_world_size(group)
    assert counts_E.numel() % (ranks * chunks) == 0, f"{counts_E.numel()} experts over {ranks} ranks, {chunks} chunks"
    sent_NCE = received_NCE = counts_E.view(chunks, ranks, -1).transpose(0, 1).contiguous()
    if ranks > 1:
        received_NCE = torch.empty_like(sent_NCE)
        dist.all_to_all_single(received_NCE, sent_NCE, group=group)
    ends_CE = received_NCE.sum(0).cumsum(1, dtype=torch.int32)
    numbers = torch.stack((sent_NCE, received_NCE), dim=2).transpose(0, 1).tolist()
    plans = []
    for of_ranks, ends in zip(numbers, ends_CE, strict=True):
        sent, received = zip(*of_ranks, strict=True)
        rows = ExpertRows([sum(rows) for rows in zip(*received, strict=True)], ends)
        plans.append(DispatchPlan([sum(rows) for rows in sent], list(received), rows))
    return plans


def sorted_by_expert(choices_R: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts rows by expert, equal ones in place, and the number of rows of each expert.

    Unlike `torch.bincount`, it does not read values back to the host.
    """
    sorted_R, order_R = choices_R.sort(stable=True)
    experts = torch.arange(num_experts + 1, device=choices_R.device)
    return order_R, torch.searchsorted(sorted_R, experts).diff()


def mix_experts(
    tokens_TH: Tensor,
    choices_TK: Tensor,
    weights_TK: Tensor,
    *,
    num_experts: int,
    group: dist.ProcessGroup,
    experts: Experts,
    chunks: int = 1,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, (T, H). Collective over the group.

    Differentiable and deterministic. The backward is collective too; every rank takes part, even if its experts get no
    rows.

    Args:
        choices_TK: global expert indices of each token; rank r holds the experts from r * num_experts / ranks on.
        experts: (rows sorted by local expert, rows of each, number of the chunk) -> the same number of rows. It is also
            called with no rows, and must then still connect its parameters to the result.
        chunks: of equally many adjacent experts of a rank, whose messages overlap with each other's compute.
    """
    ranks, keys_R = dist.get_world_size(group), choices_TK.flatten()
    if chunks > 1:
        numbers = torch.arange(num_experts, device=keys_R.device)
        keys_R = numbers.view(chunks, ranks, -1).transpose(0, 1).flatten()[keys_R]
    order_R, counts_E = sorted_by_expert(keys_R, num_experts)
    inverse_R = order_R.argsort()
    plans = plan_dispatch(counts_E, group, chunks)
    rows_RH = _Permute.apply(tokens_TH, order_R, inverse_R, choices_TK.shape[1])
    results_RH = _exchanged(rows_RH, plans, group, experts) if ranks > 1 else experts(rows_RH, plans[0].rows, 0)
    chosen_RH = _Permute.apply(results_RH, inverse_R, order_R, 1)
    chosen_TKH = chosen_RH.view(*choices_TK.shape, tokens_TH.shape[1])
    if weights_TK.dtype == chosen_TKH.dtype:  # a product sums without storing weighted rows
        return torch.bmm(weights_TK.unsqueeze(1), chosen_TKH).squeeze(1).clone()  # FSDP2 hooks no views
    return (chosen_TKH * weights_TK.unsqueeze(-1)).sum(dim=1).to(tokens_TH.dtype)


def _exchanged(rows_RH: Tensor, plans: list[DispatchPlan], group: dist.ProcessGroup, experts: Experts) -> Tensor:
    """Send rows to their experts chunk by chunk, and return the results in the order of the rows. Autograd runs what
    was called last first, so that a backward is in the same order from the last chunk to the first."""
    there, back, returned = _Messages(plans, group, "dispatch", 1), _Messages(plans, group, "combine", -1), []
    posted = _Adjoint.apply(there.scatter, there.gather, rows_RH)
    for chunk, plan in enumerate(plans):
        rows_GH = _Adjoint.apply(partial(there.arrive, chunk), partial(there.depart, chunk), posted[chunk])
        rows_GH = experts(_transposed(rows_GH, plan.received), plan.rows, chunk)
        rows_GH = _transposed(rows_GH, list(zip(*plan.received, strict=True)))
        returned.append(_Adjoint.apply(partial(back.depart, chunk), partial(back.arrive, chunk), rows_GH))
    return _Adjoint.apply(back.gather, back.scatter, *returned)


def _transposed(rows_GH: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
    """Return blocks of rows, of which i, j has `counts[i][j]`, in the order of j, i."""
    if 1 in (len(counts), inner := len(counts[0])):
        return rows_GH
    parts = rows_GH.split([count for row in counts for count in row])
    return torch.cat([part for place in range(inner) for part in parts[place::inner]])


def grouped_linear(
    rows_GI: Tensor,
    weight_EOI: Tensor,
    rows: ExpertRows,
    bias_EO: Tensor | None = None,
    product: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Multiply rows sorted by expert by their expert's matrix, and add its bias: (G, O).

    Uses a grouped matmul if torch supports it, otherwise one matmul per expert. The matrices may be a transposed view.
    The gradient of an expert without rows is zero. product: of rows (G, I), matrices (E, I, O) and the end of each
    expert's rows, in place of torch's.
    """
    if product is not None:
        out_GO = product(rows_GI, weight_EOI.transpose(1, 2), rows.ends)
    elif _has_grouped_mm(weight_EOI):
        out_GO = torch.nn.functional.grouped_mm(rows_GI, weight_EOI.transpose(1, 2), offs=rows.ends)
    else:
        parts = zip(rows_GI.split(rows.counts), weight_EOI.unbind(), strict=True)
        out_GO = torch.cat([torch.nn.functional.linear(part, matrix) for part, matrix in parts])
    if bias_EO is None:
        return out_GO
    # The backward of an indexed bias would sum in any order.
    return torch.cat([part + bias for part, bias in zip(out_GO.split(rows.counts), bias_EO.unbind(), strict=True)])


def _has_grouped_mm(weight_EOI: Tensor) -> bool:
    """Check whether torch supports a grouped matmul: rows aligned to 16 bytes, no float64, compute capability 8."""
    aligned = all(size * weight_EOI.element_size() % 16 == 0 for size in weight_EOI.shape[1:])
    capable = not weight_EOI.is_cuda or torch.cuda.get_device_capability(weight_EOI.device) >= (8, 0)
    return aligned and capable and weight_EOI.dtype in (torch.float32, torch.bfloat16, torch.float16)


class _Messages:
    """All-to-alls between a rank's rows (R, H), one chunk after another, and those of its experts (G, H).

    `scatter` posts the first chunk, and `arrive` waits for one and posts the next, or with `step` -1 from the last to
    the first; `depart` posts one, and `gather` waits for all. Each pair is the adjoint of the other. What posts returns
    empty tensors that what waits takes, so that autograd keeps the order and nothing reads what has not arrived.
    """

    def __init__(self, plans: Sequence[DispatchPlan], group: dist.ProcessGroup, name: str, step: int) -> None:
        self._plans, self._group, self._name, self._step = plans, group, name, step
        self._sizes = [sum(plan.send_splits) for plan in plans]
        self._pending: dict[int, tuple[dist.Work | None, Tensor, Tensor]] = {}
        self._later: list[tuple[int, Tensor]] = []  # chunks that `scatter` has left, the next one last
        self._whole: Tensor | None = None

    def scatter(self, rows_RH: Tensor) -> tuple[Tensor, ...]:
        self._later = [*enumerate(rows_RH.contiguous().split(self._sizes))][:: -self._step]
        self._post_next()
        return tuple(rows_RH.new_empty(0) for _ in self._plans)

    def arrive(self, chunk: int, _posted: Tensor) -> Tensor:
        received = self._wait(chunk)
        self._post_next()
        return received

    def depart(self, chunk: int, rows_GH: Tensor) -> Tensor:
        if self._whole is None:
            self._whole = rows_GH.new_empty(sum(self._sizes), *rows_GH.shape[1:])
        plan, received = self._plans[chunk], self._whole.split(self._sizes)[chunk]
        self._post(chunk, rows_GH.contiguous(), plan.receive_splits, received, plan.send_splits)
        return rows_GH.new_empty(0)

    def gather(self, *posted: Tensor) -> Tensor | None:
        for chunk in range(len(posted)):
            self._wait(chunk)
        whole, self._whole = self._whole, None
        return whole

    def _post_next(self) -> None:
        if self._later:
            chunk, part = self._later.pop()
            there, here = self._plans[chunk].send_splits, self._plans[chunk].receive_splits
            self._post(chunk, part, there, part.new_empty(sum(here), *part.shape[1:]), here)

    def _wait(self, chunk: int) -> Tensor:
        work, _, received = self._pending.pop(chunk)
        if work is not None:
            with record_function(f"expert all-to-all: {self._name}, wait"):
                work.wait()
        return received

    def _post(self, chunk: int, rows: Tensor, send: list[int], received: Tensor, receive: list[int]) -> None:
        with record_function(f"expert all-to-all: {self._name}"):
            overlaps = len(self._plans) > 1
            work = dist.all_to_all_single(received, rows, receive, send, group=self._group, async_op=overlaps)
        self._pending[chunk] = work, rows, received


class _Adjoint(torch.autograd.Function):
    """`apply(forward, backward, *tensors)` -> forward(*tensors), of which `backward` is the adjoint."""

    @staticmethod
    def forward(ctx, forward: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor):
        ctx.adjoint = backward
        return forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        found = ctx.adjoint(*grads)
        return None, None, *(found if isinstance(found, tuple) else (found,))


class _Permute(torch.autograd.Function):
    """`apply(x, index, inverse, repeats)` -> x[index // repeats]: each row of x, `repeats` times, permuted, and back by
    the permutation `inverse`. The backward of plain indexing would sum in any order."""

    @staticmethod
    def forward(ctx, x, index: Tensor, inverse: Tensor, repeats: int):
        ctx.save_for_backward(inverse)
        ctx.repeats = repeats
        return x[index // repeats]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        rows = grad[inverse]
        return rows.view(-1, ctx.repeats, *rows.shape[1:]).sum(dim=1), None, None, None
