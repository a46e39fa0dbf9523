"""Indexers of sparse attention under sequence parallelism, in unmodified transformers models.

An indexer (DeepSeek Sparse Attention: DeepSeek-V3.2, section 2.1) chooses the keys that each query attends to. It makes
a small query and key of each token, gets the keys of all tokens from a cache, and returns the positions of the highest
scores that the mask allows. Here its own forward runs in two passes over a rank's tokens:

    keys      with a cache that keeps them; then they are gathered over the ranks, in the order of the sequence
    indices   for a tile of queries at a time, with a cache that returns all keys, and these queries' part of the mask

In generation a rank keeps the keys of its own tokens beside those of attention. A new token is scored against these,
and the scores, which are much smaller than keys, are gathered instead.

MiniMax M3's chooses blocks of keys for each KV head, counted from a document's first token: its forward runs over each
document by itself.

So scores and ties are those of one process, and no tensor has tokens x tokens elements. Indexers have no gradient, as
in transformers, but that of `IndexerLoss`, if it is asked for.

B batch, S a rank's tokens of each row, L tokens of the sequence, D head dim of the indexer, k indices of a query, K KV
heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from usp.attention import DecodeStep, Prefill, token_tiles
from usp.parallel import ParallelMesh
from usp.sp.sequence import SpAxes, document_starts, documents_of, unshard_sequence
from usp.sp.sp_attention import UnifiedSPAttention

LATENTS = "sharded_latents"
QKV = tuple[Tensor, Tensor, Tensor]
_ARGUMENTS = {"hidden_states", "position_embeddings", "attention_mask", "position_ids", "past_key_values"}


def indexers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the indexers of a model that this file can run, by name: those that take what DeepSeek-V3.2's or MiniMax
    M3's takes."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Indexer")
        and (chooses_blocks(module) or inspect.signature(type(module).forward).parameters.keys() >= _ARGUMENTS)
    }


def chooses_blocks(indexer: nn.Module) -> bool:
    """Whether an indexer chooses blocks of keys for each KV head, as MiniMax M3's does."""
    return hasattr(indexer, "topk_blocks")


@dataclass(frozen=True, eq=False)
class CausalMask:
    """Stands for the mask of an attention module with an indexer, which takes the part that all heads share.

    cu_seqlens: as in `shard_batch`, None for one document per row. kv_cache: as in `run_layers`.
    """

    cu_seqlens: Tensor | None
    kv_cache: Prefill | DecodeStep | None = None

    def __getitem__(self, part: Any) -> CausalMask:
        return self


def apply_indexers(base: nn.Module, mesh: ParallelMesh | DeviceMesh, attention: UnifiedSPAttention) -> None:
    """Let the indexers of a backbone choose from all tokens of the sequence, and latent attention remember what it
    expands, in place."""
    for part in base.modules():
        if (expand := getattr(part, "expand_kv", None)) is not None:
            _remember_latents(part, expand)
    for name, module in indexers(base).items():
        owner = base.get_submodule(name.rpartition(".")[0])
        module.forward = owner.sharded_indexer = sharded = sharded_indexer(module, mesh, attention)
        owner.forward = update_wrapper(partial(_with_mask, sharded, owner.forward), owner.forward)


def sharded_indexer(module: nn.Module, mesh: Any, attention: Any) -> Any:
    """Return the `ShardedIndexer` of an indexer."""
    return (ShardedBlockIndexer if chooses_blocks(module) else ShardedIndexer)(module, mesh, attention)


def _with_mask(indexer: ShardedIndexer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    indexer.mask = CausalMask(*map(kwargs.get, ("cu_seqlens", "kv_cache")))
    return forward(*args, **{**kwargs, "attention_mask": indexer.mask})


class ShardedIndexer:
    """The forward of an indexer whose tokens are sharded. loss: from `train_indexers`. mask: of the current call of the
    attention module. block: how many keys each of the indices stands for."""

    loss: IndexerLoss | None = None
    mask = CausalMask(None)
    block = 1

    def __init__(self, module: Any, mesh: ParallelMesh | DeviceMesh, attention: UnifiedSPAttention) -> None:
        self.module, self.mesh, self.attention = module, mesh, attention
        self.choose, self._call = module.forward, dict[str, Any]()
        self._signature = inspect.signature(module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the indices (B, S, k) of this rank's queries, none of them in a warm-up. Collective."""
        call = {**self._signature.bind(*args, **kwargs).arguments, "attention_mask": self.mask}
        if self.trains:
            self._call = call
        if isinstance(self.loss, DenseIndexerLoss):
            return call["hidden_states"].new_empty(*call["hidden_states"].shape[:2], 0, dtype=torch.int32)
        cache = self.mask.kv_cache
        if isinstance(cache, DecodeStep):
            return self._decoded(call, cache)

        def choose() -> tuple[Tensor]:
            keys = self.own_keys(call)
            self.attention.indexer_bytes += keys.nbytes * (self.attention.ranks - 1)
            if cache is not None:
                cache.store(self.module, keys.unsqueeze(2))
            return (self.chosen(call, *self.scored(call, keys)),)

        with torch.no_grad():
            return self.attention.keep(("indexer", call["hidden_states"].shape), choose)[0]

    def own_keys(self, call: dict[str, Any], forward: Callable[..., Tensor] | None = None) -> Tensor:
        """Return the keys (B, S, D) of this rank's tokens, by another forward of the indexer if it is given."""
        x, made = call["hidden_states"], list[Tensor]()
        anything = torch.ones(1, 1, 1, dtype=torch.bool, device=x.device)

        def keep(keys: Tensor) -> Tensor:
            made.append(keys)
            return keys[:, :1]  # only one is scored

        for start in range(0, x.shape[1], 1024):
            inputs = {**_part(call, slice(start, start + 1024)), "attention_mask": anything}
            (forward or self.choose)(**inputs, past_key_values=_Keys(keep))
        return torch.cat(made, 1)

    def chosen(self, call: dict[str, Any], keys: Tensor, positions: Tensor, starts: Tensor, scores: int) -> Tensor:
        """Return the indices (B, S, k) of this rank's queries, at `positions` (B or 1, S) in documents that begin at
        `starts` (B, S), among all keys (B, L, D). scores: elements of the scores of a query."""
        indices = None
        for part, inputs in score_tiles(call, keys, positions, starts, scores):
            chosen = self.choose(**inputs)
            if indices is None:
                indices = chosen.new_empty(*call["hidden_states"].shape[:2], chosen.shape[-1])
            indices[:, part] = chosen
        return cast(Tensor, indices)

    def _decoded(self, call: dict[str, Any], step: DecodeStep) -> Tensor:
        """Return the indices (B, 1, k) of the new tokens, among the cached keys of all ranks."""
        keys = _cached_keys(self.module, step)
        own = _scores(self.choose, {**call, "attention_mask": step.seen().unsqueeze(1), "past_key_values": keys})
        scores = step.of_all_ranks(own.squeeze(1))
        chosen = scores.topk(min(self.module.index_topk, scores.shape[1])).indices
        return chosen.unsqueeze(1).int()

    @property
    def trains(self) -> bool:
        """Whether the forward of the attention must pass its output through `with_loss`."""
        return self.loss is not None and torch.is_grad_enabled()

    def with_loss(self, out: Tensor, *attended: Any) -> Tensor:
        """Return the output of the attention after the last call, whose backward also computes the loss's gradient.

        attended: as in `parts` of the loss.
        """
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        (leaves, structure), self._call = tree_flatten((self._call, *attended)), {}
        return _WithLoss.apply(out, self.loss, structure, len(leaves), *leaves, *parameters)

    def scored(self, call: dict[str, Any], keys: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return what `score_tiles` takes, from this rank's keys (B, S, D): those of all tokens, the positions of its
        queries, the starts of their documents, and how many scores a query has. Collective."""
        mask, (rows, tokens) = call["attention_mask"], call["hidden_states"].shape[:2]
        assert isinstance(mask, CausalMask)
        cu_seqlens, layout, axes = mask.cu_seqlens, self.attention.layout, SpAxes.of(self.mesh)
        length = tokens * axes.ranks if cu_seqlens is None else int(cu_seqlens.max())  # without padding
        keys = unshard_sequence(keys, self.mesh, layout, cu_seqlens=cu_seqlens, length=length)
        sequence = axes.layout(layout, tokens * axes.ranks, documents_of(cu_seqlens))
        positions = axes.positions(sequence)
        starts = document_starts(cu_seqlens, rows, sequence.seq_len, positions)
        return keys, positions, starts, rows * length * getattr(self.module, "n_heads", 64)


class ShardedBlockIndexer(ShardedIndexer):
    """The same of an indexer that chooses blocks of keys: its indices (B, S, K, k) are where these begin, -1 for none;
    of a new token (B, 1, K, k), all their positions."""

    def __init__(self, module: Any, mesh: ParallelMesh | DeviceMesh, attention: UnifiedSPAttention) -> None:
        super().__init__(module, mesh, attention)
        self.choose, self.block = partial(_without_mask, module.forward), module.block_size

    def own_keys(self, call: dict[str, Any], forward: Callable[..., Tensor] | None = None) -> Tensor:
        # The blocks of single keys, which are dropped, would be beyond them.
        x = call["hidden_states"]
        return super().own_keys({**call, "position_ids": x.new_zeros(x.shape[:2], dtype=torch.int64)}, forward)

    def chosen(self, call: dict[str, Any], keys: Tensor, positions: Tensor, starts: Tensor, scores: int) -> Tensor:
        rows, tokens = call["hidden_states"].shape[:2]
        shape = rows, tokens, self.module.num_heads, self.module.topk_blocks
        indices = torch.full(shape, -1, dtype=torch.int32, device=keys.device)
        at = (positions - starts).to(keys.device)
        for row, (of_row, own) in enumerate(zip(positions.expand(rows, -1).tolist(), starts.tolist(), strict=True)):
            end = 0
            for start, run in groupby(own):  # consecutive tokens of a document
                begin, end = end, end + len([*run])
                seen = keys[row : row + 1, start : of_row[end - 1] + 1]
                for tile in token_tiles(end - begin if seen.shape[1] else 0, scores // rows):
                    part = slice(begin + tile.start, begin + tile.stop)
                    inputs = {name: _of_row(value, row) for name, value in _part(call, part).items()}
                    inputs["position_ids"] = at[row : row + 1, part].clamp(max=seen.shape[1] - 1)  # of padding
                    blocks = self.choose(**inputs, attention_mask=None, past_key_values=_all_keys(seen))
                    first = first_positions(blocks, self.block)
                    indices[row, part, :, : first.shape[-1]] = first[0].where(first[0] < 0, first[0] + start)
        return indices

    def _decoded(self, call: dict[str, Any], step: DecodeStep) -> Tensor:
        with _CachedScores(self.module, step) as scores:
            blocks = self.choose(**{**call, "past_key_values": _Keys(scores.update)})
        first = first_positions(blocks, self.block).unsqueeze(-1)
        return (first + torch.arange(self.block, device=first.device)).where(first >= 0, -1).flatten(3)


def _without_mask(forward: Callable[..., Tensor], *, attention_mask: Any, **call: Any) -> Tensor:
    return forward(**call)


def _of_row(value: Any, row: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_of_row(each, row) for each in value)
    return value[row : row + 1] if isinstance(value, Tensor) and len(value) > 1 else value


def first_positions(blocks_BKSk: Tensor, size: int) -> Tensor:
    """Return where blocks begin in their document, (B, S, K, k), -1 for none."""
    return (blocks_BKSk * size).where(blocks_BKSk >= 0, -1).transpose(1, 2)


def score_tiles(
    call: dict[str, Any], keys: Tensor, positions: Tensor, starts: Tensor, scores: int
) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Yield a part of the queries, and the call that scores it; the arguments are those of `ShardedIndexer.chosen`."""
    x, every = call["hidden_states"], torch.arange(keys.shape[1], device=keys.device)
    positions, starts = (each.to(x.device).unsqueeze(-1) for each in (positions, starts))
    for part in token_tiles(x.shape[1], scores):
        visible = (every <= positions[:, part]) & (every >= starts[:, part])
        yield part, {**_part(call, part), "attention_mask": visible, "past_key_values": _all_keys(keys)}


def _part(call: dict[str, Any], tokens: slice) -> dict[str, Any]:
    """Return what a call has of some tokens: its tensors (B, S, ...), alone or in tuples; without mask and cache."""
    length = call["hidden_states"].shape[1]

    def take(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(take, value))
        return value[:, tokens] if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length else value

    return {name: take(value) for name, value in call.items() if name not in ("attention_mask", "past_key_values")}


@dataclass(frozen=True)
class _Keys:
    """A cache as indexers take it, and those of blocks, whose layers are all the same. update: from the keys that an
    indexer makes to those that it scores."""

    update: Callable[[Tensor], Tensor]

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        return self.update(keys)

    def update_index(self, keys_B1SD: Tensor) -> Tensor:
        return self.update(keys_B1SD.squeeze(1)).unsqueeze(1)

    @property
    def layers(self) -> _Keys:
        return self

    def __getitem__(self, layer: int) -> _Keys:
        return self


def _all_keys(keys: Tensor) -> _Keys:
    """Return a cache that has all keys already."""
    return _Keys(lambda _: keys)


def _cached_keys(indexer: nn.Module, step: DecodeStep) -> _Keys:
    """Return a cache that keeps the key of a new token, and returns those of this rank."""
    return _Keys(lambda keys: step.store(indexer, keys.unsqueeze(2))[0].squeeze(1))


class _CachedScores(TorchFunctionMode):
    """Keeps the key of a new token, as `_cached_keys`; in its context scores are those of the keys of all ranks."""

    def __init__(self, indexer: nn.Module, step: DecodeStep) -> None:
        super().__init__()
        self.cached, self.step = _cached_keys(indexer, step), step

    def update(self, keys: Tensor) -> Tensor:
        self.own = self.cached.update(keys)
        return keys.expand(-1, self.step.tokens, -1)  # stands for those of all positions

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func.__name__ != "matmul":
            return func(*args, **(kwargs or {}))
        return self.step.of_all_ranks((args[0] @ self.own.unsqueeze(1).float().mT).squeeze(2)).unsqueeze(2)


def train_indexers(model: nn.Module, coefficient: float, warmup: bool = False) -> None:
    """Give the indexers of a model from `apply_unified_sp` a loss, `IndexerLoss`, whose gradient comes with every
    backward; or for their `warmup` a `DenseIndexerLoss`, with attention to all keys, and freeze everything else.

    coefficient: weight of the mean over the tokens that a data-parallel rank has in a forward.
    """
    if warmup:
        model.requires_grad_(False)
    for forward in _sharded(model):
        forward.loss = (DenseIndexerLoss if warmup else IndexerLoss)(forward, coefficient)
        forward.module.requires_grad_(True)


def indexer_losses(models: Sequence[nn.Module]) -> tuple[float, float]:
    """Return this rank's shares of the losses of trained indexers since they were last asked for, and of their number:
    summed over the ranks, the first by the second is the mean over indexers and tokens."""
    losses = [forward.loss for model in models for forward in _sharded(model) if forward.loss]
    total, number = (float(sum(of)) for of in ([x.total for x in losses], [x.number for x in losses]))
    for loss in losses:
        loss.total = loss.number = 0.0
    return total, number


def _sharded(model: nn.Module) -> list[ShardedIndexer]:
    return [module.forward for module in model.modules() if isinstance(module.forward, ShardedIndexer)]


class IndexerLoss:
    """The loss of an indexer that is trained beside the attention that it chooses keys for (DeepSeek-V3.2, section 2.1,
    equation 4).

    For each query the divergence (Kullback-Leibler) of the softmax of its scores, over the keys that it chose, from the
    attention weights that these keys got, summed over the heads and normalized. Neither the attention nor what the
    indexer reads gets a gradient of it. It is computed in the backward, a tile of queries at a time.

    total: this rank's share of the means over tokens, summed over backwards. number: of these backwards, by the ranks
        of a sequence.
    """

    def __init__(self, indexer: ShardedIndexer, coefficient: float) -> None:
        self.indexer, self.coefficient = indexer, coefficient
        self.forward = inspect.unwrap(type(indexer.module).forward)  # without no_grad
        self.total: Tensor | float = 0.0
        self.number = 0.0

    def gradients(self, call: dict[str, Any], *attended: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the indexer's parameters, and add to `total`. Collective."""
        module, ranks = self.indexer.module, self.indexer.attention.ranks
        self.number += 1 / ranks
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with torch.enable_grad():
            run = partial(self.forward, module)
            keys, *scored = self.indexer.scored(call, self.indexer.own_keys(call, run))
            every = keys.detach().requires_grad_()
            own = every.nbytes * (ranks - 1) // ranks  # of this rank's keys to the others, and of their gradients
            self.indexer.attention.indexer_bytes += 2 * own
            sums: list[Tensor | None] = [None] * (len(parameters) + 1)
            for output, gradient in self.parts(run, call, every, scored, *attended):
                grads = torch.autograd.grad(output, [*parameters, every], gradient, allow_unused=True)
                sums = [_sum(a, b) for a, b in zip(sums, grads, strict=True)]
            of_keys = torch.autograd.grad(keys, parameters, sums[-1], allow_unused=True)
        return tuple(_sum(a, b) for a, b in zip(sums, of_keys, strict=False))

    def parts(
        self, run: Callable[..., Tensor], call: dict[str, Any], every: Tensor, scored: Sequence[Any], *attended: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scores of the indexer, or what is computed of them, and the loss's gradient.

        run: its forward. every: its keys. scored: the others that `ShardedIndexer.scored` returns. attended: what
            `ShardedIndexer.with_loss` was given: here indices and weights (B, S, k), which the attention got and
            returned.
        """
        indices, weights = attended
        for part, inputs in score_tiles(call, every, *scored):
            loss = _divergence(_scores(run, inputs), indices[:, part].long(), weights[:, part])
            loss = self._counted(loss, indices)
            yield loss, torch.full_like(loss, self.coefficient)

    def _counted(self, loss: Tensor, of_tokens: Tensor) -> Tensor:
        """Return a sum over some tokens as this rank's share of the mean over all (B, S, ...); add it to `total`."""
        loss = loss * self._share(of_tokens)
        self.total = self.total + loss.detach()
        return loss

    def _share(self, of_tokens: Tensor) -> float:
        return 1 / (of_tokens[..., 0].numel() * self.indexer.attention.ranks)


class DenseIndexerLoss(IndexerLoss):
    """The loss of an indexer that is trained before it chooses keys (DeepSeek-V3.2, section 2.1, equation 3).

    The attention is dense: the divergence is of scores and weights of all keys that a query sees. The weights are
    computed again, of a tile of queries and a block of keys at a time, which is gathered from all ranks.
    """

    def parts(
        self, run: Callable[..., Tensor], call: dict[str, Any], every: Tensor, scored: Sequence[Any], *attended: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """As in `IndexerLoss`. attended: q (B, S, N, H), k (B, S, K, H) and lse (B, S, N) of the attention, its scale,
        and its sinks (N,) or None."""
        (q, k, lse, scale, sinks), (positions, starts, _) = attended, scored
        attention, (rows, tokens, heads) = self.indexer.attention, lse.shape
        positions, starts = positions.to(q.device).expand(rows, -1), starts.to(q.device)
        sees = ~lse.isneginf().all(-1)  # padding does not
        lse, norms = lse.masked_fill(lse.isneginf(), 0.0), lse.new_empty(rows, tokens)
        total = torch.full_like(norms, heads) if sinks is None else heads - (sinks - lse).exp().sum(-1)
        with torch.no_grad():
            for part, inputs in score_tiles(call, every, *scored):
                norms[:, part] = _scores(run, inputs).logsumexp(-1).to(norms.dtype)
        for own in token_tiles(tokens, rows * attention.ranks * k[0, 0].numel()):
            block, at = attention.gathered(k[:, own]), attention.gathered(positions[:, own])
            for part in token_tiles(
                tokens, rows * at.shape[1] * max(heads, getattr(self.indexer.module, "n_heads", 64))
            ):
                after, before, real = (x[:, part].unsqueeze(-1) for x in (starts, positions, sees))
                seen = (at.unsqueeze(1) >= after) & (at.unsqueeze(1) <= before) & real
                keys = every.take_along_dim(at.clamp(max=every.shape[1] - 1).unsqueeze(-1), 1)
                scores = _scores(run, {**_part(call, part), "attention_mask": seen, "past_key_values": _all_keys(keys)})
                wanted = _weights(q[:, part], block, lse[:, part], scale) / total[:, part].unsqueeze(-1)
                wanted = wanted.masked_fill(~seen, 0.0)
                logs = (scores.detach() - norms[:, part].unsqueeze(-1)).masked_fill(~seen, 0.0)
                self._counted((torch.xlogy(wanted, wanted) - wanted * logs).sum(), lse)
                yield scores, (logs.exp() - wanted).masked_fill(~seen, 0.0) * (self.coefficient * self._share(lse))


def _scores(run: Callable[..., Tensor], inputs: dict[str, Any]) -> Tensor:
    """Return the scores of a call of an indexer's forward, -inf where the mask hides a key."""
    with _Scores() as found:
        run(**inputs)
    return found.scores


def _weights(q_BtNH: Tensor, k_BsKH: Tensor, lse_BtN: Tensor, scale: float) -> Tensor:
    """Return the attention weights summed over the heads, (B, t, s), without a mask."""
    q, lse = (x.unflatten(2, (k_BsKH.shape[2], -1)) for x in (q_BtNH.to(lse_BtN.dtype), lse_BtN))
    scores = torch.einsum("btkgh,bskh->bkgts", q, k_BsKH.to(lse.dtype)) * scale
    return (scores - lse.movedim(1, 3).unsqueeze(-1)).exp().sum((1, 2))


def _divergence(scores_BtL: Tensor, indices_Btk: Tensor, weights_Btk: Tensor) -> Tensor:
    """Return the sum over queries of the loss; scores are -inf where the mask hides a key."""
    chosen = scores_BtL.gather(-1, indices_Btk)
    seen = ~chosen.isneginf()
    wanted = weights_Btk * seen
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=torch.finfo(wanted.dtype).tiny)
    logs = chosen.masked_fill(~seen, torch.finfo(chosen.dtype).min).log_softmax(-1)
    return (torch.xlogy(wanted, wanted) - wanted * logs).masked_fill(~seen, 0.0).sum()


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


class _WithLoss(torch.autograd.Function):
    """`apply(out, loss, structure, n, *n leaves of the arguments of gradients, *parameters)` -> out."""

    @staticmethod
    def forward(ctx, out, loss: IndexerLoss, structure, n: int, *rest):
        # Saved tensors are freed where a layer is checkpointed; what else a call has is small.
        leaves = rest[:n]
        ctx.loss, ctx.structure = loss, structure
        ctx.others = [None if isinstance(x, Tensor) else x for x in leaves]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in leaves))
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        tensors = ctx.saved_tensors
        leaves = [other if x is None else x.detach() for x, other in zip(tensors, ctx.others, strict=True)]
        grads = ctx.loss.gradients(*tree_unflatten(leaves, ctx.structure))
        return dout, None, None, None, *(None for _ in leaves), *grads


class _Scores(TorchFunctionMode):
    """Keeps the scores (B, t, L) of which an indexer takes the highest."""

    scores: Tensor

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func.__name__ == "topk":
            self.scores = args[0]
        return func(*args, **(kwargs or {}))


def _remember_latents(module: Any, expand: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Let an attention module keep what it expands, (B, 1, S, C) and (B, 1, S, R), as its attribute `LATENTS`."""

    def expand_kv(*latents: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            setattr(module, LATENTS, latents)
        return expand(*latents)

    module.expand_kv = expand_kv


def absorbed(
    module: Any, given: QKV, latents: tuple[Tensor, Tensor], axes: SpAxes | None = None
) -> tuple[QKV, Callable[[Tensor], Tensor]]:
    """Return what attention takes in place of a module's q (B, S, N, H), k (B, S, N, H) and v (B, S, N, V), and what
    makes its results (B, S, N, V) of those for them: q (B, S, N, C + R), k (B, S, 1, C + R) and v (B, S, 1, C) of the
    latents; the same where these are not fewer bytes to send over axes, and where the linear that expands them is not a
    plain one.

    A token has a latent c and a rotary part r, of which a head n makes k = [W_n c, r] and v = U_n c (DeepSeek-V2, arXiv
    2405.04434, section 2.1). Since q . k = [W_n^T q_nope, q_rot] . [c, r], all heads can attend to one key [c, r] of
    one value c instead, and U_n is applied to the result: the same numbers, up to rounding.
    """
    (q, k, v), linear = given, _expanding_linear(module)
    more = axes is not None and not _fewer_bytes(q.shape[2], k.shape[-1] + v.shape[-1], latents, axes)
    if linear is None or more:
        return given, lambda out: out
    c, r = (x.transpose(1, 2).to(q.dtype) for x in latents)
    nope, rotary = q.split([q.shape[-1] - r.shape[-1], r.shape[-1]], -1)
    of_k, of_v = linear.weight.view(q.shape[2], -1, c.shape[-1]).split([nope.shape[-1], v.shape[-1]], 1)
    q = torch.cat([torch.einsum("bsnd,ndc->bsnc", nope, of_k), rotary], -1)
    return (q, torch.cat([c, r], -1), c), lambda out: torch.einsum("bsnc,nvc->bsnv", out, of_v)


def cached_latents(module: Any) -> int:
    """Return how many elements of a token a cache has of latent attention, [c, r] of `absorbed`; 0 if it has keys and
    values of the heads, because these are fewer, or because the linear that expands latents is not a plain one."""
    linear = _expanding_linear(module)
    if linear is None or len(linear.weight) <= linear.weight.shape[1]:
        return 0
    return linear.weight.shape[1] + cast(int, module.qk_rope_head_dim)


def _expanding_linear(module: Any) -> nn.Linear | None:
    linear = getattr(module, "kv_b_proj", None)
    plain = type(linear) is nn.Linear and linear.bias is None and not isinstance(linear.weight, DTensor)
    return linear if plain and hasattr(module, "expand_kv") else None


def _fewer_bytes(heads: int, expanded: int, latents: tuple[Tensor, Tensor], axes: SpAxes) -> bool:
    """Return whether a rank sends less for a token with its latents, if the other ring ranks choose all keys: q, k, v
    and results over ulysses, k and v of latents as a whole to every rank; and k and v over the ring."""
    latent = 2 * latents[0].shape[-1] + latents[1].shape[-1]
    to_ulysses, to_ring = axes.ulysses - 1, axes.ring - 1
    whole = latent * (to_ulysses + axes.ulysses * to_ring)
    return whole + heads * latent * to_ulysses / axes.ulysses < heads * expanded * (
        2 * to_ulysses / axes.ulysses + to_ring
    )
