"""Models whose attention has compressed keys: entries, indices, loss and gradients are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from examples.models import tiny_config
from tests.harness.ranks import RankPool
from tests.usp.hf import held_out
from tests.usp.hf.held_out import LENGTH, PACKED, ROWS, VOCAB, WHOLE, Result, ids, model_of, plain, sharded
from tests.usp.hf.test_every_model import gradient_of, relative, summed_gradients
from tests.usp.hf.test_indexers import GRPO, largest_tensors, rlhf_steps, tiny_model
from tests.usp.rlhf.test_reference import REWARD, reward_of
from tests.usp.train.families.test_families import plain_steps, steps, write
from usp import JointAttention, SparseAttention, apply_unified_sp, shard_batch
from usp.attention import AttentionSpec, HeadPlan, SequenceLayout, UnifiedPlan
from usp.config import TrainConfig
from usp.hf import compressors as module_of_compressors
from usp.hf.compressors import CompressorRun, Entries, ShardedCompressor
from usp.hf.probe import structure
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes
from usp.rlhf.dry_run import dry_run_calls
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate
from usp.rlhf.prepare import prepare as prepare_rlhf
from usp.run.failures import ConfigurationError
from usp.run.launch import Launch
from usp.sp import in_order
from usp.sp.in_order import Windows
from usp.train.dry_run import dry_run

RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
GRIDS = [(1, 1), (2, 2), (4, 1), (1, 2), (2, 1), (1, 4)]  # ring, ulysses
LAYOUTS = ["contiguous", "zigzag", "striped", "balanced"]
TOP_K = 3
SPEC = AttentionSpec(window=(4, -1))
HCA, CSA, SLIDING = "heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"


def config_of(**changes: Any) -> PretrainedConfig:
    config = tiny_config("deepseek_v4")
    settings = {"compress_rates": RATES, "index_topk": TOP_K, "index_n_heads": 2, "head_dim": 16}
    settings |= {"partial_rotary_factor": 0.5, "layer_types": [HCA, CSA, SLIDING, CSA], "rope_parameters": None}
    settings |= {"num_attention_heads": 4, "o_groups": 2, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]}
    return type(config).from_dict(config.to_dict() | settings | changes)


def errors(config: PretrainedConfig, grid: tuple[int, int], cases: list[tuple[str, Any, Result]]) -> list[Any]:
    return [sharded(config, grid, layout, cuts, one) for layout, cuts, one in cases]


@pytest.fixture(scope="module")
def alone() -> dict[Any, Result]:
    return {cuts: plain(config_of(), cuts) for cuts in (PACKED, WHOLE)}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.slow(but=1, full=3)
def test_loss_and_gradients_are_those_of_one_process(
    ranks: RankPool, alone: dict[Any, Result], exhaustive: bool, grid: tuple[int, int]
) -> None:
    cases = [(layout, cuts, one) for layout in LAYOUTS for cuts, one in alone.items()]
    if not exhaustive:  # two layouts on each grid, one with documents and one without
        first = GRIDS.index(grid)
        cases = [cases[2 * (first % 4) + first // 4], cases[2 * ((first + 1) % 4) + 1 - first // 4]]
    for found in ranks.run(errors, grid[0] * grid[1], config_of(), grid, cases):
        assert all(not each.refused and each.error <= 1e-9 for each in found), found


BY_ROW = ((0, 11, 29), (0, 20, 29))


@pytest.fixture(scope="module")
def alone_by_row() -> Tensor:
    """Return the gradients of one process, with other documents in every row."""
    model, losses, targets = model_of(config_of()), list[Tensor](), 0
    for row, cuts in enumerate(BY_ROW):
        for begin, end in pairwise(cuts):
            own = ids()[row : row + 1, begin:end]
            with held_out.InDouble():
                logits = model(input_ids=own, use_cache=False).logits
            losses.append(torch.nn.functional.cross_entropy(logits[0, :-1], own[0, 1:], reduction="sum"))
            targets += end - begin - 1
    (torch.stack(losses).sum() / targets).backward()
    return torch.cat([gradient_of(parameter) for parameter in model.parameters()])


def error_by_row(layout: str, expected: Tensor) -> float:
    mesh, own = ParallelMesh.create(ParallelDims(ring=2, ulysses=2)), ids()[:, : BY_ROW[0][-1]]
    model = apply_unified_sp(model_of(config_of()), mesh, layout)
    local = shard_batch({"input_ids": own, "labels": own, "cu_seqlens": torch.tensor(BY_ROW)}, mesh, layout)
    labels = local.pop("shift_labels")
    with held_out.InDouble():
        logits = model(**local, use_cache=False).logits
        causal_lm_loss(logits, labels, global_token_count(labels, mesh)).backward()
    return relative(summed_gradients(model), expected)


@pytest.mark.parametrize("layout", ["zigzag", "striped", "balanced"])
@pytest.mark.slow(full=1)
def test_rows_differ_in_their_documents_and_end_with_padding(
    ranks: RankPool, alone_by_row: Tensor, layout: str
) -> None:
    assert max(ranks.run(error_by_row, 4, layout, alone_by_row)) <= 1e-9


@contextmanager
def recorded() -> Iterator[list[Entries]]:
    """Record what compressors make."""
    made, entries = list[Entries](), CompressorRun.entries

    def record(run: CompressorRun, *args: Any) -> Entries:
        made.append(entries(run, *args))
        return made[-1]

    with patch.object(CompressorRun, "entries", record):
        yield made


def chosen_alone(config: PretrainedConfig, cuts: tuple[int, ...]) -> list[Tensor]:
    """Return for each layer with an indexer the entries (B, S, k) that one process chooses within documents."""
    model, parts = model_of(config), list[list[Tensor]]()
    watched = [module for module in model.modules() if type(module).__name__ == "DeepseekV4Indexer"]
    found: list[Tensor] = []
    for module in watched:
        module.register_forward_hook(lambda *call: found.append(call[-1]))
    for begin, end in pairwise(cuts):
        found.clear()
        with held_out.InDouble():
            model(input_ids=ids()[:, begin:end], use_cache=False)
        parts.append([torch.nn.functional.pad(x, (0, TOP_K - x.shape[-1]), value=-1) for x in found])
    return [torch.cat(of_layer, 1) for of_layer in zip(*parts, strict=True)]


def others_chosen(grid: tuple[int, int], layout: str, cuts: tuple[int, ...], expected: list[Tensor]) -> int:
    """Return how many indices of a rank's queries are not those of one process."""
    mesh = ParallelMesh.create(ParallelDims(ring=grid[0], ulysses=grid[1]))
    model = apply_unified_sp(model_of(config_of()), mesh, layout)
    local = shard_batch({"input_ids": ids(), "cu_seqlens": torch.tensor(cuts)}, mesh, layout)
    with recorded() as made, held_out.InDouble(), torch.no_grad():
        model(**local, use_cache=False)
    axes, (documents,) = model.unified_sp.axes, in_order.documents_of(local["cu_seqlens"])
    (positions,) = axes.positions(axes.layout(layout, LENGTH, (documents,)))
    document = torch.searchsorted(torch.tensor(documents), positions, right=True) - 1
    wrong = 0
    for entries, wanted in zip([x for x in made if x.indices is not None], expected, strict=True):
        first = torch.from_numpy(entries.plan.cuts)[:, document].unsqueeze(-1)
        wrong += int((torch.where(entries.indices < 0, -1, entries.indices - first) != wanted[:, positions]).sum())
    return wrong


@pytest.mark.parametrize(("grid", "layout"), [((2, 2), "zigzag"), ((4, 1), "striped"), ((1, 2), "contiguous")])
@pytest.mark.slow(full=1)
def test_indexers_choose_the_entries_that_they_choose_in_one_process(
    ranks: RankPool, grid: tuple[int, int], layout: str
) -> None:
    for cuts in (PACKED, WHOLE):
        expected = chosen_alone(config_of(), cuts)
        assert len(expected) == 2 and any((x >= 0).sum(-1).eq(TOP_K).any() for x in expected)
        assert ranks.run(others_chosen, grid[0] * grid[1], grid, layout, cuts, expected) == [0] * grid[0] * grid[1]


def without_neighbours(x: Tensor, received: Any, moves: Any, channel: Any) -> Tensor:
    """Take nothing of a window's tokens, which are wider than entries, from others."""
    return PLACED(x, [part * (x.shape[1] <= 16) for part in received], moves, channel)


def without_other_gradients(x: Tensor, received: Any, moves: Any, channel: Any) -> Tensor:
    """Keep of what several ranks send only this rank's part."""
    out, rank = PLACED(x, received, moves, channel), channel.rank
    return out.index_copy(0, moves.receives[rank], x[moves.sends[rank]])


def one_later(*args: Any) -> Windows:
    """Let windows begin a token too late, in all documents but the shortest."""
    layout, documents, *rest = args
    later = [tuple(cut + (0 < cut < layout.seq_len) for cut in row) for row in documents]
    return WINDOWS(layout, tuple(later), *rest)


PLACED, WINDOWS = in_order._placed, Windows.of
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "edges": (in_order, "_placed", without_neighbours),
    "gradients": (in_order, "_placed", without_other_gradients),
    "windows": (Windows, "of", staticmethod(one_later)),
    "seen": (module_of_compressors, "merge_parts", lambda outs, lses, sinks: outs[0]),
}


def error_of_fault(name: str, one: Result) -> float:
    with patch.object(*FAULTS[name]):
        return sharded(config_of(), (2, 1), "zigzag", PACKED, one).error


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(ranks: RankPool, alone: dict[Any, Result], name: str) -> None:
    assert max(ranks.run(error_of_fault, 2, name, alone[PACKED])) > 1e-4


def test_ranks_share_the_windows_of_every_layout() -> None:
    documents = ((0, 7, 8, 48, 48), (0, 21, 40, 44, 47))
    for kind in LAYOUTS:
        layout = SequenceLayout(kind, 48, 4, 2, documents if kind == "balanced" else None)
        plans = [Windows.of(layout, documents, 2, rank, 4, True) for rank in range(8)]
        made = [len(plan.own) for plan in plans]
        assert sum(made) == 1 + 10 + 5 + 4 + 1 and max(made) <= 6, (kind, made)
        assert plans[0].cuts.tolist() == [[0, 1, 1, 11, 11], [11, 16, 20, 21, 21]]
        for rank, plan in enumerate(plans):
            assert [len(x) for x in plan.tokens.receives] == [len(each.tokens.sends[rank]) for each in plans]
            whole = plan.empty.view(-1, 4)
            assert whole[0].all() and whole.eq(whole[:, :1]).all() and len(whole) == len(plan.shifts)


def sent_bytes(layout: str, rates: dict[str, int]) -> tuple[int, int]:
    """Return the bytes that a forward and a backward send for entries, counted and by the plan."""
    mesh = ParallelMesh.create(ParallelDims(ring=2, ulysses=2))
    config = config_of(layer_types=[CSA], num_hidden_layers=1, mlp_layer_types=["moe"], compress_rates=rates)
    model = apply_unified_sp(model_of(config).float(), mesh, layout)
    order, local = model.unified_sp_order, shard_batch({"input_ids": ids()}, mesh, layout)
    order.channel.sent_bytes = 0
    with recorded() as made, SentBytes() as counter:
        model.model(**local, use_cache=False).last_hidden_state.sum().backward()
    assert counter.by_op["send"] == order.channel.sent_bytes + model.unified_sp._ring.sent_bytes
    tokens, entries, rank = made[0].plan.tokens, made[0].plan.entries, order.channel.rank
    sent, back = (
        sum(len(x) for peer, x in enumerate(side) if peer != rank) for side in (tokens.sends, tokens.receives)
    )
    own, others = len(entries.sends[0]) * 3, sum(len(x) for peer, x in enumerate(entries.receives) if peer != rank)
    if layout == "contiguous":  # only what is in the window over the edge, and the one before it
        assert max(sent, back) <= 2 * ROWS * 2 * rates[CSA]
    size, of_indexer = config.head_dim, config.index_head_dim
    elements = sent * 4 * (size + of_indexer) + own * (size + of_indexer) + back * 4 * size + others * size
    return order.channel.sent_bytes, elements * 4


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.slow(full=1)
def test_what_travels_is_what_the_plan_says(ranks: RankPool, layout: str) -> None:
    for counted, planned in ranks.run(sent_bytes, 4, layout, {**RATES, CSA: 3}):
        assert counted == planned > 0


def of_two_streams(mesh: ParallelMesh) -> PreTrainedModel:
    return apply_unified_sp(model_of(config_of(max_position_embeddings=2048, hc_mult=2)).float(), mesh)


@pytest.mark.slow
def test_no_tensor_grows_faster_than_the_tokens(ranks: RankPool) -> None:
    for shorter, longer in ranks.run(largest_tensors, 2, of_two_streams):
        assert longer <= 2 * shorter < 256 * 512


@pytest.mark.slow
def test_a_compressor_that_reads_its_tokens_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = model_of(config_of()), config_of(index_topk=TOP_K + 1)  # of which no structure is known
    kind = type(model.model.layers[0].self_attn.compressor)
    whole = kind.forward

    def changed(self: Any, hidden_states: Tensor, *args: Any) -> Any:
        entries, bias = whole(self, hidden_states, *args)
        return entries + hidden_states.mean(), bias

    def named(
        self: Any, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, past_key_values: Any, layer_idx: int
    ) -> Any:
        return changed(self, hidden_states, q_residual, position_ids, past_key_values, layer_idx)

    by_length = config_of(index_topk=TOP_K + 1)
    by_length.rope_parameters["main"] |= {"rope_type": "dynamic", "factor": 2.0}
    problems = structure(type(model), by_length).problems
    assert "DeepseekV4HCACompressor turns its entries by the length of a text" in problems
    monkeypatch.setattr(kind, "forward", named)
    problems = structure(type(model), config).problems
    assert problems == ("DeepseekV4HCACompressor does not make its entries of windows of the tokens in its cache",)


def test_a_forward_makes_no_modules(ranks: RankPool) -> None:
    """Attention to joint keys and to indices is prepared once, with the model."""
    assert ranks.run(modules_made, 1) == [0]


def modules_made() -> int:
    mesh, made = ParallelMesh.create(ParallelDims()), 0
    begin = nn.Module.__init__

    def count(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        made += isinstance(module, JointAttention | SparseAttention)
        begin(module, *args, **kwargs)

    for model in (model_of(config_of()), tiny_model("deepseek_v32")):
        apply_unified_sp(model, mesh)
        with patch.object(nn.Module, "__init__", count):
            model(**shard_batch({"input_ids": ids()}, mesh), use_cache=False)
    return made


def test_what_a_compressor_does_not_support_is_refused(ranks: RankPool) -> None:
    assert ranks.run(refused, 1) == [
        "prefix_tree is not supported by models with a compressor, whose windows it would cut"
    ]


def refused() -> str:
    mesh = ParallelMesh.create(ParallelDims())
    model = apply_unified_sp(model_of(config_of()), mesh)
    tree = {"cu_seqlens": torch.tensor([0, 16, LENGTH]), "prefix_tree": torch.tensor([-1, 0])}
    with pytest.raises(ValueError) as error:
        model(**shard_batch({"input_ids": ids(), **tree}, mesh), use_cache=False)
    return str(error.value)


@pytest.mark.exhaustive
def test_checkpoints_that_keep_attention_change_nothing(ranks: RankPool, tmp_path: Path) -> None:
    write("deepseek_v4", tmp_path)
    expected = torch.tensor(plain_steps("deepseek_v4"), dtype=torch.float64)
    flags = {"sp_ring": 2, "ac": "attention-saved", "micro_batches": 2}
    for found in ranks.run(steps, 2, str(tmp_path), flags):
        assert (torch.tensor(found, dtype=torch.float64) / expected - 1).abs().max() <= 1e-5


@pytest.mark.exhaustive  # of the plan: what travels, above
def test_dry_runs_count_what_entries_send(tmp_path: Path) -> None:
    config = config_of()
    model_of(config).float().save_pretrained(tmp_path)
    asked = TrainConfig(model=str(tmp_path), seq_len=64, dtype="float32", sp_ring=4, zero=0, device="cpu")
    sent = sum(group.nbytes for group in dry_run(asked, 4).sent if group.collective == "send")
    elements = 0
    for kind in config.layer_types:
        plan = UnifiedPlan.make(SequenceLayout("zigzag", 64, 4), SPEC, HeadPlan(4, 1), 1, 0, 0)
        window = plan.wire_bytes(16, torch.float32, lse=kind == CSA)
        elements += window.total // 4
        if kind != SLIDING:
            moves = Windows.of(SequenceLayout("zigzag", 64, 4), None, 1, 0, RATES[kind], kind == CSA)
            there, back = (sum(map(len, side[1:])) for side in (moves.tokens.sends, moves.tokens.receives))
            made, others = len(moves.own), sum(map(len, moves.entries.receives[1:]))
            width, index = (64, 4 * config.index_head_dim) if kind == CSA else (32, 0)
            elements += there * (width + index) + back * width + 3 * made * (16 + index // 4) + others * 16
    assert sent == 4 * elements


PROMPTS = [torch.arange(length) * 7 % (VOCAB - 4) + 3 for length in (37, 1, 17, 8, 24)]
TOKENS = 10  # more than a window of any layer


def generating_model() -> PreTrainedModel:
    """A model that repeats few tokens, and whose scores are not equal: among such, transformers chooses otherwise in a
    forward over the whole sequence than with its cache."""
    model = model_of(config_of(max_position_embeddings=128, index_n_heads=16)).float().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(drawn * (0.5 if "embed" in name else parameter[0].numel() ** -0.5))
    return model


def generated(
    dims: ParallelDims, layout: str, prompts: list[Tensor], stores: bool = True
) -> list[tuple[list[int], Tensor]]:
    mesh = ParallelMesh.create(dims)
    generator = Generator(apply_unified_sp(generating_model(), mesh, layout), mesh, slots=3)
    with nullcontext() if stores else patch.object(ShardedCompressor, "_store"):
        found = generator.generate(prompts, Generate(max_new_tokens=TOKENS, temperature=0), [0] * len(prompts))
    return [(response.tokens.tolist(), response.logprobs) for response in found]


@pytest.mark.slow
def test_generated_tokens_are_those_of_transformers(ranks: RankPool) -> None:
    model, wanted = generating_model(), []
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt in PROMPTS:
        whole = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)
        with torch.no_grad():
            logprobs = model(whole, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])
        wanted.append((whole[0, len(prompt) :].tolist(), logprobs[len(prompt) - 1 :, 0]))
    for dims, layout in ((ParallelDims(ulysses=2, ring=2), "zigzag"), (ParallelDims(ring=2), "striped")):
        for of_rank in ranks.run(generated, dims.ring * dims.ulysses, dims, layout, PROMPTS):
            for (tokens, logprobs), (others, expected) in zip(of_rank, wanted, strict=True):
                assert tokens == others and (logprobs - expected).abs().max() <= 1e-5, (dims, tokens, others)
    ((_, logprobs),), *_ = ranks.run(generated, 2, ParallelDims(ring=2), "striped", PROMPTS[:1], False)  # a fault
    assert (logprobs[0] - wanted[0][1][0]).abs() > 1e-2


@pytest.mark.exhaustive  # its parts: generated tokens, and gradients above
def test_steps_of_grpo_are_those_of_one_process(ranks: RankPool, tmp_path: Path, exhaustive: bool) -> None:
    rows = [{"prompt": f"Question {number} of {'x' * number}:", "answer": str(number)} for number in range(12)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(REWARD)
    write("deepseek_v4", tmp_path / "model", vocab_size=384, index_topk=TOP_K, compress_rates=RATES)
    files = {"data": str(tmp_path / "questions.jsonl"), "model": str(tmp_path / "model"), "tokenizer": "bytes"}
    reward = reward_of(files["data"])
    config = replace(GRPO, **files, reward_function=reward, output=str(tmp_path / "run"))
    (alone,) = ranks.run(rlhf_steps, 1, config)
    sharded, size = replace(config, sp_ulysses=2 if exhaustive else 1, sp_ring=2, zero=3), 4 if exhaustive else 2
    for found in ranks.run(rlhf_steps, size, sharded):
        assert torch.tensor(found).allclose(torch.tensor(alone), rtol=1e-5, atol=3e-6), (found, alone)
    calls = dry_run_calls(
        prepare_rlhf(sharded, Launch(rank=0, world_size=size, local_world_size=size)), torch.device("cpu")
    )
    assert "actor_train" in {call.call for call in calls if call.sent}
    with pytest.raises(ConfigurationError, match=r"share_prefixes is not supported by .*, whose compressed windows"):
        prepare_rlhf(replace(config, share_prefixes=True), Launch())
