"""Delta updates: all encodings, pairs of layouts on eight ranks after steps of optimizers, bytes, resets."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankPool
from usp.parallel import DeltaReallocation, ParallelDims, ParamLayout, ProcessGroups, plan_realloc
from usp.parallel.reallocation.delta import apply, delta_size, encode
from usp.parallel.reallocation.param_layout import Described, Kind, described_layout
from usp.parallel.wire import SentBytes

CPU = torch.device("cpu")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("numel", [1, 64, 65, 1000, 65536, 65537, 200_001])
def test_every_number_of_changes_is_exact_in_the_smallest_encoding(numel: int, dtype: torch.dtype) -> None:
    generator, used = torch.Generator().manual_seed(0), set()
    for share in (0, 1e-5, 1e-3, 0.02, 0.1, 0.5, 0.99, 1):
        before = (50 * torch.randn(numel, generator=generator)).to(dtype)
        new = torch.where(torch.rand(numel, generator=generator) < share, -1 - before, before)
        if dtype.is_floating_point and share == 0.02:  # equal as numbers
            before[:2], new[:2] = torch.tensor([0.0, float("nan")])[:numel], torch.tensor([-0.0, float("nan")])[:numel]
        delta = encode(new, before)
        size, encoding = delta_size(numel, dtype.itemsize, delta.changed)
        index, mask = 2 * delta.changed + 4 * (numel // 65_537 and -(-numel // 65_536)), -(-numel // 8)
        fewest = min(min(index, mask) + delta.changed * dtype.itemsize, numel * dtype.itemsize)
        assert len(delta.content) == size == (fewest if delta.changed else 0)
        strided = torch.stack([before, before], 1)[:, 0].view(-1, 1) if numel > 1 else before.clone()
        for part in (before.clone(), strided):
            apply(delta, part, dtype)
            assert torch.equal(bits(part), bits(new)), (share, encoding)
        used.add(encoding)
    assert len(used) == 4 or numel <= 1000 or dtype == torch.uint8


# On eight ranks

SHAPES = {"embed": (512, 128), "last": (9, 33), "norm": (128,), "scale": (3,)}
SHAPES |= {f"{n}.{name}": s for n in range(2) for name, s in (("q", (128, 128)), ("up", (352, 128)))}
SHAPES |= {f"{n}.down": (128, 352) for n in range(2)}


def layout(dtype: torch.dtype, dims: ParallelDims, ranks: range, zero: bool) -> ParamLayout:
    """Return the layout of a model of about 260,000 parameters."""
    tp = {"q": 0, "up": 0, "down": 1}
    described = {
        name: Described(Kind(shape, dtype), (min(int(name[0] == "1"), dims.pp - 1),), tp.get(name[2:]))
        for name, shape in SHAPES.items()
    }
    return described_layout(described, dims, ranks, sharded=zero)


ALL, LOW, HIGH = range(8), range(4), range(4, 8)
TRAINED = [
    (ParallelDims(dp_shard=8), ALL, True),
    (ParallelDims(dp_shard=2, ring=2, ulysses=2), ALL, True),
    (ParallelDims(dp_shard=2, tp=4), ALL, True),
    (ParallelDims(dp_shard=4), LOW, True),
    (ParallelDims(pp=2, dp_shard=4), ALL, True),
]
USED = [
    (ParallelDims(dp_shard=1, dp_replicate=8), ALL, False),
    (ParallelDims(dp_shard=1, dp_replicate=2, tp=4), ALL, False),
    (ParallelDims(dp_shard=1, dp_replicate=2, tp=2), HIGH, False),
    (ParallelDims(dp_shard=1, dp_replicate=2, pp=2, tp=2), ALL, False),
    (ParallelDims(dp_shard=4), HIGH, True),
    (ParallelDims(dp_shard=1, tp=2), range(3, 5), False),
]
PAIRS = [*islice(zip(cycle(TRAINED), cycle(USED), strict=False), 12)]


def initial(generator: torch.Generator) -> dict[str, Tensor]:
    return {n: torch.ones(s) if n == "norm" else torch.randn(s, generator=generator) / 50 for n, s in SHAPES.items()}


def trained(weights: dict[str, Tensor], steps: int, rate: float, generator: torch.Generator) -> None:
    """Make steps of the size of Adam's, half of each in a direction that stays."""
    for weight in weights.values():
        toward = torch.randn(weight.shape, generator=generator).sign() * steps / 2
        weight += rate * (toward + torch.randn(weight.shape, generator=generator) * steps**0.5 / 2)


def run_pairs(pairs: list[int]) -> list[tuple[str, int, int, int, int, int]]:
    """Return for each pair and update: what it is, bytes sent, bytes of counts, changed and needed elements, errors."""
    groups, rank, rows = ProcessGroups(), dist.get_rank(), []
    for number in pairs:
        src, dst = layout(torch.float32, *PAIRS[number][0]), layout(torch.bfloat16, *PAIRS[number][1])
        plan = plan_realloc(src, dst, bucket_bytes=200_000, ranks_per_host=4)
        reallocation, generator = DeltaReallocation(plan, groups, CPU), torch.Generator().manual_seed(number)
        weights = initial(generator)
        held = {n: torch.full(b[rank].sizes, torch.nan).bfloat16() for n, b in dst.boxes.items() if rank in b}
        for steps, rate in ((0, 0.0), *((s, r) for r in (1e-6, 1e-5) for s in (1, 10, 100))):
            old = {name: weight.bfloat16() for name, weight in weights.items()}
            trained(weights, steps, rate, generator)
            mine = {n: weights[n][b[rank].slices()].clone() for n, b in src.boxes.items() if rank in b}
            new = {name: weight.bfloat16() for name, weight in weights.items()}
            with SentBytes() as counted:
                traffic = reallocation.update(mine, held)
            wrong = sum(not torch.equal(bits(held[n]), bits(new[n][dst.boxes[n][rank].slices()])) for n in held)
            sent = [
                (name, transfer.box)
                for move in plan.moves
                for transfer in move.transfers
                for name in move.names
                for sender, _ in transfer.route.hops
                if sender == rank
            ]
            changed = sum(int((new[n] != old[n])[box.slices()].sum()) for n, box in sent)
            needed = sum(box.numel for _, box in sent)
            assert counted.by_op["send"] == traffic.sent
            counts = 4 * sum(len(ps) for r in reallocation._pieces for ps in r.sends.values())
            kept = sum(reference.nbytes for reference in reallocation._references.values())
            assert kept <= 2 * needed
            rows.append((f"{steps} at {rate}", counted.total, counts if steps else 0, changed, needed, wrong))
    return rows


@pytest.mark.slow
def test_pairs_of_layouts_are_exact_in_the_fewest_bytes(ranks: RankPool, exhaustive: bool) -> None:
    """Updates after 1, 10 and 100 steps at 1e-6 and 1e-5. Without --exhaustive for a quarter of the twelve pairs."""
    pairs = [*range(12)] if exhaustive else [1, 7, 11]
    for of_ranks in zip(*ranks.run(run_pairs, 8, pairs), strict=True):
        what = of_ranks[0][0]
        total, counts, changed, needed, wrong = (sum(row[place] for row in of_ranks) for place in range(1, 6))
        assert not wrong, what
        full, index, mask = 2 * needed, changed * 6, needed / 8 + changed * 2
        if what == "0 at 0.0":
            assert total <= full + 8 * 14  # and whether all ranks know what was sent before
            continue
        assert total <= 1.05 * min(index, mask), what
        assert total <= full + counts + 8 * 14, what


def run_resets(intact_ranks: tuple[int, ...]) -> tuple[int, bool]:
    """Update, then lose what was received, then update again; return the bytes of that, and whether it is exact."""
    rank = dist.get_rank()
    src, dst = layout(torch.bfloat16, *TRAINED[3]), layout(torch.bfloat16, *USED[5])
    weights = initial(torch.Generator().manual_seed(0))
    reallocation = DeltaReallocation(plan_realloc(src, dst, bucket_bytes=10**6, ranks_per_host=4), ProcessGroups(), CPU)
    mine = {n: weights[n][b[rank].slices()].bfloat16() for n, b in src.boxes.items() if rank in b}
    held = {n: torch.empty(b[rank].sizes).bfloat16() for n, b in dst.boxes.items() if rank in b}
    reallocation.update(mine, held)
    for tensor in held.values():
        tensor.zero_()
    sent = reallocation.update(mine, held, intact=rank in intact_ranks).sent
    return sent, all(torch.equal(t, weights[n][dst.boxes[n][rank].slices()].bfloat16()) for n, t in held.items())


@pytest.mark.slow
def test_everything_is_sent_again_if_a_rank_lost_what_it_had(ranks: RankPool) -> None:
    whole = plan_realloc(
        layout(torch.bfloat16, *TRAINED[3]), layout(torch.bfloat16, *USED[5]), bucket_bytes=10**6, ranks_per_host=4
    ).total_bytes
    for lost in (3, 4):  # ranks that hold what is received
        results = ranks.run(run_resets, 8, tuple(rank for rank in range(8) if rank != lost))
        assert sum(sent for sent, _ in results) == whole and all(exact for _, exact in results)
    results = ranks.run(run_resets, 8, tuple(range(8)))  # without a word: only counts are sent
    assert sum(sent for sent, _ in results) < whole / 10 and not all(exact for _, exact in results)
