"""Parallelization methods by name, translated to train.py's flags, and their cost in the convention of the USP paper.

A name such as `ulysses`, `usp+zero1` or `tp-sp8+ring2+zero3` has parts: each is an axis and its degree, which one part
may omit to take the remaining ranks.

Table 2 of the paper (arXiv 2405.07719v5): cost = elements x algorithm bandwidth factor. Each method is a list of the
collectives of one transformer block, forward and backward, from which its costs follow.

    O(d^2)       a block has 12 d^2 parameters: 4 attention matrices, and 2 MLP matrices of 4 d^2 each
    O(bs L d)    elements of one activation
    N            number of ranks; P, G: bytes of parameters and gradients; A: bytes of activations

The factors hold for large N: an all-reduce moves its elements twice, everything else once (section 4.1; an all-to-all
or a gather over N ranks moves (N - 1) / N of them). By these factors an all-reduce of 12 O(d^2) costs 24 O(d^2), but
the table prints 12: its parameter costs are half of what its factors give, its activation costs are not.
`parameter_cost` follows the factors, `printed_parameter_cost` the table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from parallel import divisors
from usp.config import TrainConfig
from usp.model.facts import ModelFacts
from usp.predict.job import Job
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
FACTORS = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "all2all": 1, "P2P": 1}
BLOCK = 12  # parameters of a block, in d^2
BF16 = 2  # bytes: the paper's P, G and activations are in half precision
_METHODS = ("ulysses", "ring", "dp", "zero1", "usp+zero1", "usp+zero2", "usp+zero3", "tp", "tp-sp")  # as TABLE_2


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
        """Return the configuration of a run with `sequences` per step, in micro-batches of `rows` on a rank.

        Raise ValueError for degrees that do not divide the devices, if the sequences do not divide evenly over the
        data-parallel ranks and their micro-batches, or if they are too few for the pipeline.
        """
        flags = self._flags(facts, world_size)
        dp = world_size // math.prod(flags.get(name, 1) for name in ("sp_ulysses", "sp_ring", "tp", "pp"))
        number, rest = divmod(sequences, dp * rows)
        if rest:
            ranks = f"{dp} data-parallel ranks" + (f" x --micro-batch {rows}" if rows > 1 else "")
            raise ValueError(
                f"--global-batch-size {sequences} must be a multiple of the {ranks}: use --global-batch-size "
                f"{(number + 1) * dp * rows}"
            )
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
class Collective:
    """`count` collectives on `elements` times bs L d, or times the block's parameters; `shared`: on 1/N of that."""

    name: str
    count: int = 1
    elements: Fraction = Fraction(1)
    shared: bool = False

    def cost(self, ranks: int) -> Fraction:
        return self.count * self.elements * FACTORS[self.name] / (ranks if self.shared else 1)

    def __str__(self) -> str:
        return self.name if self.count == 1 or self.name == "P2P" else f"{self.count}*{self.name}"


@dataclass(frozen=True)
class Row:
    """A method of the table, with the collectives of one block."""

    method: str
    parameters: tuple[Collective, ...]
    activations: tuple[Collective, ...]
    split: str  # dims of attention and MLP: heads hc, tokens L, hidden size d, batch bs, layers l, experts E
    states: tuple[str, str, str]  # bytes of parameters and gradients, of optimizer states, and of activations
    bound: bool = False  # the activation cost is the maximum over all splits of N into Ulysses and ring

    def parameter_cost(self) -> Fraction:
        """Return the cost in O(d^2) by the paper's factors."""
        return BLOCK * collective_cost(self.parameters, 1)

    def printed_parameter_cost(self) -> Fraction:
        """Return the cost in O(d^2) as the table prints it: half of what its factors give."""
        return self.parameter_cost() / 2

    def activation_cost(self, ranks: int) -> Fraction:
        """Return the cost in O(bs L d)."""
        if self.bound:
            return max(unified_cost(ulysses, ranks // ulysses) for ulysses in divisors(ranks))
        return collective_cost(self.activations, ranks)


def collective_cost(collectives: Iterable[Collective], ranks: int) -> Fraction:
    """Return the sum of the costs over a number of ranks."""
    return sum((part.cost(ranks) for part in collectives), Fraction(0))


def ulysses_collectives(group: int = 1) -> tuple[Collective, ...]:
    """Return the exchanges of q, k, v and the output, and of their gradients, with `group` query heads per KV head."""
    if group == 1:
        return (Collective("all2all", 8, shared=True),)
    return (Collective("all2all", 4, shared=True), Collective("all2all", 4, Fraction(1, group), shared=True))


def ring_collectives(group: int = 1) -> tuple[Collective, ...]:
    """Return the passing of keys and values in forward and backward; the paper leaves out their gradients."""
    return (Collective("P2P", 4, Fraction(1, group)),)


def unified_cost(ulysses: int, ring: int, group: int = 1) -> Fraction:
    """Return the cost in O(bs L d) of ulysses x ring, whose ring passes the keys and values of one Ulysses rank."""
    exchange = collective_cost(ulysses_collectives(group), ulysses * ring) if ulysses > 1 else Fraction(0)
    return exchange + (collective_cost(ring_collectives(group), 1) / ulysses if ring > 1 else Fraction(0))


REDUCE = (Collective("allreduce"),)
_SHARDED = (Collective("allgather"), Collective("reducescatter"))
_SHARDED_3 = (Collective("allgather", 2), Collective("reducescatter"))
_UNIFIED = (*ring_collectives(), *ulysses_collectives())
WHOLE, _ALL = ("P+G", "6P", "A/N"), ("(P+G)/N", "6P/N", "A/N")

TABLE_2 = (
    Row("SP-Ulysses", REDUCE, ulysses_collectives(), "hc/L", WHOLE),
    Row("SP-Ring", REDUCE, ring_collectives(), "L/L", WHOLE),
    Row("DP", REDUCE, (), "bs/bs", WHOLE),
    Row("ZeRO1", _SHARDED, (), "hc/L", ("P+G", "6P/N", "A/N")),
    Row("SP-Unified+ZeRO1", _SHARDED, _UNIFIED, "hc/L", ("P+G", "6P/N", "A/N"), bound=True),
    Row("SP-Unified+ZeRO2", _SHARDED, _UNIFIED, "hc/L", ("P+G/N", "6P/N", "A/N"), bound=True),
    Row("SP-Unified+ZeRO3", _SHARDED_3, _UNIFIED, "hc/L", _ALL, bound=True),
    # Attention and MLP each all-reduce once in the forward and once in the backward.
    Row("TP", (), (Collective("allreduce", 4),), "hc/d", ("(P+G)/N", "6P/N", "αA")),
    # Each all-reduce becomes a gather and a scatter; the backward gathers the inputs again for the weight gradients.
    Row("TP-sp", (), (Collective("allgather", 6), Collective("reducescatter", 4)), "hc/d", _ALL),
)


def expert_row(experts_per_token: int) -> Row:
    """Return a row for expert parallelism, which the table lacks: rows and their gradients go to the experts and back;
    each expert has one owner, so only the gradients of attention's 4 d^2 are reduced."""
    return Row(
        "EP",
        (Collective("allreduce", elements=Fraction(4, BLOCK)),),
        (Collective("all2all", 4, Fraction(experts_per_token), shared=True),),
        "bs/E",
        ("P+G, experts' /N", "6P, experts' /N", "A/N"),
    )


def pipeline_row() -> Row:
    """Return a row for pipeline parallelism, which the table lacks: the cost of a block at a stage boundary, which
    sends hidden states and receives gradients. At most N of M micro-batches are in flight, each with l / N layers."""
    return Row("PP", (), (Collective("P2P", 2),), "l/l", ("(P+G)/N", "6P/N", "A/M"))


@dataclass(frozen=True)
class PaperCost:
    """Bytes of one block, forward and backward, as the paper counts."""

    parameters_printed: int
    parameters: int
    activations: int
    states: tuple[str, str, str]


def paper_cost(method: str, job: Job, sequences: int) -> PaperCost | None:
    """Return the cost that the paper gives a method for this model's d, L and GQA group size; None if it has none."""
    facts, hidden = job.model.facts, job.model.hidden_size
    rows = {**dict(zip(_METHODS, TABLE_2, strict=True)), "pp": pipeline_row()}
    row = expert_row(job.model.experts_per_token) if method == "ep" else rows.get(method)
    if row is None:
        return None
    cost = row.activation_cost(job.world_size)
    if job.dims.sp > 1:
        cost = unified_cost(job.dims.ulysses, job.dims.ring, facts.num_heads // facts.num_kv_heads)
    block = hidden**2 * BF16
    printed, parameters = int(row.printed_parameter_cost() * block), int(row.parameter_cost() * block)
    return PaperCost(printed, parameters, int(cost * sequences * job.config.seq_len * hidden * BF16), row.states)
