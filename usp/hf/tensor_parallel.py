"""Tensor parallelism of transformers models, from the plan that each family ships (`base_model_tp_plan`)."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from parallel import ParallelMesh
from parallel.tensor import apply_tensor_parallel, gather_output
from usp.model.degrees import tp_violations

from .models import model_facts

_TOKEN_DIM = 1  # of hidden states (batch, tokens, hidden)
_EXPERTS = "moe_tp_experts"  # the style that marks the module of all experts
_KNOWN = {"colwise", "rowwise", "replicated_with_grad_allreduce", "untouched"}


def style_violations(config: PretrainedConfig, tp: int) -> list[str]:
    """Return what in the tensor-parallel plan of a model type is not supported, one message each. Pure."""
    plan = _shipped_plan(config)
    if tp > 1 and not plan:
        return [f"tp={tp} needs a model type with a tensor-parallel plan, and {config.model_type!r} has none: use tp=1"]
    return [
        f"tp={tp}: {config.model_type!r} has the style {style!r} for {name}, which is not supported: use tp=1"
        for name, style in _without_experts(plan).items()
        if tp > 1 and style not in _KNOWN
    ]


def apply_tp(model: PreTrainedModel, mesh: ParallelMesh, sequence_parallel: bool) -> None:
    """Divide heads, MLP columns and vocabulary over the mesh's tp axis, in place. Nothing to do for tp=1.

    Call it after `apply_unified_sp` and before FSDP; parameters may be on the meta device, else every tp rank must hold
    the same values. All parameters become DTensors over tp, except those of experts, which are left alone. Each tp rank
    takes the same tokens and returns the same hidden states. The output head is not called: the loss takes its weight,
    of which each rank has rows of the vocabulary.

    Args:
        sequence_parallel: between attentions and MLPs, hidden states are (B, S / tp, H), where S are the tokens of a
            ring x ulysses rank. A pipeline stage that is not the first takes them so, and returns them so where its
            final norm is no norm (nn.Identity); the last one's output is gathered.

    Raises:
        ValueError: naming everything about the model that forbids this.
    """
    tp, facts = mesh.size("tp"), model_facts(type(model).__name__, model.config)
    violations = [*style_violations(model.config, tp), *tp_violations(facts, tp, sequence_parallel)]
    if violations:
        raise ValueError("; ".join(violations))
    if mesh.size("tp") == 1:
        return
    tp_mesh = mesh.parameter_mesh("tp")
    apply_tensor_parallel(model, tp_mesh, tp_plan(model), token_dim=_TOKEN_DIM if sequence_parallel else None)
    norm = model.base_model.get_submodule("norm")
    if sequence_parallel and not isinstance(norm, nn.Identity):
        gather_output(norm, tp_mesh, _TOKEN_DIM)


def tp_plan(model: PreTrainedModel) -> dict[str, str]:
    """The style of each divided module of a causal LM: {dotted name, in which * stands for one part: style}."""
    base = model.base_model_prefix
    plan = {f"{base}.{name}": style for name, style in _without_experts(_shipped_plan(model.config)).items()}
    return plan | {f"{base}.embed_tokens": "embedding_rowwise", "lm_head": "colwise_parameter"}


def _shipped_plan(config: PretrainedConfig) -> dict[str, str]:
    return getattr(config, "base_model_tp_plan", None) or {}


def _without_experts(plan: dict[str, str]) -> dict[str, str]:
    """The plan in which experts are untouched: they are divided over ep, and see each tp rank's own tokens."""
    experts = [name for name, style in plan.items() if style == _EXPERTS]
    below = tuple(f"{name}." for name in experts)
    rest = {name: style for name, style in plan.items() if not name.startswith(below)}
    return rest | dict.fromkeys(experts, "untouched")
