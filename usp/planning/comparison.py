"""Methods side by side on given devices: the bytes that each sends, its step and memory, and whether it fits;
as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from usp.config import TrainConfig
from usp.hf.models import ModelConfig, model_facts
from usp.model.facts import ModelShape
from usp.predict.job import ONE_DOCUMENT, Data, Job
from usp.predict.memory import largest_footprint
from usp.predict.traffic import Sent, block_traffic, step_traffic
from usp.run.metrics import size
from usp.run.tables import AND, GIB, Grid
from usp.train.resolve import job_of

from .job_cost import Terms
from .methods import Method
from .question import Devices
from .step_report import FIGURES, StepReport, figures, memory_parts, report_json

_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")


@dataclass(frozen=True, eq=False, kw_only=True)
class Setting(Devices):
    """What all compared methods have in common."""

    base: TrainConfig  # model, sequence length and activation checkpointing
    model_config: ModelConfig
    sequences: int = 1  # of a step over all devices
    rows: int = 1  # sequences of a micro-batch on one data-parallel rank
    data: Data = ONE_DOCUMENT

    @cached_property
    def shape(self) -> ModelShape:
        from usp.hf.tensor_parallel import model_shape

        return model_shape(model_facts(self.base.model, self.model_config), self.model_config)

    def job(self, config: TrainConfig) -> Job:
        """Return the step of a configuration; raise ValueError if train.py refuses it."""
        return job_of(config, self.model_config, self.world_size, self.shape, self.data)


@dataclass(frozen=True)
class Compared:
    """A feasible method and its predicted step."""

    method: str
    step: StepReport
    rank: int  # with the highest peak memory
    sender: int  # the rank that sends most in a step
    sent: tuple[Sent, ...]
    block_parameters: tuple[Sent, ...]  # what the sender's first layer sends
    block_activations: tuple[Sent, ...]

    @property
    def degrees(self) -> str:
        return f"{self.step.job.dims} zero={self.step.job.config.zero}"

    @property
    def sent_bytes(self) -> int:
        return sum(sent.nbytes for sent in self.sent)

    @property
    def reason(self) -> str:
        """Why the method does not fit; empty if it fits."""
        step, peak, words = self.step, self.step.memory.peak.total, []
        if peak > step.limits.device:
            largest, nbytes = max(memory_parts(step.memory).items(), key=lambda item: item[1])
            usable = f"{size(step.limits.device)} are usable, most for {largest}: {size(nbytes)}"
            words.append(f"Needs {size(peak)} of a device where {usable}.")
        if step.on_host > step.limits.host:
            words.append(f"Needs {size(step.on_host)} of a host's memory where {size(step.limits.host)} are usable.")
        return " ".join(words)


def compare(methods: Iterable[Method], setting: Setting) -> tuple[list[Compared], dict[str, str]]:
    """Return the feasible methods, and why the others are not, by name."""
    feasible, problems = [], {}
    for method in methods:
        try:
            sizes = setting.world_size, setting.sequences, setting.rows
            job = setting.job(method.config(setting.base, setting.shape.facts, *sizes))
            ranks = [first + rank for first in job.ranks("pp", 0) for rank in job.ranks("ring", 0)]
            sent = {rank: step_traffic(job, rank) for rank in ranks}
            sender = max(sent, key=lambda rank: sum(each.nbytes for each in sent[rank]))
            step, (_, rank) = StepReport(job, setting.hardware), largest_footprint(job)
            feasible.append(Compared(method.name, step, rank, sender, sent[sender], *block_traffic(job, sender)))
        except ValueError as error:
            problems[method.name] = str(error)
    return feasible, problems


def judge(compared: Iterable[Compared]) -> list[Compared]:
    """Return the methods, the fastest that fits first, then those that need least memory; raise ValueError if the
    hardware has no peak for the dtype, or connects too few devices."""

    def order(step: StepReport) -> tuple[bool, float]:
        return not step.fits, step.time.total if step.fits else step.memory.peak.total

    return sorted(compared, key=lambda each: order(each.step))


def comparison_tables(compared: Sequence[Compared], problems: Mapping[str, str] | None = None) -> list[Grid]:
    """Return tables of traffic on the wire, memory, and infeasible methods."""
    infeasible = Grid("Not feasible", ("method", "reason"), tuple((problems or {}).items()))
    tables = [_communication(compared), _memory(compared)] if compared else []
    return [table for table in (*tables, infeasible) if table.rows]


def _communication(compared: Sequence[Compared]) -> Grid:
    columns = ("method", "degrees", "activations per block", "parameters per block", "whole step")
    rows = (
        (each.method, each.degrees, _sent(each.block_activations), _sent(each.block_parameters), size(each.sent_bytes))
        for each in compared
    )
    return Grid("Sent in a step by the busiest rank, on the wire", columns, tuple(rows))


def _memory(compared: Sequence[Compared]) -> Grid:
    held = [(each.method, each.step.memory) for each in compared]
    unit, name = (GIB, "GiB") if max(memory.peak.total for _, memory in held) >= GIB else (2**20, "MiB")
    sizes = attrgetter("parameters", "gradients", "optimizer", "activations", "host", "peak.total")
    rows = ((method, *(f"{n / unit:.1f}" for n in sizes(memory)), memory.peak.name) for method, memory in held)
    columns = ("method", "params", "grads", "optim", "activ", "host", "peak", "at")
    return Grid(f"Memory of the rank that needs most, {name}", columns, tuple(rows))


def _sent(sent: Sequence[Sent]) -> str:
    """Return `1.0 MiB ring send x3` for each axis and collective; the c10d operator alltoall_base_ is an all-to-all."""

    def usual(collective: str) -> str:
        letters = collective.replace("_", "")
        return next((name for name in _COLLECTIVES if letters.startswith(name.replace("-", ""))), collective)

    return AND.join(f"{size(s.nbytes)} {s.axis} {usual(s.collective)} x{s.calls}" for s in sent) or "0 B"


def verdict_table(judged: Iterable[Compared], hardware: str) -> Grid:
    """Return the methods with their step and peak memory, in the order of `judge`."""
    steps = {each.method: each.step for each in judged}
    fits = {name: "yes" if step.fits else "no" for name, step in steps.items()}
    rows = ((name, *figures(step), size(step.memory.peak.total), fits[name]) for name, step in steps.items())
    columns = ("method", *FIGURES, "memory", "fits")
    return Grid(f"A step on {hardware}, the fastest that fits first", columns, tuple(rows))


def comparison_json(
    methods: Iterable[Method], judged: Iterable[Compared], problems: Mapping[str, str], terms: Terms
) -> list[dict[str, Any]]:
    """Return everything as JSON values: seconds, bytes and fractions; in the order of `methods`."""
    lines = {each.method: _json(each, terms) for each in judged}
    lines |= {name: {"method": name, "problem": problem} for name, problem in problems.items()}
    return [lines[method.name] for method in methods]


def _json(compared: Compared, terms: Terms) -> dict[str, Any]:
    memory = compared.step.memory
    traffic = {"block_parameters": compared.block_parameters, "block_activations": compared.block_activations}
    return {
        **report_json(compared.step, terms),
        **{name: getattr(compared, name) for name in ("method", "rank", "sender", "degrees", "reason")},
        **{name: [each._asdict() for each in sent] for name, sent in (traffic | {"step": compared.sent}).items()},
        "sent": compared.sent_bytes,
        "memory": asdict(memory) | {"moment": memory.peak._asdict(), "peak": memory.peak.total},
    }
