"""The CUDA back ends without a GPU: every call on fake CUDA tensors, and the same calls against real math on the CPU.

A wrong shape, dtype, stride, alignment, device, name or order of arguments is found here. What is left for a GPU is the
kernels themselves (`test_cuda_kernels_match_dense_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from usp.attention import AttentionSpec, Kernel
from usp.attention.accumulate import AttentionSum, GradientSum
from usp.attention.kernels.base import attend, attend_backward
from usp.attention.kernels.flash import FlashAttn2Kernel, FlashAttn3Kernel, FlashAttn4Kernel
from usp.attention.kernels.sdpa import CudnnKernel, EfficientKernel
from usp.attention.kernels.varlen import AtenFlashKernel

from .cuda_calls import CheckCalls, DispatchedOps, stand_ins
from .dense import worst
from .test_kernels import BLOCKS, CPU, block, errors

KERNELS = [FlashAttn4Kernel, FlashAttn3Kernel, FlashAttn2Kernel, AtenFlashKernel, CudnnKernel, EfficientKernel]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def provided() -> Iterator[None]:
    with stand_ins():
        yield


@pytest.mark.parametrize(
    "name", ["full and a triangle", "more rows than keys", "ragged documents", "single keys", "single queries"]
)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_calls_mean_what_the_back_end_needs(kernel: type[Kernel], name: str) -> None:
    for with_dlse in (False, True):
        found = errors(kernel(), name, torch.float32, CPU, AttentionSpec(scale=0.2), v_head_dim=16, with_dlse=with_dlse)
        assert worst(found) <= 1e-5


@pytest.mark.parametrize(
    "kernel", [FlashAttn4Kernel, FlashAttn3Kernel, FlashAttn2Kernel], ids=lambda kernel: kernel.name
)
def test_softcaps_reach_the_packages_that_have_them(kernel: type[Kernel]) -> None:
    assert worst(errors(kernel(), "ragged documents", torch.float32, CPU, AttentionSpec(softcap=2.0))) <= 1e-5


@pytest.mark.parametrize(("kernel", "copies"), [(FlashAttn4Kernel, 0), (FlashAttn3Kernel, 1), (FlashAttn2Kernel, 2)])
def test_latent_attention_is_padded_only_where_a_pass_needs_it(kernel: type[Kernel], copies: int) -> None:
    """Head dims 192 and 128: FlashAttention 2 needs v, and in the backward also out and dout, as wide as q."""
    with patch("usp.attention.kernels.base.pad", wraps=torch.nn.functional.pad) as padded:
        assert worst(errors(kernel(), "ragged documents", torch.float32, CPU, AttentionSpec(), 128, 192)) <= 1e-5
    assert padded.call_count == {0: 0, 1: 3, 2: 4}[copies]


def on_cuda(x: Any) -> Any:
    """Return a launch with fake CUDA tensors, inside a FakeTensorMode."""
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)
    if not is_dataclass(x):
        return x
    return replace(x, **{field.name: on_cuda(getattr(x, field.name)) for field in fields(x)})  # type: ignore[type-var]


class Fills(TorchDispatchMode):
    """Numbers of the device that are filled for nothing: the state of dropout, which there is none of."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.zeros, torch.ops.aten.zero_):
            self.found += result.dim() == 0 and result.device.type == "cuda"
        return result


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "nothing"][::2])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.slow(but=14)
def test_calls_on_fake_cuda_tensors(kernel: type[Kernel], name: str) -> None:
    """Head dim 128 and 64 of the values, 8 query heads and 2 KV heads; keys are views of one buffer, as in a ring."""
    (tokens, tasks), dtype = block(name), torch.bfloat16
    launches = kernel().lower(tasks, CPU, dtype)
    with FakeTensorMode(), DispatchedOps(), Fills() as written, CheckCalls() as calls:
        launches = tuple(on_cuda(launch) for launch in launches)
        q = torch.empty(tokens, 8, 128, device=CUDA, dtype=dtype)
        dout = torch.empty(8, tokens, 64, device=CUDA, dtype=dtype).transpose(0, 1)
        kv = torch.empty(tokens, 2 * (128 + 64), device=CUDA, dtype=dtype)
        k, v = kv[:, :256].unflatten(1, (2, 128)), kv[:, 256:].unflatten(1, (2, 64))
        total, spec = AttentionSum(q, 64), AttentionSpec()
        attend(kernel(), launches, q, k, v, spec, total, {})
        out, lse = total.result()
        sums = GradientSum(q), GradientSum(k), GradientSum(v)
        for dlse in (None, lse):
            attend_backward(kernel(), launches, dout, q, k, v, out.to(dtype), lse, spec, sums, dlse, {})
        assert (out.shape, lse.shape) == ((tokens, 8, 64), (tokens, 8)) and out.device.type == "cuda"
        assert [x.total.shape for x in sums] == [q.shape, k.shape, v.shape]
    if kernel in (AtenFlashKernel, CudnnKernel, EfficientKernel):
        passes = {"single keys": 0, "single queries": 1}.get(name, 3) if kernel is CudnnKernel else 3
        assert len(calls.called) == passes * len(launches)
        assert not written.found
