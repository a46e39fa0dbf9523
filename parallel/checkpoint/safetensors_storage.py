"""Storage of torch.distributed.checkpoint in safetensors files and one JSON index, without pickles.

    FOLDER/
        checkpoint.json              tensors: name -> dtype, shape and boxes, each with its file; extra
        rank-00000.safetensors       the boxes written by rank 0, named NAME@OFFSETS
        extra.safetensors            the tensors of `extra`

A box is the part of a global tensor at some offsets. A checkpoint is written to FOLDER.partial, and renamed when every
rank's part is on disk: FOLDER is either complete or absent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
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
_TENSOR = "tensor in " + EXTRA  # only key of the object that replaces a tensor in the JSON of `extra`


class SafetensorsWriter(StorageWriter):
    """Writes one checkpoint, whose final path is `folder`; `finished` is called by the first rank at the end."""

    def __init__(self, folder: Path, extra: Mapping[str, Any], finished: Callable[[], None]) -> None:
        self.folder, self.partial = folder, folder.with_name(folder.name + PARTIAL)
        self.extra, self.finished = extra, finished

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: a writer is used once."""

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
        results = []
        for item in plan.items:
            box = planner.resolve_data(item)
            assert isinstance(box, Tensor), f"{item.index.fqn} is not a tensor"
            box = box.contiguous()
            if (storage := box.untyped_storage().data_ptr()) in storages:
                box = box.clone()  # safetensors does not support tensors that share memory, such as tied weights
            storages.add(storage)
            boxes[_key(item.index)] = box
            results.append(WriteResult(item.index, box.nbytes, plan.storage_data))
        if boxes:
            _write(boxes, self.partial / plan.storage_data)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, Tensor] = {}
        index = {"tensors": _index(metadata, results), "extra": _without_tensors(self.extra, tensors, "")}
        _write(tensors, self.partial / EXTRA)
        (self.partial / INDEX).write_text(json.dumps(index))
        _sync(self.partial / INDEX)
        _sync(self.partial)
        if self.folder.exists():
            remove_checkpoint(self.folder)
        self.partial.rename(self.folder)
        _sync(self.folder.parent)
        self.finished()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """Reads checkpoints of `SafetensorsWriter`; each rank reads only the boxes it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[MetadataIndex, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: a reader is used once."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        files: dict[MetadataIndex, str] = {}
        for name, entry in _read_index(self.folder)["tensors"].items():
            boxes = [ChunkStorageMetadata(torch.Size(b["offset"]), torch.Size(b["shape"])) for b in entry["boxes"]]
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), boxes)
            files.update({MetadataIndex(name, torch.Size(b["offset"])): b["file"] for b in entry["boxes"]})
        return Metadata(tensors, storage_data=files)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.files = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = defaultdict(list)
        for item in plan.items:
            items[self.files[item.storage_index]].append(item)
        for name, wanted in items.items():
            with safe_open(self.folder / name, framework="pt") as file:
                for item in wanted:
                    part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                    key = _key(item.storage_index)
                    target = planner.resolve_tensor(item)
                    target.detach().copy_(file.get_slice(key)[part] if part else file.get_tensor(key))
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def read_extra(folder: Path) -> dict[str, Any]:
    """Read the `extra` of a complete checkpoint, without a process group.

    Raises:
        ValueError: if `folder` is not a checkpoint.
    """
    return _with_tensors(_read_index(folder)["extra"], load_file(folder / EXTRA))


def remove_checkpoint(folder: Path) -> None:
    """Remove a complete checkpoint, renaming it first so that a partly removed one never looks complete."""
    removing = folder.with_name(folder.name + REMOVING)
    with suppress(FileNotFoundError):
        shutil.rmtree(removing)
    shutil.rmtree(folder.rename(removing))


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not a checkpoint: {error}") from error


def _index(metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, Any]:
    files = {result.index: result.storage_data for of_rank in results for result in of_rank}

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


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    _sync(path)


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
