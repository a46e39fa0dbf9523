"""Choice of the attention back end."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from usp.attention.spec import AttentionSpec

from .base import Device, Kernel
from .flash import FlashAttn2Kernel, FlashAttn3Kernel, FlashAttn4Kernel
from .reference import ReferenceKernel
from .sdpa import CpuFlashKernel, CudnnKernel, EfficientKernel
from .varlen import AtenFlashKernel

# A name may cover several back ends, one per device, dtype and package.
KERNELS: dict[str, tuple[type[Kernel], ...]] = {
    "reference": (ReferenceKernel,),
    "sdpa": (CpuFlashKernel, AtenFlashKernel, EfficientKernel),
    "cudnn": (CudnnKernel,),
    "flash": (FlashAttn4Kernel, FlashAttn3Kernel, FlashAttn2Kernel),
    "flash2": (FlashAttn2Kernel,),
    "flash3": (FlashAttn3Kernel,),
    "flash4": (FlashAttn4Kernel,),
}
AUTO: tuple[type[Kernel], ...] = (
    *KERNELS["flash"],
    AtenFlashKernel,
    CpuFlashKernel,
    CudnnKernel,
    EfficientKernel,
    ReferenceKernel,
)
KERNEL_NAMES = ("auto", *KERNELS)
Cost = Callable[[Kernel], float | None]


def check_kernel_name(name: str) -> None:
    """Raise ValueError for an unknown name, suggesting the closest one."""
    if name not in KERNEL_NAMES:
        near = difflib.get_close_matches(name, KERNEL_NAMES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"kernel={name!r} is unknown{hint}: use one of {', '.join(KERNEL_NAMES)}")


def select_kernel(
    name: str,
    spec: AttentionSpec,
    device: torch.device | Device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int | None = None,
    cost: Cost | None = None,
    planned: bool = False,
    many_lengths: bool = False,
) -> tuple[Kernel, str]:
    """Return the back end for a call, and a log line with its name and the reasons against those tried before it.

    Of the back ends that `name` covers, the cheapest by `cost` that supports the call; those whose cost is None come
    after it, in a fixed order: flash-attn, torch's fused ops, the reference. For calls with windows or several
    documents in a row, back ends that take such a call in few launches come first.

    Args:
        name: `auto` covers all; any other name allows no fallback.
        v_head_dim: head dim of v, None for that of q and k; the line says so if the back end pads the smaller one.
        cost: relative time of a back end for one document of the call's shape.
        planned: for a run in another environment, where a package that is named here will be installed.
        many_lengths: packed back ends come first for every call: cuDNN would make a plan for each new shape.

    Raises:
        ValueError: for an unknown name, or if no back end of that name supports the call, with the reasons.
    """
    check_kernel_name(name)
    device = device if isinstance(device, Device) else Device.of(device)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    refusals: dict[str, list[str]] = defaultdict(list)  # names by reason
    absent: list[Kernel] = []
    for kernel in _by_cost(name, spec, cost, many_lengths):
        reason = kernel.refuses(spec, device, dtype, head_dim, v_head_dim)
        if reason is None and (reason := kernel.missing()) is not None:
            absent.append(kernel)
        if reason is None:
            return kernel, _line(kernel, head_dim, v_head_dim, _listed(refusals))
        refusals[reason].append(kernel.name)
    if planned and absent:
        return absent[0], _line(absent[0], head_dim, v_head_dim, ["its package is not installed here"])
    hint = "" if name == "auto" else ": use kernel='auto'"
    raise ValueError(f"kernel={name!r} cannot compute this call ({'; '.join(_listed(refusals))}){hint}")


def faster_if_installed(
    kernel: Kernel, name: str, call: tuple[AttentionSpec, torch.device | Device, torch.dtype, int, int], cost: Cost
) -> str:
    """Return what of `name` would be faster than `kernel` if its package were installed, how much, and how to install
    it; empty if nothing would."""
    device = call[1] if isinstance(call[1], Device) else Device.of(call[1])
    mine, spec = cost(kernel), call[0]
    for better in _by_cost(name, spec, cost):
        theirs = cost(better)
        if not better.install or mine is None or theirs is None or not (better.packed or spec.one_rectangle):
            continue
        if mine > theirs and better.missing() and better.refuses(spec, device, *call[2:]) is None:
            return f"{better.name} would be {mine / theirs:.1f} times as fast: {better.install}"
    return ""


def _by_cost(name: str, spec: AttentionSpec, cost: Cost | None, many_lengths: bool = False) -> list[Kernel]:
    kernels = [candidate() for candidate in (AUTO if name == "auto" else KERNELS[name])]
    costs = {kernel.name: cost(kernel) if cost else None for kernel in kernels}

    def key(kernel: Kernel) -> tuple[bool, bool, float]:
        known = costs[kernel.name]
        return not kernel.packed and (many_lengths or not spec.one_rectangle), known is None, known or 0.0

    return sorted(kernels, key=key)


def _listed(refusals: Mapping[str, list[str]]) -> list[str]:
    return [f"{', '.join(names)} refused: {reason}" for reason, names in refusals.items()]


def _line(kernel: Kernel, head_dim: int, v_head_dim: int, remarks: list[str]) -> str:
    return f"attention kernel: {kernel.name}{_padding(kernel, head_dim, v_head_dim)}" + "".join(
        f"; {each}" for each in remarks
    )


def _padding(kernel: Kernel, head_dim: int, v_head_dim: int) -> str:
    """Describe the zeros that make both head dims equal, and their cost in FLOPs; empty if there are none."""
    passes = [backward for backward in (False, True) if kernel.pads(head_dim, v_head_dim, backward)]
    if head_dim == v_head_dim or not passes:
        return ""
    padded, width = ("v" if v_head_dim < head_dim else "q and k"), max(head_dim, v_head_dim)
    products = (3, 2) if passes[0] else (1, 1)  # with H and with V, of the backward or the forward
    factor = sum(products) * width / (products[0] * head_dim + products[1] * v_head_dim)
    slower = "backward" if passes[0] else "forward"
    return f", {padded} padded to head dim {width}: {factor:.2g} times the {slower}'s FLOPs"
