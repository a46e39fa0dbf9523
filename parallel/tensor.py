"""Tensor parallelism from a plan {module name pattern: style}, with DTensor parameters and local computation.

A region is a module, such as attention or an MLP, whose first linears are sharded by columns and whose last linear is
sharded by rows. Each rank computes with its columns and rows; the partial outputs are summed when they leave the region
(Shoeybi et al. 2019, "Megatron-LM", section 3). With a token dim, tokens are sharded outside of regions: inputs are
all-gathered and outputs reduce-scattered (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4.2.2).

Collectives run only at region boundaries, so code inside (attention kernels, a tiled MLP) uses plain tensors, and
communicates once no matter how often it calls its linears. Linears that gather their output are the exception: what
follows them, such as a norm over all heads or halves of a fused projection, needs whole vectors, and is computed on
every rank. The last linear then takes its own columns of them. As every rank computes a part of the region's output,
all gradients inside are parts as well, of whole vectors and of replicated parameters alike.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from .mesh import local_tensor

# Style -> the module type it applies to, and the size of it that is divided over ranks.
STYLES: Mapping[str, tuple[type[nn.Module], str | None]] = {
    "colwise": (nn.Linear, "out_features"),
    "rowwise": (nn.Linear, "in_features"),  # outputs are partial sums
    "colwise_gather_output": (nn.Linear, "out_features"),  # outputs are whole
    "rowwise_split_input": (nn.Linear, "in_features"),  # likewise, of whole inputs
    "colwise_parameter": (nn.Linear, "out_features"),  # never called: its parameters are used elsewhere
    "embedding_rowwise": (nn.Embedding, "num_embeddings"),
    "replicated_with_grad_allreduce": (nn.Module, None),  # replicated, with a partial gradient on each rank
    "local_params": (nn.Module, None),  # direct parameters: those that the plan calls colwise by name, by their dim 0
    "untouched": (nn.Module, None),  # not parallelized, including its submodules
}


_COLWISE, _ROWWISE = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str], *, token_dim: int | None = None
) -> None:
    """Shard a model's parameters over a one-axis mesh and register the collectives of its forward, in place.

    Every parameter becomes a DTensor, replicated unless a style shards it; only `untouched` modules keep plain
    parameters. All ranks must hold the same values; nothing is communicated, so parameters may be on the meta device.
    Parameters shared between modules stay shared. Gradients may be Partial over the mesh, which FSDP2 reduces.

    Args:
        plan: {dotted name, where * matches one component: style}. Styles are colwise, colwise_gather_output, rowwise,
            rowwise_split_input, colwise_parameter, embedding_rowwise, replicated_with_grad_allreduce, local_params and
            untouched. Names are of modules, and with colwise of direct parameters of a module with local_params.
            Modules without parameters are skipped, so the plan of the whole model works for each pipeline stage.
        token_dim: dim of the hidden states that is sharded over the mesh outside of regions, from the end if
            negative; None for replicated.

    Raises:
        ValueError: listing every style that is unknown or does not fit its module, sizes that are not divisible,
            regions without colwise or without rowwise linears, and parameters inside a region that the plan omits.
    """
    if violations := tensor_parallel_violations(model, mesh.size(), plan):
        raise ValueError("; ".join(violations))
    styles = module_styles(model, plan)
    regions, untouched = _regions(styles), _untouched(styles)
    outside: Placement = Replicate() if token_dim is None else Shard(token_dim)
    # A replicated module that sees only this rank's tokens gets a partial gradient.
    rest = "replicated" if token_dim is None else "replicated_with_grad_allreduce"
    whole = tuple(f"{region}." for region, found in regions.items() if _is_whole(found))
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in model.named_modules():
        if module._parameters and not f"{name}.".startswith(untouched):
            other = "replicated_with_grad_allreduce" if f"{name}.".startswith(whole) else rest
            _place(module, styles.get(name, other), mesh, outside, placed, split_parameters(name, plan))
    for name in regions:
        _convert_at_boundaries(model.get_submodule(name), mesh, outside)


def tensor_parallel_violations(model: nn.Module, ranks: int, plan: Mapping[str, str]) -> list[str]:
    """Return what `apply_tensor_parallel` raises for a mesh of this many ranks."""
    styles = module_styles(model, plan)
    regions, untouched = _regions(styles), _untouched(styles)
    violations = []
    for name, style in styles.items():
        if style not in STYLES:
            violations.append(f"{name}: {style!r} must be one of {', '.join(STYLES)}")
            continue
        (kind, size), module = STYLES[style], model.get_submodule(name)
        if not isinstance(module, kind):
            violations.append(f"{name}: {style!r} requires {kind.__name__}, got {type(module).__name__}")
        elif size is not None and getattr(module, size) % ranks:
            violations.append(f"{name}: {ranks} ranks must divide {size}={getattr(module, size)}")
    for region, found in regions.items():
        if found <= {*_COLWISE} or found <= {*_ROWWISE}:
            listed = " and ".join(sorted(found))
            violations.append(f"{region}: has only {listed} linears, but needs both colwise and rowwise ones")
    omitted: dict[str, str] = {}  # once for all layers
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        inside = any(f"{owner}.".startswith(f"{region}.") and not _is_whole(regions[region]) for region in regions)
        if inside and owner not in styles and not name.startswith(untouched):
            text = f"{name} {tuple(parameter.shape)} is inside a sharded module: the plan must name {owner}"
            omitted.setdefault(re.sub(r"\.\d+\.", ".*.", name), text)
    violations += omitted.values()
    return violations


def module_styles(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module that has parameters and that a plan for `apply_tensor_parallel` names."""
    patterns = [(re.compile(re.escape(name).replace(r"\*", r"[^.]+")), style) for name, style in plan.items()]
    return {
        name: style
        for name, module in model.named_modules()
        for pattern, style in patterns
        if pattern.fullmatch(name) and next(module.parameters(), None) is not None
    }


def split_parameters(name: str, plan: Mapping[str, str]) -> set[str]:
    """Return the direct parameters of a module that a plan shards by their dim 0."""
    return {
        parameter
        for pattern, style in plan.items()
        for owner, _, parameter in [pattern.rpartition(".")]
        if style == "colwise" and re.fullmatch(re.escape(owner).replace(r"\*", r"[^.]+"), name)
    }


def add_low_rank(part: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Return a part of a weight plus the product of factors, (rows, rank) and (rank, columns), float32."""
    up, down = factors
    return part.float() + up @ down


def shard_low_rank(down: nn.Linear, up: nn.Linear, mesh: DeviceMesh, style: str) -> None:
    """Place a low-rank update `up(down(x))` that is added to the output of a linear of this style, in place.

    Neither has a bias. Of a colwise linear, `up` is sharded by columns and each rank's gradient of `down` is a part; of
    a rowwise one, `down` is sharded by rows, and both its output and the gradient of `up` are partial sums. Raise
    ValueError for a style whose linears are not called, or not sharded."""
    whole = "replicated_with_grad_allreduce"
    styles = dict.fromkeys(_COLWISE, (whole, style)) | dict.fromkeys(_ROWWISE, (style, whole))
    styles |= {unsharded: (unsharded, unsharded) for unsharded in ("replicated", whole)}
    if style not in styles:
        raise ValueError(f"style {style!r} has no low-rank update: use one of {', '.join(styles)}")
    first, second = styles[style]
    for module, own in ((down, first), (up, second)):
        _place(module, own, mesh, Replicate(), {})


def gather_output(module: nn.Module, mesh: DeviceMesh, token_dim: int) -> None:
    """All-gather the tokens of a module's output; its gradient must be the same on all ranks of the mesh."""
    module.register_forward_hook(
        lambda module, args, output: _convert(output, mesh, Shard(token_dim), Replicate(), Replicate())
    )


def _regions(styles: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules with colwise or rowwise linears, and their styles."""
    regions: dict[str, set[str]] = defaultdict(set)
    for name, style in styles.items():
        if style in (*_COLWISE, *_ROWWISE):
            regions[name.rpartition(".")[0]].add(style)
    return dict(regions)


def _untouched(styles: Mapping[str, str]) -> tuple[str, ...]:
    """Return prefixes of the names of what is not parallelized."""
    return tuple(f"{name}." for name, style in styles.items() if style == "untouched")


def _is_whole(styles: set[str]) -> bool:
    """Return whether all that a region computes between its first and its last linears is of whole vectors."""
    return "colwise" not in styles


def _place(
    module: nn.Module,
    style: str,
    mesh: DeviceMesh,
    outside: Placement,
    placed: dict[nn.Parameter, nn.Parameter],
    split: Collection[str] = (),
) -> None:
    """Replace a module's direct parameters by DTensors, and make its forward use their local parts. split: parameters
    that `local_params` shards."""
    gradients: dict[str, Placement] = {}
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        whole = name not in split if style == "local_params" else style.startswith("replicated")
        whole = whole or (style in _ROWWISE and name == "bias")
        placement: Placement = Replicate() if whole else Shard(1 if style in _ROWWISE else 0)
        if parameter not in placed:
            # src_data_rank=None: slice this rank's own values instead of scattering those of rank 0.
            value = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            placed[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        module.register_parameter(name, placed[parameter])
        complete = isinstance(placement, Shard) or style == "replicated"
        gradients[name] = placement if complete else Partial()
    if style == "embedding_rowwise":
        _look_up_own_rows(module, mesh, outside)
    elif style != "colwise_parameter":
        _compute_locally(module, gradients, once={"bias"} if style in _ROWWISE else set(), mesh=mesh)
    if style == "colwise_gather_output":
        module.register_forward_hook(
            lambda module, args, y: _convert(y, mesh, Shard(y.dim() - 1), Replicate(), Partial())
        )
    if style == "rowwise_split_input":
        rank, ranks = mesh.get_local_rank(), mesh.size()
        module.register_forward_pre_hook(lambda module, args: (args[0].chunk(ranks, dim=-1)[rank], *args[1:]))


def _compute_locally(module: nn.Module, gradients: Mapping[str, Placement], once: set[str], mesh: DeviceMesh) -> None:
    """Substitute local tensors for a module's parameters during its forward. gradients: placement of each one's local
    gradients. once: parameters that are added to partial sums, and therefore on one rank only."""
    share = float(mesh.get_local_rank() == 0)

    def shadow(module: nn.Module, args: tuple) -> None:
        for name, gradient in gradients.items():
            parameter = module._parameters[name]
            assert isinstance(parameter, DTensor)
            local = parameter.to_local(grad_placements=[gradient])
            # An instance attribute shadows the parameter, which stays where FSDP and state dicts look for it.
            module.__dict__[name] = local * share if name in once else local

    def unshadow(module: nn.Module, args: tuple, output: Any) -> None:
        for name in gradients:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(shadow)
    module.register_forward_hook(unshadow, always_call=True)


def _look_up_own_rows(module: nn.Module, mesh: DeviceMesh, outside: Placement) -> None:
    """Embed with this rank's part of the vocabulary and sum over ranks; DTensor's own op has a full-size gradient. What
    a subclass of Embedding does to the vectors, such as scaling them (Gemma), it does to each rank's own."""
    assert isinstance(module, nn.Embedding)
    lookup = module.forward
    rows = module.num_embeddings // mesh.size()
    first = rows * mesh.get_local_rank()
    padding = None if module.padding_idx is None else module.padding_idx - first
    module.padding_idx = padding if padding is not None and 0 <= padding < rows else None

    def forward(input: Tensor) -> Tensor:
        ids = input - first
        elsewhere = (ids < 0) | (ids >= rows)
        module.__dict__["weight"] = local_tensor(module.weight)  # shadows the parameter
        try:
            own = lookup(ids.masked_fill(elsewhere, 0))
        finally:
            del module.__dict__["weight"]
        return _convert(own.masked_fill(elsewhere.unsqueeze(-1), 0), mesh, Partial(), outside, outside)

    module.forward = forward  # type: ignore[method-assign]


def _convert_at_boundaries(region: nn.Module, mesh: DeviceMesh, outside: Placement) -> None:
    """Gather a region's first argument, and sum its output, or the first of several outputs."""
    argument = next(iter(inspect.signature(region.forward).parameters))

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        def gathered(hidden: Tensor) -> Tensor:
            return _convert(hidden, mesh, outside, Replicate(), Partial())

        if args:
            return (gathered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, argument: gathered(kwargs[argument])}

    def leave(module: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, tuple):
            return (_convert(output[0], mesh, Partial(), outside, outside), *output[1:])
        return _convert(output, mesh, Partial(), outside, outside)

    region.register_forward_pre_hook(enter, with_kwargs=True)
    region.register_forward_hook(leave)


def _convert(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, gradient: Placement) -> Tensor:
    """Redistribute a local tensor; its gradients are placed as `gradient`. Raise ValueError for an uneven division."""
    if isinstance(target, Shard) and x.shape[target.dim] % mesh.size():
        raise ValueError(
            f"tp={mesh.size()} must divide the {x.shape[target.dim]} tokens that each rank of ring x ulysses has, to "
            f"shard them further: use a sequence length that is a multiple of tp x ring x ulysses"
        )
    source, target, gradient = (
        Shard(p.dim % x.ndim) if isinstance(p, Shard) else p for p in (source, target, gradient)
    )
    converted = DTensor.from_local(x, mesh, [source], run_check=False).redistribute(placements=[target])
    return converted.to_local(grad_placements=[gradient])
