"""The layouts of a training step, their options to save memory, and the search for the fastest that fit. Pure.

The search is best first by a lower bound that grows from step to step:

    degrees       as a layout with these degrees and schedule in the largest micro-batches, without the bubble
    a layout      compute, the traffic of activations as in the largest micro-batches, and the least optimizer and
                  traffic of parameters of any shards that can fit
    an option     as a layout, with the recomputation and the copies of a way to save activations
    shards        likewise, with the optimizer and the traffic of parameters of a ZeRO stage and a number of replicas
                  (HSDP) that fit
    a candidate   the same, timed

so a candidate that is reached is faster than all that has not been reached. Of interest are the fastest of each family,
the configurations with the same axes, and the simplest of those that are within `NOISE` of the fastest. Only the lowest
ZeRO stage that fits is timed, because higher ones communicate more; optimizer offload, which saves no time, is tried
only for lower ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import chain, count, islice, product
from typing import TypeVar

from usp.config import AC_MODES, TrainConfig
from usp.model.facts import ModelFacts
from usp.optimizers import OPTIMIZERS
from usp.parallel import PP_SCHEDULES, bubble_fraction, divisors, micro_batch_violation
from usp.predict.devices import Memory
from usp.predict.seconds import StepTime, exposure
from usp.train.validate import violations

from .question import Devices, Tried, silent

MLP_TILE = 8192  # tokens; MLPs of fewer are not tiled
MOST_MICRO_BATCHES = 8  # per pipeline rank: more hardly shrink the bubble
FAMILIES = 6  # in a report
NOISE = 0.03  # predicted steps that differ by less are taken as equal
SLACK = 0.99  # of a bound by the largest micro-batches: smaller ones were up to 0.4% faster
MOST_TIGHT = 20  # layouts that are searched for the least memory
D = TypeVar("D")
ACTIVATION_AXES = ("ring", "ulysses", "tp", "ep")


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
    least_seconds: Callable[[TrainConfig], float]  # a lower bound: compute, and copies of activations to the host
    least_sharded: Callable[[TrainConfig], float]  # likewise, with what depends on the shards
    least_shards: Callable[[TrainConfig], tuple[float, float]]  # (traffic without the bubble, optimizer) of shards
    device_bytes: Callable[[TrainConfig], float]  # of the rank that needs most
    host_bytes: Callable[[TrainConfig], float]  # of the host that needs most

    def memory(self, config: TrainConfig) -> Memory:
        return Memory(self.device_bytes(config), self.host_bytes(config))

    def fits(self, config: TrainConfig, usable: Memory) -> bool:
        on_device = self.device_bytes(config) <= usable.device
        return on_device and (math.isinf(usable.host) or self.host_bytes(config) <= usable.host)


@dataclass(frozen=True)
class Candidate:
    config: TrainConfig
    time: StepTime
    memory: Memory


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    preferred: Candidate | None  # the simplest within `NOISE` of the fastest; None if nothing fits
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
    degrees = {"pp": config.pp, "dp": config.dp_replicate * config.dp_shard}
    degrees |= {name: getattr(config, name) for name in ("sp_ring", "sp_ulysses", "tp", "ep")}
    return tuple(name for name, degree in degrees.items() if degree > 1)


def simplicity(config: TrainConfig, facts: ModelFacts) -> tuple[int, ...]:
    """Return what orders configurations, the simplest first: the number of degrees above 1, then offload,
    recomputation, MLP tiles, more than one micro-batch, broken tips, and the ZeRO stage."""
    degrees = (config.pp, config.dp_replicate, config.dp_shard, config.sp_ring, config.sp_ulysses, config.tp, config.ep)
    offloads = config.ac_offload + config.optim_offload
    saved = AC_MODES.index(config.ac), int(config.mlp_tile > 0), int(config.micro_batches > 1)
    tips = sum(1 for _ in broken_tips(config, facts))
    return sum(degree > 1 for degree in degrees), offloads, *saved, tips, config.zero


def broken_tips(config: TrainConfig, facts: ModelFacts) -> Iterator[tuple[str, Callable[[TrainConfig], bool]]]:
    """Yield the tips of arXiv 2405.07719, section 4, that a configuration breaks, each with whether another follows."""
    ring, ulysses, sp = config.sp_ring, config.sp_ulysses, config.sp_ring * config.sp_ulysses
    left = facts.num_heads // config.tp
    if ring > 1 and ulysses == 1 and left > 1:
        words = f"tip 1: pure ring attention (ring {ring}), although {left} heads per rank would allow Ulysses"
        yield words, lambda other: other.sp_ring == 1 or other.sp_ulysses > 1
    if sp > 1 and config.batch_size > 1 and config.pp == 1:
        words = f"tip 2: each sequence is sharded over {sp} ranks and each rank processes {config.batch_size} of them"
        yield f"{words}; data parallelism would communicate less", lambda other: other.sp_ring * other.sp_ulysses == 1
    if sp > 1 and config.zero == 0:
        words = "tip 3: sequence parallelism without ZeRO replicates the optimizer states on every rank"
        yield words, lambda other: other.zero > 0
    if config.tp > 1 and config.tp > ulysses and left > 1:
        words = f"tip 4: tp {config.tp} communicates more activations per layer than sequence parallelism; it pays off"
        yield f"{words} only where it saves memory", lambda other: other.tp == 1 or other.tp <= other.sp_ulysses
    if config.sp_order != "ring-outer" and ring > 1 and ulysses > 1:
        words = (
            f"tip 7: with the ring inside, Ulysses communicates over the slow links, and it is {exposure('ulysses')}"
        )
        yield f"{words}; the planner keeps --sp-order", lambda other: other.sp_ring == 1 or other.sp_ulysses == 1


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


def recomputations(config: TrainConfig, facts: ModelFacts, modes: Sequence[str] = AC_MODES) -> Iterator[TrainConfig]:
    """Yield a layout, in the smallest shards, with every way to save activations by some --ac, the most last."""
    local = config.padded_len // (config.sp_ring * config.sp_ulysses) // config.tp
    (most,) = shardings(config, 1, slice(-1, None))
    for ac in modes:
        if ac != "none" and config.pp_schedule == "zero-bubble":
            return
        tiled = local > MLP_TILE and not facts.num_experts and ac not in ("none", "selective")
        for offload, tile in product((False, True)[: 1 + (ac != "none")], (0, MLP_TILE)[: 1 + tiled]):
            yield changed(most, ac=ac, ac_offload=offload, mlp_tile=tile)


def replications(config: TrainConfig) -> list[int]:
    """Return the numbers of replicas of the shards that experts allow."""
    inside = config.dp_replicate * config.dp_shard * config.sp_ring * config.sp_ulysses * config.tp
    return [number for number in divisors(config.dp_replicate * config.dp_shard) if inside // number % config.ep == 0]


def shardings(config: TrainConfig, replicas: int, which: slice = slice(None)) -> list[TrainConfig]:
    """Return a configuration with a number of replicas and the ZeRO stages that differ, or `which` of them."""
    shards = config.dp_replicate * config.dp_shard // replicas
    stages: tuple[int, ...] = (1, 2, 3) if config.micro_batches > 1 else (1, 3)
    if shards * config.sp_ring * config.sp_ulysses == 1 or config.pp_schedule == "zero-bubble":
        stages = (1,)
    return [changed(config, dp_replicate=replicas, dp_shard=shards, zero=zero) for zero in stages[which]]


def _degrees(config: TrainConfig) -> tuple[int, ...]:
    """Return the degrees, whatever part of dp replicates."""
    return config.pp, config.dp_replicate * config.dp_shard, *_inner(config)


def _inner(config: TrainConfig) -> tuple[int, ...]:
    """Return the degrees inside pp and dp, which determine how much a sequence's activations are sent."""
    return config.sp_ring, config.sp_ulysses, config.tp, config.ep


def _like(config: TrainConfig) -> tuple[object, ...]:
    """Return what layouts have in common that differ in the number of micro-batches."""
    return config.pp_schedule, *_degrees(config)


def _bubble(config: TrainConfig) -> float:
    return bubble_fraction(config.pp_schedule, config.pp, config.micro_batches)


class Search:
    """A search among `every` layout for the fastest configurations that fit the devices of a question."""

    def __init__(
        self,
        question: Question,
        predictor: Predictor,
        every: Sequence[TrainConfig],
        only: tuple[str, bool] | None = None,  # (--ac, --ac-offload); None: any
    ) -> None:
        self.question, self.predictor, self.every, self.only = question, predictor, every, only
        self.usable = question.usable
        # Float8 gathers need the largest weights there.
        on_device = OPTIMIZERS[question.base.optimizer].only_on_device or question.base.fp8 == "tensor"
        self.can_offload = math.isfinite(question.hardware.host_link_bytes_per_second) and not on_device
        self.waits: dict[tuple[int, ...], float] = {}  # by inner degrees, as the layouts with the largest micro-batches
        self.largest: dict[tuple[int, ...], TrainConfig] = {}
        self.shards: dict[object, list[tuple[float, float]]] = {}  # by degrees and schedule, of each number of replicas
        self.groups: dict[object, list[TrainConfig]] = {}  # by degrees and schedule, in the largest micro-batches first
        for layout in sorted(every, key=lambda layout: layout.micro_batches / layout.batch_size):
            self.largest.setdefault(_inner(layout), layout)
            self.groups.setdefault(_like(layout), []).append(layout)

    def run(self, keep: int = FAMILIES, report: Tried = silent) -> SearchResult:
        """Search the fastest configurations of `keep` families, and the simplest that is about as fast; tell `report`
        how many layouts were tried, and all."""
        order = count()  # among equally fast ones, the first
        queue: list[tuple[float, int, str, TrainConfig, Candidate | None]] = []
        best: dict[tuple[str, ...], Candidate] = {}
        preferred: Candidate | None = None
        tried, limit = 0, math.inf  # seconds up to which a simpler one is preferred
        simple = partial(simplicity, facts=self.question.facts)

        def push(least: float, state: str, config: TrainConfig, candidate: Candidate | None = None) -> None:
            heappush(queue, (least, next(order), state, config, candidate))

        for group in self.groups.values():
            busy, most = (1 - _bubble(group[end]) for end in (0, -1))  # in the largest and smallest micro-batches
            push(SLACK * self._least(group[0]) * busy / most, "degrees", group[0])
        while queue and (len(best) < keep or queue[0][0] <= limit):
            least, _, state, config, candidate = heappop(queue)
            # What is reached from a layout or an option has as many degrees, offloads and recomputations, or more.
            simpler = least <= limit and (
                preferred is None or simple(changed(config, zero=1)) < simple(preferred.config)
            )
            if (family(config) in best or len(best) >= keep) and not simpler:
                continue
            if candidate:
                limit = min(limit, (1 + NOISE) * candidate.time.total)
                if preferred is None or (simpler and simple(config) < simple(preferred.config)):
                    preferred = candidate
                if len(best) < keep:
                    best.setdefault(family(config), candidate)
            elif state == "degrees":
                group = self.groups[_like(config)]
                if math.isinf(shards := self.least_of_shards(group[-1])):  # in the smallest micro-batches
                    tried += len(group)
                else:
                    push(least + shards, "group", config)
            elif state == "group":
                for layout in self.groups[_like(config)]:
                    push(self._bound(layout), "layout", layout)
            elif state in ("layout", "recomputation"):
                if state == "layout":
                    report(tried, len(self.every))
                    tried += 1
                    *_, smallest = recomputations(config, self.question.facts)
                    if not self._can_fit(smallest):
                        continue
                modes = AC_MODES[AC_MODES.index(config.ac) :]
                for option in recomputations(config, self.question.facts, modes[:1]):
                    if self.only in (None, (option.ac, option.ac_offload)):
                        push(self._bound(option), "option", option)
                for more in islice(recomputations(config, self.question.facts, modes[1:2]), 1):
                    push(self._bound(more), "recomputation", more)
            elif state == "option":
                for each in self._fitting(config):
                    push(max(least, self._waiting(config) + self.predictor.least_sharded(each)), "shards", each)
            else:
                timed = self.candidate(config)
                push(timed.time.total, "candidate", config, timed)
        return SearchResult(preferred, tuple(best.values()), len(self.every), tried)

    def by_memory_option(self, result: SearchResult) -> list[Candidate]:
        """Search the fastest configuration with each recomputation, with and without its offload, among the layouts
        with the degrees of a result; without those that do not fit."""
        shown = {_degrees(candidate.config) for candidate in result.best}
        like = [layout for layout in self.every if _degrees(layout) in shown]
        options = [(ac, offload) for ac in AC_MODES for offload in (False, True)[: 1 + (ac != "none")]]
        searches = (Search(self.question, self.predictor, like, only=option) for option in options)
        found = (search.run(keep=1).best for search in searches)
        return sorted(chain(*found), key=lambda candidate: candidate.time.total)

    def _least(self, config: TrainConfig) -> float:
        """Return a lower bound of a step: compute, and the traffic of activations as with the same inner degrees in the
        largest micro-batches, which send the fewest messages, for each sequence and layer."""
        return self.predictor.least_seconds(config) + self._waiting(config)

    def _waiting(self, config: TrainConfig) -> float:
        key = _inner(config)
        if key not in self.waits:
            largest = self.largest[key]
            communication = self.predictor.seconds(largest).communication
            exposed = sum(communication[axis].exposed for axis in ACTIVATION_AXES if axis in communication)
            self.waits[key] = exposed * largest.pp / largest.batch_size
        return self.waits[key] * config.batch_size / config.pp / (1 - _bubble(config))

    def _bound(self, config: TrainConfig) -> float:
        """Return a lower bound of a layout or an option."""
        return self._least(config) + self.least_of_shards(config)

    def _can_fit(self, config: TrainConfig) -> bool:
        """Return whether a configuration fits the device, with optimizer offload where that is possible."""
        return self.predictor.device_bytes(changed(config, optim_offload=self.can_offload)) <= self.usable.device

    def least_of_shards(self, config: TrainConfig) -> float:
        """Return a lower bound of what shards add to a layout or an option; infinite if none fit."""
        if (key := _like(config)) not in self.shards:
            self.shards[key] = list(self._least_shards(self.groups[key]))
        rest = 1 - _bubble(config)
        return min((exposed / rest + optimizer for exposed, optimizer in self.shards[key]), default=math.inf)

    def _least_shards(self, group: Sequence[TrainConfig]) -> Iterator[tuple[float, float]]:
        """Yield, by the number of replicas, the least that shards take in any layout of a group: the traffic that the
        largest micro-batches hide with the most recomputation, of ZeRO-3 where no lower stage can fit."""
        (*_, largest), (*_, smallest) = (recomputations(group[end], self.question.facts) for end in (0, -1))
        # One micro-batch of ZeRO-1 accumulates no gradients, and of several, ZeRO-2 shards them.
        stages = [(slice(1), slice(-2, None)), (slice(-1, None), slice(-1, None))]
        for replicas in replications(largest):
            while stages:
                lowest = shardings(largest, replicas, stages[0][0])
                if any(map(self._can_fit, chain(shardings(smallest, replicas, stages[0][1])[:1], lowest))):
                    yield self.predictor.least_shards(*lowest)
                    break
                del stages[0]

    def _fitting(self, config: TrainConfig) -> Iterator[TrainConfig]:
        """Yield, by the number of replicas, the lowest ZeRO stage that fits, and a lower one if it fits with optimizer
        offload. More replicas need more memory."""

        def lowest(stages: list[TrainConfig]) -> list[TrainConfig]:
            return list(islice(filter(fits, stages), 1)) if any(map(fits, stages[:1] + stages[-1:])) else []

        too_large: set[tuple[int, bool]] = set()  # also with more replicas

        def fits(each: TrainConfig) -> bool:
            kind = each.zero, each.optim_offload
            if kind not in too_large and not self.predictor.fits(each, self.usable):
                too_large.add(kind)
            return kind not in too_large

        for replicas in replications(config):
            stages = shardings(config, replicas)
            if not self._can_fit(stages[-1]):
                return
            found = lowest(stages)
            lower = [each for each in stages if not found or each.zero < found[0].zero] if self.can_offload else []
            found += lowest([changed(each, optim_offload=True) for each in lower])
            if not found:
                return
            yield from found

    def candidate(self, config: TrainConfig) -> Candidate:
        return Candidate(config, self.predictor.seconds(config), self.predictor.memory(config))

    def tightest(self) -> Candidate | None:
        """Return the configuration that needs least memory of a device, of those that fit the host; None if none does.
        Of all layouts the ones that need least with most savings are tried with every option."""
        host, memory = self.question.usable.host, self.predictor.memory

        def placements(config: TrainConfig) -> list[TrainConfig]:
            placed = [config, changed(config, optim_offload=True)] if self.can_offload else [config]
            return [each for each in placed if memory(each).host <= host]

        def least(configs: Iterable[TrainConfig]) -> float:
            return min((memory(each).device for config in configs for each in placements(config)), default=math.inf)

        options = [list(recomputations(layout, self.question.facts)) for layout in self.every]
        nearest = sorted(options, key=lambda each: least(each[-2:]))[:MOST_TIGHT]
        every = [each for options in nearest for option in options for each in placements(option)]
        return self.candidate(min(every, key=lambda each: memory(each).device)) if every else None
