"""Training steps of a pipeline of stages, on torch.distributed.pipelining.

Gradients are SUMMED over micro-batches, as FSDP2 sums them over ranks, and FSDP2 follows its ZeRO stage. By default,
torch's pipeline overrides FSDP2: it keeps a whole stage and its gradients unsharded until the step ends. zero-bubble
needs that, because the weight-gradient half of a backward runs long after FSDP2's hooks; it therefore supports only
ZeRO stages 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from .fsdp import before_micro_batch
from .mesh import ParallelMesh
from .stages import PipelineSchedule, micro_batch_violation, rank_stages, schedule_violation


class Pipeline:
    """The pipeline stages of this rank, ready to run steps of `micro_batches` micro-batches.

    A stage is called as `stage(*x, **kwargs)` with one micro-batch: the first stage with ids, the others with the
    outputs of the previous stage. The last stage returns its loss, a 0-dim tensor.

    Args:
        stages: stages of this rank in the order of `rank_stages`, FSDP2 modules or plain ones.
        stage_outputs: example outputs of a stage for one micro-batch, of which shape and dtype are used. Gradients
            flow back through floating-point tensors.
        zero: ZeRO stage passed to `apply_fsdp`.

    Raises ValueError if the schedule does not support this number of micro-batches, this ZeRO stage or this torch.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: ParallelMesh,
        schedule: PipelineSchedule,
        *,
        micro_batches: int,
        stage_outputs: Sequence[Tensor],
        zero: int,
    ) -> None:
        pp = mesh.size("pp")
        violation = micro_batch_violation(schedule.name, pp, micro_batches)
        if schedule.name == "zero-bubble" and zero > 1 and any(isinstance(stage, FSDPModule) for stage in stages):
            violation = f"zero={zero} frees parameters or gradients that zero-bubble still needs: use zero=1"
        if violation := schedule_violation(schedule.name, torch.__version__) or violation:
            raise ValueError(violation)
        indices, last = rank_stages(schedule, pp, mesh.rank("pp")), pp * schedule.stages_per_rank - 1
        self.device = next(stages[0].parameters()).device
        # Given the shapes, torch does not run extra forwards and backwards to infer them.
        edge = tuple(torch.empty_like(x, requires_grad=x.is_floating_point(), device="meta") for x in stage_outputs)
        loss = torch.empty((), requires_grad=True, device="meta")

        def build(module: nn.Module, index: int) -> PipelineStage:
            kind: Any = PipelineStage if schedule.name == "zero-bubble" else partial(_Stage, zero)
            shapes = {"input_args": edge if index else (), "output_args": loss if index == last else edge}
            return kind(module, index, last + 1, self.device, group=mesh.group("pp"), **shapes)

        built: list[Any] = [build(*each) for each in zip(stages, indices, strict=True)]
        several: Any = ScheduleZBVZeroBubble if schedule.name == "zero-bubble" else ScheduleInterleaved1F1B
        # The output of the last stage already is the loss.
        options: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": lambda x, _: x, "scale_grads": False}
        one = schedule.name == "1f1b"
        self._schedule: Any = Schedule1F1B(built[0], **options) if one else several(built, **options)
        self._parameters = [parameter for stage in stages for parameter in stage.parameters()]

    def step(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """Run forward and backward of a batch, accumulate gradients, and return the detached loss.

        The loss is summed over micro-batches on the rank with the last stage, and zero elsewhere. Collective over the
        pp axis; every rank must pass the same batch.

        Args:
            ids: (rows, ...), split into micro-batches of rows / micro_batches consecutive rows.
            kwargs: arguments of every stage: tensors are split like `ids`, other values go to all micro-batches.
        """
        losses: list[Tensor] = []
        before = {parameter: parameter.grad for parameter in self._parameters}
        # torch requires a target, which the loss function ignores.
        self._schedule.step(ids, target=ids, losses=losses, return_outputs=False, **kwargs)
        for parameter, grad in before.items():
            # The first step of a schedule drops the gradients of FSDP2 modules instead of adding to them.
            if grad is not None and parameter.grad is not grad:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self.device)


class _Stage(PipelineStage):
    """A stage that configures FSDP2 before each backward, as training without a pipeline does."""

    def __init__(self, zero: int, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(_Hidden(module), *args, **kwargs)
        self._module, self._zero = module, zero

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        before_micro_batch(self._module, self._zero, last=last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class _Hidden(nn.Module):
    """Wraps an FSDP2 module, so that torch's pipeline does not recognize it and take over its resharding."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
