"""Responses of several turns: what the policy writes, and what its environment answers.

    turn --ask--> environment          other sequences are decoded meanwhile
    answer --tokens, score--> the same sequence goes on as a prompt of all its tokens, or the episode ends

An agent asks first, and for several turns at a time: its episode is a tree of sequences, most often a single branch.

Every rank of a data-parallel group keeps the same records. One of them asks the environments and tells the others what
came. No token is decoded and encoded again: the text of a turn is for the environment alone.

With partial rollouts, the environments of unfinished episodes stay as they are until the next call. In a run that is
resumed their episodes are played again: turns are written as recorded, as long as what they answer to is the same."""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from usp.data.chats import Chat
from usp.rlhf.environments.episodes import Answer, Episodes, score_of_failure
from usp.rlhf.environments.outside import ENVIRONMENT, one_line
from usp.rlhf.samples import derived_seed

from .decoding import GeneratedResponse, Rollout


@dataclass(eq=False)
class Turn:
    """A turn of the policy, whose rollout has all ids before it as a prompt, `new` ones at its end. path: the numbers
    of the turns of its sequence, its own the last. observed: ids of the sequence that count as observations."""

    rollout: Rollout
    new: int
    path: tuple[int, ...] = (0,)
    observed: int = 0


@dataclass(eq=False)
class EpisodeRecord:
    """The turns of an episode. asked: those that the last answer asked for, or why they are refused, in its order;
    missing: how many of them are not over. rewards: of the turns that were answered. begun: in this process. over:
    nothing more follows. script: turns that it has before it is begun, in a run that is resumed."""

    turns: list[Turn] = field(default_factory=list)
    asked: list[Turn | dict[str, Any]] = field(default_factory=list)
    missing: int = 0
    rewards: list[float] = field(default_factory=list)
    score: float = 0.0
    done: bool = False
    begun: bool = False
    over: bool = False
    script: list[Turn] = field(default_factory=list)

    def response(self, routed: Callable[[Rollout], Tensor], own_prompt: bool) -> GeneratedResponse:
        """Return the sequences, one after another: a turn that several begin with is the policy's in the first one
        only. own_prompt: that begins with another prompt than given."""
        tokens, logprobs, owners, branches = list[int](), list[float](), list[int](), list[int]()
        versions = list[int]()
        inner = {at for turn in self.turns for at in turn.path[:-1]}
        for leaf in (turn for number, turn in enumerate(self.turns) if number not in inner):
            begin, written = len(tokens), {*owners}
            for at in leaf.path:
                rollout, owner = self.turns[at].rollout, 0 if at + 1 in written else at + 1
                new = rollout.prompt[len(tokens) - begin :]
                tokens += [*new, *rollout.tokens]
                logprobs += [0.0] * len(new) + [x if owner else 0.0 for x in rollout.logprobs]
                owners += [0] * len(new) + [owner] * len(rollout.tokens)
                versions += [0] * len(new) + (rollout.versions or [0] * len(rollout.tokens))
            branches += [branches[-1] + 1 if branches else 0] * (len(tokens) - begin)
        cut = len(self.turns[0].rollout.prompt) if self.turns else 0
        ids, more = torch.tensor(tokens, dtype=torch.int64), dict[str, Any]()
        if self.turns:
            own = {"prompt": ids[:cut], "branches": torch.tensor(branches)} if own_prompt else {}
            more = {"routed": routed(self.turns[-1].rollout), **own, "versions": torch.tensor(versions[cut:]).long()}
        numbers = torch.tensor(logprobs[cut:], dtype=torch.float32), self.done, torch.tensor(owners[cut:]).long()
        return GeneratedResponse(ids[cut:], *numbers, self.score, self.rewards, self.over, record=self, **more)

    def begin(self, turn: Turn) -> None:
        """Add a turn, with what it has written already by the script."""
        script, self.script = self.script[:1], self.script[1:]
        one = turn.rollout
        if script and (script[0].path, script[0].rollout.prompt) == (turn.path, one.prompt):
            turn.rollout = replace(script[0].rollout.again(one.number), seed=one.seed, before=one.before)
        elif script:
            warnings.warn(f"an episode of the resumed run is new from turn {len(self.turns) + 1} on", stacklevel=1)
            self.script = []
        self.turns.append(turn)

    def again(self, number: int) -> EpisodeRecord:
        """Return a copy that goes on as episode `number` of another call; turns that are over are shared."""
        turns = [one if one.rollout.done else replace(one, rollout=one.rollout.again(number)) for one in self.turns]
        asked = [turns[each.path[-1]] if isinstance(each, Turn) else each for each in self.asked]
        return replace(self, turns=turns, asked=asked, rewards=[*self.rewards], script=[*self.script])

    def flat(self, version: int) -> dict[str, list[Any]]:
        """Return what is new before each turn, and what it wrote, one after another; version: of the weights that wrote
        what the last call did."""
        for rollout in (turn.rollout for turn in self.turns):
            rollout.versions += [version] * (len(rollout.tokens) - len(rollout.versions))
        turns = [*self.turns, *self.script]
        pieces = [(turn.rollout, turn.rollout.prompt[len(turn.rollout.prompt) - turn.new :]) for turn in turns]
        flat: dict[str, list[Any]] = {"tokens": [token for one, new in pieces for token in (*new, *one.tokens)]}
        for key in ("logprobs", "versions"):
            flat[key] = [value for one, new in pieces for value in (*[0] * len(new), *getattr(one, key))]
        return flat

    def to_extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides `flat`, as JSON values."""
        numbers = {name: getattr(self, name) for name in ("rewards", "score", "done", "over")}
        of_turns = [(turn.new, turn.path, turn.rollout) for turn in (*self.turns, *self.script)]
        return {**numbers, "turns": [(new, path, len(r.tokens), r.limit, r.stopped) for new, path, r in of_turns]}

    @staticmethod
    def from_extra(extra: Mapping[str, Any], flat: Mapping[str, list[Any]]) -> EpisodeRecord:
        """Return the record of what `to_extra` and `flat` returned; if it is not over, it begins with these turns."""
        turns, at = list[Turn](), 0
        for new, path, written, limit, stopped in extra["turns"]:
            last = turns[path[-2]].rollout if len(path) > 1 else Rollout([], 0, 0)
            of = slice(at + new, at + new + written)
            prompt = [*last.prompt, *last.tokens, *flat["tokens"][at : of.start]]
            one = Rollout(prompt, 0, limit, flat["tokens"][of], flat["logprobs"][of], stopped=stopped)
            one.versions, at = flat["versions"][of], of.stop
            turns.append(Turn(one, new, tuple(path)))
        return EpisodeRecord(**{**extra, "turns": turns}) if extra["over"] else EpisodeRecord(script=turns)


class Turns:
    """The episodes of `rollouts`, numbered from 0, in a generate call.

    Args:
        samples: (id, prompt_index) of each. groups: by axis, of the ranks that keep the same records. begun, enough:
            see `Generator.generate`. leads: whether this rank, the last one of pp and the first of the others, asks
            the environments. context: the most tokens of a sequence. agents: how many of them run at a time.

    waiting: the numbers of episodes whose answer is awaited. first: rollouts that are decoded at once. ended: whether
        those that are over are `enough`.
    """

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        episodes: Episodes,
        samples: Sequence[tuple[int, int]],
        groups: Mapping[str, dist.ProcessGroup],
        begun: Sequence[GeneratedResponse] | None = None,
        enough: Callable[[int], bool] | None = None,
        *,
        leads: bool,
        context: int,
        agents: int,
    ) -> None:
        known = [EpisodeRecord() for _ in rollouts] if begun is None else [each.record for each in begun]
        self.records = [(each or EpisodeRecord()).again(number) for number, each in enumerate(known)]
        self._limits, self._seeds = [each.limit for each in rollouts], [each.seed for each in rollouts]
        # The seed of an episode that may go on tells its process in other calls, too.
        self._goes_on, self._enough = begun is not None, enough
        self._keys = self._seeds if self._goes_on else [*range(len(rollouts))]
        self._number = {key: number for number, key in enumerate(self._keys)}
        self._episodes, self._samples, self._groups, self._context = episodes, samples, groups, context
        self._processes = episodes.processes if leads else None
        self.waiting, self._later, self.first, self.ended = set[int](), deque[int](), list[Rollout](), False
        live = [number for number, record in enumerate(self.records) if record.begun]
        if self._processes is not None and rollouts:
            self._processes.keep({self._keys[number] for number in live})
        for number, record in enumerate(self.records):
            if episodes.begin is not None and not record.begun:
                self._later.append(number)
                continue
            if not record.turns and episodes.begin is None:
                record.begin(Turn(rollouts[number], len(rollouts[number].prompt)))
            unfinished = [turn.rollout for turn in record.turns if not turn.rollout.done]
            record.missing = len(unfinished)
            self.first += unfinished
            if record.begun and not unfinished:
                self.waiting.add(number)
            elif not unfinished:
                self._ask(number)
        for _ in range(min(agents - len(live), len(self._later))):
            self._ask(self._later.popleft())
        while any(self.records[number].script for number in self.waiting):  # before others go on
            self.first += self.go_on(wait=True)

    def close(self) -> None:
        """End the environments that have not answered, but those of episodes that may go on."""
        if self._processes is not None and not self._goes_on:
            self._processes.keep(())

    def end_turn(self, rollout: Rollout) -> None:
        """Ask the environment of a rollout that has all of its tokens, once it has all that it waits for."""
        self.records[rollout.number].missing -= 1
        if not self.records[rollout.number].missing:
            self._ask(rollout.number)

    def go_on(self, wait: bool) -> list[Rollout]:
        """Return the rollouts that go on after the answers that have come; `wait` for one at least. Collective."""
        answers = [] if self._processes is None else self._processes.answers(wait)
        told = [[self._told(each._replace(number=self._number[each.number])) for each in answers]]
        for axis, group in self._groups.items():  # as tokens are
            dist.broadcast_object_list(told, group=group, group_src=group.size() - 1 if axis == "pp" else 0)
        return [rollout for each in told[0] for rollout in self._follow(each)]

    def responses(self, routed: Callable[[Rollout], Tensor]) -> list[GeneratedResponse]:
        """Return the responses of the episodes. routed: returns the experts of a rollout's tokens."""
        return [each.response(routed, self._episodes.begin is not None) for each in self.records]

    def _sample(self, number: int) -> dict[str, Any]:
        sample, index = self._samples[number]
        return {**self._episodes.sample(index), "sample": sample, "prompt_index": index}

    def _ask(self, number: int) -> None:
        """Send an environment the turns that it waits for."""
        if not self.ended:
            self.waiting.add(number)
        record = self.records[number]
        begun, record.begun = record.begun, True
        if self._processes is None:
            return
        if self._episodes.begin is None:
            said = self._episodes.written(record.turns[-1].rollout.tokens)
        else:
            said = json.dumps([each if isinstance(each, dict) else self._reply(each) for each in record.asked])
        self._processes.ask(self._keys[number], said, None if begun else self._sample(number))

    def _reply(self, turn: Turn) -> dict[str, Any]:
        tokens, ends = turn.rollout.tokens, "stop" if turn.rollout.stopped else "length"
        lengths = {"number": turn.path[-1], "read": len(turn.rollout.prompt), "written": len(tokens)}
        return {"text": self._episodes.written(tokens), "finish": ends, **lengths}

    def _told(self, answer: Answer) -> Answer:
        """Return an answer as every rank is told it. Its observation is what ranks are told of each request; None: the
        episode ends."""
        number, error, blame = answer.number, answer.error, answer.blame
        record, told = self.records[number], list[dict[str, Any]]()
        done = answer.done and not any("refused" in each for each in record.asked if isinstance(each, dict))
        if not (error or answer.done or answer.observation is None):
            agent, chat = self._episodes.begin is not None, self._episodes.examples[self._samples[number][1]].chat
            one = {"after": len(record.turns) - 1, "new": answer.observation}
            requests: Any = json.loads(str(answer.observation)) if agent else [one]
            for each in requests:
                chat = Chat("", [], each["tools"], template=each["template"]) if agent else chat
                try:
                    told.append(self._request(number, each, chat, len(told), len(requests)))
                except Exception as refused:  # of a template or a tokenizer, at a text from outside
                    why = str(refused) if isinstance(refused, ValueError) else one_line(refused)
                    told.append({"refused": why})
                    error, blame = ("", "") if agent else (why, ENVIRONMENT)
        if error:
            failed = {**self._sample(number), "turn": len(record.turns), "error": error, "traceback": answer.traceback}
            last = record.turns[-1].rollout.tokens if record.turns else ()
            failed |= {"response": self._episodes.decode(last), "blame": blame}
            self._episodes.failures.append(failed)
        ends = error or answer.done or not told or (self._episodes.begin is None and "refused" in told[0])
        return Answer(number, None if ends else told, answer.reward, done, error, blame=blame)

    def _request(self, number: int, request: Mapping[str, Any], chat: Any, place: int, shares: int) -> dict[str, Any]:
        """Return what ranks are told of a request: the turn that it goes on from (after, None to begin a sequence), the
        ids that are new, the limit of tokens, and how many of the sequence are `observed`; or why it is `refused`.

        place: among those that came together, as many as `shares`, which get equal ones of the tokens that are left.
        Raises what a template or a tokenizer does.
        """
        new, episodes, record = request["new"], self._episodes, self.records[number]
        before = None if request["after"] is None else record.turns[request["after"]]
        left = (self._limits[number] - sum(len(turn.rollout.tokens) for turn in record.turns)) // shares
        over = left <= 0 or len(record.turns) + place >= episodes.max_turns or episodes.exceeds(new)
        if not over:
            last = before.rollout.tokens if before else ()
            follows = before or isinstance(new, str)  # a text is read alike wherever it stands
            ids = episodes.observe(new, last, chat) if follows else episodes.begin(replace(chat, messages=new))
            observed = len(ids) + (before.observed if before else 0)
            known = len(ids) + (len(before.rollout.prompt) + len(before.rollout.tokens) if before else 0)
            left = min(left, self._context - known, request.get("limit") or left)
            over = left <= 0 or observed > episodes.max_observation_tokens or not known
        if over:
            limits = "--max-turns, --max-new-tokens, --max-observation-tokens or the model's context"
            return {"refused": f"the episode is at its end, by {limits}", "over": True}
        return {"after": request["after"], "ids": ids, "limit": left, "observed": observed}

    def _follow(self, told: Answer) -> list[Rollout]:
        """Count an answer as of `_told`; return the rollouts of the next turns, if there are some."""
        requests: Any = told.observation
        record, number, rollouts = self.records[told.number], told.number, list[Rollout]()
        self.waiting.discard(number)
        record.rewards += [0.0] * (len(record.turns) - len(record.rewards))
        if told.error:
            record.score, record.rewards = score_of_failure(self._episodes.failure, told.blame), []
        elif record.turns:
            record.rewards[-1] += told.reward
            record.score, record.done = record.score + told.reward, told.done
        if requests is None:
            record.over = True
            if self._processes is not None:
                self._processes.end(self._keys[number])
            self.ended |= self._enough is not None and self._enough(number)
            if self.ended:
                self.waiting.clear()
            elif self._later:
                self._ask(self._later.popleft())
            return []
        record.asked = []
        for each in requests:
            if "refused" in each:
                record.asked.append(each)
                continue
            rollout, path = Rollout(each["ids"], self._seeds[number], each["limit"], number=number), tuple[int, ...]()
            if each["after"] is not None:
                last, path = record.turns[each["after"]].rollout, record.turns[each["after"]].path
                rollout.prompt = [*last.prompt, *last.tokens, *each["ids"]]
                rollout.seed, rollout.before = last.seed, last.before + len(last.tokens) + len(each["ids"])
            if any(turn.path[:-1] == path for turn in record.turns):  # equal requests get other replies
                rollout.seed = derived_seed(self._seeds[number], len(record.turns))
            record.begin(Turn(rollout, len(each["ids"]), (*path, len(record.turns)), each["observed"]))
            record.asked.append(record.turns[-1])
            if not record.turns[-1].rollout.done:
                rollouts.append(record.turns[-1].rollout)
        record.missing = len(rollouts)
        if not rollouts:
            self._ask(number)
        return rollouts
