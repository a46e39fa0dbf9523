"""Checkpoints load bitwise into any layout, and are complete or absent whenever a rank is killed."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.harness.ranks import RankError, RankPool
from usp.parallel import (
    Checkpointer,
    DamagedCheckpoint,
    complete_checkpoints,
    latest,
    local_tensor,
    read_extra,
    set_aside,
    verify,
)
from usp.parallel.checkpoint import safetensors_storage


def values() -> dict[str, Tensor]:
    """Return global tensors of every kind: uneven, shorter than the number of ranks, empty, 0-dim, with nan."""
    random = torch.Generator().manual_seed(0)
    tensors = {
        "even": torch.randn(16, 8, generator=random),
        "uneven": torch.randn(11, 5, generator=random),
        "short": torch.randn(3, 4, generator=random),
        "bf16": torch.randn(10, 4, generator=random).bfloat16(),
        "cube": torch.randn(6, 3, 5, generator=random),
        "ids": torch.randint(-(2**62), 2**62, (7,), generator=random),
        "empty": torch.empty(0, 4),
        "step": torch.tensor(20.0),
    }
    tensors["even"][0, 0] = float("nan")
    tensors["even"][1, 1] = -0.0
    return tensors


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


# Layouts: functions from global tensors to this rank's tensors


def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def fsdp(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shard every tensor over all ranks by its first dim."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(t, mesh, [Shard(0)]) if t.ndim else t.clone() for name, t in tensors.items()}


def hsdp(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shard every tensor over half of the ranks, in two replicas."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    placements = [Replicate(), Shard(0)]
    return {name: distribute_tensor(t, mesh, placements) if t.ndim else t.clone() for name, t in tensors.items()}


def tp_fsdp(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Shard by tp=2 along the first or last dim, then by FSDP2 along the first."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    held = {}
    for place, (name, tensor) in enumerate(tensors.items()):
        if tensor.ndim < 2 or not tensor.numel():
            held[name] = tensor.clone()
            continue
        module = nn.Module()
        sharded = distribute_tensor(tensor, mesh["tp"], [Shard(0 if place % 2 else tensor.ndim - 1)])
        module.weight = nn.Parameter(sharded)
        held[name] = fully_shard(module, mesh=mesh["fsdp"]).weight.detach()
    return held


def stages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Divide names over two pipeline stages, except one that both have, and shard over the ranks of a stage."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "fsdp"))
    own = {
        name: t
        for place, (name, t) in enumerate(tensors.items())
        if name == "step" or place % 2 == mesh.get_local_rank("pp")
    }
    return {
        name: distribute_tensor(t, mesh["fsdp"], [Shard(0)], src_data_rank=None) if t.ndim else t.clone()
        for name, t in own.items()
    }


LAYOUTS = {layout.__name__: layout for layout in (plain, fsdp, hsdp, tp_fsdp, stages)}


def zeroed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for tensor in tensors.values():
        local_tensor(tensor).zero_()
    return dict(tensors)


def save(folder: Path, layout: str, step: int, extra: dict[str, Any]) -> None:
    checkpointer = Checkpointer(folder, keep=2, device_type="cpu")
    checkpointer.save(step, LAYOUTS[layout](values()), extra)
    checkpointer.wait()


def differing(path: Path, layout: str) -> list[str]:
    """Load a checkpoint and return the names whose values are not bitwise equal to `values`."""
    expected, held = LAYOUTS[layout](values()), zeroed(LAYOUTS[layout](values()))
    Checkpointer(path.parent, keep=2, device_type="cpu").load(path, held)
    return [
        name for name in held if not torch.equal(bits(local_tensor(held[name])), bits(local_tensor(expected[name])))
    ]


@pytest.mark.slow
def test_checkpoints_of_every_layout_load_bitwise_into_every_layout(
    ranks: RankPool, tmp_path: Path, exhaustive: bool
) -> None:
    """Write with every layout and read with every layout, on different numbers of ranks. Without --exhaustive, a third
    of the pairs."""
    written = [("fsdp", 8), ("tp_fsdp", 4), ("hsdp", 4), ("stages", 4), ("plain", 1)]
    read = [("tp_fsdp", 4), ("hsdp", 4), ("stages", 2), ("fsdp", 3), ("plain", 1)]
    for number, (saved_as, world_size) in enumerate(written):
        ranks.run(save, world_size, tmp_path / saved_as, saved_as, 20, {})
        path = tmp_path / saved_as / "step-00000020"
        for layout, size in read if exhaustive else read[number % 3 :: 3]:
            assert ranks.run(differing, size, path, layout) == [[]] * size, (saved_as, layout)


def test_replicated_tensors_are_written_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, 4, tmp_path, "hsdp", 20, {})
    index = json.loads((tmp_path / "step-00000020" / "checkpoint.json").read_text())
    for name, tensor in values().items():
        boxes = index["tensors"][name]["boxes"]
        assert sum(torch.Size(box["shape"]).numel() for box in boxes) == tensor.numel(), name
    assert not [path for path in tmp_path.rglob("*") if path.suffix not in ("", ".json", ".safetensors")]


def test_extra_is_restored_without_a_process_group(ranks: RankPool, tmp_path: Path) -> None:
    extra = {"step": 20, "data": {"ids": torch.arange(6).view(2, 3), "big": 2**100}, "list": [1.5, None, "x", [True]]}
    ranks.run(save, 2, tmp_path, "fsdp", 20, extra)
    read = read_extra(tmp_path / "step-00000020")
    assert torch.equal(read["data"].pop("ids"), extra["data"].pop("ids"))
    assert read == extra
    (tmp_path / "step-00000030").mkdir()
    with pytest.raises(DamagedCheckpoint, match="step-00000030 is not a checkpoint"):
        read_extra(tmp_path / "step-00000030")
    with pytest.raises(FileNotFoundError):  # it is not there, which is no damage
        read_extra(tmp_path / "step-00000040")


# Atomicity


def save_and_change(folder: Path) -> list[str]:
    """Modify every tensor as soon as save() returns, several times, and return the checkpoints with wrong values."""
    checkpointer = Checkpointer(folder, keep=10, device_type="cpu")
    tensors = fsdp({"big": torch.zeros(1024, 1024), "small": torch.zeros(5), "step": torch.zeros(())})
    tensors["tied"] = tensors["big"]
    for step in range(1, 5):
        for tensor in tensors.values():
            local_tensor(tensor).fill_(step)
        checkpointer.save(step, tensors, {"step": step})
    zeroed(tensors)
    checkpointer.wait()
    wrong = []
    for step in range(1, 5):
        path = folder / f"step-{step:08}"
        extra = checkpointer.load(path, tensors)
        held = [local_tensor(tensor) for tensor in tensors.values()]
        if extra != {"step": step} or not all(bool((part == step).all()) for part in held):
            wrong.append(path.name)
    return wrong


@pytest.mark.slow
def test_a_checkpoint_has_the_values_from_before_save_returned(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(save_and_change, 2, tmp_path) == [[], []]


def save_steps(folder: Path, steps: list[int], keep: int) -> None:
    checkpointer = Checkpointer(folder, keep=keep, device_type="cpu")
    for step in steps:
        checkpointer.save(step, fsdp({"weight": torch.full((4,), float(step))}), {})
    checkpointer.wait()


def test_the_newest_are_kept_and_only_incomplete_checkpoints_removed(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("step-00000007.partial", "step-00000003.old", "step-7.partial", "notes.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert latest(tmp_path) is None and latest(tmp_path / "nothing") is None
    ranks.run(save_steps, 2, tmp_path, [9, 10, 100, 100], 2)  # the last one replaces one of the same step
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["notes.partial", "step-00000010", "step-00000100", "step-7.partial"]
    assert latest(tmp_path) == tmp_path / "step-00000100"


def save_ranked(folder: Path, steps: list[int], rankings: list[list[int]]) -> None:
    checkpointer = Checkpointer(folder, keep=1, device_type="cpu")
    for step, best_first in zip(steps, rankings, strict=True):
        checkpointer.save(step, fsdp({"weight": torch.full((4,), float(step))}), {}, best_first)
    checkpointer.wait()


@pytest.mark.slow
def test_the_best_that_there_is_is_kept(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    ranks.run(save_ranked, 2, tmp_path / "a", [1, 2, 3, 4], [[], [2], [2, 1], [2, 3, 1]])
    assert sorted(complete_checkpoints(tmp_path / "a")) == [2, 4]
    # A step without a checkpoint, such as one whose save failed, does not displace the best of the others.
    ranks.run(save_ranked, 2, tmp_path / "a", [5, 6], [[9, 2, 5], [6, 9, 2]])
    assert sorted(complete_checkpoints(tmp_path / "a")) == [6]


def save_until_killed(folder: Path, victim: int, delay: float, saved_before: int) -> None:
    checkpointer = Checkpointer(folder, keep=2, device_type="cpu")
    path = latest(folder)
    tensors = fsdp({"weight": torch.zeros(2048, 1024)})
    begin = checkpointer.load(path, tensors)["step"] if path else 0
    weight = tensors["weight"]
    assert isinstance(weight, DTensor)
    assert bool((weight.to_local() == begin).all())
    for step in range(begin + 1, begin + 1 + saved_before):
        weight.to_local().fill_(step)
        checkpointer.save(step, tensors, {"step": step})
        checkpointer.wait()
    begin += saved_before
    if dist.get_rank() == victim:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, delay)
    for step in range(begin + 1, begin + 1000):
        weight.to_local().fill_(step)
        checkpointer.save(step, tensors, {"step": step})


@pytest.mark.slow
def test_a_rank_killed_at_any_time_leaves_complete_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    """Each round loads the last checkpoint of the previous one, and is killed while saving."""
    steps = [0]
    for victim, delay, saved_before in [(0, 0.05, 0), (1, 0.16, 1), (0, 0.31, 1)]:
        with pytest.raises(RankError, match="the worker died"):
            ranks.run(save_until_killed, 2, tmp_path, victim, delay, saved_before)
        path = latest(tmp_path)
        steps.append(read_extra(path)["step"] if path else 0)
    assert steps == sorted(steps) and steps[-1] > 0
    ranks.run(save_steps, 2, tmp_path, [10**6], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-01000000"]


# Failures


def save_beyond_a_limit(folder: Path) -> list[str]:
    """Limit the file size of rank 1 below that of its part, as a full disk would."""
    checkpointer = Checkpointer(folder, keep=2, device_type="cpu")
    tensors = fsdp({"weight": torch.zeros(64, 1024)})
    messages = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    for save_again in (True, False):
        checkpointer.save(5, tensors, {})
        while not checkpointer.finished():
            time.sleep(0.01)
        try:
            checkpointer.save(6, tensors, {}) if save_again else checkpointer.wait()
        except RuntimeError as error:
            messages.append(str(error))
    dist.barrier()
    messages += map(str, folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpointer.save(7, tensors, {})
    assert checkpointer.wait() and not checkpointer.wait()
    return messages


@pytest.mark.slow
def test_a_failure_in_the_background_is_raised_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for messages in ranks.run(save_beyond_a_limit, 2, tmp_path):
        assert len(messages) == 2  # and nothing is left of a save that failed
        for message in messages:
            assert message.startswith(f"checkpoint {tmp_path / 'step-00000005'} was not saved: rank 1: ")
            assert "File too large" in message
    assert latest(tmp_path) == tmp_path / "step-00000007"


def load_wrong(folder: Path) -> tuple[list[str], float]:
    checkpointer = Checkpointer(folder, keep=2, device_type="cpu")
    kept = torch.full((3, 4), 7.0)
    requested = [{"uneven": torch.zeros(11, 6), "bias": torch.zeros(1)}, {"short": kept, "bf16": torch.zeros(10, 4)}]
    messages = []
    for path, tensors in [(folder / "step-00000020", requested[dist.get_rank()]), (folder / "step-00000040", {})]:
        try:
            checkpointer.load(path, tensors)
        except (ValueError, OSError) as error:
            messages.append(str(error))
    return messages, kept.mean().item()


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, 1, tmp_path, "plain", 20, {})
    (first, _), (second, kept) = ranks.run(load_wrong, 2, tmp_path)
    assert first == second and kept == 7.0  # the matching tensor was not modified
    for part in (
        "does not contain bias: it belongs to another model",
        "has uneven as (11, 5) torch.float32, expected (11, 6) torch.float32",
        "has bf16 as (10, 4) torch.bfloat16, expected (10, 4) torch.float32",
    ):
        assert part in first[0]
    assert "step-00000040 cannot be read: " in first[1]


def finished_alone(folder: Path) -> bool:
    """Ask on rank 0 only: nothing is sent while nothing is saved."""
    checkpointer = Checkpointer(folder, keep=2, device_type="cpu")
    return dist.get_rank() == 0 and checkpointer.finished()


def test_asking_costs_nothing_while_nothing_is_saved(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(finished_alone, 2, tmp_path) == [False, False]


# Checksums


def load_damaged(path: Path) -> tuple[str, float]:
    held = zeroed(fsdp(values()))
    try:
        Checkpointer(path.parent, keep=2, device_type="cpu").load(path, held)
    except DamagedCheckpoint as error:
        return str(error), float(sum(local_tensor(tensor).double().abs().sum() for tensor in held.values()))
    return "", 0.0


def overwrite(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("rank-00001.safetensors", overwrite, "rank-00001.safetensors does not match its checksum"),
        ("rank-00000.safetensors", truncate, "rank-00000.safetensors does not match its checksum"),
        ("rank-00001.safetensors", Path.unlink, "rank-00001.safetensors cannot be read: "),
        ("extra.safetensors", overwrite, "extra.safetensors does not match its checksum"),
        ("checkpoint.json", overwrite, "checkpoint.json does not match its checksum"),
        ("checkpoint.json", truncate, "checkpoint.json does not match its checksum"),
        ("checkpoint.json", Path.unlink, "is not a checkpoint: "),
    ],
)
@pytest.mark.slow
def test_a_damaged_file_is_an_error_on_every_rank(
    ranks: RankPool, tmp_path: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    ranks.run(save, 2, tmp_path, "fsdp", 20, {"data": torch.arange(1000)})
    path = tmp_path / "step-00000020"
    damage(path / name)
    for message, loaded in ranks.run(load_damaged, 2, path):
        assert message.startswith(f"checkpoint {path} is damaged: {path}") and said in message
        assert loaded == 0.0  # no tensor was modified
    if not name.startswith("rank"):
        with pytest.raises(DamagedCheckpoint, match=str(path)):
            read_extra(path)


def verify_unreadable(path: Path, number: int) -> str:
    """Verify where rank 1 cannot read the files it checks, and return what is raised."""
    failing = patch.object(safetensors_storage, "_checksum_of", side_effect=OSError(number, os.strerror(number)))
    try:
        with failing if dist.get_rank() == 1 else nullcontext():
            verify(path)
    except (DamagedCheckpoint, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_what_cannot_be_read_is_not_damaged(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, 2, tmp_path, "fsdp", 20, {})
    path = tmp_path / "step-00000020"
    overwrite(path / "extra.safetensors")  # which rank 0 checks
    for number in (errno.EIO, errno.ESTALE, errno.EACCES):
        for said in ranks.run(verify_unreadable, 2, path, number):
            assert said == f"OSError: checkpoint {path} cannot be read: [Errno {number}] {os.strerror(number)}"
    assert all("DamagedCheckpoint" in said for said in ranks.run(verify_unreadable, 2, path, errno.ENOENT))
    with patch.object(Path, "read_text", side_effect=OSError(errno.EIO, "broken")), pytest.raises(OSError, match="bro"):
        read_extra(path)
    with patch.object(Path, "iterdir", side_effect=OSError(errno.EIO, "broken")), pytest.raises(OSError, match="bro"):
        latest(tmp_path)


def files_hashed(path: Path) -> list[str]:
    names, checksum_of = [], safetensors_storage._checksum_of
    with patch.object(safetensors_storage, "_checksum_of", lambda file: names.append(file.name) or checksum_of(file)):
        verify(path)
    return names


@pytest.mark.slow
def test_each_file_is_verified_by_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, 4, tmp_path, "fsdp", 20, {})
    path = tmp_path / "step-00000020"
    by_rank = ranks.run(files_hashed, 3, path)
    assert sorted(name for names in by_rank for name in names) == sorted(file.name for file in path.glob("*.safet*"))
    assert max(map(len, by_rank)) == 2  # of five


def test_a_damaged_checkpoint_is_set_aside_and_kept(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_steps, 1, tmp_path, [1, 2], 2)
    for number, name in enumerate(("step-00000002.damaged", "step-00000002.damaged-2"), start=1):
        assert set_aside(tmp_path / "step-00000002").name == name
        assert latest(tmp_path) == tmp_path / "step-00000001"
        ranks.run(save_steps, 1, tmp_path, [2], 2)
        assert len(list(tmp_path.iterdir())) == 2 + number


@pytest.mark.slow
def test_a_checkpoint_without_checksums_can_be_read(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, 2, tmp_path, "fsdp", 20, {"step": 20})
    index = tmp_path / "step-00000020" / "checkpoint.json"
    old = {key: value for key, value in json.loads(index.read_text()).items() if key in ("tensors", "extra")}
    index.write_text(json.dumps(old))
    assert ranks.run(differing, 2, index.parent, "fsdp") == [[], []] and read_extra(index.parent) == {"step": 20}


def test_keep_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpointer(tmp_path, keep=0, device_type="cpu")
