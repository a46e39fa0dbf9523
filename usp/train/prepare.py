"""Load and check everything that a run needs before its ranks communicate; report all problems in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from attention import KERNEL_NAMES
from parallel import DamagedCheckpoint, ParallelDims, read_extra
from usp.config import BOS, DEVICES, DTYPES, TrainConfig
from usp.data.cache import StoreFolder, check_ids, find_data, open_data
from usp.data.files import DataFiles, without
from usp.data.mixture import MixedRows, parse_mixture
from usp.data.packing import PackedRows
from usp.data.stream import BatchStream, Rows
from usp.data.tokenizer import Tokenizer
from usp.data.whole import WholeRows
from usp.hf.models import ModelConfig
from usp.hf.tokenizers import load_tokenizer, tokenizer_of
from usp.model.facts import ModelFacts, ModelShape
from usp.presets import PRESETS
from usp.run.failures import Problems, listed
from usp.run.launch import Launch, choose_device, computation_dtype
from usp.run.metrics import wandb_problem
from usp.run.profiling import parse_steps
from usp.sp.kernel_choice import PACKED, choose_kernel

from .checkpoints import TrainingState, resume_violations
from .evaluate import HeldOut
from .resolve import resolve
from .resume import Start, find_start


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start.

    Attributes:
        config: without any `auto` or -1.
        data: the files or the token store of each part of --data.
        reusable: `config` for other machines, with the device and dtype that were asked for.
        batches: global batches, without end. held_out: None without `eval_data`.
        predicted_fsdp_bytes: what this rank sends in a step to keep weights and gradients sharded, as predicted by
            `usp.cost`; None where nobody predicted it.
        start: the run's folder, and the checkpoint that it continues from; saved: what that holds besides tensors.
    """

    config: TrainConfig
    reusable: TrainConfig
    dims: ParallelDims
    device: torch.device
    model_config: ModelConfig
    shape: ModelShape
    tokenizer: Tokenizer
    data: tuple[DataFiles | StoreFolder, ...]
    batches: BatchStream
    held_out: HeldOut | None
    kernel_choice: str
    start: Start
    saved: TrainingState | None
    predicted_fsdp_bytes: int | None = None


def prepare(config: TrainConfig, launch: Launch, start: Start | None = None) -> PreparedRun:
    """Check `config` and load what it names: the same result, or the same error, on every rank.

    start: where the run begins; None: `find_start` decides, and `saved` stays None for a damaged checkpoint.

    Raises ConfigurationError with every violation found. The data is tokenized here unless the cache holds its tokens,
    so that data without text or without its field is refused before any rank communicates.
    """
    resolved = resolve(config, launch.world_size)
    config, facts, model_config = resolved.config, resolved.facts, resolved.model_config
    problems, kernel_choice = Problems(), ""
    attempt = problems.attempt
    device = attempt(lambda: choose_device(config.device, launch)) if config.device in DEVICES else None
    if facts is not None and device is not None:
        kernel_choice = attempt(partial(_choose_kernel, config, device, facts)) or ""
    held_out_data = attempt(lambda: find_data(config.eval_data, name="eval_data")) if config.eval_data else None
    data = attempt(lambda: _find_all(config, held_out_data))
    tokenizer_name = attempt(lambda: tokenizer_of(config.tokenizer, config.model))
    tokenizer = None
    if tokenizer_name and config.bos in BOS:
        tokenizer = attempt(lambda: _tokenizer(config, tokenizer_name))
    if tokenizer and facts and tokenizer.vocab_size > facts.vocab_size:
        problems.append(
            f"--tokenizer = {tokenizer.name} gives ids up to {tokenizer.vocab_size - 1}, and --model {facts.name} has "
            f"a vocabulary of {facts.vocab_size}: use the model's own tokenizer, or a model with a larger vocabulary"
        )
    problems += filter(
        None, (wandb_problem(config.wandb_project), _engine_problem(config, device), _lora_problem(config))
    )
    attempt(lambda: parse_steps(config.profile, config.steps))
    strict, start = start is not None, start or attempt(lambda: find_start(config, launch)) or Start()
    saved = attempt(partial(_read_state, start, config, model_config, strict)) if model_config else None
    config, model_config, facts, dims = resolved.valid(problems)
    assert device is not None and data is not None and tokenizer is not None

    packed = attempt(lambda: _mixed(data, config, tokenizer, facts.vocab_size))
    problems.check()
    assert packed is not None
    held_out = None
    if held_out_data is not None:
        held_out_rows = attempt(lambda: _packed(held_out_data, config, tokenizer, facts.vocab_size, None))
        problems.check()
        assert held_out_rows is not None
        held_out = HeldOut(held_out_data, held_out_rows)
    rows = dims.dp_replicate * dims.dp_shard * config.batch_size
    batches = BatchStream(packed, rows)
    if saved is not None:
        attempt(partial(_find_place, batches, saved, config.data_changed))
    problems.check()
    dtype = str(computation_dtype(config.dtype, device)).removeprefix("torch.")
    config = replace(config, tokenizer=tokenizer.name, dp_shard=dims.dp_shard)
    return PreparedRun(
        config=replace(config, device=device.type, dtype=dtype),
        reusable=config,
        dims=dims,
        device=device,
        model_config=model_config,
        shape=resolved.shape,
        tokenizer=tokenizer,
        data=data,
        batches=batches,
        held_out=held_out,
        kernel_choice=kernel_choice,
        start=start,
        saved=saved,
    )


def _find_all(config: TrainConfig, held_out: DataFiles | StoreFolder | None) -> tuple[DataFiles | StoreFolder, ...]:
    """Return what each part of `--data` names, without the files that are held out."""
    found = []
    for path, _ in parse_mixture(config.data):
        part = find_data(path, config.data_field)
        if isinstance(part, DataFiles) and isinstance(held_out, DataFiles):
            part = without(part, held_out, "held out for evaluation")
        found.append(part)
    return tuple(found)


def _mixed(data: Sequence[DataFiles | StoreFolder], config: TrainConfig, tokenizer: Tokenizer, vocabulary: int) -> Rows:
    """Return the rows of the parts of `--data`, by their weights."""
    rows = [_packed(part, config, tokenizer, vocabulary, config.seed) for part in data]
    return rows[0] if len(rows) == 1 else MixedRows(rows, [weight for _, weight in parse_mixture(config.data)])


def _packed(
    data: DataFiles | StoreFolder, config: TrainConfig, tokenizer: Tokenizer, vocabulary: int, seed: int | None
) -> PackedRows:
    """Open the token store of `data`, and write it first if there is none, and pack it in the order of `seed`."""
    store = open_data(data, config.data_field, tokenizer, Path(config.data_cache).expanduser(), say=print)
    check_ids(store, vocabulary)
    whole = config.packing == "whole" or (config.packing == "auto" and store.manifest.masked)
    if seed is not None and whole:
        return WholeRows(store, config.seq_len, seed)
    return PackedRows(store, config.seq_len, seed)


def _tokenizer(config: TrainConfig, name: str) -> Tokenizer:
    return load_tokenizer(name, config.bos, config.parse_special_tokens, config.chat_template)


def _find_place(batches: BatchStream, saved: TrainingState, data_changed: bool) -> None:
    """Set `batches` to the place of the checkpoint. Raises ValueError for other data, unless `data_changed`."""
    try:
        batches.load_state_dict(saved.stream, other_data=data_changed)
    except ValueError as error:
        raise ValueError(f"{error}: use the same as before, or --data-changed to begin a new epoch") from error


def _engine_problem(config: TrainConfig, device: torch.device | None) -> str | None:
    """Return why `--engine` cannot be used here; None if it can."""
    if config.engine != "deepspeed":
        return None
    if find_spec("deepspeed") is None:
        return "--engine deepspeed needs the package deepspeed: pip install 'usp-toolkit[deepspeed]'"
    dtype = computation_dtype(config.dtype, device) if device and config.dtype in DTYPES else None
    if config.zero == 0 and dtype == torch.bfloat16:
        return "--engine deepspeed --zero 0 accumulates gradients in bfloat16: use --zero 1, or --dtype float32"
    return None


def _lora_problem(config: TrainConfig) -> str | None:
    """Return why adapters of `--model` would be of no use; None if they are."""
    if config.lora_rank and config.model in PRESETS:
        return (
            f"--lora-rank = {config.lora_rank} trains adapters of weights that stay as they are, and --model "
            f"{config.model} is a preset with random ones: give a directory with a trained model"
        )
    return None


def _read_state(start: Start, config: TrainConfig, model_config: ModelConfig, strict: bool) -> TrainingState | None:
    """Read the state in the checkpoint to resume from. Raises ValueError if `config` cannot continue it.

    strict: raise for a damaged checkpoint even if the one before can replace it.
    """
    if start.checkpoint is None:
        return None
    try:
        saved = TrainingState.from_extra(read_extra(start.checkpoint))
    except DamagedCheckpoint:
        if strict or start.named:
            raise
        return None
    violations = resume_violations(saved, config, model_config.to_dict(), finished_too=start.finished_too)
    if violations:
        raise ValueError(listed(violations))
    return saved


def _choose_kernel(config: TrainConfig, device: torch.device, facts: ModelFacts) -> str:
    """Return the line that names the kernel for packed documents on this device, and those refused before it.

    Raises ValueError for a kernel that does not support them; unknown names are refused elsewhere.
    """
    if config.attention_kernel not in KERNEL_NAMES or config.dtype not in DTYPES:
        return ""
    dtype = computation_dtype(config.dtype, device)
    return choose_kernel(config.attention_kernel, PACKED, device, dtype, facts.head_dim, facts.value_dim)[1]
