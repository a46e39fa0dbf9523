"""Estimates of calls, corrected by what the calls took under the running plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from usp.cost.rlhf.estimates import Estimates
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout

_NEWEST = 0.5  # the weight of the steps since the last decision, against all before


@dataclass(frozen=True)
class Corrections:
    """What is learned from measured steps, by call.

    Attributes:
        factors: of calls that are predicted: measured over predicted seconds.
        seconds: measured, of the others, such as functions.
    """

    factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)

    def after(self, measured: Sequence[Mapping[str, float]], predicted: Sequence[Mapping[str, float]]) -> Corrections:
        """Return the corrections after further steps: of each call the median over the steps counts half, the
        corrections before half (geometrically), so that one slow step changes nothing for long.

        Args:
            measured, predicted: seconds by call of each step.
        """
        factors, seconds = dict(self.factors), dict(self.seconds)
        for call in dict.fromkeys(name for step in measured for name in step):
            pairs = [(of[call], by.get(call, 0.0)) for of, by in zip(measured, predicted, strict=True) if call in of]
            if all(by > 0 for _, by in pairs):
                new, known = median(of / by for of, by in pairs), factors
            else:
                new, known = median(of for of, _ in pairs), seconds
            known[call] = new**_NEWEST * known[call] ** (1 - _NEWEST) if call in known else new
        return Corrections(factors, seconds)


@dataclass(frozen=True, eq=False)
class CorrectedEstimates:
    """`Estimates` with corrected seconds of calls; all else is as estimated."""

    estimates: Estimates
    corrections: Corrections

    def call_seconds(self, call: str, layout: CallLayout) -> float:
        if call in self.corrections.seconds:
            return self.corrections.seconds[call]
        return self.estimates.call_seconds(call, layout) * self.corrections.factors.get(call, 1.0)

    def call_bytes(self, call: str, layout: CallLayout) -> float:
        return self.estimates.call_bytes(call, layout)

    def weight_bytes(self, copy: WeightCopy) -> float:
        return self.estimates.weight_bytes(copy)

    def state_bytes(self, copy: WeightCopy) -> float:
        return self.estimates.state_bytes(copy)

    def fill_seconds(self, source: WeightCopy, copy: WeightCopy) -> float:
        return self.estimates.fill_seconds(source, copy)

    def load_seconds(self, copy: WeightCopy) -> float:
        return self.estimates.load_seconds(copy)

    def state_load_seconds(self, copy: WeightCopy) -> float:
        return self.estimates.state_load_seconds(copy)

    def transfer_seconds(self, producer: str, source: CallLayout, target: CallLayout) -> float:
        return self.estimates.transfer_seconds(producer, source, target)
