"""Attention kernels that take time and compute nothing, as if every rank had a device of its own.

On a machine with fewer cores than ranks, what waits for a message and what waits for a core look alike. With these
kernels, cores only pack and send, so that a step takes its kernels' time and the communication that they do not hide.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.baselines import yunchang_cpu
from benchmarks.host_time import Idle, idle_forward
from usp.sp import sp_attention

FORWARD, BACKWARD = 14e-9, 35e-9  # seconds per visible pair and head: of head dim 64 on a core of a 2024 server


class Timed(Idle):
    """`Idle`, whose launches take the time of their visible pairs."""

    name = "timed"

    def __init__(self) -> None:
        self._pairs: dict[Any, int] = {}

    def lower(self, tasks, device, dtype):
        launches = super().lower(tasks, device, dtype)
        self._pairs |= dict.fromkeys(launches, 0)
        if launches:  # of which the first takes the time of all
            self._pairs[launches[0]] = sum(task.visible() for task in tasks)
        return launches

    def forward(self, q_nANH, k_nBKH, v_nBKV, launch, spec):
        time.sleep(self._pairs[launch] * q_nANH.shape[2] * FORWARD)
        return tuple(map(torch.zeros_like, super().forward(q_nANH, k_nBKH, v_nBKV, launch, spec)))

    def backward(self, dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV, lse_nNA, launch, spec):
        time.sleep(self._pairs[launch] * q_nANH.shape[2] * BACKWARD)
        return tuple(map(torch.zeros_like, (q_nANH, k_nBKH, v_nBKV)))


def timed_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, causal: bool = False, **options: Any) -> Any:
    time.sleep(_rectangle(q, k, causal) * FORWARD)
    return tuple(map(torch.zeros_like, idle_forward(q, k, v)))


def timed_backward(*args: Any, **options: Any) -> None:
    _, q, k, _, _, _, dq, dk, dv, _, _, causal, *_ = args
    time.sleep(_rectangle(q, k, causal) * BACKWARD)
    for grad in (dq, dk, dv):
        grad.zero_()


def _rectangle(q: Tensor, k: Tensor, causal: bool) -> float:
    """Return the visible pairs of all heads."""
    return q.shape[1] * k.shape[1] * q.shape[2] / (2 if causal else 1)


@contextmanager
def timed_kernels() -> Iterator[None]:
    """Let our attention and yunchang's run on such kernels."""
    ours = patch.object(sp_attention, "choose_kernel", lambda *_: (Timed(), "", ""))
    with ours, patch.multiple(yunchang_cpu, _forward=timed_forward, _backward=timed_backward):
        yield
