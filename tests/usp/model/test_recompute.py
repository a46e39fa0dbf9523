"""Activation checkpointing and tiling preserve gradients, communication and parameter names."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.ranks import RankPool
from tests.usp.tiny import packed_batch, tiny_model
from usp import UnifiedSPAttention, apply_unified_sp, shard_batch
from usp.attention import KeepResults, compute_now
from usp.hf.integrate import decoder_layers
from usp.hf.stage import CausalLMStage
from usp.losses import NextTokenLoss
from usp.model import recompute
from usp.model.recompute import apply_activation_checkpointing, apply_tiled_mlp
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp
from usp.parallel.wire import SentBytes

CASES = [("none", False, 0), ("full", False, 0), ("attention-saved", False, 0), ("attention-saved", True, 0)]
CASES += [("selective", False, 0), ("selective", True, 0)]
CASES += [("full", True, 3), ("none", False, 3), ("attention-saved", False, 3)]
FEW = [CASES[number] for number in (0, 1, 3, 5, 6, 7)]  # each mode, and each with one more option
TOKENS = 100


def build(dims: ParallelDims, mode: str, away: bool, tile: int) -> tuple[CausalLMStage, ParallelMesh]:
    mesh = ParallelMesh.create(dims)
    model = apply_unified_sp(tiny_model("llama"), mesh, "zigzag")
    layers = decoder_layers(model)
    if tile:
        apply_tiled_mlp(layers, tile)
    apply_activation_checkpointing(layers, mode, model.unified_sp, away)
    return CausalLMStage(model, mesh, loss_chunk=7), mesh


def loss_of(stage: CausalLMStage, mesh: ParallelMesh, step: int) -> Tensor:
    batch = shard_batch(packed_batch(step), mesh, "zigzag")
    return stage(batch.pop("input_ids"), **batch, head=NextTokenLoss(TOKENS))


def gradients(stage: CausalLMStage) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in stage.named_parameters()}


def compare_modes(cases: list[tuple[str, bool, int]]) -> list[float]:
    """Return each case's largest relative difference of any gradient from saving everything, with two micro-batches
    whose forwards precede their backwards."""
    wanted: dict[str, Tensor] = {}
    differences = []
    for case in cases:
        stage, mesh = build(ParallelDims(ring=2), *case)
        apply_fsdp(stage, mesh, decoder_layers(stage.model))
        losses = [loss_of(stage, mesh, step) for step in range(2)]
        for loss in losses:
            loss.backward()
        found = {**gradients(stage), "loss": torch.stack(losses).detach()}
        wanted = wanted or found
        assert found.keys() == wanted.keys()
        differences.append(max(float((found[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted))
    return differences


@pytest.mark.slow
def test_gradients_match_saving_everything(ranks: RankPool, exhaustive: bool) -> None:
    cases = CASES if exhaustive else FEW
    for differences in ranks.run(compare_modes, 2, cases):
        assert torch.tensor(differences).amax() <= 1e-6
        for (_, _, tile), difference in zip(cases, differences, strict=True):
            assert difference == 0.0 or tile  # nothing is even summed in another order


def sent(mode: str) -> tuple[int, int, list[str]]:
    """Return the bytes sent in a forward and in a backward, and the event names of rank 0's trace of both in "none"."""
    stage, mesh = build(ParallelDims(ulysses=2, ring=2), mode, False, 0)
    with torch.no_grad():
        loss_of(stage, mesh, 0)  # the ranks compare their plans once
    with profile() if mode == "none" and dist.get_rank() == 0 else nullcontext() as trace:
        with SentBytes() as forward:
            loss = loss_of(stage, mesh, 0)
        with SentBytes() as backward:
            loss.backward()
    return forward.total, backward.total, [event.name for event in trace.events()] if trace else []


@pytest.mark.slow
def test_attention_saved_never_repeats_communication(ranks: RankPool) -> None:
    none, saved, full = (ranks.run(sent, 4, mode) for mode in ("none", "attention-saved", "full"))
    for (forward, backward, _), (*as_saved, _), (*as_full, _) in zip(none, saved, full, strict=True):
        assert forward > 0 and as_saved == [forward, backward]
        # A forward compares its documents over both axes, two int64 each; only the layers are repeated.
        assert as_full == [forward, backward + forward - 2 * 16]
    names = none[0][2]
    for step in ("ring step 1/2: compute", "ring step 1/2: wait", "ring step 2/2: compute"):
        assert step in names
    for direction in ("seq to heads", "heads to seq"):
        assert names.count(f"ulysses all-to-all: {direction}") == 4  # two layers, forward and backward


def split_backward() -> list[float]:
    """Return differences from saving everything, bytes sent included, with a backward split as in zero bubble."""
    wanted: list[Tensor] = []
    differences = []
    for mode in ("none", "attention-saved"):
        stage, mesh = build(ParallelDims(ulysses=2, ring=2), mode, False, 0)
        loss, weights = loss_of(stage, mesh, 0), list(stage.parameters())
        with SentBytes() as backward:
            found = [*torch.autograd.grad(loss, weights[:1], retain_graph=True)]
            found += torch.autograd.grad(loss, weights[1:])
        wanted = wanted or found
        differences += [float((f - w).norm()) for f, w in zip(found, wanted, strict=True)] + [float(backward.total)]
    half = len(differences) // 2
    return [a - b for a, b in zip(differences[half:], differences[:half], strict=True)]


def test_split_backward_recomputes_without_communication(ranks: RankPool) -> None:
    assert all(torch.tensor(found).abs().amax() == 0 for found in ranks.run(split_backward, 4))


def test_parameter_names_are_kept_and_saved_tensors_offloaded(ranks: RankPool) -> None:
    names, plain, packed = ranks.run(names_and_packs, 1)[0]
    assert names == plain
    # For each of two layers its input, and the kept output and lse of its attention.
    assert sorted(packed) == sorted(2 * [(4, 64, 32), (4, 64, 8, 4), (256, 8)])


def names_and_packs() -> tuple[list[str], list[str], list[tuple[int, ...]]]:
    packed: list[tuple[int, ...]] = []

    class Counting(recompute.Copier):
        def to_host(self, x: Tensor) -> tuple[Tensor, None]:
            packed.append(tuple(x.shape))
            return super().to_host(x)

    with patch.object(recompute, "copier_for", lambda device: Counting()):
        stage, mesh = build(ParallelDims(), "attention-saved", True, 5)
        loss_of(stage, mesh, 0).backward()
    return sorted(stage.model.state_dict()), sorted(tiny_model("llama").state_dict()), packed


def test_replay_in_another_order_raises() -> None:
    keep = KeepResults()
    keep(("a", 1), lambda: (torch.ones(1),))
    keep(("b", 2), lambda: (torch.zeros(1), "plan"))

    def never() -> tuple[Tensor]:
        raise AssertionError

    for _ in range(2):  # from the first on, as often as asked
        replay = keep.replay()
        assert replay(("a", 1), never) == (torch.ones(1),)
        assert replay(("b", 2), never)[1] == "plan"
        with pytest.raises(RuntimeError, match=r"asks for \('c', 3\) where the first kept nothing more"):
            replay(("c", 3), never)
    with pytest.raises(RuntimeError, match=r"asks for \('b', 2\) where the first kept \('a', 1\)"):
        keep.replay()(("b", 2), never)


def test_products_are_kept_but_the_last_and_not_changed_in_place() -> None:
    """Check which products run in both passes, and that a result may not change after it is kept."""
    ran: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.in_place = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), False

        def forward(self, x: Tensor) -> Tensor:
            wide = self.up(x)
            if self.in_place:
                wide.mul_(2)
            return x + self.down(wide.sin())

    layer, attention, x = Layer(), UnifiedSPAttention.__new__(UnifiedSPAttention), torch.randn(2, 3, 4)
    nn.Module.__init__(attention)
    attention.keep = compute_now
    wanted = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    apply_activation_checkpointing([layer], "selective", attention)
    with Counted():
        found = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    assert all(map(torch.equal, found, wanted))
    assert (ran.count("addmm"), ran.count("mm")) == (1, 1 + 3)
    layer.in_place = True
    with pytest.raises(RuntimeError, match="was changed in place after it had been saved"):
        layer(x).sum().backward()


def wrong_order() -> str:
    """Return the error of a layer whose attention calls change their order in the recomputation."""
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ulysses=2)))
    runs = []

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            heads = self._linear(x).unflatten(-1, (4, 4))
            runs.append(None)
            order = (heads, heads[:, :, :2]) if len(runs) % 2 else (heads[:, :, :2], heads)
            return sum(attention(h, h, h).flatten().sum() for h in order).square()

        def _linear(self, x: Tensor) -> Tensor:
            return super().forward(x)

    layer = Layer(8, 16)
    apply_activation_checkpointing([layer], "attention-saved", attention)
    with pytest.raises(RuntimeError) as caught:
        layer(torch.randn(1, 4, 8)).backward()
    dist.barrier()
    return str(caught.value)


def test_layers_that_change_their_order_fail_on_every_rank(ranks: RankPool) -> None:
    assert all("must take the same steps in both passes" in message for message in ranks.run(wrong_order, 2))


def test_layers_without_a_feed_forward_block_are_not_tiled() -> None:
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="every layer must have its feed-forward block"):
        apply_tiled_mlp([layer], 1)
