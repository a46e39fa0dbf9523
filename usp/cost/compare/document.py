"""Write the computed tables into docs/cost.md; its text is edited there.

python -m usp.cost.compare.document
"""

from __future__ import annotations

import re
from pathlib import Path

from usp.config import TrainConfig
from usp.cost.methods import DEFAULT, Batch, Method
from usp.hf.models import load_model_config

from .comparison import compare
from .paper import TABLE_2, expert_row, grouped_rows, markdown, pipeline_row
from .tables import comparison_tables

DOCUMENT = Path(__file__).parents[3] / "docs" / "cost.md"
COMPUTED = re.compile(r"(?<=<!-- computed -->\n).*?(?=<!-- end -->\n)", re.DOTALL)


def document() -> str:
    """Return the text of docs/cost.md with its four computed parts replaced.

    Raises:
        ValueError: if the file has more or fewer of them.
    """
    example = TrainConfig(model="llama3-8b", seq_len=2**17, dtype="bfloat16")
    methods = [Method.parse(name) for name in DEFAULT]
    found = compare(methods, example, load_model_config(example.model), devices=16, batch=Batch(1))
    tables = "\n".join(table.markdown() for table in comparison_tables(found))
    extra = markdown((expert_row(experts_per_token=2), pipeline_row()))
    computed = (markdown(TABLE_2), extra, markdown(grouped_rows(group=4)), tables, "")
    prose = COMPUTED.split(DOCUMENT.read_text())
    return "".join(text + part for text, part in zip(prose, computed, strict=True))


if __name__ == "__main__":
    DOCUMENT.write_text(document())
