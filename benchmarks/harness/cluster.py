"""Emulated hosts on one machine: network namespaces with a slow link between them, and torchrun across them.

Each host is a namespace with one shaped device (`tbf`, both directions) on a bridge, which has its own namespace. No
device is created outside of them and none has a route out, so no packet leaves the machine. Ranks of the same host
communicate over its loopback at full speed. Requires Linux, root, and iproute2.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

DEVICE, MASTER_PORT = "eth0", 29400  # the same on every host, because namespaces isolate them
BURST = "128kb"  # token bucket size; must exceed the kernel's packets of up to 64 KiB
QUEUE = "64mb"  # large enough to delay packets rather than drop them, so that times follow from sizes
GRACE_SECONDS = 10.0  # for the other hosts to exit after one has failed


@dataclass(frozen=True)
class HostOutput:
    """The exit code of a host's torchrun, and the output of it and its ranks."""

    returncode: int
    text: str


@dataclass(frozen=True)
class Cluster:
    """Running hosts: the names of their namespaces, and their addresses."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]

    def torchrun(self, command: Sequence[str], ranks: int, timeout: float) -> tuple[HostOutput, ...]:
        """Run a command, the arguments that follow torchrun's options, on `ranks` ranks of every host, and return the
        output of each host. If a host fails or the timeout expires, the remaining hosts are stopped."""
        started: list[subprocess.Popen[str]] = []
        texts: list[list[str]] = [[] for _ in self.namespaces]
        readers = []
        try:
            for host in range(len(self.namespaces)):
                process = self._start(host, command, ranks)
                started.append(process)
                reader = threading.Thread(target=_read, args=(process.stdout, texts[host]), daemon=True)
                reader.start()
                readers.append(reader)
            _wait(started, timeout)
        finally:
            self._stop(started)
        for reader in readers:
            reader.join()
        return tuple(HostOutput(p.returncode, "".join(text)) for p, text in zip(started, texts, strict=True))

    def call(self, fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 600.0) -> list[Any]:
        """Return [fn(*args) on rank 0, rank 1, ...] of `ranks` ranks per host, in a gloo group.

        Args:
            fn: a module-level function.

        Raises:
            RuntimeError: hosts failed; the message has their outputs.
        """
        with tempfile.TemporaryDirectory(prefix="cluster-") as folder:
            spec = sys.modules["__main__"].__spec__  # None for plain scripts and under a debugger
            Path(folder, "main").write_text(spec.name if spec else "")
            Path(folder, "call").write_bytes(pickle.dumps((fn, args, timeout)))
            outputs = self.torchrun(["-m", "benchmarks.harness.cluster", folder], ranks, timeout)
            # Of several that failed some only lost a peer: all are shown.
            if failed := [(host, output) for host, output in enumerate(outputs) if output.returncode]:
                texts = [f"host {host} failed ({output.returncode}):\n{output.text}" for host, output in failed]
                raise RuntimeError("\n".join([f"{fn.__qualname__}:", *texts]))
            results = [Path(folder, f"rank{rank}") for rank in range(ranks * len(self.namespaces))]
            return [pickle.loads(result.read_bytes()) for result in results]

    def _start(self, host: int, command: Sequence[str], ranks: int) -> subprocess.Popen[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.namespaces)}"]
        place = [f"--node-rank={host}", f"--nproc-per-node={ranks}"]
        master = [f"--master-addr={self.addresses[0]}", f"--master-port={MASTER_PORT}"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[host], *launcher, *place, *master, *command],
            # torch warns about every address that does not resolve to a name, as none does here
            env={"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "GLOO_SOCKET_IFNAME": DEVICE},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # only this process receives an interrupt, and stops the hosts in order
        )

    def _stop(self, started: Sequence[subprocess.Popen[str]]) -> None:
        for process in started:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in started:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for namespace in self.namespaces:
            _kill_inside(namespace)  # ranks have their own sessions, and may outlive torchrun


def unavailable() -> str | None:
    """Return why emulated hosts cannot be created here; None if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces require Linux, and this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid():
        return "creating network namespaces requires root"
    probe = f"usp-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
    except RuntimeError as error:
        return f"cannot create network namespaces: {error}"
    try:
        _shape(probe, "lo", "1gbit")
    except RuntimeError as error:
        return f"cannot shape links: {error}"
    finally:
        _remove(probe)
    return None


@contextmanager
def cluster(hosts: int, rate: str) -> Iterator[Cluster]:
    """Create emulated hosts for the duration of the block.

    Args:
        hosts: their number, from 1 to 250.
        rate: of each host's link in each direction, in tc's notation: 1gbit.

    Raises:
        ValueError: the number of hosts or the rate is invalid.
        RuntimeError: hosts cannot be created here.
    """
    if not 1 <= hosts <= 250:
        raise ValueError(f"hosts={hosts} must be between 1 and 250")
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[kmg]?bit", rate):
        raise ValueError(f"rate={rate!r} must be a number followed by bit, kbit, mbit or gbit, such as 1gbit")
    reason = unavailable()
    if reason:
        raise RuntimeError(f"cannot create a cluster: {reason}")
    switch, *names = made = [f"usp-{os.getpid()}-{name}" for name in ("switch", *(f"host{n}" for n in range(hosts)))]
    addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
    if taken := set(made) & set(_run("ip", "netns", "list").split()):
        raise RuntimeError(f"cannot create a cluster: namespaces {', '.join(sorted(taken))} already exist")
    try:
        for name in made:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        bridge = f"usp-{os.getpid()}-br"
        _run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        _run("ip", "-n", switch, "link", "set", bridge, "up")
        for port, (name, address) in enumerate(zip(names, addresses, strict=True)):
            _connect(switch, bridge, f"usp-{os.getpid()}-{port}", name, address, rate)
        yield Cluster(tuple(names), tuple(addresses))
    finally:
        with _interrupts_ignored():
            for name in made:
                _remove(name)


def _connect(switch: str, bridge: str, port: str, host: str, address: str, rate: str) -> None:
    """Connect a bridge's port to a host's device. The link disappears with either namespace."""
    peer = ("peer", "name", port, "netns", switch)
    _run("ip", "link", "add", DEVICE, "netns", host, "type", "veth", *peer)
    _run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
    _run("ip", "-n", host, "address", "add", f"{address}/24", "dev", DEVICE)
    _run("ip", "-n", host, "link", "set", DEVICE, "up")
    _shape(switch, port, rate)
    _shape(host, DEVICE, rate)


def _shape(namespace: str, device: str, rate: str) -> None:
    shape = ("tbf", "rate", rate, "burst", BURST, "limit", QUEUE)
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape)


def _remove(namespace: str) -> None:
    if Path("/var/run/netns", namespace).exists():
        _kill_inside(namespace)
        _run("ip", "netns", "delete", namespace)


def _kill_inside(namespace: str) -> None:
    for pid in _run("ip", "netns", "pids", namespace).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore interrupts on the main thread, so that a second Ctrl-C does not stop the removal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _read(stream: IO[str], text: list[str]) -> None:
    text.extend(stream)


def _wait(processes: Sequence[subprocess.Popen[str]], timeout: float) -> None:
    """Wait until all processes have exited, one has failed and the grace period is over, or the timeout expires."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)


def _serve(folder: Path) -> None:
    """Run one rank of `Cluster.call`: `python -m benchmarks.harness.cluster FOLDER`."""
    main = (folder / "main").read_text()
    if main:  # functions of the caller's __main__ are pickled under that name
        sys.modules["__main__"] = importlib.import_module(main)
    fn, args, timeout = pickle.loads((folder / "call").read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    (folder / f"rank{dist.get_rank()}").write_bytes(pickle.dumps(fn(*args)))
    dist.barrier()  # an early exit would close connections that other ranks still use
    dist.destroy_process_group()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
