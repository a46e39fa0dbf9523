"""Do all ranks hold the same value? Asked before the first collective that would hang if they did not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist


class RanksDisagree(RuntimeError):
    """Ranks hold different values of something that must be the same; raised on every rank at the same point."""


def agree(value: object, groups: Sequence[dist.ProcessGroup], what: str, device: torch.device | str = "cpu") -> None:
    """Compare `repr(value)` over the grid that the groups of this rank span, with one small all-reduce each.

    Collective over every group; all ranks give the groups in the same order.

    Raises:
        RanksDisagree: on every rank of the grid alike, naming each rank's value, if they differ.
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
