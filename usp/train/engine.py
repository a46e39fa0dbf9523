"""The engine: forward, backward and optimizer step with FSDP2, through a pipeline where the mesh has a pp axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from usp.hf.disk import is_adapter, stored_tensors
from usp.hf.experts import expert_modules
from usp.hf.float8 import update_scales
from usp.hf.integrate import decoder_layers
from usp.hf.prune import tied_ends
from usp.hf.stage import CausalLMStage
from usp.losses import Head
from usp.optimizers import AdamW
from usp.parallel import ParallelMesh, before_micro_batch, clip_grad_norm, local_tensor
from usp.parallel.fsdp import sum_tied_gradients

from .passes import MicroBatch, PipelineRunner, count_choices, loss_share


def hidden_matrices(stages: Iterable[CausalLMStage]) -> list[nn.Parameter]:
    """Return the trained matrices of the decoder layers, and experts' stacks of matrices; embeddings are none."""
    chosen: dict[nn.Parameter, None] = {}
    for stage in stages:
        experts = {id(parameter) for module in expert_modules(stage.model) for parameter in module.parameters()}
        for module in decoder_layers(stage.model).modules():
            for parameter in module.parameters(recurse=False):
                is_matrix = parameter.ndim == 2 and id(parameter) not in experts  # of experts, these are biases
                is_matrix |= parameter.ndim == 3 and id(parameter) in experts
                if parameter.requires_grad and is_matrix and not isinstance(module, nn.Embedding):
                    chosen[parameter] = None
    return list(chosen)


class Engine:
    """Trainer of the stages of this rank, which `apply_fsdp` sharded. Every rank calls every method, in one order.

    stages: the pipeline stages that this rank holds, in order. zero: the ZeRO stage they were sharded with. pipeline:
    runs the stages where the mesh has more than one. float8_gather: weights are gathered in float8.
    """

    def __init__(
        self,
        stages: Sequence[CausalLMStage],
        mesh: ParallelMesh,
        *,
        zero: int,
        optimizer: AdamW,
        pipeline: PipelineRunner | None = None,
        float8_gather: bool = False,
    ) -> None:
        self.stages, self.mesh, self.zero, self.pipeline = stages, mesh, zero, pipeline
        self.parameters = {name: p for stage in stages for name, p in stage.model.named_parameters() if p.requires_grad}
        self.untrained: dict[str, Tensor] = {}
        if not any(is_adapter(name) for name in self.parameters):  # with adapters, a checkpoint holds nothing else
            stored = {name: x for stage in stages for name, x in stored_tensors(stage.model).items()}
            self.untrained = {name: x for name, x in stored.items() if name not in self.parameters}
        trained = self.parameters.values()
        matrices = hidden_matrices(stages)
        self.rule, self._matrices = optimizer, set(map(id, matrices))
        self.optimizer = optimizer.over(trained, matrices, mesh)
        # Of the parameter that the first and the last stage both have: {its name here: the name it is stored under}.
        ends = {name: stored for stage in stages for name, stored in tied_ends(stage.model).items()}
        self._tied = {name: stored for name, stored in ends.items() if name in self.parameters}
        self._copies = {name: stored for name, stored in self._tied.items() if name != stored}
        scales = partial(update_scales, self.stages, mesh, zero > 0)
        self._update_scales: Callable[[], None] = scales if float8_gather else lambda: None
        self._update_scales()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        """Accumulate the step's gradients; return this rank's share of the loss, float32, 0-dim, detached. The loss is
        the sum of the shares over the loss axis on the last pipeline stage; other stages return zero."""
        if self.pipeline is not None:
            return self.pipeline.forward_backward(micro_batches, head)
        count_choices(self.stages, self.mesh, micro_batches)
        (stage,) = self.stages
        share = torch.zeros((), device=self.mesh.device_type)
        for number, batch in enumerate(micro_batches, start=1):
            before_micro_batch(stage, self.zero, last=number == len(micro_batches))
            inputs = {key: value for key, value in batch.items() if key != "input_ids"}
            loss = stage(batch["input_ids"], **inputs, head=head)
            loss.backward()
            share += loss.detach()
        return share

    def evaluate(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
        """Return this rank's share of the loss as `forward_backward`, without gradients and load-balancing loss."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(micro_batches, head)
        return loss_share(self.stages, self.mesh, micro_batches, head)

    def step(self, learning_rate: float, max_norm: float) -> float:
        """Clip gradients to `max_norm`, update the weights, clear gradients; return the norm before clipping. Weights
        are not updated if the norm is not finite."""
        idle = [name for name, p in self.parameters.items() if p.grad is None and is_adapter(name)]
        if idle:  # a layer that reads the weight of a linear, without calling it, leaves its adapter out
            raise RuntimeError(f"{', '.join(idle)} did not take part in the forward: use other lora_targets")
        sum_tied_gradients([self.parameters[name] for name in self._tied], self.mesh)
        copies = [self.parameters[name] for name in self._copies]
        norm = clip_grad_norm(self.parameters.values(), max_norm, self.mesh, copies)
        biases = [stage.router_bias for stage in self.stages if stage.router_bias is not None]
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
            self._update_scales()
        for bias in biases:
            bias.update() if math.isfinite(norm) else bias.discard()
        self.optimizer.zero_grad()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return weights and optimizer state under names that do not depend on the layout.

        "model.<name>" and for each state of the optimizer "optimizer.<name>.<state>", such as ".exp_avg", with
        transformers' names; of persistent buffers and frozen parameters only "model.<name>", unless adapters are
        trained. DTensors of the global shape, or plain tensors that are the same on every rank.
        """
        state = {f"model.{name}": value.detach() for name, value in self.untrained.items()}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state[parameter]
            if not moments:
                moments.update(self.rule.first_state(parameter, id(parameter) in self._matrices))
            stored = self._copies.get(name, name)
            if stored != name and stored in self.parameters:  # this rank has both stages
                continue
            state[f"model.{stored}"] = _placed(parameter.detach(), parameter)
            state.update({f"optimizer.{stored}.{key}": value for key, value in moments.items()})
        return state

    def take_over(self, other: Engine) -> None:
        """Take the optimizer states of an engine that trained the same parameters, sharded alike."""
        for name, parameter in self.parameters.items():
            moments = other.optimizer.state.pop(other.parameters[name], {})
            self.optimizer.state[parameter] = {key: _placed(value, parameter) for key, value in moments.items()}

    def restore(self) -> None:
        """Continue from what filled the tensors of `state()`, which lack a tied parameter's copy of another stage."""
        for name, stored in self._copies.items():
            if stored in self.parameters:
                copy, original = self.parameters[name], self.parameters[stored]
                local_tensor(copy.detach()).copy_(local_tensor(original.detach()))
                for key, value in self.optimizer.state[original].items():
                    local_tensor(self.optimizer.state[copy][key]).copy_(local_tensor(value))
        self._update_scales()


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """Return the same memory as a DTensor on the mesh of `parameter`; a plain tensor as it is."""
    if not isinstance(value, DTensor):
        return value
    assert isinstance(parameter, DTensor)
    placed = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local_tensor(value), *placed, run_check=False, shape=value.shape, stride=value.stride())
