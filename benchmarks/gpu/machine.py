"""The machine: versions and driver, and the ceilings of products and copies."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata

import torch

from .setup import Setup, on_device

PRODUCTS = {  # m, n, k of the products of an 8B model
    "16384 x 14336 x 4096": (16384, 14336, 4096),
    "16384 x 4096 x 14336": (16384, 4096, 14336),
    "16384 x 6144 x 4096": (16384, 6144, 4096),
    "2048 x 128256 x 4096": (2048, 128256, 4096),
}
COMMANDS = {
    "nvidia-smi": ["nvidia-smi"],
    "nvidia-smi-q": ["nvidia-smi", "-q"],
    "topology": ["nvidia-smi", "topo", "-m"],
    "nvcc": ["nvcc", "--version"],
    "commit": ["git", "rev-parse", "HEAD"],
    "changes": ["git", "status", "--short"],
}


@on_device
def environment(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Write down versions, driver and device in environment.json, and multiply two matrices on the device."""
    packages = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    found = {
        "python": sys.version,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda, "config": torch.__config__.show()},
        "packages": dict(sorted(packages.items(), key=lambda item: str(item[0]).lower())),
        "variables": {k: v for k, v in os.environ.items() if k.startswith(("CUDA", "NCCL", "TORCH", "PYTORCH", "OMP"))},
        **{name: output_of(command) for name, command in COMMANDS.items()},
    }
    if setup.cuda:
        properties = torch.cuda.get_device_properties(setup.device)
        found["device"] = {name: str(getattr(properties, name)) for name in dir(properties) if name[0] != "_"}
        found["cudnn"], found["nccl"] = torch.backends.cudnn.version(), torch.cuda.nccl.version()
    (setup.folder / "environment.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    name = torch.cuda.get_device_name(setup.device) if setup.cuda else platform.processor() or platform.machine()
    yield f"{name}; Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    yield ", ".join(f"{each} {packages[each]}" for each in ("transformers", "triton", "numpy") if each in packages)
    ones = torch.ones(256, 256, device=setup.device, dtype=setup.dtype)
    yield "a product of ones, of what it is", float((ones @ ones)[0, 0]) / 256


def output_of(command: Sequence[str]) -> str:
    """Return what a command prints, or why there is nothing."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return found.stdout + found.stderr


@on_device
def ceilings(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Time products, and copies on the device and to the host."""
    for name, sizes in PRODUCTS.items():
        m, n, k = (64, 64, 64) if setup.tiny else sizes
        x, w = setup.randn(m, k), setup.randn(n, k)
        yield f"product {name}", 2 * m * n * k / setup.milliseconds(lambda x=x, w=w: x @ w.T) / 1e9  # type: ignore[misc]
        del x, w
    nbytes = 1 << (20 if setup.tiny else 30)
    x = torch.zeros(nbytes, dtype=torch.uint8, device=setup.device)
    y, host = torch.empty_like(x), torch.zeros(nbytes, dtype=torch.uint8, pin_memory=setup.cuda)
    yield "copy on the device, read and written", 2 * nbytes / setup.milliseconds(lambda: y.copy_(x)) / 1e9
    yield "copy to the host", nbytes / setup.milliseconds(lambda: host.copy_(x, non_blocking=True)) / 1e6
    yield "copy from the host", nbytes / setup.milliseconds(lambda: x.copy_(host, non_blocking=True)) / 1e6
