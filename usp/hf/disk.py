"""Files of a model's weights: which tensors there are, under which names, and what they are part of.

A model's tensors are its parameters and its persistent buffers, such as the biases by which DeepSeek-V3's routers
choose experts: saved and loaded like parameters, in a dtype of their own, and not trained.

A linear with an adapter of peft has its weight in a submodule, base_layer, which files do not name.

What `save_pretrained` writes for each tensor is found by running transformers' weight conversion on parts that know
only their box and its tensor:

    experts.gate_up_proj (E, 2I, H) -> experts.N.gate_proj.weight (I, H), experts.N.up_proj.weight (I, H), ...
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from usp.parallel.reallocation.boxes import Box

from .prune import backbone, decoder, name_of

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PreTrainedModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES_IN_ERRORS = 5
_LAYER = re.compile(r"(.*?\.|)(\d+)\.(.+)")  # the list of a layer, its number, and what it holds
_MOST_DRAFT_LAYERS = 4  # of a configuration that does not say how many there are
_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True)
class DiskTensor:
    """Tensor `name` in a file: the part `box` of a parameter, without its leading dims of size 1."""

    name: str
    parameter: str
    box: Box
    shape: tuple[int, ...]


def disk_layout(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[DiskTensor]]:
    """Return the tensors on disk that make up each tensor of a whole `model`, by its name.

    shapes: of its parameters and persistent buffers.

    Raises ValueError if files hold something else than parts of single tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    whole = {name: _Part(name, Box.whole(tuple(shape)), len(shape)) for name, shape in shapes.items()}
    layout: dict[str, list[DiskTensor]] = defaultdict(list)
    try:
        written: Any = revert_weight_conversion(model, whole)  # type: ignore[arg-type]
    except AttributeError as error:  # an operation that is a method of tensors
        raise ValueError(f"files hold more than parts of single parameters, which is not supported: {error}") from error
    for name, part in written.items():
        layout[part.tensor].append(DiskTensor(name, part.tensor, part.box, part.shape))
    return {name: sorted(layout[name], key=lambda tensor: tensor.box.offset) for name in shapes}


@dataclass(frozen=True)
class _Part:
    """Stands for the part `box` of a tensor, without its leading dims of size 1: its last `dims` dims."""

    tensor: str
    box: Box
    dims: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.box.sizes[len(self.box.sizes) - self.dims :]

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> _Part:
        return self

    def squeeze(self, dim: int | None = None) -> _Part:
        if dim or self.shape[0] != 1 or (dim is None and 1 in self.shape[1:]):
            where = "its dims of size 1" if dim is None else f"dim {dim}"
            raise ValueError(f"files hold {self.tensor} without {where}, which is not supported")
        return replace(self, dims=self.dims - 1)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[_Part, ...]:
        at, size = len(self.box.sizes) - self.dims + dim, -(-self.shape[dim] // chunks)
        begin, end = self.box.offset[at], self.box.end[at]

        def part(start: int) -> _Part:
            offset, sizes = list(self.box.offset), list(self.box.sizes)
            offset[at], sizes[at] = start, min(size, end - start)
            return replace(self, box=Box(tuple(offset), tuple(sizes)))

        return tuple(part(start) for start in range(begin, end, size))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.chunk:
            return args[0].chunk(*args[1:], **(kwargs or {}))
        raise ValueError(f"files hold tensors that {function.__name__} makes of parameters, which is not supported")


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter of peft."""
    return any(part in name for part in (".lora_A.", ".lora_B."))


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model without its adapters, by their names without adapters, tied ones each time."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not is_adapter(name):
            yield name.replace(".base_layer.", "."), parameter


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are part of checkpoints, by their names without adapters."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".replace(".base_layer.", "."), buffer


def stored_tensors(whole: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that files of a `whole` model hold: its parameters, tied ones once, and persistent buffers."""
    return dict(whole.named_parameters()) | dict(persistent_buffers(whole))


def uncast_names(whole: PreTrainedModel) -> set[str]:
    """Return the tensors that keep their dtype in files of another: buffers, and what transformers has in float32."""
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in whole._keep_in_fp32_modules_strict or ()]
    uncast = {name for name, _ in whole.named_parameters() if any(pattern.search(name) for pattern in patterns)}
    with torch.device("meta"):
        rounded = cast(Any, type(whole))._from_config(copy.deepcopy(whole.config), dtype=torch.bfloat16)
    uncast |= {name for name, parameter in rounded.named_parameters() if parameter.dtype == torch.float32}
    return uncast | {name for name, _ in persistent_buffers(whole)}


def kept_names(model: nn.Module) -> dict[str, str]:
    """Map each parameter name to the name it is stored under: its own, or for tied parameters the first one's."""
    first: dict[nn.Parameter, str] = {}
    return {name: first.setdefault(p, name) for name, p in model.named_parameters(remove_duplicate=False)}


def stored_names(model: nn.Module) -> dict[str, str]:
    """Map each tensor's name to the name it is stored under; see `kept_names`."""
    return kept_names(model) | {name: name for name, _ in persistent_buffers(model)}


def read_headers(folder: Path) -> dict[str, Any]:
    """Return safetensors' slice of every tensor of a checkpoint directory, reading only file headers.

    A slice keeps its file open; indexing it reads the values, in the dtype of the file. Raises ValueError, naming a
    file that is missing or cannot be read.
    """
    files = [folder / SINGLE]
    if not files[0].is_file():
        index = folder / INDEX
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index} cannot be read as the index of a sharded checkpoint: {error!r}") from error
    slices_of: dict[str, Any] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                slices_of |= {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118  (not a mapping)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}") from error
    return slices_of


def in_whole(whole: PreTrainedModel, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what files hold by the names in the `whole` model, also of files that its base model wrote by itself, such
    as the language model of a multimodal one."""
    base = backbone(whole)
    if decoder(whole) is not base or found.keys().isdisjoint(stored_tensors(base)):
        return found
    return {f"{name_of(whole, base)}.{name}": value for name, value in found.items()}


def choose_tensors(
    whole: PreTrainedModel, found: Mapping[str, Any], folder: Path
) -> tuple[dict[str, list[DiskTensor]], list[tuple[DiskTensor, DiskTensor]]]:
    """Find the tensors of the `whole` model. Each may also be stored under its name and in its layout in memory.

    Returns:
        The tensors in files that make up each one, by the name it is stored under, and pairs of tensors that must be
        equal: a tied parameter saved under two names.

    Raises ValueError, naming every missing or unexpected tensor, and every one of the wrong shape.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for name, first in stored_names(whole).items():
        names[first].append(name)
    tensors_of = stored_tensors(whole)
    saved = disk_layout(whole, {name: tensors_of[first].shape for first in names for name in names[first]})
    chosen: dict[str, list[DiskTensor]] = {}
    copies: list[tuple[DiskTensor, DiskTensor]] = []
    for first, aliases in names.items():
        shape = tensors_of[first].shape
        whole_box = Box.whole(tuple(shape))
        options = [
            [DiskTensor(name, name, whole_box, tuple(shape))] if name in found else saved[name] for name in aliases
        ]
        present = [tensors for tensors in options if all(tensor.name in found for tensor in tensors)]
        chosen[first] = tensors = (present or options)[0]
        copies.extend((tensors[0], other[0]) for other in present[1:])
    wanted = [*chain.from_iterable(chosen.values()), *(copy for _, copy in copies)]
    if violations := _violations(whole, wanted, found):
        model_type = whole.config.model_type
        raise ValueError(f"{folder} does not contain the weights of the {model_type} in its config.json: {violations}")
    return chosen, copies


def plan_files(tensors: Sequence[DiskTensor], itemsizes: Mapping[str, int], max_bytes: float) -> list[list[DiskTensor]]:
    """Split tensors, in order, into files of at most `max_bytes`; a larger tensor gets its own file.

    itemsizes: bytes per element of each parameter.
    """
    files: list[list[DiskTensor]] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.box.numel * itemsizes[tensor.parameter]
        if not files or size + nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += nbytes
    return files


def file_names(number: int) -> list[str]:
    """Return transformers' names for the `number` files of a model."""
    return [SINGLE] if number == 1 else [f"model-{n:05d}-of-{number:05d}.safetensors" for n in range(1, number + 1)]


def draft_tensors(whole: PreTrainedModel, built: Collection[str], found: Collection[str]) -> list[str]:
    """Return the tensors in files that belong to layers for predicting further tokens (multi-token prediction,
    arXiv 2412.19437, section 2.2), which transformers does not build: they are called mtp, or numbered behind the
    layers of a model that may have them, without being such layers.

    built: the names under which files may hold the tensors of the `whole` model.
    found: all names in the files, as `in_whole` returns them.
    """
    others = [name for name in found if name not in built and not name.endswith(_buffer_names(whole))]
    layers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))  # what each layer of a list holds
    for name in (*others, *(name for name in built if name in found)):
        if match := _LAYER.fullmatch(name):
            layers[match[1]][int(match[2])].add(match[3])
    text, rules, drafts = whole.config.get_text_config(), _ignored(whole), set[str]()
    declared = max(getattr(text, field, None) or 0 for field in _DRAFT_LAYERS)
    for stack, content in layers.items():
        own = {int(match[2]) for name in built if (match := _LAYER.fullmatch(name)) and match[1] == stack}
        beyond = [layer for layer in content if own and layer > max(own) and has_draft_layers(whole)]
        ordinary = [content[layer] for layer in own if layer in content]
        if len(beyond) <= max(declared, _MOST_DRAFT_LAYERS):  # else the model has fewer layers than the files
            drafts |= {
                f"{stack}{layer}."
                for layer in beyond
                if content[layer] not in ordinary or any(rule.search(f"{stack}{layer}.") for rule in rules)
            }
    return [
        name
        for name in others
        if any(part.startswith("mtp") for part in name.split(".")) or name.startswith(tuple(drafts))
    ]


def layer_names(names: Iterable[str]) -> list[str]:
    """Return the layers of these tensors, such as model.layers.46; of those in none, the first part of their names."""
    matches = {name: _LAYER.fullmatch(name) for name in names}
    return [*dict.fromkeys(m[1] + m[2] if m else name.partition(".")[0] for name, m in matches.items())]


def has_draft_layers(whole: PreTrainedModel) -> bool:
    """Return whether releases of this model have layers for predicting further tokens, or its configuration says so."""
    text = whole.config.get_text_config()
    return any(getattr(text, field, None) for field in _DRAFT_LAYERS) or any(
        re.search(r"mtp|layers\\\.\d", rule.pattern) for rule in _ignored(whole)
    )


def _ignored(whole: PreTrainedModel) -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in whole._keys_to_ignore_on_load_unexpected or ()]


def _buffer_names(whole: PreTrainedModel) -> tuple[str, ...]:
    return tuple(name.removeprefix("model.") for name, _ in whole.named_buffers())  # in old files, per layer


def _violations(whole: PreTrainedModel, wanted: Sequence[DiskTensor], found: Mapping[str, Any]) -> str:
    expected = {tensor.name: tensor.shape for tensor in wanted}
    shapes = {name: tuple(found[name].get_shape()) for name in expected if name in found}
    left_out = *_buffer_names(whole), *draft_tensors(whole, expected, found)
    parts = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [
            name
            for name in found
            if name not in expected
            and not name.endswith(left_out)
            and not any(rule.search(name) for rule in _ignored(whole))
        ],
        "wrong shape": [
            f"{name} has shape {shape}, expected {expected[name]}"
            for name, shape in shapes.items()
            if shape != expected[name]
        ],
    }
    return "; ".join(f"{what}: {_shown(items)}" for what, items in parts.items() if items)


def _shown(items: Sequence[str]) -> str:
    more = f" and {len(items) - _NAMES_IN_ERRORS} more" if len(items) > _NAMES_IN_ERRORS else ""
    return ", ".join(items[:_NAMES_IN_ERRORS]) + more
