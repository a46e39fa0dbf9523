"""Which of the launched processes this one is, what it computes on, and the process group that joins them.

    Launch.from_environment -> meet -> choose_device -> process_group -> outlast -> leave

torchrun keeps a key-value store, the board here, for as long as it runs: it outlives the ranks and their restarts.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

BOARD_SECONDS = 30.0  # the board answers within this, or is gone
LONG_PHASE = 3  # a phase that the watchdog calls long may take this many times --hang-timeout


@dataclass(frozen=True)
class Launch:
    """A process's place: `rank` of `world_size`, and `local_rank` of the `local_world_size` on this host.

    rendezvous: whether the environment says where the ranks meet. agent_store: host and port of torchrun's board.
    run_id: torchrun's name for the whole launch. attempt: which start of its ranks this is, from 0.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    threads: int = 1
    rendezvous: bool = False
    agent_store: tuple[str, int] | None = None
    run_id: str = ""
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
            run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )

    def board(self) -> dist.Store | None:
        """A connection to the board, where this launch's keys are its own; None where nobody keeps one.

        Raises torch.distributed.DistError when it cannot be reached.
        """
        if self.agent_store is None:
            return None
        host, port = self.agent_store
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=BOARD_SECONDS))
        return dist.PrefixStore(f"train.py/{self.run_id}", store)

    def remember(self, key: str, value: str) -> None:
        """Keep `value` on the board for every rank of this launch, later starts included; no effect without a board."""
        board = self.board()
        if board is not None:
            board.set(f"remembered/{key}", value)

    def recall(self, key: str) -> str | None:
        """What any rank of this launch, earlier starts included, last remembered under `key`; None for nothing."""
        board = self.board()
        if board is None or not board.check([f"remembered/{key}"]):
            return None
        return board.get(f"remembered/{key}").decode()


def meet(launch: Launch) -> Launch:
    """`launch` with the `attempt` that all its ranks agree on; returns once every rank has asked.

    torchrun counts restarts for each host alone, and a host that only joins another one's restart does not count it.
    Rank 0 numbers the start; the others draw tickets, and find the number under theirs. Tickets of an earlier start
    are answered again, to nobody: torchrun stops all ranks before it starts them again.
    """
    board = launch.board()
    if board is None:
        return launch
    if launch.rank > 0:
        ticket = f"ticket/{board.add('tickets', 1)}"
        while not board.check([ticket]):
            time.sleep(0.02)
        start = int(board.get(ticket))
        board.add(f"met/{start}", 1)
    else:
        start, answered = board.add("starts", 1), 0
        while board.add(f"met/{start}", 0) < launch.world_size - 1:
            tickets = board.add("tickets", 0)
            for ticket_number in range(answered + 1, tickets + 1):
                board.set(f"ticket/{ticket_number}", str(start))
            answered = tickets
            time.sleep(0.02)
    return replace(launch, attempt=start - 1)


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


def computation_dtype(name: str, device: torch.device) -> torch.dtype:
    """What --dtype asks for on a device."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


@contextmanager
def process_group(launch: Launch, device: torch.device, hang_timeout: float = 0.0) -> Iterator[None]:
    """Join the launched processes, over NCCL on CUDA and gloo on CPU, for as long as the block runs.

    The group waits longer than `hang_timeout` seconds, so that the watchdog, which knows more, speaks first; 0: as
    long as torch waits by itself. A block that ends in an error leaves the group as it is: closing it could wait for
    ranks that are gone.
    """
    torch.set_num_threads(launch.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=launch.rank,
        world_size=launch.world_size,
        store=_group_store(launch),
        timeout=_longer_than(hang_timeout),
        device_id=device if device.type == "cuda" else None,
    )
    yield
    dist.destroy_process_group()


def outlast(hang_timeout: float) -> None:
    """Let every process group that exists by now wait longer than the watchdog; groups do not inherit their limit."""
    timeout = _longer_than(hang_timeout)
    if timeout is not None:
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def leave(exit_code: int = 0) -> NoReturn:
    """End this process now, with all that it printed, but without the interpreter's own end and `atexit`.

    That end may wait for connections to ranks that are gone. And gloo's threads let go of tensors some time after a
    collective, for which they need the interpreter: torch 2.13 aborts the process where that is ending by then.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(exit_code)


def _longer_than(hang_timeout: float) -> timedelta | None:
    return timedelta(seconds=60 + 2 * LONG_PHASE * hang_timeout) if hang_timeout else None


def _group_store(launch: Launch) -> dist.Store | None:
    """Where the ranks find each other; None leaves it to the environment.

    On the board every start gets keys of its own: torch would find the addresses of ranks that were killed.
    """
    board = launch.board()
    if board is not None:
        return dist.PrefixStore(f"start/{launch.attempt}", board)
    return None if launch.rendezvous else dist.HashStore()


def _cores() -> int:
    """Those this process may use, where the system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
