"""Start train.py as a user does, in a session of its own, and see what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
LIMIT = 180.0


@dataclass(frozen=True)
class Ended:
    exit_code: int
    out: str
    err: str


class Run:
    """`script`, under torchrun where `ranks` is given; whatever is left is killed when the `with` block ends."""

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
                cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True, preexec_fn=_hear_ctrl_c,
            )  # fmt: skip

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def members(self) -> list[int]:
        """Live processes of the run: torchrun gives each rank a session of its own, the environment they share."""
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
        """The launched ranks: children of torchrun, in the order of their start."""
        return sorted(pid for pid, fields in _stats().items() if fields[1] == str(self.process.pid))

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not happened():
            assert time.monotonic() < deadline and self.process.poll() is None, self.err.read_text()
            time.sleep(0.1)

    def end(self) -> Ended:
        """Wait for the end, and see that nothing of the run lives on."""
        exit_code = self.process.wait(timeout=LIMIT)
        assert self.members() == []
        return Ended(exit_code, self.out.read_text(), self.err.read_text())


def _hear_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C, tests included; children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _stats() -> dict[int, list[str]]:
    """For every process the fields of /proc/PID/stat from the state on: state, parent, process group, session."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats[int(path.parent.name)] = path.read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return stats
