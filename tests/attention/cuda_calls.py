"""Stand-ins for the CUDA ops and packages that back ends call: the same signatures, real math on the CPU, and checks of
every argument against what the real ones require, which also run on fake CUDA tensors.

Signatures: torch's own schemas for aten; flash-attn 2.8 (`flash_attn_interface.py`); flash-attn 3's `TORCH_LIBRARY` in
hopper/flash_api_stable.cpp; flash-attn-4 4.0.0b36 (cute/interface.py). signatures.py compares them with the sources.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)
FLASH_3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FLASH_3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0) -> "
    "(Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)

# Checks


def check_tensor(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Last stride 1, and rows aligned to 16 bytes, as TMA and vector loads need."""
    assert x.dtype in dtypes and x.stride(-1) == 1 and x.numel() > 0
    offsets = [x.storage_offset(), *(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)][:-1]
    assert all(offset * x.element_size() % 16 == 0 for offset in offsets), (x.shape, x.stride(), x.storage_offset())


def check_same_device(*tensors: Tensor | None) -> None:
    devices = {x.device for x in tensors if x is not None}
    assert len(devices) == 1, devices
    fake = {isinstance(x, FakeTensor) for x in tensors if x is not None}
    assert fake == {devices.pop().type == "cuda"}


def check_packed(
    q: Tensor, k: Tensor, v: Tensor, cu: tuple[Tensor, Tensor], longest: tuple[int | None, int | None], widest: int,
    scale: float | None, left: int | None, right: int | None,
    results: tuple[Tensor, Tensor, Tensor] | None = None, unequal: bool = False,
) -> None:  # fmt: skip
    """q, k, v (total, heads, head dim); results: dout and out like q, lse (heads, total). unequal: v may be narrower or
    wider."""
    check_same_device(q, k, v, *cu, *(results or ()))
    dtypes = HALF if isinstance(q, FakeTensor) else (*HALF, torch.float32)
    for x in (q, k, v, *(results or ())[:2]):
        assert x.dim() == 3 and x.dtype == q.dtype
        check_tensor(x, dtypes)
    assert k.shape[:2] == v.shape[:2] and q.shape[2] == k.shape[2] and (unequal or k.shape[2] == v.shape[2])
    assert max(k.shape[2], v.shape[2]) <= widest and k.shape[2] % 8 == v.shape[2] % 8 == 0
    assert q.shape[1] % k.shape[1] == 0
    for boundaries in cu:
        assert boundaries.dtype == torch.int32 and boundaries.is_contiguous() and boundaries.dim() == 1
    assert cu[0].shape == cu[1].shape
    for most, total in zip(longest, (len(q), len(k)), strict=True):
        assert most is None or (type(most) is int and 1 <= most <= total)
    assert isinstance(scale, float)
    assert all(side is None or (type(side) is int and side >= -1) for side in (left, right))
    if results is not None:
        dout, out, lse = results
        assert dout.shape == out.shape == (*q.shape[:2], v.shape[2]) and lse.shape == (q.shape[1], len(q))
        assert lse.dtype == torch.float32 and lse.is_contiguous()


def check_dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None, heads: int
) -> None:
    """q, k, v (batch, heads, tokens, head dim), bias (batch, 1 or `heads`, queries, keys), rows of a multiple of 16."""
    check_same_device(q, k, v, bias)
    for x in (q, k, v):
        assert x.dim() == 4 and x.dtype == q.dtype and x.shape[:2] == q.shape[:2]
        check_tensor(x, (*HALF, torch.float32))
    assert q.shape[3] == k.shape[3] and k.shape[2] == v.shape[2] and isinstance(scale, float)
    if bias is not None:
        assert not causal and bias.dtype == q.dtype and bias.shape == (q.shape[0], heads, q.shape[2], k.shape[2])
        assert bias.stride(3) == 1 and all(stride % 16 == 0 for stride in bias.stride()[:3])


# Math


def pairs_seen(rows: int, columns: int, left: int | None, right: int | None) -> Tensor:
    """FlashAttention's window, aligned to the bottom right corner; None and negative for no limit."""
    ahead = torch.arange(columns) - torch.arange(rows).unsqueeze(1) - (columns - rows)
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= -ahead <= left
    if right is not None and right >= 0:
        seen &= ahead <= right
    return seen


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, added: Tensor, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """Return out, lse, weights by the scores' own lse, and the softcap's slope, of (..., heads, tokens, head dim)."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores, slope = q @ k.mT * scale, 1.0
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1 - capped**2
    scores = scores + added
    return scores.softmax(-1) @ v, scores.logsumexp(-1), scores, slope


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, added: Tensor,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv of this block of a row whose global out and lse are given."""
    *_, scores, slope = attention(q, k, v, scale, added, softcap)
    group, kv_heads = q.shape[-3] // k.shape[-3], k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    weights = (scores - lse.unsqueeze(-1)).exp()
    dscores = weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * slope * scale
    dk, dv = (x.unflatten(-3, (kv_heads, group)).sum(-3) for x in (dscores.mT @ q, weights.mT @ dout))
    return dscores @ k, dk, dv


def added_of(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))


def packed_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, left: int | None, right: int | None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (total, heads, head dim) and lse (heads, total)."""
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for here, there in sequences(cu_q, cu_k) if not isinstance(q, FakeTensor) else ():
        added = added_of(pairs_seen(here.stop - here.start, there.stop - there.start, left, right))
        part, sums, *_ = attention(*(x.transpose(0, 1) for x in (q[here], k[there], v[there])), scale, added, softcap)
        out[here], lse[:, here] = part.transpose(0, 1), sums
    return out, lse


def packed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float,
    left: int | None, right: int | None, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for here, there in sequences(cu_q, cu_k) if not isinstance(q, FakeTensor) else ():
        added = added_of(pairs_seen(here.stop - here.start, there.stop - there.start, left, right))
        sides = (here, here, there, there, here)
        one = [x[side].transpose(0, 1) for x, side in zip((dout, q, k, v, out), sides, strict=True)]
        parts = gradients(*one, lse[:, here], scale, added, softcap)
        for total, side, part in zip(grads, (here, there, there), parts, strict=True):
            total[side] = part.transpose(0, 1)
    return grads


def sequences(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    return zip(*([slice(*pair) for pair in pairwise(cu.tolist())] for cu in (cu_q, cu_k)), strict=True)


# aten's ops. Checks run on fake CUDA tensors as well, whose results come from torch's own meta functions.

Named = Mapping[str, Any]


def flash_forward(a: Named) -> tuple[Tensor, ...]:
    return (*packed_forward(a["query"], a["key"], a["value"], a["cum_seq_q"], a["cum_seq_k"], a["scale"],
                            a["window_size_left"], a["window_size_right"]), *(torch.empty(0),) * 3)  # fmt: skip


def flash_backward(a: Named) -> tuple[Tensor, ...]:
    return packed_backward(a["grad_out"], a["query"], a["key"], a["value"], a["out"], a["logsumexp"], a["cum_seq_q"],
                           a["cum_seq_k"], a["scale"], a["window_size_left"], a["window_size_right"])  # fmt: skip


def check_flash(a: Named) -> None:
    assert a["dropout_p"] == 0.0 and not a["is_causal"]
    results = (a["grad_out"], a["out"], a["logsumexp"]) if "grad_out" in a else None
    check_packed(a["query"], a["key"], a["value"], (a["cum_seq_q"], a["cum_seq_k"]), (a["max_q"], a["max_k"]), 256,
                 a["scale"], a["window_size_left"], a["window_size_right"], results)  # fmt: skip


def dense_added(a: Named) -> Tensor:
    rows, columns = a["query"].shape[2], a["key"].shape[2]
    if a["is_causal"]:
        return added_of(torch.ones(rows, columns, dtype=torch.bool).tril())
    return torch.zeros(()) if a["attn_bias"] is None else a["attn_bias"]


def dense_forward(a: Named) -> tuple[Tensor, Tensor]:
    return attention(a["query"], a["key"], a["value"], a["scale"], dense_added(a))[:2]


def dense_backward(a: Named, lse: Tensor) -> tuple[Tensor, ...]:
    dout = a["grad_out"] if "grad_out" in a else a["grad_out_"]
    return gradients(dout, a["query"], a["key"], a["value"], a["out"], lse, a["scale"], dense_added(a))


def check_aten_dense(a: Named, heads: int) -> None:
    assert a["dropout_p"] == 0.0
    check_dense(a["query"], a["key"], a["value"], a["attn_bias"], a["is_causal"], a["scale"], heads)


def check_cudnn(a: Named) -> None:
    """One bias for all heads: a stride of 0 is no layout of cuDNN. Backward: torch fails for one query."""
    check_aten_dense(a, 1)
    assert a["query"].shape[2] > 1 or "grad_out" not in a
    dims = a["query"].shape[3], a["value"].shape[3]
    assert max(dims) <= 128 and not any(dim % 8 for dim in dims) and a["key"].shape[2] > 1
    if "grad_out" in a:
        assert a["grad_out"].shape == a["out"].shape == (*a["query"].shape[:3], dims[1])
        assert a["logsumexp"].shape == (*a["query"].shape[:3], 1) and a["logsumexp"].dtype == torch.float32
        assert (a["max_q"], a["max_k"]) == (a["query"].shape[2], a["key"].shape[2])
        assert a["cum_seq_q"] is None and a["cum_seq_k"] is None


def check_efficient(a: Named) -> None:
    check_aten_dense(a, a["query"].shape[1])
    if "grad_out_" in a:
        lse = a["logsumexp"]
        assert lse.shape[:2] == a["query"].shape[:2] and lse.shape[2] % 32 == 0 and lse.shape[2] >= a["query"].shape[2]
        assert lse.dtype == torch.float32 and a["grad_input_mask"] == [True, True, True, False]


def efficient_forward(a: Named) -> tuple[Tensor, ...]:
    out, lse = dense_forward(a)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    return out, padded, torch.empty(0), torch.empty(0)


def cudnn_forward(a: Named) -> tuple[Any, ...]:
    out, lse = dense_forward(a)
    nothing = torch.empty(0)
    return out, lse.unsqueeze(-1), nothing, nothing, a["query"].shape[2], a["key"].shape[2], nothing, nothing, nothing


def efficient_backward(a: Named) -> tuple[Tensor, ...]:
    return *dense_backward(a, a["logsumexp"][..., : a["query"].shape[2]]), torch.empty(0)


def cudnn_backward(a: Named) -> tuple[Tensor, ...]:
    return dense_backward(a, a["logsumexp"].squeeze(-1))


ATEN: dict[str, tuple[Callable[[Named], None], Callable[[Named], Any]]] = {
    "_flash_attention_forward": (check_flash, flash_forward),
    "_flash_attention_backward": (check_flash, flash_backward),
    "_scaled_dot_product_cudnn_attention": (check_cudnn, cudnn_forward),
    "_scaled_dot_product_cudnn_attention_backward": (check_cudnn, cudnn_backward),
    "_scaled_dot_product_efficient_attention": (check_efficient, efficient_forward),
    "_scaled_dot_product_efficient_attention_backward": (check_efficient, efficient_backward),
}


def by_name(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Named) -> dict[str, Any]:
    """Return a call's arguments by the names in the op's schema, with its defaults."""
    schema = op._schema.arguments
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**named, **{argument.name: value for argument, value in zip(schema, args, strict=False)}, **kwargs}


class DispatchedOps(TorchFunctionMode):
    """Index and copy by dispatched ops: these methods set the device first, which builds for CPU cannot do for CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            x, chosen = _part(x, index)
            value = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=x.dtype)
            if chosen:
                return aten.index_put_(x, chosen, value)
            return (aten.copy_ if value.dim() or not x.dim() else aten.fill_)(x, value)
        if func in (torch.Tensor.copy_, torch.Tensor.contiguous, torch.Tensor.nonzero):
            return getattr(aten, func.__name__)(*args)
        if func is torch.Tensor.__invert__:
            return aten.bitwise_not(*args)
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, chosen = _part(*args)
        return aten.index(x, chosen) if chosen else x


def _part(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return a view of `x`, and the tensors among the indices, by dimension of the view; empty if there are none."""
    index, chosen, dim = index if isinstance(index, tuple) else (index,), dict[int, Tensor](), 0
    for place, part in enumerate(index):
        if part is None:
            x = aten.unsqueeze(x, dim)
        elif part is Ellipsis:
            dim = x.dim() - sum(each is not None for each in index[place + 1 :]) - 1
        elif isinstance(part, torch.Tensor):
            chosen[dim] = part
        elif isinstance(part, slice):
            x = aten.slice(x, dim, part.start, part.stop, part.step or 1)
        else:
            x, dim = aten.select(x, dim, part), dim - 1
        dim += 1
    return x, [chosen.get(at) for at in range(max(chosen, default=-1) + 1)]


class CheckCalls(TorchDispatchMode):
    """Check every call of the ops above; used inside a FakeTensorMode. `called` are their names."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ATEN:
            ATEN[name][0](by_name(func, args, kwargs or {}))
            self.called.append(name)
        return func(*args, **(kwargs or {}))


# The packages


def flash_2() -> ModuleType:
    module = ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        cu, sides = (cu_seqlens_q, cu_seqlens_k), (window_size_left, window_size_right)
        check_packed(q, k, v, cu, (max_seqlen_q, max_seqlen_k), 256, softmax_scale, *sides)
        assert dropout_p == 0.0 and not causal and alibi_slopes is None
        return *packed_forward(q, k, v, *cu, softmax_scale, *sides, softcap), None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        cu, sides = (cu_seqlens_q, cu_seqlens_k), (window_size_left, window_size_right)
        results = dout, out, softmax_lse
        check_packed(q, k, v, cu, (max_seqlen_q, max_seqlen_k), 256, softmax_scale, *sides, results)
        assert dropout_p == 0.0 and not causal and alibi_slopes is None and not deterministic
        grads = packed_backward(dout, q, k, v, out, softmax_lse, *cu, softmax_scale, *sides, softcap)
        for total, grad in zip((dq, dk, dv), grads, strict=True):
            aten.copy_(total, grad)

    module.__dict__.update(locals())
    return module


def flash_4() -> ModuleType:
    module = ModuleType("flash_attn.cute.interface")

    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, learnable_sink=None, num_splits=1, pack_gqa=None, return_lse=False, out=None, lse=None,
    ):  # fmt: skip
        cu, sides = (cu_seqlens_q, cu_seqlens_k), (window_size_left, window_size_right)
        check_packed(q, k, v, cu, (max_seqlen_q, max_seqlen_k), 256, softmax_scale, *sides, unequal=True)
        assert return_lse and causal == (sides == (None, 0)) and -1 not in sides
        return packed_forward(q, k, v, *cu, softmax_scale, *sides, softcap or 0.0)

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, pack_gqa=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        cu, sides = (cu_seqlens_q, cu_seqlens_k), (window_size_left, window_size_right)
        longest, results = (max_seqlen_q, max_seqlen_k), (dout, out, lse)
        check_packed(q, k, v, cu, longest, 256, softmax_scale, *sides, results, unequal=True)
        assert causal == (sides == (None, 0)) and -1 not in sides and not deterministic
        return packed_backward(dout, q, k, v, out, lse, *cu, softmax_scale, *sides, softcap)

    module.__dict__.update(locals())
    return module


def flash_3(library: Library) -> None:
    """Define the ops of flash-attn 3."""

    def fwd(q, k, v, *rest, **named):
        a = by_name(torch.ops.flash_attn_3.fwd.default, (q, k, v, *rest), named)
        cu, sides = (a["cu_seqlens_q"], a["cu_seqlens_k"]), (a["window_size_left"], a["window_size_right"])
        unequal = 128 < q.shape[2] <= 192 and 96 < v.shape[2] <= 128
        longest = a["max_seqlen_q"], a["max_seqlen_k"]
        check_packed(q, k, v, cu, longest, 256, a["softmax_scale"], *sides, unequal=unequal)
        out, lse = packed_forward(q, k, v, *cu, a["softmax_scale"], *sides, a["softcap"])
        return out, lse, q.new_empty(0), q.new_empty(0)

    def bwd(*args, **named):
        a = by_name(torch.ops.flash_attn_3.bwd.default, args, named)
        cu, sides = (a["cu_seqlens_q"], a["cu_seqlens_k"]), (a["window_size_left"], a["window_size_right"])
        qkv, results = [a[x] for x in "qkv"], (a["dout"], a["out"], a["softmax_lse"])
        check_packed(*qkv, cu, (a["max_seqlen_q"], a["max_seqlen_k"]), 256, a["softmax_scale"], *sides, results)
        grads = packed_backward(a["dout"], *qkv, *results[1:], *cu, a["softmax_scale"], *sides, a["softcap"])
        for total, grad in zip((a["dq"], a["dk"], a["dv"]), grads, strict=True):
            assert total is not None
            aten.copy_(total, grad)
        return (a["dq"], a["dk"], a["dv"], *(a["q"].new_empty(0) for _ in range(5)))

    library.define(FLASH_3_FORWARD)
    library.define(FLASH_3_BACKWARD)
    for name, function in (("fwd", fwd), ("bwd", bwd)):
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"flash_attn_3::{name}", function, lib=library)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Provide the packages, and aten's CUDA ops on the CPU."""
    with ExitStack() as stack:
        modules = {"flash_attn.flash_attn_interface": flash_2(), "flash_attn.cute.interface": flash_4()}
        modules["flash_attn_interface"] = ModuleType("flash_attn_interface")
        stack.enter_context(patch.dict(sys.modules, modules))
        flash_3(stack.enter_context(torch.library._scoped_library("flash_attn_3", "DEF")))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name, (check, compute) in ATEN.items():

            def op(*args, name=name, check=check, compute=compute, **named):
                a = by_name(getattr(aten, name).default, args, named)
                check(a)
                return compute(a)

            library.impl(name, op, "CPU")
        yield
