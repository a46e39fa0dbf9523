"""Process groups by their ranks, created once and shared by all meshes of a process; agreement of ranks on a value,
before the first collective that would hang if they differed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

ATTENTION = "attention"  # the lane of messages that must not queue behind prefetched parameters
SHOWN_FIELDS, SHOWN_CHARACTERS, SENT_CHARACTERS = 20, 300, 10_000
REFUSED, REFUSAL_WAIT = "refused", timedelta(seconds=30)


class ProcessGroups:
    """Cache of process groups, shared because each group costs threads, connections and, on GPUs, memory."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}

    def get(self, ranks: Sequence[int], lane: str = "") -> dist.ProcessGroup | None:
        """Return the group of these global ranks, or None on ranks outside it.

        The first request for a group must be made by every rank of the world, in the same order as for other groups,
        because each rank numbers its groups locally. Only members communicate.

        Args:
            lane: groups of the same ranks in different lanes are separate, so their communication never queues up.

        Raises:
            ValueError: if ranks are not ascending, or without a default process group.
        """
        return self.own([ranks], lane)

    def own(self, partition: Iterable[Sequence[int]], lane: str = "") -> dist.ProcessGroup | None:
        """Return the group of this rank among disjoint lists of ranks, made as by `get` of each.

        NCCL makes all of them in one split of the world's communicator, which takes all ranks for each list otherwise.
        """
        keys = [("" if len(ranks) == 1 else lane, tuple(ranks)) for ranks in partition]
        if wrong := next((ranks for _, ranks in keys if not ranks or [*ranks] != sorted({*ranks})), None):
            raise ValueError(f"ranks={wrong} must be non-empty, ascending and without duplicates")
        options = None
        if lane == ATTENTION and dist.get_backend() == "nccl":  # attention's kernels would fill the GPU first
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        shared = [key for key in keys if key not in self._made and len(key[1]) > 1]
        if len(shared) > 1 and dist.group.WORLD.bound_device_id:  # type: ignore[union-attr]
            split, here = dist.split_group(split_ranks=[[*r] for _, r in shared], pg_options=options), dist.get_rank()
            self._made |= {key: split if here in key[1] else None for key in shared}
        for key in (key for key in keys if key not in self._made):
            alone = len(key[1]) == 1
            group = _group_of_one(key[1][0]) if alone else dist.new_group([*key[1]], pg_options=options)
            self._made[key] = group if isinstance(group, dist.ProcessGroup) else None
        return next((group for key in keys if (group := self._made[key]) is not None), None)


def _group_of_one(rank: int) -> dist.ProcessGroup | None:
    """Make the group of this rank alone, if it is `rank`: without the others, which may not be in the mesh. With a
    device bound to the world, NCCL would split its communicator at once, for which it waits for every rank."""
    if rank != dist.get_rank():
        return None
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group([rank], use_local_synchronization=True)
    finally:
        world.bound_device_id = device


def format_ranks(ranks: Iterable[int], separator: str = ",") -> str:
    """Format ascending ranks as runs, such as "0-3,6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of each rank of the group; that of this process where there are no groups. Collective."""
    if not dist.is_initialized():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


class RanksDisagree(RuntimeError):
    """Raised on every rank, at the same point, when ranks have different values of what must be the same."""


def agree(value: object, groups: Sequence[dist.ProcessGroup], what: str, device: torch.device | str = "cpu") -> None:
    """Check that `repr(value)` is the same on all ranks of a grid, with one small all-reduce per group.

    A rank on which the value is refused passes the error, and raises it if this returns: all ranks refuse then.

    Collective over the groups, which must span the grid and be passed in the same order on all ranks. Raise
    RanksDisagree on every rank of the grid, if they differ: which ranks refuse, and why, or else which hold what, by
    field where `value` is a dataclass or a mapping. If others do not compare, a rank that refuses raises its error
    after `REFUSAL_WAIT`."""
    groups, refused = [group for group in groups if dist.get_world_size(group) > 1], isinstance(value, Exception)
    compared = REFUSED if refused else repr(value)
    digest = int.from_bytes(hashlib.blake2b(compared.encode(), digest_size=7).digest(), "big")
    bounds = torch.tensor([digest, -digest], device=device)
    for group in groups:
        work = dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group, async_op=refused)
        if isinstance(value, Exception) and work is not None:
            try:
                work.wait(REFUSAL_WAIT)
            except RuntimeError as error:
                raise value from error
    if bounds[0] == -bounds[1]:
        return
    texts = {REFUSED: f"{type(value).__name__}: {value}"} if refused else _texts(value)
    held = {dist.get_rank(): {name: text[:SENT_CHARACTERS] for name, text in texts.items()}}
    for group in groups:
        held = {rank: seen for part in gather_objects(held, group) for rank, seen in part.items()}
    if refusals := {rank: texts for rank, texts in sorted(held.items()) if REFUSED in texts}:
        reasons = "; ".join(f"{texts[REFUSED]} (rank {rank})" for rank, texts in [*refusals.items()][:SHOWN_FIELDS])
        raise RanksDisagree(f"{what} is refused on rank{'s' * (len(refusals) > 1)} {format_ranks(refusals)}: {reasons}")
    raise RanksDisagree(f"{what} must be the same on all ranks, but differs: {differences(held)}")


def differences(held: Mapping[int, Mapping[str, str]]) -> str:
    """Return which ranks hold which text, by name, without the names whose text is the same on all ranks."""
    found = []
    for name in dict.fromkeys(name for texts in held.values() for name in texts):
        ranks: dict[str, list[int]] = {}
        for rank in sorted(held):
            ranks.setdefault(held[rank].get(name, "missing"), []).append(rank)
        if len(ranks) == 1:
            continue
        same = next((at for at, seen in enumerate(zip(*ranks, strict=False)) if len({*seen}) > 1), 0)
        shown = {_around(text, same): on for text, on in ranks.items()}
        values = (f"{text} on rank{'s' * (len(on) > 1)} {format_ranks(on)}" for text, on in shown.items())
        found.append(f"{name} = {', '.join(values)}" if name else ", ".join(values))
    more = [f"and {len(found) - SHOWN_FIELDS} more"] if len(found) > SHOWN_FIELDS else []
    return "; ".join(found[:SHOWN_FIELDS] + more) or f"beyond the first {SENT_CHARACTERS} characters"


def _texts(value: object, name: str = "") -> dict[str, str]:
    """Return the texts of a value's parts by their dotted names; of a value without parts, its own under `name`."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.repr}
    elif isinstance(value, Mapping):
        parts = {str(key): part for key, part in value.items()}
    else:
        return {name: repr(value)}
    found = {} if parts else {name: repr(value)}
    for key, part in parts.items():
        found |= _texts(part, f"{name}.{key}" if name else key)
    return found


def _around(text: str, position: int) -> str:
    """Shorten a long text to what surrounds `position`."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    first = max(0, min(position - SHOWN_CHARACTERS // 4, len(text) - SHOWN_CHARACTERS))
    last = first + SHOWN_CHARACTERS
    return "..." * (first > 0) + text[first:last] + "..." * (last < len(text))
