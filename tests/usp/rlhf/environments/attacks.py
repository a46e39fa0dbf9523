"""What attacks on the sandbox see, as a table: `python -m tests.usp.rlhf.environments.attacks` writes docs/sandbox.md.

`python attacks.py` beside copies of sandbox.py and forbidden.json prints what they see for the user that
calls it, as JSON."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROGRAM = "attack_program.py"
NOBODY = 65534
MIB = 1 << 20
LIMITS: dict[str, Any] = {"seconds": 60.0, "cpu_seconds": 20, "memory": 256 * MIB, "files": 16 * MIB, "output": 1 << 16}
GIVEN = {"memory": 512 * MIB, "files": 64 * MIB, "inodes": 20_000}
REACHED = ("it works", "nothing")  # said of an attack that succeeds
KINDS = {  # of users that call the sandbox, and how a command becomes theirs
    "root": (),
    "a user": ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
    "root of a user namespace": (
        *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
        *("unshare", "--user", "--map-root-user"),
    ),
}
MEANS = {
    "malloc": "RLIMIT_AS: 256 MiB, of 512 asked for",
    "mmap shared anonymous": "RLIMIT_AS: 256 MiB, of 512 asked for",
    "memfd": "seccomp",
    "sysv shared memory": "seccomp (and an IPC namespace)",
    "message queue": "seccomp (and an IPC namespace)",
    "files in memory": "size of the tmpfs: 16 MiB in /sandbox, /tmp and /dev/shm together",
    "inodes": "number of files of the tmpfs: 4,096",
    "open files": "RLIMIT_NOFILE: 64",
    "pipes": "RLIMIT_NOFILE, and the kernel's 64 KiB a pipe",
    "socket buffers": "RLIMIT_NOFILE, and the kernel's buffers",
    "processes": "RLIMIT_NPROC: 8 of this user in this namespace, of which the guard may be 2",
    "threads": "RLIMIT_NPROC",
    "internet": "seccomp (and a network namespace)",
    "internet 6": "seccomp (and a network namespace)",
    "unix socket outside": "mount namespace",
    "abstract unix socket outside": "network namespace (and Landlock)",
    "vsock": "seccomp",
    "netlink": "seccomp (and a network namespace)",
    "read a file outside": "mount namespace (and Landlock)",
    "read the users": "mount namespace (and Landlock)",
    "read other processes": "mount namespace (and Landlock)",
    "write a file outside": "mount namespace (and Landlock)",
    "write to the interpreter": "read-only mounts (and Landlock)",
    "signal the parent": "PID namespace (and Landlock)",
    "signal everyone": "PID namespace (and Landlock): nobody else is there",
    "ptrace": "seccomp (and a PID namespace)",
    "memory of another process": "seccomp (and a PID namespace)",
    "user namespace": "seccomp",
    "mount": "seccomp (and Landlock)",
    "become root": "no rights in any namespace",
    "io uring": "seccomp",
    "keys of the user": "seccomp",
    "a loop": "RLIMIT_CPU: 1 second",
    "sleep": "the caller: 2 seconds",
    "output of 100 MB": "the caller keeps 8 KiB",
    "a process that stays": "PID namespace: it ends with the program",
}


def seen() -> dict[str, str]:
    """What each attack sees, called as the present user, with `sandbox` on the path."""
    import sandbox  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        path, abstract = f"{folder}/socket", f"usp-{os.getpid()}"
        listening = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        for each, address in zip(listening, (path, "\0" + abstract), strict=True):
            each.bind(address)
            each.listen()
        secret = Path(folder, "secret")
        secret.write_text("secret")
        outside = {"port": server.getsockname()[1], "unix": path, "abstract": abstract, "file": str(secret)}
        given = json.dumps({**GIVEN, **outside, "pid": os.getpid()})
        ran = sandbox.run_python(Path(__file__).with_name(PROGRAM).read_text(), given, sandbox.Limits(**LIMITS))
        for each in listening:
            each.close()
    try:
        found = dict(map(json.loads, ran.output.splitlines()))
    except ValueError:
        found = {"all": f"{ran.output} {ran.ended}"}
    loop = sandbox.run_python("while True: pass", limits=sandbox.Limits(200.0, 1))
    sleep = sandbox.run_python("import time; time.sleep(99)", limits=sandbox.Limits(2.0))
    flood = sandbox.run_python("for _ in range(100): print('x' * 10**6)", limits=sandbox.Limits(60.0, 30))
    stays = sandbox.run_python(
        "import os, time\nif not os.fork():\n    os.setsid(); time.sleep(50)", limits=sandbox.Limits(60.0)
    )
    found |= {"a loop": loop.ended, "sleep": sleep.ended, "output of 100 MB": f"{len(flood.output):,} characters"}
    return {**found, "a process that stays": stays.ended or f"exit code {stays.code}"}


def seen_by(kind: str) -> dict[str, str]:
    """What each attack sees, called as a kind of user. Raises RuntimeError where this process cannot become it."""
    import usp.rlhf.environments.sandbox as module

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        sandbox = Path(module.__file__)
        for file in (sandbox, sandbox.with_name("forbidden.json"), HERE / PROGRAM, Path(__file__)):
            shutil.copy(file, folder)
            Path(folder, file.name).chmod(0o644)
        python = sys.executable if kind == "root" else "/usr/bin/python3"  # others may not read ours
        command = [*KINDS[kind], python, "-B", f"{folder}/{Path(__file__).name}"]
        ran = subprocess.run(command, cwd="/", env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    found: dict[str, str] = json.loads(ran.stdout)
    return found


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    heads = ["attack", "limit", *(f"seen by {kind}" for kind in columns)]
    rows = [[name, MEANS[name], *(column[name] for column in columns.values())] for name in MEANS]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def main() -> None:
    columns = dict[str, dict[str, str]]()
    threads = [threading.Thread(target=lambda kind=kind: columns.update({kind: seen_by(kind)})) for kind in KINDS]
    for each in threads:
        each.start()
        each.join()
    path = HERE.parents[3] / "docs" / "sandbox.md"
    before = path.read_text().split("| attack |")[0]
    path.write_text(before + table(columns) + "\n")


if __name__ == "__main__":
    if Path(__file__).with_name("sandbox.py").exists():
        print(json.dumps(seen()))
    else:
        main()
