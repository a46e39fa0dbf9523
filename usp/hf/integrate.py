"""Unified sequence parallel attention for unmodified transformers models.

Registers an attention function with transformers' `AttentionInterface` and a mask function with
`AttentionMaskInterface`, which the model's configuration selects by name; the attention function calls the layer's
`unified_sp`. Further inputs of a layer (`cu_seqlens`, its window) are keyword arguments of the forward, as is
`kv_cache`, which stores keys and values (`Prefill`) or attends over stored ones (`DecodeStep`). Unsupported arguments
raise an error; none is ignored.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from attention import DecodeStep, Prefill
from parallel import ParallelMesh, agree
from usp.sp.axes import SpAxes
from usp.sp.batch import document_starts
from usp.sp.sp_attention import UnifiedSPAttention, documents_of, ulysses_violations

from .prune import OtherStagesLayer

NAME = "unified_sp"
# Families in which every layer is one self-attention through the registry, with a causal or sliding-window mask.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
# Keyword arguments that reach the attention function without changing its result.
_NEUTRAL = {
    "cache_position",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


def apply_unified_sp(
    model: PreTrainedModel, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag", kernel: str = "auto"
) -> PreTrainedModel:
    """Replace a transformers causal LM's attention by `UnifiedSPAttention`, in place; returns the model.

    Call it before FSDP. The model then takes the output of `shard_batch`: `input_ids`, `position_ids` and, for packed
    documents, `cu_seqlens`; it returns the logits of this rank's tokens. `model.unified_sp` is the attention layer.

    Raises:
        TypeError: if `model` is not a transformers model.
        ValueError: naming everything about the model that sequence parallelism does not support.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    attention = UnifiedSPAttention(mesh, layout, kernel)
    _check_model(model, attention.axes)
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _no_mask)
    _own_config(model)
    model.set_attn_implementation(NAME)
    model.config.use_cache = False
    for layer in decoder_layers(model):
        layer.self_attn.unified_sp = attention  # type: ignore[union-attr]
    model.unified_sp = attention
    guard = _ForwardGuard(attention, len(decoder_layers(model)))
    model.register_forward_pre_hook(guard.check_labels, with_kwargs=True)
    model.base_model.register_forward_pre_hook(guard.before, with_kwargs=True)
    model.base_model.register_forward_hook(guard.after)
    return model


def decode_stage(model: PreTrainedModel, x: Tensor, position_ids: Tensor, step: DecodeStep) -> Tensor:
    """Run a stage's decoding step: ids (B, 1), or hidden states after the first stage, to hidden states (B, 1, H).

    The model's own forward also builds a mask and searches for packed documents, which takes longer than the layers of
    a small model. Supports models of `FAMILIES` after `apply_unified_sp`.
    """
    base: Any = model.base_model
    hidden = x if base.embed_tokens is None else base.embed_tokens(x)
    rotary = base.rotary_emb(hidden, position_ids=position_ids)
    for layer in base.layers:
        hidden = layer(hidden, position_embeddings=rotary, kv_cache=step)
    return base.norm(hidden)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal LM of `FAMILIES`, without those of other pipeline stages."""
    layers = model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    return nn.ModuleList(layer for layer in layers if not isinstance(layer, OtherStagesLayer))


def _own_config(model: PreTrainedModel) -> None:
    """Copy the model's configuration, which other models may share."""
    shared, own = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own  # type: ignore[assignment]


def _check_model(model: PreTrainedModel, axes: SpAxes) -> None:
    config, ulysses = model.config, axes.ulysses
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type={config.model_type!r} is not among the supported families ({', '.join(FAMILIES)}): see "
            f"CONTRIBUTING.md for how to add one"
        )
    violations = ulysses_violations(config.num_attention_heads, ulysses)
    if hasattr(model, NAME):
        violations.append("the model already has unified sequence parallel attention")
    if getattr(config, "attention_dropout", 0.0):
        violations.append(f"attention_dropout={config.attention_dropout} is not supported: set it to 0")
    if getattr(config, "output_attentions", False):
        violations.append("output_attentions=True is not supported, there are no attention weights: set it to False")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope") and axes.ring * ulysses > 1:
        violations.append(
            f"rope_type={rope!r} depends on the longest position in a call, which differs between ranks: use another "
            f"rope_type, or do not shard the sequence (ring=1, ulysses=1)"
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        violations.append(f"layer_types {', '.join(sorted(kinds))} are not supported")
    if violations:
        raise ValueError("; ".join(violations))


class _ForwardGuard:
    """Forward hooks that reject arguments for which the result would differ from attention over the whole sequence."""

    def __init__(self, attention: UnifiedSPAttention, layers: int) -> None:
        self.attention, self.layers, self.calls_before, self.compared = attention, layers, 0, False

    def check_labels(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if type(module).__name__.endswith("ForSequenceClassification"):
            raise ValueError(
                f"{type(module).__name__} would read the last token of each rank's shard of the sequence: call its "
                f"base model, and unshard_sequence its hidden states"
            )
        if _named(module, args, kwargs).get("labels") is not None:
            raise ValueError(
                "labels would be shifted within each rank's shard of the sequence: pass labels to shard_batch, and "
                "its shift_labels to usp.losses.causal_lm_loss"
            )

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        named = _named(module, args, kwargs)
        try:
            violations = self._violations(named)
        except ValueError as error:  # invalid cu_seqlens
            violations = [str(error)]
        cu_seqlens = named.get("cu_seqlens")
        if not self.compared or cu_seqlens is not None or named.get("attention_mask") is not None:
            # If only some ranks raised, or packed documents differently, the others would hang.
            found, axes = "; ".join(violations) or documents_of(cu_seqlens), self.attention.axes
            agree(found, axes.groups, "a forward's errors and cu_seqlens", axes.device_type)
            self.compared = True
        if violations:
            raise ValueError("; ".join(violations))
        self.calls_before = self.attention.calls

    def _violations(self, kwargs: dict[str, Any]) -> list[str]:
        violations = []
        if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
            violations.append("a KV cache (use_cache, past_key_values) is not supported: leave it out")
        cache = kwargs.get("kv_cache")
        if isinstance(cache, DecodeStep):
            violations.append("the tokens of a DecodeStep are not sharded over the sequence: call decode_stage")
        if cache is not None and torch.is_grad_enabled():
            violations.append("kv_cache does not support gradients: call the model under torch.no_grad()")
        if cache is not None and kwargs.get("cu_seqlens") is not None:
            violations.append("kv_cache does not support packed documents: leave cu_seqlens out")
        if kwargs.get("output_attentions"):
            violations.append("output_attentions=True is not supported, there are no attention weights")
        if kwargs.get("output_router_logits"):
            violations.append(
                "output_router_logits=True computes the auxiliary loss over this rank's tokens only: set it to False "
                "and add the share of usp.hf.balance.RouterBalance"
            )
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            violations.append(
                "attention_mask masks padding, which sequence parallelism does not support: drop the padding and pack "
                "documents, with their boundaries in cu_seqlens"
            )
        ids, embedded = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        position_ids = kwargs.get("position_ids")
        if ids is None and embedded is None:
            violations.append("input_ids or inputs_embeds must be given")
        elif position_ids is None:
            violations.append("position_ids from shard_batch must be given: by default each rank counts from 0")
        elif not violations:
            # Unlike position_ids, hidden states may be sharded over tp as well.
            shape = position_ids.shape if ids is None else ids.shape
            violations += self._position_violations(shape, position_ids, kwargs.get("cu_seqlens"))
        return violations

    def _position_violations(self, shape: Sequence[int], position_ids: Tensor, cu_seqlens: Tensor | None) -> list[str]:
        axes = self.attention.axes
        rows, seq_len = shape[0], shape[1] * axes.ring * axes.ulysses
        own = axes.positions(axes.layout(self.attention.layout, seq_len))
        expected = (own - document_starts(cu_seqlens, rows, seq_len)[:, own]).to(position_ids.device)
        if position_ids.shape[-1] == expected.shape[-1] and bool((position_ids == expected).all()):
            return []
        return [
            f"position_ids do not match layout={self.attention.layout!r} and cu_seqlens: use shard_batch with this "
            f"layout, and pass the cu_seqlens of packed documents"
        ]

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        calls = self.attention.calls - self.calls_before
        if calls != self.layers:
            raise RuntimeError(
                f"only {calls} of {self.layers} attention layers used unified sequence parallelism; the others "
                f"attended to this rank's tokens only. Was _attn_implementation changed after apply_unified_sp?"
            )


def _named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a forward's positional and keyword arguments by name."""
    if not args:
        return kwargs
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Build no mask: causal, window and cu_seqlens define it."""


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kv_cache: Prefill | DecodeStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the layer's `unified_sp`: (B, N, S, H) in, (B, S, N, H) out."""
    violations = [f"{name} is not supported by unified_sp" for name in kwargs if name not in _NEUTRAL]
    if attention_mask is not None:
        violations.append("a prebuilt attention_mask is not supported: use cu_seqlens")
    if dropout:
        violations.append(f"attention dropout={dropout} is not supported: set it to 0")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if kv_cache is not None and not causal:
        violations.append("kv_cache supports only causal attention")
    if violations:
        raise ValueError("; ".join(violations))
    attention = module.unified_sp
    assert isinstance(attention, UnifiedSPAttention)
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings return float32
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    layer = module.layer_idx
    if isinstance(kv_cache, DecodeStep):
        options: Any = {"scale": scaling, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
        return kv_cache.attend(layer, q, k, v, **options), None  # type: ignore[arg-type]
    if kv_cache is not None:
        kv_cache.store(layer, k, v)  # type: ignore[arg-type]
    out = attention(
        q,
        k,
        v,
        causal=causal,
        scale=scaling,
        # transformers' window of W tokens includes the query.
        window=None if sliding_window is None else (sliding_window - 1, -1),
        softcap=softcap,
        cu_seqlens=cu_seqlens,
        sinks=s_aux,
    )
    return out, None
