"""Sections that go wrong in every way, for the tests of the GPU benchmark's runner."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

Found = Iterator[tuple[str, float] | str]


def fine(setup: Any) -> Found:
    yield "merge: error of out", 1e-9
    yield "a note"


def raises(setup: Any) -> Found:
    yield "merge: error of out", 1e-9
    raise ValueError("no such kernel\nbut others")


def aborts(setup: Any) -> Found:
    yield "merge: error of out", 1e-9
    os.abort()


def exits(setup: Any) -> Found:
    yield "merge: error of out", 1e-9
    os._exit(0)


def hangs(setup: Any) -> Found:
    yield "merge: error of out", 1e-9
    hang_here()


def hang_here() -> None:
    while True:
        time.sleep(60)


def slow(setup: Any) -> Found:
    """A measurement that is out of tolerance, which is no failure."""
    yield "peak memory at 512K tokens, of the dry run's", 2.0


def not_a_number(setup: Any) -> Found:
    yield "merge: error of out", float("nan")


def mends_itself(setup: Any) -> Found:
    """Fail in the first attempt only."""
    if setup.folder.name == "1":
        raise ValueError("not yet")
    yield "merge: error of out", 1e-9


def wrong_kernel(setup: Any) -> Found:
    """A kernel whose output is slightly off, in the section of kernels."""
    from benchmarks.gpu.kernels import parity
    from usp.attention.kernels.sdpa import CpuFlashKernel

    class Off(CpuFlashKernel):
        name = "sdpa"

        def forward(self, *arguments: Any) -> Any:
            out, lse = super().forward(*arguments)
            return out * 1.001, lse

    yield from parity(setup, {"sdpa": Off()})
