"""Ranks without processes: functions of samples on threads that add up, rows of tokens divided over several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from usp.rlhf.graph import Objective, Reduce
from usp.rlhf.samples import Samples

Function = Callable[[Samples, Reduce], Samples]


def alone(x: Tensor) -> Tensor:
    """The sum over one rank."""
    return x.clone()


def on_ranks(functions: Sequence[Function], samples: Samples, parts: Sequence[Sequence[int]]) -> Samples:
    """A function of samples on as many ranks as there are parts, each with its ids; all results together.

    functions: one for each rank, for those that remember.
    """
    meet = threading.Barrier(len(parts))
    given: list[Tensor] = [torch.zeros(())] * len(parts)

    def run(rank: int) -> Samples:
        def reduce(x: Tensor) -> Tensor:
            given[rank] = x.clone()
            meet.wait(timeout=600)
            total = torch.stack(list(given)).sum(0)
            meet.wait(timeout=600)
            return total

        try:
            return functions[rank](samples.of(parts[rank]), reduce)
        except BaseException:
            meet.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as threads:
        results = list(threads.map(run, range(len(parts))))
    value_of = {
        key: {i: value for result in results for i, value in zip(result.ids, result[key], strict=True)}
        for key in results[0].values
    }
    return Samples(samples.ids, {key: [values[i] for i in samples.ids] for key, values in value_of.items()})


@dataclass
class Row:
    """`graph.Sequences` of one of several ranks that share a row; the sums of the others come from `shared`."""

    numbers: Tensor  # the sequence that each of this rank's tokens is of; `count` for padding
    count: int
    degree: int
    shared: list[list[Tensor]]  # [number of the call][rank]: own sums
    own: list[Tensor] = field(default_factory=list)

    def sums(self, x_BS: Tensor) -> Tensor:
        own = x_BS.new_zeros(self.count + 1).index_add(0, self.numbers, x_BS.flatten())[:-1]
        self.own.append(own)
        return torch.stack(self.shared[len(self.own) - 1]).sum(0) if self.shared else own

    def spread(self, x_N: Tensor) -> Tensor:
        return torch.cat((x_N, x_N.new_zeros(1)))[self.numbers][None]

    def share(self, loss: Tensor) -> Tensor:
        return loss / self.degree


def minimise(
    objective: Objective, samples: Samples, output: Tensor, entropy: Tensor, degree: int = 1, padding: int = 0
) -> tuple[Tensor, dict[str, float]]:
    """The sum of the shares of the loss, and of metrics, of one row whose tokens `degree` ranks have in turn.

    output, entropy: (tokens of the row,), without padding.
    """

    def joined(key: str) -> Tensor:
        return torch.cat([*(value.to(output.dtype) for value in samples[key]), output.new_zeros(padding)])

    lengths = [len(tokens) for tokens in samples["tokens"]]
    count = len(lengths)
    numbers = torch.repeat_interleave(torch.arange(count + 1), torch.tensor([*lengths, padding]))
    tail = output.new_full((padding,), float("nan"))  # of padding a model says anything
    whole = {"output": torch.cat((output, tail)), "entropy": torch.cat((entropy, tail))}
    whole.update({key: joined(key) for key in objective.keys})

    def on_rank(rank: int, shared: list[list[Tensor]]) -> tuple[Tensor, dict[str, Tensor], Row]:
        row = Row(numbers[rank::degree], count, degree, shared)
        own = {key: value[None, rank::degree] for key, value in whole.items()}
        said = own.pop("entropy")
        loss, metrics = objective(own.pop("output"), said if objective.entropy else None, own, row)
        assert loss.shape == () and all(value.shape == () for value in metrics.values())
        assert not any(value.requires_grad for value in metrics.values())
        return loss, metrics, row

    shared: list[list[Tensor]] = []
    for _ in range(2 if degree > 1 else 1):  # a sum may depend on one before it
        own = [on_rank(rank, shared)[2].own for rank in range(degree)]
        shared = [list(sums) for sums in zip(*own, strict=True)]
    results = [on_rank(rank, shared) for rank in range(degree)]
    total = torch.stack([loss for loss, _, _ in results]).sum()
    seen = {name: [float(metrics[name]) for _, metrics, _ in results] for name in results[0][1]}
    return total, {name: max(values) if name.endswith("_max") else sum(values) for name, values in seen.items()}
