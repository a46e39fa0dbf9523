"""Every back end on blocks of random tasks, against the definition of its mask; on a GPU the CUDA ones too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention import AttentionSpec, Kernel, Task, check_kernel_name, select_kernel
from attention.accumulate import AttentionSum, GradientSum
from attention.bands import tight_task
from attention.kernels.base import SavedAttention, attend, attend_backward
from attention.kernels.dense import CHUNK
from attention.kernels.flash import FlashAttnKernel
from attention.kernels.reference import ReferenceKernel
from attention.kernels.sdpa import CpuFlashKernel, CudnnKernel, EfficientKernel
from attention.kernels.varlen import AtenFlashKernel, VarlenLaunch, lower_varlen

from .dense import dense_attention, relative_l2

CPU, HEADS, KV_HEADS, HEAD_DIM = torch.device("cpu"), 4, 2, 32
BLOCKS = {
    "triangle": (700, [(0, 700, 0, 700, 0, None)]),
    "odd triangle behind a rectangle": (517, [(3, 517, 0, 517, 0, None)]),
    "band": (900, [(0, 900, 0, 900, 0, 100)]),
    "wide two-sided band": (1500, [(0, 1500, 0, 1500, -700, 600)]),
    "upper triangle": (600, [(0, 600, 0, 600, None, 0)]),
    "full and a triangle": (300, [(0, 150, 0, 300, None, None), (150, 300, 0, 150, 150, None)]),
    "one-token documents": (100, [(i, i + 1, i, i + 1, 0, None) for i in range(100)]),
    "ragged documents": (200, [(a, b, a, b, 0, None) for a, b in ((0, 3), (3, 70), (70, 199), (199, 200))]),
    "rows in several tiny tasks": (64, [(0, 64, 0, 20, None, None), (10, 64, 30, 50, None, None)]),
    "rows that see nothing": (50, [(20, 30, 0, 50, None, None)]),
    "nothing": (40, []),
}


def block(name: str) -> tuple[int, tuple[Task, ...]]:
    tokens, found = BLOCKS[name]
    tasks = [tight_task(*task) for task in found]
    return tokens, tuple(task for task in tasks if task is not None)


def seen_by(tokens: int, tasks: tuple[Task, ...]) -> Tensor:
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    difference = torch.arange(tokens).unsqueeze(1) - torch.arange(tokens)
    for task in tasks:
        inside = torch.zeros_like(seen)
        inside[task.q_start : task.q_stop, task.k_start : task.k_stop] = True
        if task.lowest is not None:
            inside &= difference >= task.lowest
        if task.highest is not None:
            inside &= difference <= task.highest
        assert not (seen & inside).any()
        seen |= inside
    return seen


def errors(kernel: Kernel, name: str, dtype: torch.dtype, device: torch.device, spec: AttentionSpec) -> list[float]:
    """Relative L2 of out, dq, dk, dv."""
    tokens, tasks = block(name)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    exact = [x.double().unsqueeze(0).requires_grad_() for x in (q, k, v)]
    exact_out = dense_attention(*exact, seen_by(tokens, tasks).unsqueeze(0), softcap=spec.softcap)
    exact_out.backward(dout.double().unsqueeze(0))

    q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
    launches, total = kernel.lower(tasks, device, dtype), AttentionSum(q)
    attend(kernel, launches, q, k, v, spec, total)
    out, lse = total.result()
    sums = GradientSum(q), GradientSum(k), GradientSum(v)
    attend_backward(kernel, launches, SavedAttention(dout, q, out.to(dtype), lse), k, v, spec, *sums)
    found = [out, *(gradient.total for gradient in sums)]
    wanted = [exact_out, *(x.grad for x in exact)]
    if not tasks:
        assert not any(x.any() for x in found)
        return [0.0]
    return [relative_l2(x.cpu(), y.squeeze(0)) for x, y in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("kernel", [ReferenceKernel(), CpuFlashKernel()], ids=lambda k: k.name)
def test_cpu_kernels(kernel: Kernel, name: str, dtype: torch.dtype, tolerance: float) -> None:
    assert max(errors(kernel, name, dtype, CPU, AttentionSpec())) <= tolerance


@pytest.mark.parametrize("name", BLOCKS)
def test_reference_softcap(name: str) -> None:
    assert max(errors(ReferenceKernel(), name, torch.float32, CPU, AttentionSpec(softcap=2.0))) <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        (AtenFlashKernel(), torch.bfloat16, 1e-2),
        (CudnnKernel(), torch.bfloat16, 1e-2),
        (EfficientKernel(), torch.float32, 1e-5),
        (EfficientKernel(), torch.bfloat16, 1e-2),
        (FlashAttnKernel(), torch.bfloat16, 1e-2),
        (ReferenceKernel(), torch.float32, 1e-5),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_cuda_kernels(kernel: Kernel, dtype: torch.dtype, tolerance: float, name: str) -> None:
    device = torch.device("cuda")
    refusal = kernel.refuses(AttentionSpec(), device, dtype, HEAD_DIM)
    if refusal is not None:
        pytest.skip(refusal)
    assert max(errors(kernel, name, dtype, device, AttentionSpec())) <= tolerance


@pytest.mark.parametrize("name", BLOCKS)
def test_varlen_launches_see_the_tasks_pairs(name: str) -> None:
    """The packed form, whose kernels need a GPU, by the alignment rule that flash-attention documents."""
    tokens, tasks = block(name)
    counted = torch.zeros(tokens, tokens, dtype=torch.int)
    for launch in lower_varlen(tasks, CPU):
        assert isinstance(launch, VarlenLaunch)
        queries, keys = (rows.take(torch.arange(tokens)).flatten() for rows in (launch.queries, launch.keys))
        assert len(queries.unique()) == len(queries)
        for run in range(len(launch.cu_q) - 1):
            q, k = queries[launch.cu_q[run] : launch.cu_q[run + 1]], keys[launch.cu_k[run] : launch.cu_k[run + 1]]
            assert len(q) <= launch.max_q and len(k) <= launch.max_k
            ahead = torch.arange(len(k)) - torch.arange(len(q)).unsqueeze(1) - (len(k) - len(q))
            inside = torch.ones(len(q), len(k), dtype=torch.bool)
            if launch.left is not None:
                assert launch.left >= 0
                inside &= -ahead <= launch.left
            if launch.right is not None:
                assert launch.right >= 0  # a negative reach would be read as no limit
                inside &= ahead <= launch.right
            counted[q.unsqueeze(1), k] += inside.int()
    assert torch.equal(counted, seen_by(tokens, tasks).int())


def test_small_work_is_gathered_and_masks_stay_small() -> None:
    kernel = CpuFlashKernel()
    _, documents = block("one-token documents")
    assert len(kernel.lower(documents, CPU, torch.float32)) == 1
    band = tight_task(0, 8000, 0, 8000, -3000, 2500)
    assert band is not None
    masks = [launch.mask for launch in kernel.lower((band,), CPU, torch.float32) if launch.mask is not None]
    assert masks and all(max(mask.shape) <= CHUNK for mask in masks)
    assert len({mask.data_ptr() for mask in masks}) < len(masks)  # chunks of one shape share theirs


def test_selection_names_the_pick_and_each_refusal() -> None:
    kernel, line = select_kernel("auto", AttentionSpec(softcap=5.0), CPU, torch.float32, 64)
    assert kernel.name == "reference"
    assert "attention kernel: reference; flash-attn refused: " in line and "sdpa refused: softcap=5.0" in line
    assert select_kernel("auto", AttentionSpec(), CPU, torch.bfloat16, 64)[0].name == "sdpa"


def test_a_named_kernel_is_held_to() -> None:
    with pytest.raises(ValueError, match=r"kernel='sdpa' cannot compute this call \(sdpa refused: softcap=5.0"):
        select_kernel("sdpa", AttentionSpec(softcap=5.0), CPU, torch.float32, 64)
    with pytest.raises(ValueError, match=r"cudnn refused: runs on cuda, the tensors are on cpu"):
        select_kernel("cudnn", AttentionSpec(), CPU, torch.bfloat16, 64)
    with pytest.raises(ValueError, match=r"kernel='falsh' is unknown \(did you mean 'flash'\?\)"):
        check_kernel_name("falsh")
