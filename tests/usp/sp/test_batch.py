"""`shard_batch` computes positions and labels from the whole sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.harness.ranks import RankPool
from usp import shard_batch, shard_sequence, unshard_sequence
from usp.attention import LAYOUTS
from usp.parallel import ParallelDims, ParallelMesh
from usp.sp.sequence import document_starts

IDS = torch.arange(48).view(2, 24)
BOUNDARIES = torch.tensor([[0, 5, 6, 24, 24], [0, 8, 16, 20, 20]], dtype=torch.int32)


def gathered(layout: str, dims: ParallelDims, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    mesh = ParallelMesh.create(dims)
    local = shard_batch(batch, mesh, layout)
    documents = local.pop("cu_seqlens", None)
    whole = {key: unshard_sequence(value, mesh, layout, cu_seqlens=documents) for key, value in local.items()}
    return whole if documents is None else {**whole, "cu_seqlens": documents}


@pytest.mark.parametrize("layout", [*LAYOUTS, "balanced:0x1,4x2"])
@pytest.mark.slow(but=1)
def test_positions_and_labels_match_the_whole_sequence(ranks: RankPool, layout: str) -> None:
    labels = IDS.clone()
    labels[0, 3] = -100
    batch = {"input_ids": IDS, "labels": labels, "cu_seqlens": BOUNDARIES}
    for whole in ranks.run(gathered, 4, layout, ParallelDims(ring=2, ulysses=2), batch):
        assert torch.equal(whole["input_ids"], IDS)
        assert whole["position_ids"][0].tolist() == [*range(5), 0, *range(18)]
        assert whole["position_ids"][1].tolist() == [*range(8), *range(8), *range(4), *range(4)]
        # No target: a document's last token, and tokens before an ignored label or after the last boundary.
        assert whole["shift_labels"][0].tolist() == [1, 2, -100, 4, -100, -100, *range(7, 24), -100]
        second = [*range(25, 32), -100, *range(33, 40), -100, 41, 42, 43, -100]
        assert whole["shift_labels"][1].tolist() == [*second, *[-100] * 4]
        assert torch.equal(whole["cu_seqlens"], BOUNDARIES)


def test_a_row_is_one_document_by_default(ranks: RankPool) -> None:
    whole = ranks.run(gathered, 2, "striped", ParallelDims(ring=2), {"input_ids": IDS, "labels": IDS})[0]
    assert whole["position_ids"].tolist() == [list(range(24))] * 2
    assert whole["shift_labels"][0].tolist() == [*range(1, 24), -100]
    assert "cu_seqlens" not in whole


def refusals() -> list[str]:
    mesh, messages = ParallelMesh.create(ParallelDims(ring=2)), []
    for batch in (
        {"labels": IDS},
        {"input_ids": IDS, "attention_mask": IDS, "position_ids": IDS, "pixels": IDS},
        {"input_ids": IDS, "labels": IDS[:, 1:]},
        {"input_ids": IDS, "cu_seqlens": torch.tensor([0, 48])},
        {"input_ids": IDS, "cu_seqlens": torch.tensor([0.0, 24.0])},
    ):
        with pytest.raises(ValueError) as caught:
            shard_batch(batch, mesh, "zigzag")
        messages.append(str(caught.value))
    return messages


def test_invalid_batches_raise(ranks: RankPool) -> None:
    missing, unknown, shapes, boundaries, floats = ranks.run(refusals, 2)[0]
    assert "input_ids is missing" in missing
    assert "attention_mask is not a key of shard_batch: drop padding and pack documents" in unknown
    assert "position_ids is not a key" in unknown and "pixels is not a key" in unknown
    assert "labels (2, 23) must have the shape of input_ids (2, 24)" in shapes
    assert "cu_seqlens ends at 48, past the 24 tokens of a row" in boundaries
    assert "cu_seqlens must be integers" in floats


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow(but=1)
def test_a_length_that_no_layout_divides_is_padded(ranks: RankPool, layout: str) -> None:
    ids = IDS[:, :21]
    for boundaries in (None, torch.tensor([0, 5, 20])):
        batch = {"input_ids": ids, "labels": ids} | ({} if boundaries is None else {"cu_seqlens": boundaries})
        whole = ranks.run(gathered, 4, layout, ParallelDims(ring=2, ulysses=2), batch)[0]
        assert torch.equal(whole["input_ids"], torch.cat((ids, torch.zeros(2, 3, dtype=ids.dtype)), 1))
        ends = [20] if boundaries is None else [4, 19, 20]
        wanted = [-100 if at in ends else at + 1 for at in range(21)]
        assert whole["shift_labels"][0].tolist() == [*wanted, -100, -100, -100]
        assert torch.equal(whole["cu_seqlens"], torch.tensor([0, 21]) if boundaries is None else boundaries)


def cut() -> list[Tensor]:
    mesh, x = ParallelMesh.create(ParallelDims(ring=2, ulysses=2)), IDS[:, :21]
    with pytest.raises(ValueError, match=r"cannot be divided.*pad, with cu_seqlens=\[0, 21\]"):
        shard_sequence(x, mesh)
    boundaries = torch.tensor([0, 21])
    local = shard_sequence(x, mesh, cu_seqlens=boundaries)
    return [unshard_sequence(local, mesh, cu_seqlens=boundaries, length=21), x]


def test_padding_is_cut_off_again(ranks: RankPool) -> None:
    for found, wanted in ranks.run(cut, 4):
        assert torch.equal(found, wanted)


def test_document_starts_by_row() -> None:
    starts = document_starts(torch.tensor([0, 0, 3, 5]), rows=2, seq_len=7)
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5, 5]] * 2


def test_positions_count_from_the_root_of_a_prefix_tree(ranks: RankPool) -> None:
    ranks.run(shard_a_tree, 1)


def shard_a_tree() -> None:
    mesh, tree = ParallelMesh.create(ParallelDims()), torch.tensor([-1, 0, 0, 2])
    batch = {"input_ids": torch.arange(8).view(1, 8), "cu_seqlens": torch.tensor([0, 2, 4, 5, 7]), "prefix_tree": tree}
    sharded = shard_batch({**batch, "labels": batch["input_ids"]}, mesh)
    assert sharded["position_ids"].tolist() == [[0, 1, 2, 3, 2, 3, 4, 0]]
    assert sharded["shift_labels"].tolist() == [[1, -100, 3, -100, -100, 6, -100, -100]]  # a document's last has none
    assert torch.equal(sharded["prefix_tree"], tree)


def unshard_gradient() -> tuple[Tensor, Tensor]:
    mesh = ParallelMesh.create(ParallelDims(ring=2, ulysses=2))
    x = shard_sequence(torch.arange(16.0).view(1, 16), mesh).requires_grad_()
    weight = torch.arange(16.0) + 100 * mesh.rank("sp")
    (unshard_sequence(x, mesh) * weight).sum().backward()
    return x.grad, shard_sequence((4 * torch.arange(16.0) + 100 * (0 + 1 + 2 + 3)).view(1, 16), mesh)


def test_unshard_gradient_is_summed_over_ranks(ranks: RankPool) -> None:
    for found, wanted in ranks.run(unshard_gradient, 4):
        assert torch.equal(found, wanted)
