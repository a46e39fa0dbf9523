"""Attention over a KV cache, complete and split into parts, against dense fp64 attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attention import DecodeStep, KVCache, Prefill
from attention.decode import merge_parts, partial_attention

from .dense import dense_attention, relative_l2

CPU = torch.device("cpu")
SLOTS, HEADS, KV_HEADS, HEAD_DIM = 3, 6, 2, 8
PROMPTS, CAPACITY, STEPS = (9, 0, 4), 20, 5  # slot 1 starts empty


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact(q_NH: Tensor, k_TKH: Tensor, v_TKH: Tensor, window: int | None) -> Tensor:
    """Return the last token's attention output, (N, H)."""
    position = torch.arange(len(k_TKH))
    seen = position > position[-1] - (window or len(k_TKH))
    return dense_attention(q_NH[None, None], k_TKH[None], v_TKH[None], seen[None, None])[0, 0]


@pytest.mark.parametrize("window", [None, 4, 1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-14)]
)
def test_decode_steps_match_dense_attention(window: int | None, dtype: torch.dtype, tolerance: float) -> None:
    cache = KVCache.allocate((3,), SLOTS, CAPACITY, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype, device=CPU)
    assert cache.nbytes == 2 * SLOTS * CAPACITY * KV_HEADS * HEAD_DIM * dtype.itemsize
    cache.keys[3].fill_(100)  # left over from a finished sequence
    cache.positions.fill_(0)
    cache.clear(torch.arange(SLOTS))
    k_RSKH, v_RSKH = (draw(seed, 2, 9, KV_HEADS, HEAD_DIM).to(dtype) for seed in (0, 1))
    lengths = torch.tensor([PROMPTS[2], PROMPTS[0]])
    Prefill(cache, torch.arange(9), torch.tensor([2, 0]), torch.tensor([1, 0]), lengths).store(3, k_RSKH, v_RSKH)
    keys = {0: k_RSKH[0], 1: k_RSKH[0, :0], 2: k_RSKH[1, :4]}
    values = {0: v_RSKH[0], 1: v_RSKH[0, :0], 2: v_RSKH[1, :4]}
    for number in range(STEPS):
        q = draw(10 + number, SLOTS, 1, HEADS, HEAD_DIM).to(dtype)
        k, v = (draw(seed + number, SLOTS, 1, KV_HEADS, HEAD_DIM).to(dtype) for seed in (20, 30))
        at = torch.tensor(PROMPTS) + number
        step = DecodeStep(cache, at, at, None, length=16, group=None)
        out = step.attend(3, q, k, v, scale=None, window=window)
        assert out.dtype == dtype and out.shape == (SLOTS, 1, HEADS, HEAD_DIM)
        for slot in range(SLOTS):
            keys[slot], values[slot] = torch.cat((keys[slot], k[slot])), torch.cat((values[slot], v[slot]))
            wanted = exact(q[slot, 0].double(), keys[slot].double(), values[slot].double(), window)
            assert relative_l2(out[slot, 0], wanted) <= tolerance


def test_a_token_of_another_rank_is_not_cached() -> None:
    cache = KVCache.allocate((0,), 2, 4, kv_heads=1, head_dim=2, dtype=torch.float32, device=CPU)
    at = torch.tensor([1, 2])
    step = DecodeStep(cache, at, at, torch.tensor([True, False]), length=4, group=None)
    step.attend(0, torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2), scale=None, window=None)
    assert cache.keys[0].sum(-1).flatten(0, 1).tolist() == [[0, 2, 0, 0], [0, 0, 0, 0]]
    assert (cache.positions == 1).nonzero().tolist() == [[0, 1]] and not bool((cache.positions == 2).any())


def test_merging_parts_of_the_keys_gives_attention_over_all_of_them() -> None:
    keys = 11
    q, k, v = draw(0, 4, 2, 3, HEAD_DIM), draw(1, 4, 2, keys, HEAD_DIM), draw(2, 4, 2, keys, HEAD_DIM)
    seen = torch.rand(4, 1, 1, keys, generator=torch.Generator().manual_seed(3)) < 0.4
    seen[..., 3:6] = False  # the second part is empty
    seen[2] = False  # and so is the third row in all parts
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, float("-inf"))
    cuts = (slice(0, 3), slice(3, 6), slice(6, keys))
    parts = [partial_attention(q, k[:, :, cut], v[:, :, cut], mask[..., cut], 0.5) for cut in cuts]
    assert bool(parts[1][1].isneginf().all()) and not parts[1][0].any()
    merged = merge_parts(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    wanted = torch.where(seen, q @ k.mT * 0.5, float("-inf")).softmax(-1).nan_to_num() @ v
    assert relative_l2(merged, wanted) <= 1e-14 and not merged[2].any()
