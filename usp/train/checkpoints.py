"""Where a run begins, the state that it continues from, and its claim on a folder.

The learning rate is a function of step and configuration, so it needs no state. Nothing in a training step draws a
random number (attention dropout is refused) and every rank has the same seed, so one state of the random generators,
rank 0's, fits every layout.

One run writes to a folder, all ranks see it, and the checkpoint to continue is whole:

    create and lock it (rank 0) -> every rank reads the lock -> find the start again (rank 0) -> verify its checkpoint
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from usp.config import REMOVED, CommonConfig, CurriculumStage, TrainConfig, by_stage
from usp.fields import flag
from usp.parallel import DAMAGED, DamagedCheckpoint, latest, read_extra, set_aside, verify
from usp.parallel.groups import gather_objects
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch, named
from usp.run.metrics import METRICS_FILE
from usp.run.output import LOCK, holder, locked, this_process, warn

T = TypeVar("T")
P = TypeVar("P", bound=Any)  # a dataclass with the fields `start`, `saved` and `launch`

# Keys of a model's configuration that say who wrote it and how it runs, not what it computes.
_NOT_THE_MODEL = {
    *("_name_or_path", "_attn_implementation", "_experts_implementation", "transformers_version"),
    *("dtype", "torch_dtype", "use_cache"),
}
# What an adapter is; rlhf.py has no modules to save.
_LORA = {"lora_rank": 0, "lora_alpha": 0, "lora_targets": 0, "lora_modules_to_save": ""}
_NOT_THE_RUN = {"output", "resume"}
AUTO = "auto"
CHECKPOINTS, MODEL, ADAPTER, BEST = "checkpoints", "model", "adapter", "best"  # folders of a run
RUNS = Path("runs")  # of runs without --output
FOLDER_KEY = "run-folder"
RETRIES = (1.0, 4.0, 16.0)  # seconds after which a checkpoint that cannot be read is read again
SEEN_SECONDS = 5.0  # for a network file system to show on one host what another one has written


@dataclass(frozen=True)
class TrainingState:
    """The state of a run after a step.

    tokens: read so far, over all ranks.
    stream: `BatchStream.state_dict()`.
    random: `random_state()`.
    config: the resolved configuration, from `asdict`, with the global batch size of every stage of a curriculum.
    model: the model's configuration, from transformers' `to_dict`.
    evaluations: `Evaluations.to_extra()`; empty without held-out data.
    """

    step: int
    tokens: int
    stream: Mapping[str, Any]
    random: Mapping[str, Any]
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    evaluations: Mapping[str, Any]

    def to_extra(self) -> dict[str, Any]:
        """Return the mapping that `Checkpointer.save` takes."""
        return {**vars(self), "model": _as_json(self.model)}

    @staticmethod
    def from_extra(extra: Mapping[str, Any]) -> TrainingState:
        """Read the result of `read_extra`. Raises ValueError if the checkpoint is not of a training run."""
        names = [field.name for field in fields(TrainingState)]
        if missing := [name for name in names if name not in extra]:
            raise ValueError(f"the checkpoint is not of a training run: it lacks {', '.join(missing)}")
        return TrainingState(**{name: extra[name] for name in names})

    @property
    def ranks(self) -> int:
        """The number of ranks; 0 with a curriculum, whose stages have degrees of their own."""
        axes = ("pp", "dp_replicate", "dp_shard", "sp_ring", "sp_ulysses", "tp")
        return max(0, math.prod(self.config.get(name, 1) for name in axes))

    def ended(self, curriculum: Sequence[CurriculumStage]) -> tuple[int, ...]:
        """Return the sequences of a step of each stage that has ended, except the last stage, which a run ends in."""
        number = sum(end <= self.step for end in accumulate(stage.steps for stage in curriculum[:-1]))
        before = self.config.get("curriculum", ())[:number]
        return tuple(takewhile(bool, (stage["global_batch_size"] for stage in before)))


def resume_violations(
    saved: TrainingState, config: TrainConfig, model: Mapping[str, Any], finished_too: bool = False
) -> list[str]:
    """Return why a run of `config` with the model configuration `model` cannot continue `saved`, one message each.

    finished_too: as in `Start`.
    Layout, world size, batch and schedule may differ. Data, seq_len and seed must not:
    `BatchStream.load_state_dict` checks them. Of a stage of the curriculum that has ended, what it read must not.
    """
    problems = []
    here, there = _as_json(model), _as_json(saved.model)
    keys = sorted((here.keys() | there.keys()) - _NOT_THE_MODEL)
    if differing := [key for key in keys if here.get(key) != there.get(key)]:
        values = ", ".join(f"{key} = {here.get(key)} (checkpoint: {there.get(key)})" for key in differing)
        problems.append(f"--model = {config.model} is not the model of the checkpoint ({values}): use that model")
    ended = sum(end <= saved.step for end in accumulate(stage.steps for stage in config.curriculum))
    if _stages_read(asdict(config), ended) != _stages_read(saved.config, ended) or any(
        stage.global_batch_size not in (0, sequences)
        for stage, sequences in zip(by_stage(config), saved.ended(config.curriculum), strict=False)
    ):
        problems.append(
            "the stages of --curriculum that end before the checkpoint must have the same steps, seq_len, data and "
            "global_batch_size as before"
        )
    if (before := saved.config.get("optimizer", TrainConfig.optimizer)) != config.optimizer:
        problems.append(f"--optimizer = {config.optimizer} (checkpoint: {before}) has other states: use the same")
    problems += lora_violations(saved.config, config)
    return problems + steps_violations(saved.step, config.steps, finished_too)


def _stages_read(config: Mapping[str, Any], number: int) -> list[list[Any]]:
    """Return the steps of the first stages of a curriculum, and what they read."""
    stages = config.get("curriculum", ())[:number]
    return [[stage["steps"], *(stage[name] or config[name] for name in ("seq_len", "data"))] for stage in stages]


def read_state(start: Start, strict: bool, convert: Callable[[Mapping[str, Any]], T]) -> T | None:
    """Read the state in the checkpoint to resume from; None without one.

    strict: raise for a damaged checkpoint even if the one before can replace it, and for one that cannot be read now;
        otherwise the result is None.

    Raises ValueError by `convert` for another kind of run.
    """
    if start.checkpoint is None:
        return None
    try:
        return convert(read_extra(start.checkpoint))
    except (DamagedCheckpoint, OSError) as error:
        if strict or (start.named and isinstance(error, DamagedCheckpoint)):
            raise
        return None


def ended_stages(config: TrainConfig, launch: Launch, start: Start, saved: TrainingState | None) -> tuple[int, ...]:
    """Return `TrainingState.ended` of `saved`, or where that is damaged of the newest state before it that is not: the
    run will continue from there."""
    damaged: list[Path] = []
    with suppress(ValueError):  # all are
        while config.curriculum and saved is None and start.checkpoint is not None and not start.named:
            damaged.append(start.checkpoint)
            start = find_start(config, launch, damaged=damaged)
            saved = read_state(start, False, TrainingState.from_extra)
    return saved.ended(config.curriculum) if saved else ()


def lora_violations(saved: Mapping[str, Any], config: CommonConfig) -> list[str]:
    """Return why the adapters of `config` cannot continue a checkpoint of a run with the configuration `saved`."""
    lora = {name: getattr(config, name, without) for name, without in _LORA.items()}
    trained = {name: saved.get(name, without) for name, without in _LORA.items()}
    if lora == trained or not (config.lora_rank or trained["lora_rank"]):
        return []
    changed = ", ".join(
        f"{flag(name)} = {lora[name]} (checkpoint: {trained[name]})" for name in _LORA if lora[name] or trained[name]
    )
    return [f"{changed}: a checkpoint holds only what is trained, so LoRA must be as before; use those values"]


def steps_violations(saved: int, steps: int, finished_too: bool) -> list[str]:
    """Return why a run of `steps` steps cannot continue a checkpoint of step `saved`."""
    least = saved if finished_too else saved + 1
    if steps >= least:
        return []
    return [f"--steps = {steps} leaves nothing to do: the checkpoint is of step {saved}; use at least {least}"]


def resume_changes(saved: TrainingState, config: TrainConfig) -> list[str]:
    """Return the fields that differ from the run that is continued: allowed, and worth a line each."""
    return [
        f"{flag(name)} = {value} (checkpoint: {saved.config[name]})"
        for name, value in _as_json(asdict(config) | REMOVED).items()
        if name not in _NOT_THE_RUN and name in saved.config and saved.config[name] != value
    ]


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the random generators of Python, numpy, torch and the CUDA device, if `device` is one."""
    version, numbers, gauss = random.getstate()
    numpy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    return {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": numpy | {"state": {"key": numpy["state"]["key"].tolist(), "pos": numpy["state"]["pos"]}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the random generators to `state`, from `random_state`; a device of another type keeps its own."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    key = np.asarray(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {"key": key, "pos": numpy["state"]["pos"]}})
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def _as_json(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to what JSON restores, so that saved and live mappings compare."""
    return json.loads(json.dumps(dict(mapping), default=str))


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    folder: of the run; None for one named after the time.
    checkpoint: to resume from; None for a new run.
    finished_too: the checkpoint may be of the last step, after which only the model is left to write.
    named: the user named this checkpoint; otherwise it is the newest of a run, and the one before can replace it.
    """

    folder: Path | None = None
    checkpoint: Path | None = None
    finished_too: bool = False
    named: bool = False


def find_start(
    config: CommonConfig, launch: Launch, traces: Sequence[str] = (METRICS_FILE,), damaged: Collection[Path] = ()
) -> Start:
    """Find where the run of `config` begins: in its own folder after a restart, where `--resume` says, or anew.

    traces: names of files by which a folder is known to hold a run. damaged: checkpoints that cannot be used.

    Raises ValueError for a `--resume` without checkpoint, a run all of whose checkpoints are damaged, and an `--output`
    that holds another run or is not writable.
    """
    start = _start(config, launch, traces, damaged)
    folder = (start.folder or RUNS).resolve()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        why = f"{above} is not a directory that files can be created in"
        raise ValueError(f"--output = {start.folder or RUNS} is not writable: {why}; choose another")
    return start


def _start(config: CommonConfig, launch: Launch, traces: Sequence[str], damaged: Collection[Path]) -> Start:
    folder = Path(config.output).expanduser() if config.output else None
    if launch.own_store and folder is None:
        own = "torchrun shares no store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), in which restarts would find the run"
        raise ValueError(f"{own}: give --output and --resume auto")
    remembered = launch.recall(FOLDER_KEY) if launch.attempt > 0 else None
    # If there is a store and it has no folder, no earlier attempt got as far as writing to one.
    restarted = launch.attempt > 0 and (remembered is not None or launch.agent_store is None)
    if restarted:
        folder = Path(remembered) if remembered else folder
        if not config.resume or (folder and latest(folder / CHECKPOINTS, damaged)):
            return Start(folder, newest_checkpoint(folder, damaged) if folder else None, finished_too=True)
    if config.resume == AUTO:
        if folder is None:
            raise ValueError("--resume auto continues the run in --output: give --output")
        return Start(folder, newest_checkpoint(folder, damaged), finished_too=True)
    start = _named(config.resume, folder, damaged) if config.resume else Start(folder)
    continued = start.checkpoint.parent.parent.resolve() if start.checkpoint else None
    if folder is None or folder.resolve() == continued or restarted:
        return start
    if any((folder / name).exists() for name in traces) or latest(folder / CHECKPOINTS) is not None:
        writer = holder(folder)
        busy = f", to which {writer} writes" if writer not in ("", this_process()) else ""
        raise ValueError(
            f"--output = {config.output} already holds a run{busy}: choose another directory, or continue "
            f"it with --resume auto"
        )
    return start


def newest_checkpoint(folder: Path, damaged: Collection[Path]) -> Path | None:
    """Return the newest checkpoint of the run in `folder` that is none of `damaged`; None for a run without any. Raises
    ValueError if all that it has are damaged: it would begin anew, and write over what it has."""
    newest = latest(folder / CHECKPOINTS, damaged)
    lost = {*(path for path in damaged if path.exists()), *(folder / CHECKPOINTS).glob(f"*{DAMAGED}*")}
    if newest is None and lost:
        names = ", ".join(sorted(path.name for path in lost))
        raise ValueError(
            f"the run in {folder} cannot continue, because all of its checkpoints are damaged ({names}): continue from "
            f"another run's, or begin anew with another --output; or remove them, to write over this run"
        )
    return newest


def _named(resume: str, folder: Path | None, damaged: Collection[Path]) -> Start:
    """Resolve `--resume`: a run's folder, its `checkpoints` folder, or one checkpoint."""
    path = Path(resume).expanduser().absolute()  # not resolved: `checkpoints` may be a link to another disk
    is_checkpoint = re.fullmatch(r"step-\d+", path.name)
    run = path.parent.parent if is_checkpoint else path.parent if path.name == CHECKPOINTS else path
    newest = latest(run / CHECKPOINTS, damaged)
    checkpoint = path if is_checkpoint else newest
    if checkpoint is None or not checkpoint.is_dir():
        raise ValueError(
            f"--resume = {resume} holds no complete checkpoint: give the folder of a run, or one of its checkpoints"
        )
    is_newest = newest is not None and checkpoint.resolve() == newest.resolve()
    if not is_newest and (folder is None or folder.resolve() == run.resolve()):
        raise ValueError(
            f"--resume = {resume} is not the newest checkpoint of {run} ({newest}), from which a later "
            f"restart would continue: give another --output to the run that continues from it"
        )
    return Start(folder or run, checkpoint, named=bool(is_checkpoint))


@contextmanager
def run_folder(folder: Path | None, name: str) -> Iterator[Path]:
    """Hold the folder of a run during the block, a new one of RUNS called by `name` for None. Collective. Raises
    ConfigurationError on every rank, if another run writes to the folder, or some ranks do not see it."""
    with ExitStack() as stack:

        def create_and_lock() -> tuple[Path, str]:
            path = folder or new_folder(name)
            try:
                return path, stack.enter_context(locked(path))
            except OSError as error:
                raise ValueError(f"{path} cannot be written: {error}") from error

        claimed, text = from_first_rank(create_and_lock)
        _check_shared(claimed, text)
        yield claimed


def settled(prepared: P, folder: Path, find: Callable[[Collection[Path]], Start], prepare: Callable[[Start], P]) -> P:
    """Return `prepared` in its folder, which is locked, with a checkpoint that is whole; restarts of the launch find
    the folder again. Collective.

    find, prepare: how `prepared` was made before the folder was locked; it is made anew where the start is no longer
    the one that was found. find takes the checkpoints that are damaged.

    Raises ConfigurationError on every rank, as `sound_start` and `prepare` do.
    """
    start = sound_start(folder, find)
    if start == replace(prepared.start, folder=folder) and (prepared.saved is None) == (start.checkpoint is None):
        prepared = replace(prepared, start=start)
    else:
        prepared = prepare(start)
    if prepared.launch.rank == 0:
        prepared.launch.remember(FOLDER_KEY, str(folder))
    return prepared


def sound_start(folder: Path, find: Callable[[Collection[Path]], Start]) -> Start:
    """Find where the run in `folder` begins, from a checkpoint that agrees with its checksums. Collective.

    A damaged checkpoint of this folder is renamed, so that no later run finds it. One that cannot be read is reported,
    tried again, and left as it is. Raises ConfigurationError on every rank, if `find` refuses, if it still cannot be
    read, or if the user named a checkpoint that is damaged.
    """
    damaged: list[Path] = []
    waits = iter(RETRIES)
    while True:
        start = from_first_rank(lambda: replace(find(damaged), folder=folder))
        if start.checkpoint is None:
            return start
        try:
            verify(start.checkpoint)
            return start
        except OSError as error:
            if (seconds := next(waits, None)) is None:
                raise ConfigurationError(f"{error}: start again when its file system answers") from error
            if dist.get_rank() == 0:
                warn(f"{error}; trying again in {seconds:g} s")
            time.sleep(seconds)
        except DamagedCheckpoint as error:
            if start.named:
                raise ConfigurationError(f"{error}; choose another checkpoint") from error
            damaged.append(start.checkpoint)
            if dist.get_rank() == 0:
                warn(f"{error}; {_put_away(start.checkpoint, folder)}, and the one before it is used, if there is one")


def from_first_rank(work: Callable[[], T]) -> T:
    """Return on every rank what `work` returns on rank 0. Collective. Raises ConfigurationError on every rank, for a
    ValueError or OSError of `work`."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = work()
        except (ValueError, OSError) as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise ConfigurationError(told[1])
    return told[0]


def new_folder(name: str) -> Path:
    """Create a folder of RUNS that is named after the time and `name`, and numbered if there is one of that name."""
    RUNS.mkdir(parents=True, exist_ok=True)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for number in itertools.count(1):
        folder = RUNS / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("there is always another number")


def _check_shared(folder: Path, text: str) -> None:
    """Check that every rank reads `text` in the folder's lock. Raises ConfigurationError on every rank otherwise."""
    end = time.monotonic() + SEEN_SECONDS
    while not (seen := _reads(folder, text)) and time.monotonic() < end:
        time.sleep(0.1)
    places = gather_objects((seen, f"{folder.resolve()} on {socket.gethostname()}"))
    without = defaultdict(list)
    for rank, (seen, place) in enumerate(places):
        if not seen:
            without[place].append(rank)
    if without:
        shown = "; ".join(f"{named(ranks)} in {place}" for place, ranks in without.items())
        raise ConfigurationError(
            f"the run's folder is not shared by all ranks: what rank 0 wrote to {places[0][1]} is not seen by {shown}. "
            f"Every rank writes its part of each checkpoint: give an --output that all hosts share"
        )


def _reads(folder: Path, text: str) -> bool:
    with suppress(OSError):
        next(folder.parent.iterdir(), None)  # NFS looks again for a folder that it remembers as missing
        return (folder / LOCK).read_text() == text
    return False


def _put_away(checkpoint: Path, folder: Path) -> str:
    """Rename a damaged checkpoint of `folder`, but none of another run, and return what happened to it."""
    if checkpoint.parent.resolve() != (folder / CHECKPOINTS).resolve():
        return "it is left alone"
    try:
        return f"it is now called {set_aside(checkpoint).name}"
    except OSError as error:
        return f"it cannot be renamed ({error})"
