"""Training steps on many ranks are those of one process; and would not be, were a part of them wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.usp.tiny import FEW_STEPS, MAX_NORM, ROWS, STEPS, optimiser, packed_batch, tiny_model, train_alone
from usp import apply_unified_sp, shard_batch, shard_sequence
from usp.hf.integrate import decoder_layers
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp

GRIDS = [
    (ParallelDims(ulysses=4, ring=2), "zigzag"),
    (ParallelDims(ulysses=2, ring=4), "striped"),
    (ParallelDims(ring=8), "balanced"),
    (ParallelDims(ulysses=2, ring=2, dp_shard=2), "contiguous"),
    (ParallelDims(dp_shard=4, ulysses=2), "zigzag"),
    (ParallelDims(dp_replicate=2, ulysses=2, ring=2, sp_order="ulysses-outer"), "zigzag"),
]


@dataclass(frozen=True)
class Break:
    """A mistake to make on purpose."""

    labels: bool = False  # shift them inside each rank's part
    scale: bool = False  # average each rank's own mean
    window: bool = False  # forget the documents' borders in the attention


def train_sharded(
    family: str, dims: ParallelDims, layout: str, broken: Break, steps: int = FEW_STEPS
) -> list[tuple[float, float]]:
    mesh = ParallelMesh.create(dims)
    model = apply_unified_sp(tiny_model(family), mesh, layout)
    apply_fsdp(model, mesh, decoder_layers(model))
    optimizer, history = optimiser(model), []
    share = ROWS // mesh.size("batch")
    rows = slice(mesh.rank("batch") * share, (mesh.rank("batch") + 1) * share)
    for step in range(steps):
        whole = {key: value[rows] for key, value in packed_batch(step).items()}
        if broken.window:
            whole.pop("cu_seqlens")
        local = shard_batch(whole, mesh, layout)
        targets = local.pop("shift_labels")
        if broken.labels:
            targets = shard_sequence(whole["labels"], mesh, layout, cu_seqlens=local["cu_seqlens"]).roll(-1, dims=1)
        tokens: Tensor | int = global_token_count(targets, mesh)
        if broken.scale:
            tokens = (targets != -100).sum().clamp(min=1) * mesh.size("loss")
        loss = causal_lm_loss(model(**local).logits, targets, tokens)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).full_tensor()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.group("loss"))
        history.append((total.item(), norm.item()))
    return history


def largest_difference(histories: list[list[tuple[float, float]]], alone: list[tuple[float, float]]) -> float:
    """Of any loss or gradient norm of any step on any rank, relative."""
    wanted = torch.tensor(alone[: len(histories[0])], dtype=torch.float64)
    return float((torch.tensor(histories, dtype=torch.float64) / wanted - 1).abs().max())


@pytest.fixture(scope="module")
def alone(ranks: RankPool, exhaustive: bool) -> dict[str, list[tuple[float, float]]]:
    families = ("llama", "qwen3", "qwen2", *(["mistral"] if exhaustive else []))
    return {family: ranks.run(train_alone, 1, family, STEPS if exhaustive else FEW_STEPS)[0] for family in families}


CASES = [  # more: test_matrix.py
    pytest.param("qwen3", ParallelDims(ring=4), "striped", 4),
    *(
        pytest.param({1: "qwen3", 3: "mistral"}.get(number, "llama"), *grid, 8, marks=pytest.mark.exhaustive)
        for number, grid in enumerate(GRIDS)
    ),
]


@pytest.mark.parametrize(("family", "dims", "layout", "size"), CASES, ids=lambda value: str(value).replace(" ", "-"))
@pytest.mark.slow
def test_steps_are_those_of_one_process(
    ranks: RankPool, alone: dict, family: str, dims: ParallelDims, layout: str, size: int, exhaustive: bool
) -> None:
    found = ranks.run(train_sharded, size, family, dims, layout, Break(), STEPS if exhaustive else FEW_STEPS)
    assert largest_difference(found, alone[family]) <= 1e-5


@pytest.mark.exhaustive
def test_steps_of_qwen2_with_a_window_in_some_layers(ranks: RankPool, alone: dict, exhaustive: bool) -> None:
    steps = STEPS if exhaustive else FEW_STEPS
    found = ranks.run(train_sharded, 4, "qwen2", ParallelDims(ulysses=2, ring=2), "zigzag", Break(), steps)
    assert largest_difference(found, alone["qwen2"]) <= 1e-5


@pytest.mark.parametrize("broken", [Break(labels=True), Break(scale=True), Break(window=True)], ids=str)
def test_a_broken_step_is_seen(ranks: RankPool, alone: dict, broken: Break) -> None:
    dims = ParallelDims(ring=2, dp_shard=2)
    found = ranks.run(train_sharded, 4, "llama", dims, "zigzag", broken)
    assert largest_difference(found, alone["llama"]) > 1e-3


def wrong_positions() -> str:
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    model = apply_unified_sp(tiny_model("llama"), mesh, "zigzag")
    local = shard_batch(packed_batch(0), mesh, "zigzag")
    local.pop("shift_labels")
    local["position_ids"] = local["position_ids"].roll(1, dims=1)
    with pytest.raises(ValueError) as caught:
        model(**local)
    return str(caught.value)


@pytest.mark.slow
def test_wrong_position_ids_never_reach_a_layer(ranks: RankPool) -> None:
    messages = ranks.run(wrong_positions, 2)
    assert all("position_ids do not match layout='zigzag'" in message for message in messages)
