"""Parallelization methods by name, translated to train.py's flags.

A name such as `ulysses`, `usp+zero1` or `tp-sp8+ring2+zero3` has parts: each is an axis and its degree, which one part
may omit to take the remaining ranks. docs/cost.md has the collectives of each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from usp.config import TrainConfig
from usp.model.facts import ModelFacts
from usp.run.failures import nearest

PARTS = {"ulysses": "sp_ulysses", "ring": "sp_ring", "usp": "", "dp": "dp_shard", "hsdp": "dp_replicate"}
PARTS |= {"tp": "tp", "tp-sp": "tp", "pp": "pp", "ep": "ep", "zero": "zero"}
DEFAULT = (
    *("ulysses", "ring", "usp", "dp", "zero1", "zero2", "zero3", "usp+zero1", "usp+zero2", "usp+zero3"),
    *("tp", "tp-sp", "pp", "ep", "tp-sp2+usp+zero1", "pp2+usp+zero1"),
)


@dataclass(frozen=True)
class Method:
    """A method's name and its parts: axis and degree, None for the remaining ranks."""

    name: str
    parts: tuple[tuple[str, int | None], ...]

    @staticmethod
    def parse(name: str) -> Method:
        """Parse a name; raise ValueError for an unknown or repeated part, or if several parts omit their degrees."""
        parts: dict[str, int | None] = {}
        for text in name.split("+"):
            match = re.fullmatch(r"([a-z-]+?)(\d*)", text.strip())
            if match is None or match[1] not in PARTS:
                word = text.strip().rstrip("0123456789")
                raise ValueError(
                    f"--methods {name}: unknown part {text!r}{nearest(word, PARTS)}: use {', '.join(PARTS)}, each "
                    f"with its degree or ZeRO stage, joined by + as in tp-sp8+ring2+zero1"
                )
            if match[1] in parts:
                raise ValueError(f"--methods {name}: {match[1]} is given twice")
            parts[match[1]] = int(match[2]) if match[2] else None
        if "zero" in parts and parts["zero"] not in (0, 1, 2, 3):
            raise ValueError(f"--methods {name}: zero must be followed by its stage, 0 to 3, as in zero1")
        free = [part for part, degree in parts.items() if degree is None]
        if len(free) > 1 or 0 in [degree for part, degree in parts.items() if part != "zero"]:
            raise ValueError(
                f"--methods {name}: degrees must be at least 1, and at most one part may omit its degree; without a "
                f"degree: {', '.join(free) or 'none'}"
            )
        if "usp" in parts and {"ulysses", "ring"} & parts.keys():
            raise ValueError(f"--methods {name}: usp chooses ulysses and ring itself: give either usp or those two")
        return Method(name, tuple(parts.items()))

    def config(self, base: TrainConfig, facts: ModelFacts, world_size: int, sequences: int, rows: int) -> TrainConfig:
        """Return the configuration of a run with `sequences` per step, in micro-batches of `rows` on a rank; raise
        ValueError for degrees that do not divide the devices, and sequences that do not divide evenly over the
        data-parallel ranks and their micro-batches, or are too few for the pipeline."""
        flags = self._flags(facts, world_size)
        dp = world_size // math.prod(flags.get(name, 1) for name in ("sp_ulysses", "sp_ring", "tp", "pp"))
        number, rest = divmod(sequences, dp * rows)
        if rest:
            ranks = f"{dp} data-parallel ranks" + (f" x --micro-batch {rows}" if rows > 1 else "")
            use = f"use --global-batch-size {(number + 1) * dp * rows}"
            raise ValueError(f"--global-batch-size {sequences} must be a multiple of the {ranks}: {use}")
        pp = flags.get("pp", 1)
        if number < pp:
            raise ValueError(
                f"pp={pp} needs {pp} micro-batches, --global-batch-size {sequences} gives {number}: use "
                f"--global-batch-size {pp * dp * rows}"
            )
        flags |= {"batch_size": number * rows, "micro_batches": number}
        return replace(base, tp_sequence_parallel="tp-sp" in dict(self.parts), **flags)  # type: ignore[arg-type]

    def _flags(self, facts: ModelFacts, world_size: int) -> dict[str, int]:
        """Return the degrees and the ZeRO stage as train.py's flags."""
        parts = dict(self.parts)
        stage = parts.pop("zero", None)
        parts = parts or {"dp": None}
        product = math.prod(degree or 1 for part, degree in parts.items() if part != "ep")
        if world_size % product:
            raise ValueError(f"the product of the degrees, {product}, must divide the {world_size} devices")
        flags = {"zero": (1 if {"tp", "tp-sp", "pp", "ep"} & parts.keys() else 0) if stage is None else stage}
        for part, degree in parts.items():
            degree = degree or world_size // product
            if part == "usp":
                flags["sp_ulysses"] = math.gcd(degree, facts.num_kv_heads)
                flags["sp_ring"] = degree // flags["sp_ulysses"]
            elif part != "dp":
                flags[PARTS[part]] = degree
        return flags
