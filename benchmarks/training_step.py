"""Time and MFU of a training step with llama3-8b geometry on one device, by length, with as many layers as fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.harness.measure import Clock
from parallel import ParallelDims, ParallelMesh
from usp import apply_unified_sp, shard_batch
from usp.losses import causal_lm_loss
from usp.model.facts import ModelFacts, training_flops


@dataclass(frozen=True)
class Geometry:
    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    lengths: tuple[int, ...]
    dtype: torch.dtype

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def matmul_parameters(self) -> int:
        """Return the number of weights that multiply every token: all but the embedding table and the norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab

    def facts(self) -> ModelFacts:
        return ModelFacts(self.name, self.heads, self.kv_heads, self.head_dim, self.vocab, (0,) * self.layers)


LLAMA3_8B = Geometry("llama3-8b", 4096, 14336, 32, 32, 8, 128256, (4096, 16384, 32768), torch.bfloat16)
TOY = Geometry("toy", 64, 128, 2, 4, 2, 256, (64, 128), torch.float32)


def fitting(geometry: Geometry, memory: int) -> Geometry:
    """Reduce the layers to those that fit `memory` bytes at the longest length, with activation checkpointing."""
    tokens, itemsize = max(geometry.lengths), geometry.dtype.itemsize
    per_parameter = 4 * itemsize  # weight, gradient, two moments
    ends = 2 * geometry.hidden * geometry.vocab * per_parameter
    logits = tokens * geometry.vocab * (2 * itemsize + 2 * 4)  # with gradients, in float32 too for the loss
    working = tokens * (8 * geometry.hidden + 6 * geometry.intermediate) * itemsize  # of the recomputed layer
    one = replace(geometry, layers=1)
    layer = (one.matmul_parameters() - geometry.hidden * geometry.vocab) * per_parameter
    layer += tokens * geometry.hidden * itemsize
    fit = int((0.92 * memory - ends - logits - working) // layer)
    if fit < 1:
        raise RuntimeError(f"one layer of {geometry.name} at {tokens:,} tokens does not fit {memory / 2**30:.0f} GiB")
    return replace(geometry, layers=min(geometry.layers, fit))


def build(geometry: Geometry, device: torch.device, mesh: ParallelMesh) -> Any:
    config = LlamaConfig(
        vocab_size=geometry.vocab,
        hidden_size=geometry.hidden,
        intermediate_size=geometry.intermediate,
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads,
        max_position_embeddings=max(geometry.lengths),
        tie_word_embeddings=False,
        use_cache=False,
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=geometry.dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return apply_unified_sp(model, mesh, layout="zigzag", kernel="auto")


def stepper(model: Any, mesh: ParallelMesh, tokens: int, vocab: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs one optimizer step on random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    ids = torch.randint(vocab, (1, tokens))
    batch = shard_batch({"input_ids": ids, "labels": ids}, mesh, layout="zigzag")
    local = {name: batch[name].to(device) for name in ("input_ids", "position_ids", "shift_labels")}

    def step() -> None:
        logits = model(input_ids=local["input_ids"], position_ids=local["position_ids"], use_cache=False).logits
        causal_lm_loss(logits, local["shift_labels"], tokens - 1).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def training_rows(clock: Clock, peak: float | None, *, tiny: bool) -> Iterator[tuple[str, ...]]:
    """Yield the table rows of benchmarks/gpu.py, one per length."""
    geometry, device = TOY if tiny else LLAMA3_8B, clock.device
    if device.type == "cuda":
        geometry = fitting(geometry, torch.cuda.mem_get_info(device)[0])
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = ParallelMesh.create(ParallelDims(), device_type=device.type)
        model = build(geometry, device, mesh)
        for tokens in geometry.lengths:
            if clock.expired:
                return
            step = stepper(model, mesh, tokens, geometry.vocab, device)
            milliseconds = clock.milliseconds(step, repeats=3)
            flops = training_flops(
                geometry.facts(),
                matmul_parameters=geometry.matmul_parameters(),
                tokens=tokens,
                cu_seqlens=torch.tensor([[0, tokens]]),
            )
            rate = flops / milliseconds * 1e3
            mfu = f"MFU {100 * rate / peak:.1f}% of {peak / 1e12:.0f} TFLOP/s" if peak else "unknown peak"
            what = f"training step, {geometry.name} geometry, {geometry.layers} layers"
            kernel = ", ".join(sorted(model.unified_sp.kernels))
            yield (what, kernel, f"{tokens:,}", "-", f"{milliseconds:.1f}", "-", f"{rate / 1e12:.1f}", mfu)
    finally:
        dist.destroy_process_group()
