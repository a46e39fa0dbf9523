"""Python programs that a policy wrote, each in a process without files of others, network and further processes.

    run_python --request--> guard, this file as a script --namespaces, limits--> python -I main.py

    files         a mount namespace whose root holds the interpreter, read-only, and an empty folder of limited size;
                  and Landlock, alone where namespaces are not allowed
    network       a network namespace, whose loopback is down
    processes     a PID namespace, which ends with the program, and RLIMIT_NPROC of a user that has no others
    CPU seconds, memory, a file's size             RLIMIT_CPU, RLIMIT_AS, RLIMIT_FSIZE
    seconds, output                                the caller, who ends the program, and keeps a part of what it prints

All of it are system calls (man 7 namespaces, man 7 landlock), with and without root. Only the standard library is
imported: environments run this beside the ranks."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

READY = b"ready\n"  # what a guard prints before the program, or else what is missing
FOLDER = "/sandbox"  # where a program runs
OWNERS = 1 << 20  # with root, programs belong to users from here on: one for each process number, and nobody's
# From linux/sched.h, sys/mount.h, linux/prctl.h and linux/landlock.h, whose calls have one number everywhere.
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE, RELATIME = 1, 2, 4, 32, 4096, 1 << 14, 1 << 18, 1 << 21
LOCKED = RDONLY | NOSUID | NODEV | 8 | 1024 | 2048  # flags of a mount that a user namespace must keep; as in statvfs
DETACH, PDEATHSIG, NO_NEW_PRIVS = 2, 1, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights by version of Landlock; later ones have 16
READ, OF_FILES = 1 << 0 | 1 << 2 | 1 << 3, 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15


class Limits(NamedTuple):
    """Limits of a program: seconds, CPU seconds and bytes of memory of a process, bytes of its folder and of the output
    that is kept, and processes at a time, with threads."""

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory: int = 1 << 30
    files: int = 1 << 26
    output: int = 1 << 13
    processes: int = 8


LIMITS = Limits()


@dataclass(frozen=True)
class Ran:
    """What a program printed, its exit code, 128 and more for a signal, and why it was ended, empty if it was not."""

    output: str
    code: int
    ended: str = ""


class Unprotected(RuntimeError):
    """The machine lacks a protection."""


def run_python(code: str, stdin: str = "", limits: Limits = LIMITS, unprotected: bool = False) -> Ran:
    """Run a program, which reads `stdin`, with the packages of this interpreter.

    unprotected: also where the machine lacks a protection, with the others.

    Raises Unprotected, naming what is missing.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        request = {"code": code, "stdin": stdin, "limits": limits, "folder": folder, "unprotected": unprotected}
        request |= {"python": sys.executable, "prefixes": [sys.prefix, sys.base_prefix]}
        command, pipe = [sys.executable, "-I", "-S", __file__], subprocess.PIPE
        guard = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            late, begin, left_out, end = _exchange(guard, json.dumps(request).encode(), limits)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)  # and so all processes of the namespace
            guard.wait()
    output = begin.removeprefix(READY)
    if not (begin.startswith(READY) or late):
        raise Unprotected((output + end).decode(errors="replace").strip() or "the sandbox ended without a word")
    cut = f"\n[{left_out:,} bytes left out]\n".encode() if left_out else b""
    status = guard.returncode if guard.returncode >= 0 else 128 - guard.returncode
    known = {128 + int(each): f"it was ended by {each.name}" for each in signal.Signals}
    known |= dict.fromkeys((137, 152), f"it was killed: more than {limits.cpu_seconds} CPU seconds, or no memory")
    why = f"it took longer than {limits.seconds:g} seconds" if late else known.get(status, "")
    return Ran((output + cut + end).decode(errors="replace"), status, why)


def _exchange(guard: subprocess.Popen[bytes], request: bytes, limits: Limits) -> tuple[bool, bytes, int, bytes]:
    """Return whether a program takes too long, and the beginning and the end of its output, with the bytes between."""
    assert guard.stdin is not None and guard.stdout is not None
    begin, end, left_out, half = bytearray(), bytearray(), 0, limits.output // 2
    until = time.monotonic() + limits.seconds
    with guard.stdout, selectors.DefaultSelector() as selector:
        with suppress(BrokenPipeError), guard.stdin:
            guard.stdin.write(request)
        selector.register(guard.stdout, selectors.EVENT_READ)
        while (left := until - time.monotonic()) > 0:
            if not selector.select(left):
                break
            if not (piece := os.read(guard.stdout.fileno(), 1 << 16)):
                return False, bytes(begin), left_out, bytes(end)
            room = max(0, len(READY) + half - len(begin))
            begin += piece[:room]
            end += piece[room:]
            left_out += max(0, len(end) - half)
            del end[: max(0, len(end) - half)]
    return True, bytes(begin), left_out, bytes(end)


# In the guard's process


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library. Raises OSError with its error."""
    libc = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    function = getattr(libc, name)
    function.restype = ctypes.c_long
    if (returned := function(*values)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(returned)


def needed_paths(python: str, prefixes: Iterable[str]) -> list[str]:
    """Return what an interpreter reads: its installations, the system's libraries, and itself, under every name."""
    paths = {*prefixes} - {"/", "/usr", "/usr/local"}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/dev/null", python}
    link = Path(python)
    while link.is_symlink():
        link = Path(os.path.normpath(link.parent / link.readlink()))
        paths.add(str(link))
    return sorted(path for path in paths if Path(path).exists())


def isolate(root: str, paths: Iterable[str], limits: Limits, owner: int) -> None:
    """Enter namespaces whose root, built at `root`, holds only `paths` and an empty folder of an owner (0: oneself).
    Raises OSError where that is not allowed. The next child is in the PID namespace."""
    uid, gid, new = os.geteuid(), os.getegid(), NEWNS | NEWIPC | NEWPID | NEWNET
    call("unshare", new if owner else new | NEWUSER)
    if not owner:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    call("mount", None, b"/", None, REC | PRIVATE, None)
    call("mount", b"tmpfs", root.encode(), b"tmpfs", NOSUID | NODEV, f"mode=755,size={limits.files}".encode())
    for path in paths:
        place = Path(root + path)
        if Path(path).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        call("mount", path.encode(), bytes(place), None, BIND | REC, None)
        flags = os.statvfs(place).f_flag
        keep = flags & LOCKED | (RELATIME if flags & 4096 else 0)
        call("mount", None, bytes(place), None, REMOUNT | BIND | RDONLY | keep, None)
    Path(root + FOLDER).mkdir()
    os.chown(root + FOLDER, owner or uid, owner or gid)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)


def confine_files(paths: Iterable[str], folder: str) -> None:
    """Allow this process and its children only to read `paths` and to use a folder, by Landlock. Raises OSError."""
    version = call("syscall", CREATE_RULESET, None, 0, 1)
    everything = (1 << FS_RIGHTS.get(version, 16)) - 1
    rules = call("syscall", CREATE_RULESET, struct.pack("=Q", everything), 8, 0)
    for path, rights in [*((path, READ) for path in paths), (folder, everything), ("/dev/null", READ | 2)]:
        place = os.open(path, os.O_PATH)
        rights &= everything if Path(path).is_dir() else everything & OF_FILES
        call("syscall", ADD_RULE, rules, 1, struct.pack("=Qi", rights, place), 0)
    call("syscall", RESTRICT_SELF, rules, 0)


def wait_for(child: int) -> None:
    """Exit as a child does, when it does."""
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def protect(request: dict[str, Any], limits: Limits) -> tuple[str, list[str]]:
    """Protect what this process becomes; return the folder of the program, and what is missing."""
    folder, paths, missing = request["folder"], needed_paths(request["python"], request["prefixes"]), []
    if sys.platform != "linux":
        return folder, [f"files, network and processes are not confined on {sys.platform}"]
    call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    owner = 0 if os.geteuid() else OWNERS + os.getpid()
    try:
        isolate(folder, paths, limits, owner)
        folder, paths = FOLDER, ["/"]
        for _ in range(2):  # the first child begins the namespace, and ends it when the second, the program, ends
            if child := os.fork():
                wait_for(child)
            call("prctl", PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if owner:
            os.setgroups([])
            os.setresgid(owner, owner, owner)
            os.setresuid(owner, owner, owner)
    except OSError as error:
        missing.append(f"namespaces ({error.strerror}), and so the network and the number of processes")
    try:
        call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
        confine_files(paths, folder)
    except OSError as error:
        missing += [f"Landlock ({error.strerror}), and so the files"] if missing else []
    return folder, missing


def main() -> None:
    """Read a request, and become the program."""
    request = json.load(sys.stdin)
    limits = Limits(*request["limits"])
    folder, missing = protect(request, limits)
    if missing and not request["unprotected"]:
        sys.exit(f"this machine cannot protect itself from programs: {'; '.join(missing)}")
    os.chdir(folder)
    for name, text in (("main.py", request["code"]), ("stdin", request["stdin"])):
        Path(name).write_text(text, "utf-8", "surrogatepass")
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    for limit, most in (
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_FSIZE, limits.files),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    home = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.execve(request["python"], [request["python"], "-I", "main.py"], home)


if __name__ == "__main__":
    main()
