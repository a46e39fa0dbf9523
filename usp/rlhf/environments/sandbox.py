"""Python programs that a policy wrote, each in a process without files of others, network and further processes.

    run_python --request--> guard, this file as a script --namespaces, limits--> python -I main.py

    files         a mount namespace whose root holds the interpreter and the system's programs, read-only, and folders
                  of limited size and number of files; and Landlock, alone where namespaces are not allowed
    network       seccomp, which leaves the sockets of one host; a network namespace without those of others
    processes     a PID namespace, which ends with the program, and RLIMIT_NPROC of a user that has no others
    memory        RLIMIT_AS of each process; seccomp, without what no limit counts; and a cgroup for all of it, where
                  the machine has one to give (version 2, with the memory controller, that this user may write to)
    CPU seconds, a file's size, open files         RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_NOFILE
    seconds, output                                the caller, who ends the program, and keeps a part of what it prints

All of it are system calls (man 7 namespaces, landlock, cgroups; man 2 seccomp), with and without root. Only the
standard library is imported: environments run this beside the ranks."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

READY = b"ready\n"  # what a guard prints before the program, or else what is missing
FOLDER = "/sandbox"  # where a program runs
SHARED = ("/tmp", "/dev/shm")  # other folders of its own, of the same size together
NOBODY = 65534
OWNERS = 1 << 20  # with root, programs belong to users from here on: one for each process number, and nobody's
# From linux/sched.h, sys/mount.h, linux/prctl.h and linux/landlock.h, whose calls have one number everywhere.
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE, RELATIME = 1, 2, 4, 32, 4096, 1 << 14, 1 << 18, 1 << 21
LOCKED = RDONLY | NOSUID | NODEV | 8 | 1024 | 2048  # flags of a mount that a user namespace must keep; as in statvfs
DETACH, PDEATHSIG, NO_NEW_PRIVS, SECCOMP, BY_FILTER = 2, 1, 38, 22, 2
NEW = NEWNS | NEWIPC | NEWUSER | NEWPID | NEWNET | 0x2000000 | 0x4000000  # and CGROUP, UTS
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of rights by version of Landlock; later ones have 16
SCOPED = 6  # the version from which Landlock keeps signals and abstract sockets inside
READ, OF_FILES = 1 << 0 | 1 << 2 | 1 << 3, 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
CGROUPS, PROCS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"), "cgroup.procs"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# By seccomp(2), for x86_64 and aarch64: the architecture as the kernel audits it, and numbers of system calls,
# with those of `forbidden.json`, by what they would give a program.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE, CLONE3, SOCKET, SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
FORBIDDEN: dict[str, dict[str, list[int]]] = json.loads(Path(__file__).with_name("forbidden.json").read_text())


class Limits(NamedTuple):
    """Limits of a program: seconds, CPU seconds and bytes of memory of a process (where there is a cgroup, of all),
    bytes of its folders and of the output that is kept, processes at a time, with threads, open files of a process, and
    files in its folders."""

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory: int = 1 << 30
    files: int = 1 << 26
    output: int = 1 << 13
    processes: int = 8
    open_files: int = 64
    inodes: int = 4096


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
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder, memory_group(limits, cgroup()) as group:
        request = {"code": code, "stdin": stdin, "limits": limits, "folder": folder, "unprotected": unprotected}
        request |= {"python": sys.executable, "prefixes": [sys.prefix, sys.base_prefix], "group": group}
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


@contextmanager
def memory_group(limits: Limits, parent: Path | None) -> Iterator[str]:
    """Yield the folder of a new cgroup of limited memory, which a guard enters; "" without a parent. What is left in it
    is killed at the end. Raises OSError if it cannot be limited."""
    if parent is None:
        yield ""
        return
    group = parent / f"usp-sandbox-{secrets.token_hex(8)}"
    group.mkdir()
    try:
        (group / "memory.max").write_text(str(limits.memory + limits.files))
        (group / "pids.max").write_text(str(4 + limits.processes))  # with the guard's
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        yield str(group)
    finally:
        with suppress(OSError):  # before Linux 5.14; the PID namespace has ended already
            (group / "cgroup.kill").write_text("1")
        for _ in range(100):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.01)  # its last process is about to go


def cgroup(own: Path = Path("/proc/self/cgroup"), roots: Iterable[str] = CGROUPS) -> Path | None:
    """Return the nearest cgroup around this process of whose children this user may limit the memory; None without."""
    for root in map(Path, roots):
        with suppress(OSError, StopIteration):
            name = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
            inside = Path(os.path.normpath(f"{root}/{name}"))
            for place in (inside, *inside.parents):
                if not place.is_relative_to(root):
                    break
                controls = (place / "cgroup.subtree_control").read_text().split()
                if {"memory", "pids"} <= {*controls} and all(os.access(x, os.W_OK) for x in (place, place / PROCS)):
                    return place
    return None


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
    paths |= {"/bin", "/usr/bin", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"}
    paths |= {*DEVICES, "/proc/cpuinfo", python}  # torch reads that, and complains
    link = Path(python)
    while link.is_symlink():
        link = Path(os.path.normpath(link.parent / link.readlink()))
        paths.add(str(link))
    return sorted(path for path in paths if Path(path).exists())


def isolate(root: str, paths: Iterable[str], limits: Limits, owner: int) -> int:
    """Enter namespaces whose root, built at `root`, holds only `paths` and empty folders of a user, which is returned:
    an owner where this process may become it, or else 0: this process itself. Raises OSError where namespaces are not
    allowed. The next child is in the PID namespace."""
    uid, gid, new = os.geteuid(), os.getegid(), NEWNS | NEWIPC | NEWPID | NEWNET
    if owner:
        try:  # as root, but not that of a user namespace without such a user
            os.chown(root, owner, owner)
            call("unshare", new)
        except OSError:
            owner = 0
    if not owner:
        call("unshare", new | NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid or NOBODY} {uid} 1")  # not root in there: it loses all rights
        Path("/proc/self/gid_map").write_text(f"{gid or NOBODY} {gid} 1")
    call("mount", None, b"/", None, REC | PRIVATE, None)
    options = f"mode=755,size={limits.files},nr_inodes={limits.inodes}".encode()
    call("mount", b"tmpfs", root.encode(), b"tmpfs", NOSUID | NODEV, options)
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
        call("mount", None, bytes(place), None, REMOUNT | BIND | RDONLY | NOSUID | keep, None)
    for folder in (FOLDER, *SHARED):
        place = Path(root + folder)
        place.mkdir(parents=True, exist_ok=True)
        os.chown(place, owner or uid or NOBODY, owner or gid or NOBODY)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    return owner


def forbid() -> None:
    """Take system calls from this process and its children for good: those of `FORBIDDEN`, and sockets but those of
    one host (AF_UNIX). Raises OSError where the kernel has no such filter, or this file none for the architecture."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise OSError(f"there is no filter for {machine}")
    column = [*ARCHITECTURES].index(machine)
    load, equal, at_least, same, give = 0x20, 0x15, 0x35, 0x45, 0x06  # of classic BPF; same: a bit is set
    allow, kill, deny = 0x7FFF0000, 0x80000000, 0x50000
    program = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURES[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    if machine == "x86_64":
        program += [(at_least, 0, 1, 1 << 30), (give, 0, 0, kill)]  # the x32 calls
    for numbers in (each for calls in FORBIDDEN.values() for each in calls.values()):
        program += [(equal, 0, 1, numbers[column]), (give, 0, 0, deny | errno.EPERM)]
    program += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, deny | errno.ENOSYS)]  # the C library takes clone instead
    program += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (same, 0, 1, NEW), (give, 0, 0, deny | errno.EPERM)]
    program += [(load, 0, 0, 0)]
    program += [(equal, 1, 0, SOCKET[column]), (equal, 0, 3, SOCKETPAIR[column]), (load, 0, 0, 16)]
    program += [(equal, 1, 0, socket.AF_UNIX), (give, 0, 0, deny | errno.EAFNOSUPPORT), (give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    call("prctl", SECCOMP, BY_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)), 0, 0)


def confine_files(paths: Iterable[str], folder: str) -> None:
    """Allow this process and its children only to read `paths`, to use a folder and devices, and to signal each other,
    by Landlock. Raises OSError."""
    version = call("syscall", CREATE_RULESET, None, 0, 1)
    everything = (1 << FS_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("=QQQ", everything, 0, 3 if version >= SCOPED else 0)
    rules = call("syscall", CREATE_RULESET, attributes, 24 if version >= SCOPED else 8, 0)
    own = [each for each in SHARED if folder == FOLDER]  # where they are not everyone's
    devices = [each for each in DEVICES if Path(each).exists()]
    for path, rights in [
        *((path, READ) for path in paths),
        *((path, everything) for path in (folder, *own)),
        *((path, READ | 2) for path in devices),
    ]:
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
        if request["group"]:
            (Path(request["group"]) / PROCS).write_text("0")
    except OSError as error:
        missing.append(f"its cgroup {request['group']} ({error.strerror}), and so the memory")
    try:
        owner = isolate(folder, paths, limits, owner)
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
        missing.append(f"namespaces ({error.strerror}), and so the number of processes, and others out of sight")
    try:
        call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
        confine_files(paths, folder)
    except OSError as error:
        missing += [f"Landlock ({error.strerror}), and so the files"] if missing else []
    return folder, missing


def limit(limits: Limits, missing: list[str]) -> None:
    """Limit this process and its children, and add to what is missing."""
    for kind, most in (
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_FSIZE, limits.files),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if sys.platform != "linux":
        return
    resource.setrlimit(resource.RLIMIT_NPROC, (0, limits.processes))
    with suppress(OSError):  # as it should be
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        missing += [] if missing else ["the number of processes (this user is root outside, whom no limit counts)"]
    resource.setrlimit(resource.RLIMIT_NPROC, (limits.processes, limits.processes))
    try:
        forbid()
    except OSError as error:
        missing.append(f"seccomp ({error}), and so memory that no limit counts, and sockets")


def main() -> None:
    """Read a request, and become the program."""
    request = json.load(sys.stdin)
    limits = Limits(*request["limits"])
    folder, missing = protect(request, limits)
    os.chdir(folder)
    for name, text in (("main.py", request["code"]), ("stdin", request["stdin"])):
        Path(name).write_text(text, "utf-8", "surrogatepass")
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    limit(limits, missing)
    if missing and not request["unprotected"]:
        sys.exit(f"this machine cannot protect itself from programs: {'; '.join(missing)}")
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    home = {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.execve(request["python"], [request["python"], "-I", "main.py"], home)


if __name__ == "__main__":
    main()
