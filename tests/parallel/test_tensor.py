"""Tensor-parallel models match the results of one process, and invalid plans are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.harness.ranks import RankPool
from usp.parallel.tensor import apply_tensor_parallel, gather_output

VOCAB, WIDTH, PADDING = 12, 6, 9
PLAN = {
    "embed": "embedding_rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.scale": "replicated_with_grad_allreduce",
    "blocks.*.mlp.down": "rowwise",
    "blocks.*.mlp.absent": "rowwise",
    "head": "colwise_parameter",
}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ValueError("not finite")
        return x * self.weight


class Mlp(nn.Module):
    """Calls its linears for a few tokens at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(WIDTH, 12), Scale(), nn.Linear(12, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, str]:
        return torch.cat([self.down(self.scale(self.up(tile)).tanh()) for tile in hidden.split(4, 1)], 1), "else"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Scale(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        out, rest = self.mlp(hidden=self.norm(x))
        assert rest == "else"
        return x + out


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=PADDING)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = Scale()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        weight = self.head.weight
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return (self.norm(hidden) @ weight.T).logsumexp(-1).square().sum()


def parallelized(ranks: int, token_dim: int | None) -> Toy:
    mesh, model = init_device_mesh("cpu", (ranks,)), Toy()
    apply_tensor_parallel(model, mesh, PLAN, token_dim=token_dim)
    if token_dim is not None:
        gather_output(model.norm, mesh, token_dim)
    return model


def largest_error(ranks: int, token_dim: int | None) -> float:
    """Return the largest relative error of the loss and of every gradient."""
    ids = torch.arange(24).view(2, 12) % VOCAB
    model, reference = parallelized(ranks, token_dim), Toy()
    losses = [m(ids) for m in (model, reference)]
    for loss in losses:
        loss.backward()
    found = [losses[0].detach(), *(p.grad.full_tensor() for p in model.parameters())]
    wanted = [losses[1].detach(), *(p.grad for p in reference.parameters())]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in reference.named_parameters()]
    errors = [(f - w).norm() / w.norm() for f, w in zip(found, wanted, strict=True)]
    return torch.stack(errors).max().item()


@pytest.mark.parametrize(("size", "token_dim"), [(2, None), (3, 1)])
@pytest.mark.slow(but=1)
def test_loss_and_gradients_match_one_process(ranks: RankPool, size: int, token_dim: int | None) -> None:
    for error in ranks.run(largest_error, size, size, token_dim):
        assert error < 1e-5


def on_meta() -> None:
    with torch.device("meta"):
        model = Toy()
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,)), PLAN | {"blocks.1": "untouched"})
    assert model.head.weight is model.embed.weight
    first, second = model.blocks
    assert all(p.is_meta and isinstance(p, DTensor) for p in (*first.parameters(), model.norm.weight))
    assert not any(isinstance(p, DTensor) for p in second.parameters())
    mlp = first.mlp
    tensors = (model.embed.weight, mlp.up.weight, mlp.up.bias, mlp.down.weight, mlp.down.bias, first.norm.weight)
    assert [p.placements[0] for p in tensors] == [Shard(0), Shard(0), Shard(0), Shard(1), Replicate(), Replicate()]
    assert mlp.down.weight.to_local().shape == (WIDTH, 6)


def test_parameters_on_the_meta_device_stay_there_and_stay_shared(ranks: RankPool) -> None:
    ranks.run(on_meta, 2)


def after_an_exception() -> None:
    model = parallelized(2, None)
    with pytest.raises(ValueError, match="not finite"):
        model.norm(torch.full((1, 1, WIDTH), torch.nan))
    assert isinstance(model.norm.weight, DTensor)


def test_parameters_are_restored_after_a_failed_forward(ranks: RankPool) -> None:
    ranks.run(after_an_exception, 2)


def refusals() -> list[str]:
    mesh, messages = init_device_mesh("cpu", (2,)), []
    bad = {"embed": "colwise", "norm": "mla_kv_a_proj", "blocks.*.mlp.up": "colwise"}
    for plan in (bad, {name: style for name, style in PLAN.items() if "scale" not in name}):
        model = Toy()
        model.blocks[0].mlp.up = nn.Linear(WIDTH, 9)
        with pytest.raises(ValueError) as caught:
            apply_tensor_parallel(model, mesh, plan)
        messages.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        parallelized(2, 1)(torch.zeros(2, 5, dtype=torch.int64))
    return [*messages, str(caught.value)]


def test_invalid_plans_are_refused(ranks: RankPool) -> None:
    for plan, unnamed, tokens in ranks.run(refusals, 2):
        assert "embed: 'colwise' requires Linear, got Embedding" in plan
        assert "norm: 'mla_kv_a_proj' must be one of colwise, rowwise" in plan
        assert "blocks.0.mlp: has only colwise linears" in plan and "blocks.1.mlp" in plan
        assert "blocks.0.mlp.up: 2 ranks must divide out_features=9" in plan
        assert "the plan must name blocks.0.mlp.scale" in unnamed and "norm.weight" not in unnamed
        assert "tp=2 must divide the 5 tokens" in tokens
