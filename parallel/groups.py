"""Process groups by their ranks, made once and shared by all meshes of a process."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


class ProcessGroups:
    """The groups of this process: one object, passed down to all that need groups.

    A group costs threads, connections and, on GPUs, memory.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None] = {}

    def __len__(self) -> int:
        """How many groups this rank is in."""
        return sum(group is not None for group in self._made.values())

    def get(self, ranks: Sequence[int], lane: str = "") -> dist.ProcessGroup | None:
        """The group of these global ranks; None on every other rank.

        The first time, every rank of the world must ask, in the same order as for other groups: torch numbers groups on
        each rank by itself. Only members communicate.

        Args:
            lane: communication in one lane never waits for that in another, which is a group of its own.

        Raises:
            ValueError: for ranks that do not ascend.
            RuntimeError: without a default process group.
        """
        ranks = tuple(ranks)
        if not dist.is_initialized():
            raise RuntimeError("process groups need torch.distributed.init_process_group to have been called")
        if not ranks or list(ranks) != sorted(set(ranks)):
            raise ValueError(f"ranks={ranks} must be at least one, ascending, each once")
        key = ("" if len(ranks) == 1 else lane, ranks)
        if key not in self._made:
            group = dist.new_group(list(ranks))
            self._made[key] = group if isinstance(group, dist.ProcessGroup) else None
        return self._made[key]
