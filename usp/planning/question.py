"""What every planner shares: the devices that a question is about, the skeleton of a search, and rank 0 that answers
for all ranks. `search` plans training steps, `rlhf_question` RLHF steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from usp.parallel import Hardware
from usp.predict.devices import Memory, usable
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch

T = TypeVar("T")
Tried = Callable[[int, int], None]  # is told how many layouts are tried, of all


def silent(*told: object) -> None:
    """Take a report that nobody reads."""


def within(items: Iterable[T], bound: Callable[[T], Any], limit: Callable[[T], Any]) -> Iterator[T]:
    """Yield items in the order of a lower bound, without those whose bound is not below their limit when it is their
    turn: the skeleton of every search here, whose measurements lower the limit."""
    bounds = sorted(((bound(item), number, item) for number, item in enumerate(items)), key=lambda each: each[:2])
    yield from (item for least, _, item in bounds if least < limit(item))


@dataclass(frozen=True, eq=False, kw_only=True)
class Devices:
    """The devices of a question; a planner's question adds what runs on them."""

    hardware: Hardware
    world_size: int

    @property
    def usable(self) -> Memory:
        """Bytes that the step can use."""
        return usable(self.hardware)

    @property
    def ranks_per_host(self) -> int:
        return min(self.hardware.host_devices, self.world_size)


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
