"""One training step through a pipeline of stages, on torch.distributed.pipelining.

Gradients are SUMMED over micro-batches, as FSDP2 sums them over ranks, and FSDP2 keeps to its ZeRO stage: left to
itself, torch's pipeline gathers a whole stage and adds its gradients up whole until the step ends, whatever FSDP2 was
told. zero-bubble needs just that, because the weights' half of a backward comes long after the hooks that gather and
scatter; so it takes ZeRO stages 0 and 1 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from .fsdp import before_micro_batch
from .mesh import ParallelMesh
from .stages import micro_batch_violation, rank_stages, stages_per_rank


class Pipeline:
    """The stages of this rank, ready to run steps of `micro_batches` micro-batches.

    A stage is called as `stage(*x, **kwargs)`, with its micro-batch of the kwargs: the first stage with ids, the others
    with what the stage before gave. The last one gives its loss, 0-dim.

    Args:
        stages: this rank's, in the order of `rank_stages`, FSDP2 modules or plain ones.
        handed: what each stage gives the next for one micro-batch, in shape and dtype. Floating tensors carry
            gradients back.
        zero: the ZeRO stage of `apply_fsdp`.

    Raises:
        ValueError: if the schedule cannot run this many micro-batches, or not with this ZeRO stage.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: ParallelMesh,
        schedule: str,
        *,
        micro_batches: int,
        handed: Sequence[Tensor],
        zero: int,
    ) -> None:
        pp = mesh.size("pp")
        violation = micro_batch_violation(schedule, pp, micro_batches)
        if schedule == "zero-bubble" and zero > 1 and any(isinstance(stage, FSDPModule) for stage in stages):
            violation = f"zero={zero} gives parameters or gradients up before zero-bubble is done with them: use zero=1"
        if violation:
            raise ValueError(violation)
        indices, last = rank_stages(schedule, pp, mesh.rank("pp")), pp * stages_per_rank(schedule) - 1
        self.device = next(stages[0].parameters()).device
        self._micro_batches, self._has_last = micro_batches, last in indices
        # With shapes given, torch does not look for them with forwards and backwards of its own.
        edge = tuple(torch.empty_like(x, requires_grad=x.is_floating_point(), device="meta") for x in handed)
        loss = torch.empty((), requires_grad=True, device="meta")

        def built(module: nn.Module, index: int) -> PipelineStage:
            shapes: dict[str, Any] = {
                "input_args": edge if index else (),
                "output_args": loss if index == last else edge,
            }
            if schedule == "zero-bubble":
                return PipelineStage(module, index, last + 1, self.device, group=mesh.group("pp"), **shapes)
            return _Stage(module, zero, index, last + 1, self.device, group=mesh.group("pp"), **shapes)

        self._schedule = _schedule(schedule, [*map(built, stages, indices)], micro_batches)

    def step(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch: adds to the parameters' gradients, and gives the loss, detached.

        The loss is summed over micro-batches on the rank that holds the last stage, and zero elsewhere. Collective over
        the pp axis: every rank gives the same batch.

        Args:
            ids: (rows, ...), of which a micro-batch is rows / micro_batches consecutive ones.
            kwargs: for every stage: tensors are cut like `ids`, other values are for all micro-batches.
        """
        losses: list[Tensor] = []
        # torch wants targets for its loss function; our last stage has computed the loss.
        self._schedule.step(ids, target=ids, losses=losses, return_outputs=False, **kwargs)
        assert len(losses) == (self._micro_batches if self._has_last else 0)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self.device)


class _Stage(PipelineStage):
    """A stage whose backwards tell FSDP2 when to gather, scatter and reduce, by the same rule as without a pipeline."""

    def __init__(self, module: nn.Module, zero: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(_Hidden(module), *args, **kwargs)
        self._module, self._zero = module, zero

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        before_micro_batch(self._module, self._zero, last=last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class _Hidden(nn.Module):
    """Keeps torch's pipeline from seeing that its module is FSDP2's, and from taking the gathering over."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _schedule(
    schedule: str, stages: list[Any], micro_batches: int
) -> Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble:
    options: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": _loss_of_last_stage, "scale_grads": False}
    if schedule == "1f1b":
        return Schedule1F1B(stages[0], **options)
    return (ScheduleZBVZeroBubble if schedule == "zero-bubble" else ScheduleInterleaved1F1B)(stages, **options)


def _loss_of_last_stage(output: Tensor, target: Tensor) -> Tensor:
    return output
