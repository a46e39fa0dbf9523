"""Graphs of the algorithms: calls, options, and steps in which models are functions of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.usp.rlhf.algorithms.variants import dapo, dr_grpo
from tests.usp.rlhf.simulate import minimise, on_ranks
from usp.rlhf.algorithms.algorithm import Options, stateful
from usp.rlhf.algorithms.critic_free import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    SAPO,
    OnPolicyDistillation,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from usp.rlhf.algorithms.objectives import mini_batch_numbers
from usp.rlhf.algorithms.policy import PolicyOptions
from usp.rlhf.algorithms.ppo import PPO
from usp.rlhf.algorithms.preferences import DPO
from usp.rlhf.algorithms.registry import ALGORITHMS, build_graph
from usp.rlhf.algorithms.rewards import ScoreWith
from usp.rlhf.graph import Compute, DataflowGraph, Generate, Inference, ModelCall, TrainStep, key_kinds, unit
from usp.rlhf.samples import Samples, fingerprint, mini_batch_ids, partition


def reward(prompt: list[int], response: list[int], answer: int) -> float:
    return sum(token % 2 for token in response) / 4 + answer


FUNCTION = ScoreWith(reward, list, float)
GROUP = Generate(group_size=3, max_new_tokens=6, temperature=0.7, stop_ids=(0,))
ONE = replace(GROUP, group_size=1)
OPTIONS: dict[str, tuple[str, Options]] = {
    "sft": ("sft", Options(mini_batches=3)),
    "reward_model": ("reward_model", Options(mini_batches=2)),
    "dpo": ("dpo", DPO(mini_batches=2)),
    "ppo": ("ppo", PPO(generate=ONE)),
    "ppo_function": ("ppo", PPO(generate=GROUP, reward=FUNCTION, kl=0.0, mini_batches=5)),
    "grpo": ("grpo", GRPO(generate=GROUP, reward=FUNCTION)),
    "grpo_recomputed": ("grpo", GRPO(generate=GROUP, reward=FUNCTION, old_logprobs="recompute")),
    "dr_grpo": ("grpo", dr_grpo(GRPO(generate=GROUP, mini_batches=4))),
    "dapo": ("grpo", dapo(GRPO(generate=GROUP, reward=FUNCTION, mini_batches=2), overlong_buffer=2)),
    "gspo": ("gspo", GSPO(generate=GROUP, reward=FUNCTION, mini_batches=2)),
    "gspo_token": ("gspo", GSPO(generate=GROUP, reward=FUNCTION, mini_batches=2, ratio="sequence_token")),
    "gmpo": ("gspo", GSPO(generate=GROUP, reward=FUNCTION, mini_batches=2, ratio="geometric", eps_low=0.33)),
    "sapo": ("sapo", SAPO(generate=GROUP, reward=FUNCTION, mini_batches=2)),
    "kl_cov": ("grpo", GRPO(generate=GROUP, reward=FUNCTION, mini_batches=2, covariance="kl", covariance_share=0.2)),
    "clip_cov": ("dapo", DAPO(generate=GROUP, reward=FUNCTION, covariance="clip", covariance_low=0.0)),
    "k3_unbiased": ("grpo", GRPO(generate=GROUP, reward=FUNCTION, kl_estimator="k3_unbiased")),
    "simpo": ("dpo", DPO(mini_batches=2, loss="simpo", gamma=0.5)),
    "ipo": ("dpo", DPO(mini_batches=2, loss="ipo")),
    "cispo": ("cispo", CISPO(generate=GROUP, reward=FUNCTION, mini_batches=2)),
    "reinforce++_baseline": ("reinforce++_baseline", ReinforcePlusPlusBaseline(generate=GROUP, mini_batches=2)),
    "dynamic": ("dapo", DAPO(generate=GROUP, reward=FUNCTION, oversample=2, mini_batches=2)),
    "rloo": ("rloo", RLOO(generate=GROUP, mini_batches=2)),
    "rloo_rollout": ("rloo", RLOO(generate=GROUP, mini_batches=2, old_logprobs="rollout")),
    "reinforce++": ("reinforce++", ReinforcePlusPlus(generate=GROUP, mini_batches=2)),
    "remax": ("remax", ReMax(generate=ONE, reward=FUNCTION)),
    "distillation": ("distillation", OnPolicyDistillation(generate=ONE, reward=FUNCTION)),
    "remax_model": ("remax", ReMax(generate=ONE, zero_unfinished=True)),
}
each = pytest.mark.parametrize("name", OPTIONS)


# Calls


def described(graph: DataflowGraph) -> dict[str, tuple[str, str, set[str], set[str]]]:
    return {call.name: (call.kind, call.role, set(call.inputs), set(call.outputs)) for call in graph.calls}


GENERATED = {"tokens", "mask", "logprobs", "finished", "prompt_length"}


def test_ppo_is_six_calls_of_four_models() -> None:
    """And two calls more: old log-probabilities in the training layout, and the advantages."""
    graph = build_graph("ppo", PPO(generate=GROUP))
    of_batch = {"tokens", "mask", "score", "finished", "old_logprobs", "ref_logprobs"}
    policy = {"tokens", "weights", "token_weights", "advantages", "old_logprobs"}
    given = {"advantages", "weights", "token_weights", "returns", "reward", "kl"}
    assert described(graph) == {
        "actor_generate": ("generate", "actor", {"prompt_ids"}, GENERATED),
        "reward_inference": ("inference", "reward", {"tokens"}, {"score"}),
        "actor_inference": ("inference", "actor", {"tokens", "mask"}, {"old_logprobs"}),
        "ref_inference": ("inference", "ref", {"tokens", "mask"}, {"ref_logprobs"}),
        "critic_inference": ("inference", "critic", {"tokens"}, {"values"}),
        "advantages": ("compute", "", of_batch | {"values"}, given | {"kl_coefficient", "explained_variance"}),
        "actor_train": ("train_step", "actor", policy, set()),
        "critic_train": ("train_step", "critic", {"tokens", "weights", "values", "returns"}, set()),
    }
    assert graph.given == ("prompt_ids",) and graph.roles == ("actor", "critic", "ref", "reward")
    assert graph["actor_train"].work.stop_above == ("importance_ratio", 5.0)  # type: ignore[union-attr]
    temperatures = {
        "actor_inference": graph["actor_inference"].work.temperature,  # type: ignore[union-attr]
        "ref_inference": graph["ref_inference"].work.temperature,  # type: ignore[union-attr]
        "actor_train": graph["actor_train"].work.objective.temperature,  # type: ignore[union-attr]
    }
    assert set(temperatures.values()) == {0.7}  # of sampling: otherwise ratios would not start at 1
    assert list(stateful(graph)) == ["advantages"]


@pytest.mark.parametrize(
    "name, calls, given",
    [
        ("sft", "weights actor_train", "tokens mask"),
        ("reward_model", "weights reward_train", "tokens"),
        ("dpo", "weights ref_inference actor_train", "tokens mask"),
        ("simpo", "weights actor_train", "tokens mask"),
        (
            "ppo_function",
            "actor_generate reward actor_inference critic_inference advantages actor_train critic_train",
            "prompt_ids prompt_index",
        ),
        (
            "grpo",  # the policy that trains is the old one
            "actor_generate reward ref_inference advantages actor_train",
            "prompt_ids prompt_index",
        ),
        (
            "grpo_recomputed",
            "actor_generate reward actor_inference ref_inference advantages actor_train",
            "prompt_ids prompt_index",
        ),
        ("rloo_rollout", "actor_generate reward_inference ref_inference advantages actor_train", "prompt_ids"),
        ("dapo", "actor_generate reward actor_inference advantages actor_train", "prompt_ids prompt_index"),
        ("rloo", "actor_generate reward_inference actor_inference ref_inference advantages actor_train", "prompt_ids"),
        ("distillation", "actor_generate reward teacher_inference advantages actor_train", "prompt_ids prompt_index"),
        (
            "remax",
            "actor_generate reward actor_inference ref_inference greedy_generate greedy_reward advantages actor_train",
            "prompt_ids prompt_index",
        ),
    ],
)
def test_calls_follow_from_options(name: str, calls: str, given: str) -> None:
    graph = build_graph(*OPTIONS[name])
    assert {call.name for call in graph.calls} == set(calls.split()) and graph.given == tuple(given.split())
    key_kinds(graph)
    assert fingerprint(graph) == fingerprint(build_graph(*OPTIONS[name]))


def test_options_reach_the_calls() -> None:
    options = GRPO(generate=GROUP, kl=0.3, kl_estimator="k2", eps_low=0.1, eps_high=0.4, entropy_bonus=0.01, epochs=2)
    graph = build_graph("grpo", replace(options, max_importance_ratio=0.0))
    work = graph["actor_train"].work
    assert isinstance(work, TrainStep) and (work.epochs, work.stop_above) == (2, None)
    objective: Any = work.objective
    assert (objective.eps_low, objective.eps_high) == (0.1, 0.4)
    assert (objective.kl, objective.kl_estimator, objective.entropy_bonus) == (0.3, "k2", 0.01)
    assert objective.keys[-1] == "ref_logprobs" and unit(graph["advantages"]) == 3
    near: Any = build_graph("grpo", replace(options, covariance="kl", covariance_kl=0.7))
    assert near["actor_train"].work.objective.covariance_kl == 0.7 and objective.covariance_kl == 0
    assert "covariant" in near["actor_train"].inputs
    penalty_in_reward: Any = build_graph("rloo", RLOO(generate=GROUP, kl=0.3))["actor_train"].work
    assert penalty_in_reward.objective.kl == 0.0
    greedy = build_graph(*OPTIONS["remax"])["greedy_generate"].work
    assert greedy == replace(ONE, temperature=0.0)
    pairs: Any = build_graph("dpo", DPO(beta=0.4, label_smoothing=0.1))["actor_train"].work
    assert (pairs.objective.beta, pairs.objective.label_smoothing, unit(build_graph(*OPTIONS["dpo"])["weights"])) == (
        0.4,
        0.1,
        2,
    )


@pytest.mark.parametrize(
    "options, old, correction",
    [
        (GRPO(), "", "none"),
        (GRPO(staleness=1), "", "token_truncate"),  # the ratio is 1, and what multiplies it is not
        (GRPO(staleness=1, rollout_is="sequence_mask"), "", "sequence_mask"),
        (GRPO(staleness=1, rollout_is="none"), "old_logprobs", "none"),  # the ratio accounts for the older policy
        (GRPO(staleness=1, old_logprobs="rollout"), "logprobs", "none"),
        (GRPO(staleness=1, mini_batches=2), "old_logprobs", "token_truncate"),
        (RLOO(staleness=1), "old_logprobs", "token_truncate"),
        (GRPO(rollout_is="token_mask"), "", "token_mask"),
    ],
)
def test_with_staleness_something_accounts_for_the_older_policy(options: Any, old: str, correction: str) -> None:
    graph = build_graph("rloo" if isinstance(options, RLOO) else "grpo", options)
    objective: Any = graph["actor_train"].work.objective  # type: ignore[union-attr]
    assert (objective.old, objective.rollout_is) == (old, correction)
    assert ("logprobs" in objective.keys) == (old in ("", "logprobs") or correction != "none")
    assert ("actor_inference" in {call.name for call in graph.calls}) == (old == "old_logprobs")


# Invalid options


def test_unknown_algorithms_and_options_of_other_algorithms() -> None:
    with pytest.raises(ValueError, match=r"algorithm='a2c' is unknown: use sft, reward_model, dpo, ppo, grpo"):
        build_graph("a2c", PPO())
    with pytest.raises(TypeError, match="ppo has the options PPO, not GRPO"):
        build_graph("ppo", GRPO())
    with pytest.raises(TypeError, match="sft has the options Options, not PPO"):
        build_graph("sft", PPO())


def test_every_invalid_option_is_named() -> None:
    options = PPO(generate=Generate(temperature=0.0), gamma=1.5, kl=-1.0, mini_batches=0, zero_unfinished=True)
    with pytest.raises(ValueError) as refused:
        build_graph("ppo", options)
    for text in ("temperature=0.0 must be above 0", "gamma=1.5", "kl=-1.0", "mini_batches=0", "stop_ids"):
        assert text in str(refused.value)


@pytest.mark.parametrize(
    "algorithm, options, match",
    [
        ("sft", Options(epochs=0), "epochs=0 must be at least 1"),
        ("dpo", DPO(beta=0.0), "beta=0.0 must be above 0"),
        ("dpo", DPO(label_smoothing=0.5), "label_smoothing=0.5"),
        ("ppo", PPO(eps_low=1.1), "eps_low=1.1 must be at most 1"),
        ("grpo", GRPO(oversample=2), "oversample=2 needs drop_equal_groups=True"),
        ("cispo", CISPO(dual_clip=3.0), "dual_clip=3.0 has no effect on CISPO"),
        ("sapo", SAPO(eps_low=0.1), "eps_low=0.1 has no effect on SAPO"),
        ("sapo", SAPO(tau_negative=0.0), "tau_negative=0.0 must be above 0"),
        ("grpo", GRPO(covariance="kl"), "covariance=kl needs several mini_batches"),
        ("grpo", GRPO(covariance="clip", covariance_kl=2.0), "covariance_kl=2.0 has no effect without covariance=kl"),
        ("grpo", GRPO(covariance_share=0.1), "covariance_share=0.1 has no effect without covariance=clip or kl:"),
        ("grpo", GRPO(kl=0.0, kl_estimator="k2"), "kl_estimator=k2 has no effect without kl"),
        ("grpo", GRPO(rollout_is_lower=0.5), "rollout_is_lower=0.5 has no effect without rollout_is"),
        ("grpo", GRPO(rollout_is="token_mask", rollout_is_lower=2.0), "rollout_is_lower=2.0 must be below 2.0"),
        ("ppo", PPO(kl_estimator="k3_unbiased"), "k3_unbiased is of a loss"),
        ("dpo", DPO(loss="ipo", label_smoothing=0.1), "label_smoothing=0.1 has no effect without loss=sigmoid"),
        ("dpo", DPO(gamma=0.1), "gamma=0.1 has no effect without loss=simpo"),
        ("dpo", DPO(loss="slic"), "loss='slic' must be one of sigmoid, ipo, hinge"),  # type: ignore[arg-type]
        ("ppo", PPO(eps_high=float("nan")), "eps_high=nan"),
        ("dpo", DPO(beta=float("inf")), "beta=inf must be finite"),
        ("ppo", PPO(value_norm_eps=float("inf")), "value_norm_eps=inf must be finite"),
        ("ppo", PPO(kl=float("inf")), "kl=inf must be finite"),
        ("ppo", PPO(kl_target=float("inf")), "kl_target=inf must be finite"),
        ("ppo", PPO(entropy_bonus=float("inf")), "entropy_bonus=inf must be finite"),
        ("ppo", PPO(reward_bias=float("nan")), "reward_bias=nan must be finite"),
        ("grpo", GRPO(reward_scaling=float("nan")), "reward_scaling=nan must be finite"),
        ("grpo", GRPO(overlong_penalty=float("inf")), "overlong_penalty=inf must be finite"),
        ("ppo", PPO(dual_clip=1.0), "dual_clip=1.0 must be above 1"),
        ("ppo", PPO(max_log_ratio=0.0), "max_log_ratio=0.0 must be above 0"),
        ("ppo", PPO(max_reward_clip=0.0), "rewards would all be 0"),
        ("ppo", PPO(reward_scaling=0.0), "rewards would all be equal"),
        ("ppo", PPO(aggregation="sequence_mean"), "aggregation=sequence_mean has no effect on PPO"),
        ("ppo", PPO(kl=0.0, kl_target=6.0), "kl_target=6.0 needs kl above 0"),
        ("ppo", PPO(value_norm="ma"), "value_norm='ma'"),  # type: ignore[arg-type]
        ("ppo", PPO(value_norm_beta=1.0), "value_norm_beta=1.0"),
        ("ppo", PPO(value_norm_eps=0.0), "value_norm_eps=0.0"),
        ("ppo", PPO(value_eps_clip=0.0), "the critic could not change"),
        ("ppo", PPO(lam=-0.1), "lam=-0.1 must be from 0 to 1"),
        ("grpo", GRPO(generate=ONE), "group_size=1 must be at least 2"),
        ("grpo", GRPO(old_logprobs="both"), "old_logprobs='both' must be one of auto, recompute, rollout"),  # type: ignore[arg-type]
        (
            "grpo",
            GRPO(rollout_is="truncate"),
            "rollout_is='truncate' must be one of auto, none, token_truncate, token_",
        ),  # type: ignore[arg-type]
        (
            "grpo",
            GRPO(rollout_is="token_mask", old_logprobs="rollout"),
            "rollout_is=token_mask has no effect with old_",
        ),
        ("grpo", GRPO(rollout_is="token_mask", rollout_is_threshold=0.0), "rollout_is_threshold=0.0 must be above 0"),
        ("grpo", GRPO(rollout_is_threshold=3.0), "rollout_is_threshold=3.0 has no effect without rollout_is"),
        ("grpo", GRPO(kl_estimator="k4"), "kl_estimator='k4'"),  # type: ignore[arg-type]
        ("grpo", GRPO(overlong_buffer=65), "overlong_buffer=65 must be from 0 to generate.max_new_tokens=64"),
        ("grpo", GRPO(aggregation="mean"), "aggregation='mean'"),  # type: ignore[arg-type]
        ("rloo", RLOO(generate=ONE), "group_size=1 must be at least 2"),
        ("reinforce++", ReinforcePlusPlus(gamma=2.0), "gamma=2.0"),
        ("distillation", OnPolicyDistillation(kl=0.1), "the teacher is the reference"),
        ("distillation", OnPolicyDistillation(reward_bias=1.0), "reward_bias=1.0 has no effect on rewards"),
        ("remax", ReMax(generate=GROUP), "generate.group_size=3: ReMax samples one"),
    ],
)
def test_invalid_options(algorithm: str, options: Options, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build_graph(algorithm, options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_defaults_are_valid(algorithm: str) -> None:
    build_graph(algorithm, ALGORITHMS[algorithm].options())


def test_a_bound_may_be_infinite() -> None:
    infinite = float("inf")
    build_graph("ppo", PPO(eps_high=infinite, value_eps_clip=infinite, max_reward_clip=infinite))


# Mini-batches


@pytest.mark.parametrize("samples, mini_batches, of_unit", [(12, 5, 1), (12, 5, 2), (7, 7, 1), (3, 5, 1), (12, 1, 4)])
def test_mini_batches_divide_the_samples(samples: int, mini_batches: int, of_unit: int) -> None:
    batches = [mini_batch_ids(samples, mini_batches, number, of_unit) for number in range(mini_batches)]
    assert [i for batch in batches for i in batch] == list(range(samples))
    assert all(batch.start % of_unit == 0 for batch in batches)
    sizes = [len(batch) // of_unit for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    found = mini_batch_numbers(range(samples), mini_batches, of_unit, lambda x: x).tolist()
    assert found == [number for number, batch in enumerate(batches) for _ in batch]


# Steps


def number(tokens: Tensor, seed: int) -> Tensor:
    """Return pseudo-random numbers, (tokens,)."""
    places = torch.arange(1.0, len(tokens) + 1, dtype=torch.float64)
    return torch.sin(1.7 * tokens.cumsum(0) + 0.3 * seed + places.sqrt()).float()


def generated(prompts: list[Tensor], work: Generate) -> dict[str, list[Tensor]]:
    values: dict[str, list[Tensor]] = {key: [] for key in GENERATED}
    for sample, prompt in enumerate(prompts):
        length = 1 + (5 * sample + int(10 * work.temperature)) % work.max_new_tokens
        tokens = torch.cat((prompt, 1 + (torch.arange(length) * (sample + 3)) % 9))
        mask = torch.zeros(len(tokens))
        mask[len(prompt) - 1 : -1] = 1
        values["tokens"].append(tokens)
        values["mask"].append(mask)
        values["logprobs"].append(mask * number(tokens, 9))
        values["finished"].append(torch.tensor(length < work.max_new_tokens))
        values["prompt_length"].append(torch.tensor(len(prompt)))
    return values


@dataclass
class Walk:
    """A step in this process that simulates `ranks` ranks for functions and for the tokens of a row.

    elsewhere: the log-probability, and the entropy, of each token whose own does not count.
    """

    graph: DataflowGraph
    ranks: int
    elsewhere: float = 0.0

    def run(self, given: Samples) -> tuple[Samples, dict[str, list[dict[str, float]]]]:
        group = self.graph.group_size
        count = len(given) * group
        store = Samples(
            tuple(range(count)),
            {key: [values[i // group] for i in range(count)] for key, values in given.values.items()},
        )
        trained = {}
        for call in self.graph.order:
            if isinstance(call.work, TrainStep):
                trained[call.name] = self._train(store.only(call.inputs), call)
            else:
                store = store.updated(Samples(store.ids, self._give(store.only(call.inputs), call)))
        return store, trained

    def _give(self, samples: Samples, call: ModelCall) -> dict[str, list[Tensor]]:
        work = call.work
        if isinstance(work, Generate):
            values = generated(list(samples["prompt_ids"]), work)
            return {key: values[key.removeprefix("greedy_")] for key in call.outputs}
        if isinstance(work, Inference):
            (tokens,) = (samples[key] for key in call.inputs if key != "mask")
            said = [number(ids, seed=len(call.role)) for ids in tokens]
            if "mask" in call.inputs:
                said = [x.where(mask != 0, self.elsewhere) for x, mask in zip(said, samples["mask"], strict=True)]
            return {call.outputs[0]: [x[-1] if work.head == "score" else x for x in said]}
        assert isinstance(work, Compute)
        weights = [len(tokens) for tokens in samples[call.inputs[0]]]
        parts = [batches[0] for batches in partition(weights, self.ranks, 1, work.unit)]
        functions = [build_function(self.graph, call, rank) for rank in range(self.ranks)]
        result = on_ranks(functions, samples, parts)
        assert set(result.values) == set(call.outputs)
        for key in call.outputs:
            assert all(value.dtype == torch.float32 for value in result[key])
            assert all((value.dim() == 0) == (key in work.scalars) for value in result[key])
        return dict(result.values)  # type: ignore[arg-type]

    def _train(self, samples: Samples, call: ModelCall) -> list[dict[str, float]]:
        assert isinstance(call.work, TrainStep)
        objective = call.work.objective
        metrics = []
        for batch in range(call.work.mini_batches):
            part = samples.of(mini_batch_ids(len(samples), call.work.mini_batches, batch, objective.unit))
            output = torch.cat([number(tokens, seed=len(call.role)).double() for tokens in part["tokens"]])
            if objective.counts:
                output = output.where(torch.cat(list(part[objective.counts])) != 0, self.elsewhere)
            loss, said = minimise(objective, part, output.requires_grad_(), output.abs(), self.ranks, padding=2)
            loss.backward()
            assert output.grad is not None and output.grad.isfinite().all()
            metrics.append({"loss": loss.item(), **said})
        return metrics


def build_function(graph: DataflowGraph, call: ModelCall, rank: int) -> Callable[..., Samples]:
    """Copy functions with state: in a run every rank has its own graph."""
    assert isinstance(call.work, Compute)
    function: Any = call.work.function
    return replace(function) if call.name in stateful(graph) else function


def data(name: str) -> Samples:
    _, options = OPTIONS[name]
    draw = torch.Generator().manual_seed(3)
    ids = [
        torch.randint(1, 9, (2 + i % 3,), generator=draw) for i in range(6 if isinstance(options, PolicyOptions) else 8)
    ]
    values = {
        "prompt_ids": ids,
        "prompt_index": [torch.tensor(i) for i in range(len(ids))],
        "tokens": ids,
        "mask": [torch.ones(len(x)) * (torch.arange(len(x)) < len(x) - 1) for x in ids],
    }
    return Samples(tuple(range(len(ids))), values).only(build_graph(*OPTIONS[name]).given)


@each
def test_a_step_does_not_depend_on_the_number_of_ranks(name: str) -> None:
    graph = build_graph(*OPTIONS[name])
    values, trained = Walk(graph, 1).run(data(name))
    shared_values, shared_trained = Walk(graph, 3).run(data(name))
    for key in values.values:
        torch.testing.assert_close(shared_values[key], values[key], rtol=1e-6, atol=1e-6)
    for call, batches in trained.items():
        for batch, shared in zip(batches, shared_trained[call], strict=True):
            assert shared == pytest.approx(batch, rel=1e-5, abs=1e-6)


@each
def test_log_probabilities_that_do_not_count_change_nothing(name: str) -> None:
    graph = build_graph(*OPTIONS[name])
    values, trained = Walk(graph, 1).run(data(name))
    others, trained_too = Walk(graph, 1, elsewhere=3.0).run(data(name))
    read = {key for call in graph.calls if isinstance(call.work, Inference) for key in call.outputs}
    for key in values.values.keys() - read:
        torch.testing.assert_close(others[key], values[key], rtol=0, atol=0)
    assert trained_too == trained


@pytest.mark.parametrize("name", [name for name, (_, o) in OPTIONS.items() if isinstance(o, PolicyOptions)])
def test_the_first_optimiser_step_starts_at_the_old_policy(name: str) -> None:
    """The models never change here, so every mini-batch must find the log-probabilities of actor_inference."""
    values, trained = Walk(build_graph(*OPTIONS[name]), 1).run(data(name))
    if name == "rloo_rollout":  # what sampled is another function
        assert all(metrics["logprob_difference_max"] > 0.1 for metrics in trained["actor_train"])
        return
    for metrics in trained["actor_train"]:
        assert metrics["importance_ratio"] == pytest.approx(1, rel=1e-5)
        assert metrics.get("clip_fraction", 0) == 0 and metrics["approx_kl"] == pytest.approx(0, abs=1e-9)
        assert metrics["entropy"] > 0
    advantages = torch.cat([a[m != 0] for a, m in zip(values["advantages"], values["mask"], strict=True)])
    assert advantages.isfinite().all() and advantages.any()


def test_sft_is_the_mean_over_the_tokens_of_a_mini_batch() -> None:
    samples, trained = Walk(build_graph(*OPTIONS["sft"]), 1).run(data("sft"))
    for batch, metrics in enumerate(trained["actor_train"]):
        said = [number(samples["tokens"][i], seed=5)[samples["mask"][i] != 0] for i in mini_batch_ids(8, 3, batch)]
        assert metrics["loss"] == pytest.approx(-float(torch.cat(said).double().mean()), rel=1e-6)


def test_dpo_without_a_difference_to_the_reference() -> None:
    """Chosen and rejected are equal, so the loss is log 2."""
    samples = data("dpo")
    twice = {key: [samples[key][i - i % 2] for i in range(8)] for key in ("tokens", "mask")}
    _, trained = Walk(build_graph(*OPTIONS["dpo"]), 1).run(Samples(samples.ids, twice))
    assert [metrics["loss"] for metrics in trained["actor_train"]] == pytest.approx([0.6931471805599453] * 2)
