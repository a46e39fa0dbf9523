"""LoRA adapters, through the package peft: which linears get them, their sharding, first values and export."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from usp.config import ALL_LINEAR
from usp.parallel import ParallelMesh, option
from usp.parallel.reallocation.boxes import Box, local_box, local_part
from usp.parallel.tensor import add_low_rank, module_styles, shard_low_rank

from .disk import DiskTensor, base_parameters, is_adapter, kept_names, persistent_buffers
from .experts import expert_modules
from .export import CONFIG, FilePlan, Held, part_violations, plan_tensors, write_folder
from .models import empty_model, model_facts
from .prune import backbone, decoder, model_parts, name_of
from .shrink import shrink
from .tensor_parallel import tp_plan

ADAPTER = "default"  # peft's name of a model's only adapter
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # of peft's names


@dataclass(frozen=True)
class Saved:
    """Modules that are trained in full, as peft's modules_to_save.

    modules: the ends of their names. parameters: (name, name under which it is stored), which differ for tied ones.
    """

    modules: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]

    def has(self, name: str) -> bool:
        """Return whether the parameter of this name is trained in full."""
        return any(name in names for names in self.parameters)


@dataclass(frozen=True)
class Lora:
    """Adapters of a model.

    alpha: the update is scaled by alpha / rank.
    targets: last components of the names of the linears that get an adapter, from `lora_targets`.
    saved: what is trained in full beside the adapters, from `modules_to_save`.
    within: the name of the only module whose linears get adapters, as the decoder of a vision-language model; "" for
        the whole model.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]
    saved: Saved | None = None
    within: str = ""


def lora_targets(config: PretrainedConfig, targets: str) -> tuple[str, ...]:
    """Return the names of the linears of a model that get adapters, as peft's target_modules.

    targets: names separated by commas, or `all-linear` for every linear below the output head. Experts are one
        parameter for all experts of a layer, and stay frozen; so do dense MLPs whose names peft gives to the experts,
        and what peft refuses, as out_proj of some types of Mamba layers.

    Raises ValueError, naming those that are not linears of the model, those that peft would place on its experts, and
    those that it refuses.
    """
    model, given = empty_model(config), option("lora_targets", targets)
    has_experts = model_facts(config.model_type, config).num_experts > 0
    linears = sorted({name.rpartition(".")[2] for name, _ in _linears(model)})
    names = linears if targets == ALL_LINEAR else sorted({name.strip() for name in targets.split(",")})
    if unknown := [name for name in names if name not in linears]:
        experts = " (experts are fused parameters, which get no adapters)" if has_experts else ""
        raise ValueError(
            given + f" names {', '.join(map(repr, unknown))}, but the linear layers of "
            f"{config.model_type} are {', '.join(linears)}{experts}: use some of those, or {ALL_LINEAR}"
        )
    refused = set(_refused_by_peft(config, linears))
    moved = _moved_to_experts(model, [name for name in linears if name not in refused]) if has_experts else set()
    left = [name for name in linears if name not in moved | refused]
    for none, why in ((refused, "refuses {}"), (moved, "takes {} for its experts, which get no adapters")):
        if targets != ALL_LINEAR and (wrong := none & set(names)):
            said = why.format(f"{', '.join(sorted(wrong))} of {config.model_type}")
            raise ValueError(given + f": peft {said}: use {', '.join(left)}")
    return tuple(name for name in names if name in left)


def modules_to_save(config: PretrainedConfig, modules: str, targets: Sequence[str]) -> Saved | None:
    """Return what of a model is trained in full beside adapters of `targets`; None for no `modules`.

    modules: ends of the names of modules, separated by commas, which peft matches in the same way.

    Raises ValueError, naming those that are no modules with parameters, that hold adapters or experts, and of tied
    parameters one without the other.
    """
    if not modules:
        return None
    model, given = empty_model(config), option("lora_modules_to_save", modules)
    ends, stored, experts = tuple(name.strip() for name in modules.split(",")), kept_names(model), expert_modules(model)
    chosen: dict[str, str] = {}
    for end in ends:
        matched = [name for name, _ in model.named_modules() if end and name.endswith(end)]
        within = {name for module in matched for name in stored if name.startswith(f"{module}.")}
        if not within:
            raise ValueError(given + f": {config.model_type} has no parameters in {end!r}")
        for module in map(model.get_submodule, matched):
            inside = {name.rpartition(".")[2] for name, part in _linears(model) if part in set(module.modules())}
            if inside & set(targets) or set(experts) & set(module.modules()):
                raise ValueError(
                    given + f": {end} has adapters or experts in it, which are not trained in "
                    f"full: name other modules, such as those of the embedding and the output head"
                )
        chosen |= {name: stored[name] for name in within}
    if tied := {name for name, first in stored.items() if first in chosen.values()} - chosen.keys():
        same = f": {', '.join(sorted(tied))} is the same parameter as one of these: name its module, too"
        raise ValueError(given + same)
    return Saved(ends, tuple(sorted(chosen.items())))


def adapted_part(config: PretrainedConfig) -> str:
    """Return the name of the only part of a model that gets adapters, as `Lora.within`."""
    model = empty_model(config)
    return "" if decoder(model) is backbone(model) else name_of(model, decoder(model))


def frozen_ends(config: PretrainedConfig, saved: Saved | None) -> list[str]:
    """Return the names of the embedding and the output head of a model, unless both are trained beside adapters."""
    model = empty_model(config)
    parts = model_parts(model)
    names = {f"{name_of(model, decoder(model))}.{parts.embedding}": parts.embedding, parts.head: parts.head}
    trained = saved is not None and all(saved.has(f"{name}.weight") for name in names)
    return [] if trained else list(names.values())


def apply_lora(
    model: PreTrainedModel,
    lora: Lora,
    mesh: ParallelMesh,
    tp_sequence_parallel: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Freeze a model or a pipeline stage except `lora.saved`, and add adapters of `dtype` to its linears, in place.

    Call it after `apply_tp` and before FSDP; parameters may be on the meta device. Of a linear sharded over tp by
    columns, lora_B is sharded alike and lora_A replicated; of one sharded by rows, the other way round. Raises
    ValueError for a stage without any of the target linears, and for one that tp does not divide.
    """
    from peft import inject_adapter_in_model  # takes seconds to import

    tp = mesh.size("tp")
    styles = module_styles(model, tp_plan(model)) if tp > 1 else {}
    linears = [name for name, _ in _linears(model) if name.rpartition(".")[2] in lora.targets]
    if not linears:
        raise ValueError(
            f"a pipeline stage has no linear layer called {' or '.join(lora.targets)}, so nothing of it would be "
            f"trained: use lora_targets={ALL_LINEAR}, or fewer stages"
        )
    here = sorted({name.rpartition(".")[2] for name in linears})
    # Into the base model: in the whole one, peft looks for both ends of tied weights, which may be on two stages.
    plain = replace(lora, saved=None, within="")
    inject_adapter_in_model(lora_config(plain, here), decoder(model), ADAPTER)
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            parameter.requires_grad_(bool(lora.saved and lora.saved.has(name)))
    for name in linears:
        adapted = cast(Any, model.get_submodule(name))
        base, down, up = adapted.base_layer, adapted.lora_A[ADAPTER], adapted.lora_B[ADAPTER]
        # peft makes them in the base's dtype, and where that is sharded over tp in the size of this rank's part.
        down.weight = nn.Parameter(torch.empty(lora.rank, base.in_features, dtype=dtype, device=base.weight.device))
        up.weight = nn.Parameter(torch.empty(base.out_features, lora.rank, dtype=dtype, device=base.weight.device))
        if tp > 1 and not isinstance(base.weight, DTensor):
            raise ValueError(f"tp={tp} does not divide {name}, so it cannot have an adapter: use other lora_targets")
        if tp > 1:
            style = styles.get(name, "replicated_with_grad_allreduce" if tp_sequence_parallel else "replicated")
            shard_low_rank(down, up, mesh.parameter_mesh("tp"), style)


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the names and parameters of a model's adapters; none for a model without."""
    return ((name, p) for name, p in model.named_parameters() if is_adapter(name))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let the model compute what its base computes, within this context. For forwards without gradients."""
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    # Not by peft's enable_adapters, which clears requires_grad: FSDP2 would keep that in what it gathers.
    for module in adapted:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in adapted:
            module._disable_adapters = False


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """Draw lora_A and clear lora_B as peft does (Kaiming-uniform with a = sqrt(5)), whatever the layout.

    Each lora_A is drawn whole on the CPU by a generator seeded with `seed` and its name; a rank copies its part. Global
    random states are not changed. Does nothing without adapters.
    """
    for name, parameter in adapter_parameters(model):
        local = local_part(parameter)
        if ".lora_B." in name:
            local.zero_()
        else:
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
            whole = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5), generator=generator)
            local.copy_(whole[local_box(parameter).slices()])


def lora_config(lora: Lora, targets: Sequence[str]) -> Any:
    """Return peft's LoraConfig for some of the targets; what is not set here has its default."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=rf"{re.escape(lora.within)}\..*\.({'|'.join(targets)})" if lora.within else list(targets),
        modules_to_save=list(lora.saved.modules) if lora.saved else None,
        task_type="CAUSAL_LM",
    )


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linears of the decoder below its output head, by their names in the whole model."""
    prefix = name_of(model, decoder(model))
    for name, module in decoder(model).named_modules():
        if isinstance(module, nn.Linear):
            yield f"{prefix}.{name}", module


def _refused_by_peft(config: PretrainedConfig, names: Sequence[str]) -> Iterator[str]:
    """Yield the names of linears that peft gives no adapters in a model of this type."""
    from peft import inject_adapter_in_model

    def refusal(some: Sequence[str]) -> str:
        try:
            inject_adapter_in_model(lora_config(Lora(1, 1, ()), [*some]), empty_model(tiny), ADAPTER)
        except ValueError as error:
            return str(error)
        return ""

    tiny = shrink(config, layers=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if refusal(names):  # all at once, because most models have none, and each name takes a model
            yield from (name for name in names if "incompatible" in refusal([name]))


def _moved_to_experts(model: PreTrainedModel, names: Sequence[str]) -> set[str]:
    """Return the linears that peft replaces by parameters of experts, as for older transformers. Adds adapters."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what does not concern linears
        inject_adapter_in_model(lora_config(Lora(1, 1, ()), names), model, ADAPTER)
    return set(names) - set(cast(Any, model).peft_config[ADAPTER].target_modules)


def save_adapter(
    weights: Mapping[str, Tensor],
    folder: Path,
    *,
    lora: Lora,
    base: Path,
    config: PretrainedConfig | None = None,
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    beside: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a directory that `PeftModel.from_pretrained(base model, folder)` loads.

    Collective; as `usp.hf.export.save_weights`, also in what it raises, but to one file.

    weights: of this rank's adapters, by the names in `adapter_parameters`, and what else is trained, by the names
        under which it is stored; plain tensors (whole) or DTensors.
    base: directory of the base model, stored as the adapter's base_model_name_or_path.
    config: of the base model, written too where the adapters were trained with another one than the base's own.
    """

    def shapes(holders: Sequence[Mapping[str, Held]]) -> dict[str, tuple[int, ...]]:
        return {name: part.shape for held in holders for name, part in held.items()}

    def plan(holders: Sequence[Mapping[str, Held]]) -> list[list[FilePlan]]:
        names = {name: [_written(name)] for name in shapes(holders) if is_adapter(name)}
        for name, stored in lora.saved.parameters if lora.saved else ():  # of tied ones, peft has copies
            names.setdefault(stored, []).append(name)
        tensors = [
            DiskTensor(_PREFIX + written, name, Box.whole(shape), shape)
            for name, shape in shapes(holders).items()
            for written in names[name]
        ]
        return plan_tensors(tensors, holders, math.inf, lambda number: [ADAPTER_FILE] * number)

    def describe(rounds: Sequence[Sequence[FilePlan]], partial: Path) -> None:
        described = lora_config(lora, lora.targets)
        described.base_model_name_or_path, described.inference_mode = str(base), True
        described.save_pretrained(str(partial))
        if config is not None:
            config.to_json_file(partial / CONFIG, use_diff=True)

    write_folder(
        weights,
        folder,
        check=lambda holders: part_violations(shapes(holders), holders, shapes(holders), "the adapters"),
        plan=plan,
        describe=describe,
        marker=ADAPTER_CONFIG,
        dtype=dtype,
        group=group,
        beside=beside,
    )


def _written(name: str) -> str:
    """Return the name under which peft writes a parameter of an adapter."""
    return name.replace(f".{ADAPTER}.", ".")


class MergedWeights(Mapping[str, Tensor]):
    """The weights of stages without adapters and with their updates, by their names in the transformers model.

    A weight is merged when it is asked for, in float32, and only this rank's part of it. Collective to create: every
    rank gets the adapters of its stages whole.
    """

    @torch.no_grad()
    def __init__(self, models: Sequence[nn.Module], lora: Lora) -> None:
        self._scale = lora.alpha / lora.rank
        self._weights: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        for model in models:
            first: dict[nn.Parameter, str] = {}  # tied ones once
            for name, parameter in base_parameters(model):
                if first.setdefault(parameter, name) == name:
                    self._weights[name] = parameter.detach()
            self._weights.update(persistent_buffers(model))
            for name, parameter in adapter_parameters(model):
                self._factors[name] = _whole(parameter.detach())

    @property
    def base(self) -> Mapping[str, Tensor]:
        """The weights that the updates are added to."""
        return self._weights

    def factors(self, name: str) -> tuple[Tensor, ...]:
        """Return what `add_low_rank` adds to this rank's part of a weight, (B, A); nothing without an adapter."""
        linear = name.removesuffix(".weight")
        if f"{linear}.lora_A.{ADAPTER}.weight" not in self._factors:
            return ()
        rows, columns = local_box(self._weights[name]).slices()
        up, down = (self._factors[f"{linear}.lora_{kind}.{ADAPTER}.weight"].float() for kind in "BA")
        return self._scale * up[rows], down[:, columns]

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight, factors = self._weights[name], self.factors(name)
        if not factors:
            return weight
        merged = weight.clone().float()
        local_part(merged).copy_(add_low_rank(local_part(weight), factors))
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _whole(x: Tensor) -> Tensor:
    """Gather a DTensor where its mesh is: NCCL does not gather from host memory. The result is where `x` is."""
    if not isinstance(x, DTensor):
        return x
    there = cast(DTensor, x.to(x.device_mesh.device_type))
    return there.full_tensor().to(x.device)
