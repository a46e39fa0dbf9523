"""From a configuration to everything that an RLHF run needs before its ranks communicate, or one list of errors."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import torch
import yaml

from usp.data.batches import parse_named
from usp.data.sources import STDLIB
from usp.data.tokenizer import Tokenizer, chat_encoder, same_ids
from usp.fields import flag, parse_options, shared_values
from usp.hf.integrate import rotary_switch
from usp.hf.models import context_length, is_scalar, model_facts, stop_tokens
from usp.hf.routers import replay_problem, routed_width
from usp.hf.tokenizers import AUTO, function_schema, load_tokenizer, tokenizer_of
from usp.parallel import ParallelDims, latest, violation_of
from usp.presets import LORA_FACTOR, LORA_RATE, PRESETS, PRETRAINED_RATE, settled_rate
from usp.rlhf.generation.decoding import Rollout, cache_violation, capacity, row_multiple, stop_problems
from usp.rlhf.generation.generate import generation_problems
from usp.rlhf.generation.vllm import EngineOptions, cuts, sampling_problems, server_problems
from usp.rlhf.plan.named_plans import NAMED_PLANS, Facts, named_plan, policy_as_reference
from usp.rlhf.plan.plan import (
    OWN,
    VLLM,
    ExecutionPlan,
    from_mapping,
    needed_part,
    optimizer_of,
    staleness_violations,
    with_engine,
)
from usp.rlhf.roles.role_model import RoleSpec
from usp.rlhf.runtime.transfer import batch_violations
from usp.run.failures import Problems, listed, load_from_file, nearest
from usp.run.launch import Launch
from usp.run.metrics import METRICS_FILE
from usp.run.output import warn
from usp.run.tables import GIB
from usp.train.checkpoints import CHECKPOINTS, MODEL, Start, find_start, read_state
from usp.train.prepare import Prologue
from usp.train.resolve import settled_lora
from usp.train.validate import parallel_dims

from .algorithms.algorithm import Algorithm, Options
from .algorithms.registry import ALGORITHMS, build_graph, with_outside
from .algorithms.rewards import ScoreWith, load_reward_function
from .checkpoints import RlhfState, resume_violations, running_plan, sft_lora, sft_violations
from .config import SEARCH, RlhfConfig, SftConfig, has_critic, sft_steps_of, texts, violations
from .datasets import Example, Examples, Supervised, hold_out, known_of, open_examples
from .environments.agents import AGENT
from .environments.benchmarks import BENCHMARKS, REWARDS
from .environments.episodes import Episodes, Processes, ids_between
from .environments.ready_rewards import HTTP, REWARD, SLOW, from_spec
from .environments.sandbox import LIMITS, cgroup
from .environments.tools import NAME as TOOLS
from .environments.tools import PYTHON, Python, tool_of
from .graph import DataflowGraph, Generate, Inference, ModelCall, TrainStep, with_branches
from .role_specs import layout_violations, missing_models, role_specs, router_violations, served_models, unused_models
from .samples import derived_seed
from .served import WORKER, RolloutServer, with_served

SFT = "sft"  # the directory of a run's supervised steps
RESPONSES = 64  # per step, unless --prompts is set
CRITIC_RATE, SFT_RATE = 1e-3, 2e-3  # peak learning rates for presets


@dataclass(frozen=True)
class PreparedRlhf:
    """A run that can start, or that lacks only its plan: a planner gets it with `NO_PLAN`.

    Attributes:
        config: the configuration with every default resolved; device and dtype as asked, to fit other machines.
        sft_steps: supervised steps before the first step.
        drawn: prompts (or pairs) that a step reads, which may be more than it trains on.
        start: the run's directory and the checkpoint to continue from; saved: that checkpoint's state besides tensors.
        held_out: prompts to evaluate on. data_notes: lines on what of the files is read.
    """

    config: RlhfConfig
    launch: Launch
    algorithm: Algorithm
    sft_steps: int
    device: torch.device
    tokenizer: Tokenizer
    examples: Examples
    held_out: Sequence[Example]
    data_notes: tuple[str, ...]
    graph: DataflowGraph
    roles: dict[str, RoleSpec]
    kernel_choice: str
    start: Start
    saved: RlhfState | None
    drawn: int
    plan: ExecutionPlan
    supervised: Supervised | None = None  # samples beside those of the algorithm


T = TypeVar("T")


class _Data(NamedTuple):
    """The fields of `PreparedRlhf` of these names."""

    examples: Examples
    held_out: Sequence[Example]
    data_notes: tuple[str, ...]
    supervised: Supervised | None


NO_PLAN = ExecutionPlan("none", {})
Planner = Callable[[PreparedRlhf], ExecutionPlan]  # the same plan or ValueError on every rank


def prepare(
    config: RlhfConfig, launch: Launch, start: Start | None = None, planner: Planner | None = None
) -> PreparedRlhf:
    """Check `config` and load what it names, with the same result or the same error on every rank.

    Args:
        start: where the run begins; None: `find_rlhf_start` decides, and `saved` stays None for a damaged checkpoint.
        planner: finds the plan for --plan search, once all else is known to be right.

    Raises ConfigurationError with every violation found, before any rank communicates.
    """
    problems = Problems(ValueError, TypeError, OSError, RecursionError, yaml.YAMLError)
    attempt = problems.attempt
    algorithms = attempt(lambda: with_outside(config.algorithm, ALGORITHMS)) or {}
    problems.check()
    problems += violations(config, algorithms)
    prologue = Prologue(config, launch, problems, parse_special=True)
    device, tokenizer, algorithm = prologue.device, prologue.tokenizer, algorithms.get(config.algorithm)
    config = replace(config, tokenizer=tokenizer.name if tokenizer else config.tokenizer)
    if algorithm is None:  # one of the problems
        problems.check()
    assert algorithm is not None
    sft_steps = sft_steps_of(config, algorithm)
    config = _with_rates(settled_lora(config), algorithm, sft_steps)
    if not sft_steps:
        prologue.check_frozen_weights("give a directory, or --sft-steps that train all of them")
    specs = attempt(lambda: role_specs(config, algorithm, prologue.dtype))
    strict, start = start is not None, start or attempt(lambda: find_rlhf_start(config, sft_steps, launch)) or Start()
    problems.check()
    assert device is not None and tokenizer is not None and specs is not None
    kernel = prologue.choose_kernel(model_facts(specs["actor"].source, specs["actor"].config))
    for role, spec in specs.items():
        prologue.check_vocabulary(f"the {role} {spec.source}", spec.config.vocab_size)
    if algorithm.data == "prompts" and config.rollout_engine == OWN:
        problems += attempt(lambda: list(_unable_to_generate(config, specs["actor"]))) or []
    tools = attempt(lambda: _about("--tools = ", lambda: _schemas(config))) if config.tools else None
    data = attempt(lambda: _open_data(config, algorithm, sft_steps, specs, tokenizer, tools))
    if saved := attempt(lambda: read_state(start, strict, RlhfState.from_extra)):
        after_sft = bool(sft_steps) or (start.folder is not None and config.model == str(start.folder / SFT / MODEL))
        problems += resume_violations(saved, config, finished_too=start.finished_too, other_model=after_sft)
    problems.check()
    assert data is not None
    reward = attempt(lambda: _reward(config, algorithm, tokenizer, data.examples))
    episodes = attempt(lambda: _episodes(config, tokenizer, data.examples, tools))
    options = attempt(lambda: _algorithm_options(config, algorithm, tokenizer, reward, episodes, specs["actor"]))
    graph = attempt(lambda: _graph(config, options, algorithms, tokenizer)) if options else None
    problems.check()
    if launch.rank == 0 and not strict:
        _warn_without_cgroup(config)
    assert options is not None and graph is not None
    config = replace(config, prompts=config.prompts or math.ceil(RESPONSES / graph.group_size))
    problems += _graph_violations(config, algorithm, options, graph, specs)
    problems += _scorer_violations(graph, specs, tokenizer)
    if config.plan == SEARCH:
        problems.check()
    run = PreparedRlhf(
        config=config,
        launch=launch,
        algorithm=algorithm,
        sft_steps=sft_steps,
        device=device,
        tokenizer=tokenizer,
        **data._asdict(),
        graph=replace(graph, share_prefixes=config.share_prefixes),
        roles={role: specs[role] for role in graph.roles if role in specs},
        kernel_choice=kernel,
        start=start,
        saved=saved,
        drawn=options.drawn(config.prompts),
        plan=NO_PLAN,
    )
    plan = attempt(lambda: _plan(run, planner, says=launch.rank == 0 and not strict))
    problems.check()
    assert plan is not None
    shared = config.lora_rank and config.ref in ("", config.model)
    graph, plan = policy_as_reference(run.graph, plan) if shared else (run.graph, plan)
    plan = running_plan(saved, config, launch.world_size) or plan
    return replace(run, graph=graph, plan=plan, roles={role: specs[role] for role in graph.roles})


def _graph(
    config: RlhfConfig, options: Options, algorithms: Mapping[str, Algorithm], tokenizer: Tokenizer
) -> DataflowGraph:
    graph = build_graph(config.algorithm, options, algorithms)
    graph = with_branches(graph) if config.agent else graph
    try:
        return with_served(graph, served_models(config), tokenizer.encode)
    except ValueError as error:
        named = violation_of(error).shown(lambda role, url: f"--{'ref' if role == 'ref' else 'models'}: {role}={url}")
        raise ValueError(named) from error


def _unable_to_generate(config: RlhfConfig, actor: RoleSpec) -> Iterator[str]:
    if reasons := generation_problems(actor.config):
        kind = actor.config.model_type
        yield f"--model = {actor.source} has model_type={kind!r}, which cannot generate: {reasons}"
    if config.router_replay and (problem := replay_problem(actor.config)):
        yield f"--router-replay: {problem}: remove it"


def sft_config(run: PreparedRlhf, folder: Path) -> RlhfConfig:
    """Return the configuration of a run's supervised steps, in `folder`."""
    config = run.config
    changes = {
        "steps": run.sft_steps,
        "learning_rate": config.sft_learning_rate,
        "prompts": config.prompts * run.graph.group_size,
        "output": str(folder),
        "export_dtype": "float32",  # the run's own start: nothing is rounded
        "eval_prompts": 0 if config.eval_data else config.eval_prompts,  # still held out
        **sft_lora(config),
    }
    return RlhfConfig(algorithm="sft", **shared_values(config, SftConfig) | changes)


def _with_rates(config: RlhfConfig, algorithm: Algorithm, sft_steps: int) -> RlhfConfig:
    """Return `config` with warmup and learning rates settled, those of presets, of pretrained weights or adapters;
    rates that nothing trains with stay as they are."""
    critic, sft = config.critic or config.reward_model or config.model, PRETRAINED_RATE
    preset, pretrained = algorithm.learning_rate, algorithm.pretrained_rate
    if config.lora_rank:
        preset, pretrained, sft = LORA_FACTOR * pretrained, LORA_FACTOR * pretrained, LORA_RATE
    rates: dict[str, Any] = {"learning_rate": settled_rate(config.learning_rate, config.model, preset, pretrained)}
    if has_critic(config, algorithm):
        rates["critic_learning_rate"] = settled_rate(config.critic_learning_rate, critic, preset=CRITIC_RATE)
    if sft_steps:
        rates["sft_learning_rate"] = settled_rate(config.sft_learning_rate, config.model, SFT_RATE, sft)
    return replace(
        config, warmup_steps=algorithm.warmup_steps if config.warmup_steps < 0 else config.warmup_steps, **rates
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
        if messages := sft_violations(saved, config, sft_steps):
            raise ValueError(listed(messages))
    return start


def _open_data(
    config: RlhfConfig,
    algorithm: Algorithm,
    sft_steps: int,
    specs: dict[str, RoleSpec],
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]] | None,
) -> _Data:
    """Open --data, --eval-data and --supervised-data. tools: schemas of what responses may call."""
    examples, notes = _open_examples(config, "data", algorithm, sft_steps, specs, tokenizer, tools)
    supervised = None
    if config.supervised_data:
        actor = {"actor": specs["actor"]}
        found, more = _open_examples(config, "supervised_data", ALGORITHMS["sft"], 0, actor, tokenizer, None)
        seed, sizes = derived_seed(config.seed, "supervised"), (config.supervised_samples, config.supervised_every)
        supervised, notes = Supervised(found, tokenizer, *sizes, config.supervised_weight, seed), notes + more
    if config.eval_data:
        held_out = list[Example]()
        for name, path in parse_named(config.eval_data):
            data = f"{name}={path}".removeprefix("=")
            found, more = _open_examples(config, "eval_data", algorithm, 0, specs, tokenizer, tools, data)
            held_out += [found[index] for index in range(len(found))][: config.eval_prompts or None]
            notes += more
        return _Data(examples, held_out, notes, supervised)
    if config.eval_prompts >= len(examples):
        left = f"nothing to train on of the {len(examples)} examples of --data"
        raise ValueError(f"--eval-prompts = {config.eval_prompts} leaves {left}: use fewer")
    examples, held_out = hold_out(examples, config.eval_prompts, config.seed)
    return _Data(examples, held_out if config.eval_every else (), notes, supervised)


def _open_examples(
    config: RlhfConfig,
    field: str,
    algorithm: Algorithm,
    sft_steps: int,
    specs: dict[str, RoleSpec],
    tokenizer: Tokenizer,
    tools: list[dict[str, Any]] | None,
    data: str = "",
) -> tuple[Examples, tuple[str, ...]]:
    """Open `data` of a field, by default all that it names; return its examples, and notes on them."""
    sampled = algorithm.data == "prompts"
    models = [spec.config for spec in specs.values()]
    switches = filter(None, map(rotary_switch, models)) if sampled else ()
    longest = min([*map(context_length, models), *switches])
    data = data or getattr(config, field)
    if (benchmark := BENCHMARKS.get(name := data.partition("=")[0])) is not None:
        _about(f"{flag(field)} = {data}: ", getattr(from_spec(benchmark.reward, REWARDS), "check", lambda: None))
    scored_by_answer = sampled and not config.reward_model
    asks_none = config.reward_function != "match" or config.episodes or not algorithm.scores
    keys = ["prompt", *(("chosen", "rejected") if algorithm.data == "pairs" else ())]
    if algorithm.data == "answers" or sft_steps or scored_by_answer:
        keys.append("answer")
    unread = scored_by_answer and not sft_steps and asks_none  # a function or an environment may need none
    try:
        examples = open_examples(
            data,
            keys,
            tokenizer,
            prompt_tokens=config.prompt_tokens,
            longest=longest - config.max_new_tokens if sampled else longest,
            seed=config.seed,
            wrong_answers=config.wrong_answers,
            whole=not sampled,
            drop_long=config.long_prompts == "drop",
            bad_rows=config.bad_rows,
            optional=("answer",) if unread else (),
            tools=tools,
        )
    except ValueError as error:
        said = violation_of(error).renamed(data=field).shown(lambda name, value: f"{flag(name)} = {value}")
        raise ValueError(said) from error
    shown = field if field == "data" else flag(field) + (f" {name}" if benchmark else "")
    return examples, tuple(f"{shown}: {note}" for note in examples.notes)


def _reward(config: RlhfConfig, algorithm: Algorithm, tokenizer: Tokenizer, examples: Examples) -> ScoreWith | None:
    """Return the function that scores responses, or None if a reward model does, or nothing is scored."""
    if config.episodes or algorithm.data != "prompts" or config.reward_model:
        return None
    settings = {"reward": config.reward_function}
    apart = config.reward_processes or config.reward_function.partition("=")[0] in SLOW
    pool = Processes(REWARD, config.reward_timeout, settings) if apart else None
    return ScoreWith(
        _about("--reward-function = ", lambda: load_reward_function(config.reward_function)),
        tokenizer.decode,
        retries=config.reward_retries,
        failure=config.reward_failure,  # type: ignore[arg-type]  # one of the flag's choices
        pool=pool,
        workers=max(1, config.reward_processes),
        **known_of(examples),
    )


def _about(given: str, load: Callable[[], T]) -> T:
    """Return `load()`, whose errors begin with what was given. Raises ValueError."""
    try:
        return load()
    except ValueError as error:
        raise ValueError(f"{given}{error}") from error


def _warn_without_cgroup(config: RlhfConfig) -> None:
    """Warn where the memory of a policy's programs is bounded for each of their processes alone."""
    named = [config.reward_function, *(texts(config.tools, "--tools", apart=",") if config.tools else ())]
    if {"code", "python"} & {each.partition("=")[0] for each in named} and cgroup() is None:
        bound = f"{LIMITS.memory / GIB:g} GiB for each of its {LIMITS.processes} processes"
        warn(f"this machine has no cgroup to bound the memory of a policy's program: it has {bound} (docs/sandbox.md)")


def _schemas(config: RlhfConfig) -> list[dict[str, Any]]:
    """Return the schemas of --tools. Raises ValueError where one cannot work, or two have one name."""
    schemas: list[dict[str, Any]] = []
    for spec in texts(config.tools, "--tools", apart=","):
        if isinstance(tool := tool_of(spec, partial(load_from_file, what="function")), Python):
            tool.check()
        schemas.append(PYTHON if isinstance(tool, Python) else function_schema(tool, spec))
    names = [schema["function"]["name"] for schema in schemas]
    if len(set(names)) < len(names):
        raise ValueError(f"{config.tools}: functions must have names of their own, not {', '.join(names)}")
    return schemas


def _episodes(
    config: RlhfConfig, tokenizer: Tokenizer, examples: Examples, tools: list[dict[str, Any]] | None
) -> Episodes | None:
    """Return how --environment or --agent answers responses, or None without one."""
    if not config.episodes:
        return None
    settings: dict[str, Any] = {}
    if config.agent:
        _about("--reward-function = ", lambda: load_reward_function(config.reward_function))
        program = _about("--agent = ", lambda: shlex.split(config.agent)[0])
        if program.startswith(HTTP) and urlsplit(program).hostname not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(f"--agent = {config.agent} reaches no endpoint: run it on each host, at 127.0.0.1")
        if not program.startswith(HTTP) and shutil.which(program) is None:
            raise ValueError(f"--agent = {config.agent}: there is no program {program}")
        chat_encoder(tokenizer, f"--agent = {config.agent}")
        settings = {"agent": config.agent, "reward": config.reward_function}
    elif config.environment == TOOLS:
        _about("--reward-function = ", lambda: load_reward_function(config.reward_function))
        settings = {"tools": texts(config.tools, "--tools", apart=","), "reward": config.reward_function}
        settings["schemas"] = tools
        settings["chat"] = tokenizer.chats is not None
    else:
        environment = _about("--environment = ", lambda: load_from_file(config.environment, "class"))
        if missing := [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]:
            raise ValueError(f"--environment = {config.environment} has no method {' and no method '.join(missing)}")
    return Episodes(
        Processes(config.environment or AGENT, config.environment_timeout, settings, config.episode_timeout),
        examples,
        tokenizer.decode,
        partial(ids_between, tokenizer.encode_text, tokenizer.chats),
        config.max_turns,
        config.max_observation_tokens,
        show=tokenizer.show,
        begin=(lambda chat: tokenizer.chats.prompt(chat, guarded=True).tolist()) if config.agent else None,
        failure=config.reward_failure,  # type: ignore[arg-type]  # one of the flag's choices
    )


def _algorithm_options(
    config: RlhfConfig,
    algorithm: Algorithm,
    tokenizer: Tokenizer,
    reward: ScoreWith | None,
    episodes: Episodes | None,
    actor: RoleSpec,
) -> Options:
    """Return the defaults, overridden by --options and the flags of sampling."""
    kind = algorithm.options
    values = parse_options(config.options, kind, "--options", without=("generate", "reward", "staleness"))
    if algorithm.data == "prompts":
        sampling: dict[str, Any] = shared_values(config, Generate) | _stops(config, tokenizer, actor.config.vocab_size)
        sampling["episodes"] = episodes
        sampling["group_size"] = config.group_size or vars(kind())["generate"].group_size
        sampling["partial"] = config.begins_ahead
        sampling["routed"] = routed_width(actor.config) if config.router_replay else 0
        values |= {"generate": Generate(**sampling), "reward": reward, "staleness": config.staleness}
    return kind(**values)


def _stops(config: RlhfConfig, tokenizer: Tokenizer, vocabulary: int) -> dict[str, tuple]:
    """Return `Generate`'s stop ids and strings. Raises ValueError, naming each that cannot end a response."""
    try:
        ids = [int(part) for part in config.stop_ids.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--stop-ids = {config.stop_ids} must be token ids with commas between them") from None
    strings = tuple(texts(config.stop, "--stop"))
    work = Generate(stop_ids=tuple(ids), stop_strings=strings)
    if problems := stop_problems(work, tokenizer.encode, tokenizer.decode, vocabulary):
        raise ValueError(f"--stop-ids = {config.stop_ids}, --stop = {config.stop}: {'; '.join(problems)}")
    ends = tuple(sorted({*ids, *stop_tokens(config.model, tokenizer.eos)}))
    return {"stop_ids": ends, "stop_strings": strings}


def _reference_violations(config: RlhfConfig, graph: DataflowGraph, specs: dict[str, RoleSpec]) -> Iterator[str]:
    """Yield why the policy cannot update the reference."""
    asked = f"--ref-update-every = {config.ref_update_every}"
    if not config.ref_update_every:
        return
    if (calls := [call.role for call in graph.calls].count("ref")) != 1:
        has = f"--algorithm {config.algorithm} with these --options has {calls}"
        yield f"{asked} needs one call of the role ref, and {has}: remove it"
        return
    ours, its = ({**specs[role].config.to_dict(), "_name_or_path": ""} for role in ("actor", "ref"))
    if different := sorted(name for name in ours.keys() | its.keys() if ours.get(name) != its.get(name)):
        has = f"--ref = {config.ref} has another {', '.join(different)}"
        yield f"{asked} needs a reference like the policy, and {has}: remove one"


def _graph_violations(
    config: RlhfConfig, algorithm: Algorithm, options: Options, graph: DataflowGraph, specs: dict[str, RoleSpec]
) -> Iterator[str]:
    """Yield why the models and the prompts or pairs of a step do not fit the graph."""
    yield from unused_models(config, algorithm, graph)
    yield from missing_models(specs, graph)
    yield from router_violations(config, graph, specs)
    yield from _reference_violations(config, graph, specs)
    steps = [call.work for call in graph.calls if call.role == "actor" and isinstance(call.work, TrainStep)]
    if config.supervised_data and not steps:
        yield f"--supervised-data is for the policy, which --algorithm = {config.algorithm} does not train: remove it"
    elif config.supervised_data and config.supervised_samples < steps[0].mini_batches:
        asked = f"--supervised-samples = {config.supervised_samples}"
        yield f"{asked} leaves some of mini_batches={steps[0].mini_batches} without: use at least so many"
    generated = [call.name for call in graph.calls if isinstance(call.work, Generate)]
    if config.begins_ahead and len(generated) > 1:
        has = f"--algorithm = {config.algorithm} has {', '.join(generated)}"
        yield f"--partial-rollouts and --oversample choose the prompts of a step by one call, and {has}: remove them"
    samples = options.drawn(config.prompts) * (2 if algorithm.data == "pairs" else graph.group_size)
    if messages := batch_violations(graph, samples):
        yield f"--prompts = {config.prompts}: {'; '.join(messages)}"
    yield from (f"--options = {config.options}: {violation}" for violation in options.step_violations(samples))


def _scorer_violations(graph: DataflowGraph, specs: dict[str, RoleSpec], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield which models cannot give log-probabilities of the policy's tokens."""
    calls = [call for call in graph.calls if isinstance(call.work, Inference) and call.work.head == "logprobs"]
    for role in dict.fromkeys(call.role for call in calls if call.role in specs):
        source = specs[role].source
        if is_scalar(specs[role].config):
            yield f"the {role} {source} is a reward model, and log-probabilities are those of a language model"
        elif source not in (specs["actor"].source, tokenizer.name, *PRESETS):
            try:
                own = load_tokenizer(tokenizer_of(AUTO, source))
            except ValueError:
                continue  # a folder without one
            if not same_ids(own, tokenizer):
                yield f"the {role} {source} has another tokenizer than {tokenizer.name}: its ids are other texts"


def _plan(run: PreparedRlhf, planner: Planner | None, says: bool) -> ExecutionPlan:
    """Return the plan that --plan names or asks for, checked; it `says` which calls of a file the run leaves out."""
    config, graph, specs, launch = run.config, run.graph, run.roles, run.launch
    known, file = (*NAMED_PLANS, SEARCH), Path(config.plan).expanduser()
    if config.plan not in known and (file.suffix not in (".yaml", ".yml") or not file.is_file()):
        near = nearest(config.plan, known)
        raise ValueError(f"--plan = {config.plan} must be one of {', '.join(known)}, or a YAML file{near}")
    if config.plan in NAMED_PLANS:
        plan = named_plan(config.plan, graph, _plan_facts(config, specs, launch))
    elif config.plan != SEARCH:
        plan, unneeded = needed_part(from_mapping(yaml.safe_load(file.read_text())), graph)
        if unneeded and says:
            calls = ", ".join(unneeded)
            warn(f"--plan = {config.plan} has layouts for {calls}, which this run does not call: not needed")
    elif planner is not None:
        plan = planner(run)
    else:
        give = "give the plan.yaml of its run, or one that python -m usp rlhf-plan writes"
        raise ValueError(f"--plan = {SEARCH} is searched by rlhf.py as it starts: {give}")
    if config.rollout_engine != OWN:
        plan = with_engine(plan, graph, config.rollout_engine)
    plan.check(graph, launch.world_size)
    run = replace(run, plan=plan)
    if problems := list(_engine_problems(run)):
        engine = next((each.engine for each in plan.calls.values() if each.engine != OWN), VLLM)
        raise ValueError(f"--rollout-engine = {engine}, or engine: {engine} in a plan: {'; '.join(problems)}")
    if shared := list(staleness_violations(graph, plan)):
        asked = f"--staleness = {config.staleness} makes samples beside training, on other ranks"
        raise ValueError(f"{asked}: with --plan = {config.plan} {shared[0]}; use --plan separation, or a YAML file")
    for call in graph.calls if config.cache_tokens else ():
        layout = plan[call.name]
        if isinstance(call.work, Generate) and layout.engine == OWN:
            places = cache_places(run, call)
            if violation := cache_violation(config.cache_tokens, places, layout.dims.sp, "--cache-tokens"):
                raise ValueError(violation)
    if problems := list(layout_violations(graph, plan, specs)):
        raise ValueError(f"--plan = {config.plan}: {'; '.join(problems)}")
    untrained = set(graph.roles).difference(graph.trained_roles) if config.offload else ()
    optimizers = map(optimizer_of, graph.trained_roles) if config.offload_optimizer else ()
    return replace(plan, offload=plan.offload.union(untrained, optimizers))


def _engine_problems(run: PreparedRlhf) -> Iterator[str]:
    """Yield why the calls of a plan whose engine is not our own cannot run with it."""
    config, graph, calls = run.config, run.graph, engine_calls(run)
    layouts = [run.plan[call.name] for call in calls]
    served = next((layout.engine for layout in layouts if layout.served), "")
    if (served or not layouts) and config.rollout_cache != RlhfConfig.rollout_cache:
        yield f"--rollout-cache = {config.rollout_cache} is that of vLLM, which no call decodes with: remove it"
    if not layouts:
        return
    if config.cache_tokens and config.rollout_engine != OWN:
        yield f"--cache-tokens = {config.cache_tokens} is that of our own cache: use --rollout-cache instead"
    if config.eager_decoding and config.rollout_engine != OWN:
        yield "--eager-decoding is of our own decoding, and no call decodes with it: remove it"
    works = [call.work for call in graph.calls if isinstance(call.work, Generate)]
    if config.eval_every and config.eval_temperature >= 0:
        works += [replace(work, temperature=config.eval_temperature) for work in works]
    yield from sampling_problems(works, bool(served))
    if not served and run.device.type == "cpu" and (divided := [each.dims.ep for each in layouts if each.dims.ep > 1]):
        yield f"vLLM's experts on CPUs do not know which of them a rank has, and ep={divided[0]} divides them: use ep=1"
    if config.router_replay and not served:
        yield "--router-replay needs the experts that tokens chose, which vLLM in the run does not tell: use a server"
    if config.delta_updates and config.lora_rank:
        yield "--delta-updates is for whole weights, and an engine is sent adapters alone: remove it"
    servers, lost = RolloutServer.pool(served, retries=0) if served else [], list[str]()
    for server in servers:
        try:
            problems = server_problems(server, engine_options(run), run.roles[calls[0].role].config)
            yield from (f"{server.url}: {problem}" if servers[1:] else problem for problem in problems)
        except ConnectionError as error:
            lost.append(f"{error}")
    if servers and len(lost) == len(servers):  # else the others begin without them
        yield f"{'; '.join(lost)}; is it a vLLM server with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {WORKER}?"


def engine_calls(run: PreparedRlhf) -> list[ModelCall]:
    """Return the calls that do not decode by ourselves."""
    return [call for call in run.graph.calls if run.plan[call.name].engine != OWN]


def engine_options(run: PreparedRlhf) -> EngineOptions:
    """Return the options of the engine of a plan that has one."""
    calls = engine_calls(run)
    dims, spec = run.plan[calls[0].name].dims, run.roles[calls[0].role]
    works = [call.work for call in calls if isinstance(call.work, Generate)]
    observed = max(work.episodes.max_observation_tokens if work.episodes else 0 for work in works)
    tokens = longest_prompt(run) + run.config.max_new_tokens + observed
    return EngineOptions(
        calls=", ".join(call.name for call in calls),
        tp=dims.tp,
        experts=dims.ep > 1,
        dtype=spec.dtype,
        tokens=min(tokens, context_length(spec.config)),
        slots=run.config.slots,
        cache_bytes=int(run.config.rollout_cache * GIB),
        processed=not cuts(works),
        changes=run.config.delta_updates or run.config.lora_rank > 0,
        routed=run.config.router_replay,
    )


def longest_prompt(run: PreparedRlhf) -> int:
    """Return the tokens of the longest prompt to sample for."""
    examples = run.examples if run.config.data != STDLIB else ()
    longest = max((len(examples[index].prompt) for index in range(len(examples))), default=run.config.prompt_tokens)
    return max([longest, *(len(example.prompt) for example in run.held_out)])


def cache_places(run: PreparedRlhf, call: ModelCall) -> int:
    """Return the most places that a sequence of a generate call needs in the cache of a rank."""
    work, layout, longest = call.work, run.plan[call.name], longest_prompt(run)
    assert isinstance(work, Generate)
    if work.episodes is not None:  # a turn goes on from all before it
        longest += work.max_new_tokens + work.episodes.max_observation_tokens
    # Responses that go on are a longer prompt with a lower limit.
    begun = work.max_new_tokens if run.config.begins_ahead else 1
    rollouts = [Rollout(cast(Any, range(longest + n)), 0, work.max_new_tokens - n) for n in range(begun)]
    multiple = row_multiple(layout.sp_layout, layout.dims.ring, layout.dims.ulysses)
    return capacity(rollouts, layout.dims.sp, multiple)


def _plan_facts(config: RlhfConfig, specs: dict[str, RoleSpec], launch: Launch) -> Facts:
    models = [model_facts(spec.source, spec.config) for spec in specs.values()]
    rollout = parse_options(config.rollout, ParallelDims, "--rollout")
    return Facts(
        world_size=launch.world_size,
        ranks_per_host=launch.local_world_size,
        heads=math.gcd(*(math.gcd(model.num_heads, model.num_kv_heads) for model in models)),
        layers=min(len(model.windows) for model in models),
        dims=parallel_dims(config),
        rollout_dims=ParallelDims(**rollout) if rollout else None,
        experts=any(model.num_experts for model in models),
        **shared_values(config, Facts),
    )
