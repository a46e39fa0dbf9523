"""Decoding against the bandwidth of the memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from usp.hf.weights import fill_buffers
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate

from .model import llama_8b
from .setup import Setup, freed, on_device, one_rank
from .tokens import generator_of

BANDWIDTH = 4.8e12  # of an H200, bytes/s
LAYERS = (2, 6)  # of two models, whose difference is that of the layers alone
STEPS = ((64, "2K"), (8, "16K"), (1, "128K"))


@on_device
def rates(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Yield a step's layers as a share of the bandwidth, and what is not in layers."""
    for slots, length in STEPS:
        yield from layer_shares(setup, slots, length)


def layer_shares(setup: Setup, slots: int, length: str) -> Iterator[tuple[str, float] | str]:
    """Time a token of two models, and divide their difference by that of their layers."""
    times, counts = [], []
    for layers in (1, 2) if setup.tiny else LAYERS:
        each, nbytes = token_seconds(setup, layers, slots, length)
        times.append(each)
        counts.append((layers, nbytes))
        freed(setup)  # the model and its cache, before the next one
    (fewer, less), (more, most) = counts
    layer = (times[1] - times[0]) / (more - fewer)
    what = f"decoding {slots} x {length}"
    yield f"{what}, a layer", 1e6 * layer
    yield f"{what}, layers, of the bandwidth", (most - less) / BANDWIDTH / (times[1] - times[0])
    yield f"{what}, embedding, head and sampling", 1e6 * (times[0] - fewer * layer)


def token_seconds(setup: Setup, layers: int, slots: int, length: str) -> tuple[float, int]:
    """Return the seconds of a step of all slots, and the bytes of the weights of layers and of the cache."""
    new, prompt = (2, setup.tokens(length)) if setup.tiny else (256, setup.tokens(length) - 264)
    slots = min(slots, 2) if setup.tiny else slots
    with one_rank(setup.device), torch.no_grad():
        generator = toy_generator(setup, layers, slots)
        prompts = [torch.arange(prompt) % 200 for _ in range(slots)]

        def seconds(tokens: int) -> float:
            work = Generate(max_new_tokens=tokens)
            return setup.seconds(lambda: generator.generate(prompts, work, list(range(slots))))

        seconds(2 + new)  # what is made once: plans, graphs
        short, long = seconds(2), seconds(2 + new)
    shape = llama_8b(setup, layers)
    width = shape.hidden // shape.heads
    weights = shape.hidden * (2 * shape.hidden + 2 * shape.kv_heads * width + 3 * shape.intermediate)
    cached = 2 * slots * prompt * shape.kv_heads * width
    return (long - short) / new, layers * setup.dtype.itemsize * (weights + cached)


def toy_generator(setup: Setup, layers: int, slots: int) -> Generator:
    """Return a generator with random weights, drawn on the device."""

    def fill(model: torch.nn.Module) -> None:
        fill_buffers(model)  # type: ignore[arg-type]
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() < 2 else parameter.normal_(std=0.02)

    return generator_of(llama_8b(setup, layers), setup.device, setup.dtype, fill, slots=slots)
