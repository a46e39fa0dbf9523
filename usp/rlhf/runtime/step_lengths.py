"""The lengths of a step's samples: RUN/timeline/lengths.jsonl, one step per line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from usp.rlhf.graph.calls import Generate
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import tokens_key

from .step_plan import PROMPTS
from .timeline import FOLDER

LENGTHS_FILE = f"{FOLDER}/lengths.jsonl"


@dataclass(frozen=True)
class StepLengths:
    """Tokens of each sample's prompt and response. The samples of a prompt, group_size of them, are adjacent."""

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    group_size: int

    @staticmethod
    def of(graph: DataflowGraph, lengths: Mapping[str, Sequence[int]]) -> StepLengths:
        """Return those of the first call that generates, from the lengths of a step's sequences by key."""
        call = next(call for call in graph.calls if isinstance(call.work, Generate))
        prompts = lengths[PROMPTS]
        responses = (whole - prompt for whole, prompt in zip(lengths[tokens_key(call)], prompts, strict=True))
        return StepLengths(tuple(prompts), tuple(responses), graph.group_size)

    def line(self, step: int) -> str:
        """Return the line of a step."""
        return json.dumps({"step": step, **asdict(self)})


def read_lengths(run: Path) -> StepLengths:
    """Return the lengths of a run's last step.

    Raises:
        ValueError: if the run or the file does not exist, or has no step.
    """
    path = run / LENGTHS_FILE
    if not path.is_file():
        raise ValueError(f"{run} is not the folder of an RLHF run that generates: {LENGTHS_FILE} does not exist")
    for line in reversed(path.read_text(encoding="utf-8").splitlines()):
        try:
            values = json.loads(line)
            return StepLengths(tuple(values["prompts"]), tuple(values["responses"]), values["group_size"])
        except (ValueError, KeyError, TypeError):  # the run was killed while writing
            continue
    raise ValueError(f"{path} has the lengths of no step")
