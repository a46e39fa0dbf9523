"""The calls of an RLHF step: of models and of functions, and the keys of `Samples` that they take and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from usp.rlhf.data.samples import Samples

Reduce: TypeAlias = Callable[[Tensor], Tensor]  # the sum of a tensor over all ranks that share a call's samples


class Sequences(Protocol):
    """The sequences of a micro-batch, whose tokens may lie on several sequence-parallel ranks."""

    def sums(self, x_BS: Tensor) -> Tensor:
        """(sequences,): the sum of x over ALL tokens of each sequence, in the order of sample ids; differentiable.

        Every sequence-parallel rank gets the same sums.
        """

    def share(self, loss: Tensor) -> Tensor:
        """This rank's share of a loss that all sequence-parallel ranks compute alike from `sums`."""


class Objective(Protocol):
    """What a train step minimises: a function of what the model says about this rank's tokens.

    Attributes:
        head: "logprobs": log-probabilities of the next tokens; "values": the scalar head's output.
        entropy: whether entropies are wanted beside log-probabilities.
        keys: the per-token keys of `Samples` it is given, as float32 (B, S) sharded like the tokens, 0 in padding.
        unit: samples that must stay together in a micro-batch (2 for pairs), with consecutive ids.
        temperature: of the log-probabilities.
    """

    @property
    def head(self) -> Literal["logprobs", "values"]: ...
    @property
    def entropy(self) -> bool: ...
    @property
    def keys(self) -> tuple[str, ...]: ...
    @property
    def unit(self) -> int: ...
    @property
    def temperature(self) -> float: ...

    def __call__(
        self, output_BS: Tensor, entropy_BS: Tensor | None, given: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's share of the loss (0-dim), and detached 0-dim sums to be added over ranks and micro-batches.

        The normalisation is in the given weights, which are made for the whole mini-batch beforehand: the sum of all
        shares over ranks and micro-batches is the loss, whatever the layout.
        """


@dataclass(frozen=True)
class Generate:
    """Sample `group_size` responses to each prompt. Takes prompt_ids, gives tokens, mask, logprobs, finished.

    Attributes:
        max_new_tokens: stop there without a stop id.
        temperature: 0 is greedy. top_k: 0 is all. top_p: 1 is all.
        stop_ids: a response ends with the first of these, which belongs to it.
    """

    group_size: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Inference:
    """One forward over whole sequences. Takes tokens; its one output key holds what `head` names.

    logprobs: (tokens,) of the next token, at `temperature`. values: (tokens,) of the scalar head. score: 0-dim, the
    scalar head at the last token.
    """

    head: Literal["logprobs", "values", "score"]
    temperature: float = 1.0


@dataclass(frozen=True)
class TrainStep:
    """Optimiser steps on the samples of a step, `mini_batches` of them, `epochs` times over.

    Mini-batches are made of consecutive sample ids, so that they are the same in every layout.

    Attributes:
        stop_above: (metric, bound): before an optimiser step, leave the call when the mini-batch's metric is above.
    """

    objective: Objective
    mini_batches: int = 1
    epochs: int = 1
    stop_above: tuple[str, float] | None = None


@dataclass(frozen=True)
class Compute:
    """A function of samples without a model: rewards, advantages. Its ranks share the samples, groups kept whole.

    function(samples, reduce) -> the output keys of the same samples. `reduce` sums over all of the call's ranks, for
    statistics of the whole step, and is called equally often on every rank, samples or none.

    Attributes:
        unit: samples that must stay together, with consecutive ids.
        scalars: output keys that are one number per sample; the others have one per token. All are float32.
    """

    function: Callable[[Samples, Reduce], Samples]
    unit: int = 1
    scalars: tuple[str, ...] = ("score",)


Work: TypeAlias = Generate | Inference | TrainStep | Compute


@dataclass(frozen=True)
class ModelCall:
    """One call of a step.

    Attributes:
        role: whose model it is (actor, critic, ref, reward); "" for `Compute`.
        inputs, outputs: keys of `Samples`.
    """

    name: str
    role: str
    work: Work
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """generate, inference, train_step or compute."""
        kinds = {Generate: "generate", Inference: "inference", TrainStep: "train_step", Compute: "compute"}
        return kinds[type(self.work)]
