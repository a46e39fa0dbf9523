"""Unified sequence parallel attention for unmodified transformers models.

Registers an attention function with transformers' `AttentionInterface`, which the model's configuration selects by
name; it calls the layer's `unified_sp`. No mask function has its name, so transformers builds no masks: causal, window
and `cu_seqlens` define them. Further inputs of a layer (`cu_seqlens`, its window) are keyword arguments of the forward,
as is `kv_cache`, which stores keys and values (`Prefill`) or attends over stored ones (`DecodeStep`). Unsupported
arguments raise an error; none is ignored.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from usp.attention import DecodeStep, Prefill
from usp.parallel import ParallelMesh, agree
from usp.sp.in_order import SequenceOrder
from usp.sp.mask import LastMasks
from usp.sp.sequence import document_starts, documents_of
from usp.sp.sp_attention import Handle, SparseAttention, UnifiedSPAttention, ulysses_violations

from .compressors import ShardedCompressor, apply_compressors, compressors
from .images import PLAN, TYPES, ImageExchange, bidirectional
from .indexers import LATENTS, CausalMask, ShardedIndexer, absorbed, apply_indexers, cached_latents, indexers
from .mixers import apply_mixers, sharded_mixers
from .positions import SCALE, Places, follow_positions, scaled_query, turns_by_length
from .probe import NEUTRAL, MaskKind, Structure, structure
from .prune import HANDED, OtherStagesLayer, backbone, decoder, hand_on, model_parts, stage_inputs
from .shrink import dropouts

NAME = "unified_sp"
_KINDS = ("token_type_ids", "mm_token_type_ids")  # which tokens are images, and attend as such
FORWARD = "a forward"  # on which the ranks agree
_MANY_LENGTHS = 1 << 15  # tokens of a prompt up to which cuDNN's plan takes longer than it saves, est. for an H100
_MEDIA = ("pixel_values", "image", "video", "audio", "input_features")


@dataclass(frozen=True)
class ModuleMask:
    """The mask of an attention module. width: tokens of a sliding window, the query included, or of a chunk: tokens
    attend within their chunk, counted from the document's first token. prefixes: whether the `prefix` of a forward,
    such as its images, is seen in both directions."""

    kind: MaskKind
    width: int = 0
    prefixes: bool = True


def apply_unified_sp(
    model: PreTrainedModel, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag", kernel: str = "auto"
) -> PreTrainedModel:
    """Replace a transformers causal LM's attention by `UnifiedSPAttention`, in place; returns the model.

    Call it before FSDP. The model then takes the output of `shard_batch`: `input_ids`, `position_ids` and, for packed
    documents, `cu_seqlens`; it returns the logits of this rank's tokens. `model.unified_sp` is the attention layer.

    Raises TypeError if `model` is not a transformers model, and ValueError, naming everything about the model that
    sequence parallelism does not support.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    attention = UnifiedSPAttention(mesh, layout, kernel)
    known = structure(type(model), model.config)
    masks = _check_model(model, known, attention.axes.ulysses)
    AttentionInterface.register(NAME, _attention_forward)
    _own_config(model)
    base, sparse, calls = backbone(model), SparseAttention(attention), 0
    _set_implementation(model, [module for name, module in base.named_modules() if name in masks])
    model.config.use_cache = model.config.get_text_config().use_cache = False
    for name, mask in masks.items():
        with suppress(AttributeError):  # of another pipeline stage
            module = base.get_submodule(name)
            module.unified_sp, module.unified_sp_sparse, module.unified_sp_mask = attention, sparse, mask
            calls += known.calls[name]
            if name in known.handed:
                hand_on(base.get_submodule(known.handed[name]), module)
    model.unified_sp = attention
    recurrent = sharded_mixers(model)  # convolutions are in parts that text does not reach, such as an audio tower
    images = ImageExchange(model, mesh) if model.config.model_type in TYPES else None
    model.image_exchange = images  # type: ignore[assignment]
    guard = _ForwardGuard(attention, calls, base, images)
    guard.kinds = _KINDS if hasattr(model.config, "vision_config") else ()
    model.register_forward_pre_hook(guard.check_labels, with_kwargs=True)
    base.register_forward_pre_hook(guard.before, with_kwargs=True)
    follow_positions(base, guard.places)
    base.register_forward_hook(guard.after)
    apply_indexers(base, mesh, attention)
    if compressors(base):
        order = model.unified_sp_order = SequenceOrder(mesh, layout)  # type: ignore[assignment]
        apply_compressors(base, attention, order)
    if recurrent:
        model.unified_sp_order = apply_mixers(model, mesh, layout)  # type: ignore[assignment]
    return model


def run_layers(model: PreTrainedModel, x: Tensor, *, first: bool, **inputs: Any) -> Tensor:
    """Return the hidden states (B, S, H) of a stage below its head, after `apply_unified_sp`. `inputs` may have what
    `usp.hf.images.image_inputs` returns.

    x: ids (B, S) on the first stage, else hidden states (B, S, H); of this rank's tokens. With a `kv_cache` these are
        of prompts, or one token of each sequence.
    """
    inputs |= {**stage_inputs(model, x, first), "use_cache": False}
    if isinstance(images := getattr(model, "image_exchange", None), ImageExchange):
        images.plan = inputs.pop(PLAN, None)
    if hasattr(model.config, "output_router_logits"):
        inputs["output_router_logits"] = False  # would keep all layers' logits; `RouterBalance` uses hooks
    hidden: Tensor = backbone(model)(**inputs).last_hidden_state
    if getattr(model.config, "residual_in_fp32", False):  # Mamba's, which the next stage and the head take in --dtype
        embedding = cast(nn.Embedding, model.get_input_embeddings())
        hidden = hidden.to(embedding.weight.dtype if first else x.dtype)
    return hidden


def rotary_switch(config: PretrainedConfig) -> int | None:
    """Return the length from which on all of a sequence's tokens rotate or scale differently; None if none."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_layer = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    switching = [part for part in by_layer if part.get("rope_type") == "longrope" or SCALE in part]
    return min((part["original_max_position_embeddings"] for part in switching), default=None)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal LM, without those of other pipeline stages."""
    layers = getattr(decoder(model), model_parts(model).layers)
    assert isinstance(layers, nn.ModuleList)
    return nn.ModuleList(layer for layer in layers if not isinstance(layer, OtherStagesLayer))


def _own_config(model: PreTrainedModel) -> None:
    """Copy the model's configuration and those of its parts, which other models may share."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if (copied := copies.get(id(getattr(module, "config", None)))) is not None:
            module.config = copied


def _set_implementation(model: PreTrainedModel, attending: Sequence[nn.Module]) -> None:
    """Let attention go through this file, but not that of parts without any of `attending`, such as an encoder."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    inside = {id(part): {*part.modules()} for part in parts}
    text = {id(part.config) for part in parts if part is model or inside[id(part)] & {*attending}}
    others = [(part.config, part.config._attn_implementation) for part in parts if id(part.config) not in text]
    model.set_attn_implementation(NAME)
    for config, implementation in others:
        config._attn_implementation = implementation


def _check_model(model: PreTrainedModel, known: Structure, ulysses: int) -> dict[str, ModuleMask]:
    """Return the mask of each attention module by its name in the backbone."""
    config, text = model.config, model.config.get_text_config()
    violations = [f"model_type={config.model_type!r}: {problem}" for problem in known.problems]
    if known.masks and not violations:
        layers = getattr(text, "per_layer_config", None) or [text]  # they may differ (dots3)
        violations += ulysses_violations(min(layer.num_attention_heads for layer in layers), ulysses)
    if hasattr(model, NAME):
        violations.append("the model already has unified sequence parallel attention")
    violations += [f"{name}={p} is not supported: set it to 0" for name, p in dropouts(config)]
    if getattr(config, "output_attentions", False):
        violations.append("output_attentions=True is not supported, there are no attention weights: set it to False")
    if violations:
        raise ValueError("; ".join(violations))
    blocks = bidirectional(config) if config.model_type in TYPES else ()
    return {
        name: ModuleMask(mask.kind, getattr(text, mask.field) if mask.field else 0, not blocks or mask.kind in blocks)
        for name, mask in known.masks.items()
    }


class _ForwardGuard:
    """Forward hooks that reject arguments for which the result would differ from attention over the whole sequence."""

    def __init__(
        self, attention: UnifiedSPAttention, layers: int, base: nn.Module, images: ImageExchange | None
    ) -> None:
        self.sparse, self.compressed, self.images = bool(indexers(base)), bool(compressors(base)), images
        self.attending: list[Any] = [module for module in base.modules() if hasattr(module, "unified_sp_mask")]
        # Others read in the forward what its check found.
        self.plain = not (self.sparse or self.compressed or images or any(map(turns_by_length, base.modules())))
        self.attention, self.layers, self.calls_before, self.compared = attention, layers, 0, False
        self.kinds: Sequence[str] = ()  # arguments from which the model would build masks
        self.tree: Tensor | None = None  # of the current forward
        self.trees, self.trees_before = 0, 0  # layers that should get it, and calls that had one before
        self.cache: Prefill | DecodeStep | None = None  # of the current forward
        self.local = torch.zeros(1, dtype=torch.int64)  # positions of this rank's tokens in the whole sequence
        self.starts = partial(document_starts, None, 1, 1)  # of the documents of the tokens at given positions, or all
        self.places = Places(self.starts(), self._last_positions)
        self.given: dict[str, Any] = {}  # to the whole model, which may not pass all of it on (Mamba)
        self.in_graph, self.handle = False, Handle(self, ())  # whether the current forward is compiled as a whole

    def check_labels(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if type(module).__name__.endswith("ForSequenceClassification"):
            self._refuse(
                f"{type(module).__name__} would read the last token of each rank's shard of the sequence: call its "
                f"base model, and unshard_sequence its hidden states"
            )
        named = _named(module, args, kwargs)
        self.given = {name: named[name] for name in HANDED if name in named}
        if named.get("labels") is not None:
            self._refuse("labels would be shifted within each rank's shard: pass labels to shard_batch")

    def _refuse(self, violations: str) -> None:
        """Raise a ValueError, or RanksDisagree on every rank if others would go on and wait for this one."""
        error = ValueError(violations)
        self.attention.axes.agree(error, FORWARD)
        raise error

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        kwargs, self.given = {**self.given, **kwargs}, {}
        for name in ("cu_seqlens", "prefix_tree", "prefix"):
            if isinstance(rows := kwargs.get(name), Tensor) and rows.device.type != "cpu":
                # FSDP2 moves the arguments of its root to the GPU, from which every layer would read them.
                kwargs[name] = rows.cpu()
        named = _named(module, args, kwargs)
        self.cache = named.get("kv_cache")
        self.places.positions = _of_text(named.get("position_ids", self.places.positions))
        if isinstance(self.cache, DecodeStep) and not torch.is_grad_enabled():
            return args, kwargs  # its tokens are on all ranks
        others = (named.get(name) for name in ("kv_cache", "prefix_tree", "attention_mask"))
        self.in_graph = torch.compiler.is_compiling() and self.plain and all(x is None for x in others)
        if self.in_graph:
            return (), self._checked_in_graph(named)
        self.check(named)
        self.calls_before, self.trees_before = self.attention.calls, self.attention.trees
        self.trees = self.layers if named.get("prefix_tree") is not None else 0
        return args, kwargs

    def _checked_in_graph(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a forward that is compiled as a whole, of which one is the result of an operator that
        checks their values whenever the graph runs."""
        if violations := self._violations(named):
            self._refuse("; ".join(violations))
        if any(module.config._attn_implementation != NAME for module in self.attending):
            raise RuntimeError("_attn_implementation was changed after apply_unified_sp")
        name = "position_ids" if named.get("input_ids") is None else "input_ids"
        tensors = named[name], named["position_ids"], named.get("cu_seqlens")
        return {**named, name: check_forward(self.handle, name == "input_ids", *tensors)}

    def check(self, named: dict[str, Any]) -> None:
        """Check the arguments of a forward, and remember what follows from them. Collective if they are new."""
        try:
            violations = self._violations(named) or self._position_violations(named)
        except ValueError as error:  # invalid cu_seqlens
            violations = [str(error)]
        if violations:
            self._refuse("; ".join(violations))
        cu_seqlens, tree = named.get("cu_seqlens"), named.get("prefix_tree")
        if not self.compared or cu_seqlens is not None or named.get("attention_mask") is not None:
            # If only some ranks raised, or packed documents differently, the others would hang.
            compared = {"cu_seqlens": documents_of(cu_seqlens), "prefix_tree": None if tree is None else tree.tolist()}
            axes = self.attention.axes  # not `axes.agree`, which is about what is new: this is compared in every step
            agree(compared, axes.groups, FORWARD, axes.device_type)
            self.compared = True

    def _violations(self, kwargs: dict[str, Any]) -> list[str]:
        violations = []
        if self.images is None or self.images.plan is None:
            instead = "images come from shard_image_batch" if self.images else "this model runs on text alone"
            violations += [
                f"{name} is not supported: {instead}, and there is no sequence parallelism for video and audio"
                for name, value in kwargs.items()
                if value is not None
                and (name.startswith(_MEDIA) or (name in self.kinds and (self.images is None or bool(value.any()))))
            ]
        if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
            violations.append("a KV cache (use_cache, past_key_values) is not supported: leave it out")
        cache = kwargs.get("kv_cache")
        if cache is not None and torch.is_grad_enabled():
            violations.append("kv_cache does not support gradients: call the model under torch.no_grad()")
        if cache is not None and kwargs.get("cu_seqlens") is not None:
            violations.append("kv_cache does not support packed documents: leave cu_seqlens out")
        if self.sparse and kwargs.get("prefix_tree") is not None:
            violations.append("prefix_tree is not supported by models with an indexer, which chooses keys by position")
        if self.compressed and kwargs.get("prefix_tree") is not None:
            violations.append("prefix_tree is not supported by models with a compressor, whose windows it would cut")
        if kwargs.get("output_attentions"):
            violations.append("output_attentions=True is not supported, there are no attention weights")
        if kwargs.get("output_router_logits"):
            violations.append(
                "output_router_logits=True computes the auxiliary loss over this rank's tokens only: set it to False "
                "and add the share of usp.hf.expert_parallel.RouterBalance"
            )
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            violations.append(
                "attention_mask masks padding, which sequence parallelism does not support: drop the padding and pack "
                "documents, with their boundaries in cu_seqlens"
            )
        if kwargs.get("input_ids") is None and kwargs.get("inputs_embeds") is None:
            violations.append("input_ids or inputs_embeds must be given")
        elif kwargs.get("position_ids") is None:
            violations.append("position_ids from shard_batch must be given: by default each rank counts from 0")
        return violations

    def _position_violations(self, named: dict[str, Any]) -> list[str]:
        ids, position_ids = named.get("input_ids"), _of_text(named["position_ids"])
        # Unlike position_ids, hidden states may be sharded over tp as well.
        shape = position_ids.shape if ids is None else ids.shape
        axes, cu_seqlens, self.tree = self.attention.axes, named.get("cu_seqlens"), named.get("prefix_tree")
        rows, seq_len = shape[0], shape[1] * self.attention.ranks
        self.attention.masks = LastMasks()  # inference tensors do not tell whether they have changed
        self.attention.many_lengths = self.cache is not None and seq_len <= _MANY_LENGTHS
        local = axes.positions(axes.layout(self.attention.layout, seq_len, documents_of(cu_seqlens)))
        self.starts, self.local = partial(document_starts, cu_seqlens, rows, seq_len), local
        expected = (local - self.starts(local, self.tree)).to(position_ids.device)
        if position_ids.shape[-1] == expected.shape[-1] and bool((position_ids == expected).all()):
            return []
        given = f"layout={self.attention.layout!r}, cu_seqlens and prefix_tree"
        return [f"position_ids do not match {given}: use shard_batch"]

    def _last_positions(self) -> Tensor:
        """Return the last position of each token's document, (B, S) or (B, 1); with a cache, each row is a document:
        of a prompt, up to the last token, which is decoded later."""
        if self.cache is not None:
            return self.cache.row_lengths.unsqueeze(1) if isinstance(self.cache, Prefill) else self.places.positions
        # Where documents continue the one before, as blocks of images do, they are one text.
        if self.tree is not None and ((self.tree >= 0) & (self.tree != torch.arange(self.tree.shape[-1]) - 1)).any():
            raise ValueError("prefix_tree is not supported by models whose rotary embedding depends on a text's length")
        starts = self.starts(None, self.tree)
        lengths = torch.zeros_like(starts).scatter_add_(1, starts, torch.ones_like(starts))
        return lengths.gather(1, starts.gather(1, self.local.expand(len(starts), -1))) - 1

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        cache, self.cache = self.cache, None
        if self.in_graph:
            return
        calls = cache.attended if isinstance(cache, DecodeStep) else self.attention.calls - self.calls_before
        if calls != self.layers:
            raise RuntimeError(
                f"only {calls} of {self.layers} attention layers used unified sequence parallelism; the others "
                f"attended to this rank's tokens only. Was _attn_implementation changed after apply_unified_sp?"
            )
        if self.attention.trees - self.trees_before < self.trees:
            raise RuntimeError(f"{type(module).__name__} does not pass prefix_tree on to its attention layers")


@torch.library.custom_op("usp::check_forward", mutates_args=())
def check_forward(handle: Handle, ids: bool, x: Tensor, position_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Check the values of a forward's arguments, and return x, its ids or its positions."""
    given = {"input_ids": x} if ids else {"inputs_embeds": x}
    handle.layer.check({**given, "position_ids": position_ids, "cu_seqlens": cu_seqlens})
    return x.clone()


@check_forward.register_fake
def _(handle, ids, x, position_ids, cu_seqlens):
    return torch.empty_like(x)


def _of_text(position_ids: Any) -> Any:
    """Return the positions in documents, (B, S), of `position_ids` that have several axes: those of the first."""
    return position_ids[0] if isinstance(position_ids, Tensor) and position_ids.dim() == 3 else position_ids


def _named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    if not args:
        return kwargs
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | CausalMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_tree: Tensor | None = None,
    prefix: Tensor | None = None,
    kv_cache: Prefill | DecodeStep | None = None,
    query_positions: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the layer's `unified_sp`: (B, N, S, H) in, (B, S, N, H) out."""
    present = [name for name, value in kwargs.items() if value is not None]
    violations = [f"{name} is not supported by unified_sp" for name in present if name not in NEUTRAL]
    if (latents := cast(Any, getattr(module, LATENTS, None))) is not None:  # torch 2.11 compiles no __dict__.pop
        delattr(module, LATENTS)
    if attention_mask is not None and not isinstance(attention_mask, CausalMask):
        violations.append("a prebuilt attention_mask is not supported: use cu_seqlens")
    if dropout:
        violations.append(f"attention dropout={dropout} is not supported: set it to 0")
    attention, mask = module.unified_sp, module.unified_sp_mask
    assert isinstance(attention, UnifiedSPAttention) and isinstance(mask, ModuleMask)
    causal = mask.kind != "bidirectional"
    if kv_cache is not None and not causal:
        violations.append(f"kv_cache supports only causal masks, not {mask.kind} attention")
    if violations:
        attention.axes.agree(error := ValueError("; ".join(violations)), FORWARD)
        raise error
    if query_positions is not None:
        query = scaled_query(module, query, query_positions)
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings return float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    window, chunk = (mask.width if mask.kind == kind else None for kind in ("sliding", "chunked"))
    options: Any = {"scale": scale, "softcap": softcap, "sinks": s_aux}
    indices = block_indices if indices is None else indices
    if indices is not None and not indices.shape[-1]:  # of an indexer in its warm-up
        indices = None
    compressor: ShardedCompressor | None = getattr(module, "sharded_compressor", None)
    given, expand = (q, k, v), lambda out: out
    if kv_cache is not None:
        compressed = latents is not None and cached_latents(module) > 0
        cached, expand_cached = absorbed(module, given, cast(Any, latents)) if compressed else (given, expand)
        if isinstance(kv_cache, DecodeStep):
            values = cached[2].shape[-1] if compressed else cached[2]
            more = None if compressor is None else compressor.decoded
            options |= {"window": window, "chunk": chunk, "indices": indices, "more": more}
            out = kv_cache.attend(module, *cached[:2], values, **options)
            return expand_cached(out), None
        kv_cache.store(module, *(cached[1:2] if compressed else cached[1:]))
    sides = None if window is None else (window - 1, -1)
    if compressor is not None:
        seen = attention.masks(causal, sides, chunk, cu_seqlens)
        return compressor.attend(q, k, v, seen, **options), None
    if latents is not None and indices is not None:
        given, expand = absorbed(module, given, latents, attention.axes)
    seen = attention.masks(causal, sides, chunk, cu_seqlens, prefix if mask.prefixes else None, prefix_tree)
    indexer: ShardedIndexer | None = getattr(module, "sharded_indexer", None)
    trains = indexer is not None and indexer.trains
    if indices is None:
        results = attention(*given, seen, return_lse=trains, **options)
        if indexer is None or not trains:
            return expand(results), None
        return indexer.with_loss(results[0], q, k, results[1].detach(), scale, s_aux), None
    options |= {"index_block": indexer.block if indexer and block_indices is not None else 1, "return_weights": trains}
    results = cast(SparseAttention, module.unified_sp_sparse)(*given, indices, seen, **options)
    return (indexer.with_loss(expand(results[0]), indices, results[1]) if indexer and trains else expand(results)), None
