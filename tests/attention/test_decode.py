"""Attention over a KV cache, complete and split into parts and over ranks, against dense fp64 attention."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attention import DecodeStep, KVCache, Prefill, SequenceLayout
from attention.decode import merge_parts, partial_attention, score_mask
from tests.harness.ranks import RankPool

from .cuda_calls import CheckCalls, DispatchedOps
from .dense import dense_attention, relative_l2

CPU = torch.device("cpu")
SLOTS, HEADS, KV_HEADS, HEAD_DIM = 3, 6, 2, 8
PROMPTS, CAPACITY, STEPS = (9, 0, 4), 20, 5  # slot 1 starts empty


@dataclass(frozen=True)
class Case:
    """Score function and head dim of the values of a decoding step."""

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    v_head_dim: int = HEAD_DIM

    def options(self, dtype: torch.dtype) -> dict:
        sinks = draw(7, HEADS).to(dtype) if self.sinks else None
        return {"scale": None, "window": self.window, "chunk": self.chunk, "softcap": self.softcap, "sinks": sinks}


CASES = (
    Case(),
    Case(window=4),
    Case(window=1),
    Case(chunk=4),
    Case(softcap=0.5),
    Case(sinks=True),
    Case(v_head_dim=5),
    Case(window=3, softcap=1.5, sinks=True, v_head_dim=12),
)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(q_NH: Tensor, k_TKH: Tensor, v_TKV: Tensor, case: Case, dtype: torch.dtype) -> Tensor:
    """Return the last token's attention output, (N, V), with sinks rounded to `dtype`."""
    position = torch.arange(len(k_TKH))
    last = position[-1]
    seen = (position > last - (case.window or len(k_TKH))) & (position >= last - last % (case.chunk or len(k_TKH)))
    sinks = case.options(dtype)["sinks"]
    q, k, v = (x.double() for x in (q_NH[None, None], k_TKH[None], v_TKV[None]))
    sinks = None if sinks is None else sinks.double()
    return dense_attention(q, k, v, seen[None, None], softcap=case.softcap, sinks=sinks)[0, 0]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-14)]
)
def test_decode_steps_match_dense_attention(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    head_dims = HEAD_DIM, case.v_head_dim
    cache = KVCache.allocate(SLOTS, CAPACITY, CPU)
    cache.layer(3, *(torch.zeros(1, 1, KV_HEADS, size, dtype=dtype) for size in head_dims))
    assert cache.nbytes == SLOTS * CAPACITY * KV_HEADS * sum(head_dims) * dtype.itemsize
    cache.layers[3][0].fill_(100)  # left over from a finished sequence
    cache.positions.fill_(0)
    cache.clear(torch.arange(SLOTS))
    k_RSKH, v_RSKV = (draw(seed, 2, 9, KV_HEADS, size).to(dtype) for seed, size in enumerate(head_dims))
    lengths = torch.tensor([PROMPTS[2], PROMPTS[0]])
    Prefill(cache, torch.arange(9), torch.tensor([2, 0]), torch.tensor([1, 0]), lengths).store(3, k_RSKH, v_RSKV)
    keys = {0: k_RSKH[0], 1: k_RSKH[0, :0], 2: k_RSKH[1, :4]}
    values = {0: v_RSKV[0], 1: v_RSKV[0, :0], 2: v_RSKV[1, :4]}
    for number in range(STEPS):
        q = draw(10 + number, SLOTS, 1, HEADS, HEAD_DIM).to(dtype)
        k, v = (
            draw(seed + number, SLOTS, 1, KV_HEADS, size).to(dtype)
            for seed, size in zip((20, 30), head_dims, strict=True)
        )
        at = torch.tensor(PROMPTS) + number
        step = DecodeStep(cache, at, at, None, length=16, group=None)
        out = step.attend(3, q, k, v, **case.options(dtype))
        assert out.dtype == dtype and out.shape == (SLOTS, 1, HEADS, case.v_head_dim)
        for slot in range(SLOTS):
            keys[slot], values[slot] = torch.cat((keys[slot], k[slot])), torch.cat((values[slot], v[slot]))
            assert relative_l2(out[slot, 0], exact(q[slot, 0], keys[slot], values[slot], case, dtype)) <= tolerance


@pytest.mark.parametrize("by_head", [False, True])
def test_repeated_indices_count_once(by_head: bool) -> None:
    cache, one = KVCache.allocate(1, 16, CPU), torch.tensor([0])
    q, keys, values = (
        draw(1, 1, 1, HEADS, HEAD_DIM),
        draw(2, 1, 10, KV_HEADS, HEAD_DIM),
        draw(3, 1, 10, KV_HEADS, HEAD_DIM),
    )
    Prefill(cache, torch.arange(9), one, one, one + 9).store(0, keys[:, :9], values[:, :9])
    indices = torch.tensor([[[[3, 9, 3, -1, 12, 3], [7, 7, 0, 7, -1, 0]]]])[:, :, : 1 + by_head]
    step = DecodeStep(cache, one + 9, one + 9, None, length=16, group=None, tokens=10)
    own = indices if by_head else indices.squeeze(2)
    out = step.attend(0, q, keys[:, 9:], values[:, 9:], scale=None, window=None, indices=own)
    seen = (indices.unsqueeze(-1) == torch.arange(10)).any(3)[0].transpose(0, 1)  # (heads, 1, keys)
    seen = seen.expand(KV_HEADS, -1, -1).repeat_interleave(HEADS // KV_HEADS, 0)
    assert relative_l2(out, dense_attention(q, keys, values, seen.unsqueeze(0))) <= 1e-14


def sharded_steps(layout: str) -> list[list[Tensor]]:
    """Return the output of each case and step for one prompt of 8 tokens, sharded over all ranks.

    Two layers have different numbers of KV heads; their outputs are joined. Ranks take turns to cache the new tokens.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = SequenceLayout(layout, 8, world_size).positions(rank)
    found = []
    for case in CASES:
        cache = KVCache.allocate(2, 8, CPU)
        rows, slots, lengths = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64), torch.tensor([8])
        prefill = Prefill(cache, own, slots, rows, lengths)
        for layer, kv_heads in enumerate((KV_HEADS, 2 * KV_HEADS - 1)):
            k, v, _ = _tokens(kv_heads, case)
            prefill.store(layer, k[:, own], v[:, own])
        found.append([])
        for number in range(STEPS):
            turn = number % world_size == rank
            place = len(own) + number // world_size
            step = DecodeStep(
                cache,
                torch.tensor([0, 8 + number]),
                torch.tensor([7, place]),
                torch.tensor([False, turn]),
                length=8,
                group=dist.group.WORLD,
            )
            outs = []
            for layer, kv_heads in enumerate((KV_HEADS, 2 * KV_HEADS - 1)):
                k, v, q = (x[:, 8 + number].float() for x in _tokens(kv_heads, case))
                both = [x.expand(2, -1, -1).unsqueeze(1) for x in (q, k, v)]
                outs.append(step.attend(layer, *both, **case.options(torch.float32)))
            found[-1].append(torch.cat(outs, 1))
    return found


def _tokens(kv_heads: int, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys, values and queries of all tokens, (1, T, heads, head dim) in float32."""
    sizes = ((kv_heads, HEAD_DIM), (kv_heads, case.v_head_dim), (HEADS, HEAD_DIM))
    k, v, q = (draw(seed + kv_heads, 1, 8 + STEPS, *size).float() for seed, size in enumerate(sizes))
    return k, v, q


@pytest.mark.parametrize(("world_size", "layout"), [(2, "zigzag"), (4, "striped")])
def test_steps_on_a_sharded_cache_match_dense_attention(ranks: RankPool, world_size: int, layout: str) -> None:
    per_rank = ranks.run(sharded_steps, world_size, layout)
    for found in per_rank[1:]:
        assert all(
            torch.equal(x, y)
            for mine, first in zip(found, per_rank[0], strict=True)
            for x, y in zip(mine, first, strict=True)
        )
    for case, outs in zip(CASES, per_rank[0], strict=True):
        for number, out in enumerate(outs):
            assert not out[0].any()  # an empty slot
            for layer, kv_heads in enumerate((KV_HEADS, 2 * KV_HEADS - 1)):
                k, v, q = (x[0, : 9 + number] for x in _tokens(kv_heads, case))
                assert relative_l2(out[1, layer], exact(q[-1], k, v, case, torch.float32)) <= 1e-6


def test_a_token_of_another_rank_is_not_cached() -> None:
    cache = KVCache.allocate(2, 4, CPU)
    at = torch.tensor([1, 2])
    step = DecodeStep(cache, at, at, torch.tensor([True, False]), length=4, group=None)
    step.attend(0, torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2), scale=None, window=None)
    assert cache.layers[0][0].sum(-1).flatten(0, 1).tolist() == [[0, 2, 0, 0], [0, 0, 0, 0]]
    assert (cache.positions == 1).nonzero().tolist() == [[0, 1]] and not bool((cache.positions == 2).any())


def test_merging_parts_of_the_keys_gives_attention_over_all_of_them() -> None:
    keys = 11
    q, k, v = draw(0, 4, 2, 3, HEAD_DIM), draw(1, 4, 2, keys, HEAD_DIM), draw(2, 4, 2, keys, HEAD_DIM)
    seen = torch.rand(4, 1, 1, keys, generator=torch.Generator().manual_seed(3)) < 0.4
    seen[..., 3:6] = False  # the second part is empty
    seen[2] = False  # and so is the third row in all parts
    cuts, parts = (slice(0, 3), slice(3, 6), slice(6, keys)), []
    for cut in cuts:
        mask, blind = score_mask(seen[:, :, 0, cut], torch.float64)
        out, lse = partial_attention(q, k[:, :, cut], v[:, :, cut], mask, 0.5)
        parts.append((out, lse.masked_fill(blind, float("-inf"))))
    assert bool(parts[1][1].isneginf().all()) and all(bool(x.isfinite().all()) for x, _ in parts)
    merged = merge_parts(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    wanted = torch.where(seen, q @ k.mT * 0.5, float("-inf")).softmax(-1).nan_to_num() @ v
    assert relative_l2(merged, wanted) <= 1e-14 and not merged[2].any()


class Allocated(TorchDispatchMode):
    """The largest number of elements that an op of the block returns in new memory."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, tuple | list) else (results,):
            if isinstance(x, Tensor) and not func.is_view:
                self.largest = max(self.largest, x.numel())
        return results


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_on_a_gpu_no_step_copies_the_cache(softcap: float | None) -> None:
    """Fake CUDA tensors: head dims 192 and 128, 4 queries to a KV head, 1,000 of 1,024 entries."""
    with FakeTensorMode(), DispatchedOps(), Allocated() as allocated, CheckCalls() as calls:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        q, k, v = (torch.empty(2, 8, *shape, **options) for shape in ((4, 192), (1024, 192), (1024, 128)))
        allocated.largest = 0
        mask, _ = score_mask(torch.empty(2, 1, 1000, dtype=torch.bool, device="cuda"), torch.bfloat16)
        out, lse = partial_attention(q, k[:, :, :1000], v[:, :, :1000], mask, None, softcap)
    assert (out.shape, lse.shape, lse.dtype) == ((2, 8, 4, 128), (2, 8, 4), torch.float32)
    assert allocated.largest == 2 * 8 * 4 * (128 if softcap is None else 1000)
    assert calls.called == ([] if softcap else ["_scaled_dot_product_efficient_attention"])
