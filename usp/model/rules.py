"""The degrees of parallelism that a model allows, from its numbers. Messages name parameters, never flags."""

from __future__ import annotations

from parallel import divisors

from .facts import ModelFacts


def tp_violations(facts: ModelFacts, tp: int, tp_sequence_parallel: bool, trained: bool = True) -> list[str]:
    """Return why the model cannot be divided over `tp` ranks, one message per violation."""
    if tp == 1:
        return ["tp_sequence_parallel=True shards tokens over tp ranks: use tp=2 or more"] * tp_sequence_parallel
    divided = {
        "vocab_size": facts.vocab_size,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "intermediate_size": facts.intermediate_size,
    }
    violations = [
        f"tp={tp} must divide {name}={size} of {facts.name}: use tp={_listed(divisors(size, tp))}"
        for name, size in divided.items()
        if size % tp
    ]
    if facts.num_experts and trained and not tp_sequence_parallel:
        violations.append(
            f"tp={tp} with the mixture of experts {facts.name} needs tp_sequence_parallel=True in training, so that "
            f"each tp rank routes different tokens"
        )
    return violations


def ep_violations(facts: ModelFacts, ep: int) -> list[str]:
    """Return why the model's experts cannot be sharded over `ep` ranks, one message per violation."""
    if not facts.num_experts:
        return [f"ep={ep} shards experts, and {facts.name} has none: use ep=1"] if ep > 1 else []
    violations = []
    if facts.num_experts % ep:
        fitting = _listed(divisors(facts.num_experts))
        violations.append(f"ep={ep} must divide the {facts.num_experts} experts of {facts.name}: use ep={fitting}")
    if facts.router_jitter:
        violations.append(
            f"router_jitter_noise={facts.router_jitter} of {facts.name} makes routing depend on the rank and the "
            f"layout: set it to 0"
        )
    return violations


def pp_violations(facts: ModelFacts, stages: int) -> list[str]:
    """Return why the model cannot be cut into `stages` pipeline stages, one message per violation."""
    if stages > len(facts.windows):
        return [f"{stages} pipeline stages need as many layers, but {facts.name} has {len(facts.windows)}"]
    return []


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
