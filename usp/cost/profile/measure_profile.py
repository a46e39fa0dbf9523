"""Measuring a profile: the calls that the executor makes of a role's model, on shallow models, in each layout.

Every layout is measured on all of its ranks, because ranks that share processors slow each other down, in turns
(`usp.cost.time.rounds`). A call lasts until its last rank ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
import torch.distributed as dist

from parallel import ParallelMesh, ProcessGroups
from usp.cost.time.compute import dtype_name
from usp.cost.time.rounds import Rounds, Timed
from usp.hf.models import model_facts, with_layers
from usp.hf.shapes import model_shape
from usp.presets import PRESETS
from usp.rlhf.data.samples import Samples
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph.calls import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.roles.role_spec import RoleSpec

from .parts import PREFILL, UPDATE, Part, layout_key, model_key, work_of
from .profile import Point, Profile, Sizes, Timing


@dataclass(frozen=True, eq=False)
class Asked:
    """A call to measure, with the model of its role, in a layout."""

    call: ModelCall
    spec: RoleSpec
    layout: CallLayout

    def part(self) -> Part:
        """Return what is measured; of generation, its decode steps."""
        config = self.spec.config
        key = model_key(model_shape(model_facts(self.spec.source, config), config), self.spec.dtype)
        return Part(key, work_of(self.call), layout_key(self.layout))


def measure_profile(
    asked: Sequence[Asked],
    sizes: Sizes,
    rounds: Rounds,
    device_name: str,
    groups: ProcessGroups,
    progress: Callable[[str], None] = lambda doing: None,
    known: Mapping[Part, tuple[Point, ...]] = MappingProxyType({}),
) -> Profile:
    """Measure every call once for each model and layout. Collective over the world, all of whose ranks ask the same.

    Args:
        asked: at least one call; all of one dtype.
        known: what is not measured again, and part of the result.

    Raises:
        ValueError: for a model whose layers are of several kinds, or that does not support a layout.
    """
    points = dict(known)
    for one in asked:
        part = one.part()
        if part not in points:
            progress(f"{part.work} of {part.model}: {part.layout}")
            points |= _measured(one, part, sizes, rounds, groups)
    cores = 0 if rounds.device.type == "cuda" else len(os.sched_getaffinity(0))
    dtype = dtype_name(asked[0].spec.dtype)
    return Profile(device_name, dtype, dist.get_world_size(), cores, sizes, points)


@dataclass(eq=False)
class _Metered:
    """A call, and the seconds of this process's processor time that it has used in all."""

    call: Callable[[], object]
    used: float = 0.0
    calls: int = 0

    def __call__(self) -> None:
        begin = time.process_time()
        self.call()
        self.used += time.process_time() - begin
        self.calls += 1


@dataclass(eq=False)
class _Turns:
    """Calls to time together, by name, and what they took."""

    rounds: Rounds
    member: bool
    calls: dict[str, _Metered] = field(default_factory=dict)

    def add(self, name: str, call: Callable[[], object]) -> None:
        self.calls[name] = _Metered(call)

    def run(self) -> dict[str, Timing]:
        """Time the calls. Collective over the world."""
        rounds = self.rounds
        turns = rounds.turns([Timed(name, call if self.member else None, 1) for name, call in self.calls.items()])
        estimates = rounds.estimates(turns)
        used = torch.tensor([call.used / max(1, call.calls) for call in self.calls.values()], dtype=torch.float64)
        if rounds.device.type == "cuda":
            used.zero_()  # each rank has a device
        else:
            dist.all_reduce(used)
        return {
            name: Timing(estimates[name].seconds, each) for name, each in zip(self.calls, used.tolist(), strict=True)
        }


def _measured(
    asked: Asked, part: Part, sizes: Sizes, rounds: Rounds, groups: ProcessGroups
) -> dict[Part, tuple[Point, ...]]:
    """Return the points of a call's parts."""
    layout, work = asked.layout, asked.call.work
    mesh = ParallelMesh.create(layout.dims, rounds.device.type, layout.ranks, groups)
    points: dict[Part, list[Point]] = {}
    depths = sizes.layers or (asked.spec.config.num_hidden_layers,)
    for layers in sorted({max(layers, layout.dims.pp) for layers in depths}):
        run = _GenerateRun if isinstance(work, Generate) else _RowsRun
        for one, point in run(asked, part, layers, sizes, mesh).points(_Turns(rounds, mesh.member)):
            points.setdefault(one, []).append(point)
    return {one: tuple(found) for one, found in points.items()}


@dataclass(eq=False)
class _Run:
    """The model of a call, at one depth; None on a rank that has no part of it."""

    asked: Asked
    part: Part
    layers: int
    sizes: Sizes
    mesh: ParallelMesh

    def __post_init__(self) -> None:
        self.model = self._model() if self.mesh.member else None

    def _model(self) -> RoleModel:
        spec, slots = self.asked.spec, max(self.sizes.samples)
        random = replace(spec, source=next(iter(PRESETS)), config=with_layers(spec.config, self.layers), lora=None)

        def generator(model: RoleModel) -> Generator:
            stage = model.stage
            return Generator(
                stage.model, self.mesh, first=stage.first, last=stage.last, slots=slots, transform=stage.transform
            )

        trained = isinstance(self.asked.call.work, TrainStep)
        model = RoleModel(random, self.asked.layout, self.mesh, trained=trained, make_generator=generator)
        model.fill()
        return model

    def of_rank(self, samples: int) -> int:
        """The samples of a data-parallel rank."""
        return max(1, -(-samples // self.mesh.dims.batch))

    def drawn(self, samples: int, tokens: int) -> list[torch.Tensor]:
        """Return random tokens of samples, different on every data-parallel rank."""
        draw = torch.Generator().manual_seed(self.asked.layout.number_of(dist.get_rank()))
        vocabulary = self.asked.spec.config.vocab_size
        return [torch.randint(vocabulary, (tokens,), generator=draw) for _ in range(samples)]


class _RowsRun(_Run):
    """An inference call, or an optimizer step on one mini-batch."""

    def points(self, turns: _Turns) -> Iterator[tuple[Part, Point]]:
        """Time calls, and yield what they took."""
        sizes, dims = self.sizes, self.mesh.dims
        numbers = sorted({max(dims.pp, self.of_rank(samples)) for samples in sizes.samples})
        trains = isinstance(self.asked.call.work, TrainStep)
        for number in numbers:
            for tokens in sizes.tokens:
                turns.add(f"{number} of {tokens}", self._call(number, tokens))
        first, least = numbers[0], min(sizes.tokens)
        if trains:
            turns.add("twice", self._call(2 * first, least, rows=2 * dims.pp))
        found = turns.run()
        for number in numbers:
            for tokens in sizes.tokens:
                yield self.part, Point(self.layers, number, tokens, found[f"{number} of {tokens}"])
        if trains:
            once, twice = found[f"{first} of {least}"], found["twice"]
            update = Timing(*(max(0.0, 2 * a - b) for a, b in zip(once, twice, strict=True)))
            yield replace(self.part, work=UPDATE + self.part.work), Point(self.layers, 1, 1, update)

    def _call(self, number: int, tokens: int, rows: int = 0) -> Callable[[], object]:
        """Return a call on `number` samples in as few rows as the layout allows, or in `rows`."""
        if self.model is None:
            return lambda: None
        model, work, layout = self.model, self.asked.call.work, self.asked.layout
        samples = self._samples(number, tokens)
        layout = replace(layout, micro_batch_tokens=-(-number * tokens // rows) if rows else 0)
        if isinstance(work, Inference):
            return lambda: model.inference(samples, work, "output", layout)
        assert isinstance(work, TrainStep)
        once = replace(work, mini_batches=1, epochs=1, stop_above=None)

        def train() -> None:
            model.layout = layout  # differs in micro-batches alone
            model.train_step([samples], once)

        return train

    def _samples(self, number: int, tokens: int) -> Samples:
        work, response = self.asked.call.work, round(self.sizes.counted * tokens)
        mask = torch.zeros(tokens)
        mask[tokens - response - 1 : tokens - 1] = 1
        values: dict[str, list[torch.Tensor]] = {"tokens": self.drawn(number, tokens)}
        if isinstance(work, TrainStep):
            values |= {key: [0.01 * torch.randn(tokens) for _ in range(number)] for key in work.objective.keys}
            if work.objective.counts:
                values[work.objective.counts] = [mask] * number
        elif "mask" in self.asked.call.inputs:
            values["mask"] = [mask] * number
        return Samples(tuple(range(number)), values)


class _GenerateRun(_Run):
    """A generation to the first token, and one of some more."""

    def points(self, turns: _Turns) -> Iterator[tuple[Part, Point]]:
        """Time calls, and yield what they took."""
        sizes, steps = self.sizes, self.sizes.decoded
        numbers = sorted({self.of_rank(samples) for samples in sizes.samples})
        shapes = [(number, tokens) for number in numbers for tokens in sizes.prompts]
        for number, tokens in shapes:
            for responses in (1, 1 + steps):
                turns.add(f"{number} of {tokens}, {responses}", self._call(number, tokens, responses))
        found = turns.run()
        for number, tokens in shapes:
            first, all_ = (found[f"{number} of {tokens}, {responses}"] for responses in (1, 1 + steps))
            step = Timing(*(max(0.0, b - a) / steps for a, b in zip(first, all_, strict=True)))
            prefill = Timing(*(max(0.0, a - b) for a, b in zip(first, step, strict=True)))
            yield self.part, Point(self.layers, number, tokens + steps // 2, step)
            yield replace(self.part, work=PREFILL), Point(self.layers, number, tokens, prefill)

    def _call(self, number: int, tokens: int, responses: int) -> Callable[[], object]:
        if self.model is None:
            return lambda: None
        model, work = self.model, self.asked.call.work
        assert isinstance(work, Generate)
        prompts = Samples(tuple(range(number)), {"prompt_ids": self.drawn(number, tokens + 1)})
        asked = replace(work, group_size=1, max_new_tokens=responses, stop_ids=(), stop_strings=())
        return lambda: model.generate(prompts, asked, 0)
