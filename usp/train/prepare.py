"""From a configuration to all that a run needs before its ranks communicate, or to one message of all that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TypeVar

import torch

from attention import KERNEL_NAMES, AttentionSpec, select_kernel
from parallel import ParallelDims, read_extra
from usp.config import DEVICES, DTYPES, TrainConfig
from usp.data.documents import open_source
from usp.data.stream import BatchStream
from usp.data.tokenizer import Tokenizer
from usp.hf.models import ModelConfig, empty_model, load_model_config, model_facts
from usp.hf.shapes import matmul_parameters
from usp.hf.tokenizers import load_tokenizer
from usp.model.facts import ModelFacts
from usp.run.failures import ConfigurationError, listed
from usp.run.launch import Launch, choose_device, computation_dtype
from usp.run.metrics import wandb_problem
from usp.run.profiling import parse_steps

from .checkpoints import TrainingState, resume_violations
from .resume import Start, find_start
from .validate import parallel_dims, settle_batch, violations

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        config: without any `auto` or -1.
        parameters: of the whole model; matmul_parameters: those that multiply a token.
        batches: global batches, without end.
        predicted_fsdp_bytes: what this rank should send in a step to keep weights and gradients sharded, by
            `usp.cost`; None where nobody says.
        start: the run's folder, and the checkpoint that it continues from; saved: what that holds beside tensors.
    """

    config: TrainConfig
    dims: ParallelDims
    device: torch.device
    model_config: ModelConfig
    facts: ModelFacts
    parameters: int
    matmul_parameters: int
    tokenizer: Tokenizer
    batches: BatchStream
    kernel_choice: str
    start: Start
    saved: TrainingState | None
    predicted_fsdp_bytes: int | None = None


def prepare(config: TrainConfig, launch: Launch) -> Prepared:
    """Check `config` and load what it names: the same result, or the same error, on every rank.

    Raises ConfigurationError with every violation found. The first batch is read here, so that data without text,
    without its field, or with ids that the model has no embedding for is refused before any rank communicates.
    """
    config = settle_batch(config, launch.world_size)
    problems: list[str] = []
    kernel_choice = ""

    def attempt(load: Callable[[], T]) -> T | None:
        try:
            return load()
        except (ValueError, OSError) as error:
            problems.append(str(error))
            return None

    model_config = attempt(lambda: load_model_config(config.model))
    facts = None if model_config is None else model_facts(config.model, model_config)
    problems += violations(config, launch.world_size, facts)
    device = attempt(lambda: choose_device(config.device, launch)) if config.device in DEVICES else None
    if facts is not None and device is not None:
        kernel_choice = attempt(partial(_choose_kernel, config, device, facts.head_dim)) or ""
    units = attempt(lambda: open_source(config.data, config.data_field))
    tokenizer = attempt(lambda: load_tokenizer(config.tokenizer))
    if tokenizer and facts and tokenizer.vocab_size > facts.vocab_size:
        problems.append(
            f"--tokenizer = {tokenizer.name} gives ids up to {tokenizer.vocab_size - 1}, and --model {facts.name} has "
            f"a vocabulary of {facts.vocab_size}: use the model's own tokenizer, or a model with a larger vocabulary"
        )
    problems += filter(None, (wandb_problem(config.wandb_project), _engine_problem(config, device)))
    attempt(lambda: parse_steps(config.profile, config.steps))
    start = attempt(lambda: find_start(config, launch)) or Start()
    saved = attempt(partial(_read_state, start, config, model_config)) if model_config else None
    if problems or model_config is None or facts is None or device is None or units is None or tokenizer is None:
        raise ConfigurationError(listed(problems))

    dims = parallel_dims(config, config.ep).resolve(launch.world_size)
    rows = dims.dp_replicate * dims.dp_shard * config.batch_size
    batches = BatchStream(
        units, tokenizer, rows=rows, seq_len=config.seq_len, seed=config.seed, vocab_size=facts.vocab_size
    )
    if saved is not None:
        attempt(partial(batches.load_state_dict, saved.stream))
    if problems or attempt(batches.peek) is None:
        raise ConfigurationError(listed(problems))
    resolved = _resolved(config, dims, device)
    model = empty_model(model_config)
    return Prepared(
        config=resolved,
        dims=dims,
        device=device,
        model_config=model_config,
        facts=facts,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        matmul_parameters=matmul_parameters(model),
        tokenizer=tokenizer,
        batches=batches,
        kernel_choice=kernel_choice,
        start=start,
        saved=saved,
    )


def _engine_problem(config: TrainConfig, device: torch.device | None) -> str | None:
    """Why `--engine` cannot be served here; None where it can."""
    if config.engine != "deepspeed":
        return None
    if find_spec("deepspeed") is None:
        return "--engine deepspeed needs the package deepspeed: pip install 'usp-toolkit[deepspeed]'"
    dtype = computation_dtype(config.dtype, device) if device and config.dtype in DTYPES else None
    if config.zero == 0 and dtype == torch.bfloat16:
        return "--engine deepspeed --zero 0 adds gradients up in bfloat16: use --zero 1, or --dtype float32"
    return None


def _read_state(start: Start, config: TrainConfig, model_config: ModelConfig) -> TrainingState | None:
    """What the checkpoint to continue from holds beside tensors; ValueError where `config` cannot continue it."""
    if start.checkpoint is None:
        return None
    saved = TrainingState.from_extra(read_extra(start.checkpoint))
    violations = resume_violations(saved, config, model_config.to_dict(), finished_too=start.finished_too)
    if violations:
        raise ValueError(listed(violations))
    return saved


def _choose_kernel(config: TrainConfig, device: torch.device, head_dim: int) -> str:
    """The line that names the kernel for this device, dtype and head size, and what was refused before it.

    Raises ValueError for one that cannot serve them; unknown names are refused elsewhere.
    """
    if config.attention_kernel not in KERNEL_NAMES or config.dtype not in DTYPES:
        return ""
    dtype = computation_dtype(config.dtype, device)
    return select_kernel(config.attention_kernel, AttentionSpec(), device, dtype, head_dim)[1]


def _resolved(config: TrainConfig, dims: ParallelDims, device: torch.device) -> TrainConfig:
    dtype = str(computation_dtype(config.dtype, device)).removeprefix("torch.")
    return replace(config, dp_shard=dims.dp_shard, device=device.type, dtype=dtype)
