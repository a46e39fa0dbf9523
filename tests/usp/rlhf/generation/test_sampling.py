"""Sampling against its definition, and continuous batching."""

from __future__ import annotations

import pytest
import torch

from usp.rlhf.generation.batching import Rollout, Slots, capacity
from usp.rlhf.generation.sampling import noise, probabilities, sample, work_violations
from usp.rlhf.graph.calls import Generate

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
def test_samples_follow_the_distribution(work: Generate) -> None:
    wanted = torch.tensor([direct(row.tolist(), work) for row in LOGITS], dtype=torch.float64)
    logprobs = (LOGITS.double() / work.temperature).log_softmax(-1)
    found = probabilities(logprobs, work.top_k, work.top_p)
    assert torch.allclose(found / found.sum(-1, keepdim=True), wanted, atol=1e-12)
    draws = 20000
    uniform = torch.tensor([noise(5, number) for number in range(draws)], dtype=torch.float64)
    for row in range(2):
        tokens, chosen = sample(LOGITS[row].expand(draws, -1), uniform, work)
        frequency = torch.bincount(tokens, minlength=VOCAB) / draws
        assert (frequency - wanted[row]).abs().max() <= 0.015  # four standard deviations of a share
        assert not frequency[wanted[row] == 0].any()
        assert torch.allclose(chosen, logprobs[row, tokens].float())


def test_greedy_takes_the_most_likely_token_with_logprobs_at_temperature_one() -> None:
    tokens, logprobs = sample(LOGITS, torch.zeros(2), Generate(temperature=0, top_k=2, top_p=0.1))
    assert tokens.tolist() == [2, 0]
    assert torch.allclose(logprobs, LOGITS.log_softmax(-1)[[0, 1], tokens])


def test_noise_depends_only_on_seed_and_number() -> None:
    assert noise(3, 4) == noise(3, 4)
    values = torch.tensor([noise(seed, number) for seed in range(100) for number in range(100)], dtype=torch.float64)
    assert len(values.unique()) == 10000 and float(values.min()) >= 0 and float(values.max()) < 1
    assert (torch.histc(values, 10, 0, 1) - 1000).abs().max() < 120
    pairs = values.view(100, 100)
    for x in (pairs, pairs.T):  # neighbouring numbers and seeds are uncorrelated
        assert abs(float(torch.corrcoef(torch.stack((x[:-1].flatten(), x[1:].flatten())))[0, 1])) < 0.04


def test_logits_that_are_not_finite_are_reported() -> None:
    bad = torch.stack((torch.full((VOCAB,), float("nan")), LOGITS[0].masked_fill(LOGITS[0] == 2, float("inf"))))
    for work in (Generate(), Generate(temperature=0), Generate(top_k=2, top_p=0.5)):
        tokens, logprobs = sample(bad, torch.tensor([0.5, 0.99], dtype=torch.float64), work)
        assert bool(logprobs.isnan().all()) and bool((tokens < VOCAB).all())


def test_invalid_sampling_options_are_reported() -> None:
    assert not work_violations(Generate())
    messages = work_violations(Generate(max_new_tokens=0, temperature=-0.1, top_k=-2, top_p=1.5))
    assert [message.split("=")[0] for message in messages] == ["max_new_tokens", "temperature", "top_k", "top_p"]


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
        kept = [slots.decode_inputs(2, rank).columns[3] for rank in (0, 1)]
        assert (kept[0] + kept[1]).tolist() == [int(rollout is not None) for rollout in slots.active]
        slots.append([9] * 3, [0.0] * 3, frozenset())
        steps += 1
    assert [len(r.tokens) for r in rollouts] == list(limits) and steps == 4


def test_equal_prompts_share_a_row_and_groups_are_bounded() -> None:
    prompts = [[1] * 17, [1] * 17, [2] * 16, [3] * 14, [3] * 2]
    slots = Slots([Rollout(prompt, 0, 4) for prompt in prompts], 5)
    groups = slots.prefill_groups(slots.admit(), multiple=16, max_tokens=32)
    assert [(g.slots, g.rows) for g in groups] == [((0, 1, 2), (0, 0, 1)), ((3, 4), (0, 1))]
    assert capacity([Rollout(prompt, 0, 5) for prompt in prompts], ranks=4, multiple=16) == 16 // 4 + 2
