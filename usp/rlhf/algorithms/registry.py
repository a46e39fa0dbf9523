"""The algorithms by name. Others are run by giving `prepare` and `train_rlhf` a mapping that holds them."""

from __future__ import annotations

from collections.abc import Mapping

from usp.rlhf.graph.dataflow import DataflowGraph

from .algorithm import Algorithm, Options
from .grpo import GRPO_ALGORITHM
from .ppo import PPO_ALGORITHM
from .preferences import DPO_ALGORITHM, REWARD_MODEL_ALGORITHM
from .reinforce import REINFORCE_PLUS_PLUS_ALGORITHM, REMAX_ALGORITHM, RLOO_ALGORITHM
from .sft import SFT_ALGORITHM

ALGORITHMS: Mapping[str, Algorithm] = {
    "sft": SFT_ALGORITHM,
    "reward_model": REWARD_MODEL_ALGORITHM,
    "dpo": DPO_ALGORITHM,
    "ppo": PPO_ALGORITHM,
    "grpo": GRPO_ALGORITHM,
    "rloo": RLOO_ALGORITHM,
    "reinforce++": REINFORCE_PLUS_PLUS_ALGORITHM,
    "remax": REMAX_ALGORITHM,
}


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
