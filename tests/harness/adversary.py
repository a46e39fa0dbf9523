"""A transport on gloo that behaves as NCCL may on GPUs, so that faults that gloo forgives are errors.

    receive buffer   holds NaN, or noise of integers, until the message is waited for
    send buffer      must hold until then what was sent
    messages         must be waited for, and match what the peer posts
    operations       of all ranks, ordered as streams order them, must have no cycle, which would be a deadlock

The operations of a communicator run one after another, on each rank in the order in which they are issued. An operation
also runs after everything that was waited for before it was issued. Messages that are posted together run together.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from usp.attention import comm
from usp.parallel.wire import _group_among

FRAMES = 4  # of an operation's stack
_SILENT = ("wait_tensor", "_wrap_tensor_autograd")
_SINGLE = {"send": "send", "recv_": "receive"}


@dataclass
class Operation:
    """A collective, or a message from or to a peer, on one rank.

    issued, waited: counts of the rank's operations and waits before them; a blocking one is waited for at once, and
    `waited` is None before that. batch: the same for messages that are posted together.
    """

    kind: str  # collective, send or receive
    name: str
    group: tuple[str, tuple[int, ...]]  # name of the communicator, and its global ranks
    peer: int
    elements: int
    issued: int
    batch: int
    waited: int | None = None
    where: str = ""

    def __str__(self) -> str:
        peer = "" if self.kind == "collective" else f" {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        return f"{self.name}{peer} of {self.elements} elements in group {self.group[1]}, issued at\n{self.where}"


def order_problems(logs: Sequence[Sequence[Operation]]) -> Iterator[str]:
    """Yield what is wrong with the operations of all ranks, by rank."""
    for rank, log in enumerate(logs):
        yield from (f"rank {rank} never waits for {op}" for op in log if op.waited is None)
    nodes: dict[int, tuple[Any, ...]] = {}  # by the id of an operation: what it is on all its ranks
    matched: defaultdict[tuple[Any, ...], list[tuple[int, Operation]]] = defaultdict(list)
    for rank, log in enumerate(logs):
        numbers: defaultdict[tuple[Any, ...], int] = defaultdict(int)
        for op in log:
            ends = {"send": (rank, op.peer), "receive": (op.peer, rank)}.get(op.kind, ())
            key = (op.group, *ends)
            nodes[id(op)] = (*key, numbers[key])
            matched[nodes[id(op)]].append((rank, op))
            numbers[key] += 1
    for node, sides in matched.items():
        missing = {*(node[1:3] if len(node) > 2 else sides[0][1].group[1])} - {rank for rank, _ in sides}
        if missing:
            yield f"ranks {sorted(missing)} have no counterpart of rank {sides[0][0]}'s {sides[0][1]}"
        different = {(op.elements if len(node) > 2 else op.name) for _, op in sides}
        if len(different) > 1:
            yield "operations meet that differ: " + "\n".join(f"rank {rank}: {op}" for rank, op in sides)
    yield from _cycles(logs, nodes)


def _cycles(logs: Sequence[Sequence[Operation]], nodes: dict[int, tuple[Any, ...]]) -> Iterator[str]:
    after = TopologicalSorter[tuple[Any, ...]]()
    shown: dict[tuple[Any, ...], str] = {}
    for rank, log in enumerate(logs):
        batches: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
        last = max((max(op.issued, op.waited or 0) for op in log), default=0)
        for time in range(last):
            after.add(("time", rank, time + 1), ("time", rank, time))
        for op in log:
            node, of_group = nodes[id(op)], batches[op.group]
            shown.setdefault(node, f"rank {rank}: {op}")
            if not of_group or of_group[-1] != op.batch:
                of_group.append(op.batch)
                after.add(("stream", rank, op.group, len(of_group)), ("stream", rank, op.group, len(of_group) - 1))
            after.add(node, ("time", rank, op.issued), ("stream", rank, op.group, len(of_group)))
            after.add(("stream", rank, op.group, len(of_group) + 1), node)
            if op.waited is not None:
                after.add(("time", rank, op.waited), node)
    try:
        after.prepare()
    except CycleError as error:
        operations = [shown[node] for node in error.args[1] if node in shown]
        yield "streams would deadlock: each of these waits for the next\n" + "\n".join(operations)


class Adversary(TorchDispatchMode):
    """The transport, for the operations of this rank inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Operation] = []
        self.now, self._posting = 0, False
        self._works: list[_Late] = []  # gloo drops a message that nobody holds, and its peer would wait forever
        self._post = dist.batch_isend_irecv
        self._patches = ExitStack()

    def __enter__(self) -> Adversary:
        self._patches.enter_context(patch.object(dist, "batch_isend_irecv", self.post))
        self._patches.enter_context(patch.object(comm, "post_messages", self.post_messages))
        self._patches.enter_context(
            patch.object(comm, "post_exchange", partial(self.post_exchange, comm.post_exchange))
        )
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._patches.close()
        super().__exit__(*exc_info)

    def check(self) -> None:
        """Raise RuntimeError on every rank for what is wrong with the operations of all ranks. Collective."""
        logs: list[list[Operation]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(logs, self.log)
        if problems := list(order_problems(logs)):
            raise RuntimeError(f"{len(problems)} problems of messages; the first: {problems[0]}")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SILENT and not self._posting:
            group = _group_among(func, args)
            if group.size() > 1 and group.name() != "fake":
                first = next(iter(args[0] or args[1]), None) if isinstance(args[0], list) else args[0]
                kind = _SINGLE.get(name, "collective")
                peer = -1 if kind == "collective" else dist.get_global_rank(group, args[2])
                op = self._add(kind, name, group, peer, first.numel() if isinstance(first, Tensor) else 0)
                op.waited = self._tick()
        return func(*args, **(kwargs or {}))

    def post(self, operations: list[dist.P2POp]) -> list[Any]:
        """Stand in for `batch_isend_irecv`."""
        if any(isinstance(op.tensor, FakeTensor) for op in operations):
            return self._post(operations)
        issued, works, tensors = self.now, [], [op.tensor for op in operations]
        for op in operations:
            kind = "send" if op.op is dist.isend else "receive"
            group = op.group or dist.group.WORLD
            logged = self._add(kind, kind, group, op.peer, op.tensor.numel())
            logged.issued = logged.batch = issued
            held = op.tensor.detach().clone()
            if kind == "receive":
                _spoil(op.tensor.detach())
            works.append(partial(_Late, self, logged, op.tensor.detach(), held))
            op.tensor = held
        self._tick()
        self._posting = True
        try:
            posted = [late(work) for late, work in zip(works, self._post(operations), strict=True)]
        finally:
            self._posting = False
            for op, x in zip(operations, tensors, strict=True):
                op.tensor = x
        self._works += posted
        return posted

    def post_messages(self, group: Any, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> Any:
        """Stand in for `usp.attention.comm.post_messages`."""
        both = [(dist.isend, *each) for each in sends] + [(dist.irecv, *each) for each in receives]
        return self.post([dist.P2POp(kind, x, group=group, group_peer=peer) for kind, peer, x in both])

    def post_exchange(self, post: Any, group: Any, received: Tensor, x: Tensor, *splits: list[int]) -> Any:
        """Stand in for `usp.attention.comm.post_exchange`, done by `post`."""
        if isinstance(x, FakeTensor) or group.name() == "fake":
            return post(group, received, x, *splits)
        logged = self._add("collective", "alltoall_base_", group, -1, received.numel())
        held, arriving = x.detach().clone(), received.detach().clone()
        _spoil(received)
        self._tick()
        self._posting = True
        try:
            work = post(group, arriving, held, *splits)
        finally:
            self._posting = False
        self._works.append(_Late(self, logged, received, arriving, work, (x, held)))
        return self._works[-1]

    def _add(self, kind: str, name: str, group: Any, peer: int, elements: int) -> Operation:
        members = tuple(dist.get_process_group_ranks(group))
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        where = "".join(traceback.format_list(frames[-FRAMES:]))
        self.log.append(
            Operation(kind, name, (group.group_name, members), peer, elements, self.now, self.now, where=where)
        )
        return self.log[-1]

    def _tick(self) -> int:
        self.now += 1
        return self.now


def _spoil(x: Tensor) -> None:
    """Fill a buffer with what must not be read."""
    if x.is_floating_point() or x.is_complex():
        x.fill_(float("nan"))
    else:
        x.fill_(1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max - 5)


@dataclass
class _Late:
    """A message in flight: `held` has what was sent, or what was received. source: of an exchange, the tensor that is
    sent and its copy."""

    adversary: Adversary
    operation: Operation
    tensor: Tensor
    held: Tensor
    work: Any
    source: tuple[Tensor, Tensor] | None = None

    def wait(self, *timeout: Any) -> bool:
        self.work.wait(*timeout)
        if self.operation.waited is not None:
            return True
        self.operation.waited = self.adversary._tick()
        if self.operation.kind != "send":
            self.tensor.copy_(self.held)
        sent = (self.tensor, self.held) if self.operation.kind == "send" else self.source
        if sent is not None and not torch.equal(*(x.nan_to_num() for x in sent)):
            raise RuntimeError(f"a send buffer changed before its wait: {self.operation}")
        return True

    def is_completed(self) -> bool:
        return self.operation.waited is not None
