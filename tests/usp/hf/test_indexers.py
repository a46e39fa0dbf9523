"""Models whose attention is sparse by an indexer: their indices, loss and gradients are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.harness.ranks import RankPool, on_first_rank
from tests.usp.hf.test_every_model import gradient_of, relative, summed_gradients, tiny_config
from tests.usp.rlhf.test_reference import CONFIG, REWARD, begun, reward_of
from tests.usp.train.families.test_families import write
from usp import apply_unified_sp, shard_batch
from usp.attention import sparse as module_of_sparse
from usp.config import TrainConfig
from usp.hf import indexers as module_of_indexers
from usp.hf.indexers import first_positions, indexers, train_indexers
from usp.hf.models import model_facts
from usp.hf.probe import structure
from usp.hf.shrink import VOCAB, shrink
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes
from usp.predict.meter import StepMeter, Tiles
from usp.rlhf.config import RlhfConfig
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate
from usp.rlhf.prepare import prepare as prepare_rlhf
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.sp.sequence import SpAxes, document_starts
from usp.train.dry_run import dry_run
from usp.train.prepare import prepare

# DeepSeek-V3.2, GLM-5, and with sinks, gates and rotary positions at the end of the heads Hunyuan 4
# and MiniMax M3, whose blocks of keys each KV head has
TYPES = ["deepseek_v32", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text"]
BLOCKS, MORE = ("minimax_m3_vl_text",), ["axk2", "dots3_note_text"]
LENGTH, ROWS, TOP_K = 64, 2, 5
DOCUMENTS = [0, 23, 24, 64]
CALLS = [("zigzag", DOCUMENTS), ("striped", [0, LENGTH]), ("contiguous", DOCUMENTS)]
GRPO = replace(CONFIG, steps=2, options="", ref_update_every=0, ref_update_weight=1.0, checkpoint_every=0)
GRIDS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1)]  # ulysses, ring


def tiny_model(model_type: str, layers: int = 4, heads: tuple[int, int] | None = None) -> PreTrainedModel:
    """A model whose queries choose few keys, some of equal scores: with two heads, a quarter of the scores is zero.
    heads: query and KV heads, if not those of a small copy."""
    torch.manual_seed(0)
    config = shrink(tiny_config(model_type), layers)
    config.index_n_heads = 2
    if heads is not None:  # an indexer has a head for each KV head
        config.num_attention_heads, config.num_key_value_heads, config.index_n_heads = *heads, heads[1]
    if hasattr(config, "index_topk"):
        config.index_topk = TOP_K
    if hasattr(config, "indexer_types"):
        config.indexer_types = ["full", "shared"] * (layers // 2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch_of(cuts: list[int]) -> dict[str, Tensor]:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % (VOCAB - 4) + 3
    return {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor(cuts, dtype=torch.int32)}


def watched(model: PreTrainedModel) -> list[Tensor]:
    """Return a list to which the model's indexers add their indices."""
    found: list[Tensor] = []
    for module in indexers(model).values():
        module.register_forward_hook(lambda module, args, output: found.append(output))
    return found


def alone(model_type: str, cuts: list[int], *heads: tuple[int, int]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return indices, loss and gradients of the unchanged model, which sees documents by their positions, or, if it
    chooses blocks, each by itself."""
    model, batch = tiny_model(model_type, 4, *heads), batch_of(cuts)
    indices, starts = watched(model), document_starts(batch["cu_seqlens"], ROWS, LENGTH)
    if model_type in BLOCKS:
        ids, bounds = batch["input_ids"], [*pairwise(cuts)]
        logits = torch.cat([model(input_ids=ids[:, begin:end], use_cache=False).logits for begin, end in bounds], 1)
        layers = len(indices) // len(bounds)
        of_documents = [indices[layer::layers] for layer in range(layers)]
        indices = [torch.cat([*map(blocks_of, of_layer, bounds)], 1) for of_layer in of_documents]
    else:
        positions = torch.arange(LENGTH) - starts
        logits = model(input_ids=batch["input_ids"], position_ids=positions, use_cache=False).logits
    labels = batch["labels"].roll(-1, 1)
    labels[:, [cut - 1 for cut in cuts[1:]]] = -100
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return indices, loss.detach(), torch.cat([gradient_of(parameter) for parameter in model.parameters()])


def blocks_of(chosen: Tensor, bounds: tuple[int, int]) -> Tensor:
    """Return where the blocks of a document begin in the sequence, as the sharded indexer does."""
    first = first_positions(chosen, 4)
    first = first.where(first < 0, first + bounds[0])
    return torch.nn.functional.pad(first, (0, 2 - first.shape[-1]), value=-1)


def errors(
    model_type: str, dims: ParallelDims, calls: list[tuple[str, list[int]]], *heads: tuple[int, int]
) -> list[tuple[float, float, int]]:
    """Return for each call the errors of loss and gradients, and how many queries chose other keys than alone."""
    mesh, results = ParallelMesh.create(dims), []
    for layout, cuts in calls:
        expected, loss, gradients = on_first_rank(alone, model_type, cuts, *heads)
        model = apply_unified_sp(tiny_model(model_type, 4, *heads), mesh, layout)
        indices, local = watched(model), shard_batch(batch_of(cuts), mesh, layout)
        labels = local.pop("shift_labels")
        share = causal_lm_loss(model(**local, use_cache=False).logits, labels, global_token_count(labels, mesh))
        share.backward()
        own_loss, axes = share.detach().clone(), SpAxes.of(mesh)
        dist.all_reduce(own_loss, group=mesh.group("sp"))
        (positions,) = axes.positions(axes.layout(layout, LENGTH))
        starts = document_starts(local["cu_seqlens"], ROWS, LENGTH)
        others = sum(
            unequal(own, whole[:, positions], positions, starts[:, positions])
            for own, whole in zip(indices, expected, strict=True)
        )
        results.append((relative(own_loss, loss), relative(summed_gradients(model), gradients), others))
    return results


def unequal(own: Tensor, expected: Tensor, positions: Tensor, starts: Tensor) -> int:
    """Return how many queries have other indices, of those that their mask shows."""
    own, expected = (x if x.dim() == 3 else x.flatten(2) for x in (own, expected))
    at, first = positions.view(1, -1, 1), starts.unsqueeze(-1)
    seen = [torch.where((x >= first) & (x <= at), x, -1).sort(-1).values for x in (own, expected)]
    assert all((x >= 0).any(-1).all() for x in seen)
    return int((seen[0] != seen[1]).any(-1).sum())


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.slow(full=2)
def test_indices_loss_and_gradients_are_those_of_one_process(
    ranks: RankPool, exhaustive: bool, model_type: str
) -> None:
    grids = [*GRIDS, (2, 4), (1, 8)] if exhaustive else [(2, 2), GRIDS[TYPES.index(model_type)]]
    for number, (ulysses, ring) in enumerate(grids):
        calls = CALLS if exhaustive else CALLS[number :: len(grids)]
        for found in ranks.run(errors, ulysses * ring, model_type, ParallelDims(ring=ring, ulysses=ulysses), calls):
            assert all(max(loss, gradients) <= 1e-5 and not others for loss, gradients, others in found), found


@pytest.mark.slow
def test_blocks_of_kv_heads_whose_query_heads_ulysses_parts(ranks: RankPool, exhaustive: bool) -> None:
    for heads, ulysses in [((12, 3), 2), *([((15, 3), 2), ((12, 3), 4)] if exhaustive else [])]:
        found = ranks.run(errors, ulysses, BLOCKS[0], ParallelDims(ulysses=ulysses), CALLS[:1], heads)
        for loss, gradients, others in (row for of_rank in found for row in of_rank):
            assert max(loss, gradients) <= 1e-5 and not others, (heads, ulysses, loss, gradients, others)


@pytest.mark.slow
def test_more_types_are_exact_with_the_exhaustive_option(ranks: RankPool, exhaustive: bool) -> None:
    for model_type in MORE if exhaustive else MORE[:1]:
        for found in ranks.run(errors, 4, model_type, ParallelDims(ring=2, ulysses=2), CALLS[:2]):
            assert all(max(loss, gradients) <= 1e-5 and not others for loss, gradients, others in found), found


def gathered_bytes() -> tuple[int, int]:
    """Return the bytes that an indexer sends, and those of its keys."""
    mesh = ParallelMesh.create(ParallelDims(ring=2, ulysses=2))
    model = apply_unified_sp(tiny_model("deepseek_v32"), mesh)
    local = shard_batch(batch_of([0, LENGTH]), mesh)
    local.pop("shift_labels")
    (module, *_), sent = indexers(model).values(), []
    forward = module.forward

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        with SentBytes() as counter:
            output = forward(*args, **kwargs)
        sent.append(counter.total)
        return output

    module.forward = counted
    with torch.no_grad():
        model(**local, use_cache=False)
    assert model.unified_sp.indexer_bytes == len(indexers(model)) * sent[0]
    return sent[0], ROWS * LENGTH // 4 * module.head_dim * 4


def sent_bytes(dims: ParallelDims) -> tuple[int, ...]:
    """Return the bytes that a forward sends, also where keys and values always, or never, travel as latents."""
    mesh, rule, sent = ParallelMesh.create(dims), module_of_indexers._fewer_bytes, list[int]()
    for module_of_indexers._fewer_bytes in (rule, lambda *_: True, lambda *_: False):
        model = apply_unified_sp(tiny_model("deepseek_v32"), mesh)
        for module in indexers(model).values():
            module.index_topk = LENGTH
        local = shard_batch(batch_of([0, LENGTH]), mesh)
        local.pop("shift_labels")
        with torch.no_grad():
            model(**local, use_cache=False)
        sent.append(model.unified_sp.sent_bytes)
    module_of_indexers._fewer_bytes = rule
    return tuple(sent)


@pytest.mark.slow
def test_keys_travel_as_latents_where_these_are_fewer_bytes(ranks: RankPool) -> None:
    for ulysses, ring in ((4, 1), (2, 2), (1, 4)):
        total, latent, expanded = (
            sum(of) for of in zip(*ranks.run(sent_bytes, 4, ParallelDims(ring=ring, ulysses=ulysses)), strict=True)
        )
        assert total == min(latent, expanded) and (latent < expanded) == (ring > 1)


def test_an_indexer_sends_its_keys_to_every_other_rank(ranks: RankPool) -> None:
    for sent, own in ranks.run(gathered_bytes, 4):
        assert sent == 3 * own  # in two steps: over ulysses, then over the ring


@pytest.mark.slow
def test_tiles_change_nothing(ranks: RankPool) -> None:
    assert ranks.run(in_tiles, 2) == [True, True]


def in_tiles() -> bool:
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    found: list[list[Tensor]] = []
    for tile in (1 << 24, 7 * 2 * LENGTH * ROWS):
        module_of_sparse.TILE = tile
        model = apply_unified_sp(tiny_model("glm_moe_dsa"), mesh)
        found.append(watched(model))
        local = shard_batch(batch_of(DOCUMENTS), mesh)
        local.pop("shift_labels")
        model(**local, use_cache=False)
    module_of_sparse.TILE = 1 << 24
    return all(map(torch.equal, *found))


def test_an_indexer_that_counts_its_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = tiny_model("deepseek_v32"), tiny_config("deepseek_v32")
    kind = type(next(iter(indexers(model).values())))
    whole = kind.forward

    @wraps(whole)
    def changed(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return whole(self, hidden_states, *args, **kwargs).clamp(max=hidden_states.shape[1] - 1)

    monkeypatch.setattr(kind, "forward", changed)
    config.index_topk = 7  # of which no structure is known
    (problem,) = structure(type(model), config).problems
    assert problem == "DeepseekV32Indexer does not choose keys by token, from those of its cache"


class _Largest(TorchDispatchMode):
    """Finds the most elements of a tensor that an operator returns, in this thread and in the backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(output) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return output


def largest_tensors(build: Callable[..., PreTrainedModel], *args: Any) -> list[int]:
    """Return the elements of the largest tensor in a forward and backward of a model of two lengths."""
    mesh, found = ParallelMesh.create(ParallelDims(ring=2)), []
    module_of_sparse.TILE = 1 << 12
    for length in (256, 512):
        model = build(mesh, *args)
        local = shard_batch({"input_ids": torch.arange(length).unsqueeze(0) % 80 + 3}, mesh)
        with _Largest() as largest:
            model.model(**local, use_cache=False).last_hidden_state.sum().backward()
        found.append(largest.elements)
    module_of_sparse.TILE = 1 << 24
    return found


def one_layer(mesh: ParallelMesh, warmup: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config("deepseek_v32")
    config.index_topk, config.index_n_heads, config.num_hidden_layers = TOP_K, 2, 1
    model = apply_unified_sp(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), mesh)
    if warmup:
        train_indexers(model, 1.0, warmup)
    return model


@pytest.mark.exhaustive
def test_no_tensor_grows_faster_than_the_tokens(ranks: RankPool) -> None:
    for shorter, longer in ranks.run(largest_tensors, 2, one_layer, False):
        # The largest is the chosen keys and values, 4 heads x (24 + 12) a token, of a share of the tokens that depends
        # on the weights: from 256 to 512 tokens it differs by 1%.
        assert shorter <= 256 * 144 and longer <= min(512 * 144, 2.05 * shorter)
    for shorter, longer in ranks.run(largest_tensors, 2, one_layer, True):  # hidden layers of experts
        assert longer <= 2 * shorter < 256 * 512  # of a rank's queries by all keys


@pytest.mark.exhaustive
def test_dry_runs_assume_that_every_visible_key_is_chosen(tmp_path: Path) -> None:
    tiny_model("glm_moe_dsa").save_pretrained(tmp_path)
    config = TrainConfig(model=str(tmp_path), seq_len=LENGTH, dtype="float32", sp_ring=2, sp_ulysses=2, device="cpu")
    sent = {(group.axes, group.collective): group.nbytes for group in dry_run(config, 4).sent}
    # Two of four layers have an indexer, whose keys travel over ulysses and then, twice as many, over the ring.
    own = LENGTH // 4 * 16 * 4
    assert sent[("ring",), "_allgather_base_"] == 2 * 2 * own
    assert sent[("ulysses",), "_allgather_base_"] == 2 * own + 4 * LENGTH // 4 * TOP_K * 4
    # Latent keys and values (16 + 8 + 16), which the backward receives again, and their gradients; a bit for each.
    rows = LENGTH // 2 * (16 + 8 + 16) * 4
    assert sent[("ring",), "alltoall_base_"] == 4 * (3 * rows + LENGTH // 2 // 8)


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.exhaustive
def test_dry_runs_count_the_tiles_that_they_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: bool
) -> None:
    tiny_model("glm_moe_dsa", layers=2).save_pretrained(tmp_path)
    config = TrainConfig(model=str(tmp_path), seq_len=LENGTH, dtype="float32", sp_ring=2, device="cpu")
    config = replace(config, indexer_loss_coef=1.0, indexer_warmup=warmup, ac="attention-saved")
    monkeypatch.setattr(module_of_sparse, "TILE", 7 << 8)
    few = dry_run(config, 2)
    ran = list[int]()

    def all_tiles(self: StepMeter, every: Tiles, tokens: int, elements: int) -> Iterator[slice]:
        ran.append(len([*every(tokens, elements)]))
        for tile in every(tokens, elements):
            self.known.routes = False
            yield tile
            self.known.routes = True

    monkeypatch.setattr(StepMeter, "_few", all_tiles)
    whole = dry_run(config, 2)
    assert max(ran) > 3 and few.work == whole.work and few.sent == whole.sent
    assert few.by_category == whole.by_category and few.peak_bytes == whole.peak_bytes


def test_a_named_kernel_is_refused(tmp_path: Path) -> None:
    tiny_model("glm_moe_dsa").save_pretrained(tmp_path)
    config = TrainConfig(model=str(tmp_path), tokenizer="bytes", seq_len=64, device="cpu", attention_kernel="sdpa")
    with pytest.raises(ConfigurationError, match=r"--attention-kernel = sdpa cannot attend to indices of .*: use auto"):
        prepare(config, Launch())


def generated(dims: ParallelDims, layout: str) -> list[tuple[list[int], list[float]]]:
    mesh = ParallelMesh.create(dims)
    generator = Generator(apply_unified_sp(tiny_model("hy_v4").eval(), mesh, layout), mesh, slots=3)
    prompts = [torch.arange(length) * 7 % (VOCAB - 4) + 3 for length in (37, 50, 3, 20)]
    responses = generator.generate(prompts, Generate(max_new_tokens=12, temperature=0), [0] * len(prompts))
    assert generator.cache_bytes % (3 * place_bytes(generator)) == 0
    assert model_facts("", tiny_config("hy_v4")).latent == tiny_config("hy_v4").kv_lora_rank + 8
    return [(response.tokens.tolist(), response.logprobs.tolist()) for response in responses]


def place_bytes(generator: Generator) -> int:
    """Return the bytes of a token in a cache: latents of all layers, and of two of them an indexer's keys."""
    config = tiny_config("hy_v4")
    latents = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
    return 4 * (latents + 2 * config.index_head_dim)


@pytest.mark.slow
def test_generation_chooses_among_equal_scores_as_one_rank_does(ranks: RankPool) -> None:
    (alone,) = ranks.run(generated, 1, ParallelDims(), "contiguous")
    for dims, layout in ((ParallelDims(ulysses=2), "zigzag"), (ParallelDims(ring=2), "striped")):
        for found in ranks.run(generated, 2, dims, layout):
            for (tokens, logprobs), (wanted, expected) in zip(found, alone, strict=True):
                assert tokens == wanted and logprobs == pytest.approx(expected, abs=1e-5)


def rlhf_steps(config: RlhfConfig) -> list[tuple[float, ...]]:
    trainer = begun(config)
    every = [trainer.step(number).metrics for number in range(1, config.steps + 1)]
    return [tuple(of[key] for key in ("actor/loss", "actor/grad_norm", "score")) for of in every]


@pytest.mark.exhaustive  # its parts: generation and gradients
def test_steps_of_grpo_are_those_of_one_process(ranks: RankPool, tmp_path: Path, exhaustive: bool) -> None:
    rows = [{"prompt": f"Question {number} of {'x' * number}:", "answer": str(number)} for number in range(12)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(REWARD)
    write("deepseek_v32", tmp_path / "model", vocab_size=384, index_topk=TOP_K)
    files = {"data": str(tmp_path / "questions.jsonl"), "model": str(tmp_path / "model"), "tokenizer": "bytes"}
    reward = reward_of(files["data"])
    config = replace(GRPO, **files, reward_function=reward, output=str(tmp_path / "run"))
    (alone,) = ranks.run(rlhf_steps, 1, config)
    assert any(score > 0 for *_, score in alone)
    sharded, size = replace(config, sp_ulysses=2 if exhaustive else 1, sp_ring=2, zero=3), 4 if exhaustive else 2
    for found in ranks.run(rlhf_steps, size, sharded):
        assert torch.tensor(found).allclose(torch.tensor(alone), rtol=1e-5, atol=3e-6), (found, alone)
    with pytest.raises(ConfigurationError, match=r"share_prefixes is not supported by .*, whose indexers choose keys"):
        prepare_rlhf(replace(config, share_prefixes=True), Launch())
