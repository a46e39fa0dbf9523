"""The choice of the fastest configuration for a run.

choose          search the configurations of a run on given hardware
suppose         search again with other memory or links
contradicted    search again among those that follow a tip which the choice contradicts
planned         apply --plan auto to the configuration that training starts with: rank 0 plans for all ranks
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch

from parallel import Hardware, ParallelDims, load_hardware, node_of
from usp.config import TrainConfig, flag
from usp.cost.grid import GIB
from usp.cost.job import ONE_DOCUMENT, Data, Job, job_of
from usp.cost.memory.activations import LayerActivations, different_activations, least_layer_bytes
from usp.cost.memory.footprint import footprint, least_bytes, least_saved_bytes
from usp.cost.memory.host_memory import host_bytes
from usp.cost.time.host import saved_bytes
from usp.cost.time.least_time import (
    Attends,
    LayerCompute,
    Transfers,
    attends_of,
    least_exposed,
    least_seconds,
    least_sharded_seconds,
    least_transfers,
)
from usp.cost.time.step_time import StepTime, step_seconds
from usp.hf.models import formula_violation
from usp.model.facts import ModelFacts
from usp.run.failures import ConfigurationError, listed
from usp.run.launch import Launch, choose_device
from usp.train.resolve import resolve
from usp.train.validate import parallel_dims, with_flags

from .advice import broken_tips, degrees, memory_options, seconds, why_slower
from .layouts import MLP_TILE, Question, layouts, suppositions
from .search import Candidate, Found, Memory, Predictor, search, tightest

USABLE = 0.9  # of a device's memory: the rest is for fragmentation, the CUDA context and NCCL's buffers
USABLE_HOST = 0.9  # of a host's memory: the rest is for the system, processes and the page cache
MORE_DEVICES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # times those that are too few
CHOSEN = (
    *("sp_ulysses", "sp_ring", "dp_shard", "dp_replicate", "tp", "tp_sequence_parallel", "pp", "pp_schedule", "ep"),
    *("zero", "batch_size", "micro_batches", "ac", "ac_offload", "mlp_tile", "optim_offload"),
)


Key = tuple[object, ...]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Known:
    """What predictions of several configurations share, whatever the links between devices."""

    jobs: dict[TrainConfig, Job] = field(default_factory=dict)
    compute: dict[Key, LayerCompute] = field(default_factory=dict)
    working: dict[Key, int] = field(default_factory=dict)
    activations: dict[Key, dict[int, LayerActivations]] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """A question and the result of its search, with at least one configuration that fits.

    Attributes:
        job: of an arbitrary layout, for its model.
        memory: usable bytes.
        every: what `layouts` yields; known: what `predictor` computed so far.
    """

    question: Question
    facts: ModelFacts
    job: Job
    hardware: Hardware
    predictor: Predictor
    memory: Memory
    found: Found
    every: tuple[TrainConfig, ...]
    known: Known

    @property
    def best(self) -> Candidate:
        return self.found.best[0]


def choose(
    asked: TrainConfig,
    world_size: int,
    hardware: Hardware,
    report: Callable[[int, int], None] = lambda tried, layouts: None,
    data: Callable[[ModelFacts], Data] = lambda facts: ONE_DOCUMENT,
) -> Choice:
    """Search the fastest configurations of `asked` on `world_size` devices with asked.global_batch_size per step.

    report: as in `search`. data: what to assume of the data of a model.

    Raises:
        ConfigurationError: for invalid values, for values that the planner chooses, and if no configuration fits; the
            message then names the one that needs least memory.
    """
    sequences = asked.global_batch_size
    base = replace(asked, plan="none", hardware="auto", global_batch_size=0)
    problems = _refused(asked, world_size)
    # On one rank nothing depends on the layout, so whatever is wrong there is wrong with what was asked.
    resolved = resolve(replace(base, **{name: getattr(TrainConfig(), name) for name in CHOSEN}), 1, weights=False)
    if problems := [*problems, *resolved.problems]:
        raise ConfigurationError(listed(problems))
    _, model_config, facts, _ = resolved.valid()
    if violation := formula_violation(asked.model, model_config):
        raise ConfigurationError(with_flags(violation))
    assumed = data(facts)
    question = Question(
        base,
        sequences,
        world_size,
        ranks_per_host=hardware.tiers[0].devices or world_size,
        optim_offload=math.isfinite(hardware.host_link_bytes_per_second),
    )
    every = tuple(layouts(question, facts))
    if not every:
        raise ConfigurationError(
            f"no layout of {world_size} devices fits --global-batch-size {sequences} and --seq-len {base.seq_len} for "
            f"{base.model}: the data-parallel degree must divide --global-batch-size, and ring x ulysses "
            f"(--sp-layout zigzag: twice that) must divide --seq-len. Use powers of two for all three"
        )
    job, known = job_of(every[0], model_config, world_size, data=assumed), Known()
    memory, predictor = usable(hardware), predictor_for(job, hardware, known)
    found = search(question, facts, predictor, memory, every=every, report=report)
    choice = Choice(question, facts, job, hardware, predictor, memory, found, every, known)
    if not choice.found.best:
        raise ConfigurationError(_nothing_fits(choice))
    return choice


def usable(hardware: Hardware) -> Memory:
    """Return the bytes that a run can use."""
    return Memory(USABLE * hardware.memory_bytes, USABLE_HOST * hardware.host_memory_bytes)


def predictor_for(job: Job, hardware: Hardware, known: Known | None = None) -> Predictor:
    """Return a predictor for configurations that differ from `job` in what the planner chooses, on as many ranks.

    known: of a predictor for the same job, on hardware that differs in the links between devices alone.
    """
    known = known or Known()
    attends: dict[Key, Attends] = {}
    exposed: dict[Key, dict[int, float]] = {}
    transfers: dict[Key, Transfers] = {}

    def job_like(config: TrainConfig) -> Job:
        made = known.jobs.get(config)
        if made is None:
            dims = parallel_dims(config, config.ep).resolve(job.world_size)
            made = known.jobs[config] = replace(job, config=config, dims=dims)
        return made

    def attends_in(made: Job) -> Attends:
        key = _micro_batch(made)
        if key not in attends:
            attends[key] = attends_of(made, hardware)
        return attends[key]

    def compute_of(made: Job) -> LayerCompute:
        key = (*_micro_batch(made), made.config.ac, made.config.mlp_tile)
        if key not in known.compute:
            known.compute[key] = LayerCompute.of(made, hardware, attends_in(made))
        return known.compute[key]

    def exposed_of(made: Job) -> dict[int, float]:
        key = (*_micro_batch(made), made.config.ac)
        if key not in exposed:
            exposed[key] = least_exposed(made, hardware, attends_in(made))
        return exposed[key]

    def least_time(made: Job) -> float:
        return least_seconds(made, hardware, compute_of(made), exposed_of(made))

    def transfers_of(made: Job) -> Transfers:
        config = made.config
        key = (made.dims, config.zero, config.pp_schedule, config.micro_batches)
        if key not in transfers:
            transfers[key] = least_transfers(made, hardware)
        return transfers[key]

    def least_sharded_time(made: Job) -> float:
        rates = compute_of(made), exposed_of(made), transfers_of(made)
        saved = saved_bytes(made, made.slowest_ranks[0], _activations(made, known)) if made.config.ac_offload else 0
        return least_sharded_seconds(made, hardware, *rates, saved)

    def step_time(made: Job) -> StepTime:
        return step_seconds(made, hardware, layers=compute_of(made).passes)

    return Predictor(
        seconds=_each(step_time, job_like),
        least_seconds=_each(least_time, job_like),
        least_sharded_seconds=_each(least_sharded_time, job_like),
        **_memory_of(job_like, hardware, known),
    )


def _each(value: Callable[[Job], T], job_like: Callable[[TrainConfig], Job]) -> Callable[[TrainConfig], T]:
    """Return a value of configurations, computed once for each; their jobs are hashed faster than they are."""
    known = cache(value)
    return lambda config: known(job_like(config))


def _memory_of(
    job_like: Callable[[TrainConfig], Job], hardware: Hardware, known: Known
) -> dict[str, Callable[[TrainConfig], int]]:
    """Return the part of a predictor that has to do with memory."""

    def peak_bytes(made: Job) -> int:
        # The first pipeline stage has most activations in flight, the last has the vocabulary loss.
        ranks = made.ranks("pp", 0)
        return max(footprint(made, rank).peak.total for rank in {ranks[0], ranks[-1]})

    def least_peak(made: Job) -> int:
        return least_bytes(made, _activations(made, known))

    def least_saved(made: Job) -> int:
        key = _micro_batch(made)
        if key not in known.working:
            known.working[key] = least_layer_bytes(made, MLP_TILE)
        return least_saved_bytes(made, known.working[key])

    def on_host(made: Job) -> int:
        offloads = made.config.ac_offload or made.config.optim_offload
        return host_bytes(made, hardware.host_devices) if offloads else 0

    values = {"peak_bytes": peak_bytes, "least_bytes": least_peak, "least_saved_bytes": least_saved}
    return {name: _each(value, job_like) for name, value in (values | {"host_bytes": on_host}).items()}


def _activations(made: Job, known: Known) -> Mapping[int, LayerActivations]:
    """Return `different_activations`, computed once for jobs that have the same."""
    key = (*_micro_batch(made), made.config.ac, made.config.mlp_tile)
    if key not in known.activations:
        known.activations[key] = different_activations(made)
    return known.activations[key]


def _micro_batch(made: Job) -> Key:
    return made.rows, made.dims.ring, made.dims.ulysses, made.dims.tp, made.dims.ep


def _refused(asked: TrainConfig, world_size: int) -> list[str]:
    problems = []
    if world_size < 1:
        problems.append(f"--world-size = {world_size} must be at least 1")
    if asked.global_batch_size < 1:
        problems.append(
            f"--global-batch-size = {asked.global_batch_size} must be at least 1: the fastest layout depends on the "
            f"number of sequences per step over all devices"
        )
    if asked.curriculum:
        problems.append(
            "--curriculum: the planner chooses one layout, and its stages have different steps: plan each by itself, "
            "and write its degrees into the curriculum"
        )
    default = TrainConfig()
    given = [name for name in CHOSEN if getattr(asked, name) != getattr(default, name)]
    if given:
        values = ", ".join(f"{flag(name)} = {getattr(asked, name)}" for name in given)
        problems.append(f"{values}: chosen by the planner, remove it from the flags and from the --config file")
    return problems


def _nothing_fits(choice: Choice) -> str:
    base, devices = choice.question.base, choice.question.world_size
    smallest = tightest(choice.question, choice.facts, choice.predictor, choice.memory.host)
    enough = _enough_devices(choice)
    assert smallest is not None
    return (
        f"{base.model} at {base.seq_len} tokens does not fit {devices} x {choice.hardware.name} in any of "
        f"{choice.found.layouts} layouts. The smallest is {degrees(smallest.config)} "
        f"({memory_options(smallest.config)}) with {smallest.peak_bytes / GIB:.1f} GiB per device, of which "
        f"{choice.memory.device / GIB:.1f} GiB are usable: use {f'{enough} devices, or ' if enough else ''}fewer tokens"
    )


def _enough_devices(choice: Choice) -> int | None:
    """Return a number of devices on which the question has an answer, a multiple of those that are too few."""
    for times in MORE_DEVICES:
        question = replace(choice.question, world_size=times * choice.question.world_size)
        job = replace(choice.job, dims=ParallelDims(dp_shard=question.world_size))
        try:
            predictor = predictor_for(job, choice.hardware)
            if search(question, choice.facts, predictor, choice.memory, keep=1).best:
                return question.world_size
        except ValueError:  # the hardware connects fewer devices
            return None
    return None


def suppose(choice: Choice) -> list[tuple[str, Candidate | None]]:
    """Return the description and the fastest configuration of each of `suppositions`, None if nothing would fit."""
    found = []
    for words, other, times in suppositions(choice.hardware):
        predictor = choice.predictor
        if other is not choice.hardware:  # memory does not depend on it
            timed = predictor_for(choice.job, other, choice.known)
            predictor = replace(
                predictor,
                seconds=timed.seconds,
                least_seconds=timed.least_seconds,
                least_sharded_seconds=timed.least_sharded_seconds,
            )
        memory = replace(choice.memory, device=times * choice.memory.device)
        best = search(choice.question, choice.facts, predictor, memory, every=choice.every, keep=1).best
        found.append((words, best[0] if best else None))
    return found


def contradicted(choice: Choice) -> Iterator[str]:
    """Yield the tips of the USP paper that the choice contradicts, each with the fastest configuration that follows."""
    for tip in broken_tips(choice.best.config, choice.facts):
        following = [layout for layout in choice.every if tip.followed(layout)]
        found = search(choice.question, choice.facts, choice.predictor, choice.memory, every=following, keep=1)
        if found.best:
            other = found.best[0]
            yield (
                f"{tip.words}. The fastest that follows it, {degrees(other.config)} ({memory_options(other.config)}), "
                f"takes {seconds(other.time.total)} (slower by: {why_slower(other, choice.best)})"
            )
        else:
            reason = f"None of the {found.layouts} layouts that follow it fits into memory"
            yield f"{tip.words}. {reason if found.layouts else 'No layout of these devices and this batch follows it'}"


def planned(config: TrainConfig, launch: Launch) -> TrainConfig:
    """Return the configuration that --plan auto chooses, and print it on rank 0; without --plan auto return `config`.

    Rank 0 plans and hands its choice to the others through torchrun's store. Without a store every rank plans, and all
    choose the same.

    Raises:
        ConfigurationError: as `choose`, and for unknown hardware, or hardware without a peak for --dtype; on all ranks.
    """
    if config.plan != "auto":
        return config
    told = launch.from_first("plan", lambda: _plan(config, launch))
    if problem := told.get("problem"):
        raise ConfigurationError(problem)
    return replace(config, plan="none", hardware="auto", global_batch_size=0, **told)


def _plan(config: TrainConfig, launch: Launch) -> dict[str, Any]:
    """Return the options that --plan auto chooses, or the `problem` with it; print it on rank 0."""
    try:
        device = choose_device(config.device, launch)
        hardware = hardware_here(config.hardware, device, launch)
        if launch.rank == 0:
            print(f"plan: searching the fastest layout of {launch.world_size} ranks", flush=True)
        choice = choose(replace(config, device=device.type), launch.world_size, hardware)
    except ValueError as error:
        return {"problem": str(error)}
    best = choice.best
    on_host = f"({best.host_bytes / GIB:.1f} GiB of a host's memory) " if best.host_bytes else ""
    if launch.rank == 0:
        print(
            f"plan: {degrees(best.config)} ({memory_options(best.config)}), the fastest of {choice.found.layouts} "
            f"layouts, {seconds(best.time.total)} per step and {best.peak_bytes / GIB:.1f} GiB "
            f"{on_host}predicted on "
            f"{hardware.name} with attention by {', '.join(best.time.kernels)}"
        )
    return {name: getattr(best.config, name) for name in CHOSEN}


def hardware_here(name: str, device: torch.device, launch: Launch) -> Hardware:
    """Load --hardware, or for `auto` the node of this GPU, with this GPU's and this host's memory and this run's ranks
    per host."""
    if name != "auto":
        return load_hardware(name)
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    node = node_of(here)
    if node is None:
        raise ValueError(
            f"--hardware auto does not know {here}: measure it with torchrun ... -m usp calibrate --out hardware.json, "
            f"then use --hardware hardware.json"
        )
    known = load_hardware(node)
    inner, *outer = known.tiers
    hosts = (replace(inner, devices=launch.local_world_size), *outer) if inner.devices else known.tiers
    return replace(
        known,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory,
        tiers=tuple(hosts),
        host_devices=launch.local_world_size,
        host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
