"""Every back end on blocks of tasks, against the definition of the mask; the CUDA back ends need a GPU."""

from __future__ import annotations

from functools import cache
from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from usp.attention import AttentionSpec, Kernel, Task, check_kernel_name, select_kernel
from usp.attention.accumulate import AttentionSum, GradientSum
from usp.attention.bands import tight_task
from usp.attention.kernels.base import Device, attend, attend_backward
from usp.attention.kernels.dense import CHUNK, DenseLaunch, DenseLowering, band_mask
from usp.attention.kernels.flash import FlashAttn2Kernel, FlashAttn3Kernel, FlashAttn4Kernel
from usp.attention.kernels.reference import ReferenceKernel
from usp.attention.kernels.sdpa import LEAF, CpuFlashKernel, CudnnKernel, EfficientKernel
from usp.attention.kernels.varlen import AtenFlashKernel, VarlenLaunch, lower_varlen

from .dense import dense_attention, dense_lse, relative_l2, worst

CPU, HEADS, KV_HEADS, HEAD_DIM = torch.device("cpu"), 4, 2, 32
BLOCKS = {
    "triangle": (700, [(0, 700, 0, 700, 0, None)]),
    "odd triangle behind a rectangle": (517, [(3, 517, 0, 517, 0, None)]),
    "band": (400, [(0, 400, 0, 400, 0, 100)]),
    "wide two-sided band": (300, [(0, 300, 0, 300, -130, 120)]),  # more than a tile of the reference kernel
    "more rows than keys": (700, [(200, 700, 0, 150, 250, None)]),
    "upper triangle": (600, [(0, 600, 0, 600, None, 0)]),
    "full and a triangle": (300, [(0, 150, 0, 300, None, None), (150, 300, 0, 150, 150, None)]),
    "documents of one and two tokens": (
        150,
        [(3 * i + a, 3 * i + b, 3 * i + a, 3 * i + b, 0, None) for i in range(50) for a, b in ((0, 1), (1, 3))],
    ),
    "ragged documents": (200, [(a, b, a, b, 0, None) for a, b in ((0, 3), (3, 70), (70, 199), (199, 200))]),
    "rows in several tiny tasks": (64, [(0, 64, 0, 20, None, None), (10, 64, 30, 50, None, None)]),
    "rows that see nothing": (50, [(20, 30, 0, 50, None, None)]),
    "tiny bands": (90, [(30 * i, 30 * i + 20, 30 * i, 30 * i + 20, -3, 2) for i in range(3)]),
    "single keys": (60, [(0, 60, 5, 6, None, None), (0, 60, 9, 10, None, None)]),
    "single queries": (60, [(5, 6, 0, 60, None, None), (9, 10, 2, 50, None, None)]),
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


@patch("usp.attention.kernels.reference.TILE", 256)
@patch("usp.attention.kernels.dense.CHUNK", 64)
def errors(
    kernel: Kernel,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    spec: AttentionSpec,
    v_head_dim: int = HEAD_DIM,
    head_dim: int = HEAD_DIM,
    with_dlse: bool = False,
) -> list[float]:
    """Return the relative L2 errors of out, dq, dk, dv. with_dlse: lse has a gradient too."""
    (q, k, v, dout, dlse), wanted = exact(name, dtype, spec, v_head_dim, head_dim, with_dlse)
    _, tasks = block(name)
    q, k, v, dout, dlse = (x.to(device) for x in (q, k, v, dout, dlse))
    launches, total = kernel.lower(tasks, device, dtype), AttentionSum(q, v_head_dim)
    attend(kernel, launches, q, k, v, spec, total, {})
    out, lse = total.result()
    sums = GradientSum(q), GradientSum(k), GradientSum(v)
    attend_backward(kernel, launches, dout, q, k, v, out.to(dtype), lse, spec, sums, dlse if with_dlse else None, {})
    found = [out, *(gradient.total for gradient in sums)]
    if not tasks:
        assert not any(x.any() for x in found)
        return [0.0]
    return [relative_l2(x.cpu(), y.squeeze(0)) for x, y in zip(found, wanted, strict=True)]


@cache
def exact(
    name: str, dtype: torch.dtype, spec: AttentionSpec, v_head_dim: int, head_dim: int, with_dlse: bool = False
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return q, k, v, dout, dlse, and out, dq, dk, dv of dense fp64 attention; computed once for all kernels."""
    tokens, tasks = block(name)
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, head_dim), (KV_HEADS, head_dim), (KV_HEADS, v_head_dim), (HEADS, v_head_dim))
    inputs = tuple(torch.randn(tokens, *size, generator=generator).to(dtype) for size in sizes)
    q, k, v, dout = (x.double().unsqueeze(0) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seen = seen_by(tokens, tasks).unsqueeze(0)
    out = dense_attention(*leaves, seen, scale=spec.scale, softcap=spec.softcap)
    dlse = torch.randn(tokens, HEADS, generator=generator) * seen[0].any(1, keepdim=True)
    lse = dense_lse(leaves[0], leaves[1], seen, scale=spec.scale, softcap=spec.softcap)
    ((out * dout).sum() + (lse * dlse).sum() * with_dlse).backward()
    return (*inputs, dlse), (out.detach(), *(x.grad for x in leaves))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13), (torch.bfloat16, 1e-2)], ids=str
)
@pytest.mark.parametrize("kernel", [ReferenceKernel(), CpuFlashKernel()], ids=lambda k: k.name)
def test_cpu_kernels_match_dense_attention(kernel: Kernel, name: str, dtype: torch.dtype, tolerance: float) -> None:
    assert worst(errors(kernel, name, dtype, CPU, AttentionSpec())) <= tolerance


@pytest.mark.parametrize("name", list(BLOCKS)[::3])
@pytest.mark.parametrize(("v_head_dim", "scale"), [(16, 0.1), (40, None)])
@pytest.mark.parametrize("kernel", [ReferenceKernel(), CpuFlashKernel()], ids=lambda k: k.name)
def test_cpu_kernels_with_another_head_dim_of_v(
    kernel: Kernel, v_head_dim: int, scale: float | None, name: str
) -> None:
    assert worst(errors(kernel, name, torch.float32, CPU, AttentionSpec(scale=scale), v_head_dim)) <= 1e-6


@pytest.mark.parametrize("name", list(BLOCKS)[::3])
@pytest.mark.slow
def test_reference_kernel_with_softcap_matches_dense_attention(name: str) -> None:
    assert worst(errors(ReferenceKernel(), name, torch.float32, CPU, AttentionSpec(softcap=2.0))) <= 1e-6


@pytest.mark.parametrize("name", ["triangle", "band", "rows that see nothing", "single keys"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("kernel", [ReferenceKernel(), CpuFlashKernel()], ids=lambda k: k.name)
def test_cpu_kernels_with_a_gradient_of_lse(kernel: Kernel, dtype: torch.dtype, tolerance: float, name: str) -> None:
    assert worst(errors(kernel, name, dtype, CPU, AttentionSpec(), 16, with_dlse=True)) <= tolerance


@pytest.mark.parametrize(
    ("queries", "heads", "folded"), [(256, (8, 2), 4), (400, (4, 2), 2), (256, (8, 1), 4), (128, (8, 2), 1)]
)
@pytest.mark.slow
def test_query_heads_folded_into_queries_lose_no_accuracy(queries: int, heads: tuple[int, int], folded: int) -> None:
    generator = torch.Generator().manual_seed(0)
    counts = ((queries, heads[0]), (320, heads[1]), (320, heads[1]), (queries, heads[0]))
    q, k, v, dout = (torch.randn(1, *count, 64, generator=generator).bfloat16() for count in counts)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    dense_attention(*leaves, torch.ones(1, queries, 320, dtype=torch.bool)).backward(dout.double())
    kernel, spec, found = CpuFlashKernel(), AttentionSpec(causal=False), []
    (launch,) = kernel.lower([Task(0, queries, 0, 320)], torch.device("cpu"), q.dtype)
    assert kernel._folded(q.transpose(1, 2), heads[1], launch) == folded
    call = (dout, q, k, v, *kernel.forward(q, k, v, launch, spec), launch, spec)
    found.append(kernel.backward(*call))
    with patch.object(CpuFlashKernel, "_folded", lambda *_: 1):
        found.append(kernel.backward(*call))
    for ours, apart, leaf in zip(*found, leaves, strict=True):
        assert relative_l2(ours, leaf.grad) <= min(1.2 * relative_l2(apart, leaf.grad), 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [
        (AtenFlashKernel(), torch.bfloat16, 1e-2),
        (CudnnKernel(), torch.bfloat16, 1e-2),
        (EfficientKernel(), torch.float32, 1e-5),
        (EfficientKernel(), torch.bfloat16, 1e-2),
        (FlashAttn2Kernel(), torch.bfloat16, 1e-2),
        (FlashAttn3Kernel(), torch.bfloat16, 1e-2),
        (FlashAttn4Kernel(), torch.bfloat16, 1e-2),
        (ReferenceKernel(), torch.float32, 1e-5),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize("v_head_dim", [HEAD_DIM, 16, 40])
def test_cuda_kernels_match_dense_attention(
    kernel: Kernel, dtype: torch.dtype, tolerance: float, v_head_dim: int
) -> None:
    device = torch.device("cuda")
    refusal = kernel.refuses(AttentionSpec(), Device.of(device), dtype, HEAD_DIM, v_head_dim) or kernel.missing()
    if refusal is not None:
        pytest.skip(refusal)
    calls = list(product(BLOCKS, (False, True)))  # with a gradient of lse, too
    found = [errors(kernel, name, dtype, device, AttentionSpec(), v_head_dim, with_dlse=dlse) for name, dlse in calls]
    assert not {call: each for call, each in zip(calls, found, strict=True) if not worst(each) <= tolerance}


@pytest.mark.parametrize("name", BLOCKS)
def test_varlen_launches_cover_the_pairs_of_the_tasks(name: str) -> None:
    """Check the variable-length lowering without its GPU kernels, by FlashAttention's documented alignment rule."""
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
            assert min(launch.left, launch.right) >= -1  # no limit
            if launch.left >= 0:
                inside &= -ahead <= launch.left
            if launch.right >= 0:
                inside &= ahead <= launch.right
            counted[q.unsqueeze(1), k] += inside.int()
    assert torch.equal(counted, seen_by(tokens, tasks).int())


bands = st.tuples(st.integers(0, 900), st.integers(1, 700), st.integers(0, 900), st.integers(1, 700))
limits = st.none() | st.integers(-900, 900)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.tuples(bands, limits, limits), max_size=3), st.sampled_from((None, LEAF)))
def test_dense_launches_cover_the_pairs_of_the_tasks(rectangles: list, leaf: int | None) -> None:
    """Check bands of any shape, split into the rectangles, triangles and masks of the dense kernels."""
    found = [tight_task(q, q + n, k, k + m, low, high) for (q, n, k, m), low, high in rectangles]
    tasks = tuple(task for task in found if task is not None)
    wanted, counted = torch.zeros(1600, 1600, dtype=torch.int), torch.zeros(1600, 1600, dtype=torch.int)
    for task in tasks:
        inside = band_mask(task.rows, task.columns, *relative_band(task))
        wanted[task.q_start : task.q_stop, task.k_start : task.k_stop] += inside.int()
    for launch in DenseLowering(CPU, torch.float32, leaf).lower(tasks):
        assert isinstance(launch, DenseLaunch)
        queries, keys = (rows.take(torch.arange(1600)) for rows in (launch.queries, launch.keys))
        inside = torch.ones(len(queries), 1, queries.shape[1], keys.shape[1], dtype=torch.bool)
        if launch.causal:
            assert queries.shape == keys.shape
            inside = inside.tril()
        if launch.mask is not None:
            inside = inside & (launch.mask == 0)
        padded = launch.queries.valid is not None
        if not padded:  # every row of a launch except padding has a visible key
            assert inside.any(-1).all()
        for run in range(len(queries)):
            counted.index_put_((queries[run].unsqueeze(1), keys[run]), inside[run, 0].int(), accumulate=True)
    assert torch.equal(counted, wanted)


def relative_band(task: Task) -> tuple[int | None, int | None]:
    """Return the band's limits counted from the rectangle's corner."""
    offset = task.q_start - task.k_start
    lowest, highest = (None if limit is None else limit - offset for limit in (task.lowest, task.highest))
    return lowest, highest


def test_tiny_tasks_are_batched_and_masks_stay_small() -> None:
    kernel = CpuFlashKernel()
    _, documents = block("documents of one and two tokens")
    assert len(kernel.lower(documents, CPU, torch.float32)) == 1
    band = tight_task(0, 8000, 0, 8000, -3000, 2500)
    assert band is not None
    masks = [launch.mask for launch in kernel.lower((band,), CPU, torch.float32) if launch.mask is not None]
    assert masks and all(max(mask.shape) <= CHUNK for mask in masks)
    assert len({mask.data_ptr() for mask in masks}) < len(masks)  # chunks of equal shape share a mask


def test_selection_reports_the_choice_and_each_refusal() -> None:
    kernel, line = select_kernel("auto", AttentionSpec(softcap=5.0), CPU, torch.float32, 64)
    assert kernel.name == "reference"
    assert (
        "attention kernel: reference; flash-attn-4, flash-attn-3, flash-attn-2, aten-flash, cudnn, efficient refu"
        in line
        and "sdpa refused: softcap=5.0" in line
    )
    assert select_kernel("auto", AttentionSpec(), CPU, torch.bfloat16, 64)[0].name == "sdpa"


def test_selection_reports_padding_and_refuses_a_head_dim_of_v() -> None:
    spec = AttentionSpec()
    line = select_kernel("sdpa", spec, CPU, torch.float32, 192, 128)[1]
    assert line == "attention kernel: sdpa, v padded to head dim 192: 1.2 times the forward's FLOPs"
    for kernel, remark in (
        (FlashAttn2Kernel, ", v padded to head dim 192: 1.2 times the forward's FLOPs"),
        (FlashAttn3Kernel, ", v padded to head dim 192: 1.2 times the backward's FLOPs"),
        (FlashAttn4Kernel, ""),
    ):
        with patch.object(kernel, "missing", lambda _: None):
            line = select_kernel(f"flash{kernel.name[-1]}", spec, HOPPER, torch.bfloat16, 192, 128)[1]
        assert line == f"attention kernel: {kernel.name}{remark}"
    assert "sdpa, q and k padded to head dim 128" in select_kernel("sdpa", spec, CPU, torch.float32, 64, 128)[1]
    assert select_kernel("reference", spec, CPU, torch.float32, 192, 128)[1] == "attention kernel: reference"
    assert select_kernel("sdpa", spec, CPU, torch.float32, 64, 64)[1] == "attention kernel: sdpa"
    reason = AtenFlashKernel().refuses(spec, Device("cuda"), torch.bfloat16, 192, 260)
    assert reason == "v_head_dim=260 must be a multiple of 8, at most 256"


HOPPER, RATES = Device("cuda", (9, 0)), {"flash-attn-4": 1.0, "flash-attn-3": 2.0, "cudnn": 3.0, "flash-attn-2": 4.0}


def chosen(name: str = "auto", spec: AttentionSpec | None = None, device: Device = HOPPER, head_dim: int = 128) -> str:
    """Return the line of the choice for bfloat16 by `RATES`."""
    cost = lambda kernel: RATES.get(kernel.rated_as or kernel.name)  # noqa: E731
    return select_kernel(name, spec or AttentionSpec(), device, torch.bfloat16, head_dim, cost=cost)[1]


def test_auto_takes_the_fastest_that_can_do_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = "flash-attn-4 refused: the package flash-attn-4 is not installed; flash-attn-3 refused: flash-attn 3 "
    assert chosen().startswith(f"attention kernel: cudnn; {absent}")
    packed, window = AttentionSpec(documents=((0, 9, 20),)), AttentionSpec(window=(99, 0))
    for spec in (packed, window, AttentionSpec(prefixes=((4,),))):
        assert chosen(spec=spec).startswith("attention kernel: aten-flash; ")
    assert chosen(spec=AttentionSpec(documents=((0, 20, 20), (0, 18, 20)))).startswith("attention kernel: aten-flash; ")
    assert chosen(spec=AttentionSpec(documents=((0, 20, 20), (0, 18, 18)))).startswith("attention kernel: cudnn; ")
    assert "cudnn refused: head_dim=192 must be a multiple of 8, at most 128" in chosen(
        "auto", None, Device("cuda"), 192
    )
    for kernel in (FlashAttn4Kernel, FlashAttn3Kernel, FlashAttn2Kernel):
        monkeypatch.setattr(kernel, "missing", lambda _: None)
    assert chosen() == chosen(spec=packed) == chosen("flash") == "attention kernel: flash-attn-4"
    assert chosen("flash2") == "attention kernel: flash-attn-2"
    assert chosen(head_dim=256) == "attention kernel: flash-attn-4"
    assert chosen(device=Device("cuda", (10, 0)), head_dim=192) == (
        "attention kernel: flash-attn-2; flash-attn-4 refused: head dims (192, 192) must be at most 128, (192, 128) or "
        "(256, 256) on compute capability 10.x; flash-attn-3 refused: needs a GPU of compute capability 9.x, this has "
        "10.0; cudnn refused: head_dim=192 must be a multiple of 8, at most 128"
    )
    assert chosen(device=Device("cuda", (8, 0))).startswith(
        "attention kernel: cudnn; flash-attn-4 refused: needs a GPU of"
    )
    assert chosen(spec=AttentionSpec(softcap=5.0)) == "attention kernel: flash-attn-4"


def test_torchs_own_flash_attention_is_not_taken_for_what_another_package_made_of_it() -> None:
    with patch("usp.attention.kernels.varlen.current_flash_attention_impl", lambda: "FA3"):
        line = select_kernel("sdpa", AttentionSpec(), HOPPER, torch.bfloat16, 128)[1]
    refusal = (
        "aten-flash refused: torch.nn.attention.activate_flash_attention_impl('FA3') replaced its ops in this process"
    )
    assert refusal in line and line.startswith("attention kernel: efficient; ")


def test_a_run_elsewhere_may_have_other_packages() -> None:
    def planned(name: str, device: Device) -> str:
        return select_kernel(name, AttentionSpec(), device, torch.bfloat16, 128, planned=True)[1]

    assert planned("flash3", HOPPER) == "attention kernel: flash-attn-3; its package is not installed here"
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability 9\.x, this has 10\.0"):
        planned("flash3", Device("cuda", (10, 0)))


def test_a_named_kernel_has_no_fallback() -> None:
    with pytest.raises(ValueError, match=r"kernel='sdpa' cannot compute this call \(sdpa refused: softcap=5.0"):
        select_kernel("sdpa", AttentionSpec(softcap=5.0), CPU, torch.float32, 64)
    with pytest.raises(ValueError, match=r"cudnn refused: runs on cuda, but the tensors are on cpu"):
        select_kernel("cudnn", AttentionSpec(), CPU, torch.bfloat16, 64)
    with pytest.raises(ValueError, match=r"kernel='falsh' is unknown \(did you mean 'flash'\?\)"):
        check_kernel_name("falsh")
