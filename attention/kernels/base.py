"""The kernel interface.

A back end is stateless: it lowers a block's tasks to launches once per plan, and computes one launch at a time as a
pure function of its tensors. Callers do not depend on the back end, and kernels know nothing about ranks.

n runs of A queries and B keys; N query heads, K KV heads (K divides N), H head dim, V head dim of the values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from usp.attention.accumulate import AttentionSum, GradientSum, Rows
from usp.attention.bands import Task
from usp.attention.spec import AttentionSpec

LSE_COLUMNS = 8  # added to the head dim of v in a backward with a gradient of lse: kernels need multiples of 8


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """One kernel call: runs of queries against runs of keys, with the same kind of mask.

    Every query row that is not padding has at least one visible key.
    """

    queries: Rows
    keys: Rows


@dataclass(frozen=True)
class Device:
    """What back ends must know of a device.

    Attributes:
        type: cpu or cuda.
        capability: compute capability of an NVIDIA GPU, None if unknown.
    """

    type: str
    capability: tuple[int, int] | None = None

    @staticmethod
    def of(device: torch.device) -> Device:
        """Return the description of a device of this process; ROCm's devices have no compute capability."""
        known = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None
        return Device(device.type, torch.cuda.get_device_capability(device) if known else None)


class Kernel(ABC):
    """A block-attention back end.

    Attributes:
        rated_as: the name under which tables of rates have this kernel, if it is not its own.
        install: how to install its package; empty for one that comes with torch.
        packed: documents and windows take one or a few launches. Others cut them into many, some with masks, so that
            their rate for one causal or full rectangle says nothing about such calls.
        device_type: of the devices that it runs on; empty for any.
        majors: major compute capabilities of the GPUs that it runs on; empty for any.
    """

    name: str
    rated_as = ""
    install = ""
    packed = False
    device_type = ""
    majors: tuple[int, ...] = ()

    def missing(self) -> str | None:
        """Return why the software of this back end cannot be used in this process, or None if it can."""
        return None

    def pads(self, head_dim: int, v_head_dim: int, backward: bool) -> bool:
        """Return whether a pass requires V = H of these two that differ.

        `attend` and `attend_backward` then pad the smaller one with zeros, which adds nothing to any score, output or
        gradient, so the result is exact; all products cost as much as with the larger one.
        """
        return False

    def refuses(
        self, spec: AttentionSpec, device: Device, dtype: torch.dtype, head_dim: int, v_head_dim: int
    ) -> str | None:
        """Return why this back end cannot compute such a call exactly on such a device, or None if it can."""
        if self.device_type not in ("", device.type):
            return f"runs on {self.device_type}, but the tensors are on {device.type}"
        if self.majors and (device.capability or (0,))[0] not in self.majors:
            wanted = " or ".join(f"{major}.x" for major in self.majors)
            here = "{}.{}".format(*device.capability) if device.capability else "an unknown one"
            return f"needs a GPU of compute capability {wanted}, this has {here}"
        return self.refuses_call(spec, device, dtype, head_dim, v_head_dim)

    @abstractmethod
    def refuses_call(
        self, spec: AttentionSpec, device: Device, dtype: torch.dtype, head_dim: int, v_head_dim: int
    ) -> str | None:
        """`refuses` on a device that it runs on."""

    @abstractmethod
    def lower(self, tasks: Sequence[Task], device: torch.device, dtype: torch.dtype) -> tuple[KernelLaunch, ...]:
        """Lower tasks to launches. No query row occurs twice in one launch; no pair occurs in two."""

    @abstractmethod
    def forward(
        self, q_nANH: Tensor, k_nBKH: Tensor, v_nBKV: Tensor, launch: KernelLaunch, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        """Return out (n, A, N, V) in q's dtype and natural-log lse (n, N, A) in fp32 (fp64 for fp64)."""

    @abstractmethod
    def backward(
        self,
        dout_nANV: Tensor,
        q_nANH: Tensor,
        k_nBKH: Tensor,
        v_nBKV: Tensor,
        out_nANV: Tensor,
        lse_nNA: Tensor,
        launch: KernelLaunch,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq (n, A, N, H), dk (n, B, K, H) and dv (n, B, K, V).

        `out` and `lse` are those of the whole row over all blocks, so the results of all launches sum to the exact
        gradient, without a gradient of lse.
        """


Taken = dict[object, tuple[Tensor, ...]]  # what launches have taken of tensors that are the same in all steps of a ring


def attend(
    kernel: Kernel, launches: tuple[KernelLaunch, ...], q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor,
    spec: AttentionSpec, total: AttentionSum, taken: Taken,
) -> None:  # fmt: skip
    """Add a block's attention to `total`."""
    v_head_dim = v_TKV.shape[-1]
    spec, width = _kernel_call(kernel, spec, q_TNH, v_TKV, backward=False)
    if width:
        q_TNH, k_TKH, v_TKV = (_widened(x, width) for x in (q_TNH, k_TKH, v_TKV))
    for launch in launches:
        if (rows := launch.queries).key not in taken:
            taken[rows.key] = (rows.take(q_TNH),)
        (q,), k, v = taken[rows.key], launch.keys.take(k_TKH), launch.keys.take(v_TKV)
        out, lse = kernel.forward(q, k, v, launch, spec)
        total.merge(launch.queries, out[..., :v_head_dim] if width else out, lse)


def _kernel_call(
    kernel: Kernel, spec: AttentionSpec, q: Tensor, v: Tensor, *, backward: bool
) -> tuple[AttentionSpec, int]:
    """Return the specification for the kernel, and the head dim to which all its inputs are padded; 0 for none."""
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    if head_dim == v_head_dim or not kernel.pads(head_dim, v_head_dim, backward):
        return spec, 0
    # The default scale would follow the padded head dim.
    return replace(spec, scale=spec.score_scale(head_dim)), max(head_dim, v_head_dim)


def _widened(x: Tensor, width: int) -> Tensor:
    missing = width - x.shape[-1]
    return pad(x, (0, missing)) if missing > 0 else x


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast, which would round the float32 accumulators."""
    inside = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if inside else nullcontext()


def attend_backward(
    kernel: Kernel, launches: tuple[KernelLaunch, ...], dout_TNV: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor,
    out_TNV: Tensor, lse_TN: Tensor, spec: AttentionSpec, sums: tuple[GradientSum, GradientSum, GradientSum],
    dlse_TN: Tensor | None, taken: Taken,
) -> None:  # fmt: skip
    """Add a block's gradients to the sums of dq (T, N, H), dk (T, K, H) and dv (T, K, V). dlse: None for zero."""
    head_dims = [x.shape[-1] for x in (q_TNH, k_TKH, v_TKV)]
    if dlse_TN is not None:
        # The gradient of a score is weight * (dout . v - dout . out + dlse). Kernels do not know the last term, so it
        # becomes part of dout . out, in a column where v is zero.
        v_TKV = pad(v_TKV, (0, LSE_COLUMNS))
        dout_TNV = _with_column(dout_TNV, torch.ones_like(dlse_TN))
        out_TNV = _with_column(out_TNV, -dlse_TN)
    spec, width = _kernel_call(kernel, spec, q_TNH, v_TKV, backward=True)
    dout, q, k, v, out = dout_TNV, q_TNH, k_TKH, v_TKV, out_TNV
    if width:
        dout, q, k, v, out = (_widened(x, width) for x in (dout, q, k, v, out))
    for launch in launches:
        rows, keys = launch.queries, launch.keys
        if rows.key not in taken:
            lse = rows.take(lse_TN).transpose(1, 2).contiguous()
            taken[rows.key] = rows.take(dout), rows.take(q), rows.take(out), lse
        dout_n, q_n, out_n, lse_n = taken[rows.key]
        grads = kernel.backward(dout_n, q_n, keys.take(k), keys.take(v), out_n, lse_n, launch, spec)
        for total, side, grad, head_dim in zip(sums, (rows, keys, keys), grads, head_dims, strict=True):
            total.add(side, grad if grad.shape[-1] == head_dim else grad[..., :head_dim])


def _with_column(x_TNV: Tensor, column_TN: Tensor) -> Tensor:
    return torch.cat((x_TNV, pad(column_TN.to(x_TNV.dtype).unsqueeze(-1), (0, LSE_COLUMNS - 1))), -1)
