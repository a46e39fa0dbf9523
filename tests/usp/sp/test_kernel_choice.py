"""Training takes the kernel that a plan for the same GPU assumes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from usp.attention import AttentionSpec, HeadPlan, SequenceLayout, UnifiedPlan
from usp.attention.kernels.flash import FlashAttn2Kernel, FlashAttn3Kernel, FlashAttn4Kernel
from usp.attention.kernels.sdpa import CudnnKernel
from usp.parallel import load_hardware
from usp.sp.kernel_choice import PACKED, choose_head_groups, choose_kernel, kernel_on

NAMES = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB", "b200": "NVIDIA B200"}


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)


@pytest.mark.parametrize(
    ("node", "one_document", "packed"),
    [("h100", "cudnn", "aten-flash"), ("a100", "aten-flash", "aten-flash"), ("b200", "cudnn", "aten-flash")],
)
def test_training_takes_what_a_plan_assumes(
    monkeypatch: pytest.MonkeyPatch, node: str, one_document: str, packed: str
) -> None:
    hardware = load_hardware(node)
    assert hardware.compute_capability is not None
    pretend(monkeypatch, NAMES[node], hardware.compute_capability)
    for spec, wanted in ((AttentionSpec(), one_document), (PACKED, packed)):
        for ring in (1, 4):
            call = "auto", spec, torch.bfloat16, 128, 128, SequenceLayout("zigzag", 8192, ring=ring)
            kernel, line, _ = choose_kernel(*call[:2], torch.device("cuda"), *call[2:])
            assert kernel.name == wanted == kernel_on(hardware, *call).name
            assert line.startswith(f"attention kernel: {wanted}; flash-attn-")  # why not a package
            assert line.endswith(f"is not installed; by the rates of {hardware.name}")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ulysses", "ring", "seq_len", "groups"),
    [
        (32, 32, 8, 1, 131072, 3),
        (32, 8, 2, 4, 131072, 2),
        (32, 8, 8, 1, 131072, 1),  # a rank has one KV head
        (64, 8, 4, 2, 2048, 1),  # messages are short, and launches are not hidden
    ],
)
def test_head_groups_are_taken_where_they_pay(
    heads: int, kv_heads: int, ulysses: int, ring: int, seq_len: int, groups: int
) -> None:
    hardware, layout = load_hardware("h100"), SequenceLayout("zigzag", seq_len, ring, ulysses)
    exchanging = [range(first, first + ulysses) for first in range(0, ring * ulysses, ulysses)]
    for rank in range(ulysses):
        plan = UnifiedPlan.make(layout, AttentionSpec(), HeadPlan(heads, kv_heads, ulysses), 1, 0, rank)
        call = plan, CudnnKernel(), 128, 128, torch.bfloat16, exchanging, ulysses * ring
        assert choose_head_groups(hardware, *call) == groups


def test_a_gpu_without_a_node_has_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA GeForce RTX 4090", (8, 9))
    kernel, line, warning = choose_kernel("auto", AttentionSpec(), torch.device("cuda"), torch.bfloat16, 128, 128)
    assert kernel.name == "aten-flash" and "rates" not in line and not warning


def test_a_faster_package_that_is_not_installed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, NAMES["b200"], (10, 0))
    call = torch.device("cuda"), torch.bfloat16, 192, 128
    *_, warning = choose_kernel("auto", PACKED, *call)
    assert warning == (
        "attention runs on aten-flash; on NVIDIA B200, flash-attn-4 would be 3.6 times as fast: "
        "pip install --pre flash-attn-4"
    )
    assert choose_kernel("sdpa", PACKED, *call)[2] == ""  # what was asked for
    monkeypatch.setattr(FlashAttn4Kernel, "missing", lambda _: None)
    assert choose_kernel("auto", PACKED, *call)[2] == ""


PACKAGES = {"2": FlashAttn2Kernel, "3": FlashAttn3Kernel, "4": FlashAttn4Kernel}
MASKS = {
    "causal": AttentionSpec(),
    "packed": PACKED,
    "window": AttentionSpec(window=(4095, 0)),
    "prefix": AttentionSpec(prefixes=((4,),)),
    "softcap": AttentionSpec(softcap=30.0),
}
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
GOLDEN = Path(__file__).with_name("kernel_choice.txt")


def table(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the choice on every node: a line for each set of flash-attn packages and mask, a column for each pair of
    head dims."""
    lines = [f"{'node':5} {'flash':6} {'mask':8} " + " ".join(f"{f'{h}, {v}':12}" for h, v in HEAD_DIMS)]
    for node, installed, (name, spec) in product(
        ("a100", "h100", "h200", "b200"), ("", "2", "3", "4", "234"), MASKS.items()
    ):
        for number, kernel in PACKAGES.items():
            reason = None if number in installed else "not installed"
            monkeypatch.setattr(kernel, "missing", lambda _, reason=reason: reason)
        layout, hardware = SequenceLayout("zigzag", 65536), load_hardware(node)
        names = [kernel_on(hardware, "auto", spec, torch.bfloat16, *dims, layout).name for dims in HEAD_DIMS]
        lines.append(f"{node:5} {installed or 'none':6} {name:8} " + " ".join(f"{each:12}" for each in names))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def test_the_choice_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write `table` to kernel_choice.txt after a change that means to change it."""
    assert table(monkeypatch) == GOLDEN.read_text()
