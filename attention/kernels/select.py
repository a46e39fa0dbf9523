"""Choice of the attention back end."""

from __future__ import annotations

import difflib

import torch

from attention.spec import AttentionSpec

from .base import Kernel
from .flash import FlashAttnKernel
from .reference import ReferenceKernel
from .sdpa import CpuFlashKernel, CudnnKernel, EfficientKernel
from .varlen import AtenFlashKernel

# A name may cover several back ends, one per device and dtype; the first that supports the call is used.
KERNELS: dict[str, tuple[type[Kernel], ...]] = {
    "reference": (ReferenceKernel,),
    "sdpa": (CpuFlashKernel, AtenFlashKernel, EfficientKernel),
    "cudnn": (CudnnKernel,),
    "flash": (FlashAttnKernel,),
}
AUTO = (FlashAttnKernel, AtenFlashKernel, CpuFlashKernel, EfficientKernel, ReferenceKernel)
KERNEL_NAMES = ("auto", *KERNELS)


def check_kernel_name(name: str) -> None:
    """Raise ValueError for an unknown name, suggesting the closest one."""
    if name not in KERNEL_NAMES:
        near = difflib.get_close_matches(name, KERNEL_NAMES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"kernel={name!r} is unknown{hint}: use one of {', '.join(KERNEL_NAMES)}")


def select_kernel(
    name: str,
    spec: AttentionSpec,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int | None = None,
) -> tuple[Kernel, str]:
    """Return the back end for a call, and a log line with its name and the reasons against those tried before it.

    `auto` tries flash-attn, torch's fused ops, then the reference; any other name allows no fallback. `v_head_dim` is
    the head dim of v, None for that of q and k; the line says so if the back end pads the smaller one.

    Raises:
        ValueError: for an unknown name, or if no back end of that name supports the call, with the reasons.
    """
    check_kernel_name(name)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    refusals: list[str] = []
    for candidate in AUTO if name == "auto" else KERNELS[name]:
        kernel = candidate()
        reason = kernel.refuses(spec, device, dtype, head_dim, v_head_dim)
        if reason is None:
            padding = _padding(head_dim, v_head_dim) if kernel.equal_head_dims else ""
            return kernel, f"attention kernel: {kernel.name}{padding}" + "".join(f"; {each}" for each in refusals)
        refusals.append(f"{kernel.name} refused: {reason}")
    hint = "" if name == "auto" else ": use kernel='auto'"
    raise ValueError(f"kernel={name!r} cannot compute this call ({'; '.join(refusals)}){hint}")


def _padding(head_dim: int, v_head_dim: int) -> str:
    """Describe the zeros that make both head dims equal, and their cost in FLOPs; empty if they are equal."""
    if head_dim == v_head_dim:
        return ""
    padded, width = ("v" if v_head_dim < head_dim else "q and k"), max(head_dim, v_head_dim)
    return f", {padded} padded to head dim {width}: {2 * width / (head_dim + v_head_dim):.2g} times the forward's FLOPs"
