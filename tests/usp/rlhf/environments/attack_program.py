"""A program that attacks the sandbox from inside. Each attack is bounded, and says what it has seen.

Its input is JSON: what exists outside, and how far to go."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIVEN: dict[str, Any] = json.loads(sys.stdin.read())
MIB = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)


def until_it_fails(do: Callable[[int], Any], most: int) -> tuple[int, str]:
    """How often something can be done, and why not more often."""
    for number in range(most):
        try:
            do(number)
        except (OSError, MemoryError, RuntimeError) as error:
            return number, named(error)
    return most, "nothing"


def named(error: BaseException) -> str:
    return errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)


def tried(do: Callable[[], Any]) -> str:
    try:
        do()
    except (OSError, MemoryError, ValueError) as error:
        return named(error)
    return "it works"


def called(name: str, *arguments: Any) -> str:
    """What a function of the C library says: an error, or that it works."""
    return errno.errorcode[ctypes.get_errno()] if getattr(LIBC, name)(*arguments) == -1 else "it works"


def malloc() -> str:
    return tried(lambda: bytearray(GIVEN["memory"]))


def mmap_shared_anonymous() -> str:
    return tried(lambda: mmap.mmap(-1, GIVEN["memory"]))


def memfd() -> str:
    return tried(lambda: os.memfd_create("x"))


def sysv_shared_memory() -> str:
    return called("shmget", 0, ctypes.c_size_t(MIB), 0o1600)


def message_queue() -> str:
    return called("msgget", 0, 0o1600)


def files_in_memory() -> str:
    written = 0
    try:
        with Path("/dev/shm/x").open("wb", buffering=0) as shared, Path("x").open("wb", buffering=0) as own:
            for number in range(2 * GIVEN["files"] // MIB):
                written += (shared, own)[number % 2].write(bytes(MIB))
    except OSError as error:
        return f"{named(error)} after {written // MIB} MiB"
    finally:
        for path in ("x", "/dev/shm/x"):
            Path(path).unlink()
    return f"{written // MIB} MiB"


def inodes() -> str:
    number, why = until_it_fails(lambda number: Path(f"/tmp/{number}").mkdir(), GIVEN["inodes"])
    for each in range(number):
        Path(f"/tmp/{each}").rmdir()
    return f"{why} after {number // 100}00"


def open_files() -> str:
    found: list[int] = []
    number, why = until_it_fails(lambda number: found.append(os.open("/dev/null", os.O_RDONLY)), 4096)
    for each in found:
        os.close(each)
    return f"{why} after {number // 10}0"


def held(make: Callable[[], tuple[int, int]]) -> str:
    """How much can be written to pairs of descriptors that nobody reads, all together."""
    ends: list[int] = []
    total = 0

    def fill(number: int) -> None:
        nonlocal total
        ends.extend(make())
        os.set_blocking(ends[-1], False)
        while True:
            try:
                total += os.write(ends[-1], bytes(4096))
            except BlockingIOError:
                return

    _, why = until_it_fails(fill, 1000)
    for each in ends:
        os.close(each)
    return f"{why} after {total // MIB} MiB"


def pipes() -> str:
    return held(os.pipe)


def socket_buffers() -> str:
    def pair() -> tuple[int, int]:
        one, other = socket.socketpair()
        return one.detach(), other.detach()

    return held(pair)


def processes() -> str:
    children: list[int] = []

    def fork(number: int) -> None:
        if not (child := os.fork()):
            time.sleep(30)
            os._exit(0)
        children.append(child)

    number, why = until_it_fails(fork, 40)
    for each in children:
        os.kill(each, signal.SIGKILL)
        os.waitpid(each, 0)
    return f"{why} after {number}"


def threads() -> str:
    go_on, found = threading.Event(), list[threading.Thread]()

    def start(number: int) -> None:
        found.append(threading.Thread(target=go_on.wait))
        found[-1].start()

    number, why = until_it_fails(start, 40)
    go_on.set()
    for each in found[:number]:
        each.join()
    return f"{why} after {number}"


def connects(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> str:
    def connect() -> None:
        with socket.socket(family, kind) as made:
            made.settimeout(5)
            made.connect(address)

    return tried(connect)


def internet() -> str:
    return connects(socket.AF_INET, ("127.0.0.1", GIVEN["port"]))


def internet_6() -> str:
    return connects(socket.AF_INET6, ("::1", GIVEN["port"]))


def unix_socket_outside() -> str:
    return connects(socket.AF_UNIX, GIVEN["unix"])


def abstract_unix_socket_outside() -> str:
    return connects(socket.AF_UNIX, "\0" + GIVEN["abstract"])


def vsock() -> str:
    return connects(40, (2, 1))


def netlink() -> str:
    return tried(lambda: socket.socket(16, socket.SOCK_RAW, 0))


def read_a_file_outside() -> str:
    return tried(Path(GIVEN["file"]).read_text)


def read_the_users() -> str:
    return tried(Path("/etc/passwd").read_text)


def read_other_processes() -> str:
    return tried(Path(f"/proc/{GIVEN['pid']}/environ").read_bytes)


def write_a_file_outside() -> str:
    return tried(lambda: Path(GIVEN["file"]).open("a"))


def write_to_the_interpreter() -> str:
    return ", ".join(sorted({tried(lambda path=path: Path(path).open("a")) for path in (os.__file__, "/usr/lib/x")}))


def signal_the_parent() -> str:
    return tried(lambda: os.kill(GIVEN["pid"], 0))


def signal_everyone() -> str:
    return tried(lambda: os.kill(-1, signal.SIGCONT))


def ptrace() -> str:
    return called("ptrace", 16, GIVEN["pid"], 0, 0)


def memory_of_another_process() -> str:
    return called("process_vm_readv", GIVEN["pid"], None, 0, None, 0, 0)


def user_namespace() -> str:
    return called("unshare", 0x10000000)


def mount() -> str:
    return called("mount", b"x", b"/tmp", b"tmpfs", 0, None)


def become_root() -> str:
    return tried(lambda: os.setuid(0))


def io_uring() -> str:
    return called("syscall", ctypes.c_long(425), 1, ctypes.create_string_buffer(256))


def keys_of_the_user() -> str:
    return called("syscall", ctypes.c_long(250 if os.uname().machine == "x86_64" else 219), 0, -4, 1)


ATTACKS = [
    *(malloc, mmap_shared_anonymous, memfd, sysv_shared_memory, message_queue, files_in_memory, inodes, open_files),
    *(pipes, socket_buffers, processes, threads, internet, internet_6, unix_socket_outside),
    *(abstract_unix_socket_outside, vsock, netlink, read_a_file_outside, read_the_users, read_other_processes),
    *(write_a_file_outside, write_to_the_interpreter, signal_the_parent, signal_everyone, ptrace),
    *(memory_of_another_process, user_namespace, mount, become_root, io_uring, keys_of_the_user),
]

if __name__ == "__main__":
    for attack in ATTACKS:
        print(json.dumps([attack.__name__.replace("_", " "), attack()]), flush=True)
