"""Decoding against the bandwidth of the memory: attention alone, and layers; prompts of many lengths."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from usp.attention import DecodeStep, KVCache
from usp.hf.weights import fill_buffers
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate

from .model import llama_8b
from .setup import LENGTHS, Setup, freed, on_device, one_rank, tried
from .tokens import generator_of

BANDWIDTH = 4.8e12  # of an H200, bytes/s
ATTENTION = tuple((slots, length) for slots in (1, 8, 64) for length in ("2K", "16K", "128K"))
LAYERS = (2, 6)  # of two models, whose difference is that of the layers alone
STEPS = ((64, "2K"), (8, "16K"), (1, "128K"))
PROMPTS = tuple(range(1040, 1040 + 24 * 37, 37))  # lengths


@on_device
def rates(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Yield attention to the cache, and a step's layers, as shares of the bandwidth; and what is not in layers."""
    for slots, length in ATTENTION:
        share = partial(attention_share, setup, slots, length)
        yield from tried(f"attention of {slots} x {length}, of the bandwidth", share)
    for slots, length in STEPS:
        yield from layer_shares(setup, slots, length)


def attention_share(setup: Setup, slots: int, length: str) -> float:
    """Return the least time in which a layer's keys and values can be read, over the time of the layer's attention."""
    heads, kv_heads, head_dim = setup.heads
    tokens, slots = setup.tokens(length), min(slots, 2) if setup.tiny else slots
    cache = KVCache.allocate(slots, tokens, setup.device)
    cache.positions.copy_(torch.arange(tokens, device=setup.device).expand(slots, -1))
    last = torch.full((slots,), tokens - 1, device=setup.device)
    step = DecodeStep(cache, last, last, None, length=tokens, group=None)
    q, k, v = (setup.randn(slots, 1, number, head_dim) for number in (heads, kv_heads, kv_heads))
    for stored in cache.layer("layer", k, v):
        stored.normal_()
    with torch.inference_mode():
        milliseconds = setup.milliseconds(lambda: step.attend("layer", q, k, v, scale=None, window=None), budget=0.2)
    return cache.nbytes / BANDWIDTH / milliseconds * 1e3


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


@on_device
def prefill(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Time prompts of new lengths, one at a time, and again; what the first time costs more is for their lengths."""
    lengths = PROMPTS[:3] if setup.tiny else PROMPTS
    lengths = tuple(length // 16 for length in lengths) if setup.tiny else lengths
    with one_rank(setup.device), torch.no_grad():
        generator = toy_generator(setup, 2, 1)

        def seconds(length: int) -> float:
            prompt, work = [torch.arange(length) % 200], Generate(max_new_tokens=1)
            return setup.seconds(lambda: generator.generate(prompt, work, [0]))

        seconds(LENGTHS["2K"] // 2 if setup.cuda else lengths[0])
        first, again = ([seconds(length) for length in lengths] for _ in range(2))
        work = Generate(max_new_tokens=1)
        together = [torch.arange(length) % 200 for length in lengths]
        both = [setup.seconds(lambda: generator.generate(together, work, list(range(len(lengths))))) for _ in range(2)]
    yield "a prompt of a length seen before", 1e3 * sorted(again)[len(again) // 2]
    yield "a prompt of a new length, more", 1e3 * (sum(first) - sum(again)) / len(lengths)
    yield "24 prompts in one call, the first time, of the second", both[0] / both[1]
