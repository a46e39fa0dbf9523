"""Attention over a KV cache, complete and split into parts and over ranks, against dense fp64 attention."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.ranks import RankPool
from usp.attention import DecodeStep, KVCache, Prefill, SequenceLayout, decode
from usp.attention.decode import key_parts, merge_parts, partial_attention, score_mask

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


def device_of(multiprocessors: int, part: int) -> ExitStack:
    """Split keys as a GPU with so many multiprocessors would, into parts of at least so many."""
    stack = ExitStack()
    stack.enter_context(patch.object(decode, "multiprocessors", lambda device: multiprocessors))
    stack.enter_context(patch.object(decode, "_PART", part))
    return stack


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


@pytest.mark.parametrize("part", [16, 8, 3, 1])  # of 16 keys: not split, halves, 5 that overlap, single keys
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-14)]
)
def test_decode_steps_match_dense_attention(case: Case, dtype: torch.dtype, tolerance: float, part: int) -> None:
    with device_of(132, part):
        check_decode_steps(case, dtype, tolerance)


def check_decode_steps(case: Case, dtype: torch.dtype, tolerance: float) -> None:
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


@pytest.mark.parametrize("part", [16, 2])
@pytest.mark.parametrize("by_head", [False, True])
def test_repeated_indices_count_once(by_head: bool, part: int) -> None:
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
    with device_of(132, part):
        out = step.attend(0, q, keys[:, 9:], values[:, 9:], scale=None, window=None, indices=own)
    seen = (indices.unsqueeze(-1) == torch.arange(10)).any(3)[0].transpose(0, 1)  # (heads, 1, keys)
    seen = seen.expand(KV_HEADS, -1, -1).repeat_interleave(HEADS // KV_HEADS, 0)
    assert relative_l2(out, dense_attention(q, keys, values, seen.unsqueeze(0))) <= 1e-14


def sharded_steps(layout: str, part: int) -> list[list[Tensor]]:
    with device_of(132, part):
        return steps_of_cases(layout)


def steps_of_cases(layout: str) -> list[list[Tensor]]:
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


@pytest.mark.parametrize(("world_size", "layout", "part"), [(2, "zigzag", 8), (2, "zigzag", 3), (4, "striped", 2)])
@pytest.mark.slow
def test_steps_on_a_sharded_cache_match_dense_attention(
    ranks: RankPool, world_size: int, layout: str, part: int
) -> None:
    per_rank = ranks.run(sharded_steps, world_size, layout, part)
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


@pytest.mark.parametrize("keys", [10, 300, 1 << 15])
def test_a_slot_with_other_lengths_and_documents_of_one_key_is_split_exactly(keys: int) -> None:
    """Slots of all keys, of none, of one key in the last part, and of what a window leaves in two parts."""
    q, k, v = draw(0, 4, 1, 3, HEAD_DIM), draw(1, 4, 1, keys, HEAD_DIM), draw(2, 4, 1, keys, HEAD_DIM)
    cache, at = KVCache.allocate(4, keys, CPU), torch.zeros(4, dtype=torch.int64)
    cache.positions[0], cache.positions[2, -1], cache.positions[3, keys // 3 : keys // 2] = 0, 0, 0
    cache.layers[0] = k, v
    seen, new = (cache.positions == 0).unsqueeze(1), draw(3, 4, 1, 1, HEAD_DIM)  # which no slot caches
    for parts in (1, 2, 3, 7):
        step = DecodeStep(cache, at, at, at.bool(), length=keys, group=None)
        with patch.object(decode, "key_parts", lambda *_, parts=parts: parts):
            out = step.attend(0, q, new, new, scale=None, window=None)
        wanted = torch.where(seen.unsqueeze(2), q @ k.mT / HEAD_DIM**0.5, float("-inf")).softmax(-1) @ v
        rows = [0, 2, 3]
        assert relative_l2(out[rows], wanted[rows]) <= 1e-14
        assert bool(out.isfinite().all()) and (parts == 1 or not out[1].any())


H200, HEADS_OF_8B = 132, (8, 4, 128)  # multiprocessors; KV heads, queries of each, head dim


class Blocks(TorchDispatchMode):
    """The blocks of threads that the memory-efficient kernel launches in the block, and the keys that one reads."""

    found = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._scaled_dot_product_efficient_attention:
            batch, heads, queries, _ = args[0].shape
            self.found = batch * heads * -(-queries // 64), args[1].shape[2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("slots", "keys", "blocks"),
    [
        *((1, 2048, 64), (1, 8192, 256), (1, 32768, 264), (1, 131072, 264)),  # 8 without parts
        *((8, 2048, 256), (8, 8192, 256), (8, 32768, 256), (8, 131072, 256)),  # 64
        *((64, 2048, 512), (64, 8192, 512), (64, 32768, 512), (64, 131072, 512)),  # 512
    ],
)
@pytest.mark.slow(but=1)
def test_few_sequences_occupy_a_whole_gpu(slots: int, keys: int, blocks: int) -> None:
    """Counted on fake CUDA tensors of an 8B model with 8 KV heads, on a GPU of 132 multiprocessors."""
    heads, queries, size = HEADS_OF_8B
    with FakeTensorMode(), DispatchedOps(), Blocks() as launched, CheckCalls(), device_of(H200, 256):
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        cache = KVCache(torch.empty(slots, keys, dtype=torch.int64, device="cuda"))
        cache.layers[0] = tuple(torch.empty(slots, heads, keys, size, **options) for _ in "kv")
        at = torch.empty(slots, dtype=torch.int64, device="cuda")
        step = DecodeStep(cache, at, at, None, length=keys, group=None)
        q, new = torch.empty(slots, 1, heads * queries, size, **options), torch.empty(slots, 1, heads, size, **options)
        assert step.attend(0, q, new, new, scale=None, window=None).shape == q.shape
    assert launched.found[0] == blocks
    assert launched.found[1] < -(-keys // (blocks // (slots * heads))) + 33  # which may overlap a little


def test_the_number_of_parts_depends_on_shapes_alone() -> None:
    """And parts have 256 keys or more, blocks are two for each multiprocessor or fewer, unless keys are not split."""
    for slots in (1, 3, 8, 17, 64):
        for keys in (1, 255, 512, 1000, 4096, 131072):
            for queries in (1, 8, 65):
                with device_of(H200, 256):
                    parts = key_parts(torch.empty(slots, 8, queries, 128, device="meta"), keys)
                blocks = slots * 8 * -(-queries // 64)
                assert parts == 1 or (keys // parts >= 256 and parts * blocks <= 2 * H200)
                assert parts == 1 or (parts + 1) * blocks > 2 * H200 or keys // (parts + 1) < 256
    assert key_parts(torch.empty(1, 8, 4, 128), 131072) == 1  # on a CPU


class Allocated(TorchDispatchMode):
    """The largest number of elements that an op of the block returns in new memory."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        for x in results if isinstance(results, tuple | list) else (results,):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, x.numel())
        return results


@pytest.mark.parametrize(("softcap", "parts"), [(None, 1), (None, 3), (30.0, 1)])
@pytest.mark.slow
def test_on_a_gpu_no_step_copies_the_cache(softcap: float | None, parts: int) -> None:
    """Fake CUDA tensors: head dims 192 and 128, 4 queries to a KV head, 1,000 of 1,024 entries."""
    with FakeTensorMode(), DispatchedOps(), Allocated() as allocated, CheckCalls() as calls:
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        q, k, v = (torch.empty(2, 1, *shape, **options) for shape in ((32, 192), (8, 192), (8, 128)))
        cache = KVCache.allocate(2, 1024, torch.device("cuda"))
        at = torch.empty(2, dtype=torch.int64, device="cuda")
        cache.layer(0, k, v)
        step = DecodeStep(cache, at, at, None, length=1000, group=None)
        allocated.largest = 0
        with device_of(8 * parts, 300):  # 16 blocks without parts
            out = step.attend(0, q, k, v, scale=None, window=None, softcap=softcap)
    assert out.shape == (2, 1, 32, 128)
    mask, outs, scores = 2 * 8 * 1008, parts * 2 * 32 * 128, 2 * 32 * 1000  # elements; the cache has 16 * 1024 * 320
    assert allocated.largest == (max(mask, outs) if softcap is None else scores)
    assert calls.called == ([] if softcap else ["_scaled_dot_product_efficient_attention"])
