"""Rewards from a function that people write, and what is made of a reward before an algorithm sees it."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Reduce
from usp.run.failures import UserCodeFailed

from .response_rows import scalars

# reward(prompt, response, answer) -> a finite number; prompt and response as `ScoreWith.decode` gives them
RewardFunction = Callable[[Any, Any, Any], float]


class RewardFailed(UserCodeFailed):
    """A reward function raised, or gave what is not a finite number.

    Attributes:
        record: the sample, all plain values: sample, prompt_index, prompt_ids, response_ids, prompt, response, answer,
            error (one line) and traceback (empty if it did not raise).
    """

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(
            f"the reward function failed for sample {record['sample']} (prompt_index {record['prompt_index']}): "
            f"{record['error']}; it must return a finite number for every response"
        )
        self.record = record


@dataclass(frozen=True)
class ScoreWith:
    """A function of samples: their `score` by a function of prompt, response and answer.

    Attributes:
        reward: reward(prompt, response, answer), called once for each sample.
        decode: ids -> what `reward` is given for them: a tokenizer's decode for text, `list` for ids.
        answer: prompt_index -> the third argument.
        prefix: of the keys tokens, prompt_length and score: "greedy_" for a second response to the same prompt.
    """

    reward: RewardFunction
    decode: Callable[[list[int]], Any]
    answer: Callable[[int], Any]
    prefix: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        return f"{self.prefix}tokens", f"{self.prefix}prompt_length", "prompt_index"

    @property
    def output(self) -> str:
        return f"{self.prefix}score"

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        """`output` from `inputs`.

        Raises:
            RewardFailed: at the first sample for which there is no finite number.
        """
        scores = [
            self._score(*of_sample)
            for of_sample in zip(samples.ids, *(samples[key] for key in self.inputs), strict=True)
        ]
        return Samples(samples.ids, {self.output: scores})

    def _score(self, sample: int, tokens: Tensor, prompt_length: Tensor, prompt_index: Tensor) -> Tensor:
        ids, cut, index = tokens.tolist(), int(prompt_length), int(prompt_index)
        prompt, response, answer = self.decode(ids[:cut]), self.decode(ids[cut:]), self.answer(index)
        trace = ""
        try:
            said = self.reward(prompt, response, answer)
            score = torch.tensor(float(said) if isinstance(said, Real) else math.nan, dtype=torch.float32)
        except Exception as raised:
            error, trace = f"it raised {type(raised).__name__}: {raised}", traceback.format_exc()
        else:
            if score.isfinite():
                return score
            error = f"it returned {said!r}"
        raise RewardFailed(
            {
                "sample": sample,
                "prompt_index": index,
                "prompt_ids": ids[:cut],
                "response_ids": ids[cut:],
                "prompt": str(prompt),
                "response": str(response),
                "answer": str(answer),
                "error": error,
                "traceback": trace,
            }
        )


@dataclass(frozen=True)
class RewardShape:
    """clip((score - bias) * scaling, -max_clip, max_clip), and for long responses less.

    Attributes:
        zero_unfinished: a response that did not end with a stop id gets 0 instead.
        overlong_buffer: over the last so many of `max_tokens` tokens a response loses more and more, `overlong_penalty`
            in the end (DAPO, arXiv 2503.14476, equation 13); 0: none does.
    """

    bias: float = 0.0
    scaling: float = 1.0
    max_clip: float = 20.0
    zero_unfinished: bool = False
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    max_tokens: int = 0

    def __call__(self, score: Sequence[Tensor], finished: Sequence[Tensor], lengths_N: Tensor) -> Tensor:
        """(N,) float64."""
        reward_N = ((scalars(score) - self.bias) * self.scaling).clamp(-self.max_clip, self.max_clip)
        if self.zero_unfinished:
            reward_N = reward_N * scalars(finished)
        if self.overlong_buffer:
            excess_N = (lengths_N - (self.max_tokens - self.overlong_buffer)).clamp(min=0) / self.overlong_buffer
            reward_N = reward_N - self.overlong_penalty * excess_N.clamp(max=1)
        return reward_N
