"""Which of the launched processes this one is, what it computes on, and the process group that joins them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Launch:
    """A process's place: `rank` of `world_size`, and `local_rank` of the `local_world_size` on this host.

    rendezvous: whether the environment says where the ranks meet. agent_store: host and port of the key-value store
    that torchrun keeps for as long as it runs. attempt: which start of the same ranks this is.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    threads: int = 1
    rendezvous: bool = False
    agent_store: tuple[str, int] | None = None
    attempt: int = 0

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> Launch:
        """What torchrun says in `environ`; one process alone where it says nothing.

        threads: this process's share of the host's cores, unless OMP_NUM_THREADS asks for another number. torchrun
        sets 1 there by itself, so 1 counts as not asked under torchrun.
        """
        launched = "RANK" in environ and "WORLD_SIZE" in environ
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", 1)) if launched else 1
        agent_store = launched and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        asked = int(environ.get("OMP_NUM_THREADS", 0) or 0)
        share = max(1, _cores() // local_world_size)
        return Launch(
            rank=int(environ["RANK"]) if launched else 0,
            world_size=int(environ["WORLD_SIZE"]) if launched else 1,
            local_rank=int(environ.get("LOCAL_RANK", 0)) if launched else 0,
            local_world_size=local_world_size,
            threads=share if asked == 0 or (launched and asked == 1) else asked,
            rendezvous=launched,
            agent_store=(environ["MASTER_ADDR"], int(environ["MASTER_PORT"])) if agent_store else None,
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )


def stay_on_loopback(launch: Launch, environ: MutableMapping[str, str]) -> None:
    """Let gloo listen on this host's loopback alone where all ranks are on it, unless `environ` names an interface."""
    if launch.world_size == launch.local_world_size:
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


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


def _cores() -> int:
    """Those this process may use, where the system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
