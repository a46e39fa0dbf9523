"""Indexers of sparse attention under sequence parallelism, in unmodified transformers models.

An indexer (DeepSeek Sparse Attention: DeepSeek-V3.2, section 2.1) chooses the keys that each query attends to. It makes
a small query and key of each token, gets the keys of all tokens from a cache, and returns the positions of the highest
scores that the mask allows. Here its own forward runs in two passes over a rank's tokens:

    keys      with a cache that keeps them; then they are gathered over the ranks, in the order of the sequence
    indices   for a tile of queries at a time, with a cache that returns all keys, and these queries' part of the mask

So scores and ties are those of one process, and no tensor has tokens x tokens elements. Indexers have no gradient, as
in transformers.

B batch, S a rank's tokens of each row, L tokens of the sequence, D head dim of the indexer, k indices of a query.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel import ParallelMesh
from usp.sp.sequence import SpAxes, document_starts, documents_of, unshard_sequence
from usp.sp.sp_attention import UnifiedSPAttention

TILE = 1 << 24  # scores at a time, of all heads
_ARGUMENTS = {"hidden_states", "position_embeddings", "attention_mask", "position_ids", "past_key_values"}


def indexers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the indexers of a model that this file can run, by name: those that take what DeepSeek-V3.2's takes."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Indexer")
        and inspect.signature(type(module).forward).parameters.keys() >= _ARGUMENTS
    }


@dataclass(frozen=True, eq=False)
class CausalMask:
    """Stands for the mask of an attention module with an indexer, which takes the part that all heads share.

    cu_seqlens: as in `shard_batch`, None for one document per row.
    """

    cu_seqlens: Tensor | None

    def __getitem__(self, part: Any) -> CausalMask:
        return self


def apply_indexers(base: nn.Module, mesh: ParallelMesh | DeviceMesh, attention: UnifiedSPAttention) -> None:
    """Let the indexers of a backbone choose from all tokens of the sequence, in place."""
    for name, module in indexers(base).items():
        module.forward = partial(_sharded, module, module.forward, mesh, attention)
        owner = base.get_submodule(name.rpartition(".")[0])
        owner.forward = partial(_with_mask, owner.forward)


def _with_mask(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **{**kwargs, "attention_mask": CausalMask(kwargs.get("cu_seqlens"))})


def _sharded(
    module: nn.Module,
    forward: Callable[..., Tensor],
    mesh: ParallelMesh | DeviceMesh,
    attention: UnifiedSPAttention,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return the indices (B, S, k) of this rank's queries. Collective."""
    call = inspect.signature(forward).bind(*args, **kwargs).arguments
    mask, (rows, tokens) = call["attention_mask"], call["hidden_states"].shape[:2]
    assert isinstance(mask, CausalMask)
    cu_seqlens, axes = mask.cu_seqlens, SpAxes.of(mesh)

    def choose() -> tuple[Tensor]:
        length = tokens * axes.ranks if cu_seqlens is None else int(cu_seqlens.max())  # without padding
        keys = own_keys(forward, call)
        attention.indexer_bytes += keys.nbytes * (axes.ranks - 1)
        keys = unshard_sequence(keys, mesh, attention.layout, cu_seqlens=cu_seqlens, length=length)
        layout = axes.layout(attention.layout, tokens * axes.ranks, documents_of(cu_seqlens))
        positions = axes.positions(layout)
        starts = document_starts(cu_seqlens, rows, layout.seq_len, positions)
        return (tiled_indices(forward, call, keys, positions, starts, tile_of(module, keys)),)

    with torch.no_grad():
        return attention.keep(("indexer", call["hidden_states"].shape), choose)[0]


def tile_of(module: nn.Module, keys: Tensor) -> int:
    """Return how many queries of each row are scored at a time against keys (B, L, D)."""
    return max(1, TILE // (keys.shape[0] * keys.shape[1] * getattr(module, "n_heads", 64)))


def own_keys(forward: Callable[..., Tensor], call: dict[str, Any]) -> Tensor:
    """Return the keys (B, S, D) that an indexer makes of the tokens of a call."""
    x, keys = call["hidden_states"], list[Tensor]()
    anything = torch.ones(1, 1, 1, dtype=torch.bool, device=x.device)
    for part in _tiles(x.shape[1], 1024):
        cache = _FirstKeys()
        forward(**_part(call, part), attention_mask=anything, past_key_values=cache)
        keys.append(cache.keys)
    return torch.cat(keys, 1)


def tiled_indices(
    forward: Callable[..., Tensor], call: dict[str, Any], keys: Tensor, positions: Tensor, starts: Tensor, tile: int
) -> Tensor:
    """Return the indices (B, S, k) of a call's queries, at `positions` (B or 1, S) in documents that begin at `starts`
    (B, S), among all keys (B, L, D)."""
    x, every, found = call["hidden_states"], torch.arange(keys.shape[1], device=keys.device), list[Tensor]()
    positions, starts = (each.to(x.device).unsqueeze(-1) for each in (positions, starts))
    for part in _tiles(x.shape[1], tile):
        visible = (every <= positions[:, part]) & (every >= starts[:, part])
        found.append(forward(**_part(call, part), attention_mask=visible, past_key_values=_AllKeys(keys)))
    return torch.cat(found, 1)


def _part(call: dict[str, Any], tokens: slice) -> dict[str, Any]:
    """Return what a call has of some tokens: its tensors (B, S, ...), alone or in tuples; without mask and cache."""
    length = call["hidden_states"].shape[1]

    def take(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(take, value))
        return value[:, tokens] if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length else value

    return {name: take(value) for name, value in call.items() if name not in ("attention_mask", "past_key_values")}


def _tiles(tokens: int, size: int) -> Iterator[slice]:
    yield from (slice(start, start + size) for start in range(0, tokens, size))


class _FirstKeys:
    """A cache that keeps the keys of a part of the tokens, of which the indexer then scores only one."""

    keys: Tensor

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.keys = keys
        return keys[:, :1]


@dataclass(frozen=True)
class _AllKeys:
    """A cache that has all keys already."""

    keys: Tensor

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        return self.keys
