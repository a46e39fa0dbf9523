"""A counter of the payload bytes that this rank sends, for any code that uses torch.distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

GroupOp: TypeAlias = tuple[tuple[int, ...], str]


class SentBytes(TorchDispatchMode):
    """Counts the payload bytes that this rank sends to OTHER ranks inside the block, in any collective.

    Collectives are counted in torch's dispatcher: all-to-alls by their exact splits, point-to-point sends, all-gathers,
    reduce-scatters, and all-reduces as reduce-scatter plus all-gather.

        with SentBytes() as sent:
            step()
        print(sent.total, sent.by_op, sent.by_group)

    Attributes:
        by_op: bytes by collective.
        by_group: bytes by (global ranks of the group, collective).
        calls: number of calls, likewise. Receives, barriers and groups of one rank are not counted.

    Raises NotImplementedError for an unsupported collective inside the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()
        self.by_group: Counter[GroupOp] = Counter()
        self.calls: Counter[GroupOp] = Counter()

    @property
    def total(self) -> int:
        return sum(self.by_op.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count(func, args)
        return func(*args, **(kwargs or {}))

    def count(self, func: Any, args: Sequence[Any], times: int = 1) -> None:
        """Count equal calls of an operator, if it is a collective."""
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        name = func.overloadpacket.__name__
        if name in _SENDS_NOTHING:
            return
        if name not in _SENT:
            raise NotImplementedError(f"SentBytes does not support {func}")
        nbytes, group = times * _SENT[name](*args), _group_among(func, args)
        self.by_op[name] += nbytes
        if group.size() > 1:
            key = (tuple(dist.get_process_group_ranks(group)), name)
            self.by_group[key] += nbytes
            self.calls[key] += times


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _group(group: Any) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, torch.ScriptObject):  # argument of c10d operators
        return dist.ProcessGroup.unbox(group)
    return dist.distributed_c10d._resolve_process_group(group)  # functional collectives get the group's name


def _group_among(func: Any, args: Sequence[Any]) -> dist.ProcessGroup:
    arguments = zip(func._schema.arguments, args, strict=False)  # args omits trailing defaults
    return _group(next(value for argument, value in arguments if argument.name in ("process_group", "group_name")))


def _all_to_all_single(input: torch.Tensor, splits: Sequence[int], group: Any) -> int:
    group = _group(group)
    rows = splits or [input.size(0) // group.size()] * group.size()
    row_bytes = _nbytes([input]) // max(input.size(0), 1)
    return row_bytes * sum(count for peer, count in enumerate(rows) if peer != group.rank())


def _all_gather(inputs: Sequence[torch.Tensor], group: Any) -> int:
    return _nbytes(inputs) * (_group(group).size() - 1)


def _reduce_scatter(inputs: Sequence[torch.Tensor], group: Any) -> int:
    size = _group(group).size()
    return _nbytes(inputs) * (size - 1) // size


_SENDS_NOTHING = frozenset(
    {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}
)
_SENT: Mapping[str, Callable[..., int]] = {
    "send": lambda tensors, *_: _nbytes(tensors),
    "alltoall_base_": lambda out, input, group, out_splits, splits, *_: _all_to_all_single(input, splits, group),
    "alltoall_": lambda outs, inputs, group, *_: _nbytes(inputs) - _nbytes([inputs[_group(group).rank()]]),
    "_allgather_base_": lambda out, input, group, *_: _all_gather([input], group),
    "allgather_": lambda outs, inputs, group, *_: _all_gather(inputs, group),
    "allgather_into_tensor_coalesced_": lambda outs, inputs, group, *_: _all_gather(inputs, group),
    "_reduce_scatter_base_": lambda out, input, group, *_: _reduce_scatter([input], group),
    "reduce_scatter_": lambda outs, inputs, group, *_: _reduce_scatter(list(chain.from_iterable(inputs)), group),
    "reduce_scatter_tensor_coalesced_": lambda outs, inputs, group, *_: _reduce_scatter(inputs, group),
    "allreduce_": lambda tensors, group, *_: 2 * _reduce_scatter(tensors, group),
    "all_to_all_single": lambda input, out_splits, splits, group: _all_to_all_single(input, splits, group),
    "all_gather_into_tensor": lambda input, size, group: _all_gather([input], group),
    "reduce_scatter_tensor": lambda input, op, size, group: _reduce_scatter([input], group),
    "all_reduce": lambda input, op, group: 2 * _reduce_scatter([input], group),
}
