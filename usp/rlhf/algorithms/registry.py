"""The algorithms by name, and those of a user's file by PATH.py:NAME."""

from __future__ import annotations

from collections.abc import Mapping

from usp.rlhf.graph import DataflowGraph
from usp.run.failures import load_from_file

from .algorithm import Algorithm, Options
from .critic_free import CRITIC_FREE
from .ppo import PPO_ALGORITHM
from .preferences import GIVEN_RESPONSES

ALGORITHMS: Mapping[str, Algorithm] = {**GIVEN_RESPONSES, "ppo": PPO_ALGORITHM, **CRITIC_FREE}


def with_outside(name: str, algorithms: Mapping[str, Algorithm]) -> Mapping[str, Algorithm]:
    """Add the algorithm that `name` names, if it is PATH.py:NAME and not among them. Raises ValueError for a file that
    cannot be imported, or has no algorithm of that name."""
    if name in algorithms or ".py:" not in name:
        return algorithms
    algorithm = load_from_file(name, "algorithm")
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"{name} must be an Algorithm, got a {type(algorithm).__name__}")
    return {**algorithms, name: algorithm}


def build_graph(name: str, options: Options, algorithms: Mapping[str, Algorithm] = ALGORITHMS) -> DataflowGraph:
    """Return the graph of a step of an algorithm. Functions with state (`stateful`) start anew in each graph.

    Raises:
        ValueError: for an unknown algorithm, or naming every invalid option.
        TypeError: for options of another algorithm.
    """
    if name not in algorithms:
        raise ValueError(f"algorithm={name!r} is unknown: use {', '.join(algorithms)}")
    algorithm = algorithms[name]
    if type(options) is not algorithm.options:
        raise TypeError(f"{name} has the options {algorithm.options.__name__}, not {type(options).__name__}")
    if violations := list(options.violations()):
        raise ValueError(f"{name}: {'; '.join(violations)}")
    return algorithm.graph(options)
