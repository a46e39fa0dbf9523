"""Between prompts as `Samples`, what a generator takes and gives, and responses as `Samples`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from usp.rlhf.data.samples import Samples
from usp.rlhf.data.seeds import derived_seed
from usp.rlhf.graph.calls import Generate


class Generated(Protocol):
    """One response: its tokens (int64) and their log-probabilities (float32), and whether it ended with a stop id."""

    @property
    def tokens(self) -> Tensor: ...

    @property
    def logprobs(self) -> Tensor: ...

    @property
    def finished(self) -> bool: ...


class Generates(Protocol):
    """Makes a response to each prompt; collective over a data-parallel group, whose ranks all give the same."""

    def generate(self, prompts: Sequence[Tensor], work: Generate, seeds: Sequence[int]) -> Sequence[Generated]: ...


def responses(prompts: Samples, work: Generate, seed: int, generator: Generates) -> Samples:
    """`work.group_size` samples for each prompt p, with the ids p * group_size + k.

    Gives tokens (prompt and response), mask (1 where the next token is of the response), logprobs (of those, at
    sampling), finished and prompt_length. What is drawn for a sample follows from `seed` and its id alone.
    """
    group = range(work.group_size)
    ids = [prompt * work.group_size + k for prompt in prompts.ids for k in group]
    asked = [ids_ for ids_ in prompts["prompt_ids"] for _ in group] if prompts.ids else []
    made = generator.generate(asked, work, [derived_seed(seed, sample) for sample in ids]) if asked else []
    whole = [_sample(prompt, response) for prompt, response in zip(asked, made, strict=True)]
    keys = ("tokens", "mask", "logprobs", "finished", "prompt_length")
    return Samples(tuple(ids), {key: [sample[key] for sample in whole] for key in keys})


def _sample(prompt: Tensor, response: Generated) -> dict[str, Tensor]:
    tokens = torch.cat((prompt.cpu(), response.tokens.cpu()))
    # Entry t is about token t + 1, so the first of the response belongs to the last token of the prompt.
    predicted = slice(len(prompt) - 1, len(tokens) - 1)
    mask, logprobs = torch.zeros(2, len(tokens))
    mask[predicted] = 1
    logprobs[predicted] = response.logprobs.float().cpu()
    return {
        "tokens": tokens,
        "mask": mask,
        "logprobs": logprobs,
        "finished": torch.tensor(response.finished),
        "prompt_length": torch.tensor(len(prompt)),
    }
