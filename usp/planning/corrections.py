"""What measured seconds change in predictions, of RLHF steps and of training steps: factors of each part of a step by
layout, and factors of the rates of hardware, by which layouts that were not measured are predicted as well."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from usp.parallel import Hardware, Link

VERSION = 3  # of profiles
_LINKS = [2.0**power for power in range(-4, 8)]  # factors of the time of messages that are tried
_WEIGHT = 1e-5  # of a factor's logarithm beside those of the errors: measurements that tell nothing change nothing


class Measured(NamedTuple):
    """The seconds of a part of a step in a layout, and those predicted for the same samples. part: a call of an RLHF
    step, or a whole training step. layout: as words, which similar layouts share."""

    part: str
    layout: str
    seconds: float
    predicted: float


@dataclass(frozen=True)
class Corrections:
    """Measured over predicted seconds, by part and layout."""

    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, part: str, layout: str) -> float | None:
        """Return the factor of a part in the most similar layout in which it was measured; None if it never was."""
        known, words = self.factors.get(part), set(layout.split())
        return known[min(known, key=lambda key: len(words.symmetric_difference(key.split())))] if known else None

    def after(self, measured: Iterable[Measured]) -> Corrections:
        """Return the corrections after further measurements. The median of those of a part in a layout counts half, the
        factor before half (geometrically): one slow step changes nothing for long."""
        ratios, factors = defaultdict[tuple[str, str], list[float]](list), {**self.factors}
        for each in measured:
            ratios[each[:2]].append(each.seconds / each.predicted)
        for (part, layout), of_all in ratios.items():
            before, now = self.of(part, layout), median(of_all)
            factor = now if before is None else math.sqrt(before * now)
            factors[part] = {**factors.get(part, {}), layout: factor}
        return Corrections(factors)


@dataclass(frozen=True)
class Profile:
    """Corrections by calls that were measured on a machine, as `examples.rlhf_profile` writes them, and how they were
    made: with which dtype, on which device, by predictions for which hardware."""

    made: Mapping[str, Any]
    corrections: Corrections

    @staticmethod
    def load(path: Path, hardware: str) -> Profile:
        """Read a profile of predictions for a kind of hardware. Raise ValueError for a file that has none."""
        try:
            made = json.loads(path.read_text())
            factors = {call: {at: float(each) for at, each in of.items()} for call, of in made.pop("factors").items()}
            if made["version"] != VERSION:
                raise ValueError(f"its version must be {VERSION}")
            if made["hardware"] != hardware:
                raise ValueError(f"it corrects predictions for --hardware {made['hardware']}, not {hardware}")
            return Profile(made, Corrections(factors))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a profile of python -m examples.rlhf_profile: {error!r}") from error


def fitted(
    hardware: Hardware, measured: Sequence[Measured], predict: Callable[[Hardware], Iterable[float]]
) -> Hardware:
    """Return hardware with the two factors, of the time of all compute and of all messages, by which what was measured
    is predicted closest by `predict`. From one measurement the former follows alone."""

    def fit(links: float) -> tuple[float, Hardware]:
        """Return the error with a factor of messages, and the hardware with the best factor of compute."""
        compute, errors, slower = 1.0, [0.0], hardware
        for _ in range(4):  # it converges fast: the compute is most of a step
            compute *= math.exp(fmean(errors))
            rates = dict.fromkeys(("products", "attention", "memory", "launches"), 1 / compute)
            slower = scaled(hardware, messages=1 / links, **rates)
            predicted = zip(measured, predict(slower), strict=True)
            errors = [math.log(each.seconds / seconds) for each, seconds in predicted]
        return sum(error**2 for error in errors) + _WEIGHT * math.log(links) ** 2, slower

    return min(map(fit, _LINKS if len(measured) > 1 else [1.0]), key=lambda found: found[0])[1]


def scaled(
    hardware: Hardware,
    *,
    products: float = 1.0,
    attention: float = 1.0,
    memory: float = 1.0,
    messages: float = 1.0,
    launches: float = 1.0,
    waits: float = 1.0,
) -> Hardware:
    """Return hardware with the rates of each component times a factor."""

    def link(each: Link) -> Link:
        return Link(each.alpha_seconds / messages, each.bytes_per_second * messages)

    tiers = []
    for tier in hardware.tiers:
        kinds: dict[str, Any] = {kind: link(getattr(tier, kind)) for kind in ("send", "gather", "reduce", "exchange")}
        tiers.append(replace(tier, shared_bytes_per_second=tier.shared_bytes_per_second * messages, **kinds))
    return replace(
        hardware,
        matmul=tuple((flops, share * products) for flops, share in hardware.matmul),
        attention={name: rates.scaled(attention) for name, rates in hardware.attention.items()},
        memory_bytes_per_second=hardware.memory_bytes_per_second * memory,
        launch_seconds=hardware.launch_seconds / launches,
        wait_fraction=hardware.wait_fraction / waits,
        tiers=tuple(tiers),
    )
