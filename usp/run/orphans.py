"""The end of ranks whose launcher is gone: a torchrun that was killed with SIGKILL can neither end nor restart them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .launch import Launch

TICK_SECONDS = 0.2
ORPHANED = 1  # exit code, which nobody reads


def end_with_launcher(launch: Launch, leave: Callable[[int], object] = os._exit) -> None:
    """Watch torchrun, the parent of this process, from a thread; when it is gone, say so and end the process.

    No effect without torchrun: a process that a shell starts in the background may outlive the shell.
    """
    if launch.run_id:
        threading.Thread(target=_watch, args=(os.getppid(), launch, leave), name="launcher", daemon=True).start()


def _watch(launcher: int, launch: Launch, leave: Callable[[int], object]) -> None:
    while os.getppid() == launcher:
        time.sleep(TICK_SECONDS)
    if launch.local_rank == 0:
        with suppress(OSError):  # the reader is gone, too
            message = f"error: torchrun (process {launcher}) is gone: ending its ranks on this host; progress since "
            print(message + "the last checkpoint is lost", file=sys.stderr, flush=True)
    leave(ORPHANED)
