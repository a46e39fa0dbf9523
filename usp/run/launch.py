"""The life of a rank: torchrun's environment, device, process group, stop requests, and the end with its launcher."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import FrameType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from usp.parallel import format_ranks

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ECHO_SECONDS = 2.0  # a scheduler and torchrun may both send one for the same request
STORE_SECONDS = 30.0  # a store that does not answer within this is gone
LONG_PHASE = 3  # a phase that the watchdog calls long may take this many times hang_timeout
TICK_SECONDS = 0.2
ORPHANED = 1  # exit code, which nobody reads


@dataclass
class StopRequest:
    """Request to stop this process: number and time of the first signal, 0 before.

    saves: steps run, after which a stop saves; at other times SIGINT interrupts at once, as there is nothing to save.
    """

    signal_number: int = 0
    since: float = 0.0
    saves: bool = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while the block runs, then restore the previous handlers. Main thread only."""
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, signal_number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if signal_number == signal.SIGINT and not self.saves and not self.signal_number:
            signal.default_int_handler(signal_number, frame)
        if self.signal_number and now - self.since > ECHO_SECONDS:
            os._exit(128 + signal_number)
        if not self.signal_number:
            self.signal_number, self.since = signal_number, now


@dataclass(frozen=True)
class Launch:
    """Place of this process in a launch: `rank` of `world_size`, and `local_rank` of `local_world_size` on its host.

    threads: of torch on the CPU. rendezvous: whether the environment says where the ranks meet. agent_store: host and
    port of torchrun's store. own_store: torchrun shares none, so rank 0 serves one there, which a restart forgets.
    run_id: torchrun's name of the launch. attempt: number of restarts so far. held: as long as rank 0 has a store, it
    serves one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    threads: int = 1
    rendezvous: bool = False
    agent_store: tuple[str, int] | None = None
    own_store: bool = False
    run_id: str = ""
    attempt: int = 0
    held: dist.Store | None = None

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> Launch:
        """Read what torchrun sets in `environ`; without torchrun, a single process.

        `threads` is this process's share of the host's cores unless OMP_NUM_THREADS is set. torchrun itself sets
        that to 1, so 1 counts as unset under torchrun.
        """
        launched = "RANK" in environ and "WORLD_SIZE" in environ
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", 1)) if launched else 1
        shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") if launched else None
        threads = int(environ.get("OMP_NUM_THREADS", 0) or 0)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = max(1, cores // local_world_size)
        return Launch(
            rank=int(environ["RANK"]) if launched else 0,
            world_size=int(environ["WORLD_SIZE"]) if launched else 1,
            local_rank=int(environ.get("LOCAL_RANK", 0)) if launched else 0,
            local_world_size=local_world_size,
            threads=share if threads == 0 or (launched and threads == 1) else threads,
            rendezvous=launched,
            agent_store=(environ["MASTER_ADDR"], int(environ["MASTER_PORT"])) if shared else None,
            own_store=shared == "False",
            run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )

    def store(self) -> dist.Store | None:
        """Connect to torchrun's store, with a key prefix of this launch; None without one. Raises
        torch.distributed.DistError if it cannot be reached."""
        if self.agent_store is None:
            return None
        host, port = self.agent_store
        serves, timeout = self.own_store and self.rank == 0, timedelta(seconds=STORE_SECONDS)
        store = dist.TCPStore(host, port, is_master=serves, timeout=timeout, multi_tenant=True)
        return dist.PrefixStore(f"train.py/{self.run_id}", store)

    def from_first(self, key: str, find: Callable[[], T]) -> T:
        """Return what `find` returns on rank 0, through torchrun's store; without a store every rank calls it.

        find: its result is plain values, and its errors are among these: if it raises, all ranks end.
        """
        store = self.store() if self.world_size > 1 else None
        if store is None:
            return find()
        key = f"{key}/{self.attempt}"
        if self.rank == 0:
            store.set(key, json.dumps(find()))
        while not store.check([key]):  # if rank 0 ends, so does this process
            time.sleep(0.05)
        value: T = json.loads(store.get(key))
        return value

    def remember(self, key: str, value: str) -> None:
        """Store `value` for all ranks of this launch, across restarts; no effect without a store."""
        store = self.store()
        if store is not None:
            store.set(f"remembered/{key}", value)

    def recall(self, key: str) -> str | None:
        """Return the value that any rank last remembered under `key`, across restarts; None if there is none."""
        store = self.store()
        if store is None or not store.check([f"remembered/{key}"]):
            return None
        return store.get(f"remembered/{key}").decode()


class RanksMissing(RuntimeError):
    """Ranks that have not come to the start in time; raised on every rank that has."""


def meet(launch: Launch, seconds: float = 0.0) -> Launch:
    """Return `launch` with the `attempt` that all its ranks agree on; blocks until every rank has called it. Raises
    RanksMissing on every rank, naming those that have not, `seconds` after its call; unless positive: no limit.

    torchrun counts restarts per host, and a host that only joins another one's restart does not count it. Rank 0
    numbers the attempt; the others draw tickets, and read the number under theirs. Tickets of earlier attempts are
    answered again, which is harmless: torchrun stops all ranks before it restarts them.
    """
    store = launch.store()
    if store is None:
        return launch
    end, start, number, answered = time.monotonic() + (seconds if seconds > 0 else math.inf), 0, 0, 0
    if launch.rank > 0:
        number = store.add("tickets", 1)
        store.set(f"drawn/{number}", str(launch.rank))
    else:
        start = store.add("starts", 1)
    while not (start and store.check([f"all/{start}"])):
        if launch.rank > 0 and not start and store.check([f"ticket/{number}"]):
            start = int(store.get(f"ticket/{number}"))
            store.set(f"met/{start}/{launch.rank}", "")
            store.add(f"met/{start}", 1)
        elif launch.rank == 0 and store.add(f"met/{start}", 0) == launch.world_size - 1:
            store.set(f"all/{start}", "")
        elif launch.rank == 0:
            for ticket in range(answered + 1, (answered := store.add("tickets", 0)) + 1):
                store.set(f"ticket/{ticket}", str(start))
        if time.monotonic() > end and (missing := _missing(store, launch, start)):
            raise RanksMissing(
                f"{named(missing)} not there {seconds:g} seconds (--hang-timeout) after the "
                f"start of rank {launch.rank}: ended or stuck before the flags are read, or the host is down"
            )
        time.sleep(0.02)
    return replace(launch, attempt=start - 1, held=store)


def _missing(store: dist.Store, launch: Launch, start: int) -> list[int]:
    """Return the ranks that did not come to a start, or rank 0 if that does not go on. start: 0 without rank 0."""
    if start:
        others = [rank for rank in range(1, launch.world_size) if not store.check([f"met/{start}/{rank}"])]
        return others or ([0] if launch.rank > 0 else [])
    drawn = [n for n in range(1, store.add("tickets", 0) + 1) if not store.check([f"ticket/{n}"])]
    here = {int(store.get(f"drawn/{n}")) for n in drawn if store.check([f"drawn/{n}"])}
    return [rank for rank in range(launch.world_size) if rank not in here]


def all_ready(launch: Launch, seconds: float = 0.0) -> None:
    """Block until every rank has called it, however long some take to prepare; no effect without torchrun's store.
    Hosts tokenize data of their own accord, and creating a process group would run out of time meanwhile. Every
    `seconds` that are positive, the first rank that waits says for which others."""
    store = launch.store()
    if store is None:
        return
    key, begin = f"ready/{launch.attempt}", time.monotonic()
    store.set(f"{key}/{launch.rank}", "")
    first, said = store.add(key, 1) == 1, 0.0
    while store.add(key, 0) < launch.world_size:
        if first and seconds > 0 and (waited := time.monotonic() - begin) > said + seconds:
            said = waited
            late = [rank for rank in range(launch.world_size) if not store.check([f"{key}/{rank}"])]
            print(f"waiting for {named(late)} to prepare since {waited:.0f} seconds", file=sys.stderr, flush=True)
        time.sleep(0.02)


def named(ranks: list[int]) -> str:
    """Format ranks: [0, 1, 2, 5] is `ranks 0-2, 5`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks, ', ')}"


def hide_import_warnings() -> None:
    """Hide what torchao, which transformers imports where it is installed, logs of its kernels and enums."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def set_library_defaults(launch: Launch, environ: MutableMapping[str, str]) -> None:
    """Set what `environ` leaves open: gloo uses the loopback interface if all ranks are on this host; memory of CUDA
    tensors is not fragmented by shapes that change from step to step, and pinned memory is not rounded up to a power of
    two beyond 64 MiB."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True,pinned_max_round_threshold_mb:64"
    if launch.world_size == launch.local_world_size:
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def choose_device(device: str, launch: Launch) -> torch.device:
    """Return this process's device; `auto` is CUDA if available. Raises ValueError if the device is CUDA and this host
    has fewer GPUs than processes."""
    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and not gpus):
        return torch.device("cpu")
    if gpus == 1 and launch.rendezvous and not launch.run_id:  # Slurm, say, shows each process its own GPU
        return torch.device("cuda", 0)
    if not gpus:
        raise ValueError(
            f"--device {device}: torch sees no GPU on this host: install a torch for CUDA and a driver, check "
            f"CUDA_VISIBLE_DEVICES, or use --device cpu"
        )
    if gpus < launch.local_world_size:
        raise ValueError(
            f"--device {device}: {launch.local_world_size} processes on this host need a GPU each, but torch sees "
            f"{gpus}: start at most {gpus} per host, or use --device cpu"
        )
    return torch.device("cuda", launch.local_rank)


def computation_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype `name` on `device`; `auto` is bfloat16 on CUDA, float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


@contextmanager
def process_group(launch: Launch, device: torch.device, hang_timeout: float = 0.0) -> Iterator[None]:
    """Join the launched processes in a process group, NCCL on CUDA and gloo on CPU, for the duration of the block.

    The group's timeout is longer than `hang_timeout` seconds, so that the watchdog, which knows more, reports first;
    0 keeps torch's default. After an error the group is not destroyed, which could wait for ranks that are gone.
    """
    torch.set_num_threads(launch.threads)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # gloo connects every pair of ranks
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
    """Make the timeout of every existing process group longer than the watchdog's; groups do not inherit it."""
    timeout = _longer_than(hang_timeout)
    if timeout is not None:
        # torch 2.14's name, and 2.13's
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        for group in list(dist.distributed_c10d._world.pg_map):
            set_timeout(timeout, group)


def leave(exit_code: int = 0) -> NoReturn:
    """Flush the output and exit at once, without interpreter shutdown and `atexit`.

    Shutdown may wait for connections to ranks that are gone. And gloo's threads release tensors some time after a
    collective, for which they need the interpreter: torch 2.13 aborts the process if it is shutting down by then.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader is gone
            stream.flush()
    os._exit(exit_code)


def _longer_than(hang_timeout: float) -> timedelta | None:
    return timedelta(seconds=60 + 2 * LONG_PHASE * hang_timeout) if hang_timeout else None


def _group_store(launch: Launch) -> dist.Store | None:
    """Return the store of the process group; None leaves it to the environment. Each attempt gets its own key prefix in
    torchrun's store, or torch would find the addresses of killed ranks."""
    store = launch.store()
    if store is not None:
        return dist.PrefixStore(f"start/{launch.attempt}", store)
    return None if launch.rendezvous else dist.HashStore()


def end_with_launcher(launch: Launch) -> None:
    """Watch torchrun, the parent of this process, from a thread; when it is gone, say so and end the process. No effect
    without torchrun: a process that a shell starts in the background may outlive the shell."""
    if launch.run_id:
        threading.Thread(target=_watch, args=(os.getppid(), launch), name="launcher", daemon=True).start()


def _watch(launcher: int, launch: Launch) -> None:
    while os.getppid() == launcher:
        time.sleep(TICK_SECONDS)
    if launch.local_rank == 0:
        with suppress(OSError):  # the reader is gone, too
            message = f"error: torchrun (process {launcher}) is gone: ending its ranks on this host; progress since "
            print(message + "the last checkpoint is lost", file=sys.stderr, flush=True)
    os._exit(ORPHANED)
