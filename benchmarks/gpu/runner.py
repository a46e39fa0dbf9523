"""Runs sections as processes of their own, and keeps what they have found.

OUTPUT/run.json                  device and sizes, which are the same for all sections of an output
OUTPUT/SECTION/state.json        how the last attempt ended, which is written when it has
OUTPUT/SECTION/N/log.txt         what attempt N has printed, with its tracebacks
OUTPUT/SECTION/N/figures.jsonl   its figures, a line each
OUTPUT/summary.md                of all sections, written anew after each
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.expected import EXPECTED
from benchmarks.gpu.sections import STARTING, Section
from benchmarks.gpu.summary import DONE, Result, check_of_entry, markdown, read_entries, remarks, replace_file

ROOT = Path(__file__).parents[2]
TAIL = 15  # lines of a log that are printed when its section has failed
PATIENCE = 5.0  # times the limits on toy sizes, which are for CPUs of any speed
LATE = "not run: the time is over"


@dataclass(frozen=True)
class Options:
    """How sections are run.

    minutes: None for no bound; else sections are left out whose expected seconds do not fit, and none runs longer.
    names: of the sections to run; empty for all.
    again: run sections that have ended well as well.
    """

    output: Path
    device: str = "cuda"
    tiny: bool = False
    minutes: float | None = None
    names: tuple[str, ...] = ()
    again: bool = False


def run(sections: Sequence[Section], options: Options) -> int:
    """Run what is to be run, and return the exit code: 0 if all of it ended well and within tolerance, else 1.

    Raises ValueError for an unknown section, and for an output of another device or other sizes.
    """
    chosen = _chosen(sections, options)
    options = replace(options, output=options.output.absolute())
    options.output.mkdir(parents=True, exist_ok=True)
    _check_output(options)
    results = {section.name: last_result(section, options.output) for section in sections}
    deadline = time.monotonic() + 60 * options.minutes if options.minutes is not None else float("inf")
    waiting = [section for section in chosen if options.again or results[section.name].outcome != DONE]
    picked = fitting(waiting, options.minutes)
    for section in chosen:
        if section not in picked:
            why = "does not fit into --minutes" if section in waiting else "has ended well before"
            print(f"{section.name}: {why}", flush=True)
            continue
        print(f"{section.name}: {section.what} (about {section.seconds:.0f} s)", flush=True)
        left = deadline - time.monotonic()
        if left < section.seconds:
            results[section.name] = replace(results[section.name], outcome=LATE)
        else:
            results[section.name] = _run_section(section, options, left)
        print(f"{section.name}: {results[section.name].outcome}, {results[section.name].seconds:.0f} s", flush=True)
        replace_file(options.output / "summary.md", markdown(list(results.values())))
    replace_file(options.output / "summary.md", markdown(list(results.values())))
    judged = [results[section.name] for section in chosen if section in picked or section not in waiting]
    wrong = [result.section.name for result in judged if not result.right]
    verdict = f"to look at: {', '.join(wrong)}" if wrong else "all within tolerance"
    print(f"{options.output / 'summary.md'}: {verdict}", flush=True)
    return int(bool(wrong))


def fitting(sections: Sequence[Section], minutes: float | None) -> list[Section]:
    """Return the sections, from the first on, whose expected seconds fit into the minutes together."""
    picked, left = list[Section](), float("inf") if minutes is None else 60 * minutes
    for section in sections:
        if section.seconds <= left:
            picked.append(section)
            left -= section.seconds
    return picked


def _chosen(sections: Sequence[Section], options: Options) -> list[Section]:
    names = [section.name for section in sections]
    if unknown := [name for name in options.names if name not in names]:
        raise ValueError(f"--sections {' '.join(unknown)}: no such section; there are {', '.join(names)}")
    return [section for section in sections if not options.names or section.name in options.names]


def _check_output(options: Options) -> None:
    path, mine = options.output / "run.json", {"device": options.device, "tiny": options.tiny}
    if path.exists() and (theirs := json.loads(path.read_text())) != mine:
        raise ValueError(f"--output {options.output} has results of {theirs}, this run is {mine}: choose another one")
    replace_file(path, json.dumps(mine) + "\n")


def last_result(section: Section, output: Path) -> Result:
    """Return how the last attempt of a section ended; `NEVER` also for one that was killed with its runner."""
    folder = output / section.name
    if not (folder / "state.json").exists():
        return Result(section)
    state = json.loads((folder / "state.json").read_text())
    entries = read_entries(folder / str(state["attempts"]) / "figures.jsonl")
    return Result(section, state["outcome"], state["seconds"], state["attempts"], entries)


def _run_section(section: Section, options: Options, left: float) -> Result:
    folder = options.output / section.name
    folder.mkdir(exist_ok=True)
    attempt = 1 + max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
    place = folder / str(attempt)
    place.mkdir()
    patience = PATIENCE if options.tiny else 1.0
    limit = patience * section.most
    command = [sys.executable, "-m", "benchmarks.gpu.worker", section.run, f"--folder={place}", f"--limit={limit}"]
    command += [f"--device={options.device}", *["--tiny"] * options.tiny]
    begin = time.monotonic()
    with (place / "log.txt").open("wb") as log, _started(command, log) as process:
        in_time = _follow(process, place / "figures.jsonl", patience * STARTING, limit, begin + left)
    seconds = round(time.monotonic() - begin, 1)
    entries = read_entries(place / "figures.jsonl")
    outcome = _outcome(process.returncode, entries) if in_time else f"stopped after {seconds:.0f} s"
    if outcome != DONE:
        lines = (place / "log.txt").read_text(errors="replace").splitlines()
        print("\n".join(["", *lines[-TAIL:], f"(the end of {place / 'log.txt'})"]), flush=True)
    replace_file(
        folder / "state.json", json.dumps({"outcome": outcome, "seconds": seconds, "attempts": attempt}) + "\n"
    )
    return Result(section, outcome, seconds, attempt, entries)


@contextmanager
def _started(command: Sequence[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own, and kill the group in the end."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **offline, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver may hold a process that hangs
            process.wait(10)


def _follow(process: subprocess.Popen[bytes], path: Path, starting: float, limit: float, deadline: float) -> bool:
    """Print a section's figures as they come; return whether it ended before the deadline, having started in `starting`
    seconds, and in `limit` seconds from then on."""
    printed, last = 0, min(deadline, time.monotonic() + starting)
    while True:
        ended = process.poll() is not None
        entries = read_entries(path)
        if entries and not printed:
            last = min(deadline, time.monotonic() + limit)
        for entry in entries[printed:]:
            if "figure" in entry:
                print("  ", *check_of_entry(entry).cells(), sep="  ", flush=True)
            for remark in remarks([entry]):
                print("  ", remark, sep="  ", flush=True)
        printed = len(entries)
        if ended or time.monotonic() > last:
            return ended
        time.sleep(0.1)


def _outcome(code: int | None, entries: Sequence[dict[str, Any]]) -> str:
    if code is not None and code < 0:
        return f"crashed: {signal.Signals(-code).name}"
    if code or not entries or "ended" not in entries[-1]:
        return f"failed: exit code {code}"
    wrong = [entry["figure"] for entry in entries if "figure" in entry and not entry["right"]]
    false = [name for name in wrong if name in EXPECTED and EXPECTED[name].exact]
    return f"wrong: {', '.join(false)}" if false else DONE
