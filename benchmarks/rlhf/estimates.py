"""Predicted seconds and bytes of PPO's calls and steps, from a profile of this machine, against measured ones.

One launch of 4 ranks and one of 8: the profile, of other numbers of samples and lengths of prompts than those of the
steps, then steps of all plans in turn, and both again: what a shared machine grants changes by the minute, and medians
over such passes are of the same minutes.

    python -m benchmarks.rlhf.estimates            # about a quarter of an hour
    python -m benchmarks.rlhf.estimates --hosts 2  # four ranks on two emulated hosts with a shaped link between them
    python -m benchmarks.rlhf.estimates --quick    # two ranks, two plans; saves nothing
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.cluster import cluster, unavailable
from benchmarks.harness.measure import calibrated
from benchmarks.harness.record import Record, finish
from examples.rlhf_profile.measuring import Asked, measure_calls
from tests.harness.memory import track_memory
from tests.harness.ranks import RankPool
from usp.hf.models import load_model_config, model_facts, with_layers
from usp.hf.tensor_parallel import model_shape
from usp.parallel import ParallelDims, ProcessGroups, load_hardware, local_tensor
from usp.parallel.cluster.hardware import hardware_from_mapping
from usp.planning.call_cost import CallOptions
from usp.planning.estimates import Estimates, Measurements, Sizes, layout_key
from usp.planning.rlhf_question import layout_text
from usp.planning.simulator import Simulator
from usp.planning.workload import Workload
from usp.predict.calibrate import Plan
from usp.predict.rounds import Rounds
from usp.rlhf.algorithms.ppo import PPO, PPO_ALGORITHM
from usp.rlhf.graph import DataflowGraph, Generate, ModelCall
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan
from usp.rlhf.roles.role_model import RoleModel, RoleSpec
from usp.rlhf.runtime.executor import Executor
from usp.rlhf.runtime.timeline import Event, activities
from usp.rlhf.samples import Samples
from usp.train.engines.base import AdamW

WORLDS = (4, 8)  # ranks of each launch
RATE = "1gbit"  # between emulated hosts
PRESET, SLOTS = "tiny", 64
LAYERS = {"actor": 4, "ref": 4, "critic": 2, "reward": 2}


@dataclass(frozen=True)
class Case:
    """What is measured at one world size.

    Attributes:
        samples, prompt, response: of a step. mini_batches: of a train step.
        passes: of profile and steps. sizes, rounds: of a profile. plans: how many. steps: of each in a pass.
        memory: plans whose memory is measured, with torch's profiler, which is slow.
        hosts: emulated ones; 1: this machine as it is. calibrates: the links of several hosts.
    """

    world: int
    samples: int = 16
    prompt: int = 128
    response: int = 32
    mini_batches: int = 2
    passes: int = 2
    sizes: Sizes = field(default_factory=lambda: Sizes((), (4, 24), (160,), (96, 192), 1 / 5, 16))
    rounds: int = 3
    plans: int = 15
    steps: int = 3
    memory: int = 3
    hosts: int = 1
    calibrates: bool = True

    @property
    def degrees(self) -> tuple[ParallelDims, ...]:
        """The layouts of a call, of the whole world and of a half of it."""
        found = []
        of_two = (ParallelDims(pp=2), ParallelDims(tp=2), ParallelDims(ulysses=2), ParallelDims(ring=2))
        for dims in (ParallelDims(), *of_two):
            found.append(dims.resolve(self.world))
        return (*found, ParallelDims().resolve(self.world // 2))


def specs() -> dict[str, RoleSpec]:
    """Return the models of PPO: the critic and the reward model are half as deep as the policy."""
    found = {}
    for role, layers in LAYERS.items():
        config = load_model_config(PRESET, "scalar" if role in ("critic", "reward") else "lm")
        found[role] = RoleSpec(role, PRESET, with_layers(config, layers), optimizer=AdamW(0.0), learning_rate=1e-6)
    return found


def ppo(case: Case) -> DataflowGraph:
    generate = Generate(max_new_tokens=case.response)
    options = PPO(generate=generate, reward=None, mini_batches=case.mini_batches, old_logprobs="rollout")
    return PPO_ALGORITHM.graph(options)


def layouts(case: Case, call: ModelCall, dims: ParallelDims) -> list[CallLayout]:
    """Return the layouts of a call with these degrees: on each place of so many ranks, with and without ZeRO."""
    size = dims.pp * dims.batch * dims.sp * dims.tp
    trains, split_only = call.kind == "train_step", dims.pp * dims.sp * dims.tp == 1
    found = []
    for first in range(0, case.world, size):
        ranks = tuple(range(first, first + size))
        for zero in (0, 1) if trains and split_only and size == case.world else (0,):
            found.append(CallLayout(ranks, dims, zero=zero, tp_sequence_parallel=trains and dims.tp > 1))
    return found


def plans(case: Case, graph: DataflowGraph) -> list[ExecutionPlan]:
    """Return plans: every call with the same degrees, then every call with a random layout."""
    draw, found = random.Random(case.world), []
    for number in range(case.plans):
        calls = {}
        same = case.degrees[number] if number < 3 else None
        for call in graph.calls:
            if not call.role:
                ranks = tuple(range(case.world))
                calls[call.name] = CallLayout(ranks, ParallelDims(dp_replicate=len(ranks), dp_shard=1))
            else:
                calls[call.name] = draw.choice(layouts(case, call, same or draw.choice(case.degrees)))
        found.append(ExecutionPlan(f"{case.world} ranks, plan {number + 1}", calls))
    return found


def profile(case: Case, groups: ProcessGroups) -> Measurements:
    """Measure every call in every layout. Collective."""
    models, graph = specs(), ppo(case)
    asked = [
        Asked(call, models[call.role], layout)
        for dims in case.degrees
        for call in graph.calls
        if call.role
        for layout in layouts(case, call, dims)
    ]
    rounds = Rounds(torch.device("cpu"), case.rounds, 0.05)
    nothing = Measurements("CPU", "float32", dist.get_world_size(), case.sizes, {})
    return measure_calls(asked, nothing, rounds, groups)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def executor(case: Case, plan: ExecutionPlan, groups: ProcessGroups, built: list[RoleModel]) -> Executor:
    """Return the executor of a plan, and add its models on this rank to `built`."""
    models = specs()

    def build(call: ModelCall, layout: CallLayout, mesh: Any) -> RoleModel:
        trained = call.kind == "train_step"
        built.append(RoleModel(models[call.role], layout, mesh, trained=trained, slots=SLOTS))
        return built[-1]

    return Executor(ppo(case), plan, groups, build, torch.device("cpu"), ranks_per_host=case.world // case.hosts)


def prompts(case: Case, step: int) -> Samples:
    draw = torch.Generator().manual_seed(step)
    return Samples(
        tuple(range(case.samples)),
        {"prompt_ids": [torch.randint(256, (case.prompt,), generator=draw) for _ in range(case.samples)]},
    )


@dataclass(frozen=True)
class Taken:
    """What steps of a plan took on a rank.

    Attributes:
        seconds, events: of each counted step.
        peak_bytes: see `Running`; 0 if not measured.
    """

    seconds: list[float]
    events: list[tuple[Event, ...]]
    peak_bytes: int


@dataclass(eq=False)
class Running:
    """The executor of a plan, its models on this rank, how many steps it ran, and what those that count took."""

    executor: Executor
    models: list[RoleModel]
    steps: int = 0
    taken: list[tuple[float, tuple[Event, ...]]] = field(default_factory=list)

    def step(self, case: Case, counts: bool = True) -> None:
        """Run the next step. Collective."""
        dist.barrier()
        begin = time.perf_counter()
        result = self.executor.run_step(prompts(case, self.steps), self.steps + 1, self.steps)
        if counts:
            self.taken.append((time.perf_counter() - begin, result.events))
        self.steps += 1

    def peak_bytes(self, case: Case) -> int:
        """Return the peak of a further step. Collective."""
        held = resident(self.models)
        with track_memory() as use:
            self.step(case, counts=False)
        return held + use.peak_bytes


def start(case: Case, groups: ProcessGroups) -> list[Running]:
    """Build the executors of all plans. Collective."""
    found = []
    for plan in plans(case, ppo(case)):
        built: list[RoleModel] = []
        found.append(Running(executor(case, plan, groups, built), built))
    return found


def taken(case: Case, running: Sequence[Running]) -> list[Taken]:
    """Return what the counted steps of the plans took, and the memory of a further one. Collective."""
    found = []
    for number, one in enumerate(running):
        seconds, events = zip(*one.taken, strict=True)
        found.append(Taken(list(seconds), list(events), one.peak_bytes(case) if number < case.memory else 0))
    return found


def resident(models: Sequence[RoleModel]) -> int:
    """Return the bytes of the weights and optimizer states of models on this rank."""
    tensors: list[torch.Tensor] = [parameter for model in models for parameter in model.stage.parameters()]
    for model in models:
        if model.engine is not None:
            states = model.engine.optimizer.state.values()
            tensors += [value for state in states for value in state.values() if torch.is_tensor(value)]
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def merged(profiles: Sequence[Measurements]) -> Measurements:
    """Return the medians of measurements of the same calls."""
    points = {
        part: {at: median(one.points[part][at] for one in profiles) for at in first}
        for part, first in profiles[0].points.items()
    }
    return replace(profiles[0], points=points)


def links(case: Case) -> dict[str, Any]:
    """Return the values of a hardware file of emulated hosts, for what moves between them. Collective."""
    config = load_model_config(PRESET, "lm")
    heads = config.num_attention_heads
    plan = Plan.of(torch.device("cpu"), case.world // case.hosts, heads, config.hidden_size // heads)
    # Where ranks share processors, a turn must span several of the slices of time in which they alternate.
    return calibrated(replace(plan, seconds=0.05), f"{case.hosts} hosts")


def on_a_rank(case: Case) -> tuple[Measurements, list[Taken], dict[str, Any]]:
    """Measure the links of several hosts, then the profile and steps of all plans, in passes."""
    torch.set_num_threads(1)
    hardware = links(case) if case.hosts > 1 and case.calibrates else {}
    groups, profiles = ProcessGroups(), []
    running = start(case, groups)
    for number in range(case.passes):
        say(f"{case.world} ranks, pass {number + 1}: profile")
        profiles.append(profile(case, groups))
        say("steps")
        for one in running:
            for step in range(1 + case.steps):  # the first one finds the caches full of other plans
                one.step(case, counts=step > 0)
    say("memory")
    return merged(profiles), taken(case, running), hardware


@dataclass(frozen=True)
class Compared:
    """A plan's predicted and measured seconds.

    Attributes:
        calls: by name: predicted, measured. layouts: by name.
        step, peak_bytes: predicted, measured.
    """

    plan: str
    layouts: dict[str, str]
    calls: dict[str, tuple[float, float]]
    step: tuple[float, float]
    peak_bytes: tuple[float, float]


def compare(case: Case, by_rank: Sequence[tuple[Measurements, Sequence[Taken], dict[str, Any]]]) -> list[Compared]:
    """Return for each plan what was predicted and measured, by what each rank found."""
    measured, _, values = by_rank[0]
    hardware = hardware_from_mapping(values, "the links") if values else load_hardware("h100")
    graph, every = ppo(case), plans(case, ppo(case))
    models = {role: model_shape(model_facts(PRESET, spec.config), spec.config) for role, spec in specs().items()}
    workload = Workload.of(case.samples, 1, case.prompt, (case.response,))
    formulas = Estimates(graph, models, workload, hardware, CallOptions(torch.float32, SLOTS))
    layouts_of = {call.name: [plan[call.name] for plan in every] for call in graph.calls}
    estimates = formulas.with_factors(measured.factors(formulas, layouts_of))
    simulator = Simulator(graph, estimates, case.world)
    found = []
    for index, plan in enumerate(every):
        taken = [of_plans[index] for _, of_plans, _ in by_rank]
        simulation = simulator.run(plan)
        work = [seconds_of_calls(events) for events in zip(*(one.events for one in taken), strict=True)]
        names = [call.name for call in graph.calls if call.role]
        calls = {
            name: (estimates.call_seconds(name, plan[name]), median(of_step[name] for of_step in work))
            for name in names
        }
        assert all(layout_key(plan[name]) in estimates.factors[name] for name in names)
        step = median(max(seconds) for seconds in zip(*(one.seconds for one in taken), strict=True))
        peaks = simulation.peak_bytes, max(one.peak_bytes for one in taken)
        layouts = {name: layout_text(plan[name]) for name in names}
        found.append(Compared(plan.name, layouts, calls, (simulation.seconds, step), peaks))
    return found


def seconds_of_calls(of_ranks: Sequence[Sequence[Event]]) -> dict[str, float]:
    """Return the seconds of each call of a step on the rank that works longest."""
    found: dict[str, float] = {}
    for one in activities(event for events in of_ranks for event in events):
        found[one.event.name] = max(found.get(one.event.name, 0.0), one.work)
    return found


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of pairs."""
    ranks = [np.argsort(np.argsort(values)) for values in zip(*pairs, strict=True)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def errors(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the absolute errors of predicted values, relative to the measured ones."""
    return [abs(predicted / measured - 1) for predicted, measured in pairs]


def rows(found: Compared) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a plan's calls, its step and its memory."""

    def row(what: str, layout: str, predicted: float, measured: float, unit: float) -> tuple[str, ...]:
        shown = (f"{predicted * unit:.1f}", f"{measured * unit:.1f}", f"{predicted / measured - 1:+.0%}")
        return (found.plan, what, layout, *shown)

    for name, (predicted, measured) in found.calls.items():
        yield row(name, found.layouts[name], predicted, measured, 1e3)
    yield row("step", "", *found.step, 1e3)
    if found.peak_bytes[1]:
        yield row("memory (MB)", "", *found.peak_bytes, 1e-6)


def summary(found: Sequence[Compared]) -> Iterator[str]:
    """Yield the errors of everything."""
    calls = [pair for one in found for pair in one.calls.values()]
    kinds = {
        "calls": calls,
        "steps": [one.step for one in found],
        "peaks of memory": [one.peak_bytes for one in found if one.peak_bytes[1]],
    }
    for name, pairs in ((name, pairs) for name, pairs in kinds.items() if pairs):
        yield (
            f"{len(pairs)} {name}: absolute error {median(errors(pairs)):.1%} (median), {max(errors(pairs)):.0%} "
            f"(maximum), Spearman {spearman(pairs):.2f}"
        )
    for call in found[0].calls:
        of_call = [one.calls[call] for one in found]
        signed = median(predicted / measured - 1 for predicted, measured in of_call)
        usual, most = median(errors(of_call)), max(errors(of_call))
        yield f"{call}: {usual:.1%} (median, signed {signed:+.1%}), {most:.0%} (maximum)"


def record(cases: Sequence[Case], found: Sequence[Compared]) -> Record:
    case = cases[0]
    on_hosts = f" on {case.hosts} emulated hosts, {RATE} between them" if case.hosts > 1 else ""
    return Record.of(
        "estimates" if case.hosts == 1 else "estimates_hosts",
        f"PPO's calls and steps{on_hosts}: predicted from a profile of the machine, and measured",
        ("plan", "call", "layout", "predicted (ms)", "measured (ms)", "error"),
        [row for one in found for row in rows(one)],
        (
            *summary(found),
            f"Preset {PRESET}; policy and reference of {LAYERS['actor']} layers, critic and reward model of "
            f"{LAYERS['critic']}; {case.samples} samples of {case.prompt} + {case.response} tokens, "
            f"{case.mini_batches} mini-batches. Medians of {case.passes * case.steps} steps, "
            f"{case.steps} of a plan in a row after one that does not count.",
            "The profile has the models' calls in each layout alone, with other numbers of samples and other prompts. "
            f"Profile and steps take turns, {case.passes} times, for what the machine grants changes by the minute.",
            "Memory is that of the rank with most: weights and optimizer states before a step, and its allocations.",
        ),
        [asdict(one) for one in found],
        command="python -m benchmarks.rlhf.estimates" + (f" --hosts {case.hosts}" if case.hosts > 1 else ""),
    )


def launched(case: Case) -> list[tuple[Measurements, list[Taken], dict[str, Any]]]:
    """Return what each rank finds."""
    if case.hosts == 1:
        with RankPool() as pool:
            return pool.run(on_a_rank, case.world, case, timeout=1800.0)
    with cluster(case.hosts, RATE) as made:
        return made.call(on_a_rank, case.world // case.hosts, case, timeout=3600.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two ranks, two plans; saves nothing")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="emulated hosts (default: 1)")
    arguments = parser.parse_args()
    if arguments.hosts > 1 and (reason := unavailable()):
        raise SystemExit(f"emulated hosts are not available: {reason}")
    cases = [Case(world) for world in WORLDS[: None if arguments.hosts == 1 else 1]]
    if arguments.quick:
        sizes = Sizes((), (4, 8), (24,), (16,), 1 / 3, 4)
        cases = [Case(2, samples=8, prompt=16, response=8, sizes=sizes, plans=2, memory=1, passes=1, calibrates=False)]
    cases = [replace(case, hosts=arguments.hosts) for case in cases]
    found: list[Compared] = []
    for case in cases:
        found += compare(case, launched(case))
    finish(record(cases, found), None if arguments.quick else arguments.output, save=not arguments.quick)


if __name__ == "__main__":
    main()
