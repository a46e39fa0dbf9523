"""Layouts give each rank the same tokens as yunchang, so data pipelines carry over (docs/migrating.md)."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankPool
from usp.attention import SequenceLayout

DEGREES = [(1, 1), (1, 4), (2, 2), (4, 1), (2, 3), (3, 2)]  # (ulysses, ring)


def zigzag_of_the_paper(seq_len: int, ulysses: int, ring: int, rank: int) -> list[int]:
    """Apply Algorithm 2 of the USP paper with Ulysses innermost.

    A ring rank gets one of 2 * ring chunks from each end, which its Ulysses ranks divide evenly.
    """
    ring_rank, ulysses_rank = divmod(rank, ulysses)
    chunk = seq_len // (2 * ring)
    from_front = [ring_rank * chunk + i for i in range(chunk)]
    from_back = [seq_len - (ring_rank + 1) * chunk + i for i in range(chunk)]
    both = from_front + from_back
    share = len(both) // ulysses
    return both[ulysses_rank * share : (ulysses_rank + 1) * share]


@pytest.mark.parametrize(("ulysses", "ring"), DEGREES)
def test_zigzag_matches_the_paper_token_for_token(ulysses: int, ring: int) -> None:
    layout = SequenceLayout("zigzag", 48, ring=ring, ulysses=ulysses)
    for rank in range(ulysses * ring):
        ours = layout.positions(*divmod(rank, ulysses)).tolist()
        assert ours == zigzag_of_the_paper(48, ulysses, ring, rank), f"rank {rank}"


def extracted_by_yunchang(ulysses: int, ring: int) -> dict[str, list[int]]:
    yunchang = importlib.import_module("yunchang")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    yunchang.set_seq_parallel_pg(ulysses, ring, rank, world_size)
    tokens = torch.arange(48).reshape(1, 48, 1, 1)
    names = {"contiguous": "basic", "zigzag": "zigzag", "striped": "strip"}
    return {
        layout: yunchang.EXTRACT_FUNC_DICT[name](tokens, rank, world_size=world_size, rd=ring, ud=ulysses)
        .flatten()
        .tolist()
        for layout, name in names.items()
    }


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 4), (2, 2), (4, 1)])
def test_every_layout_matches_yunchang(ranks: RankPool, ulysses: int, ring: int) -> None:
    pytest.importorskip("yunchang", reason="yunchang, an extra, is not installed")
    for rank, extracted in enumerate(ranks.run(extracted_by_yunchang, 4, ulysses, ring)):
        for kind, tokens in extracted.items():
            layout = SequenceLayout(kind, 48, ring=ring, ulysses=ulysses)
            assert layout.positions(*divmod(rank, ulysses)).tolist() == tokens, f"{kind}, rank {rank}"
