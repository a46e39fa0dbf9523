"""Chunked log-probabilities, entropies and gradients match torch without materializing all logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.harness.memory import track_memory
from tests.harness.ranks import RankPool
from tests.usp.losses.test_cross_entropy import BATCH, HIDDEN, TOKENS, VOCAB, Operators, difference, inputs
from usp.losses import vocab_logprobs, vocab_loss

TEMPERATURE = 0.7


def made_of(logprobs: Tensor, entropies: Tensor | None) -> Tensor:
    """Compute a loss with a different weight per token."""
    weights = torch.linspace(-2, 3, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    loss = (weights * logprobs + logprobs.exp()).sum()
    return loss if entropies is None else loss + (weights.flip(1) * entropies.square()).sum()


def expected(hidden: Tensor, weight: Tensor, labels: Tensor, entropy: bool) -> list[Tensor]:
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logs = torch.log_softmax(hidden @ weight.T / TEMPERATURE, dim=2)
    wanted = labels != -100
    logprobs = logs.gather(2, labels.where(wanted, 0).unsqueeze(2)).squeeze(2).where(wanted, 0)
    entropies = -(logs.exp() * logs).sum(2).where(wanted, 0)
    made_of(logprobs, entropies if entropy else None).backward()
    return [logprobs.detach(), *([entropies.detach()] if entropy else []), hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str
)
def test_values_and_gradients(dtype: torch.dtype, tolerance: float, entropy: bool, chunk: int) -> None:
    hidden, weight, labels = inputs(dtype)
    options = {"temperature": TEMPERATURE, "chunk_tokens": chunk, "entropy": entropy}
    logprobs, entropies = vocab_logprobs(hidden, weight, labels, **options)
    assert (entropies is not None) == entropy
    made_of(logprobs, entropies).backward()
    assert hidden.grad.dtype == weight.grad.dtype == dtype and logprobs.dtype != torch.bfloat16
    found = [logprobs.detach(), *([entropies.detach()] if entropy else []), hidden.grad, weight.grad]
    assert difference(found, expected(hidden, weight, labels, entropy)) <= tolerance


def test_split_backward_and_frozen_weight() -> None:
    hidden, weight, labels = inputs()
    loss = made_of(*vocab_logprobs(hidden, weight, labels, temperature=TEMPERATURE, chunk_tokens=5, entropy=True))
    (grad_hidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (grad_weight,) = torch.autograd.grad(loss, weight)
    wanted = expected(hidden, weight, labels, True)
    assert difference([grad_hidden, grad_weight], wanted[2:]) <= 1e-14
    frozen = made_of(*vocab_logprobs(hidden, weight.detach(), labels, temperature=TEMPERATURE, chunk_tokens=5))
    assert difference([torch.autograd.grad(frozen, hidden)[0]], expected(hidden, weight, labels, False)[1:2]) <= 1e-14


def test_only_one_chunk_of_logits_exists() -> None:
    hidden, weight, labels = inputs()
    with Operators() as seen:
        made_of(*vocab_logprobs(hidden, weight, labels, chunk_tokens=14, entropy=True)).backward()  # 7 at a time
    assert seen.largest == max(7 * VOCAB, BATCH * TOKENS * HIDDEN, VOCAB * HIDDEN)
    with Operators() as empty:
        made_of(*vocab_logprobs(hidden, weight, torch.full_like(labels, -100), chunk_tokens=7)).backward()
    assert "mm" not in empty.names


@pytest.mark.parametrize("loss", ["cross-entropy", "logprobs", "entropies"])
@pytest.mark.slow(but=1)
def test_a_chunk_is_freed_before_the_next(loss: str) -> None:
    chunk, vocabulary = 64, 4096

    def peak(chunks: int) -> int:
        hidden = torch.randn(1, chunks * chunk, 4, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocabulary, 4, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(vocabulary, hidden.shape[:2])
        with track_memory() as memory:
            if loss == "cross-entropy":
                vocab_loss(hidden, weight, labels, global_tokens=labels.numel(), chunk_tokens=chunk).backward()
            else:
                options = {"chunk_tokens": chunk, "entropy": loss == "entropies"}
                made_of(*vocab_logprobs(hidden, weight, labels, **options)).backward()
        return memory.peak_bytes

    assert peak(4) - peak(1) < chunk * vocabulary / 8  # bytes, and a logit has two


def sharded() -> float:
    """Return the difference from torch with an unevenly sharded vocabulary."""
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    hidden, weight, labels = inputs()
    local = distribute_tensor(weight.detach().clone(), init_device_mesh("cpu", (size,)), [Shard(0)])
    local = local.detach().requires_grad_()
    options = {"temperature": TEMPERATURE, "chunk_tokens": 5, "entropy": True, "group": group}
    logprobs, entropies = vocab_logprobs(hidden, local, labels, **options)
    made_of(logprobs, entropies).backward()
    assert entropies is not None
    wanted = expected(hidden, weight, labels, True)
    found = [logprobs.detach(), entropies.detach(), hidden.grad, local.grad.to_local()]
    return difference(found, [*wanted[:3], wanted[3].chunk(size)[rank]])


@pytest.mark.slow
def test_sharded_vocabulary(ranks: RankPool) -> None:
    assert torch.tensor(ranks.run(sharded, 4)).amax() <= 1e-14


def test_invalid_arguments_raise() -> None:
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"temperature=0 must be above 0"):
        vocab_logprobs(hidden, weight, labels, chunk_tokens=5, temperature=0)
    labels[1, 4] = VOCAB
    with pytest.raises(ValueError, match=r"labels \[23\] are not in the vocabulary of 23"):
        vocab_logprobs(hidden, weight, labels, chunk_tokens=5)
