"""From a configuration to all that an RLHF run needs before its ranks communicate, or to one message of all that is
wrong.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import yaml

from attention import KERNEL_NAMES, LAYOUTS, AttentionSpec, select_kernel
from parallel import SP_ORDERS, ZERO_STAGES, ParallelDims, latest, read_extra
from usp.config import DEVICES, DTYPES, ParallelConfig, flag
from usp.data.documents import STDLIB
from usp.data.tokenizer import Tokenizer
from usp.hf.models import load_model_config, model_facts
from usp.hf.tokenizers import load_tokenizer
from usp.presets import PRESETS
from usp.rlhf.data.datasets import Examples, open_examples
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.named_plans import NAMED_PLANS, Facts, named_plan
from usp.rlhf.plan.plan import ExecutionPlan
from usp.rlhf.plan.plan_text import from_mapping
from usp.rlhf.roles.spec import RoleSpec
from usp.rlhf.runtime.step_plan import batch_violations
from usp.run.failures import ConfigurationError, listed, nearest
from usp.run.launch import Launch, choose_device, computation_dtype
from usp.run.metrics import METRICS_FILE, wandb_problem
from usp.train.engines.base import AdamW
from usp.train.resume import CHECKPOINTS, Start, find_start
from usp.train.validate import parallel_dims

from .algorithms.graphs import ALGORITHMS, build_graph
from .algorithms.kl import horizon_violation
from .algorithms.options import PPO, PolicyOptions
from .algorithms.rewards import ScoreWith
from .checkpoints import RlhfState, resume_violations, sft_violations
from .config import RlhfConfig, algorithm_options, default_of, parse_options

T = TypeVar("T")
PAIRS = ("reward_model", "dpo")
DEFAULT_SFT_STEPS = 100
SFT, MODEL = "sft", "model"  # folders of a run: its supervised steps, and what they and it leave
LEARNING_RATE, LEARNING_RATES = 2e-3, {"ppo": 3e-4}  # of a tiny model
RESPONSES = 64  # in a step, where --prompts does not say


@dataclass(frozen=True)
class Prepared:
    """A run that can start.

    Attributes:
        config: without any `auto` or -1.
        stop_ids: what ends a response.
        start: the run's folder, and the checkpoint that it continues from; saved: what that holds beside tensors.
    """

    config: RlhfConfig
    device: torch.device
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    examples: Examples
    graph: DataflowGraph
    plan: ExecutionPlan
    roles: dict[str, RoleSpec]
    kernel_choice: str
    start: Start
    saved: RlhfState | None


def prepare(config: RlhfConfig, launch: Launch, start: Start | None = None) -> Prepared:
    """Check `config` and load what it names: the same result, or the same error, on every rank.

    start: where the run begins, if that is known; else `find_start` says it.

    Raises ConfigurationError with every violation found, before any rank communicates.
    """
    if not config.learning_rate:
        config = replace(config, learning_rate=LEARNING_RATES.get(config.algorithm, LEARNING_RATE))
    problems = list(violations(config))

    def attempt(load: Callable[[], T]) -> T | None:
        try:
            return load()
        except (ValueError, TypeError, OSError, yaml.YAMLError) as error:
            problems.append(str(error))
            return None

    device = attempt(lambda: choose_device(config.device, launch)) if config.device in DEVICES else None
    tokenizer = attempt(lambda: load_tokenizer(config.tokenizer))
    dtype = computation_dtype(config.dtype, device) if device and config.dtype in DTYPES else torch.float32
    specs = attempt(lambda: role_specs(config, dtype)) if config.algorithm in ALGORITHMS else None
    start = start or attempt(lambda: _start(config, launch)) or Start()
    if problems or device is None or tokenizer is None or specs is None:
        raise ConfigurationError(listed(problems))
    kernel = attempt(partial(_kernel_choice, config, specs, device))
    problems += _vocabulary_violations(specs, tokenizer)
    longest = min(spec.config.max_position_embeddings for spec in specs.values())
    whole = config.algorithm in ("sft", *PAIRS)
    room = longest - (0 if whole else config.max_new_tokens)
    made = {name: getattr(config, name) for name in ("prompt_tokens", "seed", "wrong_answers")}
    examples = attempt(partial(open_examples, config.data, _keys(config), tokenizer, longest=room, whole=whole, **made))
    stop_ids = () if tokenizer.eos is None else (tokenizer.eos,)
    saved = attempt(partial(_read_state, start, config)) if start.checkpoint else None
    if problems or examples is None:
        raise ConfigurationError(listed(problems))
    reward = attempt(lambda: _reward(config, tokenizer, examples))
    options = attempt(lambda: algorithm_options(config, stop_ids, reward))
    graph = attempt(lambda: build_graph(config.algorithm, options)) if options else None
    if problems or graph is None:
        raise ConfigurationError(listed(problems))
    prompts = config.prompts or math.ceil(RESPONSES / graph.group_size)
    problems += _role_violations(config, graph)
    problems += _step_violations(prompts, config, options, graph)
    specs = {role: specs[role] for role in graph.roles}
    plan = attempt(lambda: _plan(config, graph, specs, launch))
    if problems or plan is None or kernel is None:
        raise ConfigurationError(listed(problems))
    resolved = replace(config, device=device.type, dtype=str(dtype).removeprefix("torch."), prompts=prompts)
    return Prepared(
        config=resolved,
        device=device,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        examples=examples,
        graph=graph,
        plan=plan,
        roles=specs,
        kernel_choice=kernel,
        start=start,
        saved=saved,
    )


AT_LEAST_ONE = ("prompt_tokens", "max_new_tokens", "slots", "steps", "log_every", "keep_checkpoints")
NOT_NEGATIVE = (
    "prompts",
    "group_size",
    "temperature",
    "top_k",
    "micro_batch_tokens",
    "warmup_steps",
    "weight_decay",
    "seed",
)


def violations(config: RlhfConfig) -> Iterator[str]:
    """What is wrong with single values, one message each."""
    for name, choices in (
        ("algorithm", tuple(ALGORITHMS)),
        ("sp_layout", LAYOUTS),
        ("sp_order", SP_ORDERS),
        ("attention_kernel", KERNEL_NAMES),
        ("dtype", DTYPES),
        ("device", DEVICES),
    ):
        value = getattr(config, name)
        if value not in choices:
            yield f"{flag(name)} = {value!r} must be one of {', '.join(choices)}{nearest(value, choices)}"
    if config.zero not in ZERO_STAGES:
        yield f"--zero = {config.zero} must be one of {', '.join(map(str, ZERO_STAGES))}"
    for name in (*AT_LEAST_ONE, "loss_chunk"):
        if getattr(config, name) < 1:
            yield f"{flag(name)} = {getattr(config, name)} must be at least 1"
    for name in (*NOT_NEGATIVE, "checkpoint_every", "hang_timeout"):
        if not getattr(config, name) >= 0:
            yield f"{flag(name)} = {getattr(config, name)} must not be negative"
    for name in ("learning_rate", "critic_learning_rate", "sft_learning_rate"):
        if not 0 < getattr(config, name) < math.inf:
            yield f"{flag(name)} = {getattr(config, name)} must be positive and finite"
    if not config.max_grad_norm > 0:
        yield f"--max-grad-norm = {config.max_grad_norm} must be positive; inf never clips"
    if not 0 < config.top_p <= 1:
        yield f"--top-p = {config.top_p} must be above 0 and at most 1"
    if not 0 <= config.wrong_answers < 1:
        yield f"--wrong-answers = {config.wrong_answers} must be at least 0 and below 1"
    elif config.wrong_answers and (config.algorithm != "sft" or config.data != STDLIB):
        yield f"--wrong-answers = {config.wrong_answers} is for the built-in answers of --algorithm sft: drop it"
    if config.sft_steps < -1:
        yield f"--sft-steps = {config.sft_steps} must be at least 0, or -1: {DEFAULT_SFT_STEPS} for random weights"
    if problem := wandb_problem(config.wandb_project):
        yield problem


def sft_steps(config: RlhfConfig) -> int:
    """Supervised steps before the first of another algorithm."""
    if config.algorithm == "sft":
        return 0
    return config.sft_steps if config.sft_steps >= 0 else DEFAULT_SFT_STEPS * (config.model in PRESETS)


def _start(config: RlhfConfig, launch: Launch) -> Start:
    """Where the run begins. Raises ValueError where what its folder holds is not of this run."""
    if not (steps := sft_steps(config)):
        return find_start(config, launch)
    start = find_start(config, launch, traces=(METRICS_FILE, SFT))
    if start.folder is None:
        return start
    folder = start.folder / SFT
    if (folder / MODEL).is_dir() or latest(folder / CHECKPOINTS):
        saved = yaml.safe_load((folder / "config.yaml").read_text()) or {}
        if found := sft_violations(saved, config, steps):
            raise ValueError(listed(found))
    return start


def role_specs(config: RlhfConfig, dtype: torch.dtype) -> dict[str, RoleSpec]:
    """The model of every role that an algorithm may ask for, computing in `dtype`.

    Raises:
        ValueError: naming what cannot be loaded.
    """
    optimizer = AdamW(config.weight_decay, betas=(0.9, 0.95))
    common: dict[str, Any] = {
        "dtype": dtype,
        "optimizer": optimizer,
        "max_grad_norm": config.max_grad_norm,
        "kernel": config.attention_kernel,
        "loss_chunk": config.loss_chunk,
        "seed": config.seed,
    }

    def spec(role: str, names: Sequence[str], head: Literal["lm", "scalar"], rate: float) -> RoleSpec:
        """names: of the flags that say where it comes from; the first that says something counts."""
        name = next((name for name in names if getattr(config, name)), names[-1])
        source = getattr(config, name)
        new_head = head == "scalar" and source not in PRESETS and not _is_reward_model(source)
        try:
            model = load_model_config(source, head, new_head)
        except ValueError as error:
            raise ValueError(str(error).replace(f"model={source}", f"{flag(name)} = {source}", 1)) from error
        return RoleSpec(role, source, model, new_head=new_head, learning_rate=rate, **common)

    roles = {"actor": spec("actor", ("model",), "lm", config.learning_rate)}
    roles["ref"] = spec("ref", ("ref", "model"), "lm", config.learning_rate)
    reward = "model" if config.algorithm == "reward_model" else "reward_model"
    if getattr(config, reward):
        roles["reward"] = spec("reward", (reward,), "scalar", config.learning_rate)
    roles["critic"] = spec("critic", ("critic", "reward_model", "model"), "scalar", config.critic_learning_rate)
    return roles


def _keys(config: RlhfConfig) -> tuple[str, ...]:
    """What the lines of --data must hold."""
    answers = ("answer",) if config.algorithm == "sft" or sft_steps(config) else ()
    if config.algorithm in PAIRS:
        return "prompt", "chosen", "rejected", *answers
    return ("prompt", *answers) if config.reward_model else ("prompt", "answer")


def _is_reward_model(folder: str) -> bool:
    try:
        load_model_config(folder, "scalar")
    except ValueError:
        return False
    return True


def _kernel_choice(config: RlhfConfig, specs: dict[str, RoleSpec], device: torch.device) -> str:
    facts = model_facts(config.model, specs["actor"].config)
    return select_kernel(config.attention_kernel, AttentionSpec(), device, specs["actor"].dtype, facts.head_dim)[1]


def _vocabulary_violations(specs: dict[str, RoleSpec], tokenizer: Tokenizer) -> Iterator[str]:
    for role, spec in specs.items():
        if tokenizer.vocab_size > spec.config.vocab_size:
            yield (
                f"--tokenizer = {tokenizer.name} gives ids up to {tokenizer.vocab_size - 1}, and the {role} "
                f"{spec.source} has a vocabulary of {spec.config.vocab_size}: use the model's own tokenizer"
            )


def _role_violations(config: RlhfConfig, graph: DataflowGraph) -> Iterator[str]:
    """Which models are named that no call of the graph has."""
    for name, role in (("critic", "critic"), ("ref", "ref"), ("reward_model", "reward")):
        # What --algorithm reward_model trains in that role is --model.
        if getattr(config, name) and (role not in graph.roles or config.algorithm == "reward_model"):
            yield f"{flag(name)} = {getattr(config, name)}: {config.algorithm} as asked calls no such model: drop it"


def _reward(config: RlhfConfig, tokenizer: Tokenizer, examples: Examples) -> ScoreWith | None:
    """How responses are scored; None where a reward model does, and where nothing is."""
    if not issubclass(ALGORITHMS[config.algorithm].options, PolicyOptions):
        if config.reward_function != "match":
            raise ValueError(
                f"--reward-function = {config.reward_function}: {config.algorithm} scores nothing: drop it"
            )
        return None
    if config.reward_model:
        if config.reward_function != "match":
            raise ValueError("--reward-model and --reward-function both give rewards: drop one")
        return None
    return ScoreWith(_reward_function(config.reward_function), tokenizer.decode, lambda index: examples[index].answer)


def match(prompt: str, response: str, answer: str) -> float:
    """1 for exactly the answer, else 0."""
    return float(response.strip() == answer.strip())


def _reward_function(named: str) -> Callable[[str, str, str], float]:
    if named == "match":
        return match
    path, _, name = named.rpartition(":")
    file = Path(path).expanduser()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"--reward-function = {named} must be match, or PATH.py:NAME with a file that exists")
    spec = importlib.util.spec_from_file_location(f"{file.resolve()}", file)  # no import statement can say this name
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up the names of annotations
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"--reward-function = {named}: {file} cannot be loaded: {said}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--reward-function = {named}: {file} has no function {name}{nearest(name, vars(module))}")
    return function


def _step_violations(prompts: int, config: RlhfConfig, options: Any, graph: DataflowGraph) -> Iterator[str]:
    """Why a step cannot have so many prompts, or pairs."""
    samples = prompts * (2 if config.algorithm in PAIRS else graph.group_size)
    if found := batch_violations(graph, samples):
        yield f"--prompts = {prompts}: {'; '.join(found)}"
    if isinstance(options, PPO) and options.kl_target and (violation := horizon_violation(options.kl_horizon, samples)):
        yield f"--options = {config.options}: {violation}"


def _plan(config: RlhfConfig, graph: DataflowGraph, specs: dict[str, RoleSpec], launch: Launch) -> ExecutionPlan:
    """The plan that --plan names, checked against graph, world and models."""
    facts = [model_facts(spec.source, spec.config) for spec in specs.values()]
    named, file = config.plan in NAMED_PLANS, Path(config.plan).expanduser()
    if not named and (file.suffix not in (".yaml", ".yml") or not file.is_file()):
        names = ", ".join(NAMED_PLANS)
        near = nearest(config.plan, NAMED_PLANS)
        raise ValueError(f"--plan = {config.plan} must be one of {names}, or a YAML file that exists{near}")
    unused = () if sft_steps(config) else without_layout_flags(config)  # supervised steps have them
    if dropped := [*unused, *(("rollout",) if config.rollout and config.plan != "separation" else ())]:
        raise ValueError(f"--plan = {config.plan} has no use for {', '.join(map(flag, dropped))}: leave that out")
    if not named:
        plan = from_mapping(yaml.safe_load(file.read_text()))
        plan.check(graph, launch.world_size)
    else:
        plan = named_plan(
            config.plan,
            graph,
            Facts(
                world_size=launch.world_size,
                ranks_per_host=launch.local_world_size,
                heads=math.gcd(*(math.gcd(fact.num_heads, fact.num_kv_heads) for fact in facts)),
                layers=min(len(fact.windows) for fact in facts),
                dims=parallel_dims(config, ep=1),
                rollout_dims=_rollout_dims(config),
                zero=config.zero,
                tp_sequence_parallel=config.tp_sequence_parallel,
                micro_batch_tokens=config.micro_batch_tokens,
                sp_layout=config.sp_layout,
            ),
        )
    if config.offload:
        plan = replace(plan, offload=frozenset(graph.roles) - frozenset(graph.trained_roles))
    return plan


def without_layout_flags(config: RlhfConfig) -> dict[str, Any]:
    """The defaults of those flags that `config` sets, and that its plan has no use for: its layouts are its own."""
    if config.plan in NAMED_PLANS and config.plan != "heuristic":
        return {}
    names = [field.name for field in fields(ParallelConfig)]
    if config.plan not in NAMED_PLANS:
        names.append("micro_batch_tokens")
    defaults = {name: default_of(RlhfConfig, name) for name in names}
    return {name: value for name, value in defaults.items() if getattr(config, name) != value}


def _rollout_dims(config: RlhfConfig) -> ParallelDims | None:
    """What --rollout says; None where it says nothing. Raises ValueError for what is no degree."""
    values = parse_options(config.rollout, ParallelDims, "--rollout")
    return ParallelDims(**values) if values else None


def _read_state(start: Start, config: RlhfConfig) -> RlhfState:
    assert start.checkpoint is not None and start.folder is not None
    saved = RlhfState.from_extra(read_extra(start.checkpoint))
    after_sft = bool(sft_steps(config)) or config.model == str(start.folder / SFT / MODEL)
    if found := resume_violations(saved, config, finished_too=start.finished_too, other_model=after_sft):
        raise ValueError(listed(found))
    return saved
