"""The fastest configuration for a run: what may be asked, what the search finds, and what train.py --plan auto takes.

choose     a run and hardware -> the search's finds, or one error with the nearest that would fit
suppose    what would be fastest if memory or links were otherwise
planned    the configuration that training starts with, the same on every rank
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from parallel import Hardware, load_hardware, node_of
from usp.config import TrainConfig, flag
from usp.cost.job import Job, job_of
from usp.hf.models import load_model_config, model_facts
from usp.model.facts import ModelFacts
from usp.run.failures import ConfigurationError, listed
from usp.run.launch import Launch, choose_device

from .advice import degrees, savings_of, seconds
from .layouts import Question, layouts, suppositions
from .predictor import predictor_for
from .search import Candidate, Found, Predictor, search

GIB = 2**30
USABLE = 0.9  # of a device's memory: the rest is the allocator's gaps, the context and the communication library's
CHOSEN = (
    *("sp_ulysses", "sp_ring", "dp_shard", "dp_replicate", "tp", "tp_sequence_parallel", "pp", "pp_schedule", "ep"),
    *("zero", "batch_size", "micro_batches", "ac", "ac_offload", "mlp_tile"),
)


@dataclass(frozen=True)
class Choice:
    """What was asked, and what the search found: at least one configuration that fits.

    Attributes:
        job: of any layout, for its model.
        memory_bytes: of a device, as far as it can be used.
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
    """The fastest ways to train `asked` on `world_size` devices, in steps of asked.global_batch_size sequences.

    Raises:
        ConfigurationError: where the question makes no sense, gives what is chosen here, or has no answer that fits;
            then with the nearest that would.
    """
    problems = _refused(asked, world_size)
    if problems:
        raise ConfigurationError(listed(problems))
    sequences = asked.global_batch_size
    model_config = load_model_config(asked.model)
    facts = model_facts(asked.model, model_config)
    base = replace(asked, plan="none", hardware="auto", global_batch_size=0)
    question = Question(base, sequences, world_size, hardware.tiers[0].devices or world_size)
    first = next(layouts(question, facts), None)
    if first is None:
        raise ConfigurationError(
            f"{world_size} devices cannot share {sequences} sequences of {base.seq_len} tokens of {base.model}: the "
            f"devices beside tp, pp, ring and ulysses must divide --global-batch-size, and --seq-len be a multiple of "
            f"2 x ring x ulysses. Use powers of two for all three"
        )
    job = job_of(first, model_config, world_size)
    memory, predictor = USABLE * hardware.memory_bytes, predictor_for(job, hardware)
    choice = Choice(question, facts, job, hardware, predictor, memory, search(question, facts, predictor, memory))
    if not choice.found.best:
        raise ConfigurationError(_nothing_fits(choice))
    return choice


def _refused(asked: TrainConfig, world_size: int) -> list[str]:
    problems = []
    if world_size < 1:
        problems.append(f"--world-size = {world_size} must be at least 1")
    if asked.global_batch_size < 1:
        problems.append(
            f"--global-batch-size = {asked.global_batch_size} must be at least 1: which layout is fastest depends on "
            f"how many sequences a step has over all devices"
        )
    default = TrainConfig()
    given = [name for name in CHOSEN if getattr(asked, name) != getattr(default, name)]
    if given:
        values = ", ".join(f"{flag(name)} = {getattr(asked, name)}" for name in given)
        problems.append(f"{values}: a plan chooses that, so leave it out (of the file of --config too)")
    return problems


def _nothing_fits(choice: Choice) -> str:
    tightest, base, devices = choice.found.tightest, choice.question.base, choice.question.world_size
    assert tightest is not None
    return (
        f"{base.model} at {base.seq_len} tokens fits {devices} x {choice.hardware.name} in none of "
        f"{choice.found.layouts} layouts. The nearest is {degrees(tightest.config)} ({savings_of(tightest.config)}) "
        f"with {tightest.peak_bytes / GIB:.1f} GiB a device, of which {choice.memory_bytes / GIB:.1f} can be used: "
        f"give about {devices * tightest.peak_bytes / choice.memory_bytes:.0f} devices, or fewer tokens"
    )


def suppose(choice: Choice) -> list[tuple[str, Candidate | None]]:
    """In words what might be otherwise, and what would be fastest then; None where nothing would fit."""
    found = []
    for words, other, times in suppositions(choice.hardware):
        predictor = choice.predictor if other is choice.hardware else predictor_for(choice.job, other)
        best = search(choice.question, choice.facts, predictor, times * choice.memory_bytes, keep=1).best
        found.append((words, best[0] if best else None))
    return found


def planned(config: TrainConfig, launch: Launch) -> TrainConfig:
    """What --plan auto makes of `config`, told on rank 0; anything else is as it was.

    Raises:
        ConfigurationError: as `choose`, and for hardware that is not known, or does not say what --dtype needs.
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
            f"plan: {degrees(best.config)} ({savings_of(best.config)}), the fastest of {choice.found.layouts} layouts: "
            f"{seconds(best.time.total)} a step and {best.peak_bytes / GIB:.1f} GiB expected on {hardware.name}"
        )
    return replace(best.config, device=config.device)


def _hardware(name: str, device: torch.device, launch: Launch) -> Hardware:
    """What --hardware names, or what this GPU is known as, with the memory and the hosts that are here."""
    if name != "auto":
        return load_hardware(name)
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    node = node_of(here)
    if node is None:
        raise ValueError(
            f"--hardware auto: nothing is known of {here}. Measure it: torchrun ... -m usp calibrate --out "
            f"hardware.json, then --hardware hardware.json"
        )
    known = load_hardware(node)
    inner, *outer = known.tiers
    hosts = (replace(inner, devices=launch.local_world_size), *outer) if inner.devices else known.tiers
    return replace(known, memory_bytes=torch.cuda.get_device_properties(device).total_memory, tiers=tuple(hosts))
