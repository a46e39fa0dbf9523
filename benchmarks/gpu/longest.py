"""The longest sequence: a step of 512K tokens with offload, and what the dry run finds for all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from usp.config import TrainConfig
from usp.train.dry_run import dry_run

from .model import configured, engine_step, llama_8b
from .setup import Setup, freed, on_device

DEVICE_BYTES = 141e9  # of an H200
OFFLOAD = {"ac": "full", "ac_offload": True, "loss_chunk": 8192}
MEASURED, FEW, WHOLE = 1, (2, 4), 32  # layers
RESERVED = 0.94  # of the device's memory, without the context and what the allocator cannot use


@on_device
def offloaded(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Time a step of one layer, compare its memory with the dry run's, and find the longest sequence of all layers.

    Attention takes most of the time: with all 32 layers, a step would take as many times longer.
    """
    tokens = setup.tokens("512K")
    config = configured(setup, llama_8b(setup, MEASURED), tokens, mlp_tile=256 if setup.tiny else 16384, **OFFLOAD)
    predicted = dry_run(config, 1)
    with engine_step(config) as step:
        freed(setup)
        seconds = setup.seconds(step)
        yield "step of one layer, 512K tokens, offloaded", seconds
        if setup.cuda:
            measured = torch.cuda.max_memory_allocated(setup.device)
            yield "peak memory at 512K tokens, of the dry run's", measured / predicted.peak_bytes
    fits, host = longest(setup, config)
    yield "longest sequence of 32 layers by the dry run, offloaded", fits / 1024
    yield f"with that, 32 layers keep {host / 2**30:,.0f} GiB in host memory"


def longest(setup: Setup, config: TrainConfig) -> tuple[float, float]:
    """Return how many tokens fit into the device with all layers, and the bytes of the host that these need.

    Memory is linear in layers and in tokens, so that dry runs of few of both, which take seconds, tell.
    """
    lengths = (config.seq_len // 8, config.seq_len // 4)

    def whole(tokens: int) -> tuple[float, float]:
        runs = []
        for layers in FEW:
            model = llama_8b(setup, layers).saved(setup.folder)
            runs.append(dry_run(replace(config, model=model, seq_len=tokens, optim_offload=True), 1))
        few, more = ((run.peak_bytes, run.host_bytes) for run in runs)
        times = (WHOLE - FEW[0]) / (FEW[1] - FEW[0])
        return few[0] + times * (more[0] - few[0]), few[1] + times * (more[1] - few[1])

    (peak, host), (peak_more, host_more) = map(whole, lengths)
    slope = (peak_more - peak) / (lengths[1] - lengths[0])
    tokens = lengths[0] + (RESERVED * DEVICE_BYTES - peak) / slope
    return tokens, host + (host_more - host) / (lengths[1] - lengths[0]) * (tokens - lengths[0])
