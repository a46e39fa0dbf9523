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
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._library import opaque_object
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from usp.attention import (
    LSE_COLUMNS,
    AttentionSpec,
    Channel,
    Exposed,
    HeadPlan,
    Joint,
    KeepResults,
    MaskMod,
    RingProgram,
    SequenceLayout,
    SparseProgram,
    UnifiedPlan,
    WireBytes,
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
from .sequence import SpAxes, StepKeeper, documents_of, rows_of, ulysses_ranks

logger = logging.getLogger(__name__)
Rows = tuple[tuple[int, ...], ...] | None
Described = tuple[torch.Size, torch.dtype, torch.device]
# Torch has no public names for these; 2.14 warns at the use of those that 2.13 has.
_NEW = hasattr(opaque_object, "register_custom_class")
_CustomClass: Any = (
    import_module("torch._custom_class_base").CustomClassBase
    if _NEW
    else import_module("torch._opaque_base").OpaqueBase
)
CALL = "the attention call"  # on which the ranks agree
GATHER = "attention to indices: gather, in plain torch on every device"


class UnifiedSPAttention(StepKeeper, nn.Module):
    """Exact, parameter-free attention over sequences sharded on a ring x ulysses mesh.

    Ulysses exchanges tokens for heads over the ulysses axis, ring attention passes keys and values around the ring axis
    (USP, arXiv 2405.07719). Results match a single process for every supported mask, head count and degree; anything
    else raises an error. Under torch.compile, a call is one operator of the graph.

    Keys of another number of tokens, or with `cu_seqlens_k`, are of another sequence that is sharded in the same layout
    (cross attention). Joint tokens are the same on all ranks, as the text beside an image in diffusion transformers:
    queries attend to the sharded and the joint keys, and every rank gets the results of joint queries. Joint keys and
    values are never sent. Like losses, gradients add up over the ranks: each rank gets a share of the gradients of
    joint q, k and v, and a loss on the results of joint queries counts once for every rank.

    Args:
        mesh: a ParallelMesh, or a torch DeviceMesh with axes named ring and ulysses.
        layout: one of `usp.attention.LAYOUTS`, or from `usp.attention.layout_name`; must match `shard_sequence` and
            `shard_batch`. balanced divides packed documents so that ranks have equal work under a causal mask, or under
            those of layers whose windows the name has; auto takes it for rows that zigzag would divide unevenly.
        kernel: auto, or one of `usp.attention.KERNEL_NAMES`.
        dkv_dtype: of the partial gradients of k and v that travel the ring: that of k and v, with which half-precision
            messages are half as large and each hop rounds; None for float32 (float64 for float64).
        head_groups: in how many groups of a rank's KV heads, with their query heads, q, k and v are exchanged over the
            ulysses axis: while a group computes, the next one arrives and the previous one's results leave, in both
            passes. A rank sends the same bytes in as many times more messages. None for what `choose_head_groups`
            finds fastest; attention with joint tokens, to another sequence, to indices, with lse or with a mask_mod
            that tells heads apart has one.

    Raises ValueError for an unknown layout or kernel, or head_groups that are not positive or without ulysses ranks.
    """

    def __init__(
        self,
        mesh: ParallelMesh | DeviceMesh,
        layout: str = "zigzag",
        kernel: str = "auto",
        dkv_dtype: torch.dtype | None = None,
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
        self.dkv_dtype, self.head_groups = dkv_dtype, head_groups
        self._ulysses, self._ring = Channel(self.axes.ulysses_group), Channel(self.axes.ring_group)
        # Calls repeat from layer to layer and, without documents, from step to step.
        self._prepare = lru_cache(maxsize=16)(self._prepare_uncached)
        self._described = lru_cache(maxsize=16)(self._describe)
        self._last_call, self._last_plan = LastResult(self._look_up), LastResult(lambda _, *call: self._prepare(*call))
        self._logged: set[str] = set()
        self.calls, self.trees = 0, 0  # trees: calls with a prefix tree
        self.indexer_bytes = 0  # that indexers, which choose the indices of calls, have sent
        self.kernels: set[str] = set()  # names of those that calls have used
        self.many_lengths = False  # few calls have the same length: kernels that need no time to get ready come first
        self._handle = Handle(self, (self.axes.ulysses, self.axes.ulysses_rank))

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        causal: bool = True,
        scale: float | None = None,
        window: tuple[int, int] | None = None,
        softcap: float | None = None,
        cu_seqlens: Tensor | None = None,
        sinks: Tensor | None = None,
        prefix: Tensor | None = None,
        chunk: int | None = None,
        prefix_tree: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        joint_q: Tensor | None = None,
        joint_k: Tensor | None = None,
        joint_v: Tensor | None = None,
        joint_strategy: str = "front",
        joint_cu_seqlens: Tensor | None = None,
        return_lse: bool = False,
        indices: Tensor | None = None,
        return_weights: bool = False,
        mask_mod: MaskMod | None = None,
        index_block: int = 1,
        joint_every: int = 0,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute attention of this rank's queries over the whole sequence. Collective over both axes.

        Args:
            q: (B, S, N, H).
            k: (B, S, K, H); K divides N. k and v are None if there are only joint keys; no rank sends anything then.
            v: (B, S, K, V); V may differ from H, as in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
                Messages have the true head dims; a kernel that needs equal ones pads the smaller with zeros.
            causal: mask later keys.
            scale: factor on the scores; 1 / sqrt(H) by default.
            window: (left, right) in global tokens, -1 for no limit.
            softcap: scores become softcap * tanh(scores / softcap).
            cu_seqlens: global boundaries of packed documents, integers, (documents + 1,) for all rows or (B, documents
                + 1) padded by repeating the last; later tokens output zero. On a GPU it costs a synchronization.
            sinks: (N,) logits that join each softmax without a value. Their gradient is this rank's share.
            prefix: for a prefix-LM mask, how many leading tokens of each document attend to each other in both
                directions (within `window`): integers (documents,) or (B, documents). Needs causal=True.
            chunk: tokens attend within their chunk of this many tokens, counted from the document's first token.
            prefix_tree: (documents,) or (B, documents) integers: the index of the earlier document that each one
                continues, or -1. Its tokens also attend to the documents it continues, so that samples with a common
                prefix have it once. Positions and windows count from the root. Needs causal=True and cu_seqlens.
            cu_seqlens_k: of cross attention (causal=False, no window), of the keys: document n is seen by document n.
            joint_q, joint_k, joint_v: (B, J, N, H), (B, J, K, H), (B, J, K, V), without a window; joint_q may be None.
            joint_strategy: under a causal mask, joint tokens precede all others ("front") or follow them ("rear").
            joint_cu_seqlens: boundaries of the joint tokens of each document, if there are several, or for padding.
            return_lse: also return the log-sum-exp of each query's scores. It is differentiable.
            indices: (B, S, k), or (B, S, K, k) by KV head without sinks: global positions to attend to if the mask
                shows them, each the first of `index_block`; negative for none. No prefix, prefix_tree, joint tokens.
            return_weights: also return the weights of `indices`, summed over heads and blocks, without gradients.
            mask_mod: FlexAttention's function of row, head, query and key position; both the mask (pass causal=False)
                and it must show a pair. It is evaluated once: another mask needs another function.
            joint_every: if not 0, joint key j is seen from its document's token (j + 1) * joint_every - 1 on.

        Returns:
            (B, S, N, V) in q's dtype, or a tuple of out, joint_out, lse (B, S, N) in float32 (float64 for float64),
            joint_lse and weights (B, S, k) in that dtype, without those that were not asked for.

        Raises:
            RuntimeError: in transforms of torch.func and forward-mode differentiation.
            ValueError: on every rank, for shapes, lengths, documents or a kernel that do not suit the call.
            RanksDisagree: on every rank, if calls that are new to all of them differ, or only some refuse theirs. If
                others repeat a call, which only a model's forward compares, who refuses raises a ValueError after 30 s.
        """
        masked = cu_seqlens, prefix, prefix_tree, causal, scale
        tensors, rows = (q, k, v, joint_q, joint_k, joint_v), (cu_seqlens_k, joint_cu_seqlens)
        if torch.compiler.is_compiling():
            own = _compiled(*tensors[:3], return_lse, (*tensors[3:], *rows, indices, mask_mod, joint_every or None))
            return attend(self._handle, *own, sinks, *masked, list(_window(window)), softcap, _chunk(chunk))[0]
        given: Any = {"rows": rows, "front": joint_strategy, "return_lse": return_lse, "every": joint_every}
        sparse = indices, index_block, return_weights
        call = self._call(tensors, sinks, *masked, window, softcap, chunk, sparse=sparse, mask_mod=mask_mod, **given)
        call |= {"sinks": sinks, "keep": self.keep, "joint": tensors[3:], "return_lse": return_lse, "indices": indices}
        results = unified_attention(q, k, v, **call, return_weights=return_weights)
        return results[0] if len(results) == 1 else tuple(results)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnifiedSPAttention:
        """Share the process groups, which cannot be copied."""
        return UnifiedSPAttention(self._mesh, self.layout, self.kernel, self.dkv_dtype, self.head_groups)

    def wire_bytes(
        self,
        *,
        batch: int,
        seq_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        cu_seqlens: Tensor | None = None,
        prefix: Tensor | None = None,
        v_head_dim: int | None = None,
        prefix_tree: Tensor | None = None,
        seq_len_k: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        joint_len: int = 0,
        joint_queries: bool = True,
        joint_strategy: str = "front",
        joint_cu_seqlens: Tensor | None = None,
        return_lse: bool = False,
        indices: Tensor | None = None,
        return_weights: bool = False,
        mask_mod: MaskMod | None = None,
        index_block: int = 1,
    ) -> WireBytes:
        """Predict the bytes this rank sends in the forward and backward of such a call (global `seq_len`).

        Args:
            v_head_dim: that of v, None for `head_dim`.
            seq_len_k: global length of the keys in cross attention, 0 for joint keys only.
            joint_len: joint tokens per row, with `joint_queries` or only with keys.
            return_lse: with lse, and its gradient in the backward.
            indices: (batch, seq_len, k), or (batch, seq_len, num_kv_heads, k), of all queries of the sequence; with
                `return_weights` theirs travel too.
        """
        seq_len += 0 if cu_seqlens is None else self.axes.padding(self.layout, seq_len)
        if seq_len_k and cu_seqlens_k is not None:
            seq_len_k += self.axes.padding(self.layout, seq_len_k)
        joint, of_joint = None, documents_of(joint_cu_seqlens, "joint_cu_seqlens")
        if joint_len:
            joint = Joint(joint_len, joint_queries, seq_len_k == 0, _is_front(joint_strategy), of_joint)
        masked = _mask_of(cu_seqlens, prefix, prefix_tree, causal, None, _window(window), None, 0)
        of_keys = documents_of(cu_seqlens_k, "cu_seqlens_k")
        spec, layout, key_layout = self._sequences(seq_len, seq_len_k, of_keys, joint, *masked)
        if mask_mod is not None:
            spec = with_mask_mod(spec, mask_mod, batch, num_heads, seq_len, torch.device(self.axes.device_type))
        heads = HeadPlan(num_heads, num_kv_heads, self.axes.ulysses)
        plan = UnifiedPlan.make(layout, spec, heads, batch, self.axes.ring_rank, self.axes.ulysses_rank, key_layout)
        sparse = indices, return_weights, index_block
        return plan.wire_bytes(head_dim, dtype, v_head_dim, return_lse, self.dkv_dtype, *sparse)

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

    def _call(self, *arguments: Any, **others: Any) -> dict[str, Any]:
        """Return `_checked_call`; if only some ranks refuse the call, raise RanksDisagree on every rank."""
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            raise RuntimeError(
                "attention over several ranks supports neither transforms of torch.func (vmap, grad, jvp) nor "
                "forward-mode differentiation: use the batch dim, and torch.autograd.grad or backward()"
            )
        try:
            return self._checked_call(*arguments, **others)
        except (ValueError, TypeError) as error:
            self.axes.agree(error, CALL)
            raise

    def _checked_call(
        self,
        tensors: Sequence[Tensor | None],
        sinks: Tensor | None,
        *options: Any,
        rows: tuple[Tensor | None, Tensor | None] = (None, None),
        front: str = "front",
        return_lse: bool = False,
        sparse: tuple[Tensor | None, int, bool] = (None, 1, False),
        mask_mod: MaskMod | None = None,
        every: int = 0,
    ) -> dict[str, Any]:
        """Check a call and count it; return its plan, its program, and the channels.

        tensors: q, k, v, and the joint ones. options: from cu_seqlens to chunk, as for `_mask_of`. rows: boundaries of
        the keys and of the joint tokens. sparse: indices, the keys of each, and whether the weights are returned.
        """
        options = *options[:5], list(_window(options[5])), options[6], _chunk(options[7])
        of_indices = _sparse(*sparse, tensors, sinks, return_lse)
        shapes = tuple([None if x is None else (x.shape, x.dtype, x.device) for x in tensors])
        trained = return_lse and any(x is not None and x.requires_grad for x in (*tensors, sinks))
        lse_gradient = trained and torch.is_grad_enabled()
        of_joint = _is_front(front), every
        of_calls = return_lse, lse_gradient, of_indices, mask_mod, self.many_lengths
        others = None if sinks is None else sinks.shape, *of_joint, *of_calls
        call = self._last_call((*rows, *options[:3]), shapes, others, *options[3:])
        counts = self.__dict__  # assignment to a module's attribute takes microseconds
        counts["calls"] += 1
        counts["trees"] += call[0].parents is not None
        plan, program = self.keep(("plan", *call), lambda: self._last_plan((), *call))
        return {"plan": plan, "program": program, "ulysses": self._ulysses, "ring": self._ring}

    def _look_up(self, tensors: tuple[Tensor | None, ...], shapes: Any, others: Any, *options: Any) -> tuple[Any, ...]:
        of_keys, of_joint, cu_seqlens, prefix, prefix_tree = tensors
        rows = documents_of(of_keys, "cu_seqlens_k"), documents_of(of_joint, "joint_cu_seqlens")
        return self._described(shapes, others, *rows, *_mask_of(cu_seqlens, prefix, prefix_tree, *options))

    def _describe(
        self,
        shapes: tuple[Described | None, ...],
        others: tuple[torch.Size | None, bool, int, bool, bool, tuple[int, ...], MaskMod | None, bool],
        key_documents: Rows,
        joint_documents: Rows,
        mask: AttentionSpec,
        chunk: int,
    ) -> tuple[Any, ...]:
        """Check a call and return the arguments of its `_prepare`. mask, chunk: of `_mask_of`."""
        sinks, front, every, return_lse, lse_gradient, sparse, mask_mod, many_lengths = others
        _check_tensors(shapes, sinks)
        assert shapes[0] is not None
        q, dtype, device = shapes[0]
        k, v, joint_q, joint_k, joint_v = (x[0] if x else torch.Size() for x in shapes[1:])
        seq_len, key_len, joint = q[1] * self.ranks, None if k else 0, None
        if k and (k[1] != q[1] or key_documents is not None):
            key_len = k[1] * self.ranks
        if joint_k:
            joint = Joint(joint_k[1], bool(joint_q), not k, front, joint_documents, every)
        elif every:
            raise ValueError(f"joint_every={every} is of joint keys: give joint_k and joint_v")
        spec, *layouts = self._sequences(seq_len, key_len, key_documents, joint, mask, chunk)
        if mask_mod is not None:
            spec = with_mask_mod(spec, mask_mod, q[0], q[2], seq_len, device)
        by_head = spec.function is not None and spec.function.by_head
        of_itself = key_len is None and joint is None and not (sparse or return_lse or by_head)
        heads = self._heads(q, (k or joint_k)[2], (v or joint_v)[3], dtype, device, of_itself)
        kind = dtype, device, lse_gradient, sparse, many_lengths
        return spec, *layouts, heads, q[0], q[3], (v or joint_v)[3], *kind

    def _heads(
        self, q: torch.Size, kv_heads: int, v_head_dim: int, dtype: torch.dtype, device: torch.device, of_itself: bool
    ) -> HeadPlan:
        """Return the heads of all ranks, in groups; raise ValueError if there are not so many."""
        heads = HeadPlan(q[2], kv_heads, self.axes.ulysses)
        if self.head_groups is None:
            return heads
        most = max(map(heads.kv_width, range(heads.ulysses))) if of_itself else 1
        if self.head_groups > most:
            raise ValueError(
                f"head_groups={self.head_groups} exceeds the {most} KV heads of a rank (num_kv_heads={kv_heads}, "
                f"ulysses={heads.ulysses}): use head_groups={most} or less"
                if of_itself
                else f"head_groups={self.head_groups} is not supported with joint tokens, keys of another sequence, "
                f"indices, return_lse or a mask_mod that tells heads apart: use head_groups=1"
            )
        return replace(heads, groups=self.head_groups)

    def _sequences(
        self,
        seq_len: int,
        key_len: int | None,
        key_documents: Rows,
        joint: Joint | None,
        mask: AttentionSpec,
        chunk: int,
    ) -> tuple[AttentionSpec, SequenceLayout, SequenceLayout | None]:
        """Return the mask of a call, and the layouts of its queries and, for cross attention, of its keys. key_len:
        None if the keys are of the queries' tokens, 0 if there are only joint ones. mask, chunk: `_mask_of`'s."""
        if key_len:
            key_documents = key_documents or ((0, key_len),)
        spec = _in_chunks(replace(mask, key_documents=key_documents, joint=joint), seq_len, chunk)
        layout = self.axes.layout(self.layout, seq_len, mask.documents)
        return spec, layout, self.axes.layout(self.layout, key_len, key_documents) if key_len else None

    def _prepare_uncached(
        self,
        spec: AttentionSpec,
        layout: SequenceLayout,
        key_layout: SequenceLayout | None,
        heads: HeadPlan,
        batch: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        lse_gradient: bool,
        sparse: tuple[int, ...] = (),
        many_lengths: bool = False,
    ) -> tuple[UnifiedPlan, RingProgram | SparseProgram]:
        if self.dkv_dtype not in (None, dtype, accumulate_dtype(dtype)):
            raise ValueError(f"dkv_dtype={self.dkv_dtype} must be {dtype}, the dtype of k and v, or None")
        plan = UnifiedPlan.make(layout, spec, heads, batch, self.axes.ring_rank, self.axes.ulysses_rank, key_layout)
        kv_index = plan.heads.kv_index(plan.ulysses_rank)
        if sparse:
            return plan, self._prepare_sparse(plan, device, (head_dim, v_head_dim, dtype, sparse), kv_index)
        widened = v_head_dim + LSE_COLUMNS * lse_gradient
        kernel, choice, slow = choose_kernel(self.kernel, spec, device, dtype, head_dim, widened, layout, many_lengths)
        self.kernels.add(kernel.name)
        here = node_here(device) if self.head_groups is None and self.axes.ulysses > 1 else None
        if here is not None:
            sizes, exchanging = (head_dim, v_head_dim, dtype), ulysses_ranks(self._mesh)
            groups = choose_head_groups(here, plan, kernel, *sizes, exchanging, dist.get_world_size())
            heads = replace(heads, groups=groups)
            plan = replace(plan, heads=replace(plan.heads, groups=groups))
        by_group = [each.kv_index(plan.ulysses_rank) for each in heads.by_group] if heads.groups > 1 else ()
        program = RingProgram.lower(plan.ring, spec, kernel, device, dtype, kv_index, self.dkv_dtype, by_group)
        call = (layout, key_layout, spec, heads, batch, head_dim, v_head_dim, str(dtype), kernel.name, self.dkv_dtype)
        self.axes.agree(call, CALL)
        self._log(logging.INFO, choice)
        for warning in (slow, *ulysses_violations(heads.num_heads, plan.heads.ulysses)):
            self._log(logging.WARNING, warning)
        return plan, program

    def _prepare_sparse(
        self, plan: UnifiedPlan, device: torch.device, described: tuple[Any, ...], kv_index: tuple[int, ...] | None
    ) -> SparseProgram:
        if self.kernel != "auto":
            raise ValueError(f"kernel={self.kernel!r} cannot attend to indices: use kernel='auto'")
        *by_head, _, block = described[-1]
        options: Any = device, kv_index, self.dkv_dtype, None, None, block
        if by_head:
            options = device, None, self.dkv_dtype, plan.sparse_heads, plan.heads.even_places(plan.ulysses_rank), block
        program = SparseProgram.of(plan.layout, plan.spec, plan.batch, plan.ring.rank, *options)
        self.kernels.add("gather")
        call = (plan.layout, plan.spec, plan.heads, plan.batch, *map(str, described), self.dkv_dtype)
        self.axes.agree(call, CALL)
        self._log(logging.INFO, GATHER)
        return program

    def _log(self, level: int, line: str) -> None:
        if line and line not in self._logged and (not dist.is_initialized() or dist.get_rank() == 0):
            self._logged.add(line)
            logger.log(level, line)


class LastResult:
    """A function of a tuple of tensors and of other arguments that gives its last result again, in microseconds, where
    they are the same; tensors are if their values are."""

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        self._function, self._result = function, ()
        self._tensors: tuple[Tensor | None, ...] = ()
        self._arguments: tuple[Any, ...] | None = None

    def __call__(self, tensors: tuple[Tensor | None, ...], *arguments: Any) -> tuple[Any, ...]:
        if arguments != self._arguments or not all(map(_same, self._tensors, tensors)):
            self._result = self._function(tensors, *arguments)
            self._tensors = tuple([None if x is None else x.detach().clone() for x in tensors])
            self._arguments = arguments
        return self._result


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    # The values of a fake one can be unknown.
    return type(a) is type(b) is Tensor and (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)


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
    cu_seqlens: Tensor | None,
    prefix: Tensor | None,
    prefix_tree: Tensor | None,
    causal: bool,
    scale: float | None,
    window: list[int],
    softcap: float | None,
    chunk: int,
) -> list[Tensor]:
    """Return attention's output (B, S, N, V), and what `attend_backward` needs besides the arguments."""
    layer: UnifiedSPAttention = handle.layer
    if violations := ulysses_violations(q.shape[2], layer.axes.ulysses):
        raise ValueError(f"torch.compile needs a query head on every rank: {'; '.join(violations)}")
    tensors = (q, k, v, None, None, None)
    masked = cu_seqlens, prefix, prefix_tree, causal, scale
    call = layer._call(tensors, sinks, *masked, window, softcap, chunk or None)
    out, *saved = unified_forward(q, k, v, **call, sinks=sinks, keep=layer.keep)
    # The graph may write over what the operator returns.
    results = [out, *(saved if call["plan"].heads.groups == 1 else _joined(saved))]
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
    cu_seqlens: Tensor | None,
    prefix: Tensor | None,
    prefix_tree: Tensor | None,
    causal: bool,
    scale: float | None,
    window: list[int],
    softcap: float | None,
    chunk: int,
) -> list[Tensor]:
    """Return the gradients of q, k, v and, if given, sinks; `saved` as in `usp.attention.unified_backward`."""
    layer: UnifiedSPAttention = handle.layer
    batch, tokens, num_heads, v_head_dim = dout.shape
    seq_len, q_size = tokens * layer.ranks, torch.Size((batch, tokens, num_heads, head_dim))
    heads = layer._heads(q_size, kv_heads, v_head_dim, dout.dtype, dout.device, True)
    mask, chunk = _mask_of(cu_seqlens, prefix, prefix_tree, causal, scale, window, softcap, chunk)
    spec, layout = _in_chunks(mask, seq_len, chunk), layer.axes.layout(layer.layout, seq_len, mask.documents)
    sizes = (heads, batch, head_dim, v_head_dim, dout.dtype, dout.device)
    plan, program = layer._prepare(spec, layout, None, *sizes, False)
    assert isinstance(program, RingProgram)
    if plan.heads.groups > 1:
        saved = _parted(saved, plan.heads, layer.axes.ulysses_rank, head_dim)
    grads = unified_backward(dout, saved, head_dim, plan, program, layer._ulysses, layer._ring, sinks)
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
    handle, q, k, v, sinks, cu_seqlens, prefix, prefix_tree, *ctx.options = inputs
    ctx.handle, ctx.sizes = handle, (q.shape[-1], k.shape[2])
    out, lse, *exchanged = output
    saved = (lse, *exchanged) if exchanged else (out, lse, q, k, v)
    ctx.save_for_backward(sinks, cu_seqlens, prefix, prefix_tree, *saved)


def _backward(ctx, grads):
    sinks, cu_seqlens, prefix, prefix_tree, *saved = ctx.saved_tensors
    tensors = (sinks, cu_seqlens, prefix, prefix_tree)
    dq, dk, dv, *dsinks = attend_backward(ctx.handle, grads[0], saved, *ctx.sizes, *tensors, *ctx.options)
    return None, dq, dk, dv, *(dsinks or [None]), *[None] * 8


attend.register_autograd(_backward, setup_context=_save)


def ulysses_violations(num_heads: int, ulysses: int) -> list[str]:
    """Return a message if some Ulysses ranks would have no query head, else an empty list."""
    if ulysses <= num_heads:
        return []
    return [
        f"ulysses={ulysses} exceeds the {num_heads} query heads: {ulysses - num_heads} of {ulysses} ulysses ranks have "
        f"no head; use ulysses={num_heads} or less and move the remaining ranks to ring"
    ]


def _check_tensors(shapes: tuple[Described | None, ...], sinks: torch.Size | None) -> None:
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


def _compiled(
    q: Tensor, k: Tensor | None, v: Tensor | None, return_lse: bool, others: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, if a graph supports the call. others: arguments that it does not."""
    if return_lse or any(x is not None for x in others) or k is None or v is None or k.shape[1] != q.shape[1]:
        raise ValueError(
            "torch.compile supports attention of a sequence to itself: call what has joint or cross attention, "
            "return_lse, indices or mask_mod under torch.compiler.disable"
        )
    return q, k, v


def _chunk(chunk: int | None) -> int:
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 token")
    return chunk or 0


def _sparse(
    indices: Tensor | None,
    block: int,
    return_weights: bool,
    tensors: Sequence[Tensor | None],
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[int, ...]:
    """Return the shape of a query's indices and how many keys each stands for, empty without; raise ValueError for
    those that do not fit the call. tensors: q, k, and others."""
    if indices is None and (return_weights or block != 1):
        raise ValueError("return_weights and index_block are about the keys at indices: give indices")
    if indices is None:
        return ()
    (q, k, *_), violations, by_head = tensors, [], indices.dim() == 4
    assert q is not None
    heads = (q.shape[2] if k is None else k.shape[2],) * by_head
    if indices.shape[:-1] != (*q.shape[:2], *heads) or not indices.shape[-1]:
        violations.append(
            f"indices {tuple(indices.shape)} must be (batch, tokens, k) or (batch, tokens, num_kv_heads, k) for q "
            f"{tuple(q.shape)}"
        )
    if block < 1:
        violations.append(f"index_block={block} must be at least 1 position")
    if by_head and (return_weights or sinks is not None):
        violations.append("sinks and return_weights are not supported with indices of each KV head: leave them out")
    if indices.dtype not in (torch.int32, torch.int64) or indices.device != q.device:
        violations.append(f"indices must be int32 or int64 on {q.device}, got {indices.dtype} on {indices.device}")
    if return_lse:
        violations.append("return_lse is not supported with indices: leave one of them out")
    if violations:
        raise ValueError("; ".join(violations))
    return *indices.shape[2:], block


def _mask_of(
    cu_seqlens: Tensor | None,
    prefix: Tensor | None,
    prefix_tree: Tensor | None,
    causal: bool,
    scale: float | None,
    window: Sequence[int],
    softcap: float | None,
    chunk: int,
) -> tuple[AttentionSpec, int]:
    """Return the mask of a sequence that attends to itself, without its chunks, and these."""
    prefixes, parents = rows_of(prefix, "prefix", "documents"), rows_of(prefix_tree, "prefix_tree", "documents")
    reach = (window[0], window[1])
    return AttentionSpec(causal, reach, scale, softcap, documents_of(cu_seqlens), prefixes, parents), chunk


def _in_chunks(spec: AttentionSpec, seq_len: int, chunk: int) -> AttentionSpec:
    """Return a mask with its chunks of so many tokens, 0 for none: attention within chunks is that within documents."""
    if not chunk:
        return spec
    if any(x is not None for x in (spec.parents, spec.key_documents, spec.joint)):
        raise ValueError("attention in chunks does not support prefix_tree, joint tokens and cross attention")
    rows = spec.documents or ((0, seq_len),)
    cut = [([at for a, b in pairwise(row) for at in range(a, b, chunk)] or [0]) + [row[-1]] for row in rows]
    longest = max(map(len, cut))
    return replace(spec, documents=tuple(tuple(row + row[-1:] * (longest - len(row))) for row in cut))


def _is_front(joint_strategy: str) -> bool:
    if joint_strategy not in ("front", "rear"):
        raise ValueError(f"joint_strategy={joint_strategy!r} must be front or rear")
    return joint_strategy == "front"


def _window(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return (-1, -1)
    if not (isinstance(window, Sequence) and len(window) == 2 and all(type(side) is int for side in window)):
        raise ValueError(f"window={window!r} must be None or (left, right) in tokens, -1 for no limit")
    return (window[0], window[1])
