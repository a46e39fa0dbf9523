"""The bias by which a router chooses experts, updated by their loads instead of by a gradient (aux-loss-free balancing:
Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2):

    bias += rate * sign(mean load - load)    after every optimizer step, load: how many tokens of it chose the expert

The bias only chooses; weights of experts come from the scores without it, so it has no gradient, and no part in the
optimizer. transformers has it as a buffer in float32, which checkpoints and exports hold. Loads are whole numbers, so
the bias is the same in every layout as long as the choices are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from parallel import ParallelMesh

from .expert_parallel import expert_loads, over_ranks, own_real
from .experts import expert_modules

BIAS = "e_score_correction_bias"


def biased_experts(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the experts of every layer with such a bias, and the module that has it as a buffer."""
    known = {id(experts) for experts in expert_modules(model)}
    for block in model.modules():
        experts = next((child for child in block.children() if id(child) in known), None)
        if experts is not None:
            for owner in block.modules():
                buffer = owner._buffers.get(BIAS)
                if buffer is not None and buffer.numel() == experts.num_experts:
                    yield experts, owner


def bias_problem(model: PreTrainedModel) -> str:
    """Return why the routers of a model have no bias that can be updated; "" if they have."""
    found, layers = list(biased_experts(model)), expert_modules(model)
    if layers and len(found) == len(layers):
        return ""
    return f"{len(layers) - len(found)} of its {len(layers)} routers have no buffer {BIAS} with a number per expert"


class RouterBias:
    """Counter of the tokens that choose each expert on a pipeline stage, and the update of the biases.

        bias.open(real)
        hidden = model(...)     # with gradients: passes without are not counted, nor is what a backward recomputes
        bias.close()
        bias.update()           # after the optimizer step, which may have several micro-batches; collective

    model: the stage's layers. tp_sequence_parallel: tokens are sharded over tp as well.
    """

    def __init__(
        self, model: PreTrainedModel, mesh: ParallelMesh, rate: float, *, tp_sequence_parallel: bool = False
    ) -> None:
        self.rate = rate
        self._loss_group = mesh.group("loss")
        self._tp_group = mesh.group("tp") if tp_sequence_parallel else None
        self._owners: list[nn.Module] = []
        self._counts: list[Tensor | None] = []
        self._counting = False
        self._real: Tensor | None = None
        for number, (experts, owner) in enumerate(biased_experts(model)):
            self._owners.append(owner)
            self._counts.append(None)
            experts.register_forward_pre_hook(self._counter(number), with_kwargs=True)

    def open(self, real: Tensor | None = None) -> None:
        """Start a micro-batch's forward. real: (B, S) bool, False for padding, which does not count; None: none is."""
        self._counting, self._real = torch.is_grad_enabled(), own_real(real, self._tp_group)

    def close(self) -> None:
        self._counting, self._real = False, None

    def discard(self) -> None:
        """Forget the counts of a step whose weights are not updated."""
        self._counts = [None] * len(self._owners)

    @torch.no_grad()
    def update(self) -> None:
        """Update the biases by the loads since the last update. Collective over loss (and tp)."""
        if not self._owners:
            return
        biases: Sequence[Tensor] = [owner.get_buffer(BIAS) for owner in self._owners]
        loads_LE = torch.stack(
            [
                torch.zeros(bias.numel(), dtype=torch.int64, device=bias.device) if counts is None else counts
                for bias, counts in zip(biases, self._counts, strict=True)
            ]
        )
        over_ranks(loads_LE, self._loss_group, self._tp_group)
        above_LE = loads_LE.sum(1, keepdim=True) - loads_LE * loads_LE.shape[1]  # of the mean over the load, times E
        for bias, above_E in zip(biases, above_LE, strict=True):
            bias.add_(self.rate * above_E.sign().to(bias.dtype).view_as(bias))
        self.discard()

    def _counter(self, number: int) -> Any:
        def count(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._counting:
                return
            chosen_TK = (args[1] if len(args) > 1 else kwargs["top_k_index"]).detach()
            counts_E = expert_loads(chosen_TK, self._real, int(experts.num_experts))  # type: ignore[arg-type]
            before = self._counts[number]
            self._counts[number] = counts_E if before is None else before + counts_E

        return count
