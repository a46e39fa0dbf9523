"""Resolve a configuration: find its model, settle the batch and the degrees, and check every rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from parallel import ParallelDims
from usp.config import ROPE_SCALINGS, TrainConfig
from usp.hf.models import ModelConfig, load_model_config, model_facts, with_context
from usp.hf.shapes import model_shape
from usp.model.facts import ModelFacts, ModelShape
from usp.presets import PRESETS, settled_rate
from usp.run.failures import ConfigurationError, listed

from .validate import parallel_dims, settle_batch, violations, with_flags


@dataclass(frozen=True)
class Resolved:
    """A configuration with its model and degrees; the same on every rank.

    Attributes:
        config: with the batch size of a rank and the learning rate; device and dtype may still be `auto`.
        model_config, facts: with the context of the run; None where the model was not found.
        dims: None where there are problems.
        problems: what is wrong, one message each.
    """

    config: TrainConfig
    model_config: ModelConfig | None
    facts: ModelFacts | None
    dims: ParallelDims | None
    problems: tuple[str, ...]

    @cached_property
    def shape(self) -> ModelShape:
        """The model's parameters as shapes, built once."""
        assert self.facts is not None and self.model_config is not None
        return model_shape(self.facts, self.model_config)

    def valid(self, problems: Iterable[str] = ()) -> tuple[TrainConfig, ModelConfig, ModelFacts, ParallelDims]:
        """Return the configuration, its model's configuration and facts, and the degrees.

        Raises:
            ConfigurationError: for `problems` and the problems found here, all of them in one message.
        """
        if found := [*problems, *self.problems]:
            raise ConfigurationError(listed(found))
        assert self.model_config is not None and self.facts is not None and self.dims is not None
        return self.config, self.model_config, self.facts, self.dims


def resolve(config: TrainConfig, world_size: int, model_config: ModelConfig | None = None) -> Resolved:
    """Resolve `config` on `world_size` ranks; model_config: from `trained_model`, if the caller has it."""
    config, problems, facts = settle_batch(config, world_size), [], None
    config = replace(config, learning_rate=settled_rate(config.learning_rate, config.model))
    if model_config is None:
        try:
            model_config = load_model_config(config.model)
            model_config = _with_context(config, model_config)
        except (ValueError, OSError) as error:
            problems.append(with_flags(str(error)))
    if model_config is not None:
        facts = model_facts(config.model, model_config)
    problems += violations(config, world_size, facts)
    dims = None if problems else parallel_dims(config, config.ep).resolve(world_size)
    return Resolved(config, model_config, facts, dims, tuple(problems))


def trained_model(config: TrainConfig) -> ModelConfig:
    """Return the configuration of the model that `config` trains, with the context it is trained for.

    Raises:
        ValueError: as `load_model_config` and `with_context`.
    """
    try:
        return _with_context(config, load_model_config(config.model))
    except ValueError as error:
        raise ValueError(with_flags(str(error))) from error


def _with_context(config: TrainConfig, model: ModelConfig) -> ModelConfig:
    if config.rope_scaling not in ROPE_SCALINGS:  # one of the violations
        return model
    return with_context(model, config.seq_len, config.rope_scaling, pretrained=config.model not in PRESETS)
