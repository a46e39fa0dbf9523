"""What ranks read of rows: the batch of one process, cut as the layout says, and no token twice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import usp.data.rows
from usp.attention import LAYOUTS, OF_DOCUMENTS, SequenceLayout, causal_pairs, counted_windows, layout_name
from usp.config import TrainConfig
from usp.data.batches import (
    AHEAD,
    PERIOD,
    BatchReader,
    BatchStream,
    MixedRows,
    Part,
    TokenBatch,
    even_rows,
    parse_mixture,
    read_batch,
    shares,
    taken,
)
from usp.data.cache import cached_store
from usp.data.rows import PackedRows, Permutation, StageRows, WholeRows, best_fit
from usp.data.sources import find_files
from usp.data.store import TokenStore
from usp.data.tokenizer import ByteTokenizer
from usp.parallel import ParallelDims, ParallelMesh
from usp.predict.fake_world import fake_world
from usp.sp.sequence import shard_batch
from usp.train.step import part_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """200 documents of 1 to 400 tokens, each with its number in it."""
    folder = tmp_path_factory.mktemp("store")
    lengths = np.random.default_rng(0).integers(0, 100, 200)
    lines = [json.dumps({"text": f"{number} " * length}) for number, length in enumerate(lengths)]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return cached_store(find_files(str(folder / "data.jsonl")), "text", ByteTokenizer(), folder / "cache")


# Orders


@given(count=st.integers(1, 3000), seed=st.integers(0, 5))
@settings(max_examples=30)
def test_an_order_has_every_number_once_and_can_be_reversed(count: int, seed: int) -> None:
    order, places = Permutation(count, (seed, 7)), np.arange(count)
    assert sorted(order.at(places).tolist()) == places.tolist()
    assert order.place_of(order.at(places)).tolist() == places.tolist()
    assert Permutation(count, None).at(places).tolist() == places.tolist()


@pytest.mark.parametrize("count", [4, 100])
@pytest.mark.slow(but=1)
def test_every_order_is_as_likely_as_any_other(count: int) -> None:
    """The chi-squared statistic of two numbers that are next to each other is near its mean, 1 for each pair."""
    draws = 20 * count**2
    next_to = np.zeros((count, count))
    for seed in range(draws // (count - 1)):
        order = Permutation(count, (seed,)).at(np.arange(count))
        np.add.at(next_to, (order[:-1], order[1:]), 1)
    pairs = next_to[~np.eye(count, dtype=bool)]
    statistic = ((pairs - pairs.mean()) ** 2).sum() / pairs.mean() / len(pairs)
    assert abs(statistic - 1) < 6 * (2 / len(pairs)) ** 0.5


# Parts of ranks

GRIDS = [(1, 1), (1, 4), (4, 1), (2, 2), (4, 2)]  # ring x ulysses


def parts(kind: str, grid: tuple[int, int], whole: TokenBatch) -> list[tuple[Part, torch.Tensor]]:
    """The parts of all ranks of a grid, and their positions in each row of a batch."""
    rows, seq_len = whole.input_ids.shape
    layout = SequenceLayout(kind, seq_len, *grid)
    documents = tuple(map(tuple, whole.cu_seqlens.tolist())) if kind in OF_DOCUMENTS else None
    planned = replace(layout, documents=documents)
    ranks = itertools.product(range(grid[0]), range(grid[1]))
    return [
        (Part(layout, *rank, 0, rows), torch.stack([planned.positions(*rank, row) for row in range(rows)]))
        for rank in ranks
    ]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_part_is_the_batch_of_one_process_cut_by_the_layout(
    store: TokenStore, kind: str, grid: tuple[int, int]
) -> None:
    packed = PackedRows(store, 256, seed=1)
    numbers = range(packed.per_epoch - 2, packed.per_epoch + 2)
    whole = read_batch(packed, numbers, Part.whole(4, 256))
    for part, positions in parts(kind, grid, whole):
        batch = read_batch(packed, numbers, part)
        own, rows = batch.to(CPU), map(tuple, whole.cu_seqlens.tolist())
        if kind == "auto":
            kinds = [replace(part.layout, documents=(row,)).decided.kind for row in rows]
            assert batch.balanced == kinds.count("balanced") / len(kinds)
        for name, value in whole.to(CPU).items():
            assert torch.equal(own[name], value if name == "cu_seqlens" else value.gather(1, positions)), name


def test_positions_and_targets_end_with_documents(store: TokenStore) -> None:
    batch = read_batch(PackedRows(store, 256, seed=1), range(8), Part.whole(8, 256))
    for row, boundaries in enumerate(batch.cu_seqlens.tolist()):
        for begin, end in itertools.pairwise(boundaries):
            assert batch.position_ids[row, begin:end].tolist() == list(range(end - begin))
            expected = [*batch.input_ids[row, begin + 1 : end].tolist(), -100][: end - begin]
            assert batch.shift_labels[row, begin:end].tolist() == expected


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_rank_reads_its_tokens_and_the_last_targets_alone(store: TokenStore, kind: str) -> None:
    """Bytes of a rank: 1 / (ring x ulysses) of its rows, and a token for every span that ends inside a document."""
    packed, size, rows = PackedRows(store, 1024, seed=1), 2, 3
    for part, positions in parts(kind, (4, 2), read_batch(packed, range(rows), Part.whole(rows, 1024))):
        before = store.token_bytes
        batch = read_batch(packed, range(rows), part)
        found = (store.token_bytes - before) // size
        if kind == "striped":  # the tokens between its own, for 1 / ulysses of the rows
            assert rows * 1024 // 2 - 3 * rows <= found <= rows * 1024 // 2
        else:
            ends = torch.from_numpy(np.diff(positions.numpy(), append=-1) != 1)
            followed = int((batch.shift_labels[ends] != -100).sum())
            assert found == rows * 1024 // 8 + followed and (kind == "balanced" or followed <= 2 * rows)


class Positions(TokenStore):
    """A store in which every token is its own position."""

    def read(self, begin: int, end: int) -> np.ndarray:
        return np.arange(begin, end)


@pytest.mark.slow
def test_1024_ranks_read_every_token_of_an_epoch_once(store: TokenStore, exhaustive: bool) -> None:
    """Except for what fills up the last row."""
    packed, dp, (ring, ulysses) = PackedRows(Positions(store.folder), 512, seed=3), 16, (8, 8)
    layout = SequenceLayout("zigzag", 512, ring, ulysses)
    for epoch in (0, 1) if exhaustive else (1,):
        ids = []
        for rank in range(dp * ring * ulysses):
            part = Part(layout, rank // ulysses % ring, rank % ulysses, rank // (ring * ulysses), 1)
            for first in range(0, packed.per_epoch, dp):
                if first + part.first < packed.per_epoch:
                    numbers = range(epoch * packed.per_epoch + first, epoch * packed.per_epoch + first + dp)
                    ids.append(read_batch(packed, numbers, part).input_ids[0])
        counts = np.bincount(np.concatenate(ids), minlength=store.manifest.tokens)
        fill = packed.per_epoch * 512 - store.manifest.tokens
        assert counts.min() == 1 and (counts - 1).sum() == fill < 512


@pytest.mark.slow
def test_stages_of_a_curriculum_read_every_token_of_an_epoch_once_on_1024_ranks(store: TokenStore) -> None:
    """Rows of other lengths go on where those before have left the store, into the next epoch if they must."""
    positions, tokens = Positions(store.folder), store.manifest.tokens
    short = StageRows(positions, 128, 3, 0, 96)
    rest = StageRows(positions, 512, 3, 96 * 128, -(-(tokens - 96 * 128) // 512))
    found = []
    for packed, dp, (ring, ulysses) in ((short, 32, (8, 4)), (rest, 16, (8, 8))):
        layout = SequenceLayout("zigzag", packed.seq_len, ring, ulysses)
        for rank in range(dp * ring * ulysses):
            part = Part(layout, rank // ulysses % ring, rank % ulysses, rank // (ring * ulysses), 1)
            for first in range(0, packed.count, dp):
                if first + part.first < packed.count:
                    ids = read_batch(packed, range(first, first + dp), part).input_ids[0]
                    assert len(ids) == packed.seq_len // (ring * ulysses)
                    found.append(ids)
    counts = np.bincount(np.concatenate(found), minlength=tokens)
    over = rest.begin + rest.count * 512 - tokens
    assert counts.min() == 1 and (counts - 1).sum() == over < 512
    numbers = [rest._place(number) for number in range(rest.count + 2)]
    assert sorted(numbers) == list(range(rest.count + 2)) != numbers
    again = StageRows(positions, 512, 3, rest.begin + rest.count * 512, 200)  # more than an epoch
    starts = [int(again.row(number).begins[0]) for number in range(again.count)]
    assert again._first_of(2) < again.count and len(starts) == 200
    assert sorted(again._place(number) for number in range(200)) == list(range(200))


def test_how_much_of_each_source_a_stage_takes(store: TokenStore) -> None:
    sources = [PackedRows(store, 64, 3), PackedRows(store, 64, 3)]
    mixed, weights = MixedRows(sources, [0.7, 0.3]), [0.7, 0.3]
    for rows in (0, 5, PERIOD, PERIOD + 300):
        periods, rest = divmod(rows, PERIOD)
        which = np.concatenate([mixed._order(period)[0] for period in range(periods + 1)])[: periods * PERIOD + rest]
        read = np.bincount(which, minlength=2).tolist()
        assert taken(weights, 3, rows) == read and sum(read) == rows
    assert taken([1.0], 3, 77) == [77]


def test_blocks_of_any_size_give_the_same_rows(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> list[list[int]]:
        packed = PackedRows(store, 512, seed=3)
        return read_batch(packed, range(packed.per_epoch), Part.whole(packed.per_epoch, 512)).input_ids.tolist()

    first = rows()
    monkeypatch.setattr(usp.data.rows, "BLOCK", 7)
    assert rows() == first
    monkeypatch.setattr(usp.data.rows, "BLOCKS", 2)
    assert rows() == first


# Reading ahead


def test_batches_are_read_ahead_and_the_place_is_that_of_the_last_one_taken(store: TokenStore) -> None:
    packed = PackedRows(store, 64, seed=0)
    stream = BatchStream(packed, 2)
    reader = BatchReader(stream, Part.whole(2, 64))
    taken = [next(reader) for _ in range(3)]
    assert [batch.numbers for batch in taken] == [range(2), range(2, 4), range(4, 6)]
    assert stream.next_row == stream.state_dict()["row"] == 6 and reader.waited >= 0
    again = BatchStream(packed, 3)
    again.load_state_dict(stream.state_dict())
    after = next(BatchReader(again, Part.whole(3, 64)))
    assert torch.equal(after.input_ids[:2], next(reader).input_ids)


def test_what_fails_in_the_background_fails_in_the_step(store: TokenStore) -> None:
    packed = PackedRows(TokenStore(store.folder), 64, seed=0)
    reader = BatchReader(BatchStream(packed, 1), Part.whole(1, 64))
    next(reader)
    with (store.folder / "tokens.bin").open("rb") as closed:
        pass
    before = packed.store._files["tokens.bin"]  # stays open for a read that has begun
    packed.store._files["tokens.bin"] = closed
    with pytest.raises(ValueError, match="closed file"):
        for _ in range(AHEAD + 2):
            next(reader)
    before.close()


# Mixtures


@pytest.mark.slow
def test_a_mixture_has_the_rows_of_each_store_in_their_order_and_share(store: TokenStore) -> None:
    """Every row of each store is there as often as any other, however unequal the stores are."""
    positions = [PackedRows(Positions(store.folder), length, seed=0) for length in (64, 64)]
    mixed = MixedRows(positions, [0.7, 0.3])
    assert mixed.shares == (717, 307) and shares([1, 1, 1]) == (342, 341, 341)
    for source, share in enumerate(mixed.shares):
        drawn = [mixed.row(number) for number in range(3 * PERIOD)]
        own = [row for row in drawn if row.store is positions[source].store]
        expected = [positions[source].row(number) for number in range(3 * share)]
        assert sorted(row.begins.tolist() for row in own) == sorted(row.begins.tolist() for row in expected)
    assert {mixed.row(number).store is positions[0].store for number in range(20)} == {True, False}
    again = MixedRows(positions, [7, 3])
    assert all((again.row(number).begins == mixed.row(number).begins).all() for number in (5000, 17, 2048))
    part = Part.whole(4, 64)
    assert read_batch(mixed, range(1022, 1026), part).input_ids.shape == (4, 64)
    stream = BatchStream(mixed, 4)
    other = BatchStream(MixedRows(positions, [0.5, 0.5]), 4)
    with pytest.raises(ValueError, match="data = 512/1024 of 197 documents"):
        other.load_state_dict(stream.state_dict())


def test_mixtures_are_written_as_paths_with_weights(tmp_path: Path) -> None:
    assert parse_mixture("a=0.7,b/c=2") == [("a", 0.7), ("b/c", 2.0)]
    assert parse_mixture("stdlib") == [("stdlib", 1.0)]
    (tmp_path / "a=1,b").mkdir()
    assert parse_mixture(str(tmp_path / "a=1,b")) == [(str(tmp_path / "a=1,b"), 1.0)]
    for wrong in ("a=0.7,b", "a=0", "a=-1", "=1", "a=inf", "a=x"):
        with pytest.raises(ValueError, match="must be PATH=WEIGHT with a positive weight"):
            parse_mixture(wrong)
    with pytest.raises(ValueError, match="names a path twice"):
        parse_mixture("a=1,a=2")
    with pytest.raises(ValueError, match=r"weight 1e-05 is too small: of 1024 rows it gives none"):
        shares([1.0, 1e-5])


# Whole documents


@given(lengths=st.lists(st.integers(1, 64), max_size=60))
def test_best_fit_puts_every_length_once_where_there_is_room(lengths: list[int]) -> None:
    rows = best_fit(lengths, 64)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < row <= 64 for row in filled)
    assert all(a + b > 64 for a, b in itertools.combinations(filled, 2))  # no two rows fit into one


@pytest.mark.slow
def test_whole_documents_are_read_once_per_epoch_and_padded(store: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usp.data.rows, "WINDOW", 50)
    tokens = store.manifest.tokens
    packed = WholeRows(Positions(store.folder), 256, seed=3)
    orders = []
    for epoch in range(2):
        numbers = range(epoch * packed.per_epoch, (epoch + 1) * packed.per_epoch)
        batch = read_batch(packed, numbers, Part.whole(packed.per_epoch, 256))
        counts = np.zeros(tokens, int)
        begins, ends = store.bounds(np.arange(store.manifest.documents))
        for row, boundaries in enumerate(batch.cu_seqlens.tolist()):
            end = boundaries[-1]
            counts += np.bincount(batch.input_ids[row, :end], minlength=tokens)
            assert (batch.shift_labels[row, end:] == -100).all() and (batch.input_ids[row, end:] == 0).all()
            for first, last in itertools.pairwise(sorted(set(boundaries))):
                begin = int(batch.input_ids[row, first])
                document = np.searchsorted(ends, begin, side="right")
                low, high = int(begins[document]), int(ends[document])
                assert (begin - low) % 256 == 0 and begin + last - first == min(begin + 256, high)
        assert (counts == 1).all() and packed.per_epoch * 256 < 1.2 * tokens
        orders.append(batch.input_ids[:, 0].tolist())
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.slow(but=1)
def test_a_part_is_what_shard_batch_keeps_of_the_whole_batch(store: TokenStore, kind: str) -> None:
    """Rows with padding, on every rank of a mesh of all axes, for a model whose layers have windows."""
    windows = (0, 16, 16)
    packed, config = WholeRows(store, 512, seed=1), TrainConfig(sp_layout=kind, seq_len=512, batch_size=3)
    whole = read_batch(packed, range(6), Part.whole(6, 512))
    assert (whole.cu_seqlens[:, -1] < 512).any()
    for rank in range(16):
        with fake_world(16, rank):
            mesh = ParallelMesh.create(ParallelDims(dp_shard=2, ring=4, ulysses=2), device_type="cpu")
            part = part_of(mesh, config, windows=windows)
            ids, cu_seqlens = (each[part.first : part.first + 3] for each in (whole.input_ids, whole.cu_seqlens))
            name = layout_name(kind, windows)
            expected = shard_batch({"input_ids": ids, "labels": ids, "cu_seqlens": cu_seqlens}, mesh, name)
        own = read_batch(packed, range(6), part).to(CPU)
        for name in ("input_ids", "position_ids", "shift_labels"):
            assert torch.equal(own[name], expected[name]), (rank, name)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=50)
def test_ranks_get_as_many_rows_and_nearly_equal_work(each: int, ranks: int, seed: int) -> None:
    pairs = np.random.default_rng(seed).lognormal(3, 1, each * ranks).astype(int).tolist()
    dealt = even_rows(pairs, ranks)
    assert sorted(itertools.chain(*dealt)) == list(range(each * ranks)) and {len(rows) for rows in dealt} == {each}
    order = sorted(pairs, reverse=True)
    for place in range(each):  # what ranks compute at the same time is as similar as can be
        assert sorted((pairs[rows[place]] for rows in dealt), reverse=True) == order[place * ranks :][:ranks]
    totals = [sum(pairs[row] for row in rows) for rows in dealt]
    assert max(totals) - min(totals) <= max(pairs) - min(pairs)


def test_balanced_rows_of_all_ranks_are_the_batch(store: TokenStore) -> None:
    packed, numbers = WholeRows(store, 512, seed=1), range(6, 14)
    whole = read_batch(packed, numbers, Part.whole(8, 512))
    parts = [read_batch(packed, numbers, replace(Part.whole(2, 512), first=2 * k, balanced=True)) for k in range(4)]
    assert sorted(number for part in parts for number in part.own) == list(numbers) != [n for p in parts for n in p.own]
    for part in parts:
        assert part.numbers == numbers
        assert torch.equal(part.shift_labels, whole.shift_labels[[number - 6 for number in part.own]])
    lengths = [part.cu_seqlens.diff().double() for part in parts]
    work = [float((each**2).sum()) for each in lengths]
    ends = whole.cu_seqlens.diff().double().square().sum(1).view(4, 2).sum(1)
    assert max(work) / min(work) < float(ends.max() / ends.min())


def test_rows_are_dealt_by_what_windows_show(store: TokenStore) -> None:
    """Five layers have a window, one has none, as in Gemma 3: a long document has hardly more work than short ones."""
    windows = (16,) * 5 + (0, -1)
    draw = np.random.default_rng(2864)
    cuts = [np.sort(draw.choice(np.arange(1, 256), draw.integers(0, 20), replace=False)) for _ in range(12)]
    rows = [np.diff(np.concatenate(([0], cut, [256]))) for cut in cuts]

    def work_of(lengths: np.ndarray, windows: Sequence[int]) -> int:
        return sum(causal_pairs(length, counted_windows(windows)) for length in lengths.tolist())

    def visible(lengths: np.ndarray) -> int:
        """Pairs counted from the mask of each layer."""
        documents, place = np.repeat(np.arange(len(lengths)), lengths), np.arange(256)
        behind = place[:, None] - place
        seen = (documents[:, None] == documents) & (behind >= 0)
        return sum(int((seen & (behind < (window or 256))).sum()) for window in windows if window >= 0)

    work = [visible(lengths) for lengths in rows]
    assert work == [work_of(lengths, windows) for lengths in rows]
    uneven = {}
    for name, of in (("windows", windows), ("full", (0,))):
        loads = [sum(work[row] for row in each) for each in even_rows([work_of(x, of) for x in rows], 4)]
        uneven[name] = max(loads) / (sum(loads) / 4)
    assert uneven["windows"] < 1.038 < uneven["full"]
    packed, config = WholeRows(store, 512, seed=1), TrainConfig(seq_len=512, batch_size=2)
    dealt = []
    for rank in range(3):
        with fake_world(3, rank):
            mesh = ParallelMesh.create(ParallelDims(dp_shard=3), device_type="cpu")
            part = part_of(mesh, config, True, windows=windows)
        dealt.append(list(read_batch(packed, range(6), part).own))
    pairs = [work_of(np.diff(packed.row(number).boundaries), windows) for number in range(6)]
    assert dealt == even_rows(pairs, 3)
