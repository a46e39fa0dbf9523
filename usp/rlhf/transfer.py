"""Values of samples go from the ranks that made them to the ranks that take them, each once.

The sender is the leader that has a sample (ReaL, arXiv 2406.14088, section 4.2); a receiver gets what it lacks, in one
all-to-all of bytes among the ranks of both calls. All sizes are known beforehand, so it is posted and not waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .keys import KeyKind
from .plan import CallLayout

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


@dataclass(frozen=True)
class Transfer:
    """A plan on its way. `ranks` are those of `group`, ascending."""

    plan: TransferPlan
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    kinds: Mapping[str, KeyKind]
    lengths: Lengths

    def start(self, store: Store, device: torch.device) -> Arriving:
        """Post the messages of this rank, and return without waiting for any."""
        rank = dist.get_rank()
        outgoing = [self.plan.items.get((rank, target), ()) for target in self.ranks]
        incoming = [self.plan.items.get((source, rank), ()) for source in self.ranks]
        values = [
            store[key][i].reshape(-1).contiguous().view(torch.uint8) for message in outgoing for key, i in message
        ]
        buffer = (
            torch.cat([value.view(torch.uint8) for value in values]).to(device)
            if values
            else torch.empty(0, dtype=torch.uint8, device=device)
        )
        sizes = [message_bytes(message, self.kinds, self.lengths) for message in incoming]
        into = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        out_sizes = [message_bytes(message, self.kinds, self.lengths) for message in outgoing]
        work = dist.all_to_all_single(into, buffer, sizes, out_sizes, group=self.group, async_op=True)
        expected = tuple(item for message in incoming for item in message)
        return Arriving(work, buffer, into, expected, self.kinds, self.lengths)


@dataclass(frozen=True)
class Arriving:
    """Messages that were posted. `outgoing` is kept until they have left."""

    work: dist.Work
    outgoing: Tensor
    incoming: Tensor
    expected: tuple[tuple[str, int], ...]
    kinds: Mapping[str, KeyKind]
    lengths: Lengths

    def wait(self, store: Store) -> None:
        """Put what arrives into the store."""
        self.work.wait()
        for key, i, value in self._values(self.incoming.cpu()):
            store.setdefault(key, {})[i] = value

    def _values(self, received: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        sizes = [_numel(self.kinds[key], self.lengths, i) * self.kinds[key].dtype.itemsize for key, i in self.expected]
        for (key, i), piece in zip(self.expected, received.split(sizes), strict=True):
            value = piece.clone().view(self.kinds[key].dtype)  # a piece may lie where its type must not begin
            yield key, i, value if self.kinds[key].tokens else value.reshape(())


def _numel(kind: KeyKind, lengths: Lengths, i: int) -> int:
    return lengths[kind.tokens][i] if kind.tokens else 1
