"""Rewards from user functions: their arguments, and the record of a sample for which they fail."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.usp.rlhf.simulate import alone, on_ranks
from usp.rlhf.algorithms.rewards import RewardFailed, RewardShape, ScoreWith
from usp.rlhf.environments.episodes import Processes
from usp.rlhf.environments.ready_rewards import REWARD
from usp.rlhf.samples import Samples
from usp.run.failures import load_from_file

ANSWERS = ("a", "bb", "ccc")


def make() -> Samples:
    """Three samples: prompts of 1, 2 and 3 tokens, responses of 2, 1 and none."""
    tokens = ([1, 11, 12], [2, 3, 13], [4, 5, 6])
    return Samples(
        (4, 5, 9),
        {
            "tokens": [torch.tensor(ids) for ids in tokens],
            "prompt_length": [torch.tensor(length) for length in (1, 2, 3)],
            "prompt_index": [torch.tensor(index) for index in (2, 0, 1)],
        },
    )


def text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def score_with(reward: Callable[[Any, Any, Any], Any], **options: Any) -> ScoreWith:
    return ScoreWith(reward, options.pop("decode", text), ANSWERS.__getitem__, **options)


def test_the_function_gets_prompt_response_and_answer() -> None:
    seen = []

    def reward(prompt: str, response: str, answer: str) -> float:
        seen.append((prompt, response, answer))
        return len(response) / 2

    result = score_with(reward)(make(), alone)
    assert seen == [("1", "11 12", "ccc"), ("2 3", "13", "a"), ("4 5 6", "", "bb")]
    assert result.ids == (4, 5, 9) and [float(x) for x in result["score"]] == [2.5, 1.0, 0.0]
    assert all(x.dtype == torch.float32 and x.shape == () for x in result["score"])
    assert not len(score_with(reward)(make().of(()), alone))

    seen.clear()
    greedy = {f"greedy_{key}": make()[key] for key in ("tokens", "prompt_length")}
    samples = Samples((4, 5, 9), {**greedy, "prompt_index": make()["prompt_index"]})
    function = score_with(reward, decode=list, prefix="greedy_")
    assert function(samples.only(function.inputs), alone).values.keys() == {function.output} == {"greedy_score"}
    assert seen[0] == ([1], [11, 12], "ccc")


@pytest.mark.parametrize("apart", [False, True])
def test_a_function_that_takes_the_row_gets_the_line_of_the_data(apart: bool, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def longest(prompt, response, answer, *, row):\n    return row['most']\n")
    reward = load_from_file(name := f"{tmp_path / 'rewards.py'}:longest", "function")
    pool = Processes(REWARD, 60.0, {"reward": name}) if apart else None
    with closing(pool) if pool else nullcontext():
        result = score_with(reward, pool=pool, row=lambda index: {"most": index / 4})(make(), alone)
    assert [float(x) for x in result["score"]] == [0.5, 0.0, 0.25]


@pytest.mark.parametrize("number", [True, 1, 1.0, np.float32(1), np.int64(1), Fraction(1)])
def test_numbers_of_all_kinds(number: Any) -> None:
    result = score_with(lambda *_: number)(make(), alone)
    assert [float(x) for x in result["score"]] == [1.0] * 3


@pytest.mark.parametrize(
    "said", [math.nan, math.inf, -math.inf, 1e300, None, "1", [1.0], 1j, torch.tensor(1.0)], ids=repr
)
def test_results_that_are_not_finite_numbers(said: Any) -> None:
    function = score_with(lambda prompt, response, answer: said if answer == "a" else 0.0)
    with pytest.raises(
        RewardFailed, match=r"failed for sample 5 \(prompt_index 0\): it returned .*; it must"
    ) as failed:
        function(make(), alone)
    record = json.loads(json.dumps(failed.value.record))
    assert record == {
        "sample": 5,
        "prompt_index": 0,
        "prompt_ids": [2, 3],
        "response_ids": [13],
        "prompt": "2 3",
        "response": "13",
        "answer": "a",
        "error": f"it returned {said!r}",
        "traceback": "",
        "blame": "reward",
    }


def test_an_exception_is_kept_with_its_sample() -> None:
    def reward(prompt: str, response: str, answer: str) -> float:
        return 1 / (len(answer) - 2)

    with pytest.raises(RewardFailed, match=r"sample 9 .*it raised ZeroDivisionError: ") as failed:
        score_with(reward)(make(), alone)
    record = failed.value.record
    assert "1 / (len(answer) - 2)" in record["traceback"] and "ZeroDivisionError" in record["error"]
    assert json.loads(json.dumps(record))["prompt_ids"] == [4, 5, 6]


def test_numbers_too_large_for_a_float() -> None:
    with pytest.raises(RewardFailed, match="it raised OverflowError"):
        score_with(lambda *_: 10**400)(make(), alone)


def test_the_rank_that_sees_it_raises() -> None:
    function = score_with(lambda prompt, response, answer: 1 / 0 if answer == "bb" else 0.0)
    with pytest.raises(RewardFailed, match="sample 9"):
        on_ranks([function, function], make(), [(4, 5), (9,)])


@pytest.mark.parametrize("failure", ["zero", "drop", "stop"])
def test_a_sample_that_fails_again_is_recorded_and_has_no_score(failure: Any) -> None:
    calls: list[str] = []

    def reward(prompt: str, response: str, answer: str) -> float:
        calls.append(answer)
        if answer == "bb" or calls.count("a") == 1 == len(calls) - calls.index("a"):
            raise SystemExit("the judge has left")
        return 1.0

    function = score_with(reward, retries=2, pause=0.0, failure=failure)
    scores = [float(x) for x in function(make(), alone)["score"]]
    assert calls == ["ccc", "a", "bb", "a", "bb", "bb"]
    assert scores[:2] == [1, 1] and (scores[2] == 0 if failure == "zero" else math.isnan(scores[2]))
    (record,) = function.failures
    assert (record["sample"], record["error"]) == (9, "it raised SystemExit: the judge has left")


def test_an_interrupt_is_not_caught() -> None:
    def reward(prompt: str, response: str, answer: str) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_with(reward)(make(), alone)


def test_the_shape_of_rewards() -> None:
    score = [torch.tensor(x) for x in (0.0, 1.0, 2.0, 30.0, -30.0)]
    finished = [torch.tensor(x) for x in (True, True, False, True, False)]
    lengths = torch.tensor([1, 6, 8, 10, 12])

    def shaped(shape: RewardShape) -> list[float]:
        return shape(score, finished, lengths).tolist()

    assert shaped(RewardShape()) == [0, 1, 2, 30, -30] and not RewardShape().clips(score).any()
    assert RewardShape(bias=1, scaling=2, max_clip=5).clips(score).tolist() == [False, False, False, True, True]
    assert shaped(RewardShape(bias=1, scaling=2, max_clip=5)) == [-2, 0, 2, 5, -5]
    assert shaped(RewardShape(zero_unfinished=True)) == [0, 1, 0, 30, 0]
    # the penalty grows over the last 4 of 10 tokens (DAPO, equation 13)
    assert shaped(RewardShape(overlong_buffer=4, max_tokens=10)) == [0, 1, 1.5, 29, -31]
    assert shaped(RewardShape(overlong_buffer=4, max_tokens=10, overlong_penalty=2)) == [0, 1, 1, 28, -32]
