"""A folder has one writer, and the lock ends with its process, however that ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from usp.run.output import LOCK, holder, locked

HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", file=file, flush=True)
print("held", flush=True)
time.sleep(1000)
"""


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    folder, me = tmp_path / "runs" / "a", f"process {os.getpid()} on {socket.gethostname()}"
    with locked(folder) as first:
        assert holder(folder) == me and (folder / LOCK).read_text() == first
        with pytest.raises(ValueError, match=f"a is in use: {me} writes to it"), locked(folder, seconds=0):
            raise AssertionError("two writers")
    assert holder(folder) == "" == holder(tmp_path)
    with locked(folder, seconds=0) as second:
        assert second != first


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / LOCK)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert holder(tmp_path) == "held"
        with pytest.raises(ValueError, match="held writes to it"), locked(tmp_path, seconds=0):
            raise AssertionError("two writers")
        other.kill()
        with locked(tmp_path):
            pass
