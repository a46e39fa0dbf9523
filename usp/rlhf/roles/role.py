"""The interface between the executor and a role's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from parallel import ParallelMesh
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout


class Role(Protocol):
    """One copy of a role's weights in the layout of a call, without memory at first.

    Every rank of the mesh makes the same calls. Only the ranks in `CallLayout.leaders` return samples.
    """

    def weights(self) -> Mapping[str, Tensor]:
        """Return parameters and persistent buffers by global names, DTensors or plain, with or without memory.

        Without those that training leaves as they are (`SupportsSharing.frozen`).
        """

    def fill(self) -> None:
        """Allocate and initialize the weights."""

    def allocate(self) -> None:
        """Allocate the weights without initializing them. Frozen ones are initialized the first time, and stay."""

    def release(self) -> None:
        """Free the memory of the weights."""

    def offload(self) -> None:
        """Move the weights to the host."""

    def load(self) -> None:
        """Move the weights back to the device."""

    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        """Respond to prompts, by prompt id: samples p * group_size + k, with the keys of `keys.GENERATED`."""

    def inference(self, samples: Samples, work: Inference, output: str, layout: CallLayout | None = None) -> Samples:
        """Return the samples with only the key `output`. Their sequences are under the key "tokens".

        layout: of the call, which differs from the copy's in micro-batches and chunks alone; None: that of the copy.
        """

    def train_step(self, mini_batches: Sequence[Samples], work: TrainStep) -> Mapping[str, float]:
        """Train on this data-parallel rank's part of each mini-batch; return the same metrics on every rank."""


@runtime_checkable
class SupportsSharing(Protocol):
    """A model whose weights can share the memory of another copy."""

    def frozen(self) -> Mapping[str, Tensor]:
        """Return the parameters that `weights` leaves out: with adapters those of the base, else none."""

    def share(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors, with the same names and boxes, instead of allocating memory.

        They are all of `frozen()`, with or without those of `weights()`. Called only for copies with zero=0 that never
        had memory.
        """


@runtime_checkable
class SupportsSwitching(Protocol):
    """A model whose values can move to that of another plan."""

    def state(self) -> Mapping[str, Tensor]:
        """Return the live weights and optimizer states of a trained copy, by names that do not depend on its layout."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state()`, whose tensors have been filled."""

    def discard(self) -> None:
        """Free all memory of a copy that has values between steps; it is not used again."""


# The call, with its layout, is the role's train step for the copy that the optimizer updates, else the first call that
# uses the copy.
BuildRole: TypeAlias = Callable[[ModelCall, CallLayout, ParallelMesh], Role]
