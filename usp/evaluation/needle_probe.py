"""Running a needle probe on this rank: generating responses under sequence, tensor and pipeline parallelism.

The ranks that these degrees leave over divide the prompts of each length.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist

from parallel import ParallelDims, ParallelMesh
from usp.data.files import find_files
from usp.data.tokenizer import Tokenizer
from usp.hf.models import (
    LIMIT,
    ModelConfig,
    empty_model,
    end_of_sequence_ids,
    load_model_config,
    model_facts,
    with_context,
)
from usp.hf.tensor_parallel import tp_problems
from usp.hf.tokenizers import load_tokenizer, tokenizer_of
from usp.model.rules import pp_violations
from usp.presets import PRESETS
from usp.rlhf.data.samples import Samples
from usp.rlhf.generation.generate import Generator
from usp.rlhf.generation.support import generation_problems
from usp.rlhf.graph.calls import Generate, Inference
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.roles.role_spec import RoleSpec
from usp.run.failures import ConfigurationError, Problems
from usp.run.launch import Launch, choose_device, computation_dtype
from usp.run.metrics import short
from usp.sp.kernel_choice import PACKED, choose_kernel
from usp.train.validate import with_flags

from .haystack import Cell, Haystack, Prompt, cells_of, is_right, texts_of
from .heat_map import Found, NeedleResult
from .needle_flags import NeedleConfig, needle_violations

CACHED = 2**17  # tokens of prompts that are decoded together, for each sequence-parallel rank
SLACK = 16  # tokens of a response besides the answer
STEPS = (16, 8, 4, 2, 1)  # the model's limit is divided by these for the lengths that are the default


@dataclass(frozen=True, eq=False)
class PreparedProbe:
    """A probe that has been checked: model and layout, the cells, and what makes their prompts."""

    config: NeedleConfig
    spec: RoleSpec
    layout: CallLayout
    device: torch.device
    tokenizer: Tokenizer
    haystack: Haystack
    cells: tuple[Cell, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({cell.length for cell in self.cells}))


def prepare_probe(config: NeedleConfig, launch: Launch) -> PreparedProbe:
    """Check `config` and load what it names, with the same result or the same error on every rank.

    Raises:
        ConfigurationError: with every violation found, before any rank communicates.
    """
    problems = Problems(needle_violations(config))
    problems.check()
    device = problems.attempt(lambda: choose_device(config.device, launch))
    model = problems.attempt(lambda: load_model_config(config.model))
    tokenizer = problems.attempt(lambda: load_tokenizer(tokenizer_of(config.tokenizer, config.model)))
    files = problems.attempt(lambda: find_files(config.data, config.data_field))
    dims = problems.attempt(
        lambda: ParallelDims(pp=config.pp, ring=config.sp_ring, ulysses=config.sp_ulysses, tp=config.tp).resolve(
            launch.world_size
        )
    )
    _check(problems)
    assert device and model and tokenizer and files and dims
    lengths = config.asked_lengths or _default_lengths(model)
    longer = problems.attempt(lambda: _with_lengths(config, model, lengths))
    problems += _model_violations(config, model, tokenizer, dims)
    dtype = computation_dtype(config.dtype, device)
    problems.attempt(partial(_kernel, config, model, device, dtype))
    _check(problems)
    assert longer is not None
    texts = texts_of(files, config.data_field)
    haystack = problems.attempt(lambda: Haystack(config, tokenizer, texts, lengths[-1]))
    cells = cells_of(lengths, config.asked_depths, config.samples)
    if haystack is not None:
        problems.attempt(lambda: haystack.prompt(cells[0]))  # of the shortest length
    _check(problems)
    assert haystack is not None
    spec = RoleSpec("model", config.model, longer, dtype=dtype, kernel=config.attention_kernel)
    layout = CallLayout(tuple(range(launch.world_size)), dims, sp_layout=config.sp_layout)
    return PreparedProbe(config, spec, layout, device, tokenizer, haystack, tuple(cells))


def run_probe(prepared: PreparedProbe, say: Callable[[str], None] = lambda line: None) -> NeedleResult:
    """Return the responses to all prompts, the same on every rank. Collective.

    say: takes a line at the end of every length.

    Raises:
        ConfigurationError: on every rank, if the model cannot be divided as asked.
    """
    config, layout = prepared.config, prepared.layout
    mesh = ParallelMesh.create(layout.dims, device_type=prepared.device.type)
    mesh.agree((config, prepared.cells, prepared.spec.config.to_dict()), "the needle probe")
    try:
        model = RoleModel(prepared.spec, layout, mesh)
    except ValueError as error:
        raise ConfigurationError(with_flags(str(error))) from error
    model.fill()
    found: list[Found] = []
    for length in prepared.lengths:
        begin = time.perf_counter()
        own = [cell for cell in prepared.cells if cell.length == length]
        own = own[mesh.rank("batch") :: mesh.size("batch")]
        everywhere: list[list[Found]] = [[] for _ in layout.ranks]
        dist.all_gather_object(everywhere, _respond(prepared, model, mesh, own))
        here = [one for leader in layout.leaders for one in everywhere[leader]]
        found += sorted(here, key=lambda one: (one.depth, one.sample))
        score = sum(one.right for one in here) / len(here)
        say(f"{short(length)} tokens: {score:.0%} found, {time.perf_counter() - begin:.1f} s")
    return NeedleResult(asdict(config), tuple(found))


def _respond(prepared: PreparedProbe, model: RoleModel, mesh: ParallelMesh, cells: Sequence[Cell]) -> list[Found]:
    """Return the responses to prompts of one length, on all ranks of this data-parallel group; maybe to none."""
    prompts = [prepared.haystack.prompt(cell) for cell in cells]
    texts = _generate(prepared, model, mesh, prompts) if prompts else []
    logprobs: Sequence[float | None] = [None] * len(prompts)
    if prepared.config.logprobs:
        logprobs = _answer_logprobs(model, prompts) or logprobs
    return [
        Found(**asdict(cell), answer=prompt.answer, response=text, right=is_right(text, prompt.answer), logprob=logprob)
        for cell, prompt, text, logprob in zip(cells, prompts, texts, logprobs, strict=True)
    ]


def _generate(prepared: PreparedProbe, model: RoleModel, mesh: ParallelMesh, prompts: Sequence[Prompt]) -> list[str]:
    stage, config = model.stage, prepared.config
    longest = max(len(prompt.ids) for prompt in prompts)
    slots = max(1, CACHED * mesh.size("sp") // longest)
    generator = Generator(stage.model, mesh, first=stage.first, last=stage.last, slots=slots, transform=stage.transform)
    answer = max(len(prompt.answer_ids) for prompt in prompts)
    stop_ids = end_of_sequence_ids(config.model)
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
    found = model.inference(samples, Inference("logprobs"), "logprobs")
    return [values.double().sum().item() for values in found["logprobs"]] if found.ids else []


def _default_lengths(model: ModelConfig) -> tuple[int, ...]:
    limit = getattr(model, LIMIT, None)
    return tuple(limit // part for part in STEPS) if limit else (1024, 2048, 4096, 8192)


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
        raise ValueError(str(error).replace("seq_len=", "--lengths ") + hint) from error


def _model_violations(config: NeedleConfig, model: ModelConfig, tokenizer: Tokenizer, dims: ParallelDims) -> list[str]:
    facts = model_facts(config.model, model)
    found = pp_violations(facts, dims.pp)
    if dims.tp > 1:
        found += tp_problems(empty_model(model), dims.tp, sequence_parallel=False, trained=False)
    if problem := generation_problems(model):
        found.append(f"{config.model} has model_type={model.model_type!r}, which cannot generate: {problem}")
    if tokenizer.vocab_size > model.vocab_size:
        found.append(
            f"--tokenizer = {tokenizer.name} has ids up to {tokenizer.vocab_size - 1}, but the vocabulary of "
            f"{config.model} has {model.vocab_size}: use the model's own tokenizer"
        )
    return found


def _kernel(config: NeedleConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    facts = model_facts(config.model, model)
    choose_kernel(config.attention_kernel, PACKED, device, dtype, facts.head_dim, facts.value_dim)


def _check(problems: Problems) -> None:
    problems[:] = map(with_flags, problems)
    problems.check()
