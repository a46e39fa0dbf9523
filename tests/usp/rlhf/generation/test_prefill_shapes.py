"""Prompts have almost as many lengths as there are prompts, and cuDNN plans anew for each shape that it gets."""

from __future__ import annotations

from collections import Counter
from itertools import count
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.cuda_calls import CheckCalls, DispatchedOps
from tests.harness.ranks import RankPool
from usp.hf.integrate import _MANY_LENGTHS
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.cluster.hardware import load_hardware
from usp.predict.fake_world import fake_world
from usp.rlhf.generation.decoding import Rollout, Slots, row_multiple
from usp.rlhf.generation.generate import _PREFILL_TOKENS
from usp.rlhf.graph import Generate
from usp.sp import kernel_choice, sp_attention
from usp.sp.sequence import SpAxes
from usp.sp.sp_attention import UnifiedSPAttention

from .test_families import GRIDS, built, prompts

aten = torch.ops.aten
LENGTHS = torch.randint(64, 4000, (200,), generator=torch.Generator().manual_seed(0)).tolist()


class Shapes(TorchDispatchMode):
    """The shapes that kernels get in the block, by the name of their operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (aten._scaled_dot_product_cudnn_attention, aten._flash_attention_forward):
            self.found.add((func.overloadpacket.__name__, tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))


def prefilled() -> list[tuple[int, int]]:
    """Rows and tokens of each forward over the prompts, 32 of which are admitted at a time."""
    rollouts = Rollout.begin([torch.zeros(n) for n in LENGTHS], Generate(), range(len(LENGTHS)), (), 1 << 17)
    for number, rollout in zip(count(), rollouts, strict=False):
        rollout.prompt[0] = number  # equal prompts share a row
    slots, shapes = Slots(rollouts, 32), []
    while admitted := slots.admit():
        groups = slots.prefill_groups(admitted, row_multiple("zigzag", 1, 1), _PREFILL_TOKENS)
        shapes += [(len(group.prompts), group.padded) for group in groups]
        slots.active = [None] * 32
    return shapes


def planned(shapes: list[tuple[int, int]], many_lengths: bool) -> Counter[str]:
    """How many shapes each kernel gets, on an H100."""
    node = load_hardware("h100")
    with (
        fake_world(1, 0),
        patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
        patch.object(kernel_choice, "node_here", lambda device: node),
        patch.object(sp_attention, "node_here", lambda device: node),
        patch.object(SpAxes, "agree", lambda *_, **__: None),
    ):
        attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(), "cuda"))
        attention.many_lengths = many_lengths
        with FakeTensorMode(), DispatchedOps(), Shapes() as seen, CheckCalls(), torch.no_grad():
            for rows, tokens in shapes:
                x = torch.empty(rows, tokens, 4, 64, dtype=torch.bfloat16, device="cuda")
                attention(x, x[:, :, :2], x[:, :, :2])
    return Counter(name for name, _ in seen.found)


@pytest.mark.exhaustive
def test_no_plans_are_made_for_prompts_of_many_lengths() -> None:
    shapes = sorted(set(prefilled()))
    assert len(shapes) > 30
    before = planned(shapes, many_lengths=False)
    assert [*before] == ["_scaled_dot_product_cudnn_attention"] and before.total() > 30
    assert [*planned(shapes, many_lengths=True)] == ["_flash_attention_forward"]


def asked_for(longest: int) -> set[bool]:
    """What prefills of a few prompts ask for, if kernels get ready for prompts longer than this."""
    forward, found = UnifiedSPAttention.forward, set()

    def recorded(self, *args, **options):
        found.add(self.many_lengths)
        return forward(self, *args, **options)

    generator, given = built("llama", GRIDS["alone"], ParallelMesh.create(ParallelDims())), prompts("llama")
    with patch.object(UnifiedSPAttention, "forward", recorded), patch("usp.hf.integrate._MANY_LENGTHS", longest):
        generator.generate(given, Generate(max_new_tokens=2), range(len(given)))
    return found


@pytest.mark.parametrize(("longest", "wanted"), [(_MANY_LENGTHS, {True}), (32, {False, True}), (1, {False})])
@pytest.mark.slow(but=1)
def test_prefills_of_short_prompts_ask_for_kernels_without_plans(
    ranks: RankPool, longest: int, wanted: set[bool]
) -> None:
    assert ranks.run(asked_for, 1, longest) == [wanted]
