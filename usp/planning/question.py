"""What every planner shares: the devices that a question is about, what-ifs, remedies where nothing fits, and rank 0
that answers for all ranks. `search` plans training steps, `rlhf_question` RLHF steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from usp.parallel import Hardware
from usp.predict.devices import Memory, usable
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.run.metrics import seconds

Q = TypeVar("Q", bound="Devices")
Tried = Callable[[int, int], None]  # is told how many layouts are tried, of all

LAYOUT = (  # what a plan of a training step sets, without options to save memory
    *("sp_ulysses", "sp_ring", "dp_shard", "dp_replicate", "tp", "tp_sequence_parallel", "pp", "pp_schedule", "ep"),
    *("batch_size", "micro_batches"),
)
CHOSEN = (*LAYOUT, "zero", "ac", "ac_offload", "mlp_tile", "optim_offload")
MORE_DEVICES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # times those that are too few


def silent(*told: object) -> None:
    """Take a report that nobody reads."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Devices:
    """The devices of a question; a planner's question adds what runs on them."""

    hardware: Hardware
    world_size: int
    memory_factor: float = 1.0  # times the memory of each device; other than 1 in what-ifs

    @property
    def usable(self) -> Memory:
        """Bytes that the step can use."""
        device, host = usable(self.hardware)
        return Memory(self.memory_factor * device, host)

    @property
    def ranks_per_host(self) -> int:
        return min(self.hardware.host_devices, self.world_size)


def suppositions(question: Q) -> Iterator[tuple[str, Q]]:
    """Yield (words, question) with other memory, and with other links between hosts if the devices use any; where only
    the memory differs, the hardware is the same object, so that predictions of seconds stay valid."""
    *inner, last = question.hardware.tiers
    factors = {"twice": 2.0, "half": 0.5}
    for words, factor in factors.items():
        yield f"with {words} the memory", replace(question, memory_factor=factor)
    for words, factor in factors.items() if inner and question.world_size > inner[-1].devices else ():
        hardware = replace(question.hardware, tiers=(*inner, last.faster(factor)))
        yield f"with {words} the bandwidth between hosts", replace(question, hardware=hardware)


def enough_devices(question: Q, fits: Callable[[Q], bool], times: Sequence[int] = MORE_DEVICES) -> int | None:
    """Return the first multiple of the devices on which a plan fits; None if there is none that the hardware connects,
    which it does not where `fits` raises ValueError."""
    for factor in times:
        larger = replace(question, world_size=factor * question.world_size)
        try:
            if fits(larger):
                return larger.world_size
        except ValueError:
            return None
    return None


def what_if_line(words: str, plan: str, took: float) -> str:
    """Return the line of a report that says which plan is the fastest under a supposition; empty if nothing fits."""
    return f"what if {words}: " + (f"{plan}, {seconds(took)} per step" if plan else "nothing would fit")


def from_rank_0(launch: Launch, key: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `find` returns on rank 0, as plain values, on every rank, collectively through torchrun's store;
    raise ConfigurationError on every rank, with the message of the ValueError that `find` raises."""

    def answer() -> dict[str, Any]:
        try:
            return find()
        except ValueError as error:
            return {"problem": str(error)}

    told = launch.from_first(key, answer)
    if "problem" in told:
        raise ConfigurationError(told["problem"])
    return told
