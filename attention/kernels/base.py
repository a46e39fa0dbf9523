"""The kernel interface.

A back end is stateless: it lowers a block's tasks to launches once per plan, and computes one launch at a time as a
pure function of its tensors. Callers do not depend on the back end, and kernels know nothing about ranks.

n runs of A queries and B keys; N query heads, K KV heads (K divides N), H head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.accumulate import AttentionSum, GradientSum, Rows
from attention.bands import Task
from attention.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel call: runs of queries against runs of keys, with the same kind of mask.

    Every query row that is not padding has at least one visible key.
    """

    queries: Rows
    keys: Rows


class Kernel(ABC):
    """A block-attention back end."""

    name: str

    @abstractmethod
    def refuses(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why this back end cannot compute such a call exactly, or None if it can."""

    @abstractmethod
    def lower(self, tasks: tuple[Task, ...], device: torch.device, dtype: torch.dtype) -> tuple[Launch, ...]:
        """Lower tasks to launches. No query row occurs twice in one launch; no pair occurs in two."""

    @abstractmethod
    def forward(
        self, q_nANH: Tensor, k_nBKH: Tensor, v_nBKH: Tensor, launch: Launch, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Return out (n, A, N, H) in q's dtype and natural-log lse (n, N, A) in fp32 (fp64 for fp64)."""

    @abstractmethod
    def backward(
        self,
        dout_nANH: Tensor,
        q_nANH: Tensor,
        k_nBKH: Tensor,
        v_nBKH: Tensor,
        out_nANH: Tensor,
        lse_nNA: Tensor,
        launch: Launch,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq (n, A, N, H), dk and dv (n, B, K, H).

        `out` and `lse` are those of the whole row over all blocks, so the results of all launches sum to the exact
        gradient, without a gradient of lse.
        """


def attend(
    kernel: Kernel, launches: tuple[Launch, ...], q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: AttentionSpec,
    total: AttentionSum,
) -> None:  # fmt: skip
    """Add a block's attention to `total`."""
    with _without_autocast(q_TNH.device):
        for launch in launches:
            q, k, v = launch.queries.take(q_TNH), launch.keys.take(k_TKH), launch.keys.take(v_TKH)
            total.merge(launch.queries, *kernel.forward(q, k, v, launch, spec))


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast, which would round the float32 accumulators."""
    inside = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if inside else nullcontext()


def attend_backward(
    kernel: Kernel, launches: tuple[Launch, ...], dout_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor,
    out_TNH: Tensor, lse_TN: Tensor, spec: AttentionSpec, sums: tuple[GradientSum, GradientSum, GradientSum],
) -> None:  # fmt: skip
    """Add a block's gradients to the sums of dq (T, N, H), dk and dv (T, K, H)."""
    with _without_autocast(k_TKH.device):
        for launch in launches:
            rows, keys = launch.queries, launch.keys
            grads = kernel.backward(
                rows.take(dout_TNH), rows.take(q_TNH), keys.take(k_TKH), keys.take(v_TKH), rows.take(out_TNH),
                rows.take(lse_TN).transpose(1, 2).contiguous(), launch, spec,
            )  # fmt: skip
            for total, side, grad in zip(sums, (rows, keys, keys), grads, strict=True):
                total.add(side, grad)
