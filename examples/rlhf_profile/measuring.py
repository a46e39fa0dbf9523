"""Measure the calls of roles' models, on shallow models, in each layout.

Every layout is measured on all of its ranks, in turns (`usp.predict.rounds`). A call lasts until its last rank ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from usp.data.store import write_json
from usp.hf.models import model_facts, with_layers
from usp.hf.tensor_parallel import model_shape
from usp.parallel import ParallelMesh, ProcessGroups
from usp.planning.estimates import DECODE, PREFILL, UPDATE, VERSION, Measurements, TimedPart, layout_key, model_key
from usp.planning.question import silent
from usp.predict.rounds import Rounds, Timed
from usp.presets import PRESETS
from usp.rlhf.graph import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.samples import Samples

Timings = Iterator[tuple[TimedPart, tuple[int, int, int], float]]  # (part, (layers, sequences, tokens), seconds)


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure. A pipeline of more stages than layers has a layer for each."""

    layers: Sequence[int] = (1, 2)  # depths of the models; empty: their own depth
    samples: Sequence[int] = (8, 32)  # of a mini-batch or call, over all data-parallel ranks
    tokens: Sequence[int] = (256, 1024)  # of each sample
    prompts: Sequence[int] = (256, 1024)  # tokens of a prompt
    counted: float = 0.5  # the fraction of the tokens that are the response
    decoded: int = 16  # steps of a timed generation


@dataclass(frozen=True, eq=False)
class Asked:
    """A call to measure, with the model of its role, in a layout."""

    call: ModelCall
    spec: RoleSpec
    layout: CallLayout


def work_of(call: ModelCall) -> str:
    """Return the `TimedPart.work` of a call with a model; of generation that of a decode step."""
    if isinstance(call.work, Generate):
        return DECODE
    if isinstance(call.work, Inference):
        return "logprobs" if call.work.head == "logprobs" else "values"
    assert isinstance(call.work, TrainStep)
    return f"train {call.work.objective.head}"


def measure_calls(
    asked: Sequence[Asked],
    known: Measurements,
    rounds: Rounds,
    groups: ProcessGroups,
    progress: Callable[[str], None] = silent,
    keep: Callable[[Measurements], None] = silent,
) -> Measurements:
    """Measure every call, once for each model and layout, but what is known; all are of one dtype. Collective over the
    world, all of whose ranks ask the same. `keep` gets what is measured so far after each call. Raise ValueError for
    layers of several kinds, and unsupported layouts."""
    points, sizes = {part: dict(measured) for part, measured in known.points.items()}, Sizes(**known.sizes)
    for one in asked:
        config = one.spec.config
        key = model_key(model_shape(model_facts(one.spec.source, config), config), one.spec.dtype)
        part = TimedPart(key, work_of(one.call), layout_key(one.layout))
        if part in points:
            continue
        progress(f"{part.work} of {part.model}: {part.layout}")
        mesh = ParallelMesh.create(one.layout.dims, rounds.device.type, one.layout.ranks, groups)
        depths = sizes.layers or (config.num_hidden_layers,)
        for layers in sorted({max(layers, one.layout.dims.pp) for layers in depths}):
            run = _GenerateRun if isinstance(one.call.work, Generate) else _RowsRun
            for measured, at, seconds in run(one, part, layers, sizes, mesh, rounds).timings():
                points.setdefault(measured, {})[at] = seconds
        keep(replace(known, points=points))
    return replace(known, points=points)


def save(measured: Measurements, path: Path) -> None:
    """Write measurements as JSON, for `Measurements.load`."""
    parts = [
        {**asdict(part), "points": [[*at, seconds] for at, seconds in points.items()]}
        for part, points in sorted(measured.points.items())
    ]
    made_of = {name: getattr(measured, name) for name in ("device", "dtype", "ranks", "sizes")}
    write_json(path, {"version": VERSION, **made_of, "parts": parts})


@dataclass(eq=False)
class _Run:
    """The model of a call, at one depth; None on a rank that has no part of it."""

    asked: Asked
    part: TimedPart
    layers: int
    sizes: Sizes
    mesh: ParallelMesh
    rounds: Rounds
    model: RoleModel | None = None

    def __post_init__(self) -> None:
        if self.mesh.member:
            spec, trained = self.asked.spec, isinstance(self.asked.call.work, TrainStep)
            random = replace(spec, source=next(iter(PRESETS)), config=with_layers(spec.config, self.layers), lora=None)
            slots = max(self.sizes.samples)
            self.model = RoleModel(random, self.asked.layout, self.mesh, trained=trained, slots=slots)
            self.model.fill()

    def seconds(
        self, call: Callable[..., Callable[[], object]], shapes: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], float]:
        """Return the seconds of what `call` makes of the model and each shape, timed in turns: medians, because a
        step's ranks wait for each other as these do. Collective over the world."""
        turns = self.rounds.turns([Timed(str(at), call(self.model, *at) if self.model else None, 1) for at in shapes])
        took = self.rounds.on_slowest_rank(turns).values()
        return {shape: median(of_all) for shape, of_all in zip(shapes, took, strict=True)}

    def drawn(self, samples: int, tokens: int) -> list[Tensor]:
        """Return random tokens of samples, different on every data-parallel rank."""
        draw = torch.Generator().manual_seed(self.asked.layout.number_of(dist.get_rank()))
        return [torch.randint(self.asked.spec.config.vocab_size, (tokens,), generator=draw) for _ in range(samples)]


class _RowsRun(_Run):
    """An inference call, or an optimizer step on one mini-batch."""

    def timings(self) -> Timings:
        pp, trains = self.mesh.dims.pp, isinstance(self.asked.call.work, TrainStep)
        numbers = sorted({max(pp, -(-samples // self.mesh.dims.batch)) for samples in self.sizes.samples})
        shapes: list[tuple[int, ...]] = [*product(numbers, self.sizes.tokens)]
        first, least = numbers[0], min(self.sizes.tokens)
        twice = (2 * first, least, 2 * pp)  # in twice the micro-batches
        found = self.seconds(self._call, [*shapes, *([twice] if trains else [])])
        for number, tokens in shapes:
            yield self.part, (self.layers, number, tokens), found[number, tokens]
        if trains:
            update = max(0.0, 2 * found[first, least] - found[twice])
            yield replace(self.part, work=UPDATE + self.part.work), (self.layers, 1, 1), update

    def _call(self, model: RoleModel, number: int, tokens: int, rows: int = 0) -> Callable[[], object]:
        """Return a call on `number` samples in as few rows as the layout allows, or in `rows`."""
        work, samples = self.asked.call.work, self._samples(number, tokens)
        layout = replace(model.layout, micro_batch_tokens=-(-number * tokens // rows) if rows else 0)
        if isinstance(work, Inference):
            return lambda: model.inference(samples, work, "output", layout)
        assert isinstance(work, TrainStep)
        once = replace(work, mini_batches=1, epochs=1, stop_above=None)

        def train() -> None:
            model.layout = layout  # differs only in micro-batches
            model.train_step([samples], once)

        return train

    def _samples(self, number: int, tokens: int) -> Samples:
        work, response = self.asked.call.work, round(self.sizes.counted * tokens)
        mask = torch.zeros(tokens)
        mask[tokens - response - 1 : tokens - 1] = 1
        values: dict[str, list[Tensor]] = {"tokens": self.drawn(number, tokens)}
        if isinstance(work, TrainStep):
            values |= {key: [0.01 * torch.randn(tokens) for _ in range(number)] for key in work.objective.keys}
            if work.objective.counts:
                values[work.objective.counts] = [mask] * number
        elif "mask" in self.asked.call.inputs:
            values["mask"] = [mask] * number
        return Samples(tuple(range(number)), values)


class _GenerateRun(_Run):
    """A generation to the first token, and one of some more."""

    def timings(self) -> Timings:
        steps = self.sizes.decoded
        numbers = sorted({-(-samples // self.mesh.dims.batch) for samples in self.sizes.samples})
        found = self.seconds(self._call, [*product(numbers, self.sizes.prompts, (1, 1 + steps))])
        for number, tokens in product(numbers, self.sizes.prompts):
            first, whole = found[number, tokens, 1], found[number, tokens, 1 + steps]
            # On a busy machine the longer run may seem the shorter one. No step is free: then all forwards share it.
            step = (whole - first) / steps if whole > first else whole / (1 + steps)
            yield self.part, (self.layers, number, tokens + steps // 2), step
            yield replace(self.part, work=PREFILL), (self.layers, number, tokens), max(0.0, first - step)

    def _call(self, model: RoleModel, number: int, tokens: int, responses: int) -> Callable[[], object]:
        work = self.asked.call.work
        assert isinstance(work, Generate)
        prompts = Samples(tuple(range(number)), {"prompt_ids": self.drawn(number, tokens + 1)})
        generate = replace(work, group_size=1, max_new_tokens=responses, stop_ids=(), stop_strings=())
        return lambda: model.generate(prompts, generate, 0)
