"""`UnifiedSPAttention`, the attention layer of a ring x ulysses mesh, and its operator in graphs of torch.compile.

    graph   ... -> q, k, v -> usp::attention -> out -> ...          usp::attention_backward in the backward graph

A compiler sees only its shapes. The kernels, the messages between ranks and the plan of a call, which depends on the
values of `cu_seqlens`, remain eager code, so that different documents need no other graph.

B batch, S a rank's tokens of each row (seq / (ring * ulysses)), N and K query and KV heads, H head dim, V head dim of
the values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._library import opaque_object
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from usp.attention import (
    LSE_COLUMNS,
    AttentionOp,
    Channel,
    Exposed,
    HeadPlan,
    Joint,
    KeepResults,
    RingProgram,
    SparseProgram,
    UnifiedPlan,
    accumulate_dtype,
    check_kernel_name,
    parse_layout,
    unified_attention,
    unified_backward,
    unified_forward,
    with_mask_mod,
)
from usp.parallel import ParallelMesh

from .kernel_choice import choose_head_groups, choose_kernel, node_here
from .mask import AttentionPlan, LastMasks, Mask
from .sequence import SpAxes, StepKeeper, ulysses_ranks

logger = logging.getLogger(__name__)
Shapes = tuple[tuple[torch.Size, torch.dtype, torch.device] | None, ...]
# Torch has no public names for these; 2.14 warns at the use of those that 2.13 has.
_NEW = hasattr(opaque_object, "register_custom_class")
_CustomClass: Any = (
    import_module("torch._custom_class_base").CustomClassBase
    if _NEW
    else import_module("torch._opaque_base").OpaqueBase
)
CALL = "the attention call"  # on which the ranks agree
NOT_IN_GRAPHS = (
    "torch.compile supports attention of a sequence to itself, with a Mask: call what has joint or cross attention, "
    "return_lse, indices, a function of pairs or a plan under torch.compiler.disable"
)
GATHER = "attention to indices: gather, in plain torch on every device"


class UnifiedSPAttention(StepKeeper, nn.Module):
    """Exact, parameter-free attention over sequences sharded on a ring x ulysses mesh.

    Ulysses exchanges tokens for heads over the ulysses axis, ring attention passes keys and values around the ring axis
    (USP, arXiv 2405.07719). Results match a single process for every supported mask, head count and degree; anything
    else raises an error. Under torch.compile, a call is one operator of the graph.

    Keys of another number of tokens, or with `Mask.cu_seqlens_k`, are of another sequence that is sharded in the same
    layout (cross attention). `JointAttention` and `SparseAttention` run on a layer.

    Args:
        mesh: a ParallelMesh, or a torch DeviceMesh with axes named ring and ulysses.
        layout: one of `usp.attention.LAYOUTS`, or from `usp.attention.layout_name`; must match `shard_sequence` and
            `shard_batch`. balanced divides packed documents so that ranks have equal work under a causal mask, or under
            those of layers whose windows the name has; auto takes it for rows that zigzag would divide unevenly.
        kernel: auto, or one of `usp.attention.KERNEL_NAMES`.
        head_groups: in how many groups of a rank's KV heads, with their query heads, q, k and v are exchanged over the
            ulysses axis: while a group computes, the next one arrives and the previous one's results leave, in both
            passes. A rank sends the same bytes in head_groups times as many messages. None for what
            `choose_head_groups` finds fastest; attention with joint tokens, to another sequence, to indices, with lse
            or with a function that tells heads apart has one.

    Raises ValueError for an unknown layout or kernel, or head_groups that are not positive or without ulysses ranks.
    """

    def __init__(
        self,
        mesh: ParallelMesh | DeviceMesh,
        layout: str = "zigzag",
        kernel: str = "auto",
        head_groups: int | None = None,
    ) -> None:
        super().__init__()
        parse_layout(layout)
        check_kernel_name(kernel)
        self._mesh, self.axes, self.layout, self.kernel = mesh, SpAxes.of(mesh), layout, kernel
        if head_groups is not None and (head_groups < 1 or head_groups > 1 == self.axes.ulysses):
            raise ValueError(
                f"head_groups={head_groups} must be at least 1, and 1 for ulysses=1, which exchanges no heads"
            )
        self.head_groups = head_groups
        self._ulysses, self._ring = Channel(self.axes.ulysses_group), Channel(self.axes.ring_group)
        # Calls repeat from layer to layer and, without documents, from step to step.
        self._plans, self._programs = lru_cache(maxsize=16)(self._plan), lru_cache(maxsize=16)(self._lower)
        self._logged: set[str] = set()
        self.masks = LastMasks()  # of a model's forward, and of calls in the short form
        # Whether few calls have the same length: kernels that need no plan for one come first.
        self.many_lengths = False
        self.calls, self.trees = 0, 0  # trees: calls with a prefix tree
        self.indexer_bytes = 0  # that indexers, which choose the indices of calls, have sent
        self.kernels: set[str] = set()  # names of those that calls have used
        self._handle = Handle(self, (self.axes.ulysses, self.axes.ulysses_rank))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | AttentionPlan | None = None,
        *,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention of this rank's queries over the whole sequence. Collective over both axes.

        Args:
            q: (B, S, N, H).
            k: (B, S, K, H); K divides N.
            v: (B, S, K, V); V may differ from H, as in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
                Messages have the true head dims; a kernel that needs equal ones pads the smaller with zeros.
            mask: which keys each query sees, or the plan that `plan` has made for it, once a batch.
            causal, window, cu_seqlens: the short form of `Mask(causal, window, cu_seqlens)`.
            scale: factor on the scores; 1 / sqrt(H) by default.
            softcap: scores become softcap * tanh(scores / softcap).
            sinks: (N,) logits that join each softmax without a value. Their gradient is this rank's share.
            return_lse: also return the log-sum-exp of each query's scores. It is differentiable.

        Returns:
            (B, S, N, V) in q's dtype; with return_lse a tuple of it and the lse (B, S, N) in float32 (float64 for
            float64).

        Raises:
            RuntimeError: in transforms of torch.func and forward-mode differentiation.
            ValueError: on every rank, for shapes, lengths, documents or a kernel that do not suit the call.
            RanksDisagree: on every rank, if calls that are new to all of them differ, or only some refuse theirs. If
                others repeat a call, which only a model's forward compares, who refuses raises a ValueError after 30 s.
        """
        if torch.compiler.is_compiling():
            mask = _one_mask(mask, causal, window, cu_seqlens)
            return _in_graph(self._handle, (q, k, v, sinks), mask, (scale, softcap), return_lse)
        given = partial(_one_mask, mask, causal, window, cu_seqlens, self.masks)
        return self.run(Call((q, k, v, None, None, None), scale, softcap, sinks, return_lse), given)

    def plan(self, mask: Mask, q: torch.Size, k: torch.Size) -> AttentionPlan:
        """Return the plan of attention with a mask on this rank's q and k of these sizes, (B, S, N, H) and (B, S, K,
        H). No communication: ranks agree on the plan in its first call. Raises ValueError for documents that do not fit
        the sequence, and a length that the layout cannot divide."""
        return self._plans(mask, q, k, None, torch.device(self.axes.device_type))

    def run(self, call: Call, mask: Callable[[], Mask | AttentionPlan]) -> Tensor | tuple[Tensor, ...]:
        """Return the results of a call. Collective; raises as `forward`. mask: returns that of the call, or refuses."""
        if torch.compiler.is_compiling():
            raise ValueError(NOT_IN_GRAPHS)
        q, k, v, *joint = call.tensors
        of_sparse = {"indices": call.indices, "return_weights": call.return_weights}
        more: Any = {"sinks": call.sinks, "joint": tuple(joint), "return_lse": call.return_lse, **of_sparse}
        results = unified_attention(q, k, v, self.prepared(call, mask), **more)
        return results[0] if len(results) == 1 else tuple(results)

    def prepared(self, call: Call, mask: Callable[[], Mask | AttentionPlan]) -> AttentionOp:
        """Check a call and count it; return what it runs. If only some ranks refuse it, raise RanksDisagree on every
        rank."""
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            raise RuntimeError(
                "attention over several ranks supports neither transforms of torch.func (vmap, grad, jvp) nor "
                "forward-mode differentiation: use the batch dim, and torch.autograd.grad or backward()"
            )
        try:
            lowered = mask(), call.described(), (call.front, call.every), self.many_lengths
            plan, program = self.keep(("plan", *lowered), lambda: self._programs(*lowered))
        except (ValueError, TypeError) as error:
            self.axes.agree(error, CALL)
            raise
        counts = self.__dict__  # assignment to a module's attribute takes microseconds
        counts["calls"] += 1
        counts["trees"] += plan.spec.parents is not None
        return AttentionOp(plan, program, self._ulysses, self._ring, self.keep)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnifiedSPAttention:
        """Share the process groups, which cannot be copied."""
        return UnifiedSPAttention(self._mesh, self.layout, self.kernel, self.head_groups)

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.axes.ranks

    def gathered(self, x: Tensor) -> Tensor:
        """Return the tokens x (B, n, ...) of all ranks, (B, ranks * n, ...), rank by rank. Collective."""
        for channel in (self._ulysses, self._ring):
            if channel.size > 1:
                x = channel.all_gather(x).transpose(0, 1).flatten(1, 2)
        return x

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent through this module so far, and for the indices that it was given."""
        return self._ulysses.sent_bytes + self._ring.sent_bytes + self.indexer_bytes

    def time_exposed(self) -> Exposed:
        """Measure from now on how long this rank's attention waits for messages; return what has the seconds."""
        self._ulysses.exposed = self._ring.exposed = self._ring.exposed or Exposed(self.axes.device_type)
        return self._ring.exposed

    def extra_repr(self) -> str:
        return f"ring={self.axes.ring}, ulysses={self.axes.ulysses}, layout={self.layout!r}, kernel={self.kernel!r}"

    def _plan(
        self, mask: Mask, q: torch.Size, k: torch.Size | None, joint: tuple[Joint, int] | None, device: torch.device
    ) -> AttentionPlan:
        """Return the plan of a call. joint: its joint tokens, and the number of their KV heads."""
        seq_len, key_len = q[1] * self.ranks, 0 if k is None else None
        if k is not None and (k[1] != q[1] or mask.cu_seqlens_k is not None):
            key_len = k[1] * self.ranks
        of_joint, kv_heads = joint or (None, 0)
        spec = mask.spec(seq_len, key_len, of_joint)
        layout = self.axes.layout(self.layout, seq_len, cast(Any, mask.cu_seqlens))
        key_layout = self.axes.layout(self.layout, key_len, spec.key_documents) if key_len else None
        if mask.function is not None:
            spec = with_mask_mod(spec, mask.function, q[0], q[2], seq_len, device)
        by_head = spec.function is not None and spec.function.by_head
        heads = HeadPlan(q[2], kv_heads if k is None else k[2], self.axes.ulysses)
        ranks = self.axes.ring_rank, self.axes.ulysses_rank
        unified = UnifiedPlan.make(layout, spec, heads, q[0], *ranks, key_layout)
        made_for = self._sizes(q, k, of_joint)
        return AttentionPlan(unified, made_for, unified.of_itself and not by_head)

    def _sizes(self, q: torch.Size, k: torch.Size | None, joint: Joint | None) -> dict[str, Any]:
        """Return what a plan is made for, beside its mask."""
        joint = None if joint is None else replace(joint, documents=None)
        ranks = self.axes.ring, self.axes.ulysses, self.axes.ring_rank, self.axes.ulysses_rank
        sizes = {"q": tuple(q), "k": k and tuple(k), "joint tokens": joint}
        return sizes | {"layout": self.layout, "ring, ulysses and this rank of both": ranks}

    def _lower(
        self, mask: Mask | AttentionPlan, call: CallFacts, of_joint: tuple[bool, int], many_lengths: bool
    ) -> tuple[UnifiedPlan, RingProgram | SparseProgram]:
        """Check a call, and return its plan and program. Collective."""
        plan = self._plan_of(mask, call, of_joint)
        q, dtype, device = call.shapes[0]  # type: ignore[misc]
        v_head_dim = next(x[0][3] for x in (call.shapes[2], call.shapes[5]) if x is not None)
        spec = replace(plan.unified.spec, scale=call.scale, softcap=call.softcap)
        heads = self._in_groups(plan.unified.heads, plan.of_itself and not (call.sparse or call.return_lse))
        unified = replace(plan.unified, spec=spec, heads=heads)
        kv_index = heads.kv_index(unified.ulysses_rank)
        if call.sparse:
            return unified, self._lower_sparse(unified, device, (q[3], v_head_dim, dtype, call.sparse), kv_index)
        attends = spec, device, dtype, q[3], v_head_dim + LSE_COLUMNS * call.lse_gradient
        kernel, choice, slow = choose_kernel(self.kernel, *attends, unified.layout, many_lengths)
        self.kernels.add(kernel.name)
        here = node_here(device) if self.head_groups is None and self.axes.ulysses > 1 else None
        if here is not None:
            sizes, exchanging = (q[3], v_head_dim, dtype), ulysses_ranks(self._mesh)
            groups = choose_head_groups(here, unified, kernel, *sizes, exchanging, dist.get_world_size())
            unified = replace(unified, heads=(heads := replace(heads, groups=groups)))
        by_group = [each.kv_index(unified.ulysses_rank) for each in heads.by_group] if heads.groups > 1 else ()
        program = RingProgram.lower(unified.ring, spec, kernel, device, dtype, kv_index, by_group)
        of_kernel = q[3], v_head_dim, str(dtype), kernel.name
        self.axes.agree((unified.layout, unified.key_layout, spec, heads, unified.batch, *of_kernel), CALL)
        self._log(logging.INFO, choice)
        for warning in (slow, *ulysses_violations(heads.num_heads, heads.ulysses)):
            self._log(logging.WARNING, warning)
        return unified, program

    def _plan_of(self, mask: Mask | AttentionPlan, call: CallFacts, of_joint: tuple[bool, int]) -> AttentionPlan:
        """Return the plan of a call. Raises ValueError for tensors that do not fit each other, or another's plan."""
        _check_tensors(call.shapes, call.sinks)
        q, k, _, joint_q, joint_k, _ = (None if x is None else x[0] for x in call.shapes)
        assert q is not None and call.shapes[0] is not None
        front, every = of_joint
        if joint_k is None and every:
            raise ValueError(f"every={every} is of joint keys: give joint_k and joint_v")
        rows: Any = mask.joint_cu_seqlens if isinstance(mask, Mask) else None
        joint = None if joint_k is None else Joint(joint_k[1], bool(joint_q), not k, front, rows, every)
        if isinstance(mask, Mask):
            return self._plans(mask, q, k, joint and (joint, joint_k[2]), call.shapes[0][2])  # type: ignore[index]
        sizes = self._sizes(q, k, joint)
        if differing := [
            f"the plan is for {name} {mask.made_for[name]}, and the call has {value}"
            for name, value in sizes.items()
            if value != mask.made_for[name]
        ]:
            raise ValueError(f"{'; '.join(differing)}: make a plan for each batch, by the layer that it is for")
        return mask

    def _in_groups(self, heads: HeadPlan, of_itself: bool) -> HeadPlan:
        """Return the heads of all ranks, in groups; raise ValueError if there are not so many."""
        if self.head_groups is None:
            return heads
        most = max(map(heads.kv_width, range(heads.ulysses))) if of_itself else 1
        if self.head_groups > most:
            raise ValueError(
                f"head_groups={self.head_groups} exceeds the {most} KV heads of a rank (num_kv_heads="
                f"{heads.num_kv_heads}, ulysses={heads.ulysses}): use head_groups={most} or less"
                if of_itself
                else f"head_groups={self.head_groups} is not supported with joint tokens, keys of another sequence, "
                f"indices, return_lse or a function that tells heads apart: use head_groups=1"
            )
        return replace(heads, groups=self.head_groups)

    def _lower_sparse(
        self, plan: UnifiedPlan, device: torch.device, described: tuple[Any, ...], kv_index: tuple[int, ...] | None
    ) -> SparseProgram:
        if self.kernel != "auto":
            raise ValueError(f"kernel={self.kernel!r} cannot attend to indices: use kernel='auto'")
        *by_head, _, block = described[-1]
        options: Any = device, kv_index, None, None, block
        if by_head:
            options = device, None, plan.sparse_heads, plan.heads.even_places(plan.ulysses_rank), block
        program = SparseProgram.of(plan.layout, plan.spec, plan.batch, plan.ring.rank, *options)
        self.kernels.add("gather")
        call = (plan.layout, plan.spec, plan.heads, plan.batch, *map(str, described))
        self.axes.agree(call, CALL)
        self._log(logging.INFO, GATHER)
        return program

    def _log(self, level: int, line: str) -> None:
        if line and line not in self._logged and (not dist.is_initialized() or dist.get_rank() == 0):
            self._logged.add(line)
            logger.log(level, line)


class JointAttention(nn.Module):
    """Attention to sharded and to joint tokens, which are the same on all ranks, as the text beside an image in
    diffusion transformers: queries attend to both, and every rank gets the results of joint queries. Joint keys and
    values are never sent. Like losses, gradients add up over the ranks: each rank gets a share of the gradients of
    joint q, k and v, and a loss on the results of joint queries counts once for every rank.

    Args:
        attention: the layer that it runs on.
        strategy: under a causal mask, joint tokens precede all others ("front") or follow ("rear"), else ValueError.
        every: if not 0, joint key j is seen from its document's token (j + 1) * every - 1 on.
    """

    def __init__(self, attention: UnifiedSPAttention, strategy: str = "front", every: int = 0) -> None:
        super().__init__()
        if strategy not in ("front", "rear"):
            raise ValueError(f"strategy={strategy!r} must be front or rear")
        self.attention, self._of_joint = attention, (strategy == "front", every)

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        joint_q: Tensor | None,
        joint_k: Tensor,
        joint_v: Tensor,
        mask: Mask | AttentionPlan | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention of this rank's and the joint queries. Collective over both axes.

        Args:
            q, k, v: as of `UnifiedSPAttention`. k and v are None if there are only joint keys; no rank sends anything
                then.
            joint_q, joint_k, joint_v: (B, J, N, H), (B, J, K, H), (B, J, K, V); joint_q may be None.
            mask: of `UnifiedSPAttention`; a window does not limit what joint tokens see and who sees them.

        Returns (B, S, N, V) in q's dtype, or a tuple of out, joint_out (B, J, N, V), lse and joint_lse, without those
        that were not asked for; raises as `UnifiedSPAttention`.
        """
        call = Call((q, k, v, joint_q, joint_k, joint_v), scale, softcap, sinks, return_lse, *self._of_joint)
        return self.attention.run(call, partial(_one_mask, mask))

    def plan(
        self, mask: Mask, q: torch.Size, k: torch.Size | None, joint_k: torch.Size, joint_queries: bool = True
    ) -> AttentionPlan:
        """Return the plan of calls of these sizes, as `UnifiedSPAttention.plan`."""
        front, every = self._of_joint
        joint = Joint(joint_k[1], joint_queries, k is None, front, cast(Any, mask.joint_cu_seqlens), every)
        return self.attention._plans(mask, q, k, (joint, joint_k[2]), torch.device(self.attention.axes.device_type))


class SparseAttention(nn.Module):
    """Attention of each query to keys of its own choice, as DeepSeek V3.2's, which an indexer makes. attention: the
    layer that it runs on."""

    def __init__(self, attention: UnifiedSPAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indices: Tensor,
        mask: Mask | AttentionPlan | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        index_block: int = 1,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention of this rank's queries to the chosen keys. Collective over both axes.

        Args:
            q, k, v: as of `UnifiedSPAttention`.
            indices: (B, S, k), or (B, S, K, k) by KV head without sinks: global positions to attend to if the mask
                shows them, each the first of `index_block`; negative for none.
            mask: of `UnifiedSPAttention`, without a prefix, a tree and a function.
            return_weights: also return the weights (B, S, k) of `indices`, summed over heads and blocks, in float32
                (float64 for float64), without gradients.

        Returns (B, S, N, V) in q's dtype, with return_weights a tuple of it and these; raises as `UnifiedSPAttention`.
        """
        call = Call((q, k, v, *[None] * 3), scale, softcap, sinks, False, True, 0, indices, index_block, return_weights)
        return self.attention.run(call, partial(_one_mask, mask))


class CallFacts(NamedTuple):
    """What the program of a call depends on beside its mask."""

    shapes: Shapes
    sinks: torch.Size | None
    scale: float | None
    softcap: float | None
    return_lse: bool = False
    lse_gradient: bool = False
    sparse: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an attention layer, but for its mask. tensors: q, k, v, and the joint ones. front, every: of
    `JointAttention`."""

    tensors: tuple[Any, ...]
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    return_lse: bool = False
    front: bool = True
    every: int = 0
    indices: Tensor | None = None
    index_block: int = 1
    return_weights: bool = False

    def described(self) -> CallFacts:
        """Raises ValueError for indices that do not fit."""
        shapes = tuple([None if x is None else (x.shape, x.dtype, x.device) for x in self.tensors])
        trained = self.return_lse and any(x is not None and x.requires_grad for x in (*self.tensors, self.sinks))
        sinks, lse_gradient = None if self.sinks is None else self.sinks.shape, trained and torch.is_grad_enabled()
        sparse = () if self.indices is None else _sparse(self)
        return CallFacts(shapes, sinks, self.scale, self.softcap, self.return_lse, lse_gradient, sparse)


class Handle(_CustomClass):
    """An attention layer, or what checks a forward, as an argument of the operators: graphs take it as an input, so
    layers share a graph.

    A handle lives as long as its layer: graphs have no reference to it.

    shape_facts: what the shapes of the results depend on besides the tensors'. Layers that differ in them share no
    graphs.
    """

    def __init__(self, layer: Any, shape_facts: tuple[int, ...]) -> None:
        self.layer, self.shape_facts = layer, shape_facts

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a part of the key under which inductor stores graphs; it is never loaded."""
        return Handle, (None, self.shape_facts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        """Return this handle, which torch 2.11 copies where it traces."""
        return self


_register, _kind = ("register_custom_class", "symbolic") if _NEW else ("register_opaque_type", "reference")
getattr(opaque_object, _register)(Handle, typ=_kind, guard_fn=lambda handle: [handle.shape_facts])


@torch.library.custom_op("usp::attention", mutates_args=())
def attend(
    handle: Handle,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rows: list[Tensor],
    mask: list[int],
    scale: float | None,
    softcap: float | None,
) -> list[Tensor]:
    """Return attention's output (B, S, N, V), and what `attend_backward` needs besides the arguments. rows, mask: of
    `_in_graph`."""
    layer: UnifiedSPAttention = handle.layer
    if violations := ulysses_violations(q.shape[2], layer.axes.ulysses):
        raise ValueError(f"torch.compile needs a query head on every rank: {'; '.join(violations)}")
    operation = layer.prepared(Call((q, k, v, None, None, None), scale, softcap, sinks), partial(_mask, rows, mask))
    out, *saved = unified_forward(q, k, v, operation, sinks)
    # The graph may write over what the operator returns.
    results = [out, *(saved if operation.plan.heads.groups == 1 else _joined(saved))]
    kept = isinstance(layer.keep, KeepResults)
    return [x.clone(memory_format=torch.contiguous_format) if kept else x.contiguous() for x in results]


@attend.register_fake
def _(handle, q, k, v, *options):
    axes = getattr(handle, "real_obj", handle).layer.axes  # a handle is wrapped while a graph is traced
    # Plans divide heads, so that their numbers must not be symbolic.
    heads, rank = HeadPlan(int(q.shape[2]), int(k.shape[2]), axes.ulysses), axes.ulysses_rank
    tokens, width, v_head_dim = q.shape[0] * q.shape[1] * axes.ulysses, heads.q_width(rank), v.shape[3]
    results = [q.new_empty(*q.shape[:3], v_head_dim), q.new_empty(tokens, width, dtype=accumulate_dtype(q.dtype))]
    if axes.ulysses > 1:
        results.append(q.new_empty(tokens, heads.elements(rank, q.shape[3], v_head_dim)))
        results.append(q.new_empty(tokens, width, v_head_dim))
    return results


@torch.library.custom_op("usp::attention_backward", mutates_args=())
def attend_backward(
    handle: Handle,
    dout: Tensor,
    saved: list[Tensor],
    head_dim: int,
    kv_heads: int,
    sinks: Tensor | None,
    rows: list[Tensor],
    mask: list[int],
    scale: float | None,
    softcap: float | None,
) -> list[Tensor]:
    """Return the gradients of q, k, v and, if given, sinks; `saved` as in `usp.attention.unified_backward`."""
    layer: UnifiedSPAttention = handle.layer
    batch, tokens, num_heads, v_head_dim = dout.shape
    sizes = ((num_heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim))
    shapes = [(torch.Size((batch, tokens, *size)), dout.dtype, dout.device) for size in sizes]
    call = CallFacts((*shapes, None, None, None), None if sinks is None else sinks.shape, scale, softcap)
    plan, program = layer._programs(_mask(rows, mask), call, (True, 0), False)
    if plan.heads.groups > 1:
        saved = _parted(saved, plan.heads, layer.axes.ulysses_rank, head_dim)
    grads = unified_backward(dout, saved, head_dim, AttentionOp(plan, program, layer._ulysses, layer._ring), sinks)
    return [x.contiguous() for x in grads]


def _joined(saved: Sequence[Tensor]) -> list[Tensor]:
    """Return the lse, q, k and v, and out of all groups of heads, one after another, in the shapes of a single one."""
    tokens, v_head_dim = len(saved[0]), saved[2].shape[2]
    shapes = (tokens, -1), (tokens, -1), (tokens, -1, v_head_dim)
    return [torch.cat([x.flatten() for x in saved[kind::3]]).view(shape) for kind, shape in enumerate(shapes)]


def _parted(saved: Sequence[Tensor], heads: HeadPlan, rank: int, head_dim: int) -> list[Tensor]:
    """Invert `_joined`."""
    tokens, v_head_dim = len(saved[0]), saved[2].shape[2]
    widths = [each.q_width(rank) for each in heads.by_group]
    elements = [each.elements(rank, head_dim, v_head_dim) for each in heads.by_group]
    lse, qkv, out = (
        x.flatten().split([tokens * size for size in sizes])
        for x, sizes in zip(saved, (widths, elements, [width * v_head_dim for width in widths]), strict=True)
    )
    groups = zip(lse, qkv, out, widths, strict=True)
    return [
        x.view(tokens, *shape)
        for a, b, c, width in groups
        for x, shape in ((a, (width,)), (b, (-1,)), (c, (width, v_head_dim)))
    ]


@attend_backward.register_fake
def _(handle, dout, saved, head_dim, kv_heads, sinks, *options):
    rows, tokens, heads, v_head_dim = dout.shape
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim)]
    grads = [dout.new_empty(rows, tokens, *shape) for shape in shapes]
    return grads if sinks is None else [*grads, torch.empty_like(sinks)]


def _save(ctx, inputs, output):
    handle, q, k, v, sinks, rows, *ctx.options = inputs
    ctx.handle, ctx.sizes, ctx.rows = handle, (q.shape[-1], k.shape[2]), len(rows)
    out, lse, *exchanged = output
    saved = (lse, *exchanged) if exchanged else (out, lse, q, k, v)
    ctx.save_for_backward(sinks, *rows, *saved)


def _backward(ctx, grads):
    sinks, *tensors = ctx.saved_tensors
    rows, saved = tensors[: ctx.rows], tensors[ctx.rows :]
    dq, dk, dv, *dsinks = attend_backward(ctx.handle, grads[0], saved, *ctx.sizes, sinks, rows, *ctx.options)
    return None, dq, dk, dv, *(dsinks or [None]), [None] * len(rows), None, None, None


attend.register_autograd(_backward, setup_context=_save)


def ulysses_violations(num_heads: int, ulysses: int) -> list[str]:
    """Return a message if some Ulysses ranks would have no query head, else an empty list."""
    if ulysses <= num_heads:
        return []
    return [
        f"ulysses={ulysses} exceeds the {num_heads} query heads: {ulysses - num_heads} of {ulysses} ulysses ranks have "
        f"no head; use ulysses={num_heads} or less and move the remaining ranks to ring"
    ]


def _check_tensors(shapes: Shapes, sinks: torch.Size | None) -> None:
    """Raise ValueError for violations in the shapes of q, k, v, joint_q, joint_k and joint_v."""
    named = zip(("q", "k", "v", "joint_q", "joint_k", "joint_v"), shapes, strict=True)
    given = {name: x for name, x in named if x is not None}
    sizes = {name: tuple(size) for name, (size, *_) in given.items()}
    keys = [pair for pair in (("k", "v"), ("joint_k", "joint_v")) if sizes.keys() & pair]
    violations = []
    if not keys or not all(sizes.keys() >= set(pair) for pair in keys):
        violations.append("k and v, or joint_k and joint_v, or all four must be given")
    elif any(len(size) != 4 for size in sizes.values()) or any(sizes[k][:3] != sizes[v][:3] for k, v in keys):
        violations.append(
            "q must be (batch, tokens, num_heads, head_dim), k (batch, tokens, num_kv_heads, head_dim), and v the same "
            "as k except for its own head_dim"
        )
    else:
        pairs = [(sizes[name], sizes[f"joint_{name}"]) for name in "qkv" if {name, f"joint_{name}"} <= sizes.keys()]
        if any((x[0], *x[2:]) != (y[0], *y[2:]) for x, y in pairs):
            violations.append("joint_q, joint_k and joint_v must be like q, k and v except for the number of tokens")
        if "joint_q" in sizes and (len(keys) < 2 or sizes["joint_q"][1] != sizes["joint_k"][1]):
            violations.append("joint_q needs k, v, joint_k and joint_v, and as many tokens as joint_k")
        if any((sizes["q"][0], sizes["q"][3]) != (sizes[k][0], sizes[k][3]) for k, _ in keys):
            violations.append("q and k must have the same batch and head_dim")
    if len({each[1:] for each in given.values()}) > 1:
        violations.append(f"{', '.join(given)} must have the same dtype and device")
    if sinks is not None and tuple(sinks) != sizes["q"][2:3]:
        violations.append(f"sinks {tuple(sinks)} must have one logit per query head")
    if violations:
        listed = ", ".join(f"{name} {tuple(x[0])} {x[1]} {x[2]}" for name, x in given.items())
        raise ValueError(f"{'; '.join(violations)}; got {listed}")


def _one_mask(
    mask: Mask | AttentionPlan | None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    masks: LastMasks | None = None,
) -> Mask | AttentionPlan:
    """Return the mask of a call, or that of its short form."""
    if mask is None:  # inference tensors do not tell whether they have changed
        again = masks is None or (isinstance(cu_seqlens, Tensor) and cu_seqlens.is_inference())
        return Mask(causal, window, cu_seqlens) if again else masks(causal, window, None, cu_seqlens, None, None)  # type: ignore[misc]
    if not isinstance(mask, Mask | AttentionPlan):
        raise TypeError(f"mask must be a Mask or a plan, got {type(mask).__name__}")
    if not causal or window is not None or cu_seqlens is not None:
        raise ValueError("causal, window and cu_seqlens are the short form of a mask: give either these or a mask")
    return mask


def _in_graph(handle: Handle, tensors: Any, mask: Any, scaling: tuple[float | None, ...], return_lse: bool) -> Tensor:
    """Return the operator's output for q, k, v and sinks, if a graph supports the call."""
    q, k, *_ = tensors
    if return_lse or isinstance(mask, AttentionPlan) or k.shape[1] != q.shape[1] or mask.function is not None:
        raise ValueError(NOT_IN_GRAPHS)
    given = mask.cu_seqlens, mask.prefix, mask.tree
    rows = [x if isinstance(x, Tensor) else torch.tensor(x) for x in given if x is not None]
    numbers = [int(mask.causal), *(mask.window or (-1, -1)), mask.chunk or 0, *(int(x is not None) for x in given)]
    return attend(handle, *tensors, rows, numbers, *scaling)[0]


def _sparse(call: Call) -> tuple[int, ...]:
    """Return the shape of a query's indices and how many keys each stands for; raise ValueError for those that do not
    fit the call."""
    indices, block = call.indices, call.index_block
    assert indices is not None
    (q, k, *_), violations, by_head = call.tensors, [], indices.dim() == 4
    assert q is not None and k is not None
    heads = (k.shape[2],) * by_head
    if indices.shape[:-1] != (*q.shape[:2], *heads) or not indices.shape[-1]:
        violations.append(
            f"indices {tuple(indices.shape)} must be (batch, tokens, k) or (batch, tokens, num_kv_heads, k) for q "
            f"{tuple(q.shape)}"
        )
    if block < 1:
        violations.append(f"index_block={block} must be at least 1 position")
    if by_head and (call.return_weights or call.sinks is not None):
        violations.append("sinks and return_weights are not supported with indices of each KV head: leave them out")
    if indices.dtype not in (torch.int32, torch.int64) or indices.device != q.device:
        violations.append(f"indices must be int32 or int64 on {q.device}, got {indices.dtype} on {indices.device}")
    if violations:
        raise ValueError("; ".join(violations))
    return *indices.shape[2:], block


def _mask(rows: Sequence[Tensor], numbers: Sequence[int]) -> Mask:
    """Return the mask that an operator of `_in_graph` gets."""
    (causal, left, right, chunk, *given), tensors = numbers, iter(rows)
    cu_seqlens, prefix, tree = (next(tensors) if each else None for each in given)
    return Mask(bool(causal), (left, right), cu_seqlens, prefix, tree, chunk or None)
