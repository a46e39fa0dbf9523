"""Which of the launched processes this one is, what it computes on, and the process group that joins them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Launch:
    """A process's place: `rank` of `world_size`, and `local_rank` of the `local_world_size` on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    threads: int = 1
    rendezvous: bool = False

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> Launch:
        """What torchrun says in `environ`; one process alone where it says nothing.

        threads: this process's share of the host's cores, unless OMP_NUM_THREADS asks for another number. torchrun
        sets 1 there by itself, so 1 counts as not asked under torchrun.
        """
        launched = "RANK" in environ and "WORLD_SIZE" in environ
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", 1)) if launched else 1
        asked = int(environ.get("OMP_NUM_THREADS", 0) or 0)
        share = max(1, len(os.sched_getaffinity(0)) // local_world_size)
        return Launch(
            rank=int(environ["RANK"]) if launched else 0,
            world_size=int(environ["WORLD_SIZE"]) if launched else 1,
            local_rank=int(environ.get("LOCAL_RANK", 0)) if launched else 0,
            local_world_size=local_world_size,
            threads=share if asked == 0 or (launched and asked == 1) else asked,
            rendezvous=launched,
        )


def choose_device(device: str, launch: Launch) -> torch.device:
    """The device of this process; `auto` is CUDA where there is any.

    Raises ValueError when CUDA is asked for, or chosen, and this host has fewer GPUs than processes.
    """
    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not gpus):
        return torch.device("cpu")
    if gpus < launch.local_world_size:
        raise ValueError(
            f"--device = {device}: {launch.local_world_size} processes on this host need a GPU each, and torch sees "
            f"{gpus}. Start at most {gpus} (--nproc-per-node), or use --device cpu"
        )
    return torch.device("cuda", launch.local_rank)


@contextmanager
def process_group(launch: Launch, device: torch.device) -> Iterator[None]:
    """Join the launched processes, over NCCL on CUDA and gloo on CPU, for as long as the block runs.

    A block that ends in an error leaves the group as it is: closing it could wait for ranks that are gone.
    """
    torch.set_num_threads(launch.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=launch.rank,
        world_size=launch.world_size,
        store=None if launch.rendezvous else dist.HashStore(),
        device_id=device if device.type == "cuda" else None,
    )
    yield
    dist.destroy_process_group()
