"""Rewards from a user's function, and the shaping that every reward gets."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, cast

import torch
from torch import Tensor

from usp.rlhf.environments.episodes import Processes, score_of_failure
from usp.rlhf.environments.outside import ENVIRONMENT, REWARD_CODE, TEXT, Unscored, clean, one_line
from usp.rlhf.environments.ready_rewards import READY_REWARDS, from_spec, score
from usp.rlhf.graph import Reduce
from usp.rlhf.samples import Samples
from usp.run.failures import UserCodeFailed, load_from_file

from .response_rows import scalars

# reward(prompt, response, answer[, row]) -> a finite number; prompt and response as `ScoreWith.decode` gives them
RewardFunction = Callable[..., float]
_Asked = tuple[Any, Mapping[str, Any]]  # a response, and the sample that it is of, as `Environment.reset` gets one
_Tried = tuple[Tensor, str, str, str]  # a score; or why there is none, the traceback, and whose fault it is


def load_reward_function(name: str) -> RewardFunction:
    """Return the ready function of a name, or the function that PATH.py:NAME names. Raises ValueError for another name,
    a file that cannot be imported, a missing function or package, or a machine that lacks what the function needs."""
    if name.partition("=")[0] in READY_REWARDS:
        function = from_spec(name, READY_REWARDS)
        getattr(function, "check", lambda: None)()
        return function
    function = load_from_file(name, "function")
    if not callable(function):
        raise ValueError(f"{name} must be a function, got a {type(function).__name__}")
    return cast(RewardFunction, function)


class RewardFailed(UserCodeFailed):
    """A reward function raised, or did not return a finite number; or the environment of an episode failed.

    record: the sample as JSON values: sample, prompt_index, prompt_ids, response_ids, prompt, response, answer, error
    (one line), traceback (empty if it did not raise) and blame, whose fault it is (see `outside`).
    """

    def __init__(self, record: dict[str, Any]) -> None:
        sample = f"sample {record['sample']} (prompt_index {record['prompt_index']})"
        turn = f" (in turn {record['turn']})" if "turn" in record else ""  # of an episode
        if record["blame"] == TEXT:
            super().__init__(f"what the policy wrote leaves {sample} without a score: {record['error']}{turn}")
        else:
            needs = turn or "; it must return a finite number for every response"
            who = "environment" if record["blame"] == ENVIRONMENT else "reward function"
            super().__init__(f"the {who} failed for {sample}: {record['error']}{needs}")
        self.record = record


@dataclass(frozen=True)
class ScoreWith:
    """Function of samples: `score` from a function of prompt, response and answer.

    Attributes:
        reward: reward(prompt, response, answer), called once per sample, and again where it fails.
        decode: converts ids to the arguments of `reward`: a tokenizer's decode for text, `list` for ids.
        answer: maps prompt_index to the third argument. row: maps it to the line of the data, for functions with a
            parameter of that name; they get prompt and answer where it is empty.
        prefix: of the keys tokens, prompt_length and score: "greedy_" for a second response to the same prompt.
        retries: further calls for samples for which the function fails, `pause` seconds after the first calls, and
            twice as many after each further ones.
        failure: what then becomes of the sample. raise: `RewardFailed` is raised at once, only on this rank. The
            others record it in `failures`, and its score is that of `score_of_failure`.
        failures: the samples that failed since the last step was recorded, as `RewardFailed.record`.
        pool: processes that call the function instead of this one, `workers` at a time; a call that takes too long
            fails.
    """

    reward: RewardFunction
    decode: Callable[[list[int]], Any]
    answer: Callable[[int], Any]
    prefix: str = ""
    retries: int = 0
    pause: float = 1.0
    failure: Literal["raise", "stop", "zero", "drop"] = "raise"
    failures: list[dict[str, Any]] = field(default_factory=list)
    pool: Processes | None = None
    workers: int = 1
    row: Callable[[int], Mapping[str, Any]] = lambda index: {}

    @property
    def inputs(self) -> tuple[str, ...]:
        return f"{self.prefix}tokens", f"{self.prefix}prompt_length", "prompt_index"

    @property
    def output(self) -> str:
        return f"{self.prefix}score"

    def __call__(self, samples: Samples, reduce: Reduce) -> Samples:
        """Score samples. Raises RewardFailed at the first sample without a finite score, if `failure` is "raise"."""
        asked: list[_Asked] = []
        for tokens, prompt_length, prompt_index in zip(*(samples[key] for key in self.inputs), strict=True):
            ids, cut, index = tokens.tolist(), int(prompt_length), int(prompt_index)
            texts = {"prompt": self.decode(ids[:cut]), "answer": self.answer(index)}
            asked.append((self.decode(ids[cut:]), {**texts, "row": self.row(index) or texts}))
        scores = []
        for number, (found, *failed) in enumerate(self._tried(asked)):
            scores.append(self._failed(samples, number, asked[number], *failed) if failed[0] else found)
        return Samples(samples.ids, {self.output: scores})

    def _tried(self, samples: Sequence[_Asked]) -> list[_Tried]:
        """Return what calls return, with retries of those that fail."""
        tried: dict[int, _Tried] = {}
        missing = list(range(len(samples)))
        for failed in range(1 + self.retries):
            if failed and missing:
                time.sleep(self.pause * 2 ** (failed - 1))
            asked = [samples[number] for number in missing]
            tried |= zip(missing, map(self._try, asked) if self.pool is None else self._in_pool(asked), strict=True)
            missing = [number for number in missing if tried[number][1] and tried[number][3] != TEXT]
        return [tried[number] for number in range(len(samples))]

    def _in_pool(self, samples: Sequence[_Asked]) -> list[_Tried]:
        assert self.pool is not None
        answers = self.pool.answer_all(samples, self.workers)
        return [(torch.tensor(each.reward), each.error, each.traceback, each.blame) for each in answers]

    def _failed(self, samples: Samples, number: int, asked: _Asked, error: str, trace: str, blame: str) -> Tensor:
        """Record a failure, and return its score. Raises RewardFailed if `failure` is "raise"."""
        tokens, prompt_length, prompt_index = (samples[key][number] for key in self.inputs)
        response, sample = asked
        failure = RewardFailed(
            {
                "sample": samples.ids[number],
                "prompt_index": int(prompt_index),
                "prompt_ids": tokens[: int(prompt_length)].tolist(),
                "response_ids": tokens[int(prompt_length) :].tolist(),
                **{name: str(text) for name, text in {**sample, "response": response}.items() if name != "row"},
                "error": error,
                "traceback": trace,
                "blame": blame,
            }
        )
        if self.failure == "raise":
            raise failure
        self.failures.append(failure.record)
        return torch.tensor(score_of_failure(self.failure, blame))

    def _try(self, asked: _Asked) -> _Tried:
        nothing, (response, sample) = torch.tensor(math.nan), asked
        try:
            returned = score(self.reward, sample, response)
            found = torch.tensor(float(returned) if isinstance(returned, Real) else math.nan, dtype=torch.float32)
        except (Exception, SystemExit) as raised:  # SystemExit would end this rank without a word
            blame = TEXT if isinstance(raised, Unscored) else REWARD_CODE
            return nothing, f"it raised {one_line(raised)}", clean(traceback.format_exc()), blame
        return (found, "", "", "") if found.isfinite() else (nothing, f"it returned {returned!r:.200}", "", REWARD_CODE)


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
