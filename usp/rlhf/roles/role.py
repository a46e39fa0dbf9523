"""What the executor asks of a model: a role's weights in the layout of a call, on one rank of its mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from parallel import ParallelMesh
from usp.rlhf.data.samples import Samples
from usp.rlhf.graph.calls import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout


class RoleModel(Protocol):
    """One copy of a role's weights, which has no memory at first, and what can be done with them.

    Every rank of the mesh makes the same calls.

    The leader of a data-parallel index is the rank that `CallLayout.leaders` names; the others of its group return no
    samples.
    """

    def weights(self) -> Mapping[str, Tensor]:
        """The parameters by their global names, DTensors or plain; with memory or without."""

    def fill(self) -> None:
        """Give the weights memory and their first values, for the copy that others are made of."""

    def allocate(self) -> None:
        """Give the weights memory, with any content."""

    def release(self) -> None:
        """Take their memory away."""

    def offload(self) -> None:
        """Move them to the host."""

    def load(self) -> None:
        """Bring them back from the host."""

    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        """Responses to prompts (ids: of prompts): samples p * group_size + k, with the keys of `keys.GENERATED`."""

    def inference(self, samples: Samples, work: Inference, output: str) -> Samples:
        """The samples with `output` alone. Their sequences are under the key "tokens"."""

    def train_step(self, mini_batches: Sequence[Samples], work: TrainStep) -> Mapping[str, float]:
        """Train on this group's part of each mini-batch; the same metrics on every rank."""


@runtime_checkable
class Sharing(Protocol):
    """A model whose weights can live in another's memory."""

    def share(self, weights: Mapping[str, Tensor]) -> None:
        """Use these tensors, of the same names and boxes, from now on, instead of memory of its own.

        Asked of copies with zero=0 that never had memory.
        """


# The call is the role's train step where the copy is the one that an optimiser changes, else the copy's first call.
BuildRole: TypeAlias = Callable[[ModelCall, CallLayout, ParallelMesh], RoleModel]
