"""Expert-parallel models and their auxiliary loss match transformers on a single process."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from examples.models import causal_lm_types
from tests.harness.ranks import RankPool
from tests.usp.hf.test_every_model import reason, relative, tiny_config
from tests.usp.hf.test_every_model import tiny_model as any_tiny_model
from tests.usp.tiny import (
    CONFIGS,
    FEW_STEPS,
    MAX_NORM,
    ROWS,
    STEPS,
    VOCAB,
    optimiser,
    packed_batch,
    tiny_model,
    train_alone,
)
from tests.usp.train.test_parity import largest_difference
from usp import apply_unified_sp, shard_batch
from usp.hf.expert_parallel import RouterBalance, apply_ep
from usp.hf.experts import expert_modules, expert_problems, has_balancing_loss, router_modules
from usp.hf.integrate import decoder_layers
from usp.hf.models import load_model_config, model_facts
from usp.hf.tensor_parallel import apply_tp, model_shape
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh, apply_fsdp, clip_grad_norm

COEFFICIENT = 0.02
GRIDS: list[tuple[str, ParallelDims]] = [
    ("mixtral", ParallelDims(ep=2, ulysses=2, ring=2)),
    ("mixtral", ParallelDims(ep=2, ulysses=2, dp_replicate=2)),
    ("mixtral", ParallelDims(ep=2, ulysses=2, tp=2)),
    ("qwen3_moe", ParallelDims(ep=2, ring=2, tp=2)),
]


@dataclass(frozen=True)
class Break:
    """Deliberate mistake."""

    balance: bool = False  # the mean of each rank's own auxiliary loss
    gradient: bool = False  # lose the gradient of one expert


# One step: every gradient


def few_tokens(rank: int) -> Tensor:
    return torch.randint(0, VOCAB, (1, 3), generator=torch.Generator().manual_seed(rank))


def moe_model(family: str, experts: int, device: str = "cpu") -> PreTrainedModel:
    config = CONFIGS[family]()
    config.num_experts = experts
    config.num_experts_per_tok = min(config.num_experts_per_tok, experts // 2)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def gradients_sharded(family: str, experts: int, ep: int) -> tuple[dict[str, Tensor], list[float]]:
    """Return gradients by name, and how often each expert was chosen. Each rank has a different sequence."""
    mesh = ParallelMesh.create(ParallelDims(ep=ep))
    model = moe_model(family, experts)
    apply_ep(model, mesh)
    balance = RouterBalance(model, mesh, COEFFICIENT)
    apply_fsdp(model, mesh, decoder_layers(model), experts=expert_modules(model))
    ids = few_tokens(dist.get_rank())
    balance.open()
    logits = model(input_ids=ids, use_cache=False).logits
    chosen = balance.close()
    loss = causal_lm_loss(logits, ids, ids.numel() * dist.get_world_size()) + balance.share(chosen)
    loss.backward()
    counts, total = chosen[0].detach().clone(), loss.detach().clone()
    dist.all_reduce(counts)
    dist.all_reduce(total)
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"loss": total, **grads}, counts.tolist()


def gradients_alone(family: str, experts: int, world: int) -> dict[str, Tensor]:
    model = moe_model(family, experts)
    ids = torch.cat([few_tokens(rank) for rank in range(world)])
    out = model(input_ids=ids, output_router_logits=True, use_cache=False)
    loss = causal_lm_loss(out.logits, ids, ids.numel()) + COEFFICIENT * out.aux_loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


# the last row has fewer experts than ranks that share their parameters
@pytest.mark.parametrize(
    ("family", "experts", "ep"),
    [("mixtral", 8, 1), ("mixtral", 8, 2), ("mixtral", 16, 4), ("qwen3_moe", 16, 2), ("mixtral", 2, 1)],
)
@pytest.mark.slow(but=1)
def test_loss_and_gradients_match_a_single_process(ranks: RankPool, family: str, experts: int, ep: int) -> None:
    results = ranks.run(gradients_sharded, 4, family, experts, ep)
    wanted = gradients_alone(family, experts, 4)
    assert experts < 16 or 0.0 in results[0][1], "an expert that no token chose should be among them"
    for found, _ in results:
        assert found.keys() == wanted.keys()
        errors = torch.stack([(found[n] - g).norm() / g.norm().clamp(min=1e-6) for n, g in wanted.items()])
        assert bool((errors <= 1e-5).all()), dict(zip(wanted, errors.tolist(), strict=True))


# Every kind of experts that transformers has under its interface


def experts_error(model_type: str, broken: str = "") -> float:
    """Return the largest relative error of a layer's experts over ep=2, forward and gradients; ranks route alone."""
    mesh = ParallelMesh.create(ParallelDims(ep=2))
    model = any_tiny_model(model_type)
    whole = copy.deepcopy(expert_modules(model)[0])
    whole.config._experts_implementation = "eager"
    apply_ep(model, mesh)
    own = expert_modules(model)[0]
    with torch.no_grad():
        if broken == "bias":
            own.down_proj_bias.to_local().zero_()
        elif broken == "order":
            own.down_proj.to_local().copy_(own.down_proj.to_local().roll(1, 0))
    draws = torch.Generator().manual_seed(0)
    rank, hidden = dist.get_rank(), model.config.get_text_config().hidden_size
    tokens = torch.randn(2, 7, hidden, generator=draws).requires_grad_()
    chosen = torch.rand(2, 7, whole.num_experts, generator=draws).topk(2).indices
    weights = torch.rand(2, 7, 2, generator=draws).requires_grad_()
    upstream = torch.randn(2, 7, hidden, generator=draws)
    expected = whole(tokens.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)).view_as(tokens)
    wanted = torch.autograd.grad(expected, (tokens, weights, *whole.parameters()), upstream)
    out = own(tokens[rank], chosen[rank], weights[rank])
    found = torch.autograd.grad(out, (tokens, weights, *own.parameters()), upstream[rank])
    pairs = [(out, expected[rank]), (found[0][rank], wanted[0][rank]), (found[1][rank], wanted[1][rank])]
    pairs += [(part.to_local(), all_.chunk(2)[rank]) for part, all_ in zip(found[2:], wanted[2:], strict=True)]
    return max(((a - b).norm() / b.norm().clamp(min=1e-6)).item() for a, b in pairs)


def experts_errors(model_types: list[str]) -> dict[str, float]:
    return {model_type: experts_error(model_type) for model_type in model_types}


def types_with_experts() -> list[str]:
    found = []
    for model_type in causal_lm_types():
        with suppress(Exception):  # of a type without a tiny copy
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(tiny_config(model_type))
            if expert_modules(model) and not expert_problems(model, model_facts("", model.config).num_experts):
                found.append(model_type)
    return found


# transposed and interleaved with biases and a clamped gate; without a gate; another clamped gate
KINDS = ["gpt_oss", "nemotron_h", "deepseek_v4"]


@pytest.mark.slow
def test_experts_of_every_kind_are_exact(ranks: RankPool, request: pytest.FixtureRequest) -> None:
    kinds = types_with_experts() if request.config.getoption("--exhaustive") else KINDS
    assert set(kinds) >= set(KINDS)
    for found in ranks.run(experts_errors, 2, kinds):
        assert {kind: error for kind, error in found.items() if not error <= 2e-6} == {}


@pytest.mark.parametrize("broken", ["bias", "order"])
def test_broken_experts_are_detected(ranks: RankPool, broken: str) -> None:
    assert min(ranks.run(experts_error, 2, "gpt_oss", broken)) > 1e-2


# Several steps


def train_sharded(family: str, dims: ParallelDims, steps: int, broken: Break) -> list[tuple[float, float]]:
    mesh = ParallelMesh.create(dims)
    model = apply_unified_sp(tiny_model(family), mesh)
    apply_ep(model, mesh)
    if dims.tp > 1:
        apply_tp(model, mesh, sequence_parallel=True)
        head = model.lm_head  # never called where the vocabulary is divided; here it makes whole logits
        head.forward = lambda hidden: torch.nn.functional.linear(hidden, head.weight.full_tensor())
    balance = RouterBalance(model, mesh, COEFFICIENT, tp_sequence_parallel=dims.tp > 1)
    if broken.balance:
        balance.loss_group = dist.new_subgroups(1)[0]
        balance.coefficient /= mesh.size("loss")
    apply_fsdp(model, mesh, decoder_layers(model), experts=expert_modules(model))
    optimizer, history = optimiser(model), []
    share = ROWS // mesh.size("batch")
    rows = slice(mesh.rank("batch") * share, (mesh.rank("batch") + 1) * share)
    for step in range(steps):
        local = shard_batch({key: value[rows] for key, value in packed_batch(step).items()}, mesh)
        targets = local.pop("shift_labels")
        balance.open()
        logits = model(**local).logits
        chosen = balance.close()
        loss = causal_lm_loss(logits, targets, global_token_count(targets, mesh)) + balance.share(chosen)
        optimizer.zero_grad()
        loss.backward()
        if broken.gradient and mesh.expert_mesh("ep").get_local_rank() == 0:
            expert_modules(model)[0].down_proj.grad.to_local()[0].zero_()
        norm = clip_grad_norm(model.parameters(), MAX_NORM, mesh)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.group("loss"))
        history.append((total.item(), norm))
    return history


@pytest.fixture(scope="module")
def alone(ranks: RankPool, exhaustive: bool) -> dict[str, list[tuple[float, float]]]:
    steps, families = (STEPS, ("mixtral", "qwen3_moe")) if exhaustive else (FEW_STEPS, ("mixtral",))
    return {family: ranks.run(train_alone, 1, family, steps, COEFFICIENT)[0] for family in families}


@pytest.mark.exhaustive  # more: test_matrix.py
@pytest.mark.parametrize(("family", "dims"), GRIDS, ids=lambda value: str(value).replace(" ", "-"))
def test_ten_steps_match_a_single_process(ranks: RankPool, alone: dict, family: str, dims: ParallelDims) -> None:
    found = ranks.run(train_sharded, 4, family, dims, STEPS, Break())
    assert largest_difference(found, alone[family]) <= 1e-5


@pytest.mark.parametrize("broken", [Break(balance=True), Break(gradient=True)], ids=str)
@pytest.mark.slow(but=1)
def test_broken_steps_are_detected(ranks: RankPool, alone: dict, broken: Break) -> None:
    found = ranks.run(train_sharded, 4, *GRIDS[0], FEW_STEPS, broken)
    assert largest_difference(found, alone["mixtral"]) > 1e-4


# The auxiliary loss


def checkpointed(implementation: CheckpointImpl) -> dict[str, Tensor]:
    mesh = ParallelMesh.create(ParallelDims())
    model = tiny_model("mixtral")
    layers = model.base_model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, checkpoint_impl=implementation)
    balance = RouterBalance(model, mesh, 1.0)
    ids = packed_batch(0)["input_ids"]
    balance.open()
    model(input_ids=ids, use_cache=False)
    share = balance.share(balance.close())
    share.backward()
    grads = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return {"loss": share.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def test_recomputed_layers_are_counted_once(ranks: RankPool) -> None:
    found = ranks.run(checkpointed, 1, CheckpointImpl.NO_REENTRANT)[0]
    model = tiny_model("mixtral")
    loss = model(input_ids=packed_batch(0)["input_ids"], output_router_logits=True, use_cache=False).aux_loss
    loss.backward()
    wanted = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7, msg=name)


def reentrant() -> str:
    with pytest.raises(RuntimeError) as caught:
        checkpointed(CheckpointImpl.REENTRANT)
    return str(caught.value)


def test_routers_without_autograd_raise(ranks: RankPool) -> None:
    assert "some ran without autograd: the auxiliary loss would miss them" in ranks.run(reentrant, 1)[0]


def shares_of_two_stages() -> list[tuple[Tensor, Tensor]]:
    """Return each micro-batch's share and gradient to the first of two stages; tokens are sharded over tp."""
    mesh = ParallelMesh.create(ParallelDims(tp=2))
    model = tiny_model("mixtral")
    stages = [RouterBalance(model, mesh, 1.5, tp_sequence_parallel=True) for _ in range(2)]
    results = []
    for logits in logits_of_layers():
        balance = None
        for stage, layer in zip(stages, logits, strict=True):
            stage.open(balance)
            own = layer.chunk(2)[mesh.rank("tp")]
            for router in router_modules(model):  # what they would give for this rank's half of the tokens
                stage._record(router, (), (own, own, own.topk(2)[1]))
            balance = stage.close()
            if stage is stages[0]:
                balance = first = balance.detach().requires_grad_()
        share = stages[1].share(balance)
        share.backward()
        results.append((share.detach(), first.grad))
    return results


def logits_of_layers() -> Tensor:
    """(micro-batches, stages, tokens, experts)"""
    return torch.randn(2, 2, 10, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.slow
def test_loss_is_shared_over_stages_and_tp_ranks(ranks: RankPool) -> None:
    results = ranks.run(shares_of_two_stages, 2)
    for number, (first, second) in enumerate(logits_of_layers()):
        layers = (first, first, second, second)  # the tiny model has two layers, and each stage ran both
        wanted = 3.0 / 2 * load_balancing_loss_func(layers, 8, 2)
        for rank in range(2):
            share, gradient = results[rank][number]
            torch.testing.assert_close(share, wanted.detach())  # replicated over tp, as the loss is
            counts = sum(torch.bincount(layer.topk(2)[1].flatten(), minlength=8) for layer in layers)
            torch.testing.assert_close(gradient, torch.stack((torch.zeros(8), 1.5 * 8 * counts / 40 / 40)))


@pytest.mark.parametrize(
    ("asked", "logits", "used"), [(-1, True, 0.02), (-1, False, 0.02), (0.5, False, 0.5), (0, True, 0.0)]
)
def test_coefficient_defaults_to_that_of_the_configuration(asked: float, logits: bool, used: float) -> None:
    config = load_model_config("mixtral-tiny")
    config.output_router_logits = logits
    assert model_facts("", config).balance(asked) == used
    assert model_facts("", load_model_config("tiny")).balance(-1) == 0.0


def balance_errors(model_types: list[str]) -> dict[str, tuple[float, float]]:
    """Return the relative errors of loss and gradients of the auxiliary loss against the model's own, by type."""
    mesh, errors = ParallelMesh.create(ParallelDims()), {}
    ids = torch.arange(2 * 24).view(2, 24) * 7 % 90 + 3
    for model_type in model_types:
        model = any_tiny_model(model_type)
        wanted = model(input_ids=ids, output_router_logits=True, use_cache=False).aux_loss
        routers = [p for router in router_modules(model) for p in router.parameters() if p.requires_grad]
        expected = torch.autograd.grad(wanted, routers)
        balance = RouterBalance(model, mesh, 1.0)
        balance.open()
        model(input_ids=ids, use_cache=False)
        share = balance.share(balance.close())
        found = torch.autograd.grad(share, routers)
        gradients = max(relative(a, b) for a, b in zip(found, expected, strict=True))
        errors[model_type] = (relative(share, wanted), gradients)
    return errors


@pytest.mark.slow
def test_auxiliary_loss_is_that_of_each_family(ranks: RankPool, request: pytest.FixtureRequest) -> None:
    chosen = ["gpt_oss", "minimax_m2"]  # softmax of chosen logits; sigmoid scores with a bias
    if request.config.getoption("--exhaustive"):
        chosen = [name for name in types_with_experts() if has_balancing_loss(tiny_config(name)) and not reason(name)]
        assert len(chosen) > 12
    (found,) = ranks.run(balance_errors, 1, chosen)
    assert {name: errors for name, errors in found.items() if not max(errors) <= 1e-5} == {}


# What apply_ep does to a model, and what it refuses


def spread_on_meta() -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    mesh = ParallelMesh.create(ParallelDims(ep=2))
    model = moe_model("qwen3_moe", 8, device="meta")
    names = [name for name, _ in model.named_parameters()]
    apply_ep(model, mesh)
    assert [name for name, _ in model.named_parameters()] == names
    spread = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert all(p.placements == (Shard(0),) and p.to_local().is_meta for p in spread.values())
    return [(name, tuple(p.shape), tuple(p.to_local().shape)) for name, p in spread.items()]


def test_experts_are_sharded_on_the_meta_device(ranks: RankPool) -> None:
    prefix = "model.layers.1.mlp.experts"
    for found in ranks.run(spread_on_meta, 2):
        assert found == [
            (f"{prefix}.gate_up_proj", (8, 48, 32), (4, 48, 32)),
            (f"{prefix}.down_proj", (8, 32, 24), (4, 32, 24)),
        ]


def refusals() -> list[str]:
    mesh = ParallelMesh.create(ParallelDims(ep=2))
    with pytest.raises(ValueError) as dense:
        apply_ep(tiny_model("llama"), mesh)
    model = apply_unified_sp(tiny_model("mixtral"), mesh)
    local = shard_batch(packed_batch(0), mesh)
    local.pop("shift_labels")
    with pytest.raises(ValueError) as logits:
        model(**local, output_router_logits=True)
    return [str(dense.value), str(logits.value)]


@pytest.mark.slow
def test_dense_models_and_router_logits_raise(ranks: RankPool) -> None:
    for dense, logits in ranks.run(refusals, 2):
        assert "ep=2 shards experts, and llama has none: use ep=1" in dense
        assert "output_router_logits=True computes the auxiliary loss over this rank's tokens only" in logits


def test_matmul_parameters_count_only_chosen_experts() -> None:
    model = moe_model("mixtral", 8, device="meta")
    one_expert = 2 * 3 * 64 * 32  # layers, gate, up and down, in and out
    everything = sum(p.numel() for p in model.parameters()) - VOCAB * 32
    shape = model_shape(model_facts("mixtral", model.config), model.config)
    assert shape.matmul_parameters == everything - 6 * one_expert
