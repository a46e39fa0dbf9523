"""A needle probe: generate the responses under sequence, tensor and pipeline parallelism, and show what was found.

The ranks that these degrees leave over divide the prompts of each length. Results are a table, JSON, and a heat map of
length by depth.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, product, starmap
from typing import Any

import torch

from usp.data.documents import read_pieces
from usp.data.sources import find_files
from usp.data.tokenizer import Tokenizer
from usp.fields import token_count
from usp.hf.models import (
    LIMIT,
    ModelConfig,
    empty_model,
    load_model_config,
    model_facts,
    stop_tokens,
    with_context,
    without_dropout,
)
from usp.hf.tensor_parallel import tp_problems
from usp.hf.tokenizers import load_tokenizer, tokenizer_of
from usp.model.facts import ModelFacts, pp_violations
from usp.parallel import ParallelDims, ParallelMesh, Violation, violation_of
from usp.parallel.groups import gather_objects
from usp.presets import PRESETS
from usp.rlhf.generation.generate import Generator, generation_problems
from usp.rlhf.graph import Generate, Inference
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.samples import Samples
from usp.run.failures import ConfigurationError, Problems
from usp.run.launch import Launch, choose_device, computation_dtype
from usp.run.metrics import short
from usp.run.tables import Grid
from usp.sp.kernel_choice import PACKED, choose_kernel
from usp.train.validate import parallel_dims, with_flags

from .prompts import Cell, Haystack, NeedleConfig, Prompt, is_right, needle_violations

# Colours of none and all found: they differ in lightness and from yellow alike for all kinds of colour vision.
COLOURS = ("#dd5f43", "#f8e7a1", "#45b094")
CACHED = 2**17  # tokens of prompts that are decoded together, for each sequence-parallel rank
SLACK = 16  # tokens of a response besides the answer
STEPS = (16, 8, 4, 2, 1)  # the model's limit is divided by these for the lengths that are the default


@dataclass(frozen=True)
class Response(Cell):
    """A model's response to the prompt of a cell. logprob: of the right answer after the prompt, the sum over its
    tokens; None if it was not asked for."""

    answer: str
    response: str
    right: bool
    logprob: float | None


@dataclass(frozen=True)
class NeedleResult:
    """All responses of a probe. asked: the flags that it was made with."""

    asked: dict[str, Any]
    responses: tuple[Response, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({response.length for response in self.responses})

    @property
    def depths(self) -> list[float]:
        return sorted({response.depth for response in self.responses})

    def score(self, length: int | None = None, depth: float | None = None) -> float:
        """Return the part of the responses that is right, of a length, a depth, both, or all."""
        right = [r.right for r in self.responses if length in (None, r.length) and depth in (None, r.depth)]
        return sum(right) / len(right)

    def to_json(self) -> dict[str, Any]:
        """Return the flags, and for each length and depth the score, the mean log-probability and the responses."""
        cells = []
        names = ("sample", "answer", "response", "right", "logprob")
        for length, depth in product(self.lengths, self.depths):
            here = [response for response in self.responses if (response.length, response.depth) == (length, depth)]
            known = [response.logprob for response in here if response.logprob is not None]
            cells.append(
                {
                    "length": length,
                    "depth": depth,
                    "score": self.score(length, depth),
                    "answer_logprob": sum(known) / len(known) if known else None,
                    "responses": [{name: getattr(response, name) for name in names} for response in here],
                }
            )
        return {"asked": self.asked, "score": self.score(), "cells": cells}

    def table(self) -> Grid:
        """Return scores in percent: a line for each depth, a column for each length."""
        rows = [
            (f"{depth:g}%", *(f"{100 * self.score(length, depth):.0f}" for length in self.lengths))
            for depth in self.depths
        ]
        rows.append(("all", *(f"{100 * self.score(length):.0f}" for length in self.lengths)))
        return Grid("", ("depth", *map(short, self.lengths)), tuple(rows))


def plot_heat_map(result: NeedleResult, title: str, mark: int | None = None) -> Any:
    """Return a matplotlib figure: lengths from left to right, depths from top to bottom, percent in each cell; a dashed
    line stands behind the last length up to `mark`."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    lengths, depths = result.lengths, result.depths
    figure = Figure(figsize=(2.4 + 0.75 * len(lengths), 1.9 + 0.42 * len(depths)), layout="constrained")
    axes = figure.subplots()
    scores = [[100 * result.score(length, depth) for length in lengths] for depth in depths]
    colours = LinearSegmentedColormap.from_list("found", COLOURS)
    image = axes.imshow(scores, cmap=colours, vmin=0, vmax=100, aspect="auto")
    for row, line in enumerate(scores):
        for column, score in enumerate(line):
            axes.text(column, row, f"{score:.0f}", ha="center", va="center", fontsize="small")
    axes.set_xticks(range(len(lengths)), map(short, lengths))
    axes.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths])
    axes.set_xticks([column + 0.5 for column in range(len(lengths) - 1)], minor=True)
    axes.set_yticks([row + 0.5 for row in range(len(depths) - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("length of the prompt in tokens")
    axes.set_ylabel("depth of the needle")
    axes.set_title(title, fontsize="medium", pad=18)
    if mark is not None and lengths[0] <= mark < lengths[-1]:
        behind = sum(length <= mark for length in lengths) - 0.5
        axes.axvline(behind, color="black", linestyle="--", linewidth=1.5)
        aligned: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": "small"}
        axes.annotate(f"up to {short(mark)} ", (behind, 1), xycoords=("data", "axes fraction"), **aligned)
    figure.colorbar(image, ax=axes, label="found, %", pad=0.02)
    return figure


@dataclass(frozen=True, eq=False)
class PreparedProbe:
    """A probe that has been checked: model and layout, the cells by length, and what makes their prompts."""

    config: NeedleConfig
    spec: RoleSpec
    layout: CallLayout
    device: torch.device
    tokenizer: Tokenizer
    haystack: Haystack
    cells: tuple[Cell, ...]


def prepare_probe(config: NeedleConfig, launch: Launch) -> PreparedProbe:
    """Check `config` and load what it names, with the same result or the same error on every rank. Raises
    ConfigurationError with every violation found, before any rank communicates."""
    problems = Problems()
    problems += needle_violations(config)
    problems.check()
    device = problems.attempt(lambda: choose_device(config.device, launch))
    model = problems.attempt(lambda: without_dropout(load_model_config(config.model)))
    tokenizer = problems.attempt(lambda: load_tokenizer(tokenizer_of(config.tokenizer, config.model)))
    files = problems.attempt(lambda: find_files(config.data, config.data_field))
    dims = problems.attempt(lambda: parallel_dims(config).resolve(launch.world_size))
    _check(problems)
    assert device and model and tokenizer and files and dims
    limit = getattr(model, LIMIT, None)
    defaults = tuple(limit // step for step in STEPS) if limit else (1024, 2048, 4096, 8192)
    lengths = sorted({token_count(text) for text in config.lengths.split(",")}) if config.lengths else defaults
    longer = problems.attempt(lambda: _with_lengths(config, model, lengths))
    facts = model_facts(config.model, model)
    problems += _model_violations(config, model, facts, tokenizer, dims)
    dtype = computation_dtype(config.dtype, device)
    head_dims = facts.head_dim, facts.value_dim
    problems.attempt(partial(choose_kernel, config.attention_kernel, PACKED, device, dtype, *head_dims))
    _check(problems)
    assert longer is not None
    pieces = (piece for file in files.files for piece, _ in read_pieces(file, config.data_field))
    texts = (piece for piece in pieces if isinstance(piece, str))  # neither chats nor completions
    haystack = problems.attempt(lambda: Haystack(config, tokenizer, texts, lengths[-1]))
    cells = tuple(starmap(Cell, product(lengths, config.asked_depths, range(config.samples))))
    if haystack is not None:
        problems.attempt(lambda: haystack.prompt(cells[0]))  # of the shortest length
    _check(problems)
    assert haystack is not None
    spec = RoleSpec("model", config.model, longer, dtype=dtype, kernel=config.attention_kernel)
    layout = CallLayout(tuple(range(launch.world_size)), dims, sp_layout=config.sp_layout)
    return PreparedProbe(config, spec, layout, device, tokenizer, haystack, cells)


def run_probe(prepared: PreparedProbe, say: Callable[[str], None] = lambda line: None) -> NeedleResult:
    """Return the responses to all prompts, the same on every rank; `say` takes a line at the end of every length.
    Collective. Raises ConfigurationError on every rank, if the model cannot be divided as asked."""
    config, layout = prepared.config, prepared.layout
    mesh = ParallelMesh.create(layout.dims, device_type=prepared.device.type)
    mesh.agree((config, prepared.cells, prepared.spec.config.to_dict()), "the needle probe")
    try:
        model = RoleModel(prepared.spec, layout, mesh)
    except ValueError as error:
        raise ConfigurationError(with_flags(violation_of(error))) from error
    model.fill()
    responses: list[Response] = []
    for length, group in groupby(prepared.cells, lambda cell: cell.length):
        begin = time.perf_counter()
        cells = list(group)
        everywhere = gather_objects(_respond(prepared, model, mesh, cells[mesh.rank("batch") :: mesh.size("batch")]))
        of_length = [response for leader in layout.leaders for response in everywhere[leader]]
        responses += sorted(of_length, key=lambda response: (response.depth, response.sample))
        score = sum(response.right for response in of_length) / len(of_length)
        say(f"{short(length)} tokens: {score:.0%} found, {time.perf_counter() - begin:.1f} s")
    return NeedleResult(asdict(config), tuple(responses))


def _respond(prepared: PreparedProbe, model: RoleModel, mesh: ParallelMesh, cells: Sequence[Cell]) -> list[Response]:
    """Return the responses to prompts of one length, on all ranks of this data-parallel group; maybe to none."""
    prompts = [prepared.haystack.prompt(cell) for cell in cells]
    texts = _generate(prepared, model, mesh, prompts) if prompts else []
    logprobs: Sequence[float | None] = [None] * len(prompts)
    if prepared.config.logprobs:
        logprobs = _answer_logprobs(model, prompts) or logprobs
    return [
        Response(**asdict(cell), answer=p.answer, response=text, right=is_right(text, p.answer), logprob=logprob)
        for cell, p, text, logprob in zip(cells, prompts, texts, logprobs, strict=True)
    ]


def _generate(prepared: PreparedProbe, model: RoleModel, mesh: ParallelMesh, prompts: Sequence[Prompt]) -> list[str]:
    stage, config = model.stage, prepared.config
    longest = max(len(prompt.ids) for prompt in prompts)
    slots = max(1, CACHED * mesh.size("sp") // longest)
    generator = Generator.of(stage, mesh, slots=slots)
    answer = max(len(prompt.answer_ids) for prompt in prompts)
    stop_ids = stop_tokens(config.model, prepared.tokenizer.eos)
    work = Generate(max_new_tokens=config.max_new_tokens or answer + SLACK, temperature=0.0, stop_ids=stop_ids)
    ids = [torch.from_numpy(prompt.ids) for prompt in prompts]
    responses = generator.generate(ids, work, [0] * len(ids))
    return [prepared.tokenizer.decode(response.tokens.tolist()) for response in responses]


def _answer_logprobs(model: RoleModel, prompts: Sequence[Prompt]) -> list[float]:
    """Return the log-probability of each answer after its prompt; nothing on ranks that do not lead."""
    tokens = [torch.from_numpy(prompt.ids).new_tensor([*prompt.ids, *prompt.answer_ids]) for prompt in prompts]
    masks = [torch.zeros(len(ids)) for ids in tokens]
    for mask, prompt in zip(masks, prompts, strict=True):
        mask[len(prompt.ids) - 1 : -1] = 1
    samples = Samples(tuple(range(len(prompts))), {"tokens": tokens, "mask": masks})
    logprobs = model.inference(samples, Inference("logprobs"), "logprobs")
    return [values.double().sum().item() for values in logprobs["logprobs"]] if logprobs.ids else []


def _with_lengths(config: NeedleConfig, model: ModelConfig, lengths: Sequence[int]) -> ModelConfig:
    longest, limit = lengths[-1], getattr(model, LIMIT, None)
    if config.beyond_limit:
        if limit is None or longest <= limit or not getattr(model, "rope_parameters", None):
            raise ValueError(
                f"--beyond-limit has no effect: it needs rotary positions and a limit below the longest of --lengths, "
                f"{longest}, and the model has {LIMIT}={limit}; remove it"
            )
        model = copy.deepcopy(model)
        setattr(model, LIMIT, longest)
        return model
    try:
        return with_context(model, longest, config.rope_scaling, pretrained=config.model not in PRESETS)
    except ValueError as error:
        hint = "" if config.rope_scaling != "none" else "; --beyond-limit takes them as they are"
        raise ValueError(violation_of(error).renamed(seq_len="lengths") + hint) from error


def _model_violations(
    config: NeedleConfig, model: ModelConfig, facts: ModelFacts, tokenizer: Tokenizer, dims: ParallelDims
) -> list[Violation | str]:
    violations: list[Violation | str] = [*pp_violations(facts, dims.pp)]
    if dims.tp > 1:
        violations += tp_problems(empty_model(model), dims.tp, sequence_parallel=False, trained=False)
    if problem := generation_problems(model):
        violations.append(f"{config.model} has model_type={model.model_type!r}, which cannot generate: {problem}")
    if tokenizer.vocab_size > model.vocab_size:
        violations.append(
            f"--tokenizer = {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the vocabulary of "
            f"{config.model} has {model.vocab_size}: use the model's own tokenizer"
        )
    return violations


def _check(problems: Problems) -> None:
    problems[:] = map(with_flags, problems)
    problems.check()
