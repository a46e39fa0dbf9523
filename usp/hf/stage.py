"""A pipeline stage of a causal language model.

    first stage   ids -> embedding -> layers ->  ...  -> layers -> norm -> usp.losses.output_heads.Head   last stage

The model is an unmodified transformers model without the layers of other stages. Its output head is never called: the
loss uses its weight, so that the logits of all tokens are never materialized. Without pipeline parallelism, the only
stage is both first and last.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from parallel import ParallelMesh
from usp.losses.output_heads import Head, LastHidden

from .balance import RouterBalance
from .prune import head_name


class CausalLMStage(nn.Module):
    """Stage of `model`, and the root module that the engine shards.

    Args:
        first: the stage takes ids.
        last: the stage has the output head.
        loss_chunk: number of tokens whose logits exist at a time.
        balance: collects the routers' statistics if their auxiliary loss is part of the loss.
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
    ) -> None:
        super().__init__()
        self.model, self.first, self.last, self.loss_chunk, self.balance = model, first, last, loss_chunk, balance
        self.tp_group = mesh.group("tp") if mesh.size("tp") > 1 else None

    def forward(
        self,
        x: Tensor,
        chosen: Tensor | None = None,
        *,
        head: Head,
        position_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        **inputs: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return hidden states, or on the last stage the output of `head`: in training this rank's share of the loss.

        Args:
            x: (B, S) ids on the first stage, else hidden states (B, S, H).
            chosen: with `balance`, the second output of the previous stage.
            position_ids, cu_seqlens: from `shard_batch`.
            inputs: tensors for `head`, such as `shift_labels`.
        """
        if self.balance is not None:
            self.balance.open(chosen)
        options: dict[str, Any] = {"input_ids" if self.first else "inputs_embeds": x, "use_cache": False}
        if hasattr(self.model.config, "output_router_logits"):
            options["output_router_logits"] = False  # would keep all layers' logits; `balance` uses hooks
        hidden = self.model.base_model(**options, position_ids=position_ids, cu_seqlens=cu_seqlens).last_hidden_state
        if self.balance is not None:
            chosen = self.balance.close()
        if not self.last:
            return hidden if chosen is None else (hidden, chosen)
        weight = cast(nn.Linear, getattr(self.model, head_name(self.model))).weight
        if cu_seqlens is not None:
            inputs["cu_seqlens"] = cu_seqlens
        wanted = head(LastHidden(hidden, weight, self.loss_chunk, self.tp_group), inputs)
        return wanted if self.balance is None or chosen is None else wanted + self.balance.share(chosen)
