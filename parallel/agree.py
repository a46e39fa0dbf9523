"""Do all ranks hold the same value? Asked before the first collective that would hang if they did not."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist


def agree(value: object, group: dist.ProcessGroup | None, what: str, device: torch.device | str = "cpu") -> None:
    """Compare `repr(value)` over a group with one small all-reduce. Collective over the group.

    Raises:
        RuntimeError: on every rank of the group alike, naming each rank's value, if they differ.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    text = repr(value)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    bounds = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    if bounds[0] == -bounds[1]:
        return
    values: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(values, text if len(text) <= 300 else text[:300] + "...", group=group)
    ranks = dist.get_process_group_ranks(group)
    held = "; ".join(f"rank {rank}: {seen}" for rank, seen in zip(ranks, values, strict=True))
    raise RuntimeError(f"{what} must be the same on all ranks of the group, but differs: {held}")
