"""The configuration of an RLHF run, with the flags of rlhf.py; `usp.config` has those that train.py shares."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_type_hints

from tyro.conf import arg

from usp.config import (
    MODEL_HELP,
    LoraConfig,
    MemoryConfig,
    ParallelConfig,
    RouterConfig,
    RunConfig,
    ScheduleConfig,
    one_of,
)
from usp.run.failures import nearest

from .algorithms.registry import ALGORITHMS

DEFAULT_SFT_STEPS = 100
REWARD_FAILURES = ("stop", "zero", "drop")
LONG_PROMPTS = ("refuse", "drop")
SEARCH = "search"  # --plan
SEARCH_FLAGS = ("hardware", "search_budget")
REWARD_FLAGS = ("reward_function", "reward_retries", "reward_failure")


@dataclass(frozen=True)
class _Rlhf:
    """The fields that only rlhf.py has."""

    algorithm: Annotated[str, one_of((*ALGORITHMS, "PATH.py:NAME"))] = "grpo"
    """Training algorithm; PATH.py:NAME: an Algorithm in a file, see docs/algorithms.md."""
    plan: Annotated[str, arg(metavar="NAME|PATH")] = "flattening"
    """Ranks and layout of each model call: heuristic, flattening, interleaving, separation, or a YAML file. search: the
    plan of the shortest predicted step; a resumed run keeps the one that it found, if it has as many ranks."""
    hardware: Annotated[str, arg(metavar="auto|NODE|PATH.json")] = "auto"
    """Hardware for --plan search and --replan: detected, a known node type, or a file of `python -m usp calibrate`."""
    search_budget: float = 60.0
    """Seconds of --plan search, which --seed seeds. With fewer than predictions and named plans take, only these are
    compared."""
    options: Annotated[str, arg(metavar="NAME=VALUE,...", help_behavior_hint="(optional)")] = ""
    """Algorithm options, e.g. kl=0.1,mini_batches=2. An unknown name lists all options with their defaults."""
    ep: int = 1
    """Expert-parallel degree of every call, generation included; divides dp_shard x ring x ulysses x tp."""
    rollout: Annotated[str, arg(metavar="NAME=VALUE,...", help_behavior_hint="(default: as training)")] = ""
    """Parallel degrees of generation and inference with --plan separation, e.g. tp=2,ulysses=2."""

    model: Annotated[str, arg(metavar="PRESET|PATH", help=f"Model to train (the actor). {MODEL_HELP}")] = "tiny"
    reward_model: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """Directory of a trained reward model. If unset, --reward-function scores the responses."""
    critic: Annotated[str, arg(metavar="PATH", help_behavior_hint="(default: the reward model, else the actor)")] = ""
    """Initial critic: a reward model, or a causal LM whose head is replaced by a new scalar head."""
    ref: Annotated[str, arg(metavar="PATH", help_behavior_hint="(default: the actor)")] = ""
    """Reference model of the KL penalty, and of DPO."""
    models: Annotated[str, arg(metavar="NAME=PATH,...", help_behavior_hint="(optional)")] = ""
    """Models of an algorithm's further roles: causal LMs, or reward models."""
    reward_function: Annotated[str, arg(metavar="match|PATH.py:NAME")] = "match"
    """Function reward(prompt, response, answer) -> float. match: 1 if the response equals the answer, else 0."""

    reward_retries: int = 2
    """Further calls of the reward function for a sample that it fails for, after 1, 2, 4, ... seconds."""
    reward_failure: Annotated[str, one_of(REWARD_FAILURES)] = "stop"
    """If it still fails. stop: end the run with a checkpoint. zero: the score is 0. drop: leave the sample out."""

    data: Annotated[str, arg(metavar="stdlib|PATH.jsonl")] = "stdlib"
    """JSONL file of prompts with answers, or of preference pairs. stdlib: built-in task over Python's own sources."""
    long_prompts: Annotated[str, one_of(LONG_PROMPTS)] = "refuse"
    """Lines of --data that do not fit the model's context. refuse: an error. drop: left out, and counted."""
    prompt_tokens: int = 1024
    """Maximum length of the built-in prompts in tokens; the minimum is 1/16 of it, at least 64."""
    wrong_answers: float = 0.0
    """Fraction of wrong answers among the built-in demonstrations (sft only)."""
    tokenizer: Annotated[str, arg(metavar="auto|bytes|PATH")] = "auto"
    """Directory of a local transformers tokenizer. bytes: one token per byte, as in ByT5. auto: the model directory's
    own, or bytes for a preset."""
    chat_template: Annotated[str, arg(metavar="FILE", help_behavior_hint="(optional)")] = ""
    """Chat template (Jinja) for messages, instead of the tokenizer's own; exported with the model."""

    replan: Annotated[str, arg(metavar="every=N,gain=5%", help_behavior_hint="(optional)")] = ""
    """Correct the predictions of --plan search by what steps take, search again every N steps (10 without), and change
    the plan between two steps where another one saves at least `gain` (5%) of a step, and over the steps that remain
    more than the change takes. A search takes at most budget=5 seconds."""

    staleness: Annotated[int, one_of(("0", "1"))] = 0
    """1: generate and score the samples of a step while the step before trains, with the weights from before it. Needs
    a plan with different ranks for both, such as separation."""

    prompts: int = 0
    """Prompts (or preference pairs) per step. 0: enough for 64 responses (or 64 pairs)."""
    group_size: int = 0
    """Responses sampled per prompt. 0: the algorithm's default."""
    max_new_tokens: int = 8
    """Maximum response length in tokens."""
    temperature: float = 1.0
    """Sampling temperature, also applied to the log-probabilities in training."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 disables."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose total probability reaches p; 1 disables."""
    stop_ids: Annotated[str, arg(metavar="ID,...", help_behavior_hint="(optional)")] = ""
    """Token ids that end a response, besides those of the tokenizer and of the model's generation_config.json."""
    stop: Annotated[str, arg(metavar="TEXT|JSON", help_behavior_hint="(optional)")] = ""
    """Text that ends a response, or a JSON list of such: the first token after which the response contains one is its
    last."""
    slots: int = 64
    """Maximum sequences decoded concurrently per rank; the rest are queued."""
    micro_batch_tokens: int = -1
    """Maximum tokens per micro-batch of a data-parallel rank, unless one sequence is longer. -1: 16,384 for each of its
    sequence-parallel ranks. 0: no limit."""

    eval_every: int = 0
    """Steps between evaluations on held-out prompts; the last step is evaluated too. 0: no evaluation."""
    eval_data: Annotated[str, arg(metavar="PATH.jsonl", help_behavior_hint="(optional)")] = ""
    """JSONL file of prompts to evaluate on. Without it, --eval-prompts are held out of --data."""
    eval_prompts: int = 0
    """Number of prompts to evaluate on, never trained on; of --eval-data the first ones. 0: all of --eval-data."""
    eval_samples: int = 1
    """Responses per evaluated prompt, for pass@k up to this k."""
    eval_temperature: float = -1.0
    """Sampling temperature of evaluations; 0 is greedy. -1: 0 for one response per prompt, else --temperature."""
    eval_pass_score: float = 1.0
    """Least score with which an evaluated response passes."""
    keep_best: bool = False
    """Keep the checkpoint with the highest mean score in an evaluation, and write its model to RUN/best."""

    sft_steps: int = -1
    """Supervised steps on the correct answers before the first training step. -1: 100 for presets, else 0."""
    steps: int = 150
    """Training steps, after the supervised ones."""
    learning_rate: Annotated[
        float, arg(help_behavior_hint="(default: the algorithm's, for a preset or for a directory)")
    ] = 0.0
    """Peak learning rate of AdamW."""
    critic_learning_rate: Annotated[
        float, arg(help_behavior_hint="(default: 1e-3 for a preset, 1e-5 for a directory)")
    ] = 0.0
    """Peak learning rate of the critic."""
    sft_learning_rate: Annotated[
        float, arg(help_behavior_hint="(default: 2e-3 for a preset, 1e-5 for a directory)")
    ] = 0.0
    """Peak learning rate of the supervised steps."""
    warmup_steps: Annotated[int, arg(help_behavior_hint="(default: 20 for grpo and its variants, else 5)")] = -1
    """Steps of linear learning rate warmup; the supervised steps before have those of sft."""
    weight_decay: float = 0.0
    """AdamW weight decay, applied to matrices only."""
    max_grad_norm: float = 1.0
    """Maximum global gradient norm; inf disables clipping."""
    seed: int = 0
    """Seed of the initial weights, the order of the data, and sampling."""
    offload: bool = False
    """Offload the weights of untrained models to host memory between calls."""
    offload_optimizer: bool = False
    """Offload the optimizer states of trained models to host memory between train steps."""


@dataclass(frozen=True)
class RlhfConfig(RunConfig, MemoryConfig, RouterConfig, ScheduleConfig, _Rlhf, LoraConfig, ParallelConfig):
    """Train a language model with PPO, GRPO and related algorithms, or on demonstrations and preference pairs. Every
    model call has its own ranks and parallel layout.

    For example, on 8 ranks: torchrun --nproc-per-node 8 rlhf.py --algorithm grpo --sp-ulysses 2 --sp-ring 2

    Outside the repository, use --no-python usp-rlhf instead of rlhf.py.
    """


def parse_options(text: str, kind: type, source: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Parse NAME=VALUE,... into fields of the dataclass `kind`, each converted to the type of its default.

    Args:
        source: the flag that `text` comes from, for messages.
        without: fields that cannot be set.

    Raises:
        ValueError: naming every part that is wrong.
    """
    hints = get_type_hints(kind)
    known = {field.name: default_of(kind, field.name) for field in fields(kind) if field.name not in without}
    values: dict[str, Any] = {}
    problems = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (side.strip() for side in part.partition("="))
        name = name.replace("-", "_")
        if name not in known:
            options = ", ".join(f"{option}={default}" for option, default in known.items())
            problems.append(f"unknown {name!r}{nearest(name, known)}, must be one of {options}")
            continue
        try:
            values[name] = _converted(value, type(known[name]))
        except ValueError:
            problems.append(f"{name} = {value!r} must be {getattr(hints[name], '__name__', hints[name])}")
    if problems:
        raise ValueError(f"{source} = {text}: {'; '.join(problems)}")
    return values


def default_of(kind: type, name: str) -> Any:
    """Return the default of a dataclass field."""
    field = next(field for field in fields(kind) if field.name == name)
    return field.default if field.default_factory is MISSING else field.default_factory()


def _converted(value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError
        return value.lower() == "true"
    return kind(value)
