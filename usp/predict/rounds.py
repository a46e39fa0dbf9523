"""Times of calls on a machine that may do other work meanwhile: one short turn of every call per round.

A burst of other work then reaches one turn of several calls, rather than all turns of one call. Other work can only
slow a call down, so the estimate is the mean of its fastest eighth of turns, which differs less between runs under load
than the median or the mean do. A turn lasts until the slowest rank has made its calls, as a
step of training does. Each third of the rounds, every third one, gives an estimate as well; the spread is of these. A
turn is read from the clock of torch.utils.benchmark, which waits for the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from timeit import Timer

import psutil
import torch
import torch.distributed as dist
from torch.utils import benchmark

from usp.parallel.groups import gather_objects

LEAST_TURNS = 6  # of a slow call: two in each third
PARTS = 3


@dataclass(frozen=True)
class Timed:
    """A call to time."""

    name: str
    call: Callable[[], object] | None  # None on a rank that waits for the others
    calls: int = 0  # in a turn; 0 for as many as fit

    def turn(self, calls: int) -> float:
        """Return the mean seconds of `calls` calls, 0 on a rank without the call. Collective over all ranks."""
        if dist.is_initialized():
            dist.barrier()
        return Timer(self.call, timer=benchmark.timer).timeit(calls) / calls if self.call else 0.0


@dataclass(frozen=True)
class Estimate:
    """Seconds of a call, and the relative distance between estimates from thirds of its turns."""

    seconds: float
    spread: float

    @staticmethod
    def of(turns: Sequence[float]) -> Estimate:
        """Estimate from the mean seconds of a call in each turn, of which there are at least PARTS."""

        def fastest(turns: Sequence[float]) -> float:  # the mean of the fastest eighth
            return statistics.mean(sorted(turns)[: -(-len(turns) // 8)])

        thirds = [fastest(turns[part::PARTS]) for part in range(PARTS)]
        return Estimate(fastest(turns), max(thirds) / min(thirds) - 1)


@dataclass(frozen=True)
class Rounds:
    """Turns of `seconds` in `rounds` rounds; slow calls take turns in fewer rounds. The same on all ranks."""

    device: torch.device
    rounds: int
    seconds: float

    def turns(self, timed: Sequence[Timed]) -> dict[str, list[float]]:
        """Return the seconds of each call by turn on this rank, 0 where it has no call. Collective over all ranks."""
        turns: dict[str, list[float]] = {each.name: [] for each in timed}
        for each in timed:  # the first call of each allocates and connects
            each.turn(1)
        once = slowest([each.turn(1) for each in timed], self.device)
        calls = [each.calls or max(1, round(self.seconds / taken)) for each, taken in zip(timed, once, strict=True)]
        number = [
            min(self.rounds, max(LEAST_TURNS, round(4 * self.rounds * self.seconds / (often * taken))))
            for often, taken in zip(calls, once, strict=True)
        ]
        for round_ in range(self.rounds):
            for each, often, of_all in zip(timed, calls, number, strict=True):
                if (round_ + 1) * of_all // self.rounds > round_ * of_all // self.rounds:
                    turns[each.name].append(each.turn(often))
        return turns

    def estimates(self, turns: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
        """Return the estimates from what `turns` returned, each turn on its slowest rank. Collective over all ranks."""
        return {name: Estimate.of(of_all) for name, of_all in self.on_slowest_rank(turns).items()}

    def on_slowest_rank(self, turns: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Return what `turns` returned, each turn on its slowest rank. Collective over all ranks."""
        every = iter(slowest([*chain(*turns.values())], self.device))
        return {name: list(islice(every, len(each))) for name, each in turns.items()}


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the maxima over all ranks. Collective over these."""
    most = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


class OtherLoad:
    """What programs other than these ranks use of their machines' processors, from when it is made."""

    def __init__(self) -> None:
        self._begin = _processors()

    def share(self) -> float:
        """Return the busiest machine's fraction of processor time. Collective."""
        used = [end - begin for begin, end in zip(self._begin, _processors(), strict=True)]
        everyone = gather_objects((psutil.boot_time(), used))  # the time tells machines apart; emulated hosts are one
        shares = [0.0]
        for machine in {machine for machine, _ in everyone}:
            own, every, available = zip(*(used for name, used in everyone if name == machine), strict=True)
            shares.append((max(every) - sum(own)) / max(available))
        return max(shares)


def _processors() -> tuple[float, float, float]:
    """Return the seconds of processors that this process used, that all used, and that there were."""
    own, every = psutil.Process().cpu_times(), psutil.cpu_times()
    idle = every.idle + getattr(every, "iowait", 0.0)
    return own.user + own.system, sum(every) - idle, sum(every)
