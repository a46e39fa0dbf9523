"""Runs a function on N gloo ranks of this machine, for tests and benchmarks.

    with RankPool() as ranks:
        sums = ranks.run(all_reduce_of, 4, tensor)      # [result of rank 0, ..., result of rank 3]

A pool reuses its worker processes, because starting them takes longer than most jobs; they are forked from a server
that has already imported torch. Every job gets a new process group. When a job fails or times out, its workers are
killed, so that it cannot affect the next one.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from .adversary import Adversary

_GRACE_SECONDS = 10.0  # time for the peers of a failed rank to report their own failures
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


class RankError(RuntimeError):
    """Raised when a job fails. `failures` maps each failed rank to its traceback, in order of failure."""

    def __init__(self, message: str, failures: Mapping[int, str]) -> None:
        super().__init__(message)
        self.failures = dict(failures)


@dataclass(frozen=True)
class _Job:
    """A worker's part of a job. port: of the pool's store. prefix: of its keys there. call: the pickled (fn, args)."""

    rank: int
    world_size: int
    port: int
    prefix: str
    timeout: float
    sys_path: tuple[str, ...]
    call: bytes
    adversarial: bool


@dataclass(frozen=True)
class _Reply:
    """A worker's answer: the pickled result if `ok`, else the traceback; `time` orders failures across ranks."""

    ok: bool
    payload: Any
    time: float


@dataclass(frozen=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    stacks: Path


class RankPool:
    """Worker processes that run jobs as gloo ranks, one job after another; use it as a context manager.

    Args:
        preload: modules that the fork server imports once for all workers.
        adversarial: messages behave as on GPUs at their worst, and are checked (`tests.harness.adversary`).
    """

    def __init__(self, preload: Sequence[str] = (), adversarial: bool = False) -> None:
        self._adversarial = adversarial
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "torch.distributed.tensor", *preload])
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: dist.TCPStore | None = None  # a file would be read again every 10 ms
        self._started = 0

    def __enter__(self) -> RankPool:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        # A socket of the store's own would be of both versions of IP, and ask DNS for the name of every connection.
        listener = socket.create_server(("127.0.0.1", 0))
        options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.fileno()}
        self._store = dist.TCPStore("127.0.0.1", listener.getsockname()[1], is_master=True, **options)
        listener.detach()  # the store closes it
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._discard_workers()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = self._store = None

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0) -> list[Any]:
        """Return [fn(*args) on rank 0, ..., on rank world_size - 1].

        `fn` runs with the default process group initialized (gloo over loopback, one thread per rank). It must be a
        module-level function, because it is pickled by name; arguments and results are pickled too.

        Raises:
            RankError: if `fn` raised, or its worker died, on some rank. The message contains the first failed rank's
                traceback; failures that only report a lost peer are omitted.
            TimeoutError: if ranks do not answer within `timeout` seconds. The message contains their Python stacks.
        """
        if self._store is None:
            raise RuntimeError("RankPool is not open: use `with RankPool() as ranks: ranks.run(...)`")
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1")
        call = pickle.dumps((fn, args))
        if not all(worker.process.is_alive() for worker in self._workers):
            self._discard_workers()
        while len(self._workers) < world_size:
            self._workers.append(self._start_worker())
        workers = self._workers[:world_size]
        self._started += 1
        of_all = (self._store.port, str(self._started), timeout, tuple(sys.path), call, self._adversarial)
        try:
            for rank, worker in enumerate(workers):
                worker.connection.send(_Job(rank, world_size, *of_all))
            replies = _collect(workers, timeout)
            if not all(rank in replies and replies[rank].ok for rank in range(world_size)):
                raise _failure(fn, workers, replies, timeout)
        except BaseException:  # including KeyboardInterrupt: workers in the middle of a job cannot be reused
            self._discard_workers()
            raise
        for worker in workers:
            worker.connection.send(None)  # ranks may close their connections only once all have finished
        return [pickle.loads(replies[rank].payload) for rank in range(world_size)]

    def _start_worker(self) -> _Worker:
        assert self._folder is not None
        self._started += 1
        stacks = Path(self._folder.name) / f"stacks-{self._started}"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, stacks)

    def _discard_workers(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers = []


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0) -> list[Any]:
    """Run one job in a new pool; see `RankPool.run`."""
    with RankPool() as ranks:
        return ranks.run(fn, world_size, *args, timeout=timeout)


def on_first_rank(fn: Callable[..., Any], *args: Any) -> Any:
    """Return on every rank of a job what `fn(*args)` returns on the first, for what all would compute alike."""
    found = [fn(*args) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return found[0]


# Worker side


def _serve(connection: Connection, stacks: str) -> None:
    """Run jobs until the pool closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the pool handles it
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    store: dist.TCPStore | None = None  # of all jobs
    with Path(stacks).open("w") as stream:
        # C-level handlers work even while the rank is blocked inside a collective, and when it dies of a signal.
        faulthandler.enable(stream)
        faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
        try:
            while (job := connection.recv()) is not None:
                store = store or dist.TCPStore("127.0.0.1", job.port, is_master=False)
                reply = _run_job(job, store)
                connection.send(reply)
                if not reply.ok:
                    os._exit(1)  # closes the sockets immediately, so that peers waiting for this rank fail too
                connection.recv()
                dist.destroy_process_group()
                # DTensor's cache is keyed by mesh, and would confuse this job's meshes with equal ones of the next.
                _clear_sharding_prop_cache()
        except (EOFError, ConnectionResetError):
            return


def _run_job(job: _Job, store: dist.TCPStore) -> _Reply:
    try:
        sys.path[:] = job.sys_path
        torch.set_num_threads(1)
        fn, args = pickle.loads(job.call)
        # Longer than the job's timeout, so that the pool, which reports every rank's stack, times out first.
        limit = timedelta(seconds=job.timeout + 60)
        store.set_timeout(limit)
        keys = dist.PrefixStore(job.prefix, store)
        dist.init_process_group("gloo", store=keys, rank=job.rank, world_size=job.world_size, timeout=limit)
        if not job.adversarial:
            return _Reply(True, pickle.dumps(fn(*args)), time.monotonic())
        with Adversary() as adversary:
            result = fn(*args)
        adversary.check()
        return _Reply(True, pickle.dumps(result), time.monotonic())
    except BaseException:  # including SystemExit and KeyboardInterrupt
        return _Reply(False, traceback.format_exc(), time.monotonic())


# Pool side


def _collect(workers: Sequence[_Worker], timeout: float) -> dict[int, _Reply]:
    """Return replies by rank, without ranks that timed out or did not fail soon enough after a failed rank."""
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    replies: dict[int, _Reply] = {}
    deadline = time.monotonic() + timeout
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), timeout=remaining):
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                replies[rank] = connection.recv()
            except (EOFError, ConnectionResetError):
                workers[rank].process.join(timeout=_GRACE_SECONDS)
                text = f"the worker died with exit code {workers[rank].process.exitcode}\n"
                text += workers[rank].stacks.read_text()
                replies[rank] = _Reply(False, text, time.monotonic())
            if not replies[rank].ok:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return replies


def _failure(
    fn: Callable[..., Any], workers: Sequence[_Worker], replies: Mapping[int, _Reply], timeout: float
) -> RankError | TimeoutError:
    job = f"{fn.__module__}.{fn.__qualname__} on {len(workers)} ranks"
    failed = sorted((rank for rank in replies if not replies[rank].ok), key=lambda rank: replies[rank].time)
    if failed:
        own = [rank for rank in failed if not any(text in replies[rank].payload for text in _PEER_GONE)] or failed
        failures = {rank: replies[rank].payload for rank in own}
        first, *others = own
        also = f"\nAlso failed: ranks {', '.join(map(str, sorted(others)))}." if others else ""
        return RankError(f"{job}: rank {first} failed.\n{failures[first]}{also}", failures)
    missing = [rank for rank in range(len(workers)) if rank not in replies]
    stacks = "\n".join(f"rank {rank}:\n{_stack(workers[rank])}" for rank in missing)
    done = f" (ranks {sorted(replies)} had finished)" if replies else ""
    return TimeoutError(f"{job}: ranks {missing} did not answer within {timeout:g} s{done}. Their stacks:\n{stacks}")


def _stack(worker: _Worker) -> str:
    """Return the worker's Python stack, written by its signal handler."""
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGUSR1)
    text, deadline = "", time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        before, text = text, worker.stacks.read_text()
        if text and text == before:
            break
    return text or "(no stack: the process does not respond to signals)\n"
