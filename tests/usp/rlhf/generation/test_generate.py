"""Generated tokens on every mesh match transformers' `generate`, however sequences are batched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

import usp.attention.decode
from tests.harness.ranks import RankPool
from tests.usp.tiny import CONFIGS, SIZES, VOCAB, drawn_model
from usp.hf.expert_parallel import apply_ep
from usp.hf.integrate import apply_unified_sp
from usp.hf.models import empty_model, materialise
from usp.hf.prune import prune_to_stage
from usp.hf.tensor_parallel import apply_tp
from usp.hf.weights import initialise
from usp.parallel import ParallelDims, ParallelMesh, stage_layers
from usp.rlhf.generation.decoding import GeneratedResponse, Slots
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate

CONTEXT = SIZES["max_position_embeddings"]
LENGTHS = (40, 1, 3, 251, 65, 2, 33, 150, 9)  # the longest reaches the end of the context
GREEDY = Generate(max_new_tokens=7, temperature=0)
SAMPLED = Generate(max_new_tokens=4, temperature=0.8, top_k=30, top_p=0.9)
GRIDS = (
    ParallelDims(),
    ParallelDims(tp=2),
    ParallelDims(ulysses=2),
    ParallelDims(ring=2),
    ParallelDims(ring=2, ulysses=2),
    ParallelDims(tp=2, ulysses=2),
    ParallelDims(tp=2, ring=2, ulysses=2),
    ParallelDims(pp=2),
    ParallelDims(pp=2, tp=2, ulysses=2),
)
LAYOUTS = {5: "contiguous", 3: "striped"}  # by the grid's number; zigzag elsewhere
ON_GRIDS = {"llama": (0, 3, 6, 7, 8), "qwen3": (2, 5), "mistral": (1, 4, 7)}
ON_RANKS = {4: (3, 4, 5, 7)}  # all but grids with fewer axes and, on 8 ranks, more
ALL_ON_RANKS = {4: (0, 1, 2, 3, 4, 5, 7), 8: (6, 8)}


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in LENGTHS]


def letters(ids: Iterable[int]) -> str:
    return "".join(chr(256 + i) for i in ids)


def built(
    config: PretrainedConfig,
    mesh: ParallelMesh,
    layout: str = "zigzag",
    slots: int = 4,
    budget: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Generator:
    """A generator with this rank's part of `drawn_model(config)`."""
    rank, stages = mesh.rank("pp"), mesh.size("pp")
    first, last = rank == 0, rank == stages - 1
    model = empty_model(config)
    prune_to_stage(model, stage_layers(config.num_hidden_layers, stages)[rank], first, last)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    apply_unified_sp(model, mesh, layout)
    apply_ep(model, mesh, tp_sequence_parallel=False)
    apply_tp(model, mesh, sequence_parallel=False, trained=False)
    materialise(model, torch.device("cpu"))
    initialise(model, 0)
    options: dict[str, Any] = {"slots": slots, "cache_tokens": budget, "decode": letters}
    return Generator(model, mesh, first=first, last=last, **options)


@dataclass(frozen=True)
class Found:
    """The numbers of one rank's prompts, and its responses."""

    numbers: range
    responses: list[GeneratedResponse]


def on_grids(numbers: tuple[int, ...], works: dict[str, tuple[Generate, ...]]) -> dict[tuple[int, str], list[Found]]:
    """Return the results of each call by grid and family. Prompts are dealt out to data-parallel groups."""
    found = {}
    for number in numbers:
        mesh = ParallelMesh.create(GRIDS[number])
        own = range(mesh.rank("batch"), len(LENGTHS), mesh.size("batch"))
        given, seeds = [prompts()[index] for index in own], [7 + index for index in own]
        for family in (family for family in works if number in ON_GRIDS[family]):
            generator = built(CONFIGS[family](), mesh, LAYOUTS.get(number, "zigzag"))
            found[number, family] = [Found(own, generator.generate(given, work, seeds)) for work in works[family]]
    return found


def expected(model: PreTrainedModel, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Return transformers' greedy response, and its log-probabilities by a forward over the whole sequence."""
    ids = prompt.unsqueeze(0)
    new = min(GREEDY.max_new_tokens, CONTEXT - len(prompt))
    options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    whole = model.generate(ids, max_new_tokens=new, **options)
    return whole[0, len(prompt) :], logprobs_of(model, whole[0])[len(prompt) - 1 :]


def logprobs_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the log-probability of each token but the first, by one forward."""
    with torch.no_grad():
        return model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)


def stopped(response: Tensor, stop: int) -> Tensor:
    places = (response == stop).nonzero()
    return response[: int(places[0]) + 1] if len(places) else response


@pytest.mark.slow
def test_every_grid_matches_transformers(ranks: RankPool, exhaustive: bool) -> None:
    wanted = {}
    for family in ON_GRIDS:
        model = drawn_model(CONFIGS[family]())
        wanted[family] = [expected(model, prompt) for prompt in prompts()]
    stop = int(wanted["llama"][0][0][4])
    stopping = replace(GREEDY, stop_ids=(stop, VOCAB + 5))
    by_text = replace(GREEDY, stop_strings=(letters(wanted["llama"][0][0][3:5].tolist()),))
    works = {"llama": (stopping, SAMPLED, by_text), "qwen3": (GREEDY,), "mistral": (GREEDY,)}
    on_ranks = ALL_ON_RANKS if exhaustive else ON_RANKS
    per_rank = [found for size, numbers in on_ranks.items() for found in ranks.run(on_grids, size, numbers, works)]
    for family in ON_GRIDS:
        for where, index, response in responses(per_rank, family, 0):
            tokens, logprobs = wanted[family][index]
            if family == "llama":
                tokens = stopped(tokens, stop)
            assert response.tokens.tolist() == tokens.tolist(), where
            assert (response.logprobs - logprobs[: len(tokens)]).abs().max() <= 1e-5, where
            assert response.finished == (family == "llama" and int(tokens[-1]) == stop), where
    for where, index, response in responses(per_rank, "llama", 2):
        text, (string,) = letters(wanted["llama"][index][0].tolist()), by_text.stop_strings
        place = text.find(string)
        assert letters(response.tokens.tolist()) == (text if place < 0 else text[: place + len(string)]), where
        assert response.finished == (place >= 0) and (index != 0 or response.finished), where
    sampled: dict[int, list[int]] = {}
    for where, index, response in responses(per_rank, "llama", 1):
        assert sampled.setdefault(index, response.tokens.tolist()) == response.tokens.tolist(), where


def responses(
    per_rank: list[dict[tuple[int, str], list[Found]]], family: str, call: int
) -> Iterator[tuple[str, int, GeneratedResponse]]:
    """Yield (where, number of the prompt, response) of every rank."""
    for rank, grids in enumerate(per_rank):
        for (number, of_family), calls in grids.items():
            if of_family == family:
                found = calls[call]
                for index, response in zip(found.numbers, found.responses, strict=True):
                    yield f"{family}, {GRIDS[number]}, rank {rank}, prompt {index}", index, response


def alone(slots: int, order: tuple[int, ...]) -> dict[int, list[int]]:
    generator = built(CONFIGS["qwen3"](), ParallelMesh.create(ParallelDims()), slots=slots)
    given = [prompts()[index] for index in order]
    return dict(zip(order, [r.tokens.tolist() for r in generator.generate(given, SAMPLED, order)], strict=True))


@pytest.mark.slow
def test_slots_and_order_change_nothing_and_equal_prompts_differ_by_seed(ranks: RankPool) -> None:
    order = tuple(range(len(LENGTHS)))
    few, many = (ranks.run(alone, 1, slots, order)[0] for slots in (1, 64))
    assert few == many == ranks.run(alone, 1, 4, order[::-1])[0]
    repeated = ranks.run(responses_to_one_prompt, 2)[0]
    assert repeated[0] == repeated[1] and repeated[0] != repeated[2] and repeated[3] == few[2]


def with_budget(budget: int) -> tuple[list[list[int]], int]:
    """Responses with room for so many tokens, 0 for no bound, and the bytes of the cache."""
    generator = built(CONFIGS["qwen3"](), ParallelMesh.create(ParallelDims(ring=2)), slots=64, budget=budget)
    found = generator.generate(prompts(), SAMPLED, list(range(len(LENGTHS))))
    return [r.tokens.tolist() for r in found], generator.cache_bytes


def refused_budget() -> int:
    """The tokens that the refusal of a budget of one token names."""
    with pytest.raises(ValueError, match="cache_tokens = 1 holds no sequence") as refusal:
        with_budget(1)
    numbers = re.search(r"need (\d+) tokens", str(refusal.value))
    assert numbers is not None
    return int(numbers[1])


@pytest.mark.slow
def test_a_budget_of_the_cache_changes_its_size_and_no_token(ranks: RankPool) -> None:
    (needed, _), (unbounded, all_bytes) = ranks.run(refused_budget, 2), ranks.run(with_budget, 2, 0)[0]
    for slots in (1, 2):
        responses, nbytes = ranks.run(with_budget, 2, slots * needed + 1)[0]
        assert responses == unbounded
        assert nbytes * len(LENGTHS) == all_bytes * slots


def responses_to_one_prompt() -> list[list[int]]:
    """Respond to prompt 0 with seeds 7, 7 and 8, which share a prefill, and to prompt 2."""
    generator = built(CONFIGS["qwen3"](), ParallelMesh.create(ParallelDims(ring=2)), slots=4)
    given = [prompts()[index] for index in (0, 0, 0, 2)]
    return [r.tokens.tolist() for r in generator.generate(given, SAMPLED, [7, 7, 8, 2])]


def cache_bytes(grids: tuple[ParallelDims, ...]) -> list[int]:
    """Those of responses that end at once, with room for eight tokens."""
    work, found = Generate(max_new_tokens=8, temperature=0, stop_ids=tuple(range(VOCAB))), []
    for dims in grids:
        generator = built(CONFIGS["llama"](), ParallelMesh.create(dims))
        generator.generate([torch.arange(65), torch.arange(3)], work, [0, 0])
        found.append(generator.cache_bytes)
    return found


@pytest.mark.slow
def test_cache_memory_falls_with_every_axis(ranks: RankPool) -> None:
    grids = tuple(GRIDS[number] for number in ON_RANKS[4])
    per_rank = ranks.run(cache_bytes, 4, grids)
    # two slots, layers, KV heads; keys and values of 64 prompt tokens and 8 more, 4 float32 a head
    whole = 2 * 2 * 2 * 2 * (64 + 8) * 4 * 4
    wanted = [whole // (dims.tp * dims.ring * dims.ulysses * dims.pp) for dims in grids]
    assert per_rank == [wanted] * 4


LONG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=33000,
)


def long_prompt() -> Tensor:
    return torch.randint(VOCAB, (32768,), generator=torch.Generator().manual_seed(1))


def continue_long_prompt() -> list[int]:
    generator = built(LONG, ParallelMesh.create(ParallelDims(ring=2, ulysses=2)))
    work = Generate(max_new_tokens=4, temperature=0)
    return generator.generate([long_prompt()], work, [0])[0].tokens.tolist()


@pytest.mark.exhaustive
def test_a_prompt_of_32k_tokens(ranks: RankPool) -> None:
    ids = long_prompt().unsqueeze(0)
    options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    whole = drawn_model(LONG).generate(ids, max_new_tokens=4, **options)
    assert ranks.run(continue_long_prompt, 4) == [whole[0, 32768:].tolist()] * 4


def broken(kind: str) -> float:
    """Return the largest error of a log-probability on a ring of two."""
    if kind == "merge":
        usp.attention.decode.merge_parts = lambda out, lse, sinks: out.mean(0)
    if kind == "owner":
        decode_inputs = Slots.decode_inputs
        Slots.decode_inputs = lambda self, ranks, rank: decode_inputs(self, ranks, 0)
    generator = built(CONFIGS["llama"](), ParallelMesh.create(ParallelDims(ring=2)))
    found = generator.generate(prompts()[:3], Generate(max_new_tokens=4, temperature=0), [0] * 3)
    model = drawn_model(CONFIGS["llama"]())
    errors = [torch.zeros(1)]
    for prompt, response in zip(prompts(), found, strict=False):
        logprobs = logprobs_of(model, torch.cat((prompt, response.tokens)))
        errors.append((logprobs[len(prompt) - 1 :] - response.logprobs).abs())
    return float(torch.cat(errors).max())


@pytest.mark.parametrize("kind", ["", "merge", "owner"])
def test_wrong_merge_and_wrong_owner_are_noticed(kind: str) -> None:
    with RankPool() as own:  # patched ranks
        errors = own.run(broken, 2, kind)
    assert all(error > 1e-4 for error in errors) if kind else all(error <= 1e-5 for error in errors)


def refusals() -> dict[str, str]:
    mesh = ParallelMesh.create(ParallelDims(ulysses=2))
    generator = built(CONFIGS["llama"](), mesh)
    experts = apply_unified_sp(empty_model(CONFIGS["mixtral"]()), mesh)
    sharded = ParallelMesh.create(ParallelDims(dp_shard=2, ep=2))
    rank = torch.distributed.get_rank()
    cases = {
        "none": lambda: generator.generate([], GREEDY, []),
        "long": lambda: generator.generate([torch.arange(3), torch.arange(CONTEXT)], GREEDY, [0, 0]),
        "empty": lambda: generator.generate([torch.arange(0)], GREEDY, [0]),
        "differ": lambda: generator.generate([torch.tensor([rank])], GREEDY, [0]),
        "plain": lambda: Generator(torch.nn.Linear(1, 1), mesh),
        "experts": lambda: Generator(experts, sharded),
        "gradients": lambda: generator._forward(torch.ones(1, 1).long(), torch.ones(1, 1).long(), object()),
    }
    messages = {}
    for name, call in cases.items():
        try:
            messages[name] = str(call())
        except (ValueError, RuntimeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    with torch.no_grad():
        next(generator._model.parameters()).fill_(torch.nan)
    try:
        generator.generate([torch.arange(3)], GREEDY, [0])
    except RuntimeError as error:
        messages["nan"] = str(error)
    return messages


@pytest.mark.slow
def test_invalid_arguments_are_rejected_on_every_rank(ranks: RankPool) -> None:
    wanted = {
        "none": "[]",
        "long": f"ValueError: prompt 1 has {CONTEXT} tokens, expected 1 to {CONTEXT - 1} to leave room for a response",
        "empty": "ValueError: prompt 0 has 0 tokens",
        "differ": "RanksDisagree: the arguments of generate must be the same on all ranks",
        "plain": "ValueError: the model's attention is not sharded: call apply_unified_sp(model, mesh) first",
        "experts": "ValueError: ep=2 divides experts, and these are whole: call apply_ep",
        "gradients": "ValueError: kv_cache does not support gradients",
        "nan": "the model's logits are not finite after 3 tokens",
    }
    for found in ranks.run(refusals, 2):
        assert {name: text in found[name] for name, text in wanted.items()} == dict.fromkeys(wanted, True), found
