"""The loss of indexers: their gradients are those of the paper's formula in one process, on every layout."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import gradient_of, relative, summed_gradients
from tests.usp.hf.test_indexers import DOCUMENTS, LENGTH, ROWS, batch_of, tiny_model
from tests.usp.train.families.test_families import MESHES, PAIRS, steps, write
from usp import apply_unified_sp, shard_batch
from usp.attention import sparse as module_of_sparse
from usp.config import TrainConfig
from usp.hf.indexers import indexer_losses, indexers, train_indexers
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.sp.sequence import document_starts
from usp.train.prepare import prepare

COEFFICIENT = 3.0
GRIDS = [("zigzag", ParallelDims(ring=2, ulysses=2)), ("contiguous", ParallelDims(ulysses=4))]


def scores(indexer: Any, call: dict[str, Any]) -> Tensor:
    """Return I_ts of DeepSeek-V3.2's equation 1: the sum over heads of w_tj relu(q_tj . k_s), every row whole."""
    modeling = sys.modules[type(indexer).__module__]
    rotate = getattr(modeling, "apply_rotary_pos_emb", None) or modeling.apply_rotary_pos_emb_interleave
    x, latent, (cos, sin) = call["hidden_states"].detach(), call["q_resid"].detach(), call["position_embeddings"]
    q = indexer.wq_b(latent).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(x)).unsqueeze(2)
    turned = indexer.qk_rope_head_dim
    if type(indexer).__name__ == "HYV4Indexer":  # whose rotary positions are at the end of the heads
        q, k = q.roll(turned, -1), k.roll(turned, -1)
    q_turned, k_turned = rotate(q[..., :turned], k[..., :turned], cos, sin, unsqueeze_dim=2)
    q, k = torch.cat([q_turned, q[..., turned:]], -1), torch.cat([k_turned, k[..., turned:]], -1)
    products = torch.einsum("bthd,bsd->bths", q, k.squeeze(2)).relu() * indexer.head_dim**-0.5
    return torch.einsum("bth,bths->bts", indexer.weights_proj(x) * indexer.n_heads**-0.5, products)


def formula(model_type: str, warmup: bool) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the unchanged model's indexers, and the gradients of that and its own loss; in a warm-up,
    where queries attend to all keys, of that alone."""
    model, batch, found = tiny_model(model_type), batch_of(DOCUMENTS), list[tuple[Any, ...]]()
    for indexer in indexers(model).values() if warmup else ():
        indexer.index_topk = LENGTH
    for name, indexer in indexers(model).items():
        owner, calls = model.get_submodule(name.rpartition(".")[0]), list[Any]()

        def chosen(module: Any, args: tuple, kwargs: dict, output: Tensor, calls: list = calls) -> None:
            names = ("hidden_states", "q_resid", "position_embeddings", "attention_mask")
            calls.append((module, dict(zip(names, args, strict=False)) | kwargs, output))

        def attended(module: Any, args: tuple, output: Any, calls: list = calls) -> None:
            found.append((*calls.pop(), output[1].detach().sum(1)))

        indexer.register_forward_hook(chosen, with_kwargs=True)
        owner.register_forward_hook(attended)
    starts = document_starts(batch["cu_seqlens"], ROWS, LENGTH)
    logits = model(input_ids=batch["input_ids"], position_ids=torch.arange(LENGTH) - starts, use_cache=False).logits
    labels = batch["labels"].roll(-1, 1)
    labels[:, [cut - 1 for cut in DOCUMENTS[1:]]] = -100
    own, losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), list[Tensor]()
    for indexer, call, indices, weights in found:
        at = torch.arange(LENGTH).view(1, -1, 1)
        seen = (indices <= at) & (indices >= starts.unsqueeze(-1))
        wanted = weights.gather(-1, indices.long()).where(seen, 0.0)
        wanted = wanted / wanted.sum(-1, keepdim=True)
        got = scores(indexer, call).gather(-1, indices.long()).masked_fill(~seen, -torch.inf).softmax(-1)
        losses.append((wanted * (wanted.clamp(min=1e-30) / got.where(seen, 1.0)).log()).sum(-1).mean())
    (own * (not warmup) + COEFFICIENT * sum(losses)).backward()
    gradients = torch.cat([gradient_of(parameter) for parameter in model.parameters()])
    return torch.stack(losses).mean().detach(), gradients


def sharded(model: PreTrainedModel, mesh: ParallelMesh, layout: str) -> None:
    local = shard_batch(batch_of(DOCUMENTS), mesh, layout)
    labels = local.pop("shift_labels")
    share = causal_lm_loss(model(**local, use_cache=False).logits, labels, global_token_count(labels, mesh))
    share.backward()


def errors(
    model_type: str, layout: str, dims: ParallelDims, tile: int, warmup: bool = False
) -> tuple[float, float, float]:
    """Return the errors of loss and gradients, and the part of the gradients that is the indexers'."""
    mesh, expected = ParallelMesh.create(dims), formula(model_type, warmup)
    model = apply_unified_sp(tiny_model(model_type), mesh, layout)
    train_indexers(model, COEFFICIENT, warmup)
    whole, module_of_sparse.TILE = module_of_sparse.TILE, tile
    sharded(model, mesh, layout)
    module_of_sparse.TILE = whole
    sums = torch.tensor(indexer_losses([model]))
    torch.distributed.all_reduce(sums, group=mesh.group("sp"))
    assert indexer_losses([model]) == (0.0, 0.0) and sums[1] == len(indexers(model))
    parts = [gradient_of(p).norm() for module in indexers(model).values() for p in module.parameters()]
    gradients = summed_gradients(model)
    part = torch.stack(parts).norm() / gradients.norm()
    return relative(sums[0] / sums[1], expected[0]), relative(gradients, expected[1]), part.item()


@pytest.mark.parametrize(("model_type", "grid"), [("deepseek_v32", 0), ("glm_moe_dsa", 1)])
@pytest.mark.slow
def test_loss_and_gradients_are_those_of_the_formula(
    ranks: RankPool, exhaustive: bool, model_type: str, grid: int
) -> None:
    for layout, dims in GRIDS if exhaustive else GRIDS[grid : grid + 1]:
        for loss, gradients, part in ranks.run(errors, 4, model_type, layout, dims, 5 * 2 * LENGTH * ROWS):
            assert max(loss, gradients) <= 1e-5 and part > 1e-2


# Of 64 tokens, every tile has 5 queries, whose scores have 2 heads, and a block all tokens, or as many of each rank.
@pytest.mark.parametrize(
    ("model_type", "grid", "tile"), [("deepseek_v32", 0, 5 * 4 * LENGTH * ROWS), ("hy_v4", 1, 1 << 11)]
)
@pytest.mark.slow(but=1)
def test_loss_and_gradients_of_a_warm_up_are_those_of_the_formula(
    ranks: RankPool, exhaustive: bool, model_type: str, grid: int, tile: int
) -> None:
    for layout, dims in GRIDS if exhaustive else GRIDS[grid : grid + 1]:
        for loss, gradients, part in ranks.run(errors, 4, model_type, layout, dims, tile, True):
            assert max(loss, gradients) <= 1e-5 and part > 1e-2


@pytest.mark.slow
def test_training_steps_are_those_of_one_process(ranks: RankPool, tmp_path: Path, exhaustive: bool) -> None:
    write("glm_moe_dsa", tmp_path / "tiny", index_topk=5, index_n_heads=2)
    asked = {"indexer_loss_coef": COEFFICIENT, "max_grad_norm": 1e9}
    expected = ranks.run(steps, 1, str(tmp_path / "tiny"), asked)[0]
    without = ranks.run(steps, 1, str(tmp_path / "tiny"), {"max_grad_norm": 1e9})[0]
    assert expected[0][0] == without[0][0] and expected[0][1] > without[0][1]  # norms of gradients
    for mesh in ["u2 r2, recomputed", "pp2 r2"] if exhaustive else ["r2, recomputed"]:
        flags = (MESHES | PAIRS)[mesh] | asked
        found = ranks.run(steps, 4 if exhaustive else 2, str(tmp_path / "tiny"), flags)[0]
        assert relative(torch.tensor(found), torch.tensor(expected)) <= 1e-5


@pytest.mark.exhaustive  # its gradients: below
def test_steps_of_a_warm_up_are_those_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    write("glm_moe_dsa", tmp_path / "tiny", index_topk=5, index_n_heads=2)
    asked = {"indexer_loss_coef": COEFFICIENT, "indexer_warmup": True, "max_grad_norm": 1e9}
    expected = ranks.run(steps, 1, str(tmp_path / "tiny"), asked)[0]
    for mesh in ({**PAIRS["r2, recomputed"], "ac": "attention-saved"}, {"sp_ring": 2, "ep": 2, "ac": "full"}):
        found = ranks.run(steps, 2, str(tmp_path / "tiny"), {**asked, **mesh})[0]
        assert relative(torch.tensor(found), torch.tensor(expected)) <= 1e-5


@pytest.mark.slow
def test_what_has_no_indexer_loss_is_refused(tmp_path: Path) -> None:
    asked = TrainConfig(model="tiny", tokenizer="bytes", seq_len=64, device="cpu", indexer_loss_coef=0.5)
    with pytest.raises(ConfigurationError, match=r"trains indexers that choose among tokens, and .* has none"):
        prepare(asked, Launch())
    write("minimax_m3_vl_text", tmp_path / "blocks")
    with pytest.raises(ConfigurationError, match=r"the score of each key, and the indexers of .* choose blocks"):
        prepare(replace(asked, model=str(tmp_path / "blocks")), Launch())
    write("glm_moe_dsa", tmp_path / "tiny", index_topk=5)
    asked = replace(asked, model=str(tmp_path / "tiny"), indexer_loss_coef=0.0, indexer_warmup=True)
    with pytest.raises(ConfigurationError, match="--indexer-warmup trains by the loss of --indexer-loss-coef"):
        prepare(asked, Launch())
    asked = replace(asked, indexer_loss_coef=1.0, router_bias_update_rate=1e-3, pp=2)
    with pytest.raises(ConfigurationError, match=r"(?s)--indexer-warmup may leave a stage.*--indexer-warmup keeps all"):
        prepare(asked, Launch(world_size=2))
