"""The attention kernel of a call, by the rates that a hardware file states: on this machine, and on a described one."""

from __future__ import annotations

import math
from functools import cache, partial

import torch

from attention import AttentionSpec, Device, Kernel, SequenceLayout, select_kernel
from attention.kernels.select import faster_if_installed
from parallel import Hardware, load_hardware, node_of

PACKED = AttentionSpec(documents=((0, 1, 2),))  # several documents in a row, as most batches have
PRODUCTS = (2, 5)  # of forward and backward, whose times a choice weighs


def choose_kernel(
    name: str,
    spec: AttentionSpec,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    layout: SequenceLayout | None = None,
) -> tuple[Kernel, str, str]:
    """Return the kernel of calls on this device, the line that names it and those refused before it, and a warning if
    a package that is not installed would be faster, else an empty one.

    `auto` and `flash` take the fastest that can, by the rates of this kind of GPU (`parallel/cluster/nodes`); devices
    without a node have a fixed order. layout: of the sequence, None for a long one on a single rank.

    Raises ValueError as `select_kernel`.
    """
    call = spec, device, dtype, head_dim, v_head_dim
    here = node_on(torch.cuda.get_device_name(device)) if device.type == "cuda" and torch.cuda.is_available() else None
    if here is None:
        return *select_kernel(name, *call), ""
    cost = partial(_relative_seconds, here, spec, layout)
    kernel, line = select_kernel(name, *call, cost=cost)
    faster = faster_if_installed(kernel, name, call, cost)
    warning = f"attention runs on {kernel.name}; on {here.device}, {faster}" if faster else ""
    return kernel, f"{line}; by the rates of {here.name}", warning


def kernel_on(
    hardware: Hardware,
    name: str,
    spec: AttentionSpec,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    layout: SequenceLayout,
) -> Kernel:
    """Return the kernel that `choose_kernel` would take on `hardware`, with the packages that are installed here. A
    package that `name` asks for need not be installed. Raises ValueError as `select_kernel`."""
    device = Device("cpu" if hardware.device == "CPU" else "cuda", hardware.compute_capability)
    cost = partial(_relative_seconds, hardware, spec, layout)
    return select_kernel(name, spec, device, dtype, head_dim, v_head_dim, cost=cost, planned=True)[0]


@cache
def node_on(device_name: str) -> Hardware | None:
    """Return the known node with this kind of GPU, None for others."""
    node = node_of(device_name)
    return None if node is None else load_hardware(node)


def _relative_seconds(
    hardware: Hardware, spec: AttentionSpec, layout: SequenceLayout | None, kernel: Kernel
) -> float | None:
    """Return the time of forward and backward per product and visible pair; None without rates of this kernel."""
    rates = hardware.attention.get(kernel.rated_as or kernel.name)
    if rates is None:
        return None
    ring = 1 if layout is None else layout.ring
    tokens = math.inf if layout is None else layout.ring_len
    full = ring > 1 or not spec.causal  # most blocks of a ring have no mask
    passes = (rates.efficiency(tokens, backward=backward, full=full) for backward in (False, True))
    return sum(products / part for products, part in zip(PRODUCTS, passes, strict=True))
