"""Samples that have their common prefixes once give the same outputs, gradients and metrics as whole samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.harness.ranks import RankPool
from tests.usp.tiny import VOCAB
from usp.parallel import ParallelDims, ParallelMesh, ProcessGroups
from usp.parallel.reallocation.boxes import local_part
from usp.rlhf.graph import Inference, TrainStep
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.roles.rows import Family, micro_batches, plan_rows, prefix_families, unpack
from usp.rlhf.samples import Samples
from usp.sp.sequence import unshard_sequence

from .test_role_model import TEMPERATURE, Case, spec_of

GROUPS = ((9, (3, 1, 6, 2)), (1, (4, 2)), (17, (5, 5, 1, 8)), (6, (2, 2)))  # tokens of a prompt, and of its responses


def grouped_samples() -> Samples:
    """Return responses to prompts; of the last prompt they are equal, and of the one before their first tokens are."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, VOCAB, shape, generator=generator)

    values: dict[str, list[Tensor]] = {"tokens": [], "old": [], "advantages": [], "weights": []}
    for prompt_len, lengths in GROUPS:
        prompt, first, same = draw(prompt_len), draw(1), draw(1)
        for length in lengths:
            response = draw(length) if prompt_len < 17 else torch.cat((first, draw(length - 1)))
            response = same.expand(length) if prompt_len == 6 else response
            place = torch.arange(prompt_len + length)
            values["tokens"].append(torch.cat((prompt, response)))
            values["old"].append(torch.randn(len(place), generator=generator) * 0.2 - 4.6)
            values["advantages"].append(torch.randn(len(place), generator=generator))
            values["weights"].append(((place >= prompt_len - 1) & (place < len(place) - 1)) / 30)
    return Samples(tuple(range(len(values["tokens"]))), values)


def saved(families: tuple[Family, ...]) -> int:
    return sum((len(members) - 1) * shared for members, shared in families)


texts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=0, max_size=7)


@pytest.mark.slow
@given(texts, st.integers(0, 12), st.booleans(), st.data())
def test_families_share_equal_tokens_and_save_most(texts, budget: int, counting: bool, data: st.DataObject) -> None:
    lengths = list(map(len, texts))
    firsts = [data.draw(st.integers(0, length)) if counting else length for length in lengths]
    counted = [(torch.arange(length) >= first).float() for length, first in zip(lengths, firsts, strict=True)]
    samples = Samples(tuple(range(len(texts))), {"tokens": list(map(torch.tensor, texts)), "x": counted})
    families = prefix_families(samples, budget, "x" if counting else "")

    def most(members: range) -> int | None:
        """Return how many first tokens, and the labels of these, are equal and do not count; None: over the budget."""
        equal = 0
        while all(equal < firsts[i] and texts[i][: equal + 2] == texts[members[0]][: equal + 2] for i in members):
            if any(equal + 1 >= lengths[i] for i in members):
                break
            equal += 1
        shared = equal if len(members) > 1 else 0
        tokens = sum(lengths[i] for i in members) - (len(members) - 1) * shared
        return None if budget and len(members) > 1 and tokens > budget else shared

    assert [index for members, _ in families for index in members] == list(range(len(texts)))
    assert all(shared == most(members) for members, shared in families)
    best = 0
    for cuts in product((False, True), repeat=max(0, len(texts) - 1)):
        ends = [0, *(place for place, cut in enumerate(cuts, 1) if cut), len(texts)]
        division = [range(a, b) for a, b in pairwise(ends)] if texts else []
        if all(most(members) is not None for members in division):
            best = max(best, sum((len(members) - 1) * (most(members) or 0) for members in division))
    assert saved(families) == best


@dataclass(frozen=True)
class Singles:
    """A policy or value loss of tokens, plus one on sums over whole sequences."""

    head: Literal["logprobs", "values"] = "logprobs"
    keys: tuple[str, ...] = ("old", "advantages", "weights")
    counts: str = "weights"
    unit: int = 1
    temperature: float = TEMPERATURE
    entropy: bool = False

    def __call__(self, output: Tensor, entropy: Tensor | None, given: Any, sequences: Any) -> Any:
        old, advantages, weights = (given[key] for key in self.keys)
        sums = sequences.sums(output * (weights > 0))
        whole = sequences.share(0.001 * sums.square().sum())
        loss = (weights * (output - old) * advantages).sum() + whole
        return loss, {"whole": whole.detach(), "away": (weights * (output - old)).sum().detach()}


CASES = [
    Case(ParallelDims(pp=2, ulysses=2), head="values", ac="full"),
    Case(ParallelDims(pp=2, tp=2), shared=True, budget=40),
    Case(ParallelDims(ring=2, dp_shard=2), zero=3, family="qwen3", head="values", budget=40),
    Case(ParallelDims(ring=2, ulysses=2), family="mixtral", ac="attention-saved", zero=1),
    Case(ParallelDims(ring=2, ulysses=2), family="qwen3_next", ac="full", zero=3),
    Case(ParallelDims(ring=4), family="bamba", budget=40),
]


def run_both(cases: list[Case]) -> list[tuple[dict[str, float], tuple[int, int]]]:
    groups = ProcessGroups()
    return [run(replace(case, ranks=dist.get_world_size()), groups) for case in cases]


def run(case: Case, groups: ProcessGroups) -> tuple[dict[str, float], tuple[int, int]]:
    """Return the largest differences between whole samples and shared prefixes, and the tokens of the rows of each."""
    mesh = ParallelMesh.create(case.layout.dims, groups=groups)
    samples = grouped_samples()
    size, rank = mesh.size("batch"), mesh.rank("batch")
    samples = samples.of([i for i in samples.ids if i // 6 % size == rank])
    results: list[tuple[list[Tensor], list[Tensor], dict[str, float], list[Tensor]]] = []
    tokens = []
    for share in (False, True):
        model = RoleModel(replace(spec_of(case), share_prefixes=share), case.layout, mesh, trained=True)
        model.fill()
        said = model.inference(samples, Inference(case.head, TEMPERATURE), "said").values.get("said", [])
        masked = Samples(samples.ids, {"tokens": samples["tokens"], "mask": samples["weights"]})
        counted = model.inference(masked, Inference(case.head, TEMPERATURE), "said").values.get("said", [])
        told = model.train_step([samples], TrainStep(Singles(case.head)))
        results.append((said, counted, dict(told), [local_part(x).clone() for x in model.weights().values()]))
        plan = plan_rows(samples, case.layout, mesh, share=share, counts="weights")
        assert plan is not None
        tokens.append(plan.row_len * len(plan.rows))
    (a, b, metrics, weights), (c, d, others, moved) = results
    found = {"outputs": largest(a, c), "masked": largest(b, d), "weights": largest(weights, moved)}
    found |= {name: abs(metrics[name] - others[name]) for name in metrics}
    return found, (tokens[0], tokens[1])


def largest(found: list[Tensor], wanted: list[Tensor]) -> float:
    errors = [float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True) if x.numel()]
    return max(errors, default=0.0)


@pytest.mark.slow
def test_shared_prefixes_change_no_result(ranks: RankPool, exhaustive: bool) -> None:
    """Without --exhaustive without the first case, of which each other one has a part, nor the last."""
    every = {4: CASES if exhaustive else CASES[1:-1]}
    for size, cases in every.items():
        for results in ranks.run(run_both, size, cases):
            for case, (errors, (whole, shared)) in zip(cases, results, strict=True):
                assert all(error <= 1e-5 for error in errors.values()), (case, errors)
                assert shared < 0.8 * whole


def unpacked() -> None:
    layout = Case(ParallelDims(ring=2), ranks=2).layout
    mesh, samples = ParallelMesh.create(layout.dims), grouped_samples()
    plan = plan_rows(samples, layout, mesh, share=True)
    assert plan is not None and [len(members) for members, shared in plan.families if shared] == [4, 4, 2]
    (batch,) = micro_batches(samples, plan, layout, mesh)
    numbers = unshard_sequence(batch["position_ids"], mesh)
    assert numbers.max() == 24  # of the longest sample, not of the row
    wanted = {"input_ids": samples["tokens"], "position_ids": [torch.arange(len(ids)) for ids in samples["tokens"]]}
    for key, values in wanted.items():
        found = unpack([batch[key]], plan, samples, layout, mesh)
        assert all(torch.equal(x, y) for x, y in zip(found, values, strict=True))


def test_every_sample_gets_the_values_of_shared_tokens(ranks: RankPool) -> None:
    ranks.run(unpacked, 2)
