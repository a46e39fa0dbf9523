"""Greedy tokens and log-probabilities after updates of the real vLLM are those of transformers on the new weights.

vllm_updates.py STORE FAMILY [URL of a server]"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tests.usp.rlhf.generation.test_partial import LENGTHS
from tests.usp.rlhf.generation.test_updates import TOKENS, assert_transformers_tokens
from tests.usp.rlhf.generation.test_vllm import DERIVED
from usp.data.tokenizer import BYTE_VOCAB
from usp.hf.disk import disk_layout, stored_tensors
from usp.hf.models import empty_model, materialise
from usp.hf.weights import initialise
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.reallocation.boxes import Box
from usp.rlhf.generation.vllm import EngineOptions, ServedEngine, VllmEngine, pieces_of, server_problems
from usp.rlhf.graph import Generate
from usp.rlhf.served import RolloutServer
from usp.run.launch import leave


def main(store: str, family: str, url: str = "") -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model: Any = empty_model(DERIVED[family])
    materialise(model, torch.device("cpu"))
    model.set_attn_implementation("eager")  # transformers' sdpa has no softcap
    model.config.architectures = [type(model).__name__]  # as in files
    sizes: dict[str, Any] = {"dtype": torch.float32, "tokens": 64, "slots": 4, "cache_bytes": 1 << 24}
    options = EngineOptions("generate", tp=1, experts=False, processed=True, **sizes)
    mesh = ParallelMesh.create(ParallelDims(dp_shard=1))
    way: tuple[Any, ...] = (options, mesh, bytes, nullcontext)
    engine = ServedEngine(model.config, url, *way) if url else VllmEngine.start(model.config, *way)
    assert engine is not None
    assert not url or server_problems(RolloutServer(url), options, model.config) == []
    on_disk = disk_layout(model, {name: x.shape for name, x in stored_tensors(model).items()})
    boxes = {name: Box.whole(x.shape) for name, x in stored_tensors(model).items()}
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(BYTE_VOCAB, (length,), generator=random) for length in LENGTHS]
    work = Generate(max_new_tokens=TOKENS, temperature=0.0)
    for version in range(3):
        initialise(model, version)
        if version != 1:  # the second update follows without a sleep
            engine.sleep()
            engine.wake()
        engine.load(pieces_of(stored_tensors(model), boxes, on_disk))
        assert_transformers_tokens(model, prompts, engine.generate(prompts, work, [0] * len(prompts)), 1e-4)


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
