"""Checkpoints of distributed tensors: written while training goes on, whole or not there, read into any layout.

    FOLDER/step-00000020             a whole checkpoint: see `safetensors_storage`
    FOLDER/step-00000030.partial     one that is being written, or that a rank was killed in: never picked up

    main thread    ... step 20 | copy to host | step 21 | step 22 ...
    background                 | plan | write rank-*.safetensors | all ranks done: rename | remove old ones

torch.distributed.checkpoint plans who writes and who reads which box of which tensor, and copies; tensors that several
ranks hold alike are written once. Its collectives run on a gloo group of their own, because two threads that use one
group would mix theirs up.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, async_save, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from .safetensors_storage import DOOMED, PARTIAL, SafetensorsReader, SafetensorsWriter, read_extra, remove_checkpoint

_WHOLE = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(rf"step-\d{{8,}}({re.escape(PARTIAL)}|{re.escape(DOOMED)})")


def latest(folder: Path) -> Path | None:
    """The whole checkpoint of the highest step in `folder`, if there is one."""
    found = _whole(folder)
    return found[max(found)] if found else None


class Checkpointer:
    """Saves to `folder` and loads from any. Every rank makes it and calls every method, in the same order.

    Making one is collective, and removes what killed runs left half-written in `folder`.

    Args:
        folder: shared by all ranks; made by the first save.
        keep: how many whole checkpoints to keep; an older one goes when a newer one is whole.
        device_type: where the tensors to save lie; from "cuda" they are copied through pinned memory.

    Raises:
        ValueError: keep < 1.
        RuntimeError: on every rank, when something half-written cannot be removed.
    """

    def __init__(self, folder: Path, keep: int, device_type: str) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: the newest checkpoint is always kept")
        self.folder, self.keep = folder, keep
        self.group = dist.new_group(backend="gloo")
        cuda = device_type == "cuda"
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
            )
        )
        self.saving: tuple[Path, Future[Any]] | None = None
        errors = self._gathered(lambda: self._remove_leftovers() if dist.get_rank() == 0 else None)
        if errors:
            raise RuntimeError(f"{folder} holds a half-written checkpoint that cannot be removed: {'; '.join(errors)}")

    def save(self, step: int, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
        """Begin to save, and return when `tensors` are copied to host memory: they may change from then on.

        A save still under way is waited for first. A whole checkpoint of the same step is replaced.

        Args:
            step: names the checkpoint.
            tensors: DTensors, or plain tensors that are the same on every rank that gives their name. Ranks may give
                different names. A name means one global tensor.
            extra: what JSON knows and small CPU tensors, nested; the first rank's are kept.

        Raises:
            RuntimeError: on every rank, when the save before this one failed.
        """
        self.wait()
        path = self.folder / f"step-{step:08}"
        writer = SafetensorsWriter(path, extra, finished=self._remove_old)
        response = async_save(
            dict(tensors),
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self.group,
            async_stager=self.stager,
        )
        assert isinstance(response, Future)
        self.saving = (path, response)

    def wait(self) -> None:
        """Return when no save is under way. Raises RuntimeError, on every rank, when it failed on any."""
        if self.saving is None:
            return
        (path, response), self.saving = self.saving, None
        try:
            response.result()
        except (CheckpointException, Exception) as error:
            raise RuntimeError(f"checkpoint {path} was not saved: {_causes(error)}") from error

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fill `tensors` from a checkpoint of any layout and number of ranks, in place; gives its `extra`.

        A rank reads only the boxes it holds. Names that no rank asks for stay unread.

        Raises:
            ValueError: on every rank, before any tensor is written to, when `path` is no checkpoint, or when it lacks
                a name that a rank asks for or has it in another shape or dtype; names all of them.
            RuntimeError: on every rank, when a file cannot be read.
        """
        self.wait()
        if violations := self._gathered(lambda: _violations(path, tensors)):
            raise ValueError("; ".join(violations))
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            load(dict(tensors), storage_reader=SafetensorsReader(path), planner=planner, process_group=self.group)
        except CheckpointException as error:
            raise RuntimeError(f"checkpoint {path} cannot be read: {_causes(error)}") from error
        return read_extra(path)

    def _gathered(self, check: Callable[[], str | None]) -> list[str]:
        """What `check` has to say, or fails with, on any rank: the same list on all of them."""
        try:
            said = check()
        except (ValueError, OSError) as error:
            said = str(error)
        gathered: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, said, group=self.group)
        return sorted({message for message in gathered if message})

    def _remove_leftovers(self) -> None:
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if _LEFTOVER.fullmatch(path.name):
                    shutil.rmtree(path)

    def _remove_old(self) -> None:
        found = _whole(self.folder)
        for step in sorted(found)[: -self.keep]:
            remove_checkpoint(found[step])


def _whole(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    matches = ((_WHOLE.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match}


def _violations(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """What of `tensors` the checkpoint does not hold."""
    saved = SafetensorsReader(path).read_metadata().state_dict_metadata
    missing = sorted(tensors.keys() - saved.keys())
    said = [f"{path} has no {', '.join(missing)}: it is of another model"] if missing else []
    for name in sorted(tensors.keys() & saved.keys()):
        held, asked = saved[name], tensors[name]
        assert isinstance(held, TensorStorageMetadata)
        if (held.size, held.properties.dtype) != (asked.shape, asked.dtype):
            there = f"{tuple(held.size)} {held.properties.dtype}"
            said.append(f"{path} has {name} as {there}, not {tuple(asked.shape)} {asked.dtype}")
    return "; ".join(said)


def _causes(error: BaseException) -> str:
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    causes = ((rank, wrapped[0]) for rank, wrapped in sorted(error.failures.items()))
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in causes)
