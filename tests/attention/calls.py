"""Calls of the attention layers with all of their arguments by name, as cases have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from usp import JointAttention, Mask, SparseAttention, UnifiedSPAttention
from usp.sp.mask import AttentionPlan

NAMES = {"prefix_tree": "tree", "mask_mod": "function"}


def mask_of(arguments: dict[str, Any]) -> Mask:
    return Mask(**{NAMES.get(name, name): value for name, value in arguments.items()})


def called(
    module: UnifiedSPAttention,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    joint: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    joint_strategy: str = "front",
    joint_every: int = 0,
    sparse: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **mask: Any,
) -> Any:
    """Return the results of a call. joint: q, k and v. sparse: indices and what is asked of them. options: scale and
    others of all layers."""
    options = options or {}
    if joint[1] is not None:
        layer = JointAttention(module, joint_strategy, joint_every)
        return layer(q, k, v, *joint, mask_of(mask), **options)
    if sparse:
        return SparseAttention(module)(q, k, v, mask=mask_of(mask), **sparse, **options)
    return module(q, k, v, mask_of(mask), **options)


def plan_of(
    module: UnifiedSPAttention,
    q: tuple[int, ...],
    k: tuple[int, ...] | None,
    joint: tuple[int, bool, int] = (0, False, 0),
    joint_strategy: str = "front",
    joint_every: int = 0,
    **mask: Any,
) -> AttentionPlan:
    """Return the plan of calls on global q and k of these sizes. joint: tokens, whether there are queries of them, and
    KV heads."""
    sizes = []
    for size in (q, k):
        missing = module.axes.padding(module.layout, size[1]) if size else 0
        sizes.append(size and torch.Size((size[0], (size[1] + missing) // module.ranks, *size[2:])))
    if not joint[0]:
        return module.plan(mask_of(mask), *sizes)
    layer = JointAttention(module, joint_strategy, joint_every)
    return layer.plan(mask_of(mask), *sizes, torch.Size((q[0], joint[0], joint[2], q[3])), joint[1])
