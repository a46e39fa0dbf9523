"""The configuration of an RLHF run: rlhf.py's flags. Beside them it has those of `usp.config` that train.py has too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

from tyro.conf import arg

from usp.config import MODEL_HELP, ParallelConfig, RunConfig, one_of
from usp.rlhf.graph.calls import Generate
from usp.run.failures import nearest

from .algorithms.graphs import ALGORITHMS
from .algorithms.options import PolicyOptions

_NOT_OPTIONS = {"generate", "reward"}  # they have flags of their own


@dataclass(frozen=True)
class _Rlhf:
    """What is rlhf.py's own."""

    algorithm: Annotated[str, one_of(tuple(ALGORITHMS))] = "grpo"
    """What a step is made of: which models are called, and what they are trained on."""
    plan: Annotated[str, arg(metavar="NAME|PATH")] = "flattening"
    """Ranks and layout of each call: heuristic, flattening, interleaving, separation, or a YAML file."""
    options: Annotated[str, arg(metavar="NAME=VALUE,...", help_behavior_hint="(optional)")] = ""
    """Options of the algorithm, such as kl=0.1,mini_batches=2; a wrong name lists those that there are."""
    rollout: Annotated[str, arg(metavar="NAME=VALUE,...", help_behavior_hint="(optional)")] = ""
    """Degrees of generation and inference under --plan separation, such as tp=2,ulysses=2; else as in training."""

    model: Annotated[str, arg(metavar="PRESET|PATH", help=f"The actor. {MODEL_HELP}")] = "tiny"
    reward_model: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """A folder with a trained reward model. Without one, --reward-function gives the rewards."""
    critic: Annotated[str, arg(metavar="PATH", help_behavior_hint="(default: the reward model, else the actor)")] = ""
    """Where the critic starts from: a reward model, or a causal LM, whose head is replaced."""
    ref: Annotated[str, arg(metavar="PATH", help_behavior_hint="(default: the actor)")] = ""
    """The model that the actor is held close to."""
    reward_function: Annotated[str, arg(metavar="match|PATH.py:NAME")] = "match"
    """reward(prompt, response, answer) -> float. match: 1 for exactly the answer, else 0."""

    data: Annotated[str, arg(metavar="stdlib|PATH.jsonl")] = "stdlib"
    """Prompts with answers, or with a chosen and a rejected response. stdlib: made from Python's own library."""
    prompt_tokens: int = 1024
    """Tokens of the longest prompt that is made from the library; the shortest has a sixteenth, or 64."""
    wrong_answers: float = 0.0
    """Part of the built-in answers that are wrong, as some demonstrations of people are. For sft alone."""
    tokenizer: Annotated[str, arg(metavar="bytes|PATH")] = "bytes"
    """A local transformers tokenizer folder. bytes: one token per byte, as ByT5 counts them."""

    prompts: int = 0
    """Prompts, or pairs, in a step. 0: as many as make 64 responses, or 64 pairs."""
    group_size: int = 0
    """Responses to each prompt. 0: as many as the algorithm needs."""
    max_new_tokens: int = 8
    """Tokens of the longest response."""
    temperature: float = 1.0
    """Of sampling, and of the log-probabilities that are trained on."""
    top_k: int = 0
    """Sample among so many tokens. 0: all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that have this probability together."""
    slots: int = 64
    """Sequences that a rank generates together; others wait for a place."""
    micro_batch_tokens: int = 0
    """Tokens of a data-parallel rank that pass through a model at a time. 0: as many as there are."""

    sft_steps: int = -1
    """Supervised steps before the first, on the right answers. -1: 100 for a preset's random weights, else none."""
    steps: int = 150
    """RLHF steps."""
    learning_rate: float = 0.0
    """Peak learning rate of AdamW: reached after the warm-up, then a cosine down to a tenth of it. 0: what suits the
    tiny presets, 3e-4 with ppo, else 2e-3; a model of billions wants 1e-6 to 1e-5."""
    critic_learning_rate: float = 1e-3
    """That of the critic."""
    sft_learning_rate: float = 2e-3
    """That of the supervised steps before the first."""
    warmup_steps: int = 5
    """Steps over which learning rates rise linearly from zero."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, on matrices only."""
    max_grad_norm: float = 1.0
    """Clip gradients to this global norm. inf: never clip."""
    seed: int = 0
    """Fixes the initial weights, the prompts and what is sampled."""
    offload: bool = False
    """Keep the weights of models that are not trained in the host's memory between their calls."""
    loss_chunk: int = 2048
    """Tokens whose logits exist at a time, on each rank."""


@dataclass(frozen=True)
class RlhfConfig(RunConfig, _Rlhf, ParallelConfig):
    """Train a language model with PPO, GRPO and their kin, or on examples and pairs, every call of a model in a layout
    of its own.

    Start it with torchrun, for example: torchrun --nproc-per-node 8 rlhf.py --algorithm grpo --sp-ulysses 2
    """


def algorithm_options(config: RlhfConfig, stop_ids: tuple[int, ...], reward: Any) -> Any:
    """The options of `config.algorithm`: its defaults, `--options`, and what the other flags say.

    Args:
        reward: how responses are scored; None by a reward model.

    Raises:
        ValueError: naming every part of --options that is wrong, with the names that there are.
    """
    kind = ALGORITHMS[config.algorithm].options
    values = parse_options(config.options, kind, "--options", _NOT_OPTIONS)
    if not issubclass(kind, PolicyOptions):
        return kind(**values)
    generate = Generate(
        group_size=config.group_size or default_of(kind, "generate").group_size,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_ids=stop_ids,
    )
    return kind(**{"generate": generate, "reward": reward, **values})


def parse_options(text: str, kind: type, what: str, without: set[str] | None = None) -> dict[str, Any]:
    """NAME=VALUE,... as values for fields of the dataclass `kind`, of the type of their defaults.

    Raises:
        ValueError: naming every part that is wrong.
    """
    hints = get_type_hints(kind)
    known = {field.name: default_of(kind, field.name) for field in fields(kind) if field.name not in (without or ())}
    values: dict[str, Any] = {}
    problems = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        name = name.replace("-", "_")
        if name not in known:
            problems.append(f"unknown {name!r}{nearest(name, known)}: there are {_listed(known)}")
            continue
        try:
            values[name] = _converted(value, type(known[name]))
        except ValueError:
            problems.append(f"{name} = {value!r} must be {getattr(hints[name], '__name__', hints[name])}")
    if problems:
        raise ValueError(f"{what} = {text}: {'; '.join(problems)}")
    return values


def default_of(kind: type, name: str) -> Any:
    """The default of a dataclass field."""
    field = next(field for field in fields(kind) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _converted(value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError
        return value.lower() == "true"
    return kind(value)


def _listed(known: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in known.items())
