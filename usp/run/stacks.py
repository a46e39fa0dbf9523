"""Find the collective that a process waits in, or what else it is doing, from the Python stacks of its threads.

A gloo collective blocks inside torch.distributed, called from our code. An NCCL collective returns at once, and Python
blocks later, wherever a result is read; torch's flight recorder then knows which collective the GPU is in.
"""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[2]
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
IDLE = ("threading.py", "concurrent/futures/_base.py", "torch/autograd/graph.py")  # a thread in these waits for another
CALLERS = 3


class Whereabouts(NamedTuple):
    """Location of a process. collective: the one it waits in, or empty. at: its innermost calls outside of torch."""

    collective: str
    at: str


def whereabouts(frames: Mapping[int, FrameType], main: int) -> Whereabouts:
    """Locate the process whose threads are at `frames` (sys._current_frames) and whose main thread is `main`.

    If the main thread waits for another one, that one counts: a backward on CUDA runs in a separate thread.
    """
    found = _of_thread(frames[main])
    if not found.collective and _short(frames[main].f_code.co_filename).endswith(IDLE):
        others = (_of_thread(frame) for thread, frame in frames.items() if thread != main)
        found = next((other for other in others if other.collective), found)
    return found if found.collective else Whereabouts(unfinished_on_gpu(flight_record()), found.at)


def flight_record() -> bytes:
    """Return the contents of torch's flight recorder as JSON; empty without one."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return dump(True, False) if dump is not None else b""


def unfinished_on_gpu(record: bytes) -> str:
    """Describe the oldest unfinished NCCL collective of a flight record; empty if there is none."""
    entries = json.loads(record).get("entries", []) if record else []
    for entry in entries:
        if entry["profiling_name"].startswith("nccl:") and entry["state"] != "completed" and not entry["retired"]:
            return f"{entry['profiling_name']} of {entry['input_sizes']} in group {entry['process_group'][-1]}"
    return ""


def _of_thread(frame: FrameType) -> Whereabouts:
    calls = list(_calls(frame))
    collective = ""
    outside = len(calls)
    for index, (file, _, function) in enumerate(calls):
        if not file.startswith("torch/"):
            outside = index
            break
        if file in COLLECTIVES and not function.startswith("_"):
            collective = function  # ends as the outermost one: what our code called
    if not collective and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        collective = "wait"  # torch.distributed's Work.wait has no Python frame
    callers = calls[outside : outside + CALLERS] or calls[:CALLERS]
    return Whereabouts(collective, " < ".join(f"{file}:{line} {function}" for file, line, function in callers))


def _calls(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """Yield (short file name, line, function) of the calls, innermost first."""
    while frame is not None:
        yield _short(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _short(file: str) -> str:
    """Shorten `file` to its path in site-packages or in this project, else to its last two parts."""
    path = Path(file)
    if "site-packages/" in path.as_posix():
        return path.as_posix().rpartition("site-packages/")[2]
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else "/".join(path.parts[-2:])
