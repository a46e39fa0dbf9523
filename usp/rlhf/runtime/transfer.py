"""Values of samples go from the ranks that made them to the ranks that take them, each once.

The sender is the leader that has a sample, as in ReaL (arXiv 2406.14088); a receiver gets what it lacks, in one message
of bytes from each sender. All sizes are known beforehand, so messages are posted and waited for where they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from usp.rlhf.graph.keys import KeyKind
from usp.rlhf.plan.plan import CallLayout

Lengths = Mapping[str, Sequence[int]]  # key of sequences -> tokens of each sample of the step, by id
Store = dict[str, dict[int, Tensor]]  # key -> sample -> value: what this rank holds


@dataclass(frozen=True)
class Part:
    """A call's side of a transfer: the ids of each data-parallel index, and the keys that it gives or takes."""

    layout: CallLayout
    ids: tuple[tuple[int, ...], ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class TransferPlan:
    """What travels: for each pair of (source, target) ranks, (key, id) in order."""

    items: Mapping[tuple[int, int], tuple[tuple[str, int], ...]]

    def sent(self, rank: int, kinds: Mapping[str, KeyKind], lengths: Lengths) -> int:
        """Bytes that a rank sends."""
        return sum(message_bytes(m, kinds, lengths) for (source, _), m in self.items.items() if source == rank)

    def received(self, rank: int, kinds: Mapping[str, KeyKind], lengths: Lengths) -> int:
        """Bytes that a rank receives: what it needs and has not, so nobody can do with less."""
        return sum(message_bytes(m, kinds, lengths) for (_, target), m in self.items.items() if target == rank)


def message_bytes(message: Sequence[tuple[str, int]], kinds: Mapping[str, KeyKind], lengths: Lengths) -> int:
    """Bytes of a message."""
    return sum(_numel(kinds[key], lengths, i) * kinds[key].dtype.itemsize for key, i in message)


def plan_transfer(producer: Part, consumers: Sequence[Part], served: Sequence[Part] = ()) -> TransferPlan:
    """Who sends which outputs of `producer` to whom, so that the ranks of `consumers` have what they take.

    Args:
        served: consumers that already have theirs.
    """
    leaders = {i: leader for leader, ids in zip(producer.layout.leaders, producer.ids, strict=True) for i in ids}
    made = set(producer.keys)

    def needs(parts: Sequence[Part]) -> dict[int, set[tuple[str, int]]]:
        found: dict[int, set[tuple[str, int]]] = {}
        for part in parts:
            keys = made & set(part.keys)
            for ranks, ids in zip(part.layout.groups, part.ids, strict=True):
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
class Arriving:
    """Messages that were posted, and all tensors that they need until they have left or arrived."""

    works: Sequence[dist.Work]
    outgoing: Sequence[Tensor]
    incoming: Mapping[int, Tensor]
    plan: TransferPlan
    kinds: Mapping[str, KeyKind]
    lengths: Lengths

    def wait(self, store: Store) -> None:
        """Put what arrives into the store."""
        for work in self.works:
            work.wait()
        for source, received in self.incoming.items():
            message = self.plan.items[source, dist.get_rank()]
            sizes = [message_bytes([item], self.kinds, self.lengths) for item in message]
            for (key, i), piece in zip(message, received.cpu().split(sizes), strict=True):
                value = piece.clone().view(self.kinds[key].dtype)  # a piece may lie where its type must not begin
                store.setdefault(key, {})[i] = value if self.kinds[key].tokens else value.reshape(())


@dataclass(frozen=True, eq=False)
class Messenger:
    """Posts the messages of plans. `kinds` and `lengths` are those of the keys that travel."""

    group: dist.ProcessGroup
    device: torch.device
    kinds: Mapping[str, KeyKind]
    lengths: Lengths

    def post(self, plan: TransferPlan, store: Store, tag: int) -> Arriving:
        """Post this rank's messages, one for each peer, and wait for none.

        Point to point: a collective that waits for one sender would hold up the next one of its group.

        Args:
            tag: tells the transfers of a group that may be on their way at the same time apart.
        """
        rank = dist.get_rank()
        outgoing, incoming, posts = [], {}, []
        for (source, target), message in plan.items.items():
            if source == rank:
                values = [store[key][i].reshape(-1).contiguous().view(torch.uint8) for key, i in message]
                outgoing.append(torch.cat(values).to(self.device))
                posts.append(dist.P2POp(dist.isend, outgoing[-1], target, self.group, tag))
            elif target == rank:
                size = message_bytes(message, self.kinds, self.lengths)
                incoming[source] = torch.empty(size, dtype=torch.uint8, device=self.device)
                posts.append(dist.P2POp(dist.irecv, incoming[source], source, self.group, tag))
        works = dist.batch_isend_irecv(posts) if posts else []
        return Arriving(works, outgoing, incoming, plan, self.kinds, self.lengths)


def _numel(kind: KeyKind, lengths: Lengths, i: int) -> int:
    return lengths[kind.tokens][i] if kind.tokens else 1
