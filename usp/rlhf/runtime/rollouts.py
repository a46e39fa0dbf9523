"""The rollouts that are begun and not in a step yet: a queue that all ranks know, responses so far on their ranks.

    begin --> go on with all that is begun, until a step's prompts are complete --> end: the others stay, or are dropped

When generation stops depends on tokens alone, not on time, so that a run that is resumed repeats what it did. A
checkpoint holds the responses so far, so that any plan and number of ranks goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from usp.parallel.groups import gather_objects
from usp.rlhf.generation.decoding import GeneratedResponse
from usp.rlhf.generation.partial import NOT_BEGUN, PER_TOKEN, Group, group_samples
from usp.rlhf.generation.turns import EpisodeRecord
from usp.rlhf.graph import DataflowGraph, Generate
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.rollout_queue import BegunPrompt, QueueRules, RolloutQueue, choose
from usp.rlhf.samples import Samples, derived_seed

from .transfer import PROMPTS, StepData, whole_of_parts


@dataclass(frozen=True)
class RolloutOptions:
    """How a run begins and takes rollouts. begun, ahead, steps: see `QueueRules`."""

    prompts: int  # of a step
    begun: float
    ahead: int
    steps: int
    draw: Callable[[Sequence[int]], Samples]  # given values of the prompts with some tickets, in order, on every rank
    seed: int  # of the run


class Rollouts:
    """The begun rollouts of the one generate call of a graph.

    queue: after the last step. states: of all begun prompts by ticket, and each response: its tokens so far, whether it
        is complete, whether it ended by itself, and of an episode `EpisodeRecord.to_extra`. Both are the same on every
        rank.
    """

    def __init__(self, options: RolloutOptions, graph: DataflowGraph, plan: ExecutionPlan) -> None:
        (self.call,) = (call for call in graph.calls if isinstance(call.work, Generate))
        self._options, self._graph, self._plan = options, graph, plan
        blocks = self.begin_step().partition(self.call)
        shares = tuple(sum(map(len, batches)) // graph.group_size for batches in blocks)
        self._rules = QueueRules(shares, options.begun, options.ahead, options.steps)
        layout = plan[self.call.name]
        self._owner = layout.number_of(dist.get_rank()) if dist.get_rank() in layout.ranks else -1
        self._leads = dist.get_rank() in layout.leaders
        self.queue, self.states = RolloutQueue(), dict[int, Sequence[tuple[Any, ...]]]()
        self._groups, self._after = dict[int, Group](), dict[int, Group]()

    def begin_step(self) -> StepData:
        """Return the data of a step whose prompts generation will choose; which samples a rank makes is known."""
        step = StepData(self._graph, self._plan, self._options.prompts * self._graph.group_size)
        step.lengths[PROMPTS] = [0] * step.samples
        step.partition(self.call)
        step.tickets = [0] * step.samples
        return step

    def generate(self, model: RoleModel, step: StepData, ids: Sequence[int]) -> Samples:
        """Go on with this rank's rollouts until as many are complete as a step takes; return its samples."""
        work = self.call.work
        assert isinstance(work, Generate) and step.tickets is not None
        number, begun = step.number, self.queue.begin(self._rules, step.number).of(self._owner)
        new = [each for each in begun if each.ticket not in self._groups]
        groups = self._groups | {each.ticket: self._begun(each, (NOT_BEGUN,) * work.group_size) for each in new}

        def enough(complete: Sequence[int]) -> bool:
            return choose(self._rules, number, begun, complete) is not None

        self._after, complete = model.go_on(groups, work, step.version, enough)
        taken = choose(self._rules, number, begun, complete)
        assert taken is not None
        if not self._leads:
            return Samples((), {})
        for place, ticket in enumerate(taken):
            for sample in ids[place * work.group_size : (place + 1) * work.group_size]:
                step.tickets[sample] = ticket
        return group_samples([self._after[ticket] for ticket in taken], ids, work)

    def know_prompts(self, step: StepData) -> None:
        """Take the given values of the samples of a step, whose tickets all ranks have been told."""
        assert step.tickets is not None
        group = self._graph.group_size
        for key, values in self._options.draw(step.tickets[::group]).values.items():
            step.store[key] = {i: values[i // group] for i in range(step.samples)}
        step.lengths[PROMPTS] = [len(step.store[PROMPTS][i]) for i in range(step.samples)]

    def end(self, step: StepData, spare: Iterable[int]) -> None:
        """Count the rollouts of a step as made. Collective over the world. spare: samples that it has no use for."""
        assert step.tickets is not None
        queue, taken = self.queue.begin(self._rules, step.number), set(step.tickets)
        self.queue = queue.end(self._rules, step.number, taken, {step.tickets[i] for i in spare})
        left = {each.ticket for each in self.queue.begun}
        self._groups = {ticket: group for ticket, group in self._after.items() if ticket in left}
        own = dict[int, list[tuple[Any, ...]]]()
        for at, of in self._groups.items():
            own[at] = [(len(r.tokens), r.complete, r.finished, r.record and r.record.to_extra()) for r in of.responses]
        known = {ticket: of for told in gather_objects(own) for ticket, of in told.items()}
        self.states = {each.ticket: known[each.ticket] for each in self.queue.begun}

    def to_extra(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides `whole`, as JSON values."""
        states = {str(ticket): [list(each) for each in of] for ticket, of in self.states.items()}
        return {"queue": self.queue.to_extra(), "shares": list(self._rules.shares), "states": states}

    def on(self, graph: DataflowGraph, plan: ExecutionPlan, device: torch.device) -> Rollouts:
        """Return what is begun on the ranks of another plan. Collective over the world."""
        moved, whole = Rollouts(self._options, graph, plan), self.whole(device)
        moved.read_extra(self.to_extra())
        moved.fill(whole)
        return moved

    def blank(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return zeros like `whole`; none if nothing is begun."""
        total = sum(tokens for of in self.states.values() for tokens, *_ in of)
        return {key: torch.zeros(total, dtype=dtype, device=device) for key, dtype in PER_TOKEN.items() if total}

    def whole(self, device: torch.device) -> dict[str, Tensor]:
        """Return the responses so far, one after another in the order of `states`, on every rank. Collective."""
        whole = self.blank()
        for key, joined in whole.items():
            for (ticket, k), piece in self._pieces(joined):
                if self._leads and ticket in self._groups:
                    piece.copy_(getattr(self._groups[ticket].responses[k], key))
        return whole_of_parts(whole, device)

    def read_extra(self, extra: Mapping[str, Any]) -> None:
        """Take what `to_extra` returned; `fill` must follow."""
        self.queue = RolloutQueue.from_extra(extra["queue"])
        if tuple(extra["shares"]) != self._rules.shares:
            self.queue = self.queue.dealt(self._rules)
        self.states = {int(ticket): [tuple(each) for each in of] for ticket, of in extra["states"].items()}

    def fill(self, whole: Mapping[str, Tensor]) -> None:
        """Take this rank's responses so far, from those of all ranks."""
        values: dict[tuple[int, int], dict[str, Any]] = {}
        for key, joined in whole.items():
            for place, piece in self._pieces(joined.cpu()):
                values.setdefault(place, {})[key] = piece.clone()
        for each in self.queue.of(self._owner):
            responses = []
            for k, (_, complete, finished, *record) in enumerate(self.states[each.ticket]):
                response = replace(NOT_BEGUN, **values.get((each.ticket, k), {}), finished=finished, complete=complete)
                flat = {key: getattr(response, key).tolist() for key in PER_TOKEN}
                of = EpisodeRecord.from_extra(record[0], flat) if any(record) else None
                responses.append(replace(response, record=of))
            self._groups[each.ticket] = self._begun(each, tuple(responses))

    def _begun(self, prompt: BegunPrompt, responses: tuple[GeneratedResponse, ...]) -> Group:
        drawn = self._options.draw([prompt.ticket])
        seed = derived_seed(self._options.seed, f"rollout/{prompt.ticket}/{prompt.step}")
        (index,) = drawn.values.get("prompt_index", (0,))
        return Group(drawn[PROMPTS][0], seed, responses, int(index))

    def _pieces(self, joined: Tensor) -> list[tuple[tuple[int, int], Tensor]]:
        """Divide what `whole` returns under a key by ticket and number of the response."""
        places = [(ticket, k) for ticket, of in self.states.items() for k in range(len(of))]
        sizes = [tokens for of in self.states.values() for tokens, *_ in of]
        return list(zip(places, joined.split(sizes), strict=True))
