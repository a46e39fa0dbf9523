"""Start train.py or rlhf.py as a user does, in a separate session, and check that no process survives it."""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.run import main as torchrun

from usp.run.launch import leave

ROOT = Path(__file__).parents[2]
LIMIT = 600.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # the environment of a program in the process of a test


@dataclass(frozen=True)
class Ended:
    exit_code: int
    out: str
    err: str


class Run:
    """Process of `script`, under torchrun if `ranks` is given; survivors are killed when the `with` block ends.

    forked: it and its ranks are forked from the server of pools' ranks, which has imported what takes them seconds.
    """

    def __init__(
        self,
        args: list[str],
        folder: Path,
        ranks: int | None = None,
        script: Path | None = None,
        torchrun: tuple[str, ...] = (),
        forked: bool = False,
    ) -> None:
        launcher = [*torchrun, "--nproc-per-node", str(ranks)] if ranks else []
        command = [*launcher, str(script or ROOT / "train.py"), "--device", "cpu", *args]
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        self.mark = f"TEST_RUN={folder}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        environment |= dict([self.mark.split("=", 1)])
        self.process: subprocess.Popen[bytes] | _Server
        if forked:
            self.out.touch()
            self.err.touch()
            given = (command, bool(ranks), folder, environment, (self.out, self.err), [str(ROOT), *sys.path])
            process = multiprocessing.get_context("forkserver").Process(target=_launch, args=given, daemon=True)
            process.start()
            self.process = _Server(process)
            return
        module = ["-m", "torch.distributed.run"] if ranks else []
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *module, *command],
                cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True, preexec_fn=_default_sigint,
            )  # fmt: skip

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def members(self) -> list[int]:
        """Return the live processes of the run, by their environment or, if they are forked, their standard output:
        torchrun starts each rank in a new session."""
        found = []
        for pid, fields in _stats().items():
            try:
                marked = self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                marked |= Path(f"/proc/{pid}/fd/1").readlink() == self.out
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if marked and fields[0] != "Z":
                found.append(pid)
        return found

    def workers(self) -> list[int]:
        """Return the ranks: children of torchrun, in the order of their start."""
        return sorted(pid for pid, fields in _stats().items() if fields[1] == str(self.process.pid))

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not happened():
            assert time.monotonic() < deadline and self.process.poll() is None, self.err.read_text()
            time.sleep(0.1)

    def end(self) -> Ended:
        """Wait for the end, and check that no process of the run survives."""
        exit_code = self.process.wait(timeout=LIMIT)
        assert self.members() == []
        return Ended(exit_code, self.out.read_text(), self.err.read_text())


@dataclass
class _Server:
    """A process of the fork server, with the methods of `Popen` that tests call."""

    process: ForkServerProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"the run goes on after {timeout} s"
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class _Fork(subprocess.Popen):
    """What torchrun starts, forked from torchrun."""

    def _execute_child(self, args: Any, executable: Any, *options: Any) -> None:  # type: ignore[override]
        _, unbuffered, *command = args  # the interpreter comes first
        assert unbuffered == "-u"
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            os.setsid()
            _run_script(command, options[4])


def _launch(
    command: list[str],
    under_torchrun: bool,
    folder: Path,
    environment: dict[str, str],
    outputs: tuple[Path, Path],
    path: list[str],
) -> None:
    """Become the process of a run."""
    os.setsid()
    os.chdir(folder)
    for stream, output in zip((sys.stdout, sys.stderr), outputs, strict=True):
        os.dup2(os.open(output, os.O_WRONLY), stream.fileno())
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not under_torchrun:
        _run_script(command, environment)
    os.environ.clear()
    os.environ.update(environment)
    with patch(f"{SubprocessHandler.__module__}.Popen", _Fork):
        torchrun(command)


def _run_script(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Do what `python -u SCRIPT ARGUMENTS` does, in a process that has just been forked."""
    os.closerange(3, 1 << 16)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = command
    exit_code: Any = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        exit_code = end.code or 0
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    leave(exit_code)


def run_here(program: str, args: list[str], folder: Path, wanted: int = 0) -> Ended:
    """Run train.py ("train") or rlhf.py ("rlhf") on a rank of a pool, which need not start first.

    wanted: the exit code, with which it must end.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        _as_torchrun(folder),
        patch(f"usp.{program}.trainer.process_group", lambda *_: nullcontext()),  # the pool has one
        patch("usp.run.failures.LAUNCHER_SECONDS", 0.0),  # there is none to wait for
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        exit_code = import_module(f"usp.commands.{program}").main(["--device", "cpu", *args], os.environ)
    assert exit_code == wanted, err.getvalue()
    return Ended(exit_code, out.getvalue(), err.getvalue())


def run_script(script: Path, args: list[str], folder: Path) -> str:
    """Run a script on a rank of a pool, whose process group it takes for its own, and return what it prints."""
    out = io.StringIO()
    with (
        _as_torchrun(folder),
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        patch.object(sys, "argv", [str(script), *args]),
        redirect_stdout(out),
    ):
        runpy.run_path(str(script))["main"]()
    return out.getvalue()


@contextmanager
def _as_torchrun(folder: Path) -> Iterator[None]:
    """Set what torchrun tells a rank, and work in `folder`."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, place), chdir(folder):
        yield


def _default_sigint() -> None:
    """Restore the default SIGINT handler: background jobs of a shell ignore SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _stats() -> dict[int, list[str]]:
    """Return for every process the fields of /proc/PID/stat from the state on: state, parent, group, session."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats[int(path.parent.name)] = path.read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return stats


def refusals_of(text: str) -> list[tuple[list[str], list[str]]]:
    """Return arguments, and parts of what is said of each, of lines `ARGUMENTS => PART | PART` that go on indented."""
    lines = text.strip("\n").replace("\n    ", " ").splitlines()
    rows = (line.partition(" =>") for line in lines)
    return [(shlex.split(args), said.strip().split(" | ")) for args, _, said in rows]
