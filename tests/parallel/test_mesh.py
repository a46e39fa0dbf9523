"""The mesh on real ranks: coordinates, comparison of values, and FSDP's gradient sums."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.ranks import RankError, RankPool
from usp.parallel import (
    ZERO_STAGES,
    ParallelDims,
    ParallelMesh,
    ProcessGroups,
    RanksDisagree,
    apply_fsdp,
    before_micro_batch,
    clip_grad_norm,
    format_ranks,
)

AXES = ("dp_replicate", "dp_shard", "ring", "ulysses", "sp", "batch", "fsdp", "loss")


def coordinates(dims: ParallelDims) -> dict[str, tuple[int, int]]:
    mesh = ParallelMesh.create(dims)
    assert all(dist.get_world_size(mesh.group(axis)) == mesh.size(axis) for axis in AXES)
    found = {axis: (mesh.rank(axis), mesh.size(axis)) for axis in AXES}
    assert mesh.dims.coordinates(dist.get_rank()).items() >= {axis: rank for axis, (rank, _) in found.items()}.items()
    return found


@pytest.mark.slow
def test_coordinates_follow_sp_order(ranks: RankPool) -> None:
    outer = ranks.run(coordinates, 8, ParallelDims(ring=2, ulysses=2, dp_replicate=2))
    assert [c["ring"][0] for c in outer] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [c["ulysses"][0] for c in outer] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [c["sp"] for c in outer] == [(rank % 4, 4) for rank in range(8)]
    assert [c["batch"] for c in outer] == [(rank // 4, 2) for rank in range(8)]
    assert [c["fsdp"] for c in outer] == [(rank % 4, 4) for rank in range(8)]
    assert [c["loss"] for c in outer] == [(rank, 8) for rank in range(8)]
    inner = ranks.run(coordinates, 8, ParallelDims(ring=2, ulysses=4, sp_order="ulysses-outer"))
    assert [c["ring"][0] for c in inner] == [0, 1] * 4
    assert [c["ulysses"][0] for c in inner] == [0, 0, 1, 1, 2, 2, 3, 3]


def meshes_side_by_side() -> tuple[int, list[tuple[int, float]]]:
    """Return the number of groups this rank needs for four meshes, and size and rank sum of each mesh it is in."""
    groups, found = ProcessGroups(), []
    for ranks, dims in (
        (None, ParallelDims(pp=2, ulysses=2, tp=2)),
        (range(4), ParallelDims(ring=2, tp=2)),
        (range(4, 8), ParallelDims(ulysses=4)),
        ((1, 3, 6), ParallelDims(dp_replicate=3)),
    ):
        mesh = ParallelMesh.create(dims, ranks=ranks, groups=groups)
        if not mesh.member:
            assert dist.get_rank() not in mesh.ranks
            continue
        number = torch.tensor(float(dist.get_rank()))
        for axis in ("pp", "loss", "tp"):
            dist.all_reduce(number, group=mesh.group(axis))
        place = mesh.dims.coordinates(mesh.ranks.index(dist.get_rank()))
        assert place["loss"] == mesh.rank("loss") and place["tp"] == mesh.rank("tp")
        found.append((len(mesh.ranks), number.item()))
    return sum(group is not None for group in groups._made.values()), found


@pytest.mark.slow
def test_meshes_over_different_ranks_coexist_and_share_groups(ranks: RankPool) -> None:
    for rank, (made, found) in enumerate(ranks.run(meshes_side_by_side, 8)):
        half = (4, 6.0) if rank < 4 else (4, 22.0)
        assert found == [(8, 28.0), half] + ([(3, 10.0)] if rank in (1, 3, 6) else [])
        assert made <= 11, made  # one group per axis and view would be 23 for each mesh


def expert_coordinates(dims: ParallelDims) -> tuple[int, int, int]:
    mesh = ParallelMesh.create(dims)
    return mesh.rank("efsdp"), mesh.rank("ep"), mesh.size("efsdp")


@pytest.mark.slow
def test_ep_regroups_the_ranks_that_hold_different_tokens(ranks: RankPool) -> None:
    found = ranks.run(expert_coordinates, 8, ParallelDims(pp=2, ulysses=2, tp=2, ep=2))
    assert found == [(rank % 4 // 2, rank % 2, 2) for rank in range(8)]
    with pytest.raises(ValueError, match=r"ep=3 must divide .* = 8 ranks that it regroups: use ep=1, 2, 4, 8"):
        ParallelDims(ulysses=4, tp=2, ep=3).resolve(8)


def disagree(axis: str) -> list[str]:
    """Return the messages of values that rank 0, or rank 2, holds differently."""
    mesh, rank = ParallelMesh.create(ParallelDims(ring=2, ulysses=2)), dist.get_rank()
    values = [
        {"seq_len": 64 if rank else 32, "degrees": ParallelDims(ring=2, tp=2 if rank == 2 else 1), "seed": 0},
        {"model": {"rope": {"factor": 4.0}} if rank == 2 else {}},
        "x" * 20_000 + str(min(rank, 1)),
        "x" * 5_000 + str(min(rank, 1)) + "y" * 5_000,
        8 if rank else 4,
    ]
    mesh.agree("the same", "the plan", (axis,))
    messages = []
    for value in values:
        with pytest.raises(RanksDisagree) as caught:
            mesh.agree(value, "the plan", (axis,))
        messages.append(str(caught.value).removeprefix("the plan must be the same on all ranks, but differs: "))
    return messages


@pytest.mark.slow
def test_a_disagreement_is_the_same_error_on_every_rank_and_shows_what_differs(ranks: RankPool) -> None:
    first, *others = ranks.run(disagree, 4, "loss")
    assert others == [first] * 3
    by_field, nested, unsent, around, plain = first
    assert by_field == "seq_len = 32 on rank 0, 64 on ranks 1-3; degrees.tp = 1 on ranks 0-1,3, 2 on rank 2"
    missing, only = "model = {} on ranks 0-1,3, missing on rank 2", "missing on ranks 0-1,3, 4.0 on rank 2"
    assert nested == f"{missing}; model.rope.factor = {only}"
    assert unsent == "beyond the first 10000 characters"
    assert re.fullmatch(r"\.\.\.x{75}0y{224}\.\.\. on rank 0, \.\.\.x{75}1y{224}\.\.\. on ranks 1-3", around)
    assert plain == "4 on rank 0, 8 on ranks 1-3"


def test_ranks_are_formatted_as_runs() -> None:
    assert format_ranks([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert format_ranks([3], ", ") == "3" and format_ranks([1, 2, 4], ", ") == "1-2, 4"


def wrong_world() -> None:
    ParallelMesh.create(ParallelDims(ring=3))


def test_degrees_are_checked_before_any_group_is_created(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="ring=3 = 3 ranks must divide the world size 2"):
        ranks.run(wrong_world, 2)


def test_a_mesh_requires_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ParallelMesh.create(ParallelDims())


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ParallelDims(dp_shard=1)
    try:
        for _ in range(2):
            assert ParallelMesh.create(one, device_type="cpu").size("sp") == 1
            assert ParallelMesh.create(ParallelDims()).size("loss") == 1, "in the same world"
            dist.destroy_process_group()
        monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
        with pytest.raises(RuntimeError, match="init_process_group"):
            ParallelMesh.create(one)
        monkeypatch.undo()
        for wrong in ({"ring": 2}, {"ring": 2, "dp_shard": 1}):
            with pytest.raises(RuntimeError, match=r"may give ParallelDims\(dp_shard=1\)"):
                ParallelMesh.create(ParallelDims(**wrong))
        assert not dist.is_initialized()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def summed_gradients(dims: ParallelDims, zero: int, micro_batches: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return clipped gradients under FSDP with different inputs on each rank, and those of one model on all inputs."""
    mesh = ParallelMesh.create(dims)
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    inputs = torch.arange(dist.get_world_size() * micro_batches * 6.0).view(-1, micro_batches, 6) / 10
    apply_fsdp(model, mesh, list(model), zero=zero)
    for number, row in enumerate(inputs[dist.get_rank()], start=1):
        before_micro_batch(model, zero, last=number == micro_batches)
        model(row).square().sum().backward()
    reference(inputs).square().sum().backward()
    norm = clip_grad_norm(model.parameters(), float("inf"), mesh)
    wanted = nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item()
    assert norm == pytest.approx(wanted, rel=1e-5)
    clip_grad_norm(model.parameters(), wanted / 2, mesh)
    sharded = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [g.flatten().tolist() for g in sharded], [(p.grad / 2).flatten().tolist() for p in reference.parameters()]


@pytest.mark.parametrize(
    ("dims", "zero", "micro_batches"),
    [
        pytest.param(dims, zero, parts, marks=() if (place + zero + parts // 3) % 2 else pytest.mark.exhaustive)
        for place, dims in enumerate((ParallelDims(ring=2, ulysses=2), ParallelDims(dp_replicate=2, ulysses=2)))
        for zero in ZERO_STAGES
        for parts in (1, 3)
    ],
    ids=str,
)
@pytest.mark.slow(but=1)
def test_gradients_are_summed_over_ranks_and_micro_batches_and_clipped_by_their_norm(
    ranks: RankPool, dims: ParallelDims, zero: int, micro_batches: int
) -> None:
    for sharded, reference in ranks.run(summed_gradients, 4, dims, zero, micro_batches):
        for found, wanted in zip(sharded, reference, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-4)


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += not func.is_view
        return func(*args, **(kwargs or {}))


def test_the_norm_takes_as_many_operators_for_many_parameters() -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh, found = ParallelMesh.create(ParallelDims()), []
        for number in (1, 2, 40):  # the first looks up the groups
            parameters = [nn.Parameter(torch.ones(3)) for _ in range(number)]
            for parameter in parameters:
                parameter.grad = torch.ones(3)
            with Operators() as operators:
                assert clip_grad_norm(parameters, float("inf"), mesh) == pytest.approx((3 * number) ** 0.5)
            found.append(operators.counts)
        assert found[1] == found[2] and found[1].total() <= 9, found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("splits", [False, True], ids=["new_group", "split_group"])
@pytest.mark.slow(but=1)
def test_a_mesh_of_1024_ranks_takes_few_communicators(splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []  # ranks of each group that this rank waits for

    def new_group(ranks: list[int], use_local_synchronization: bool = False, **_: object) -> object:
        assert use_local_synchronization == (len(ranks) == 1)
        # With a device, NCCL would split the world's communicator for a group of one, which takes ranks outside a mesh.
        assert len(ranks) > 1 or dist.group.WORLD.bound_device_id is None  # type: ignore[union-attr]
        member = dist.get_rank() in ranks
        made.extend([len(ranks)] * (member or not use_local_synchronization))
        return original(ranks, use_local_synchronization=use_local_synchronization) if member else None

    def split_group(split_ranks: list[list[int]], **_: object) -> object:
        made.append(len(split_ranks[0]))
        return original(next(ranks for ranks in split_ranks if dist.get_rank() in ranks))

    original = dist.new_group
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "split_group", split_group)
    dist.init_process_group("fake", rank=77, world_size=1024, store=FakeStore())
    try:
        if splits:
            dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # type: ignore[union-attr]
        mesh = ParallelMesh.create(ParallelDims(dp_shard=16, ring=8, ulysses=8))
        assert [mesh.rank(axis) for axis in ("dp_shard", "ring", "ulysses")] == [1, 1, 5]
    finally:
        dist.destroy_process_group()
    assert made.count(1) == 1
    assert len(made) <= (8 if splits else 340), made
