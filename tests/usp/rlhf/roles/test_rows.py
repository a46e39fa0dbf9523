"""Samples are packed into rows of the same shape on every rank, and per-token outputs unpacked by sample."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.ranks import RankPool
from usp.parallel import ParallelDims, ParallelMesh
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.rows import SEQUENCE, RowPlan, micro_batches, pack_lengths, plan_rows, sequences_of, unpack
from usp.rlhf.samples import Samples
from usp.sp.sequence import unshard_sequence


def samples_of(lengths: list[int], first: int = 0) -> Samples:
    tokens = [torch.arange(length) + 10 * number + 1 for number, length in enumerate(lengths)]
    return Samples(tuple(range(first, first + len(lengths))), {"tokens": tokens, "x": [t / 2 for t in tokens]})


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 40), max_size=24).map(lambda lengths: lengths[: len(lengths) // 2 * 2]),
    unit=st.sampled_from([1, 2]),
    budget=st.integers(0, 60),
    at_least=st.integers(1, 4),
)
def test_every_sample_is_in_one_row_and_rows_respect_the_budget(
    lengths: list[int], unit: int, budget: int, at_least: int
) -> None:
    rows = pack_lengths(range(len(lengths)), lengths, unit=unit, budget=budget, at_least=at_least)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert len(rows) >= at_least and (budget or len(rows) == at_least)
    for row in rows:
        assert list(row) == sorted(row)
        assert all(index ^ 1 in row for index in row) or unit == 1
        assert not budget or sum(lengths[index] for index in row) <= budget or len(row) == unit


def test_units_share_rows_by_sample_id() -> None:
    assert pack_lengths(range(6, 10), [5, 9, 2, 1], unit=2, at_least=2) == ((0, 1), (2, 3))


def layout_of(dims: ParallelDims, **options: int | bool | str) -> CallLayout:
    return CallLayout(tuple(range(8)), dims, **options)  # type: ignore[arg-type]


def rows_on_ranks() -> None:
    dims = ParallelDims(ring=2, ulysses=2, dp_shard=2)
    mesh, layout = ParallelMesh.create(dims), layout_of(dims, micro_batch_tokens=12)
    uneven = [samples_of([3, 11, 2, 5, 1]), samples_of([], first=5)][mesh.rank("batch")]
    plan = plan_rows(uneven, layout, mesh)
    assert plan is not None and plan.row_len == 12  # the least multiple of ring * max(2, ulysses) from 11
    assert len(plan.rows) == 2 and [*map(len, plan.rows)] == [[1, 4], [0, 0]][mesh.rank("batch")]
    batches = micro_batches(uneven, plan, layout, mesh, ("x",))
    for row, batch in zip(plan.rows, batches, strict=True):
        whole = {key: unshard_sequence(value, mesh) for key, value in batch.items() if key != "cu_seqlens"}
        tokens = [uneven["tokens"][index] for index in row]
        ids = torch.cat([*tokens, torch.zeros(12 - sum(map(len, tokens)), dtype=torch.int64)])
        labels = torch.cat([*(torch.cat((t[1:], torch.tensor([-100]))) for t in tokens), torch.full((12,), -100)])[:12]
        assert torch.equal(whole["input_ids"][0], ids) and torch.equal(whole["shift_labels"][0], labels)
        assert torch.equal(whole["x"][0], ids / 2) and whole["x"].dtype == torch.float32
        assert batch["cu_seqlens"].tolist()[0][-1] == sum(map(len, tokens))
        _check_sums(batch, whole["x"], mesh)
    again = unpack([batch["x"] for batch in batches], plan, uneven, layout, mesh)
    assert all(torch.equal(a, b) for a, b in zip(again, uneven["x"] if len(uneven) else [], strict=True))
    assert plan_rows(samples_of([]), layout, mesh) is None
    shared = layout_of(ParallelDims(tp=2, dp_shard=4), tp_sequence_parallel=True)
    plan = plan_rows(samples_of([3]), shared, ParallelMesh.create(shared.dims))
    assert plan == RowPlan(((0,),), 4)


def _check_sums(batch: dict[str, Tensor], whole: Tensor, mesh: ParallelMesh) -> None:
    """Check the sums over whole sequences, and that all ranks' shares together reach every token's gradient once."""
    sequences = sequences_of(batch, mesh.group("sp"))
    x = batch["x"].clone().requires_grad_()
    sums = sequences.sums(x)
    cuts = batch["cu_seqlens"][0].diff().tolist()
    pieces = whole[0].split([*cuts, whole.shape[1] - sum(cuts)])[:-1] if sum(cuts) else []
    assert torch.equal(sums, torch.tensor([float(piece.sum()) for piece in pieces]))
    weights = torch.arange(len(sums)) + 1.0
    sequences.share((weights * sums.square()).sum()).backward()
    of_token = torch.cat((2 * weights * sums, torch.zeros(1)))[batch[SEQUENCE]]
    assert torch.allclose(x.grad, of_token)


@pytest.mark.slow
def test_rows_and_sums_on_ranks(ranks: RankPool) -> None:
    ranks.run(rows_on_ranks, 8)


@pytest.mark.slow
def test_values_that_are_not_per_token_are_rejected(ranks: RankPool) -> None:
    ranks.run(refuse_short_values, 1)


def refuse_short_values() -> None:
    mesh = ParallelMesh.create(ParallelDims())
    samples = samples_of([3, 2])
    short = Samples(samples.ids, {**samples.values, "x": [torch.zeros(3), torch.zeros(())]})
    with pytest.raises(ValueError, match=r"one number per token: x of sample 1 has shape \(\), expected \(2,\)"):
        micro_batches(short, RowPlan(((0, 1),), 5), layout_of(ParallelDims()), mesh, ("x",))
