"""Sampling against its definition, and continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from usp.data.tokenizer import ByteTokenizer
from usp.rlhf.generation.decoding import (
    Rollout,
    Slots,
    Stops,
    capacity,
    exponential,
    probabilities,
    sample,
    sequence_key,
    stop_problems,
    token_keys,
)
from usp.rlhf.graph import Generate

VOCAB = 7
LOGITS = torch.tensor([[0.5, -1.0, 2.0, 0.0, 1.5, -3.0, 1.0], [3.0, 2.9, -9.0, 0.0, 0.0, 1.0, -1.0]])


def direct(logits: list[float], work: Generate) -> list[float]:
    """Return the normalized sampling distribution, computed one token at a time."""
    weights = [2.718281828459045 ** (logit / work.temperature) for logit in logits]
    likeliest = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    kept = likeliest[: work.top_k or None]
    nucleus, mass, total = [], 0.0, sum(weights[token] for token in kept)
    for token in kept:
        if mass < work.top_p:
            nucleus.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


WORKS = [
    Generate(temperature=1.0),
    Generate(temperature=0.3),
    Generate(temperature=2.0, top_k=3),
    Generate(temperature=1.5, top_p=0.6),
    Generate(temperature=0.7, top_k=4, top_p=0.9),
    Generate(temperature=1.0, top_k=1),
    Generate(temperature=1.0, top_k=VOCAB + 1, top_p=1e-9),
]


@pytest.mark.parametrize("work", WORKS, ids=str)
@pytest.mark.slow(but=2)
def test_samples_follow_the_distribution(work: Generate) -> None:
    wanted = torch.tensor([direct(row.tolist(), work) for row in LOGITS], dtype=torch.float64)
    probs = (LOGITS.double() / work.temperature).softmax(-1)
    found = probabilities(probs, work.top_k, work.top_p)
    assert torch.allclose(found / found.sum(-1, keepdim=True), wanted, atol=1e-12)
    draws = 20000
    for row in range(2):
        tokens, chosen = sample(LOGITS[row].expand(draws, -1), keys(5, draws), token_keys(VOCAB), work)
        assert chi_square(torch.bincount(tokens, minlength=VOCAB), wanted[row]) <= 5
        assert torch.allclose(chosen, probs[row, tokens].log().float())


def keys(seed: int, numbers: int) -> Tensor:
    return torch.tensor([sequence_key(seed, number) for number in range(numbers)])


def chi_square(counts: Tensor, wanted: Tensor) -> float:
    """Pearson's statistic, in standard deviations from its mean; infinite if something impossible was counted."""
    if counts[wanted == 0].any():
        return float("inf")
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    expected = wanted * counts.sum()
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / max(2 * freedom, 1) ** 0.5


@pytest.mark.slow
def test_a_large_vocabulary_follows_the_distribution() -> None:
    logits = 2 * torch.randn(32000, generator=torch.Generator().manual_seed(1))
    probs, bins = logits.double().softmax(-1), 200
    places = torch.arange(32000) % bins
    wanted = torch.zeros(bins, dtype=torch.float64).index_add_(0, places, probs)
    table = token_keys(32000)
    tokens = torch.cat(
        [sample(logits.expand(500, -1), part, table, Generate())[0] for part in keys(1, 5000).split(500)]
    )
    assert chi_square(torch.bincount(places[tokens], minlength=bins), wanted) <= 5
    likely = probs.argsort(descending=True)[:bins]  # single tokens
    drawn = torch.stack([(tokens == token).sum() for token in likely])
    assert (
        chi_square(
            torch.cat((drawn, 5000 - drawn.sum(0, keepdim=True))),
            torch.cat((probs[likely], 1 - probs[likely].sum(0, keepdim=True))),
        )
        <= 5
    )


def test_greedy_takes_the_most_likely_token_with_logprobs_at_temperature_one() -> None:
    greedy = Generate(temperature=0, top_k=2, top_p=0.1)
    tokens, logprobs = sample(LOGITS, torch.ones(2, dtype=torch.int64), token_keys(VOCAB), greedy)
    assert tokens.tolist() == [2, 0]
    assert torch.allclose(logprobs, LOGITS.log_softmax(-1)[[0, 1], tokens])


def test_logprobs_are_exact_at_low_temperatures() -> None:
    logits = torch.linspace(20, 40, 1000).expand(64, -1)
    tokens, logprobs = sample(logits, keys(2, 64), token_keys(1000), Generate(temperature=0.05))
    exact = (logits.double() / 0.05).log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    assert (logprobs - exact).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_exponential_and_independent(dtype: torch.dtype) -> None:
    assert sequence_key(3, 4) == sequence_key(3, 4) and len(token_keys(100000).unique()) == 100000
    rows = torch.tensor([sequence_key(seed, number) for seed in range(50) for number in range(50)])
    noise = exponential(rows, token_keys(400), dtype)
    assert float(noise.min()) > 0 and bool(noise.isfinite().all())
    uniform = (-noise.double()).exp()
    assert (torch.histc(uniform, 10, 0, 1) - 100000).abs().max() < 1500  # five standard deviations
    for x in (uniform, uniform.T, uniform.view(50, 50, 400)):  # neighbouring sequences and numbers, tokens, seeds
        assert abs(float(torch.corrcoef(torch.stack((x[:-1].flatten(), x[1:].flatten())))[0, 1])) < 0.005
    smallest = (noise.double().amin(1) * 400).neg().exp()  # uniform if the tokens of a step are independent
    assert (torch.histc(smallest, 10, 0, 1) - 250).abs().max() < 75
    assert torch.equal(exponential(rows[7:8], token_keys(400)[3:5], dtype), noise[7:8, 3:5])


@pytest.mark.slow
def test_rounding_changes_few_draws() -> None:
    logits = torch.randn(2000, 5000, generator=torch.Generator().manual_seed(3))
    moved = logits + 1e-3 * torch.randn(2000, 5000, generator=torch.Generator().manual_seed(4))
    tokens, others = (sample(x, keys(3, 2000), token_keys(5000), Generate())[0] for x in (logits, moved))
    assert (tokens != others).sum() <= 8  # 1e-3 of 2000, where inverse transform sampling changes most


def test_logits_that_are_not_finite_are_reported() -> None:
    bad = torch.stack((torch.full((VOCAB,), float("nan")), LOGITS[0].masked_fill(LOGITS[0] == 2, float("inf"))))
    for work in (Generate(), Generate(temperature=0), Generate(top_k=2, top_p=0.5)):
        tokens, logprobs = sample(bad, keys(0, 2), token_keys(VOCAB), work)
        assert bool(logprobs.isnan().all()) and bool((tokens < VOCAB).all())


def test_freed_slots_are_refilled() -> None:
    lengths, limits = (5, 40, 1, 33, 5), (2, 3, 1, 4, 2)
    rollouts = [Rollout([index] * n, 0, limit) for index, (n, limit) in enumerate(zip(lengths, limits, strict=True))]
    rollouts[4].prompt = rollouts[0].prompt
    slots = Slots(rollouts, 3)
    assert slots.admit() == [0, 1, 2] and [len(r.prompt) for r in slots.active if r] == [40, 33, 5]
    groups = slots.prefill_groups([0, 1, 2], multiple=16, max_tokens=1000)
    assert [(g.slots, g.rows, g.padded) for g in groups] == [((0,), (0,), 48), ((1,), (0,), 32), ((2,), (0,), 16)]
    steps = 0
    while slots.pending:
        slots.admit()
        kept = [slots.decode_inputs(2, rank)[0][3] for rank in (0, 1)]
        assert (kept[0] + kept[1]).tolist() == [int(rollout is not None) for rollout in slots.active]
        slots.read(slots.issue(), [9] * 3, [0.0] * 3, lambda tokens: False)
        steps += 1
    assert [len(r.tokens) for r in rollouts] == list(limits) and steps == 4


def test_steps_that_are_read_late_give_the_same_responses() -> None:
    """Token n of sequence i is 10 * i + n; a sequence that has ended is decoded once more, one at its limit is not."""

    def run(late: int) -> tuple[list[tuple[list[int], bool]], list[int]]:
        rollouts = [Rollout([index], 0, limit) for index, limit in enumerate((3, 5, 1, 4))]
        slots, steps, decoded = Slots(rollouts, 2), deque[tuple[Any, list[int]]](), [0] * 4
        while slots.pending or steps:
            slots.admit()
            if slots.pending:
                token = slots.decode_inputs(1, 0)[0][0].tolist()
                tokens = [0 if r is None else 10 * r.prompt[0] + r.decoded for r in slots.active]
                for rollout, given in zip(slots.active, token, strict=True):
                    if rollout is not None:
                        known = 10 * rollout.prompt[0] + rollout.decoded - 1 if rollout.decoded else rollout.prompt[0]
                        assert given == (-1 if rollout.unread else known)
                        decoded[rollout.prompt[0]] += 1
                steps.append((slots.issue(), tokens))
            if len(steps) > late or not slots.pending:
                issued, tokens = steps.popleft()
                slots.read(issued, tokens, [0.0] * 2, lambda response: response[-1] in (11, 30, 32))
        assert all(len(r.tokens) == len(r.logprobs) for r in rollouts)
        return [(r.tokens, r.stopped) for r in rollouts], decoded

    responses = [([0, 1, 2], False), ([10, 11], True), ([20], False), ([30], True)]
    assert run(0) == (responses, [3, 2, 1, 1])
    assert run(1) == (responses, [3, 3, 1, 2])


def test_equal_prompts_share_a_row_and_groups_are_bounded() -> None:
    prompts = [[1] * 17, [1] * 17, [2] * 16, [3] * 14, [3] * 2]
    slots = Slots([Rollout(prompt, 0, 4) for prompt in prompts], 5)
    groups = slots.prefill_groups(slots.admit(), multiple=16, max_tokens=32)
    assert [(g.slots, g.rows) for g in groups] == [((0, 1, 2), (0, 0, 1)), ((3, 4), (0, 1))]
    assert capacity([Rollout(prompt, 0, 5) for prompt in prompts], ranks=4, multiple=16) == 16 // 4 + 2


class Pieces:
    """A tokenizer of 256 bytes, a special token without text, and pieces of several bytes."""

    PIECES = (*(bytes([byte]) for byte in range(256)), b"", b"</ans", b"wer>", b" the end.", "é".encode()[:1])

    @classmethod
    def decode(cls, ids: Iterable[int]) -> str:
        return b"".join(cls.PIECES[i] for i in ids).decode("utf-8", "replace").removeprefix(" ")


def test_a_response_ends_with_the_token_that_completes_a_stop_string() -> None:
    strings = ("</answer>", "é!", "\n\n")
    stops = Stops(Generate(stop_ids=(7, 9), stop_strings=strings), Pieces.decode)
    draw = torch.Generator().manual_seed(0)
    likely = [257, 258, 256, 260, 0xA9, ord("!"), ord("\n"), ord("<"), ord("/"), 259, 9, ord("x")]
    ends: list[int] = []
    for _ in range(300):
        tokens: list[int] = []
        ended = False
        while not ended and len(tokens) < 200:
            run = int(torch.randint(4, (), generator=draw)) == 0
            tokens += [256] * 30 if run else [likely[int(torch.randint(len(likely), (), generator=draw))]]
            if not run:
                ended = stops(tokens)
                text = Pieces.decode(tokens)
                assert ended == (tokens[-1] in (7, 9) or any(string in text for string in strings)), tokens
        ends.append(tokens[-1])
    assert set(ends) >= {258, ord("!"), ord("\n"), 9}


def test_stops_that_cannot_end_a_response_are_reported() -> None:
    tokenizer = ByteTokenizer()
    work = Generate(stop_ids=(1, 384), stop_strings=("ok", "", "\ud800"))
    problems = stop_problems(work, tokenizer.encode, tokenizer.decode, 384)
    assert [problem.split(" must")[0].split(" is")[0] for problem in problems] == [
        "stop id 384",
        "a stop string",
        "stop string '\\ud800'",
    ]
