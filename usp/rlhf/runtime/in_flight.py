"""The samples of a step that are rolled out and not trained on yet, with staleness 1.

Between two iterations each rank that trains has those that it trains on. A checkpoint holds all of them, whole, so that
any plan and number of ranks continues with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from usp.rlhf.graph.calls import ModelCall
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import KeyKind
from usp.rlhf.plan.plan import ExecutionPlan

from .step_plan import StepData


@dataclass(frozen=True)
class InFlight:
    """Samples in flight.

    Attributes:
        number: of the step that trains on them.
        step: what this rank has of them.
        metrics: of their rollouts, the same on every rank.
    """

    number: int
    step: StepData
    metrics: dict[str, float]

    @staticmethod
    def of(number: int, step: StepData, metrics: dict[str, float]) -> InFlight:
        """Return the samples of a step whose rollouts are done, without the values that only these needed."""
        step.store = {key: values for key, values in step.store.items() if key in _readers(step)}
        return InFlight(number, step, metrics)

    def whole(self, device: torch.device) -> dict[str, Tensor]:
        """Return the values of all samples by key, one sample after another, on every rank. Collective."""
        found = {}
        for key, call in _readers(self.step).items():
            sizes = _sizes(self.step, key)
            joined = torch.zeros(sum(sizes), dtype=self.step.kinds[key].dtype)
            leaders, pieces = self.step.plan[call.name].leaders, joined.split(sizes)
            if dist.get_rank() in leaders:
                for i in self.step.transfer_end(call, (key,)).ids[leaders.index(dist.get_rank())]:
                    pieces[i].copy_(self.step.store[key][i].reshape(-1))
            bytes_of_one_rank = joined.view(torch.uint8).to(device)  # and zeros of the others
            dist.all_reduce(bytes_of_one_rank)
            found[key] = bytes_of_one_rank.view(joined.dtype)
        return found

    def to_extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides `whole`, as JSON values."""
        lengths = {key: list(of_key) for key, of_key in self.step.lengths.items()}
        return {"step": self.number, "samples": self.step.samples, "lengths": lengths, "metrics": self.metrics}


class SavedInFlight:
    """Samples in flight of a checkpoint, to be filled in.

    Attributes:
        values: like `InFlight.whole`, to be filled.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        kinds: Mapping[str, KeyKind],
        extra: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        step = StepData(graph, plan, kinds, extra["samples"])
        step.lengths.update(extra["lengths"])
        self._in_flight = InFlight(extra["step"], step, dict(extra["metrics"]))
        self.values = {
            key: torch.zeros(sum(_sizes(step, key)), dtype=kinds[key].dtype, device=device) for key in _readers(step)
        }

    def restored(self) -> InFlight:
        """Return the samples, all of them on every rank."""
        step = self._in_flight.step
        for key, joined in self.values.items():
            pieces = joined.cpu().split(_sizes(step, key))
            shaped = pieces if step.kinds[key].tokens else [piece.reshape(()) for piece in pieces]
            step.store[key] = dict(enumerate(shaped))
        return self._in_flight


def _readers(step: StepData) -> dict[str, ModelCall]:
    """Map the keys that are in flight to a call that reads them: one that makes no samples."""
    calls = [call for call in step.graph.calls if not call.outputs]
    return {key: call for call in calls for key in sorted(call.inputs) if key in step.kinds}


def _sizes(step: StepData, key: str) -> Sequence[int]:
    kind = step.kinds[key]
    return list(step.lengths[kind.tokens]) if kind.tokens else [1] * step.samples
