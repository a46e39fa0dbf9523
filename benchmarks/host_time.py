"""Host time of one attention call, and what it launches besides the attention kernels.

One process takes the place of a rank: messages go to torch's fake process group, and the attention kernels of all
systems allocate their results and compute nothing. What remains is the time in which the host prepares a call, which a
GPU hides only where its kernels take longer. Systems alternate; each figure is the least CPU time of a call.

    python -m benchmarks.host_time            # about two minutes
    python -m benchmarks.host_time --quick    # counts, and times of few calls
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.baselines import yunchang_cpu
from benchmarks.harness.record import Record, finish, parser_of
from usp import UnifiedSPAttention
from usp.attention import DecodeStep, Kernel, KVCache
from usp.attention.kernels.varlen import lower_varlen
from usp.parallel import ParallelDims, ParallelMesh
from usp.sp import sp_attention

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 16, 8, 8, 8  # of a rank: small, so that the host's time is all there is
CACHED, SLOTS = 64, 4
PLANNED_TOKENS, PLANNED_RANKS, DOCUMENTS, SAMPLES = 2**20, 64, 16_000, 16  # of planning; samples and their prefix
PLANNED = (("zigzag", False), ("balanced", False), ("striped", False), ("zigzag", True), ("striped", True))
NO_LAUNCH = ("empty", "empty_like", "new_empty", "empty_strided", "_local_scalar_dense", "detach", "alias")


@dataclass(frozen=True)
class Case:
    name: str
    ring: int = 1
    ulysses: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses


CASES = (Case("ring 1"), Case("ring 2", ring=2), Case("ring 8", ring=8), Case("ulysses 8", ulysses=8))


class Idle(Kernel):
    """A variable-length kernel that allocates its results."""

    name, packed = "idle", True

    def refuses_call(self, *_: Any) -> None:
        return None

    def lower(self, tasks, device, dtype):
        return tuple(lower_varlen(tasks, device))

    def forward(self, q_nANH, k_nBKH, v_nBKV, launch, spec):
        lse = q_nANH.new_empty(len(q_nANH), q_nANH.shape[2], q_nANH.shape[1], dtype=torch.float32)
        return torch.empty_like(q_nANH), lse

    def backward(self, dout_nANV, q_nANH, k_nBKH, v_nBKV, out_nANV, lse_nNA, launch, spec):
        return torch.empty_like(q_nANH), torch.empty_like(k_nBKH), torch.empty_like(v_nBKV)


def idle_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def idle_backward(*_: Any, **rest: Any) -> None: ...


class Launches(TorchDispatchMode):
    """Counts the operators that launch something, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.nbytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and func.overloadpacket.__name__ not in NO_LAUNCH:
            self.count += 1
            several = results if isinstance(results, tuple | list) else (results,)
            self.nbytes += sum(x.nbytes for x in (*args, *several) if isinstance(x, Tensor))
        return results


@contextmanager
def world(ranks: int) -> Iterator[None]:
    """Be one rank of so many, the others of which are not there."""
    dist.init_process_group("fake", rank=min(3, ranks - 1), world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def systems(case: Case) -> dict[str, Callable[..., Tensor]]:
    mesh = ParallelMesh.create(ParallelDims(ulysses=case.ulysses, ring=case.ring), device_type="cpu")
    chosen: dict[str, Callable[..., Tensor]] = {"ours": UnifiedSPAttention(mesh)}
    if case.ranks > 1 and find_spec("yunchang"):
        chosen["yunchang"] = yunchang_cpu.build(ulysses=case.ulysses, ring=case.ring, layout="zigzag").attention
    if case.ranks == 1:
        chosen[SDPA] = sdpa
    return chosen


def calls(attention: Callable[..., Tensor]) -> dict[str, Callable[[], Any]]:
    """Return a forward, and a forward and backward."""
    shapes = [(1, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    leaves = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*leaves, causal=True)

    def both() -> None:
        out = attention(*leaves, causal=True)
        torch.autograd.grad(out, leaves, out.detach())

    return {"forward": forward, "both": both}


def decode_step(ranks: int) -> Callable[[], Any]:
    cache, group = KVCache.allocate(SLOTS, CACHED, torch.device("cpu")), dist.group.WORLD if ranks > 1 else None
    cache.positions.copy_(torch.arange(CACHED))
    at = torch.full((SLOTS,), CACHED - 1)
    step = DecodeStep(cache, at, at, None, length=CACHED, group=group)
    q, k = (torch.randn(SLOTS, 1, heads, HEAD_DIM, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS))
    return lambda: step.attend(0, q, k, k, scale=None, window=None)


def least_microseconds(runs: dict[Any, Callable[[], Any]], rounds: int, repeats: int) -> dict[Any, float]:
    """Return the least CPU time of a call of each, taken in turns."""
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            begin = time.process_time()
            for _ in range(repeats):
                run()
            least[name] = min(least[name], (time.process_time() - begin) / repeats * 1e6)
    return least


def launches(run: Callable[[], Any]) -> Launches:
    run()
    with Launches() as counted:
        run()
    return counted


def measure(case: Case, rounds: int, repeats: int) -> dict[str, Any]:
    """Return microseconds, launches and bytes of each system's forward and backward."""
    chosen = patch.object(sp_attention, "choose_kernel", lambda *_: (Idle(), "", ""))
    idle = patch.multiple(yunchang_cpu, _forward=idle_forward, _backward=idle_backward)
    with world(case.ranks), chosen, idle:
        runs = {name: calls(attention) for name, attention in systems(case).items()}
        flat = {(name, kind): run for name, kinds in runs.items() for kind, run in kinds.items()}
        counted = {key: launches(run) for key, run in flat.items()}
        times = least_microseconds(flat, rounds, repeats)
    return {
        "case": asdict(case),
        "systems": {
            name: {
                "microseconds": {kind: times[name, kind] for kind in kinds},
                "launches": {kind: counted[name, kind].count for kind in kinds},
                "bytes": {kind: counted[name, kind].nbytes for kind in kinds},
            }
            for name, kinds in runs.items()
        },
    }


def measure_planning(layout: str, tree: bool) -> dict[str, Any]:
    """Return the CPU time in which one rank finds the plan of many documents first, and again: microseconds."""
    generator = random.Random(0)
    cuts = sorted(generator.sample(range(1, PLANNED_TOKENS), DOCUMENTS - 1))
    cu_seqlens = torch.tensor([0, *cuts, PLANNED_TOKENS])
    numbers = torch.arange(DOCUMENTS)
    prefix_tree = torch.where(numbers % SAMPLES == 0, -1, numbers - numbers % SAMPLES) if tree else None
    with world(PLANNED_RANKS), patch.object(sp_attention, "choose_kernel", lambda *_: (Idle(), "", "")):
        mesh = ParallelMesh.create(ParallelDims(ring=PLANNED_RANKS), device_type="cpu")
        attention, x = UnifiedSPAttention(mesh, layout), torch.empty(1, PLANNED_TOKENS // PLANNED_RANKS, 1, 8)

        def plan() -> None:
            call = sp_attention.Call((x, x, x, None, None, None))
            attention.prepared(call, lambda: attention.masks(True, None, None, cu_seqlens, None, prefix_tree))

        first = least_microseconds({"first": plan}, 1, 1)
        return {"layout": layout, "tree": tree, **first, **least_microseconds({"again": plan}, 20, 10)}


def measure_decoding(ranks: int, rounds: int, repeats: int) -> dict[str, Any]:
    with world(ranks):
        step = decode_step(ranks)
        counted, times = launches(step), least_microseconds({"forward": step}, rounds, repeats)
    figures = {"microseconds": times, "launches": {"forward": counted.count}, "bytes": {"forward": counted.nbytes}}
    return {"case": {"name": f"decode step, sp {ranks}"}, "systems": {"ours": figures}}


def rows(data: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for result in data:
        for name, figures in result["systems"].items():
            cells = []
            for figure, form in (("microseconds", "{:.0f}"), ("launches", "{}"), ("bytes", "{}")):
                first, *both = figures[figure].values()
                cells += [form.format(first), form.format(both[0] - first) if both else ""]
            yield result["case"]["name"], name, *cells


QUESTION, SDPA = "How long does the host prepare a call?", "torch's SDPA"
COLUMNS = ("call", "system", "us forward", "us backward", "launches fwd", "bwd", "bytes fwd", "bwd")
NOTES = (
    f"{TOKENS} tokens of a rank, {HEADS} query and {KV_HEADS} KV heads, head dim {HEAD_DIM}, bfloat16; zigzag",
    "launches and bytes: operators besides attention kernels and messages, and what they read and write",
    "a merge takes the operators of torch here; where Triton is, one launch and 10 bytes an element of out",
)


def planning_note(found: dict[str, Any]) -> str:
    tree = f", each {SAMPLES}th the prefix of those behind it" if found["tree"] else ""
    return (
        f"plan and launches of one of {PLANNED_RANKS} ring ranks, {found['layout']}, {DOCUMENTS:,} documents in 1M "
        f"tokens{tree}: {found['first'] / 1e6:.2f} CPU s; found again in {found['again']:.0f} us"
    )


def answer(data: list[dict[str, Any]]) -> str:
    def microseconds(call: str, system: str) -> str:
        (found,) = (result["systems"] for result in data if result["case"]["name"] == call)
        if system not in found:
            return "unknown"
        first, both = found[system]["microseconds"].values()
        return f"{first:.0f} and {both - first:.0f}"

    return (
        f"{microseconds('ring 1', 'ours')} us of CPU time on one rank for forward and backward "
        f"({microseconds('ring 1', SDPA)} us for {SDPA}, whose kernel is included), {microseconds('ring 8', 'ours')} "
        f"us in a ring of 8 ({microseconds('ring 8', 'yunchang')} us for yunchang)."
    )


def main() -> None:
    options = parser_of(__doc__ or "", quick="few calls").parse_args()
    torch.set_num_threads(1)
    turns = (2, 2) if options.quick else (40, 10)
    data = [*(measure(case, *turns) for case in CASES), *(measure_decoding(ranks, *turns) for ranks in (1, 2))]
    notes = (*NOTES, *(planning_note(measure_planning(*case)) for case in PLANNED))
    finish(Record.of("host_time", QUESTION, answer(data), COLUMNS, rows(data), notes), options)


if __name__ == "__main__":
    main()
