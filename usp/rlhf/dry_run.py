"""The calls of an RLHF step without devices: what each takes on one rank of any world.

Train and inference calls run for real on fake tensors, as `dry_run` does, with every sequence at its longest. Of a
generate call, the layers' forward over a group of prompts runs; its KV cache is a product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Group
from torch import Tensor

from usp.hf.compressors import compressors
from usp.hf.indexers import cached_latents, indexers
from usp.hf.models import materialise, model_facts
from usp.parallel import ParallelMesh, ProcessGroups, local_tensor
from usp.predict.fake_world import HostMemory, fake_world, stand_ins
from usp.predict.meter import CATEGORIES, PARAMETERS, StepMeter
from usp.rlhf.generation.decoding import fitting_slots
from usp.rlhf.plan.operations import (
    StepWeights,
    WeightCopy,
    copy_of,
    schedule,
    shares_memory,
    trained_copy,
    weight_copies,
)
from usp.rlhf.plan.plan import OWN, optimizer_of
from usp.rlhf.roles.role_model import RoleModel
from usp.rlhf.roles.rows import micro_batches, pack_lengths, plan_rows
from usp.run.tables import GIB, Grid
from usp.train.build import engine_over
from usp.train.dry_run import GroupSent, counted, follow_step, label_state, sent_by_axis

from .algorithms.objectives import NextToken
from .datasets import Example, Examples, HiddenMark, sequences_of
from .graph import Generate, Inference, ModelCall, TrainStep, Work, unit
from .prepare import PreparedRlhf, cache_places, longest_prompt
from .samples import Samples, kept_together

KV_CACHE = "KV cache"
_PREFILL_TOKENS = 16384  # of a prefill's forward, unless one prompt is longer


@dataclass(frozen=True)
class CallRun:
    """What a call takes on the rank."""

    call: str
    kind: str
    layout: str
    samples: int  # of the rank's data-parallel index in a mini-batch
    tokens: int  # of each sample
    micro_batches: int  # of these samples; 0 for a generate call
    by_category: Mapping[str, int]  # the parts of the call's peak
    others_bytes: int  # weights and optimizer states that other calls keep on the device meanwhile
    host_bytes: int  # peak host memory of `ac_offload`
    sent: tuple[GroupSent, ...]  # in one mini-batch

    @property
    def own_bytes(self) -> int:
        """The peak of the call's own tensors."""
        return sum(self.by_category.values())

    @property
    def peak_bytes(self) -> int:
        return self.own_bytes + self.others_bytes


def dry_run_calls(run: PreparedRlhf, device: torch.device) -> tuple[CallRun, ...]:
    """Run the model calls of a step in which the rank of `run.launch` takes part, in the order of the step, with the
    attention kernels, optimizer and offload of `device`; tensors are on the CPU and have no memory. Raise ValueError
    for a model that does not support a layout, and RuntimeError in a process that has a default process group."""
    sampled, pairs = run.algorithm.data == "prompts", run.algorithm.data == "pairs"
    resident, prompt_tokens = _resident(run), longest_prompt(run) if sampled else _longest(run, run.examples, pairs)
    calls = [call for call in run.graph.order if call.role and run.launch.rank in run.plan[call.name].ranks]
    return tuple(_run(run, call, prompt_tokens, device, resident[call.name]) for call in calls)


def _longest(run: PreparedRlhf, examples: Examples, pairs: bool = False) -> int:
    """Return the tokens of the longest sequence that examples are trained on as."""
    built_in = isinstance(examples, HiddenMark)

    def tokens(example: Example) -> int:
        prompt = run.config.prompt_tokens if built_in else len(example.prompt)
        return prompt - len(example.prompt) + max(len(ids) for ids, _ in sequences_of(example, run.tokenizer, pairs))

    return max(tokens(examples[index]) for index in range(64 if built_in else len(examples)))


def samples_of(run: PreparedRlhf, call: ModelCall) -> int:
    """Return the most samples that a data-parallel rank has in a forward and backward of a call."""
    samples = run.config.prompts * (2 if run.algorithm.data == "pairs" else run.graph.group_size)
    if isinstance(call.work, TrainStep):
        samples = -(-samples // call.work.mini_batches)
    parts = run.plan[call.name].dims.batch
    together = max(unit(call), kept_together(samples, run.graph.sharing_group(call), parts))
    return -(-samples // together // parts) * together


class _Blank(RoleModel):
    """A role's model whose weights have no values."""

    def allocate(self) -> None:
        materialise(self.stage, torch.device("cpu"))
        if self.trained:
            self.engine = engine_over([self.stage], self._recipe, self.mesh)

    def _sums(self, metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        return {"loss": 0.0}


def _run(run: PreparedRlhf, call: ModelCall, prompt_tokens: int, device: torch.device, others_bytes: int) -> CallRun:
    layout, meter = run.plan[call.name], StepMeter(host := HostMemory())
    most, new_tokens = samples_of(run, call), run.config.max_new_tokens if run.algorithm.data == "prompts" else 0
    samples, tokens = most, prompt_tokens + new_tokens
    generates = isinstance(call.work, Generate)
    if generates:  # as many prompts as one prefill takes
        tokens = prompt_tokens
        samples = max(1, min(samples, run.config.slots, _PREFILL_TOKENS // tokens))
    with fake_world(run.launch.world_size, run.launch.rank), stand_ins(device, host):
        mesh = ParallelMesh.create(layout.dims, "cpu", layout.ranks)
        trained = copy_of(run.graph, run.plan, call) == trained_copy(run.graph, run.plan, call.role)
        apart = replace(run.roles[call.role], share_prefixes=False)  # blank samples would share all they have
        model = _Blank(apart, layout, mesh, trained=trained)
        with counted(meter):
            model.allocate()
            engine = model.engine if isinstance(call.work, TrainStep) else None
            label_state([model.stage], engine, meter.memory)
            meter.memory.restart()
            follow_step([model.stage], engine, meter)
            batch = _samples(call.work, samples, tokens)
            if (more := run.supervised) is not None and isinstance(call.work, TrainStep) and call.role == "actor":
                own = -(-more.samples // call.work.mini_batches // layout.dims.batch)
                blank = _samples(TrainStep(NextToken()), own, _longest(run, more.examples))
                model.supervised = [blank], more.weight
            _call(model, call, batch)
        options = {"unit": unit(call), "budget": layout.token_budget, "at_least": mesh.size("pp")}
        rows = () if generates else pack_lengths(batch.ids, [tokens] * samples, **options)
        sent = sent_by_axis(meter.wire, mesh)
        by_category: dict[str, int] = {**meter.memory.at_peak}
        if layout.served:  # which has the rest
            adapts = apart.lora is not None and run.launch.rank in layout.receivers
            kept = [*model.frozen().values(), *model.weights().values()] if adapts else []
            by_category = {PARAMETERS: _bytes(kept)} if kept else {}
        elif layout.engine != OWN:
            by_category[KV_CACHE] = int(run.config.rollout_cache * GIB)
            if apart.lora is not None:  # the engine has what base and adapters add up to besides
                by_category[PARAMETERS] += sum(local_tensor(weight).nbytes for weight in model.frozen().values())
        elif generates:
            places = cache_places(run, call)
            slots = fitting_slots(run.config.slots, run.config.cache_tokens, places, layout.dims.sp)
            by_category[KV_CACHE] = min(slots, most) * places * _place_bytes(model)
    sizes = most, prompt_tokens + new_tokens, len(rows)
    return CallRun(call.name, call.kind, str(layout), *sizes, by_category, others_bytes, host.peak_bytes, sent)


def _samples(work: Work, samples: int, tokens: int) -> Samples:
    """Return samples of token 0, all of which count, with the values that a call reads of each token."""
    keys = work.objective.keys if isinstance(work, TrainStep) else ()
    values: dict[str, list[Tensor]] = {key: [torch.zeros(tokens) for _ in range(samples)] for key in keys}
    if isinstance(work, TrainStep) and (counts := work.objective.counts):
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
        model.forward(batches, None)


def _place_bytes(model: RoleModel) -> int:
    """Return the bytes of one token of one sequence in the rank's KV cache."""
    facts = model_facts(model.spec.source, model.spec.config)
    attending = [x for x in model.stage.model.modules() if getattr(x, "unified_sp_mask", None) is not None]
    of_heads = max(1, facts.num_kv_heads // model.mesh.size("tp")) * (facts.head_dim + facts.value_dim)
    elements = sum(cached_latents(module) or of_heads for module in attending)
    made: list[Any] = [*indexers(model.stage.model).values(), *compressors(model.stage.model).values()]
    made += [module.indexer for module in made if getattr(module, "indexer", None) is not None]
    return (elements + sum(module.head_dim for module in made)) * model.spec.dtype.itemsize


def _resident(run: PreparedRlhf) -> dict[str, int]:
    """Return, by call, the bytes of weights and optimizer states on the device that are not the call's own."""
    graph, plan, rank, world_size = run.graph, run.plan, run.launch.rank, run.launch.world_size
    trained = {role: trained_copy(graph, plan, role) for role in graph.roles}
    models: dict[WeightCopy, RoleModel] = {}
    with fake_world(world_size, rank):
        groups = ProcessGroups()
        for copy, calls in weight_copies(graph, plan).items():
            if rank in copy.layout.receivers:
                mesh = ParallelMesh.create(copy.layout.dims, "cpu", copy.layout.ranks, groups)
                trains = copy == trained[copy.role]
                models[copy] = RoleModel(run.roles[copy.role], plan[calls[-1].name], mesh, trained=trains)

    aliases = frozenset(copy for copy in models if shares_memory(copy, trained[copy.role]))
    own = {copy: model for copy, model in models.items() if copy not in aliases}
    elsewhere = {copy for copy in own if copy.layout.served and run.roles[copy.role].lora is None}
    weights = {copy: 0 if copy in elsewhere else _bytes(model.weights().values()) for copy, model in own.items()}
    frozen = {copy: _bytes(model.frozen().values()) for copy, model in own.items()}
    states = {
        copy: 2 * _bytes(parameter for parameter in model.stage.parameters() if parameter.requires_grad)
        for copy, model in own.items()
        if copy == trained[copy.role] and optimizer_of(copy.role) not in plan.offload
    }
    given = sum(
        _bytes(model.weights().values())
        for copy, model in own.items()
        if run.config.delta_updates and copy.layout.engine != OWN
    )
    present = {copy for copy in own if trained[copy.role] in (None, copy) and copy.role not in plan.offload}
    others: dict[str, int] = {}
    kept = StepWeights(stay=run.config.delta_updates)
    for operation in schedule(graph, plan, world_size, aliases, kept):
        if operation.copy in models and operation.kind in ("reallocate", "load"):
            present.add(operation.copy)
        elif operation.copy in models and operation.kind in ("release", "offload"):
            present.discard(operation.copy)
        elif operation.kind == "call" and rank in operation.ranks and (call := graph[operation.call]).role:
            copy = copy_of(graph, plan, call)
            held = trained[copy.role] if copy in aliases else copy
            total = given + sum(weights[other] for other in present - {held})
            total += sum(size for other, size in frozen.items() if other != held)
            trains = isinstance(call.work, TrainStep)
            others[call.name] = total + sum(size for other, size in states.items() if not trains or other != copy)
    return others


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_tensor(x).nbytes for x in tensors)


def render_calls(calls: Sequence[CallRun]) -> Group:
    """Return tables of the calls, their memory and their traffic for rich to print."""
    layouts, memory, traffic = [], [], []
    for call in calls:
        layouts.append((call.call, call.layout, f"{call.samples} x {call.tokens:,}", str(call.micro_batches or "")))
        parts = {name: call.by_category.get(name, 0) for name in (*CATEGORIES, KV_CACHE)}
        sizes = {**parts, "other calls": call.others_bytes, "total": call.peak_bytes, "host memory": call.host_bytes}
        memory += _under(call.call, [(name, f"{nbytes / GIB:.3f}") for name, nbytes in sizes.items() if nbytes])
        sent = [(", ".join(sent.axes), sent.collective.strip("_"), f"{sent.nbytes:,}") for sent in call.sent]
        traffic += _under(call.call, sent)
    return Group(
        Grid("Calls of the rank", ("call", "layout", "samples x tokens", "micro-batches"), tuple(layouts)).table(),
        Grid("Peak memory of the rank", ("call", "category", "GiB"), tuple(memory)).table(),
        Grid("Sent by the rank, per mini-batch", ("call", "axes", "collective", "bytes"), tuple(traffic)).table(),
    )


def _under(call: str, lines: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the lines of a call, its name before the first one."""
    return [("" if number else call, *line) for number, line in enumerate(lines)]
