"""A role's model without a layout, and in the layout of one call, on one rank.

samples  --rows-->  micro-batches  --stages, with a head on the last-->  per-token outputs, or gradients and metrics
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import fmean as mean
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from usp.attention import layout_name
from usp.fields import shared_values
from usp.hf.disk import is_adapter, persistent_buffers
from usp.hf.lora import Lora, adapters_off
from usp.hf.models import ModelConfig, is_scalar, materialise, model_facts
from usp.hf.prune import tied_ends
from usp.hf.weights import fill_buffers
from usp.losses import Head, LastHidden
from usp.optimizers import AdamW
from usp.parallel import ParallelMesh
from usp.rlhf.algorithms.objectives import NextToken
from usp.rlhf.generation.generate import Generator, RolloutEngine, generate_samples
from usp.rlhf.generation.partial import Group, go_on
from usp.rlhf.graph import Generate, Inference, ModelCall, Objective, TrainStep
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.samples import Samples
from usp.run.failures import TrainingDiverged
from usp.train.build import EngineRecipe, build_stages, engine_over, first_weights
from usp.train.engine import Engine
from usp.train.passes import MicroBatch, forward_only

from .rows import micro_batches, plan_rows, sequences_of, unpack
from .weight_memory import WeightMemory, alias_buffers, alias_parameters


@dataclass(frozen=True, eq=False)
class RoleSpec:
    """A role's model and training options, without ranks and degrees.

    Attributes:
        source: preset, or folder to load the weights from.
        config: from `load_model_config(source, head, new_head)`.
        new_head: `source` is a causal LM without a scalar head; initialize one from the seed.
        seed: for random weights.
        dtype: of forward and backward, and of weights that this copy does not train. Trained weights are float32.
        optimizer, learning_rate, max_grad_norm: for a trained role; `RoleModel.learning_rate` may change between steps.
        loss_chunk: tokens whose logits exist at a time in calls whose layout says nothing.
        balance, router_balance: weight and scope of the routers' load-balancing loss where the role is trained; see
            `EngineRecipe`. A step is a mini-batch.
        share_prefixes: rows have the common prefixes of samples once.
        router_replay: tokens choose the experts in the samples, if these have some.
        lora: adapters, which are trained instead of the weights of `source`.
    """

    role: str
    source: str
    config: ModelConfig
    new_head: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float32
    optimizer: AdamW | None = None
    learning_rate: float = 1e-6
    max_grad_norm: float = 1.0
    kernel: str = "auto"
    loss_chunk: int = 2048
    balance: float = 0.0
    router_balance: str = "step"
    share_prefixes: bool = False
    router_replay: bool = False
    lora: Lora | None = None

    def recipe(self, layout: CallLayout, trained: bool) -> EngineRecipe:
        """Return how to build the model's stages and engine in a layout."""
        different = {
            "model": self.config,
            "zero": layout.zero if trained or layout.zero else None,
            "optimizer": self.optimizer if trained else None,
            "loss_chunk": layout.loss_chunk or self.loss_chunk,
            "balance": self.balance if trained else 0.0,
            "weights_dtype": torch.float32 if trained and self.lora is None else self.dtype,
        }
        return EngineRecipe(**shared_values(self, EngineRecipe) | shared_values(layout, EngineRecipe) | different)


class RoleModel:
    """One copy of a role's weights, a transformers model in the layout of a call; without memory at first.

    Every rank of the mesh calls every method, in the same order. Only ranks in `CallLayout.leaders` return samples.

    Args:
        trained: this copy is the one that the optimizer updates. It is sharded with FSDP2, as is any copy with zero
            above 0; the others have plain parameters, or DTensors over tp (and ep) only.
        offload_optimizer: the optimizer's states are in host memory except during train steps.
        generation: options of its `Generator`.

    learning_rate: for the next train steps; may be set between them.
    supervised: `Supervised.of_step` of the next train step, or nothing, and the weight of its cross-entropy.

    Raises ValueError for a model that does not support the layout.
    """

    def __init__(
        self,
        spec: RoleSpec,
        layout: CallLayout,
        mesh: ParallelMesh,
        *,
        trained: bool = False,
        offload_optimizer: bool = False,
        **generation: Any,
    ) -> None:
        windows = model_facts(spec.source, spec.config).windows
        layout = replace(layout, sp_layout=layout_name(layout.sp_layout, windows))
        self.spec, self.layout, self.mesh, self.trained = spec, layout, mesh, trained
        self._scalar = is_scalar(spec.config)
        self.learning_rate = spec.learning_rate
        self.engine: Engine | None = None
        self._recipe = spec.recipe(layout, trained)
        (self.stage,) = build_stages(self._recipe, mesh)
        self._allocated = False
        self._memory = WeightMemory()
        self._moments, self._offload_optimizer = WeightMemory(self._optimizer_states), offload_optimizer
        self._new_generator = partial(Generator.of, self.stage, mesh, **generation)
        self.supervised: tuple[Sequence[Samples], float] = (), 0.0
        self._generator: Generator | None = None

    def weights(self) -> dict[str, Tensor]:
        """Return the live parameters and persistent buffers by the names they are stored under, with or without memory.
        Of a role with adapters, the parameters of the adapters."""
        adapted = self.spec.lora is not None
        return {name: weight for name, weight in self._stored() if is_adapter(name) or not adapted}

    def frozen(self) -> dict[str, Tensor]:
        """Return the other ones: those that adapters are added to."""
        adapted = self.spec.lora is not None
        return {name: weight for name, weight in self._stored() if adapted and not is_adapter(name)}

    def allocate(self) -> None:
        """Allocate the weights, if they have no memory, without values; buffers and frozen ones keep theirs."""
        if self._allocated:
            self._memory.allocate()
            return
        self._allocated = True
        materialise(self.stage, torch.device(self.mesh.device_type))
        if self.spec.lora is None:
            fill_buffers(self.stage.model)
        else:
            self._load()
        self._memory = WeightMemory(lambda: self._parameters().values())
        if self.trained:
            self.engine = engine_over([self.stage], self._recipe, self.mesh)

    def fill(self) -> None:
        """Allocate and initialize the weights."""
        self.allocate()
        if self.spec.lora is None:
            self._load()

    def share(self, weights: Mapping[str, Tensor]) -> None:
        """Share the memory of another copy's `frozen()` and `weights()`, or only of the former; boxes must be equal.

        For a copy with zero=0 that has no memory yet. Updates of the other copy are visible here. `release`,
        `allocate`, `offload` and `load` do not touch shared memory.
        """
        alias_parameters(self.stage.model, weights, torch.device(self.mesh.device_type))
        fill_buffers(self.stage.model)
        alias_buffers(self.stage.model, weights)
        self._allocated = True
        not_shared = self._parameters().keys() - weights.keys()
        self._memory = WeightMemory(lambda: [x for name, x in self._parameters().items() if name in not_shared])

    def release(self) -> None:
        """Free the memory of the weights and of CUDA graphs."""
        self.forget()
        self._memory.release()

    def offload(self) -> None:
        """Move the weights to the host, and free CUDA graphs."""
        self.forget()
        self._memory.offload()

    def forget(self) -> None:
        """Free the CUDA graphs of decode steps."""
        if self._generator is not None:
            self._generator.forget()

    def load(self) -> None:
        """Move the weights back to the device."""
        self._memory.load()

    def inference(self, samples: Samples, work: Inference, output: str, layout: CallLayout | None = None) -> Samples:
        """Run one forward over this data-parallel rank's samples, possibly none; return `output` on its leader.

        Log-probabilities are 0 where a `mask` of the samples is.

        layout: of the call, which differs from the copy's only in micro-batches and chunks; None: that of the copy.

        Raises ValueError if the model does not have the head that the work names.
        """
        logprobs = work.head == "logprobs"
        self._check_head("logprobs" if logprobs else "values")

        def head(last: LastHidden, inputs: Mapping[str, Tensor]) -> Tensor:
            return last.logprobs(inputs["shift_labels"], work.temperature)[0] if logprobs else last.values()

        layout = layout or self.layout
        if layout.sp_layout != self.layout.sp_layout:  # auto, which the copy has settled
            layout = replace(layout, sp_layout=self.layout.sp_layout)
        self.stage.loss_chunk = layout.loss_chunk or self.spec.loss_chunk
        counts = "mask" if "mask" in samples.values and logprobs else ""
        plan = plan_rows(samples, layout, self.mesh, share=self.spec.share_prefixes, counts=counts)
        values: list[Tensor] = []
        if plan is not None:
            batches = micro_batches(samples, plan, layout, self.mesh, counts=counts)
            with nullcontext() if work.adapters else adapters_off(self.stage):
                outputs = self.forward(batches, head)
            values = unpack(outputs, plan, samples, layout, self.mesh) if self.stage.last else []
        if not self._leads:
            return Samples((), {})
        return Samples(samples.ids, {output: [value[-1] if work.head == "score" else value for value in values]})

    def forward(self, batches: Sequence[MicroBatch], head: Head | None) -> list[Tensor]:
        """Return the output of `head` (None: hidden states) for each micro-batch on the last stage, [] on the others.

        Collective over the mesh. Nothing is kept for a backward.

        batches: of one shape.
        """
        sent = []
        if self.mesh.size("pp") > 1:
            rows, tokens = batches[0]["input_ids"].shape
            tokens //= self.mesh.size("tp") if self.layout.tp_sequence_parallel else 1
            hidden = self.stage.model.config.hidden_size
            sent = [torch.empty(rows, tokens, hidden, dtype=self.spec.dtype, device="meta")]
        with self._unbalanced():
            return forward_only([self.stage], self.mesh, [{**batch, "head": head} for batch in batches], sent=sent)

    @contextmanager
    def _unbalanced(self) -> Iterator[None]:
        """Leave out the load-balancing loss, which is part of the losses of mini-batches alone."""
        balance, self.stage.balance = self.stage.balance, None
        try:
            yield
        finally:
            self.stage.balance = balance

    def train_step(self, mini_batches: Sequence[Samples], work: TrainStep) -> dict[str, float]:
        """Run optimizer steps on this data-parallel rank's part of each mini-batch, possibly empty.

        Returns:
            The objective's metrics and `loss`, averaged over mini-batches, `grad_norm`, averaged over optimizer steps,
            and the number of `optimizer_steps`; the same on every rank.

        Raises TrainingDiverged on every rank, if a metric or the gradient is not finite; the weights keep the values of
        the last good optimizer step.
        """
        engine = self._trained_engine()
        self._check_head(work.objective.head)
        self.stage.loss_chunk = self._recipe.loss_chunk
        if self._offload_optimizer:
            self._moments.prefetch()
        metrics = self._optimizer_steps(engine, mini_batches, work)
        self.offload_optimizer()
        return metrics

    def _optimizer_steps(self, engine: Engine, mini_batches: Sequence[Samples], work: TrainStep) -> dict[str, float]:
        seen: list[dict[str, float]] = []
        norms: list[float] = []
        supervised, weight = self.supervised
        for epoch, (number, samples) in product(range(1, work.epochs + 1), enumerate(mini_batches, start=1)):
            place = f"train_step of {self.spec.role}, epoch {epoch}, mini-batch {number} of {len(mini_batches)}"
            seen.append(self._gradients(engine, samples, work.objective, place))
            if supervised:
                with self._unbalanced():
                    place = f"{place}, supervised samples"
                    found = self._gradients(engine, supervised[number - 1], NextToken(), place, weight)
                seen[-1]["supervised_loss"] = found["loss"]
            name, bound = work.stop_above or ("loss", math.inf)
            if name not in seen[-1]:
                known = f"the objective's metrics are {', '.join(seen[-1])}"
                raise ValueError(f"stop_above names unknown metric {name}: {known}")
            if seen[-1][name] > bound:
                engine.optimizer.zero_grad()
                break
            if self._offload_optimizer:
                self._moments.load()
            norms.append(engine.step(self.learning_rate, self.spec.max_grad_norm))
            if not math.isfinite(norms[-1]):
                raise TrainingDiverged(f"{place}: the gradient norm is {norms[-1]}, expected a finite value")
        metrics = {name: mean(each[name] for each in seen) for name in seen[0]} if seen else {}
        metrics |= {name: max(each[name] for each in seen) for name in metrics if _is_largest(name)}
        return {**metrics, "grad_norm": mean(norms) if norms else 0.0, "optimizer_steps": float(len(norms))}

    def generate(self, prompts: Samples, work: Generate, seed: int) -> Samples:
        """Respond to this data-parallel rank's prompts, possibly none; return `generate_samples` on its leader. For a
        copy that is not trained, with zero=0."""
        samples = generate_samples(prompts, work, seed, self._generates())
        return samples if self._leads else Samples((), {})

    def go_on(
        self, groups: Mapping[int, Group], work: Generate, version: int, enough: Callable[[Sequence[int]], bool]
    ) -> tuple[dict[int, Group], list[int]]:
        """Go on with this data-parallel rank's responses: `partial.go_on`, on every rank."""
        return go_on(groups, work, version, enough, self._generates())

    def _generates(self) -> RolloutEngine:
        if self._generator is None:
            self._generator = self._new_generator()
        return self._generator

    def state(self) -> dict[str, Tensor]:
        """Return the weights and optimizer state of a trained copy, as `Engine.state`, on the device.
        `offload_optimizer` must follow once they have been read."""
        self._moments.load()
        return self._trained_engine().state()

    def restore(self) -> None:
        """Continue from what filled the tensors of `state()`."""
        self._trained_engine().restore()
        self.offload_optimizer()

    def offload_optimizer(self) -> None:
        """Move the optimizer's states to the host, if this copy was made to."""
        if self._offload_optimizer:
            self._moments.offload()

    def discard(self) -> None:
        """Free the memory of all weights and optimizer states; the model cannot be used again."""
        self.forget()
        if self.engine is not None:
            self._moments.release()
        WeightMemory(lambda: [weight for _, weight in self._stored()]).release()

    def _optimizer_states(self) -> list[Tensor]:
        """Return the moments; the step counts are single numbers."""
        states = self._trained_engine().optimizer.state.values()
        return [state for kept in states for name, state in kept.items() if name != "step"]

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        ends = tied_ends(self.stage.model)
        for name, weight in self.stage.model.named_parameters():
            yield ends.get(name, name), weight.detach()
        yield from persistent_buffers(self.stage.model)

    def _parameters(self) -> dict[str, Tensor]:
        """Return those of `weights()` that can be freed."""
        buffers = {name for name, _ in persistent_buffers(self.stage.model)}
        return {name: weight for name, weight in self.weights().items() if name not in buffers}

    def _load(self) -> None:
        first_weights(self.stage, self.spec.source, self.spec.seed, self.spec.new_head)

    def _gradients(
        self, engine: Engine, samples: Samples, objective: Objective, place: str, weight: float = 1.0
    ) -> dict[str, float]:
        """Accumulate the gradients of a mini-batch, times `weight`; return its metrics, the same on every rank."""
        counts = objective.counts
        share = self.spec.share_prefixes and counts != ""  # else even the prompt has a loss, for each sample
        plan = plan_rows(samples, self.layout, self.mesh, objective.unit, share=share, counts=counts)
        if plan is None:
            raise ValueError(f"{place} has no samples on any rank: use fewer mini-batches or more samples")
        batches = micro_batches(samples, plan, self.layout, self.mesh, objective.keys, counts)
        seen: list[dict[str, Tensor]] = []

        def head(last: LastHidden, inputs: Mapping[str, Tensor]) -> Tensor:
            """Return this rank's share of the objective's loss."""
            if objective.head == "values":
                output, entropy = last.values(), None
            else:
                output, entropy = last.logprobs(inputs["shift_labels"], objective.temperature, objective.entropy)
            per_token = {key: inputs[key] for key in objective.keys}
            loss, metrics = objective(output, entropy, per_token, sequences_of(inputs, self.mesh.group("sp")))
            seen.append({**metrics, "loss": loss.detach()})
            return weight * loss

        balance = self.stage.balance
        if balance is not None and balance.by_micro_batch:
            balance.coefficient = self.spec.balance / len(batches)
        engine.forward_backward(batches, head)
        metrics = self._sums(seen)
        broken = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if broken:
            engine.optimizer.zero_grad()
            raise TrainingDiverged(f"{place}: {broken} must be finite; no optimizer step was made")
        return metrics

    def _sums(self, metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Sum the last stage's metrics over micro-batches and ranks, or take the largest; broadcast them."""
        totals: dict[str, float] = {}
        if self.stage.last:
            names = sorted(metrics[0])
            values = torch.stack([torch.stack([of_batch[name].double() for name in names]) for of_batch in metrics])
            total, largest = values.sum(0), values.amax(0)
            for axis in ("loss", "tp"):
                dist.all_reduce(total, group=self.mesh.group(axis))
                if any(map(_is_largest, names)):
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.mesh.group(axis))
            # tp ranks differ by rounding: average, so that all take the same decisions.
            sums = dict(zip(names, (total / self.mesh.size("tp")).tolist(), strict=True))
            totals = sums | {name: top for name, top in zip(names, largest.tolist(), strict=True) if _is_largest(name)}
        if self.mesh.size("pp") == 1:
            return totals
        known = [totals]
        device = torch.device(self.mesh.device_type)
        last = self.mesh.size("pp") - 1
        dist.broadcast_object_list(known, group=self.mesh.group("pp"), group_src=last, device=device)
        return known[0]

    @property
    def _leads(self) -> bool:
        """This rank returns the results of its data-parallel index."""
        return self.stage.last and self.mesh.rank("sp") == 0 and self.mesh.rank("tp") == 0

    def _trained_engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError(f"{self.spec.role} is not trained in this layout, or not allocated yet")
        return self.engine

    def _check_head(self, head: str) -> None:
        if (head == "values") != self._scalar:
            actual = "a scalar head" if self._scalar else "a causal LM head"
            raise ValueError(f"{self.spec.role} cannot compute {head}, it has {actual}")


# The call, with its layout, is the role's train step for the copy that the optimizer updates, else the first call that
# uses the copy.
BuildRole: TypeAlias = Callable[[ModelCall, CallLayout, ParallelMesh], RoleModel]


def _is_largest(name: str) -> bool:
    return name.endswith("_max")
