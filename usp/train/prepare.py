"""Load and check everything that a run needs before its ranks communicate; report all problems in one message.

RLHF runs share `Prologue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from usp.attention import KERNEL_NAMES
from usp.config import BOS, DEVICES, DTYPES, CommonConfig, TrainConfig, by_stage
from usp.data.batches import BatchStream, MixedRows, parse_mixture, parse_named, taken
from usp.data.cache import check_ids, find_data, open_data
from usp.data.documents import DROP, keys_of
from usp.data.rows import PackedRows, StageRows, WholeRows
from usp.data.sources import DataFiles, without
from usp.data.store import TokenStore
from usp.data.tokenizer import Tokenizer
from usp.hf.models import ModelConfig
from usp.hf.processors import Images, load_images
from usp.hf.tokenizers import load_tokenizer, tokenizer_of
from usp.model.facts import ModelFacts, ModelShape
from usp.presets import PRESETS
from usp.run.failures import Problems
from usp.run.launch import Launch, choose_device, computation_dtype
from usp.run.metrics import parse_steps, tracker_problems
from usp.sp.kernel_choice import PACKED, choose_kernel
from usp.sp.sp_attention import GATHER

from .checkpoints import Start, TrainingState, ended_stages, find_start, read_state, resume_violations
from .resolve import ResolvedStage, resolve
from .step import HeldOut
from .validate import with_flags

# By --fp8: the compute capability from which GPUs have its products, and the CUDA that torchao's kernels need.
FLOAT8_GPUS = dict.fromkeys(("tensor", "row"), ((8, 9), (0, 0))) | {"mx": ((10, 0), (12, 8))}
_Source = tuple[TokenStore, str]  # and lines about files that were left out, and keys that are read


@dataclass(frozen=True)
class PreparedStage(ResolvedStage):
    """A stage with its data.

    left_out: which files of each entry of --data were left out, and which keys of the others are read.
    batches: global batches, without end. held_out: the sets of `eval_data`; best is the loss on the first.
    """

    left_out: tuple[str, ...]
    batches: BatchStream
    held_out: tuple[HeldOut, ...]


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start.

    config: without any `auto`, and without a curriculum also without -1; its stages have global batch sizes.
    reusable: `config` for other machines, with the device and dtype that were asked for.
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
    launch: Launch

    def stage_of(self, step: int) -> PreparedStage:
        """Return the stage of a step; that of the last for later steps."""
        return next((stage for stage in self.stages if step <= stage.last), self.stages[-1])

    @property
    def images(self) -> Images | None:
        """What reads the images of chats; None for models without an encoder of images."""
        return getattr(self.tokenizer.chats, "images", None)

    @property
    def begins_in(self) -> PreparedStage:
        """The stage of the first step that is left."""
        return self.stage_of(self.saved.step + 1 if self.saved else 1)


class Prologue:
    """What train.py and rlhf.py find in the same way before their ranks communicate.

    problems: every problem so far. device, tokenizer: None if they are among the problems. dtype: of the computation.
    """

    def __init__(
        self,
        config: CommonConfig,
        launch: Launch,
        problems: Problems,
        images: Callable[[], Images | None] = lambda: None,
        **reading: Any,
    ) -> None:
        """images, reading: of `load_tokenizer`."""
        self._config, self.problems = config, problems
        attempt = problems.attempt
        self.device = attempt(lambda: choose_device(config.device, launch)) if config.device in DEVICES else None
        self._computes_on = self.device if config.dtype in DTYPES else None
        self.dtype = computation_dtype(config.dtype, self._computes_on) if self._computes_on else torch.float32
        name = attempt(lambda: tokenizer_of(config.tokenizer, config.model))
        self.tokenizer: Tokenizer | None = None
        if name is not None:
            reading |= {"chat_template": config.chat_template, "model": config.model}
            self.tokenizer = attempt(lambda: load_tokenizer(name, images=images(), **reading))
        problems += tracker_problems(config)

    def choose_kernel(self, facts: ModelFacts) -> str:
        """Return the lines that name the kernel for packed documents on this device, those refused before it, and a
        package that would be faster."""
        name, device = self._config.attention_kernel, self._computes_on
        if device is None or name not in KERNEL_NAMES:  # refused elsewhere
            return ""
        sizes, sparse = (facts.head_dim, facts.value_dim), GATHER if any(facts.chosen) else ""
        if sparse and name != "auto":
            self.problems.append(f"--attention-kernel = {name} cannot attend to indices of {facts.name}: use auto")
        if sparse and all(facts.chosen):
            return sparse
        choice = self.problems.attempt(lambda: choose_kernel(name, PACKED, device, self.dtype, *sizes)[1:]) or ()
        return "\n".join(filter(None, (*choice, sparse)))

    def check_vocabulary(self, model: str, size: int) -> None:
        """Check that the vocabulary of `model` has every id of the tokenizer."""
        if self.tokenizer and self.tokenizer.vocab_size > size:
            self.problems.append(
                f"--tokenizer = {self.tokenizer.name} has ids up to {self.tokenizer.vocab_size - 1}, and {model} has a "
                f"vocabulary of {size}: use the model's own tokenizer, or a model with a larger vocabulary"
            )

    def check_frozen_weights(self, remedy: str) -> None:
        """Check that the weights under adapters have been trained. remedy: what to give instead."""
        config = self._config
        if config.lora_rank and config.model in PRESETS:
            self.problems.append(
                f"--lora-rank = {config.lora_rank} trains adapters of weights that stay as they are, and --model "
                f"{config.model} is a preset with random ones: {remedy}"
            )


def prepare(config: TrainConfig, launch: Launch, start: Start | None = None) -> PreparedRun:
    """Check `config` and load what it names: the same result, or the same error, on every rank.

    start: where the run begins; None: `find_start` decides, and `saved` stays None for a damaged checkpoint.

    Raises ConfigurationError with every violation found. The data is tokenized here unless the cache holds its tokens,
    so that data without text or without its field is refused before any rank communicates.
    """
    problems = Problems()
    attempt = problems.attempt
    strict, start = start is not None, start or attempt(lambda: find_start(config, launch)) or Start()
    saved = attempt(lambda: read_state(start, strict, TrainingState.from_extra))
    reading = {"bos": config.bos if config.bos in BOS else "auto", "parse_special": config.parse_special_tokens}
    reading |= {"train_on": config.train_on, "add_tokens": config.add_tokens}
    prologue = Prologue(config, launch, problems, partial(load_images, config.model), **reading)
    device, tokenizer, kernel_choice = prologue.device, prologue.tokenizer, ""
    ids = tokenizer.vocab_size if config.add_tokens and tokenizer else 0
    resolved = resolve(
        config, launch.world_size, ended=ended_stages(config, launch, start, saved), ids=ids, images=True
    )
    config, facts, model_config = resolved.config, resolved.facts, resolved.model_config
    problems[:] = dict.fromkeys(map(with_flags, [*problems, *resolved.problems]))  # both read the model's folder
    if saved is not None and resolved.problems and (before := saved.ranks) not in (0, launch.world_size):
        ranks = f"the checkpoint is of {before} ranks, and this run has {launch.world_size}: --plan auto finds degrees"
        problems.append(f"{ranks}, or torchrun --nnodes {-(-before // launch.local_world_size)} waits for lost hosts")
    if saved is not None and model_config is not None:
        problems += resume_violations(saved, config, model_config.to_dict(), start.finished_too)
    if facts is not None:
        kernel_choice = prologue.choose_kernel(facts)
        prologue.check_vocabulary(f"--model {facts.name}", facts.vocab_size)
    prologue.check_frozen_weights("give a directory with a trained model")
    problems += _device_problems(config, device)
    named = dict(attempt(lambda: parse_named(config.eval_data)) or ())
    held_out = attempt(lambda: {name: find_data(path, name="eval_data") for name, path in named.items()}) or {}
    data = attempt(lambda: _find_all(config, held_out))
    attempt(lambda: parse_steps(config.profile, config.steps))
    problems.check()
    config, model_config, facts, dims = resolved.valid()
    assert device is not None and data is not None and tokenizer is not None

    dtype = str(prologue.dtype).removeprefix("torch.")
    here: dict[str, Any] = {"tokenizer": tokenizer.name, "device": device.type, "dtype": dtype}

    def opened(found: DataFiles | Path) -> _Source:
        store = open_data(found, config.data_field, tokenizer, Path(config.data_cache).expanduser(), config.bad_rows)
        check_ids(store, facts.vocab_size)
        if not isinstance(found, DataFiles):
            return store, ""
        keys = keys_of(found.files, config.data_field, config.bad_rows)
        return store, "\n".join(filter(None, [found.left_out_line(), *keys]))

    sources = attempt(lambda: {path: opened(found) for path, found in data.items()}) or {}
    held_out_sources = attempt(lambda: {name: opened(found) for name, found in held_out.items()}) or {}
    problems.check()
    staged = partial(_stages, resolved.stages, sources, held_out_sources, here)
    stages = attempt(lambda: tuple(staged(tuple(saved.stream.get("begun", (0, 0))) if saved else (0, 0))))
    problems.check()
    assert stages is not None
    config = replace(config, tokenizer=tokenizer.name)
    if not config.curriculum:
        config = replace(config, dp_shard=dims.dp_shard)
    pairs = zip(config.curriculum, stages, strict=False)
    of_stages = [replace(stage, batch_size=0, global_batch_size=found.sequences) for stage, found in pairs]
    prepared = PreparedRun(
        config=replace(config, curriculum=tuple(of_stages), **here),
        reusable=config,
        stages=stages,
        device=device,
        model_config=model_config,
        shape=resolved.shape,
        tokenizer=tokenizer,
        kernel_choice=kernel_choice,
        start=start,
        saved=saved,
        launch=launch,
    )
    placed = attempt(lambda: _placed(prepared, staged))
    problems.check()
    assert placed is not None
    return placed


def _placed(prepared: PreparedRun, staged: Callable[[tuple[int, int]], Iterable[PreparedStage]]) -> PreparedRun:
    """Return a run at the place in its data that its checkpoint has, or where an epoch of other data begins. Raises
    ValueError for other data without --data-changed. staged: makes the stages, from `BatchStream.begun`."""
    saved = prepared.saved
    if saved is None:
        return prepared
    try:
        prepared.stage_of(saved.step).batches.load_state_dict(saved.stream)
    except ValueError as error:
        if not prepared.config.data_changed:
            raise ValueError(f"{error}: use the same as before, or --data-changed to begin a new epoch") from error
        return replace(prepared, stages=tuple(staged((saved.step, saved.stream["epoch"] + 1))))
    return prepared


def _device_problems(config: TrainConfig, device: torch.device | None) -> Iterator[str]:
    if config.async_tp and device is not None and device.type != "cuda":
        yield f"--async-tp needs NVIDIA GPUs, and the device is {device.type}: remove it"
    if config.fp8 == "none":
        return
    if find_spec("torchao") is None:
        yield f"--fp8 {config.fp8} needs the package torchao: pip install 'usp-toolkit[fp8]'"
    if device is None or device.type != "cuda" or config.fp8_emulate:
        return
    capability, toolkit = FLOAT8_GPUS[config.fp8]
    if torch.cuda.get_device_capability(device) < capability:
        name, least = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        yield f"--fp8 {config.fp8} needs a GPU with float8 ({least} or above), not {name}: give --fp8-emulate"
    elif tuple(map(int, (torch.version.cuda or "0.0").split("."))) < toolkit:
        least = ".".join(map(str, toolkit))
        yield f"--fp8 {config.fp8} needs torch with CUDA {least}, not {torch.version.cuda}: give --fp8-emulate"


def _find_all(config: TrainConfig, held_out: Mapping[str, DataFiles | Path]) -> dict[str, DataFiles | Path]:
    """Return the data of each path of `--data`, of all stages, without the files that are held out. Raises ValueError
    for `--bad-rows drop` without files."""
    data: dict[str, DataFiles | Path] = {}
    for path in dict.fromkeys(path for stage in by_stage(config) for path, _ in parse_mixture(stage.data)):
        files = find_data(path, config.data_field)
        for others in held_out.values():
            if isinstance(files, DataFiles) and isinstance(others, DataFiles):
                files = without(files, others, "held out for evaluation")
        data[path] = files
    if config.bad_rows == DROP and not any(
        isinstance(found, DataFiles) for found in (*data.values(), *held_out.values())
    ):
        raise ValueError("--bad-rows drop is for files of documents, and --data has none: remove it")
    return data


def _stages(
    stages: Iterable[ResolvedStage],
    sources: Mapping[str, _Source],
    held_out: Mapping[str, _Source],
    here: Mapping[str, Any],
    begun: tuple[int, int],
) -> Iterator[PreparedStage]:
    """Yield the stages with their data, each continuing where the previous stage stopped reading. With whole documents,
    a stage that reads data again reads it in another order. begun: as in `BatchStream`."""
    read: Counter[str] = Counter()  # tokens of each store since the data has begun, or with whole documents stages
    before, epoch = begun
    for stage in stages:
        config = replace(stage.config, dp_shard=stage.dims.dp_shard, **here)
        paths, weights = zip(*parse_mixture(config.data), strict=True)
        rows: list[PackedRows] = []
        steps = max(0, stage.last - max(stage.first - 1, before))
        counts = taken(weights, config.seed, steps * stage.sequences)
        for path, count in zip(paths, counts, strict=True):
            store, _ = sources[path]
            if _is_whole(store, config):
                rows.append(WholeRows(store, config.seq_len, config.seed + read[path], epoch))
                read[path] += 1
                continue
            if config.steps == stage.last - stage.first + 1:  # the whole run
                rows.append(PackedRows(store, config.seq_len, config.seed, epoch))
            else:
                begin = epoch * store.manifest.tokens + read[path]
                rows.append(StageRows(store, config.seq_len, config.seed, begin, count))
            read[path] += count * config.seq_len
        left_out = tuple(sources[path][1] for path in paths)
        batches = BatchStream(rows[0] if len(rows) == 1 else MixedRows(rows, weights), stage.sequences, begun)
        sets = tuple(
            HeldOut(name, (WholeRows if _is_whole(held, config) else PackedRows)(held, config.seq_len, None), left)
            for name, (held, left) in held_out.items()
        )
        of_stage: dict[str, Any] = vars(stage) | {"config": config}
        yield PreparedStage(**of_stage, left_out=left_out, batches=batches, held_out=sets)


def _is_whole(store: TokenStore, config: TrainConfig) -> bool:
    return config.packing == "whole" or (config.packing == "auto" and store.manifest.masked)
