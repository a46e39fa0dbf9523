"""Estimates of calls, corrected by what the calls took under the running plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import median
from typing import NamedTuple

from parallel import Hardware
from usp.cost.rlhf.estimates import Estimates
from usp.rlhf.plan.operations import WeightCopy
from usp.rlhf.plan.plan import CallLayout

_NEWEST = 0.5  # the weight of the steps since the last decision, against all before
_FASTER = 1e6  # links by which communication takes no time worth counting


class CallSeconds(NamedTuple):
    """The seconds of a call, or factors of them: of its computation, and of communication that it waits for."""

    computation: float = 1.0
    communication: float = 1.0

    @property
    def total(self) -> float:
        return self.computation + self.communication

    def times(self, factors: CallSeconds) -> CallSeconds:
        """Return both parts, each times its factor."""
        return CallSeconds(*(part * factor for part, factor in zip(self, factors, strict=True)))


@dataclass(frozen=True)
class Corrections:
    """What is learned from measured steps, by call.

    Attributes:
        factors: of calls that are predicted: measured over predicted seconds.
        seconds: measured, of the others, such as functions.
    """

    factors: Mapping[str, CallSeconds] = field(default_factory=dict, hash=False)
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)

    def after(
        self, measured: Sequence[Mapping[str, float]], predicted: Sequence[Mapping[str, CallSeconds]]
    ) -> Corrections:
        """Return the corrections after further steps.

        Of each call the median over the steps counts half, the corrections before half (geometrically), so that one
        slow step changes nothing for long. Steps tell the sum of computation and communication alone: of the factors
        that explain it, to first order, those are taken that change least in the logarithm. So what a call takes on
        one rank says nothing about links, and the larger part of a call explains most.

        Args:
            measured: seconds by call of each step. predicted: the same, without corrections.
        """
        factors, seconds = dict(self.factors), dict(self.seconds)
        for call in dict.fromkeys(name for step in measured for name in step):
            pairs = [
                (of[call], by.get(call, CallSeconds(0.0, 0.0)))
                for of, by in zip(measured, predicted, strict=True)
                if call in of
            ]
            if all(by.total > 0 for _, by in pairs):
                known, newest = factors.get(call), _NEWEST if call in factors else 1.0
                factors[call] = _explaining(known or CallSeconds(), pairs, newest)
            else:
                new = median(of for of, _ in pairs)
                seconds[call] = new**_NEWEST * seconds[call] ** (1 - _NEWEST) if call in seconds else new
        return Corrections(factors, seconds)


def _explaining(known: CallSeconds, pairs: Sequence[tuple[float, CallSeconds]], newest: float) -> CallSeconds:
    """Return the factors nearest to `known` that explain measured seconds, with weight `newest`.

    pairs: (measured, predicted) of each step.
    """
    corrected = [by.times(known) for _, by in pairs]
    change = newest * log(median(of / by.total for (of, _), by in zip(pairs, corrected, strict=True)))
    share = sum(by.communication for by in corrected) / sum(by.total for by in corrected)
    norm = share**2 + (1 - share) ** 2
    return known.times(CallSeconds(exp(change * (1 - share) / norm), exp(change * share / norm)))


def over_fast_links(hardware: Hardware) -> Hardware:
    """Return the hardware with links by which communication takes next to no time."""
    return replace(hardware, tiers=tuple(tier.faster(_FASTER, latency=_FASTER) for tier in hardware.tiers))


@dataclass(frozen=True, eq=False)
class CorrectedEstimates:
    """`Estimates` with corrected seconds of calls; all else is as estimated.

    Attributes:
        computation: the same estimates on hardware `over_fast_links`.
    """

    estimates: Estimates
    computation: Estimates
    corrections: Corrections = field(default_factory=Corrections)

    def predicted(self, call: str, layout: CallLayout) -> CallSeconds:
        """Return the seconds of a call without corrections."""
        total, alone = (of.call_seconds(call, layout) for of in (self.estimates, self.computation))
        return CallSeconds(min(alone, total), max(0.0, total - alone))

    def call_seconds(self, call: str, layout: CallLayout) -> float:
        if call in self.corrections.seconds:
            return self.corrections.seconds[call]
        return self.predicted(call, layout).times(self.corrections.factors.get(call, CallSeconds())).total

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
