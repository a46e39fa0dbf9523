"""Training takes the kernel that a plan for the same GPU assumes."""

from __future__ import annotations

import pytest
import torch

from attention import AttentionSpec, SequenceLayout
from parallel import load_hardware
from usp.sp.kernel_choice import PACKED, choose_kernel, kernel_on

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
            kernel, line = choose_kernel(*call[:2], torch.device("cuda"), *call[2:])
            assert kernel.name == wanted == kernel_on(hardware, *call).name
            assert line.startswith(f"attention kernel: {wanted}; flash-attn-")  # why not a package
            assert line.endswith(f"is not installed; by the rates of {hardware.name}")


def test_a_gpu_without_a_node_has_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA GeForce RTX 4090", (8, 9))
    kernel, line = choose_kernel("auto", AttentionSpec(), torch.device("cuda"), torch.bfloat16, 128, 128)
    assert kernel.name == "aten-flash" and "rates" not in line
