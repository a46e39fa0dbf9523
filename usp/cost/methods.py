"""Ways to parallelise by name: `ulysses`, `usp+zero1`, `tp-sp8+ring2+zero3`, each as the flags of a training run.

A part is an axis with its degree; one part may leave its degree out and takes the ranks that are left.
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
class Method:
    """A name and its parts: axis -> degree, None for the ranks that are left."""

    name: str
    parts: tuple[tuple[str, int | None], ...]

    @staticmethod
    def parse(name: str) -> Method:
        """Raises ValueError for a part that is not known, given twice, or without a degree beside another such."""
        parts: dict[str, int | None] = {}
        for part in name.split("+"):
            found = re.fullmatch(r"([a-z-]+?)(\d*)", part.strip())
            if found is None or found[1] not in PARTS:
                word = part.strip().rstrip("0123456789")
                raise ValueError(
                    f"--methods {name}: {part!r} is no part{nearest(word, PARTS)}: join {', '.join(PARTS)} with +, "
                    f"each with its degree or stage, as in tp-sp8+ring2+zero1"
                )
            if found[1] in parts:
                raise ValueError(f"--methods {name}: {found[1]} is given twice")
            parts[found[1]] = int(found[2]) if found[2] else None
        if "zero" in parts and parts["zero"] not in (0, 1, 2, 3):
            raise ValueError(f"--methods {name}: zero needs its stage, 0 to 3, as in zero1")
        free = [part for part, degree in parts.items() if degree is None]
        if len(free) > 1 or 0 in [degree for part, degree in parts.items() if part != "zero"]:
            raise ValueError(f"--methods {name}: give degrees of at least 1, to all parts but one ({', '.join(free)})")
        if "usp" in parts and {"ulysses", "ring"} & parts.keys():
            raise ValueError(f"--methods {name}: usp chooses ulysses and ring itself: give usp, or the two of them")
        return Method(name, tuple(parts.items()))

    def flags(self, facts: ModelFacts, devices: int) -> dict[str, int | bool]:
        """The degrees as train.py's flags on `devices` ranks.

        Raises:
            ValueError: if the given degrees do not divide the devices.
        """
        parts = dict(self.parts)
        stage = parts.pop("zero", None)
        if not parts:
            parts = {"dp": None}
        product = math.prod(degree or 1 for part, degree in parts.items() if part != "ep")
        if devices % product:
            raise ValueError(f"{product} ranks do not divide {devices} devices")
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
        whole_copies = not {"tp", "tp-sp", "pp", "ep"} & parts.keys()
        return {**flags, "zero": stage if stage is not None else 0 if whole_copies else 1}


def config_for(method: Method, base: TrainConfig, facts: ModelFacts, devices: int, batch: int) -> TrainConfig:
    """The run: `batch` sequences over the data-parallel ranks; in a pipeline a sequence is a micro-batch.

    Raises:
        ValueError: if the batch cannot be divided so.
    """
    flags = method.flags(facts, devices)
    others = math.prod(int(flags.get(name, 1)) for name in ("sp_ulysses", "sp_ring", "tp", "pp"))
    data = devices // others
    if batch % data:
        above = -(-batch // data) * data
        raise ValueError(
            f"a batch of {batch} does not give {data} data-parallel ranks a sequence each: --batch {above}"
        )
    rows, pp = batch // data, int(flags.get("pp", 1))
    if rows < pp:
        raise ValueError(f"pp={pp} needs {pp} micro-batches, and a batch of {batch} makes {rows}: --batch {pp * data}")
    return replace(base, **flags, batch_size=rows, micro_batches=rows if pp > 1 else 1)  # type: ignore[arg-type]
