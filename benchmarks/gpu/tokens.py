"""Correctness of decoding: tokens against those of the CPU, with CUDA graphs and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from usp import apply_unified_sp
from usp.hf.models import empty_model, materialise
from usp.hf.weights import initialise
from usp.parallel import ParallelDims, ParallelMesh
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate

from .model import SMALL, TOY, Shape
from .setup import Setup, on_device, one_rank

LENGTHS = (40, 1, 3, 25, 9, 151, 65, 2, 90)  # of prompts, more than slots
Response = tuple[list[int], Tensor]  # tokens and their log-probabilities


@on_device
def decoded(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Decode greedily in float32 on the CPU and the device; compare tokens, and log-probabilities in bfloat16 too."""
    shape, new = (TOY, 8) if setup.tiny else (SMALL, 100)
    lengths = LENGTHS[:5] if setup.tiny else LENGTHS
    cpu = responses(shape, torch.device("cpu"), torch.float32, lengths, new)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found = {}
        for eager in (True, False):
            with counted_replays() as replays:
                found[eager] = responses(shape, setup.device, dtype, lengths, new, eager)
            how = "one by one" if eager else "in graphs"
            if dtype == torch.float32:
                yield f"tokens of the CPU, decoded {how}", same_tokens(found[eager], cpu)
            yield f"first log-probability, {name}, decoded {how}: error", first_error(found[eager], cpu)
            if not eager and setup.cuda:
                yield f"steps replayed, {name}", float(len(replays))
        if dtype == torch.float32:
            yield "tokens decoded one by one, decoded in graphs", same_tokens(found[False], found[True])


def responses(
    shape: Shape, device: torch.device, dtype: torch.dtype, lengths: Sequence[int], new: int, eager: bool = False
) -> list[Response]:
    """Return greedy responses to prompts of many lengths."""
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(shape.vocabulary, (length,), generator=drawn) for length in lengths]
    with one_rank(device), torch.no_grad():
        generator = generator_of(shape, device, dtype, slots=4, eager=eager)
        work = Generate(max_new_tokens=new, temperature=0)
        found = generator.generate(prompts, work, list(range(len(prompts))))
    return [(each.tokens.tolist(), each.logprobs) for each in found]


def generator_of(shape: Shape, device: torch.device, dtype: torch.dtype, fill: Any = None, **options: Any) -> Generator:
    """Return a generator with the model; fill: gives it weights, by default the same on every device."""
    mesh = ParallelMesh.create(ParallelDims(), device.type)
    model: Any = empty_model(shape.config())
    model.to(dtype)
    apply_unified_sp(model, mesh)
    materialise(model, device)
    initialise(model, 0) if fill is None else fill(model)
    return Generator(model, mesh, **options)


def same_tokens(found: Sequence[Response], others: Sequence[Response]) -> float:
    """Return the share of tokens up to the first that differs, in each response."""
    pairs = [(one, other) for (one, _), (other, _) in zip(found, others, strict=True)]
    same = [[x == y for x, y in zip(one, other, strict=True)] for one, other in pairs]
    return sum([*each, False].index(False) for each in same) / sum(map(len, same))


def first_error(found: Sequence[Response], others: Sequence[Response]) -> float:
    """Return the largest difference of the first token's log-probability, which depends on the prompt only."""
    return max(abs(float(one[0] - other[0])) for (_, one), (_, other) in zip(found, others, strict=True))


@contextmanager
def counted_replays() -> Iterator[list[None]]:
    """Count the replays of CUDA graphs."""
    replays, replay = list[None](), torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(None)
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", counted):
        yield replays
