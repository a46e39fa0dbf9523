"""From a configuration to everything that an RLHF run needs before its ranks communicate, or one list of errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from parallel import DamagedCheckpoint, ParallelDims, latest, read_extra
from usp.config import DEVICES, DTYPES, ParallelConfig, flag
from usp.data.tokenizer import Tokenizer
from usp.hf.models import end_of_sequence_ids, model_facts
from usp.hf.tokenizers import load_tokenizer, tokenizer_of
from usp.presets import LORA_FACTOR, LORA_RATE, PRESETS, PRETRAINED_RATE, settled_rate
from usp.rlhf.data.datasets import Example, Examples, open_examples
from usp.rlhf.data.held_out import hold_out
from usp.rlhf.generation.stopping import stop_problems
from usp.rlhf.graph.calls import Generate
from usp.rlhf.graph.dataflow import DataflowGraph
from usp.rlhf.plan.base_reference import policy_as_reference
from usp.rlhf.plan.named_plans import NAMED_PLANS, Facts, named_plan
from usp.rlhf.plan.plan import ExecutionPlan, optimizer_of, staleness_violations
from usp.rlhf.plan.plan_text import from_mapping
from usp.rlhf.roles.role_spec import RoleSpec
from usp.rlhf.runtime.step_plan import batch_violations
from usp.run.failures import Problems, listed, nearest
from usp.run.launch import Launch, choose_device, computation_dtype
from usp.run.metrics import METRICS_FILE
from usp.train.resolve import settled_lora
from usp.train.resume import CHECKPOINTS, MODEL, Start, find_start
from usp.train.validate import parallel_dims

from .algorithms.algorithm import Algorithm, Options
from .algorithms.registry import ALGORITHMS, build_graph, with_outside
from .algorithms.rewards import ScoreWith, load_reward_function
from .checkpoints import RlhfState, resume_violations, running_plan, sft_violations
from .config import DEFAULT_SFT_STEPS, REWARD_FLAGS, SEARCH, RlhfConfig, default_of, parse_options
from .role_specs import (
    context,
    generation_violations,
    kernel_choice,
    layout_violations,
    missing_models,
    role_specs,
    router_violations,
    unused_models,
    vocabulary_violations,
)
from .validate import violations

SFT = "sft"  # the directory of a run's supervised steps
RESPONSES = 64  # per step, unless --prompts is set
CRITIC_RATE, SFT_RATE = 1e-3, 2e-3  # peak learning rates for presets


@dataclass(frozen=True)
class Unplanned:
    """A run that lacks nothing but its plan. Attributes as of `PreparedRlhf`."""

    config: RlhfConfig
    algorithm: Algorithm
    launch: Launch
    device: torch.device
    tokenizer: Tokenizer
    examples: Examples
    graph: DataflowGraph
    roles: dict[str, RoleSpec]
    start: Start
    drawn: int


Planner = Callable[[Unplanned], ExecutionPlan]  # the same plan or ValueError on every rank


@dataclass(frozen=True)
class PreparedRlhf:
    """A run that can start.

    Attributes:
        config: the configuration with every default resolved; device and dtype as asked, to fit other machines.
        sft_steps: supervised steps before the first step.
        drawn: prompts (or pairs) that a step reads, which may be more than it trains on.
        start: the run's directory and the checkpoint to continue from; saved: that checkpoint's state besides tensors.
        held_out: prompts to evaluate on.
    """

    config: RlhfConfig
    algorithm: Algorithm
    sft_steps: int
    device: torch.device
    tokenizer: Tokenizer
    examples: Examples
    graph: DataflowGraph
    plan: ExecutionPlan
    roles: dict[str, RoleSpec]
    kernel_choice: str
    start: Start
    saved: RlhfState | None
    drawn: int
    held_out: Sequence[Example] = ()

    def unplanned(self, launch: Launch) -> Unplanned:
        """Return the run as it was before it had a plan."""
        return Unplanned(
            self.config,
            self.algorithm,
            launch,
            self.device,
            self.tokenizer,
            self.examples,
            self.graph,
            self.roles,
            self.start,
            self.drawn,
        )


def prepare(
    config: RlhfConfig,
    launch: Launch,
    start: Start | None = None,
    algorithms: Mapping[str, Algorithm] = ALGORITHMS,
    planner: Planner | None = None,
) -> PreparedRlhf:
    """Check `config` and load what it names, with the same result or the same error on every rank.

    Args:
        start: where the run begins; None: `find_rlhf_start` decides, and `saved` stays None for a damaged checkpoint.
        algorithms: `config.algorithm` names one of them, or PATH.py:NAME.
        planner: finds the plan for --plan search, once all else is known to be right.

    Raises:
        ConfigurationError: with every violation found, before any rank communicates.
    """
    problems = Problems((), (ValueError, TypeError, OSError, yaml.YAMLError))
    attempt = problems.attempt
    algorithms = attempt(lambda: with_outside(config.algorithm, algorithms)) or {}
    problems.check()
    problems += violations(config, algorithms)
    device = attempt(lambda: choose_device(config.device, launch)) if config.device in DEVICES else None
    tokenizer = attempt(partial(_tokenizer, config))
    config = replace(config, tokenizer=tokenizer.name if tokenizer else config.tokenizer)
    dtype = computation_dtype(config.dtype, device) if device and config.dtype in DTYPES else torch.float32
    algorithm = algorithms.get(config.algorithm)
    if algorithm is None:  # one of the problems
        problems.check()
    assert algorithm is not None
    config = _with_rates(settled_lora(config), algorithm)
    sft_steps = _sft_steps(config, algorithm)
    problems += _frozen_preset(config, sft_steps)
    specs = attempt(lambda: role_specs(config, algorithm, dtype))
    strict, start = start is not None, start or attempt(lambda: find_rlhf_start(config, sft_steps, launch)) or Start()
    problems.check()
    assert device is not None and tokenizer is not None and specs is not None
    kernel = attempt(partial(kernel_choice, config, specs["actor"], device))
    problems += vocabulary_violations(specs, tokenizer)
    if algorithm.data == "prompts":
        problems += attempt(partial(generation_violations, specs)) or ()
    opened = attempt(partial(_open_data, config, algorithm, sft_steps, specs, tokenizer))
    saved = attempt(partial(_read_state, start, config, sft_steps, strict)) if start.checkpoint else None
    problems.check()
    assert opened is not None
    examples, held_out = opened
    reward = attempt(lambda: _reward(config, algorithm, tokenizer, examples))
    options = attempt(partial(_algorithm_options, config, algorithm, tokenizer, reward, specs["actor"]))
    graph = attempt(lambda: build_graph(config.algorithm, options, algorithms)) if options else None
    problems.check()
    assert options is not None and graph is not None
    config = replace(config, prompts=config.prompts or math.ceil(RESPONSES / graph.group_size))
    drawn = options.drawn(config.prompts)
    problems += _graph_violations(config, algorithm, options, graph, specs, drawn)
    used = {role: specs[role] for role in graph.roles if role in specs}
    if config.plan == SEARCH:
        problems.check()
    run = Unplanned(config, algorithm, launch, device, tokenizer, examples, graph, used, start, drawn)
    plan = attempt(partial(_plan, run, sft_steps, planner))
    problems.check()
    assert plan is not None and kernel is not None
    if config.lora_rank and config.ref in ("", config.model):
        graph, plan = policy_as_reference(graph, plan)
    specs = {role: specs[role] for role in graph.roles}
    return PreparedRlhf(
        config,
        algorithm,
        sft_steps,
        device,
        tokenizer,
        examples,
        graph,
        running_plan(saved, config, launch.world_size) or plan,
        specs,
        kernel,
        start,
        saved,
        drawn,
        held_out,
    )


def _tokenizer(config: RlhfConfig) -> Tokenizer:
    name = tokenizer_of(config.tokenizer, config.model)
    return load_tokenizer(name, parse_special=True, chat_template=config.chat_template)


def _with_rates(config: RlhfConfig, algorithm: Algorithm) -> RlhfConfig:
    """Return `config` with warmup and learning rates settled, those of presets, of pretrained weights or adapters."""
    critic = config.critic or config.reward_model or config.model
    preset, pretrained, sft = algorithm.learning_rate, algorithm.pretrained_rate, PRETRAINED_RATE
    if config.lora_rank:
        preset = pretrained = LORA_FACTOR * pretrained
        sft = LORA_RATE
    return replace(
        config,
        warmup_steps=algorithm.warmup_steps if config.warmup_steps < 0 else config.warmup_steps,
        learning_rate=settled_rate(config.learning_rate, config.model, preset, pretrained),
        critic_learning_rate=settled_rate(config.critic_learning_rate, critic, preset=CRITIC_RATE),
        sft_learning_rate=settled_rate(config.sft_learning_rate, config.model, SFT_RATE, sft),
    )


def _sft_steps(config: RlhfConfig, algorithm: Algorithm) -> int:
    """Return the number of supervised steps before the first step."""
    if algorithm.data == "answers":
        return 0
    return config.sft_steps if config.sft_steps >= 0 else DEFAULT_SFT_STEPS * (config.model in PRESETS)


def _frozen_preset(config: RlhfConfig, sft_steps: int) -> Iterator[str]:
    """Yield why adapters cannot be trained on the weights that the run begins with."""
    if config.lora_rank and config.model in PRESETS and not sft_steps:
        yield (
            f"--lora-rank = {config.lora_rank} trains adapters of weights that stay as they are, and --model "
            f"{config.model} is a preset with random ones: give a directory, or --sft-steps that train all of them"
        )


def find_rlhf_start(config: RlhfConfig, sft_steps: int, launch: Launch, damaged: Collection[Path] = ()) -> Start:
    """Return where the run begins. Raises ValueError if its directory holds another run's supervised steps.

    damaged: checkpoints that cannot be used.
    """
    if not sft_steps:
        return find_start(config, launch, damaged=damaged)
    start = find_start(config, launch, (METRICS_FILE, SFT), damaged)
    if start.folder is None:
        return start
    directory = start.folder / SFT
    if (directory / MODEL).is_dir() or latest(directory / CHECKPOINTS):
        saved = yaml.safe_load((directory / "config.yaml").read_text()) or {}
        if found := sft_violations(saved, config, sft_steps):
            raise ValueError(listed(found))
    return start


def _read_state(start: Start, config: RlhfConfig, sft_steps: int, strict: bool) -> RlhfState | None:
    """Read the state in a checkpoint; None if it is damaged and, unless `strict`, the one before can replace it."""
    assert start.checkpoint is not None and start.folder is not None
    try:
        saved = RlhfState.from_extra(read_extra(start.checkpoint))
    except DamagedCheckpoint:
        if strict or start.named:
            raise
        return None
    after_sft = bool(sft_steps) or config.model == str(start.folder / SFT / MODEL)
    if found := resume_violations(saved, config, finished_too=start.finished_too, other_model=after_sft):
        raise ValueError(listed(found))
    return saved


def _open_data(
    config: RlhfConfig, algorithm: Algorithm, sft_steps: int, specs: dict[str, RoleSpec], tokenizer: Tokenizer
) -> tuple[Examples, Sequence[Example]]:
    """Return the examples to train on, and those to evaluate on."""
    examples = _open_examples(config, algorithm, sft_steps, specs, tokenizer)
    if config.eval_data:
        try:
            opened = _open_examples(replace(config, data=config.eval_data), algorithm, 0, specs, tokenizer)
        except ValueError as error:
            raise ValueError(str(error).replace("--data", "--eval-data", 1)) from error
        number = min(config.eval_prompts or len(opened), len(opened))
        return examples, [opened[index] for index in range(number)]
    if config.eval_prompts >= len(examples):
        raise ValueError(
            f"--eval-prompts = {config.eval_prompts} leaves nothing to train on of the {len(examples)} examples of "
            f"--data: use fewer"
        )
    examples, held_out = hold_out(examples, config.eval_prompts, config.seed)
    return examples, held_out if config.eval_every else ()


def _open_examples(
    config: RlhfConfig, algorithm: Algorithm, sft_steps: int, specs: dict[str, RoleSpec], tokenizer: Tokenizer
) -> Examples:
    sampled = algorithm.data == "prompts"
    longest = min(context(spec, sampled) for spec in specs.values())
    scored_by_answer = sampled and not config.reward_model
    keys = ["prompt", *(("chosen", "rejected") if algorithm.data == "pairs" else ())]
    if algorithm.data == "answers" or sft_steps or scored_by_answer:
        keys.append("answer")
    unread = scored_by_answer and not sft_steps and config.reward_function != "match"  # a function may need none
    try:
        return open_examples(
            config.data,
            keys,
            tokenizer,
            prompt_tokens=config.prompt_tokens,
            longest=longest - config.max_new_tokens if sampled else longest,
            seed=config.seed,
            wrong_answers=config.wrong_answers,
            whole=not sampled,
            drop_long=config.long_prompts == "drop",
            optional=("answer",) if unread else (),
        )
    except ValueError as error:
        names = r"\b(data|prompt_tokens|long_prompts|tokenizer|chat_template)="
        raise ValueError(re.sub(names, lambda match: f"{flag(match[1])} = ", str(error))) from error


def _reward(config: RlhfConfig, algorithm: Algorithm, tokenizer: Tokenizer, examples: Examples) -> ScoreWith | None:
    """Return the function that scores responses, or None if a reward model does, or nothing is scored."""
    name = config.reward_function
    if algorithm.data != "prompts" or config.reward_model:
        given = [n for n in REWARD_FLAGS if getattr(config, n) != default_of(RlhfConfig, n)]
        if not given:
            return None
        flags = ", ".join(f"{flag(n)} = {getattr(config, n)}" for n in given)
        if algorithm.data != "prompts":
            raise ValueError(f"{flags} is not used: {config.algorithm} does not score responses, remove it")
        raise ValueError(f"{flags} is not used with --reward-model, which scores the responses: remove one")
    try:
        function = load_reward_function(name)
    except ValueError as error:
        raise ValueError(f"--reward-function = {error}") from error
    return ScoreWith(
        function,
        tokenizer.decode,
        lambda index: examples[index].answer,
        retries=config.reward_retries,
        failure=config.reward_failure,  # type: ignore[arg-type]  # one of the flag's choices
    )


def _algorithm_options(
    config: RlhfConfig, algorithm: Algorithm, tokenizer: Tokenizer, reward: ScoreWith | None, actor: RoleSpec
) -> Options:
    """Return the defaults, overridden by --options and the flags of sampling."""
    kind = algorithm.options
    values = parse_options(config.options, kind, "--options", without=("generate", "reward", "staleness"))
    if algorithm.data == "prompts":
        generate = Generate(
            group_size=config.group_size or default_of(kind, "generate").group_size,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            **_stops(config, tokenizer, actor.config.vocab_size),
        )
        values |= {"generate": generate, "reward": reward, "staleness": config.staleness}
    return kind(**values)


def _stops(config: RlhfConfig, tokenizer: Tokenizer, vocabulary: int) -> dict[str, tuple]:
    """Return `Generate`'s stop ids and strings. Raises ValueError, naming each that cannot end a response."""
    try:
        asked = [int(part) for part in config.stop_ids.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--stop-ids = {config.stop_ids} must be token ids with commas between them") from None
    strings = _stop_strings(config.stop)
    found = Generate(stop_ids=tuple(asked), stop_strings=strings)
    if problems := stop_problems(found, tokenizer.encode, tokenizer.decode, vocabulary):
        raise ValueError(f"--stop-ids = {config.stop_ids}, --stop = {config.stop}: {'; '.join(problems)}")
    ends = {*asked, *end_of_sequence_ids(config.model), *(() if tokenizer.eos is None else (tokenizer.eos,))}
    return {"stop_ids": tuple(sorted(ends)), "stop_strings": strings}


def _stop_strings(stop: str) -> tuple[str, ...]:
    if not stop.startswith("["):
        return (stop,) if stop else ()
    try:
        strings = json.loads(stop)
    except ValueError:
        strings = None
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError(f'--stop = {stop} must be a text, or a JSON list of texts such as ["one", "two"]')
    return tuple(strings)


def _graph_violations(
    config: RlhfConfig,
    algorithm: Algorithm,
    options: Options,
    graph: DataflowGraph,
    specs: dict[str, RoleSpec],
    drawn: int,
) -> Iterator[str]:
    """Yield why the models and the samples do not fit the graph."""
    yield from unused_models(config, algorithm, graph)
    yield from missing_models(specs, graph)
    yield from router_violations(config, graph, specs)
    yield from _step_violations(config, algorithm, options, graph, drawn)


def _step_violations(
    config: RlhfConfig, algorithm: Algorithm, options: Options, graph: DataflowGraph, drawn: int
) -> Iterator[str]:
    """Yield why a step cannot have `drawn` prompts or pairs."""
    samples = drawn * (2 if algorithm.data == "pairs" else graph.group_size)
    if found := batch_violations(graph, samples):
        yield f"--prompts = {config.prompts}: {'; '.join(found)}"
    yield from (f"--options = {config.options}: {violation}" for violation in options.step_violations(samples))


def _plan(run: Unplanned, sft_steps: int, planner: Planner | None) -> ExecutionPlan:
    """Return the plan that --plan names or asks for, checked against graph, world and models."""
    config, graph, specs, launch = run.config, run.graph, run.roles, run.launch
    named, file = config.plan in NAMED_PLANS, Path(config.plan).expanduser()
    if not named and config.plan != SEARCH and (file.suffix not in (".yaml", ".yml") or not file.is_file()):
        known = (*NAMED_PLANS, SEARCH)
        near = nearest(config.plan, known)
        raise ValueError(f"--plan = {config.plan} must be one of {', '.join(known)}, or a YAML file{near}")
    unused = [] if sft_steps else list(unused_layout_flags(config))  # supervised steps use them
    if config.rollout and config.plan != "separation":
        unused.append("rollout")
    if unused:
        raise ValueError(f"--plan = {config.plan} does not use {', '.join(map(flag, unused))}: remove them")
    if named:
        plan = named_plan(config.plan, graph, _plan_facts(config, specs, launch))
    elif config.plan == SEARCH:
        if planner is None:
            raise ValueError(
                f"--plan = {SEARCH} is searched by rlhf.py as it starts: give the plan.yaml of its run, or one that "
                f"python -m usp rlhf-plan writes"
            )
        plan = planner(run)
        plan.check(graph, launch.world_size)
    else:
        plan = from_mapping(yaml.safe_load(file.read_text()))
        plan.check(graph, launch.world_size)
    if config.staleness and (shared := list(staleness_violations(graph, plan))):
        raise ValueError(
            f"--staleness = {config.staleness} makes samples beside training, on other ranks: with --plan = "
            f"{config.plan} {shared[0]}; use --plan separation, or a YAML file"
        )
    if problems := list(layout_violations(graph, plan, specs)):
        raise ValueError(f"--plan = {config.plan}: {'; '.join(problems)}")
    offload = plan.offload
    if config.offload:
        offload |= frozenset(graph.roles) - frozenset(graph.trained_roles)
    if config.offload_optimizer:
        offload |= frozenset(map(optimizer_of, graph.trained_roles))
    return replace(plan, offload=offload)


def _plan_facts(config: RlhfConfig, specs: dict[str, RoleSpec], launch: Launch) -> Facts:
    models = [model_facts(spec.source, spec.config) for spec in specs.values()]
    rollout = parse_options(config.rollout, ParallelDims, "--rollout")
    return Facts(
        world_size=launch.world_size,
        ranks_per_host=launch.local_world_size,
        heads=math.gcd(*(math.gcd(model.num_heads, model.num_kv_heads) for model in models)),
        layers=min(len(model.windows) for model in models),
        dims=parallel_dims(config, config.ep),
        rollout_dims=ParallelDims(**rollout) if rollout else None,
        zero=config.zero,
        tp_sequence_parallel=config.tp_sequence_parallel,
        micro_batch_tokens=config.micro_batch_tokens,
        sp_layout=config.sp_layout,
        ac=config.ac,
        ac_offload=config.ac_offload,
        mlp_tile=config.mlp_tile,
        experts=any(model.num_experts for model in models),
    )


def unused_layout_flags(config: RlhfConfig) -> dict[str, Any]:
    """Return the layout flags that are set although the plan defines all layouts, with their defaults."""
    if config.plan in NAMED_PLANS and config.plan != "heuristic":
        return {}
    names = [*(field.name for field in fields(ParallelConfig)), "ep"]
    if config.plan not in NAMED_PLANS:
        names += ["micro_batch_tokens", "ac", "ac_offload", "mlp_tile"]
    defaults = {name: default_of(RlhfConfig, name) for name in names}
    return {name: value for name, value in defaults.items() if getattr(config, name) != value}
