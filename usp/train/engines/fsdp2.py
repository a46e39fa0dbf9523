"""Training with FSDP2, and pipeline parallelism where the mesh has a pp axis.

Muon (Jordan et al. 2024; at scale: arXiv 2502.16982) on sharded matrices, with AdamW for all other parameters.

    momentum of each shard --all-to-all--> whole matrices --Newton-Schulz--> --all-to-all--> update of each shard

The momentum is element-wise, so it stays sharded. Only the orthogonalisation needs whole matrices: each matrix goes to
one of the ranks that share it, in rounds of one matrix per rank, so that the ranks divide the work and none holds more
than one matrix. torch's Newton-Schulz works in bfloat16, so sending bfloat16 is exact, and a step sends 4 bytes per
element of a shard. Matrices that a rank holds whole, such as most experts, are not sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS
from torch.optim._muon import _adjust_lr as adjusted_rate
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz

from usp.hf.disk import is_adapter, stored_tensors
from usp.hf.experts import expert_modules
from usp.hf.float8 import update_scales
from usp.hf.integrate import decoder_layers
from usp.hf.prune import tied_ends
from usp.hf.stage import CausalLMStage
from usp.losses import Head
from usp.parallel import ParallelMesh, before_micro_batch, clip_grad_norm, local_tensor
from usp.parallel.fsdp import sum_tied_gradients
from usp.parallel.reallocation.boxes import Box, box_at

from .base import AdamW, MicroBatch, PipelineRunner, count_choices, loss_share

BUFFER = "momentum_buffer"
WIRE = torch.bfloat16  # of what Newton-Schulz takes and returns


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the matrices of the layers; the other fields are AdamW's, for all other parameters. Updates have the
    root mean square of AdamW's (`match_rms_adamw` of torch), so one learning rate serves both."""

    momentum: float = 0.95


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter, or one expert of it.

    expert: index in this rank's part of a parameter with three dims. ranks: global, in the order of the group over
    which the matrix is sharded; only this one if it is whole here. boxes: what each of `ranks` holds.
    """

    parameter: nn.Parameter
    expert: int | None
    shape: tuple[int, int]
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]

    def part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the matrix in the parameter, its gradient or its momentum."""
        local = local_tensor(tensor.detach())
        return local if self.expert is None else local[self.expert]


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer over all parameters of a rank. Every rank calls `step`, with gradients of the same parameters.
    Raises ValueError for a matrix whose part on a rank is not one box."""

    def __init__(
        self, rule: Muon, parameters: Collection[nn.Parameter], matrices: Sequence[nn.Parameter], mesh: ParallelMesh
    ) -> None:
        self.rule, self._device = rule, torch.device(mesh.device_type)
        self._is_matrix = set(map(id, matrices))
        others = [parameter for parameter in parameters if id(parameter) not in self._is_matrix]
        self._adamw = rule.over(others) if others else None  # adapters are matrices only
        groups = self._adamw.param_groups if self._adamw else []
        super().__init__([{"params": list(matrices)}, *groups], {"lr": 0.0})
        if self._adamw:
            self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state
        self._shared: dict[tuple[int, ...], list[Matrix]] = defaultdict(list)
        for matrix in (matrix for parameter in matrices for matrix in split(parameter)):
            self._shared[matrix.ranks].append(matrix)
        self._groups = {ranks: _group(mesh, ranks) for ranks in self._shared if len(ranks) > 1}

    def first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state that the first step would make."""
        if id(parameter) in self._is_matrix:
            return {BUFFER: torch.zeros_like(parameter.detach())}
        return AdamW.first_state(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        if self._adamw:
            self._adamw.step()
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                self.state[parameter] = self.first_state(parameter)
        for ranks, shared in self._shared.items():
            for matrices in rounds([m for m in shared if m.parameter.grad is not None], len(ranks)):
                self._update(matrices, ranks)

    def _update(self, matrices: Sequence[Matrix], ranks: tuple[int, ...]) -> None:
        """Update the matrices of a round: the first rank orthogonalises the first, and so on."""
        parts = [self._direction(matrix) for matrix in matrices]
        if len(ranks) == 1:
            updates = [_orthogonal(part) for part in parts]
        else:
            rank, group = ranks.index(dist.get_rank()), self._groups[ranks]  # pyright: ignore[reportArgumentType]
            mine = matrices[rank] if rank < len(matrices) else None
            arrived = self._exchange(parts, [box.numel for box in mine.boxes] if mine else [], group)
            back = list[Tensor]()
            if mine is not None:
                whole = torch.empty(mine.shape, dtype=WIRE, device=self._device)
                for box, values in zip(mine.boxes, arrived, strict=True):
                    whole[box.slices()] = values.view(box.sizes)
                whole = _orthogonal(whole)
                back = [whole[box.slices()] for box in mine.boxes]
            updates = self._exchange(back, [part.numel() for part in parts], group)
        rate = self.param_groups[0]["lr"]
        for matrix, update in zip(matrices, updates, strict=True):
            weight = matrix.part(matrix.parameter)
            weight.mul_(1 - rate * self.rule.weight_decay)
            scale = adjusted_rate(rate, "match_rms_adamw", torch.Size(matrix.shape))
            weight.add_(update.view(weight.shape), alpha=-scale)

    def _direction(self, matrix: Matrix) -> Tensor:
        """Update the momentum of this rank's part, and return what is orthogonalised (Nesterov), in bfloat16."""
        assert matrix.parameter.grad is not None
        gradient, momentum = matrix.part(matrix.parameter.grad), self.rule.momentum
        buffer = matrix.part(self.state[matrix.parameter][BUFFER]).lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum).to(WIRE)

    def _exchange(self, parts: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
        """Send part i to rank i; return what each rank sends, of `sizes` elements, missing ones empty. Collective."""
        received = torch.empty(sum(sizes), dtype=WIRE, device=self._device)
        values = torch.cat([received.new_empty(0), *(part.reshape(-1) for part in parts)])
        ranks = range(dist.get_world_size(group))
        sent = [parts[rank].numel() if rank < len(parts) else 0 for rank in ranks]
        arriving = [sizes[rank] if rank < len(sizes) else 0 for rank in ranks]
        dist.all_to_all_single(received, values, arriving, sent, group=group)
        return list(received.split(list(sizes)))


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


def split(parameter: nn.Parameter) -> Iterator[Matrix]:
    """Yield the matrices that this rank holds a part of. Raises ValueError as `box_at`."""
    rows, columns = shape = tuple(parameter.shape[-2:])
    ranks: tuple[int, ...] = (dist.get_rank(),)
    boxes: tuple[Box, ...] = (Box.whole(shape),)
    if isinstance(parameter, DTensor):
        ranks, boxes = _shards(parameter, parameter.ndim - 2)
    experts = [None] if parameter.ndim == 2 else range(len(local_tensor(parameter)))
    for expert in experts:
        yield Matrix(parameter, expert, (rows, columns), ranks, boxes)


def rounds(matrices: Sequence[Matrix], ranks: int) -> Iterator[Sequence[Matrix]]:
    """Yield the matrices in rounds of at most `ranks` of about the same size, the largest first."""
    ordered = sorted(matrices, key=lambda matrix: -matrix.shape[0] * matrix.shape[1])
    for first in range(0, len(ordered), ranks):
        yield ordered[first : first + ranks]


def _shards(parameter: DTensor, first_dim: int) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """Return the ranks that hold the other parts of this rank's matrices, and the box of each in a matrix."""
    mesh, rank, here = parameter.device_mesh, dist.get_rank(), parameter.device_mesh.get_coordinate()
    assert here is not None
    along = {
        axis: dist.get_process_group_ranks(mesh.get_group(axis))
        for axis, placement in enumerate(parameter.placements)
        if mesh.size(axis) > 1 and getattr(placement, "dim", -1) >= first_dim
    }
    ranks, boxes = [], []
    for coordinate in product(*(range(mesh.size(i)) if i in along else [place] for i, place in enumerate(here))):
        box = box_at(parameter, coordinate)
        ranks.append(rank + sum(peers[coordinate[axis]] - rank for axis, peers in along.items()))  # of a regular grid
        boxes.append(Box(box.offset[first_dim:], box.sizes[first_dim:]))
    return tuple(ranks), tuple(boxes)


def _group(mesh: ParallelMesh, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of the ranks over which matrices are sharded: fsdp, or with tensor parallelism fsdp x tp."""
    groups = (mesh.group(axis) for axis in ("fsdp", "tp", "efsdp"))  # without ep, efsdp is fsdp x tp
    return next(group for group in groups if tuple(dist.get_process_group_ranks(group)) == ranks)


def _orthogonal(matrix: Tensor) -> Tensor:
    return newton_schulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)


class Fsdp2Engine:
    """An `Engine` over stages that `apply_fsdp` sharded.

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
        self.optimizer: torch.optim.AdamW | MuonAdamW
        if isinstance(optimizer, Muon):
            self.optimizer = MuonAdamW(optimizer, trained, hidden_matrices(stages), mesh)
            self._first_state = self.optimizer.first_state
        else:
            self.optimizer, self._first_state = optimizer.over(trained), AdamW.first_state
        # Of the parameter that the first and the last stage both have: {its name here: the name it is stored under}.
        ends = {name: stored for stage in stages for name, stored in tied_ends(stage.model).items()}
        self._tied = {name: stored for name, stored in ends.items() if name in self.parameters}
        self._copies = {name: stored for name, stored in self._tied.items() if name != stored}
        scales = partial(update_scales, self.stages, mesh, zero > 0)
        self._update_scales: Callable[[], None] = scales if float8_gather else lambda: None
        self._update_scales()

    def forward_backward(self, micro_batches: Sequence[MicroBatch], head: Head) -> Tensor:
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
        if self.pipeline is not None:
            return self.pipeline.evaluate(micro_batches, head)
        return loss_share(self.stages, self.mesh, micro_batches, head)

    def step(self, learning_rate: float, max_norm: float) -> float:
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
        state = {f"model.{name}": value.detach() for name, value in self.untrained.items()}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state[parameter]
            if not moments:
                moments.update(self._first_state(parameter))
            stored = self._copies.get(name, name)
            if stored != name and stored in self.parameters:  # this rank has both stages
                continue
            state[f"model.{stored}"] = _placed(parameter.detach(), parameter)
            state.update({f"optimizer.{stored}.{key}": value for key, value in moments.items()})
        return state

    def take_over(self, other: Fsdp2Engine) -> None:
        """Take the optimizer states of an engine that trained the same parameters, sharded alike."""
        for name, parameter in self.parameters.items():
            moments = other.optimizer.state.pop(other.parameters[name], {})
            self.optimizer.state[parameter] = {key: _placed(value, parameter) for key, value in moments.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tied parameter to the other stage of this rank; `state()` returns the live tensors of all others."""
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
