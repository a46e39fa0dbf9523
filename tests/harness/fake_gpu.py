"""A GPU without a GPU: tensors that have shapes only, streams with clocks, and counts of what stops the host.

The real step of a rank runs on fake tensors of a device of its own, `DEVICE`, which FSDP2 and autograd treat as CUDA.
Two kinds of findings:

    synchronization   the host waits for the device: a value that is read back, a shape that depends on values, a copy
                      between host and device that blocks, such as FSDP2's implicit move of arguments; not an event
                      after which the device still has work
    race              a tensor is used on a stream that has not waited for the one that wrote it, or is freed while
                      another stream than its own may use it; on the host, a tensor is read before its copy arrived

A stream runs its operators in order. An event is what a stream and those that it waited for had done; vector clocks
(Lamport 1978; Mattern 1989) tell whether a use comes after another. An asynchronous collective runs on the stream of
its communicator, after the stream that issued it, as NCCL's do, and its work's `wait` lets the current stream wait.

A process becomes such a device once and for all (`register`), so that tests use a process of its own.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

import usp.attention.comm
import usp.model.recompute
from usp.parallel.wire import _group_among
from usp.predict.fake_world import KnownValues, tensors_of, written

aten, c10d = torch.ops.aten, torch.ops.c10d
DEVICE = "fakegpu"
ROOT = Path(__file__).parents[2]
_PLAIN = {Tensor, torch.nn.Parameter, FakeTensor}
_READS_BACK = {
    aten._local_scalar_dense: "a value is read",
    **dict.fromkeys((aten.nonzero, aten.masked_select, aten.bincount, aten._unique2), "a shape depends on values"),
    **dict.fromkeys((aten.unique_dim, aten.unique_consecutive, aten.equal), "a shape depends on values"),
}
_SENDS_ONLY = ("send",)
_IN_SECOND = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allgather_", "reduce_scatter_")


@dataclass(frozen=True)
class Finding:
    """kind: synchronization or race. what: which. where: the line of the project, and torch's function below it.
    gathers: all-gathers that had been issued before."""

    kind: str
    what: str
    where: str
    gathers: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} at {self.where}"


class Stream:
    """seen: by stream, how many of its operators had ended before any that this stream runs from now on."""

    def __init__(self, gpu: FakeGpu, name: str = "stream") -> None:
        self.gpu, self.name, self.time = gpu, name, 0
        self.seen: dict[Stream, int] = {}
        self.device, self.device_index = torch.device(DEVICE, 0), 0

    def wait_event(self, event: Event) -> None:
        for stream, time in event.seen.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def has(self, stream: Stream, time: int) -> bool:
        return stream is self or self.seen.get(stream, 0) >= time

    def synchronize(self) -> None:
        self.gpu.stop("the stream is synchronized", self)


class Event:
    def __init__(self, gpu: FakeGpu, *options: Any, **named: Any) -> None:
        self.gpu = gpu
        self.seen: dict[Stream, int] = {}
        self.stream = gpu.current

    def record(self, stream: Stream | None = None) -> None:
        stream = self.stream = stream or self.gpu.current
        self.seen = {**stream.seen, stream: stream.time}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current).wait_event(self)

    def synchronize(self) -> None:
        if self.stream.time == self.seen.get(self.stream):  # else the device has work, although the host waits
            self.gpu.found("synchronization", "an event is synchronized")
        self.gpu.host.wait_event(self)


@dataclass(eq=False)
class _Uses:
    """The uses of a storage. stream: whose it is; wrote: the last write; read: by stream, the time of its last read."""

    stream: Stream
    reference: Any
    wrote: tuple[Stream, int] | None = None
    read: dict[Stream, int] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)


class _Values(KnownValues):
    """Known values, computed on the CPU, and what boolean masks select by them."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket is aten.index and any(x is not None and x.dtype == torch.bool for x in args[1]):
            return self._shaped(func, args, kwargs)
        return super().call(func, args, kwargs)

    def _really(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def to_cpu(x: Any) -> Any:
            return torch.device("cpu") if isinstance(x, torch.device) else x

        return super()._really(func, *tree_map(to_cpu, (args, kwargs)))


@dataclass
class _Arrival:
    """A message in flight: what its work is to be waited for."""

    work: Any
    stream: Stream

    def __post_init__(self) -> None:
        self.event = self.stream.record_event()

    def wait(self, *timeout: Any) -> bool:
        self.stream.gpu.current.wait_event(self.event)
        return True

    def is_completed(self) -> bool:
        return True


class FakeGpu(TorchDispatchMode):
    """The device, for the operators inside the block, which belongs into a FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.known = _Values()
        self.findings: list[Finding] = []
        self.gathers = 0
        self.host, self.current = Stream(self, "host"), Stream(self, "default")
        self._of_groups: dict[str, Stream] = {}
        self._issued: Stream | None = None  # whose operator the last collective was
        self._uses: dict[int, _Uses] = {}
        self._pinned: set[int] = set()
        self._arriving: dict[int, Event] = {}  # by storage, of functional collectives
        self._freed: dict[Stream, list[_Uses]] = {}  # what the next allocation of a stream may reuse

    @property
    def synchronizations(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == "synchronization"]

    @property
    def races(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == "race"]

    def found(self, kind: str, what: str) -> None:
        self.findings.append(Finding(kind, what, _where(), self.gathers))

    def stop(self, what: str, stream: Stream | None = None) -> None:
        """Let the host wait for a stream."""
        self.found("synchronization", what)
        self.host.wait_stream(stream or self.current)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        outside, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outside

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return args[0].device if not isinstance(args[0], FakeTensor) else args[0].fake_device
        if not _PLAIN.issuperset(types):
            return NotImplemented
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None:
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if packet is aten.is_pinned:
            return self._key(args[0]) in self._pinned
        pinned = bool(kwargs.get("pin_memory")) or packet is aten._pin_memory
        if pinned:
            kwargs.pop("pin_memory", None)
            func, args = (aten.clone.default, args[:1]) if packet is aten._pin_memory else (func, args)
        operands = [x for x in tensors_of((args, kwargs)) if isinstance(x, FakeTensor)]
        result = self.known.call(func, args, kwargs)
        results = [x for x in tensors_of(result) if isinstance(x, FakeTensor)]
        if pinned:
            self._pinned |= {self._key(x) for x in results}
        if packet is torch.ops._c10d_functional.wait_tensor:
            if (event := self._arriving.pop(self._key(args[0]), None)) is not None:
                self.current.wait_event(event)
        elif not func.is_view and (operands or results):
            self._run(func, args, kwargs, operands, results)
        else:
            for x in results:
                self._uses_of(x, self.current if _on_device(x) else self.host)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, operands: list[FakeTensor], results: list[FakeTensor]) -> None:
        name = func.overloadpacket.__name__
        of_group = func.namespace in ("c10d", "_c10d_functional")
        stream = self.current if any(map(_on_device, operands + results)) else self.host
        if of_group:
            self.gathers += name == "_allgather_base_"
            stream = self._stream_of(func, args, stream)
            changed = tensors_of(args[0]) if name not in _SENDS_ONLY else []
            read = tensors_of(args[1]) if name in _IN_SECOND else operands
        else:
            changed = [x for x in tensors_of(list(written(func, args, kwargs))) if isinstance(x, FakeTensor)]
            read = [x for x in operands if not any(x is y for y in changed)]
        if stream is not self.host:
            stream.wait_stream(self.host)  # it runs what is issued now
        stream.time += 1
        known = {self._key(x) for x in operands}
        for x in results:
            if self._key(x) not in known:
                changed.append(x)
        for x in read:
            self._read(x, stream)
        for x in changed:
            self._write(x, stream)
        if stream.name == "communicator" and func.namespace == "_c10d_functional":
            self._arriving |= {self._key(x): stream.record_event() for x in results}
        self._check_host(func, args, kwargs, operands, results, stream)

    def _stream_of(self, func: Any, args: Any, stream: Stream) -> Stream:
        group = _group_among(func, args)
        names = [argument.name for argument in func._schema.arguments]
        at = names.index("async_op") if "async_op" in names else len(args)
        waits_at_once = at < len(args) and not args[at]
        self._issued = stream
        if stream is self.host or waits_at_once or group.size() == 1:
            return stream
        of_group = self._of_groups.setdefault(group.group_name, Stream(self, "communicator"))
        of_group.wait_stream(stream)
        self._issued = of_group
        return of_group

    def _check_host(self, func: Any, args: Any, kwargs: Any, operands: Any, results: Any, stream: Stream) -> None:
        packet = func.overloadpacket
        if packet in _READS_BACK and _on_device(args[0]):
            self.stop(_READS_BACK[packet])
        elif packet is aten.repeat_interleave and _on_device(operands[0]) and kwargs.get("output_size") is None:
            self.stop("a shape depends on values")
        elif packet in (aten.index, aten.index_put, aten.index_put_) and _on_device(args[0]):
            for index in args[1]:
                if index is not None and index.dtype == torch.bool:
                    self.stop("a boolean mask")
                elif index is not None and not _on_device(index):
                    self.stop("an index in host memory")
        elif packet in (aten._to_copy, aten.copy_):
            source, target = (args[0], results[0]) if packet is aten._to_copy else (args[1], args[0])
            non_blocking = kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2])
            if _on_device(source) == _on_device(target):
                return
            here = source if _on_device(target) else target
            if non_blocking and packet is aten._to_copy and here is target:
                self._pinned.add(self._key(here))  # torch allocates it so
            if not non_blocking or self._key(here) not in self._pinned:
                self.stop(f"a copy to the {'device' if here is source else 'host'} that blocks")

    def _read(self, x: FakeTensor, stream: Stream) -> None:
        uses = self._uses_of(x, stream)
        if uses.wrote and not stream.has(*uses.wrote):
            self.found("race", f"{_name(x)} is read on the {stream.name}, before the {uses.wrote[0].name} wrote it")
        uses.read[stream] = stream.time

    def _write(self, x: FakeTensor, stream: Stream) -> None:
        uses = self._uses_of(x, stream)
        before = [*([uses.wrote] if uses.wrote else []), *uses.read.items()]
        if late := [other for other, time in before if not stream.has(other, time)]:
            self.found("race", f"{_name(x)} is written on the {stream.name}, while the {late[0].name} uses it")
        uses.wrote, uses.read = (stream, stream.time), {}

    def _uses_of(self, x: FakeTensor, stream: Stream) -> _Uses:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._uses:
            owner = stream if stream.name != "communicator" else self.current
            self._allocate(owner)
            self._uses[key] = _Uses(owner, weakref.ref(storage, lambda _, key=key: self._free(key)))  # type: ignore[misc]
        return self._uses[key]

    def _free(self, key: int) -> None:
        uses = self._uses.pop(key)
        self._pinned.discard(key)
        self._arriving.pop(key, None)
        self._freed.setdefault(uses.stream, []).append(uses)

    def _allocate(self, stream: Stream) -> None:
        """Check that nothing else uses the memory that a stream may reuse; NCCL keeps what it uses."""
        for uses in self._freed.pop(stream, ()):
            last = {**uses.read, **({uses.wrote[0]: uses.wrote[1]} if uses.wrote else {})}
            for other, time in last.items():
                safe = other in uses.recorded or other.name == "communicator" or self.host in (other, stream)
                if not safe and not stream.has(other, time):
                    self.found("race", f"memory of the {stream.name} stream is reused while the {other.name} uses it")

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Follow a storage that is freed, or allocated again on the current stream."""
        if (uses := self._uses.get(storage._cdata)) is not None:
            if size:
                self._allocate(self.current)
            else:
                self._freed.setdefault(uses.stream, []).append(replace(uses))
            uses.stream, uses.wrote, uses.read, uses.recorded = self.current, None, {}, set()

    def record(self, x: Tensor, stream: Stream) -> None:
        if isinstance(x, FakeTensor):
            self._uses_of(x, self.current).recorded.add(stream)

    def numbers(self, x: Tensor) -> list[Any]:
        """Stand in for `tolist`, one copy to the host."""
        if _on_device(x):
            self.stop("values are read (tolist)")
        else:
            self._read(x, self.host)  # type: ignore[arg-type]
        if self.known.of(x) is None and x.is_floating_point():
            with _disable_current_modes():
                return torch.ones(x.shape).tolist()
        return self.known.numbers(x)

    def post(self, operations: list[dist.P2POp]) -> list[_Arrival]:
        """Stand in for `batch_isend_irecv`."""
        works = [op.op(op.tensor, op.peer, op.group) for op in operations]
        return [_Arrival(work, self._issued or self.current) for work in works]

    def post_messages(
        self, group: Any, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]
    ) -> list[_Arrival]:
        """Stand in for `usp.attention.comm.post_messages`."""
        both = [(dist.isend, *each) for each in sends] + [(dist.irecv, *each) for each in receives]
        return self.post([dist.P2POp(kind, x, group=group, group_peer=peer) for kind, peer, x in both])

    def post_exchange(self, exchange: Callable[..., Any], *args: Any, **options: Any) -> _Arrival | None:
        """Stand in for `dist.all_to_all_single`, which is `exchange`."""
        work = exchange(*args, **options)
        return None if work is None else _Arrival(work, self._issued or self.current)

    def _key(self, x: Tensor) -> int:
        return x.untyped_storage()._cdata


def _on_device(x: Tensor) -> bool:
    return x.device.type == DEVICE


def _name(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _where() -> str:
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    own = [at for at, frame in enumerate(frames) if _is_own(Path(frame.filename))]
    if not own:
        return "the end of a tensor's life"
    place = frames[own[-1]]
    below = [frame for frame in frames[own[-1] + 1 :] if "/torch/distributed/" in frame.filename]
    through = f", in {Path(below[-1].filename).name} {below[-1].name}" if below else ""
    return f"{Path(place.filename).relative_to(ROOT)}:{place.lineno} {place.name}{through}"


def _is_own(file: Path) -> bool:
    return file.is_relative_to(ROOT) and "site-packages" not in file.parts


class _Backend:
    """The device's module of torch, which stands in for parts of torch.cuda too. gpu: of the run."""

    gpu: FakeGpu

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]  # an error inside of autograd's engine would end the process

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def Stream(self, *options: Any, **named: Any) -> Stream:
        return Stream(self.gpu)

    def Event(self, *options: Any, **named: Any) -> Event:
        return Event(self.gpu)

    def current_stream(self, device: Any = None) -> Stream:
        return self.gpu.current

    def stream(self, stream: Stream) -> Any:
        return self.gpu.on(stream)

    def synchronize(self, device: Any = None) -> None:
        self.gpu.stop("the device is synchronized")


BACKEND = _Backend()
_empty = torch._C._acc.create_empty_tensor
_EMPTY = torch.library.Library("aten", "IMPL", "PrivateUse1")


def register() -> None:
    """Make `DEVICE` a device of this process, for good."""
    if not hasattr(torch, DEVICE):
        # After a fork, the first call makes torch's pool of threads anew, which autograd's threads must not do at once.
        torch.set_num_threads(torch.get_num_threads())
        backend_registration._setup_privateuseone_for_python_backend(DEVICE, BACKEND)
        dist.Backend.default_device_backend_map[DEVICE] = dist.Backend.FAKE
        dist.Backend.backend_capability[dist.Backend.FAKE].append(DEVICE)
        # FSDP2 makes an empty tensor when it wraps a module, which is before there are fake tensors.
        _EMPTY.impl("empty.memory_format", lambda size, dtype=None, **_: _empty(size, dtype or torch.float32))


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Run what the block does on fake tensors of `DEVICE`."""
    gpu = BACKEND.gpu = FakeGpu()
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        gpu.resized(storage, size)
        return resize(storage, size)

    def waited(work: Any, *timeout: Any) -> bool:
        if gpu._issued is not None:
            gpu.current.wait_stream(gpu._issued)
        return True

    with ExitStack() as stack:
        for target, name, stand_in in (
            (torch.UntypedStorage, "resize_", resized),
            (Tensor, "record_stream", gpu.record),
            (FakeTensor, "tolist", gpu.numbers),
            (dist, "batch_isend_irecv", gpu.post),
            (usp.attention.comm, "post_messages", gpu.post_messages),
            (dist, "all_to_all_single", partial(gpu.post_exchange, dist.all_to_all_single)),
            (dist.Work, "wait", waited),
            # In inference mode, fake tensors decompose operators below this mode, which would not see the parts.
            (torch._C, "_InferenceMode", lambda mode: torch.no_grad()),
            (torch.cuda, "Stream", BACKEND.Stream),
            (torch.cuda, "current_stream", BACKEND.current_stream),
            (torch.cuda, "stream", BACKEND.stream),
            (usp.model.recompute, "copier_for", usp.model.recompute.PinnedCopier),
        ):
            replacement = _as_method(stand_in) if isinstance(target, type) else stand_in
            stack.enter_context(patch.object(target, name, replacement))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", property(lambda mode: True)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(gpu)
        yield gpu


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)
