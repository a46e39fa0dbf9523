"""After updates, greedy tokens and log-probabilities are those of transformers' generate on the new weights, with tied
embeddings and without. See test_vllm.py for the real vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.usp.rlhf.generation.test_generate import built
from tests.usp.rlhf.generation.test_partial import LENGTHS
from tests.usp.tiny import CONFIGS, VOCAB, drawn_model
from usp.hf.weights import initialise
from usp.parallel import ParallelDims, ParallelMesh
from usp.rlhf.generation.decoding import GeneratedResponse
from usp.rlhf.graph import Generate

TOKENS = 12


def assert_transformers_tokens(
    model: Any, prompts: Sequence[Tensor], found: Sequence[GeneratedResponse], tolerance: float
) -> None:
    for prompt, response in zip(prompts, found, strict=True):
        told = model.generate(
            prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        wanted = told.sequences[0, len(prompt) :]
        assert response.tokens.tolist() == wanted.tolist()
        logprobs = torch.cat(told.logits).log_softmax(-1).gather(1, wanted[:, None]).squeeze(1)
        torch.testing.assert_close(response.logprobs, logprobs, rtol=0, atol=tolerance)


def own_decoding(name: str) -> None:
    """Compare after each of two updates of one generator, on two ranks that share its sequences."""
    config = CONFIGS[name]()
    generator = built(config, ParallelMesh.create(ParallelDims(ulysses=2)), slots=4)
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCAB, (length,), generator=random) for length in LENGTHS]
    model, work = drawn_model(config).eval(), Generate(max_new_tokens=TOKENS, temperature=0.0)
    for version in range(2):
        initialise(generator._model, version)
        initialise(model, version)
        assert_transformers_tokens(model, prompts, generator.generate(prompts, work, [0] * len(prompts)), 1e-5)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-tied-deep", "qwen3_moe"])
@pytest.mark.slow(but=1)
def test_own_decoding_is_that_of_the_new_weights(ranks: RankPool, name: str) -> None:
    ranks.run(own_decoding, 2, name)
