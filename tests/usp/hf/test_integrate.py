"""`apply_unified_sp` rejects models and forward arguments that sequence parallelism does not support."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BloomConfig, LlamaConfig

from tests.attention.dense import relative_l2
from tests.harness.ranks import RankPool
from tests.usp.tiny import SEQ_LEN, SIZES, packed_batch, tiny_model
from usp import apply_unified_sp, shard_batch, unshard_sequence
from usp.attention import LAYOUTS
from usp.parallel import ParallelDims, ParallelMesh
from usp.sp.sequence import SpAxes


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def refused_models() -> list[str]:
    mesh = ParallelMesh.create(ParallelDims())
    dropout = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, attention_dropout=0.1))
    dropout.config._attn_implementation = "eager"
    dropout.config.output_attentions = True
    bloom = AutoModelForCausalLM.from_config(BloomConfig(n_layer=1, n_head=2, hidden_size=8, vocab_size=9))
    twice = apply_unified_sp(tiny_model("llama"), mesh)
    return [
        refusal(apply_unified_sp, nn.Linear(1, 1), mesh),
        refusal(apply_unified_sp, bloom, mesh),
        refusal(apply_unified_sp, dropout, mesh),
        refusal(apply_unified_sp, twice, mesh),
        refusal(apply_unified_sp, tiny_model("llama"), mesh, "strip"),
        refusal(apply_unified_sp, tiny_model("llama"), mesh, "zigzag", "falsh"),
    ]


@pytest.mark.slow
def test_unsupported_models_raise(ranks: RankPool) -> None:
    kind, family, both, twice, layout, kernel = ranks.run(refused_models, 1)[0]
    assert "must be a transformers PreTrainedModel, got Linear" in kind
    assert "model_type='bloom': BloomAttention mix tokens outside of transformers' AttentionInterface" in family
    assert "attention_dropout=0.1" in both and "output_attentions=True" in both
    assert "already has unified sequence parallel attention" in twice
    assert "layout='strip' must be one of" in layout
    assert "did you mean 'flash'?" in kernel


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.0],
        "long_factor": [1.0, 3.0],
    },
}


def turned_by_length(rope: dict[str, Any], layout: str, cuts: list[int]) -> float:
    """Return the error of the logits of a model whose frequencies depend on the length of a document."""
    torch.manual_seed(0)
    limit = {"max_position_embeddings": 16}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | limit, rope_parameters=rope))
    ids = packed_batch(0)["input_ids"]
    with torch.no_grad():
        # By copies, because rotary embeddings remember the longest document.
        alone = [copy.deepcopy(model)(input_ids=ids[:, begin:end]).logits for begin, end in pairwise(cuts)]
        mesh = ParallelMesh.create(ParallelDims(ring=2, ulysses=2))
        local = shard_batch({"input_ids": ids, "cu_seqlens": torch.tensor(cuts)}, mesh, layout)
        apply_unified_sp(model, mesh, layout)
        own = [model(**local).logits for _ in range(2)][1]
    return (own - unshard_slice(torch.cat(alone, dim=1), mesh, layout)).norm().item() / own.norm().item()


def unshard_slice(whole: torch.Tensor, mesh: ParallelMesh, layout: str) -> torch.Tensor:
    axes = SpAxes.of(mesh)
    return whole[:, axes.positions(axes.layout(layout, whole.shape[1]))[0]]


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.slow
def test_rotary_frequencies_follow_the_length_of_each_document(ranks: RankPool, kind: str) -> None:
    # Within the original length of 16, exactly that long, and two that are longer.
    for layout, cuts in (("contiguous", [0, SEQ_LEN]), ("zigzag", [0, 7, 37, 53, SEQ_LEN]), ("striped", [0, 40, 64])):
        assert max(ranks.run(turned_by_length, 4, ROPES[kind], layout, cuts)) <= 1e-6


def odd_length(layout: str, rope: dict[str, Any] | None) -> tuple[float, float]:
    """Return the errors of the logits, and of a weight's gradient, of rows that the ranks cannot divide."""
    torch.manual_seed(0)
    mesh, ids = ParallelMesh.create(ParallelDims(ring=2, ulysses=2)), packed_batch(0)["input_ids"][:, :37]
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | {"max_position_embeddings": 16}, rope_scaling=rope))
    alone = copy.deepcopy(model)
    wanted = alone(input_ids=ids).logits
    wanted.square().sum().backward()
    local = shard_batch({"input_ids": ids}, mesh, layout)
    apply_unified_sp(model, mesh, layout)
    logits = unshard_sequence(model(**local).logits, mesh, layout, cu_seqlens=local["cu_seqlens"], length=37)
    (logits.square().sum() / 4).backward()  # the gradient of all ranks' losses
    found, exact = (x.get_input_embeddings().weight.grad for x in (model, alone))
    dist.all_reduce(found)
    return relative_l2(logits, wanted), relative_l2(found, exact)


@pytest.mark.slow
def test_a_model_takes_rows_of_any_length(ranks: RankPool) -> None:
    for layout, rope in (*((layout, None) for layout in LAYOUTS), ("zigzag", ROPES["dynamic"])):
        assert all(max(errors) <= 2e-6 for errors in ranks.run(odd_length, 4, layout, rope))


def models_of_one_config() -> tuple[bool, str]:
    """Return whether patching one model leaves another with the same config unchanged, and a classifier's error."""
    config, mesh = LlamaConfig(**SIZES, pad_token_id=0), ParallelMesh.create(ParallelDims(ring=2))
    policy, ref = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    batch = packed_batch(0)
    before = ref(input_ids=batch["input_ids"]).logits
    apply_unified_sp(policy, mesh)
    classifier = apply_unified_sp(AutoModelForSequenceClassification.from_config(config), mesh)
    good = shard_batch(batch, mesh)
    good.pop("shift_labels")
    return torch.equal(before, ref(input_ids=batch["input_ids"]).logits), refusal(classifier, **good)


@pytest.mark.slow
def test_models_sharing_a_config_are_unchanged_and_classifiers_raise(ranks: RankPool) -> None:
    for same, classifier in ranks.run(models_of_one_config, 2):
        assert same
        assert "LlamaForSequenceClassification would read the last token of each rank's shard" in classifier


def copied() -> bool:
    mesh = ParallelMesh.create(ParallelDims(ring=2, ulysses=2))
    model = apply_unified_sp(tiny_model("llama"), mesh)
    good = shard_batch(packed_batch(0), mesh)
    good.pop("shift_labels")
    return torch.equal(model(**good).logits, copy.deepcopy(model)(**good).logits)


@pytest.mark.slow
def test_deepcopy_attends_over_the_same_ranks(ranks: RankPool) -> None:
    assert ranks.run(copied, 4) == [True] * 4


def too_many_ranks() -> str:
    config = LlamaConfig(**{**SIZES, "num_attention_heads": 2})
    return refusal(
        apply_unified_sp, AutoModelForCausalLM.from_config(config), ParallelMesh.create(ParallelDims(ulysses=4))
    )


@pytest.mark.slow
def test_more_ulysses_ranks_than_heads_raises(ranks: RankPool) -> None:
    assert all(
        "ulysses=4 exceeds the 2 query heads: 2 of 4 ulysses ranks have no head" in message
        for message in ranks.run(too_many_ranks, 4)
    )


def refused_forwards() -> dict[str, str]:
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    model = apply_unified_sp(tiny_model("llama"), mesh)
    good = shard_batch(packed_batch(0), mesh)
    labels = good.pop("shift_labels")
    model(**good, attention_mask=torch.ones_like(labels))  # a mask that hides nothing is no padding
    padding = torch.ones_like(labels)
    padding[:, -1] = 0

    def without(key: str) -> dict[str, torch.Tensor]:
        return {name: value for name, value in good.items() if name != key}

    cases = {
        "labels": {**good, "labels": labels},
        "padding": {**good, "attention_mask": padding},
        "4d mask": {**good, "attention_mask": torch.zeros(1, 1, 4, 4)},
        "no positions": without("position_ids"),
        "no cu_seqlens": without("cu_seqlens"),
        "cache": {**good, "use_cache": True},
        "weights": {**good, "output_attentions": True},
        "unknown": {**good, "block_tables": labels},
    }
    messages = {name: refusal(model, **arguments) for name, arguments in cases.items()}
    by_kind = {"full_attention": torch.zeros(1, 1, 4, 4)}  # as families with layers of two kinds take them
    messages["masks by kind"] = refusal(apply_unified_sp(tiny_model("qwen2"), mesh), **good, attention_mask=by_kind)
    model.config._attn_implementation = "sdpa"
    messages["unpatched"] = refusal(model, **good)
    return messages


def refused_by_some() -> list[str]:
    """Return the errors on each rank when only some ranks find a violation."""
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    rank, found = mesh.rank("ring"), []
    for wrong in ("layout", "padding", "boundaries", "labels"):
        model = apply_unified_sp(tiny_model("llama"), mesh)
        arguments = shard_batch(packed_batch(0), mesh, "contiguous" if wrong == "layout" else "zigzag")
        labels = arguments.pop("shift_labels")
        if wrong == "padding":
            arguments["attention_mask"] = torch.ones_like(labels)
            arguments["attention_mask"][:, -1] = rank
        if wrong == "labels" and rank:
            arguments["labels"] = labels
        if wrong == "boundaries" and rank:
            arguments["cu_seqlens"] = arguments["cu_seqlens"] + 1
        found.append(refusal(model, **arguments))
    return found


def by_position_or_in_half_precision() -> tuple[str, torch.dtype]:
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    model = apply_unified_sp(tiny_model("llama"), mesh)
    good = shard_batch(packed_batch(0), mesh)
    labels, ids, positions = good.pop("shift_labels"), good["input_ids"], good["position_ids"]
    with torch.autocast("cpu", torch.bfloat16):
        dtype = model(**good).logits.dtype
    return refusal(model, ids, None, positions, None, None, labels), dtype


def test_an_error_on_one_rank_is_raised_on_all(ranks: RankPool) -> None:
    for layout, padding, boundaries, labels in ranks.run(refused_by_some, 2):
        assert labels.startswith("a forward is refused on rank 1: ValueError: labels would be shifted")
        assert "position_ids do not match layout='zigzag'" in layout
        assert "attention_mask masks padding" in padding
        assert "must start at 0" in boundaries


def test_positional_labels_raise_and_autocast_is_supported(ranks: RankPool) -> None:
    for labels, dtype in ranks.run(by_position_or_in_half_precision, 2):
        assert "pass labels to shard_batch" in labels
        assert dtype == torch.bfloat16


@pytest.mark.slow
def test_unsupported_forward_arguments_raise(ranks: RankPool) -> None:
    found = ranks.run(refused_forwards, 2)[0]
    wanted = {
        "labels": "pass labels to shard_batch",
        "padding": "attention_mask masks padding",
        "4d mask": "prebuilt attention_mask",
        "masks by kind": "prebuilt attention_mask",
        "no positions": "position_ids from shard_batch must be given",
        "no cu_seqlens": "position_ids do not match layout='zigzag', cu_seqlens",
        "cache": "a KV cache",
        "weights": "output_attentions=True",
        "unknown": "block_tables is not supported by unified_sp",
        "unpatched": "only 0 of 2 attention layers used unified sequence parallelism",
    }
    assert {name: wanted[name] in message for name, message in found.items()} == dict.fromkeys(wanted, True), found


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU, and whose values are read only by a copy to the CPU."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def tolist(self) -> list[Any]:
        raise AssertionError("read from the GPU")


def logits_of_moved_boundaries() -> bool:
    mesh = ParallelMesh.create(ParallelDims())
    model = apply_unified_sp(tiny_model("llama"), mesh)
    batch = shard_batch(packed_batch(0), mesh)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "cu_seqlens")}
    wanted = model(**inputs, use_cache=False).logits
    moved = {**inputs, "cu_seqlens": inputs["cu_seqlens"].as_subclass(OnGpu)}
    return torch.equal(model(**moved, use_cache=False).logits, wanted)


def test_layers_do_not_read_boundaries_that_fsdp_moved_to_the_gpu(ranks: RankPool) -> None:
    assert ranks.run(logits_of_moved_boundaries, 1) == [True]


def compiled_as_a_whole(model_type: str) -> tuple[float, int, str, str, str]:
    """Return the difference of logits and gradients from eager code, graphs, and the refusals of other positions, of
    boundaries that are invalid on one rank, and of another attention function."""
    from torch._dynamo.utils import counters

    mesh, found = ParallelMesh.create(ParallelDims(ring=2)), []
    batches = [shard_batch(packed_batch(number), mesh) for number in range(2)]  # of other documents
    assert not torch.equal(batches[0]["cu_seqlens"], batches[1]["cu_seqlens"])
    batches = [{name: batch[name] for name in ("input_ids", "position_ids", "cu_seqlens")} for batch in batches]
    torch.compiler.reset()
    counters.clear()
    for compiles in (False, True):
        model = apply_unified_sp(tiny_model(model_type), mesh)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        logits = [run(**batch, use_cache=False).logits for batch in batches]
        sum(each.square().sum() for each in logits).backward()
        found.append(torch.cat([x.flatten() for x in (*logits, *(p.grad for p in model.parameters()))]))
    graphs = counters["stats"]["unique_graphs"] + 100 * len(counters["graph_break"])
    with torch.no_grad():
        wrong = refusal(run, **{**batches[0], "position_ids": batches[0]["position_ids"] + 1}, use_cache=False)
        cuts = batches[0]["cu_seqlens"] + mesh.rank("ring")
        on_one = refusal(run, **{**batches[0], "cu_seqlens": cuts}, use_cache=False)
        model.config._attn_implementation = "sdpa"
        changed = refusal(run, **batches[0], use_cache=False)
    return float((found[0] - found[1]).detach().abs().max()), graphs, wrong, on_one, changed


@pytest.mark.compiles
@pytest.mark.exhaustive  # the operator: tests/usp/sp/test_operator.py
def test_a_model_compiled_as_a_whole_is_one_graph_and_checks_its_inputs(ranks: RankPool, exhaustive: bool) -> None:
    for model_type in ("llama", "qwen2", "gpt2") if exhaustive else ("llama",):
        for difference, graphs, wrong, on_one, changed in ranks.run(compiled_as_a_whole, 2, model_type):
            assert difference == 0 and graphs == 1
            assert "position_ids do not match layout='zigzag'" in wrong
            assert "a forward is refused on rank 1: ValueError: cu_seqlens=" in on_one
            assert "_attn_implementation was changed" in changed
