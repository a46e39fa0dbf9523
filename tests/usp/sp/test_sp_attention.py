"""Argument checks, supported meshes and activation checkpointing of `UnifiedSPAttention`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.harness.ranks import RankError, RankPool
from usp import JointAttention, Mask, SparseAttention, UnifiedSPAttention, shard_sequence, unshard_sequence
from usp.attention import KeepResults
from usp.parallel import ParallelDims, ParallelMesh, RanksDisagree, groups
from usp.parallel.wire import SentBytes
from usp.sp.sequence import rows_of


def refusals() -> dict[str, str]:
    mesh = ParallelMesh.create(ParallelDims(ring=2))
    q, k, odd = torch.randn(1, 4, 4, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 3, 4, 8)
    attention, sizes, wide = UnifiedSPAttention(mesh), (q.shape, q.shape), torch.randn(1, 6, 4, 8)
    joint = JointAttention(attention)
    calls = {
        "dims": lambda: UnifiedSPAttention(mesh)(q[0], k[0], k[0]),
        "tokens": lambda: UnifiedSPAttention(mesh)(q, k[:, :2], k[:, :2]),
        "dtype": lambda: UnifiedSPAttention(mesh)(q, k.double(), k.double()),
        "heads": lambda: UnifiedSPAttention(mesh)(q[:, :, :3], k, k),
        "length": lambda: UnifiedSPAttention(mesh)(odd, odd, odd),
        "sinks": lambda: UnifiedSPAttention(mesh)(q, k, k, sinks=torch.zeros(2)),
        "kernel": lambda: UnifiedSPAttention(mesh, kernel="sdpa")(q, k, k, softcap=2.0),
        "layout": lambda: UnifiedSPAttention(mesh, "strip"),
        "ulysses": lambda: UnifiedSPAttention(mesh, head_groups=2),
        "keys": lambda: UnifiedSPAttention(mesh)(q, None, None),
        "joint": lambda: joint(q, k, k, q, k[..., :4], k),
        "queries": lambda: joint(q, None, None, q, k, k),
        "strategy": lambda: JointAttention(joint.attention, "none"),
        "prefix": lambda: joint(q, k, k, None, k, k, Mask(prefix=torch.tensor([3]))),
        "chunk": lambda: joint(q, k, k, None, k, k, Mask(chunk=2)),
        "pairs": lambda: joint(q, k, k, None, k, k, Mask(cu_seqlens=torch.tensor([0, 3, 8]))),
        "boundaries": lambda: UnifiedSPAttention(mesh)(
            q, odd[:, :2], odd[:, :2], Mask(causal=False, cu_seqlens_k=torch.tensor([0, 9]))
        ),
        "two masks": lambda: UnifiedSPAttention(mesh)(q, k, k, Mask(), causal=False),
        "another plan": lambda: joint.attention(q, k, k, joint.attention.plan(Mask(), wide.shape, wide.shape)),
        "another layout": lambda: UnifiedSPAttention(mesh, layout="contiguous")(
            q, q, q, attention.plan(Mask(), *sizes)
        ),
        "other tokens": lambda: attention(q, q, q, joint.plan(Mask(), *sizes, q.shape)),
        "sequence": lambda: Mask(cu_seqlens=(0, 4)),
        "compiled indices": lambda: torch.compile(SparseAttention(attention), backend="eager", fullgraph=True)(
            q, k, k, torch.zeros(1, 4, 2, dtype=torch.int64)
        ),
        "two compiled": lambda: torch.compile(UnifiedSPAttention(mesh), backend="eager", fullgraph=True)(
            q, k, k, Mask(), causal=False
        ),
        "compiled": lambda: torch.compile(UnifiedSPAttention(mesh), backend="eager", fullgraph=True)(
            q, k, k, return_lse=True
        ),
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises((ValueError, torch._dynamo.exc.Unsupported)) as caught:
            call()
        messages[name] = str(caught.value)
    with pytest.raises(TypeError, match="must be a ParallelMesh or a torch DeviceMesh, got str"):
        UnifiedSPAttention("cuda")
    return messages


@pytest.mark.slow
def test_invalid_calls_raise(ranks: RankPool) -> None:
    found = ranks.run(refusals, 2)[0]
    assert "q must be (batch, tokens, num_heads, head_dim)" in found["dims"]
    assert "keys of another sequence (k has other tokens than q" in found["tokens"]
    assert "have the same dtype and device; got q (1, 4, 4, 8) torch.float32 cpu" in found["dtype"]
    assert "num_kv_heads=2 must divide num_heads=3" in found["heads"]
    assert "seq_len=6 cannot be divided by layout='zigzag'" in found["length"]
    assert "sinks (2,) must have one logit per query head" in found["sinks"]
    assert "kernel='sdpa' cannot compute this call" in found["kernel"]
    assert "layout='strip' must be one of" in found["layout"]
    assert "head_groups=2 must be at least 1, and 1 for ulysses=1" in found["ulysses"]
    assert "k and v, or joint_k and joint_v, or all four must be given; got q (1, 4, 4, 8)" in found["keys"]
    assert "joint_q, joint_k and joint_v must be like q, k and v except for the number of tokens" in found["joint"]
    assert "joint_q needs k, v, joint_k and joint_v, and as many tokens as joint_k" in found["queries"]
    assert "strategy='none' must be front or rear" in found["strategy"]
    assert "joint tokens are not supported with prefix or prefix_tree" in found["prefix"]
    assert "attention in chunks does not support a prefix tree, joint tokens and cross attention" in found["chunk"]
    assert "must be the same (1 without boundaries): cu_seqlens 2, joint_cu_seqlens 1" in found["pairs"]
    assert "cu_seqlens_k ends at 9, past the 4 tokens of a row" in found["boundaries"]
    assert "torch.compile supports attention of a sequence to itself" in found["compiled"]
    for name in ("two masks", "two compiled"):
        assert "are the short form of a mask: give either these or a mask" in found[name]
    assert "the plan is for layout zigzag, and the call has contiguous: make" in found["another layout"]
    assert "the plan is for joint tokens Joint(tokens=4" in found["other tokens"]
    assert "cu_seqlens must be an integer tensor, got tuple" in found["sequence"]
    assert "torch.compile supports attention of a sequence to itself" in found["compiled indices"]
    assert "the plan is for q (1, 6, 4, 8), and the call has (1, 4, 4, 8)" in found["another plan"]


def refused_groups() -> list[str]:
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ulysses=2)), head_groups=3)
    q, k, few = torch.randn(1, 4, 12, 8), torch.randn(1, 4, 6, 8), torch.randn(1, 4, 4, 8)
    messages = []
    for call in (
        lambda: attention(q, few, few),
        lambda: attention(q, k, k, return_lse=True),
        lambda: JointAttention(attention)(q, k, k, None, k, k),
    ):
        with pytest.raises(ValueError, match="head_groups=3") as caught:
            call()
        messages.append(str(caught.value))
    attention(q, k, k)
    return messages


def test_head_groups_are_honoured_or_refused(ranks: RankPool) -> None:
    for few, *others in ranks.run(refused_groups, 2):
        assert few == (
            "head_groups=3 exceeds the 2 KV heads of a rank (num_kv_heads=4, ulysses=2): use head_groups=2 or less"
        )
        assert all("is not supported with joint tokens" in message for message in others)


def exposed_and_replayed() -> tuple[float, float, int]:
    """Return the seconds in which a call waited, the difference of a replay's gradients, and what that sends."""
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ulysses=2, ring=2)), head_groups=2)
    q, k, v = (torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (8, 4, 4))
    exposed, keep, found = attention.time_exposed(), KeepResults(), []
    for kept in (keep, keep.replay()):
        with attention.keeping(kept), SentBytes() as sent:
            out = attention(q, k, v)
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    waited = exposed.take()
    assert exposed.take() == 0.0
    return waited, max(float((x - y).abs().max()) for x, y in zip(*found, strict=True)), sent.total


@pytest.mark.slow
def test_exposed_time_is_measured_and_groups_are_replayed(ranks: RankPool) -> None:
    for waited, *rest in ranks.run(exposed_and_replayed, 4):
        assert waited > 0
        assert rest == [0.0, 0]


def with_heads_inside_out() -> float:
    """Return the largest difference in output and gradients for other strides of q, k and v."""
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims()))
    plain = [torch.randn(1, 200, heads, 16).requires_grad_() for heads in (4, 2, 2)]
    turned = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in plain]
    outs = [attention(*plain), attention(*turned)]
    for out in outs:
        out.sum().backward()
    pairs = [outs, *([x.grad, y.grad] for x, y in zip(plain, turned, strict=True))]
    return max(float((x - y).abs().max()) for x, y in pairs)


def test_results_do_not_depend_on_strides(ranks: RankPool) -> None:
    assert ranks.run(with_heads_inside_out, 1) == [0.0]


@pytest.mark.parametrize("window", [0, (), [4.5, 0], "ab", (1, 2, 3)])
def test_invalid_windows_raise(window: object) -> None:
    with pytest.raises(ValueError, match=r"must be None or \(left, right\)"):
        Mask(window=window)  # type: ignore[arg-type]
    assert Mask(window=[4, 0]) == Mask(window=(4, 0))  # type: ignore[arg-type]


def test_masks_are_equal_by_value_and_keep_no_tensor() -> None:
    boundaries = torch.tensor([0, 4, 8])
    mask = Mask(cu_seqlens=boundaries)
    boundaries[1] = 2  # in place: other documents
    assert mask == Mask(cu_seqlens=((0, 4, 8),)) != Mask(cu_seqlens=boundaries) and hash(mask) == hash(replace(mask))
    assert Mask(cu_seqlens=boundaries.int()) == Mask(cu_seqlens=boundaries) != Mask(cu_seqlens=boundaries[:2])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"chunk": 0}, "chunk=0 must be at least 1 token"),
        ({"cu_seqlens": boundaries.float()}, "cu_seqlens must be integers"),
        ({"tree": [0, 1]}, "tree must be an integer tensor, got list"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            Mask(**options)


def explicit_plans() -> tuple[float, int, int]:
    """Return the difference of calls with a plan from the short form, the plans made, and excess bytes."""
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ulysses=2, ring=2)))
    q, k = torch.randn(2, 8, 4, 8, requires_grad=True), torch.randn(2, 8, 2, 8, requires_grad=True)
    cu_seqlens, found = torch.tensor([0, 5, 32]), []
    plan = attention.plan(Mask(window=(9, 0), cu_seqlens=cu_seqlens), q.shape, k.shape)
    options: dict[str, Any] = {"scale": 0.5, "softcap": 2.0}
    attention(q, k, k, plan, **options)  # ranks compare the program
    made = attention._plans.cache_info().misses
    with SentBytes() as sent:
        found.append(torch.autograd.grad(attention(q, k, k, plan, **options).square().sum(), (q, k)))
    for dtype in (torch.float64, torch.float32):
        attention(q.to(dtype), k.to(dtype), k.to(dtype), plan)
    short = attention(q, k, k, window=(9, 0), cu_seqlens=cu_seqlens, **options)
    found.append(torch.autograd.grad(short.square().sum(), (q, k)))
    worst = max(float((x - y).abs().max()) for x, y in zip(*found, strict=True))
    wire = plan.wire_bytes(torch.float32).total
    return worst, attention._plans.cache_info().misses - made, sent.total - wire


def test_a_plan_is_made_once_for_a_batch(ranks: RankPool) -> None:
    assert ranks.run(explicit_plans, 4) == [(0.0, 0, 0)] * 4


def gradient_of_sinks() -> list[float]:
    """Return the sinks' gradient with more ulysses ranks than heads, when only the sinks require grad."""
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ulysses=4)))
    q, sinks = torch.ones(1, 2, 2, 8), torch.zeros(2, requires_grad=True)
    attention(q, q, q, causal=False, sinks=sinks).sum().backward()
    assert sinks.grad is not None
    dist.all_reduce(sinks.grad)
    return sinks.grad.tolist()


def test_sinks_have_a_gradient_on_idle_ranks(ranks: RankPool) -> None:
    # Every output is 8 w / (1 + 8 w), where w = exp(8 / sqrt(8)): its derivative by the sink is -8 w / (1 + 8 w)^2.
    w = 8 * math.exp(8**0.5)
    expected = -8 * 8 * w / (1 + w) ** 2  # over 8 queries of 8 elements
    for found in ranks.run(gradient_of_sinks, 4):
        assert found == pytest.approx([expected] * 2, rel=1e-5)


def unequal_calls() -> None:
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ring=2, ulysses=2)))
    x = torch.randn(1, 8, 4, 8)
    attention(x, x, x, causal=dist.get_rank() != 3)


def test_mismatched_calls_raise_on_every_rank(ranks: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(unequal_calls, 4)
    assert sorted(caught.value.failures) == [0, 1, 2, 3]
    assert all("the attention call must be the same on all ranks" in text for text in caught.value.failures.values())


def refused_on_one_rank() -> list[str]:
    """Return the messages of calls that are invalid on rank 1 only, each new to all ranks."""
    mesh, one = ParallelMesh.create(ParallelDims(ring=2, ulysses=2)), dist.get_rank() == 1
    x, joint, indices = torch.randn(1, 8, 4, 8), torch.randn(1, 2, 4, 8), torch.zeros(1, 8, 3, dtype=torch.int64)

    def layer() -> UnifiedSPAttention:
        return UnifiedSPAttention(mesh)

    calls: list[Callable[[], Any]] = [
        lambda: layer()(x, x, x, softcap=-1.0 if one else 1.0),
        lambda: layer()(x, x, x, window=3 if one else (3, 0)),  # type: ignore[arg-type]
        lambda: layer()(x, x, x, cu_seqlens=torch.tensor([0, 99 if one else 32])),
        lambda: JointAttention(layer(), every=4)(x, x, x, None, joint, joint, Mask(causal=not one)),
        lambda: SparseAttention(layer())(x, x, x, indices[:, : 8 - one]),
        lambda: layer()(x, x, x, sinks=torch.zeros(4 + one)),
        lambda: layer()(x, x, x, "mask" if one else None),  # type: ignore[arg-type]
    ]
    found = []
    for call in calls:
        with pytest.raises((RanksDisagree, ValueError)) as caught:
            call()
        found.append(f"{caught.type.__name__}: {caught.value}")
    UnifiedSPAttention(mesh)(x, x, x)  # the groups are as before
    return found


@pytest.mark.slow
def test_a_call_that_one_rank_refuses_raises_on_every_rank(ranks: RankPool) -> None:
    reasons = (
        "softcap=-1.0 must be a positive number", "window=3 must be None or",
        "cu_seqlens ends at 99, past the 32 tokens", "joint_every says which joint keys precede a query",
        "indices (1, 7, 3) must be", "sinks (5,) must have one logit", "mask must be a Mask or a plan, got str",
    )  # fmt: skip
    for found in ranks.run(refused_on_one_rank, 4):
        for message, reason in zip(found, reasons, strict=True):
            kind = "TypeError" if reason.startswith("mask") else "ValueError"
            assert message.startswith(f"RanksDisagree: the attention call is refused on rank 1: {kind}: ")
            assert reason in message


def refused_transforms() -> list[str]:
    x, attention = torch.randn(2, 1, 8, 4, 8), UnifiedSPAttention(ParallelMesh.create(ParallelDims(ring=2)))

    def attend(q: torch.Tensor) -> torch.Tensor:
        return attention(q, q, q)

    def forward_mode() -> None:
        with torch.autograd.forward_ad.dual_level():
            attend(torch.autograd.forward_ad.make_dual(x[0], x[0]))

    calls = [
        lambda: torch.vmap(attend)(x),
        lambda: torch.func.grad(lambda q: attend(q).sum())(x[0]),
        lambda: torch.func.jvp(attend, (x[0],), (x[1],)),
        forward_mode,
    ]
    messages = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        messages.append(str(caught.value))
    assert torch.func.functional_call(attention, {}, (x[0],) * 3).shape == x[0].shape
    return messages


@pytest.mark.slow
def test_transforms_of_functions_are_refused(ranks: RankPool) -> None:
    for messages in ranks.run(refused_transforms, 2):
        assert len(messages) == 4
        assert all(text.startswith("attention over several ranks supports neither transforms") for text in messages)


def without_rows() -> list[tuple[int, ...]]:
    """Return the shapes of the results of calls without rows, and of those whose rows are all padding in chunks."""
    attention, found = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ring=2, ulysses=2))), []
    x = torch.randn(0, 8, 4, 8, requires_grad=True)
    indices, function = torch.zeros(0, 8, 3, dtype=torch.int64), lambda b, h, q, k: q >= k + b
    for call in (
        lambda: attention(x, x, x),
        lambda: attention(x, x, x, Mask(chunk=5)),
        lambda: attention(x, x, x, cu_seqlens=torch.zeros(0, 3, dtype=torch.int64)),
        lambda: attention(x, x, x, Mask(function=function)),
        lambda: JointAttention(attention)(x, x, x, *(x[:, :3],) * 3, return_lse=True),
        lambda: SparseAttention(attention)(x, x, x, indices, return_weights=True),
    ):
        results = call()
        results = results if isinstance(results, tuple) else (results,)
        (grad,) = torch.autograd.grad(sum(each.sum() for each in results if each.requires_grad), x)
        assert grad.shape == x.shape
        found += [tuple(each.shape) for each in results]
    rows = torch.ones(2, 8, 4, 8, requires_grad=True)
    for cu_seqlens in (torch.tensor([0, 0]), torch.tensor([[0, 0, 0], [0, 0, 0]])):
        out = attention(rows, rows, rows, Mask(cu_seqlens=cu_seqlens, chunk=3))
        out.sum().backward()
        assert not out.any() and not rows.grad.any()
    return found


def test_batches_without_rows_and_rows_of_padding(ranks: RankPool) -> None:
    out, lse = (0, 8, 4, 8), (0, 8, 4)
    wanted = [out, out, out, out, out, (0, 3, 4, 8), lse, (0, 3, 4), out, (0, 8, 3)]
    assert ranks.run(without_rows, 4) == [wanted] * 4


def refused_while_others_go_on() -> str:
    x, attention = torch.randn(1, 8, 4, 8), UnifiedSPAttention(ParallelMesh.create(ParallelDims(ring=2)))
    with mock.patch.object(groups, "REFUSAL_WAIT", timedelta(milliseconds=100)):
        if dist.get_rank() == 0:
            return ""
        with pytest.raises(ValueError) as caught:
            attention(x, x, x, softcap=-1.0)
    return str(caught.value)


def test_a_rank_that_refuses_what_others_do_not_compare_says_why(ranks: RankPool) -> None:
    assert ranks.run(refused_while_others_go_on, 2)[1].startswith("softcap=-1.0 must be a positive number")


def on_a_device_mesh(names: tuple[str, ...], shape: tuple[int, ...]) -> float:
    """Return the largest difference from a single process."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 16, 4, 8, dtype=torch.float64) for _ in range(3))
    parts = [shard_sequence(x, mesh, "striped") for x in (q, k, v)]
    out = unshard_sequence(UnifiedSPAttention(mesh, "striped")(*parts), mesh, "striped")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return float((out - alone).abs().max())


@pytest.mark.parametrize(
    ("names", "shape"), [(("ring", "ulysses"), (2, 2)), (("dp", "ring"), (2, 2)), (("ulysses",), (4,))]
)
def test_torch_device_mesh_is_supported(ranks: RankPool, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    assert all(difference < 1e-14 for difference in ranks.run(on_a_device_mesh, 4, names, shape))


def wrong_axes() -> None:
    UnifiedSPAttention(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))


def test_device_mesh_must_name_an_axis(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"must name at least one of ring and ulysses"):
        ranks.run(wrong_axes, 2)


def several_meshes_and_checkpointing() -> float:
    """Compare two layers on two meshes, the second checkpointed, with a single process."""
    first, second = (ParallelMesh.create(ParallelDims(**axes)) for axes in ({"ring": 4}, {"ulysses": 2, "ring": 2}))
    torch.manual_seed(0)
    x = torch.randn(1, 32, 4, 8, dtype=torch.float64)
    part = shard_sequence(x, first).requires_grad_()
    one, two = UnifiedSPAttention(first), UnifiedSPAttention(second)
    middle = shard_sequence(unshard_sequence(one(part, part, part), first), second)
    out = checkpoint(two, middle, middle, middle, use_reentrant=False)
    out.square().sum().backward()
    whole = x.clone().requires_grad_()
    y = whole.transpose(1, 2)
    for _ in range(2):
        y = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)
    y.square().sum().backward()
    return float((part.grad - shard_sequence(whole.grad, first)).abs().max())


@pytest.mark.slow
def test_several_meshes_in_one_graph(ranks: RankPool) -> None:
    assert all(difference < 1e-12 for difference in ranks.run(several_meshes_and_checkpointing, 4))


def replayed_with_another_head_dim_of_v() -> tuple[float, int]:
    """Return the largest difference between gradients of a saved and a replayed call, and the bytes that replay sends.

    Replaying needs the step's own head dim of v: a call that differs only in it is refused.
    """
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ulysses=2, ring=2)))
    q, k, v = (torch.randn(1, 8, heads, size, requires_grad=True) for heads, size in ((4, 8), (2, 8), (2, 6)))
    keep = KeepResults()
    with attention.keeping(keep):
        saved = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    with attention.keeping(keep.replay()), SentBytes() as sent:
        out = attention(q, k, v)
    with attention.keeping(keep.replay()), pytest.raises(RuntimeError, match="the same steps in both passes"):
        attention(q, k, v[..., :5])
    replayed = torch.autograd.grad(out.square().sum(), (q, k, v))
    return max(float((x - y).abs().max()) for x, y in zip(saved, replayed, strict=True)), sent.total


def replayed_joint_attention() -> tuple[float, int]:
    """Return the largest difference between gradients of a saved and a replayed call, and the bytes that one sends."""
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ulysses=2, ring=2)))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, tokens, 4, 8, generator=generator).requires_grad_() for tokens in (8, 8, 8, 3, 3, 3)]
    keep, found = KeepResults(), []
    for kept in (keep, keep.replay()):
        with attention.keeping(kept), SentBytes() as sent:
            results = JointAttention(attention)(*tensors, Mask(causal=False), return_lse=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in results), tensors))
    return max(float((x - y).abs().max()) for x, y in zip(*found, strict=True)), sent.total


@pytest.mark.slow
def test_replayed_joint_attention_sends_nothing(ranks: RankPool) -> None:
    assert ranks.run(replayed_joint_attention, 4) == [(0.0, 0)] * 4


def test_a_replayed_call_with_another_head_dim_of_v_sends_nothing(ranks: RankPool) -> None:
    assert ranks.run(replayed_with_another_head_dim_of_v, 4) == [(0.0, 0)] * 4


def log_lines() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("usp.sp.sp_attention")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    attention = UnifiedSPAttention(ParallelMesh.create(ParallelDims(ulysses=4)))
    x = torch.randn(1, 2, 3, 8)
    attention(x, x, x)
    attention(x, x, x)
    return lines


def test_kernel_and_idle_ranks_are_logged_once(ranks: RankPool) -> None:
    first, *others = ranks.run(log_lines, 4)
    assert len(first) == 2 and not any(others)
    assert first[0].startswith(
        "attention kernel: sdpa; flash-attn-4, flash-attn-3, flash-attn-2, aten-flash refused: runs on cuda"
    )
    assert "ulysses=4 exceeds the 3 query heads: 1 of 4 ulysses ranks have no head" in first[1]


def reads_of_boundaries() -> None:
    attention, x, cu = (
        UnifiedSPAttention(ParallelMesh.create(ParallelDims())),
        torch.randn(1, 6, 2, 8),
        torch.tensor([0, 6]),
    )
    with patch("usp.sp.mask.rows_of", wraps=rows_of) as reads:

        def call() -> torch.Tensor:
            return attention(x, x, x, cu_seqlens=cu)

        def read() -> int:
            return sum(args.args[0] is not None for args in reads.call_args_list)

        first = call()
        assert torch.equal(call(), first) and read() == 1  # of a copy to the host, which a GPU would wait for
        cu[-1] = 3
        assert not torch.equal(call(), first) and read() == 2
    with torch.inference_mode():  # whose tensors do not tell that they have changed
        cu = torch.tensor([0, 6])
        first = call()
        cu[-1] = 3
        assert not torch.equal(call(), first)


def test_boundaries_are_read_once_until_they_change(ranks: RankPool) -> None:
    ranks.run(reads_of_boundaries, 1)
