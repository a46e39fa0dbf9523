"""Transfer values of samples from the ranks that produced them to the ranks that consume them, each once.

The leader that has a sample sends it, as in ReaL (arXiv 2406.14088); a receiver gets what it lacks, in one message per
sender. All sizes are known in advance, so messages are posted early and waited for where they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from usp.rlhf.graph.keys import KeyKind
from usp.rlhf.plan.plan import CallLayout

Lengths = Mapping[str, Sequence[int]]  # key of sequences -> number of tokens by sample id
Store = dict[str, dict[int, Tensor]]  # key -> sample id -> value, of the values on this rank


@dataclass(frozen=True)
class TransferEnd:
    """The producer or a consumer of a transfer: ids of each data-parallel index, and keys to send or receive."""

    layout: CallLayout
    ids: tuple[tuple[int, ...], ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class TransferPlan:
    """The messages of a transfer: (key, id) in order, for each pair of (source, target) ranks."""

    items: Mapping[tuple[int, int], tuple[tuple[str, int], ...]]

    def sent(self, rank: int, kinds: Mapping[str, KeyKind], lengths: Lengths) -> int:
        """Return the bytes that a rank sends."""
        return sum(message_bytes(m, kinds, lengths) for (source, _), m in self.items.items() if source == rank)

    def received(self, rank: int, kinds: Mapping[str, KeyKind], lengths: Lengths) -> int:
        """Return the bytes that a rank receives, the minimum: exactly what it lacks."""
        return sum(message_bytes(m, kinds, lengths) for (_, target), m in self.items.items() if target == rank)


def message_bytes(message: Sequence[tuple[str, int]], kinds: Mapping[str, KeyKind], lengths: Lengths) -> int:
    """Return the size of a message."""
    items = ((kinds[key], i) for key, i in message)
    return sum((lengths[kind.tokens][i] if kind.tokens else 1) * kind.dtype.itemsize for kind, i in items)


def plan_transfer(
    producer: TransferEnd, consumers: Sequence[TransferEnd], served: Sequence[TransferEnd] = ()
) -> TransferPlan:
    """Plan the messages that bring outputs of `producer` to the ranks of `consumers`.

    Args:
        served: consumers that already have their inputs.
    """
    leaders = {i: leader for leader, ids in zip(producer.layout.leaders, producer.ids, strict=True) for i in ids}
    produced = set(producer.keys)

    def needs(ends: Sequence[TransferEnd]) -> dict[int, set[tuple[str, int]]]:
        found: dict[int, set[tuple[str, int]]] = {}
        for end in ends:
            keys = produced & set(end.keys)
            for ranks, ids in zip(end.layout.groups, end.ids, strict=True):
                wanted = {(key, i) for key in keys for i in ids}
                for rank in ranks:
                    found.setdefault(rank, set()).update(wanted)
        return found

    held = needs(served)
    items: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for target, wanted in sorted(needs(consumers).items()):
        for key, i in sorted(wanted - held.get(target, set())):
            if leaders[i] != target:
                items.setdefault((leaders[i], target), []).append((key, i))
    return TransferPlan({pair: tuple(message) for pair, message in items.items()})


@dataclass(frozen=True, eq=False)
class PendingTransfer:
    """Posted messages of this rank, with the buffers that must stay alive until they complete."""

    works: Sequence[dist.Work]
    outgoing: Sequence[Tensor]
    incoming: Mapping[int, Tensor]
    plan: TransferPlan
    kinds: Mapping[str, KeyKind]
    lengths: Lengths

    def wait(self, store: Store) -> None:
        """Wait, and put the received values into the store."""
        for work in self.works:
            work.wait()
        for source, received in self.incoming.items():
            message = self.plan.items[source, dist.get_rank()]
            sizes = [message_bytes([item], self.kinds, self.lengths) for item in message]
            for (key, i), piece in zip(message, received.cpu().split(sizes), strict=True):
                value = piece.clone().view(self.kinds[key].dtype)  # pieces may be misaligned for their dtype
                store.setdefault(key, {})[i] = value if self.kinds[key].tokens else value.reshape(())


def post_transfer(
    plan: TransferPlan,
    store: Store,
    kinds: Mapping[str, KeyKind],
    lengths: Lengths,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    tag: int,
) -> PendingTransfer:
    """Post this rank's messages, one per peer, without waiting.

    Point to point: a collective that waits for one sender would delay the next one in its group.

    Args:
        kinds, lengths: of the keys in the plan.
        tag: unique among the group's concurrent transfers.
    """
    rank = dist.get_rank()
    outgoing, incoming, posts = [], {}, []
    for (source, target), message in plan.items.items():
        if source == rank:
            values = [store[key][i].reshape(-1).contiguous().view(torch.uint8) for key, i in message]
            outgoing.append(torch.cat(values).to(device))
            posts.append(dist.P2POp(dist.isend, outgoing[-1], target, group, tag))
        elif target == rank:
            incoming[source] = torch.empty(message_bytes(message, kinds, lengths), dtype=torch.uint8, device=device)
            posts.append(dist.P2POp(dist.irecv, incoming[source], source, group, tag))
    works = dist.batch_isend_irecv(posts) if posts else []
    return PendingTransfer(works, outgoing, incoming, plan, kinds, lengths)
