"""A training step of Llama 3 8B's layers: time, MFU, launches, memory, torch.compile, and transformers' own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM

from tests.harness.memory import track_memory
from usp.hf.models import load_model_config
from usp.model.facts import training_flops
from usp.parallel import peak_flops
from usp.predict.job import ONE_DOCUMENT, Data
from usp.predict.memory import footprint
from usp.train.dry_run import dry_run
from usp.train.resolve import job_of, resolve

from .model import configured, engine_step, llama_8b
from .setup import Setup, freed, on_device, one_rank

LAYERS = 4
PACKED, WHOLE = "documents of 8K, 4K and 4K", "one document of 16K"


def documents(setup: Setup, name: str) -> Data:
    tokens = setup.tokens("16K")
    return Data(documents=(tokens // 2, tokens // 4, tokens // 4)) if name == PACKED else ONE_DOCUMENT


@on_device
def eager(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Time eager steps, and count what they launch and what stops the host."""
    config = configured(setup, llama_8b(setup, LAYERS), setup.tokens("16K"))
    for name in (PACKED, WHOLE):
        data = documents(setup, name)
        with engine_step(config, data) as step:
            yield f"first step, {name}", setup.seconds(step)
            milliseconds = setup.milliseconds(step, budget=3)
            yield f"step, {name}", milliseconds
            yield f"MFU, {name}", mfu(setup, config.seq_len, data, milliseconds)
            if name == PACKED:
                yield "kernels launched in a step", float(launches(step, setup))
                yield "stops of the host in a step", float(stops_of(step, setup))
                yield "the device is busy, of a step", busy(step, setup, milliseconds)
        del step
        freed(setup)


def mfu(setup: Setup, tokens: int, data: Data, milliseconds: float) -> float:
    """Return the model's FLOPs, without recomputation, in % of the peak; in % of 1 TFLOP/s for a rehearsal."""
    config = configured(setup, llama_8b(setup, LAYERS), tokens)
    resolved = resolve(config, 1, weights=False)
    _, _, facts, _ = resolved.valid([])
    boundaries, weights = torch.tensor([data.boundaries(tokens)]), resolved.shape.matmul_parameters
    flops = training_flops(facts, matmul_parameters=weights, tokens=tokens, cu_seqlens=boundaries)
    peak = (peak_flops(torch.cuda.get_device_name(setup.device)) if setup.cuda else None) or 1e12
    return 1e5 * flops / milliseconds / peak


@on_device
def memory(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Compare the peak of a step with the dry run's. Nothing else has lived in this process."""
    data = documents(setup, PACKED)
    config = configured(setup, llama_8b(setup, LAYERS), setup.tokens("16K"))
    predicted = dry_run(config, 1, data=data)
    with engine_step(config, data) as step:
        step()  # the optimizer's states
        with track_memory(setup.device) as use:
            step()
    moving = predicted.peak_bytes - (0 if setup.cuda else predicted.start_bytes)
    measured = torch.cuda.max_memory_allocated(setup.device) if setup.cuda else use.peak_bytes
    yield f"measured {measured / 2**20:,.0f} MiB, predicted {moving / 2**20:,.0f} MiB"
    yield "peak memory of a step, of the dry run's", measured / moving


@on_device
def offloaded(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Time a step of one layer, most of which is attention, and compare its memory with the dry run's."""
    options = {"ac": "full", "ac_offload": True, "loss_chunk": 8192, "mlp_tile": 256 if setup.tiny else 16384}
    config = configured(setup, llama_8b(setup, 1), setup.tokens("512K"), **options)
    predicted = dry_run(config, 1)
    with engine_step(config) as step:
        freed(setup)
        yield "step of one layer, 512K tokens, offloaded", setup.seconds(step)
        if setup.cuda:
            measured = torch.cuda.max_memory_allocated(setup.device)
            yield "peak memory at 512K tokens, of the dry run's", measured / predicted.peak_bytes


@on_device
def compiled(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Time steps with and without torch.compile, count kernels, and compare the peak without recomputation with the
    formula's."""
    data = documents(setup, PACKED)
    config = configured(setup, llama_8b(setup, LAYERS), setup.tokens("16K"))
    times: list[float] = []
    for compile_ in (False, True):
        backend = "eager" if setup.tiny else "inductor"  # which compiles for half a minute
        with engine_step(replace(config, compile=compile_), data, backend=backend) as step:
            first = setup.seconds(step)
            if compile_:
                yield "first step with torch.compile", first
                yield "kernels launched in a compiled step", float(launches(step, setup))
            times.append(setup.milliseconds(step, budget=2))
        del step
        freed(setup)
    yield "step with torch.compile, of eager", times[1] / times[0]
    yield "MFU with torch.compile", mfu(setup, config.seq_len, data, times[1])
    config = replace(config, compile=True, ac="none")
    predicted = footprint(job_of(config, load_model_config(config.model, weights=False), 1, data=data), 0).peak.total
    with engine_step(config, data, backend=backend) as step:
        step()
        freed(setup)
        step()
        if setup.cuda:
            measured = torch.cuda.max_memory_allocated(setup.device)
            yield "peak memory of a compiled step, of the formula's", measured / predicted


@on_device
def peer(setup: Setup) -> Iterator[tuple[str, float] | str]:
    """Time transformers' model under FSDP2 on the same tokens, as one document, and the toolkit's step after it."""
    tokens = setup.tokens("16K")
    with one_rank(setup.device), transformers_step(setup, tokens) as step:
        theirs = setup.milliseconds(step, budget=2)
        yield "transformers with FSDP2, a step", theirs
        if setup.cuda:
            yield "transformers with FSDP2, peak memory", torch.cuda.max_memory_allocated(setup.device) / 2**30
    del step
    freed(setup)
    with engine_step(configured(setup, llama_8b(setup, LAYERS), tokens)) as step:
        mine = setup.milliseconds(step, budget=2)
        if setup.cuda:
            yield "the toolkit, peak memory", torch.cuda.max_memory_allocated(setup.device) / 2**30
    yield "the toolkit's step, of transformers'", mine / theirs


@contextmanager
def transformers_step(setup: Setup, tokens: int) -> Iterator[Callable[[], object]]:
    """Give a step as a user writes it: sdpa, checkpointed layers, logits of all tokens, fused AdamW."""
    config = llama_8b(setup, LAYERS).config()
    with torch.device(setup.device):
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    policy = MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    drawn = torch.Generator().manual_seed(0)
    ids: Tensor = torch.randint(config.vocab_size, (1, tokens), generator=drawn).to(setup.device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield step


def stops_of(step: Callable[[], object], setup: Setup) -> int:
    """Return how often torch says that a call synchronizes; 0 on a CPU, which does not tell."""
    if not setup.cuda:
        step()
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def launches(step: Callable[[], object], setup: Setup) -> int:
    """Return the kernels and copies of a step on a GPU; the operators on a CPU."""
    return sum(event.count for event in _profiled(step, setup))


def busy(step: Callable[[], object], setup: Setup, milliseconds: float) -> float:
    """Return the summed time of a step's kernels over its time."""
    attribute = "self_device_time_total" if setup.cuda else "self_cpu_time_total"
    return sum(getattr(event, attribute) for event in _profiled(step, setup)) / 1e3 / milliseconds


def _profiled(step: Callable[[], object], setup: Setup) -> list:
    activity = ProfilerActivity.CUDA if setup.cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        step()
        setup.synchronize()
    return [event for event in profiler.key_averages() if not setup.cuda or event.self_device_time_total > 0]
