"""Compiles the kernels of the installed package flash-attn-4 for a GPU that is not there, through our back end.

    FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_NUM_SMS=132 python -m tests.attention.flash4 9

Tensors are fake; the machine code is real. Prints a line for each case: its name, and what the package raised.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from usp.attention import AttentionSpec
from usp.attention.accumulate import AttentionSum, GradientSum
from usp.attention.kernels.base import Device, attend, attend_backward
from usp.attention.kernels.flash import FlashAttn4Kernel

from .cuda_calls import DispatchedOps
from .test_cuda_calls import CUDA, on_cuda
from .test_kernels import CPU, block

CAUSAL = AttentionSpec()


@dataclass(frozen=True)
class Case:
    """Tasks of tests/attention/test_kernels.py. spec: what the back end is asked; refused_on: major capabilities."""

    tasks: str
    head_dim: int
    v_head_dim: int
    kv_heads: int
    spec: AttentionSpec = CAUSAL
    refused_on: tuple[int, ...] = ()


WINDOW = AttentionSpec(window=(100, 0))
CASES = {
    "grouped heads": Case("full and a triangle", 128, 128, 2),
    "documents": Case("ragged documents", 64, 64, 4),
    "window": Case("band", 128, 128, 2, WINDOW),
    "narrower v": Case("triangle", 128, 64, 2),
    "wider v": Case("triangle", 64, 128, 2),
    "latent attention": Case("ragged documents", 192, 128, 4),
    "latent attention with a window": Case("band", 192, 128, 4, WINDOW),
    "softcap": Case("triangle", 128, 128, 2, AttentionSpec(softcap=30.0)),
    "head dim 256": Case("full and a triangle", 256, 256, 2),
    "head dim 256 with a window": Case("band", 256, 256, 2, WINDOW, refused_on=(10,)),
    "head dim 256 with a softcap": Case("triangle", 256, 256, 2, AttentionSpec(softcap=30.0), refused_on=(10,)),
    "head dim 192": Case("triangle", 192, 192, 2, refused_on=(10,)),
    "head dim 256 and 128": Case("triangle", 256, 128, 2, refused_on=(10,)),
}


def compile_case(case: Case) -> None:
    """Run forward and backward on fake CUDA tensors, with keys that are views of one buffer, as in a ring."""
    (tokens, tasks), dtype, heads = block(case.tasks), torch.bfloat16, 4
    kernel, kv_heads, sizes = FlashAttn4Kernel(), case.kv_heads, (case.head_dim, case.v_head_dim)
    launches = kernel.lower(tasks, CPU, dtype)
    with FakeTensorMode(), DispatchedOps():
        launches = tuple(on_cuda(launch) for launch in launches)
        q = torch.empty(tokens, heads, sizes[0], device=CUDA, dtype=dtype)
        dout = torch.empty(tokens, heads, sizes[1], device=CUDA, dtype=dtype)
        kv = torch.empty(tokens, kv_heads * sum(sizes), device=CUDA, dtype=dtype).split(
            [kv_heads * x for x in sizes], 1
        )
        k, v = (x.unflatten(1, (kv_heads, size)) for x, size in zip(kv, sizes, strict=True))
        total, sums = AttentionSum(q, sizes[1]), (GradientSum(q), GradientSum(k), GradientSum(v))
        attend(kernel, launches, q, k, v, case.spec, total, {})
        out, lse = total.result()
        attend_backward(kernel, launches, dout, q, k, v, out.to(dtype), lse, case.spec, sums, None, {})
        assert (out.shape, lse.shape) == ((tokens, heads, sizes[1]), (tokens, heads))
        assert [x.total.shape for x in sums] == [q.shape, k.shape, v.shape]


def main(major: int, names: list[str]) -> None:
    for name, case in CASES.items():
        if names and name not in names:
            continue
        refusal = FlashAttn4Kernel().refuses(
            case.spec, Device("cuda", (major, 0)), torch.bfloat16, case.head_dim, case.v_head_dim
        )
        try:
            compile_case(case)
            raised = "compiles"
        except Exception as error:
            raised = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"{name} | {'refused' if refusal else 'taken'} | {raised}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
