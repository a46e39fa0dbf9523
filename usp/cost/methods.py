"""Parallelization methods by name: `ulysses`, `usp+zero1`, `tp-sp8+ring2+zero3`, each translated to train.py's flags.

A part is an axis and its degree. One part may omit its degree and takes the remaining ranks.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from usp.config import TrainConfig
from usp.model.facts import ModelFacts
from usp.run.failures import nearest

PARTS = {
    "ulysses": "sp_ulysses",
    "ring": "sp_ring",
    "usp": "",
    "dp": "dp_shard",
    "hsdp": "dp_replicate",
    "tp": "tp",
    "tp-sp": "tp",
    "pp": "pp",
    "ep": "ep",
    "zero": "zero",
}
DEFAULT = (
    *("ulysses", "ring", "usp", "dp", "zero1", "zero2", "zero3", "usp+zero1", "usp+zero2", "usp+zero3"),
    *("tp", "tp-sp", "pp", "ep", "tp-sp2+usp+zero1", "pp2+usp+zero1"),
)


@dataclass(frozen=True)
class Batch:
    """The sequences of a step over all devices, and those of a micro-batch on one data-parallel rank."""

    sequences: int
    rows: int = 1


@dataclass(frozen=True)
class Method:
    """A method's name and its parts: axis and degree, None for the remaining ranks."""

    name: str
    parts: tuple[tuple[str, int | None], ...]

    @staticmethod
    def parse(name: str) -> Method:
        """Parse a method's name.

        Raises:
            ValueError: for an unknown or repeated part, and if more than one part omits its degree.
        """
        parts: dict[str, int | None] = {}
        for part in name.split("+"):
            found = re.fullmatch(r"([a-z-]+?)(\d*)", part.strip())
            if found is None or found[1] not in PARTS:
                word = part.strip().rstrip("0123456789")
                raise ValueError(
                    f"--methods {name}: unknown part {part!r}{nearest(word, PARTS)}: use {', '.join(PARTS)}, each "
                    f"with its degree or ZeRO stage, joined by + as in tp-sp8+ring2+zero1"
                )
            if found[1] in parts:
                raise ValueError(f"--methods {name}: {found[1]} is given twice")
            parts[found[1]] = int(found[2]) if found[2] else None
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

    def flags(self, facts: ModelFacts, devices: int) -> dict[str, int | bool]:
        """Return the degrees as train.py's flags for `devices` ranks.

        Raises:
            ValueError: if the product of the given degrees does not divide `devices`.
        """
        parts = dict(self.parts)
        stage = parts.pop("zero", None)
        parts = parts or {"dp": None}
        product = math.prod(degree or 1 for part, degree in parts.items() if part != "ep")
        if devices % product:
            raise ValueError(f"the product of the degrees, {product}, must divide the {devices} devices")
        flags: dict[str, int | bool] = {}
        for part, degree in parts.items():
            degree = degree or devices // product
            if part == "usp":
                flags["sp_ulysses"] = math.gcd(degree, facts.num_kv_heads)
                flags["sp_ring"] = degree // math.gcd(degree, facts.num_kv_heads)
            elif part != "dp":
                flags[PARTS[part]] = degree
            if part == "tp-sp":
                flags["tp_sequence_parallel"] = True
        default = 1 if {"tp", "tp-sp", "pp", "ep"} & parts.keys() else 0
        return {**flags, "zero": default if stage is None else stage}


def config_for(method: Method, base: TrainConfig, facts: ModelFacts, devices: int, batch: Batch) -> TrainConfig:
    """Return the configuration of a run with `batch` per step, whose micro-batches have the same size in every method.

    Raises:
        ValueError: if `batch` does not divide evenly over the data-parallel ranks and their micro-batches, or is too
            small for the pipeline.
    """
    flags = method.flags(facts, devices)
    others = math.prod(int(flags.get(name, 1)) for name in ("sp_ulysses", "sp_ring", "tp", "pp"))
    data = devices // others
    each = data * batch.rows
    if batch.sequences % each:
        ranks = f"{data} data-parallel ranks" + (f" x --micro-batch {batch.rows}" if batch.rows > 1 else "")
        raise ValueError(
            f"--batch {batch.sequences} must be a multiple of the {ranks}: use --batch "
            f"{-(-batch.sequences // each) * each}"
        )
    number, pp = batch.sequences // each, int(flags.get("pp", 1))
    if number < pp:
        raise ValueError(
            f"pp={pp} needs {pp} micro-batches, --batch {batch.sequences} gives {number}: use --batch {pp * each}"
        )
    return replace(base, **flags, batch_size=number * batch.rows, micro_batches=number)  # type: ignore[arg-type]
