"""Communication over one mesh axis, with a count of the bytes sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor


@dataclass
class Pending:
    """Messages in flight. Call `wait` before reading a received tensor or writing to a sent one."""

    works: list[dist.Work] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # send buffers must outlive the transfer

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.tensors = [], []


class Channel:
    """A process group of one axis, with a count of the payload bytes that this rank has sent to other ranks.

    `group` is None for a single rank, which never communicates.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.sent_bytes = 0

    def post(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Pending:
        """Start point-to-point messages, given as (peer's rank in the group, contiguous tensor), without blocking.

        Messages between two ranks are matched in the order of posting, so all ranks must post in the same order.
        """
        operations = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=peer) for peer, tensor in sends]
        operations += [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=peer) for peer, tensor in receives]
        if not operations:
            return Pending()
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        return Pending(dist.batch_isend_irecv(operations), [tensor for _, tensor in sends])

    def all_to_all(self, x: Tensor, send_splits: list[int], receive_splits: list[int]) -> Tensor:
        """Split flat `x` by `send_splits` (elements per rank) and return the parts sent to this rank, in rank order."""
        received = x.new_empty(sum(receive_splits))
        dist.all_to_all_single(received, x, receive_splits, send_splits, group=self.group)
        self.sent_bytes += (x.numel() - send_splits[self.rank]) * x.element_size()
        return received
