"""Every kind of model generates on sharded ranks what transformers generates alone, token for token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import TYPES, reason, tiny_config, tiny_model
from usp.attention import DecodeStep, KVCache, Prefill
from usp.hf.integrate import apply_unified_sp, decoder_layers
from usp.hf.probe import structure
from usp.hf.prune import prune_to_stage
from usp.hf.shrink import VOCAB
from usp.hf.stage import logit_transform
from usp.hf.tensor_parallel import apply_tp
from usp.parallel import ParallelDims, ParallelMesh, stage_layers
from usp.rlhf.generation.generate import Generator, generation_problems
from usp.rlhf.graph import Generate

LENGTHS = (37, 1, 2, 20, 9)  # more than slots, so that these are used again
TOLERANCE = 1e-5
# transformers' cache needs an attention layer, which these tiny ones have not; Moshi's differs from its own forward.
WITHOUT_CACHE = ("bamba", "granitemoehybrid", "jamba", "moshi")
GREEDY = Generate(max_new_tokens=5, temperature=0)


@dataclass(frozen=True)
class Grid:
    dims: ParallelDims
    layout: str = "zigzag"


GRIDS = {
    "alone": Grid(ParallelDims()),
    "u2": Grid(ParallelDims(ulysses=2), "contiguous"),
    "r2": Grid(ParallelDims(ring=2), "striped"),
    "u2 r2": Grid(ParallelDims(ulysses=2, ring=2)),
    "tp2": Grid(ParallelDims(tp=2)),
    "tp2 r2": Grid(ParallelDims(tp=2, ring=2)),
    "pp2": Grid(ParallelDims(pp=2)),
    "pp2 u2": Grid(ParallelDims(pp=2, ulysses=2), "contiguous"),
}
ON_FOUR = (
    "u2 r2",
    "tp2 r2",
    "pp2 u2",
)  # ranks, and others on two; all with --exhaustive, where some have other prompts
CHOSEN = {
    "gemma2": ["tp2 r2"],  # softcap, windows, capped logits
    "gpt_oss": ["u2 r2"],  # sinks
    "deepseek_v3": ["r2"],  # values with a head dim of their own
    "llama4_text": ["u2"],  # chunks, and scales that grow
    "granite": ["pp2"],  # scaled logits
    "qwen3_next": ["u2 r2"],  # gated delta rule
    "falcon_h1": ["r2"],  # Mamba-2 beside attention
    "minimax": ["pp2"],  # lightning attention
    "stablelm": ["pp2"],  # layers that do not pass the cache on
    "zamba2": ["u2"],  # attention layers that all call themselves layer -1
    "glm_moe_dsa": ["pp2 u2"],  # keys that an indexer chooses for several layers
    "minimax_m3_vl_text": ["u2"],  # blocks of them for each KV head
    "longrope": ["u2"],
}
# Why a mesh is refused for a family.
REFUSALS = (
    "tensor-parallel plan of model_type=",
    "tie_word_embeddings",
    "in its tensor-parallel plan",
    "is inside a sharded",
    "needs tp_sequence_parallel",
    "outside of its layers",
    "does not divide its recurrent layers",
    "has no attribute",  # of models that train.py refuses
)


def prompts(model_type: str) -> list[Tensor]:
    generator, lengths = torch.Generator().manual_seed(0), ROTARY[model_type][2] if model_type in ROTARY else LENGTHS
    return [torch.randint(3, VOCAB - 4, (length,), generator=generator) for length in lengths]


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0, 2.0] * 4}
ROTARY = {  # of a model type, and prompts that stay on one side of the length that changes it
    "longrope": ("phi3", LONG | {"original_max_position_embeddings": 32}, (27, 50, 3)),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, (59, 58, 3)),
}


def model_of(model_type: str) -> PreTrainedModel:
    """A model of a type, or one of ROTARY, with other weights: as drawn, states decay fast, and tokens repeat."""
    if model_type in ROTARY:
        name, rope, _ = ROTARY[model_type]
        config = tiny_config(name)
        config.rope_parameters, config.original_max_position_embeddings = dict(rope), 32
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    else:
        model = tiny_model(model_type).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(0.5 * drawn - 3 if parameter.dim() == 1 else parameter)
            elif parameter.dim() >= 2:
                parameter.copy_(drawn * (0.5 if "embed" in name else parameter[0].numel() ** -0.5))
    return model


def built(model_type: str, grid: Grid, mesh: ParallelMesh) -> Generator:
    """This rank's part of `model_of(model_type)`, with fewer slots than prompts."""
    model = model_of(model_type)
    transform = logit_transform(model)
    stages, stage = mesh.size("pp"), mesh.rank("pp")
    first, last = stage == 0, stage == stages - 1
    found = structure(type(model), model.config)
    if found.mixers and mesh.size("tp") > 1:
        raise ValueError(f"{model_type} does not divide its recurrent layers")
    if stages > 1:
        if not found.in_stages:
            raise ValueError(f"{model_type} changes hidden states outside of its layers")
        layers = stage_layers(len(decoder_layers(model)), stages)[stage]
        prune_to_stage(model, layers, first, last, found.layer_outputs)
    apply_unified_sp(model, mesh, grid.layout)
    apply_tp(model, mesh, sequence_parallel=False)
    return Generator(model, mesh, first=first, last=last, slots=3, transform=transform)


Responses = list[tuple[list[int], Tensor]]


def responses(model_type: str, name: str, mesh: ParallelMesh) -> Responses | str:
    """Tokens and log-probabilities by prompt, or why the grid is refused."""
    try:
        generator = built(model_type, GRIDS[name], mesh)
    except (AttributeError, ValueError) as error:
        return str(error)
    given = prompts(model_type)
    found = generator.generate(given, GREEDY, [0] * len(given))
    return [(response.tokens.tolist(), response.logprobs) for response in found]


def on_ranks(cases: Sequence[tuple[str, str]]) -> list[Responses | str]:
    meshes: dict[str, ParallelMesh] = {}
    for _, name in cases:
        if name not in meshes:
            meshes[name] = ParallelMesh.create(GRIDS[name].dims)
    return [responses(model_type, name, meshes[name]) for model_type, name in cases]


@cache
def expected(model_type: str) -> Responses:
    """What transformers generates with its own cache, and log-probabilities by a forward over the whole sequence."""
    model, found = model_of(model_type), []
    for prompt in prompts(model_type):
        ids = prompt.unsqueeze(0)
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        use_cache = model_type not in WITHOUT_CACHE
        whole = model.generate(ids, max_new_tokens=GREEDY.max_new_tokens, use_cache=use_cache, **options)
        with torch.no_grad():
            logits = model(whole, use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(1, whole[0, 1:, None]).squeeze(1)
        found.append((whole[0, len(prompt) :].tolist(), logprobs[len(prompt) - 1 :]))
    return found


def difference(found: Responses, wanted: Responses) -> float:
    """The largest error of a log-probability, relative beyond 1; infinite if a token differs."""
    if [tokens for tokens, _ in found] != [tokens for tokens, _ in wanted]:
        return float("inf")
    pairs = ((own, whole) for (_, own), (_, whole) in zip(found, wanted, strict=True))
    return max(float(((own - whole) / whole.abs().clamp(min=1)).abs().max()) for own, whole in pairs)


def refused_switch() -> str:
    generator = built("longrope", GRIDS["u2"], ParallelMesh.create(GRIDS["u2"].dims))
    with pytest.raises(ValueError) as caught:
        generator.generate([torch.arange(27), torch.arange(28)], GREEDY, [0, 0])
    return str(caught.value)


@pytest.mark.slow
def test_a_sequence_that_would_grow_past_the_switch_of_its_rotary_positions_is_refused(ranks: RankPool) -> None:
    found = ranks.run(refused_switch, 2)
    assert all(text.startswith("prompt 1 has 28 tokens and its response up to 5: beyond 32 tokens") for text in found)


def without(option: str) -> AbstractContextManager:
    attend = DecodeStep.attend
    return patch.object(DecodeStep, "attend", lambda *args, **options: attend(*args, **options | {option: None}))


def whole_rows(prefill: Prefill, padded: int) -> Tensor:
    """As if every prompt went on to the end of its row."""
    return torch.tensor([[0, padded]] * len(prefill.row_lengths))


def clear_positions(self: KVCache, slots: Tensor) -> None:
    self.positions[slots] = torch.iinfo(torch.int64).max


BROKEN: dict[str, tuple[str, Callable[[], AbstractContextManager]]] = {
    "windows": ("gpt_oss", lambda: without("window")),
    "chunks": ("llama4_text", lambda: without("chunk")),
    "sinks": ("gpt_oss", lambda: without("sinks")),
    "states of former sequences stay": ("qwen3_next", lambda: patch.object(KVCache, "clear", clear_positions)),
    "padding is read": ("falcon_h1", lambda: patch("usp.hf.mixers.prompt_documents", whole_rows)),
    "keys of other ranks are not scored": (
        "hy_v4",
        lambda: patch.object(torch.distributed, "all_reduce", lambda *args, **kwargs: None),
    ),
    "keys that were not chosen": ("hy_v4", lambda: without("indices")),
    "heads of other ranks": (
        "qwen3_next",
        lambda: patch("usp.sp.in_order.own_heads", lambda heads, group: slice(0, heads // 2)),
    ),
}


def broken_on_ranks() -> dict[str, Responses | str]:
    mesh, found = ParallelMesh.create(GRIDS["u2"].dims), {}
    for what, (model_type, broken) in BROKEN.items():
        with broken():
            found[what] = responses(model_type, "u2", mesh)
    return found


@pytest.mark.slow
def test_what_is_broken_on_purpose_is_noticed(ranks: RankPool) -> None:
    found = ranks.run(broken_on_ranks, 2)[0]
    wanted = {model_type: expected(model_type) for model_type, _ in BROKEN.values()}
    errors = {what: difference(found[what], wanted[model_type]) for what, (model_type, _) in BROKEN.items()}
    assert {what: error for what, error in errors.items() if not error > TOLERANCE} == {}


def generated(model_type: str) -> bool:
    return not reason(model_type) and not generation_problems(tiny_config(model_type))


@pytest.mark.slow
def test_tokens_are_those_of_transformers(ranks: RankPool, exhaustive: bool) -> None:
    chosen = {name: list(GRIDS) for name in TYPES if generated(name)} if exhaustive else CHOSEN
    wrong: dict[tuple[str, str], Any] = {}
    for model_types in [[name] for name in chosen] if exhaustive else [list(chosen)]:
        every = [(name, grid) for name in model_types for grid in chosen[name]]
        wanted = {name: expected(name) for name in model_types}
        results: list[tuple[Any, ...]] = []
        for size in (2, 4):
            cases = [(name, grid) for name, grid in every if (size == 4) == (exhaustive or grid in ON_FOUR)]
            results += zip(cases, *(ranks.run(on_ranks, size, cases) if cases else ()), strict=True)
        for (name, grid), *found in results:
            if isinstance(found[0], str):
                if not (exhaustive and any(part in found[0] for part in REFUSALS)):
                    wrong[name, grid] = found[0]
                continue
            worst = max(difference(of_rank, wanted[name]) for of_rank in found)
            if not worst <= TOLERANCE:
                wrong[name, grid] = worst
    assert not wrong
    assert not exhaustive or len(chosen) >= 90
