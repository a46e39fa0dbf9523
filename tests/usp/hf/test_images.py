"""Vision-language models on images: losses and gradients of all parameters equal transformers' in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests.attention.dense import relative_l2
from tests.harness.pages import blocks
from tests.harness.ranks import RankPool
from tests.usp.hf.vision import FAMILIES, IMAGE, documents, logits_alone, loss_alone, packed, tiny_vlm
from tests.usp.tiny import optimiser
from usp import apply_unified_sp, shard_image_batch, unshard_sequence
from usp.attention import LAYOUTS, OF_DOCUMENTS, SequenceLayout
from usp.data.chats import Image
from usp.data.rows import balanced
from usp.hf.images import TYPES, image_plan
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp

Grids = list[tuple[int, int, str]]
DOCS = Path(__file__).parents[3] / "docs" / "guides" / "vision.md"


def share_of_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return this rank's share of the mean loss of all ranks' labels."""
    count = (targets != -100).sum()
    dist.all_reduce(count)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


def local_loss(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    """Return this rank's share of the mean loss of all ranks' labels."""
    targets = batch.pop("shift_labels")
    return share_of_loss(model(**batch).logits, targets)


def gradient_error(grad: Tensor | None, exact: Tensor | None) -> float:
    """Return the relative L2 of a gradient, or its norm where the exact one is none or zero."""
    assert grad is not None
    return grad.norm().item() if exact is None or exact.norm() < 1e-12 else relative_l2(grad, exact)


def errors(kind: str, grids: Grids, layer_types: Sequence[str] = ()) -> dict[str, float]:
    """Return, on rank 0, the largest errors of the loss, of each gradient and of every token's logits over (ring,
    ulysses, layout)."""
    found: dict[str, float] = {}
    whole = tiny_vlm(kind, layer_types=layer_types)
    rows, fresh = documents(whole), copy.deepcopy(whole)
    with torch.no_grad():
        exact_logits = pad_sequence([torch.cat(row) for row in logits_alone(whole, rows)], batch_first=True)
    tokens = torch.tensor([sum(document["input_ids"].shape[1] for document in row) for row in rows]).unsqueeze(1)
    if dist.get_rank() == 0:
        wanted = loss_alone(whole, rows)
        wanted.backward()
    for ring, ulysses, layout in grids:
        mesh = ParallelMesh.create(ParallelDims(ring=ring, ulysses=ulysses))
        own = apply_unified_sp(copy.deepcopy(fresh), mesh, layout)
        batch = shard_image_batch(packed(rows), own)
        targets = batch.pop("shift_labels")
        logits = own(**batch).logits
        loss = share_of_loss(logits, targets)
        loss.backward()
        documented = packed(rows)["cu_seqlens"] if layout in OF_DOCUMENTS else None
        everywhere = unshard_sequence(logits.detach(), mesh, layout, 1, documented, exact_logits.shape[1])
        real = torch.arange(exact_logits.shape[1]) < tokens
        found["logits"] = max(found.get("logits", 0), relative_l2(everywhere[real], exact_logits[real]))
        dist.all_reduce(total := loss.detach())
        for parameter in own.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
        if dist.get_rank() == 0:
            found["loss"] = max(found.get("loss", 0), abs(total / wanted - 1).item())
            for (name, exact), parameter in zip(whole.named_parameters(), own.parameters(), strict=True):
                found[name] = max(found.get(name, 0), gradient_error(parameter.grad, exact.grad))
    return found


def check(found: dict[str, float]) -> None:
    wrong = {name: error for name, error in found.items() if not error <= 1e-5}
    assert len(found) > 30 and not wrong, wrong


USUAL = {"qwen2_5_vl": [(2, 2, "zigzag"), (4, 1, "contiguous"), (1, 4, "striped")]}
USUAL |= {"qwen3_vl": [(4, 1, "zigzag")], "gemma3": [(2, 2, "zigzag")]}


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.slow
def test_loss_and_every_gradient_equal_one_process(ranks: RankPool, kind: str) -> None:
    check(ranks.run(errors, 4, kind, USUAL[kind])[0])


SLIDING, FULL = "sliding_attention", "full_attention"
ORDERS = {"gemma3": [FULL, SLIDING], "gemma4": [FULL, SLIDING, FULL]}


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.slow
def test_images_are_bidirectional_where_transformers_has_them_so(ranks: RankPool, kind: str) -> None:
    """Gemma 3's in all layers, Gemma 4's in those with a window alone."""
    check(ranks.run(errors, 4, kind, [(2, 2, "zigzag")], ORDERS[kind])[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [*product((SLIDING, FULL), repeat=3)], ids=str)
@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "aya_vision", "cohere2_vision"])
def test_layers_of_every_kind_in_every_order(ranks: RankPool, kind: str, order: tuple[str, ...]) -> None:
    check(ranks.run(errors, 4, kind, [(2, 2, "zigzag"), (4, 1, "striped")], order)[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_on_every_layout(ranks: RankPool, kind: str) -> None:
    layouts = [layout for layout in LAYOUTS if layout not in OF_DOCUMENTS or not kind.startswith("gemma")]
    check(ranks.run(errors, 4, kind, [(2, 2, layout) for layout in layouts] + [(4, 1, "zigzag"), (1, 4, "zigzag")])[0])
    # more than half of the ranks have no image, and Ulysses copies heads of keys
    check(ranks.run(errors, 8, kind, [(2, 4, "zigzag"), (8, 1, "contiguous")])[0])


def sharded_weights(kind: str) -> dict[str, float]:
    """Return the errors of the loss and of the gradients under FSDP2, where one of two ranks has no image."""
    whole = tiny_vlm(kind)
    rows = [documents(whole)[1][:1]]
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    own = apply_unified_sp(copy.deepcopy(whole), mesh)
    for layer in (*own.model.visual.blocks, *own.model.language_model.layers, own):
        fully_shard(layer, mesh=mesh.device_mesh("ring"))
    loss_alone(whole, rows).backward()
    local_loss(own, shard_image_batch(packed(rows), own)).backward()
    pairs = zip(own.named_parameters(), whole.parameters(), strict=True)
    # FSDP2 takes the mean over ranks.
    return {name: gradient_error(cast(Any, x.grad).full_tensor() * 2, exact.grad) for (name, x), exact in pairs}


@pytest.mark.slow
def test_ranks_without_images_gather_the_weights_of_the_encoder(ranks: RankPool) -> None:
    check(ranks.run(sharded_weights, 2, "qwen2_5_vl")[0])


def ten_steps(grid: dict[str, int], frozen: bool, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Return the losses of ten steps under FSDP2 and alone, and those of the last weights: exported, and alone."""
    mesh, whole = ParallelMesh.create(ParallelDims(**grid)), tiny_vlm("qwen3_vl").float()
    rows = documents(whole)
    whole.model.visual.requires_grad_(not frozen)
    own = apply_unified_sp(copy.deepcopy(whole), mesh)
    apply_fsdp(own, mesh, [*own.model.visual.blocks, *own.model.language_model.layers])
    share = rows[mesh.rank("batch") :: mesh.size("batch")]
    optimizers, losses = (optimiser(own), optimiser(whole)), ([], [])
    for _ in range(10):
        batch = shard_image_batch(packed(share), own)
        targets = batch.pop("shift_labels")
        loss = causal_lm_loss(own(**batch).logits, targets, global_token_count(targets, mesh))
        loss.backward()
        dist.all_reduce(total := loss.detach())
        (alone := loss_alone(whole, rows)).backward()
        for optimizer, values, value in zip(optimizers, losses, (total, alone.detach()), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            values.append(value.item())
    state = get_model_state_dict(own, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        exported = tiny_vlm("qwen3_vl").float()
        exported.load_state_dict(state)
        exported.save_pretrained(folder)
    dist.barrier()
    loaded = AutoModelForImageTextToText.from_pretrained(folder)
    return *losses, [loss_alone(model, rows).item() for model in (loaded, whole)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("grid", "frozen"), [({"ring": 2, "ulysses": 2}, False), ({"dp_shard": 2, "ring": 2}, True)], ids=str
)
def test_ten_steps_and_the_exported_model_are_those_of_one_process(
    ranks: RankPool, tmp_path: Path, grid: dict[str, int], frozen: bool
) -> None:
    """With the encoder trained, or frozen."""
    found, alone, last = ranks.run(ten_steps, 4, grid, frozen, tmp_path)[0]
    assert found == pytest.approx(alone, rel=1e-5) and found[-1] < 0.9 * found[0]
    assert last[0] == pytest.approx(last[1], rel=1e-5)


def test_images_are_balanced_by_patches() -> None:
    assert balanced([4, 100, 30, 50, 28], 2) == [0, 0, 1, 1, 1]
    assert balanced([1], 4) == [0]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_each_feature_goes_to_its_token(layout: str) -> None:
    images = [Image(8, 8, 2), Image(80, 80, 20), Image(12, 12, 3), Image(4, 4, 1)]
    owners, whole = [1, 0, 2, 1], SequenceLayout(layout, 24, 2, 2)
    is_image = torch.zeros(2, 23, dtype=torch.bool)
    is_image[0, 1:3] = is_image[0, 3:] = is_image[1, 5:8] = is_image[1, 20] = True
    own = [[number for number, owner in enumerate(owners) if owner == rank] or [3] for rank in range(4)]
    plans = [image_plan(images, owners, own[rank], is_image, whole, rank) for rank in range(4)]
    starts = torch.tensor([0, 2, 22, 25, 26])
    encoded = [torch.cat([torch.arange(*starts[number : number + 2]) for number in numbers]) for numbers in own]
    number = torch.full((2, 24), -1)
    number[:, :23][is_image] = torch.arange(26)  # of each token's feature
    for rank, plan in enumerate(plans):
        received = torch.full((plan.lengths[1],), -1)
        for peer, places in enumerate(plan.receives):
            received[places] = encoded[peer][plans[peer].sends[rank]]
        wanted = number[:, whole.positions(*divmod(rank, 2))]
        assert torch.equal(received, wanted[wanted >= 0])


def refusals() -> list[str]:
    mesh = ParallelMesh.create(ParallelDims())
    model = apply_unified_sp(tiny_vlm("qwen2_5_vl"), mesh)
    batch = packed(documents(model))
    straddling = batch | {"cu_seqlens": torch.tensor([0, 12, 60])}
    found = []

    def refused(call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError) as caught:
            call(*args, **kwargs)
        found.append(str(caught.value))

    refused(model, input_ids=batch["input_ids"], pixel_values=batch["pixel_values"])
    refused(shard_image_batch, batch, tiny_vlm("qwen2_5_vl"))
    refused(
        shard_image_batch, batch | {"input_ids": batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 1)}, model
    )
    refused(shard_image_batch, straddling, model)
    refused(shard_image_batch, batch | {"pixel_values": batch["pixel_values"][1:]}, model)
    refused(shard_image_batch, batch | {"pixel_values_videos": batch["pixel_values"]}, model)
    refused(shard_image_batch, batch | {"attention_mask": batch["input_ids"] != 0}, model)
    gemma = apply_unified_sp(tiny_vlm("gemma3"), mesh, "balanced")
    refused(shard_image_batch, packed(documents(gemma)), gemma)
    return found


def test_what_does_not_fit_is_refused_before_any_communication(ranks: RankPool) -> None:
    messages = [
        "pixel_values is not supported: images come from shard_image_batch",
        "the model must be the result of apply_unified_sp",
        "4 images have 40 features, but input_ids have 0 tokens for them",
        "an image continues past the end of its document at token 12 of row 0",
        "pixel_values have 159 patches, but image_grid_thw says 160",
        "pixel_values_videos are not supported beside images",
        "attention_mask masks padding",
        "layout='balanced' does not support images that attend both ways: use zigzag",
    ]
    for found, message in zip(ranks.run(refusals, 1)[0], messages, strict=True):
        assert message in found


def documented() -> tuple[int, int]:
    """Run the example of the documentation; return the numbers of logits' tokens and of encoded patches."""
    model, mesh = tiny_vlm("qwen3_vl"), ParallelMesh.create(ParallelDims(ring=2))
    names: dict[str, Any] = {"model": model, "mesh": mesh, **packed(documents(model))}
    (code,) = (block.text for block in blocks(DOCS) if block.language == "python")
    exec(code, names)
    return names["logits"].shape[1], len(names["batch"]["pixel_values"])


@pytest.mark.slow
def test_the_documented_example_runs(ranks: RankPool) -> None:
    assert {*TYPES} == {*FAMILIES} and all(kind in DOCS.read_text() for kind in TYPES)
    assert sorted(ranks.run(documented, 2)) == [(30, 48), (30, 112)]
