"""The configuration for a run, what bounds it, and what others gain and cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from rich.console import Group

from usp.config import CHOSEN, TrainConfig
from usp.fields import flag
from usp.hf.models import empty_model
from usp.model.facts import ModelFacts
from usp.parallel import Hardware, ParallelDims
from usp.predict.devices import Memory, hardware_here
from usp.predict.job import ONE_DOCUMENT, Data, Job, shared
from usp.predict.memory import host_bytes, peak_moment
from usp.predict.seconds import least_seconds, step_seconds
from usp.run.failures import ConfigurationError, listed
from usp.run.launch import Launch, choose_device
from usp.run.metrics import seconds, size
from usp.run.output import working
from usp.run.tables import GIB, Grid
from usp.train.resolve import job_of, resolve

from .job_cost import Terms, with_jobs
from .question import Tried, silent
from .search import CLOSE, DEGREES, Candidate, Predictor, Question, Search, SearchResult, changed, layouts
from .step_report import FIGURES, StepReport, figures, step_report

_degrees = attrgetter(*DEGREES, "sp_order")
_MORE_DEVICES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # times those that are too few


@dataclass(frozen=True)
class Choice:
    """A search and its result, with at least one configuration that fits."""

    search: Search
    result: SearchResult
    job: Job  # of an arbitrary layout, for its model
    proof: StepReport | None = None  # the dry run of the best, which has its memory, where formulas are approximate

    @property
    def best(self) -> Candidate:
        """The simplest configuration that is about as fast as the fastest."""
        assert self.result.preferred is not None
        return self.result.preferred

    def step(self, candidate: Candidate) -> StepReport:
        """Return the step of one of the configurations."""
        dims = ParallelDims(*_degrees(candidate.config))
        return StepReport(replace(self.job, config=candidate.config, dims=dims), self.search.question.hardware)

    @property
    def shown(self) -> list[Candidate]:
        """The best, then the fastest of each family."""
        return [self.best, *(each for each in self.result.best if each.config != self.best.config)]


def choose(
    asked: TrainConfig,
    world_size: int,
    hardware: Hardware,
    report: Tried = silent,
    data: Callable[[ModelFacts], Data] = lambda facts: ONE_DOCUMENT,
) -> Choice:
    """Search the best configurations of `asked` on `world_size` devices with asked.global_batch_size per step.
    `report` is as in `Search.run`, `data` what to assume of the data. Raise ConfigurationError for invalid values,
    for values that the planner chooses, and, naming the one that needs least memory, if no configuration fits."""
    from usp.hf.tensor_parallel import tp_problems  # transformers' models take seconds to import

    base = unplanned(asked)
    # On one rank nothing depends on the layout, so whatever is wrong there is wrong with what was asked.
    resolved = resolve(replace(base, **{name: getattr(TrainConfig(), name) for name in CHOSEN}), 1, weights=False)
    if problems := [*_refused(asked, world_size), *resolved.problems]:
        raise ConfigurationError(listed(problems))
    _, model_config, facts, _ = resolved.valid()
    divided = not facts.formula_violation or not tp_problems(empty_model(model_config), 2, True)
    sizes: Any = {"world_size": world_size, "sequences": asked.global_batch_size}
    question = Question(hardware=hardware, base=base, facts=facts, divided=divided, **sizes)
    every = tuple(layouts(question))
    if base.fp8 == "tensor":  # any ZeRO stage and number of replicas makes fewer shards
        shape, shards = resolved.shape, attrgetter("dp_shard", "sp_ring", "sp_ulysses")
        every = tuple(each for each in every if not shape.uneven_float8(each.tp, math.prod(shards(each))))
    if not every:
        raise ConfigurationError(
            f"no layout of {world_size} devices fits --global-batch-size {question.sequences}: use a power of two"
        )
    job = job_of(every[0], model_config, world_size, resolved.shape, data(facts))
    search = Search(question, predictor_for(job, hardware), every)
    result = search.run(report=report)
    if not result.best:
        raise ConfigurationError(_nothing_fits(search, job))
    choice = Choice(search, result, job)
    return choice if not job.approximate or dist.is_initialized() else _proved(choice)  # inside a run, trials prove it


def _proved(choice: Choice) -> Choice:
    """Return the choice with the best configuration that fits by its dry run."""
    data, question = replace(choice.job.data, router_imbalance=1.0), choice.search.question
    for number, best in enumerate(choice.shown):
        proof = step_report(best.config, question.world_size, question.hardware, lambda facts: data)
        if proof.fits:
            proved = replace(best, memory=Memory(proof.memory.peak.total, proof.on_host))
            result = replace(choice.result, preferred=proved, best=tuple(choice.shown[number + 1 :]))
            return replace(choice, result=result, proof=proof)
    raise ConfigurationError(
        f"{question.base.model}: by their dry runs none of the {len(choice.shown)} fastest configurations fits "
        f"{question.world_size} x {question.hardware.name}: use more devices or fewer tokens"
    )


def unplanned(asked: TrainConfig) -> TrainConfig:
    """Return what is asked without the options of --plan."""
    names = ("plan", "tune_budget", "hardware", "global_batch_size")
    return replace(asked, **{name: getattr(TrainConfig(), name) for name in names})


def predictor_for(job: Job, hardware: Hardware) -> Predictor:
    """Return a predictor for configurations that differ from `job` in what the planner chooses."""
    bare, dims = replace(job), cache(ParallelDims)  # a job that has cached nothing
    kept = shared(attrgetter(*CHOSEN))  # which are hashed faster than all fields
    like = kept(lambda config: changed(bare, config=config, dims=dims(*_degrees(config))))

    def on_device(config: TrainConfig) -> int:
        made = like(config)  # its ends have most activations in flight, and the vocabulary loss
        return max(peak_moment(made, rank).total for rank in {0, made.ranks("pp", 0)[-1]})

    def on_host(config: TrainConfig) -> int:
        offloads = config.ac_offload or config.optim_offload
        return host_bytes(like(config), hardware.host_devices) if offloads else 0

    return Predictor(
        kept(lambda config: step_seconds(like(config), hardware)),
        kept(lambda config: least_seconds(like(config), hardware)),
        kept(on_device),
        kept(on_host),
    )


def _refused(asked: TrainConfig, world_size: int) -> Iterator[str]:
    if world_size < 1:
        yield f"--world-size = {world_size} must be at least 1"
    if asked.global_batch_size < 1:
        words = "the fastest layout depends on the number of sequences per step over all devices"
        yield f"--global-batch-size = {asked.global_batch_size} must be at least 1: {words}"
    if asked.curriculum:
        words = "plan each by itself, and write its degrees into the curriculum"
        yield f"--curriculum: the planner chooses one layout, and its stages have different steps: {words}"
    values = {name: getattr(asked, name) for name in CHOSEN}
    if given := [f"{flag(name)} = {value}" for name, value in values.items() if value != getattr(TrainConfig(), name)]:
        yield f"{', '.join(given)}: chosen by the planner, remove it from the flags and from the --config file"


def _nothing_fits(search: Search, job: Job) -> str:
    question, smallest, enough = search.question, search.tightest(), ""
    assert smallest is not None
    with suppress(ValueError):  # beyond what the hardware connects
        for factor in _MORE_DEVICES:
            larger = replace(question, world_size=factor * question.world_size)
            if Search(larger, search.predictor, tuple(layouts(larger))).fits():
                enough = f"{larger.world_size} devices, or "
                break
    return (
        f"{question.base.model} at {question.base.seq_len} tokens does not fit {question.world_size} x "
        f"{question.hardware.name} in any of {len(search.every)} layouts. The smallest is {candidate_text(smallest)} "
        f"with {smallest.memory.device / GIB:.1f} GiB per device, and "
        f"{question.usable.device / GIB:.1f} GiB are usable: use {enough}fewer tokens"
    )


def plan_here(config: TrainConfig, launch: Launch) -> Choice:
    """Return the choice of --plan auto, and print it on rank 0. Raise ValueError as `choose`, and for unknown hardware,
    or hardware without a peak for --dtype."""
    device = choose_device(config.device, launch)
    hardware = hardware_here(config.hardware, device, launch)
    if launch.rank == 0:
        print(f"plan: searching the fastest layout of {launch.world_size} ranks", flush=True)
    with working("planning", shown=launch.rank == 0) as say:
        choice = choose(replace(config, device=device.type), launch.world_size, hardware, partial(tell, say))
    best = choice.best
    if launch.rank == 0:
        on_host = f"({best.memory.host / GIB:.1f} GiB of a host's memory) " if best.memory.host else ""
        print(
            f"plan: {candidate_text(best)}, of {choice.result.layouts} layouts the simplest within {CLOSE:.0%} of the "
            f"fastest, {seconds(best.time.total)} per step and {best.memory.device / GIB:.1f} GiB {on_host}predicted "
            f"on {hardware.name} with attention by {', '.join(best.time.kernels)}"
        )
    return choice


def tell(say: Callable[[str], None], tried: int, layouts: int) -> None:
    """Say how far a search is, at every hundredth layout."""
    if tried % 100 == 0:
        say(f"planning: {tried} of {layouts} layouts tried; most are ruled out by their bounds")


def compared(candidate: Candidate, first: Candidate) -> str:
    """Return how much longer a candidate takes than the first, and the two components that differ most."""
    its, total = first.time.parts, first.time.total
    differences = ((name, took - its.get(name, 0.0)) for name, took in candidate.time.parts.items())
    largest = sorted(differences, key=lambda item: -abs(item[1]))[:2]
    large = ((name, "-" if more < 0 else "+", abs(more)) for name, more in largest if abs(more) > 0.001 * total)
    words = ", ".join(f"{name} {sign}{seconds(more)}" for name, sign, more in large)
    return f"{candidate.time.total / total - 1:+.1%}: {words}" if words else "equally fast"


def bound(candidate: Candidate, memory_bytes: float) -> str:
    """Return the component that takes longest, and memory if saving it costs time."""
    largest = candidate.time.bound
    words = f"{largest} ({candidate.time.parts[largest] / candidate.time.total:.0%})"
    if candidate.config.ac != "none" and candidate.memory.device > 0.5 * memory_bytes:
        words += ", and by memory, which requires recomputation"
    return words


def render_plan(choice: Choice, terms: Terms) -> Group:
    """Return the report for rich to print, with the job by each plan if `terms` ask for it."""
    result, memory, first = choice.result, choice.search.question.usable, choice.best
    host = f" and {memory.host / GIB:.0f} GiB of a host" if math.isfinite(memory.host) else ""
    lines = [
        f"{result.layouts} layouts, {result.tried} checked against {memory.device / GIB:.0f} GiB of a device{host}",
        f"1 is bound by {bound(first, memory.device)}",
    ]
    if proof := choice.proof:
        sent = max(sum(sent.nbytes for sent in run.sent) for run in proof.runs)
        lines.append(
            f"1 by a dry run, because {choice.job.approximate}: {size(proof.memory.peak.total)} at the peak, "
            f"{size(sent)} sent by a rank, {seconds(proof.time.total)} per step"
        )
    numbered = [(str(number), each) for number, each in enumerate(choice.shown, start=1)]
    lines += [f"{number} compared with 1: {compared(candidate, first)}" for number, candidate in numbered[1:]]
    kernels = ", ".join(sorted({kernel for candidate in choice.shown for kernel in candidate.time.kernels}))
    title = (
        f"The simplest plan within {CLOSE:.0%} of the fastest (no offload, fewest axes, least recomputation), then the "
        f"fastest of each set of axes; attention by {kernels}; +- is the mean error of published steps of that kind"
    )
    columns = ("", *FIGURES, "GiB", "GiB of a host", "plan")
    grid = Grid(title, columns, tuple(_row(choice, *each) for each in numbered))
    jobs = [(number, choice.step(each).job_cost(terms)) for number, each in numbered] if terms.asked else []
    return with_jobs(terms, jobs, grid, lines)


def _row(choice: Choice, name: str, candidate: Candidate) -> tuple[str, ...]:
    memory = (f"{nbytes / GIB:.1f}" for nbytes in candidate.memory)
    return name, *figures(choice.step(candidate)), *memory, candidate_text(candidate, "{}; {}")


def compare_choices(choices: Mapping[str, Choice | str], terms: Terms) -> Group:
    """Return the report of the best plans on several kinds or numbers of devices, by their names, with the job of each;
    where nothing fits there is an error's text in place of a choice."""
    found = {name: choice for name, choice in choices.items() if isinstance(choice, Choice)}
    rows = (_row(choice, name, choice.best) for name, choice in found.items())
    grid = Grid("The plan of each", ("devices", *FIGURES, "GiB", "plan"), tuple((*row[:5], row[6]) for row in rows))
    jobs = [(name, choice.step(choice.best).job_cost(terms)) for name, choice in found.items()]
    lines = [f"{name}: {choice}" for name, choice in choices.items() if isinstance(choice, str)]
    return with_jobs(terms, jobs, grid, lines)


def degrees(config: TrainConfig) -> str:
    """Return the degrees above 1, outermost first."""
    values = ((name.removeprefix("sp_"), getattr(config, name)) for name in DEGREES)
    return " ".join(f"{name} {degree}" for name, degree in values if degree > 1) or "one rank"


def memory_options(config: TrainConfig) -> str:
    """Return the options that determine the memory, including those of the pipeline."""
    words = {
        f"ZeRO-{config.zero}": True,
        f"ac {config.ac}" + (" with offload" if config.ac_offload else ""): config.ac != "none",
        "optimizer offload": config.optim_offload,
        f"MLP tiles of {config.mlp_tile} tokens": config.mlp_tile,
        f"{config.micro_batches} micro-batches": config.micro_batches > 1,
        config.pp_schedule: config.pp > 1,
    }
    return ", ".join(word for word, holds in words.items() if holds)


def candidate_text(candidate: Candidate, form: str = "{} ({})") -> str:
    """Return the degrees and the memory options of a candidate."""
    return form.format(degrees(candidate.config), memory_options(candidate.config))
