"""Estimates for searches: those of `usp.cost.calls`, each computed once for calls and places that are alike."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from usp.cost.calls.call_cost import CallCost, call_cost
from usp.cost.calls.plan_estimates import PlanEstimates
from usp.rlhf.graph.calls import Inference, ModelCall
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout

from .quick_fill import fill_seconds


class Predictions:
    """Estimates of a graph's calls on hosts that are all alike.

    A call takes the same wherever its ranks are within a host, or on whole hosts; and so do calls of one kind to roles
    with the same model. Reallocations are estimated by `quick_fill`. Samples that are sent between calls take no time:
    they are small beside weights and activations.

    Where ranks share processors (`Hardware.crowding`), a call takes what it takes alone: the rates are those of all
    `world_size` ranks at work, and the fewer ranks it has, the faster each is.
    """

    def __init__(self, exact: PlanEstimates, ranks_per_host: int, world_size: int = 0) -> None:
        self._exact, self._per_host, self._world_size = exact, ranks_per_host, world_size
        self._cost = cache(self._new_cost)
        self._copy_bytes = cache(self._new_copy_bytes)
        self._state_load = cache(self._new_state_load)
        self._first = {call.name: _alike(exact, call) for call in exact.graph.calls if call.role}
        self._placed = cache(self._somewhere)
        self.fill_seconds = cache(self._fill_seconds)
        self.call_seconds = cache(self._call_seconds)
        self.call_bytes = cache(self._call_bytes)
        self.weight_bytes = cache(self._weight_bytes)
        self.state_bytes = cache(self._state_bytes)

    def _call_seconds(self, call: str, layout: CallLayout) -> float:
        if call not in self._first:
            return 0.0
        return self._cost(self._first[call], self._placed(layout)).total * self._busy(len(layout.ranks))

    def _busy(self, ranks: int) -> float:
        """Return what a call of so many ranks takes alone, relative to when all others are at work, too."""
        crowding = self._exact.hardware.crowding
        return max(ranks / self._world_size, 1 / crowding) if crowding > 1 and self._world_size else 1.0

    def _call_bytes(self, call: str, layout: CallLayout) -> float:
        return self._cost(self._first[call], self._placed(layout)).work_bytes if call in self._first else 0.0

    def _weight_bytes(self, copy: WeightCopy) -> float:
        return self._copy_bytes(copy.role, self._placed(copy.layout))[0]

    def _state_bytes(self, copy: WeightCopy) -> float:
        return self._copy_bytes(copy.role, self._placed(copy.layout))[1]

    def load_seconds(self, copy: WeightCopy) -> float:
        return self.weight_bytes(copy) / self._exact.hardware.host_link_bytes_per_second

    def state_load_seconds(self, copy: WeightCopy) -> float:
        return self._state_load(copy.role, self._placed(copy.layout))

    def transfer_seconds(self, producer: str, source: CallLayout, target: CallLayout) -> float:
        return 0.0

    def _fill_seconds(self, source: WeightCopy, copy: WeightCopy) -> float:
        nbytes = self._exact.models[copy.role].numel * self._exact.options.dtype.itemsize
        return fill_seconds(source.layout, copy.layout, nbytes, self._exact.hardware, self._per_host)

    def _new_cost(self, name: str, layout: CallLayout) -> CallCost:
        exact, call = self._exact, self._exact.graph[name]
        return call_cost(call, layout, exact.models[call.role], exact.workload, exact.hardware, exact.options)

    def _new_copy_bytes(self, role: str, layout: CallLayout) -> tuple[float, float]:
        return self._exact.copy_bytes(WeightCopy(role, layout))

    def _new_state_load(self, role: str, layout: CallLayout) -> float:
        return self._exact.state_load_seconds(WeightCopy(role, layout))

    def _somewhere(self, layout: CallLayout) -> CallLayout:
        """Return the layout on the first ranks, if it is within a host, or on whole hosts."""
        first, number, host = layout.ranks[0], len(layout.ranks), self._per_host
        consecutive = layout.ranks[-1] - first == number - 1
        if consecutive and (first % host + number <= host or first % host == number % host == 0):
            return replace(layout, ranks=tuple(range(number)))
        return layout


def _alike(exact: PlanEstimates, call: ModelCall) -> str:
    """Return the first call that takes as long as `call` in the same layout: the same work with the same model."""

    def work(one: ModelCall) -> object:
        return one.work.head if isinstance(one.work, Inference) else one.name

    return next(
        other.name
        for other in exact.graph.calls
        if other.role
        and other.kind == call.kind
        and work(other) == work(call)
        and exact.models[other.role] is exact.models[call.role]
    )
