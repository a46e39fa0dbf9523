"""Seconds and bytes of everything that a simulation of an RLHF plan asks for, on given hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from parallel import Hardware, ReallocPlan, plan_realloc, realloc_seconds
from usp.cost.time.compute import held_elements
from usp.cost.traffic.sharding import FLOAT32
from usp.model.facts import ModelShape
from usp.model.weight_layout import weight_layout
from usp.rlhf.data.partition import balance
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.graph.keys import key_kinds
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.runtime.transfer import TransferEnd, plan_transfer

from .call_cost import CallCost, CallOptions, call_cost, forward_job
from .sample_seconds import sample_seconds
from .workload import Workload

BUCKET_BYTES = 64 << 20  # buffer memory of a reallocation, as in usp.rlhf.runtime.copies


def fill_plan(
    source: WeightCopy, copy: WeightCopy, model: ModelShape, dtype: torch.dtype, per_host: int
) -> ReallocPlan:
    """Return the reallocation that fills a copy of a model's weights from another one alone.

    per_host: ranks of a host.
    """
    src, dst = (
        weight_layout(model, each.layout.dims, each.layout.ranks, zero=each.layout.zero, dtype=dtype)
        for each in (source, copy)
    )
    return plan_realloc(src, dst, bucket_bytes=BUCKET_BYTES, ranks_per_host=per_host)


@dataclass(frozen=True, eq=False)
class PlanEstimates:
    """Predictions for the calls of a graph, from hardware files alone. Bytes are those of the rank that has most.

    Attributes:
        models: by role.
    """

    graph: DataflowGraph
    models: Mapping[str, ModelShape]
    workload: Workload
    hardware: Hardware
    options: CallOptions = field(default_factory=CallOptions)

    def call_seconds(self, call: str, layout: CallLayout) -> float:
        """Return the time of a call; that of functions is not predicted, and 0."""
        return self._cost(call, layout).total if self.graph[call].role else 0.0

    def call_bytes(self, call: str, layout: CallLayout) -> float:
        """Return the memory that a call takes beside weights and optimizer."""
        return self._cost(call, layout).work_bytes if self.graph[call].role else 0.0

    def weight_bytes(self, copy: WeightCopy) -> float:
        """Return the memory of a copy's weights in the dtype of untrained ones."""
        return self.copy_bytes(copy)[0]

    def state_bytes(self, copy: WeightCopy) -> float:
        """Return the memory of a trained copy's moments, and what its float32 weights take beyond `weight_bytes`."""
        return self.copy_bytes(copy)[1]

    def copy_bytes(self, copy: WeightCopy) -> tuple[int, int]:
        """Return (`weight_bytes`, `state_bytes`)."""
        elements, itemsize = self._elements(copy), self.options.dtype.itemsize
        return elements * itemsize, elements * (3 * FLOAT32 - itemsize)

    def fill_seconds(self, source: WeightCopy, copy: WeightCopy) -> float:
        """Return the time of the reallocation that fills a copy from another; 0 if both are alike."""
        if source.layout.of_weights == copy.layout.of_weights:
            return 0.0
        per_host = self.hardware.tiers[0].devices or max(source.layout.ranks + copy.layout.ranks) + 1
        plan = fill_plan(source, copy, self.models[copy.role], self.options.dtype, per_host)
        return realloc_seconds(plan, self.hardware).total

    def load_seconds(self, copy: WeightCopy) -> float:
        """Return the time to move a copy's weights from the host to the device, or back."""
        return self.weight_bytes(copy) / self.hardware.host_link_bytes_per_second

    def state_load_seconds(self, copy: WeightCopy) -> float:
        """Return the time to move a trained copy's moments from the host to the device, or back."""
        return self._elements(copy) * 2 * FLOAT32 / self.hardware.host_link_bytes_per_second

    def transfer_seconds(self, producer: str, source: CallLayout, target: CallLayout) -> float:
        """Return the time to send all outputs of a call to another layout."""
        lengths, kinds = self.workload.sequences, key_kinds(self.graph)
        keys = self.graph[producer].outputs
        ends = [
            TransferEnd(layout, balance(range(len(lengths)), lengths, layout.dims.batch), keys)
            for layout in (source, target)
        ]
        tokens = {kinds[key].tokens: lengths for key in keys}
        return sample_seconds(plan_transfer(ends[0], ends[1:]), kinds, tokens, self.hardware)

    def _cost(self, call: str, layout: CallLayout) -> CallCost:
        made = self.graph[call]
        return call_cost(made, layout, self.models[made.role], self.workload, self.hardware, self.options)

    def _elements(self, copy: WeightCopy) -> int:
        job = forward_job(copy.layout, self.models[copy.role], self.options)
        return max(held_elements(job, rank) for rank in job.ranks("pp", 0))
