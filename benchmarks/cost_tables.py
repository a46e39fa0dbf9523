"""The computed tables of docs/cost.md: the paper's Table 2 with the rows that it lacks, and an example on the wire.

Table 2 of the paper (arXiv 2405.07719v5): cost = elements x algorithm bandwidth factor. Each method is a list of the
collectives of one transformer block, forward and backward, from which its costs follow.

    O(d^2)       a block has 12 d^2 parameters: 4 attention matrices, and 2 MLP matrices of 4 d^2 each
    O(bs L d)    elements of one activation
    N            number of ranks; P, G: bytes of parameters and gradients; A: bytes of activations

The factors hold for large N: an all-reduce moves its elements twice, everything else once (section 4.1; an all-to-all
or a gather over N ranks moves (N - 1) / N of them). By these factors an all-reduce of 12 O(d^2) costs 24 O(d^2), but
the table prints 12: its parameter costs are half of what its factors give, its activation costs are not.
`parameter_cost` follows the factors, `printed_parameter_cost` the table.

python -m benchmarks.cost_tables
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.parallel import divisors, load_hardware
from usp.planning.comparison import Setting, compare, comparison_tables
from usp.planning.methods import DEFAULT, PAPER, Method, unified_cost
from usp.run.tables import Grid

DOCUMENT = Path(__file__).parents[1] / "docs" / "cost.md"
COMPUTED = re.compile(r"(?<=<!-- computed -->\n).*?(?=<!-- end -->\n)", re.DOTALL)
FACTORS = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "all2all": 1, "P2P": 1}
BLOCK = 12  # parameters of a block, in d^2


@dataclass(frozen=True)
class Collective:
    """`count` collectives on `elements` times bs L d, or times the block's parameters; all-to-alls on 1/N of that."""

    name: str
    count: int = 1
    elements: Fraction = Fraction(1)

    @property
    def shared(self) -> bool:
        return self.name == "all2all"

    def cost(self, ranks: int) -> Fraction:
        return self.count * self.elements * FACTORS[self.name] / (ranks if self.shared else 1)

    def __str__(self) -> str:
        return self.name if self.count == 1 or self.name == "P2P" else f"{self.count}*{self.name}"


@dataclass(frozen=True)
class Row:
    """A method of the table, with the collectives of one block."""

    method: str
    key: str  # in `PAPER`
    parameters: tuple[Collective, ...]
    activations: tuple[Collective, ...]
    split: str  # dims of attention and MLP: heads hc, tokens L, hidden size d, batch bs, layers l, experts E

    @property
    def bound(self) -> bool:
        """Whether the activation cost is the maximum over all splits of N into Ulysses and ring."""
        return self.key.startswith("usp")

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
        return (Collective("all2all", 8),)
    return (Collective("all2all", 4), Collective("all2all", 4, Fraction(1, group)))


def ring_collectives(group: int = 1) -> tuple[Collective, ...]:
    """Return the passing of keys and values in forward and backward; the paper leaves out their gradients."""
    return (Collective("P2P", 4, Fraction(1, group)),)


REDUCE = (Collective("allreduce"),)
_SHARDED = (Collective("allgather"), Collective("reducescatter"))
_SHARDED_3 = (Collective("allgather", 2), Collective("reducescatter"))
_UNIFIED = (*ring_collectives(), *ulysses_collectives())

TABLE_2 = (
    Row("SP-Ulysses", "ulysses", REDUCE, ulysses_collectives(), "hc/L"),
    Row("SP-Ring", "ring", REDUCE, ring_collectives(), "L/L"),
    Row("DP", "dp", REDUCE, (), "bs/bs"),
    Row("ZeRO1", "zero1", _SHARDED, (), "hc/L"),
    Row("SP-Unified+ZeRO1", "usp+zero1", _SHARDED, _UNIFIED, "hc/L"),
    Row("SP-Unified+ZeRO2", "usp+zero2", _SHARDED, _UNIFIED, "hc/L"),
    Row("SP-Unified+ZeRO3", "usp+zero3", _SHARDED_3, _UNIFIED, "hc/L"),
    # Attention and MLP each all-reduce once in the forward and once in the backward.
    Row("TP", "tp", (), (Collective("allreduce", 4),), "hc/d"),
    # Each all-reduce becomes a gather and a scatter; the backward gathers the inputs again for the weight gradients.
    Row("TP-sp", "tp-sp", (), (Collective("allgather", 6), Collective("reducescatter", 4)), "hc/d"),
)
# What the table lacks. Rows and their gradients go to two experts and back; each expert has one owner, so only the
# gradients of attention's 4 d^2 are reduced.
EXPERTS = Row(
    "EP",
    "ep",
    (Collective("allreduce", elements=Fraction(4, BLOCK)),),
    (Collective("all2all", 4, Fraction(2)),),
    "bs/E",
)
# The cost of a block at a stage boundary, which sends hidden states and receives gradients. At most N of M
# micro-batches are in flight, each with l / N layers.
PIPELINE = Row("PP", "pp", (), (Collective("P2P", 2),), "l/l")


def grouped_rows(group: int) -> tuple[Row, ...]:
    """Return SP-Ulysses and SP-Ring with `group` query heads per KV head (the paper's remark on GQA, section 4.1)."""
    return (
        Row(f"SP-Ulysses, GQA {group}", "ulysses", REDUCE, ulysses_collectives(group), "hc/L"),
        Row(f"SP-Ring, GQA {group}", "ring", REDUCE, ring_collectives(group), "L/L"),
    )


def expression(row: Row) -> str:
    """Return the activation cost in O(bs L d) in the table's notation."""
    if row.bound:
        return f"≤{max(row.activation_cost(ranks) for ranks in (4, 8, 16))}"
    whole, shared = (
        collective_cost((part for part in row.activations if part.shared is on), 1) for on in (False, True)
    )
    divided = f"{shared.numerator}/N" if shared.denominator == 1 else f"{shared.numerator}/({shared.denominator}N)"
    return " + ".join([*([str(whole)] if whole else []), *([divided] if shared else [])]) or "0"


def markdown(rows: tuple[Row, ...]) -> str:
    """Return the table with both parameter costs, the printed one first."""
    heads = (
        *("method", "parameters", "cost printed", "by its factors", "activations", "cost", "split"),
        *("P, G", "OS", "Act"),
    )
    cells = tuple(
        (
            row.method,
            " + ".join(map(str, row.parameters)) or "0",
            *(f"{cost} O(d²)" if cost else "0" for cost in (row.printed_parameter_cost(), row.parameter_cost())),
            " + ".join(map(str, row.activations)) or "0",
            f"{expression(row)} O(bs L d)" if row.activations else "0",
            row.split,
            *PAPER[row.key][2],
        )
        for row in rows
    )
    return Grid("", heads, cells).markdown()


def document() -> str:
    """Return the text of docs/cost.md with its four computed parts replaced; raise ValueError if it has not four."""
    example = TrainConfig(model="llama3-8b", seq_len=2**17, dtype="bfloat16")
    setting = Setting(
        hardware=load_hardware("h100"), world_size=16, base=example, model_config=load_model_config(example.model)
    )
    compared, problems = compare(map(Method.parse, DEFAULT), setting)
    tables = "\n".join(table.markdown() for table in comparison_tables(compared, problems))
    extra = markdown((EXPERTS, PIPELINE))
    computed = (markdown(TABLE_2), extra, markdown(grouped_rows(group=4)), tables, "")
    prose = COMPUTED.split(DOCUMENT.read_text())
    return "".join(text + table for text, table in zip(prose, computed, strict=True))


if __name__ == "__main__":
    DOCUMENT.write_text(document())
