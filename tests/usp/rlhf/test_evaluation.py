"""Evaluations score current weights, the same under every plan, and leave training as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from tests.harness.ranks import RankPool
from tests.usp.rlhf.runtime.test_executor import executor, plans
from tests.usp.rlhf.toy import VOCABULARY, Alone, SharingModel, ppo, prompts, respond
from usp.parallel import ProcessGroups
from usp.rlhf.algorithms.rewards import ScoreWith
from usp.rlhf.config import RlhfConfig
from usp.rlhf.datasets import Example, FileExamples, hold_out
from usp.rlhf.evaluation import Evaluator, _evaluated, evaluation_metrics, evaluation_step, interval, pass_at_k
from usp.rlhf.graph import Compute, DataflowGraph, Generate, ModelCall
from usp.rlhf.samples import Samples, derived_seed
from usp.train.step import Evaluations

STEPS = 3
CONFIG = RlhfConfig(eval_every=2, eval_samples=4, eval_pass_score=0.5, steps=STEPS, temperature=0.7)
HELD_OUT = [Example(np.arange(1, 2 + number) % VOCABULARY, "") for number in range(5)]


def graph() -> DataflowGraph:
    """PPO's step, whose generate call also tells the lengths of prompts."""

    def told(call: ModelCall) -> ModelCall:
        return replace(call, outputs=(*call.outputs, "prompt_length")) if call.kind == "generate" else call

    made = ppo()
    return replace(made, calls=tuple(told(call) for call in made.calls))


class Measured(SharingModel):
    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        made = super().generate(prompts, work, seed)
        lengths = dict(zip(prompts.ids, map(len, prompts["prompt_ids"]), strict=True))
        told = {"prompt_length": [torch.tensor(lengths[i // work.group_size]) for i in made.ids]}
        return Samples(made.ids, {**made.values, **told})


def run_plans(first: int) -> list[tuple[list[dict[str, float]], list[dict[str, float]]]]:
    """Return the metrics of the steps and evaluations of the plans from the first on, and of the last without
    evaluations."""
    groups, found, every = ProcessGroups(), [], plans(graph())[first:]
    for plan in [*every, every[-1]]:
        made = executor(graph(), plan, groups, build_role=Measured)
        evaluator = Evaluator(CONFIG, made, graph(), plan, HELD_OUT)
        steps, evaluations = [], []
        for number in range(1, STEPS + 1):
            steps.append(made.run_step(prompts(5, number), number=number, seed=number).metrics)
            if evaluator.due(number) and len(found) < len(every):
                evaluations.append(evaluator.run(number)[0])
        found.append((steps, evaluations))
    return found


def sampling(config: RlhfConfig) -> Generate:
    """Return how an evaluation samples."""
    evaluated, _ = evaluation_step(graph(), plans(graph())[0], HELD_OUT, config)
    work = evaluated["actor_generate"].work
    assert isinstance(work, Generate)
    return work


def alone() -> Iterator[dict[str, float]]:
    """Yield the metrics of evaluations in one process."""
    model = Alone()
    work = sampling(CONFIG)
    assert (work.group_size, work.temperature) == (4, 0.7)
    seed = derived_seed(derived_seed(CONFIG.seed, "evaluation"), "actor_generate")
    for number in range(1, STEPS + 1):
        model.step(graph(), prompts(5, number), derived_seed(number, "actor_generate"))
        if number in (2, STEPS):
            numbers: dict[str, dict[int, float]] = {"score": {}, "finished": {}}
            lengths = []
            for i in range(4 * len(HELD_OUT)):
                prompt = torch.from_numpy(HELD_OUT[i // 4].prompt)
                made = respond(lambda tokens: model._logits("actor", tokens), prompt, work, seed, i)
                numbers["score"][i] = float(model._logits("reward", made["tokens"])[-1, 0].float())
                numbers["finished"][i] = float(made["finished"])
                lengths.append(len(made["tokens"]) - len(prompt))
            yield evaluation_metrics(numbers, lengths, 4, CONFIG.eval_pass_score)


@pytest.mark.slow
def test_evaluations_are_those_of_one_process_under_every_plan_and_leave_training_alone(
    ranks: RankPool, exhaustive: bool
) -> None:
    wanted = list(alone())
    assert wanted[0] != wanted[1] and 0 < wanted[0]["eval/pass@1"] < 1
    for *evaluated, (without, none) in ranks.run(run_plans, 8, 0 if exhaustive else 5):
        for _, evaluations in evaluated:
            timeless = [{k: v for k, v in metrics.items() if k != "eval/seconds"} for metrics in evaluations]
            assert timeless == [pytest.approx(metrics, abs=1e-5) for metrics in wanted]
        assert evaluated[-1][0] == without and not none


def test_pass_at_k_is_the_share_of_choices_with_a_pass() -> None:
    for passed in range(6):
        for k in range(1, 6):
            chosen = list(combinations(range(5), k))
            share = sum(any(one < passed for one in choice) for choice in chosen) / len(chosen)
            assert pass_at_k(5, passed, k) == pytest.approx(share)


def test_metrics_group_responses_by_prompt() -> None:
    scores = torch.tensor([0.7, 0.0, 0.0, 1.0, 0.7, 0.1]).tolist()  # float32
    finished = {number: float(number != 5) for number in reversed(range(6))}  # in any order
    numbers = {"score": dict(enumerate(scores)), "finished": finished}
    found = evaluation_metrics(numbers, (1, 2, 3, 4, 5, 9), per_prompt=3, pass_score=0.7)
    ends = {f"eval/pass@{k}_{end}" for k in (1, 2, 3) for end in ("low", "high")}
    assert {name: value for name, value in found.items() if name not in ends} == {
        "eval/score": pytest.approx(2.5 / 6),
        "eval/pass@1": pytest.approx((1 / 3 + 2 / 3) / 2),
        "eval/pass@2": pytest.approx((2 / 3 + 1) / 2),
        "eval/pass@3": 1.0,
        "eval/response_length": 4.0,
        "eval/response_length_max": 9.0,
        "eval/finished": pytest.approx(5 / 6),
    }


def test_each_benchmark_has_metrics_and_the_first_those_without_a_name() -> None:
    numbers = {"score": dict(enumerate([1.0, 0.0, 1.0, 0.0, 0.0, 0.0])), "finished": dict.fromkeys(range(6), 1.0)}
    found = evaluation_metrics(numbers, (1, 2, 3, 4, 5, 9), 2, 1.0, ["math", "code", "math"])
    assert found["eval/math/pass@1"] == found["eval/pass@1"] == 0.25
    assert (found["eval/math/response_length"], found["eval/code/response_length"]) == (17 / 4, 3.5)
    assert found["eval/code/pass@2"] == 1 and found["eval/code/pass@2_low"] > 0.2 and "eval/code/finished" in found


def test_intervals_hold_the_true_mean_in_about_95_of_100_samples() -> None:
    assert interval(0.0, 10) == (0.0, pytest.approx(0.27754, abs=1e-4))  # Wilson's, by R's binom.wilson
    assert interval(0.5, 100) == (pytest.approx(0.40383, abs=1e-4), pytest.approx(0.59617, abs=1e-4))
    passed = np.random.default_rng(0).binomial(30, 0.2, 2000) / 30
    held = [low <= 0.2 <= high for low, high in (interval(share, 30) for share in passed)]
    assert 0.93 < np.mean(held) < 0.98


def test_rewards_get_the_rows_of_evaluated_prompts() -> None:
    def reward(prompt: str, response: str, answer: str, row: dict[str, str]) -> float:
        return float(row["right"] == "evaluated")

    scored = ScoreWith(reward, str, lambda index: "", row=lambda index: {"right": "trained"})
    call = ModelCall("score", "actor", Compute(scored), scored.inputs, (scored.output,))
    prompts = [Example(np.array([1]), "", row='{"right": "evaluated"}')]
    work = _evaluated(call, prompts, CONFIG, {}).work
    assert isinstance(work, Compute) and isinstance(work.function, ScoreWith)
    sample = {"tokens": [torch.tensor([1, 2])], "prompt_length": [torch.tensor(1)], "prompt_index": [torch.tensor(0)]}
    assert work.function(Samples((0,), sample), lambda values: values)["score"] == [1.0]


def test_greedy_is_the_default_of_one_response() -> None:
    config, trained = RlhfConfig(temperature=0.8), graph()["actor_generate"].work
    assert isinstance(trained, Generate)
    assert sampling(config) == replace(trained, group_size=1, temperature=0.0)
    assert sampling(replace(config, eval_samples=8)) == replace(trained, group_size=8, temperature=0.8)
    assert sampling(replace(config, eval_temperature=0.3)).temperature == 0.3


def test_held_out_examples_are_not_trained_on() -> None:
    examples = FileExamples([Example(np.array([number]), "") for number in range(50)])
    rest, held_out = hold_out(examples, 7, seed=3)
    trained, tested = ([int(part[index].prompt[0]) for index in range(len(part))] for part in (rest, held_out))
    assert sorted(trained + tested) == list(range(50)) and len(tested) == 7 and trained == sorted(trained)
    assert hold_out(examples, 7, seed=3)[1] == held_out != hold_out(examples, 7, seed=4)[1]


def test_the_best_evaluation_is_the_first_of_the_highest_score() -> None:
    past = Evaluations("of these prompts", {10: 0.5, 20: 0.9, 30: 0.9, 40: -math.inf}, "scores")
    assert past.best_first() == [20, 30, 10, 40]
    for identity, known in (("of these prompts", past.values), ("of others", {})):
        again = Evaluations(identity, name="scores")
        again.restore(past.to_extra())
        assert again.values == known
