"""What a profile names: parts of calls, models without their depth, and layouts without their place."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from hashlib import sha256

import torch

from usp.model.facts import ModelShape
from usp.rlhf.graph.calls import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.plan.plan import CallLayout

PREFILL, DECODE, UPDATE = "prefill", "decode", "update of "
_PLACE = ("ranks", "dims", "zero", "micro_batch_tokens")


@dataclass(frozen=True, order=True)
class Part:
    """What is timed: a part of calls, by a model, in a layout.

    Attributes:
        model: `model_key`.
        work: PREFILL: a forward over prompts, to the first token. DECODE: one step. "logprobs", "values": a forward.
            "train logprobs", "train values": an optimizer step on one mini-batch of as few micro-batches as the layout
            allows. UPDATE and one of these: what of it does not repeat with further micro-batches.
        layout: `layout_key`.
    """

    model: str
    work: str
    layout: str


def work_of(call: ModelCall) -> str:
    """Return the `Part.work` of a call with a model; of generation that of a decode step."""
    if isinstance(call.work, Generate):
        return DECODE
    if isinstance(call.work, Inference):
        return "logprobs" if call.work.head == "logprobs" else "values"
    assert isinstance(call.work, TrainStep)
    return f"train {call.work.objective.head}"


def model_key(model: ModelShape, dtype: torch.dtype) -> str:
    """Return what tells models whose layers take different times apart; equal for models that differ in depth alone.

    Raises:
        ValueError: for layers of several kinds.
    """
    if len(set(model.alike)) > 1:
        raise ValueError(
            f"model={model.facts.name} has layers of several kinds, and a profile scales one with the depth"
        )
    facts = replace(model.facts, name="", windows=model.facts.windows[:1])
    parts = (facts, model.embedding, model.layers[0], model.norm, model.head, model.experts_per_token, str(dtype))
    head = "scalar" if model.head and model.head[0].shape[0] == 1 else f"vocabulary {facts.vocab_size}"
    return f"hidden {model.hidden_size}, {head}, {sha256(repr(parts).encode()).hexdigest()[:8]}"


def layout_key(layout: CallLayout) -> str:
    """Return the degrees and options of a layout; equal for layouts that run alike on different ranks of one host.

    Replicas without ZeRO are data-parallel ranks like all others, and micro-batches are counted by the estimates.
    """
    dims, default = layout.dims, CallLayout((0,), layout.dims)
    sharded = layout.zero > 0 and dims.dp_shard * dims.sp > 1
    degrees = {"dp": dims.batch, **({"replicas": dims.dp_replicate} if sharded else {})}
    degrees |= {axis: getattr(dims, axis) for axis in ("pp", "ring", "ulysses", "tp", "ep")}
    words = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    words += [f"zero={layout.zero}"] if sharded else []
    words += [dims.sp_order] if dims.ring > 1 and dims.ulysses > 1 and dims.sp_order != "ring-outer" else []
    options = (field.name for field in fields(layout) if field.name not in _PLACE)
    words += [f"{name}={getattr(layout, name)}" for name in options if getattr(layout, name) != getattr(default, name)]
    return " ".join(words) or "one rank"
