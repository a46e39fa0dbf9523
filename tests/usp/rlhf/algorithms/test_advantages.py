"""Advantages, returns and weights against loops over samples and tokens, on one rank and on several."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.usp.rlhf.algorithms.variants import dapo, dr_grpo
from tests.usp.rlhf.simulate import Function, alone, on_ranks
from usp.rlhf.algorithms.algorithm import Stateful
from usp.rlhf.algorithms.critic_free import (
    DAPO,
    GRPO,
    RLOO,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    remax_advantages,
    rloo_advantages,
)
from usp.rlhf.algorithms.objectives import Estimator, Weighting
from usp.rlhf.algorithms.policy import PolicyOptions
from usp.rlhf.algorithms.ppo import PPO, PPOAdvantages, gae, next_kl
from usp.rlhf.algorithms.preferences import DPO, pair_weights
from usp.rlhf.algorithms.response_rows import Moments, RunningMoments, discounted_sums
from usp.rlhf.algorithms.rewards import ScoreWith
from usp.rlhf.graph import Generate
from usp.rlhf.samples import Samples, mini_batch_ids

RESPONSES = (3, 1, 6, 2, 4, 4, 1, 5, 2, 3, 7, 1)  # tokens of each; groups of 4 (and of 2)
GROUP = Generate(group_size=4, max_new_tokens=7, stop_ids=(0,))
ESTIMATES = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x}
PER_TOKEN = ("logprobs", "old_logprobs", "ref_logprobs", "values")


def make(seed: int = 0, scores: tuple[float, ...] = ()) -> Samples:
    """Return twelve samples with one to three prompt tokens; every third response is truncated."""
    draw = torch.Generator().manual_seed(seed)
    values: dict[str, list[Tensor]] = {key: [] for key in PER_TOKEN}
    masks = []
    for number, length in enumerate(RESPONSES):
        prompt = 1 + number % 3
        mask = torch.zeros(prompt + length)
        mask[prompt - 1 : -1] = 1
        masks.append(mask)
        for key in PER_TOKEN:
            values[key].append(0.5 * torch.randn(len(mask), generator=draw))
    scores = scores or tuple((2 * torch.randn(len(RESPONSES), generator=draw)).tolist())
    numbers = range(len(RESPONSES))
    return Samples(
        tuple(numbers),
        {
            **values,
            "tokens": [mask.long() for mask in masks],
            "mask": masks,
            "score": [torch.tensor(score) for score in scores],
            "finished": [torch.tensor(number % 3 != 2) for number in numbers],
            "greedy_score": [torch.tensor(0.1 * number) for number in numbers],
            "greedy_finished": [torch.tensor(number % 2 == 0) for number in numbers],
        },
    )


def chosen(samples: Samples, key: str) -> list[list[float]]:
    """Return the values where the mask is 1, by sample."""
    return [value[mask == 1].tolist() for value, mask in zip(samples[key], samples["mask"], strict=True)]


def standardised(rows: list[list[float]]) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    return [[(x - mean) / (std + 1e-5) for x in row] for row in rows]


def shaped(samples: Samples, options: PolicyOptions) -> list[float]:
    rewards = []
    for score, finished in zip(samples["score"], samples["finished"], strict=True):
        reward = (float(score) - options.reward_bias) * options.reward_scaling
        reward = max(-options.max_reward_clip, min(options.max_reward_clip, reward))
        rewards.append(0.0 if options.zero_unfinished and not finished else reward)
    return rewards


def penalised(samples: Samples, options: PolicyOptions, kl: float) -> list[list[float]]:
    """Return the rewards of tokens with the KL penalty."""
    rows = []
    for old, ref, reward in zip(
        chosen(samples, "old_logprobs"), chosen(samples, "ref_logprobs"), shaped(samples, options), strict=True
    ):
        estimate = ESTIMATES[options.kl_estimator if options.kl_in_reward else "k1"]
        row = [-kl * estimate(o - r) for o, r in zip(old, ref, strict=True)]
        row[-1] += reward
        rows.append(row)
    return rows


def groups(values: list[float], size: int) -> list[list[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def alike(values: list[float]) -> list[list[float]]:
    return [[value] * length for value, length in zip(values, RESPONSES, strict=True)]


def oracle_gae(samples: Samples, options: PPO, kl: float, mean: float = 0.0, std: float = 1.0) -> list[list[float]]:
    """Sum (gamma lam)^l delta[t + l] over l in a plain loop."""
    rows = []
    for i, (rewards, values) in enumerate(zip(penalised(samples, options, kl), chosen(samples, "values"), strict=True)):
        values = [v * std + mean for v in values]
        behind = 0.0 if samples["finished"][i] else float(samples["values"][i][-1]) * std + mean
        following = [*values[1:], behind]
        deltas = [r + options.gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
        factor = options.gamma * options.lam
        rows.append([sum(factor**l * deltas[t + l] for l in range(len(deltas) - t)) for t in range(len(deltas))])
    return rows


def check_rows(samples: Samples, key: str, expected: list[list[float]], result: Samples) -> None:
    """Check the values inside the mask, and 0 outside."""
    for i, (value, mask, row) in enumerate(zip(result[key], samples["mask"], expected, strict=True)):
        assert value.dtype == torch.float32 and value.shape == mask.shape
        assert value[mask == 1].tolist() == pytest.approx(row, rel=1e-5, abs=1e-5), f"{key} of sample {i}"
        assert not value[mask == 0].any()


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0), (0.5, 1.0)])
def test_gae(gamma: float, lam: float) -> None:
    options = PPO(gamma=gamma, lam=lam, normalise_advantages=False, value_norm="none", zero_unfinished=True)
    options = replace(options, reward_bias=0.5, reward_scaling=3.0, max_reward_clip=2.0)
    samples = make()
    result = PPOAdvantages(options)(samples, alone)
    expected = oracle_gae(samples, options, kl=0.1)
    check_rows(samples, "advantages", expected, result)
    returns = [
        [a + v for a, v in zip(*rows, strict=True)] for rows in zip(expected, chosen(samples, "values"), strict=True)
    ]
    check_rows(samples, "returns", returns, result)
    assert [float(x) for x in result["reward"]] == pytest.approx(shaped(samples, options), rel=1e-6)
    assert 0.0 in shaped(samples, options) and 2.0 in map(abs, shaped(samples, options))
    clipped = [abs(3 * (float(score) - 0.5)) > 2 for score in samples["score"]]
    assert [bool(x) for x in result["reward_clipped"]] == clipped and 0 < sum(clipped) < 12
    errors = [x for row in expected for x in row]
    flat = [x for row in returns for x in row]
    explained = 1 - statistics.pvariance(errors) / statistics.pvariance(flat)
    assert [float(x) for x in result["explained_variance"]] == pytest.approx([explained] * 12, rel=1e-5)


def test_long_rows() -> None:
    draw = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2, 300, generator=draw, dtype=torch.float64)
    inside = torch.arange(300) < torch.tensor([[300], [171]])
    rewards, values = rewards * inside, values * inside
    last = torch.tensor([0.0, 2.5], dtype=torch.float64)
    found = gae(rewards, values, inside, last, gamma=0.99, lam=0.95)
    for row, length in ((0, 300), (1, 171)):
        advantage, following = 0.0, float(last[row])
        for t in reversed(range(length)):
            delta = float(rewards[row, t]) + 0.99 * following - float(values[row, t])
            advantage = delta + 0.99 * 0.95 * advantage
            following = float(values[row, t])
            assert float(found[row, t]) == pytest.approx(advantage, rel=1e-10)
    assert discounted_sums(torch.zeros(3, 0), 0.5).shape == (3, 0)


@pytest.mark.parametrize("staleness", [0, 1])
def test_ppo_normalizes_and_keeps_state(staleness: int) -> None:
    options = PPO(kl=0.2, kl_target=0.5, kl_horizon=100, value_norm="exp", value_norm_beta=0.75, lam=0.9)
    options = replace(options, staleness=staleness)
    function = PPOAdvantages(options)
    coefficient, batches = 0.2, []
    scales = [(0.0, 1.0)]
    for step in range(3):
        samples = make(step)
        mean, std = scales[max(step - staleness, 0)]  # that the critic has learned
        result = function(samples, alone)
        raw = oracle_gae(samples, options, coefficient, mean, std)
        check_rows(samples, "advantages", standardised(raw), result)
        returns = [
            [a + v * std + mean for a, v in zip(*rows, strict=True)]
            for rows in zip(raw, chosen(samples, "values"), strict=True)
        ]
        batches.append([x for row in returns for x in row])
        ages = [0.25 * 0.75 ** (step - number) for number in range(step + 1)]
        means, squares = (
            sum(age * statistics.fmean(x**power for x in batch) for age, batch in zip(ages, batches, strict=True))
            / sum(ages)
            for power in (1, 2)
        )
        mean, std = means, math.sqrt(squares - means**2)
        scales.append((mean, std))
        check_rows(samples, "returns", [[(x - mean) / std for x in row] for row in returns], result)
        assert [float(x) for x in result["kl_coefficient"]] == pytest.approx([coefficient] * 12)
        log_ratios = [
            sum(o - r for o, r in zip(*rows, strict=True))
            for rows in zip(chosen(samples, "old_logprobs"), chosen(samples, "ref_logprobs"), strict=True)
        ]
        assert [float(x) for x in result["kl"]] == pytest.approx(log_ratios, rel=1e-5, abs=1e-6)
        error = min(max(statistics.fmean(log_ratios) / 0.5 - 1, -0.2), 0.2)
        coefficient *= 1 + error * 12 / 100
    assert function.kl == pytest.approx(coefficient)

    assert isinstance(function, Stateful)
    again = PPOAdvantages(options)
    again.load_state_dict(function.state_dict())
    samples = make(3)
    for key in ("advantages", "returns"):
        torch.testing.assert_close(again(samples, alone)[key], function(samples, alone)[key], rtol=0, atol=0)
        again.load_state_dict(function.state_dict())


def test_options_of_a_resumed_run_override_its_state() -> None:
    function = PPOAdvantages(PPO(kl=0.2, kl_target=0.5, kl_horizon=100, value_norm="mean"))
    function(make(), alone)
    assert function.kl != 0.2 and function.returns.weight
    fixed = PPOAdvantages(PPO(kl=0.3, value_norm="none"))
    fixed.load_state_dict(function.state_dict())
    assert fixed.kl == 0.3 and (fixed.returns.mean, fixed.returns.std) == (0.0, 1.0)


def test_ppo_normalises_rewards_but_not_the_penalty() -> None:
    options = PPO(normalise_rewards=True, normalise_advantages=False, value_norm="none", reward_scaling=3.0)
    samples = make()
    result = PPOAdvantages(options)(samples, alone)
    assert [float(x) for x in result["reward"]] == pytest.approx(shaped(samples, options))  # unchanged
    (rewards,) = standardised([shaped(samples, options)])
    normal = samples.updated(Samples(samples.ids, {"score": [torch.tensor(reward / 3) for reward in rewards]}))
    check_rows(samples, "advantages", oracle_gae(normal, options, kl=0.1), result)


def test_statistics_of_all_numbers() -> None:
    batches = ([1.0, 2.0, 6.0], [4.0], [-3.0, 0.5])
    running = RunningMoments("mean")
    assert (running.mean, running.std) == (0.0, 1.0)
    for batch in batches:
        running = running.updated(Moments(len(batch), statistics.fmean(batch), statistics.pvariance(batch)))
    flat = [x for batch in batches for x in batch]
    assert (running.mean, running.std) == pytest.approx((statistics.fmean(flat), statistics.pstdev(flat)))
    x = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(running.denormalise(running.normalise(x)), x)
    assert running.updated(Moments(0, 0.0, 0.0)) == running
    assert RunningMoments("none").updated(Moments(1, 5.0, 0.0)) == RunningMoments("none")
    assert RunningMoments("mean").updated(Moments(2, 5.0, 0.0)).std == math.sqrt(1e-5)


def test_kl_control_follows_its_target() -> None:
    assert next_kl(PPO(), 0.1, 100.0, 64) == 0.1
    options = PPO(kl_target=6.0, kl_horizon=10_000)
    assert next_kl(options, 0.1, 6.6, 500) == pytest.approx(0.1 * (1 + 0.1 * 500 / 10_000))
    assert next_kl(options, 0.1, 60.0, 500) == pytest.approx(0.1 * (1 + 0.2 * 500 / 10_000))
    assert next_kl(options, 0.1, -6.0, 500) == pytest.approx(0.1 * (1 - 0.2 * 500 / 10_000))
    assert next_kl(replace(options, kl_horizon=103), 0.1, 0.0, 512) > 0
    (refused,) = PPO(kl_target=6.0, kl_horizon=102).step_violations(512)
    assert refused.startswith("kl_horizon=102 must be above 0.2 times the 512 samples of a step")
    assert not list(PPO(kl_target=6.0, kl_horizon=103).step_violations(512))


def test_grpo_and_its_variants() -> None:
    samples = make()
    options = GRPO(generate=GROUP)
    of_groups = groups(shaped(samples, options), 4)
    by_std = [(r - statistics.fmean(g)) / (statistics.stdev(g) + 1e-4) for g in of_groups for r in g]
    result = grpo_advantages(options, samples, alone)
    check_rows(samples, "advantages", alike(by_std), result)
    lengths = [float(n) for n in RESPONSES]
    check_rows(samples, "weights", alike([1 / (12 * n) for n in lengths]), result)
    check_rows(samples, "token_weights", alike([1 / sum(lengths)] * 12), result)

    result = grpo_advantages(dr_grpo(options), samples, alone)
    check_rows(samples, "advantages", alike([r - statistics.fmean(g) for g in of_groups for r in g]), result)
    check_rows(samples, "weights", alike([1 / (12 * 7)] * 12), result)


def test_dapo_drops_equal_groups_and_penalizes_length() -> None:
    options = replace(dapo(GRPO(generate=GROUP, mini_batches=3)), scale_by_std=False)
    samples = make(scores=(1.0, 0.0, 0.0, 1.0, *[1.0] * 4, *[0.0] * 4))
    result = grpo_advantages(options, samples, alone)
    assert [float(x) for x in result["informative"]] == [1.0] * 4 + [0.0] * 8
    expected = [1 / sum(RESPONSES[:4])] * 4 + [0.0] * 8
    check_rows(samples, "weights", alike(expected), result)
    whole = [1 / sum(RESPONSES[start : start + 4]) for start in (0, 4, 8) for _ in range(4)]
    check_rows(samples, "token_weights", alike(whole), result)
    kept = grpo_advantages(replace(options, drop_equal_groups=False), samples, alone)
    check_rows(samples, "weights", alike(whole), kept)
    assert all(not value.any() for value in kept["advantages"][4:])  # equal rewards carry no signal

    long = replace(options, overlong_buffer=4, overlong_penalty=0.5)
    rewards = [
        float(score) - 0.5 * min(max(0.0, (length - 3) / 4), 1.0)
        for score, length in zip(samples["score"], RESPONSES, strict=True)
    ]
    result = grpo_advantages(long, samples, alone)
    assert [float(x) for x in result["reward"]] == pytest.approx(rewards)
    assert [float(x) for x in result["informative"]] == [1.0] * 12


def test_rewards_that_differ_by_rounding_are_equal() -> None:
    """Between layouts a reward model's scores differ by rounding, which must not become an advantage."""
    samples = make(scores=tuple(1 + 1e-7 * (number % 2) for number in range(12)))
    result = grpo_advantages(GRPO(generate=GROUP), samples, alone)
    assert not any(map(float, result["informative"]))
    assert max(float(x.abs().max()) for x in result["advantages"]) < 2e-3


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_rloo_leaves_one_out(estimator: Estimator) -> None:
    samples, options = make(), RLOO(generate=GROUP, kl=0.3, kl_estimator=estimator)
    rewards = [sum(row) for row in penalised(samples, options, 0.3)]
    expected = [
        reward - statistics.fmean(other for j, other in enumerate(group) if j != i)
        for group in groups(rewards, 4)
        for i, reward in enumerate(group)
    ]
    result = rloo_advantages(options, samples, alone)
    check_rows(samples, "advantages", alike(expected), result)
    check_rows(samples, "weights", alike([1 / 12] * 12), result)


@pytest.mark.parametrize("estimator", ESTIMATES)
def test_reinforce_plus_plus(estimator: Estimator) -> None:
    samples, options = make(), ReinforcePlusPlus(kl=0.3, gamma=0.9, kl_estimator=estimator)
    rewards = penalised(samples, options, 0.3)
    returns = [[sum(0.9**k * r for k, r in enumerate(row[t:])) for t in range(len(row))] for row in rewards]
    result = reinforce_plus_plus_advantages(options, samples, alone)
    check_rows(samples, "advantages", standardised(returns), result)


@pytest.mark.parametrize("scores", [(), (1.0,) * 12], ids=["", "equal rewards"])
def test_tokens_whose_log_probability_and_advantage_vary_together(scores: tuple[float, ...]) -> None:
    """arXiv 2505.22617, section 4; one response has no tokens."""
    samples, step = make(scores=scores), GRPO(generate=GROUP, mini_batches=2)
    samples = samples.updated(Samples(samples.ids, {"mask": [m * (i != 5) for i, m in enumerate(samples["mask"])]}))
    plain = grpo_advantages(step, samples, alone)
    logs, gains = (
        [x for row in chosen(given, key) for x in row]
        for given, key in ((samples, "old_logprobs"), (plain.updated(samples.only(("mask",))), "advantages"))
    )
    pairs = list(zip(logs, gains, strict=True))
    together = [(x - statistics.fmean(logs)) * (a - statistics.fmean(gains)) for x, a in pairs]
    found = grpo_advantages(replace(step, covariance="kl", covariance_share=0.2), samples, alone)
    marked = [x for row in chosen(found.updated(samples.only(("mask",))), "covariant") for x in row]
    assert sum(marked) == int(0.2 * len(together))
    if not scores:
        least = sorted(together)[-int(sum(marked))]
        assert marked == [float(x >= least) for x in together]
    torch.testing.assert_close(found["advantages"], plain["advantages"], rtol=0, atol=0)

    clip = replace(step, covariance="clip", covariance_share=0.2, covariance_low=0.02, covariance_high=0.3)
    cut = [
        x
        for row in chosen(grpo_advantages(clip, samples, alone).updated(samples.only(("mask",))), "advantages")
        for x in row
    ]
    gone = [c for c, a, b in zip(together, gains, cut, strict=True) if a != b]
    assert all(b in (a, 0.0) for a, b in zip(gains, cut, strict=True)) and all(0.02 < c < 0.3 for c in gone)
    assert len(gone) == min(int(0.2 * len(together)), sum(0.02 < c < 0.3 for c in together))
    assert gone or scores
    other = samples.updated(Samples(samples.ids, {"tokens": [tokens + 1 for tokens in samples["tokens"]]}))
    again = [grpo_advantages(clip, each, alone)["advantages"] for each in (samples, other)]
    assert scores or any(not torch.equal(a, b) for a, b in zip(*again, strict=True))  # another draw in another step


def test_reinforce_plus_plus_with_the_group_as_baseline() -> None:
    samples, options = make(), ReinforcePlusPlusBaseline(generate=GROUP)
    distances = [r - statistics.fmean(g) for g in groups(shaped(samples, options), 4) for r in g]
    result = grpo_advantages(options, samples, alone)
    check_rows(samples, "advantages", standardised(alike(distances)), result)
    check_rows(samples, "weights", alike([1 / sum(RESPONSES)] * 12), result)


def test_dynamic_sampling_trains_on_the_first_groups_that_differ() -> None:
    pairs = replace(GROUP, group_size=2)
    options = DAPO(generate=pairs, oversample=3)  # of six groups on two
    samples = make(scores=(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0))
    expected = [1 / sum(RESPONSES[i] for i in (2, 3, 6, 7)) if i in (2, 3, 6, 7) else 0.0 for i in range(12)]
    for result in (
        grpo_advantages(options, samples, alone),
        on_ranks([partial(grpo_advantages, options)] * 2, samples, [(0, 1, 4, 5, 6, 7), (2, 3, 8, 9, 10, 11)]),
    ):
        check_rows(samples, "weights", alike(expected), result)
        assert [float(x) for x in result["informative"]] == [0, 0, 1, 1, 0, 0, *[1] * 6]
        assert [float(x) for x in result["spare"]] == [*[0] * 8, *[1] * 4]
    assert (options.drawn(5), GRPO().drawn(5)) == (15, 5)
    few = make(scores=(*[1.0] * 10, 0.0, 1.0))
    expected = [1 / sum(RESPONSES[10:]) if i > 9 else 0.0 for i in range(12)]
    check_rows(few, "weights", alike(expected), grpo_advantages(options, few, alone))


def test_remax_subtracts_the_greedy_reward() -> None:
    samples, options = make(), ReMax(kl=0.3, zero_unfinished=True, reward_scaling=2.0)
    baselines = [0.2 * number if number % 2 == 0 else 0.0 for number in range(12)]
    rewards = penalised(samples, options, 0.3)
    expected = [
        [sum(row[t:]) - baseline for t in range(len(row))] for row, baseline in zip(rewards, baselines, strict=True)
    ]
    check_rows(samples, "advantages", expected, remax_advantages(options, samples, alone))


@pytest.mark.parametrize("mini_batches", [1, 5, 12])
def test_weights_sum_up_by_mini_batch(mini_batches: int) -> None:
    samples = make()
    masks = [mask * (number != 4) for number, mask in enumerate(samples["mask"])]  # one sample has no tokens

    def sums(aggregation: str) -> list[float]:
        weighting = Weighting(aggregation, mini_batches, length=7)  # type: ignore[arg-type]
        weights = weighting(samples.ids, masks, alone)
        batches = [mini_batch_ids(12, mini_batches, number) for number in range(mini_batches)]
        return [sum(float(weights[i].sum()) for i in batch) for batch in batches]

    members = [
        [RESPONSES[i] for i in mini_batch_ids(12, mini_batches, number) if i != 4] for number in range(mini_batches)
    ]
    assert sum(map(len, members)) == 11
    some = [float(bool(lengths)) for lengths in members]
    assert sums("token_mean") == pytest.approx(some)
    assert sums("sequence_mean") == pytest.approx(some)
    means = [statistics.fmean(lengths) if lengths else 0.0 for lengths in members]
    assert sums("sequence_sum") == pytest.approx(means)
    assert sums("constant") == pytest.approx([mean / 7 for mean in means])


def test_pairs_of_a_mini_batch_have_equal_weights() -> None:
    samples = make()
    weights = pair_weights(DPO(mini_batches=4), samples, alone)["weights"]
    for weight, pairs in zip(weights, [1, 1, 2, 2, 2, 2, 1, 1, 2, 2, 2, 2], strict=True):
        assert float(weight[-1]) == 1 / pairs and not weight[:-1].any()


FUNCTIONS: dict[str, Callable[[], Function]] = {
    "ppo": lambda: PPOAdvantages(PPO(kl_target=0.5, mini_batches=5)),
    "grpo": lambda: partial(grpo_advantages, GRPO(generate=GROUP, drop_equal_groups=True, mini_batches=5)),
    "clip_cov": lambda: partial(
        grpo_advantages, GRPO(generate=GROUP, covariance="clip", covariance_share=0.2, covariance_low=0.02)
    ),
    "kl_cov": lambda: partial(grpo_advantages, GRPO(generate=GROUP, covariance="kl", mini_batches=5)),
    "rloo": lambda: partial(rloo_advantages, RLOO(generate=GROUP, mini_batches=5, kl_estimator="k3")),
    "reinforce++": lambda: partial(reinforce_plus_plus_advantages, ReinforcePlusPlus(mini_batches=5)),
    "remax": lambda: partial(remax_advantages, ReMax(mini_batches=5)),
    "pairs": lambda: partial(pair_weights, DPO(mini_batches=4)),
}


@pytest.mark.parametrize("make_function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_results_do_not_depend_on_ranks(make_function: Callable[[], Function]) -> None:
    samples, function = make(), make_function()
    whole = function(samples, alone)
    for parts in ([range(4, 8), (0, 1, 2, 3, 8, 9, 10, 11)], [range(8, 12), (), range(8), ()]):
        functions = [make_function() for _ in parts]
        shared = on_ranks(functions, samples, parts)
        assert shared.values.keys() == whole.values.keys()
        for key in whole.values:
            torch.testing.assert_close(shared[key], whole[key], rtol=1e-6, atol=1e-6)
        for of_rank in functions if isinstance(function, Stateful) else ():
            assert isinstance(of_rank, Stateful)
            assert of_rank.state_dict() == pytest.approx(function.state_dict(), rel=1e-12)


DROP = ScoreWith(lambda *_: 0.0, list, float, failure="drop")
ONE = Generate(max_new_tokens=7, stop_ids=(0,))
DROPPING: dict[str, tuple[Callable[[PolicyOptions], Function], PolicyOptions]] = {
    "ppo": (PPOAdvantages, PPO(generate=ONE, kl_target=0.5, normalise_rewards=True, mini_batches=1)),  # type: ignore[dict-item]
    "grpo": (lambda o: partial(grpo_advantages, o), GRPO(generate=GROUP)),  # type: ignore[arg-type]
    "rloo": (lambda o: partial(rloo_advantages, o), RLOO(generate=GROUP)),  # type: ignore[arg-type]
    "reinforce++": (lambda o: partial(reinforce_plus_plus_advantages, o), ReinforcePlusPlus()),  # type: ignore[arg-type]
    "remax": (lambda o: partial(remax_advantages, o), ReMax()),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", DROPPING)
def test_samples_without_a_score_are_left_out(name: str) -> None:
    """The others get what they would get without them; of a whole group where a baseline compares its members."""
    make_function, options = DROPPING[name]
    gone = {4, 5, 6, 7} if options.generate.group_size > 1 else {2, 9}
    samples = make()
    scores = [torch.tensor(math.nan) if i in gone else score for i, score in enumerate(samples["score"])]
    function = make_function(replace(options, reward=DROP))
    found = function(samples.updated(Samples(samples.ids, {"score": scores})), alone)
    wanted_function = make_function(options)
    others = [i for i in samples.ids if i not in gone]
    wanted = wanted_function(Samples(tuple(range(len(others))), samples.of(others).values), alone)
    for key in wanted.values:
        torch.testing.assert_close([found[key][i] for i in others], wanted[key], rtol=1e-6, atol=1e-7)
        for i in gone:
            value = found[key][i]
            unknown = key in ("reward", "kl") and bool(value.isnan())
            assert unknown or key in ("kl_coefficient", "explained_variance") or not value.any(), key
    if isinstance(function, Stateful):
        assert isinstance(wanted_function, Stateful)
        adapted = function.state_dict()
        assert adapted.pop("kl_coefficient") == pytest.approx(options.kl, rel=0.2)  # by the number of samples
        assert adapted == pytest.approx({key: wanted_function.state_dict()[key] for key in adapted})


def test_a_group_without_one_of_its_members() -> None:
    samples, options = make(), GRPO(generate=GROUP, reward=DROP)
    scores = [*samples["score"][:5], torch.tensor(math.nan), *samples["score"][6:]]
    samples = samples.updated(Samples(samples.ids, {"score": scores}))
    rest = [float(scores[i]) for i in (4, 6, 7)]
    mean, std = statistics.fmean(rest), statistics.stdev(rest)
    expected = [(rest[0] - mean) / (std + 1e-4), 0.0, *((r - mean) / (std + 1e-4) for r in rest[1:])]
    found = grpo_advantages(options, samples, alone)
    assert [float(x.max() + x.min()) for x in found["advantages"][4:8]] == pytest.approx(expected, abs=1e-5)
    assert not found["weights"][5].any() and not found["token_weights"][5].any()
    found = rloo_advantages(RLOO(generate=GROUP, reward=DROP, kl=0.0), samples, alone)
    expected = [rest[0] - (rest[1] + rest[2]) / 2, 0.0, rest[1] - (rest[0] + rest[2]) / 2]
    assert [float(x.max() + x.min()) for x in found["advantages"][4:7]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("make_function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_values_outside_the_mask_are_not_read(make_function: Callable[[], Function]) -> None:
    samples = make()
    spoilt = {}
    for key in PER_TOKEN:
        spoilt[key] = [x.where(mask == 1, math.nan) for x, mask in zip(samples[key], samples["mask"], strict=True)]
    # the value after a truncated response does count
    for i, value in enumerate(spoilt["values"]):
        if not samples["finished"][i]:
            value[-1] = samples["values"][i][-1]
    whole = make_function()(samples, alone)
    found = make_function()(samples.updated(Samples(samples.ids, spoilt)), alone)
    for key in whole.values:
        torch.testing.assert_close(found[key], whole[key], rtol=0, atol=0)


@pytest.mark.parametrize("make_function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_no_samples_and_no_response_tokens(make_function: Callable[[], Function]) -> None:
    assert not len(make_function()(make().of(()), alone))
    samples = make()
    silent = samples.updated(Samples(samples.ids, {"mask": [torch.zeros_like(mask) for mask in samples["mask"]]}))
    for key, values in make_function()(silent, alone).values.items():
        assert all(value.isfinite().all() for value in values)
        assert key in ("reward", "weights", "kl_coefficient", "informative") or not any(map(torch.any, values))
