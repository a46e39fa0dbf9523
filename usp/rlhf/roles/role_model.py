"""A role's model in the layout of one call, on one rank: what the calls of a step do with it.

samples  --rows-->  micro-batches  --stages, a head on the last-->  a value per token, or gradients and metrics
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from parallel import ParallelMesh
from usp.hf.initialise import fill_buffers
from usp.hf.models import is_scalar, materialise
from usp.rlhf.data.samples import Samples
from usp.rlhf.generation.responses import Generates, responses
from usp.rlhf.graph.calls import Generate, Inference, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.run.failures import TrainingDiverged
from usp.train.build import build_stages, first_weights, fsdp2_engine
from usp.train.engines.fsdp2 import Fsdp2Engine

from .forward import forward_stages
from .readers import Minimise, Say
from .rows import micro_batches, plan_rows, unpack
from .spec import RoleSpec
from .weight_memory import WeightMemory, live_in


class RoleModel:
    """Every rank of the mesh calls every method, in the same order. Weights have no memory before `allocate`.

    Args:
        trained: this copy is the one that the optimiser changes. It is sharded with FSDP2, as is any copy with zero
            above 0; the others have plain parameters, or DTensors over tp (and ep) alone.
        make_generator: what generates with this copy; called once.

    Attributes:
        learning_rate: of the coming train steps; may be set between them.

    Raises:
        ValueError: for a model that cannot be divided as asked, and a role to be trained without an optimiser.
    """

    def __init__(
        self,
        spec: RoleSpec,
        layout: CallLayout,
        mesh: ParallelMesh,
        *,
        trained: bool = False,
        make_generator: Callable[[RoleModel], Generates] | None = None,
    ) -> None:
        if trained and spec.optimizer is None:
            raise ValueError(f"{spec.role} is to be trained, and its RoleSpec has no optimizer: give it an AdamW")
        self.spec, self.layout, self.mesh, self.trained = spec, layout, mesh, trained
        self.learning_rate = spec.learning_rate
        self.engine: Fsdp2Engine | None = None
        self._recipe = spec.recipe(layout, trained)
        (self.stage,) = build_stages(self._recipe, mesh)
        self._memory: WeightMemory | None = None
        self._make_generator = make_generator
        self._generator: Generates | None = None

    def weights(self) -> dict[str, Tensor]:
        """The live parameters by transformers' names, with memory or without."""
        return {name.removeprefix("model."): weight.detach() for name, weight in self.stage.named_parameters()}

    def allocate(self) -> None:
        """Give the weights memory with any content, if they have none. Buffers (rotary frequencies) keep theirs."""
        if self._memory is not None:
            self._memory.allocate()
            return
        materialise(self.stage, torch.device(self.mesh.device_type))
        fill_buffers(self.stage.model)
        self._memory = WeightMemory([self.stage])
        if self.trained:
            self.engine = fsdp2_engine([self.stage], self._recipe, self.mesh)

    def fill(self) -> None:
        """Give the weights memory and their first values."""
        self.allocate()
        first_weights(self.stage, self.spec.source, self.spec.seed, self.spec.new_head)

    def share(self, weights: Mapping[str, Tensor]) -> None:
        """Live in the memory of another copy's `weights()`, which hold the same boxes, instead of memory of its own.

        For a copy without memory. What the other copy learns, this one knows; `release` and the like do nothing.

        Raises:
            ValueError: for a copy that FSDP2 shards, and naming parameters that are not there.
        """
        if isinstance(self.stage, FSDPModule) or self._memory is not None:
            raise ValueError(f"a copy of {self.spec.role} that shares weights must have zero=0, and no memory yet")
        live_in(self.stage.model, weights, torch.device(self.mesh.device_type))
        fill_buffers(self.stage.model)
        self._memory = WeightMemory([])

    def release(self) -> None:
        """Take the weights' memory away, and their values with it."""
        if self._memory is not None:
            self._memory.release()

    def offload(self) -> None:
        """Move the weights to the host."""
        if self._memory is not None:
            self._memory.offload()

    def load(self) -> None:
        """Bring them back from the host."""
        if self._memory is not None:
            self._memory.load()

    def inference(self, samples: Samples, work: Inference, output: str) -> Samples:
        """One forward over this data-parallel rank's samples, maybe none: on its leader `output`, elsewhere nothing.

        Raises:
            ValueError: if the model's head is not the one that the work names.
        """
        head = Say("logprobs" if work.head == "logprobs" else "values", work.temperature)
        self._check_head(head.head)
        plan = plan_rows(samples, self.layout, self.mesh)
        values: list[Tensor] = []
        if plan is not None:
            batches = micro_batches(samples, plan, self.layout, self.mesh)
            said = self._forward(batches, head)
            values = unpack(said, plan, samples, self.layout, self.mesh) if self.stage.last else []
        if not self._leads:
            return Samples((), {})
        return Samples(samples.ids, {output: [value[-1] if work.head == "score" else value for value in values]})

    def train_step(self, mini_batches: Sequence[Samples], work: TrainStep) -> dict[str, float]:
        """Optimiser steps on this data-parallel rank's part of each mini-batch, maybe none of it.

        Returns:
            The objective's metrics and `loss`, averaged over the mini-batches seen, `grad_norm` over the optimiser
            steps made, and their number `optimizer_steps`; the same on every rank.

        Raises:
            TrainingDiverged: on every rank, when a metric or the gradient is not finite; the weights are those of the
                optimiser step before.
        """
        engine = self._trained_engine()
        self._check_head(work.objective.head)
        seen: list[dict[str, float]] = []
        norms: list[float] = []
        for epoch in range(work.epochs):
            for number, samples in enumerate(mini_batches, start=1):
                place = f"train_step of {self.spec.role}, epoch {epoch + 1}, mini-batch {number} of {len(mini_batches)}"
                seen.append(self._gradients(engine, samples, work, place))
                if work.stop_above is not None and _above(seen[-1], *work.stop_above):
                    engine.optimizer.zero_grad()
                    return _averages(seen, norms)
                norms.append(engine.step(self.learning_rate, self.spec.max_grad_norm))
                if not math.isfinite(norms[-1]):
                    raise TrainingDiverged(f"{place}: the gradient norm is {norms[-1]}, and must be finite")
        return _averages(seen, norms)

    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        """Responses to this data-parallel rank's prompts, maybe none: on its leader as `responses` says, else nothing.

        Raises:
            ValueError: for a copy that FSDP2 shards, or that nothing generates with.
        """
        if self._generator is None:
            if isinstance(self.stage, FSDPModule) or self._make_generator is None:
                raise ValueError(
                    f"{self.spec.role} is to generate with trained={self.trained}, zero={self.layout.zero} and "
                    f"make_generator={self._make_generator}: it takes an untrained copy, zero=0 and a generator"
                )
            self._generator = self._make_generator(self)
        made = responses(prompts, work, seed, self._generator)
        return made if self._leads else Samples((), {})

    def state(self) -> dict[str, Tensor]:
        """Weights and optimiser state of a trained copy, as `Engine.state`."""
        return self._trained_engine().state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` gave, filled from a checkpoint."""
        self._trained_engine().restore(state)

    def _gradients(self, engine: Fsdp2Engine, samples: Samples, work: TrainStep, place: str) -> dict[str, float]:
        """Add the gradients of a mini-batch up; its metrics, the same on every rank."""
        objective = work.objective
        plan = plan_rows(samples, self.layout, self.mesh, objective.unit)
        if plan is None:
            raise ValueError(f"{place} has no sample on any rank: give fewer mini-batches, or more samples")
        batches = micro_batches(samples, plan, self.layout, self.mesh, objective.keys)
        head = Minimise(objective, self.mesh.group("sp"))
        engine.forward_backward(batches, head)
        metrics = self._sums(head.metrics)
        broken = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if broken:
            engine.optimizer.zero_grad()
            raise TrainingDiverged(f"{place}: {broken} must be finite; no optimiser step was made")
        return metrics

    def _sums(self, metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """The sums over micro-batches and ranks, which the last stage has, on every rank."""
        totals: dict[str, float] = {}
        if self.stage.last:
            names = sorted(metrics[0])
            total = torch.stack([torch.stack([one[name].double() for name in names]) for one in metrics]).sum(0)
            for axis in ("loss", "tp"):
                dist.all_reduce(total, group=self.mesh.group(axis))
            # Ranks of tp hold the same, but for rounding: all must come to the same decisions.
            totals = dict(zip(names, (total / self.mesh.size("tp")).tolist(), strict=True))
        if self.mesh.size("pp") == 1:
            return totals
        known = [totals]
        device = torch.device(self.mesh.device_type)
        last = self.mesh.size("pp") - 1
        dist.broadcast_object_list(known, group=self.mesh.group("pp"), group_src=last, device=device)
        return known[0]

    def _forward(self, batches: Sequence[Mapping[str, Tensor]], head: Say) -> list[Tensor]:
        parts = self.mesh.size("tp") if self.layout.tp_sequence_parallel else 1
        return forward_stages(self.stage, self.mesh, batches, head, dtype=self.spec.dtype, token_parts=parts)

    @property
    def _leads(self) -> bool:
        """Whether this rank has the results of its data-parallel group."""
        return self.stage.last and self.mesh.rank("sp") == 0 and self.mesh.rank("tp") == 0

    def _trained_engine(self) -> Fsdp2Engine:
        if self.engine is None:
            raise RuntimeError(f"{self.spec.role} is not trained in this layout, or its weights have no memory yet")
        return self.engine

    def _check_head(self, head: str) -> None:
        if (head == "values") != is_scalar(self.spec.config):
            has = "a scalar head" if is_scalar(self.spec.config) else "a causal LM's head"
            raise ValueError(f"{self.spec.role} was asked for {head}, and has {has}: use the role that has the other")


def _above(metrics: Mapping[str, float], name: str, bound: float) -> bool:
    if name not in metrics:
        raise ValueError(f"stop_above names {name}, and the objective gives {', '.join(metrics)}")
    return metrics[name] > bound


def _averages(seen: Sequence[Mapping[str, float]], norms: Sequence[float]) -> dict[str, float]:
    averages = {name: sum(one[name] for one in seen) / len(seen) for name in seen[0]} if seen else {}
    grad_norm = sum(norms) / len(norms) if norms else 0.0
    return {**averages, "grad_norm": grad_norm, "optimizer_steps": float(len(norms))}
