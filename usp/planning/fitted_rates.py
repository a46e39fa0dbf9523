"""Rates of a machine by a run: the hardware file by which the run's step is predicted to take what it took.

A run of one configuration tells few numbers apart. The duration of its steps gives one, a factor of all compute. A
trace of some steps (--profile) also tells what matrix products and attention took, which gives up to three factors: of
matrix products, of attention, and of the rest, which is bound by memory. Links, launches and copies to the host keep
the rates of the file that the fit begins with: in a step their time is mixed with waiting for other ranks."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from parallel.cluster.hardware import Hardware, hardware_from_mapping
from usp.predict.seconds import StepTime
from usp.run.failures import ConfigurationError

from .step_report import Measured

PRODUCTS, ATTENTION, MEMORY = "matrix products", "attention", "memory-bound operators"  # as in `StepTime.parts`
COMPUTE = (PRODUCTS, ATTENTION, MEMORY, "optimizer")
FEWEST_STEPS = 10
LEAST = 0.05  # part of a step that a component takes if its rate can be told from that of the others
ROUNDS, TOLERANCE = 100, 1e-4  # of the fit, which converges by a constant factor in each round
_OPERATORS = {  # by names of torch's operators on a CPU, and of kernels on a GPU
    ATTENTION: re.compile(r"aten::_(scaled_dot_product|flash)_\w*attention\w*$|flash|fmha|cudnn\w*sdpa"),
    PRODUCTS: re.compile(r"aten::(addmm|mm|bmm|baddbmm|_grouped_mm|_scaled_mm)$|gemm|nvjet"),
}


@dataclass(frozen=True)
class FittedRates:
    """A hardware file by a run: its contents, and how many times as fast as in the file before each component is."""

    values: Mapping[str, Any]
    factors: Mapping[str, float]

    @property
    def text(self) -> str:
        told = ", ".join(f"{name} {factor:.2f}" for name, factor in self.factors.items())
        return f"times the rates of before: {told}; links, launches and the host keep theirs"


def fitted(
    values: Mapping[str, Any],
    predict: Callable[[Hardware], StepTime],
    run: Measured,
    traced: Mapping[str, float],
    where: str,
) -> FittedRates:
    """Fit the rates in the `values` of a hardware file so that `predict` gives the seconds of a run's step.

    traced: the parts of a step in matrix products and attention, empty without a trace. where: the folder of the run.
    Raise ConfigurationError if the run does not determine the rates.
    """
    seconds = run.seconds
    if run.steps < FEWEST_STEPS:
        raise ConfigurationError(
            f"--write-hardware: {where} has {run.steps} steps after the first ones, and a median of at least "
            f"{FEWEST_STEPS} determines rates: let it run longer"
        )
    told = {name: share * seconds for name, share in traced.items() if share > LEAST}
    factors = dict.fromkeys((PRODUCTS, ATTENTION, MEMORY), 1.0)
    for _ in range(ROUNDS):
        time = predict(hardware_from_mapping(scaled(values, factors), where))
        parts = time.parts
        compute = seconds - (time.total - sum(parts[name] for name in COMPUTE))
        rest = compute - sum(told.values())
        if rest <= LEAST * compute:
            raise ConfigurationError(
                f"--write-hardware: by the rates of --hardware, what {where} does besides "
                f"{'matrix products and attention' if told else 'compute'} takes all of its step of {seconds:.3g} s: "
                "calibrate the machine, or give a run that computes more and communicates less"
            )
        others = sum(parts[name] for name in COMPUTE if name not in told)
        changes = {name: parts[name] / told[name] if name in told else others / rest for name in factors}
        factors = {name: factors[name] * changes[name] for name in factors}
        if max(abs(change - 1) for change in changes.values()) < TOLERANCE:
            break
    else:
        raise ConfigurationError(
            f"--write-hardware: no rates of compute give the step of {where}, which waits for its host or its messages"
        )
    before = values.get("source", [])
    source = [f"compute by the steps of {where}", *([before] if isinstance(before, str) else before)]
    same = {name: factor for name, factor in factors.items() if name not in told}
    named = {**{name: factors[name] for name in told}, " and ".join(same): factors[MEMORY]}
    return FittedRates({**scaled(values, factors), "source": source}, named)


def scaled(values: Mapping[str, Any], factors: Mapping[str, float]) -> dict[str, Any]:
    """Return the values of a hardware file with other rates of compute. An efficiency above 1 raises the peaks."""
    efficiency = values["efficiency"]

    def curves(of: Any, factor: float) -> Any:
        if isinstance(of, Mapping):
            return {name: curves(curve, factor) for name, curve in of.items()}
        return [[size, factor * share] for size, share in of]

    products = curves(efficiency["matmul"], factors[PRODUCTS])
    attention = curves(efficiency["attention"], factors[ATTENTION])
    shares = [products, *(curve for kernel in attention.values() for curve in kernel.values())]
    above = max(1.0, *(share for curve in shares for _, share in curve))
    peaks = hardware_from_mapping(values, "to be fitted").peak_flops
    return {
        **values,
        "peak_flops": {dtype: above * peak for dtype, peak in peaks.items()},
        "memory_bytes_per_second": factors[MEMORY] * values["memory_bytes_per_second"],
        "efficiency": {
            **efficiency,
            "matmul": curves(products, 1 / above),
            "attention": curves(attention, 1 / above),
        },
    }


def traced_parts(folder: Path) -> dict[str, float]:
    """Return the parts of a step that matrix products and attention take, by the trace of rank 0 in the folder of a
    run; empty without a trace."""
    path = folder / "profile" / "rank-0.json.gz"
    if not path.exists():
        return {}
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event.get("dur")]
    kind = "kernel" if any(event.get("cat") == "kernel" for event in events) else "cpu_op"
    steps, found, ends = 0.0, dict.fromkeys(_OPERATORS, 0.0), Counter[Any]()  # ends by thread or stream
    for event in sorted(events, key=itemgetter("ts")):
        name = next((name for name, pattern in _OPERATORS.items() if pattern.search(event["name"])), "")
        if event.get("cat") == "user_annotation" and re.fullmatch(r"step \d+", event["name"]):
            steps += event["dur"]
        elif event.get("cat") == kind and name and event["ts"] >= ends[event["tid"]]:  # not inside of another
            found[name] += event["dur"]
            ends[event["tid"]] = event["ts"] + event["dur"]
    return {name: took / steps for name, took in found.items()} if steps else {}
