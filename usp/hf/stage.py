"""A pipeline stage of a causal language model.

    first stage   ids -> embedding -> layers ->  ...  -> layers -> norm -> usp.losses.Head   last stage

The model is an unmodified transformers model without the layers of other stages. Its output head is never called: the
loss uses its weight, so that the logits of all tokens are never materialized, and what the model's forward does to them
afterwards is measured beforehand (`logit_transform`). Without pipeline parallelism, the only stage is both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from usp.losses import UNCHANGED, Head, LastHidden, LogitTransform
from usp.parallel import ParallelMesh

from .expert_parallel import RouterBalance
from .integrate import run_layers
from .prune import backbone, decoder, model_parts
from .routers import RouterBias

_SLOPE, _FAR = 2.0**-20, 2.0**40  # exact in every dtype: where a softcap has not begun, and where it has ended
_CHECKED = (-300.0, -30.0, -2.0, 0.0, 0.5, 7.0, 100.0)


class CausalLMStage(nn.Module):
    """Stage of `model`, and the root module that the engine shards.

    first, last: whether the stage takes ids, and whether it has the output head.
    loss_chunk: number of tokens whose logits exist at a time.
    balance: collects the routers' statistics if their auxiliary loss is part of the loss.
    router_bias: counts the experts' loads if the bias of routers follows them.
    transform: from `logit_transform`, for models with one. compile: backend for the loss; empty for eager.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: ParallelMesh,
        *,
        first: bool = True,
        last: bool = True,
        loss_chunk: int,
        balance: RouterBalance | None = None,
        router_bias: RouterBias | None = None,
        transform: LogitTransform = UNCHANGED,
        compile: str = "",
    ) -> None:
        super().__init__()
        self.transform, self.backend = transform, compile
        self.model, self.first, self.last, self.loss_chunk, self.balance = model, first, last, loss_chunk, balance
        self.router_bias = router_bias
        self.tp_group = mesh.group("tp") if mesh.size("tp") > 1 else None

    def forward(
        self,
        x: Tensor,
        chosen: Tensor | None = None,
        *,
        head: Head | None,
        position_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        prefix_tree: Tensor | None = None,
        real: Tensor | None = None,
        images: Mapping[str, Any] | None = None,
        routed_experts: Tensor | None = None,
        **inputs: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return hidden states, or on the last stage the output of `head`: in training this rank's share of the loss.

        With `balance`, hidden states come with its result so far, on the last stage too if `head` is None; in training
        mode its loss is added.

        Args:
            x: (B, S) ids on the first stage, else hidden states (B, S, H).
            chosen: with `balance`, the second output of the previous stage.
            head: None to only run the layers.
            position_ids, cu_seqlens, prefix_tree: from `shard_batch`.
            real: (B, S) bool, False for padding, which does not count in `balance`; None: there is none.
            images: from `image_inputs`.
            routed_experts: (B, S, W), see `replay_choices`.
            inputs: tensors for `head`, such as `shift_labels`.
        """
        if self.balance is not None:
            self.balance.open(chosen, real)
        if self.router_bias is not None:
            self.router_bias.open(real)
        documents = {name: x for name, x in (("cu_seqlens", cu_seqlens), ("prefix_tree", prefix_tree)) if x is not None}
        of_tokens: dict[str, Any] = {"position_ids": position_ids, "cu_seqlens": None, **documents}
        if routed_experts is not None:
            of_tokens["routed_experts"] = routed_experts
        hidden = run_layers(self.model, x, first=self.first, **of_tokens | dict(images or {}))
        if self.router_bias is not None:
            self.router_bias.close()
        if self.balance is not None:
            chosen = self.balance.close()
        if not self.last or head is None:
            return hidden if chosen is None else (hidden, chosen)
        linear = cast(nn.Linear, getattr(self.model, model_parts(self.model).head))
        options = self.loss_chunk, self.tp_group, self.transform, linear.bias, self.backend
        last = LastHidden(hidden, linear.weight, *options)
        wanted = head(last, inputs | documents)
        if self.balance is None or chosen is None or not self.training:
            return wanted
        return wanted + self.balance.share(chosen)


def logit_transform(model: PreTrainedModel) -> LogitTransform:
    """Measure how a causal LM scales (Cohere, Granite) or caps (Gemma 2) its head's logits; weights are not read.

    A scale of the head's input (MiniCPM 3) is one of its logits. Calls the model's own forward around a base model and
    a head that return known values. The configuration does not tell: of two families with `logits_scaling`, Granite
    divides by it and HyperCLOVA X multiplies. Raises ValueError for any other transform, and if the head is not applied
    to the last hidden states.
    """
    name = model_parts(model).head
    head, bases = cast(nn.Linear, getattr(model, name)), {backbone(model), decoder(model)}  # either is called (OPT)
    kind = type(model).__name__
    known = torch.tensor([_SLOPE, _FAR, *_CHECKED], dtype=torch.float64)
    last = torch.linspace(-1.0, 1.0, head.in_features).view(1, 1, -1)
    model._modules[name] = _Known(known, last, scalable=head.bias is None)
    for base in bases:
        base.forward = lambda *args, **kwargs: _LastHiddenOnly(last_hidden_state=last)
    try:
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits.flatten().double()
    except RuntimeError as error:  # of layers between the base model and the head, which are on the meta device
        raise ValueError(f"{kind} changes its last hidden states before its output head: {error}") from error
    finally:
        model._modules[name] = head
        for base in bases:
            del base.forward
    scale, farthest = (logits[0] / _SLOPE).item(), logits[1].item()
    transform = LogitTransform(scale, farthest if abs(farthest) < abs(scale) * _FAR / 2 else 0.0)
    transform.apply_(expected := known.clone())
    if not torch.allclose(logits, expected, rtol=1e-6, atol=1e-9):
        raise ValueError(
            f"{kind} computes its logits from its output head by more than a scale and a softcap, which the loss does "
            f"not know: use another model, or extend usp.losses.LogitTransform"
        )
    return transform


class _LastHiddenOnly(MoeModelOutputWithPast):
    """The output of a base model of any class, of which everything else is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Known(nn.Module):
    """An output head that returns known logits of known hidden states, and where `scalable` their multiples."""

    def __init__(self, logits: Tensor, hidden: Tensor, scalable: bool) -> None:
        super().__init__()
        self.logits, self.hidden, self.scalable = logits, hidden, scalable
        self.weight = hidden  # models that read it read its dtype (Mamba)

    def forward(self, hidden: Tensor) -> Tensor:
        scale = hidden.flatten()[0].item() / self.hidden.flatten()[0].item() if self.scalable else 1.0
        if hidden.shape != self.hidden.shape or not torch.allclose(hidden, scale * self.hidden):
            raise RuntimeError("the head takes others than the base model returns")
        return scale * self.logits.view(1, 1, -1)
