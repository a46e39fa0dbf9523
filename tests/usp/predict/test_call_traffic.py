"""The traffic of calls without gradients against the wire, to the byte: inference, prefill and decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.usp.predict.test_step_traffic import GroupOp, evenly
from tests.usp.tiny import CONFIGS, VOCAB
from usp.config import TrainConfig
from usp.hf.experts import router_modules
from usp.hf.models import model_facts, scalar_config
from usp.hf.tensor_parallel import model_shape
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes
from usp.planning.call_cost import decode_traffic
from usp.predict.job import Job
from usp.predict.traffic import FLOAT32, INT64, Sent, all_reduce, merged, pass_parts
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate, Inference
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.samples import Samples

TOKENS, SAMPLES, SLOTS = 64, 8, 32
CHUNK = 24  # tokens whose logits exist at a time
Counts = dict[GroupOp, tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A call on the last ranks of the world: those of `dims`."""

    dims: ParallelDims
    family: str = "llama-4kv"
    head: Literal["logprobs", "values"] = "logprobs"
    zero: int = 0
    sp_layout: str = "zigzag"
    tp_sequence_parallel: bool = False

    @property
    def config(self) -> Any:
        config = CONFIGS[self.family]()
        return scalar_config(config) if self.head == "values" else config

    def call_layout(self, world_size: int) -> CallLayout:
        size = self.dims.pp * self.dims.batch * self.dims.sp * self.dims.tp
        return CallLayout(
            tuple(range(world_size - size, world_size)),
            self.dims,
            zero=self.zero,
            sp_layout=self.sp_layout,
            tp_sequence_parallel=self.tp_sequence_parallel,
            micro_batch_tokens=TOKENS,
        )

    def job(self, world_size: int, output: Literal["logprobs", "values", "cache"], rows: int, parts: int) -> Job:
        facts = model_facts("", self.config)
        flags = TrainConfig(
            seq_len=TOKENS,
            batch_size=rows,
            micro_batches=parts,
            zero=self.zero,
            sp_layout=self.sp_layout,
            tp_sequence_parallel=self.tp_sequence_parallel,
            loss_chunk=CHUNK,
            dtype="bfloat16",
        )
        shape, placed = model_shape(facts, self.config), self.call_layout(world_size).ranks
        return Job(flags, shape, self.dims, trained=False, output=output, weights=torch.bfloat16, placed=placed)


def dims(**degrees: int) -> ParallelDims:
    return ParallelDims(**{"dp_shard": 1, **degrees})


# The last of each list, because the other ranks take no part. One of two layers has a window.
LAST_TWO = Case(dims(ring=2), family="qwen2", sp_layout="auto")
INFERENCE = [
    Case(dims(dp_shard=4), zero=3),
    Case(dims(dp_shard=4), zero=1, head="values"),
    Case(dims(ulysses=2, ring=2)),
    Case(dims(ring=4), zero=3, sp_layout="contiguous", family="mistral"),
    Case(dims(pp=2, ulysses=2), zero=2),
    Case(dims(pp=2, tp=2)),
    Case(dims(tp=2, ring=2), sp_layout="striped", tp_sequence_parallel=True, zero=3),
    Case(dims(tp=2, dp_shard=2), head="values"),
    Case(dims(dp_shard=2, ring=2, ep=4), family="mixtral", zero=3),
    Case(dims(tp=2, ulysses=2, ep=4), family="qwen3_moe"),
    LAST_TWO,
]
GENERATION = [
    Case(dims(pp=2, ring=2), sp_layout="striped", family="qwen3"),
    Case(dims(dp_shard=2, ulysses=2, ep=2), family="mixtral"),
    *(case for case in INFERENCE if case.zero == 0 and case.head == "logprobs" and not case.tp_sequence_parallel),
]
FEW = [*GENERATION[:2], *GENERATION[-2:]]  # without --exhaustive; each has an axis that the others lack


def built(case: Case, world_size: int) -> tuple[RoleModel, ParallelMesh]:
    layout = case.call_layout(world_size)
    mesh = ParallelMesh.create(layout.dims, "cpu", layout.ranks)
    spec = RoleSpec("actor", "tiny", case.config, dtype=torch.bfloat16, loss_chunk=CHUNK)
    model = RoleModel(spec, layout, mesh)
    model.allocate()
    for weight in model.weights().values():
        torch.nn.init.normal_(weight.to_local() if hasattr(weight, "to_local") else weight, std=0.02)
    for router in router_modules(model.stage.model):
        router.register_forward_hook(evenly)
    return model, mesh


def counts(counter: Any) -> Counts:
    return {key: (counter.by_group[key], calls) for key, calls in counter.calls.items()}


def inference_traffic(job: Job, rank: int) -> tuple[Sent, ...]:
    """Return what `rank` sends in an inference call: its forwards, the number and length of rows, and the outputs."""
    parts = [*pass_parts(job, rank)["forward"], all_reduce("batch", 2 * INT64, job.degree("batch"))]
    if len(job.stage_layers) - 1 in job.stages(rank):
        values = job.config.micro_batches * job.tokens * FLOAT32
        for axis in ("ulysses", "ring"):  # one after the other
            parts.append(Sent(axis, "_allgather_base_", values * (job.degree(axis) - 1)))
            values *= job.degree(axis)
    return merged(sent for sent in parts if job.degree(sent.axis) > 1)


def sent_by_inference(cases: Sequence[Case]) -> list[Counts | None]:
    """What this rank sends in the second call of each case; None if it takes no part."""
    found: list[Counts | None] = []
    for case in cases:
        layout = case.call_layout(torch.distributed.get_world_size())
        if torch.distributed.get_rank() not in layout.ranks:
            found.append(None)
            continue
        model, mesh = built(case, torch.distributed.get_world_size())
        own = range(SAMPLES // mesh.size("batch"))
        samples = Samples(tuple(own), {"tokens": [torch.arange(TOKENS) % VOCAB for _ in own]})
        model.inference(samples, Inference(case.head), "output", layout)
        with SentBytes() as sent:
            model.inference(samples, Inference(case.head), "output", layout)
        found.append(counts(sent))
    return found


def sent_by_generation(cases: Sequence[Case]) -> list[tuple[Counts, Counts] | None]:
    """What this rank sends in a forward of (prompts, one token per slot)."""
    found: list[tuple[Counts, Counts] | None] = []
    for case in cases:
        world_size = torch.distributed.get_world_size()
        if torch.distributed.get_rank() not in case.call_layout(world_size).ranks:
            found.append(None)
            continue
        model, mesh = built(case, world_size)
        stage = model.stage
        generator = _Counting(stage.model, mesh, first=stage.first, last=stage.last, slots=SLOTS)
        prompts = [torch.arange(start, start + TOKENS + 1) % VOCAB for start in range(SLOTS)]
        for _ in range(2):
            generator.seen = []
            generator.generate(prompts, Generate(max_new_tokens=1, temperature=0.0), seeds=range(SLOTS))
        assert len(generator.seen) == 2
        found.append((generator.seen[0], generator.seen[1]))
    return found


class _Counting(Generator):
    seen: list[Counts]

    def _forward(self, *args: Any) -> Any:
        with SentBytes() as sent:
            hidden = super()._forward(*args)
        self.seen.append(counts(sent))
        return hidden


def predicted(job: Job, rank: int, parts: Iterable[Sent]) -> Counts:
    nbytes: Counter[GroupOp] = Counter()
    calls: Counter[GroupOp] = Counter()
    for sent in parts:
        key = job.linked(sent.axis, rank), sent.collective
        nbytes[key] += sent.nbytes
        calls[key] += sent.calls
    return {key: (nbytes[key], calls[key]) for key in calls}


@pytest.mark.slow
def test_every_byte_of_an_inference_call_is_predicted(ranks: RankPool, exhaustive: bool) -> None:
    cases = INFERENCE if exhaustive else [*INFERENCE[::4], LAST_TWO]
    for rank, found in enumerate(ranks.run(sent_by_inference, 4, cases)):
        for case, wire in zip(cases, found, strict=True):
            each = SAMPLES // case.dims.batch
            job = case.job(4, case.head, rows=each, parts=each)
            assert (wire is None) == (rank not in job.global_ranks)
            if wire is not None:
                place = job.global_ranks.index(rank)
                assert predicted(job, place, inference_traffic(job, place)) == wire, f"rank {rank}: {case}"


def test_every_byte_of_prefill_and_decode_is_predicted(ranks: RankPool, exhaustive: bool) -> None:
    cases = GENERATION if exhaustive else FEW
    for rank, found in enumerate(ranks.run(sent_by_generation, 4, cases)):
        for case, wire in zip(cases, found, strict=True):
            job = case.job(4, "cache", rows=SLOTS, parts=1)
            if wire is not None:
                place = job.global_ranks.index(rank)
                prefill = pass_parts(job, place)
                assert not any(prefill[kind] for kind in ("count", "recompute", "backward", "update"))
                assert predicted(job, place, merged(prefill["forward"])) == wire[0], f"prefill, rank {rank}: {case}"
                forward = decode_traffic(job, place, SLOTS)
                assert predicted(job, place, forward) == wire[1], f"decode, rank {rank}: {case}"
