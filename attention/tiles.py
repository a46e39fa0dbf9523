"""Masks by function, as FlexAttention's mask_mod: bands where they are bands, else tiles.

A function decides of each pair (row, head, query, key) that a mask of bands shows. If what remains is a mask of bands,
it becomes one, with the kernels and messages of bands. Else a block of a rank's queries and another's keys has

    empty tiles      that are not computed, and whose keys are not sent
    full tiles       which join to rectangles without a mask
    partial tiles    with a mask of booleans

The function is evaluated for the pairs of a tile's queries and some tiles' keys at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .bands import Task, Tasks, Tile
from .intervals import Array
from .layout import SequenceLayout
from .spec import AttentionSpec, MaskFunction, MaskMod

TILE = 128  # queries, and keys
WIDE = 8  # tiles of keys that have one mask at most

Seen = npt.NDArray[np.bool_]


def visible_range(spec: AttentionSpec, row: int, seq_len: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest positions that queries at these positions of a row may see, the highest -1 if there
    are none, without the function of the mask."""
    boundaries = torch.tensor(spec.row_documents(row, seq_len))
    number = torch.searchsorted(boundaries, positions, right=True)
    first, last = boundaries[number - 1], boundaries[number.clamp(max=len(boundaries) - 1)] - 1
    lowest, highest = spec.difference_range()  # of query position - key position
    if lowest is not None:
        last = last.minimum(positions - lowest)
    if highest is not None:
        first = first.maximum(positions - highest)
    return first, last.where(number < len(boundaries), -1)


def with_mask_mod(
    spec: AttentionSpec, mask_mod: MaskMod, batch: int, num_heads: int, seq_len: int, device: torch.device
) -> AttentionSpec:
    """Return the mask of the pairs that both `spec` and a function show: one of bands if there is one, else `spec` with
    the function. All pairs of the rows are evaluated, for all heads if the function uses the head.

    Raises:
        ValueError: for what is no function of a pair, or a mask with prefixes, a tree, joint tokens or other keys.
    """
    if not spec.in_intervals:
        raise ValueError(
            "mask_mod supports causal, window, chunk and cu_seqlens; not prefix, prefix_tree, joint tokens and cross "
            "attention: say in the function what it hides of the prefix, and leave the others out"
        )
    by_row, by_head = (_uses(mask_mod, argument, device) for argument in (0, 1))
    rows = batch if by_row or len(spec.documents or ()) > 1 else 1
    if not rows:  # and so no pairs
        return spec
    asked = MaskFunction(mask_mod, device, by_row, by_head, "", (0, num_heads if by_head else 1))
    positions, digest, alike = torch.arange(seq_len), sha256(), True
    bounds = np.empty((rows, 3, seq_len), np.int64)  # the first and the last key of each query, and their number
    bounds[:] = np.array([seq_len, -1, 0])[:, None]
    for row in range(rows):
        first, last, number = bounds[row]
        for queries, start, seen in _evaluated(spec, asked, row, seq_len, positions, positions):
            digest.update(np.packbits(seen).tobytes())
            alike = alike and bool((seen == seen[:1]).all())
            some, one = seen[0].any(1), slice(queries, queries + seen.shape[1])
            number[one] += seen[0].sum(1)
            first[one] = np.where(some, np.minimum(first[one], start + seen[0].argmax(1)), first[one])
            last[one] = np.where(some, start + seen.shape[2] - 1 - seen[0, :, ::-1].argmax(1), last[one])
    if alike and (bands := _bands(bounds)) is not None:
        return replace(spec, **bands)
    return replace(spec, function=MaskFunction(mask_mod, device, rows > 1, not alike, digest.hexdigest()))


def _uses(mask_mod: MaskMod, argument: int, device: torch.device) -> bool:
    """Return whether the result of a function is computed from this one of its arguments."""
    dims = [0 if number == argument else None for number in range(4)]
    inputs = [torch.zeros(() if dim is None else (1,), dtype=torch.int64, device=device) for dim in dims]
    result = torch.vmap(mask_mod, tuple(dims))(*inputs)
    if result.dtype != torch.bool or result.shape != (1,):
        raise ValueError(
            f"mask_mod must return a bool for one (row, head, query position, key position), got {result.dtype} of "
            f"shape {tuple(result.shape[1:])}"
        )
    try:
        torch.vmap(mask_mod, tuple(dims), out_dims=None)(*inputs)
    except ValueError:  # the result has the dim of the argument
        return True
    return False


def _evaluated(
    spec: AttentionSpec, mask: MaskFunction, row: int, seq_len: int, queries: Tensor, keys: Tensor
) -> Iterator[tuple[int, int, Seen]]:
    """Yield the number of the first query and of the first key, and which pairs from there on are visible (heads,
    queries, keys), for all that may be. queries, keys: ascending positions."""
    first, last = visible_range(spec, row, seq_len, queries)
    over_keys = torch.vmap(mask.function, (None, None, None, 0))
    over_queries = torch.vmap(over_keys, (None, None, 0, None))
    over_heads = torch.vmap(over_queries, (None, 0, None, None))
    number, heads = torch.tensor(row, device=mask.device), torch.arange(*mask.heads, device=mask.device)
    tokens = int((last >= 0).sum())  # without padding, which the function may not know
    for start in range(0, tokens if len(heads) else 0, TILE):
        some = slice(start, min(start + TILE, tokens))
        low, high = first[some, None], last[some, None]
        begin = int(torch.searchsorted(keys, low.min())) // TILE * TILE
        end = int(torch.searchsorted(keys, high.max(), right=True))
        for at in range(begin, end, WIDE * TILE):
            those = keys[at : min(at + WIDE * TILE, end)]
            seen = over_heads(number, heads, queries[some].to(mask.device), those.to(mask.device)).cpu()
            yield start, at, (seen & (those >= low) & (those <= high)).numpy()


def _bands(bounds: Array) -> dict[str, Any] | None:
    """Return the fields of the mask in which the queries of each row see the keys from the first to the last, if these
    are as many as their number, else None. bounds: (rows, 3, queries)."""
    rows, at = [], np.arange(bounds.shape[2])
    for first, last, number in bounds:
        tokens = int(max(np.flatnonzero(number).max(initial=-1), last.max(initial=-1))) + 1  # what follows is hidden
        first, last, here = first[:tokens], last[:tokens], at[:tokens]
        if (number[:tokens] != last - first + 1).any():
            return None
        crossed = np.zeros(tokens + 1, np.int64)  # by how many queries' pairs each boundary is
        np.add.at(crossed, np.minimum(first, here) + 1, 1)
        np.add.at(crossed, np.maximum(last, here) + 1, -1)
        rows.append((first, last, here, np.append(np.flatnonzero(crossed.cumsum()[:tokens] == 0), tokens)))
    left = max(int((here - first).max(initial=0)) for first, _, here, _ in rows)
    right = max(int((last - here).max(initial=0)) for _, last, here, _ in rows)
    both_ways, one_way, documents, prefixes = right > 0, True, [], []
    for first, last, here, boundaries in rows:
        starts, lengths = boundaries[:-1], np.diff(boundaries)
        start, stop = np.repeat(starts, lengths), np.repeat(boundaries[1:], lengths)
        if (first != np.maximum(start, here - left)).any():
            return None
        both_ways &= bool((last == np.minimum(stop - 1, here + right)).all())
        ends = np.maximum.reduceat(np.where(last > here, last + 1, 0), starts) if len(starts) else starts  # of prefixes
        end = np.repeat(ends, lengths)
        one_way &= bool((last == np.where(here < end, np.minimum(end - 1, here + right), here)).all())
        documents.append(tuple(boundaries.tolist()) if len(starts) else (0, 0))
        prefixes.append(tuple(np.maximum(ends - starts, 0).tolist()))
    if not (both_ways or one_way):
        return None
    entries = max(map(len, documents))
    longest = max(b - a for row in documents for a, b in pairwise(row))
    window = tuple(-1 if reach >= longest - 1 else reach for reach in (left, right))
    prefixes = [row + (0,) * (entries - 1 - len(row)) for row in prefixes]
    return {
        "causal": not both_ways,
        "window": window if right else (window[0], -1),
        "documents": tuple(row + row[-1:] * (entries - len(row)) for row in documents),
        "prefixes": None if both_ways or not right else tuple(prefixes),
    }


def tile_tasks(
    layout: SequenceLayout, spec: AttentionSpec, mask: MaskFunction, batch: int, q_rank: int, k_rank: int
) -> Tasks:
    """Return the visible pairs between two ranks' queries and keys: rectangles of full tiles, and partial ones."""
    full: list[Task] = []
    above: dict[tuple[int, int], int] = {}  # the last rectangle with these keys
    tiles: list[Tile] = []
    masks: dict[tuple[object, ...], Tensor] = {}  # each of those that are alike once
    for row in range(batch):
        queries, keys = layout.ring_positions(q_rank, row), layout.ring_positions(k_rank, row)
        offset = row * layout.ring_len
        for q_start, k_start, seen in _evaluated(spec, mask, row * mask.by_row, layout.seq_len, queries, keys):
            q_start, k_start = q_start + offset, k_start + offset
            for column, part, every in _runs(seen):
                begin = k_start + column
                if every:
                    task = Task(q_start, q_start + part.shape[1], begin, begin + part.shape[2])
                    number = above.get((begin, task.k_stop), -1)
                    if number >= 0 and full[number].q_stop == q_start:
                        full[number] = replace(full[number], q_stop=task.q_stop)
                    else:
                        above[begin, task.k_stop] = len(full)
                        full.append(task)
                    continue
                rows, columns = (np.flatnonzero(part.any(dims)) for dims in ((0, 2), (0, 1)))
                part = part[: 1 if (part == part[:1]).all() else None]
                part = part[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                shared = masks.setdefault((part.shape, part.tobytes()), torch.from_numpy(part.copy()))
                tiles.append(Tile(q_start + int(rows[0]), begin + int(columns[0]), shared))
    return Tasks(Tasks.of(full).rows, tiles)


def _runs(seen: Seen) -> Iterator[tuple[int, Seen, bool]]:
    """Yield the first column and the pairs of adjacent tiles of a kind, and whether all are visible, unless none is."""
    tiles, column = [seen[..., at : at + TILE] for at in range(0, seen.shape[2], TILE)], 0
    for (some, every), run in groupby(tiles, lambda tile: (bool(tile.any()), bool(tile.all()))):
        part = np.concatenate([*run], 2)
        if some:
            yield column, part, every
        column += part.shape[2]
