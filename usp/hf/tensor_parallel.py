"""Tensor parallelism for transformers models, from the plan that each family ships (`base_model_tp_plan`), and the
shapes of a model's parameters with their styles in this plan."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from usp.model.facts import LayerShape, ModelFacts, ModelShape, ParameterShape, tp_violations
from usp.parallel import ParallelMesh, Violation, all_of, option
from usp.parallel.tensor import STYLES, apply_tensor_parallel, gather_output, module_styles, tensor_parallel_violations

from .experts import expert_modules
from .images import encoder_parts
from .integrate import decoder_layers
from .models import empty_model, is_scalar, model_facts
from .probe import structure
from .prune import backbone, decoder, model_parts, name_of

_TOKEN_DIM = -2  # of hidden states (batch, tokens, hidden), which some shared experts get as (tokens, hidden)
_PARTIAL, _LATENT = "replicated_with_grad_allreduce", "mla_kv_a_proj"
_KNOWN = {*STYLES, _LATENT}


def apply_tp(model: PreTrainedModel, mesh: ParallelMesh, sequence_parallel: bool, trained: bool = True) -> None:
    """Shard heads, MLP columns and vocabulary over the mesh's tp axis, in place; does nothing for tp=1.

    Call it after `apply_unified_sp` and before FSDP; parameters may be on the meta device, else every tp rank must hold
    the same values. All parameters except experts become DTensors over tp. Each tp rank takes the same tokens and
    returns the same hidden states. The output head is not called: the loss uses its weight, sharded by vocabulary rows.

    sequence_parallel: between attention and MLP, hidden states are (B, S / tp, H), where S are the tokens of a ring x
        ulysses rank. A pipeline stage other than the first takes them in this shape, and returns them in it if its
        final norm is nn.Identity; the last stage's output is gathered.
    trained: the model has a backward, in which tp ranks that route the same tokens would count them twice.

    Raises ValueError, naming all `tp_problems`.
    """
    if problems := tp_problems(model, mesh.size("tp"), sequence_parallel, trained):
        raise ValueError(all_of(problems))
    if mesh.size("tp") == 1:
        return
    tp_mesh = mesh.parameter_mesh("tp")
    apply_tensor_parallel(model, tp_mesh, tp_plan(model), token_dim=_TOKEN_DIM if sequence_parallel else None)
    norm = getattr(decoder(model), model_parts(model).norm)
    if sequence_parallel and not isinstance(norm, nn.Identity):
        gather_output(norm, tp_mesh, _TOKEN_DIM)


def tp_problems(
    model: PreTrainedModel, tp: int, sequence_parallel: bool, trained: bool = True
) -> list[Violation | str]:
    """Return why a causal LM or a stage of it cannot be divided over `tp` ranks. See `apply_tp`."""
    config = model.config
    facts = model_facts(config.model_type, config)
    problems: list[Violation | str] = [*tp_violations(facts, tp, sequence_parallel, trained)]
    if tp == 1:
        return problems
    if mixers := structure(type(model), config).mixers:
        recurrent = f"the recurrent layers of {type(model).__name__} ({', '.join(mixers)})"
        problems.append(option("tp", tp) + f" does not divide {recurrent}: use " + option("tp", 1))
    if sequence_parallel and facts.value_dim != facts.head_dim:
        problems.append("latent attention is not supported with tp_sequence_parallel: leave it out")
    if sequence_parallel and not facts.in_stages:
        problems.append("tp_sequence_parallel needs hidden states that only layers and a norm change: leave it out")
    problems += plan_violations(config)
    if problems:
        return problems
    if sequence_parallel and (kinds := _undivided_attention(model)):
        problems.append(
            f"tensor-parallel plan of model_type={config.model_type!r}: it does not divide {', '.join(kinds)}, which "
            f"tp_sequence_parallel would give only a part of the tokens; use " + option("tp", 1)
        )
    return problems or [*tensor_parallel_violations(model, tp, tp_plan(model))]


def _undivided_attention(model: PreTrainedModel) -> list[str]:
    divided = {name.rpartition(".")[0] for name in module_styles(model, tp_plan(model))}
    names = {f"{name_of(model, backbone(model))}.{name}" for name in structure(type(model), model.config).masks}
    attention = {name: module for name, module in model.named_modules() if name in names}
    return sorted({type(module).__name__ for name, module in attention.items() if name not in divided})


def plan_violations(config: PretrainedConfig) -> list[Violation]:
    """Return why the tensor-parallel plan of a model type is not supported."""
    plan = _family_plan(config)
    unknown = [f"style {style!r} of {name} is not supported" for name, style in plan.items() if style not in _KNOWN]
    missing = [] if plan else ["transformers ships none"]
    of_type = f"tensor-parallel plan of model_type={config.model_type!r}: "
    return [of_type + f"{text}; use " + option("tp", 1) for text in missing + unknown]


def tp_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the style of each sharded module of a causal LM by dotted name, in which * matches one component."""
    base, parts = name_of(model, decoder(model)), model_parts(model)
    plan = {f"{base}.{name}": style for name, style in _family_plan(model.config).items()}
    # Every rank has whole modules of latent attention, of which the plan names one in each layer.
    latent = [name for name, style in plan.items() if style == _LATENT]
    latent += [name for each in latent for name, _ in _unplanned(model, each.rpartition(".")[0], plan)]
    plan |= dict.fromkeys(latent, _PARTIAL) | dict(_head_norms(model, plan))
    plan[f"{base}.{parts.embedding}"] = "embedding_rowwise"
    return plan if is_scalar(model.config) else plan | {parts.head: "colwise_parameter"}


def _head_norms(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the styles of norms over each head (GLM-4.5's use_qk_norm, Cohere's), where the plan divides the heads and
    names none: their weight is that of all heads, or one for each head."""
    head_dim = model_facts("", model.config).head_dim
    for query in [name for name, style in plan.items() if style == "colwise" and name.endswith("q_proj")]:
        for name, module in _unplanned(model, query.rpartition(".")[0], plan):
            shapes = {tuple(parameter.shape) for parameter in module._parameters.values() if parameter is not None}
            if name.endswith("norm") and shapes == {(head_dim,)}:
                yield name, _PARTIAL
            elif name.endswith("norm") and all(len(shape) == 2 and shape[1] == head_dim for shape in shapes):
                yield name, "local_params"
                yield from ((f"{name}.{parameter}", "colwise") for parameter in module._parameters)


def _unplanned(model: PreTrainedModel, owner: str, plan: Mapping[str, str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with parameters in those that a pattern names, where the plan does not name them."""
    pattern = re.compile(re.escape(owner).replace(r"\*", r"[^.]+"))
    for name, module in model.named_modules():
        within, _, part = name.rpartition(".")
        if pattern.fullmatch(within) and module._parameters and f"{owner}.{part}" not in plan:
            yield f"{owner}.{part}", module


def _family_plan(config: PretrainedConfig) -> dict[str, str]:
    """Return the shipped plan, but experts untouched: they are sharded over ep, each tp rank routes other tokens."""
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    experts = [name for name, style in plan.items() if style == "moe_tp_experts"]
    below = tuple(f"{name}." for name in experts)
    rest = {name: style for name, style in plan.items() if not name.startswith(below)}
    return rest | dict.fromkeys(experts, "untouched")


def model_shape(facts: ModelFacts, config: PretrainedConfig) -> ModelShape:
    """Return the parameter shapes of the model of `config`, whose facts are `facts`. Builds it on the meta device.
    Supports models of `usp.model.facts.FAMILIES`, with the head of a causal LM or a scalar one. Those of an encoder of
    images stand beside the embedding."""
    model = empty_model(config)
    styles = module_styles(model, tp_plan(model))
    experts = {id(p) for module in expert_modules(model) for p in module.parameters()}
    modules, parts, base = dict(model.named_modules()), model_parts(model), name_of(model, decoder(model))
    names = {id(module): name for name, module in modules.items()}

    def multiplies(owner: str, p: nn.Parameter) -> bool:
        is_router = len(p) == facts.num_experts and not owner.endswith("_proj")
        inside = owner.startswith(f"{base}.{parts.layers}.")
        return inside and p.ndim == 2 and isinstance(modules[owner], nn.Linear) and not is_router

    def shapes(module: nn.Module, routed: bool = False) -> tuple[ParameterShape, ...]:
        """Return the shapes of the experts, or of all other parameters."""
        owners = ((f"{names[id(module)]}.{name}".rpartition(".")[0], name, p) for name, p in module.named_parameters())
        return tuple(
            ParameterShape(
                name, tuple(p.shape), "untouched" if routed else styles.get(owner, "replicated"), multiplies(owner, p)
            )
            for owner, name, p in owners
            if routed == (id(p) in experts)
        )

    encoders = [shape for part in encoder_parts(model) for shape in shapes(part)]
    head = model.get_submodule(parts.head)
    known: dict[LayerShape, LayerShape] = {}
    layers = [LayerShape(shapes(layer), shapes(layer, routed=True)) for layer in decoder_layers(model)]
    return ModelShape(
        facts=facts,
        hidden_size=config.get_text_config().hidden_size,
        embedding=(*shapes(model.get_input_embeddings()), *encoders),
        layers=tuple(known.setdefault(layer, layer) for layer in layers),
        norm=shapes(getattr(decoder(model), parts.norm)),
        head=() if facts.tied else shapes(head),
        names=(f"{base}.{parts.embedding}", f"{base}.{parts.layers}", f"{base}.{parts.norm}", parts.head),
    )
