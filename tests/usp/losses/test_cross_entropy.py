"""The chunked loss matches torch's cross-entropy without materializing all logits."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.cuda_calls import DispatchedOps
from tests.harness.ranks import RankPool
from usp.losses import HeadGradients, vocab_loss

BATCH, TOKENS, HIDDEN, VOCAB, TARGETS = 2, 13, 6, 23, 41


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=generator)
    labels[0, 3:9] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def expected(hidden: Tensor, weight: Tensor, labels: Tensor, factor: float = 1.0) -> list[Tensor]:
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = (hidden @ weight.T).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / TARGETS
    (loss * factor).backward()
    return [loss.detach(), hidden.grad, weight.grad]


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(found, wanted, strict=True)
    return float(torch.stack([(f.double() - w).norm() / (w.norm() + 1e-30) for f, w in pairs]).amax())


@pytest.mark.parametrize("chunk", [1, 5, 26, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str
)
def test_value_and_gradients(dtype: torch.dtype, tolerance: float, chunk: int) -> None:
    hidden, weight, labels = inputs(dtype)
    loss = vocab_loss(hidden, weight, labels, global_tokens=TARGETS, chunk_tokens=chunk)
    (loss * 3).backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    found = [loss.detach(), hidden.grad, weight.grad]
    assert difference(found, expected(hidden, weight, labels, 3.0)) <= tolerance


def test_split_backward() -> None:
    hidden, weight, labels = inputs()
    loss = vocab_loss(hidden, weight, labels, global_tokens=TARGETS, chunk_tokens=5) * 3
    (grad_hidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (grad_weight,) = torch.autograd.grad(loss, weight)
    assert difference([grad_hidden, grad_weight], expected(hidden, weight, labels, 3.0)[1:]) <= 1e-14


def test_loss_without_targets_is_part_of_the_graph() -> None:
    hidden, weight, labels = inputs()
    with Operators() as seen:
        loss = vocab_loss(hidden, weight, torch.full_like(labels, -100), global_tokens=TARGETS, chunk_tokens=5)
        loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()
    assert "mm" not in seen.names


class Operators(TorchDispatchMode):
    """Recorder of the operators that run, and of the largest number of elements of a result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        self.largest = max([self.largest, *(x.numel() for x in [result] if isinstance(x, Tensor))])
        return result


def test_only_one_chunk_of_logits_and_only_required_gradients() -> None:
    hidden, weight, labels = inputs()
    with Operators() as trained:
        vocab_loss(hidden, weight, labels, global_tokens=TARGETS, chunk_tokens=7).backward()
    assert trained.largest == max(7 * VOCAB, BATCH * TOKENS * HIDDEN, VOCAB * HIDDEN)
    with Operators() as evaluated, torch.no_grad():
        vocab_loss(hidden, weight, labels, global_tokens=TARGETS, chunk_tokens=7)
    assert evaluated.names.count("mm") == 4 and "scatter_add_" not in evaluated.names
    with Operators() as frozen:
        vocab_loss(hidden, weight.detach(), labels, global_tokens=TARGETS, chunk_tokens=7).backward()
    assert frozen.names.count("mm") == 8 and "addmm_" not in frozen.names


def sharded() -> list[float]:
    """Return differences from torch for a vocabulary in plain shards (even only) and as a DTensor."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    assert group is not None
    hidden, weight, labels = inputs()
    mesh = init_device_mesh("cpu", (size,))
    found = []
    for plain in (True, False):
        rows = weight[: VOCAB // size * size].detach().clone() if plain else weight.detach().clone()
        targets = labels.where(labels < len(rows), 0)
        whole = expected(hidden, rows, targets)
        local = rows.chunk(size)[rank].clone() if plain else distribute_tensor(rows, mesh, [Shard(0)])
        local = local.detach().requires_grad_()
        hidden.grad = None
        loss = vocab_loss(hidden, local, targets, global_tokens=TARGETS, chunk_tokens=5, group=group)
        loss.backward()
        grad = local.grad if plain else local.grad.to_local()
        own = whole[2].chunk(size)[rank]
        found.append(difference([loss.detach(), hidden.grad, grad], [*whole[:2], own]))
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.slow(but=1)
def test_sharded_vocabulary(ranks: RankPool, size: int) -> None:
    assert torch.tensor(ranks.run(sharded, size)).amax() <= 1e-14


def test_invalid_arguments_raise() -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"one label for each token; chunk_tokens must be at least 1; got hidden"):
        vocab_loss(hidden, weight, labels[:, 1:], global_tokens=TARGETS, chunk_tokens=0)
    with pytest.raises(ValueError, match="global_tokens=0 must be at least 1"):
        vocab_loss(hidden, weight, labels, global_tokens=0, chunk_tokens=5)
    labels[1, 4] = VOCAB
    with pytest.raises(ValueError, match=r"labels \[23\] are not in the vocabulary of 23"):
        vocab_loss(hidden, weight, labels, global_tokens=TARGETS, chunk_tokens=5)


def test_on_a_gpu_the_weights_gradient_is_accumulated_by_the_product() -> None:
    with FakeTensorMode(), DispatchedOps(), patch.object(torch, "addmm") as product:
        shapes = ((8, 6), (23, 6), (4, 23))
        hidden, weight, grads = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        gradients = HeadGradients(hidden, weight, wants_hidden=False, wants_weight=True)
        gradients.add(slice(0, 4), grads)
    total, transposed, chunk = product.call_args.args
    assert total is gradients.weight is product.call_args.kwargs["out"] and total.dtype == torch.float32
    assert (transposed.shape, chunk.shape) == ((23, 4), (4, 6)) and product.call_args.kwargs["out_dtype"] == total.dtype
