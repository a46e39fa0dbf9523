"""ReaL's figure of PPO steps (arXiv 2406.14088, version 1): its 36 cells, and the models and lengths of each.

Seconds follow from the throughput that the figure's bars show; its GPU-weighted mean gain agrees with the abstract's
26%. A step has 2^17 tokens: prompts of 128 and responses of 128, 384 or 896, all of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from usp.hf.models import load_model_config, model_facts
from usp.hf.tensor_parallel import model_shape
from usp.model.facts import ModelShape
from usp.planning.workload import Workload
from usp.rlhf.algorithms.registry import ALGORITHMS, build_graph
from usp.rlhf.graph import DataflowGraph, Generate

TOKENS, PROMPT, LENGTHS, MINI_BATCHES = 2**17, 128, (128, 384, 896), 4
SIZES: dict[int, tuple[int, int, int, int, int]] = {  # hidden, MLP, layers, heads, key-value heads
    7: (4096, 11008, 32, 32, 32),
    13: (5120, 13824, 40, 40, 40),
    34: (8192, 22016, 48, 64, 8),
    70: (8192, 28672, 80, 64, 8),
}
# (actor, critic, devices): seconds of heuristic and of ReaL's plan at each length of responses.
MEASURED: dict[tuple[int, int, int], tuple[tuple[float, float], ...]] = {
    (7, 7, 8): ((31.3, 23.3), (42.3, 28.0), (63.3, 37.4)),
    (13, 7, 16): ((30.1, 24.3), (42.6, 31.3), (69.1, 44.2)),
    (34, 7, 32): ((34.0, 29.2), (50.5, 46.7), (84.7, 77.4)),
    (70, 7, 64): ((43.7, 41.6), (71.6, 65.9), (129.0, 123.8)),
    (7, 13, 16): ((28.5, 20.8), (37.9, 24.6), (57.5, 34.3)),
    (7, 34, 32): ((30.7, 26.7), (41.9, 29.4), (67.9, 43.4)),
    (7, 70, 64): ((33.0, 29.8), (49.8, 37.8), (77.8, 43.4)),
    (7, 7, 16): ((24.0, 14.6), (35.3, 23.2), (58.2, 34.3)),
    (13, 13, 32): ((27.1, 23.7), (38.5, 27.3), (67.8, 42.9)),
    (34, 34, 64): ((33.7, 29.5), (60.0, 48.8), (89.9, 77.6)),
    (70, 70, 128): ((47.6, 38.4), (78.9, 71.9), (144.0, 118.7)),
}


@dataclass(frozen=True)
class Cell:
    """One pair of bars.

    Attributes:
        actor, critic: billions of parameters, also of the reference and of the reward model.
        response: tokens.
        heuristic, real: measured seconds of a step.
        bars: how often the figure shows it: 7B + 7B on 8 devices twice.
    """

    actor: int
    critic: int
    devices: int
    response: int
    heuristic: float
    real: float

    @property
    def bars(self) -> int:
        return 2 if self.devices == 8 else 1

    @property
    def ratio(self) -> float:
        """How many times faster ReaL's plan is."""
        return self.heuristic / self.real

    @property
    def samples(self) -> int:
        return TOKENS // (PROMPT + self.response)

    @property
    def workload(self) -> Workload:
        return Workload.of(self.samples, 1, PROMPT, (self.response,))

    @property
    def name(self) -> str:
        return f"{self.actor}B + {self.critic}B"


def cells() -> Iterator[Cell]:
    for (actor, critic, devices), seconds in MEASURED.items():
        for length, (heuristic, real) in zip(LENGTHS, seconds, strict=True):
            yield Cell(actor, critic, devices, length, heuristic, real)


@cache
def model(size: int, head: str) -> ModelShape:
    """Return a LLaMA of `size` billion parameters. head: lm or scalar."""
    config = load_model_config("llama2-7b", head, new_head=True, weights=False)  # type: ignore[arg-type]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config.update(dict(zip(names, SIZES[size], strict=True)))
    return model_shape(model_facts(f"{size}B", config), config)


def models(actor: int, critic: int) -> dict[str, ModelShape]:
    """Return the model of each role of PPO."""
    policy, value = model(actor, "lm"), model(critic, "scalar")
    return {"actor": policy, "ref": policy, "critic": value, "reward": value}


def ppo(response: int) -> DataflowGraph:
    """Return the graph of PPO with a reward model; log-probabilities are those at sampling."""
    options: Any = ALGORITHMS["ppo"].options
    generate = Generate(group_size=1, max_new_tokens=response)
    made = options(mini_batches=MINI_BATCHES, generate=generate, reward=None, old_logprobs="rollout")
    return build_graph("ppo", made)
