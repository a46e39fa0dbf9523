"""Load and check everything that a run needs before its ranks communicate; report all problems in one message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attention import KERNEL_NAMES
from parallel import DamagedCheckpoint, ParallelDims, read_extra
from usp.config import BOS, DEVICES, DTYPES, TrainConfig, by_stage
from usp.data.cache import StoreFolder, check_ids, find_data, open_data
from usp.data.files import DataFiles, without
from usp.data.mixture import MixedRows, parse_mixture, taken
from usp.data.packing import PackedRows, StageRows
from usp.data.store import TokenStore
from usp.data.stream import BatchStream
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
from .resolve import ResolvedStage, resolve
from .resume import Start, find_start


@dataclass(frozen=True)
class PreparedStage:
    """A stage of the curriculum, or the whole of a run without one, with its data.

    Attributes:
        config: as `PreparedRun.config`, without a curriculum, but with the steps of the whole run.
        first, last: its steps.
        data: the files or the token store of each part of --data.
        batches: global batches, without end. held_out: None without `eval_data`.
    """

    config: TrainConfig
    dims: ParallelDims
    first: int
    last: int
    data: tuple[DataFiles | StoreFolder, ...]
    batches: BatchStream
    held_out: HeldOut | None


@dataclass(frozen=True)
class Predicted:
    """What is predicted of a stage.

    Attributes:
        fsdp_bytes: what this rank sends in a step to keep weights and gradients sharded.
        summary: the lines that rank 0 prints.
    """

    fsdp_bytes: int
    summary: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start.

    Attributes:
        config: without any `auto`, and without a curriculum also without -1.
        reusable: `config` for other machines, with the device and dtype that were asked for.
        stages: those of the curriculum, or one of all steps.
        predicted: what `usp.cost` says of each stage; empty where nobody asked it, or it has no formulas.
        start: the run's folder, and the checkpoint that it continues from; saved: what that holds besides tensors.
    """

    config: TrainConfig
    reusable: TrainConfig
    stages: tuple[PreparedStage, ...]
    device: torch.device
    model_config: ModelConfig
    shape: ModelShape
    tokenizer: Tokenizer
    kernel_choice: str
    start: Start
    saved: TrainingState | None
    predicted: tuple[Predicted, ...] = ()

    def stage_of(self, step: int) -> PreparedStage:
        """Return the stage of a step; that of the last for later steps."""
        return next((stage for stage in self.stages if step <= stage.last), self.stages[-1])

    @property
    def begins_in(self) -> PreparedStage:
        """The stage of the first step that is left."""
        return self.stage_of(self.saved.step + 1 if self.saved else 1)

    @property
    def dims(self) -> ParallelDims:
        return self.begins_in.dims

    @property
    def data(self) -> tuple[DataFiles | StoreFolder, ...]:
        return self.begins_in.data

    @property
    def batches(self) -> BatchStream:
        return self.begins_in.batches

    @property
    def held_out(self) -> HeldOut | None:
        return self.begins_in.held_out


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

    dtype = str(computation_dtype(config.dtype, device)).removeprefix("torch.")
    here: dict[str, Any] = {"tokenizer": tokenizer.name, "device": device.type, "dtype": dtype}
    open_all = partial(_open, data, held_out_data, config, tokenizer, facts.vocab_size)
    stages = attempt(lambda: tuple(_stages(resolved.stages, open_all(), here)))
    problems.check()
    assert stages is not None
    config = replace(config, tokenizer=tokenizer.name)
    if not config.curriculum:
        config = replace(config, dp_shard=dims.dp_shard)
    prepared = PreparedRun(
        config=replace(config, **here),
        reusable=config,
        stages=stages,
        device=device,
        model_config=model_config,
        shape=resolved.shape,
        tokenizer=tokenizer,
        kernel_choice=kernel_choice,
        start=start,
        saved=saved,
    )
    if saved is not None:
        attempt(partial(_find_place, prepared.stage_of(saved.step).batches, saved, config.data_changed))
    problems.check()
    return prepared


Data = DataFiles | StoreFolder


def _find_all(config: TrainConfig, held_out: Data | None) -> dict[str, Data]:
    """Return what each path of `--data` names, of all stages, without the files that are held out."""
    found: dict[str, Data] = {}
    for path in dict.fromkeys(path for stage in by_stage(config) for path, _ in parse_mixture(stage.data)):
        part = find_data(path, config.data_field)
        if isinstance(part, DataFiles) and isinstance(held_out, DataFiles):
            part = without(part, held_out, "held out for evaluation")
        found[path] = part
    return found


@dataclass(frozen=True)
class _Opened:
    """The data of a run by path, its token stores, and the held-out data with its own."""

    data: Mapping[str, Data]
    stores: Mapping[str, TokenStore]
    held_out: tuple[Data, TokenStore] | None


def _open(
    data: Mapping[str, Data], held_out: Data | None, config: TrainConfig, tokenizer: Tokenizer, vocabulary: int
) -> _Opened:
    """Open the token stores, and write those first that are missing."""

    def opened(part: Data) -> TokenStore:
        store = open_data(part, config.data_field, tokenizer, Path(config.data_cache).expanduser(), say=print)
        check_ids(store, vocabulary)
        return store

    stores = {path: opened(part) for path, part in data.items()}
    return _Opened(data, stores, None if held_out is None else (held_out, opened(held_out)))


def _stages(stages: Sequence[ResolvedStage], opened: _Opened, here: Mapping[str, Any]) -> Iterator[PreparedStage]:
    """Yield the stages with their rows, each of which goes on where those before have left its data.

    With whole documents, a stage that reads data again reads it in another order.
    """
    read: Counter[str] = Counter()  # tokens of each store so far, or with whole documents stages
    for stage in stages:
        config = replace(stage.config, dp_shard=stage.dims.dp_shard, **here)
        mixture = parse_mixture(stage.config.data)
        batch, weights = stage.dims.batch * config.batch_size, [weight for _, weight in mixture]
        counts = taken(weights, config.seed, (stage.last - stage.first + 1) * batch)
        sources = []
        for (path, _), count in zip(mixture, counts, strict=True):
            sources.append(_packed(opened.stores[path], config, read[path], count, alone=len(stages) == 1))
            read[path] += 1 if _whole(opened.stores[path], config) else count * config.seq_len
        packed = sources[0] if len(sources) == 1 else MixedRows(sources, weights)
        held_out = None
        if opened.held_out is not None:
            part, store = opened.held_out
            held_out = HeldOut(part, PackedRows(store, config.seq_len, None))
        data = tuple(opened.data[path] for path, _ in mixture)
        yield PreparedStage(config, stage.dims, stage.first, stage.last, data, BatchStream(packed, batch), held_out)


def _packed(store: TokenStore, config: TrainConfig, read: int, count: int, alone: bool) -> PackedRows:
    """Return the rows of a store in the order of the seed. read, count: of a stage that is not `alone`."""
    if _whole(store, config):
        return WholeRows(store, config.seq_len, config.seed + read)
    if alone:
        return PackedRows(store, config.seq_len, config.seed)
    return StageRows(store, config.seq_len, config.seed, read, count)


def _whole(store: TokenStore, config: TrainConfig) -> bool:
    """Return whether documents are packed whole: with --packing auto, those with a loss mask."""
    return config.packing == "whole" or (config.packing == "auto" and store.manifest.masked)


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
