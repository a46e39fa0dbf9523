"""The process of one section: runs its function, and writes each figure as it comes.

    python -m benchmarks.gpu.worker MODULE:FUNCTION --folder FOLDER --device cuda --limit 60

FOLDER/figures.jsonl has one JSON object a line: that the section has started, a figure, a note, the error that ended
it, or that it has ended well. Tracebacks go to stderr: of an exception, a crash, and all threads before the limit.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.expected import check_of
from benchmarks.gpu.sections import STARTING, Job
from benchmarks.gpu.summary import entry_of

Figure = tuple[str, float]


def write(path: Path, entry: dict[str, Any]) -> None:
    """Append a line, and wait until it is on the disk."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def run_section(name: str, job: Job, path: Path, limit: float) -> None:
    """Run `module:function`, and write its figures and notes."""
    module, _, function = name.partition(":")
    section = getattr(importlib.import_module(module), function)
    faulthandler.dump_traceback_later(0.8 * limit)
    write(path, {"started": True})
    found: Iterable[Figure | str] = section(job)
    for item in found:
        if isinstance(item, str):
            write(path, {"note": item})
        else:
            write(path, entry_of(check_of(*item, tiny=job.tiny)))
    write(path, {"ended": True})


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one section of benchmarks.gpu.")
    parser.add_argument("run", help="MODULE:FUNCTION")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, required=True, help="seconds until the process is killed")
    args = parser.parse_args()
    if sys.platform == "linux":  # a runner that is killed takes this process with it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.8 * STARTING)
    path = args.folder / "figures.jsonl"
    try:
        run_section(args.run, Job(args.device, args.tiny, args.folder), path, args.limit)
    except Exception as error:
        lines = str(error).splitlines() or [""]
        write(path, {"error": f"{type(error).__name__}: {lines[0]}".strip()})
        raise


if __name__ == "__main__":
    main()
