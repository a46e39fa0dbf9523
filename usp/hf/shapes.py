"""Shapes of a model's parameters: of the families with formulas from the configuration alone, because transformers'
models take seconds to import, and most of a second to build; of any other as built."""

from __future__ import annotations

from transformers import PretrainedConfig

from usp.model.facts import LayerShape, ModelFacts, ModelShape, ParameterShape

from .models import FAMILIES, empty_model, experts_per_token, is_scalar

_NORMS = ("input_layernorm", "post_attention_layernorm")
_BIASED = ("llama", "qwen3", "qwen3_moe")  # families whose attention may have biases everywhere


def shape_of(facts: ModelFacts, config: PretrainedConfig) -> ModelShape:
    """Return what `usp.hf.tensor_parallel.model_shape` does; it builds the model."""
    if config.model_type not in FAMILIES or facts.widths:
        from .tensor_parallel import model_shape

        return model_shape(facts, config)
    width, head = config.hidden_size, "score" if is_scalar(config) else "lm_head"
    rows, style = (1, "replicated") if is_scalar(config) else (facts.vocab_size, "colwise_parameter")
    layers = {routed: _layer(facts, config, routed) for routed in (False, True)}
    return ModelShape(
        facts=facts,
        hidden_size=width,
        embedding=(ParameterShape("weight", (facts.vocab_size, width), "embedding_rowwise"),),
        layers=tuple(layers[_routed(facts, config, index)] for index in range(config.num_hidden_layers)),
        norm=(ParameterShape("weight", (width,)),),
        head=() if facts.tied else (ParameterShape("weight", (rows, width), style),),
        experts_per_token=experts_per_token(config) if facts.num_experts else 0,
        names=("model.embed_tokens", "model.layers", "model.norm", head),
    )


def divisible(config: PretrainedConfig) -> bool:
    """Return whether tensor and Megatron's sequence parallelism can divide a model, which may be built to know it."""
    if config.model_type in FAMILIES:
        return True
    from .tensor_parallel import tp_problems

    return not tp_problems(empty_model(config), 2, sequence_parallel=True)


def _routed(facts: ModelFacts, config: PretrainedConfig, index: int) -> bool:
    """Return whether a layer has experts."""
    sparse = (index + 1) % getattr(config, "decoder_sparse_step", 1) == 0
    return facts.num_experts > 0 and sparse and index not in getattr(config, "mlp_only_layers", ())


def _layer(facts: ModelFacts, config: PretrainedConfig, routed: bool) -> LayerShape:
    """Return the parameters of a layer, with experts or with a dense MLP, in their order."""
    plan, width, family = config.base_model_tp_plan or {}, config.hidden_size, config.model_type
    heads, kv_heads = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    bias = family in _BIASED and config.attention_bias
    biases = bias or family == "qwen2"
    modules: list[tuple[str, tuple[int, ...], bool]] = [  # with whether they have a bias
        ("self_attn.q_proj", (heads, width), biases),
        ("self_attn.k_proj", (kv_heads, width), biases),
        ("self_attn.v_proj", (kv_heads, width), biases),
        ("self_attn.o_proj", (width, heads), bias),
    ]
    if family in ("qwen3", "qwen3_moe"):
        modules += [(f"self_attn.{name}_norm", (facts.head_dim,), False) for name in "qk"]
    experts = []
    if routed:
        number, inner = facts.num_experts, getattr(config, "moe_intermediate_size", config.intermediate_size)
        modules.append(("mlp.gate", (number, width), False))
        sizes = {"gate_up_proj": (number, 2 * inner, width), "down_proj": (number, width, inner)}
        experts = [ParameterShape(f"mlp.experts.{name}", shape, "untouched") for name, shape in sizes.items()]
    else:
        inner, bias = config.intermediate_size, family == "llama" and config.mlp_bias
        modules += [(f"mlp.{name}_proj", (inner, width), bias) for name in ("gate", "up")]
        modules.append(("mlp.down_proj", (width, inner), bias))
    parameters = []
    for owner, shape, biased in (*modules, *((name, (width,), False) for name in _NORMS)):
        style = plan.get(f"layers.*.{owner}", "replicated")
        parameters.append(ParameterShape(f"{owner}.weight", shape, style, owner.endswith("_proj")))
        parameters += [ParameterShape(f"{owner}.bias", shape[:1], style)] if biased else []
    return LayerShape(tuple(parameters), tuple(experts))
