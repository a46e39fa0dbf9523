"""Responses of several turns: what the policy writes, and what its environment answers.

    turn --ask--> environment          other sequences are decoded meanwhile
    answer --tokens, score--> the same sequence goes on as a prompt of all its tokens, or the episode ends

Every rank of a data-parallel group keeps the same records. One of them asks the environments and tells the others what
came. No token is decoded and encoded again: the text of a turn is for the environment alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from usp.rlhf.environments.episodes import Answer, Episodes, score_of_failure
from usp.rlhf.environments.outside import ENVIRONMENT, one_line

from .decoding import GeneratedResponse, Rollout


class Told(NamedTuple):
    """What every rank is told of an answer: ids that the policy reads (None: the episode is done), or that they are too
    many, and the reward; or why there is none, and whose fault it is."""

    number: int
    ids: list[int] | None
    reward: float = 0.0
    error: str = ""
    blame: str = ""
    over: bool = False


@dataclass(eq=False)
class EpisodeRecord:
    """A response so far. last: the rollout of the last turn. owners: the turn that each token belongs to, from 1; 0 for
    the environment's. rewards: of the turns that were answered."""

    last: Rollout
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    score: float = 0.0
    done: bool = False

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], turn: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.owners += [turn] * len(tokens)


class Turns:
    """The episodes of `rollouts`, numbered from 0, in a generate call.

    Args:
        samples: (id, prompt_index) of each. groups: by axis, of the ranks that keep the same records. leads: whether
            this rank, the last one of pp and the first of the others, asks the environments. context: the most tokens
            of a sequence.

    waiting: rollouts whose environment has not answered, by number.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        episodes: Episodes,
        samples: Sequence[tuple[int, int]],
        groups: Mapping[str, dist.ProcessGroup],
        *,
        leads: bool,
        context: int,
    ) -> None:
        self.records = [EpisodeRecord(rollout) for rollout in rollouts]
        self.waiting: dict[int, Rollout] = {}
        self._limits = [rollout.limit for rollout in rollouts]
        self._episodes, self._samples, self._groups, self._context = episodes, samples, groups, context
        self._processes = episodes.processes if leads else None

    def close(self) -> None:
        """End the environments that have not answered."""
        if self._processes is not None:
            self._processes.stop()

    def end_turn(self, rollout: Rollout) -> None:
        """Ask the environment of a rollout that has all of its tokens."""
        record = self.records[rollout.number]
        record.turns += 1
        record.last = rollout
        record.add(rollout.tokens, rollout.logprobs, record.turns)
        self.waiting[rollout.number] = rollout
        if self._processes is not None:
            sample = self._sample(rollout.number) if record.turns == 1 else None
            self._processes.ask(rollout.number, self._episodes.decode(rollout.tokens), sample)

    def go_on(self, wait: bool) -> list[Rollout]:
        """Return the rollouts that go on after the answers that have come; `wait` for one at least. Collective."""
        told = [[] if self._processes is None else [self._told(each) for each in self._processes.answers(wait)]]
        for axis, group in self._groups.items():  # as tokens are
            dist.broadcast_object_list(told, group=group, group_src=group.size() - 1 if axis == "pp" else 0)
        following = [self._follow(each) for each in told[0]]
        return [rollout for rollout in following if rollout is not None]

    def responses(self, routed: Callable[[Rollout], Tensor]) -> list[GeneratedResponse]:
        """Return the responses of the episodes. routed: returns the experts of a rollout's tokens."""
        return [
            GeneratedResponse(
                torch.tensor(each.tokens),
                torch.tensor(each.logprobs, dtype=torch.float32),
                each.done,
                torch.tensor(each.owners),
                each.score,
                each.rewards,
                routed=routed(each.last),
            )
            for each in self.records
        ]

    def _sample(self, number: int) -> dict[str, Any]:
        sample, index = self._samples[number]
        return {**self._episodes.sample(index), "sample": sample, "prompt_index": index}

    def _told(self, answer: Answer) -> Told:
        rollout, error, blame, ids = self.waiting[answer.number], answer.error, answer.blame, None
        over = bool(answer.observation) and self._episodes.exceeds(answer.observation or "")
        if not (error or answer.done or over):
            assert answer.observation is not None
            chat = self._episodes.examples[self._samples[answer.number][1]].chat
            try:
                ids = self._episodes.observe(answer.observation, rollout.tokens, chat)
            except Exception as refused:  # of a template or a tokenizer, at a text from outside
                error, blame = str(refused) if isinstance(refused, ValueError) else one_line(refused), ENVIRONMENT
        if error:
            record = {**self._sample(answer.number), "turn": self.records[answer.number].turns, "error": error}
            record |= {"traceback": answer.traceback, "response": self._episodes.decode(rollout.tokens), "blame": blame}
            self._episodes.failures.append(record)
        return Told(answer.number, ids, answer.reward, error, blame, over and not answer.done)

    def _follow(self, told: Told) -> Rollout | None:
        """Count an answer; return the rollout of the next turn, if there is one."""
        rollout, record = self.waiting.pop(told.number), self.records[told.number]
        if told.error:
            record.score, record.rewards = score_of_failure(self._episodes.failure, told.blame), []
        else:
            record.rewards.append(told.reward)
            record.score += told.reward
            record.done = told.ids is None and not told.over
        ids = told.ids or []
        prompt = [*rollout.prompt, *rollout.tokens, *ids]
        observed = record.owners.count(0)
        left = min(self._limits[told.number] - len(record.owners) + observed, self._context - len(prompt))
        observed += len(ids)
        over = told.over or observed > self._episodes.max_observation_tokens
        over |= record.turns == self._episodes.max_turns or left <= 0
        if told.error or record.done or over:
            if self._processes is not None:
                self._processes.end(told.number)
            return None
        record.add(ids, [0.0] * len(ids), 0)
        return Rollout(prompt, rollout.seed, left, number=told.number, before=len(record.tokens))
