"""Rewards from a user's function, and the shaping that every reward gets."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from usp.rlhf.graph import Reduce
from usp.rlhf.samples import Samples
from usp.run.failures import UserCodeFailed, load_from_file

from .response_rows import scalars

# reward(prompt, response, answer) -> a finite number; prompt and response as `ScoreWith.decode` gives them
RewardFunction = Callable[[Any, Any, Any], float]


def match(prompt: str, response: str, answer: str) -> float:
    """Return 1 if the response is the answer up to surrounding whitespace, else 0."""
    return float(response.strip() == answer.strip())


def load_reward_function(name: str) -> RewardFunction:
    """Return `match`, or the function that PATH.py:NAME names.

    Raises ValueError for another name, a file that cannot be imported, or a missing function.
    """
    if name == "match":
        return match
    function = load_from_file(name, "function")
    if not callable(function):
        raise ValueError(f"{name} must be a function, got a {type(function).__name__}")
    return function


class RewardFailed(UserCodeFailed):
    """A reward function raised, or did not return a finite number; or the environment of an episode failed.

    record: the sample as JSON values: sample, prompt_index, prompt_ids, response_ids, prompt, response, answer, error
    (one line) and traceback (empty if it did not raise).
    """

    def __init__(self, record: dict[str, Any]) -> None:
        who, needs = "reward function", "; it must return a finite number for every response"
        if "turn" in record:  # of an episode
            who, needs = "environment", f" (in turn {record['turn']})"
        sample = f"sample {record['sample']} (prompt_index {record['prompt_index']})"
        super().__init__(f"the {who} failed for {sample}: {record['error']}{needs}")
        self.record = record


@dataclass(frozen=True)
class ScoreWith:
    """Function of samples: `score` from a function of prompt, response and answer.

    Attributes:
        reward: reward(prompt, response, answer), called once per sample, and again where it fails.
        decode: converts ids to the arguments of `reward`: a tokenizer's decode for text, `list` for ids.
        answer: maps prompt_index to the third argument.
        prefix: of the keys tokens, prompt_length and score: "greedy_" for a second response to the same prompt.
        retries: further calls for a sample for which the function fails, `pause` seconds after the first failure, and
            twice as many after each further one.
        failure: what then becomes of the sample. raise: `RewardFailed` is raised at once, only on this rank. The
            others record it in `failures`; its score is 0 (zero), or nan: the sample is no part of the step (drop), or
            the step must not train (stop).
        failures: the samples that failed since the last `take_failures`, as `RewardFailed.record`.
    """

    reward: RewardFunction
    decode: Callable[[list[int]], Any]
    answer: Callable[[int], Any]
    prefix: str = ""
    retries: int = 0
    pause: float = 1.0
    failure: Literal["raise", "stop", "zero", "drop"] = "raise"
    failures: list[dict[str, Any]] = field(default_factory=list)

    def take_failures(self) -> list[dict[str, Any]]:
        """Return `failures`, and forget them."""
        taken = list(self.failures)
        self.failures.clear()
        return taken

    @property
    def inputs(self) -> tuple[str, ...]:
        return f"{self.prefix}tokens", f"{self.prefix}prompt_length", "prompt_index"

    @property
    def output(self) -> str:
        return f"{self.prefix}score"

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        """Score samples. Raises RewardFailed at the first sample without a finite score, if `failure` is "raise"."""
        scores = [
            self._score(*of_sample)
            for of_sample in zip(samples.ids, *(samples[key] for key in self.inputs), strict=True)
        ]
        return Samples(samples.ids, {self.output: scores})

    def _score(self, sample: int, tokens: Tensor, prompt_length: Tensor, prompt_index: Tensor) -> Tensor:
        ids, cut, index = tokens.tolist(), int(prompt_length), int(prompt_index)
        texts = self.decode(ids[:cut]), self.decode(ids[cut:]), self.answer(index)
        for failed in range(1 + self.retries):
            if failed:
                time.sleep(self.pause * 2 ** (failed - 1))
            score, error, trace = self._try(*texts)
            if not error:
                return score
        failure = RewardFailed(
            {
                "sample": sample,
                "prompt_index": index,
                "prompt_ids": ids[:cut],
                "response_ids": ids[cut:],
                **{name: str(text) for name, text in zip(("prompt", "response", "answer"), texts, strict=True)},
                "error": error,
                "traceback": trace,
            }
        )
        if self.failure == "raise":
            raise failure
        self.failures.append(failure.record)
        return torch.tensor(0.0 if self.failure == "zero" else math.nan)

    def _try(self, prompt: Any, response: Any, answer: Any) -> tuple[Tensor, str, str]:
        """Return the score, why it is none, and the traceback; the latter two are empty for a score."""
        nothing = torch.tensor(math.nan)
        try:
            returned = self.reward(prompt, response, answer)
            score = torch.tensor(float(returned) if isinstance(returned, Real) else math.nan, dtype=torch.float32)
        except (Exception, SystemExit) as raised:  # SystemExit would end this rank without a word
            return nothing, f"it raised {type(raised).__name__}: {raised}", traceback.format_exc()
        return (score, "", "") if score.isfinite() else (nothing, f"it returned {returned!r}", "")


@dataclass(frozen=True)
class RewardShape:
    """clip((score - bias) * scaling, -max_clip, max_clip), less a penalty on overlong responses.

    Attributes:
        max_clip: bound of a reward; inf: none.
        zero_unfinished: replace the reward of a response without a stop id by 0.
        overlong_buffer: the penalty grows linearly from 0 to `overlong_penalty` over the last `overlong_buffer` of
            `max_tokens` tokens (DAPO, arXiv 2503.14476, equation 13); 0: no penalty.
    """

    bias: float = 0.0
    scaling: float = 1.0
    max_clip: float = math.inf
    zero_unfinished: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    max_tokens: int = 0

    def __call__(self, score: Sequence[Tensor], finished: Sequence[Tensor], lengths_N: Tensor) -> Tensor:
        """Return the shaped rewards, (N,) float64."""
        reward_N = self._scaled(score).clamp(-self.max_clip, self.max_clip)
        if self.zero_unfinished:
            reward_N = reward_N * scalars(finished)
        if self.overlong_buffer:
            excess_N = (lengths_N - (self.max_tokens - self.overlong_buffer)).clamp(min=0) / self.overlong_buffer
            reward_N = reward_N - self.overlong_penalty * excess_N.clamp(max=1)
        return reward_N

    def clips(self, score: Sequence[Tensor]) -> Tensor:
        """Return which scores `max_clip` changes, (N,) bool."""
        return self._scaled(score).abs() > self.max_clip

    def _scaled(self, score: Sequence[Tensor]) -> Tensor:
        return (scalars(score) - self.bias) * self.scaling
