"""Whether a model is exact with sequence parallelism, found by running a tiny copy of it, or why it is refused.

    1. all tokens            an attention function records every call: module, queries, keys, values, mask, result
    2. some, then very few   with their position_ids, and the recorded results in place of attention

A model whose layers mix tokens in nothing but these calls computes in the second runs what it computed for the same
tokens in the first: then attention over a sharded sequence makes the whole model exact. Everything else shows as a
difference: convolutions, recurrences, attention outside `AttentionInterface`, routers that compare tokens, positions
that are counted instead of read, or that the model would count from another number than 0. Masks are read from the
first run, not from names.

What begins at some length shows as well: every number of the configuration that may be one is lowered so far that all
tokens are more, and very few are less (`usp.hf.shrink.lowered`), and `torch.arange` over the tokens of a rank begins
far from 0, whatever number in the code it may be compared with. Calls must have the same options for any number of
tokens, and the same masks as with those numbers as they are, which all tokens are less than. Only a constant in the
code, with which a number of tokens is compared, stays unseen.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from usp.attention import SequenceLayout, compute_now
from usp.attention.sparse import TILE
from usp.sp.in_order import Windows
from usp.sp.sequence import GridChannel

from .compressors import CompressorRun, compressors
from .experts import expert_modules
from .indexers import chooses_blocks, first_positions, indexers, sharded_indexer
from .mixers import sharded_mixers
from .positions import BY_LENGTH, Places, follow_positions, scaled_query
from .prune import backbone, decoder, hand_on, model_parts, prune_to_stage, stage_inputs
from .shrink import POSITIONS, VOCAB, WINDOWS, large_numbers, lowered, shrink

logger = logging.getLogger(__name__)
PROBE = "usp_probe"
LENGTH = 16
# Of a number of tokens that nothing else has: neither from the beginning nor to the end, with gaps.
SHARD = (1, 2, 3, 4, 6, 8, 9, 10, 11, 13, 14)
FEW = (1, 2)  # less than any of the lowered numbers, in number and in position
FAR = 1 << 24
TOLERANCE = 1e-4  # of the largest value: rounding in float32 is 1e-6

NOT_REGISTERED = "its attention does not go through transformers' AttentionInterface"
MaskKind = Literal["causal", "sliding", "chunked", "bidirectional"]
# Arguments of attention functions that change nothing here, or are part of the call.
NEUTRAL = {
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
    *("cache_position", "position_ids", "position_embeddings", "use_cache", "layer_idx"),
}
OPTIONS = ("scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux")  # of a call, for all of its tokens
HONOURED = {*OPTIONS, "cu_seqlens", "prefix_tree", "kv_cache"}


@dataclass(frozen=True)
class LayerMask:
    """The mask of one attention module: kind, and the field of the configuration that holds its width, or nothing."""

    kind: MaskKind
    field: str = ""


@dataclass(frozen=True)
class Structure:
    """How a model attends.

    masks: of every attention module that a forward calls, by the module's name in the base model, in order.
    problems: why sequence parallelism would not be exact, one message each.
    in_stages: whether layers take nothing from other layers but hidden states, and only the norm follows them, so that
        the model can be divided into pipeline stages.
    divides_experts: whether its experts go through transformers' `ExpertsInterface`, so that ep divides them.
    layer_outputs: how many values a layer returns in a tuple; 0 if it returns only hidden states.
    handed: attention modules, by name, and the layers that do not pass on to them what `hand_on` does.
    calls: how often a forward calls attention modules, by name.
    mixers: kinds of its recurrent and convolutional layers, which `usp.hf.mixers` runs over the whole sequence.
    indexers: kinds of the modules that choose or make the keys of attention, which `usp.hf.indexers` runs.
    untried: numbers of the configuration that a tiny copy cannot have below the probe's length, such as sizes: whether
        anything begins at them is unknown.
    """

    masks: dict[str, LayerMask]
    problems: tuple[str, ...]
    in_stages: bool = False
    divides_experts: bool = False
    mixers: tuple[str, ...] = ()
    indexers: tuple[str, ...] = ()
    layer_outputs: int = 0
    untried: tuple[str, ...] = ()
    handed: dict[str, str] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Call:
    module: nn.Module
    inputs: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    options: dict[str, Any]
    output: Tensor


_KNOWN: dict[tuple[type, str], Structure] = {}  # by class and content of the tiny configuration


def structure(kind: type[PreTrainedModel], config: PretrainedConfig) -> Structure:
    """Find the structure of the models of class `kind` with `config`, once for configurations that differ in sizes; all
    layers run, so the masks are theirs. Raises ValueError if a tiny copy cannot be built or run, so that nothing is
    known."""
    if getattr(config, "is_encoder_decoder", False):
        return Structure({}, ("it is an encoder and a decoder, and only decoders without an encoder are supported",))
    if kind.main_input_name != "input_ids":
        return Structure({}, (f"it takes {kind.main_input_name}, and only language models, of ids, are supported",))
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _mask)
    try:
        tiny = shrink(config)
        tiny.use_cache, tiny.name_or_path = False, ""  # as `apply_unified_sp` sets it; wherever it is read from
        key = kind, tiny.to_json_string(use_diff=False)
        if key not in _KNOWN:
            with torch.random.fork_rng(devices=()):
                _KNOWN[key] = _probe(kind, tiny)
    except Exception as error:  # of any kind: it is transformers' code that runs
        if not isinstance(error, KeyError) or error.args != (PROBE,):
            why = f"its tiny copy fails with {type(error).__name__}: {error}"
            raise ValueError(f"model_type={config.model_type!r} cannot be verified: {why}") from error
        _KNOWN[key] = Structure({}, (NOT_REGISTERED,))  # no attention of this name in a table of attention classes
    return _KNOWN[key]


def _probe(kind: type[PreTrainedModel], tiny: PretrainedConfig) -> Structure:
    """Find the structure of a model of a tiny configuration with its numbers lowered, except those without which it
    does not run. If it does not run with all of them lowered, and has problems with none, these are what is found."""

    @cache
    def found(*names: str) -> Structure:
        torch.manual_seed(0)
        return _structure_of(built(names))

    def built(names: Sequence[str]) -> PreTrainedModel:
        implementations = {"attn_implementation": PROBE, "experts_implementation": "eager"}
        model: PreTrainedModel = kind._from_config(lowered(tiny, names), **implementations).eval()
        return model

    names, failing, untried = [*large_numbers(vars(tiny.get_text_config()), LENGTH)], list[str](), list[str]()
    try:
        return _with_same_masks(found(*names), names, built)
    except Exception:  # of any kind: it is transformers' code that runs
        logger.debug("%s does not run with %s lowered", kind.__name__, names, exc_info=True)
        with suppress(Exception):
            if (plain := found()).problems:
                return plain
        for name in names:
            try:
                found(name)
            except Exception as error:  # of any kind, as above
                logger.debug("%s does not run with %s lowered", kind.__name__, name, exc_info=True)
                failing.append(name)
                # Of a table of positions, which no sequence can go beyond.
                if name not in POSITIONS and not isinstance(error, IndexError):
                    untried.append(name)
    low = [name for name in names if name not in failing]
    return _with_same_masks(replace(found(*low), untried=tuple(untried)), low, built)


def _with_same_masks(
    low: Structure, names: Sequence[str], built: Callable[[Sequence[str]], PreTrainedModel]
) -> Structure:
    """Return the structure of a model with these numbers lowered, and as a problem that its masks are others with all
    of them, or one, as they are: then they depend on the length."""
    if low.problems or not low.masks:
        return low

    def differs(lowered: Sequence[str]) -> bool:
        return bool(names) and _masks_of(built(lowered)) != low.masks

    if not differs(()):
        return low
    each = [name for name in names if differs([other for other in names if other != name])] or names
    return replace(low, problems=(f"its masks depend on whether there are more tokens than {', '.join(each)}",))


@torch.no_grad()
def _masks_of(model: PreTrainedModel) -> dict[str, LayerMask | str]:
    """Return the mask of the last call of each attention module, by its name in the base model."""
    base = backbone(model)
    calls, names = list[_Call](), {module: name for name, module in base.named_modules()}
    for module in compressors(base).values():
        module.forward = partial(_make_none, cast(int, module.head_dim))
    AttentionInterface.register(PROBE, partial(_record, calls))
    try:
        base(input_ids=_ids(), use_cache=False, kv_cache=None)
    finally:
        AttentionInterface.register(PROBE, _attend)
    return {names[call.module]: _mask_of(call) for call in calls}


def _ids() -> Tensor:
    return torch.arange(LENGTH).unsqueeze(0) * 7 % (VOCAB - 4) + 3


def _structure_of(model: PreTrainedModel, handed: dict[str, str] | None = None) -> Structure:
    """Run a model, in which the layers of `handed` pass on what their attention modules take."""
    base, unchanged, handed = backbone(model), copy.deepcopy(model), handed or {}
    for name, layer in handed.items():
        hand_on(base.get_submodule(layer), base.get_submodule(name))
    names = {module: name for name, module in base.named_modules()}
    mixers, making = sharded_mixers(base), compressors(base)
    not_made = _compressor_problem(base, making)
    for module in making.values():
        module.forward = partial(_make_none, cast(int, module.head_dim))
    calls, mixing, difference = _run_twice(base, [base.get_submodule(name) for name in mixers])
    unreached = dict.fromkeys(names[call.module] for call in calls if "kv_cache" not in call.options)
    layers = [names[layer] for stack in base.modules() if isinstance(stack, nn.ModuleList) for layer in stack]
    found = {name: layer for name in unreached for layer in layers if name.startswith(f"{layer}.")}
    if found and not handed:
        return _structure_of(unchanged, found)
    problems: list[str] = []
    if not_made:
        problems.append(not_made)
    elif mixing:
        problems.append(f"{', '.join(mixing)} mix tokens outside of transformers' AttentionInterface")
    elif not calls and not mixers:
        problems.append(NOT_REGISTERED)
    elif difference:
        problems.append(difference)
    masks, chosen = dict[str, LayerMask](), indexers(base)
    if chosen and not problems and (problem := _indexer_problem(base, chosen)):
        problems.append(problem)
    honoured = NEUTRAL | HONOURED | ({"indices", "block_indices"} if chosen else set())
    for call in calls:
        kind, mask = type(call.module).__name__, _mask_of(call)
        if isinstance(mask, str):
            problems.append(f"{kind}: {mask}")
        elif masks.setdefault(names[call.module], mask) != mask:
            problems.append(f"{kind} has several masks")
        unknown = [name for name, value in call.options.items() if name not in honoured and value is not None]
        problems += [f"{kind} passes {name} to attention" for name in unknown]
        if "kv_cache" not in call.options:
            problems.append(f"keyword arguments of a forward do not reach {kind}")
    parameters = inspect.signature(base.forward).parameters
    if "position_ids" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        problems.append(f"{type(base).__name__} takes no position_ids")
    in_stages, outputs = _in_stages(unchanged)
    return Structure(
        masks=masks,
        problems=tuple(dict.fromkeys(problems)),
        in_stages=in_stages,
        divides_experts=bool(expert_modules(base)),
        mixers=tuple(dict.fromkeys(mixers.values())),
        indexers=tuple(dict.fromkeys(type(module).__name__ for module in (*chosen.values(), *making.values()))),
        layer_outputs=outputs,
        handed=handed,
        calls=Counter(names[call.module] for call in calls),
    )


@torch.no_grad()
def _run_twice(base: nn.Module, mixers: Sequence[nn.Module]) -> tuple[list[_Call], list[str], str]:
    """Run all tokens, then only some, and very few. Return the calls of attention, the kinds of those other parts of
    decoder layers that give other results for a part of the tokens, and how these tokens differ in any other way.
    Leaves layers as `follow_positions` does."""
    calls, same, mixing, changing = list[_Call](), list[bool](), list[str](), dict[str, None]()
    whole_run = list[tuple[Tensor | None, Any]]()  # what the watched modules took and returned, in the first run

    def remember(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        whole_run.append((_first_tensor((*args, *kwargs.values())), output))

    def run(attention: Callable[..., Any], hook: Callable[..., Any], **inputs: Tensor) -> Tensor:
        AttentionInterface.register(PROBE, attention)
        hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in watched]
        try:
            return base(**inputs, use_cache=False, kv_cache=None).last_hidden_state
        finally:
            AttentionInterface.register(PROBE, _attend)
            for registered in hooks:
                registered.remove()

    def run_part(shard: list[int], first: int) -> None:
        replayed, remembered = iter(calls), iter(whole_run)

        def replay(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **options: Any) -> Any:
            call, own = next(replayed), (scaled_query(module, q, options.get("query_positions")), k, v)
            same.append(all(_equal(x, whole[:, :, shard]) for x, whole in zip(own, call.inputs, strict=True)))
            for name in OPTIONS:
                if not _same_value(options.get(name), call.options.get(name)):
                    changing[f"{type(module).__name__}'s {name} depends on the tokens of a forward"] = None
            return call.output[:, shard].contiguous(), None

        def compare(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
            taken, (before, whole) = _first_tensor((*args, *kwargs.values())), next(remembered)
            if module in mixers:
                same.append(_equal(taken, before[:, shard]))  # type: ignore[index]
                return (whole[0][:, shard], *whole[1:]) if isinstance(whole, tuple) else whole[:, shard]
            name, outputs = type(module).__name__, (_first_tensor(output), _first_tensor(whole))
            if name not in mixing and _same(taken, before, shard) and not _same(*outputs, shard):
                mixing.append(name)
            return output

        places.positions = torch.tensor(shard).unsqueeze(0)
        with _CountingFrom(first, len(shard)):
            part = run(replay, compare, input_ids=_ids()[:, shard], position_ids=places.positions)
        same.append(_equal(part, whole[:, shard]))

    stacks = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    watched = dict.fromkeys([*(part for stack in stacks for layer in stack for part in layer.children()), *mixers])
    whole = run(partial(_record, calls), remember, input_ids=_ids())
    if not whole.isfinite().all():
        raise ValueError("its hidden states are not finite")
    places = Places(torch.arange(LENGTH).unsqueeze(0), lambda: torch.tensor([[LENGTH - 1]]))
    follow_positions(base, places)
    unneeded = [module for module in indexers(base).values() if chooses_blocks(module)]
    for module in unneeded:  # they fail on tokens before which others are missing
        module.forward = lambda *args, **kwargs: None
    try:
        try:
            run_part([*SHARD], FAR)
        except IndexError:  # it counts to choose from the tokens that it has
            for seen in (same, mixing, changing):
                seen.clear()
            run_part([*SHARD], 0)
        run_part([*FEW], 0)
    except Exception as error:  # of any kind: it is transformers' code that runs
        return calls, mixing, f"its layers fail on a part of the tokens with {type(error).__name__}: {error}"
    finally:
        places.positions = torch.arange(LENGTH).unsqueeze(0)
        for module in unneeded:
            del module.forward
    depends = [] if all(same) else ["its layers depend on tokens, or on positions, that other ranks hold"]
    return calls, mixing, "; ".join((*changing, *depends))


@torch.no_grad()
def _calls_of(
    base: nn.Module, modules: Iterable[nn.Module], ids: Tensor
) -> list[tuple[nn.Module, dict[str, Any], Any]]:
    """Return the calls of these modules in a forward: module, arguments, result."""
    calls: list[tuple[nn.Module, dict[str, Any], Any]] = []

    def remember(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        calls.append((module, inspect.signature(module.forward).bind(*args, **kwargs).arguments, output))

    hooks = [module.register_forward_hook(remember, with_kwargs=True) for module in modules]
    base(input_ids=ids, use_cache=False, kv_cache=None)
    for hook in hooks:
        hook.remove()
    return calls


@torch.no_grad()
def _indexer_problem(base: nn.Module, chosen: Mapping[str, nn.Module]) -> str:
    """Return whether an indexer chooses other keys if it runs as `usp.hf.indexers` runs it, empty if all do not."""
    positions = torch.arange(LENGTH).unsqueeze(0)
    for module, call, output in _calls_of(base, chosen.values(), _ids()):
        sharded, name = sharded_indexer(module, None, None), type(module).__name__
        own = sharded.chosen(call, sharded.own_keys(call), positions, torch.zeros_like(positions), TILE // 5)
        if chooses_blocks(module):
            output, config = first_positions(output, sharded.block), cast(Any, base).config.get_text_config()
            kv_heads = config.num_key_value_heads
            if output.shape[2] != kv_heads:
                return f"{name} chooses for {output.shape[2]} heads, and attention has {kv_heads} KV heads"
        pairs = [_seen_indices(indices[0].flatten(0, -2).tolist()) for indices in (own, output)]
        if output.is_floating_point() or pairs[0] != pairs[1]:
            return f"{name} does not choose keys by token, from those of its cache"
    return ""


def _seen_indices(indices: list[list[int]]) -> list[set[int]]:
    """Return the indices up to their position of the queries of all positions, which may each have several lists."""
    lists = len(indices) // LENGTH
    return [{key for key in keys if 0 <= key <= number // lists} for number, keys in enumerate(indices)]


@torch.no_grad()
def _compressor_problem(base: nn.Module, making: Mapping[str, nn.Module]) -> str:
    """Return whether a compressor makes other entries, or shows others to a query, if it runs as `usp.hf.indexers` runs
    it, on the same tokens twice, as two documents; empty if none does."""
    length, names = 4 * LENGTH, ("hidden_states", "q_residual", "position_ids")
    ids = _ids().repeat(1, length // LENGTH)  # of which a query does not choose all entries
    calls: list[Any] = _calls_of(base, making.values(), ids) if making else []
    layout, documents = SequenceLayout("contiguous", 2 * length), ((0, length, 2 * length),)
    for module, named, (entries, bias) in calls:
        if BY_LENGTH & {*module.rotary_emb.rope_type.values()}:
            return f"{type(module).__name__} turns its entries by the length of a text"
        if bias is None:  # its windows are longer than these tokens
            continue
        run, seen = CompressorRun(module), torch.zeros(2 * length, 2 * entries.shape[2] + 1, dtype=torch.bool)
        plan = Windows.of(layout, documents, 1, 0, run.rate, run.overlap)
        channel, twice = GridChannel(None, (0,)), [torch.cat((named[x],) * 2, 1) for x in names]
        made = run.entries(twice, plan, channel, compute_now)
        if made.indices is None:
            ready = (torch.arange(length) + 1) // run.rate
            expected = torch.arange(entries.shape[2]) < ready.unsqueeze(1)
            seen = torch.block_diag(expected, expected)
        else:
            seen = seen.scatter_(1, made.indices[0].long() % seen.shape[1], True)[:, :-1]
        shown = bias[0, 0] == 0
        if not _equal(made.entries, entries[0, 0].repeat(2, 1)) or not seen.equal(torch.block_diag(shown, shown)):
            return f"{type(module).__name__} does not make its entries of windows of the tokens in its cache"
    return ""


def _make_none(head_dim: int, hidden_states: Tensor, *_: Any) -> tuple[Tensor, None]:
    return hidden_states.new_empty(len(hidden_states), 1, 0, head_dim), None


class _CountingFrom(TorchFunctionMode):
    """Let `torch.arange` over `tokens` begin at `first` instead of 0, except where transformers builds masks."""

    def __init__(self, first: int, tokens: int) -> None:
        super().__init__()
        self.first, self.tokens = first, tokens

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is not torch.arange or sys._getframe(1).f_globals["__name__"] == masking_utils.__name__:
            return out
        return out + self.first if out.tolist() == [*range(self.tokens)] else out


@torch.no_grad()
def _in_stages(model: PreTrainedModel) -> tuple[bool, int]:
    """Return (whether a model can be divided into stages, the outputs of a layer); see `Structure`. Prunes it. It must
    end with its norm, and two stages must compute what the whole model does."""
    inputs: dict[str, Any] = {"position_ids": torch.arange(LENGTH).unsqueeze(0), "use_cache": False}
    ids, normed, returned = torch.arange(3, 3 + LENGTH).unsqueeze(0), list[Tensor](), list[Any]()
    try:
        base, inner, parts = backbone(model), decoder(model), model_parts(model)
        staged = {parts.embedding, *parts.positions, parts.layers, parts.norm}
        others = [part for name, part in inner.named_children() if name not in staged]
        stack, later = getattr(inner, parts.layers), copy.deepcopy(model)
        hooks = [stack[0].register_forward_hook(lambda module, args, output: returned.append(output))]
        hooks += [getattr(inner, parts.norm).register_forward_hook(lambda module, args, output: normed.append(output))]
        ends = base(input_ids=ids, **inputs).last_hidden_state
        for hook in hooks:
            hook.remove()
        outputs, cut = len(returned[0]) if isinstance(returned[0], tuple) else 0, len(stack) // 2
        if any(parameter.numel() for part in others for parameter in part.parameters()):
            return False, outputs
        if not cut or len(normed) != 1 or not torch.equal(ends, normed[0]):
            return len(normed) == 1 and torch.equal(ends, normed[0]), outputs
        prune_to_stage(model, range(cut), first=True, last=False, outputs=outputs)
        prune_to_stage(later, range(cut, len(stack)), first=False, last=True, outputs=outputs)
        x = base(**stage_inputs(model, ids, first=True), **inputs).last_hidden_state
        x = backbone(later)(**stage_inputs(later, x, first=False), **inputs).last_hidden_state
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # of a backbone that expects other layers
        return False, 0
    return torch.equal(x, ends), outputs  # not nearly: with their first weights, tiny layers change little


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend over everything; (B, N, S, H) in, (B, S, N, H) out. What else scores go through does not matter here."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -1e4)
    elif attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


def _record(
    calls: list[_Call],
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    calls.append(_Call(module, (q, k, v), attention_mask, options, _attend(module, q, k, v, attention_mask)[0]))
    return calls[-1].output, None


def _same_value(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


def _mask_of(call: _Call) -> LayerMask | str:
    """Return the mask of a call, or why it is none that sequence parallelism knows."""
    mask, length = call.mask, call.inputs[0].shape[2]
    if call.inputs[1].shape[2] != length:
        return f"it attends over {call.inputs[1].shape[2]} keys for {length} queries"
    if mask is None:
        causal = call.options.get("is_causal")
        causal = getattr(call.module, "is_causal", True) if causal is None else causal
        return LayerMask("causal") if causal else LayerMask("bidirectional")
    if mask.dtype != torch.bool:
        if not bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            return "its mask adds to the scores"
        mask = mask == 0
    seen = mask.reshape(-1, length, length)
    if not bool((seen == seen[:1]).all()):
        return "its mask differs between heads"
    for kind, expected in _known_masks(length):
        if torch.equal(seen[0], expected):
            return kind
    return "its mask is none of causal, sliding, chunked and bidirectional"


def _known_masks(length: int) -> Iterator[tuple[LayerMask, Tensor]]:
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
    causal = key <= query
    yield LayerMask("causal"), causal
    yield LayerMask("bidirectional"), torch.ones_like(causal)
    for name, width in WINDOWS.items():
        yield LayerMask("sliding", name), causal & (query - key < width)
        yield LayerMask("chunked", name), causal & (query // width == key // width)


def _same(part: Tensor | None, whole: Tensor | None, shard: list[int]) -> bool:
    if part is None or whole is None or whole.dim() < 2 or whole.shape[1] != LENGTH:
        return True  # not by token
    return _equal(part, whole[:, shard])


def _first_tensor(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values
    parts = values if isinstance(values, tuple | list) else ()
    return next((value for value in parts if isinstance(value, Tensor) and value.is_floating_point()), None)


def _equal(part: Tensor, whole: Tensor) -> bool:
    if part.shape != whole.shape:
        return False
    return bool((part - whole).abs().max() <= TOLERANCE * whole.abs().max().clamp(min=1e-6))


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
