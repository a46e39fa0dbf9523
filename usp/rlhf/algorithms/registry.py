"""The algorithms by name, and those of a user's file by PATH.py:NAME."""

from __future__ import annotations

from collections.abc import Mapping

from usp.rlhf.graph.dataflow import DataflowGraph
from usp.run.user_code import load_from_file

from .algorithm import Algorithm, Options
from .grpo import GRPO_ALGORITHM
from .grpo_variants import CISPO_ALGORITHM, DAPO_ALGORITHM, DR_GRPO_ALGORITHM, GSPO_ALGORITHM
from .ppo import PPO_ALGORITHM
from .preferences import DPO_ALGORITHM, REWARD_MODEL_ALGORITHM
from .reinforce import (
    REINFORCE_PLUS_PLUS_ALGORITHM,
    REINFORCE_PLUS_PLUS_BASELINE_ALGORITHM,
    REMAX_ALGORITHM,
    RLOO_ALGORITHM,
)
from .sft import SFT_ALGORITHM

ALGORITHMS: Mapping[str, Algorithm] = {
    "sft": SFT_ALGORITHM,
    "reward_model": REWARD_MODEL_ALGORITHM,
    "dpo": DPO_ALGORITHM,
    "ppo": PPO_ALGORITHM,
    "grpo": GRPO_ALGORITHM,
    "dr_grpo": DR_GRPO_ALGORITHM,
    "dapo": DAPO_ALGORITHM,
    "gspo": GSPO_ALGORITHM,
    "cispo": CISPO_ALGORITHM,
    "rloo": RLOO_ALGORITHM,
    "reinforce++": REINFORCE_PLUS_PLUS_ALGORITHM,
    "reinforce++_baseline": REINFORCE_PLUS_PLUS_BASELINE_ALGORITHM,
    "remax": REMAX_ALGORITHM,
}


def with_outside(name: str, algorithms: Mapping[str, Algorithm]) -> Mapping[str, Algorithm]:
    """Add the algorithm that `name` names, if it is PATH.py:NAME and not among them.

    Raises:
        ValueError: for a file that cannot be imported, or has no algorithm of that name.
    """
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
