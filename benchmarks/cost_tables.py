"""The computed tables of docs/cost.md: the paper's Table 2 with the rows that it lacks, and an example on the wire.

python -m benchmarks.cost_tables
"""

from __future__ import annotations

import re
from pathlib import Path

from parallel import load_hardware
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.planning.comparison import Setting, compare, comparison_tables
from usp.planning.methods import (
    DEFAULT,
    REDUCE,
    TABLE_2,
    WHOLE,
    Method,
    Row,
    collective_cost,
    expert_row,
    pipeline_row,
    ring_collectives,
    ulysses_collectives,
)
from usp.run.tables import Grid

DOCUMENT = Path(__file__).parents[1] / "docs" / "cost.md"
COMPUTED = re.compile(r"(?<=<!-- computed -->\n).*?(?=<!-- end -->\n)", re.DOTALL)


def grouped_rows(group: int) -> tuple[Row, ...]:
    """Return SP-Ulysses and SP-Ring with `group` query heads per KV head (the paper's remark on GQA, section 4.1)."""
    return (
        Row(f"SP-Ulysses, GQA {group}", REDUCE, ulysses_collectives(group), "hc/L", WHOLE),
        Row(f"SP-Ring, GQA {group}", REDUCE, ring_collectives(group), "L/L", WHOLE),
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
            *row.states,
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
    extra = markdown((expert_row(experts_per_token=2), pipeline_row()))
    computed = (markdown(TABLE_2), extra, markdown(grouped_rows(group=4)), tables, "")
    prose = COMPUTED.split(DOCUMENT.read_text())
    return "".join(text + table for text, table in zip(prose, computed, strict=True))


if __name__ == "__main__":
    DOCUMENT.write_text(document())
