"""Table 2 of the USP paper (arXiv 2405.07719v5) in its own convention: cost = elements x algorithm bandwidth factor.

Each method is a list of the collectives of one transformer block, forward and backward, from which its costs follow.

    O(d^2)       a block has 12 d^2 parameters: 4 attention matrices, and 2 MLP matrices of 4 d^2 each
    O(bs L d)    elements of one activation
    N            number of ranks; P, G: bytes of parameters and gradients; A: bytes of activations

The factors hold for large N: an all-reduce moves its elements twice, everything else once (section 4.1; an all-to-all
or a gather over N ranks moves (N - 1) / N of them). By these factors an all-reduce of 12 O(d^2) costs 24 O(d^2), but
the table prints 12: its parameter costs are half of what its factors give, its activation costs are not.
`parameter_cost` follows the factors, `printed_parameter_cost` the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from parallel import divisors
from usp.cost.grid import Grid

FACTORS = {"allreduce": 2, "allgather": 1, "reducescatter": 1, "all2all": 1, "P2P": 1}
BLOCK = 12  # parameters of a block, in d^2


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
    """A method of the table.

    Attributes:
        parameters, activations: the collectives of one block.
        split: the sharded dims of attention and MLP: heads hc, tokens L, hidden size d, batch bs, layers l, experts E.
        states: bytes of parameters and gradients, of optimizer states, and of activations.
        bound: the activation cost is the maximum over all splits of N into Ulysses and ring.
    """

    method: str
    parameters: tuple[Collective, ...]
    activations: tuple[Collective, ...]
    split: str
    states: tuple[str, str, str]
    bound: bool = False

    def parameter_cost(self) -> Fraction:
        """Return the cost in O(d^2) by the paper's factors."""
        return BLOCK * _cost(self.parameters, 1)

    def printed_parameter_cost(self) -> Fraction:
        """Return the cost in O(d^2) as the table prints it: half of what its factors give."""
        return self.parameter_cost() / 2

    def activation_cost(self, ranks: int) -> Fraction:
        """Return the cost in O(bs L d)."""
        if self.bound:
            return max(unified_cost(ulysses, ranks // ulysses) for ulysses in divisors(ranks))
        return _cost(self.activations, ranks)


def _cost(collectives: Iterable[Collective], ranks: int) -> Fraction:
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
    exchange = _cost(ulysses_collectives(group), ulysses * ring) if ulysses > 1 else Fraction(0)
    return exchange + (_cost(ring_collectives(group), 1) / ulysses if ring > 1 else Fraction(0))


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


def grouped_rows(group: int) -> tuple[Row, ...]:
    """Return SP-Ulysses and SP-Ring with `group` query heads per KV head (the paper's remark on GQA, section 4.1)."""
    return (
        Row(f"SP-Ulysses, GQA {group}", _REDUCE, ulysses_collectives(group), "hc/L", _WHOLE),
        Row(f"SP-Ring, GQA {group}", _REDUCE, ring_collectives(group), "L/L", _WHOLE),
    )


def expression(row: Row) -> str:
    """Return the activation cost in O(bs L d) in the table's notation."""
    if row.bound:
        return f"≤{max(row.activation_cost(ranks) for ranks in (4, 8, 16))}"
    whole, shared = (_cost((part for part in row.activations if part.shared is on), 1) for on in (False, True))
    found = [f"{whole}"] if whole else []
    if shared:
        top, bottom = shared.numerator, shared.denominator
        found.append(f"{top}/N" if bottom == 1 else f"{top}/({bottom}N)")
    return " + ".join(found) or "0"


def markdown(rows: tuple[Row, ...]) -> str:
    """Return the table with both parameter costs, the printed one first."""
    before = ("method", "parameters", "cost printed", "by its factors", "activations", "cost")
    cells = tuple(
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
        for row in rows
    )
    return Grid("", (*before, "split", "P, G", "OS", "Act"), cells).markdown()


def _square(cost: Fraction) -> str:
    return f"{cost} O(d²)" if cost else "0"
