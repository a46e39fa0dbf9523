"""Counts of everything that passes torch's dispatcher in a training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.wire import SentBytes
from usp.cost.time.kernel_flops import attention_flops, matmul_flops

from .fake_world import HostMemory
from .known_values import KnownValues, tensors_of
from .live_memory import WHOLE, LiveMemory

_PLAIN = {Tensor, nn.Parameter, FakeTensor}
_FSDP_COLLECTIVES = {torch.ops.c10d._allgather_base_, torch.ops.c10d._reduce_scatter_base_}


class StepMeter(TorchDispatchMode):
    """A mode inside `FakeTensorMode` that runs operators and counts them; `host` counts what is offloaded.

    Attributes:
        known: the known values of fake tensors.
        memory: the storages of all results; FSDP2's buffers are labelled.
        wire: the bytes of collectives.
        matmul_flops, attention_flops: see `kernel_flops`.
    """

    def __init__(self, host: HostMemory) -> None:
        super().__init__()
        self.known, self.memory, self.wire = KnownValues(), LiveMemory(host), SentBytes()
        self.matmul_flops = self.attention_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # a shortcut for the most frequent call
            return args[0].device if not isinstance(args[0], FakeTensor) else args[0].fake_device
        if not _PLAIN.issuperset(types):
            return NotImplemented  # DTensor calls operators on local tensors, which come here again
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return func(*args, **kwargs)  # a device mesh is computed with real tensors
        self.wire.count(func, args)
        result = self.known.call(func, args, kwargs)
        made = [x for x in tensors_of(result) if isinstance(x, FakeTensor)]
        self.memory.see(made)
        if func.namespace == "fsdp" or func.overloadpacket in _FSDP_COLLECTIVES:
            used = [x for x in tensors_of((args, kwargs)) if isinstance(x, FakeTensor)]
            self.memory.label(used + made, WHOLE, again=False)
        self.matmul_flops += matmul_flops(func, args, kwargs, result)
        self.attention_flops += attention_flops(func, args, kwargs, self.known.numbers)
        return result
