"""A model's parameters as data: their exact shapes, layer by layer, and how tensor parallelism cuts them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .facts import ModelFacts


@dataclass(frozen=True)
class ParameterShape:
    """One parameter.

    Attributes:
        name: as transformers names it, inside its layer or the model.
        style: of the module that has it, as in the plan of `parallel.tensor`; "replicated" where the plan is silent.
    """

    name: str
    shape: tuple[int, ...]
    style: str = "replicated"

    @property
    def tp_dim(self) -> int | None:
        """The dim that tensor-parallel ranks divide; None where each has it all."""
        if self.style in ("colwise", "colwise_parameter", "embedding_rowwise"):
            return 0
        return 1 if self.style == "rowwise" and len(self.shape) > 1 else None

    def local(self, tp: int) -> tuple[int, ...]:
        """The shape on one of `tp` tensor-parallel ranks."""
        return tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))

    def partial_gradient(self, sequence_parallel: bool) -> bool:
        """Whether tensor-parallel ranks each have a part of its gradient, to be summed."""
        if self.style == "untouched" or self.tp_dim is not None:
            return False
        return sequence_parallel or self.style != "replicated"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LayerShape:
    """A decoder layer; `experts` are parameters (experts, rows, columns), empty in a dense layer."""

    parameters: tuple[ParameterShape, ...]
    experts: tuple[ParameterShape, ...] = ()


@dataclass(frozen=True)
class ModelShape:
    """A causal language model without its values.

    Attributes:
        layers: in order; equal ones may be one object.
        head: empty where it is the embedding.
        experts_per_token: how many experts each token goes to; 0 for a dense model.
        expert_size: columns of one expert's hidden layer.
    """

    facts: ModelFacts
    hidden_size: int
    embedding: tuple[ParameterShape, ...]
    layers: tuple[LayerShape, ...]
    norm: tuple[ParameterShape, ...]
    head: tuple[ParameterShape, ...]
    experts_per_token: int = 0
    expert_size: int = 0

    @property
    def numel(self) -> int:
        """All parameters."""
        parts = [*self.embedding, *self.norm, *self.head]
        for layer in self.layers:
            parts += [*layer.parameters, *layer.experts]
        return sum(part.numel for part in parts)

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply a token: all but the input embedding, a tied output head included.

        Of a layer's experts, as many as a token chooses.
        """
        idle = self.facts.num_experts - self.experts_per_token
        experts = sum(part.numel for layer in self.layers for part in layer.experts)
        embedding = 0 if self.facts.tied else sum(part.numel for part in self.embedding)
        return self.numel - embedding - (experts // self.facts.num_experts * idle if experts else 0)
