"""Expert parallelism for unmodified transformers models.

Registers an experts implementation with transformers' `ExpertsInterface`, which the model's configuration selects by
name. An experts module keeps its parameters, whose dim 0 counts experts: with ep > 1 they become DTensors sharded over
ep in that dim. Its attributes say how they are laid out:

    gate_up_proj (E, 2I, H), or without a gate up_proj (E, I, H); down_proj (E, H, I); transposed: the last two dims
    gate_up_proj_bias (E, 2I), or up_proj_bias (E, I); down_proj_bias (E, H)

T tokens of this rank, K experts per token, H hidden size, I an expert's intermediate size, E experts.

The auxiliary load-balancing loss is that of Switch Transformers (arXiv 2101.03961, section 2.2), as in transformers'
`load_balancing_loss_func`: over all layers and tokens, with R = layers x tokens, counts c_e (how often the highest
logits of a token include that of expert e) and probability sums p_e (of the routers' softmax),

    loss = E * sum_e (c_e / R) * (p_e / R)

A product of two sums is not a mean of the ranks' losses, nor of the micro-batches'. But only p carries a gradient, and
p is a sum: with c and R of the whole step, the share of a rank's micro-batch is E * sum_e (c_e / R) * (p_e of its
tokens / R). The shares sum to the loss and their gradients to its gradient, so no collective needs a backward.

c of the step must be known before its first backward, so several micro-batches take a forward pass that only counts
(`usp.train.passes`). Balancing each micro-batch on its own is cheaper and constrains the experts more:
with few tokens it keeps them from specializing (arXiv 2501.11873).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from usp.attention.comm import gather_rows
from usp.model.facts import ep_chunks, ep_violations
from usp.parallel import ParallelMesh, all_of, local_tensor
from usp.parallel.expert import ExpertRows, grouped_linear, mix_experts, sorted_by_expert

from .experts import expert_modules, logits_index, router_modules
from .models import model_facts

NAME = "expert_parallel"


def apply_ep(model: PreTrainedModel, mesh: ParallelMesh, tp_sequence_parallel: bool = True, chunks: int = 0) -> None:
    """Shard the experts of a transformers causal LM over the ep axis, in place; leaves a dense model unchanged.

    Call it before FSDP; supports the meta device. Ranks that have the same tokens, as tp ranks without Megatron's
    sequence parallelism, route a part of them each and gather the results, which supports no gradients. The experts'
    gradients cover the tokens of the rank's ep group and must be summed over efsdp and dp_replicate, as FSDP over
    `expert_modules` does. chunks: as of `ep_chunks`. Raises ValueError, naming all `ep_violations`.
    """
    experts_mesh, facts = mesh.expert_mesh("ep"), model_facts(model.config.model_type, model.config)
    violations = ep_violations(facts, experts_mesh.size(), chunks)
    if violations:
        raise ValueError(all_of(violations))
    modules = expert_modules(model)
    ExpertsInterface.register(NAME, _experts_forward)
    for module in modules:
        module.ep_group = experts_mesh.get_group()  # type: ignore[assignment]
        module.ep_chunks = ep_chunks(facts, experts_mesh.size(), chunks)  # type: ignore[assignment]
        module.ep_replicas = () if tp_sequence_parallel else (mesh.group("tp"),)  # type: ignore[assignment]
        if experts_mesh.size() == 1:
            continue
        for name, whole in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(whole.detach(), experts_mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(shard, requires_grad=whole.requires_grad))
    if modules:
        model.set_experts_implementation(NAME)


@contextmanager
def same_tokens(experts: Sequence[Any], groups: tuple[dist.ProcessGroup, ...]) -> Iterator[None]:
    """Run forwards of experts in one chunk, in which the ranks of `groups`, outermost first, have the same tokens."""
    usual = [(module.ep_replicas, module.ep_chunks) for module in experts]
    for module in experts:
        module.ep_replicas, module.ep_chunks = groups, 1
    try:
        yield
    finally:
        for module, before in zip(experts, usual, strict=True):
            module.ep_replicas, module.ep_chunks = before


def serve_experts(experts: Sequence[Any]) -> None:
    """Take part in a forward of the other ranks of the ep groups under `same_tokens`, without tokens."""
    with same_tokens(experts, ()):
        for module in experts:
            weight = local_tensor(module.down_proj)
            hidden_size = weight.shape[2 if module.is_transposed else 1]
            tokens = torch.empty(0, hidden_size, dtype=weight.dtype, device=weight.device)
            _experts_forward(module, tokens, torch.empty(0, 1, dtype=torch.int64, device=weight.device), tokens[:, :1])


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of a layer on (T, H), (T, K), (T, K); registered with `ExpertsInterface`."""

    @cache
    def of_chunks(name: str) -> tuple[Tensor, ...]:
        whole, chunks = local_tensor(getattr(module, name)), module.ep_chunks
        return whole.chunk(chunks) if chunks > 1 else (whole,)  # the gradient of one chunk would be copied

    def linear(name: str, rows_GX: Tensor, rows: ExpertRows, chunk: int) -> Tensor:
        weight = of_chunks(name)[chunk]
        bias = of_chunks(f"{name}_bias")[chunk] if module.has_bias else None
        weight = weight.transpose(1, 2) if module.is_transposed else weight
        return grouped_linear(rows_GX, weight, rows, bias, getattr(module, "grouped_product", None))

    def experts(rows_GH: Tensor, rows: ExpertRows, chunk: int) -> Tensor:
        if module.has_gate:
            inner_GI = module._apply_gate(linear("gate_up_proj", rows_GH, rows, chunk))
        else:
            inner_GI = module.act_fn(linear("up_proj", rows_GH, rows, chunk))
        return linear("down_proj", inner_GI, rows, chunk)

    def mix(hidden_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        options = {"num_experts": module.num_experts, "group": module.ep_group, "chunks": module.ep_chunks}
        return mix_experts(hidden_TH, index_TK, weights_TK, experts=experts, **options)

    replicas = [group for group in module.ep_replicas if group.size() > 1]
    if module.ep_group.size() == 1 or not replicas:
        return mix(hidden_states, top_k_index, top_k_weights)
    return _divided(mix, replicas, hidden_states, top_k_index, top_k_weights)


def _divided(mix: Callable[..., Tensor], groups: Sequence[dist.ProcessGroup], *tokens: Tensor) -> Tensor:
    """Return `mix` of tokens that the ranks of `groups`, outermost first, all have: each mixes a part of them."""
    part, parts, total = 0, 1, len(tokens[0])
    for group in groups:
        part, parts = part * group.size() + dist.get_rank(group), parts * group.size()
    size = -(-total // parts)
    own = slice(min(part * size, total), min((part + 1) * size, total))
    mixed = mix(*(x[own] for x in tokens))
    mixed = torch.cat((mixed, mixed.new_zeros(size - len(mixed), mixed.shape[1])))
    for group in reversed(groups):
        mixed = gather_rows(mixed, group)
    return mixed[:total]


def own_real(real: Tensor | None, tp_group: dist.ProcessGroup | None) -> Tensor | None:
    """Return which of the tokens that a router sees count, (T,), by those of the rank (B, S), which a `tp_group` shards
    further; None: all."""
    if real is not None and tp_group is not None:
        real = real.chunk(tp_group.size(), dim=1)[tp_group.rank()]
    return None if real is None else real.flatten()


def expert_loads(chosen_TK: Tensor, real_T: Tensor | None, num_experts: int) -> Tensor:
    """Return how many of the tokens that count, all if `real_T` is None, chose each expert."""
    if real_T is not None:
        chosen_TK = chosen_TK.where(real_T.unsqueeze(1), num_experts)
    return sorted_by_expert(chosen_TK.flatten(), num_experts)[1]


def over_ranks(counts: Tensor, *groups: dist.ProcessGroup | None) -> Tensor:
    """Sum in place over these groups in turn. Collective."""
    for group in filter(None, groups):
        dist.all_reduce(counts, group=group)
    return counts


class RouterBalance:
    """Collector of the routers' statistics on a pipeline stage; computes the auxiliary loss on the last stage.

        router.open(balance of the previous stage, or None)
        hidden = model(...)
        balance = router.close()                    # sent to the next stage with the hidden states
        loss = loss + router.share(balance)         # on the last stage

    model: the stage's layers, of a model for which transformers defines such a loss; may have no router.
    coefficient: weight of the auxiliary loss: of the step, or with `by_micro_batch` of each micro-batch.
    tp_sequence_parallel: tokens are sharded over tp as well. Shares stay replicated over tp.
    by_micro_batch: each micro-batch has its own auxiliary loss, with its own counts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: ParallelMesh,
        coefficient: float,
        *,
        tp_sequence_parallel: bool = False,
        by_micro_batch: bool = False,
    ) -> None:
        self.by_micro_batch = by_micro_batch
        facts = model_facts(model.config.model_type, model.config)
        self.num_experts, self.top_k = facts.num_experts, facts.experts_per_token
        self.coefficient, self.device = coefficient, mesh.device_type
        self.loss_group = mesh.group("loss")
        self.tp_group = mesh.group("tp") if tp_sequence_parallel else None
        self._step_counts: Tensor | None = None
        self._routers, self._logits_index = router_modules(model), logits_index(model)
        self._incoming: Tensor | None = None
        self._seen: list[tuple[nn.Module, Tensor]] | None = None
        self._real: Tensor | None = None
        for router in self._routers:
            router.register_forward_hook(self._record)

    def open(self, incoming: Tensor | None = None, real: Tensor | None = None) -> None:
        """Start a micro-batch's forward.

        incoming: the result of `close` on the previous stage.
        real: (B, S) bool, False for those of this rank's tokens that are padding and do not count; None: none is.
        """
        self._incoming, self._seen, self._real = incoming, [], own_real(real, self.tp_group)

    def close(self) -> Tensor:
        """End the forward; return (2, E) float32, counts and probability sums over the layers so far."""
        assert self._seen is not None, "close() without open()"
        seen, self._seen, self._real = self._seen, None, None
        silent = len({id(router) for router in self._routers} - {id(router) for router, _ in seen})
        cut_off = any(
            not rows.requires_grad and any(parameter.requires_grad for parameter in router.parameters())
            for router, rows in seen
        )
        if silent or (cut_off and torch.is_grad_enabled()):
            raise RuntimeError(
                f"of {len(self._routers)} routers {silent} did not run in this forward"
                f"{', and some ran without autograd' if cut_off else ''}: the auxiliary loss would miss them"
            )
        total = self._incoming
        if total is None:  # a leaf that requires grad: the pipeline returns a gradient for each of its inputs
            total = torch.zeros(2, self.num_experts, device=self.device, requires_grad=True)
        self._incoming = None
        return total + (torch.stack([rows for _, rows in seen]).sum(dim=0) if seen else 0.0)

    def set_step(self, balances: Sequence[Tensor]) -> None:
        """Set the step's counts to those of these results of `close`, on the last stage. Collective over loss (and tp).
        Of none: the step is one micro-batch, whose `share` counts."""
        counts = torch.stack([b[0] for b in balances]).sum(0) if balances else None
        self._step_counts = None if counts is None else over_ranks(counts, self.loss_group, self.tp_group)

    def share(self, balance: Tensor) -> Tensor:
        """Return this rank's share of the weighted auxiliary loss, float32, 0-dim. Collective over loss (and tp)."""
        counts, probabilities = self._step_counts, balance[1]
        if counts is None:
            counts = over_ranks(balance[0].detach().clone(), self.loss_group, self.tp_group)
        rows = counts.double().sum() / self.top_k
        share = self.coefficient * self.num_experts * torch.sum((counts / rows) * (probabilities / rows))
        if self.tp_group is None:
            return share
        # The value covers all tp ranks, the gradient only this rank's tokens: it is summed over tp later.
        total = share.detach().clone()
        dist.all_reduce(total, group=self.tp_group)
        return share + (total - share.detach())

    def _record(self, router: nn.Module, args: Any, output: Tensor | tuple[Tensor, ...]) -> None:
        # Recomputation in the backward must save the same tensors as the forward, but is not counted again.
        if self._seen is None and not torch.is_grad_enabled():
            return  # a forward outside of `open` and `close`
        logits = output if isinstance(output, Tensor) else output[self._logits_index]
        probabilities = torch.softmax(local_tensor(logits), dim=-1, dtype=torch.float32)
        # As transformers does: a router that chooses by other scores is balanced by these all the same.
        chosen = probabilities.topk(self.top_k, dim=-1).indices
        sums = probabilities.sum(dim=0) if self._real is None else _SumOfReal.apply(probabilities, self._real)
        counts = expert_loads(chosen, self._real, self.num_experts).to(torch.float32)
        if self._seen is not None:
            self._seen.append((router, torch.stack((counts, sums))))


class _SumOfReal(torch.autograd.Function):
    """Sum (T, E) over the tokens that `real` (T,) names. It keeps `real` aside from saved tensors, which a checkpointed
    layer computes again after other micro-batches began."""

    @staticmethod
    def forward(ctx, x_TE: Tensor, real_T: Tensor) -> Tensor:
        ctx.real = real_T
        return x_TE.where(real_T.unsqueeze(1), 0).sum(dim=0)

    @staticmethod
    def backward(ctx, grad_E: Tensor):
        return ctx.real.unsqueeze(1) * grad_E, None
