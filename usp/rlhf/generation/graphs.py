"""Decode steps as CUDA graphs: the host launches all operators of a step at once.

A graph repeats one step's operators on the memory that they had. So a step reads and writes static tensors, all that
changes between steps is in these, and nothing in it waits for the device or takes its shape from values.

    first step of a shape    operator by operator on a side stream, where cuBLAS and NCCL allocate what they keep
    second                   captured there, which computes nothing, and replayed
    later ones               replayed

Nothing that a step allocates outlives it, so graphs share one pool of memory and are replayed in any order. They hold
the addresses of weights and KV cache: `Generator` keeps them for its next call, whose steps they may be if nothing has
moved.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from usp.hf.compressors import compressors
from usp.hf.experts import expert_modules
from usp.hf.indexers import indexers
from usp.hf.models import ModelConfig, empty_model, model_facts
from usp.hf.positions import turns_by_length
from usp.hf.prune import backbone
from usp.parallel import ParallelDims
from usp.rlhf.graph import DataflowGraph, Generate
from usp.rlhf.plan.plan import OWN, ExecutionPlan

_ROOM = 1 << 31  # bytes that the memory of a step's intermediate tensors may take


class StepGraphs:
    """The CUDA graphs of a function of static tensors, one for each of its arguments.

    Ranks that communicate in a step call it with the same arguments in the same order: whether a collective is captured
    is a property of it on all of them (NCCL's user guide, "Using NCCL with CUDA Graphs").
    """

    def __init__(self, step: Callable[..., None], device: torch.device) -> None:
        self._step, self._device, self._stream = step, device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[Hashable, ...], torch.cuda.CUDAGraph | None] = {}

    def __call__(self, *shape: Hashable) -> None:
        """Run the function with these arguments."""
        if shape not in self._graphs:
            self._graphs[shape], current = None, torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._step(*shape)
            current.wait_stream(self._stream)
            return
        graph = self._graphs[shape]
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            # `torch.cuda.graph` would wait for the device, and so for other ranks, and return free memory to it, which
            # is needed only where the graph would lack it. Other threads may use the device during a capture.
            if torch.cuda.mem_get_info(self._device)[0] < _ROOM:
                torch.cuda.empty_cache()
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    self._step(*shape)
                finally:
                    graph.capture_end()
            self._graphs[shape] = graph
        graph.replay()


def eager_reason(model: Any, dims: ParallelDims) -> str:
    """Return why a graph cannot have the decode steps of a causal LM; empty if it can. The same on all ranks."""
    base, routed = backbone(model), model_facts("", model.config).experts_per_token
    reasons = {
        "hidden states pass along pp": dims.pp > 1,
        "experts get as many rows as tokens choose them": expert_modules(model) or routed,
        "scores of all tokens so far choose keys": indexers(base) or compressors(base),
        "rotary embeddings turn by the longest sequence": any(map(turns_by_length, base.modules())),
        "FSDP has streams of its own": any(isinstance(module, FSDPModule) for module in model.modules()),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def decoding_notes(
    graph: DataflowGraph, plan: ExecutionPlan, configs: Mapping[str, ModelConfig], eager: bool
) -> Iterator[str]:
    """Yield how our own generate calls decode on GPUs. eager: asked for."""
    for call in graph.calls:
        if isinstance(call.work, Generate) and (layout := plan[call.name]).engine == OWN:
            asked = "as asked" if eager else ""
            reason = asked or eager_reason(empty_model(configs[call.role], causal=True), layout.dims)
            yield f"{call.name}: decodes " + (f"operator by operator: {reason}" if reason else "under CUDA graphs")
