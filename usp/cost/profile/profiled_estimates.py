"""Estimates from a profile where it has a call's layout, and from others, by the rates of the hardware, where not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from usp.cost.calls.call_cost import CallOptions, Rows, batchings, mini_batch_rows, packed_rows
from usp.cost.calls.plan_estimates import fill_plan
from usp.cost.calls.workload import Workload
from usp.cost.rlhf.estimates import Estimates
from usp.model.facts import ModelShape
from usp.rlhf.graph.calls import Generate, ModelCall, TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout

from .moves import move_seconds
from .parts import PREFILL, UPDATE, Part, layout_key, model_key, work_of
from .profile import NOTHING, Profile, Timing


@dataclass(eq=False)
class ProfiledEstimates:
    """Estimates of a graph's calls whose seconds are those of a profile, as far as it goes.

    Attributes:
        others: what it lacks: bytes, the movement of weights and samples, and calls in layouts that were not measured.
        lacking: the calls and layouts, without their ranks, that were asked for and not measured.
    """

    profile: Profile
    others: Estimates
    graph: DataflowGraph
    models: Mapping[str, ModelShape]
    workload: Workload
    options: CallOptions = field(default_factory=CallOptions)
    lacking: set[tuple[str, str]] = field(default_factory=set)
    _fills: dict[tuple[WeightCopy, WeightCopy], float] = field(default_factory=dict, repr=False)
    _known: dict[tuple[str, CallLayout], Timing | None] = field(default_factory=dict, repr=False)

    def call_seconds(self, call: str, layout: CallLayout) -> float:
        timing = self.timing(call, layout)
        return self.others.call_seconds(call, layout) if timing is None else timing.seconds

    def timing(self, call: str, layout: CallLayout) -> Timing | None:
        """Return what the profile says of a call; None for a function, and for a layout that it lacks."""
        made = self.graph[call]
        if not made.role:
            return None
        if (call, layout) not in self._known:
            found = self._known[call, layout] = self._timing(made, layout)
            if found is None:
                self.lacking.add((call, layout_key(layout)))
        return self._known[call, layout]

    def call_bytes(self, call: str, layout: CallLayout) -> float:
        return self.others.call_bytes(call, layout)

    def weight_bytes(self, copy: WeightCopy) -> float:
        return self.others.weight_bytes(copy)

    def state_bytes(self, copy: WeightCopy) -> float:
        return self.others.state_bytes(copy)

    def fill_seconds(self, source: WeightCopy, copy: WeightCopy) -> float:
        if self.profile.moves is None or source.layout.of_weights == copy.layout.of_weights:
            return self.others.fill_seconds(source, copy)
        if (source, copy) not in self._fills:
            plan = fill_plan(source, copy, self.models[copy.role], self.options.dtype, self.profile.ranks)
            self._fills[source, copy] = move_seconds(self.profile.moves, plan)
        return self._fills[source, copy]

    def load_seconds(self, copy: WeightCopy) -> float:
        return self.others.load_seconds(copy)

    def state_load_seconds(self, copy: WeightCopy) -> float:
        return self.others.state_load_seconds(copy)

    def transfer_seconds(self, producer: str, source: CallLayout, target: CallLayout) -> float:
        return self.others.transfer_seconds(producer, source, target)

    @cached_property
    def _keys(self) -> dict[str, str]:
        """The `model_key` of each role whose model has one."""
        found = {}
        for role, model in self.models.items():
            if len(set(model.alike)) == 1:
                found[role] = model_key(model, self.options.dtype)
        return found

    @cached_property
    def _mean_tokens(self) -> float:
        return sum(self.workload.sequences) / len(self.workload.sequences)

    def _timing(self, call: ModelCall, layout: CallLayout) -> Timing | None:
        if call.role not in self._keys:
            return None
        depth = len(self.models[call.role].layers)
        part = Part(self._keys[call.role], work_of(call), layout_key(layout))
        if isinstance(call.work, Generate):
            return self._generation(part, depth, layout)
        if isinstance(call.work, TrainStep):
            total = NOTHING
            for rows, number in mini_batch_rows(call.work, layout, self.workload).items():
                one = self._rows(part, depth, rows, layout)
                if one is None:
                    return None
                total = total.plus(one, number * call.work.epochs)
            return total
        return self._rows(part, depth, packed_rows(self.workload.sequences, layout), layout)

    def _rows(self, part: Part, depth: int, rows: Rows, layout: CallLayout) -> Timing | None:
        """Return the timing of rows of packed sequences: that of the fewest that the layout allows, and the others."""
        least, tokens = layout.dims.pp, self._mean_tokens
        found = self.profile.at(part, depth, least * rows.tokens / tokens, tokens)
        if found is None or rows.number <= least:
            return found
        update = self.profile.at(Part(part.model, UPDATE + part.work, part.layout), depth, 1, 1) or NOTHING
        return found.plus(found.plus(update, -1.0), (rows.number - least) / least)

    def _generation(self, part: Part, depth: int, layout: CallLayout) -> Timing | None:
        longest = NOTHING
        prompts = Part(part.model, PREFILL, part.layout)
        for run in batchings(layout, self.workload, self.options):
            total = NOTHING
            for stretch in run.stretches:
                step = self.profile.at(part, depth, run.slots, stretch.length * layout.dims.sp)
                prefills = [self.profile.at(prompts, depth, *shape) for shape in stretch.prefills]
                if step is None or None in prefills:
                    return None
                total = total.plus(step, stretch.steps)
                for prefill in prefills:
                    assert prefill is not None
                    total = total.plus(prefill)
            longest = max(longest, total)
        return longest
