"""FLOPs of operators as they are called, recomputation included.

A multiply-add is two FLOPs. torch's own formulas count matrix products. Attention counts its products over the (query,
key) pairs that the kernel visits: all pairs of a rectangle, the lower triangle of a causal square, the band of each
packed sequence. The forward has 2 products (scores, output), the backward 5 (scores again, 4 gradients; Dao et al.
2022, arXiv 2205.14135, algorithms 1 and 4). Other operators count nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from attention import band_pairs

aten = torch.ops.aten

FORWARD, BACKWARD = 2, 5  # products
VALUES = {FORWARD: 1, BACKWARD: 2}  # of these, products over the head dim of the values
Read = Callable[[Tensor], list[int]]
IN_PLACE: Mapping[Any, Any] = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}  # torch's formulas lack them


def matmul_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the FLOPs of a matrix product or convolution, 0 for any other operator."""
    packet = IN_PLACE.get(func.overloadpacket, func.overloadpacket)
    if packet is aten._grouped_mm:
        a, b = args[0], args[1]  # (rows, K) x (groups, K, N), or for a weight's gradient (M, rows) x (rows, N)
        return 2 * a.numel() * b.shape[-1]
    formula = None if packet in ATTENTION else flop_registry.get(packet)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def attention_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read) -> int:
    """Return the FLOPs of an attention kernel, 0 for any other operator.

    read: `Tensor.tolist` for `cu_seqlens`, whose values a fake tensor does not have.
    """
    count = ATTENTION.get(func.overloadpacket)
    return 0 if count is None else count(args, kwargs, read)


def _dense(products: int, query: int, causal: int) -> Callable[..., int]:
    """Count a kernel with q (batch, heads, rows, head dim), k and v from argument `query` on, a bool at `causal`."""

    def count(args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read) -> int:
        (batch, heads, rows, size), columns = args[query].shape, args[query + 1].shape[2]
        pairs = rows * (rows + 1) // 2 if any(args[causal : causal + 1]) else rows * columns
        return 2 * batch * heads * pairs * _multiplied(products, size, args[query + 2].shape[3])

    return count


def _packed(products: int, query: int, cu_seqlens: int) -> Callable[..., int]:
    """Count a kernel with q (tokens, heads, head dim), k and v from `query` on, `cu_seqlens` of q and k likewise."""

    def count(args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read) -> int:
        left, right = (kwargs.get(f"window_size_{side}", -1) for side in ("left", "right"))
        limits = None if right < 0 else -right, None if left < 0 else left
        lengths = [[stop - start for start, stop in pairwise(read(x))] for x in args[cu_seqlens : cu_seqlens + 2]]
        pairs = sum(band_pairs(rows, columns, columns - rows, *limits) for rows, columns in zip(*lengths, strict=True))
        _, heads, size = args[query].shape
        return 2 * heads * pairs * _multiplied(products, size, args[query + 2].shape[2])

    return count


def _multiplied(products: int, head_dim: int, v_head_dim: int) -> int:
    """Return the multiply-adds per pair and head of a kernel's products."""
    return (products - VALUES[products]) * head_dim + VALUES[products] * v_head_dim


# Operator: products, position of q among its arguments, position of the causal flag or of cu_seqlens.
ATTENTION: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _dense(FORWARD, 0, 4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _dense(BACKWARD, 1, 7),
    aten._scaled_dot_product_efficient_attention: _dense(FORWARD, 0, 6),
    aten._scaled_dot_product_efficient_attention_backward: _dense(BACKWARD, 1, 11),
    aten._scaled_dot_product_cudnn_attention: _dense(FORWARD, 0, 6),
    aten._scaled_dot_product_cudnn_attention_backward: _dense(BACKWARD, 1, 14),
    aten._flash_attention_forward: _packed(FORWARD, 0, 3),
    aten._flash_attention_backward: _packed(BACKWARD, 1, 6),
}
