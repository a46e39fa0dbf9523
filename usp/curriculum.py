"""The stages of a curriculum: how long sequences are for how many steps, from which data, and divided over which ranks.

curriculum:
  - {steps: 1000, seq_len: 8K, data: "web=0.8,books=0.2", sp_ulysses: 2, global_batch_size: 64}
  - {steps: 200, seq_len: 128K, data: "books=0.9,code=0.1", sp_ulysses: 8, sp_ring: 2, global_batch_size: 4}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

UNITS = {"": 1, "K": 2**10, "M": 2**20}


@dataclass(frozen=True)
class CurriculumStage:
    """A stage of a curriculum: what is 0 or empty is as in the run's own configuration.

    With `sp_ulysses` or `sp_ring`, dp_shard takes the remaining ranks. The other fields are TrainConfig's.

    Attributes:
        steps: of this stage.
    """

    steps: int
    seq_len: int = 0
    data: str = ""
    sp_ulysses: int = 0
    sp_ring: int = 0
    batch_size: int = 0
    global_batch_size: int = 0
    micro_batches: int = 0
    ac: str = ""

    def given(self) -> dict[str, Any]:
        """Return the fields that replace the run's."""
        return {name: value for name, value in vars(self).items() if value and name != "steps"}


def token_count(text: str) -> int:
    """Parse a number of tokens, an integer followed by K, M or nothing: `128K` is 131072.

    Raises:
        ValueError: for any other text.
    """
    found = re.fullmatch(r"(-?\d+)([KM]?)", text.strip().upper())
    if found is None:
        raise ValueError(f"{text} must be a number of tokens such as 131072, 128K or 1M")
    return int(found[1]) * UNITS[found[2]]


def stages_from(listed: Any) -> tuple[CurriculumStage, ...]:
    """Read the stages of a curriculum from a list of mappings; keys may have dashes for underscores.

    Raises:
        ValueError: naming the stage and the key that is wrong.
    """
    if not isinstance(listed, list | tuple):
        raise ValueError(f"a curriculum is a list of stages, such as [{{steps: 100, seq_len: 8K}}], not {listed!r}")
    return tuple(_stage(number, values) for number, values in enumerate(listed, start=1))


def read_stages(path: str) -> tuple[CurriculumStage, ...]:
    """Read a curriculum from a YAML file: a list of stages, or a mapping with the key `curriculum`.

    Raises:
        ValueError: for a file that cannot be read, and as `stages_from`.
    """
    if not path:
        return ()
    try:
        listed = yaml.safe_load(Path(path).expanduser().read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not a curriculum: {error}") from error
    if isinstance(listed, Mapping) and listed.keys() == {"curriculum"}:
        listed = listed["curriculum"]
    return stages_from(listed)


def _stage(number: int, values: Any) -> CurriculumStage:
    if isinstance(values, CurriculumStage):
        return values
    kinds = {field.name: int if field.type == "int" else str for field in fields(CurriculumStage)}
    found: dict[str, Any] = {}
    for key, value in values.items() if isinstance(values, Mapping) else ():
        name = str(key).replace("-", "_")
        if name not in kinds:
            raise ValueError(f"stage {number} of the curriculum has an unknown key {key!r}: use {', '.join(kinds)}")
        found[name] = token_count(value) if name == "seq_len" and isinstance(value, str) else value
        if type(found[name]) is not kinds[name] or (kinds[name] is int and found[name] < 0):
            words = "a number, at least 0" if kinds[name] is int else "a string"
            raise ValueError(f"{key} = {value!r} in stage {number} of the curriculum must be {words}")
    if not found.get("steps"):
        raise ValueError(f"stage {number} of the curriculum needs its number of steps, such as {{steps: 100}}")
    return CurriculumStage(**found)
