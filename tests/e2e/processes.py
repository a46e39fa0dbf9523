"""Start train.py or rlhf.py as a user does, in a separate session, and check that no process survives it."""

from __future__ import annotations

import io
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from unittest.mock import patch

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
LIMIT = 600.0


@dataclass(frozen=True)
class Ended:
    exit_code: int
    out: str
    err: str


class Run:
    """Process of `script`, under torchrun if `ranks` is given; survivors are killed when the `with` block ends."""

    def __init__(
        self,
        args: list[str],
        folder: Path,
        ranks: int | None = None,
        script: Path | None = None,
        torchrun: tuple[str, ...] = (),
    ) -> None:
        launcher = ["-m", "torch.distributed.run", *torchrun, "--nproc-per-node", str(ranks)] if ranks else []
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        self.mark = f"TEST_RUN={folder}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        environment |= dict([self.mark.split("=", 1)])
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(script or ROOT / "train.py"), "--device", "cpu", *args],
                cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True, preexec_fn=_default_sigint,
            )  # fmt: skip

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def members(self) -> list[int]:
        """Return the live processes of the run, by their environment: torchrun starts each rank in a new session."""
        found = []
        for pid, fields in _stats().items():
            try:
                marked = self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
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


def run_here(program: str, args: list[str], folder: Path) -> Ended:
    """Run train.py ("train") or rlhf.py ("rlhf") on a rank of a pool, which need not start first; it must end well."""
    out, err = io.StringIO(), io.StringIO()
    with (
        _as_torchrun(folder),
        patch(f"usp.{program}.trainer.process_group", lambda *_: nullcontext()),  # the pool has one
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        exit_code = import_module(f"usp.commands.{program}").main(["--device", "cpu", *args], os.environ)
    assert exit_code == 0, err.getvalue()
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
