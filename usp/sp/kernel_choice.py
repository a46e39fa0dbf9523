"""The attention kernel of a call, and its groups of heads, by the rates that a hardware file states: on this machine,
and on a described one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import torch

from usp.attention import AttentionSpec, Device, Kernel, SequenceLayout, UnifiedPlan, select_kernel
from usp.attention.kernels.select import faster_if_installed
from usp.parallel import Hardware, load_hardware, node_of, overlap_of, transfer_seconds

PACKED = AttentionSpec(documents=((0, 1, 2),))  # several documents in a row, as most batches have
PRODUCTS = (2, 5)  # of forward and backward, whose times a choice weighs
GROUP_LAUNCHES = 20  # operators of both passes that each group of heads adds: kernels, exchanges, copies around them


def choose_kernel(
    name: str,
    spec: AttentionSpec,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    v_head_dim: int,
    layout: SequenceLayout | None = None,
    many_lengths: bool = False,
) -> tuple[Kernel, str, str]:
    """Return the kernel of calls on this device, the line that names it and those refused before it, and a warning if
    a package that is not installed would be faster, else an empty one.

    `auto` and `flash` take the fastest that can, by the rates of this kind of GPU (`parallel/cluster/nodes`); devices
    without a node have a fixed order. layout: of the sequence, None for a long one on a single rank.

    many_lengths, and the ValueError that is raised: as `select_kernel`.
    """
    call = spec, device, dtype, head_dim, v_head_dim
    here = node_here(device)
    if here is None:
        return *select_kernel(name, *call, many_lengths=many_lengths), ""
    cost = partial(_relative_seconds, here, spec, layout)
    kernel, line = select_kernel(name, *call, cost=cost, many_lengths=many_lengths)
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


def choose_head_groups(
    hardware: Hardware,
    plan: UnifiedPlan,
    kernel: Kernel,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    exchanging: Sequence[Sequence[int]],
    world_size: int,
) -> int:
    """Return in how many groups of heads a call is fastest: all ranks find the same.

    One group is exchanged, computed and exchanged back. With more, only the first one's arrival and the last one's
    results are exposed, and what takes longer than the compute of a group; every group adds messages and launches.

    exchanging: the global ranks of each group of ulysses ranks, which exchange at once.
    """
    heads, name = plan.heads, str(dtype).removeprefix("torch.")
    most = min(width for width in map(heads.kv_width, range(heads.ulysses)) if width)
    together = not plan.of_itself or (plan.spec.function is not None and plan.spec.function.by_head)
    if heads.ulysses == 1 or most == 1 or name not in hardware.peak_flops or together:
        return 1
    layout, ranks = plan.layout, range(world_size)
    wire = replace(plan, ulysses_rank=0).wire_bytes(head_dim, dtype, v_head_dim)
    passes = (wire.seq_to_heads, wire.heads_to_seq), (wire.dout_to_heads, wire.grads_to_seq)
    per_pair = 2.0 * max(head_dim, v_head_dim) * heads.q_width(0)
    flops, free = per_pair * _pairs(plan) / layout.ring, min(overlap_of(hardware, each) for each in exchanging)

    def exchange(nbytes: float) -> float:
        steps = heads.ulysses - 1
        return max(transfer_seconds(hardware, each, "exchange", nbytes, steps, ranks) for each in exchanging)

    def seconds(groups: int) -> float:
        total = groups * GROUP_LAUNCHES * hardware.launch_seconds
        for number, (arriving, leaving) in enumerate(passes):
            late, full = bool(number), layout.ring > 1 or not plan.spec.causal
            work = PRODUCTS[number] * flops / groups
            compute = hardware.attention_seconds(
                kernel.rated_as or kernel.name, work, layout.ring_len, name, backward=late, full=full
            )
            first, last = exchange(arriving / groups), exchange(leaving / groups)
            beside = [first * (at + 1 < groups) + last * (at > 0) for at in range(groups)]
            slower = (1 - free) * sum(min(compute, each) for each in beside)
            total += first + last + slower + sum(max(compute, each) for each in beside)
        return total

    return min(range(1, most + 1), key=lambda groups: (seconds(groups), groups))


def _pairs(plan: UnifiedPlan) -> float:
    """Return about how many pairs of a query and a key are visible, in all rows."""
    spec, pairs = plan.spec, 0.0
    reach = spec.window[0] + 1 if spec.window[0] >= 0 else math.inf
    for row in range(plan.batch):
        for start, stop in pairwise(spec.row_documents(row, plan.layout.seq_len)):
            length = stop - start
            pairs += length * min(reach, length / 2 if spec.causal else length)
    return pairs


def node_here(device: torch.device) -> Hardware | None:
    """Return the known node with the GPU of this process, None for others."""
    here = device.type == "cuda" and torch.cuda.is_available()
    return node_on(torch.cuda.get_device_name(device)) if here else None


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
