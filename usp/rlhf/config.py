"""The configuration of an RLHF run, with the flags of rlhf.py, and the rules on several of them.

`usp.config` has the flags that train.py shares.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated

from tyro.conf import arg

from usp.config import BAD_ROWS, ONLY_WITH, UNPREDICTED, CommonConfig, Norm, ParallelConfig, Positive
from usp.data.batches import parse_named
from usp.data.sources import STDLIB
from usp.fields import (
    AUTO_RATE,
    RATE,
    AtLeast0,
    AtLeast1,
    Fraction,
    NotNegative,
    OnlyWith,
    Rule,
    among,
    as_given,
    at_least,
    changed_ones,
    flag,
    names_of,
    one_of,
    parameter_violations,
    parse_options,
    shown,
    value_violations,
    without_effect,
)
from usp.parallel import violation_of
from usp.presets import PRESETS
from usp.rlhf.plan.named_plans import NAMED_PLANS
from usp.rlhf.plan.plan import ENGINE, OWN, TOKENS_PER_RANK
from usp.train.validate import common_violations

from .algorithms.algorithm import Above0, Algorithm
from .algorithms.registry import ALGORITHMS, with_outside
from .environments.benchmarks import BENCHMARKS
from .environments.ready_rewards import HTTP
from .environments.tools import NAME as TOOLS

DEFAULT_SFT_STEPS = 100
SEARCH = "search"  # --plan
# As `usp.config.UNPREDICTED`; prompts and answers have lengths, which the data and the tokenizer determine.
RLHF_UNPREDICTED = (UNPREDICTED - {"data", "bad_rows", "tokenizer", "chat_template", "plan"}) | {
    *("search_budget", "replan", "wrong_answers", "reward_retries", "reward_failure", "temperature", "top_k", "top_p"),
    *("stop_ids", "stop", "eval_prompts", "eval_samples", "eval_temperature", "eval_pass_score", "keep_best"),
    *("critic_learning_rate", "sft_learning_rate", "reward_processes", "reward_timeout"),
    *("ref_update_every", "ref_update_weight", "router_replay"),
}

EvalTemperature = Annotated[float, Rule(lambda x: x == -1 or 0 <= x < math.inf, "at least 0, or -1 for the default")]
Engine = shown("{own,vllm}|URL,...", str, str, rule=ENGINE)
Oversample = Annotated[float, Rule(lambda value: value == 0 or 1 <= value < math.inf, "at least 1, or 0")]


@dataclass(frozen=True)
class _Rlhf:
    """The fields that the supervised steps before an RLHF run have no use for."""

    algorithm: Annotated[str, arg(metavar="{" + ",".join((*ALGORITHMS, "PATH.py:NAME")) + "}")] = "grpo"
    """Training algorithm. PATH.py:NAME: an Algorithm in a file, see docs/algorithms.md."""
    plan: Annotated[str, arg(metavar="NAME|PATH")] = "flattening"
    """Ranks and layout of each model call: heuristic, flattening, interleaving, separation, or a YAML file. search: the
    plan with the shortest predicted step; a resumed run keeps its plan if the number of ranks is the same."""
    hardware: Annotated[str, arg(metavar="auto|NODE|PATH.json")] = "auto"
    """Hardware for --plan search and --replan: detected, a known node type, or a file of `python -m usp calibrate`."""
    search_budget: NotNegative = 60.0
    """Seconds of --plan search, which --seed seeds. If this is less than predictions and named plans take, only the
    named plans are compared."""
    options: Annotated[str, arg(metavar="NAME=VALUE,...", help_behavior_hint="(optional)")] = ""
    """Algorithm options, e.g. kl=0.1,mini_batches=2. An unknown name lists all options with their defaults."""
    rollout: Annotated[str, arg(metavar="NAME=VALUE,...", help_behavior_hint="(default: as training)")] = ""
    """Parallel degrees of generation and inference with --plan separation, e.g. tp=2,ulysses=2."""
    replan: Annotated[str, arg(metavar="every=N,gain=5%", help_behavior_hint="(optional)")] = ""
    """Correct the predictions of --plan search by measured steps, search again every N steps (default 10), and change
    the plan between two steps if another one saves at least `gain` (5%) of a step, and over the remaining steps more
    than the change takes. A search takes at most budget=5 seconds."""
    staleness: AtLeast0 = 0
    """1: generate and score the samples of a step while the previous step trains, with the weights from before it.
    Needs a plan with different ranks for both, such as separation. Above 1, with --partial-rollouts: the most steps
    that a sample's oldest token may be older than the weights that train on it."""
    partial_rollouts: bool = False
    """Begin responses up to --staleness steps ahead. A step takes the prompts whose responses are complete first;
    the others go on with the next weights."""
    oversample: Oversample = 0.0
    """Begin that many times the prompts of a step; it takes those that are complete first. The slowest go on with
    --partial-rollouts, and otherwise are dropped and begun again. 0: (1 + staleness) / 2 with them, else 1."""
    delta_updates: bool = False
    """Send only the weights that have changed since the last step, exactly. Copies of trained weights then stay in
    memory, as does what an engine was given, and senders keep what they sent."""

    reward_model: Annotated[str, arg(metavar="PATH", help_behavior_hint="(optional)")] = ""
    """Directory of a trained reward model. If unset, --reward-function scores the responses."""
    critic: Annotated[str, arg(metavar="PATH", help_behavior_hint="(default: the reward model, else the actor)")] = ""
    """Initial critic: a reward model, or a causal LM whose head is replaced by a new scalar head."""
    ref: Annotated[str, arg(metavar="PATH|URL", help_behavior_hint="(default: the actor)")] = ""
    """Reference model of the KL penalty, and of DPO; or an OpenAI-compatible server that has it."""
    ref_update_every: AtLeast0 = 0
    """Steps between updates of the reference by the trained policy. 0: it stays as it began."""
    ref_update_weight: Annotated[float, Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")] = 1.0
    """Weight of the policy in such an update, beside the reference's own. 1: the policy replaces it."""
    models: Annotated[str, arg(metavar="NAME=PATH|URL,...", help_behavior_hint="(optional)")] = ""
    """Models of an algorithm's further roles: causal LMs, reward models, or of causal LMs servers that have them."""

    group_size: AtLeast0 = 0
    """Responses sampled per prompt. 0: the algorithm's default."""
    max_new_tokens: AtLeast1 = 8
    """Maximum response length in tokens."""
    temperature: Annotated[float, at_least(0)] = 1.0
    """Sampling temperature, also applied to the log-probabilities in training."""
    top_k: AtLeast0 = 0
    """Sample from the k most likely tokens. 0: from all."""
    top_p: Annotated[float, Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")] = 1.0
    """Sample from the smallest set of tokens whose total probability reaches p. 1: from all."""
    stop_ids: Annotated[str, arg(metavar="ID,...", help_behavior_hint="(optional)")] = ""
    """Token ids that end a response, besides those of the tokenizer and of the model's generation_config.json."""
    stop: Annotated[str, arg(metavar="TEXT|JSON", help_behavior_hint="(optional)")] = ""
    """Text that ends a response, or a JSON list of such texts. The token that completes it is the last one."""
    slots: AtLeast1 = 64
    """Maximum sequences decoded concurrently per rank; the rest are queued."""
    cache_tokens: AtLeast0 = 0
    """Maximum tokens in the KV cache of the ranks that share a sequence: where prompts and responses may be so long
    that --slots of them exceed it, fewer sequences are decoded at a time. 0: no bound."""
    eager_decoding: bool = False
    """Issue the operators of decode steps one by one on GPUs too, where they run as CUDA graphs otherwise."""
    rollout_engine: Annotated[str, Engine] = OWN
    """What decodes the responses. own: this toolkit, in every layout. vllm: vLLM in the processes of the generate
    call, which then has tp and data-parallel degrees only; it sleeps while other calls run. URLs such as
    http://HOST:PORT/v1, with commas between them: a pool of vLLM servers, of which some may be lost."""
    rollout_cache: Positive = 1.0
    """GiB of the KV cache of --rollout-engine vllm on each of its ranks."""
    router_replay: bool = False
    """Let the tokens of responses, in log-probabilities and training of the policy, choose the experts that they chose
    when they were generated."""
    share_prefixes: bool = False
    """Compute a prompt once for its responses, in training and for log-probabilities and values."""

    sft_steps: Annotated[int, at_least(-1, f"at least 0, or -1: {DEFAULT_SFT_STEPS} for random weights")] = -1
    """Supervised steps on the correct answers before the first training step. -1: 100 for presets, else 0."""
    critic_learning_rate: Annotated[float, RATE] = AUTO_RATE
    """Peak learning rate of the critic. auto: 1e-3 for a preset, 1e-5 for a directory."""
    sft_learning_rate: Annotated[float, RATE] = AUTO_RATE
    """Peak learning rate of the supervised steps. auto: 2e-3 for a preset, 1e-5 for a directory, 1e-4 with LoRA."""
    warmup_steps: Annotated[
        int,
        at_least(-1, "at least 0, or -1 for the algorithm's"),
        arg(help_behavior_hint="(default: 20 for grpo and its variants, else 5)"),
    ] = -1
    """Steps of linear learning rate warmup. The supervised steps have the warmup of sft."""


@dataclass(frozen=True)
class RewardConfig:
    """The function that scores responses."""

    reward_function: Annotated[str, arg(metavar="NAME[=VALUE]|PATH.py:NAME")] = "match"
    """Function reward(prompt, response, answer) -> float, or a ready one. match: 1 if the response equals the answer,
    else 0. math: mathematical equality. regex=PATTERN. code: tests in a sandbox. judge=URL: a model's verdict.
    server=URL: an HTTP server's score."""
    reward_retries: AtLeast0 = 2
    """Retries of the reward function for a sample that it fails for, after 1, 2, 4, ... seconds."""
    reward_failure: Annotated[str, one_of(("stop", "zero", "drop"))] = "stop"
    """If every retry fails, or an environment. stop: end the run with a checkpoint. zero: the score is 0. drop: leave
    the sample out."""

    reward_processes: AtLeast0 = 0
    """Processes beside each rank that call the reward function, at most; for slow ones. 0: the rank calls it, except
    math and regex, which one process calls."""
    reward_timeout: Positive = 60.0
    """Seconds of a call in --reward-processes, which is ended after that."""


@dataclass(frozen=True)
class EnvironmentConfig:
    """The environment that answers the turns of responses, and scores them instead of a reward function."""

    agent: Annotated[str, arg(metavar="COMMAND|URL", help_behavior_hint="(optional)")] = ""
    """Command that acts in an episode, as in a shell without its operators: its requests to the OpenAI-compatible
    endpoint at OPENAI_BASE_URL, with the key OPENAI_API_KEY, are the policy's turns; docs/guides/rlhf/agents.md. Or the
    URL of a service on this host, which is posted these two for each episode."""
    environment: Annotated[str, arg(metavar="tools|PATH.py:NAME", help_behavior_hint="(optional)")] = ""
    """Class with reset(sample) and step(turn) -> (observation, reward, done); docs/guides/rlhf/environments.md. tools:
    run the calls of --tools in a turn; --reward-function scores the one without calls, which ends the episode."""
    tools: Annotated[str, arg(metavar="python|PATH.py:NAME,...|JSON", help_behavior_hint="(optional)")] = ""
    """Tools of --environment tools, with commas between them or as a JSON list: python (in a sandbox), or a function of
    yours."""
    max_turns: AtLeast1 = 8
    """Maximum turns of the policy in an episode; --max-new-tokens are those of all."""
    max_observation_tokens: AtLeast1 = 1024
    """Maximum tokens of all observations of an episode; of an agent's conversation, what the policy has not written."""
    environment_timeout: Positive = 60.0
    """Seconds of a step of the environment, or of an agent from a reply to its next request, which is ended then."""
    episode_timeout: NotNegative = 0.0
    """Seconds of an episode, which ends then as it is, as at --max-turns. 0: no limit."""

    @property
    def episodes(self) -> bool:
        """Return whether responses are episodes."""
        return bool(self.environment or self.agent)


@dataclass(frozen=True)
class SupervisedConfig:
    """Supervised samples beside those of the algorithm."""

    supervised_data: Annotated[str, arg(metavar="PATH.jsonl|PATH.parquet", help_behavior_hint="(optional)")] = ""
    """JSONL or Parquet file of prompts with answers, or of chats, as --algorithm sft reads them: the policy's loss has
    their mean cross-entropy besides."""
    supervised_weight: Positive = 0.1
    """Weight of that cross-entropy in the loss of each optimizer step."""
    supervised_samples: AtLeast1 = 16
    """Supervised samples of a step, which its mini-batches divide."""
    supervised_every: AtLeast1 = 1
    """Steps from one with supervised samples to the next."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations on held-out prompts."""

    eval_every: AtLeast0 = 0
    """Steps between evaluations on held-out prompts; the last step is evaluated too, and benchmarks before the first.
    0: no evaluation."""
    eval_data: Annotated[str, arg(metavar="PATH.jsonl|NAME=PATH,NAME=PATH,...", help_behavior_hint="(optional)")] = ""
    """JSONL or Parquet file of prompts to evaluate on, or benchmarks by name with their files, which bring their own
    prompts and rewards. Without it, --eval-prompts are held out of --data."""
    eval_samples: AtLeast1 = 1
    """Responses per evaluated prompt, for pass@k up to this k."""
    eval_temperature: EvalTemperature = -1.0
    """Sampling temperature of evaluations; 0 is greedy. -1: 0 for one response per prompt, else --temperature."""
    eval_pass_score: Annotated[float, Rule(math.isfinite, "finite")] = 1.0
    """Least score with which an evaluated response passes."""
    keep_best: bool = False
    """Keep the checkpoint with the highest mean score in an evaluation, and write its model to RUN/best."""


@dataclass(frozen=True)
class _Supervised:
    """The fields that the supervised steps share, besides those of train.py."""

    data: Annotated[str, arg(metavar="stdlib|PATH.jsonl|PATH.parquet")] = "stdlib"
    """JSONL or Parquet file of prompts with answers, or of preference pairs, or NAME=PATH of a benchmark; JSON lines
    also compressed, or in a file without a suffix. stdlib: built-in task over Python's own sources."""
    bad_rows: Annotated[str, one_of(BAD_ROWS)] = "refuse"
    """Lines of data files that are no prompts. refuse: an error. drop: left out, and counted."""
    long_prompts: Annotated[str, one_of(("refuse", "drop"))] = "refuse"
    """Lines of data files that do not fit the model's context. refuse: an error. drop: left out, and counted."""
    prompt_tokens: AtLeast1 = 1024
    """Maximum length of the built-in prompts in tokens; the minimum is 1/16 of it, at least 64."""
    wrong_answers: Fraction = 0.0
    """Fraction of wrong answers among the built-in demonstrations (sft only)."""
    eval_prompts: AtLeast0 = 0
    """Number of prompts to evaluate on, never trained on; of each --eval-data the first ones. 0: all of --eval-data."""
    prompts: AtLeast0 = 0
    """Prompts (or preference pairs) per step. 0: enough for 64 responses (or 64 pairs)."""
    micro_batch_tokens: Annotated[
        int, at_least(-1, f"at least 1, 0 for no limit, or -1: {TOKENS_PER_RANK} per sequence-parallel rank")
    ] = -1
    """Maximum tokens per micro-batch of a data-parallel rank, unless one sequence is longer. -1: 16,384 for each of its
    sequence-parallel ranks. 0: no limit."""
    learning_rate: Annotated[float, RATE] = AUTO_RATE
    """Peak learning rate of AdamW. auto: the algorithm's, for a preset or for a directory."""
    weight_decay: NotNegative = 0.0
    """AdamW weight decay, applied to matrices only."""
    max_grad_norm: Norm = 1.0
    """Maximum global gradient norm. inf: no clipping."""
    seed: AtLeast0 = 0
    """Seed of the initial weights, the order of the data, and sampling."""
    offload: bool = False
    """Offload the weights of untrained models to host memory between calls."""
    offload_optimizer: bool = False
    """Offload the optimizer states of trained models to host memory between train steps."""


@dataclass(frozen=True)
class SftConfig(CommonConfig, _Supervised):
    """The fields that the supervised steps before an RLHF run take from its configuration."""

    steps: AtLeast0 = 150
    """Training steps, after the supervised ones. 0: only an evaluation, with --eval-every."""


@dataclass(frozen=True)
class RlhfConfig(SftConfig, EvaluationConfig, SupervisedConfig, EnvironmentConfig, RewardConfig, _Rlhf):
    """Train a language model with PPO, GRPO and related algorithms, or on demonstrations and preference pairs. Every
    model call has its own ranks and parallel layout.

    For example, on 8 ranks: torchrun --nproc-per-node 8 rlhf.py --algorithm grpo --sp-ulysses 2 --sp-ring 2

    Outside the repository, use --no-python usp-rlhf instead of rlhf.py.
    """

    def without_effect(self) -> dict[str, str]:
        """Return the options that have no effect beside the others, whatever their values, with messages; {} for an
        algorithm that is unknown or cannot be loaded."""
        with suppress(ValueError):
            if algorithm := with_outside(self.algorithm, ALGORITHMS).get(self.algorithm):
                return without_effect_of(self, algorithm)
        return {}

    @property
    def begun(self) -> float:
        """Return how many times the prompts of a step are begun."""
        return self.oversample or ((1 + self.staleness) / 2 if self.partial_rollouts else 1.0)

    @property
    def begins_ahead(self) -> bool:
        """Return whether a step takes the prompts that are complete first."""
        return self.partial_rollouts or self.begun > 1


@dataclass(frozen=True)
class ReplanOptions:
    """When to search for another plan, and which gain is worth a change.

    Attributes:
        every: steps between two searches.
        gain: the least part of a step's time that another plan must save.
        budget: seconds of a search, in which no rank trains.
    """

    every: AtLeast1 = 10
    gain: Annotated[float, Rule(lambda value: 0 <= value < 1, "from 0 to 100%")] = 0.05
    budget: Above0 = 5.0

    @staticmethod
    def parse(text: str) -> ReplanOptions:
        """Parse every=N,gain=5%,budget=SECONDS; the gain may be a fraction, too. Raises ValueError naming every part
        that is wrong."""
        as_fraction = re.sub(r"([\d.]+)%", lambda match: repr(float(match[1]) / 100), text)
        options = ReplanOptions(**parse_options(as_fraction, ReplanOptions, "--replan"))
        if problems := list(parameter_violations(options)):
            raise ValueError(f"--replan = {text}: {'; '.join(problems)}")
        return options


# Fields that concern generated responses, which algorithms on given ones do not have.
_OF_RESPONSES = (
    *("group_size", "max_new_tokens", "temperature", "top_k", "top_p", "slots", "rollout_cache"),
    *("stop", "stop_ids", "rollout_engine", "cache_tokens", "eager_decoding", "share_prefixes"),
    *("router_replay", "delta_updates"),
    *("staleness", "partial_rollouts", "oversample", "environment", "agent", "eval_every", "replan"),
)
# Fields that have an effect only beside another one.
_OPTIONS: Mapping[str, Sequence[str]] = {
    "reward_processes": ("reward_timeout",),
    "ref_update_every": ("ref_update_weight",),
    "eval_every": names_of(EvaluationConfig)[1:],
    "environment": ("tools",),
    "supervised_data": names_of(SupervisedConfig)[1:],
}
_SCORING = ("reward_model", "reward_retries", "reward_processes", "reward_timeout")
_ONLY_WITH = (
    *ONLY_WITH,
    *(
        OnlyWith(tuple(options), attrgetter(name), f"is an option of {flag(name)}: give both or neither")
        for name, options in _OPTIONS.items()
    ),
    OnlyWith(
        names_of(EnvironmentConfig)[3:],
        attrgetter("episodes"),
        "is an option of --environment and --agent: give one of these, or remove it",
    ),
    OnlyWith(
        ("hardware",),
        lambda c: c.plan == SEARCH or c.replan,
        f"is only used by --plan {SEARCH} and --replan: give one, or remove it",
    ),
    OnlyWith(("search_budget",), lambda c: c.plan == SEARCH, f"is only used by --plan {SEARCH}: give both or neither"),
    OnlyWith(("rollout",), lambda c: c.plan == "separation", "is only used by --plan separation: remove it"),
    OnlyWith(
        ("prompt_tokens",),
        lambda c: c.data == STDLIB,
        f"is that of built-in prompts: give --data {STDLIB}, or remove it",
    ),
    OnlyWith(
        ("long_prompts", "bad_rows"),
        lambda c: c.data != STDLIB or c.eval_data or c.supervised_data,
        "requires a --data file: built-in prompts are good, remove it",
    ),
    *(
        OnlyWith(names, condition, f"is not used with {flag(scorer)}, which scores the responses: remove one")
        for names, condition, scorer in (
            (names_of(RewardConfig), lambda c: not c.reward_model or c.episodes, "reward_model"),
            (_SCORING, lambda c: not c.environment, "environment"),
            (_SCORING, lambda c: not c.agent, "agent"),
            (("reward_function",), lambda c: c.environment in ("", TOOLS), "environment"),
        )
    ),
)


def unused_layout_flags(plan: str) -> tuple[str, ...]:
    """Return the fields of layouts that a plan does not use, because it says or chooses them."""
    chosen = ("micro_batch_tokens", "ac", "ac_offload", "mlp_tile") if plan not in NAMED_PLANS else ()
    return () if plan in NAMED_PLANS and plan != "heuristic" else (*names_of(ParallelConfig), *chosen)


def has_critic(config: RlhfConfig, algorithm: Algorithm) -> bool:
    """Return whether a step of the algorithm has a critic; also for options that are wrong."""
    try:
        options = parse_options(config.options, algorithm.options, "--options")
        return "critic" in algorithm.graph(algorithm.options(**options)).roles
    except (ValueError, TypeError):  # told elsewhere
        return True


def sft_steps_of(config: RlhfConfig, algorithm: Algorithm) -> int:
    """Return the supervised steps before the first step."""
    if algorithm.data == "answers":
        return 0
    return config.sft_steps if config.sft_steps >= 0 else DEFAULT_SFT_STEPS * (config.model in PRESETS)


def without_effect_of(config: RlhfConfig, algorithm: Algorithm) -> dict[str, str]:
    """Return the options that have no effect with an algorithm beside the others, with messages."""
    name, elsewhere = config.algorithm, dict[str, str]()
    if not has_critic(config, algorithm):
        elsewhere["critic_learning_rate"] = f"is of a critic, and {name} has none: remove it"
    if not sft_steps_of(config, algorithm):  # which have no layouts in the plan
        elsewhere |= dict.fromkeys(unused_layout_flags(config.plan), f"is not used by --plan {config.plan}: remove it")
        elsewhere["sft_learning_rate"] = "is of supervised steps before the others, and there are none: remove it"
    if algorithm.data == "answers" and config.sft_steps:
        elsewhere["sft_steps"] = f"is of steps before those of {name}, which are the same: give --steps"
    if algorithm.data != "prompts":
        elsewhere |= dict.fromkeys(_OF_RESPONSES, f"is for generated responses, and {name} has none: remove it")
        scores = f"is not used: {name} does not score responses, remove it"
        elsewhere |= dict.fromkeys(names_of(RewardConfig), scores)
    if algorithm.data != "answers" or config.data != STDLIB:
        elsewhere["wrong_answers"] = f"requires --data {STDLIB} and --algorithm sft: remove it"
    return without_effect(config, _ONLY_WITH) | {
        option: f"{as_given(config, option)} {why}" for option, why in elsewhere.items()
    }


def violations(config: RlhfConfig, algorithms: Mapping[str, Algorithm]) -> Iterator[str]:
    yield from value_violations(config, algorithm=among(tuple(algorithms))).values()
    yield from common_violations(config)
    algorithm = algorithms.get(config.algorithm)
    found = without_effect_of(config, algorithm) if algorithm else without_effect(config, _ONLY_WITH)
    yield from changed_ones(config, found)
    yield from _search_violations(config)
    yield from _evaluation_violations(config)
    yield from _replan_violations(config)
    yield from _environment_violations(config)
    yield from _supervised_violations(config, algorithm)
    if config.rollout_engine != OWN and (config.plan == SEARCH or config.replan):
        asked = f"--rollout-engine = {config.rollout_engine}"
        why = ", whose devices they do not know" if config.rollout_engine.startswith(HTTP) else ""
        yield f"--plan {SEARCH} and --replan do not predict calls with {asked}{why}: give a named plan or a YAML file"
    if config.ref_update_every and config.lora_rank:
        asked = f"--ref-update-every = {config.ref_update_every}"
        yield f"{asked} is not supported with --lora-rank, whose reference is the policy's own base: remove one"
    if config.router_replay and config.begins_ahead:
        yield "--router-replay is not supported with --partial-rollouts and --oversample: remove one"
    yield from _rollout_violations(config)
    if config.delta_updates and (config.plan == SEARCH or config.replan):
        other = "--replan" if config.replan else f"--plan {SEARCH}"
        yield f"--delta-updates keeps copies in memory, which {other} does not predict: remove one"
    if config.lora_rank and algorithm and algorithm.model_role != "actor":
        asked = f"--lora-rank = {config.lora_rank} with --algorithm {config.algorithm}"
        yield f"{asked}, which trains a scalar head, is not supported: heads get no adapters, remove it"


def given(config: RlhfConfig, names: Iterable[str]) -> list[str]:
    """Return which of these fields differ from their defaults."""
    return [name for name in names if getattr(config, name) != getattr(RlhfConfig, name)]


def texts(value: str, flag_name: str, apart: str = "") -> list[str]:
    """Return the texts of a JSON list, or of a value that is no list, which `apart` separates if there are several."""
    if not value.startswith("["):
        return [text.strip() for text in (value.split(apart) if apart else [value]) if text] if value else []
    try:
        listed = json.loads(value)
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise ValueError(f'{flag_name} = {value} must be a text, or a JSON list of texts such as ["one", "two"]')
    return listed


def _rollout_violations(config: RlhfConfig) -> Iterator[str]:
    if config.staleness > 1 and not config.partial_rollouts:
        why = "whole rollouts are made one step ahead, and earlier ones would only be older"
        yield f"--staleness = {config.staleness}: {why}: use 1, or add --partial-rollouts"
    if config.partial_rollouts and config.staleness < 2:
        why = "a response that goes on after a weight update is at least 2 steps old when it is trained on"
        yield f"--partial-rollouts with --staleness = {config.staleness}: {why}: use --staleness 2 or more"
    if config.partial_rollouts and config.oversample > config.staleness:
        most = f"--staleness = {config.staleness}: more cannot be trained on in time"
        yield f"--oversample = {config.oversample:g} must be at most {most}"


def _search_violations(config: RlhfConfig) -> Iterator[str]:
    if config.plan != SEARCH:
        return
    for name in ("offload", "offload_optimizer"):
        if getattr(config, name):
            yield f"{flag(name)} is chosen by --plan {SEARCH}: remove it"
    if config.lora_rank:
        asked = f"--lora-rank = {config.lora_rank}"
        yield f"--plan {SEARCH} does not predict steps of adapters ({asked}): give a named plan or a YAML file"


def _evaluation_violations(config: RlhfConfig) -> Iterator[str]:
    if not config.eval_every:
        if not config.steps:
            yield "--steps = 0 only evaluates: add --eval-every 1 with --eval-data, or give at least 1"
        return
    if not config.eval_data and not config.eval_prompts:
        yield f"--eval-every = {config.eval_every} needs prompts: give --eval-data, or --eval-prompts to hold out"
    if config.eval_data == STDLIB:
        yield f"--eval-data = {STDLIB} must be a data file: --eval-prompts holds prompts out of the built-in ones"
    try:
        names = [name for name, _ in parse_named(config.eval_data) if name]
    except ValueError as error:
        yield violation_of(error).shown(lambda name, value: f"{flag(name)} = {value}")
        return
    if unknown := [name for name in names if name not in BENCHMARKS]:
        known = f"{unknown[0]} must be one of {', '.join(BENCHMARKS)}"
        yield f"--eval-data = {config.eval_data}: {known}, or give a file without a name"
    for other in given(config, ("reward_model", "environment", "agent")) if names else ():
        yield f"--eval-data = {config.eval_data} has rewards of its own, and {flag(other)} scores: remove one"
    if config.eval_samples > 1 and config.eval_temperature == 0:
        yield f"--eval-samples = {config.eval_samples} with --eval-temperature = 0 are equal responses: change one"
    if config.keep_best and not config.checkpoint_every:
        yield "--keep-best keeps a checkpoint, but --checkpoint-every is 0: set it, or remove --keep-best"


def _environment_violations(config: RlhfConfig) -> Iterator[str]:
    if not config.episodes:
        return
    if config.agent:
        for name in given(config, ("environment", "share_prefixes", "router_replay")):
            yield f"--agent = {config.agent} is not supported with {flag(name)}: remove one"
        if urls := [value for value in (config.ref, config.models) if any(http in value for http in HTTP)]:
            yield f"--agent = {config.agent} is not supported with a server's log-probabilities ({urls[0]}): remove one"
    if bool(config.tools) != (config.environment == TOOLS):
        yield f"--tools = {config.tools} are those of --environment {TOOLS}: give both or neither"
    if config.replan:
        yield "--replan does not predict how often an environment or agent answers: remove one"


def _supervised_violations(config: RlhfConfig, algorithm: Algorithm | None) -> Iterator[str]:
    if not config.supervised_data:
        return
    if algorithm is not None and algorithm.data == "answers":
        yield f"--supervised-data: {config.algorithm} trains on nothing else, give its samples in --data"
    if config.plan == SEARCH or config.replan:
        yield f"--plan {SEARCH} and --replan do not predict --supervised-data: give a named plan or a YAML file"


def _replan_violations(config: RlhfConfig) -> Iterator[str]:
    if not config.replan:
        return
    try:
        options = ReplanOptions.parse(config.replan)
    except ValueError as error:
        yield str(error)
        return
    if options.every >= config.steps:
        yield f"--replan = {config.replan} searches after step {options.every} of --steps = {config.steps}: too late"
    for name in given(config, ("lora_rank", "ep")):
        calls = "calls with adapters" if name == "lora_rank" else "calls with expert parallelism"
        yield f"--replan = {config.replan} has no predictions of {calls}: remove it, or {flag(name)}"
