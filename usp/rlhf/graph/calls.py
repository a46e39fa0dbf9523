"""The calls of an RLHF step, to models and functions, with the keys of `Samples` that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from usp.rlhf.data.samples import Samples

Reduce: TypeAlias = Callable[[Tensor], Tensor]  # sums a tensor over all ranks of a call


class Sequences(Protocol):
    """The sequences of a micro-batch, whose tokens may be sharded over sequence-parallel ranks."""

    def sums(self, x_BS: Tensor) -> Tensor:
        """Sum x over ALL tokens of each sequence: (sequences,), in the order of sample ids; differentiable.

        Every sequence-parallel rank gets the same sums.
        """

    def spread(self, x_N: Tensor) -> Tensor:
        """Give each of this rank's tokens the number of its sequence, (B, S); 0 in padding."""

    def share(self, loss: Tensor) -> Tensor:
        """Return this rank's share of a loss that every sequence-parallel rank computes from `sums`."""


class Objective(Protocol):
    """The loss that a train step minimizes, computed from the model's output for this rank's tokens.

    Attributes:
        head: "logprobs": log-probabilities of the next tokens; "values": the scalar head's output.
        entropy: also compute entropies, for "logprobs".
        keys: per-token keys of `Samples` to pass in, as float32 (B, S) sharded like the tokens, 0 in padding.
        counts: the one of `keys` that is 0 where a log-probability and its entropy do not count; these are not
            computed, but 0. "": all count.
        unit: number of samples with consecutive ids that must share a micro-batch (2 for pairs).
        temperature: of the log-probabilities.
    """

    @property
    def head(self) -> Literal["logprobs", "values"]: ...
    @property
    def entropy(self) -> bool: ...
    @property
    def keys(self) -> tuple[str, ...]: ...
    @property
    def counts(self) -> str: ...
    @property
    def unit(self) -> int: ...
    @property
    def temperature(self) -> float: ...

    def __call__(
        self, output_BS: Tensor, entropy_BS: Tensor | None, given: Mapping[str, Tensor], sequences: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's share of the loss (0-dim), and detached 0-dim metrics.

        Both are summed over ranks and micro-batches; of metrics named *_max the largest is taken. The given weights
        carry the normalization, computed over the whole mini-batch beforehand, so the sum is the same loss in every
        layout.
        """


@dataclass(frozen=True)
class Generate:
    """Sample `group_size` responses to each prompt. Reads prompt_ids, writes tokens, mask, logprobs, finished.

    Attributes:
        max_new_tokens: maximum length of a response.
        temperature: 0 decodes greedily. top_k: 0 disables. top_p: 1 disables.
        stop_ids: a response ends with the first of these, which it includes.
        stop_strings: it also ends with the first token after which its text contains one of these.
    """

    group_size: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inference:
    """One forward over whole sequences. Reads tokens; writes the output of `head` under its one output key.

    logprobs: (tokens,) of the next token, at `temperature`; 0 where `mask` is, if the call reads it. values: (tokens,)
    of the scalar head. score: 0-dim, the scalar head at the last token.

    Attributes:
        adapters: False: compute with the role's base, as without its adapters.
    """

    head: Literal["logprobs", "values", "score"]
    temperature: float = 1.0
    adapters: bool = True


@dataclass(frozen=True)
class TrainStep:
    """Optimizer steps on the samples of a step: `epochs` passes over `mini_batches` mini-batches.

    A mini-batch has consecutive sample ids, so it is the same in every layout.

    Attributes:
        stop_above: (metric, bound): end the call before an optimizer step whose mini-batch metric exceeds the bound.
    """

    objective: Objective
    mini_batches: int = 1
    epochs: int = 1
    stop_above: tuple[str, float] | None = None


@dataclass(frozen=True)
class Compute:
    """A function of samples without a model, such as rewards or advantages. The samples are split over its ranks.

    function(samples, reduce) -> the same samples with the output keys. `reduce` sums over all of the call's ranks, for
    statistics of the whole step; every rank must call it equally often, even without samples.

    Attributes:
        unit: number of samples with consecutive ids that must share a rank.
        scalars: output keys with one number per sample; the others have one per token. All are float32.
    """

    function: Callable[[Samples, Reduce], Samples]
    unit: int = 1
    scalars: tuple[str, ...] = ("score",)


Work: TypeAlias = Generate | Inference | TrainStep | Compute


@dataclass(frozen=True)
class ModelCall:
    """One call of a step.

    Attributes:
        role: the model (actor, critic, ref, reward, or another name); "" for `Compute`.
        inputs, outputs: keys of `Samples`.
    """

    name: str
    role: str
    work: Work
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Return generate, inference, train_step or compute."""
        kinds = {Generate: "generate", Inference: "inference", TrainStep: "train_step", Compute: "compute"}
        return kinds[type(self.work)]
