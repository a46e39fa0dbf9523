"""What sections share: the device, their sizes, timers, a process group of one rank, channels without a network."""

from __future__ import annotations

import gc
import math
import queue
import statistics
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from usp.attention import AttentionSpec, Channel, Kernel
from usp.attention.comm import Pending
from usp.attention.kernels.base import Device
from usp.attention.kernels.select import KERNELS

from .sections import Job

T = TypeVar("T")
CAUSAL, FULL = AttentionSpec(causal=True), AttentionSpec(causal=False)
LENGTHS = {"2K": 2048, "8K": 8192, "16K": 16384, "32K": 32768, "128K": 131072, "512K": 524288}
TINY_LENGTHS = {"2K": 32, "8K": 64, "16K": 96, "32K": 128, "128K": 192, "512K": 512}


@dataclass(frozen=True)
class Setup:
    """The arguments of a section, see `Job`.

    tiny: toy sizes in float32; no time is expected of them.
    """

    device: torch.device
    tiny: bool
    folder: Path

    @staticmethod
    def of(device: str, tiny: bool, folder: Path) -> Setup:
        """Make a setup. Raises RuntimeError without the device."""
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(
                f"benchmarks.gpu needs a CUDA GPU, but torch {torch.__version__} finds none: run it on a machine with "
                "one, or rehearse it with --device cpu --tiny"
            )
        return Setup(torch.device(device), tiny, folder)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tiny else torch.bfloat16

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head dim."""
        return (4, 2, 16) if self.tiny else (32, 8, 128)

    def tokens(self, name: str) -> int:
        return (TINY_LENGTHS if self.tiny else LENGTHS)[name]

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def qkv(self, queries: int, keys: int) -> list[Tensor]:
        """Return random q, k, v, dout of shape (tokens, heads, head dim)."""
        heads, kv_heads, head_dim = self.heads
        shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
        return [self.randn(*shape, head_dim) for shape in shapes]

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the wall-clock seconds of one call."""
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - begin

    def milliseconds(self, call: Callable[[], object], budget: float = 0.5) -> float:
        """Return the median time of a call after a first one, by events on a GPU.

        Calls of less than 2 ms are timed ten at a time, so that the device does not wait for the host.

        budget: seconds to spend; one timed call at least.
        """
        self.seconds(call)
        once = self.seconds(call)
        each = 10 if self.cuda and once < 2e-3 else 1
        repeats = 1 if self.tiny else max(1, min(10, int(budget / max(each * once, 1e-6))))
        return statistics.median(self._timed(call, each) for _ in range(repeats))

    def _timed(self, call: Callable[[], object], each: int) -> float:
        if not self.cuda:
            return 1e3 * self.seconds(call)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        begin.record()
        for _ in range(each):
            call()
        end.record()
        self.synchronize()
        return begin.elapsed_time(end) / each

    def passes(self, forward: Callable[[], Tensor], leaves: Sequence[Tensor], dout: Tensor) -> tuple[float, float]:
        """Return the milliseconds of the forward, and of forward and backward."""
        with torch.no_grad():
            first = self.milliseconds(forward)
        return first, self.milliseconds(lambda: torch.autograd.grad(forward(), leaves, dout))


def on_device(section: Callable[..., T]) -> Callable[..., T]:
    """Make a section of a function whose first argument is a setup."""

    @wraps(section)
    def run(job: Job, *others: Any) -> T:
        return section(Setup.of(job.device, job.tiny, job.folder), *others)

    return run


def tried(what: str, call: Callable[[], float]) -> Iterator[tuple[str, float] | str]:
    """Yield a figure; for an exception inf, with a note and its traceback on stderr, so that the section goes on. An
    error of the device ends the section, as nothing after it would work."""
    try:
        yield what, call()
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        traceback.print_exc()
        yield what, math.inf
        yield f"{what}: {type(error).__name__}: {str(error)[:300]}"


def kernels(setup: Setup, spec: AttentionSpec = CAUSAL) -> Iterator[tuple[str, Kernel | str]]:
    """Yield every back end by name, or why it cannot take a call."""
    device, head_dim = Device.of(setup.device), setup.heads[2]
    every = {kind.name: kind() for kinds in KERNELS.values() for kind in kinds}
    for name, kernel in every.items():
        reason = kernel.refuses(spec, device, setup.dtype, head_dim, head_dim) or kernel.missing()
        yield name, reason or kernel


class SilentChannel(Channel):
    """A ring axis without a network: messages complete immediately and leave buffers unchanged."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size = size

    def post(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Pending:
        return Pending()


@dataclass
class Mail:
    """Messages between ranks that are threads of this process, in order for each pair. One rank runs at a time."""

    size: int
    patience: float = 60.0  # seconds that a rank waits for a message
    turn: threading.Lock = field(default_factory=threading.Lock)
    boxes: dict[tuple[int, int], queue.Queue[Tensor]] = field(default_factory=lambda: defaultdict(queue.Queue))

    def each_rank(self, call: Callable[[Channel], T]) -> list[T]:
        """Return what `call` returns on each rank; raise what one of them raises."""

        def rank(number: int) -> T:
            with torch.no_grad(), self.turn:
                return call(MailChannel(self, number))

        with ThreadPoolExecutor(self.size) as pool:
            ranks = [pool.submit(rank, number) for number in range(self.size)]
            for ended in as_completed(ranks):
                ended.result()  # raises the first error, and not what it leads to on other ranks
        return [each.result() for each in ranks]


class MailChannel(Channel):
    """A rank's end of `Mail`. All ranks issue their work on one stream, so a message is complete when it is posted."""

    def __init__(self, mail: Mail, rank: int) -> None:
        super().__init__(None)
        self.mail, self.rank, self.size = mail, rank, mail.size

    def post(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Pending:
        for peer, x in sends:
            self.mail.boxes[self.rank, peer].put(x.clone())
        return _Arriving(self, receives)


class _Arriving(Pending):
    def __init__(self, channel: MailChannel, receives: list[tuple[int, Tensor]]) -> None:
        super().__init__()
        self.channel, self.receives = channel, receives

    def wait(self) -> None:
        mail, rank = self.channel.mail, self.channel.rank
        for peer, buffer in self.receives:
            mail.turn.release()
            try:
                x = mail.boxes[peer, rank].get(timeout=mail.patience)
            finally:
                mail.turn.acquire()
            buffer.copy_(x)
        self.receives = []


def freed(setup: Setup) -> None:
    """Free the memory of what is no longer used, and forget its peak."""
    gc.collect()
    if setup.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setup.device)


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Be the only rank of a process group, of NCCL on a GPU, bound to it from the start."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    place = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(backend, store=dist.FileStore(file.name, 1), rank=0, world_size=1, device_id=place)
        try:
            yield
        finally:
            dist.destroy_process_group()
