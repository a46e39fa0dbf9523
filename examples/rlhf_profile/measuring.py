"""Measure the calls of roles' models, on shallow models, in each layout: ReaL's profile (arXiv 2406.14088, section 5.1)
with the toolkit's calls for blocks.

Every layout is measured on all of its ranks, in turns (`usp.predict.rounds`). A call lasts until its last rank ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from usp.hf.models import model_facts, with_layers
from usp.hf.tensor_parallel import model_shape
from usp.parallel import Hardware, ParallelMesh, ProcessGroups
from usp.planning.call_cost import CallOptions, Calls
from usp.planning.corrections import Corrections, Measured
from usp.planning.estimates import layout_key
from usp.planning.question import silent
from usp.planning.workload import Workload
from usp.predict.rounds import Rounds, Timed
from usp.presets import PRESETS
from usp.rlhf.graph import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.samples import Samples

Shape = tuple[int, int]  # samples of a data-parallel rank, tokens of each


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure. A pipeline of more stages than layers has a layer for each."""

    layers: Sequence[int] = (1, 2)  # depths of the models; empty: their own depth
    samples: Sequence[int] = (8, 32)  # of a mini-batch or call, over all data-parallel ranks
    tokens: Sequence[int] = (256, 1024)  # of each sample, or of a prompt
    counted: float = 0.5  # the fraction of the tokens that are the response
    decoded: int = 64  # tokens of a generated response


@dataclass(frozen=True, eq=False)
class Asked:
    """A call to measure, with the model of its role, in a layout."""

    call: ModelCall
    spec: RoleSpec
    layout: CallLayout


@dataclass(frozen=True, eq=False)
class Measuring:
    """How calls are measured and predicted."""

    sizes: Sizes
    hardware: Hardware
    rounds: Rounds
    groups: ProcessGroups

    def corrections(
        self,
        asked: Sequence[Asked],
        known: Corrections,
        progress: Callable[[str], None] = silent,
        keep: Callable[[Corrections], None] = silent,
    ) -> Corrections:
        """Measure every call but those that are known, once for calls that do the same with the same model. Collective
        over the world, all of whose ranks ask the same. `keep` gets what is measured so far after each call. Raise
        ValueError for unsupported layouts."""
        alike = defaultdict[object, list[Asked]](list)
        for one in asked:
            work = one.call.work.head if isinstance(one.call.work, Inference) else one.call.name
            if layout_key(one.layout) not in known.factors.get(one.call.name, {}):
                alike[work, one.spec.source, repr(one.spec.config), layout_key(one.layout)].append(one)
        for first, *others in alike.values():
            progress(f"{first.call.name}: {layout_key(first.layout)}")
            measured = [*self._measured(first)]
            for one in (first, *others):
                known = known.after(each._replace(part=one.call.name) for each in measured)
            keep(known)
        return known

    def _measured(self, one: Asked) -> Iterator[Measured]:
        config, pp, batch = one.spec.config, one.layout.dims.pp, one.layout.dims.batch
        mesh = ParallelMesh.create(one.layout.dims, self.rounds.device.type, one.layout.ranks, self.groups)
        least = 1 if isinstance(one.call.work, Generate) else pp  # rows
        numbers = sorted({max(least, -(-samples // batch)) for samples in self.sizes.samples})
        shapes = [*product(numbers, self.sizes.tokens)]
        depths = sorted({max(layers, pp) for layers in self.sizes.layers or (config.num_hidden_layers,)})
        return self.compared(one, {layers: _Run(one, layers, self, mesh).seconds(shapes) for layers in depths})

    def compared(self, one: Asked, took: Mapping[int, Mapping[Shape, float]]) -> Iterator[Measured]:
        """Yield what a call takes at every size, and what is predicted: from the seconds at some depths, on the line
        through them at the depth of its model."""
        low, high = min(took), max(took)
        depth = one.spec.config.num_hidden_layers if low < high else low

        def line(first: float, last: float) -> float:
            return first + max(0.0, last - first) / max(1, high - low) * (depth - low)

        for shape in took[low]:
            predicted = (self.predicted(one, layers, *shape) for layers in (low, high))
            seconds = line(took[low][shape], took[high][shape])
            yield Measured(one.call.name, layout_key(one.layout), seconds, line(*predicted))

    def predicted(self, one: Asked, layers: int, samples: int, tokens: int) -> float:
        """Return the seconds of a call by formula."""
        config, call, number = with_layers(one.spec.config, layers), one.call, samples * one.layout.dims.batch
        if isinstance(call.work, TrainStep):
            call = replace(call, work=replace(call.work, mini_batches=1, epochs=1))
        response = self.sizes.decoded if isinstance(call.work, Generate) else round(self.sizes.counted * tokens)
        prompt = tokens + 1 if isinstance(call.work, Generate) else tokens - response
        load = Workload((prompt,) * number, (response,) * number, 1, response)
        shape = model_shape(model_facts(one.spec.source, config), config)
        options = CallOptions(one.spec.dtype, slots=samples, cuda_graphs=True)
        return Calls(one.layout, shape, load, self.hardware, options).cost(call).total


@dataclass(eq=False)
class _Run:
    """The model of a call, at one depth; None on a rank that has no part of it."""

    asked: Asked
    layers: int
    measuring: Measuring
    mesh: ParallelMesh
    model: RoleModel | None = None

    def __post_init__(self) -> None:
        if self.mesh.member:
            spec, trained = self.asked.spec, isinstance(self.asked.call.work, TrainStep)
            random = replace(spec, source=next(iter(PRESETS)), config=with_layers(spec.config, self.layers), lora=None)
            slots = max(self.measuring.sizes.samples)
            self.model = RoleModel(random, self.asked.layout, self.mesh, trained=trained, slots=slots)
            self.model.fill()

    def seconds(self, shapes: Sequence[Shape]) -> dict[Shape, float]:
        """Return the seconds of the call at each size, timed in turns: medians, because a step's ranks wait for each
        other as these do. Collective over the world."""
        rounds = self.measuring.rounds
        turns = [Timed(str(at), self._call(self.model, *at) if self.model else None, 1) for at in shapes]
        took = rounds.on_slowest_rank(rounds.turns(turns)).values()
        return {shape: median(of_all) for shape, of_all in zip(shapes, took, strict=True)}

    def _call(self, model: RoleModel, number: int, tokens: int) -> Callable[[], object]:
        work = self.asked.call.work
        if isinstance(work, Generate):
            prompts = Samples(tuple(range(number)), {"prompt_ids": self._drawn(number, tokens + 1)})
            tokens = self.measuring.sizes.decoded
            decode = replace(work, group_size=1, max_new_tokens=tokens, stop_ids=(), stop_strings=())
            return partial(model.generate, prompts, decode, 0)
        samples = self._samples(number, tokens)
        if isinstance(work, Inference):
            return partial(model.inference, samples, work, "output", model.layout)
        assert isinstance(work, TrainStep)
        return partial(model.train_step, [samples], replace(work, mini_batches=1, epochs=1, stop_above=None))

    def _drawn(self, samples: int, tokens: int) -> list[Tensor]:
        """Return random tokens of samples, different on every data-parallel rank."""
        draw = torch.Generator().manual_seed(self.asked.layout.number_of(dist.get_rank()))
        return [torch.randint(self.asked.spec.config.vocab_size, (tokens,), generator=draw) for _ in range(samples)]

    def _samples(self, number: int, tokens: int) -> Samples:
        work, response = self.asked.call.work, round(self.measuring.sizes.counted * tokens)
        mask = torch.zeros(tokens)
        mask[tokens - response - 1 : tokens - 1] = 1
        values: dict[str, list[Tensor]] = {"tokens": self._drawn(number, tokens)}
        if isinstance(work, TrainStep):
            values |= {key: [0.01 * torch.randn(tokens) for _ in range(number)] for key in work.objective.keys}
            if work.objective.counts:
                values[work.objective.counts] = [mask] * number
        elif "mask" in self.asked.call.inputs:
            values["mask"] = [mask] * number
        return Samples(tuple(range(number)), values)
