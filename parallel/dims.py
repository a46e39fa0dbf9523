"""Degrees of parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .violation import Violation, all_of, option

SP_ORDERS = ("ring-outer", "ulysses-outer")
ZERO_STAGES = (0, 1, 2, 3)
# Coarser views of the same ranks. Each derived axis flattens adjacent axes, in either sp_order.
DERIVED_AXES = {
    "sp": ("ring", "ulysses"),  # sequences are sharded over it
    "batch": ("dp_replicate", "dp_shard"),  # its ranks get different data
    "fsdp": ("dp_shard", "ring", "ulysses"),  # parameters are sharded over it
    "loss": ("dp_replicate", "dp_shard", "ring", "ulysses"),  # token counts are summed over it
}


@dataclass(frozen=True)
class ParallelDims:
    """Number of ranks on each mesh axis; the product of all but ep is the world size.

    Attributes:
        pp: pipeline-parallel ranks.
        dp_replicate: data-parallel replicas, each of which holds a complete (sharded) copy of the model.
        dp_shard: data-parallel ranks over which parameters are sharded; -1 for all remaining ranks.
        ring: sequence-parallel ranks that pass keys and values around (point-to-point, overlaps with compute).
        ulysses: sequence-parallel ranks that exchange heads for tokens (all-to-all, blocking).
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks. ep adds no ranks: it regroups the dp_shard x ring x ulysses x tp ranks of a pipeline
            stage and replica, which all hold different tokens, into efsdp x ep.
        sp_order: which of ring and ulysses is the outer axis. Ranks of the inner one are adjacent and share the fastest
            links.

    Raises ValueError listing every degree that is not a positive number, and an unknown order.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    ep: int = 1
    sp_order: str = "ring-outer"

    def __post_init__(self) -> None:
        violations = [
            option(axis, degree) + f" must be at least 1{' (or -1 for the rest)' if axis == 'dp_shard' else ''}"
            for axis, degree in (*self.degrees().items(), ("ep", self.ep))
            if degree < 1 and (axis, degree) != ("dp_shard", -1)
        ]
        if self.sp_order not in SP_ORDERS:
            violations.append(option("sp_order", repr(self.sp_order)) + f" must be one of {', '.join(SP_ORDERS)}")
        if violations:
            raise ValueError(all_of(violations))

    def degrees(self) -> dict[str, int]:
        """Return the degree of each mesh axis, outermost first."""
        sp = ("ring", "ulysses") if self.sp_order == "ring-outer" else ("ulysses", "ring")
        return {axis: getattr(self, axis) for axis in ("pp", "dp_replicate", "dp_shard", *sp, "tp")}

    def coordinates(self, number: int) -> dict[str, int]:
        """Return the coordinate of rank `number` on each axis, including derived axes. Requires resolved degrees."""
        degrees = self.degrees()
        found: dict[str, int] = {}
        rest = number
        for axis, degree in reversed(degrees.items()):
            rest, found[axis] = divmod(rest, degree)
        for name, joined in DERIVED_AXES.items():
            found[name] = 0
            for axis in (axis for axis in degrees if axis in joined):
                found[name] = found[name] * degrees[axis] + found[axis]
        return found

    @property
    def sp(self) -> int:
        """Number of ranks over which each sequence is sharded."""
        return self.ring * self.ulysses

    @property
    def batch(self) -> int:
        """Number of groups of sp x tp x pp ranks that get different data. Requires resolved degrees."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Number of ranks over which each expert's parameters are sharded. Requires resolved degrees."""
        return self.dp_shard * self.sp * self.tp // self.ep

    def resolve(self, world_size: int, called: str = "the world size") -> ParallelDims:
        """Return the same degrees with dp_shard=-1 replaced by its value. called: what `world_size` is in messages.
        Raise ValueError if the degrees do not multiply to it, or ep does not divide the ranks it regroups."""
        dims = self._fill(world_size, called)
        regrouped = dims.dp_shard * dims.sp * dims.tp
        if regrouped % dims.ep:
            parts = all_of((option(name, getattr(dims, name)) for name in ("dp_shard", "ring", "ulysses", "tp")), " x ")
            fact = option("ep", dims.ep) + " must divide the " + parts + f" = {regrouped} ranks that it regroups: use "
            raise ValueError(fact + option("ep", ", ".join(map(str, divisors(regrouped)))))
        return dims

    def _fill(self, world_size: int, called: str) -> ParallelDims:
        others = {axis: degree for axis, degree in self.degrees().items() if axis != "dp_shard"}
        product = math.prod(others.values())
        asked = all_of((option(axis, degree) for axis, degree in others.items() if degree > 1), " x ")
        asked = asked if asked.parts else asked + "1"
        if self.dp_shard == -1:
            if world_size % product:
                fact = asked + f" = {product} ranks must divide {called} {world_size}"
                raise ValueError(fact + f": lower a degree, or start a multiple of {product} ranks")
            return replace(self, dp_shard=world_size // product)
        if product * self.dp_shard != world_size:
            ranks, remedy = product * self.dp_shard, Violation(("lower a degree",))
            if world_size % product == 0:
                remedy = "use " + option("dp_shard", world_size // product) + " (or -1)"
            fact = f" = {ranks} ranks must equal {called} {world_size}: " + remedy + f", or start {ranks} ranks"
            raise ValueError(option("dp_shard", self.dp_shard) + " x " + asked + fact)
        return self

    def __str__(self) -> str:
        degrees = {**self.degrees(), "ep": self.ep}
        return " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1) or "one rank"


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of `number`, ascending, up to `most`."""
    return [part for part in range(1, min(number, most or number) + 1) if number % part == 0]
