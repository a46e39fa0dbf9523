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
    name: str, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[Kernel, str]:
    """Return the back end for a call, and a log line with its name and the reasons against those tried before it.

    `auto` tries flash-attn, torch's fused ops, then the reference; any other name allows no fallback.

    Raises:
        ValueError: for an unknown name, or if no back end of that name supports the call, with the reasons.
    """
    check_kernel_name(name)
    refusals: list[str] = []
    for candidate in AUTO if name == "auto" else KERNELS[name]:
        kernel = candidate()
        reason = kernel.refuses(spec, device, dtype, head_dim)
        if reason is None:
            return kernel, f"attention kernel: {kernel.name}" + "".join(f"; {refusal}" for refusal in refusals)
        refusals.append(f"{kernel.name} refused: {reason}")
    hint = "" if name == "auto" else ": use kernel='auto'"
    raise ValueError(f"kernel={name!r} cannot compute this call ({'; '.join(refusals)}){hint}")
