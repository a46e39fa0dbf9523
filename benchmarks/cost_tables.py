"""The example of docs/cost.md: what `usp cost` finds for each of its methods.

python -m benchmarks.cost_tables
"""

from __future__ import annotations

import re
from pathlib import Path

from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.parallel import load_hardware
from usp.planning.comparison import Setting, compare, comparison_tables
from usp.planning.methods import DEFAULT, Method

DOCUMENT = Path(__file__).parents[1] / "docs" / "cost.md"
COMPUTED = re.compile(r"(?<=<!-- computed -->\n).*?(?=<!-- end -->\n)", re.DOTALL)


def document() -> str:
    """Return the text of docs/cost.md with its computed part replaced."""
    example = TrainConfig(model="llama3-8b", seq_len=2**17, dtype="bfloat16")
    setting = Setting(
        hardware=load_hardware("h100"), world_size=16, base=example, model_config=load_model_config(example.model)
    )
    compared, problems = compare(map(Method.parse, DEFAULT), setting)
    tables = "\n".join(table.markdown() for table in comparison_tables(compared, problems))
    return COMPUTED.sub(lambda _: tables, DOCUMENT.read_text())


if __name__ == "__main__":
    DOCUMENT.write_text(document())
