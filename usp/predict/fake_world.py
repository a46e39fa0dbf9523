"""One process as any rank of any world: fake tensors with the values that control flow reads, a process group that
never communicates, and stand-ins for a GPU.

A fake tensor has a shape and no values. The values that a step reads (positions, `cu_seqlens`, the number of rows per
rank, the optimizer's step count) are integers and scalars derived from other integers and scalars: these are computed
for real beside their fake tensors as long as all inputs are known. Two results are assumed instead: routers choose
experts evenly (choice k of token t is expert (t K + k) mod E), and a floating-point number read from unknown values,
such as the gradient norm, is 1. In collectives every other rank is assumed to have the values of this one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import schedules
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

import usp.model.recompute
import usp.sp.sp_attention
from usp import losses
from usp.attention import AttentionSpec, accumulate, check_kernel_name, select_kernel
from usp.attention.kernels.base import Kernel
from usp.sp.sequence import SpAxes

aten, c10d = torch.ops.aten, torch.ops.c10d

# Operators whose output shapes depend on values.
_SHAPED_BY_VALUES = (aten.nonzero, aten.bincount, aten.masked_select)
_UNKNOWN = "a data-dependent value, which a dry run does not have"


class KnownValues:
    """The known values of fake tensors. `routes`: whether those of which the largest are taken belong to a router;
    `tables`: of the experts of each token id, with the number of experts."""

    def __init__(self) -> None:
        self.routes = True
        self.tables: Any = WeakIdKeyDictionary()
        self._values: Any = WeakIdKeyDictionary()
        self._lost: dict[int, torch.UntypedStorage] = {}  # kept alive so that no other storage reuses their addresses

    def of(self, x: Tensor) -> Tensor | None:
        """Return a real tensor with the values of `x`, or None if they are unknown."""
        if not isinstance(x, FakeTensor):
            return x if _small(x) and not x.is_meta else None
        value = self._values.get(x)
        return None if value is None or value.untyped_storage()._cdata in self._lost else value

    def know(self, x: Tensor, value: Tensor) -> None:
        """Take `value`, a real tensor, for the values of `x`."""
        self._values[x] = value

    def numbers(self, x: Tensor) -> list[Any]:
        """Return `x.tolist()` of known values."""
        value = self.of(x)
        assert value is not None, f"the values of this {x.dtype} tensor are unknown"
        with _disable_current_modes():
            return value.tolist()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors, and record the values of its results if they can be known; raise
        NotImplementedError if control flow depends on unknown values."""
        packet = func.overloadpacket
        if packet is aten._local_scalar_dense:
            return self._number(args[0])
        if packet in _SHAPED_BY_VALUES:
            return self._shaped(func, args, kwargs)
        if packet is aten._grouped_mm and args[0].dtype != torch.bfloat16:  # its fake supports only bfloat16
            rows, matrices, *rest = args
            result = func(rows.bfloat16(), matrices.bfloat16(), *rest, **kwargs).to(rows.dtype)
        else:
            result = func(*args, **kwargs)
        if func.namespace == "c10d":
            if packet is c10d.alltoall_base_:  # reductions and gathers keep known values
                self._exchange(args)
        elif packet is aten.topk and self.routes:
            self._route(result[1], args[0].shape[args[2] if len(args) > 2 else -1])
        elif packet is aten.index and (experts := self.tables.get(args[0])):
            self._route(result, experts)
        else:
            self._compute(func, args, kwargs, result)
        return result

    def _route(self, chosen: Tensor, experts: int) -> None:
        with _disable_current_modes():
            self._values[chosen] = torch.arange(chosen.numel()).remainder(experts).view(chosen.shape)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        outputs = tensors_of(result)
        if outputs and all(map(_small, outputs)) and all(self.of(x) is not None for x in tensors_of((args, kwargs))):
            for x, value in zip(outputs, tensors_of(self._really(func, args, kwargs)), strict=True):
                if isinstance(x, FakeTensor):
                    self._values[x] = value
        elif func._schema.is_mutable:  # the values of what it writes to are lost, and those of their views
            for x in tensors_of(list(written(func, args, kwargs))):
                value = self._values.get(x)
                if value is not None:
                    self._lost[value.untyped_storage()._cdata] = value.untyped_storage()

    def _really(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        real_args, real_kwargs = tree_map(lambda x: self.of(x) if isinstance(x, Tensor) else x, (args, kwargs))
        with _disable_current_modes():
            return func(*real_args, **real_kwargs)

    def _shaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.of(args[0]) is None:
            raise NotImplementedError(f"the output shape of {func} depends on {_UNKNOWN}")
        real = self._really(func, args, kwargs)
        fake = torch.empty(real.shape, dtype=real.dtype, device=args[0].device)
        self._values[fake] = real
        return fake

    def _number(self, x: Tensor) -> bool | int | float:
        value = self.of(x)
        if value is not None:
            with _disable_current_modes():
                return value.item()
        if not x.dtype.is_floating_point:
            raise NotImplementedError(f"control flow depends on {_UNKNOWN} ({x.dtype})")
        return 1.0

    def _exchange(self, args: tuple[Any, ...]) -> None:
        """Record the values that an all-to-all receives."""
        output, sent, group = args[0], self.of(args[1]), torch.distributed.ProcessGroup.unbox(args[2])
        if sent is not None and len({*args[3], *args[4]}) < 2:
            with _disable_current_modes():
                own = sent.view(group.size(), -1)[group.rank()]
                self._values[output] = own.repeat(group.size()).view(sent.shape)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results."""
    if isinstance(values, Tensor):
        return [values]
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def _small(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex()) or x.numel() == 1


_SHAPES = "_propagate_tensor_meta_non_cached"


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Act as `rank` of a default process group of `world_size` ranks whose collectives return at once and move nothing;
    raise RuntimeError if the process already has a default process group."""
    if dist.is_initialized():
        raise RuntimeError("a dry run creates its own process group, but this process already has one")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor caches sharding by mesh, and the next world's meshes compare equal to this world's.
        _clear_sharding_prop_cache()


class HostMemory:
    """What `--ac-offload` and `--optim-offload` keep in host memory; `copied_bytes` are those that `to_host` copied."""

    def __init__(self) -> None:
        self.current_bytes = self.peak_bytes = self.copied_bytes = 0

    def to_host(self, x: Tensor) -> tuple[Callable[[], Tensor], None]:
        """Copy like `usp.model.recompute.Copier`, tensors that stand for a GPU's."""
        load = partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
        self.copied_bytes += x.nbytes
        self.add(x.nbytes)
        weakref.finalize(load, self.add, -x.nbytes)
        return load, None

    def to_device(self, copies: Sequence[Callable[[], Tensor]], after: None) -> tuple[list[Tensor], None]:
        return [load() for load in copies], None

    def wait(self, event: None) -> None:
        pass

    def add(self, nbytes: int) -> None:
        """Count memory that is allocated, or freed if negative."""
        self.current_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)


def kernel_for(
    name: str, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int
) -> tuple[Kernel, str]:
    """Select as `select_kernel` among torch's kernels: flash-attn's makes the same launches and tensors as its own."""
    check_kernel_name(name)
    name = "sdpa" if name == "auto" or name.startswith("flash") else name
    return select_kernel(name, spec, device, dtype, head_dim, v_head_dim)


@contextmanager
def stand_ins(device: torch.device, host: HostMemory) -> Iterator[None]:
    """Patch code to decide as on `device` although tensors are on the CPU, and to skip a first step's agreements."""

    def choose(name: str, spec: AttentionSpec, _: torch.device, *dtype_and_sizes: Any) -> tuple[Kernel, str, str]:
        return *kernel_for(name, spec, device, *dtype_and_sizes[:3]), ""

    # DTensor's shape propagation runs outside of the modes: its fake tensors of the global size would be counted.
    propagate = _disable_current_modes()(getattr(ShardingPropagator, _SHAPES))
    with ExitStack() as stack:
        stack.enter_context(patch.object(usp.sp.sp_attention, "choose_kernel", choose))
        stack.enter_context(patch.object(schedules._PipelineSchedule, "_warmup_p2p", _give_shapes, create=True))
        stack.enter_context(patch.object(SpAxes, "agree", lambda *_, **__: None))
        stack.enter_context(patch.object(ShardingPropagator, _SHAPES, propagate))
        if device.type == "cuda":  # where a merge is one operator, with the bytes of this one
            # Into the memory of the sum, as on a GPU, for whose operator torch 2.11 has no shapes.
            stack.enter_context(
                patch.object(losses, "add_product", lambda x, a, b: x.view(a.dtype)[:, ::2].addmm_(a, b))
            )
            stack.enter_context(patch.object(usp.model.recompute, "copier_for", lambda device: host))
            stack.enter_context(patch.object(FSDPParam, "all_gather_inputs", property(_copied_to_device)))
            stack.enter_context(patch.object(accumulate, "merge", lambda out, lse, more, more_lse: out.add_(more)))
        yield


_ALL_GATHER_INPUTS: Callable[[FSDPParam], list[Tensor]] = vars(FSDPParam)["all_gather_inputs"].fget


def _copied_to_device(self: FSDPParam) -> list[Tensor]:
    """Copy a shard that is in host memory to the device, as FSDP2 does before it is gathered."""
    if not self.offload_to_cpu:
        return _ALL_GATHER_INPUTS(self)
    with patch.object(self, "_sharded_param_data", self._sharded_param_data.clone()):
        return _ALL_GATHER_INPUTS(self)


def _give_shapes(_: Any, stages: list[Any], *__: Any) -> None:
    """Skip the vote on shape inference in the first step of torch's pipelines (from 2.12 on): the shapes are given."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC
