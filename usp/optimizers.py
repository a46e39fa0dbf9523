"""Optimizers: all that the toolkit knows of each, in the order of `--optimizer`'s choices.

`OPTIMIZERS` has one value for each: its options, what it refuses, what predictions need, and the rule that builds it.
Every other file asks this value, so a new optimizer is a rule and an entry here (and in `usp.config` a field for an
option that no other one has).

Muon (Jordan et al. 2024; at scale: arXiv 2502.16982) on sharded matrices, with AdamW for all other parameters.

    momentum of each shard --all-to-all--> whole matrices --Newton-Schulz--> --all-to-all--> update of each shard

The momentum is element-wise, so it stays sharded. Only the orthogonalisation needs whole matrices: each matrix goes to
one of the ranks that share it, in rounds of one matrix per rank, so that the ranks divide the work and none holds more
than one matrix. torch's Newton-Schulz works in bfloat16, so sending bfloat16 is exact, and a step sends 4 bytes per
element of a shard. Matrices that a rank holds whole, such as most experts, are not sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS
from torch.optim._muon import _adjust_lr as adjusted_rate
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz
from torch.optim.adamw import adamw

from usp.parallel import ParallelMesh, local_tensor
from usp.parallel.reallocation.boxes import Box, box_at

if TYPE_CHECKING:  # takes half a second to import, and is needed where a parameter is at hand
    from torch.distributed.tensor import DTensor

Parameters: TypeAlias = Iterable[nn.Parameter]
Matrices: TypeAlias = Sequence[nn.Parameter]
BUFFER = "momentum_buffer"
_AT_ONCE = 2**22  # elements of which there are moments in float32
WIRE = torch.bfloat16  # of what Newton-Schulz takes and returns


@dataclass(frozen=True)
class AdamW:
    """The hyperparameters of AdamW, with weight decay on matrices only; the learning rate is an argument of every step.

    Rules of other optimizers are subclasses, because AdamW updates what they leave to it."""

    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    moments: ClassVar[torch.dtype | None] = None  # their dtype; None: that of the parameter

    @staticmethod
    def of(config: Any) -> AdamW:
        return AdamW(config.weight_decay, (config.adam_beta1, config.adam_beta2), config.adam_eps)

    def over(
        self, parameters: Parameters, matrices: Matrices = (), mesh: ParallelMesh | None = None
    ) -> torch.optim.Optimizer:
        """Return the optimizer of `parameters`, among which `matrices` are those of the layers; AdamW, torch's fused
        one, needs neither these nor the mesh. Collective."""
        groups: dict[float, dict[str, Any]] = {}
        for parameter in parameters:
            decay = self.weight_decay if parameter.ndim >= 2 else 0.0
            groups.setdefault(decay, {"params": [], "weight_decay": decay})["params"].append(parameter)
        return _LocalAdamW(list(groups.values()), betas=self.betas, eps=self.eps, fused=True)

    @classmethod
    def first_state(cls, parameter: Tensor, matrix: bool = False) -> dict[str, Tensor]:
        """Return the state that the first step would make for a parameter, `matrix` of a layer or any other; the count
        is where the fused kernel updates it."""
        moment = partial(torch.zeros_like, parameter.detach(), dtype=cls.moments)
        return {"step": torch.zeros((), device=parameter.device), "exp_avg": moment(), "exp_avg_sq": moment()}


class _LocalAdamW(torch.optim.AdamW):
    """AdamW that updates the local parts of DTensors, which are sharded like their gradients. DTensor itself would look
    for a sharding of every parameter's update, which takes seconds on every new mesh."""

    def _init_group(self, group: dict[str, Any], *tensors: list[Tensor]) -> bool:
        has_complex = super()._init_group(group, *tensors)
        for kind in tensors:
            kind[:] = map(local_tensor, kind)
        return has_complex


@dataclass(frozen=True)
class HalfAdamW(AdamW):
    """AdamW whose moments are kept in bfloat16: torch's fused update in float32, a part of a parameter at a time."""

    moments = torch.bfloat16

    @staticmethod
    def of(config: Any) -> HalfAdamW:
        return HalfAdamW(**vars(AdamW.of(config)))

    def over(self, parameters: Parameters, matrices: Matrices = (), mesh: ParallelMesh | None = None) -> _HalfAdamW:
        return _HalfAdamW(super().over(parameters).param_groups, betas=self.betas, eps=self.eps)


class _HalfAdamW(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            beta1, beta2 = group["betas"]
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(HalfAdamW.first_state(parameter))
                state["step"] += 1
                tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
                rows = max(1, _AT_ONCE // max(1, parameter.shape[1:].numel()))
                parts = (torch.atleast_1d(local_tensor(tensor)).split(rows) for tensor in tensors)
                for weight, gradient, *kept in zip(*parts, strict=True):
                    average, squares = (moment.float() for moment in kept)
                    moments, before = ([average], [squares]), [state["step"] - 1]  # the call counts its step
                    adamw([weight], [gradient], *moments, [], before, fused=True, beta1=beta1, beta2=beta2, **options)
                    kept[0].copy_(average)
                    kept[1].copy_(squares)


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the matrices of the layers; the other fields are AdamW's, for all other parameters. Updates have the
    root mean square of AdamW's (`match_rms_adamw` of torch), so one learning rate serves both."""

    momentum: float = 0.95

    @staticmethod
    def of(config: Any) -> Muon:
        return Muon(**vars(AdamW.of(config)), momentum=config.muon_momentum)

    def over(self, parameters: Parameters, matrices: Matrices = (), mesh: ParallelMesh | None = None) -> MuonAdamW:
        assert mesh is not None
        return MuonAdamW(self, parameters, matrices, mesh)

    @classmethod
    def first_state(cls, parameter: Tensor, matrix: bool = False) -> dict[str, Tensor]:
        return {BUFFER: torch.zeros_like(parameter.detach())} if matrix else AdamW.first_state(parameter)


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

    def __init__(self, rule: Muon, parameters: Parameters, matrices: Matrices, mesh: ParallelMesh) -> None:
        self.rule, self._device = rule, torch.device(mesh.device_type)
        chosen = set(map(id, matrices))
        others = [parameter for parameter in parameters if id(parameter) not in chosen]
        self._adamw = AdamW.over(rule, others) if others else None  # adapters are matrices only
        groups = self._adamw.param_groups if self._adamw else []
        super().__init__([{"params": list(matrices)}, *groups], {"lr": 0.0})
        if self._adamw:
            self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state
        self._shared: dict[tuple[int, ...], list[Matrix]] = defaultdict(list)
        for matrix in (matrix for parameter in matrices for matrix in split(parameter)):
            self._shared[matrix.ranks].append(matrix)
        self._groups = {ranks: _group(mesh, ranks) for ranks in self._shared if len(ranks) > 1}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        if self._adamw:
            self._adamw.step()
        for parameter in self.param_groups[0]["params"]:
            if not self.state[parameter]:
                self.state[parameter] = self.rule.first_state(parameter, matrix=True)
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


def split(parameter: nn.Parameter) -> Iterator[Matrix]:
    """Yield the matrices that this rank holds a part of. Raises ValueError as `box_at`."""
    from torch.distributed.tensor import DTensor

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


@dataclass(frozen=True)
class OfMatrices:
    """What a step does with whole matrices of the layers, for predictions.

    states: float32 numbers per element that a rank keeps. sent: bytes per element on the way to the rank that updates
    a matrix, and back. temporary: bytes per element of the matrix that is updated. products: (rows, inner, columns) of
    bfloat16 products of a matrix by its sides, the short one first; they run `times` times.
    """

    states: int
    sent: int
    temporary: int
    products: Callable[[int, int], Sequence[tuple[int, int, int]]]
    times: int


@dataclass(frozen=True)
class Optimizer:
    """All that is known of an optimizer.

    rule: reads it from a TrainConfig. options: the fields that it reads, besides weight_decay. help: of the flag.
    states: float32 numbers per parameter. of_matrices: what is different for matrices; None: nothing.
    approximate: what formulas only estimate.
    only_on_device: why it cannot update weights on the host. refuses: yields what else it refuses of a TrainConfig.
    """

    name: str
    rule: Callable[[Any], AdamW]
    options: tuple[str, ...]
    help: str = ""
    states: int = 2
    of_matrices: OfMatrices | None = None
    approximate: str = ""
    only_on_device: str = ""
    refuses: Callable[[Any], Iterator[str]] = lambda config: iter(())

    def violations(self, config: Any) -> Iterator[str]:
        """Yield what a TrainConfig asks for that this optimizer does not support."""
        if self.only_on_device and config.optim_offload:
            yield f"--optimizer {self.name} {self.only_on_device}: --optim-offload needs --optimizer adamw"
        yield from self.refuses(config)


def _degrees_without_a_group(config: Any) -> Iterator[str]:
    if config.tp > 1 and config.ep > 1:
        degrees = f"--tp {config.tp} with --ep {config.ep}"
        yield f"--optimizer muon does not support {degrees}: use --tp 1 or --ep 1, or --optimizer adamw"


def _betas_beyond_bfloat16(config: Any) -> Iterator[str]:
    for name in ("adam_beta1", "adam_beta2"):
        if (beta := getattr(config, name)) > 0.99:
            given = f"--{name.replace('_', '-')} = {beta:g} must be at most 0.99 with --optimizer adamw-bf16"
            yield f"{given}, because bfloat16 rounds smaller changes of a moment away: lower it, or use adamw"


def _gram_products(a: int, b: int) -> Sequence[tuple[int, int, int]]:
    return (a, b, a), (a, a, a), (a, a, b)


_ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
OPTIMIZERS: Mapping[str, Optimizer] = {
    each.name: each
    for each in (
        Optimizer("adamw", AdamW.of, _ADAM),
        Optimizer(
            "adamw-bf16",
            HalfAdamW.of,
            _ADAM,
            "AdamW with moments in bfloat16, half the memory",
            states=1,
            refuses=_betas_beyond_bfloat16,
        ),
        Optimizer(
            "muon",
            Muon.of,
            (*_ADAM, "muon_momentum"),
            "Muon for the matrices of the layers and AdamW for the rest, at the same learning rate",
            # Temporary is what is sent, received and iterated in bfloat16, and a float32 gradient.
            of_matrices=OfMatrices(1, 2 * WIRE.itemsize, 14, _gram_products, DEFAULT_NS_STEPS),
            approximate="temporaries of Muon are estimated",
            only_on_device="multiplies matrices, slowly on the host",
            refuses=_degrees_without_a_group,
        ),
    )
}
