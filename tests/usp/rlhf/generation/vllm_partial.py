"""Responses of the real vLLM that stop and go on, in one process: those of `test_partial` with our own decoding.

vllm_partial.py STORE FAMILY [URL of a server]"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.usp.rlhf.generation.test_partial import LENGTHS, WORK, begun, enough, same
from tests.usp.rlhf.generation.test_vllm import DERIVED
from usp.data.tokenizer import BYTE_VOCAB
from usp.hf.disk import disk_layout, stored_tensors
from usp.hf.models import empty_model, materialise
from usp.hf.weights import initialise
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.reallocation.boxes import Box
from usp.rlhf.generation.partial import go_on, group_samples
from usp.rlhf.generation.vllm import EngineOptions, ServedEngine, VllmEngine, pieces_of
from usp.run.launch import leave


def main(store: str, family: str, url: str = "") -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model: Any = empty_model(DERIVED[family])
    materialise(model, torch.device("cpu"))
    sizes: dict[str, Any] = {"dtype": torch.float32, "tokens": 64, "slots": 4, "cache_bytes": 1 << 24}
    options = EngineOptions("generate", tp=1, experts=False, processed=True, **sizes)
    mesh = ParallelMesh.create(ParallelDims(dp_shard=1))
    way: tuple[Any, ...] = (options, mesh, bytes, nullcontext)
    engine = ServedEngine(model.config, url, *way) if url else VllmEngine.start(model.config, *way)
    assert engine is not None

    on_disk = disk_layout(model, {name: x.shape for name, x in stored_tensors(model).items()})
    weights = dict(model.named_parameters())  # a tied head once
    boxes = {name: Box.whole(x.shape) for name, x in weights.items()}

    def update(version: int) -> None:
        initialise(model, version)
        engine.load(pieces_of({name: x.detach() for name, x in weights.items()}, boxes, on_disk))

    ids = range(len(LENGTHS) * WORK.group_size)
    stops = tuple(range(0, BYTE_VOCAB, 6))
    greedy, sampled = replace(WORK, temperature=0.0, stop_ids=stops), replace(WORK, stop_ids=stops)
    update(0)
    whole = group_samples([*go_on(begun(), greedy, 0, lambda complete: False, engine)[0].values()], ids, greedy)
    groups, told = begun(), []
    for part in range(3):
        groups, complete = go_on(groups, greedy, part, partial(enough, part + 1), engine)
        told.append(complete)
    parts = group_samples([*groups.values()], ids, greedy)
    for key in ("tokens", "mask", "finished"):
        assert all(map(torch.equal, parts[key], whole[key])), key
    assert all(map(same, parts["logprobs"], whole["logprobs"]))
    assert all(len(tickets) > part for part, tickets in enumerate(told)) and sorted(told[0]) == told[1][: len(told[0])]
    assert any(len(of[mask > 0].unique()) > 1 for of, mask in zip(parts["versions"], parts["mask"], strict=True))

    groups = begun()
    for part in range(3):
        update(part)
        groups, _ = go_on(groups, sampled, part, partial(enough, part + 1), engine)
    updated = group_samples([*groups.values()], ids, sampled)
    for version in range(3):
        initialise(model, version)
        for n, tokens in enumerate(updated["tokens"]):
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
            own = ((updated["versions"][n] == version) & (updated["mask"][n] > 0))[:-1]
            assert same(updated["logprobs"][n][:-1][own], logprobs[own]), (version, n)
    pairs = [[each.tokens.tolist() for each in group.responses] for group in groups.values()]
    assert any(first != second for first, second in pairs), "responses of a prompt have noise of their own"


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
