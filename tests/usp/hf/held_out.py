"""Configurations that the table of models was not made with: random values for every field of a model's configuration.

Types with images get an encoder that is drawn as well, and images of other sizes.

`usp.hf.shrink` makes every size the same for all families. Here a seed draws sizes, heads, masks, rotary embeddings,
experts, scales, biases and the kinds of layers, from the fields that a configuration has and the names that its
modeling file reads. What transformers itself cannot build or run in one process is left out, found by halving. Each
configuration then runs on ring x ulysses meshes in float64, forwards and backwards, against one process: also what
layers do in float32, such as norms, so that nothing but the order of sums differs.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from examples.models import causal_lm_types, tiny_config
from tests.harness.ranks import RankPool
from tests.usp.hf import vision
from usp import apply_unified_sp, shard_batch, shard_image_batch
from usp.hf.images import TYPES
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh
from usp.sp.sequence import SpAxes

TABLE = Path(__file__).parents[3] / "docs" / "models.md"
ROWS, LENGTH, VOCAB = 2, 32, 89
PACKED, WHOLE = (0, 11, 12, 32), (0, LENGTH)
CALLS = (((2, 2), "zigzag", PACKED), ((4, 1), "striped", WHOLE), ((1, 4), "contiguous", PACKED))  # ring, ulysses
Change = dict[str, Any]  # fields that are set together

_HIDDEN = ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads")
_KV_HEADS = ("num_key_value_heads",)
_STATE_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_STATE_DIMS = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "attention_head_dim")
_STATE_WIDTHS = ("lora_rank", "state_size", "d_state", "conv", "rank", "head_dim", "moe_intermediate", "latent")
_FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "intermediate_size_mlp", "dff")
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_SWITCHES_LEFT = {  # of what a forward returns or stores, or which kernels run
    *("is_encoder_decoder", "is_decoder", "add_cross_attention", "use_cache", "return_dict", "torchscript"),
    *("output_hidden_states", "output_attentions", "output_router_logits", "use_mamba_kernels", "use_mambapy"),
    *("use_associative_scan", "use_mem_eff_path", "cross_attention_hidden_size", "apply_spec_augment"),
}
_SCALES = ("multiplier", "softcap", "scaling_factor", "scale", "swiglu_limit", "clip", "lambda", "residual_multiplier")
_LENGTHS = ("window", "chunk", "local_attention", "topk", "floor_scale", "block_size")
_WIDTHS = ("lora_rank", "state_size", "d_state", "conv", "rank", "head_dim", "moe_intermediate", "latent")
_COUNTS = ("period", "offset", "interval", "step", "every", "pattern", "first_k", "n_shared", "num_shared", "cycles")
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "mamba", "attention")
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclass
class Drawn:
    """A configuration with the fields that were drawn, and those that transformers does not run with."""

    config: PretrainedConfig
    fields: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def draw(model_type: str, seed: int) -> Drawn:
    """Return a configuration of random values that transformers runs in one process."""
    rng, sees = random.Random(f"{model_type} {seed}"), model_type in TYPES
    config = vision.tiny_config(model_type, VOCAB, VOCAB - 1) if sees else tiny_config(model_type)
    text = config.get_text_config()
    if sees and "head_dim" in vars(text) and not hasattr(type(text), "head_dim"):
        del text.head_dim  # which its model does not read
    drawn = Drawn(_without_chance(config))
    for changes in (_shapes, _details):  # which read the fields that are drawn already
        found = list(changes(drawn.config.get_text_config(), rng))
        _keep(drawn, [_fitting(drawn.config, change) for change in found] if sees else found)
    if sees:
        _keep(drawn, list(_encoder(drawn.config, rng)))
    return drawn


def _keep(drawn: Drawn, changes: Sequence[Change]) -> None:
    """Make those of the changes with which the model runs."""
    if not changes:
        return
    try:
        changed = _changed(drawn.config, {name: value for change in changes for name, value in change.items()})
        plain(changed, WHOLE)
    except Exception as error:  # of any kind: it is transformers' code that runs
        if len(changes) == 1:
            drawn.left_out += [f"{name} ({type(error).__name__}: {error})" for name in changes[0]]
            return
        middle = len(changes) // 2
        for half in (changes[:middle], changes[middle:]):
            _keep(drawn, half)
    else:
        drawn.config = changed
        drawn.fields += [name for change in changes for name in change]


def _changed(config: PretrainedConfig, change: Change) -> PretrainedConfig:
    """Return a copy whose text part is built from its fields anew, as a user's file is read. Names of fields of other
    parts begin with theirs."""
    if config.model_type in TYPES:
        whole: dict[str, Any] = config.to_dict()
        for name, value in change.items():
            part, _, inner = (name if "." in name else f"text_config.{name}").partition(".")
            (whole if part == "config" else whole[part])[inner] = value
        return type(config).from_dict(whole)
    config = copy.deepcopy(config)
    text = config.get_text_config()
    built = type(text).from_dict(text.to_dict() | change)
    if text is config:
        return built
    for name, value in list(vars(config).items()):
        if value is text:
            setattr(config, name, built)
    return config


def _without_chance(config: PretrainedConfig) -> PretrainedConfig:
    for part in (config, config.get_text_config(), getattr(config, "vision_config", config)):
        for name, value in list(vars(part).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _shapes(text: PretrainedConfig, rng: random.Random) -> Iterator[Change]:
    """Yield sizes that depend on each other, together."""
    fields = vars(text)
    heads = rng.choice((4, 6, 8))
    kv_heads = rng.choice([number for number in range(1, heads + 1) if heads % number == 0])
    head_dim = rng.choice((8, 12, 20, 24))
    own_head_dim = "head_dim" in fields or "qk_rope_head_dim" in fields
    hidden = heads * (rng.choice((8, 10, 14)) if own_head_dim else head_dim)

    def of(names: Sequence[str], value: Any) -> Change:
        return {name: value for name in names if isinstance(fields.get(name), int)}

    width = of(_HIDDEN, hidden) | of(_HEADS, heads) | of(_KV_HEADS, heads)
    width |= of(_STATE_HEADS, heads) | of(_STATE_DIMS, 2 * hidden // heads) | of(_STATE_WIDTHS, 2 * hidden)
    if "qk_rope_head_dim" in fields:
        nope, rope = rng.choice((8, 12, 20)), rng.choice((4, 8, 12))
        width |= of(("qk_rope_head_dim", "head_dim"), rope) | of(("qk_nope_head_dim",), nope)
        width |= of(("qk_head_dim",), nope + rope) | of(("v_head_dim",), rng.choice((8, 16, 20)))
    else:
        width |= of(("head_dim", "query_pre_attn_scalar"), head_dim)
    yield width
    if "qk_rope_head_dim" not in fields:  # latent attention has a key for each head
        yield of(_KV_HEADS, kv_heads) | (of(("index_n_heads",), kv_heads) if "index_topk_blocks" in fields else {})
    yield of(_FFN, rng.choice((36, 60, 68)))
    experts = rng.choice((4, 6, 12))
    groups = rng.choice([number for number in (1, 2, 3) if experts % number == 0 and experts // number >= 2])
    yield (
        of(_EXPERTS, experts)
        | of(_CHOSEN, rng.choice((1, 2, 3)))
        | of(("n_group", "num_expert_group"), groups)
        | of(("topk_group",), rng.randint((groups + 1) // 2, groups))
    )
    depth = next((fields[name] for name in _DEPTH if isinstance(fields.get(name), int)), None)
    layers = rng.randint(2, 5)
    lists = {
        name: rng.choices(list(dict.fromkeys(value)), k=layers)
        for name, value in fields.items()
        if isinstance(value, list | tuple) and len(value) == depth and not isinstance(value[0], dict | list)
    }
    yield of(_DEPTH, layers) | lists


def _details(text: PretrainedConfig, rng: random.Random) -> Iterator[Change]:
    """Yield fields that are drawn by themselves."""
    fields, source = vars(text), _modeling_source(text)
    yield {"vocab_size": VOCAB}
    for name, value in fields.items():
        if name.startswith("_") or name in _SWITCHES_LEFT or name.endswith(("_id", "_config", "eps")):
            continue
        if isinstance(value, bool) and rng.random() < 0.5:
            yield {name: not value}
        elif name in ("hidden_act", "hidden_activation", "activation_function"):
            yield {name: rng.choice(_ACTIVATIONS)}
        elif isinstance(value, float) and any(part in name for part in _SCALES):
            yield {name: value * rng.uniform(0.6, 1.6) or rng.uniform(0.5, 2.0)}
        elif value is None and "softcap" in name:
            yield {name: rng.uniform(5.0, 30.0)}
        elif value is None and name == "sliding_window":
            yield {name: rng.randint(2, 11)}
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if any(part in name for part in _LENGTHS) and name != "topk_group":
                yield {name: rng.randint(2, 11)}
            elif any(part in name for part in _COUNTS):
                yield {name: rng.randint(1, 3)}
            elif any(part in name for part in _WIDTHS) and name not in ("head_dim", "v_head_dim", "qk_head_dim"):
                yield {name: max(2, value + rng.choice((-2, -1, 1, 2, 4)) * (2 if value >= 8 else 1))}
    if isinstance(fields.get("layer_types"), list) and fields["layer_types"]:
        kinds = [*dict.fromkeys(fields["layer_types"]), *(kind for kind in _KINDS if f'"{kind}"' in source)]
        yield {"layer_types": rng.choices(kinds, k=len(fields["layer_types"]))}
        if "max_window_layers" in fields:  # the kinds of layers follow from it
            yield {"max_window_layers": 1, "use_sliding_window": True, "sliding_window": 7, "layer_types": None}
    rope = fields.get("rope_parameters")
    if rope and text.base_config_key != "vision_config":  # those of encoders have no kinds
        by_kind = {kind: part for kind, part in rope.items() if isinstance(part, dict)}
        if by_kind:
            yield {"rope_parameters": {**rope, **{kind: _rope(part, fields, rng) for kind, part in by_kind.items()}}}
        else:
            yield {"rope_parameters": _rope(rope, fields, rng)}


def _fitting(config: PretrainedConfig, change: Change) -> Change:
    """Return a change of the text model with those of rotary embeddings and of the encoder's outputs that it needs."""
    encoder, rope = config.vision_config, config.get_text_config().rope_parameters or {}
    change = dict(change)
    if "mrope_section" in rope and "num_attention_heads" in change:
        head_dim = change.get("head_dim") or change["hidden_size"] // change["num_attention_heads"]
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        change["rope_parameters"] = {**rope, "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    if "hidden_size" in change:
        out = "hidden_size" if hasattr(encoder, "embed_dim") else "out_hidden_size"
        change |= {f"vision_config.{out}": change["hidden_size"]} if hasattr(encoder, out) else {}
    return change


def _encoder(config: PretrainedConfig, rng: random.Random) -> Iterator[Change]:
    """Yield fields of the encoder of images and of the whole model."""
    fields = vars(config.vision_config)

    def of(names: Sequence[str], value: Any) -> Change:
        return {f"vision_config.{name}": value for name in names if name in fields}

    heads, patch = rng.choice((2, 4, 6)), rng.choice((2, 3, 4))
    width = ("embed_dim",) if "embed_dim" in fields else ("hidden_size",)
    yield of(("num_heads", "num_attention_heads", "num_key_value_heads"), heads) | of(
        width, heads * rng.choice((8, 16))
    )
    yield of(("intermediate_size",), rng.choice((20, 36, 52)))
    depth = rng.randint(1, 4)
    chosen = [rng.randrange(depth)]
    yield of(("depth", "num_hidden_layers"), depth) | of(("deepstack_visual_indexes", "fullatt_block_indexes"), chosen)
    sides = [rng.choice((4, 6, 8)) for _ in range(2)]
    for across in ([side * patch for side in sides], sides[0] * patch):  # of a rectangle, or a square
        yield of(("patch_size",), [patch] * 2 if isinstance(fields.get("patch_size"), list | tuple) else patch) | of(
            ("image_size",), across
        )
    for name, values in {
        "spatial_merge_size": (1, 3),
        "temporal_patch_size": (1, 3),
        "pooling_kernel_size": (1, 3),
    }.items():
        yield of((name,), rng.choice(values))
    if hasattr(config, "mm_tokens_per_image"):
        yield {"config.mm_tokens_per_image": rng.choice((1, 4))}
    for change in _details(config.vision_config, rng):
        yield {f"vision_config.{name}": value for name, value in change.items() if name in fields}
    for name, value in vars(config).items():
        if name in ("projector_hidden_size", "alignment_intermediate_size"):
            yield {f"config.{name}": value + rng.choice((-4, 4, 8))}
        elif isinstance(value, bool) and name.startswith(("projector", "multimodal")):
            yield {f"config.{name}": not value}


def _rope(rope: dict[str, Any], fields: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return rotary embeddings of another kind, whose parameters matter at the length of the runs."""
    drawn = {**rope, "rope_theta": 10 ** rng.uniform(2, 6)}
    if "partial_rotary_factor" in rope:
        drawn["partial_rotary_factor"] = rng.choice((0.5, 1.0))
    if "mrope_section" in rope:
        return drawn
    kind = rng.choice(("default", "linear", "dynamic", "yarn", "llama3", "longrope"))
    drawn |= {"rope_type": kind} | ({} if kind == "default" else {"factor": rng.uniform(1.5, 8.0)})
    if kind in ("yarn", "llama3", "longrope", "dynamic"):
        drawn["original_max_position_embeddings"] = rng.choice((8, 16, 24))
    if kind == "llama3":
        drawn |= {"low_freq_factor": 1.0, "high_freq_factor": rng.uniform(2.0, 5.0)}
    if kind == "yarn":
        drawn |= {"beta_fast": rng.choice((8.0, 32.0)), "beta_slow": 1.0}
    if kind == "longrope":
        dim = fields.get("qk_rope_head_dim") or fields.get("head_dim")
        dim = dim or fields["hidden_size"] // fields["num_attention_heads"]
        pairs = int(dim * drawn.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            drawn[name] = [rng.uniform(1.0, 4.0) for _ in range(pairs)]
    return drawn


def _modeling_source(config: PretrainedConfig) -> str:
    """Return the source of the model's classes and of its configuration."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return inspect.getsource(sys.modules[type(config).__module__])
    model = AutoModelForCausalLM._model_mapping.get(type(config), None)
    kinds = [type(config), model[0] if isinstance(model, tuple) else model]
    return "".join(inspect.getsource(sys.modules[kind.__module__]) for kind in kinds if kind is not None)


# Against one process


class InDouble(TorchFunctionMode):
    """Compute in float64 what is asked for in float32."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return function(*args, **kwargs)


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model in float64, with weights of which none is zero or one."""
    torch.manual_seed(0)
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    sees = config.model_type in TYPES
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with InDouble():
        model = kind.from_config(copy.deepcopy(config), **implementations)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if sees and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.05)
            elif (tensor.dim() < 2 or name.endswith("bias")) and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model = model.double()
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # lightning attention's buffers, computed in float32
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    return model


def ids() -> Tensor:
    return torch.randint(3, VOCAB - 1, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Result:
    """The logits (B, S, V), none of a model with images, the mean loss, and the gradient of every parameter, in
    float64."""

    logits: Tensor
    loss: Tensor
    gradients: list[Tensor]


def plain(config: PretrainedConfig, cuts: Sequence[int]) -> Result:
    """Return what transformers computes of each document by itself; raise ValueError if that is not finite."""
    model, own = model_of(config), ids()
    if config.model_type in TYPES:
        with InDouble():
            (loss := vision.loss_alone(model, images(model))).backward()
        return _finite(Result(torch.zeros(0), loss.detach(), _gradients(model)))
    parts, targets, total = [], 0, torch.zeros((), dtype=torch.float64)
    for begin, end in pairwise(cuts):
        with InDouble():
            logits = model(input_ids=own[:, begin:end], use_cache=False).logits
        labels = own[:, begin + 1 : end].flatten()
        total = total + torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        targets += len(labels)
        parts.append(logits.detach())
    (total / targets).backward()
    return _finite(Result(torch.cat(parts, dim=1), total.detach() / targets, _gradients(model)))


def images(model: PreTrainedModel) -> list[list[dict[str, Tensor]]]:
    """Return the documents of two rows, with images of numbers and sizes that depend on the configuration."""
    rng = random.Random(model.config.to_json_string())
    rows: list[list[list[int | str]]] = [[["0", rng.randint(2, 9)]], []]
    for row in (0, *rng.choices((0, 1), k=2), 1):
        parts: list[int | str] = [rng.randint(1, 9)] * rng.randint(0, 1)
        for _ in range(rng.randint(0, 3)):  # with text after each: mRoPE takes images without for one
            parts += [str(rng.randrange(4)), rng.randint(1, 9)]
        rows[row].append([*parts, rng.randint(2, 9)])
    return vision.documents(model, rows, [(rng.randint(1, 4), rng.randint(1, 4)) for _ in range(4)])


def _finite(result: Result) -> Result:
    if not all(value.isfinite().all() for value in (result.logits, *result.gradients)):
        raise ValueError("not finite")
    return result


def _gradients(model: PreTrainedModel) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@dataclass(frozen=True)
class Found:
    """What the ranks of a mesh computed: the largest relative error of logits, loss or a parameter's gradient, and of
    which; or why the model is refused."""

    error: float = 0.0
    where: str = ""
    refused: str = ""


def sharded(config: PretrainedConfig, degrees: tuple[int, int], layout: str, cuts: Sequence[int], one: Result) -> Found:
    """Compare a sharded run on this job's ranks with one process."""
    mesh, model = ParallelMesh.create(ParallelDims(ring=degrees[0], ulysses=degrees[1])), model_of(config)
    batch = {"input_ids": ids(), "labels": ids(), "cu_seqlens": torch.tensor(cuts, dtype=torch.int32)}
    sees = config.model_type in TYPES
    with InDouble():
        batch = vision.packed(images(model)) if sees else batch
    try:
        apply_unified_sp(model, mesh, layout)
        local = shard_image_batch(batch, model) if sees else shard_batch(batch, mesh, layout)
        labels = local.pop("shift_labels")
        with InDouble():
            logits = model(**local, use_cache=False).logits
    except ValueError as error:
        return Found(refused=str(error))
    with InDouble():
        share = causal_lm_loss(logits, labels, global_token_count(labels, mesh))
        share.backward()
    loss, axes = share.detach().clone(), SpAxes.of(mesh)
    gradients = _gradients(model)
    for total in (loss, *gradients):
        dist.all_reduce(total)
    (positions,) = axes.positions(axes.layout(layout, LENGTH, (tuple(cuts),)))
    largest = max(gradient.norm().item() for gradient in one.gradients)
    errors = {"loss": _relative(loss, one.loss)}
    if not sees:
        errors["logits"] = _relative(logits, one.logits[:, positions])
    for (name, _), own, expected in zip(model.named_parameters(), gradients, one.gradients, strict=True):
        errors[name] = _relative(own, expected, 1e-3 * largest)
    where = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return Found(errors[where], where)


def _relative(own: Tensor, expected: Tensor, least: float = 0.0) -> float:
    return ((own - expected).norm() / max(expected.norm().item(), least)).item()


def check(ranks: RankPool, config: PretrainedConfig, calls: Sequence[Any] = CALLS) -> list[Found]:
    """Return the worst of the ranks for each of `calls`."""
    one = {cuts: plain(config, cuts) for _, _, cuts in calls}
    found = []
    for degrees, layout, cuts in calls:
        of_ranks = ranks.run(sharded, degrees[0] * degrees[1], config, degrees, layout, cuts, one[cuts], timeout=120.0)
        assert len({rank.refused for rank in of_ranks}) == 1, f"ranks refuse differently: {of_ranks}"
        found.append(max(of_ranks, key=lambda rank: rank.error if rank.error == rank.error else float("inf")))
    return found


def exact_types() -> list[str]:
    """Return the types that docs/models.md calls exact, and those that take images."""
    rows = [line.split(" | ") for line in TABLE.read_text().splitlines()]
    exact = {row[0].removeprefix("| ") for row in rows if row[2:3] == ["exact"]}
    return sorted(exact & {*causal_lm_types()} | {*TYPES})
