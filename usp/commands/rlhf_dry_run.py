"""python -m usp rlhf-dry-run: the model calls of an RLHF step on a simulated rank, without devices."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from rich.console import Console

from usp.rlhf.config import RLHF_UNPREDICTED, RlhfConfig
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch

from .flags import as_kind, check_world_size, parse


@dataclass(frozen=True)
class RlhfDryRunConfig(RlhfConfig):
    """Run the model calls of an RLHF step on one rank without devices, and report the memory and traffic of each.

    For example: python -m usp rlhf-dry-run runs/last/config.yaml --world-size 64 --dp-shard -1 --sp-ulysses 8
    """

    world_size: int = 0
    """Number of ranks to simulate."""
    ranks_per_host: int = 8
    """Ranks on each host; the heuristic plan depends on it."""
    rank: int = 0
    """Rank to report on."""
    json: bool = False
    """Print JSON, with sizes in bytes."""


def main(argv: Sequence[str], environ: MutableMapping[str, str], prog: str) -> None:
    asked = parse(argv, RlhfDryRunConfig, prog, leading_config=True, without=RLHF_UNPREDICTED)
    check_world_size(asked.world_size)
    if not 0 <= asked.rank < asked.world_size:
        raise ConfigurationError(
            f"--rank = {asked.rank} must be one of the {asked.world_size} ranks: 0 to {asked.world_size - 1}"
        )
    if asked.ranks_per_host < 1:
        raise ConfigurationError(f"--ranks-per-host = {asked.ranks_per_host} must be at least 1")
    from usp.rlhf.dry_run import dry_run_calls, render_calls
    from usp.rlhf.prepare import prepare

    device = "cpu" if asked.device == "cpu" else "cuda"
    dtype = asked.dtype if asked.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    # Checked as a run on the CPU: there may be no other device here, and no step is run.
    config = replace(
        as_kind(asked, RlhfConfig), device="cpu", dtype=dtype, attention_kernel="auto", output="", resume=""
    )
    hosts = min(asked.ranks_per_host, asked.world_size)
    run = prepare(config, Launch(asked.rank, asked.world_size, local_world_size=hosts))
    roles = {role: replace(spec, kernel=asked.attention_kernel) for role, spec in run.roles.items()}
    calls = dry_run_calls(replace(run, roles=roles), torch.device(device))
    if asked.json:
        print(json.dumps([asdict(call) | {"peak_bytes": call.peak_bytes} for call in calls], indent=2))
    else:
        console = Console()
        console.print(f"rank {asked.rank} of {asked.world_size}: {asked.algorithm}, {dtype} on {device}")
        console.print(render_calls(calls))
