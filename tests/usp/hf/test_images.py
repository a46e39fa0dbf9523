"""Vision-language models on images: losses and gradients of all parameters equal transformers' in one process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from parallel import ParallelDims, ParallelMesh
from tests.attention.dense import relative_l2
from tests.harness.ranks import RankPool
from tests.usp.hf.vision import documents, loss_alone, packed, tiny_vlm
from usp import apply_unified_sp
from usp.hf.images import TYPES, shard_image_batch


def errors(kind: str, cases: list[tuple[int, int, str]]) -> dict[str, float]:
    """Return, on rank 0, the largest errors of loss and gradients over (ring, ulysses, layout), by what differs."""
    found: dict[str, float] = {}
    whole, wanted = tiny_vlm(kind), None
    rows = documents(whole)
    model = copy.deepcopy(whole)
    if dist.get_rank() == 0:
        wanted = loss_alone(whole, rows)
        wanted.backward()
    for ring, ulysses, layout in cases:
        own = apply_unified_sp(
            copy.deepcopy(model), ParallelMesh.create(ParallelDims(ring=ring, ulysses=ulysses)), layout
        )
        batch = shard_image_batch(packed(rows), own)
        targets = batch.pop("shift_labels")
        count = (targets != -100).sum()
        dist.all_reduce(count)
        loss = cross_entropy(own(**batch).logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in own.named_parameters()}
        for grad in grads.values():
            dist.all_reduce(grad)
        if wanted is not None:
            found["loss"] = max(found.get("loss", 0), abs(total / wanted - 1).item())
            for name, x in whole.named_parameters():
                exact = torch.zeros_like(x) if x.grad is None else x.grad
                error = relative_l2(grads[name], exact) if exact.norm() > 1e-7 else grads[name].norm().item()
                found[name] = max(found.get(name, 0), error)
    return found


GRIDS = [(2, 2, "zigzag"), (4, 1, "contiguous"), (1, 4, "zigzag")]


@pytest.mark.parametrize("kind", TYPES)
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, kind: str) -> None:
    found = ranks.run(errors, 4, kind, GRIDS)[0]
    wrong = {name: error for name, error in found.items() if not error <= 1e-5}
    assert len(found) > 30 and not wrong, wrong
