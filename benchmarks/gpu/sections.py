"""The sections of the benchmark, in the order of what they tell per second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STARTING = 120.0  # seconds that a process may take until it has imported what its section needs


@dataclass(frozen=True)
class Job:
    """What a section is called with.

    tiny: toy sizes, for a rehearsal.
    folder: of this attempt.
    """

    device: str
    tiny: bool
    folder: Path


@dataclass(frozen=True)
class Section:
    """A part of the benchmark that runs as a process of its own.

    Attributes:
        run: `module:function`, which takes a `Job` and yields figures (name, value) and notes (text).
        seconds: expected on an H200, with the start of the process.
        what: it shows, in a line.
        limit: seconds after which it is killed, without its imports; 0 for twice those that are expected, and 20 more.
    """

    name: str
    run: str
    seconds: float
    what: str
    limit: float = 0.0

    @property
    def most(self) -> float:
        return self.limit or 2 * self.seconds + 20


SECTIONS = (
    Section("environment", "benchmarks.gpu.machine:environment", 5, "versions, driver, device"),
    Section("kernels", "benchmarks.gpu.kernels:parity", 30, "every attention kernel and mask against float64"),
    Section("training", "benchmarks.gpu.training:steps", 15, "loss and gradient norm of steps against the CPU"),
    Section("tokens", "benchmarks.gpu.tokens:decoded", 20, "decoded tokens against the CPU, with and without graphs"),
    Section("machine", "benchmarks.gpu.machine:ceilings", 15, "products, copies, copies to the host and back"),
    Section("step", "benchmarks.gpu.step:eager", 25, "a training step: time, MFU, kernels launched, host stops"),
    Section("memory", "benchmarks.gpu.step:memory", 20, "peak memory of a step against the dry run"),
    Section("ring", "benchmarks.gpu.kernels:emulated_ring", 15, "four ranks of a ring on one device against float64"),
    Section("train.py", "benchmarks.gpu.training:program", 30, "three steps of train.py against the CPU"),
    Section("attention", "benchmarks.gpu.attention:rates", 70, "rates of attention kernels from 2K to 128K tokens"),
    Section("decoding", "benchmarks.gpu.decoding:rates", 40, "decoding against the memory's bandwidth"),
    Section("compiled", "benchmarks.gpu.step:compiled", 90, "torch.compile: first and later steps, kernels, memory"),
    Section("peer", "benchmarks.gpu.step:peer", 20, "the same model by transformers with FSDP2"),
    Section("longest", "benchmarks.gpu.step:offloaded", 35, "a layer's step of 512K tokens with offload"),
)
