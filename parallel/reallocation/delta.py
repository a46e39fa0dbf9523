"""Reallocation again and again into the same tensors, of which only what has changed is sent.

After an optimizer step most bfloat16 weights have the same bits as before. A sender compares each piece that it sends
with what it sent last time, and sends the smallest of these; both sides know which from the number of changed elements:

    count = 0    nothing
    index        positions of 16 bits inside blocks of 65,536 elements, and how many are in each block; values
    mask         a bit per element; values of those that changed
    whole        all values

    round n    encode | counts | payload ............. | apply
    round n+1                   encode | counts | payload ............. | apply

Values are overwritten, not added to, so the result has the bits of a whole reallocation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from usp.parallel.groups import ProcessGroups

from .realloc_plan import ReallocPlan
from .reallocation import BoxPiece, Reallocation, Round, Traffic

_LEAST = 64  # elements of a piece: smaller ones are sent whole, without a count
_BLOCK = 1 << 16  # elements whose positions have 16 bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size: elements compared by bits
# Multiplied by eight bytes that are 0 or 1, the highest byte is their bits, first one lowest.
_PACK = 0x0102040810204080

Encoding = Literal["nothing", "index", "mask", "whole"]


class Delta(NamedTuple):
    """Changed elements of a piece: their number and the bytes that say which they are, and what."""

    changed: int
    content: Tensor


def delta_size(numel: int, itemsize: int, count: int) -> tuple[int, Encoding]:
    """Return the bytes of `count` changed elements of a piece, and in which encoding these are the fewest."""
    if not count:
        return 0, "nothing"
    blocks = -(-numel // _BLOCK)
    sizes: dict[Encoding, int] = {
        "index": count * (2 + itemsize) + (4 * blocks if blocks > 1 else 0),
        "mask": -(-numel // 8) + count * itemsize,
        "whole": numel * itemsize,
    }
    encoding = min(sizes, key=lambda each: sizes[each])
    return sizes[encoding], encoding


def encode(values: Tensor, before: Tensor) -> Delta:
    """Return what changed between two contiguous 1-D tensors of one dtype, bit by bit."""
    kind = _INTEGERS[values.itemsize]
    changed = values.view(kind) != before.view(kind)
    count, numel = int(changed.sum()), len(values)
    _, encoding = delta_size(numel, values.itemsize, count)
    if encoding in ("nothing", "whole"):
        return Delta(count, values[: numel if count else 0].view(torch.uint8))
    if encoding == "mask":
        padded = torch.nn.functional.pad(changed, (0, -numel % 8))
        where = [((padded.view(torch.int64) * _PACK >> 56) & 255).to(torch.uint8)]
        content = values[changed]
    else:
        index = changed.nonzero().view(-1)
        content = values[index]
        blocks = [torch.bincount(index // _BLOCK, minlength=-(-numel // _BLOCK)).to(torch.int32)]
        where = [*(blocks if numel > _BLOCK else ()), (index % _BLOCK - _BLOCK // 2).to(torch.int16)]
    return Delta(count, torch.cat([*(part.view(torch.uint8) for part in where), content.view(torch.uint8)]))


def apply(delta: Delta, part: Tensor, dtype: torch.dtype) -> None:
    """Overwrite the changed elements of a piece, whose values are sent in `dtype`; its own may be larger."""
    count, content, numel = *delta, part.numel()
    size, encoding = delta_size(numel, dtype.itemsize, count)
    assert len(content) == size
    if encoding == "whole":
        part.copy_(content.clone().view(dtype).view(part.shape))
    if encoding in ("nothing", "whole"):
        return
    where, values = content.split([size - count * dtype.itemsize, count * dtype.itemsize])
    if encoding == "mask":
        bits = (where.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=where.device)) & 1
        index = bits.view(-1)[:numel].nonzero().view(-1)
    else:
        of_blocks, low = where.split([len(where) - 2 * count, 2 * count])
        index = low.clone().view(torch.int16).to(torch.int64) + _BLOCK // 2
        if len(of_blocks):
            counts = of_blocks.clone().view(torch.int32).to(torch.int64)
            index += torch.arange(len(counts), device=where.device).repeat_interleave(counts) * _BLOCK
    new = values.clone().view(dtype).to(part.dtype)  # cloned, because elements may be unaligned in a message
    if part.is_contiguous():
        part.view(-1)[index] = new
    else:
        part[torch.unravel_index(index, part.shape)] = new


class DeltaReallocation(Reallocation):
    """Executes a plan, after the first time by sending changed elements. Must be created as `Reallocation`.

    A sender keeps what it sent last, in the dtype in which it is sent, for comparison, but none of
    pieces that lie in its own box of `dst`, which has these values until the end of a run.
    """

    def __init__(self, plan: ReallocPlan, groups: ProcessGroups, device: torch.device) -> None:
        super().__init__(plan, groups, device)
        sent = [piece for round_ in self._pieces for pieces in round_.sends.values() for piece in pieces]
        self._times_sent = Counter(sent)
        self._onward = {piece for piece in sent if self._source(piece) == len(plan.layouts) - 1}
        self._references: dict[BoxPiece, Tensor] = {}
        self._filled = False

    def update(
        self,
        src: Mapping[str, Tensor],
        dst: Mapping[str, Tensor],
        copies: Sequence[Mapping[str, Tensor]] = (),
        *,
        intact: bool = True,
    ) -> Traffic:
        """Copy the weights of `src` to `dst` as `run`, and return what this rank sent and received, counts included.

        All weights are sent whole the first time, and whenever a rank says that `dst` is not intact.

        Args:
            intact: `dst` on this rank has the values of this object's last run, as far as this rank knows.

        Raises ValueError as `run`.
        """
        held = self._held(src, dst, copies)
        known = torch.tensor(int(intact and self._filled), device=self._device)
        if self._group is not None:
            dist.all_reduce(known, dist.ReduceOp.MIN, group=self._group)
        if known:
            return self._send_changes(held)
        self.run(src, dst, copies)
        for piece in self._times_sent.keys() - self._onward:
            own = self.plan.dst.boxes[piece.name].get(self._rank)
            if _is_counted(piece) and (own is None or piece.box.overlap(own) != piece.box):
                self._references[piece] = self._values(piece, held).clone()
        self._filled = True
        return self.traffic

    @torch.no_grad()
    def _send_changes(self, held: Sequence[Mapping[str, Tensor]]) -> Traffic:
        plan, ready, waiting = self.plan, dict[BoxPiece, Delta](), _Arriving([], [], {})
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)  # all that some shares of a route have
        uses, nbytes = Counter(self._times_sent), Counter[str]()
        for round_ in (*self._pieces, Round({}, {})):  # after the last, what it brought is applied
            deltas = {to: [self._delta(piece, held, ready, uses) for piece in ps] for to, ps in round_.sends.items()}
            counts = self._exchange_counts(round_, deltas)
            operations, buffers = [], []
            arriving: dict[BoxPiece, Delta] = {}
            for peer, pieces in round_.receives.items():
                sizes = [
                    delta_size(piece.box.numel, plan.wire_dtype(piece.name).itemsize, count)[0]
                    for piece, count in zip(pieces, counts[peer], strict=True)
                ]
                buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
                operations += [dist.P2POp(dist.irecv, buffer, peer, self._group)] if len(buffer) else []
                arriving |= zip(pieces, map(Delta, counts[peer], buffer.split(sizes)), strict=True)
                nbytes["received"] += (size := len(buffer) + 4 * sum(map(_is_counted, pieces)))
                nbytes["crossed"] += size if plan.host(peer) != plan.host(self._rank) else 0
            for peer, pieces in round_.sends.items():
                buffer = torch.cat([nothing, *(delta.content for delta in deltas[peer])])
                operations += [dist.P2POp(dist.isend, buffer, peer, self._group)] if len(buffer) else []
                nbytes["sent"] += len(buffer) + 4 * sum(map(_is_counted, pieces))
                buffers.append(buffer)
            posted = dist.batch_isend_irecv(operations) if operations else []
            for work in waiting.works:
                work.wait()
            for piece, delta in waiting.deltas.items():
                apply(delta, self._part(piece, -1, held), plan.wire_dtype(piece.name))
            ready |= {piece: delta for piece, delta in waiting.deltas.items() if piece in self._onward}
            waiting = _Arriving(posted, buffers, arriving)
        self._copy_kept(held)
        return self.traffic._replace(**{name: nbytes[name] for name in ("sent", "received", "crossed")})

    def _delta(
        self,
        piece: BoxPiece,
        held: Sequence[Mapping[str, Tensor]],
        ready: dict[BoxPiece, Delta],
        uses: Counter[BoxPiece],
    ) -> Delta:
        """Return what changed in a piece that this rank sends; it is in `ready` until it has been sent everywhere."""
        if piece not in ready:
            values = self._values(piece, held)
            if not _is_counted(piece):
                ready[piece] = Delta(len(values), values.view(torch.uint8))
            elif (reference := self._references.get(piece)) is not None:
                ready[piece] = encode(values, reference)
                reference.copy_(values)
            else:
                before = self._part(piece, -1, held).to(values.dtype).contiguous().view(-1)
                ready[piece] = encode(values, before)
        uses[piece] -= 1
        return ready[piece] if uses[piece] else ready.pop(piece)

    def _exchange_counts(self, round_: Round, deltas: Mapping[int, Sequence[Delta]]) -> dict[int, list[int]]:
        """Send the numbers of changed elements; return, by sender, those of the pieces that this rank receives."""
        operations, told = [], dict[int, Tensor]()
        for peer, pieces in round_.receives.items():
            told[peer] = torch.empty(sum(map(_is_counted, pieces)), dtype=torch.int32, device=self._device)
            operations += [dist.P2POp(dist.irecv, told[peer], peer, self._group)] if len(told[peer]) else []
        for peer, pieces in round_.sends.items():
            of_pieces = [delta.changed for p, delta in zip(pieces, deltas[peer], strict=True) if _is_counted(p)]
            telling = torch.tensor(of_pieces, dtype=torch.int32, device=self._device)
            operations += [dist.P2POp(dist.isend, telling, peer, self._group)] if of_pieces else []
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        counts = {peer: iter(numbers.tolist()) for peer, numbers in told.items()}
        return {
            peer: [next(counts[peer]) if _is_counted(piece) else piece.box.numel for piece in pieces]
            for peer, pieces in round_.receives.items()
        }

    def _source(self, piece: BoxPiece) -> int:
        return self.plan.source(piece.name, self._rank, piece.box)

    def _part(self, piece: BoxPiece, index: int, held: Sequence[Mapping[str, Tensor]]) -> Tensor:
        return held[index][piece.name][self._slices(piece.name, index, piece.box)]

    def _values(self, piece: BoxPiece, held: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the values of a piece that this rank sends, flat and as they are sent."""
        part = self._part(piece, self._source(piece), held)
        return part.to(self._device, self.plan.wire_dtype(piece.name)).contiguous().view(-1)


class _Arriving(NamedTuple):
    """Messages of a round in flight, and what they bring."""

    works: Sequence[dist.Work]
    sent: Sequence[Tensor]  # send buffers must outlive the transfer
    deltas: Mapping[BoxPiece, Delta]


def _is_counted(piece: BoxPiece) -> bool:
    return piece.box.numel >= _LEAST
