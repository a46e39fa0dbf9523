"""The flash-attn package (2.7 or a later 2.x), variable-length: faster than torch's copy, and supports softcap."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch

from attention.spec import AttentionSpec

from .varlen import VarlenKernel


class FlashAttnKernel(VarlenKernel):
    name = "flash-attn"

    def refuses(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int
    ) -> str | None:
        try:
            release = version("flash-attn")
        except PackageNotFoundError:
            return "the package flash-attn is not installed"
        major, minor = (int(part) for part in release.split(".")[:2])
        if major != 2 or minor < 7:
            return f"flash-attn {release} is installed, but 2.7 or a later 2.x is required"
        return super().refuses(spec, device, dtype, head_dim, v_head_dim)

    @staticmethod
    def load() -> ModuleType:
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
            deterministic=False, **_options(launch, spec, q),
        )  # fmt: skip
        return dq, dk, dv


def _options(launch, spec, q) -> dict:
    return {
        "softmax_scale": spec.score_scale(q.shape[-1]),
        "causal": False,  # the window already expresses it
        **launch.windows,
        "softcap": spec.softcap or 0.0,
        "alibi_slopes": None,
    }
