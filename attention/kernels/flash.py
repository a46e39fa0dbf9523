"""The flash-attn packages, variable-length: 2.7 and later 2.x, 3 for Hopper, 4 for Hopper and Blackwell.

They are called directly: `torch.nn.attention.activate_flash_attention_impl` would replace torch's own attention in the
whole process.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch

from usp.attention.spec import AttentionSpec

from .base import Device
from .varlen import VarlenKernel, VarlenLaunch


@cache
def release(package: str) -> str | None:
    """Return the installed version of a package, None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def is_replaced(package: str, path: str) -> bool:
    """Check whether a file of an installed package has another size than it was installed with."""
    files = (file for file in distribution(package).files or () if str(file) == path)
    return any(file.size is not None and Path(file.locate()).stat().st_size != file.size for file in files)


@cache
def has_module(name: str) -> bool:
    """Check whether a top-level module could be imported, without importing it."""
    return importlib.util.find_spec(name) is not None


class FlashAttn2Kernel(VarlenKernel):
    """The package flash-attn 2.x, faster than torch's copy."""

    name = "flash-attn-2"
    install = "pip install flash-attn --no-build-isolation"
    softcaps = True

    def missing(self) -> str | None:
        found = release("flash-attn")
        if found is None:
            return "the package flash-attn is not installed"
        major, minor = (int(part) for part in found.split(".")[:2])
        if major != 2 or minor < 7:
            return f"flash-attn {found} is installed, but 2.7 or a later 2.x is required"
        return None

    @staticmethod
    def load() -> Any:
        """Import the package's interface on first use."""
        return importlib.import_module("flash_attn.flash_attn_interface")

    def _forward(self, q, k, v, launch, spec):
        out, lse, _, _ = self.load()._flash_attn_varlen_forward(
            q, k, v, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k, 0.0, **_options(launch, spec, q)
        )
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, launch, spec):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.load()._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, dq, dk, dv, launch.cu_q, launch.cu_k, launch.max_q, launch.max_k, 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_options(launch, spec, q),
        )  # fmt: skip
        return dq, dk, dv


def _options(launch: VarlenLaunch, spec: AttentionSpec, q: torch.Tensor) -> dict[str, Any]:
    return {
        "softmax_scale": spec.score_scale(q.shape[-1]),
        "causal": False,  # the window already expresses it
        **launch.windows,
        "softcap": spec.softcap or 0.0,
        "alibi_slopes": None,
    }


class FlashAttn3Kernel(VarlenKernel):
    """The ops of flash-attn 3, which its module `flash_attn_interface` registers."""

    name = "flash-attn-3"
    install = "pip install ./hopper in a checkout of flash-attention"
    majors = (9,)
    softcaps = True

    def pads(self, head_dim: int, v_head_dim: int, backward: bool) -> bool:
        # What mha_fwd of hopper/flash_api_stable.cpp allows; earlier releases have no backward for it.
        return backward or not (128 < head_dim <= 192 and 96 < v_head_dim <= 128)

    def missing(self) -> str | None:
        return None if has_module("flash_attn_interface") else "flash-attn 3 (flash_attn_interface) is not installed"

    @staticmethod
    def load() -> Any:
        """Import the module on first use; return the namespace of its ops."""
        importlib.import_module("flash_attn_interface")
        return torch.ops.flash_attn_3

    def _forward(self, q, k, v, launch, spec):
        out, lse, _, _ = self.load().fwd(
            q, k, v, **_named(launch), **launch.windows, softcap=spec.softcap or 0.0,
            softmax_scale=spec.score_scale(q.shape[-1]), num_splits=1,  # more take a float32 output of all tokens each
        )  # fmt: skip
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, launch, spec):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.load().bwd(
            dout, q, k, v, out, lse, dq, dk, dv, **_named(launch), **launch.windows, softcap=spec.softcap or 0.0,
            softmax_scale=spec.score_scale(q.shape[-1]), deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv


def _named(launch: VarlenLaunch) -> dict[str, Any]:
    return {
        "cu_seqlens_q": launch.cu_q,
        "cu_seqlens_k": launch.cu_k,
        "max_seqlen_q": launch.max_q,
        "max_seqlen_k": launch.max_k,
    }


class FlashAttn4Kernel(VarlenKernel):
    """The package flash-attn-4, with the arguments that torch's own adapter passes (torch.nn.attention._fa4)."""

    name = "flash-attn-4"
    install = "pip install --pre flash-attn-4"
    majors = (9, 10)
    softcaps = True

    def pads(self, head_dim: int, v_head_dim: int, backward: bool) -> bool:
        return (head_dim, v_head_dim) != (192, 128)  # a v narrower than 128 has no backward on 10.x

    def refuses_call(
        self, spec: AttentionSpec, device: Device, dtype: torch.dtype, head_dim: int, v_head_dim: int
    ) -> str | None:
        reason = super().refuses_call(spec, device, dtype, head_dim, v_head_dim)
        if reason or (device.capability or (9, 0)) < (10, 0):
            return reason
        dims = head_dim, v_head_dim
        if max(dims) > 128 and dims not in ((192, 128), (256, 256)):
            return f"head dims {dims} must be at most 128, (192, 128) or (256, 256) on compute capability 10.x"
        if max(dims) == 256 and not (spec.one_sided and spec.softcap is None):
            return "head dim 256 has no backward with a window, a prefix or a softcap on compute capability 10.x"
        return None

    def missing(self) -> str | None:
        if release("flash-attn-4") is None:
            return "the package flash-attn-4 is not installed"
        if is_replaced("flash-attn-4", "flash_attn/cute/interface.py"):  # flash-attn 2.8 ships an older one
            return "flash-attn, installed later, has replaced a file of flash-attn-4: install flash-attn-4 again"
        return None

    @staticmethod
    def load() -> Any:
        """Import the package's interface on first use; it compiles kernels when they are first called."""
        return importlib.import_module("flash_attn.cute.interface")

    def _forward(self, q, k, v, launch, spec):
        out, lse, *_ = self.load()._flash_attn_fwd(
            q, k, v, **_named(launch), **_limits(launch), softmax_scale=spec.score_scale(q.shape[-1]),
            softcap=spec.softcap, return_lse=True,
        )  # fmt: skip
        return out, lse

    def _backward(self, dout, q, k, v, out, lse, launch, spec):
        dq, dk, dv, *_ = self.load()._flash_attn_bwd(
            q, k, v, out, dout, lse, **_named(launch), **_limits(launch), softmax_scale=spec.score_scale(q.shape[-1]),
            softcap=spec.softcap or 0.0, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv


def _limits(launch: VarlenLaunch) -> dict[str, Any]:
    """Return the window as flash-attn-4 has it: None for no limit, and a flag for what is causal."""
    windows = {name: None if reach < 0 else reach for name, reach in launch.windows.items()}
    return {"causal": (launch.left, launch.right) == (-1, 0), **windows}
