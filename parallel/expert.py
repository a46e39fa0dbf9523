"""Expert parallelism: tokens are sent to the ranks of the experts they are routed to, and the results sent back.

    rows, one per (token, choice), sorted by expert
      -> counts: number of rows per expert, a small all-to-all -> DispatchPlan
      -> dispatch: all-to-all with those splits; rows from all ranks, sorted by this rank's experts
      -> experts, each on its own rows
      -> combine: the inverse all-to-all -> results of each token, weighted and summed

GShard (arXiv 2006.16668, section 2) without a capacity limit: no token is dropped, so the splits are uneven.

T tokens of this rank, K choices per token, H hidden size, R = T * K local rows, G rows received, E experts, O and I
output and input sizes of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function


@dataclass(frozen=True)
class ExpertRows:
    """Rows sorted by expert: how many each expert has, and where they end, int32 on the rows' device."""

    counts: list[int]
    ends: Tensor


@dataclass(frozen=True)
class DispatchPlan:
    """Row counts of the all-to-all, for one rank of an expert-parallel group.

    Attributes:
        send_splits: number of rows sent to each rank of the group.
        received: for each rank of the group, the number of rows received for each of this rank's experts.
        rows: that each of this rank's experts gets from all ranks.
    """

    send_splits: list[int]
    received: list[list[int]]
    rows: ExpertRows

    @property
    def receive_splits(self) -> list[int]:
        return [sum(rows) for rows in self.received]


def plan_dispatch(counts_E: Tensor, group: dist.ProcessGroup) -> DispatchPlan:
    """Make this rank's plan from its row count for every expert. Collective over the group: E numbers per rank."""
    ranks = dist.get_world_size(group)
    assert counts_E.numel() % ranks == 0, f"{counts_E.numel()} experts over {ranks} ranks"
    received_E = counts_E
    if ranks > 1:
        received_E = torch.empty_like(counts_E)
        dist.all_to_all_single(received_E, counts_E, group=group)
    both = torch.stack((counts_E, received_E)).view(2, ranks, -1)
    ends = both[1].sum(0).cumsum(0, dtype=torch.int32)
    sent, received = both.tolist()
    rows = ExpertRows([sum(rows) for rows in zip(*received, strict=True)], ends)
    return DispatchPlan([sum(rows) for rows in sent], received, rows)


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
    experts: Callable[[Tensor, ExpertRows], Tensor],
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, (T, H). Collective over the group.

    Differentiable and deterministic. The backward is collective too; every rank takes part, even if its experts get no
    rows.

    Args:
        choices_TK: global expert indices of each token; rank r holds the experts from r * num_experts / ranks on.
        experts: (rows sorted by local expert, rows of each) -> the same number of rows. It is also called with no rows,
            and must then still connect its parameters to the result.
    """
    order_R, counts_E = sorted_by_expert(choices_TK.flatten(), num_experts)
    inverse_R = order_R.argsort()
    plan = plan_dispatch(counts_E, group)
    rows_RH = _Permute.apply(tokens_TH, order_R, inverse_R, choices_TK.shape[1])
    results_GH = experts(dispatch(rows_RH, plan, group), plan.rows)
    chosen_RH = _Permute.apply(combine(results_GH, plan, group), inverse_R, order_R, 1)
    chosen_TKH = chosen_RH.view(*choices_TK.shape, tokens_TH.shape[1])
    if weights_TK.dtype == chosen_TKH.dtype:  # a product sums without storing weighted rows
        return torch.bmm(weights_TK.unsqueeze(1), chosen_TKH).squeeze(1).clone()  # FSDP2 hooks no views
    return (chosen_TKH * weights_TK.unsqueeze(-1)).sum(dim=1).to(tokens_TH.dtype)


def dispatch(rows_RH: Tensor, plan: DispatchPlan, group: dist.ProcessGroup) -> Tensor:
    """Send rows sorted by global expert; return all ranks' rows for this rank's experts, sorted by expert, (G, H)."""
    return _transposed(_all_to_all(rows_RH, plan.send_splits, plan.receive_splits, group, "dispatch"), plan.received)


def combine(rows_GH: Tensor, plan: DispatchPlan, group: dist.ProcessGroup) -> Tensor:
    """Invert `dispatch`: return every row to the rank and position it came from."""
    rows = _transposed(rows_GH, list(zip(*plan.received, strict=True)))
    return _all_to_all(rows, plan.receive_splits, plan.send_splits, group, "combine")


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


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, name: str) -> Tensor:
    if dist.get_world_size(group) == 1:
        return x
    return _AllToAll.apply(x, send, receive, group, name)


class _AllToAll(torch.autograd.Function):
    """`apply(rows, send splits, receive splits, group, name)` -> the received rows, in rank order."""

    @staticmethod
    def forward(ctx, x, send: list[int], receive: list[int], group: dist.ProcessGroup, name: str):
        ctx.splits = send, receive, group, name
        return _exchange(x, send, receive, group, name)

    @staticmethod
    def backward(ctx, grad):
        send, receive, group, name = ctx.splits
        return _exchange(grad, receive, send, group, f"{name} (backward)"), None, None, None, None


def _exchange(x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, name: str) -> Tensor:
    received = x.new_empty(sum(receive), *x.shape[1:])
    with record_function(f"expert all-to-all: {name}"):
        dist.all_to_all_single(received, x.contiguous(), receive, send, group=group)
    return received


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
