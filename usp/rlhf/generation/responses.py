"""Generate responses to prompts, and convert them to `Samples`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from usp.rlhf.data.samples import Samples
from usp.rlhf.data.seeds import derived_seed
from usp.rlhf.graph.calls import Generate


@dataclass(frozen=True, eq=False)
class GeneratedResponse:
    """One generated response.

    Attributes:
        tokens: int64, on the CPU.
        logprobs: float32, of each token at the temperature (1 where it is 0), before top-k and top-p.
        finished: whether it ends with a stop id, or the token that completes a stop string.
    """

    tokens: Tensor
    logprobs: Tensor
    finished: bool


class SupportsGenerate(Protocol):
    """A generator of one response per prompt.

    Collective over a data-parallel group, all of whose ranks return the same responses.
    """

    def generate(
        self, prompts: Sequence[Tensor], work: Generate, seeds: Sequence[int]
    ) -> Sequence[GeneratedResponse]: ...


def generate_samples(prompts: Samples, work: Generate, seed: int, generator: SupportsGenerate) -> Samples:
    """Generate `work.group_size` samples for each prompt p, with the ids p * group_size + k.

    Returns tokens (prompt and response), mask (1 where the next token is in the response), logprobs (of the response,
    at sampling), finished and prompt_length. A sample depends only on `seed` and its id.
    """
    group = range(work.group_size)
    ids = [prompt * work.group_size + k for prompt in prompts.ids for k in group]
    repeated = [prompt for prompt in prompts["prompt_ids"] for _ in group] if prompts.ids else []
    responses = generator.generate(repeated, work, [derived_seed(seed, sample) for sample in ids])
    samples = [_sample(prompt, response) for prompt, response in zip(repeated, responses, strict=True)]
    keys = ("tokens", "mask", "logprobs", "finished", "prompt_length")
    return Samples(tuple(ids), {key: [sample[key] for sample in samples] for key in keys})


def _sample(prompt: Tensor, response: GeneratedResponse) -> dict[str, Tensor]:
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
