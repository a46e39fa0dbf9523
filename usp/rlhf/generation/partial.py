"""Partial rollouts: responses whose generation stops at a change of weights, and goes on with the new ones.

A response that goes on is a prompt of all tokens so far, whose keys and values are computed again, with the new
weights. A token keeps the log-probability and the version of the weights that wrote it. By our own decoding its noise
depends on its position alone, so under equal weights the tokens are those without a stop. The environments of episodes
wait meanwhile, or work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from usp.rlhf.graph import Generate, generated_keys
from usp.rlhf.samples import Samples, derived_seed

from .decoding import GeneratedResponse
from .generate import RolloutEngine, sample_values

PER_TOKEN = {"tokens": torch.int64, "logprobs": torch.float32, "versions": torch.int64}  # of a response so far
_NOTHING: dict[str, Any] = {key: torch.zeros(0, dtype=dtype) for key, dtype in PER_TOKEN.items()}
NOT_BEGUN = GeneratedResponse(**_NOTHING, finished=False, complete=False)


@dataclass(frozen=True, eq=False)
class Group:
    """A prompt and its responses so far, of episodes with a `record`. seed: of the group. index: of the example."""

    prompt: Tensor
    seed: int
    responses: tuple[GeneratedResponse, ...]
    index: int = 0

    @property
    def complete(self) -> bool:
        return all(each.complete for each in self.responses)


def go_on(
    groups: Mapping[int, Group],
    work: Generate,
    version: int,
    enough: Callable[[Sequence[int]], bool],
    generator: RolloutEngine,
) -> tuple[dict[int, Group], list[int]]:
    """Go on with responses until `enough` groups, or all, are complete. Collective as `Generator.generate`.

    Returns the groups as they are then, and the tickets of the complete ones, the first to complete first.

    Args:
        groups: by ticket. Each has `work.group_size` responses.
        version: of the weights.
        enough: called with the tickets of the complete groups.
    """
    complete = [ticket for ticket in sorted(groups) if groups[ticket].complete]
    begun = [(ticket, k, each) for ticket in sorted(groups) for k, each in enumerate(groups[ticket].responses)]
    places = [(ticket, k) for ticket, k, each in begun if not each.complete]
    if enough(complete):
        places = []
    missing = {ticket: sum(other == ticket for other, _ in places) for ticket, _ in places}

    def ended(number: int) -> bool:
        ticket, _ = places[number]
        missing[ticket] -= 1
        if not missing[ticket]:
            complete.append(ticket)
        return enough(complete)

    more = generator.generate(
        [groups[ticket].prompt for ticket, _ in places],
        work,
        [derived_seed(groups[ticket].seed, k) for ticket, k in places],
        [(ticket * work.group_size + k, groups[ticket].index) for ticket, k in places],
        begun=[groups[ticket].responses[k] for ticket, k in places],
        enough=ended,
    )
    after = {ticket: list(group.responses) for ticket, group in groups.items()}
    for (ticket, k), response in zip(places, more, strict=True):
        before = after[ticket][k].versions
        new = torch.full_like(response.tokens[len(before) :], version)
        written: dict[str, Any] = {"versions": torch.cat((before, new))}
        if response.record:  # all of its turns, as a checkpoint keeps them
            flat = response.record.flat(version)
            written = {key: torch.tensor(values, dtype=PER_TOKEN[key]) for key, values in flat.items()}
        after[ticket][k] = replace(response, **written)
    return {ticket: replace(groups[ticket], responses=tuple(after[ticket])) for ticket in groups}, complete


def group_samples(groups: Sequence[Group], ids: Sequence[int], work: Generate) -> Samples:
    """Return the samples of complete groups, as `generate_samples` does, with the ids of all of their samples."""
    given, own_prompt = (lambda _: NOT_BEGUN.routed), bool(work.episodes and work.episodes.begin)
    pairs = [(group.prompt, each) for group in groups for each in group.responses]
    whole = [(prompt, each.record.response(given, own_prompt) if each.record else each) for prompt, each in pairs]
    samples = [sample_values(*each) for each in whole]
    return Samples(tuple(ids), {key: [sample[key] for sample in samples] for key in generated_keys(work)})
