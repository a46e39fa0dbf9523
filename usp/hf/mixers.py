"""Recurrent and convolutional layers of unmodified transformers models under sequence parallelism.

transformers sends every convolution and recurrence over tokens through a few functions that the model's file names at
module level, because each may be replaced by a kernel of another package (`use_kernel_func_from_hub_with_fallback`). A
layer's own forward is run here with functions of the same names that work over the whole sharded sequence and call the
original ones on a rank's tokens, a recurrence as an affine map of its state. What a layer does per token stays as it
is. A layer that computes its recurrence in its own forward gets another forward. With a `kv_cache`, the functions also
keep the states of prompts (`Prefill`), or work on one token from these states (`DecodeStep`).

n segments, L tokens of the longest, H value heads, G groups, K and V key and value head dims, P head dim, N state size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from usp.attention import DecodeStep, Prefill
from usp.parallel import ParallelMesh
from usp.sp.in_order import DecodeCall, OrderedCall, PrefillCall, SequenceOrder, prompt_documents
from usp.sp.scan import FromZero, Recurrence

Kernel = Callable[..., Any]
LayerCall: TypeAlias = OrderedCall | DecodeCall  # what convolves and scans a layer's tokens


@dataclass(frozen=True)
class DeltaRule(Recurrence):
    """The gated delta rule (arXiv 2412.06464, section 3), with decays per head or, in Kimi Linear, per key channel.

    Its state S (K x V) becomes (I - beta k k^T) diag(exp g) S + beta k v^T, each column on its own. So K more columns,
    which begin as the identity and get zero values, end as the transition, and what the queries read from them is
    what each output takes from the incoming state.

    Inputs: q, k (n, L, heads, K), v (n, L, H, V), g (n, L, H) or (n, L, H, K), beta (n, L, H).
    """

    mixing = True
    kernel: Kernel
    token_kernel: Kernel  # the same, for single tokens
    options: Mapping[str, Any]

    def __call__(self, inputs: Sequence[Tensor], carried: bool) -> FromZero:
        q, k, v, g, beta = inputs
        heads, key_dim, value_dim = self.state
        initial = None
        if carried:
            v = torch.cat((v, v.new_zeros(*v.shape[:-1], key_dim)), dim=-1)
            initial = torch.zeros(len(v), heads, key_dim, value_dim + key_dim, device=v.device)
            initial[..., value_dim:] = torch.eye(key_dim, device=v.device)
        out, final = self.kernel(
            q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=True, **self.options
        )
        if not carried:
            return FromZero(out, final, None, None)
        out, reads = out.split((value_dim, key_dim), dim=-1)
        final, transition = final.split((value_dim, key_dim), dim=-1)

        def read(states: Tensor) -> Tensor:
            return torch.einsum("nlhk,nhkv->nlhv", reads.to(states.dtype), states)

        return FromZero(out, final, transition, read)

    def step(self, inputs: Sequence[Tensor], state: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (_per_head(x, self.state[0])[:, own].unsqueeze(1) for x in inputs)
        options = {"initial_state": state, "output_final_state": True, **self.options}
        out, after = self.token_kernel(q, k, v, g=g, beta=beta, **options)
        return out.squeeze(1), after


@dataclass(frozen=True)
class StateSpace(Recurrence):
    """Mamba-2 (arXiv 2405.21060, section 2): the state of a head decays by exp(dt A), A being a number per head.
    Inputs: x (n, L, H, P), dt (n, L, H) after its softplus and limits, B, C (n, L, G, N). state: (H, P, N)."""

    kernel: Kernel
    A: Tensor
    D: Tensor | None
    options: Mapping[str, Any]

    def __call__(self, inputs: Sequence[Tensor], carried: bool) -> FromZero:
        x, dt, B, C = inputs
        out, final = self.kernel(x, dt, self.A, B, C, D=self.D, return_final_states=True, **self.options)
        if not carried:
            return FromZero(out, final, None, None)
        decay = torch.cumsum(dt * self.A, dim=1)

        def read(states: Tensor) -> Tensor:
            by_group = states.unflatten(1, (C.shape[2], -1))
            shares = torch.einsum("nlgs,ngrps->nlgrp", C.to(states.dtype), by_group).flatten(2, 3)
            return shares * decay.exp().unsqueeze(-1)

        return FromZero(out, final, decay[:, -1].exp()[..., None, None], read)

    def step(self, inputs: Sequence[Tensor], state: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (_per_head(part, self.state[0])[:, own].float() for part in inputs)
        decay = (dt * self.A[own]).exp()[..., None, None]
        after = state * decay + (dt.unsqueeze(-1) * x).unsqueeze(-1) * B.unsqueeze(2)
        out = (after @ C.unsqueeze(-1)).squeeze(-1)
        if self.D is not None:
            out = out + self.D[own].unsqueeze(-1) * x
        return out, after


class SelectiveScan(StateSpace):
    """Mamba (arXiv 2312.00752, section 3): each of N states of a channel decays by exp(dt A) with its own A. Inputs: x,
    dt (n, L, channels), dt after its softplus, B, C (n, L, N). state: (channels, N)."""

    def __call__(self, inputs: Sequence[Tensor], carried: bool) -> FromZero:
        x, dt, B, C = (tokens.transpose(1, 2) for tokens in inputs)
        out, final = self.kernel(x, dt, self.A, B, C, D=self.D, return_last_state=True, **self.options)
        out = out.transpose(1, 2)
        if not carried:
            return FromZero(out, final, None, None)
        decay = torch.cumsum(inputs[1], dim=1)

        def read(states: Tensor) -> Tensor:
            decayed = (decay.unsqueeze(-1) * self.A).exp() * states.unsqueeze(1)
            return (decayed @ inputs[3].to(states.dtype).unsqueeze(-1)).squeeze(-1)

        return FromZero(out, final, (decay[:, -1].unsqueeze(-1) * self.A).exp(), read)

    def step(self, inputs: Sequence[Tensor], state: Tensor, own: slice) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (part.float() for part in inputs)
        x, dt = x[:, own], dt[:, own]
        after = state * (dt.unsqueeze(-1) * self.A[own]).exp() + (dt * x).unsqueeze(-1) * B.unsqueeze(1)
        out = (after @ C.unsqueeze(-1)).squeeze(-1)
        return (out if self.D is None else out + self.D[own] * x).to(inputs[0].dtype), after


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


# A whole layer in one kernel, from zero states; layers go on without it where it returns None.
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
LAYER_TYPE = "linear_attention"  # transformers' name in masks by layer type
# Caches, and documents of this rank's tokens only, where `cu_seqlens` is global.
UNSUPPORTED = ("cache_params", "past_key_values", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def sharded_mixers(model: nn.Module) -> dict[str, str]:
    """Return, by module name, the kinds of convolutions and recurrences that can run on a sharded sequence."""
    mixers = {}
    for name, module in model.named_modules():
        called = set(_original(module).__code__.co_names) if hasattr(type(module), "forward") else set()
        if kind := next((kind for known, kind in _KINDS.items() if known in called), ""):
            mixers[name] = kind
    return mixers


def apply_mixers(model: PreTrainedModel, mesh: ParallelMesh | DeviceMesh, layout: str = "zigzag") -> SequenceOrder:
    """Make a model's convolutions and recurrences run over the sharded sequence, in place. Collective for a DeviceMesh.

    The model's forward must pass `cu_seqlens` and `prefix_tree` of packed documents on to these layers, which each
    forward checks. Mamba layers get no keyword arguments, so both travel in `attention_mask`. Call this after
    registering forward hooks that read either.

    Returns what the layers run through; its `channel` counts the bytes that this rank sends. Raises ValueError, naming
    the modules that cannot be sharded.
    """
    mixers = sharded_mixers(model)
    refusals = [
        f"{name}: {type(module).__name__} convolves tokens by itself"
        for name, module in model.named_modules()
        if name not in mixers
        and any(isinstance(part, nn.Conv1d) and part.kernel_size != (1,) for part in module.children())
    ]
    if any(isinstance(model.get_submodule(name).forward, ShardedForward) for name in mixers):
        refusals.append("the model's recurrent layers already run over a sharded sequence")
    if refusals:
        raise ValueError("; ".join(refusals))
    order = SequenceOrder(mesh, layout)
    guard = _DocumentGuard(len(mixers), FUNCTIONS[SCAN][0] in mixers.values())
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
        attention_mask: Any = None,
        cu_seqlens: Tensor | None = None,
        prefix_tree: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.guard.in_mask and attention_mask is not None:
            mask = attention_mask[LAYER_TYPE] if isinstance(attention_mask, dict) else attention_mask
            (cu_seqlens, prefix_tree), attention_mask = mask, None
        violations = [
            f"{name} is not supported by {type(self.mixer).__name__} on a sharded sequence"
            for name in UNSUPPORTED
            if kwargs.get(name) is not None
        ]
        if attention_mask is not None:
            violations.append("attention_mask is not supported: drop padding, and pass cu_seqlens of packed documents")
        if violations:
            raise ValueError("; ".join(violations))
        self.guard.calls += 1
        self.guard.with_documents += cu_seqlens is not None
        self.guard.with_trees += prefix_tree is not None
        kwargs.pop("kv_cache", None)  # of layers that pass on all they get
        cache = self.guard.cache

        def layer(x: Tensor, call: LayerCall) -> Tensor:
            return _with_functions(self.mixer, call)(self.mixer, x, **kwargs)

        def prefill(x: Tensor, call: OrderedCall) -> Tensor:
            assert isinstance(cache, Prefill)
            return layer(x, PrefillCall(call.plan, call.order, cache, self.name))

        if isinstance(cache, DecodeStep):
            out = layer(hidden_states, DecodeCall(cache, self.name))
        elif cache is None:
            out = self.order.run(hidden_states, cu_seqlens, layer, prefix_tree)
        else:
            padded = hidden_states.shape[1] * self.order.axes.ranks
            out = self.order.run(hidden_states, prompt_documents(cache, padded), prefill)
        return (out, None) if _other_forward(self.mixer) else out


class _DocumentGuard:
    """Forward hooks that check that a forward's documents reach its mixers; if `in_mask`, in place of a mask. cache: of
    the current forward, since not every layer passes keyword arguments on."""

    def __init__(self, mixers: int, in_mask: bool) -> None:
        self.mixers, self.in_mask = mixers, in_mask
        self.calls, self.with_documents, self.with_trees = 0, 0, 0  # since the forward began
        self.cache: Prefill | DecodeStep | None = None

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.calls, self.with_documents, self.with_trees = 0, 0, 0
        self.cache = kwargs.get("kv_cache")
        if not self.in_mask:
            return args, kwargs
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and not bool(mask.all()):
            raise ValueError("attention_mask is not supported: drop padding, and pass cu_seqlens of packed documents")
        documents = kwargs.get("cu_seqlens"), kwargs.get("prefix_tree")
        return args, {
            **kwargs,
            "attention_mask": None if documents[0] is None else {"full_attention": None, LAYER_TYPE: documents},
        }

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self.cache = None
        if self.calls != self.mixers:
            raise RuntimeError(f"only {self.calls} of {self.mixers} recurrent layers ran over the sharded sequence")
        for name, reached in (("cu_seqlens", self.with_documents), ("prefix_tree", self.with_trees)):
            if kwargs.get(name) is not None and reached != self.calls:
                raise RuntimeError(
                    f"{type(module).__name__} passed {name} to {reached} of its {self.calls} recurrent layers: the "
                    f"others would mix documents"
                )


def _original(module: nn.Module) -> FunctionType:
    return inspect.unwrap(type(module).forward)


def _with_functions(module: nn.Module, call: LayerCall) -> Kernel:
    """Return the module's own forward, in which functions over the sequence are those of the call."""
    forward = _original(module)
    if (other := _other_forward(module)) is not None:
        return partial(other, call)
    # Without the kernel of a whole layer, it takes the path of separate kernels.
    names: dict[str, Any] = dict.fromkeys(FUSED, lambda *args, **kwargs: None)
    known = forward.__globals__
    for name, (_, sharded, token_kernel) in FUNCTIONS.items():
        if name in known:
            names[name] = partial(sharded, On(call, known[name], known.get(token_kernel, known[name])))
    bound = FunctionType(
        forward.__code__, {**known, **names}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound


def _other_forward(module: nn.Module) -> Kernel | None:
    called = _original(module).__code__.co_names
    return next((other for name, (_, other) in FORWARDS.items() if name in called), None)


class On(NamedTuple):
    """The call that a function of a layer runs in, its original kernel, and that for single tokens."""

    call: LayerCall
    kernel: Kernel
    token_kernel: Kernel


def _convolution(
    on: On, hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **kwargs: Any
) -> Tensor:
    return on.call.convolve(
        hidden_states, weight.shape[-1], lambda x: on.kernel(x, weight, bias, activation=activation)
    )


def _delta_rule(
    on: On,
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
    return on.call.scan((query, key, value, g, beta), DeltaRule(state, on.kernel, on.token_kernel, options)), None


def _state_space(
    on: On,
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
    return on.call.scan((hidden_states, steps, B, C), StateSpace(state, on.kernel, A, D, {"chunk_size": chunk_size}))


def _selective_scan(
    on: On,
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
    recurrence = SelectiveScan((x.shape[2], A.shape[1]), on.kernel, A, D, options)
    out = on.call.scan((x, _steps(dt, delta_bias, delta_softplus), B, C), recurrence).transpose(1, 2)
    return out if z is None else out * F.silu(z)


def _lightning_attention(call: LayerCall, module: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """The forward of MiniMax's lightning attention (arXiv 2501.08313, section 2.2.1): a state-space model whose tokens
    all decay the state of a head by exp(-slope_rate), with values as inputs, and keys and queries as B and C."""
    qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (module.num_attention_heads, 3, module.head_dim))
    q, k, v = qkv.unbind(-2)
    steps = v.new_ones(*v.shape[:2], 1)  # none of padding
    options = {"chunk_size": module.block_size}
    decay = -module.slope_rate.flatten()
    recurrence = StateSpace((*v.shape[2:], k.shape[3]), _decaying_scan, decay, None, options)
    out = module.norm(call.scan((v, steps, k, q), recurrence).to(v.dtype).flatten(2))
    return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * out)


def _decaying_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return the outputs and final states of a `StateSpace` with a group for each head and dt = 0 or 1, without D."""
    decays = (dt * A).transpose(1, 2)
    dtype = torch.promote_types(x.dtype, decays.dtype)
    tensors = [tokens.transpose(1, 2).to(dtype) for tokens in (x, B, C)]
    state, outs = tensors[0].new_zeros(*tensors[0].shape[:2], x.shape[3], B.shape[3]), []
    for v, k, q, each in zip(*(tokens.split(chunk_size, 2) for tokens in (*tensors, decays)), strict=True):
        decay = each.cumsum(-1).unsqueeze(-1)
        later = torch.ones(each.shape[-1], each.shape[-1], dtype=torch.bool, device=x.device).triu(1)
        between = (decay - decay.mT).masked_fill(later, float("-inf")).exp()
        outs.append((q @ k.mT * between) @ v + (q * decay.exp()) @ state.mT)
        last = decay[..., -1:, :]
        state = state * last.exp() + (v * (last - decay).exp()).mT @ k
    return torch.cat(outs, 2).transpose(1, 2).to(x.dtype), state


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Return the step sizes of a state-space layer, outside of its kernel: padding needs 0, which no softplus gives."""
    steps = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(steps) if softplus else steps


SCAN = "mamba_selective_scan"
# Functions over tokens: what they compute, what replaces them, and the kernel for single tokens of those that have one.
FUNCTIONS: Mapping[str, tuple[str, Kernel, str]] = {
    "torch_chunk_gated_delta_rule": ("gated delta rule", _delta_rule, "torch_recurrent_gated_delta_rule"),
    "chunk_kimi_delta_attention": ("Kimi delta attention", _delta_rule, "recurrent_kimi_delta_attention"),
    "mamba2_chunk_scan": ("Mamba-2", _state_space, ""),
    SCAN: ("Mamba", _selective_scan, ""),
    "causal_conv1d_fn": ("short convolution", _convolution, ""),
}
# Layers with recurrences in their own forward, by a name in it: what they compute, and another forward, which returns
# their output without a state.
FORWARDS: Mapping[str, tuple[str, Kernel]] = {"diagonal_decay": ("lightning attention", _lightning_attention)}
_KINDS = {name: kind for name, (kind, *_) in FUNCTIONS.items()} | {name: kind for name, (kind, _) in FORWARDS.items()}
