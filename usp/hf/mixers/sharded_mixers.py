"""Recurrent and convolutional layers of unmodified transformers models under sequence parallelism.

transformers sends every convolution and recurrence over tokens through a few functions that the model's file names at
module level, because each may be replaced by a kernel of another package (`use_kernel_func_from_hub_with_fallback`). A
layer's own forward is run here with functions of the same names that work over the whole sharded sequence and call the
original ones on a rank's tokens. What a layer does to each token alone stays as it is. With a `kv_cache`, the functions
also keep the states of prompts (`Prefill`), or work on one token from these states (`DecodeStep`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from attention import DecodeStep, Prefill
from parallel import ParallelMesh
from usp.sp.in_order import LayerCall, OrderedCall, SequenceOrder
from usp.sp.recurrent_cache import DecodeCall, PrefillCall, prompt_documents

from .recurrences import DeltaRule, Kernel, SelectiveScan, StateSpace

CONVOLUTION = "causal_conv1d_fn"
KINDS = {
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "chunk_kimi_delta_attention": "Kimi delta attention",
    "mamba2_chunk_scan": "Mamba-2",
    "mamba_selective_scan": "Mamba",
    CONVOLUTION: "short convolution",
}
# A whole layer in one kernel, from zero states; layers go on without it where it returns None.
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
# The kernels for single tokens of those that have one.
TOKEN_KERNELS = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
CACHES = ("cache_params", "past_key_values")
LAYER_TYPE = "linear_attention"  # transformers' name in masks by layer type
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # of this rank's tokens only, where `cu_seqlens` is global


@dataclass(frozen=True)
class Mixer:
    """What was found about a module that mixes tokens outside of attention.

    Attributes:
        kind: what it computes.
        refusal: why it cannot run on a sharded sequence; empty if it can.
    """

    kind: str
    refusal: str = ""


def sharded_mixers(model: nn.Module) -> dict[str, Mixer]:
    """Return, by module name, what mixes tokens by a convolution or a recurrence, and whether it can be sharded."""
    found = {name: kind for name, module in model.named_modules() if (kind := _kind(module)) is not None}
    for name, module in model.named_modules():
        own = name.rpartition(".")[0]
        if isinstance(module, nn.Conv1d) and module.kernel_size != (1,) and own not in found:
            found[own] = Mixer("convolution", f"{type(model.get_submodule(own)).__name__} convolves tokens by itself")
    return found


def apply_mixers(model: PreTrainedModel, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag") -> SequenceOrder:
    """Make a model's convolutions and recurrences run over the sharded sequence, in place. Collective for a DeviceMesh.

    The model's forward must pass `cu_seqlens` of packed documents on to these layers, which is checked in each forward.
    Mamba layers get no keyword arguments, so their documents travel in `attention_mask`. Call this after registering
    forward hooks that read either.

    Returns:
        What the layers run through; its `channel` counts the bytes that this rank sends.

    Raises:
        ValueError: naming the modules that cannot be sharded.
    """
    mixers = sharded_mixers(model)
    refusals = [f"{name}: {mixer.refusal}" for name, mixer in mixers.items() if mixer.refusal]
    if any(isinstance(model.get_submodule(name).forward, ShardedForward) for name in mixers):
        refusals.append("the model's recurrent layers already run over a sharded sequence")
    if refusals:
        raise ValueError("; ".join(refusals))
    order = SequenceOrder(mesh, layout)
    guard = _DocumentGuard(len(mixers), any(mixer.kind == KINDS["mamba_selective_scan"] for mixer in mixers.values()))
    for name in mixers:
        module = model.get_submodule(name)
        module.forward = ShardedForward(name, module, order, guard)
    model.base_model.register_forward_pre_hook(guard.before, with_kwargs=True)
    model.base_model.register_forward_hook(guard.after, with_kwargs=True)
    return order


class ShardedForward:
    """The forward of a mixer on this rank's tokens of a sharded sequence."""

    def __init__(self, name: str, mixer: nn.Module, order: SequenceOrder, guard: _DocumentGuard) -> None:
        self.name, self.mixer, self.order, self.guard = name, mixer, order, guard

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if self.guard.in_mask and attention_mask is not None:
            cu_seqlens = attention_mask[LAYER_TYPE] if isinstance(attention_mask, dict) else attention_mask
            attention_mask = None
        violations = [
            f"{name} is not supported by {type(self.mixer).__name__} on a sharded sequence"
            for name in (*CACHES, *PACKED)
            if kwargs.get(name) is not None
        ]
        if attention_mask is not None:
            violations.append("attention_mask is not supported: drop padding, and pass cu_seqlens of packed documents")
        if violations:
            raise ValueError("; ".join(violations))
        self.guard.count(cu_seqlens)
        kwargs.pop("kv_cache", None)  # of layers that pass on all they get
        cache = self.guard.cache

        def layer(x: Tensor, call: LayerCall) -> Tensor:
            return _with_functions(self.mixer, call)(self.mixer, x, **kwargs)

        def prefill(x: Tensor, call: OrderedCall) -> Tensor:
            assert isinstance(cache, Prefill)
            return layer(x, PrefillCall(call.plan, call.order, cache, self.name))

        if isinstance(cache, DecodeStep):
            return layer(hidden_states, DecodeCall(cache, self.name))
        if cache is None:
            return self.order.run(hidden_states, cu_seqlens, layer)
        padded = hidden_states.shape[1] * self.order.axes.ring * self.order.axes.ulysses
        return self.order.run(hidden_states, prompt_documents(cache, padded), prefill)


class _DocumentGuard:
    """Forward hooks that check that a forward's documents reach its mixers; if `in_mask`, in place of a mask.

    cache: of the current forward, since not every layer passes keyword arguments on.
    """

    def __init__(self, mixers: int, in_mask: bool) -> None:
        self.mixers, self.in_mask = mixers, in_mask
        self.calls, self.with_documents, self.before_calls = 0, 0, (0, 0)
        self.cache: Prefill | DecodeStep | None = None

    def count(self, cu_seqlens: Tensor | None) -> None:
        self.calls += 1
        self.with_documents += cu_seqlens is not None

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.before_calls = (self.calls, self.with_documents)
        self.cache = kwargs.get("kv_cache")
        if not self.in_mask:
            return args, kwargs
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise ValueError("attention_mask is not supported: drop padding, and pass cu_seqlens of packed documents")
        documents = kwargs.get("cu_seqlens")
        return args, {
            **kwargs,
            "attention_mask": None if documents is None else {"full_attention": None, LAYER_TYPE: documents},
        }

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self.cache = None
        calls, with_documents = self.calls - self.before_calls[0], self.with_documents - self.before_calls[1]
        if calls != self.mixers:
            raise RuntimeError(f"only {calls} of {self.mixers} recurrent layers ran over the sharded sequence")
        if kwargs.get("cu_seqlens") is not None and with_documents != calls:
            raise RuntimeError(
                f"{type(module).__name__} passed cu_seqlens to {with_documents} of its {calls} recurrent layers: the "
                f"others would mix documents"
            )


def _kind(module: nn.Module) -> Mixer | None:
    """Return what a module computes by the functions that its forward calls."""
    names = set(_original(module).__code__.co_names) if hasattr(type(module), "forward") else set()
    return next((Mixer(kind) for function, kind in KINDS.items() if function in names), None)


def _original(module: nn.Module) -> FunctionType:
    """Return the forward of a module's class, without decorators."""
    return inspect.unwrap(type(module).forward)


def _with_functions(module: nn.Module, call: LayerCall) -> FunctionType:
    """Return the module's own forward, in which functions over the sequence are those of the call."""
    forward = _original(module)
    names = {**dict.fromkeys(FUSED, _no_fused_kernel)}
    known = forward.__globals__
    for name, sharded in SHARDED.items():
        if name in known:
            names[name] = sharded(known[name], call, known.get(TOKEN_KERNELS.get(name, ""), known[name]))
    bound = FunctionType(
        forward.__code__, {**known, **names}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound


def _no_fused_kernel(*args: Any, **kwargs: Any) -> None:
    """Make the layer take the path of separate kernels."""


def _convolution(kernel: Kernel, call: LayerCall, _: Kernel) -> Kernel:
    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        return call.convolve(hidden_states, weight.shape[-1], lambda x: kernel(x, weight, bias, activation=activation))

    return causal_conv1d_fn


def _delta_rule(kernel: Kernel, call: LayerCall, token_kernel: Kernel) -> Kernel:
    def chunk_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[Tensor, None]:
        state = (value.shape[2], key.shape[3], value.shape[3])
        return call.scan((query, key, value, g, beta), DeltaRule(kernel, token_kernel, state, options)), None

    return chunk_delta_rule


def _state_space(kernel: Kernel, call: LayerCall, _: Kernel) -> Kernel:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> Tensor:
        steps = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
        state = (*hidden_states.shape[2:], B.shape[3])
        return call.scan((hidden_states, steps, B, C), StateSpace(kernel, state, A, D, chunk_size))

    return mamba2_chunk_scan


def _selective_scan(kernel: Kernel, call: LayerCall, _: Kernel) -> Kernel:
    def mamba_selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **options: Any,
    ) -> Tensor:
        x, dt, B, C = (tokens.transpose(1, 2) for tokens in (hidden_states, dt, B, C))
        recurrence = SelectiveScan(kernel, (x.shape[2], A.shape[1]), A, D, options)
        out = call.scan((x, _steps(dt, delta_bias, delta_softplus), B, C), recurrence).transpose(1, 2)
        return out if z is None else out * F.silu(z)

    return mamba_selective_scan


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Return the step sizes of a state-space layer, outside of its kernel: padding needs a zero step, which no input
    of the softplus gives."""
    steps = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(steps) if softplus else steps


SHARDED: Mapping[str, Callable[[Kernel, LayerCall, Kernel], Kernel]] = {
    CONVOLUTION: _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective_scan,
}
