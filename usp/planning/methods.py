"""Parallelization methods by name, translated to train.py's flags, and their cost in the convention of the USP paper.

A name such as `ulysses`, `usp+zero1` or `tp-sp8+ring2+zero3` has parts: each is an axis and its degree, which one part
may omit to take the remaining ranks. docs/cost.md has the collectives of each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction

from usp.config import TrainConfig
from usp.model.facts import ModelFacts
from usp.predict.job import Job
from usp.run.failures import nearest

PARTS = {"ulysses": "sp_ulysses", "ring": "sp_ring", "usp": "", "dp": "dp_shard", "hsdp": "dp_replicate"}
PARTS |= {"tp": "tp", "tp-sp": "tp", "pp": "pp", "ep": "ep", "zero": "zero"}
DEFAULT = (
    *("ulysses", "ring", "usp", "dp", "zero1", "zero2", "zero3", "usp+zero1", "usp+zero2", "usp+zero3"),
    *("tp", "tp-sp", "pp", "ep", "tp-sp2+usp+zero1", "pp2+usp+zero1"),
)
BF16 = 2  # bytes: the paper's P, G and activations are in half precision
_SHARDED = ("(P+G)/N", "6P/N", "A/N")
# Table 2 of arXiv 2405.07719v5, then what it lacks. By method, of one block: cost of parameters in O(d^2) by the
# paper's factors, which it prints halved; cost of activations in O(bs L d) without sequence parallelism; and bytes of
# parameters P and gradients G, of optimizer states, and of activations A, on N ranks with M micro-batches.
PAPER: dict[str, tuple[int, int, tuple[str, str, str]]] = {
    "ulysses": (24, 8, ("P+G", "6P", "A/N")),
    "ring": (24, 4, ("P+G", "6P", "A/N")),
    "dp": (24, 0, ("P+G", "6P", "A/N")),
    "zero1": (24, 0, ("P+G", "6P/N", "A/N")),
    "usp+zero1": (24, 0, ("P+G", "6P/N", "A/N")),
    "usp+zero2": (24, 0, ("P+G/N", "6P/N", "A/N")),
    "usp+zero3": (36, 0, _SHARDED),
    "tp": (0, 8, ("(P+G)/N", "6P/N", "αA")),
    "tp-sp": (0, 10, _SHARDED),
    "ep": (8, 4, ("P+G, experts' /N", "6P, experts' /N", "A/N")),  # activations: times experts per token / N
    "pp": (0, 2, ("(P+G)/N", "6P/N", "A/M")),
}


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


@dataclass(frozen=True)
class PaperCost:
    """Bytes of one block, forward and backward, as the paper counts."""

    parameters_printed: int
    parameters: int
    activations: int
    states: tuple[str, str, str]


def unified_cost(ulysses: int, ring: int, group: int = 1) -> Fraction:
    """Return the paper's cost in O(bs L d) of ulysses x ring with `group` query heads per KV head: Ulysses exchanges q,
    k, v, the output and their gradients; the ring passes the keys and values of one Ulysses rank in both passes."""
    exchanged = (4 + Fraction(4, group)) / (ulysses * ring) if ulysses > 1 else Fraction(0)
    return exchanged + (Fraction(4, group * ulysses) if ring > 1 else 0)


def paper_cost(method: str, job: Job, sequences: int) -> PaperCost | None:
    """Return the cost that the paper gives a method for this model's d, L and GQA group size; None if it has none."""
    if method not in PAPER:
        return None
    facts, hidden, (parameters, activations, states) = job.model.facts, job.model.hidden_size, PAPER[method]
    cost = Fraction(activations)
    if job.dims.sp > 1:
        cost = unified_cost(job.dims.ulysses, job.dims.ring, facts.num_heads // facts.num_kv_heads)
    elif method == "ep":
        cost *= Fraction(job.model.facts.experts_per_token, job.world_size)
    block, moved = hidden**2 * BF16, int(cost * sequences * job.config.seq_len * hidden * BF16)
    return PaperCost(parameters * block // 2, parameters * block, moved, states)
