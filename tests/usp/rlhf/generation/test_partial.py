"""A response that stops and goes on has the tokens of one that does not, where the weights stay, and each token the
log-probability under the weights that wrote it, where they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.usp.rlhf.generation.test_generate import built, letters
from tests.usp.tiny import CONFIGS, VOCAB, drawn_model
from usp.hf.weights import initialise
from usp.parallel import ParallelDims, ParallelMesh
from usp.rlhf.generation.decoding import Rollout, Slots
from usp.rlhf.generation.partial import NOT_BEGUN, Group, go_on, group_samples
from usp.rlhf.graph import Generate
from usp.rlhf.samples import Samples

WORK = Generate(group_size=2, max_new_tokens=24, stop_ids=tuple(range(0, VOCAB, 12)), partial=True)
LENGTHS = (9, 1, 33)


def begun() -> dict[int, Group]:
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(VOCAB, (length,), generator=random) for length in LENGTHS]
    return {10 + n: Group(prompt, n, (NOT_BEGUN,) * WORK.group_size) for n, prompt in enumerate(prompts)}


def enough(wanted: int, complete: Sequence[int]) -> bool:
    return len(complete) >= wanted


def in_parts(text: str) -> tuple[Samples, Samples, Samples, list[list[int]]]:
    """The samples of a call that does not stop, of three parts with the same weights, and of three with others each;
    and the groups that are complete after each of these. text: also ends a response."""
    mesh = ParallelMesh.create(ParallelDims(ulysses=2))
    generator = built(CONFIGS["llama"](), mesh, slots=4)
    work = replace(WORK, stop_strings=(text,) if text else ())
    ids = range(len(LENGTHS) * WORK.group_size)
    whole, _ = go_on(begun(), work, 0, lambda complete: False, generator)
    found, told = [group_samples([*whole.values()], ids, work)], []
    for update in (False, True):
        groups = begun()
        for part in range(3):
            if update:
                initialise(generator._model, part)
            groups, complete = go_on(groups, work, part, partial(enough, part + 1), generator)
            told.append(complete)
        found.append(group_samples([*groups.values()], ids, work))
    whole_call, equal, updated = found
    return whole_call, equal, updated, told[:3]


def same(ours: Tensor, theirs: Tensor) -> bool:
    return len(ours) == len(theirs) and torch.allclose(ours.double(), theirs.double(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_response_goes_on_with_its_tokens_and_the_weights_at_hand(ranks: RankPool) -> None:
    whole, *_ = ranks.run(in_parts, 2, "")[0]
    longest = max(whole["tokens"][:2], key=len).tolist()[LENGTHS[0] :]
    text = letters(longest[3:5])  # which a part may begin and the next one complete
    for of_rank in ranks.run(in_parts, 2, text):
        whole, parts, updated, complete = of_rank
        assert [len(tickets) >= part + 1 for part, tickets in enumerate(complete)] == [True] * 3
        assert complete[0] == complete[1][: len(complete[0])]  # in the order of completion
        for key in ("tokens", "mask", "logprobs", "finished"):
            assert all(map(same, map(torch.atleast_1d, parts[key]), map(torch.atleast_1d, whole[key]))), key
        written = [versions[mask > 0] for versions, mask in zip(updated["versions"], updated["mask"], strict=True)]
        assert all((of.diff() >= 0).all() for of in written) and any(len(of.unique()) > 1 for of in written)
        model = drawn_model(CONFIGS["llama"]())
        for version in range(3):
            initialise(model, version)
            for n, tokens in enumerate(updated["tokens"]):
                with torch.no_grad():
                    logprobs = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
                own = ((updated["versions"][n] == version) & (updated["mask"][n] > 0))[:-1]
                assert same(updated["logprobs"][n][:-1][own], logprobs[own]), (version, n)


def test_what_ends_a_response_may_begin_before_a_stop() -> None:
    seen: list[list[int]] = []
    resumed = Rollout([9, 9], seed=0, limit=7, tokens=[1, 2], known=2)
    slots = Slots([Rollout([9, 9, 9, 9, 9], seed=0, limit=5), resumed], 2)
    slots.admit()
    assert slots.active[0] is resumed  # it goes first

    def ended(tokens: Sequence[int]) -> bool:
        seen.append([*tokens])
        return False

    slots.read(slots.issue(), [3, 4], [0.0, 0.0], ended)
    assert seen == [[1, 2, 3], [4]]
