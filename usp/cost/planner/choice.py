"""The choice of the fastest configuration for a run.

choose     search the configurations of a run on given hardware
suppose    search again with other memory or links
planned    apply --plan auto to the configuration that training starts with, on every rank alike
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from parallel import Hardware, load_hardware, node_of
from usp.config import TrainConfig, flag
from usp.cost.grid import GIB
from usp.cost.job import Job, job_of
from usp.cost.memory.footprint import footprint
from usp.cost.time.step_time import step_seconds
from usp.hf.models import formula_violation
from usp.model.facts import ModelFacts
from usp.run.failures import ConfigurationError, listed
from usp.run.launch import Launch, choose_device
from usp.train.resolve import resolve
from usp.train.validate import parallel_dims, with_flags

from .advice import degrees, memory_options, seconds
from .layouts import Question, layouts, suppositions
from .search import Candidate, Found, Predictor, search

USABLE = 0.9  # of a device's memory: the rest is for fragmentation, the CUDA context and NCCL's buffers
CHOSEN = (
    *("sp_ulysses", "sp_ring", "dp_shard", "dp_replicate", "tp", "tp_sequence_parallel", "pp", "pp_schedule", "ep"),
    *("zero", "batch_size", "micro_batches", "ac", "ac_offload", "mlp_tile"),
)


@dataclass(frozen=True)
class Choice:
    """A question and the result of its search, with at least one configuration that fits.

    Attributes:
        job: of an arbitrary layout, for its model.
        memory_bytes: usable bytes per device.
    """

    question: Question
    facts: ModelFacts
    job: Job
    hardware: Hardware
    predictor: Predictor
    memory_bytes: float
    found: Found

    @property
    def best(self) -> Candidate:
        return self.found.best[0]


def choose(asked: TrainConfig, world_size: int, hardware: Hardware) -> Choice:
    """Search the fastest configurations of `asked` on `world_size` devices with asked.global_batch_size per step.

    Raises:
        ConfigurationError: for invalid values, for values that the planner chooses, and if no configuration fits; the
            message then names the one that needs least memory.
    """
    sequences = asked.global_batch_size
    base = replace(asked, plan="none", hardware="auto", global_batch_size=0)
    problems = _refused(asked, world_size)
    # On one rank nothing depends on the layout, so whatever is wrong there is wrong with what was asked.
    found = resolve(replace(base, **{name: getattr(TrainConfig(), name) for name in CHOSEN}), 1, weights=False)
    if problems := [*problems, *found.problems]:
        raise ConfigurationError(listed(problems))
    _, model_config, facts, _ = found.valid()
    if violation := formula_violation(asked.model, model_config):
        raise ConfigurationError(with_flags(violation))
    question = Question(base, sequences, world_size, hardware.tiers[0].devices or world_size)
    first = next(layouts(question, facts), None)
    if first is None:
        raise ConfigurationError(
            f"no layout of {world_size} devices fits --global-batch-size {sequences} and --seq-len {base.seq_len} for "
            f"{base.model}: the data-parallel degree must divide --global-batch-size, and ring x ulysses "
            f"(--sp-layout zigzag: twice that) must divide --seq-len. Use powers of two for all three"
        )
    job = job_of(first, model_config, world_size)
    memory, predictor = USABLE * hardware.memory_bytes, predictor_for(job, hardware)
    choice = Choice(question, facts, job, hardware, predictor, memory, search(question, facts, predictor, memory))
    if not choice.found.best:
        raise ConfigurationError(_nothing_fits(choice))
    return choice


def predictor_for(job: Job, hardware: Hardware) -> Predictor:
    """Return a predictor for configurations that differ from `job` in what the planner chooses, on as many ranks."""

    @cache
    def job_like(config: TrainConfig) -> Job:
        return replace(job, config=config, dims=parallel_dims(config, config.ep).resolve(job.world_size))

    @cache
    def peak_bytes(config: TrainConfig) -> int:
        # The first pipeline stage has most activations in flight, the last has the vocabulary loss.
        ranks = job_like(config).ranks("pp", 0)
        return max(footprint(job_like(config), rank).peak.total for rank in {ranks[0], ranks[-1]})

    return Predictor(cache(lambda config: step_seconds(job_like(config), hardware)), peak_bytes)


def _refused(asked: TrainConfig, world_size: int) -> list[str]:
    problems = []
    if world_size < 1:
        problems.append(f"--world-size = {world_size} must be at least 1")
    if asked.global_batch_size < 1:
        problems.append(
            f"--global-batch-size = {asked.global_batch_size} must be at least 1: the fastest layout depends on the "
            f"number of sequences per step over all devices"
        )
    default = TrainConfig()
    given = [name for name in CHOSEN if getattr(asked, name) != getattr(default, name)]
    if given:
        values = ", ".join(f"{flag(name)} = {getattr(asked, name)}" for name in given)
        problems.append(f"{values}: chosen by the planner, remove it from the flags and from the --config file")
    return problems


def _nothing_fits(choice: Choice) -> str:
    tightest, base, devices = choice.found.tightest, choice.question.base, choice.question.world_size
    assert tightest is not None
    return (
        f"{base.model} at {base.seq_len} tokens does not fit {devices} x {choice.hardware.name} in any of "
        f"{choice.found.layouts} layouts. The smallest is {degrees(tightest.config)} "
        f"({memory_options(tightest.config)}) with {tightest.peak_bytes / GIB:.1f} GiB per device, of which "
        f"{choice.memory_bytes / GIB:.1f} GiB are usable: use about "
        f"{devices * tightest.peak_bytes / choice.memory_bytes:.0f} devices, or fewer tokens"
    )


def suppose(choice: Choice) -> list[tuple[str, Candidate | None]]:
    """Return the description and the fastest configuration of each of `suppositions`, None if nothing would fit."""
    found = []
    for words, other, times in suppositions(choice.hardware):
        predictor = choice.predictor if other is choice.hardware else predictor_for(choice.job, other)
        best = search(choice.question, choice.facts, predictor, times * choice.memory_bytes, keep=1).best
        found.append((words, best[0] if best else None))
    return found


def planned(config: TrainConfig, launch: Launch) -> TrainConfig:
    """Return the configuration that --plan auto chooses, and print it on rank 0; without --plan auto return `config`.

    Raises:
        ConfigurationError: as `choose`, and for unknown hardware, or hardware without a peak for --dtype.
    """
    if config.plan != "auto":
        return config
    try:
        device = choose_device(config.device, launch)
        hardware = _hardware(config.hardware, device, launch)
        choice = choose(replace(config, device=device.type), launch.world_size, hardware)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    best = choice.best
    if launch.rank == 0:
        print(
            f"plan: {degrees(best.config)} ({memory_options(best.config)}), the fastest of {choice.found.layouts} "
            f"layouts, {seconds(best.time.total)} per step and {best.peak_bytes / GIB:.1f} GiB predicted on "
            f"{hardware.name}"
        )
    return replace(best.config, device=config.device)


def _hardware(name: str, device: torch.device, launch: Launch) -> Hardware:
    """Load --hardware, or for `auto` the node of this GPU, with this GPU's memory and this run's ranks per host."""
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
    return replace(known, memory_bytes=torch.cuda.get_device_properties(device).total_memory, tiers=tuple(hosts))
