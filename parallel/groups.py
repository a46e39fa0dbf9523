"""Process groups by their ranks, created once and shared by all meshes of a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist


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
        ranks = tuple(ranks)
        if not ranks or list(ranks) != sorted(set(ranks)):
            raise ValueError(f"ranks={ranks} must be non-empty, ascending and without duplicates")
        key = ("" if len(ranks) == 1 else lane, ranks)
        if key not in self._made:
            group = dist.new_group(list(ranks))
            self._made[key] = group if isinstance(group, dist.ProcessGroup) else None
        return self._made[key]


def format_ranks(ranks: Iterable[int], separator: str = ",") -> str:
    """Format ascending ranks as runs, such as "0-3,6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
