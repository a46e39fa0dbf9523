"""Comparison of a value across ranks, before the first collective that would hang if they differed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist


class RanksDisagree(RuntimeError):
    """Raised on every rank, at the same point, when ranks have different values of what must be the same."""


def agree(value: object, groups: Sequence[dist.ProcessGroup], what: str, device: torch.device | str = "cpu") -> None:
    """Check that `repr(value)` is the same on all ranks of a grid, with one small all-reduce per group.

    Collective over the groups, which must span the grid and be passed in the same order on all ranks.

    Raises:
        RanksDisagree: on every rank of the grid, listing each rank's value, if they differ.
    """
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    text = repr(value)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    bounds = torch.tensor([digest, -digest], device=device)
    for group in groups:
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    if bounds[0] == -bounds[1]:
        return
    held = {dist.get_rank(): text if len(text) <= 300 else text[:300] + "..."}
    for group in groups:
        gathered: list[dict[int, str]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(gathered, held, group=group)
        held = {rank: seen for part in gathered for rank, seen in part.items()}
    shown = "; ".join(f"rank {rank}: {held[rank]}" for rank in sorted(held))
    raise RanksDisagree(f"{what} must be the same on all ranks, but differs: {shown}")
