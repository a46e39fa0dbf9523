"""FLOPs of operators as they are called: what a kernel is asked to compute, recomputation included.

A multiply-add is two. Matrix products are counted by torch's own formulas. Attention's are the same products over the
(query, key) pairs that its kernel visits: all of a rectangle, a causal square's visible half, what the band of a packed
sequence shows. Forward: scores and values, 2 products; backward: those of the scores again and 4 gradients, 5 in all
(Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4). What is no product of matrices counts nothing.
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
Read = Callable[[Tensor], list[int]]
IN_PLACE: Mapping[Any, Any] = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}  # torch's formulas lack them


def matmul_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """Those of a matrix product or a convolution, 0 for any other operator."""
    packet = IN_PLACE.get(func.overloadpacket, func.overloadpacket)
    if packet is aten._grouped_mm:
        a, b = args[0], args[1]  # rows by groups of matrices, or (for a weight's gradient) columns by rows, in groups
        return 2 * a.numel() * b.shape[-1]
    formula = None if packet in ATTENTION else flop_registry.get(packet)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def attention_flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read) -> int:
    """Those of an attention kernel, 0 for any other operator.

    read: `Tensor.tolist` for the borders of packed sequences, which a fake tensor cannot give.
    """
    count = ATTENTION.get(func.overloadpacket)
    return 0 if count is None else count(args, kwargs, read)


def _dense(products: int, query: int, causal: int) -> Callable[..., int]:
    """Counts a kernel whose arguments number `query` and next are q (n, N, A, H) and k, and number `causal` a bool."""

    def count(args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read) -> int:
        (batch, heads, rows, size), columns = args[query].shape, args[query + 1].shape[2]
        pairs = rows * (rows + 1) // 2 if any(args[causal : causal + 1]) else rows * columns
        return 2 * products * batch * heads * pairs * size

    return count


def _packed(products: int, query: int, borders: int) -> Callable[..., int]:
    """The same for q (T, N, H), the borders of whose sequences and of their keys' are `borders` and the next."""

    def count(args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Read) -> int:
        left, right = (kwargs.get(f"window_size_{side}", -1) for side in ("left", "right"))
        limits = None if right < 0 else -right, None if left < 0 else left
        lengths = [[stop - start for start, stop in pairwise(read(x))] for x in args[borders : borders + 2]]
        pairs = sum(band_pairs(rows, columns, columns - rows, *limits) for rows, columns in zip(*lengths, strict=True))
        _, heads, size = args[query].shape
        return 2 * products * heads * pairs * size

    return count


# The op: products, where its arguments have q, and where causal or borders.
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
