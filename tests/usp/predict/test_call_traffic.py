"""The traffic of calls without gradients against the wire, to the byte: inference, prefill and decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.usp.predict.real_step import Counts, choose_in_turn, counts, predicted
from tests.usp.tiny import CONFIGS, VOCAB
from usp.config import TrainConfig
from usp.hf.experts import router_modules
from usp.hf.models import model_facts, scalar_config
from usp.hf.tensor_parallel import model_shape
from usp.parallel import ParallelDims, ParallelMesh
from usp.parallel.wire import SentBytes
from usp.planning.call_cost import decode_traffic
from usp.predict.job import PASSES, Job
from usp.predict.traffic import FLOAT32, INT64, Sent, all_reduce, merged, pass_parts
from usp.rlhf.generation.generate import Generator
from usp.rlhf.graph import Generate, Inference
from usp.rlhf.plan.plan import CallLayout
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.samples import Samples

TOKENS, SAMPLES, SLOTS = 64, 8, 32
CHUNK = 24  # tokens whose logits exist at a time


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

    @property
    def generates(self) -> bool:
        return self.zero == 0 and self.head == "logprobs" and not self.tp_sequence_parallel

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


# Those of fewer than four ranks are on the last of the world. One of two layers of qwen2 has a window.
CASES = [
    Case(dims(pp=2, ring=2), sp_layout="striped", family="qwen3"),
    Case(dims(dp_shard=2, ulysses=2, ep=2), family="mixtral"),
    Case(dims(ring=2), family="qwen2", sp_layout="auto"),
    Case(dims(dp_shard=4), zero=3),
    Case(dims(pp=2, ulysses=2), zero=2),
    Case(dims(dp_shard=2, ring=2, ep=4), family="mixtral", zero=3),
    Case(dims(tp=2, ulysses=2, ep=4), family="qwen3_moe"),
    # with --exhaustive
    Case(dims(dp_shard=4), zero=1, head="values"),
    Case(dims(ulysses=2, ring=2)),
    Case(dims(ring=4), zero=3, sp_layout="contiguous", family="mistral"),
    Case(dims(pp=2, tp=2)),
    Case(dims(tp=2, ring=2), sp_layout="striped", tp_sequence_parallel=True, zero=3),
    Case(dims(tp=2, dp_shard=2), head="values"),
]


def built(case: Case, world_size: int) -> tuple[RoleModel, ParallelMesh]:
    layout = case.call_layout(world_size)
    mesh = ParallelMesh.create(layout.dims, "cpu", layout.ranks)
    spec = RoleSpec("actor", "tiny", case.config, dtype=torch.bfloat16, loss_chunk=CHUNK)
    model = RoleModel(spec, layout, mesh)
    model.allocate()
    for weight in model.weights().values():
        torch.nn.init.normal_(weight.to_local() if hasattr(weight, "to_local") else weight, std=0.02)
    for router in router_modules(model.stage.model):
        router.register_forward_hook(choose_in_turn)
    return model, mesh


def inference_traffic(job: Job, rank: int) -> tuple[Sent, ...]:
    """Return what `rank` sends in an inference call: its forwards, the number and length of rows, and the outputs."""
    parts = [*pass_parts(job, rank)["forward"], all_reduce("batch", 2 * INT64, job.degree("batch"))]
    if len(job.stage_layers) - 1 in job.stages(rank):
        values = job.config.micro_batches * job.tokens * FLOAT32
        for axis in ("ulysses", "ring"):  # one after the other
            parts.append(Sent(axis, "_allgather_base_", values * (job.degree(axis) - 1)))
            values *= job.degree(axis)
    return merged(sent for sent in parts if job.degree(sent.axis) > 1)


def sent_by_calls(cases: Sequence[Case]) -> list[list[Counts]]:
    """Return what this rank sends in the second call of inference and, if the case generates, in the forwards of
    prompts and of one token per slot; nothing if it takes no part."""
    found, world_size = [], torch.distributed.get_world_size()
    for case in cases:
        layout = case.call_layout(world_size)
        if torch.distributed.get_rank() not in layout.ranks:
            found.append([])
            continue
        model, mesh = built(case, world_size)
        own = range(SAMPLES // mesh.size("batch"))
        samples = Samples(tuple(own), {"tokens": [torch.arange(TOKENS) % VOCAB for _ in own]})
        model.inference(samples, Inference(case.head), "output", layout)
        with SentBytes() as sent:
            model.inference(samples, Inference(case.head), "output", layout)
        found.append([counts(sent)])
        if case.generates:
            stage = model.stage
            generator = _Counting(stage.model, mesh, first=stage.first, last=stage.last, slots=SLOTS)
            prompts = [torch.arange(start, start + TOKENS + 1) % VOCAB for start in range(SLOTS)]
            for _ in range(2):
                generator.seen = []
                generator.generate(prompts, Generate(max_new_tokens=1, temperature=0.0), seeds=range(SLOTS))
            found[-1] += generator.seen
    return found


class _Counting(Generator):
    seen: list[Counts]

    def _forward(self, *args: Any) -> Any:
        with SentBytes() as sent:
            hidden = super()._forward(*args)
        self.seen.append(counts(sent))
        return hidden


def sent_by_formulas(case: Case, world_size: int, rank: int) -> list[Counts]:
    each = SAMPLES // case.dims.batch
    job = case.job(world_size, case.head, rows=each, parts=each)
    if rank not in job.global_ranks:
        return []
    place = job.global_ranks.index(rank)
    found = [predicted(job, place, inference_traffic(job, place))]
    if case.generates:
        job = case.job(world_size, "cache", rows=SLOTS, parts=1)
        prefill = pass_parts(job, place)
        assert not any(prefill[kind] for kind in PASSES if kind != "forward")
        found += [predicted(job, place, parts) for parts in (prefill["forward"], decode_traffic(job, place, SLOTS))]
    return found


@pytest.mark.parametrize(
    "cases", [CASES[:3], CASES[3:7], pytest.param(CASES[7:], marks=pytest.mark.exhaustive)], ids=["few", "more", "rest"]
)
@pytest.mark.slow(but=1)
def test_every_byte_of_a_call_is_predicted(ranks: RankPool, cases: list[Case]) -> None:
    for rank, found in enumerate(ranks.run(sent_by_calls, 4, cases)):
        for case, wires in zip(cases, found, strict=True):
            assert wires == sent_by_formulas(case, 4, rank), f"rank {rank}: {case}"
