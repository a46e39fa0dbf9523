"""Losses, their gradients and metrics against loops written from the papers' formulas, on one rank and on several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.usp.rlhf.simulate import alone, minimise
from usp.rlhf.algorithms.objectives import (
    ClippedPolicy,
    ClippedSequences,
    ClippedValue,
    ClippedWeights,
    NextToken,
    RolloutIS,
    SoftPolicy,
    kl_estimate,
)
from usp.rlhf.algorithms.preferences import DPO, DirectPreference, PairLoss, PreferredScore, pair_weights
from usp.rlhf.graph import Objective
from usp.rlhf.samples import Samples

IMPORTANCE: tuple[RolloutIS, ...] = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
REJECTION: tuple[RolloutIS, ...] = ("token_reject", "sequence_reject", "geometric_reject")
PAIR_LOSSES: tuple[PairLoss, ...] = ("ipo", "hinge", "simpo", "orpo")
LENGTHS = (5, 2, 7, 4, 3, 6, 2, 4)  # prompts of 1 token at least: the second sample has one response token
EMPTY = 6  # a sample without response tokens
Oracle = Callable[[Samples, list[float], list[float]], dict[str, float]]


def make(seed: int = 0) -> Samples:
    """Return eight float64 samples with one to three prompt tokens."""
    draw = torch.Generator().manual_seed(seed)
    masks = []
    for number, length in enumerate(LENGTHS):
        mask = torch.zeros(length, dtype=torch.float64)
        mask[min(number % 3, length - 2) : length - 1] = number != EMPTY
        masks.append(mask)
    tokens = sum(float(mask.sum()) for mask in masks)

    def numbers(scale: float = 1.0) -> list[Tensor]:
        return [scale * torch.randn(n, generator=draw, dtype=torch.float64) for n in LENGTHS]

    values = {
        "tokens": [torch.zeros(n, dtype=torch.int64) for n in LENGTHS],
        "mask": masks,
        "token_weights": [mask / tokens for mask in masks],
        "weights": [mask / (2 + n) for n, mask in enumerate(masks)],
        "advantages": numbers(),
        "old_logprobs": numbers(0.3),
        "logprobs": numbers(0.3),
        "ref_logprobs": numbers(0.3),
        "values": numbers(0.3),
        "returns": numbers(),
        "covariant": [(torch.arange(n) % 2).double() for n in LENGTHS],
    }
    values["weights"][4] = torch.zeros(3, dtype=torch.float64)  # counts in metrics, not in the loss
    return Samples(tuple(range(len(LENGTHS))), values)


def make_pairs() -> Samples:
    samples = make()
    weights = pair_weights(DPO(mini_batches=1), samples, alone)
    return samples.updated(
        Samples(samples.ids, {"weights": [(weight != 0).double() / 4 for weight in weights["weights"]]})
    )


def said(seed: int = 1, tokens: int = sum(LENGTHS)) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    output, entropy = 0.3 * torch.randn(2, tokens, generator=draw, dtype=torch.float64)
    return output, entropy.abs()


def tokens_of(samples: Samples, output: list[float], entropy: list[float]) -> list[tuple[int, int, float, float]]:
    """(sample, token, output, entropy) along the row."""
    places = [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)]
    return [(i, t, o, e) for (i, t), o, e in zip(places, output, entropy, strict=True)]


def next_token(samples: Samples, output: list[float], entropy: list[float]) -> dict[str, float]:
    return {"loss": sum(-float(samples["weights"][i][t]) * o for i, t, o, _ in tokens_of(samples, output, entropy))}


def clipped_policy(
    low: float = 0.2,
    high: float = 0.2,
    kl: float = 0.0,
    estimator: str = "k3",
    bonus: float = 0.0,
    dual: float = 3.0,
    bound: float = 20.0,
    rollout_is: str = "",
    cap: float = math.inf,
    least: float = 0.0,
    covariance_kl: float = 0.0,
) -> Oracle:
    def oracle(samples: Samples, output: list[float], entropy: list[float]) -> dict[str, float]:
        corrections = importance(samples, rollout_is, cap, least) if rollout_is else {}
        fractions = ("clip_fraction", "dual_clip_fraction", "clamp_fraction")
        names = ("importance_ratio", *fractions, "approx_kl", "entropy", "policy_loss", "loss")
        totals = dict.fromkeys((*names, *(("ref_kl",) if kl else ())), 0.0)
        totals |= {"covariant_fraction": 0.0} if covariance_kl else {}
        for i, t, new, e in tokens_of(samples, output, entropy):
            if not samples["mask"][i][t]:
                continue
            old, ref, a, w, mean = (
                float(samples[key][i][t])
                for key in ("old_logprobs", "ref_logprobs", "advantages", "weights", "token_weights")
            )
            ratio = min(max(math.exp(new) / math.exp(old), math.exp(-bound)), math.exp(bound))
            clipped = 1 - low if ratio < 1 - low else 1 + high if ratio > 1 + high else ratio
            surrogate = min(ratio * a, clipped * a)  # PPO, equation 7, which is maximised
            if a < 0:
                surrogate = max(surrogate, dual * a)  # dual clip, equation 5
            log_r = ref - new
            if estimator == "k3":
                log_r = min(max(log_r, -bound), bound)
            k3 = math.exp(log_r) - 1 - log_r
            divergence = {"k1": -log_r, "k2": log_r**2 / 2, "k3": k3, "k3_unbiased": ratio * k3}[estimator]
            surrogate *= corrections.get((i, t), 1.0)
            if covariance_kl:
                near = float(samples["covariant"][i][t])
                totals["covariant_fraction"] += mean * near
                totals["loss"] += w * covariance_kl * near * abs(new - old) * corrections.get((i, t), 1.0)
            totals["policy_loss"] -= w * surrogate
            totals["loss"] += w * (-surrogate + kl * divergence - bonus * e)
            totals["importance_ratio"] += mean * ratio
            totals["clip_fraction"] += mean * (clipped * a < ratio * a)
            totals["dual_clip_fraction"] += mean * (a < 0 and ratio > dual)
            totals["clamp_fraction"] += mean * (abs(new - old) > bound)
            totals["approx_kl"] += mean * (ratio - 1 - math.log(ratio))
            totals["entropy"] += mean * e
            if kl:
                totals["ref_kl"] += mean * divergence
        return totals | (importance_metrics(samples, rollout_is, cap, least) if rollout_is else {})

    return oracle


def importance(samples: Samples, mode: str, cap: float, least: float = 0.0) -> dict[tuple[int, int], float]:
    """Truncated importance sampling: what multiplies each response token; cap inf, least 0: not truncated."""
    found = {}
    level, _, kind = mode.partition("_")
    for i, mask in enumerate(samples["mask"]):
        places = [t for t in range(len(mask)) if mask[t]]
        of_token = [math.exp(samples["old_logprobs"][i][t]) / math.exp(samples["logprobs"][i][t]) for t in places]
        for t, own in zip(places, of_token, strict=True):
            ratio = own if level == "token" else math.prod(of_token) ** (1 / len(places) if level == "geometric" else 1)
            bound = min(max(ratio, least), cap)
            rejected = 0.0 if bound != ratio else 1.0 if (kind, cap) != ("reject", math.inf) else ratio
            found[i, t] = {"truncate": bound, "mask": ratio * (bound == ratio), "reject": rejected}[kind]
    return found


def importance_metrics(samples: Samples, mode: str, cap: float, least: float) -> dict[str, float]:
    used, free = (list(importance(samples, mode, *bounds).values()) for bounds in ((cap, least), (math.inf, 0.0)))
    share = "rollout_is_truncated_fraction" if mode.endswith("truncate") else "rollout_is_masked_fraction"
    return {
        "rollout_is_mean": sum(used) / len(used),
        "rollout_is_square": sum(x * x for x in used) / len(used),
        "rollout_is_max": max(free),
        share: sum(not least <= x <= cap for x in free) / len(free),
    }


def gspo(low: float, high: float, geometric: bool = False) -> Oracle:
    """Equations 5 and 7 of arXiv 2507.18071, response by response. geometric: arXiv 2507.20673."""

    def oracle(samples: Samples, output: list[float], entropy: list[float]) -> dict[str, float]:
        by_token = clipped_policy(low, high, dual=math.inf)(samples, output, entropy)
        totals = {name: by_token[name] for name in ("approx_kl", "entropy", "clamp_fraction")}
        names = ("importance_ratio", "clip_fraction", "dual_clip_fraction", "policy_loss", "loss")
        totals |= dict.fromkeys(names, 0.0)
        rows: dict[int, list[tuple[float, ...]]] = {}
        for i, t, new, _ in tokens_of(samples, output, entropy):
            if samples["mask"][i][t]:
                old, a, w = (float(samples[key][i][t]) for key in ("old_logprobs", "advantages", "weights"))
                rows.setdefault(i, []).append((new - old, a, w))
        tokens = sum(len(row) for row in rows.values())
        for row in rows.values():
            weight = sum(w for _, _, w in row)
            a = sum(w * a for _, a, w in row) / weight if weight else 0.0
            free = [math.exp(x) for x, _, _ in row]
            sign = -1 if a < 0 else 1
            bound = [min(sign * x, sign * min(max(x, 1 - low), 1 + high)) * sign for x in free]
            ratio = math.prod(bound if geometric else free) ** (1 / len(row))
            clipped = min(max(ratio, 1 - low), 1 + high)
            totals["policy_loss"] -= weight * min(ratio * a, clipped * a)
            totals["importance_ratio"] += len(row) / tokens * ratio
            changed = sum(x != y for x, y in zip(bound, free, strict=True))
            totals["clip_fraction"] += (changed if geometric else len(row) * (clipped * a < ratio * a)) / tokens
        return {**totals, "loss": totals["policy_loss"]}

    return oracle


def gspo_token(
    samples: Samples, output: list[float], entropy: list[float], at: Sequence[float] = ()
) -> dict[str, float]:
    """Equations 13 and 14 of arXiv 2507.18071; `at`: the log-probabilities that have no gradient."""
    by_token = clipped_policy(dual=math.inf)(samples, output, entropy)
    totals = {name: by_token[name] for name in ("approx_kl", "entropy", "clamp_fraction")}
    totals |= dict.fromkeys(("importance_ratio", "clip_fraction", "dual_clip_fraction", "policy_loss"), 0.0)
    logs: dict[int, list[float]] = {}
    fixed = at or output
    row = [(*each, f) for each, f in zip(tokens_of(samples, output, entropy), fixed, strict=True)]
    for i, t, _, _, f in row:
        if samples["mask"][i][t]:
            logs.setdefault(i, []).append(f - float(samples["old_logprobs"][i][t]))
    for i, t, new, _, f in row:
        if samples["mask"][i][t]:
            a, w, mean = (float(samples[key][i][t]) for key in ("advantages", "weights", "token_weights"))
            ratio = math.exp(sum(logs[i]) / len(logs[i])) * math.exp(new) / math.exp(f)
            clipped = min(max(ratio, 0.95), 1.1)
            totals["policy_loss"] -= w * min(ratio * a, clipped * a)
            totals["importance_ratio"] += mean * ratio
            totals["clip_fraction"] += mean * (clipped * a < ratio * a)
    return {**totals, "loss": totals["policy_loss"]}


def sapo(samples: Samples, output: list[float], entropy: list[float]) -> dict[str, float]:
    """The soft gate of arXiv 2511.20347."""
    by_token = clipped_policy(dual=math.inf)(samples, output, entropy)
    totals = {name: by_token[name] for name in ("approx_kl", "entropy", "clamp_fraction", "importance_ratio")}
    totals["policy_loss"] = 0.0
    for i, t, new, _ in tokens_of(samples, output, entropy):
        if samples["mask"][i][t]:
            old, a, w = (float(samples[key][i][t]) for key in ("old_logprobs", "advantages", "weights"))
            tau = 1.5 if a > 0 else 2.5
            gate = 4 / tau / (1 + math.exp(-tau * (math.exp(new - old) - 1)))
            totals["policy_loss"] -= w * gate * a
    return {**totals, "loss": totals["policy_loss"]}


def cispo(samples: Samples, output: list[float], entropy: list[float], at: Sequence[float] = ()) -> dict[str, float]:
    """Equations 4 and 5 of arXiv 2506.13585; `at`: the log-probabilities that the weights, without gradient, are of."""
    by_token = clipped_policy(1.0, 0.3, dual=math.inf)(samples, output, entropy)
    totals = {name: by_token[name] for name in ("approx_kl", "entropy", "clamp_fraction", "importance_ratio")}
    totals |= {"policy_loss": 0.0, "clip_fraction": 0.0}
    for (i, t, new, _), fixed in zip(tokens_of(samples, output, entropy), at or output, strict=True):
        if samples["mask"][i][t]:
            old, a, w, mean = (
                float(samples[key][i][t]) for key in ("old_logprobs", "advantages", "weights", "token_weights")
            )
            weight = min(math.exp(fixed - old), 1.3)
            totals["policy_loss"] -= w * weight * a * new
            totals["clip_fraction"] += mean * (math.exp(fixed - old) > 1.3)
    return {**totals, "loss": totals["policy_loss"]}


def clipped_value(samples: Samples, output: list[float], entropy: list[float]) -> dict[str, float]:
    totals = dict.fromkeys(("loss", "clip_fraction", "value"), 0.0)
    for i, t, v, _ in tokens_of(samples, output, entropy):
        w, old, target = (float(samples[key][i][t]) for key in ("weights", "values", "returns"))
        free, bound = (v - target) ** 2, (min(max(v, old - 0.2), old + 0.2) - target) ** 2
        totals["loss"] += 0.5 * w * max(free, bound)
        totals["clip_fraction"] += w * (bound > free)
        totals["value"] += w * v
    return totals


def of_pairs(chosen: list[float], rejected: list[float], smoothing: float, what: str) -> dict[str, float]:
    count = len(chosen)
    margins = [a - b for a, b in zip(chosen, rejected, strict=True)]
    right, wrong = ([math.log(1 / (1 + math.exp(-sign * m))) for m in margins] for sign in (1, -1))
    return {
        "loss": -sum((1 - smoothing) * r + smoothing * w for r, w in zip(right, wrong, strict=True)) / count,
        "accuracy": sum(m > 0 for m in margins) / count,
        "margin": sum(margins) / count,
        f"chosen_{what}": sum(chosen) / count,
        f"rejected_{what}": sum(rejected) / count,
    }


def preferred_score(samples: Samples, output: list[float], entropy: list[float]) -> dict[str, float]:
    scores = [o for i, t, o, _ in tokens_of(samples, output, entropy) if t == LENGTHS[i] - 1]
    return of_pairs(scores[::2], scores[1::2], 0.0, "score")


def direct_preference(beta: float, smoothing: float) -> Oracle:
    def oracle(samples: Samples, output: list[float], entropy: list[float]) -> dict[str, float]:
        rewards = [0.0] * len(LENGTHS)
        for i, t, o, _ in tokens_of(samples, output, entropy):
            if samples["mask"][i][t]:
                rewards[i] += beta * (o - float(samples["ref_logprobs"][i][t]))
        return of_pairs(rewards[::2], rewards[1::2], smoothing, "reward")

    return oracle


def pair_loss(loss: str, beta: float, gamma: float = 0.0) -> Oracle:
    """IPO (arXiv 2310.12036, equation 17), the hinge of SLiC (2309.06657, section 3), SimPO (2405.14734, equation 6)
    and ORPO (2403.07691, equations 6 and 7), pair by pair."""

    def oracle(samples: Samples, output: list[float], entropy: list[float]) -> dict[str, float]:
        logs: list[list[tuple[float, float]]] = [[] for _ in LENGTHS]
        for i, t, o, _ in tokens_of(samples, output, entropy):
            if samples["mask"][i][t]:
                logs[i].append((o, float(samples["ref_logprobs"][i][t])))
        means = [sum(o for o, _ in each) / len(each) if each else 0.0 for each in logs]
        sums = means if loss in ("simpo", "orpo") else [sum(o - r for o, r in each) for each in logs]
        found = of_pairs([beta * x for x in sums[::2]], [beta * x for x in sums[1::2]], 0.0, "reward")
        odds = [math.exp(min(x, -1e-6)) / (1 - math.exp(min(x, -1e-6))) for x in means]
        losses = []
        for c in range(0, len(LENGTHS), 2):
            h = sums[c] - sums[c + 1]
            if loss == "ipo":
                losses.append((h - 1 / (2 * beta)) ** 2)
            elif loss == "hinge":
                losses.append(max(0.0, 1 - beta * h))
            elif loss == "simpo":
                losses.append(math.log(1 + math.exp(gamma - beta * h)))
            else:
                losses.append(-means[c] + beta * math.log(1 + odds[c + 1] / odds[c]))
        return {**found, "loss": sum(losses) / len(losses)}

    return oracle


CASES: dict[str, tuple[Objective, Callable[[], Samples], Oracle]] = {
    "next_token": (NextToken(), make, next_token),
    "ppo": (ClippedPolicy(), make, clipped_policy()),
    "dapo": (ClippedPolicy(0.1, 0.3), make, clipped_policy(0.1, 0.3)),
    "k1": (ClippedPolicy(kl=0.7, kl_estimator="k1"), make, clipped_policy(kl=0.7, estimator="k1")),
    "k2": (ClippedPolicy(kl=0.7, kl_estimator="k2"), make, clipped_policy(kl=0.7, estimator="k2")),
    "k3": (ClippedPolicy(kl=0.7), make, clipped_policy(kl=0.7)),
    "bounds": (
        ClippedPolicy(kl=0.7, dual_clip=1.3, max_log_ratio=0.4),
        make,
        clipped_policy(kl=0.7, dual=1.3, bound=0.4),
    ),
    **{
        mode: (
            ClippedPolicy(kl=0.7, rollout_is=mode, rollout_is_threshold=1.2),
            make,
            clipped_policy(kl=0.7, rollout_is=mode, cap=1.2),
        )
        for mode in IMPORTANCE
    },
    "k3_unbiased": (
        ClippedPolicy(kl=0.7, kl_estimator="k3_unbiased"),
        make,
        clipped_policy(kl=0.7, estimator="k3_unbiased"),
    ),
    **{
        mode: (
            ClippedPolicy(rollout_is=mode, rollout_is_threshold=1.1, rollout_is_lower=0.8),
            make,
            clipped_policy(rollout_is=mode, cap=1.1, least=0.8),
        )
        for mode in REJECTION
    },
    "icepop": (
        ClippedPolicy(rollout_is="token_mask", rollout_is_threshold=1.2, rollout_is_lower=0.9),
        make,
        clipped_policy(rollout_is="token_mask", cap=1.2, least=0.9),
    ),
    "kl_cov": (
        ClippedPolicy(1.0, math.inf, dual_clip=math.inf, covariance_kl=0.6),
        make,
        clipped_policy(1.0, math.inf, dual=math.inf, covariance_kl=0.6),
    ),
    "gspo": (ClippedSequences(0.05, 0.1, dual_clip=math.inf), make, gspo(0.05, 0.1)),
    "gspo_token": (ClippedSequences(0.05, 0.1, dual_clip=math.inf, ratio="sequence_token"), make, gspo_token),
    "gmpo": (ClippedSequences(0.05, 0.1, dual_clip=math.inf, ratio="geometric"), make, gspo(0.05, 0.1, True)),
    "sapo": (SoftPolicy(tau_positive=1.5, tau_negative=2.5), make, sapo),
    "cispo": (ClippedWeights(1.0, 0.3), make, cispo),
    "entropy": (ClippedPolicy(entropy_bonus=0.3), make, clipped_policy(bonus=0.3)),
    "value": (ClippedValue(0.2), make, clipped_value),
    "reward_model": (PreferredScore(), make_pairs, preferred_score),
    "dpo": (DirectPreference(0.5), make_pairs, direct_preference(0.5, 0.0)),
    "cdpo": (DirectPreference(0.5, 0.2), make_pairs, direct_preference(0.5, 0.2)),
    **{
        loss: (DirectPreference(0.7, loss=loss, gamma=0.3 * (loss == "simpo")), make_pairs, pair_loss(loss, 0.7, 0.3))
        for loss in PAIR_LOSSES
    },
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
Case = tuple[Objective, Callable[[], Samples], Oracle]


@each_case
def test_the_papers_formula(case: Case) -> None:
    objective, samples, oracle = case
    for seed in range(5):
        output, entropy = said(seed)
        loss, metrics = minimise(objective, samples(), output, entropy)
        assert {"loss": loss.item(), **metrics} == pytest.approx(
            oracle(samples(), output.tolist(), entropy.tolist()), rel=1e-9, abs=1e-12
        )


@each_case
@pytest.mark.slow(but=3)
def test_gradients_are_finite_differences_of_the_oracle(case: Case) -> None:
    objective, samples, oracle = case
    output, entropy = (x.requires_grad_() for x in said())
    loss, _ = minimise(objective, samples(), output, entropy)
    loss.backward()
    if oracle in (cispo, gspo_token):
        oracle = partial(oracle, at=output.tolist())  # type: ignore[call-arg]
    step = 1e-6
    for x in (output, entropy):
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        for index in range(len(x)):
            sides = []
            for sign in (1, -1):
                moved = x.detach().clone()
                moved[index] += sign * step
                both = (moved, entropy.detach()) if x is output else (output.detach(), moved)
                sides.append(oracle(samples(), both[0].tolist(), both[1].tolist())["loss"])
            assert gradient[index].item() == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-8)


@each_case
@pytest.mark.slow(but=3)
def test_results_do_not_depend_on_ranks_or_padding(case: Case) -> None:
    objective, samples, _ = case

    def all_of(degree: int, padding: int) -> tuple[Tensor, dict[str, float], Tensor]:
        output, entropy = (x.requires_grad_() for x in said())
        loss, metrics = minimise(objective, samples(), output, entropy, degree, padding)
        loss.backward()
        assert output.grad is not None
        return loss.detach(), metrics, output.grad

    loss, metrics, gradient = all_of(1, 0)
    for degree, padding in ((1, 3), (3, 0), (4, 5), (40, 13)):  # some of 40 ranks have no token
        other_loss, other_metrics, other_gradient = all_of(degree, padding)
        torch.testing.assert_close(other_loss, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-12, atol=1e-12)
        assert other_metrics == pytest.approx(metrics, rel=1e-12, abs=1e-12)


@each_case
def test_values_outside_the_mask_are_not_read(case: Case) -> None:
    objective, make_samples, _ = case
    samples, (output, entropy) = make_samples(), said()
    whole = minimise(objective, samples, output, entropy)
    # The reward model reads the value at the last token, which predicts nothing.
    counts = [
        weight != 0 if isinstance(objective, PreferredScore) else mask != 0
        for weight, mask in zip(samples["weights"], samples["mask"], strict=True)
    ]
    row = torch.cat(counts)
    for garbage in (math.nan, math.inf, 1e30):
        spoilt = {
            key: [x.where(c, garbage) for x, c in zip(samples[key], counts, strict=True)]
            for key in objective.keys
            if key not in ("weights", "token_weights", "mask")
        }
        spoilt_output = output.where(row, garbage).requires_grad_()
        spoilt_samples = samples.updated(Samples(samples.ids, spoilt))
        loss, metrics = minimise(objective, spoilt_samples, spoilt_output, entropy.where(row, garbage))
        loss.backward()
        assert loss.item() == whole[0].item() and metrics == whole[1]
        assert spoilt_output.grad is not None and spoilt_output.grad.isfinite().all()
        assert not spoilt_output.grad[~row].any()


@each_case
def test_a_rank_without_sequences(case: Case) -> None:
    objective = case[0]
    nothing = Samples((), {key: [] for key in ("tokens", *objective.keys)})
    output, entropy = (x.requires_grad_() for x in said(tokens=0))
    loss, metrics = minimise(objective, nothing, output, entropy, padding=4)
    loss.backward()
    assert loss.item() == 0 and not any(metrics.values())
    assert metrics.keys() == minimise(objective, case[1](), *said())[1].keys()


def test_micro_batches_of_whole_pairs_add_up() -> None:
    samples, (output, entropy) = make_pairs(), said()
    for objective in (PreferredScore(), DirectPreference()):
        loss, metrics = minimise(objective, samples, output, entropy)
        cut = sum(LENGTHS[:2])
        parts = (
            minimise(objective, samples.of((0, 1)), output[:cut], entropy[:cut], degree=2),
            minimise(objective, samples.of((2, 3, 4, 5, 6, 7)), output[cut:], entropy[cut:], degree=3),
        )
        torch.testing.assert_close(parts[0][0] + parts[1][0], loss, rtol=1e-12, atol=1e-12)
        assert {name: parts[0][1][name] + parts[1][1][name] for name in metrics} == pytest.approx(metrics, abs=1e-12)


def test_a_ratio_of_one_gives_the_policy_gradient() -> None:
    """At the first optimiser step the gradient is that of REINFORCE: -advantage * weight at each token."""
    samples, (output, entropy) = make(), said()
    old = list(output.split(LENGTHS))
    samples = samples.updated(Samples(samples.ids, {"old_logprobs": old}))
    output.requires_grad_()
    loss, metrics = minimise(ClippedPolicy(), samples, output, entropy)
    loss.backward()
    expected = -torch.cat(list(samples["weights"])) * torch.cat(list(samples["advantages"]))
    torch.testing.assert_close(output.grad, expected)
    assert metrics["importance_ratio"] == pytest.approx(1) and metrics["clip_fraction"] == metrics["approx_kl"] == 0


def test_k3_keeps_its_digits_where_policies_are_close() -> None:
    difference = torch.linspace(-1e-4, 1e-4, 21)
    k3 = kl_estimate(difference, "k3")
    torch.testing.assert_close(k3, difference.square() / 2, rtol=0, atol=2e-11)


@pytest.mark.parametrize("far", [100.0, -100.0])
@pytest.mark.parametrize("moved", ["old_logprobs", "ref_logprobs"])
def test_a_far_token_leaves_the_loss_and_its_gradient_finite(far: float, moved: str) -> None:
    """In float32, where the exponential of its log-ratio is not, and without the bounds the metrics are not either."""

    def step(objective: ClippedPolicy) -> tuple[Tensor, dict[str, float], Tensor]:
        samples, (output, entropy) = make(), said()
        values = {key: [x.float() for x in samples[key]] for key in objective.keys}
        values[moved] = [x - far * (torch.arange(len(x)) == 2) for x in values[moved]]
        output = output.float().requires_grad_()
        samples = Samples(samples.ids, {**values, "tokens": samples["tokens"]})
        loss, metrics = minimise(objective, samples, output, entropy.float())
        loss.backward()
        assert output.grad is not None
        return loss, metrics, output.grad

    loss, metrics, gradient = step(ClippedPolicy(kl=0.1))
    assert loss.isfinite() and all(map(math.isfinite, metrics.values())) and gradient.isfinite().all()
    assert (metrics["clamp_fraction"] > 0) == (moved == "old_logprobs")
    loss, metrics, gradient = step(ClippedPolicy(kl=0.1, dual_clip=math.inf, max_log_ratio=math.inf))
    overflows = (far > 0) == (moved == "old_logprobs")
    assert all(map(math.isfinite, metrics.values())) != overflows


@pytest.mark.parametrize("mode", IMPORTANCE)
def test_the_own_policy_against_the_one_that_sampled_has_no_gradient(mode: RolloutIS) -> None:
    """With the policy as the old one, each token's policy gradient is multiplied, also that of other objectives."""
    for objective in (ClippedPolicy(old=""), ClippedSequences(old=""), ClippedWeights(1.0, 4.0, old="")):
        samples, (output, entropy) = make(), (x.requires_grad_() for x in said())
        own = samples.updated(Samples(samples.ids, {"old_logprobs": list(output.detach().split(LENGTHS))}))
        factors = importance(own, mode, 1.2)
        places = [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)]
        row = torch.tensor([factors.get(place, 0.0) for place in places], dtype=torch.float64)
        multiplied = list((torch.cat(list(samples["weights"])) * row).split(LENGTHS))
        corrected = replace(objective, rollout_is=mode, rollout_is_threshold=1.2)
        minimise(corrected, samples, output, entropy, degree=3)[0].backward()
        found, output.grad = output.grad, None
        samples = samples.updated(Samples(samples.ids, {"weights": multiplied}))
        minimise(objective, samples, output, entropy)[0].backward()
        assert found is not None and output.grad is not None and 0.0 < row.max() <= 1.2
        torch.testing.assert_close(found, output.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("degree", [1, 3])
def test_a_policy_that_is_the_old_one_needs_no_old_logprobs(degree: int) -> None:
    """Loss, metrics and gradient are those of its own log-probabilities as the old ones."""

    def step(objective: ClippedPolicy, samples: Samples) -> tuple[float, dict[str, float], Tensor]:
        output, entropy = (x.requires_grad_() for x in said())
        loss, metrics = minimise(objective, samples, output, entropy, degree, padding=4)
        loss.backward()
        assert output.grad is not None
        return loss.item(), metrics, output.grad

    samples, output = make(), said()[0]
    recomputed = samples.updated(Samples(samples.ids, {"old_logprobs": list(output.split(LENGTHS))}))
    loss, metrics, gradient = step(ClippedPolicy(kl=0.3), recomputed)
    found, seen, found_gradient = step(ClippedPolicy(kl=0.3, old=""), samples)
    assert found == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-12, atol=1e-12)
    differences = (output - torch.cat(list(samples["logprobs"]))).abs()[torch.cat(list(samples["mask"])) != 0]
    assert seen.pop("logprob_difference_max") == pytest.approx(differences.max().item())
    assert seen.pop("logprob_difference_mean") == pytest.approx(differences.mean().item())
    assert seen == pytest.approx(metrics, rel=1e-12, abs=1e-12) and seen["importance_ratio"] == pytest.approx(1)
