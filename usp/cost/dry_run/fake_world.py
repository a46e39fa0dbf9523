"""One process as any rank of any world: a process group that never communicates, and stand-ins for a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes

import usp.model.offload
import usp.sp.sp_attention
from attention import AttentionSpec, check_kernel_name, select_kernel
from attention.kernels.base import Kernel
from usp.sp.axes import SpAxes

_SHAPES = "_propagate_tensor_meta_non_cached"


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Act as `rank` of a default process group of `world_size` ranks whose collectives return at once and move nothing.

    Raises:
        RuntimeError: if the process already has a default process group.
    """
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
    """What `--ac-offload` and `--optim-offload` keep in host memory.

    Attributes:
        peak_bytes: the most at any time.
    """

    def __init__(self) -> None:
        self.current_bytes = self.peak_bytes = 0

    def to_host(self, x: Tensor) -> tuple[Callable[[], Tensor], None]:
        """Copy like `usp.model.offload.Copier`, tensors that stand for a GPU's."""
        load = partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
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
    device: torch.device, name: str, spec: AttentionSpec, dtype: torch.dtype, head_dim: int, v_head_dim: int
) -> tuple[Kernel, str]:
    """Select among the kernels that ship with torch: flash-attn's makes the same launches and tensors as torch's own.

    Raises:
        ValueError: as `select_kernel`.
    """
    check_kernel_name(name)
    name = "sdpa" if name == "auto" or name.startswith("flash") else name
    return select_kernel(name, spec, device, dtype, head_dim, v_head_dim)


@contextmanager
def stand_ins(device: torch.device, host: HostMemory) -> Iterator[None]:
    """Patch the code to decide as on `device` although tensors are on the CPU.

    The agreements that ranks make once, in the first step of a run, are skipped.
    """

    def choose(
        name: str, spec: AttentionSpec, _: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, *__: Any
    ) -> tuple[Kernel, str]:
        return kernel_for(device, name, spec, dtype, head_dim, v_head_dim)

    with ExitStack() as stack:
        stack.enter_context(patch.object(usp.sp.sp_attention, "choose_kernel", choose))
        stack.enter_context(patch.object(_PipelineSchedule, "_warmup_p2p", _give_shapes))
        stack.enter_context(patch.object(SpAxes, "agree", lambda *_, **__: None))
        stack.enter_context(patch.object(ShardingPropagator, _SHAPES, _aside(getattr(ShardingPropagator, _SHAPES))))
        if device.type == "cuda":
            stack.enter_context(patch.object(usp.model.offload, "copier_for", lambda device: host))
            stack.enter_context(patch.object(FSDPParam, "all_gather_inputs", property(_copied_to_device)))
        yield


_ALL_GATHER_INPUTS: Callable[[FSDPParam], list[Tensor]] = vars(FSDPParam)["all_gather_inputs"].fget


def _copied_to_device(self: FSDPParam) -> list[Tensor]:
    """Copy a shard that is in host memory to the device, as FSDP2 does before it is gathered."""
    if not self.offload_to_cpu:
        return _ALL_GATHER_INPUTS(self)
    with patch.object(self, "_sharded_param_data", self._sharded_param_data.clone()):
        return _ALL_GATHER_INPUTS(self)


def _aside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run DTensor's shape propagation outside of the modes: its fake tensors of the global size would be counted."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return run


def _give_shapes(_: Any, stages: list[Any], *__: Any) -> None:
    """Skip the vote on shape inference in the first step of torch's pipelines: the shapes are given."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
