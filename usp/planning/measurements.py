"""Measured seconds of the parts of calls: their file, what lies between them, and factors of what formulas predict.

The seconds of a part are linear in layers, sequences and tokens between neighbouring measurements, and continue the
last two beyond them; where there is one measurement, they are proportional (layers must then be as measured). This is
ReaL's profile (arXiv 2406.14088, section 5.1), with the calls of the toolkit in place of single blocks."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from usp.model.facts import ModelShape
from usp.rlhf.graph import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout

from .call_cost import Rows, batchings, mini_batch_rows, packed_rows
from .estimates import CallSeconds, Estimates, Factors, layout_key
from .workload import Batching, Workload

PREFILL, DECODE, UPDATE = "prefill", "decode", "update of "
VERSION = 2
Points = Mapping[tuple[int, int, int], float]  # seconds by (layers, sequences of a data-parallel rank, tokens of each)


@dataclass(frozen=True, order=True)
class Part:
    """What is timed: a part of calls, by a model, in a layout.

    Work is PREFILL: a forward over prompts, to the first token; DECODE: one step; "logprobs", "values": a forward;
    "train logprobs", "train values": an optimizer step on one mini-batch of as few micro-batches as the layout allows;
    UPDATE and one of these: what does not repeat with further micro-batches.
    """

    model: str  # `model_key`
    work: str
    layout: str  # `layout_key`


def work_of(call: ModelCall) -> str:
    """Return the `Part.work` of a call with a model; of generation that of a decode step."""
    if isinstance(call.work, Generate):
        return DECODE
    if isinstance(call.work, Inference):
        return "logprobs" if call.work.head == "logprobs" else "values"
    assert isinstance(call.work, TrainStep)
    return f"train {call.work.objective.head}"


def model_key(model: ModelShape, dtype: torch.dtype) -> str:
    """Return a key that identifies a model up to its depth; raise ValueError for layers of several kinds."""
    if len(set(model.alike)) > 1:
        raise ValueError(
            f"model={model.facts.name} has layers of several kinds, and measurements scale one with the depth"
        )
    facts = replace(model.facts, name="", windows=model.facts.windows[:1])
    parts = (facts, model.embedding, model.layers[0], model.norm, model.head, model.experts_per_token, str(dtype))
    head = "scalar" if model.head and model.head[0].shape[0] == 1 else f"vocabulary {facts.vocab_size}"
    return f"hidden {model.hidden_size}, {head}, {sha256(repr(parts).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure. A pipeline of more stages than layers has a layer for each."""

    layers: tuple[int, ...] = (1, 2)  # depths of the models; empty: their own depth
    samples: tuple[int, ...] = (8, 32)  # of a mini-batch or call, over all data-parallel ranks
    tokens: tuple[int, ...] = (256, 1024)  # of each sample
    prompts: tuple[int, ...] = (256, 1024)  # tokens of a prompt
    counted: float = 0.5  # the fraction of the tokens that are the response
    decoded: int = 16  # steps of a timed generation


@dataclass(frozen=True)
class Measurements:
    """What was measured on a machine."""

    device: str
    dtype: str
    ranks: int  # in the launch
    sizes: Sizes  # of every part
    points: Mapping[Part, Points] = field(hash=False)
    step_seconds: float = 0.0  # beside the calls and the movement of weights: see `measure_step`

    def at(self, part: Part, layers: int, sequences: float, tokens: float) -> float:
        """Return the seconds of a part; nan if it was not measured, or only at another depth."""
        points = self.points.get(part, {})
        depths = {depth for depth, *_ in points}
        return _along(points, layers, sequences, tokens) if len(depths) > 1 or layers in depths else math.nan

    def factors(self, estimates: Estimates, layouts: Mapping[str, Iterable[CallLayout]]) -> Factors:
        """Return the measured seconds over those by formula, of the layouts of calls that were measured."""
        factors: dict[str, dict[str, CallSeconds]] = {}
        for name, of_call in layouts.items():
            call = estimates.graph[name]
            if not call.role or len(set(estimates.models[call.role].alike)) > 1:
                continue
            model = model_key(estimates.models[call.role], estimates.options.dtype)
            for layout in of_call:
                part = Part(model, work_of(call), layout_key(layout))
                if part in self.points and part.layout not in factors.get(name, {}):
                    ratio = self._call_seconds(part, call, layout, estimates) / estimates.formula(name, layout)
                    if not math.isnan(ratio):
                        factors.setdefault(name, {})[part.layout] = CallSeconds(ratio, ratio)
        return factors

    def _call_seconds(self, part: Part, call: ModelCall, layout: CallLayout, estimates: Estimates) -> float:
        depth, workload = len(estimates.models[call.role].layers), estimates.workload
        if isinstance(call.work, Generate):
            return self._generation(part, depth, layout, estimates)
        if isinstance(call.work, TrainStep):
            mini_batches = mini_batch_rows(call.work, layout, workload).elements()
            return call.work.epochs * sum(self._rows(part, depth, rows, layout, workload) for rows in mini_batches)
        return self._rows(part, depth, packed_rows(workload.sequences, layout), layout, workload)

    def _rows(self, part: Part, depth: int, rows: Rows, layout: CallLayout, workload: Workload) -> float:
        """Return the seconds of rows of packed sequences: of the fewest that the layout allows, and of the others."""
        least, tokens = layout.dims.pp, sum(workload.sequences) / len(workload.sequences)
        seconds = self.at(part, depth, least * rows.tokens / tokens, tokens)
        if rows.number <= least:
            return seconds
        update = replace(part, work=UPDATE + part.work)
        once = self.at(update, depth, 1, 1) if update in self.points else 0.0
        return seconds + (seconds - once) * (rows.number - least) / least

    def _generation(self, part: Part, depth: int, layout: CallLayout, estimates: Estimates) -> float:
        prompts = replace(part, work=PREFILL)

        def seconds(run: Batching) -> float:
            return sum(
                stretch.steps * self.at(part, depth, run.slots, stretch.length * layout.dims.sp)
                + sum(self.at(prompts, depth, *shape) for shape in stretch.prefills)
                for stretch in run.stretches
            )

        return max(map(seconds, batchings(layout, estimates.workload, estimates.options)))

    def save(self, path: Path) -> None:
        """Write the measurements as JSON."""
        parts = [
            {**asdict(part), "points": [[*at, seconds] for at, seconds in points.items()]}
            for part, points in sorted(self.points.items())
        ]
        values = {"version": VERSION, "device": self.device, "dtype": self.dtype, "ranks": self.ranks}
        values |= {"sizes": asdict(self.sizes), "step": [self.step_seconds]}
        lines = ",\n  ".join(map(json.dumps, parts))
        new = path.with_name(f"{path.name}.new")
        new.write_text(f'{json.dumps(values)[:-1]}, "parts": [\n  {lines}\n]}}\n')
        new.replace(path)

    @staticmethod
    def load(path: Path) -> Measurements:
        """Read measurements. Raises ValueError for a file that has none."""
        try:
            values = json.loads(path.read_text())
            if values["version"] != VERSION:
                raise ValueError(f"its version must be {VERSION}")
            # Points and steps may end with the seconds of processors, which are not used.
            points = {}
            for part in values["parts"]:
                measured = {tuple(at): float(seconds) for *at, seconds in (point[:4] for point in part["points"])}
                points[Part(part["model"], part["work"], part["layout"])] = measured
            sizes: dict[str, Any] = {
                name: tuple(x) if isinstance(x, list) else x for name, x in values["sizes"].items()
            }
            made_of = values["device"], values["dtype"], values["ranks"]
            return Measurements(*made_of, Sizes(**sizes), points, values["step"][0])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is not a profile of python -m usp rlhf-profile: {error!r}") from error


def _along(known: Mapping[Any, float], x: float, *others: float) -> float:
    """Return what lies at x, then at the other coordinates: on the line through the two nearest known ones, or in
    proportion to a single one."""
    xs = sorted({first for first, *_ in known})

    def at(first: int) -> float:
        line = {place[1:]: seconds for place, seconds in known.items() if place[0] == first}
        return _along(line, *others) if others else line[()]

    if len(xs) == 1:
        return at(xs[0]) * x / xs[0]
    right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    low, high = at(xs[right - 1]), at(xs[right])
    return max(0.0, low + (x - xs[right - 1]) / (xs[right] - xs[right - 1]) * (high - low))
