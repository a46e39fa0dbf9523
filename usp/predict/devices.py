"""The devices of a run: their hardware, and how much of their memory can be used."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import psutil
import torch

from usp.parallel import Hardware, load_hardware, node_of
from usp.run.launch import Launch

USABLE = 0.9  # of a device's memory: the rest is for fragmentation, the CUDA context and NCCL's buffers
USABLE_HOST = 0.9  # of a host's memory: the rest is for the system, processes and the page cache


class Memory(NamedTuple):
    """Bytes of a device, and of a host, whose devices share them."""

    device: float
    host: float = math.inf


def usable(hardware: Hardware) -> Memory:
    """Return the bytes that a run can use."""
    return Memory(USABLE * hardware.memory_bytes, USABLE_HOST * hardware.host_memory_bytes)


def hardware_here(name: str, device: torch.device, launch: Launch) -> Hardware:
    """Load --hardware; `auto` is the node of this GPU, with this GPU's and this host's memory and this run's ranks
    per host. Raise ValueError for unknown hardware."""
    if name != "auto":
        return load_hardware(name)
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    node = node_of(here)
    if node is None:
        raise ValueError(
            f"--hardware auto does not know {here}: measure it with torchrun ... -m usp calibrate --out hardware.json, "
            f"then use --hardware hardware.json"
        )
    memory = device_memory_bytes(device, launch.local_world_size)
    known = replace(load_hardware(node), memory_bytes=memory, host_memory_bytes=psutil.virtual_memory().total)
    return of_launch(known, device, launch)


def of_launch(hardware: Hardware, device: torch.device, launch: Launch) -> Hardware:
    """Return the hardware with the ranks per host of a launch, and no more memory than its devices have."""
    inner, *outer = hardware.tiers
    return replace(
        hardware,
        tiers=(replace(inner, devices=launch.local_world_size), *outer) if inner.devices else hardware.tiers,
        memory_bytes=min(device_memory_bytes(device, launch.local_world_size), hardware.memory_bytes),
        host_devices=launch.local_world_size,
    )


def device_memory_bytes(device: torch.device, ranks_per_host: int) -> int:
    """Return a device's memory; on a CPU a rank's share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // ranks_per_host
