"""The graph and the models of a step that flags describe, without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from usp.config import token_count
from usp.hf.models import ModelHead, formula_violation, load_model_config, model_facts
from usp.hf.shapes import model_shape
from usp.model.facts import ModelShape
from usp.rlhf.algorithms.registry import ALGORITHMS, build_graph
from usp.rlhf.algorithms.rewards import ScoreWith
from usp.rlhf.config import default_of, parse_options
from usp.rlhf.graph.calls import Generate
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.run.failures import ConfigurationError


def quantiles_of(text: str, flag: str) -> tuple[int, ...]:
    """Parse lengths at equal steps of probability, N or N,N,...

    Args:
        flag: that `text` comes from, for messages.

    Raises:
        ConfigurationError: for what are no positive ascending numbers of tokens.
    """
    try:
        found = tuple(token_count(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"{flag} = {text}: {error}") from None
    if min(found) < 1 or list(found) != sorted(found):
        raise ConfigurationError(f"{flag} = {text} must be positive and ascending")
    return found


def described_graph(
    algorithm: str, options: str, *, group_size: int, max_new_tokens: int, staleness: int, function: bool
) -> DataflowGraph:
    """Return the graph of an algorithm.

    Args:
        algorithm, options, group_size, max_new_tokens, staleness: as the flags of rlhf.py.
        function: whether a function scores the responses, rather than a reward model.

    Raises:
        ConfigurationError: for an algorithm that does not generate.
        ValueError: for wrong options.
    """
    if algorithm not in ALGORITHMS or ALGORITHMS[algorithm].data != "prompts":
        raise ConfigurationError(f"--algorithm = {algorithm} must be one that generates: see --help")
    kind = ALGORITHMS[algorithm].options
    group = group_size or default_of(kind, "generate").group_size
    generate = Generate(group_size=group, max_new_tokens=max_new_tokens)
    reward = ScoreWith(lambda *_: 0.0, str, str) if function else None
    values = parse_options(options, kind, "--options", without=("generate", "reward", "staleness"))
    built = kind(**values, generate=generate, reward=reward, staleness=staleness)  # type: ignore[call-arg]
    return build_graph(algorithm, built)


def described_models(names: Mapping[str, str], roles: Sequence[str]) -> dict[str, ModelShape]:
    """Return the shapes of the model of each role; roles of one size share them.

    Args:
        names: presets or paths by role; critic and reward have a scalar head, whatever is there.

    Raises:
        ConfigurationError: for a model that there are no formulas for.
        ValueError: for one that cannot be loaded.
    """
    shapes: dict[tuple[str, str], ModelShape] = {}
    for role in roles:
        name, head = names[role], _head(role)
        if (name, head) not in shapes:
            config = load_model_config(name, head, new_head=True, weights=False)
            if violation := formula_violation(name, config):
                raise ConfigurationError(f"--{role} = {violation}")
            shapes[name, head] = model_shape(model_facts(name, config), config)
    return {role: shapes[names[role], _head(role)] for role in roles}


def _head(role: str) -> ModelHead:
    return "scalar" if role in ("critic", "reward") else "lm"
