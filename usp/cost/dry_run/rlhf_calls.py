"""The calls of an RLHF step without devices: what each takes on one rank of any world.

Train and inference calls run for real on fake tensors, as `dry_run` does, with every sequence at its longest. Of a
generate call, the layers' forward over a group of prompts runs; its KV cache is a product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel import ParallelMesh, ProcessGroups, local_tensor
from parallel.reallocation.boxes import local_box
from usp.data.files import STDLIB
from usp.hf.models import materialise, model_facts
from usp.rlhf.data.datasets import Example, sequences_of
from usp.rlhf.data.samples import Samples
from usp.rlhf.generation.batching import Rollout, capacity
from usp.rlhf.graph.calls import Generate, Inference, ModelCall, TrainStep
from usp.rlhf.graph.dataflow import DataflowGraph, unit
from usp.rlhf.plan.operations import WeightCopy, copy_of, schedule, trained_copy, weight_copies
from usp.rlhf.plan.plan import ExecutionPlan, optimizer_of
from usp.rlhf.prepare import PreparedRlhf
from usp.rlhf.roles.forward import forward_stages
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.roles.role_spec import RoleSpec
from usp.rlhf.roles.rows import micro_batches, pack, plan_rows
from usp.train.build import fsdp2_engine

from .dry_run import GroupSent, follow_step, label_state, sent_by_axis
from .fake_world import HostMemory, fake_world, stand_ins
from .step_meter import StepMeter

KV_CACHE = "KV cache"
_PREFILL_TOKENS = 16384  # of a prefill's forward, unless one prompt is longer


@dataclass(frozen=True)
class RlhfStep:
    """A step to run without devices.

    Attributes:
        graph, plan, roles: of the run.
        prompts: per step, or sequences for algorithms that do not sample. prompt_tokens: of the longest of them.
        new_tokens: the longest response that is sampled; 0 if none is.
        slots: sequences that a rank decodes at a time.
        staleness: see `schedule`.
    """

    graph: DataflowGraph
    plan: ExecutionPlan
    roles: Mapping[str, RoleSpec]
    prompts: int
    prompt_tokens: int
    new_tokens: int
    slots: int
    staleness: int = 0

    @staticmethod
    def of(prepared: PreparedRlhf) -> RlhfStep:
        """Return the steps of a run."""
        config, tokenizer, sampled = prepared.config, prepared.tokenizer, prepared.algorithm.data == "prompts"
        built_in = config.data == STDLIB
        examples = [prepared.examples[index] for index in range(64 if built_in else len(prepared.examples))]

        def tokens(example: Example) -> int:
            prompt = config.prompt_tokens if built_in else len(example.prompt)
            pairs = prepared.algorithm.data == "pairs"
            if sampled:
                return prompt
            return prompt - len(example.prompt) + max(len(ids) for ids, _ in sequences_of(example, tokenizer, pairs))

        return RlhfStep(
            prepared.graph,
            prepared.plan,
            prepared.roles,
            prompts=config.prompts * (2 if prepared.algorithm.data == "pairs" else 1),
            prompt_tokens=max(map(tokens, examples)),
            new_tokens=config.max_new_tokens if sampled else 0,
            slots=config.slots,
            staleness=config.staleness,
        )

    def samples_of(self, call: ModelCall) -> int:
        """The most samples that a data-parallel rank has in a forward and backward of a call."""
        samples = self.prompts * self.graph.group_size
        if isinstance(call.work, TrainStep):
            samples = -(-samples // call.work.mini_batches)
        groups = -(-samples // unit(call))
        return -(-groups // self.plan[call.name].dims.batch) * unit(call)


@dataclass(frozen=True)
class CallRun:
    """What a call takes on the rank.

    Attributes:
        samples, tokens: of the rank's data-parallel index in a mini-batch, and the tokens of each sample.
        micro_batches: of these samples; 0 for a generate call.
        by_category: the parts of the call's peak.
        others_bytes: weights and optimizer states that other calls keep on the device meanwhile.
        host_bytes: peak host memory of `ac_offload`.
        sent: by the rank, in one mini-batch.
    """

    call: str
    kind: str
    layout: str
    samples: int
    tokens: int
    micro_batches: int
    by_category: Mapping[str, int]
    others_bytes: int
    host_bytes: int
    sent: tuple[GroupSent, ...]

    @property
    def own_bytes(self) -> int:
        """The peak of the call's own tensors."""
        return sum(self.by_category.values())

    @property
    def peak_bytes(self) -> int:
        return self.own_bytes + self.others_bytes


def dry_run_calls(step: RlhfStep, world_size: int, rank: int, device: torch.device) -> tuple[CallRun, ...]:
    """Run the model calls of a step in which `rank` takes part, in the order of the step.

    device: whose attention kernels, optimizer and offload are meant; tensors are on the CPU and have no memory.

    Raises:
        ValueError: for a model that does not support a layout.
        RuntimeError: in a process that has a default process group.
    """
    resident = _resident(step, world_size, rank)
    calls = [call for call in step.graph.order if call.role and rank in step.plan[call.name].ranks]
    return tuple(_run(step, call, world_size, rank, device, resident[call.name]) for call in calls)


class _Blank(RoleModel):
    """A role's model whose weights have no values."""

    def allocate(self) -> None:
        materialise(self.stage, torch.device("cpu"))
        if self.trained:
            self.engine = fsdp2_engine([self.stage], self._recipe, self.mesh)

    def _sums(self, metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        return {"loss": 0.0}


def _run(
    step: RlhfStep, call: ModelCall, world_size: int, rank: int, device: torch.device, others_bytes: int
) -> CallRun:
    layout, host = step.plan[call.name], HostMemory()
    meter = StepMeter(host)
    samples, tokens = step.samples_of(call), step.prompt_tokens + step.new_tokens
    generates = isinstance(call.work, Generate)
    if generates:  # as many prompts as one prefill takes
        tokens = step.prompt_tokens
        samples = max(1, min(samples, step.slots, _PREFILL_TOKENS // tokens))
    with fake_world(world_size, rank), stand_ins(device, host):
        mesh = ParallelMesh.create(layout.dims, "cpu", layout.ranks)
        trained = copy_of(step.graph, step.plan, call) == trained_copy(step.graph, step.plan, call.role)
        model = _Blank(step.roles[call.role], layout, mesh, trained=trained)
        with FakeTensorMode(allow_non_fake_inputs=True), meter, meter.memory.following_resizes():
            model.allocate()
            engine = model.engine if isinstance(call.work, TrainStep) else None
            label_state([model.stage], engine, meter.memory)
            meter.memory.restart()
            follow_step([model.stage], engine, meter.memory)
            given = _samples(call, samples, tokens)
            _call(model, call, given)
        rows = [] if generates else pack(given, unit=unit(call), budget=layout.token_budget, at_least=mesh.size("pp"))
        sent = sent_by_axis(meter.wire, mesh)
        by_category = dict(meter.memory.at_peak)
        if generates:
            by_category[KV_CACHE] = _cache_bytes(step, call, model, mesh)
    return CallRun(
        call=call.name,
        kind=call.kind,
        layout=str(layout),
        samples=step.samples_of(call),
        tokens=step.prompt_tokens + step.new_tokens,
        micro_batches=len(rows),
        by_category=by_category,
        others_bytes=others_bytes,
        host_bytes=host.peak_bytes,
        sent=sent,
    )


def _samples(call: ModelCall, samples: int, tokens: int) -> Samples:
    """Return samples of token 0, all of which count, with the values that a call reads of each token."""
    keys = call.work.objective.keys if isinstance(call.work, TrainStep) else ()
    values: dict[str, list[Tensor]] = {key: [torch.zeros(tokens) for _ in range(samples)] for key in keys}
    if isinstance(call.work, TrainStep) and (counts := call.work.objective.counts):
        values[counts] = [torch.ones(tokens, dtype=torch.int64) for _ in range(samples)]  # known, unlike floats
    values["tokens"] = [torch.zeros(tokens, dtype=torch.int64) for _ in range(samples)]
    return Samples(tuple(range(samples)), values)


def _call(model: RoleModel, call: ModelCall, samples: Samples) -> None:
    work = call.work
    if isinstance(work, TrainStep):
        model.train_step([samples], replace(work, mini_batches=1, epochs=1, stop_above=None))
    elif isinstance(work, Inference):
        model.inference(samples, replace(work, adapters=True), "output")
    else:
        plan = plan_rows(samples, replace(model.layout, micro_batch_tokens=0), model.mesh)
        assert plan is not None
        batches = micro_batches(samples, plan, model.layout, model.mesh)
        forward_stages(model.stage, model.mesh, batches, None, dtype=model.spec.dtype)


def _cache_bytes(step: RlhfStep, call: ModelCall, model: RoleModel, mesh: ParallelMesh) -> int:
    """Return the bytes of the rank's KV cache, with every sequence at its longest."""
    facts, sp, tp = model_facts(model.spec.source, model.spec.config), mesh.size("sp"), mesh.size("tp")
    layers = sum(1 for module in model.stage.model.modules() if getattr(module, "unified_sp_mask", None) is not None)
    places = capacity([Rollout([0] * step.prompt_tokens, 0, step.new_tokens)], sp, sp)
    slots = min(step.slots, step.samples_of(call))
    heads = max(1, facts.num_kv_heads // tp)
    return slots * places * layers * heads * (facts.head_dim + facts.value_dim) * model.spec.dtype.itemsize


# What stays on the device beside a call


def _resident(step: RlhfStep, world_size: int, rank: int) -> dict[str, int]:
    """Return, by call, the bytes of weights and optimizer states that are not the call's own."""
    graph, plan = step.graph, step.plan
    copies = {copy: calls for copy, calls in weight_copies(graph, plan).items() if rank in copy.layout.ranks}
    models: dict[WeightCopy, RoleModel] = {}
    with fake_world(world_size, rank):
        groups = ProcessGroups()
        for copy, calls in copies.items():
            mesh = ParallelMesh.create(copy.layout.dims, "cpu", copy.layout.ranks, groups)
            trained = copy == trained_copy(graph, plan, copy.role)
            models[copy] = RoleModel(step.roles[copy.role], plan[calls[-1].name], mesh, trained=trained)
    trained_copies = {role: trained_copy(graph, plan, role) for role in graph.roles}
    aliases = frozenset(
        copy
        for copy, model in models.items()
        if (source := trained_copies[copy.role]) in models and source != copy and _shares(model, models[source])
    )
    weights = {copy: 0 if copy in aliases else _bytes(model.weights().values()) for copy, model in models.items()}
    frozen = {copy: 0 if copy in aliases else _bytes(model.frozen().values()) for copy, model in models.items()}
    states = {
        copy: 2 * _bytes(parameter for parameter in model.stage.parameters() if parameter.requires_grad)
        for copy, model in models.items()
        if copy == trained_copies[copy.role]
    }
    present = {copy for copy in models if trained_copies[copy.role] in (None, copy)}
    present -= {copy for copy in present if copy.role in plan.offload}
    found: dict[str, int] = {}
    for operation in schedule(graph, plan, world_size, aliases, staleness=step.staleness):
        if operation.copy in models and operation.kind in ("reallocate", "load"):
            present.add(operation.copy)
        elif operation.copy in models and operation.kind in ("release", "offload"):
            present.discard(operation.copy)
        elif operation.kind == "call" and rank in operation.ranks and (call := graph[operation.call]).role:
            own = copy_of(graph, plan, call)
            total = sum(weights[copy] for copy in present) + sum(frozen.values())
            total += sum(size for copy, size in states.items() if optimizer_of(copy.role) not in plan.offload)
            held = trained_copies[own.role] if own in aliases else own
            assert held is not None
            kept = weights[held] + frozen[held]
            if isinstance(call.work, TrainStep) and optimizer_of(call.role) not in plan.offload:
                kept += states.get(own, 0)
            found[call.name] = total - kept
    return found


def _shares(copy: RoleModel, source: RoleModel) -> bool:
    """Return whether a copy can use the memory of the trained one, as far as this rank can tell."""
    held = source.weights()
    return copy.layout.zero == 0 and all(
        name in held and local_box(held[name]) == local_box(weight) and held[name].dtype == weight.dtype
        for name, weight in copy.weights().items()
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_tensor(x).nbytes for x in tensors)
