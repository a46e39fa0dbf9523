"""Programs in the sandbox: what they cannot do, with root and without, and where namespaces are not allowed."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from usp.rlhf.environments import sandbox
from usp.rlhf.environments.sandbox import Limits, Ran, Unprotected, run_python

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
    "processes": ("import os; os.listdir('/proc')", NOT_THERE),
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
        assert "Network is unreachable" in ran.output
    ran = run_python("import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))")
    assert "Network is unreachable" in ran.output


@needs_protection
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


@needs_protection
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_user_without_root_is_protected_in_the_same_way(tmp_path: Path) -> None:
    python = Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("no interpreter that every user may read")
    copy = tmp_path / "sandbox.py"
    copy.write_text(FILE.read_text())
    program = """
from sandbox import run_python
print(run_python('import os; print(os.listdir("/"), os.getuid()); open("/etc/passwd")').output)
print(run_python('import os\\nfor _ in range(99): os.fork()').output)
"""
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    copy.chmod(0o644)
    tmp_path.chmod(0o755)
    ran = subprocess.run(
        [python, "-c", program], cwd=tmp_path, env={}, user=65534, group=65534, extra_groups=[], capture_output=True
    )
    said = ran.stdout.decode()
    assert "65534" in said and NOT_THERE in said and "BlockingIOError" in said, ran.stderr.decode()


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


def test_without_namespaces_a_program_is_refused_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "sandbox.py"
    copy.write_text(
        FILE.read_text().replace(
            '    call("unshare",', '    raise PermissionError(1, "not permitted")\n    call("unshare",'
        )
    )
    monkeypatch.setattr(sandbox, "__file__", str(copy))
    with pytest.raises(Unprotected, match=r"namespaces \(not permitted\), and so the network and the number"):
        run_python("print('no')")
    ran = run_python(f"print(input())\nopen({str(copy)!r})", "hello", unprotected=True)
    assert ran.output.startswith("hello\n") and FORBIDDEN in ran.output  # Landlock holds
