"""Resolve a configuration: find its model, settle the batch and the degrees, and check every rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

from usp.attention import OF_DOCUMENTS
from usp.config import ROPE_SCALINGS, CommonConfig, TrainConfig, by_stage
from usp.fields import flag
from usp.hf import models
from usp.hf.images import bidirectional, sees_images
from usp.model.facts import ModelFacts, ModelShape
from usp.optimizers import OPTIMIZERS
from usp.parallel import ParallelDims, violation_of
from usp.predict.job import ONE_DOCUMENT, Data, Job, adapted
from usp.presets import LORA_RATE, PRESETS, settled_rate
from usp.run.failures import ConfigurationError, listed

from .validate import parallel_dims, settle_batch, violations, with_flags

if TYPE_CHECKING:  # with transformers' models it takes seconds to import
    from usp.hf.lora import Lora

C = TypeVar("C", bound=CommonConfig)


@dataclass(frozen=True)
class ResolvedStage:
    """A stage of the curriculum, or the whole of a run without one.

    config: as `Resolved.config`, without a curriculum, but with the steps of the whole run.
    first, last: its steps; those of the run are numbered from 1.
    sequences: of a step, over all ranks.
    """

    config: TrainConfig
    dims: ParallelDims
    first: int
    last: int
    sequences: int

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        config = self.config
        return config.padded_len * config.batch_size // (config.micro_batches * self.dims.ring * self.dims.ulysses)


@dataclass(frozen=True)
class Resolved:
    """A configuration with its model and degrees; the same on every rank.

    config: with the batch size of a rank and the learning rate; device and dtype may still be `auto`. With a
        curriculum, its stages have their own batch sizes.
    stages: those of the curriculum, or one of all steps; empty where there are problems.
    model_config, facts: with the context of the run; None where the model was not found.
    problems: what is wrong, one message each.
    """

    config: TrainConfig
    model_config: models.ModelConfig | None
    facts: ModelFacts | None
    problems: tuple[str, ...]
    stages: tuple[ResolvedStage, ...] = ()

    @property
    def largest(self) -> ResolvedStage:
        """The stage with the most tokens of a micro-batch on a rank, which needs the most memory."""
        return max(self.stages, key=lambda stage: stage.tokens)

    @cached_property
    def shape(self) -> ModelShape:
        """The model's parameters as shapes, built once."""
        from usp.hf.tensor_parallel import model_shape  # transformers' models take seconds to import

        assert self.facts is not None and self.model_config is not None
        return model_shape(self.facts, self.model_config)

    def valid(self, problems: Iterable[str] = ()) -> tuple[TrainConfig, models.ModelConfig, ModelFacts, ParallelDims]:
        """Return the configuration, its model's configuration and facts, and the degrees of the first stage. Raises
        ConfigurationError for `problems` and the problems found here, all of them in one message."""
        if problems := [*problems, *self.problems]:
            raise ConfigurationError(listed(problems))
        assert self.model_config is not None and self.facts is not None
        return self.config, self.model_config, self.facts, self.stages[0].dims


def resolve(
    config: TrainConfig,
    world_size: int,
    model_config: models.ModelConfig | None = None,
    weights: bool = True,
    ended: Sequence[int] = (),
    ids: int = 0,
    images: bool = False,
) -> Resolved:
    """Resolve `config` on `world_size` ranks.

    model_config: from `trained_model`, if the caller has it.
    weights: whether a model directory must have weights as well as config.json.
    ended: the sequences of a step of each stage of the curriculum that has run, on other ranks perhaps: of these stages
        only what they read counts, and their degrees are not resolved.
    ids, images: see `trained_model`.
    """
    config, problems, facts = settle_batch(config, world_size), [], None
    rates = {"preset": LORA_RATE, "pretrained": LORA_RATE} if config.lora_rank else {}
    config = replace(config, learning_rate=settled_rate(config.learning_rate, config.model, **rates))
    config = settled_lora(config)
    if model_config is None:
        try:
            model_config = trained_model(config, weights, ids, images)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if model_config is not None:
        facts = models.model_facts(config.model, model_config)
        problems += [*lora_problems(config, model_config), *image_problems(config, model_config)]
        problems += router_bias_problems(config, model_config)
    problems += violations(config, world_size, facts, len(ended))
    if problems:
        return Resolved(config, model_config, facts, tuple(problems))
    lasts = tuple(accumulate(stage.steps for stage in config.curriculum)) or (config.steps,)
    stages = []
    for number, (stage, (before, last)) in enumerate(zip(by_stage(config), pairwise((0, *lasts)), strict=True)):
        dims = parallel_dims(stage)
        if number < len(ended):
            sequences = ended[number]
        else:
            stage, dims = settle_batch(stage, world_size), dims.resolve(world_size)
            sequences = dims.batch * stage.batch_size
        stages.append(ResolvedStage(stage, dims, before + 1, last, sequences))
    found = Resolved(replace(config, steps=lasts[-1]), model_config, facts, (), tuple(stages))
    problems = list(dict.fromkeys(text for stage in stages for text in _float8_problems(found, stage)))
    return replace(found, problems=tuple(problems), stages=()) if problems else found


def compiled_if_possible(config: TrainConfig, world_size: int) -> TrainConfig:
    """Return `config` with --compile, or as it is if something of it, or its model, is against that."""
    compiled = replace(config, compile=True)
    if against := set(resolve(compiled, world_size).problems):
        against -= set(resolve(config, world_size).problems)
    return config if against else compiled


def settled_lora(config: C) -> C:
    """Return `config` with the default scale of its adapters, if it has any."""
    return replace(config, lora_alpha=2 * config.lora_rank) if config.lora_rank and not config.lora_alpha else config


def lora_of(config: CommonConfig, model: models.ModelConfig) -> Lora | None:
    """Return the adapters that `config`, after `settled_lora`, trains on a model; None for all of its weights. Raises
    ValueError for targets that get no adapters, and for what the model does not support beside them."""
    if not config.lora_rank:
        return None
    from usp.hf.lora import Lora, adapted_part, frozen_ends, lora_targets, modules_to_save

    lora = Lora(config.lora_rank, config.lora_alpha, lora_targets(model, config.lora_targets))
    if not isinstance(config, TrainConfig):
        return lora
    saved = modules_to_save(model, config.lora_modules_to_save, lora.targets)
    if config.add_tokens and (ends := frozen_ends(model, saved)):
        raise ValueError(
            f"--add-tokens {config.add_tokens} adds rows that adapters do not train: give --lora-modules-to-save "
            f"{','.join(ends)}"
        )
    within = adapted_part(model)
    return replace(lora, saved=saved, within=within)


def lora_problems(config: CommonConfig, model: models.ModelConfig) -> Iterator[str]:
    """Yield why a model cannot have the adapters of `config`."""
    if config.lora_rank > 0 and find_spec("peft") is None:
        yield "--lora-rank needs the package peft: pip install 'usp-toolkit[lora]'"
        return
    try:
        lora_of(config, model)
    except ValueError as error:
        yield with_flags(violation_of(error))


def router_bias_problems(config: TrainConfig, model: models.ModelConfig) -> Iterator[str]:
    """Yield why the bias of a model's routers cannot follow the experts' loads."""
    if not config.router_bias_update_rate:
        return
    from usp.hf.routers import bias_problem

    given = f"--router-bias-update-rate = {config.router_bias_update_rate:g}"
    if problem := bias_problem(models.empty_model(model)):
        yield f"{given} updates the bias of routers, and {config.model} has none: {problem}; remove it"
    if config.lora_rank:
        yield f"{given} changes the base under adapters, which are all that is saved: remove it, or --lora-rank"


def image_problems(config: TrainConfig, model: models.ModelConfig) -> Iterator[str]:
    """Yield what a vision-language model cannot be trained with, and what needs one."""
    if not sees_images(model):
        if config.freeze_encoder:
            yield f"--freeze-encoder freezes an encoder of images, and {config.model} has none: remove it"
        return
    given = f"{config.model} ({model.model_type}) has an encoder of images, which is not divided"
    for name in ("tp", "pp", "ep"):
        if (degree := getattr(config, name)) > 1:
            yield f"{flag(name)} = {degree}: {given}: use {flag(name)} 1, with --sp-ring, --sp-ulysses and --dp-shard"
    for name, off in (("compile", False), ("fp8", "none"), ("sample_every", 0)):
        if (value := getattr(config, name)) != off:
            yield f"{flag(name)} {value} is not supported for a vision-language model: use {flag(name)} {off}"
    if config.packing == "cut":
        yield "--packing cut would cut images: use --packing auto, which keeps chats whole"
    if config.sp_layout in OF_DOCUMENTS and bidirectional(model):
        given = f"--sp-layout {config.sp_layout}"
        yield f"{given} does not support images of {model.model_type}, which attend both ways: use zigzag"


def _float8_problems(resolved: Resolved, stage: ResolvedStage) -> Iterator[str]:
    """Yield why a model cannot be trained in float8 with the degrees of a stage."""
    if stage.config.fp8 != "none" and stage.dims.dp_shard > 0:  # not of a stage that has ended
        from usp.hf.float8 import float8_problems

        assert resolved.model_config is not None
        dims, gathers = stage.dims, stage.config.fp8 == "tensor" and stage.config.zero > 0
        shards = dims.dp_shard * dims.ring * dims.ulysses if gathers else 1
        yield from float8_problems(resolved.shape, resolved.model_config, stage.config.fp8, stage.dims.tp, shards)


def trained_model(config: TrainConfig, weights: bool = True, ids: int = 0, images: bool = False) -> models.ModelConfig:
    """Return the configuration of the model that `config` trains, with the context it is trained for.

    weights: as in `resolve`. ids: of its tokenizer with the tokens that are added; it gets rows for them. images: as in
    `load_model_config`.

    Raises ValueError for a model that cannot be read, has no such context, or has dropout that is not disabled.
    """
    try:
        model = models.load_model_config(config.model, weights=weights, images=images)
        model = models.without_dropout(models.with_vocabulary(model, ids), config.disable_dropout)
        if config.rope_scaling not in ROPE_SCALINGS:  # one of the violations
            return model
        longest = max(stage.seq_len for stage in by_stage(config))
        return models.with_context(model, longest, config.rope_scaling, pretrained=config.model not in PRESETS)
    except ValueError as error:
        raise ValueError(with_flags(violation_of(error))) from error


def job_of(
    config: TrainConfig,
    model_config: models.ModelConfig,
    world_size: int,
    model: ModelShape | None = None,
    data: Data = ONE_DOCUMENT,
) -> Job:
    """Return the step that `config` asks for; of a curriculum, that of the stage with most tokens on a rank.

    model: the shapes of `model_config`, if the caller has them.

    Raises ConfigurationError for configurations that train.py refuses, and for models that see images.
    """
    images = f"--model = {config.model} has an encoder of images, which is not modelled"
    refused = [images] if sees_images(model_config) else []
    resolved = resolve(config, world_size, model_config)
    _, model_config, _, _ = resolved.valid(refused)
    config, dims = resolved.largest.config, resolved.largest.dims
    model = model or resolved.shape
    balance = model.facts.balance(config.router_aux_loss_coef) != 0
    approximate = "; ".join(_approximations(config, model.facts))
    job = Job(config, model, dims, balance, data=data, approximate=approximate)
    if lora := lora_of(config, model_config):  # frozen weights need no float32 copy
        saved = [name for name, _ in lora.saved.parameters] if lora.saved else []
        return replace(job, model=adapted(model, lora.rank, lora.targets, saved), weights=job.dtype)
    return job


def _approximations(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    if facts.formula_violation:
        yield f"activations of model_type={facts.model_type} are estimated from its matrices"
    if facts.compressed:
        yield "compressed keys, and what is sent for them, are left out"
    elif facts.chosen:
        yield "ranks are assumed to receive all keys that the mask shows, and not only those that indexers choose"
    if config.lora_rank:
        yield "what frozen weights need not save is estimated"
    if estimated := OPTIMIZERS[config.optimizer].approximate:
        yield estimated
