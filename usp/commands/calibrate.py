"""python -m usp calibrate: measure this machine for --hardware."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch.distributed as dist
import tyro
from tyro.conf import arg

from usp.fields import AtLeast1, value_violations
from usp.parallel import load_hardware
from usp.run.launch import Launch, choose_device, process_group, set_library_defaults
from usp.run.output import warn

from .flags import check, output_problem


@dataclass(frozen=True)
class CalibrateConfig:
    """Measure compute, memory and link speeds, and write them to a hardware file for --hardware.

    For example, on 8 ranks: torchrun --nproc-per-node 8 -m usp calibrate --out machine.json
    """

    out: Annotated[Path, arg(metavar="FILE.json")]
    """Hardware file to write."""
    name: str = "this machine"
    """Name of the machine in reports."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type. auto: CUDA if available, otherwise CPU."""
    heads: AtLeast1 = 8
    """Attention heads of the benchmark."""
    head_dim: AtLeast1 = 64
    """Head dimension of the benchmark."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    """Measure on every rank that torchrun launched, or in this process only, and write the file on rank 0."""
    asked = tyro.cli(CalibrateConfig, args=argv, prog=prog)
    from usp.predict.calibrate import Plan, cautions, contents, measure

    check(*value_violations(asked).values(), output_problem("--out", asked.out))
    launch = Launch.from_environment(environ)
    set_library_defaults(launch, environ)
    device = choose_device(asked.device, launch)
    with process_group(launch, device):
        plan = Plan.of(device, launch.local_world_size, asked.heads, asked.head_dim)
        found = contents(plan, asked.name, measure(plan))
        if launch.rank == 0:
            asked.out.write_text(json.dumps(found, indent=1) + "\n")
            hardware = load_hardware(str(asked.out))
            peaks = ", ".join(f"{peak / 1e9:,.1f} GFLOP/s in {dtype}" for dtype, peak in hardware.peak_flops.items())
            print(f"{asked.out}: {peaks}; memory {hardware.memory_bytes_per_second / 1e9:,.1f} GB/s")
            for tier in hardware.tiers:
                link = tier.send
                print(f"  {tier.name}: {link.bytes_per_second / 1e9:.3f} GB/s, {link.alpha_seconds * 1e6:.0f} us")
            for caution in cautions(found):
                warn(f"{asked.out}: {caution}")
        dist.barrier()
