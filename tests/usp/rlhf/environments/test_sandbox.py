"""Programs in the sandbox: what they cannot do, with root and without, and where namespaces are not allowed."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.usp.rlhf.environments import attacks
from usp.rlhf.environments import sandbox
from usp.rlhf.environments.sandbox import Limits, Ran, Unprotected, cgroup, memory_group, run_python

FILE = Path(sandbox.__file__)


def missing() -> str:
    try:
        run_python("")
    except Unprotected as error:
        return str(error)
    return ""


needs_protection = pytest.mark.skipif(bool(missing()), reason=f"programs cannot be confined here: {missing()}")
NOT_THERE, FORBIDDEN = "FileNotFoundError", "PermissionError"
FAULTS = {
    "a file": (f"open({str(FILE)!r})", NOT_THERE),
    "users": ("open('/etc/passwd')", NOT_THERE),
    "processes": ("import os; os.listdir('/proc/1')", NOT_THERE),
    "memory": ("bytearray(10**10)", "MemoryError"),
    "a large file": ("open('x', 'wb').write(bytes(1 << 27))", "No space left on device"),
    "many files": ("for i in range(99): open(f'{i}', 'wb').write(bytes(1 << 20))", "No space left on device"),
    "the interpreter": ("import os; open(os.__file__, 'a')", "denied" if os.geteuid() == 0 else "Read-only"),
    "forks": ("import os\nfor _ in range(99): os.fork() or __import__('time').sleep(99)", "BlockingIOError"),
    "threads": (
        "import threading as t, time\nfor _ in range(99): t.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "can't start new thread",
    ),
    "a crash": ("import ctypes; ctypes.string_at(0)", ""),
    "an exit code": ("raise SystemExit(3)", ""),
}


@needs_protection
def test_a_program_runs_with_its_input_in_a_folder_of_its_own() -> None:
    program = "import os, tempfile; print(input(), sorted(os.listdir()), os.getcwd(), tempfile.mkdtemp()[:9])"
    assert run_python(program, "hello") == Ran("hello ['main.py', 'stdin'] /sandbox /sandbox/\n", 0)


@needs_protection
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow(but=1)
def test_what_a_program_cannot_do(fault: str) -> None:
    code, said = FAULTS[fault]
    ran = run_python(code, limits=Limits(seconds=20, cpu_seconds=4, files=1 << 24, processes=4))
    assert ran.code and said in ran.output
    expected = {"a crash": (139, "it was ended by SIGSEGV"), "an exit code": (3, "")}.get(fault, (1, ""))
    assert (ran.code, ran.ended) == expected


@needs_protection
def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = run_python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
        assert "Address family not supported by protocol" in ran.output


@needs_protection
@pytest.mark.slow
def test_time_and_output_are_bounded_by_the_caller() -> None:
    ran = run_python("import time; print('begun', flush=True); time.sleep(99)", limits=Limits(seconds=1.5))
    assert ran.ended == "it took longer than 1.5 seconds" and ran.output in ("begun\n", "")
    ran = run_python("while True: pass", limits=Limits(seconds=60, cpu_seconds=1))
    assert ran.ended == "it was killed: more than 1 CPU seconds, or no memory"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ran = run_python(
        "print('first')\nfor _ in range(100): print('x' * 10**6)\nprint('last')", limits=Limits(seconds=60)
    )
    assert ran.output.startswith("first\n") and ran.output.endswith("last\n") and len(ran.output) < 9000
    assert "bytes left out]" in ran.output and ran.code == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB


@needs_protection
def test_nothing_of_a_program_outlives_it() -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(600)\nprint('ends')"
    begin = time.monotonic()
    ran = run_python(code, limits=Limits(seconds=600))  # its output ends when the last process that has it does
    assert ran.ended == "" and time.monotonic() - begin < 500


def missing_for(kind: str) -> str:
    """Why the attacks of a kind of user cannot be tried here."""
    if kind == "root":
        return missing() or ("" if os.geteuid() == 0 else "this is not root")
    if os.geteuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare"))):
        return "it takes root, setpriv and unshare to become another user"
    return "" if Path("/usr/bin/python3").exists() else "no interpreter that every user may read"


@pytest.mark.parametrize("kind", attacks.KINDS)
@pytest.mark.slow
def test_attacks_see_nothing_of_the_machine_and_are_bounded(kind: str) -> None:
    if why := missing_for(kind):
        pytest.skip(why)
    seen = attacks.seen_by(kind)
    assert seen.keys() == attacks.MEANS.keys()
    for attack, saw in seen.items():
        assert not saw.startswith(attacks.REACHED), (attack, saw)
    numbers = {name: int(saw.split(" after ")[1].split()[0]) for name, saw in seen.items() if " after " in saw}
    most = {"files in memory": 16, "inodes": 4100, "open files": 64, "processes": 8, "threads": 8, "pipes": 4}
    assert all(numbers[name] <= bound for name, bound in most.items()), numbers
    assert numbers["socket buffers"] <= 32 and numbers["processes"] >= 4


@needs_protection
@pytest.mark.slow
def test_what_programs_need_is_there() -> None:
    program = """
import multiprocessing, subprocess, torch
from multiprocessing.shared_memory import SharedMemory
with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, 2]))
made = SharedMemory(create=True, size=100); made.close(); made.unlink()
print(subprocess.run("echo $((1 + 1))", shell=True, capture_output=True, text=True).stdout, open("/dev/urandom", "rb"))
print(float(torch.ones(3).sum()))
"""
    ran = run_python(program, limits=Limits(seconds=600, cpu_seconds=200))
    assert ran == Ran("[1, 2]\n2\n <_io.BufferedReader name='/dev/urandom'>\n3.0\n", 0)


def cgroups_in(tmp_path: Path, own: str, **controls: str) -> tuple[Path, Path]:
    """A file like /proc/self/cgroup, and a tree of cgroups, the names with __ for a slash."""
    for name, control in controls.items():
        group = tmp_path / "root" / name.replace("__", "/")
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.subtree_control").write_text(control)
        (group / "cgroup.procs").touch()
    (tmp_path / "own").write_text(f"4:memory:/elsewhere\n0::{own}\n")
    return tmp_path / "own", tmp_path / "root"


@pytest.mark.slow
def test_the_nearest_cgroup_that_gives_memory_is_found_and_limited(tmp_path: Path) -> None:
    own, root = cgroups_in(tmp_path, "/user/run", user="cpu memory pids\n", user__run="")
    assert cgroup(own, [str(root)]) == root / "user"
    assert cgroup(own, [str(tmp_path / "none"), str(root)]) == root / "user"
    (root / "user" / "cgroup.subtree_control").write_text("cpu pids\n")
    assert cgroup(own, [str(root)]) is None
    own.write_text("4:memory:/only version 1\n")
    assert cgroup(own, [str(root)]) is None
    with memory_group(Limits(memory=1000, files=24, processes=5), root / "user") as folder:
        group = Path(folder)
        assert group.parent == root / "user" and (group / "memory.max").read_text() == "1024"
        assert (group / "pids.max").read_text() == "9"
        for file in group.iterdir():  # as a cgroup's are, these are no obstacle to its end
            file.unlink()
    assert [each.name for each in group.iterdir()] == ["cgroup.kill"]  # what is left in it is ended
    with memory_group(Limits(), None) as folder:
        assert folder == ""


@needs_protection
@pytest.mark.slow
def test_the_guard_enters_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, root = cgroups_in(tmp_path, "/", user="memory pids")
    entered: list[str] = []
    group = sandbox.memory_group

    @contextmanager
    def watched(limits: Limits, parent: Path | None) -> Iterator[str]:
        with group(limits, root / "user") as folder:
            yield folder
            entered.append((Path(folder) / "cgroup.procs").read_text())
            for file in Path(folder).iterdir():
                file.unlink()

    monkeypatch.setattr(sandbox, "memory_group", watched)
    assert run_python("print('inside')").output == "inside\n" and entered == ["0"]


def test_files_are_confined_by_landlock_alone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    folder = str(tmp_path / "folder")
    program = f"""
import sys; sys.path.insert(0, {str(FILE.parent)!r})
import sandbox
try:
    sandbox.call("prctl", sandbox.NO_NEW_PRIVS, 1, 0, 0, 0)
    sandbox.confine_files(sandbox.needed_paths(sys.executable, [sys.base_prefix]), {folder!r})
except OSError as error: sys.exit(f"none: {{error}}")
open({folder!r} + "/x", "w").write("x"); open("/dev/null", "w").write("x"); import json.tool
for mode in ("r", "w"):
    try: open({str(tmp_path / "other")!r}, mode); sys.exit("opened")
    except PermissionError: pass
"""
    (tmp_path / "other").write_text("secret")
    ran = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    if "none: " in ran.stderr:
        pytest.skip(f"this kernel has no Landlock: {ran.stderr}")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_without_namespaces_a_program_is_refused_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "sandbox.py"
    refused = '    raise PermissionError(1, "not permitted")\n    uid, gid, new ='
    copy.write_text(FILE.read_text().replace("    uid, gid, new =", refused))
    shutil.copy(FILE.with_name("forbidden.json"), tmp_path)
    monkeypatch.setattr(sandbox, "__file__", str(copy))
    with pytest.raises(Unprotected, match=r"namespaces \(not permitted\), and so the number of processes, and others"):
        run_python("print('no')")
    ran = run_python(f"print(input())\nopen({str(copy)!r})", "hello", unprotected=True)
    assert ran.output.startswith("hello\n") and FORBIDDEN in ran.output  # Landlock holds
    ran = run_python("import os, socket\ntry: socket.socket()\nfinally: os.memfd_create('x')", unprotected=True)
    assert "Address family not supported" in ran.output and "Operation not permitted" in ran.output  # as does seccomp
