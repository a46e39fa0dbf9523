"""Checkpoints of distributed tensors: asynchronous, atomic, and loadable into any layout.

    FOLDER/step-00000020             a complete checkpoint: see `safetensors_storage`
    FOLDER/step-00000030.partial     in progress, or interrupted: never loaded
    FOLDER/step-00000010.damaged     set aside because a file has changed: never loaded, never removed

    main thread    ... step 20 | copy to host | step 21 | step 22 ...
    background                 | plan | write and hash rank-*.safetensors | all ranks done: rename | remove old ones

torch.distributed.checkpoint plans which rank writes and reads which box of each tensor; replicated tensors are written
once. Its collectives use a separate gloo group, because collectives of two threads must not share a group.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, async_save, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from usp.parallel.groups import gather_objects

from . import safetensors_storage as storage

_COMPLETE = re.compile(r"step-(\d{8,})")
DAMAGED = ".damaged"
_LEFTOVER = re.compile(rf"step-\d{{8,}}({re.escape(storage.PARTIAL)}|{re.escape(storage.REMOVING)})")


def latest(folder: Path, without: Collection[Path] = ()) -> Path | None:
    """Return the complete checkpoint of the highest step in `folder` that is not one of `without`, or None."""
    found = {step: path for step, path in complete_checkpoints(folder).items() if path not in without}
    return found[max(found)] if found else None


def verify(path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Compare the files of a checkpoint with their checksums, each on one rank of the group. Collective. Raise
    DamagedCheckpoint on every rank, naming the files that are missing or changed, and OSError on every rank, if a rank
    cannot read a file: then nothing is known of what it holds."""
    part = slice(dist.get_rank(group), None, dist.get_world_size(group))
    unread: list[str] = []

    def damage() -> str:
        try:
            return "; ".join(storage.damaged_files(path, part))
        except OSError as error:
            unread.append(str(error))
            return ""

    found = _gather_errors(damage, group)
    if errors := _gather_errors(lambda: "".join(unread), group):
        raise OSError(f"checkpoint {path} cannot be read: {'; '.join(errors)}")
    if found:
        raise storage.DamagedCheckpoint(f"checkpoint {path} is damaged: {'; '.join(found)}")


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that `latest` does not find it, and return its new path."""
    names = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    aside = next(new for name in names if not (new := path.with_name(path.name + DAMAGED + name)).exists())
    return path.rename(aside)


class Checkpointer:
    """Saves checkpoints to `folder`, and loads them from any folder. All methods are collective.

    Creation is collective too, and removes incomplete checkpoints of killed runs from `folder`.

    Args:
        folder: shared by all ranks; created by the first save.
        keep: number of complete checkpoints to keep; the oldest is removed once a new one is complete, unless it is
            the best (see `save`).
        device_type: device of the tensors to save; from "cuda" they are copied through pinned memory.

    Raises:
        ValueError: if keep < 1.
        RuntimeError: on every rank, if an incomplete checkpoint cannot be removed.
    """

    def __init__(self, folder: Path, keep: int, device_type: str) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: the newest checkpoint is always kept")
        self.folder, self.keep, self.device_type = folder, keep, device_type
        self.group = dist.new_group(backend="gloo")
        cuda = device_type == "cuda"
        self.options = StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
        self.stager = DefaultStager(self.options)
        self.saving: tuple[Path, Future[Any]] | None = None

        def remove_leftovers() -> None:
            for path in self.folder.glob("*") if dist.get_rank() == 0 else ():
                if _LEFTOVER.fullmatch(path.name):
                    shutil.rmtree(path)

        errors = _gather_errors(remove_leftovers, self.group)
        if errors:
            raise RuntimeError(f"an incomplete checkpoint in {folder} cannot be removed: {'; '.join(errors)}")

    def save(
        self, step: int, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], best_first: Sequence[int] = ()
    ) -> None:
        """Start saving, and return as soon as `tensors` have been copied to host memory.

        Waits for the previous save first. A checkpoint of the same step is replaced.

        Args:
            tensors: DTensors, or plain tensors that are equal on every rank that passes their name. Ranks may pass
                different names. A name identifies one global tensor.
            extra: nested JSON values and small CPU tensors; those of the first rank are saved.
            best_first: steps from the best on; of these, the first that has a complete checkpoint is not removed.

        Raises:
            RuntimeError: on every rank, if the previous save failed.
        """
        self.wait()
        path = self.folder / f"step-{step:08}"
        writer = storage.SafetensorsWriter(path, extra, finished=partial(self._remove_old, tuple(best_first)))
        if not self.stager._state_dict_stager._deepcopy_dispatch:  # torch 2.11 closes a stager after each use
            self.stager = DefaultStager(self.options)
        response = async_save(
            dict(tensors),
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self.group,
            async_stager=self.stager,
        )
        assert isinstance(response, Future)
        self.saving = (path, response)

    def finished(self) -> bool:
        """Return whether the current save has ended on every rank, well or not; False without one, at no cost."""
        if self.saving is None:
            return False
        ended = torch.tensor(int(self.saving[1].done()), device=self.device_type)
        dist.all_reduce(ended, dist.ReduceOp.MIN)  # not over `group`, which the save uses
        return bool(ended)

    def wait(self) -> bool:
        """Wait for the current save; return whether there was one. Raise RuntimeError on every rank, if the save failed
        on any; its files are removed."""
        if self.saving is None:
            return False
        (path, response), self.saving = self.saving, None
        try:
            response.result()
        except (CheckpointException, Exception) as error:
            if dist.get_rank() == 0:  # all ranks have stopped writing, and what they wrote may fill the disk
                shutil.rmtree(path.with_name(path.name + storage.PARTIAL), ignore_errors=True)
            raise RuntimeError(f"checkpoint {path} was not saved: {_causes(error)}") from error
        return True

    def load(self, path: Path, tensors: Mapping[str, Tensor], verified: bool = False) -> dict[str, Any]:
        """Fill `tensors` in place from a checkpoint of any layout and number of ranks, and return its `extra`.

        Each rank reads only the boxes it holds, after `verify`. Names that no rank requests are not read.

        Args:
            verified: `verify` has just accepted `path`, and need not read it again.

        Raises:
            DamagedCheckpoint, OSError: on every rank, before any tensor is modified; see `verify`.
            ValueError: on every rank, before any tensor is modified, if `path` is not a checkpoint, listing the
                requested names that it lacks or has with another shape or dtype.
            RuntimeError: on every rank, if a file cannot be read.
        """
        self.wait()
        if not verified:
            verify(path, self.group)
        if violations := _gather_errors(lambda: _violations(path, tensors), self.group):
            raise ValueError("; ".join(violations))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            load(
                dict(tensors), storage_reader=storage.SafetensorsReader(path), planner=planner, process_group=self.group
            )
        except CheckpointException as error:
            raise RuntimeError(f"checkpoint {path} cannot be read: {_causes(error)}") from error
        return storage.read_extra(path)

    def _remove_old(self, best_first: Sequence[int]) -> None:
        found = complete_checkpoints(self.folder)
        best = next((step for step in best_first if step in found), None)
        for step in sorted(found)[: -self.keep]:
            if step != best:
                storage.remove_checkpoint(found[step])


def _gather_errors(check: Callable[[], str | None], group: dist.ProcessGroup | None) -> list[str]:
    """Run `check` on every rank; return the messages it returned or raised on any rank."""
    try:
        message = check()
    except (ValueError, OSError) as error:
        message = str(error)
    return sorted({message for message in gather_objects(message, group) if message})


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `folder` by step."""
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # other errors do not say that there are none
        return {}
    matches = ((_COMPLETE.fullmatch(path.name), path) for path in paths)
    return {int(match[1]): path for match, path in matches if match}


def _violations(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """List the tensors that the checkpoint lacks, or has with another shape or dtype."""
    metadata = storage.SafetensorsReader(path).read_metadata().state_dict_metadata
    missing = sorted(tensors.keys() - metadata.keys())
    found = [f"{path} does not contain {', '.join(missing)}: it belongs to another model"] if missing else []
    for name in sorted(tensors.keys() & metadata.keys()):
        saved, wanted = metadata[name], tensors[name]
        assert isinstance(saved, TensorStorageMetadata)
        if (saved.size, saved.properties.dtype) != (wanted.shape, wanted.dtype):
            shown = f"{tuple(saved.size)} {saved.properties.dtype}"
            found.append(f"{path} has {name} as {shown}, expected {tuple(wanted.shape)} {wanted.dtype}")
    return "; ".join(found)


def _causes(error: BaseException) -> str:
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    causes = ((rank, wrapped[0]) for rank, wrapped in sorted(error.failures.items()))
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes)
