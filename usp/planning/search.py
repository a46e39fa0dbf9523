"""The layouts of a training step, their options to save memory, and the search for the fastest that fit. Pure.

The search takes layouts, and of each the ways to save activations, in the order of a lower bound of their seconds, and
times those whose bound is below what is of interest: first the fastest of each family, the configurations with the
same axes, then, in the order of their simplicity, those within `CLOSE` of the fastest. Only the lowest ZeRO stage that
fits is timed, because higher ones communicate more; optimizer offload, which saves no time, only for lower ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from operator import attrgetter
from typing import TypeVar

from usp.config import AC_MODES, TrainConfig
from usp.model.facts import ModelFacts
from usp.optimizers import OPTIMIZERS
from usp.parallel import PP_SCHEDULES, divisors, micro_batch_violation
from usp.predict.devices import Memory
from usp.predict.seconds import PUBLISHED_ERRORS, StepTime
from usp.train.validate import violations

from .question import Devices, Tried, silent, within

MLP_TILE = 8192  # tokens; MLPs of fewer are not tiled
MOST_MICRO_BATCHES = 8  # per pipeline rank: more hardly shrink the bubble
FAMILIES = 6  # in a report
CLOSE = PUBLISHED_ERRORS["dense models"] + PUBLISHED_ERRORS["tensor parallelism"]  # differing by less, steps are equal
DEGREES = ("pp", "dp_replicate", "dp_shard", "sp_ring", "sp_ulysses", "tp", "ep")  # outermost first
D = TypeVar("D")


@dataclass(frozen=True, eq=False, kw_only=True)
class Question(Devices):
    """A training step to plan; in `base`, whatever the planner chooses has its default."""

    base: TrainConfig
    facts: ModelFacts
    sequences: int  # per step, over all ranks
    divided: bool = True  # whether tp can divide the model


@dataclass(frozen=True)
class Predictor:
    """Functions of a configuration."""

    seconds: Callable[[TrainConfig], StepTime]  # of its step
    least_seconds: Callable[[TrainConfig], float]  # a lower bound, whatever is sharded over dp
    device_bytes: Callable[[TrainConfig], float]  # of the rank that needs most
    host_bytes: Callable[[TrainConfig], float]  # of the host that needs most

    def memory(self, config: TrainConfig) -> Memory:
        return Memory(self.device_bytes(config), self.host_bytes(config))

    def fits(self, config: TrainConfig, usable: Memory) -> bool:
        return self.device_bytes(config) <= usable.device and self.host_bytes(config) <= usable.host


@dataclass(frozen=True)
class Candidate:
    config: TrainConfig
    time: StepTime
    memory: Memory

    @cached_property
    def seconds(self) -> float:
        return self.time.total


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    preferred: Candidate | None  # the simplest within `CLOSE` of the fastest; None if nothing fits
    best: tuple[Candidate, ...]  # the fastest configuration of each family that fits, the fastest first
    layouts: int  # how many there are
    tried: int  # of these, how many were checked against the memory


def changed(source: D, /, **values: object) -> D:
    """Return a dataclass with other values, as `dataclasses.replace`, which takes fifty times as long; what it caches
    must not depend on these values."""
    other = object.__new__(type(source))
    vars(other).update(vars(source), **values)
    return other


def family(config: TrainConfig) -> tuple[str, ...]:
    """Return the axes that a configuration uses, outermost first; dp may shard and replicate."""
    used = {name: getattr(config, name) for name in DEGREES if name != "dp_replicate"}
    used["dp_shard"] *= config.dp_replicate
    return tuple(name for name, degree in used.items() if degree > 1)


def simplicity(config: TrainConfig) -> tuple[int, ...]:
    """Return what orders configurations, the simplest first: offload, the number of axes, the axes themselves (dp, ep,
    sp, tp, pp), then recomputation, MLP tiles, more than one micro-batch, and the ZeRO stage."""
    sp = config.sp_ring * config.sp_ulysses
    used = [degree > 1 for degree in (config.pp, config.tp, sp, config.ep, config.dp_replicate, config.dp_shard)]
    saved = AC_MODES.index(config.ac), int(config.mlp_tile > 0), int(config.micro_batches > 1)
    return config.ac_offload + config.optim_offload, sum(used), *used, *saved, config.zero


def layouts(question: Question) -> Iterator[TrainConfig]:
    """Yield every valid choice of degrees, micro-batches and schedule, with all activations saved and ZeRO-1 over all
    data-parallel ranks. tp stays inside a host, with Megatron's sequence parallelism; heads bound tp x ulysses."""
    world, facts = question.world_size, question.facts
    inside = (question.hardware.tiers[0].devices or world) if question.divided else 1
    for tp, pp in product(divisors(world), divisors(world)):
        if tp > inside or facts.num_heads % tp or world % (tp * pp) or pp > len(facts.windows):
            continue
        base = changed(question.base, tp=tp, tp_sequence_parallel=tp > 1, pp=pp, zero=1)
        for sp in divisors(world // (tp * pp)):
            dp = world // (tp * pp * sp)
            for ulysses in divisors(sp, facts.num_heads // tp) if question.sequences % dp == 0 else ():
                size = question.sequences // dp
                layout = changed(base, dp_shard=dp, sp_ulysses=ulysses, sp_ring=sp // ulysses, batch_size=size)
                yield from _completed(question, layout)


def _completed(question: Question, layout: TrainConfig) -> Iterator[TrainConfig]:
    """Yield a layout with every schedule, number of micro-batches and expert degree."""
    world, experts = question.world_size, question.facts.num_experts
    degrees = [ep for ep in divisors(experts) if world // layout.pp % ep == 0] if experts else [1]
    for ep, schedule in product(degrees, PP_SCHEDULES if layout.pp > 1 else ("1f1b",)):
        numbers = _micro_batches(layout.batch_size, layout.pp, schedule)
        configs = [changed(layout, ep=ep, pp_schedule=schedule, micro_batches=number) for number in numbers]
        if configs and not violations(configs[0], world, question.facts):  # no rule tells such numbers apart
            yield from configs


def _micro_batches(batch: int, pp: int, schedule: str) -> list[int]:
    """Return divisors of the batch. Without a pipeline all of them: fewer save more activations, but larger products
    are faster, and ZeRO-2 and 3 communicate in each."""
    numbers = divisors(batch)
    if pp == 1:
        return numbers
    fitting = [number for number in numbers if not micro_batch_violation(schedule, pp, number)]
    return [number for number in fitting if number <= MOST_MICRO_BATCHES * pp] or fitting[:1]


def recomputations(config: TrainConfig, facts: ModelFacts) -> Iterator[TrainConfig]:
    """Yield a layout, in the smallest shards, with every way to save activations, the most last."""
    local = config.padded_len // (config.sp_ring * config.sp_ulysses) // config.tp
    smallest = shardings(config)[0][-1]
    modes = AC_MODES if config.pp_schedule != "zero-bubble" else ("none",)
    for ac in (mode for mode in modes if not (config.compile and mode == "selective")):
        tiled = local > MLP_TILE and not facts.num_experts and ac not in ("none", "selective")
        for offload, tile in product((False, True)[: 1 + (ac != "none")], (0, MLP_TILE)[: 1 + tiled]):
            yield changed(smallest, ac=ac, ac_offload=offload, mlp_tile=tile)


def shardings(config: TrainConfig) -> list[list[TrainConfig]]:
    """Return, by the number of replicas that experts allow, ascending, the ZeRO stages of a layout that differ."""
    dp, sp = config.dp_replicate * config.dp_shard, config.sp_ring * config.sp_ulysses
    found = []
    for replicas in (number for number in divisors(dp) if dp * sp * config.tp // number % config.ep == 0):
        sharded = dp // replicas * sp > 1 and config.pp_schedule != "zero-bubble"
        stages = ((1, 2, 3) if config.micro_batches > 1 else (1, 3)) if sharded else (1,)
        found.append([changed(config, dp_replicate=replicas, dp_shard=dp // replicas, zero=zero) for zero in stages])
    return found


@dataclass(frozen=True, eq=False)
class Search:
    """A search among `every` layout for the fastest configurations that fit the devices of a question."""

    question: Question
    predictor: Predictor
    every: Sequence[TrainConfig]

    @property
    def can_offload(self) -> bool:
        """Whether optimizer states may be on the host; float8 gathers need the largest weights on the device."""
        base, link = self.question.base, self.question.hardware.host_link_bytes_per_second
        return math.isfinite(link) and not OPTIMIZERS[base.optimizer].only_on_device and base.fp8 != "tensor"

    def run(self, report: Tried = silent) -> SearchResult:
        """Search the fastest configurations of `FAMILIES`, and the simplest that is about as fast; tell `report` how
        many layouts are tried, of all."""
        least, tried = self.predictor.least_seconds, 0
        best: dict[tuple[str, ...], Candidate] = {}

        def limit(config: TrainConfig) -> float:
            """Return the seconds below which a configuration is among the fastest of families."""
            own = best[kind].seconds if (kind := family(config)) in best else math.inf
            return min(own, *sorted(each.seconds for each in best.values())[FAMILIES - 1 : FAMILIES], math.inf)

        for layout in within(self.every, least, limit):
            report(tried, len(self.every))
            tried += 1
            for option in within(self._options(layout), least, limit):
                for candidate in map(self.candidate, self._fitting(option)):
                    first = best.setdefault(family(layout), candidate)
                    best[family(layout)] = min(first, candidate, key=attrgetter("seconds"))
        fastest = sorted(best.values(), key=attrgetter("seconds"))[:FAMILIES]
        preferred = self._simplest(fastest[0]) if fastest else None
        return SearchResult(preferred, tuple(fastest), len(self.every), tried)

    def fits(self) -> bool:
        """Return whether any configuration fits; raise ValueError if the hardware does not connect the devices."""
        options = chain.from_iterable(map(self._options, self.every))
        return any(map(self.candidate, chain.from_iterable(map(self._fitting, options))))

    def _options(self, layout: TrainConfig) -> list[TrainConfig]:
        """Return a layout with the ways to save activations, none if it does not even fit with the most of them."""
        *_, smallest = options = list(recomputations(layout, self.question.facts))
        least_bytes = self.predictor.device_bytes(changed(smallest, optim_offload=self.can_offload))
        return options if least_bytes <= self.question.usable.device else []

    def _simplest(self, fastest: Candidate) -> Candidate:
        """Return the simplest, then the fastest, within `CLOSE` that does not mix ring and Ulysses inside a host."""
        found, slowest, least = [fastest], (1 + CLOSE) * fastest.seconds, self.predictor.least_seconds

        def simplest(option: TrainConfig) -> tuple[int, ...]:
            return simplicity(changed(option, zero=1))

        def order(each: Candidate) -> tuple[tuple[int, ...], bool, float]:
            ring, ulysses = each.config.sp_ring, each.config.sp_ulysses
            mixed = 1 < ring < ring * ulysses <= self.question.ranks_per_host
            return simplicity(each.config), mixed, each.seconds

        def limit(_: TrainConfig) -> tuple[float, ...]:
            return *simplicity(found[0].config), math.inf

        for layout in within((each for each in self.every if least(each) <= slowest), simplest, limit):
            near = (each for each in self._options(layout) if least(each) <= slowest)
            for option in within(near, simplest, limit):
                timed = (each for each in map(self.candidate, self._fitting(option)) if each.seconds <= slowest)
                found[0] = min([found[0], *timed], key=order)
        return found[0]

    def _fits(self, config: TrainConfig) -> bool:
        return self.predictor.fits(config, self.question.usable)

    def _fitting(self, option: TrainConfig) -> Iterator[TrainConfig]:
        """Yield, by the number of replicas, the lowest ZeRO stage that fits, and a lower one if it fits with optimizer
        offload. More replicas need more memory."""
        for stages in shardings(option):
            found = next(filter(self._fits, stages), None)
            lower = [each for each in stages if found is None or each.zero < found.zero] if self.can_offload else []
            offloaded = next(filter(self._fits, (changed(each, optim_offload=True) for each in lower)), None)
            if not (found or offloaded):
                return
            yield from filter(None, (found, offloaded))

    def candidate(self, config: TrainConfig) -> Candidate:
        return Candidate(config, self.predictor.seconds(config), self.predictor.memory(config))

    def tightest(self) -> Candidate | None:
        """Return the configuration that needs least memory of a device with the most recomputation, of those that fit
        the host; None if none does."""

        def offloads(layout: TrainConfig) -> Iterator[TrainConfig]:
            *_, most = recomputations(layout, self.question.facts)
            for saved, states in product({False, most.ac_offload}, {False, self.can_offload}):
                yield changed(most, ac_offload=saved, optim_offload=states)

        every = (each for layout in self.every for each in offloads(layout))
        held = (each for each in every if self.predictor.host_bytes(each) <= self.question.usable.host)
        smallest = min(held, key=self.predictor.device_bytes, default=None)
        return None if smallest is None else self.candidate(smallest)
