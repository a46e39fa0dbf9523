"""What is done to the routers of experts: their bias follows loads, and their choices are replayed.

The bias by which a router chooses experts is updated by their loads instead of by a gradient (aux-loss-free balancing:
Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2):

    bias += rate * sign(mean load - load)    after every optimizer step, load: how many tokens of it chose the expert

The bias only chooses; weights of experts come from the scores without it, so it has no gradient, and no part in the
optimizer. transformers has it as a buffer in float32, which checkpoints and exports hold. Loads are whole numbers, so
the bias is the same in every layout as long as the choices are.

Experts that tokens chose in a rollout are recorded there and forced on the routers in training (rollout routing replay:
Ma et al., arXiv 2510.11370).

    recorder = ChoiceRecorder(model); model(...); recorder.take(T)     # (T, W) int16 of a forward
    replay_choices(model); ...; model(..., routed_experts=x_BSW)       # again where layers are recomputed

W = layers x K numbers a token, by layer, with 1 added to the number of each of its K experts; 0: the router chooses.
Weights of the experts are those that the router of this pass gives to them, with its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from usp.parallel import ParallelMesh

from .expert_parallel import expert_loads, over_ranks, own_real
from .experts import expert_modules
from .models import empty_model, model_facts
from .prune import OtherStagesLayer, backbone, decoder, model_parts
from .shrink import VOCAB, shrink

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
            _on_choice(experts, partial(self._count, number, int(cast(Any, experts).num_experts)))

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

    def _count(self, number: int, num_experts: int, chosen_TK: Tensor) -> None:
        if self._counting:
            counts_E, before = expert_loads(chosen_TK, self._real, num_experts), self._counts[number]
            self._counts[number] = counts_E if before is None else before + counts_E


def _on_choice(experts: nn.Module, told: Callable[[Tensor], None]) -> None:
    """Call `told` with the experts that tokens choose, (T, K), before each forward of a layer's experts."""

    def tell(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        told((args[1] if len(args) > 1 else kwargs["top_k_index"]).detach())

    experts.register_forward_pre_hook(tell, with_kwargs=True)


def routed_width(config: PretrainedConfig) -> int:
    """Return how many numbers say the experts of a token."""
    return config.num_hidden_layers * model_facts("", config).experts_per_token


class ChoiceRecorder:
    """Recorder of the experts that each token chooses in the layers of a model, or of a pipeline stage of it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.width, self._device = routed_width(model.config), next(model.parameters()).device
        self._chosen: dict[int, Tensor] = {}
        for number, layer in _numbered_layers(model):
            for experts in expert_modules(layer):
                _on_choice(experts, partial(self._chosen.__setitem__, number))

    def take(self, tokens: int) -> Tensor:
        """Return the choices of the last forward, (T, W); 0 for layers of other stages, and without experts."""
        whole = torch.zeros(tokens, self.width, dtype=torch.int16, device=self._device)
        for number, of_layer in self._chosen.items():
            whole[:, number * of_layer.shape[1] : (number + 1) * of_layer.shape[1]] = of_layer + 1
        self._chosen.clear()
        return whole


def replay_choices(
    model: PreTrainedModel, mesh: ParallelMesh | None = None, tp_sequence_parallel: bool = False
) -> None:
    """Make the layers of a model take `routed_experts`, (B, S, W) of this rank's tokens, and choose these, in place.

    Call it before activation checkpointing. tp_sequence_parallel: the layers' tokens are sharded over the tp axis of
    `mesh` as well.
    """
    top_k = model_facts("", model.config).experts_per_token
    group = mesh.group("tp") if mesh and tp_sequence_parallel else None
    for number, layer in _numbered_layers(model):
        told, experts = _Told(), expert_modules(layer)
        for block in layer.modules():
            if any(child in block.children() for child in experts):
                block.forward = _choosing(block.forward, told, int(cast(Any, experts[0]).num_experts))
        layer.forward = _telling(layer.forward, told, slice(number * top_k, (number + 1) * top_k), group)


def replay_problem(config: PretrainedConfig) -> str:
    """Return why the choices of experts cannot be forced on a causal LM of `config`; "" if they can. It is tried with a
    tiny copy."""
    if not model_facts("", config).num_experts:
        return f"model_type={config.model_type!r} has no experts"
    tiny = cast(Any, type(empty_model(config, causal=True)))._from_config(shrink(config, layers=4)).eval()
    if not expert_modules(tiny):
        return f"the experts of model_type={config.model_type!r} do not go through transformers' ExpertsInterface"
    ids, recorder = torch.arange(8).unsqueeze(0) % VOCAB, ChoiceRecorder(tiny)
    replay_choices(tiny)
    with torch.no_grad():
        backbone(tiny)(input_ids=ids, use_cache=False)
        asked = recorder.take(ids.numel())
        experts = max(int(cast(Any, each).num_experts) for each in expert_modules(tiny))
        asked = ((asked.long() - 1 + experts // 2) % experts + 1).where(asked > 0, 0).to(torch.int16)
        asked[0] = 0
        backbone(tiny)(input_ids=ids, use_cache=False, routed_experts=asked.unsqueeze(0))
    found = recorder.take(ids.numel())
    if torch.equal(found[1:].sort(1).values, asked[1:].sort(1).values) and (found[0] > 0).any():
        return ""
    return f"the routers of model_type={config.model_type!r} do not choose among all experts by torch.topk"


def _numbered_layers(model: PreTrainedModel) -> Iterator[tuple[int, nn.Module]]:
    for number, layer in enumerate(getattr(decoder(model), model_parts(model).layers)):
        if not isinstance(layer, OtherStagesLayer):
            yield number, layer


class _Told:
    """The choices of the tokens that a layer computes, (T, K), with 1 added; None: the router chooses."""

    choices: Tensor | None = None


def _telling(forward: Callable[..., Any], told: _Told, own: slice, group: Any) -> Callable[..., Any]:
    def run(*args: Any, routed_experts: Tensor | None = None, **kwargs: Any) -> Any:
        if routed_experts is not None:
            if group is not None:
                routed_experts = routed_experts.chunk(group.size(), dim=1)[group.rank()]
            routed_experts = routed_experts[..., own].flatten(0, 1)  # pyright: ignore[reportOptionalSubscript]
        told.choices = routed_experts
        return forward(*args, **kwargs)

    return run


def _choosing(forward: Callable[..., Any], told: _Told, num_experts: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if told.choices is None:
            return forward(*args, **kwargs)
        with _ForcedChoice(told.choices.long(), num_experts):
            return forward(*args, **kwargs)

    return run


class _ForcedChoice(TorchFunctionMode):
    """Let torch.topk of numbers of all experts choose these (T, K), with 1 added; 0: what it chooses itself."""

    def __init__(self, choices_TK: Tensor, num_experts: int) -> None:
        super().__init__()
        self._choices_TK, self._num_experts = choices_TK, num_experts

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk) or result.indices.numel() != self._choices_TK.numel():
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self._num_experts:
            return result
        asked = self._choices_TK.view_as(result.indices)
        chosen = (asked - 1).where(asked > 0, result.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
