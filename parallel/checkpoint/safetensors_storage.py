"""Storage of torch.distributed.checkpoint in safetensors files and one JSON index, without pickles.

    FOLDER/
        checkpoint.json              tensors: name -> dtype, shape and boxes, each with its file; extra;
                                     files: name -> checksum; checksum: of the text before it
        rank-00000.safetensors       the boxes written by rank 0, named NAME@OFFSETS
        extra.safetensors            the tensors of `extra`

A box is the part of a global tensor at some offsets. A checkpoint is written to FOLDER.partial, and renamed when every
rank's part is on disk: FOLDER is either complete or absent. Whether it is still as it was written, checksums say.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

INDEX = "checkpoint.json"
EXTRA = "extra.safetensors"
PARTIAL = ".partial"  # being written
REMOVING = ".old"  # being removed
_CHECKSUM = ', "checksum": "'  # ends the index, before the checksum of the text up to here
_BLOCK = 2**24  # bytes read at a time
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # say what a folder holds that is there
_TENSOR = "tensor in " + EXTRA  # only key of the object that replaces a tensor in the JSON of `extra`


class DamagedCheckpoint(ValueError):
    """A checkpoint is not, or no longer, what was written; the message names the path."""


class SafetensorsWriter(StorageWriter):
    """Writes one checkpoint, whose final path is `folder`; `finished` is called by the first rank at the end."""

    def __init__(self, folder: Path, extra: Mapping[str, Any], finished: Callable[[], None]) -> None:
        self.folder, self.partial = folder, folder.with_name(folder.name + PARTIAL)
        self.extra, self.finished = extra, finished

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: it serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no role needs setup."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder before any rank writes to it, and assign a file to each rank."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)
        return [replace(plan, storage_data=f"rank-{rank:05}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        boxes: dict[str, Tensor] = {}
        storages: set[int] = set()
        for item in plan.items:
            box = planner.resolve_data(item)
            assert isinstance(box, Tensor), f"{item.index.fqn} is not a tensor"
            box = box.contiguous()
            if (storage := box.untyped_storage().data_ptr()) in storages:
                box = box.clone()  # safetensors does not support tensors that share memory, such as tied weights
            storages.add(storage)
            boxes[_key(item.index)] = box
        if not boxes:
            return _done([])
        path = self.partial / plan.storage_data
        save_file(boxes, path)
        _sync(path)
        file = (path.name, _checksum_of(path))
        return _done([WriteResult(item.index, boxes[_key(item.index)].nbytes, file) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, Tensor] = {}
        extra = _without_tensors(self.extra, tensors, "")
        saved = save(tensors)
        files = dict(result.storage_data for of_rank in results for result in of_rank)
        files[EXTRA] = _checksum(saved)
        text = json.dumps({"tensors": _index(metadata, results), "extra": extra, "files": files})[:-1]
        (self.partial / EXTRA).write_bytes(saved)
        (self.partial / INDEX).write_text(f'{text}{_CHECKSUM}{_checksum(text.encode())}"}}')
        for path in (self.partial / EXTRA, self.partial / INDEX, self.partial):
            _sync(path)
        if self.folder.exists():
            remove_checkpoint(self.folder)
        self.partial.rename(self.folder)
        _sync(self.folder.parent)
        self.finished()


class SafetensorsReader(FileSystemReader):
    """Reads checkpoints of `SafetensorsWriter`; each rank reads only the boxes it needs."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        files: dict[MetadataIndex, str] = {}
        for name, entry in _read_index(Path(self.path))["tensors"].items():
            boxes = [ChunkStorageMetadata(torch.Size(b["offset"]), torch.Size(b["shape"])) for b in entry["boxes"]]
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), boxes)
            files.update({MetadataIndex(name, torch.Size(b["offset"])): b["file"] for b in entry["boxes"]})
        return Metadata(tensors, storage_data=files)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = defaultdict(list)
        for item in plan.items:
            items[self.storage_data[item.storage_index]].append(item)
        for name, wanted in items.items():
            with safe_open(Path(self.path, name), framework="pt") as file:
                for item in wanted:
                    part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                    key = _key(item.storage_index)
                    target = planner.resolve_tensor(item)
                    target.detach().copy_(file.get_slice(key)[part] if part else file.get_tensor(key))
                    planner.commit_tensor(item, target)
        return _done(None)


def read_extra(folder: Path) -> dict[str, Any]:
    """Read the `extra` of a complete checkpoint, without a process group. Raise DamagedCheckpoint if `folder` is not a
    checkpoint, or its `extra` is damaged, and OSError if it cannot be read, whatever it holds."""
    index = _read_index(folder)
    try:
        saved = (folder / EXTRA).read_bytes()
        checksum = _checksum(saved)
        if index["files"].get(EXTRA, checksum) != checksum:
            raise DamagedCheckpoint(f"{folder / EXTRA} does not match its checksum")
        return _with_tensors(index["extra"], load(saved))
    except (OSError, SafetensorError) as error:
        _check_read(folder, error)
        raise DamagedCheckpoint(f"{folder / EXTRA} cannot be read: {error}") from error


def damaged_files(folder: Path, part: slice) -> Iterator[str]:
    """Yield what is wrong with the files of a checkpoint that `part` selects of all, one message each. Raise
    DamagedCheckpoint if `folder` is not a checkpoint, or its index is damaged, and OSError if a file cannot be read,
    whatever it holds."""
    for name, checksum in sorted(_read_index(folder)["files"].items())[part]:
        try:
            if _checksum_of(folder / name) != checksum:
                yield f"{folder / name} does not match its checksum"
        except OSError as error:
            _check_read(folder, error)
            yield f"{folder / name} cannot be read: {error}"


def remove_checkpoint(folder: Path) -> None:
    """Remove a complete checkpoint, renaming it first so that a partly removed one never looks complete."""
    removing = folder.with_name(folder.name + REMOVING)
    with suppress(FileNotFoundError):
        shutil.rmtree(removing)
    shutil.rmtree(folder.rename(removing))


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        text = (folder / INDEX).read_text()
        before, _, after = text.rpartition(_CHECKSUM)
        whole = after == f'{_checksum(before.encode())}"}}'
        index = json.loads(text) if whole or not before else {}
    except (OSError, ValueError) as error:
        _check_read(folder, error)
        raise DamagedCheckpoint(f"{folder} is not a checkpoint: {error}") from error
    if whole:
        return index
    if not before and index.keys() == {"tensors", "extra"}:  # written without checksums
        return {**index, "files": {}}
    raise DamagedCheckpoint(f"{folder / INDEX} does not match its checksum")


def _check_read(folder: Path, error: Exception) -> None:
    """Raise `error` again unless it says what a checkpoint holds, or lacks while its folder is there."""
    if isinstance(error, OSError) and not (isinstance(error, _MISSING) and folder.is_dir()):
        raise error


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _checksum_of(path: Path) -> str:
    checksum = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
    return checksum.hexdigest()


def _index(metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, Any]:
    files = {result.index: result.storage_data[0] for of_rank in results for result in of_rank}

    def entry(name: str, tensor: TensorStorageMetadata) -> dict[str, Any]:
        boxes = [
            {"offset": list(box.offsets), "shape": list(box.sizes), "file": files[MetadataIndex(name, box.offsets)]}
            for box in tensor.chunks
        ]
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(tensor.size), "boxes": boxes}

    known = metadata.state_dict_metadata.items()
    return {name: entry(name, tensor) for name, tensor in known if isinstance(tensor, TensorStorageMetadata)}


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _without_tensors(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return `value` for JSON: each tensor is added to `tensors` under its path and replaced by a reference."""
    if isinstance(value, Tensor):
        tensors[path] = value.contiguous().clone()
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        return {key: _without_tensors(part, tensors, f"{path}/{key}") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(part, tensors, f"{path}/{place}") for place, part in enumerate(value)]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_with_tensors(part, tensors) for part in value]
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _with_tensors(part, tensors) for key, part in value.items()}
    return value


def _sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
