"""What one pipeline stage of a causal language model computes: from ids or hidden states to hidden states or the loss.

    first stage   ids -> embedding -> layers ->  ...  -> layers -> norm -> vocabulary loss   last stage

The model is the unchanged transformers one, with the layers of other stages taken out. Its head is never called: the
loss takes the head's weight, so that the logits of all tokens never exist. Without pipeline parallelism one stage is
first and last.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from parallel import ParallelMesh
from usp.hf.balance import RouterBalance
from usp.loss import vocab_loss


class CausalLMStage(nn.Module):
    """A stage of `model`, and the root module that the engine shards.

    Args:
        first, last: whether the stage takes ids, and whether it gives the loss.
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
        position_ids: Tensor,
        shift_labels: Tensor,
        global_tokens: int,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Hidden states, or on the last stage this rank's share of the loss, in fp32.

        Args:
            x: (B, S) ids on the first stage, else hidden states (B, S, H).
            chosen: with `balance`, what the stage before gave beside its hidden states.
            position_ids, shift_labels, cu_seqlens: as `shard_batch` gives them.
            global_tokens: targets of the whole step, over all ranks and micro-batches.
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
        head = cast(nn.Linear, self.model.get_output_embeddings())
        loss = vocab_loss(
            hidden,
            head.weight,
            shift_labels,
            global_tokens=global_tokens,
            chunk_tokens=self.loss_chunk,
            group=self.tp_group,
        )
        return loss if self.balance is None or chosen is None else loss + self.balance.share(chosen)
