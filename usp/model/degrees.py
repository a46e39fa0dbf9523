"""The degrees of parallelism that a model allows. Messages name parameters; `usp.train.validate` names flags."""

from __future__ import annotations

from collections.abc import Iterator

from parallel import divisors

from .facts import ModelFacts


def tp_violations(facts: ModelFacts, tp: int, sequence_parallel: bool) -> Iterator[str]:
    """Yield why `tp` ranks cannot share the model's matrices, one message each.

    sequence_parallel: whether they share the tokens between matrices too.
    """
    if tp == 1:
        return
    names = ["num_heads", "num_kv_heads", "vocab_size", *(["intermediate_size"] if facts.dense_mlps else [])]
    for name in names:
        number = getattr(facts, name)
        if number % tp:
            yield f"tp={tp} must divide {name}={number} of {facts.name}: use tp={_listed(divisors(number, tp))}"
    if facts.num_experts and not sequence_parallel:
        yield (
            f"tp={tp} with the mixture of experts {facts.name} needs tp_sequence_parallel=True, so that every rank "
            f"routes different tokens"
        )


def ep_violations(facts: ModelFacts, ep: int) -> Iterator[str]:
    """Yield why `ep` ranks cannot share the model's experts, one message each."""
    experts = facts.num_experts
    if not experts:
        if ep > 1:
            yield f"ep={ep} distributes experts, and {facts.name} has none: use ep=1"
        return
    if experts % ep:
        yield f"ep={ep} must divide num_experts={experts} of {facts.name}: use ep={_listed(divisors(experts))}"
    if facts.router_jitter:
        yield (
            f"router_jitter_noise={facts.router_jitter} in the configuration of {facts.name} differs from rank to rank "
            f"and layout to layout: set it to 0"
        )


def pp_violations(facts: ModelFacts, stages: int) -> Iterator[str]:
    """Yield why the model cannot be cut into `stages` pipeline stages, one message each."""
    if stages > len(facts.windows):
        yield f"{stages} pipeline stages need as many layers, but {facts.name} has {len(facts.windows)}: use fewer"
    if facts.tied and stages > 1:
        yield (
            f"the embedding and the output head of {facts.name} are one matrix (tie_word_embeddings), but the first "
            f"pipeline stage would hold one and the last the other: use pp=1"
        )


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
