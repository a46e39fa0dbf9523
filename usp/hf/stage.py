"""What one pipeline stage of a language model computes: from ids or hidden states to hidden states, or what is wanted.

    first stage   ids -> embedding -> layers ->  ...  -> layers -> norm -> usp.losses.output_heads.Head   last stage

The model is the unchanged transformers one, with the layers of other stages taken out. Its head is never called: the
loss takes its weight, so that the logits of all tokens never exist. Without pipeline parallelism one stage is
first and last.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from parallel import ParallelMesh
from usp.hf.balance import RouterBalance
from usp.losses.output_heads import Head, LastHidden

from .prune import head_name


class CausalLMStage(nn.Module):
    """A stage of `model`, and the root module that the engine shards.

    Args:
        first, last: whether the stage takes ids, and whether it has the head.
        loss_chunk: tokens whose logits exist at a time.
        balance: what counts the choices of the model's routers, where their auxiliary loss is part of the loss.
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
        """Hidden states, or on the last stage what `head` makes of them: in training this rank's share of the loss.

        Args:
            x: (B, S) ids on the first stage, else hidden states (B, S, H).
            chosen: with `balance`, what the stage before gave beside its hidden states.
            position_ids, cu_seqlens: as `shard_batch` gives them.
            inputs: what `head` takes, such as `shift_labels`.
        """
        if self.balance is not None:
            self.balance.open(chosen)
        options: dict[str, Any] = {"input_ids" if self.first else "inputs_embeds": x, "use_cache": False}
        if hasattr(self.model.config, "output_router_logits"):
            options["output_router_logits"] = False  # would keep every layer's, and `balance` counts them as they come
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
