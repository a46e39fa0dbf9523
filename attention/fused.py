"""The merge of two partial attention results as one Triton kernel, for GPUs: accumulate.py imports it where Triton is.

It reads and writes each number of the float32 sum once and reads that of a half-precision part: 10 bytes instead of 18.

n runs of T tokens, N query heads, V head dim of the values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # heads of tokens in a program


@triton.jit
def _merge_kernel(
    out, lse, part, part_lse, rows, heads,
    out_run, out_token, out_head, lse_run, lse_token, lse_head,
    part_run, part_token, part_head, part_lse_run, part_lse_token, part_lse_head,
    width: tl.constexpr, padded: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, run = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1).to(tl.int64)
    inside, token, head = row < rows, (row // heads).to(tl.int64), row % heads
    at = lse + run * lse_run + token * lse_token + head * lse_head
    old = tl.load(at, mask=inside, other=0.0)
    more_at = part_lse + run * part_lse_run + token * part_lse_token + head * part_lse_head
    more = tl.load(more_at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(old, more)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # both empty: no nan
    weight = tl.exp(more - base)
    total = tl.exp(old - base) + weight
    tl.store(at, tl.where(total > 0, base + tl.log(tl.where(total > 0, total, 1.0)), float("-inf")), mask=inside)
    weight = weight / tl.where(total > 0, total, 1.0)
    column = tl.arange(0, padded)
    both = inside[:, None] & (column < width)[None, :]
    out_at = out + (run * out_run + token * out_token + head * out_head)[:, None] + column[None, :]
    part_at = part + (run * part_run + token * part_token + head * part_head)[:, None] + column[None, :]
    x, y = tl.load(out_at, mask=both, other=0.0), tl.load(part_at, mask=both, other=0.0).to(tl.float32)
    tl.store(out_at, x + weight[:, None] * (y - x), mask=both)


def merge(out_nTNV: Tensor, lse_nTN: Tensor, part_nTNV: Tensor, part_lse_nTN: Tensor) -> None:
    """Merge float32 out and lse with those of another part, in place; the last dims of out and part have stride 1."""
    runs, tokens, heads, width = out_nTNV.shape
    rows = tokens * heads
    if not rows * runs:
        return
    strides = [s for x in (out_nTNV, lse_nTN, part_nTNV, part_lse_nTN) for s in x.stride()[:3]]
    _merge_kernel[triton.cdiv(rows, ROWS), runs](
        out_nTNV, lse_nTN, part_nTNV, part_lse_nTN, rows, heads, *strides,
        width=width, padded=triton.next_power_of_2(width), block=ROWS,
    )  # fmt: skip
