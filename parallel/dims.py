"""Degrees of parallelism as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

SpOrder = Literal["ring-outer", "ulysses-outer"]
SP_ORDERS: tuple[str, ...] = get_args(SpOrder)
# The same ranks under coarser axes, named by their use. Each derived axis joins neighbouring axes, in either sp_order.
DERIVED_AXES = {
    "sp": ("ring", "ulysses"),  # what a sequence is sharded over
    "batch": ("dp_replicate", "dp_shard"),  # what sees different data
    "fsdp": ("dp_shard", "ring", "ulysses"),  # what parameters are sharded over
    "loss": ("dp_replicate", "dp_shard", "ring", "ulysses"),  # what token counts are summed over
}


@dataclass(frozen=True)
class ParallelDims:
    """How many ranks each mesh axis has; their product, ep left out, is the world size.

    Attributes:
        pp: pipeline stages.
        dp_replicate: data-parallel groups that each hold a whole (sharded) copy of the model.
        dp_shard: data-parallel ranks over which parameters are sharded; -1 takes what the others leave.
        ring: sequence-parallel ranks that pass keys and values around (point-to-point, overlaps with compute).
        ulysses: sequence-parallel ranks that exchange heads for tokens (all-to-all, blocks).
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks. They are no ranks of their own: ep regroups the dp_shard x ring x ulysses x tp ranks
            of a pipeline stage and replica, which all hold different tokens, into efsdp x ep.
        sp_order: which of ring and ulysses is nested outside. The inner one has neighbouring ranks, which share the
            fastest links.

    Raises:
        ValueError: naming every degree that is no positive number, and an unknown order.
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
            f"{axis}={degree} must be at least 1{' (or -1 for the rest)' if axis == 'dp_shard' else ''}"
            for axis, degree in (*self.degrees().items(), ("ep", self.ep))
            if degree < 1 and (axis, degree) != ("dp_shard", -1)
        ]
        if self.sp_order not in SP_ORDERS:
            violations.append(f"sp_order={self.sp_order!r} must be one of {', '.join(SP_ORDERS)}")
        if violations:
            raise ValueError("; ".join(violations))

    def degrees(self) -> dict[str, int]:
        """Degree per mesh axis, outermost first."""
        sp = ("ring", "ulysses") if self.sp_order == "ring-outer" else ("ulysses", "ring")
        return {axis: getattr(self, axis) for axis in ("pp", "dp_replicate", "dp_shard", *sp, "tp")}

    def coordinates(self, number: int) -> dict[str, int]:
        """Where rank `number` of the grid is along each axis, derived ones too. Needs resolved degrees."""
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
        """Ranks over which each sequence is sharded."""
        return self.ring * self.ulysses

    @property
    def batch(self) -> int:
        """Ranks, or groups of sp x tp x pp ranks, that see different data. Needs resolved degrees."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Ranks over which an expert's parameters are sharded. Needs resolved degrees."""
        return self.dp_shard * self.sp * self.tp // self.ep

    def resolve(self, world_size: int) -> ParallelDims:
        """The same degrees with dp_shard=-1 filled in.

        Raises:
            ValueError: if the degrees do not multiply to `world_size`, or ep does not divide the ranks it regroups.
        """
        dims = self._fill(world_size)
        regrouped = dims.dp_shard * dims.sp * dims.tp
        if regrouped % dims.ep:
            fitting = ", ".join(str(ep) for ep in range(1, regrouped + 1) if regrouped % ep == 0)
            raise ValueError(
                f"ep={dims.ep} must divide the dp_shard={dims.dp_shard} x ring={dims.ring} x ulysses={dims.ulysses} x "
                f"tp={dims.tp} = {regrouped} ranks that it regroups: use ep={fitting}"
            )
        return dims

    def _fill(self, world_size: int) -> ParallelDims:
        others = {axis: degree for axis, degree in self.degrees().items() if axis != "dp_shard"}
        product = math.prod(others.values())
        asked = " x ".join(f"{axis}={degree}" for axis, degree in others.items() if degree > 1) or "1"
        if self.dp_shard == -1:
            if world_size % product:
                raise ValueError(
                    f"{asked} = {product} ranks must divide the world size {world_size}: lower a degree, or start "
                    f"a multiple of {product} ranks"
                )
            return replace(self, dp_shard=world_size // product)
        if product * self.dp_shard != world_size:
            fitting = f"use dp_shard={world_size // product} (or -1)" if world_size % product == 0 else "lower a degree"
            raise ValueError(
                f"dp_shard={self.dp_shard} x {asked} = {product * self.dp_shard} ranks must equal the world size "
                f"{world_size}: {fitting}, or start {product * self.dp_shard} ranks"
            )
        return self

    def __str__(self) -> str:
        degrees = {**self.degrees(), "ep": self.ep}
        return " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1) or "one rank"


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of `number`, ascending, up to `most`."""
    return [part for part in range(1, min(number, most or number) + 1) if number % part == 0]
