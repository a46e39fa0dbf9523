"""Sections of benchmarks/gpu.py on the toolkit's own step: time, MFU, stops of the host, memory, torch.compile,
decoding, offloading, process groups."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from attention.accumulate import AttentionSum, Rows
from attention.decode import partial_attention
from benchmarks.harness.checks import Check
from benchmarks.harness.measure import Clock
from parallel import ParallelDims, ParallelMesh, peak_flops
from tests.harness.memory import track_memory
from usp import apply_unified_sp
from usp.config import TrainConfig
from usp.hf.models import empty_model, materialise
from usp.hf.weights import initialise
from usp.model.facts import training_flops
from usp.model.recompute import copier_for
from usp.predict.job import Data
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate
from usp.train.build import EngineRecipe, build_engine
from usp.train.dry_run import blank_batch, dry_run
from usp.train.resolve import resolve
from usp.train.step import train_step

LAYERS = 4  # of llama3-8b


@dataclass(frozen=True)
class Steps:
    """The sections. tiny: toy sizes, to try the code, for which no times are expected."""

    clock: Clock
    tiny: bool
    folder: Path

    @property
    def device(self) -> torch.device:
        return self.clock.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def peak(self) -> float:
        """bfloat16 FLOP/s; nan where it is not known."""
        return (peak_flops(torch.cuda.get_device_name(self.device)) if self.cuda else None) or math.nan

    def config(self, **changes: Any) -> TrainConfig:
        """Return the run of one rank, on documents packed into one row, with the model's configuration in `folder`."""
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_hidden_layers": 2}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        if not self.tiny:
            sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": LAYERS}
            heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
        if not (self.folder / "config.json").exists():
            shape = LlamaConfig(**sizes, **heads, max_position_embeddings=65536, architectures=["LlamaForCausalLM"])
            shape.save_pretrained(self.folder)
        options = {"seq_len": 256 if self.tiny else 16384, "ac": "full", "loss_chunk": 64 if self.tiny else 2048}
        dtype = "float32" if self.tiny else "bfloat16"
        return TrainConfig(model=str(self.folder), device=self.device.type, dtype=dtype, **{**options, **changes})

    @cached_property
    def data(self) -> Data:
        length = self.config().seq_len
        return Data(documents=(length // 2, length // 4, length // 4))

    @contextmanager
    def step(self, **changes: Any) -> Iterator[Callable[[], tuple[float, float]]]:
        """Give a function that runs the trainer's step, with NCCL on a GPU and a device bound to the world."""
        config = self.config(**changes)
        resolved = resolve(config, 1, weights=False)
        _, model, _, _ = resolved.valid([])
        config = resolved.largest.config
        with one_rank(self.device):
            mesh = ParallelMesh.create(ParallelDims(), self.device.type)
            recipe = EngineRecipe.of(config, model)
            if self.tiny and recipe.compile:
                recipe = replace(recipe, compile="eager")  # inductor compiles for half a minute
            engine = build_engine(recipe, mesh, self.device, lambda stage: initialise(stage.model, 0))
            batch = blank_batch(config, mesh, self.data)
            local = {key: x if key == "cu_seqlens" else x.to(self.device) for key, x in batch.items()}
            yield lambda: train_step(engine, mesh, local, config, 1e-4)

    def training(self) -> Iterator[Check]:
        """Time a step, its MFU, and what stops the host in it."""
        config = self.config()
        resolved = resolve(config, 1, weights=False)
        _, model, facts, _ = resolved.valid([])
        with self.step() as step:
            milliseconds = self.clock.milliseconds(step, repeats=3)
            stops = stops_of(step, self.device)
        weights = resolved.shape.matmul_parameters
        boundaries = torch.tensor([self.data.boundaries(config.seq_len)])
        flops = training_flops(facts, matmul_parameters=weights, tokens=config.seq_len, cu_seqlens=boundaries)
        yield Check(f"step of {model.num_hidden_layers} layers, {config.seq_len:,} tokens", milliseconds, "ms")
        expected = math.nan if self.tiny else 37.0  # 34 to 40% with everything recomputed, which MFU does not count
        yield Check("MFU", 100 * flops / milliseconds * 1e3 / self.peak, "%", expected, 0.9, 1.3)
        yield Check("stops of the host in a step", stops, "", 10, 0.0, 1.0)

    def memory(self) -> Iterator[Check]:
        """Compare the peak of a step with the dry run's."""
        config = self.config()
        predicted = dry_run(replace(config, device="cpu") if self.tiny else config, 1, data=self.data)
        with self.step() as step:
            step()  # the optimizer's states
            with track_memory(self.device) as use:
                step()
        moving = predicted.peak_bytes - (0 if self.cuda else predicted.start_bytes)
        measured = torch.cuda.max_memory_allocated(self.device) if self.cuda else use.peak_bytes
        yield Check("peak memory of a step, of the dry run's", measured / 2**20, "MiB", moving / 2**20, 0.95, 1.1)

    def compiled(self) -> Iterator[Check]:
        """Time a step with and without torch.compile."""
        times = {}
        for compile_ in (False, True):
            with self.step(compile=compile_) as step:
                begin = time.perf_counter()
                step()
                self.clock.synchronize()
                first = time.perf_counter() - begin
                times[compile_] = self.clock.milliseconds(step, repeats=3)
        yield Check("first step with torch.compile", first, "s", math.nan if self.tiny else 40, 0.1, 3)
        yield Check("step with torch.compile, of eager", times[True] / times[False], "", self._if_full(0.84), 0.85, 1.1)

    def merging(self) -> Iterator[Check]:
        """Time the merge of a block's results, and the kernels beside it."""
        tokens, heads, width = (128, 4, 16) if self.tiny else (8192, 32, 128)
        q = torch.randn(tokens, heads, width, device=self.device, dtype=torch.bfloat16)
        out, lse = torch.randn_like(q).unsqueeze(0), torch.randn(1, heads, tokens, device=self.device)
        total = AttentionSum(q, width)

        def merge() -> None:
            total.merge(Rows.of(0, tokens), out.clone(), lse.clone())  # which it may keep

        merge()
        milliseconds = self.clock.milliseconds(merge)
        yield Check("merge of a hop, 8K x 32 heads", milliseconds, "ms", self._if_full(0.15), 0.3, 1.4)
        yield Check("merge, bytes of 10 an element", 10 * q.numel() / milliseconds / 1e6, "GB/s")

    def decoding(self) -> Iterator[Check]:
        """Time a token of all slots, and the attention of a rank that has a part of the keys."""
        slots, prompt, new = (2, 8, 4) if self.tiny else (64, 2048, 32)
        _, config, _, _ = resolve(self.config(), 1, weights=False).valid([])
        with one_rank(self.device):
            mesh = ParallelMesh.create(ParallelDims(), self.device.type)
            model: Any = empty_model(config)
            model.to(torch.float32 if self.tiny else torch.bfloat16)
            apply_unified_sp(model, mesh)
            materialise(model, self.device)
            initialise(model, 0)
            generator = Generator(model, mesh, slots=slots)
            prompts = [torch.arange(prompt) % 200 for _ in range(slots)]

            def seconds(tokens: int) -> float:
                begin = time.perf_counter()
                generator.generate(prompts, Generate(max_new_tokens=tokens), list(range(slots)))
                self.clock.synchronize()
                return time.perf_counter() - begin

            seconds(2)
            short, long = seconds(2), seconds(2 + new)
        layers = 2 if self.tiny else LAYERS
        each = 1e3 * (long - short) / new / layers
        yield Check(f"decoding, {slots} slots, a layer and token", each, "ms", self._if_full(0.7), 0.2, 1.2)
        shape, length = ((2, 2, 2, 16), 64) if self.tiny else ((64, 8, 4, 128), 16384)
        q = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        k, v = (torch.randn(*shape[:2], length, shape[3], device=self.device, dtype=torch.bfloat16) for _ in range(2))
        mask = torch.zeros(shape[0], 1, 1, length, device=self.device, dtype=torch.bfloat16)
        whole = self.clock.milliseconds(
            lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        )
        part = self.clock.milliseconds(lambda: partial_attention(q, k, v, mask, None))
        yield Check("attention to a part of the keys, of SDPA", part / whole, "", self._if_full(1.0), 0.3, 1.3)

    def offloading(self) -> Iterator[Check]:
        """Time copies to the host and back at once."""
        copier, size = copier_for(self.device), (1 << 16 if self.tiny else 1 << 28)
        x = torch.zeros(size, dtype=torch.uint8, device=self.device)
        copy, event = copier.to_host(x)

        def both() -> None:
            _, out = copier.to_host(x)
            _, back = copier.to_device([copy], event)
            copier.wait(out)
            copier.wait(back)

        rate = size / self.clock.milliseconds(both) / 1e6
        yield Check("copies in both directions at once, each", rate, "GB/s", self._if_full(50), 0.8, 1.2)

    def groups(self) -> Iterator[Check]:
        """Time process groups of one rank, with and without a device bound to the world."""
        for bound in (True, False):
            with one_rank(self.device, bound):
                begin = time.perf_counter()
                made = [dist.new_group([0]) for _ in range(32)]
                for group in made:
                    dist.all_reduce(torch.zeros(1, device=self.device), group=group)
                self.clock.synchronize()
                each = 1e3 * (time.perf_counter() - begin) / len(made)
            where = "with a bound device" if bound else "made when they are used"
            yield Check(f"a group of one rank, {where}", each, "ms", self._if_full(50), 0.02, 4)

    def _if_full(self, expected: float) -> float:
        return math.nan if self.tiny else expected


@contextmanager
def one_rank(device: torch.device, bound: bool = True) -> Iterator[None]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    place = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and bound else None
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(backend, store=dist.FileStore(file.name, 1), rank=0, world_size=1, device_id=place)
        try:
            yield
        finally:
            dist.destroy_process_group()


def stops_of(step: Callable[[], object], device: torch.device) -> int:
    """Return how often torch says that a call synchronizes; 0 on a CPU, which does not tell."""
    if device.type != "cuda":
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


def sections(steps: Steps) -> dict[str, Callable[[], Iterator[Check]]]:
    """Return the sections in the order that finds most first."""
    return {
        "training step": steps.training,
        "memory": steps.memory,
        "merging": steps.merging,
        "decoding": steps.decoding,
        "offloading": steps.offloading,
        "torch.compile": steps.compiled,
        "process groups": steps.groups,
    }
