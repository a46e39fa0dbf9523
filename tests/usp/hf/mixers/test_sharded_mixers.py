"""Hybrid models of transformers on a sharded sequence equal each document alone in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.harness.ranks import RankPool
from tests.usp.hf.mixers.hybrids import FAMILIES, SIZES, errors, hybrid, relative, sharded
from tests.usp.sp.planned_bytes import halo_bytes, moved_bytes, state_bytes
from usp import shard_sequence
from usp.attention import LAYOUTS
from usp.hf.mixers import apply_mixers, sharded_mixers
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes
from usp.sp.in_order import SequenceOrder
from usp.sp.spans import UNORDERED, HaloPlan

TOLERANCE = 1e-5
# One family of each kind, on as many layouts as fit into CI; the grid with --exhaustive.
CHOICE = [
    ("qwen3_next", 2, 2, ("zigzag", "striped")),
    ("qwen3_next", 4, 1, ("contiguous",)),
    ("kimi_linear", 2, 1, ("zigzag",)),
    ("bamba", 2, 2, ("zigzag",)),
    ("falcon_h1", 1, 2, ("contiguous",)),
    ("minimax", 2, 2, ("zigzag", "striped")),
    ("lfm2", 4, 1, ("zigzag", "contiguous", "striped")),
]


@pytest.mark.parametrize(("family", "ring", "ulysses", "layouts"), CHOICE)
@pytest.mark.slow
def test_hybrids_equal_one_process(
    ranks: RankPool, family: str, ring: int, ulysses: int, layouts: tuple[str, ...]
) -> None:
    for found in ranks.run(errors, ring * ulysses, family, ring, ulysses, layouts):
        assert {name: error for name, error in found.items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(but=1, full=3)
def test_all_hybrids_on_all_layouts(ranks: RankPool, family: str, exhaustive: bool) -> None:
    degrees = [(r, u) for r in (1, 2, 4) for u in (1, 2, 4)] if exhaustive else [(1, 1)]
    for ring, ulysses in degrees:
        layouts = LAYOUTS if exhaustive else ("zigzag",)
        for found in ranks.run(errors, ring * ulysses, family, ring, ulysses, layouts, timeout=600.0):
            wrong = {name: error for name, error in found.items() if not error < TOLERANCE}
            assert wrong == {}, f"ring={ring} ulysses={ulysses}"


def sent_and_planned(family: str, seq_len: int, layout: str) -> list[tuple[int, int]]:
    """Return (bytes on the wire, bytes of the plans) of the forward and the backward of one recurrent layer."""
    mesh = ParallelMesh.create(ParallelDims(ring=2, ulysses=2))
    model = hybrid(family)
    order = apply_mixers(model, mesh, layout)
    name = next(iter(sharded_mixers(model)))
    mixer = model.get_submodule(name)
    convolution = next(child for child in mixer.modules() if isinstance(child, nn.Conv1d))
    cu_seqlens = torch.tensor([[0, 9, seq_len, seq_len], [0, 3, seq_len - 2, seq_len]])
    x = shard_sequence(torch.randn(2, seq_len, SIZES["hidden_size"]), mesh, layout, cu_seqlens=cu_seqlens)
    x.requires_grad_()
    plan = order.plan(2, seq_len, cu_seqlens)
    itemsize = torch.float32.itemsize
    parts = [halo_bytes(HaloPlan(plan, convolution.kernel_size[0]), convolution.in_channels * itemsize)]
    parts += [state_bytes(plan, STATES[family] * itemsize)] if family in STATES else []
    if moves := order.moves(2, order.axes.layout(layout, seq_len, plan.documents)):
        both = sum(moved_bytes(moves, order.channel.rank, SIZES["hidden_size"] * itemsize))  # to the layer and back
        parts += [(both, both)]
    with SentBytes() as forward:
        out = mixer(x, cu_seqlens=cu_seqlens)
    with SentBytes() as backward:
        out.sum().backward()
    planned = [sum(part) for part in zip(*parts, strict=True)]
    return [(forward.total, planned[0]), (backward.total, planned[1])]


STATES = {"qwen3_next": 4 * 6 * 8, "bamba": 6 * 8 * 4}  # numbers in a state of one row


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if family == "qwen3_next" or number == place else pytest.mark.exhaustive)
        for place, family in enumerate(["bamba", "lfm2", "qwen3_next"])
        for number, layout in enumerate(LAYOUTS)
    ],
)
@pytest.mark.slow(full=3)
def test_bytes_on_the_wire_equal_the_plan(ranks: RankPool, family: str, layout: str) -> None:
    by_length = [ranks.run(sent_and_planned, 4, family, seq_len, layout) for seq_len in (32, 96)]
    for found in by_length:
        assert all(sent == planned for rank in found for sent, planned in rank)
        assert sum(sent for rank in found for sent, _ in rank) > 0
    assert (by_length[0] == by_length[1]) == (layout not in UNORDERED)


def copied_and_checkpointed() -> list[float]:
    """Return relative differences of a copy's gradients, and of those under activation checkpointing."""
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    ids = shard_sequence(torch.arange(32).unsqueeze(0), mesh)
    positions = shard_sequence(torch.arange(32).unsqueeze(0), mesh)

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        model.train()
        outs = []
        for cut in (8, 20):  # two forwards before the first backward, as pipelines do
            documents = torch.tensor([0, cut, 32])
            out = model.base_model(ids, position_ids=positions, use_cache=False, cu_seqlens=documents)
            outs.append(out.last_hidden_state)
        torch.stack(outs).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model = sharded(hybrid("qwen3_next"), mesh, "zigzag")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)  # a copy that ran the original's layers would not see it
    want, halved = gradients(model), gradients(other)
    assert not torch.equal(want[0], halved[0])
    again = copy.deepcopy(model)
    again.zero_grad()
    again.gradient_checkpointing_enable()
    kept = gradients(again)
    return [relative(torch.cat([x.flatten() for x in kept]), torch.cat([x.flatten() for x in want]))]


@pytest.mark.slow
def test_copies_and_checkpoints_keep_the_results(ranks: RankPool) -> None:
    assert max(map(max, ranks.run(copied_and_checkpointed, 2))) < 1e-6


def refusals() -> dict[str, str]:
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    model = hybrid("lfm2")
    apply_mixers(model, mesh)
    mixer = model.get_submodule(next(iter(sharded_mixers(model))))
    x, ids = torch.randn(1, 16, SIZES["hidden_size"]), torch.ones(1, 16, dtype=torch.int64)
    own = hybrid("lfm2")
    own.model.layers[0].extra = nn.ModuleDict({"conv": nn.Conv1d(4, 4, 3)})
    calls = {
        "mask": lambda: mixer(x, attention_mask=torch.zeros(1, 16)),
        "cache": lambda: mixer(x, past_key_values=object()),
        "packed": lambda: mixer(x, cu_seq_lens_q=torch.tensor([0, 16])),
        "length": lambda: mixer(x[:, :15]),
        "documents": lambda: mixer(x, cu_seqlens=torch.tensor([0, 64])),
        "layout": lambda: SequenceOrder(mesh, "strip"),
        "own code": lambda: apply_mixers(own, mesh),
        "again": lambda: apply_mixers(model, mesh),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call()
        found[name] = str(caught.value)
    model.model.layers[0].conv.forward = type(mixer).forward.__get__(mixer)
    with pytest.raises(RuntimeError, match="only 0 of 1 recurrent layers"):
        model.base_model(ids, position_ids=torch.arange(16).unsqueeze(0), use_cache=False)
    return found


def test_unsupported_calls_and_models_raise(ranks: RankPool) -> None:
    found = ranks.run(refusals, 2)[0]
    assert "attention_mask is not supported" in found["mask"]
    assert "past_key_values is not supported by Lfm2ShortConv" in found["cache"]
    assert "cu_seq_lens_q is not supported" in found["packed"]
    assert "seq_len=30 cannot be divided" in found["length"]
    assert "cu_seqlens ends at 64" in found["documents"]
    assert "layout='strip' must be one of" in found["layout"]
    assert "model.layers.0.extra: ModuleDict convolves tokens by itself" in found["own code"]
    assert "already" in found["again"]


@pytest.mark.slow
def test_mixers_are_found_by_what_they_call() -> None:
    kinds = {family: set(sharded_mixers(hybrid(family)).values()) for family in FAMILIES}
    assert kinds["olmo_hybrid"] == {"gated delta rule"}
    assert kinds["kimi_linear"] == {"Kimi delta attention"}
    assert kinds["nemotron_h"] == kinds["zamba2"] == {"Mamba-2"}
    assert kinds["jamba"] == {"Mamba"}
    assert sharded_mixers(hybrid("minimax")) == {"model.layers.0.self_attn": "lightning attention"}
    assert sharded_mixers(hybrid("lfm2")) == {"model.layers.0.conv": "short convolution"}
