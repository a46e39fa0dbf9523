"""Where a process is, read from the Python stacks of its threads: in which collective it waits, or what else it does.

A collective over gloo blocks inside torch.distributed, called from our code. Over NCCL it returns at once, and Python
blocks later, wherever a result is read; there torch's flight recorder knows which one the GPU is at.
"""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

ROOT = Path(__file__).parents[2]
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
IDLE = ("threading.py", "concurrent/futures/_base.py", "torch/autograd/graph.py")  # where a thread waits for another
CALLERS = 3


@dataclass(frozen=True)
class Whereabouts:
    """collective: what the process waits in, empty when it is elsewhere. at: its innermost calls outside of torch."""

    collective: str
    at: str


def whereabouts(frames: Mapping[int, FrameType], main: int) -> Whereabouts:
    """Where the process is whose threads are at `frames` (sys._current_frames), `main` its main thread.

    Another thread counts when the main one waits for it: a backward on CUDA runs in a thread of its own.
    """
    found = _of_thread(frames[main])
    if not found.collective and _short(frames[main].f_code.co_filename).endswith(IDLE):
        others = (_of_thread(frame) for thread, frame in frames.items() if thread != main)
        found = next((other for other in others if other.collective), found)
    return found if found.collective else Whereabouts(unfinished_on_gpu(flight_record()), found.at)


def flight_record() -> bytes:
    """What torch's flight recorder holds, as JSON; nothing where torch has none."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return dump(True, False) if dump is not None else b""


def unfinished_on_gpu(record: bytes) -> str:
    """The oldest NCCL collective in a flight record that has not ended, with its shapes and group; empty for none."""
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
            collective = function  # the outermost one: what the caller called
    if not collective and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        collective = "wait"  # for a message under way: the works of torch.distributed have no Python frame
    callers = calls[outside : outside + CALLERS] or calls[:CALLERS]
    return Whereabouts(collective, " < ".join(f"{file}:{line} {function}" for file, line, function in callers))


def _calls(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """(short file name, line, function) of the calls, the innermost first."""
    while frame is not None:
        yield _short(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _short(file: str) -> str:
    """`file` relative to where packages are installed, or to this project; its last two parts elsewhere."""
    path = Path(file)
    if "site-packages/" in path.as_posix():
        return path.as_posix().rpartition("site-packages/")[2]
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else "/".join(path.parts[-2:])
