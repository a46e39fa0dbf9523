"""Table 2 of the USP paper (arXiv 2405.07719v5) in its own convention: cost = elements x algorithm bandwidth factor.

Each method is a list of collectives of one transformer block, forward and backward; costs follow from the counts.

    O(d^2)       12 of them are a block's parameters: 4 attention matrices, 2 MLP matrices of 4 d^2 each
    O(bs L d)    elements of one activation
    N            ranks that share the work; P, G bytes of parameters and gradients; A of activations

The factors are those of large N: an all-reduce moves its elements twice, everything else once (the paper's section 4.1;
an all-to-all and a gather of N ranks move (N - 1) / N of them). With them an all-reduce of 12 O(d^2) costs 24 O(d^2),
and 12 is what the table prints: its parameter costs are half of what its factors give, its activation costs are not.
Both are stated here: `parameter_cost` follows the factors, `printed_parameter_cost` the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

FACTORS = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "all2all": 1, "P2P": 1}
BLOCK = 12  # parameters of a block, in d^2


@dataclass(frozen=True)
class Collective:
    """`count` times `name` on the part `elements` of bs L d, or of the block's parameters; `shared`: on 1/N of it."""

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
    """A method.

    Attributes:
        parameters, activations: what a block communicates.
        split: dims that are divided (heads hc, tokens L, hidden size d, batch bs, layers l, experts E), for attention
            and for the MLP.
        states: bytes of parameters and gradients, of the optimiser, and of activations.
        bound: the cost of activations is at most this, whatever the degrees inside.
    """

    method: str
    parameters: tuple[Collective, ...]
    activations: tuple[Collective, ...]
    split: str
    states: tuple[str, str, str]
    bound: bool = False

    def parameter_cost(self) -> Fraction:
        """In O(d^2), by the paper's factors."""
        return BLOCK * sum((part.cost(1) for part in self.parameters), Fraction(0))

    def printed_parameter_cost(self) -> Fraction:
        """In O(d^2), as the table prints it: half of what its factors give."""
        return self.parameter_cost() / 2

    def activation_cost(self, ranks: int) -> Fraction:
        """In O(bs L d)."""
        if self.bound:
            return max(
                unified_cost(ulysses, ranks // ulysses) for ulysses in range(1, ranks + 1) if ranks % ulysses == 0
            )
        return sum((part.cost(ranks) for part in self.activations), Fraction(0))


def ulysses_collectives(group: int = 1) -> tuple[Collective, ...]:
    """q, k, v and the output, and the gradients of all four; with `group` query heads to a key-value head, k and v are
    smaller by that."""
    if group == 1:
        return (Collective("all2all", 8, shared=True),)
    return (Collective("all2all", 4, shared=True), Collective("all2all", 4, Fraction(1, group), shared=True))


def ring_collectives(group: int = 1) -> tuple[Collective, ...]:
    """Keys and values pass every rank, in the forward and again in the backward. The paper leaves out their gradients,
    which travel too."""
    return (Collective("P2P", 4, Fraction(1, group)),)


def unified_cost(ulysses: int, ring: int, group: int = 1) -> Fraction:
    """In O(bs L d), of ulysses x ring: the ring's keys are those of one Ulysses rank's heads."""
    ranks = ulysses * ring
    exchange = (
        sum((part.cost(ranks) for part in ulysses_collectives(group)), Fraction(0)) if ulysses > 1 else Fraction(0)
    )
    passing = (
        sum((part.cost(ranks) for part in ring_collectives(group)), Fraction(0)) / ulysses if ring > 1 else Fraction(0)
    )
    return exchange + passing


_REDUCE = (Collective("allreduce"),)
_SHARDED = (Collective("allgather"), Collective("reducescatter"))
_SHARDED_3 = (Collective("allgather", 2), Collective("reducescatter"))
_UNIFIED = (*ring_collectives(), *ulysses_collectives())
_WHOLE, _ALL = ("P+G", "6P", "A/N"), ("(P+G)/N", "6P/N", "A/N")

TABLE_2 = (
    Row("SP-Ulysses", _REDUCE, ulysses_collectives(), "hc/L", _WHOLE),
    Row("SP-Ring", _REDUCE, ring_collectives(), "L/L", _WHOLE),
    Row("DP", _REDUCE, (), "bs/bs", _WHOLE),
    Row("ZeRO1", _SHARDED, (), "hc/L", ("P+G", "6P/N", "A/N")),
    Row("SP-Unified+ZeRO1", _SHARDED, _UNIFIED, "hc/L", ("P+G", "6P/N", "A/N"), bound=True),
    Row("SP-Unified+ZeRO2", _SHARDED, _UNIFIED, "hc/L", ("P+G/N", "6P/N", "A/N"), bound=True),
    Row("SP-Unified+ZeRO3", _SHARDED_3, _UNIFIED, "hc/L", _ALL, bound=True),
    # Attention and MLP: one all-reduce each in the forward, one each in the backward.
    Row("TP", (), (Collective("allreduce", 4),), "hc/d", ("(P+G)/N", "6P/N", "αA")),
    # Each all-reduce becomes a gather and a scatter; the gathered inputs are gathered once more for the weights.
    Row("TP-sp", (), (Collective("allgather", 6), Collective("reducescatter", 4)), "hc/d", _ALL),
)


def expert_row(experts_per_token: int) -> Row:
    """Expert parallelism, which the table lacks: rows to their experts and back, and the gradients of both, where a
    token is `experts_per_token` rows. An expert has one owner: gradients of the attention's 4 d^2 alone are reduced."""
    return Row(
        "EP",
        (Collective("allreduce", elements=Fraction(4, BLOCK)),),
        (Collective("all2all", 4, Fraction(experts_per_token), shared=True),),
        "bs/E",
        ("P+G, experts' /N", "6P, experts' /N", "A/N"),
    )


def pipeline_row() -> Row:
    """Pipeline parallelism, which the table lacks: hidden states go on and gradients come back at a stage's border, so
    a block inside a stage sends nothing; the cost is that of a block before a border. Of M micro-batches at most N are
    in flight on the first rank, each of l / N layers."""
    return Row("PP", (), (Collective("P2P", 2),), "l/l", ("(P+G)/N", "6P/N", "A/M"))


def grouped_rows(group: int) -> tuple[Row, ...]:
    """SP-Ulysses and SP-Ring with `group` query heads to a key-value head (the paper's remark on GQA, section 4.1)."""
    return (
        Row(f"SP-Ulysses, GQA {group}", _REDUCE, ulysses_collectives(group), "hc/L", _WHOLE),
        Row(f"SP-Ring, GQA {group}", _REDUCE, ring_collectives(group), "L/L", _WHOLE),
    )


def expression(row: Row) -> str:
    """The cost of activations in O(bs L d) as the table writes it."""
    if row.bound:
        return f"≤{max(row.activation_cost(ranks) for ranks in (4, 8, 16))}"
    whole = sum((part.cost(1) for part in row.activations if not part.shared), Fraction(0))
    shared = sum((part.cost(1) for part in row.activations if part.shared), Fraction(0))
    found = [f"{whole}"] if whole else []
    if shared:
        top, bottom = shared.numerator, shared.denominator
        found.append(f"{top}/N" if bottom == 1 else f"{top}/({bottom}N)")
    return " + ".join(found) or "0"


def markdown(rows: tuple[Row, ...]) -> str:
    """The table; both parameter costs, the printed one first."""
    head = (
        "method",
        "parameters",
        "cost printed",
        "by its factors",
        "activations",
        "cost",
        "split",
        "P, G",
        "OS",
        "Act",
    )
    lines = [head, ("---",) * len(head)]
    for row in rows:
        lines.append(
            (
                row.method,
                " + ".join(map(str, row.parameters)) or "0",
                _square(row.printed_parameter_cost()),
                _square(row.parameter_cost()),
                " + ".join(map(str, row.activations)) or "0",
                f"{expression(row)} O(bs L d)" if row.activations else "0",
                row.split,
                *row.states,
            )
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _square(cost: Fraction) -> str:
    return f"{cost} O(d²)" if cost else "0"
