"""What sequence parallelism is worth to PPO on long samples: predicted steps of searched plans, with it and without.

python -m benchmarks.rlhf.long_rollouts            # on one core
python -m benchmarks.rlhf.long_rollouts --quick    # one model at one length; saves nothing
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.record import Record, finish
from benchmarks.rlhf.real_rows import models, ppo
from usp.parallel import Hardware, format_ranks, load_hardware
from usp.planning.call_cost import CallOptions
from usp.planning.estimates import Estimates
from usp.planning.rlhf_search import NothingFits, OptionSpace, Problem, options, search
from usp.planning.simulator import Simulator
from usp.planning.workload import Workload
from usp.predict.devices import usable
from usp.rlhf.plan.plan import CallLayout, ExecutionPlan, optimizer_of

K = 1024
SIZES, CRITIC, LENGTHS, WORLDS = (7, 13, 34, 70), 7, (8 * K, 32 * K, 128 * K, 512 * K, K * K), (64, 128)
TOKENS, RESPONSE = 4 * K * K, 2 * K  # of a step; of a sample that are generated
HOST, SMALLEST = 8, 16  # devices of a node; the fewest of a call
OFFLOAD_FROM = 128 * K  # tokens of a sample whose activations may be offloaded


@dataclass(frozen=True)
class Case:
    """Attributes: billions of the actor's parameters, tokens of a sample, devices."""

    actor: int
    length: int
    devices: int


@dataclass(frozen=True)
class Searched:
    """A search's result.

    Attributes:
        seconds: of a step; 0 if no plan fits into memory.
        needs: GiB of the plan that needs least, where none fits.
        degrees: of each call: (tp, pp, dp, ulysses, ring).
    """

    seconds: float
    needs: float
    degrees: dict[str, str]


@dataclass(frozen=True)
class Result:
    case: Case
    plain: Searched
    parallel: Searched
    took: float


def simulator(actor: int, length: int, hardware: Hardware, world_size: int) -> Simulator:
    samples = TOKENS // length
    graph = ppo(RESPONSE, mini_batches=1)
    load = Workload.of(samples, 1, length - RESPONSE, (RESPONSE,))
    estimates = Estimates(graph, models(actor, CRITIC), load, hardware, CallOptions(slots=min(64, samples)))
    return Simulator(graph, estimates, world_size)


def layouts(simulated: Simulator, actor: int, samples: int) -> dict[str, list[CallLayout]]:
    """Return the layouts of each call, with Ulysses inside hosts and a ring between them."""
    facts = {role: shape.facts for role, shape in models(actor, CRITIC).items()}
    world = simulated.world_size
    space = OptionSpace(
        world,
        HOST,
        samples,
        smallest=SMALLEST,
        even=True,
        max_sequence=world,
        zero=(3,),
        recompute=(("full", False), ("full", True)) if TOKENS // samples >= OFFLOAD_FROM else (("full", False),),
        models=facts,
    )

    def usual(layout: CallLayout) -> bool:
        dims = layout.dims
        inside = min(dims.sp, HOST // dims.tp)
        return dims.ulysses == inside

    found = {call.name: list(options(call, space)) for call in simulated.graph.calls}
    return {name: [one for one in of if usual(one)] or of for name, of in found.items()}


def searched(
    problem: Problem, budget: float, start: ExecutionPlan | None = None
) -> tuple[Searched, ExecutionPlan | None]:
    """Search from a plan, if there is one, and from the fastest layout of every call."""
    calls = problem.simulator.graph
    try:
        fitting = problem.that_fit()
    except NothingFits:
        return Searched(0.0, min_bytes(problem) / 2**30, {}), None
    found = search(fitting, budget=budget, starts=[start] if start else [], clock=time.process_time)
    if not found.best:
        assert found.nearest
        return Searched(0.0, found.nearest[0] / 2**30, {}), None
    seconds, plan = found.best[0]
    return Searched(seconds, 0.0, {name: degrees(plan[name]) for name in plan.calls if calls[name].role}), plan


def min_bytes(problem: Problem) -> float:
    """Return what the call that needs most takes where it needs least."""
    estimates = problem.simulator.estimates
    return max(
        min((estimates.call_bytes(name, layout) for layout in of), default=0.0)
        for name, of in problem.options.items()
        if problem.simulator.graph[name].role
    )


def degrees(layout: CallLayout) -> str:
    dims = layout.dims
    parts = {"tp": dims.tp, "pp": dims.pp, "dp": dims.batch, "ulysses": dims.ulysses, "ring": dims.ring}
    text = " ".join(f"{name} {degree}" for name, degree in parts.items() if degree > 1)
    return f"ranks {format_ranks(layout.ranks)}: {text or 'one rank'}"


def results(actor: int, length: int, hardware: Hardware, worlds: Sequence[int], budget: float) -> Iterator[Result]:
    """Yield the results on every number of devices, whose predictions are shared."""
    first = simulator(actor, length, hardware, max(worlds))
    for world in worlds:
        begin = time.monotonic()
        simulated = replace(first, world_size=world, _schedules={})
        every = layouts(simulated, actor, TOKENS // length)
        trained = tuple(map(optimizer_of, simulated.graph.trained_roles))
        problem = Problem(simulated, every, usable(hardware).device, ("ref", "reward", *trained))
        alone = {name: [one for one in of if one.dims.sp == 1] for name, of in every.items()}
        plain, best = searched(replace(problem, options=alone), budget)
        parallel, _ = searched(problem, budget, best)
        took = time.monotonic() - begin
        print(f"{actor}B, {length}, {world}: {plain.seconds:.1f}, {parallel.seconds:.1f} in {took:.0f} s", flush=True)
        yield Result(Case(actor, length, world), plain, parallel, took)


COLUMNS = ("actor", "tokens", "GPUs", "without", "with", "gain", "training without", "training with")


def shown(one: Searched) -> str:
    return f"{one.seconds:.0f} s" if one.seconds else f"none: {one.needs:.0f} GiB"


def training(one: Searched) -> str:
    return one.degrees.get("actor_train", "").rpartition(": ")[2]


def row(one: Result) -> tuple[str, ...]:
    case, plain, parallel = one.case, one.plain, one.parallel
    gained = f"{plain.seconds / parallel.seconds:.2f}" if plain.seconds and parallel.seconds else ""
    name = f"{case.length // K}K" if case.length < K * K else f"{case.length // K // K}M"
    return (
        *(f"{case.actor}B", name, str(case.devices), shown(plain), shown(parallel), gained),
        *(training(plain), training(parallel)),
    )


def notes(found: Sequence[Result]) -> Iterable[str]:
    yield (
        f"PPO, critic and reward model of {CRITIC}B, {TOKENS // K // K}M tokens a step in one mini-batch, of which "
        f"{RESPONSE // K}K of each sample are generated and the rest is its prompt; hardware file h100. A call has "
        "16 devices or a power of two times as many, and ZeRO 3 and recomputation, from 128K tokens on also offloaded "
        "activations, and at least two samples for each pipeline stage and data-parallel rank; Ulysses is inside a "
        "host, a ring between hosts."
    )
    yield "none: no plan fits into memory; a call takes at least so much besides its weights and optimizer states."
    both = [one for one in found if one.plain.seconds and one.parallel.seconds]
    for length in LENGTHS:
        gains = [one.plain.seconds / one.parallel.seconds for one in both if one.case.length == length]
        without = [one for one in found if one.case.length == length and not one.plain.seconds]
        text = f"{min(gains):.2f} to {max(gains):.2f} times as fast" if gains else ""
        text += f"{'; ' if gains and without else ''}{len(without)} without it fit nowhere" if without else ""
        if text:
            yield f"{length // K}K tokens, with sequence parallelism: {text}."


def data(one: Result) -> dict[str, Any]:
    return asdict(one)


def record_of(results: Sequence[Result]) -> Record:
    found = sorted(results, key=lambda one: (one.case.actor, one.case.length, one.case.devices))
    return Record.of(
        "long_rollouts",
        "A PPO step on long samples by searched plans, without and with sequence parallelism: predictions",
        COLUMNS,
        map(row, found),
        notes(found),
        list(map(data, found)),
        command="python -m benchmarks.rlhf.long_rollouts",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one model at one length; save nothing")
    parser.add_argument("--budget", type=float, default=3.0, help="CPU seconds of each search")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    arguments = parser.parse_args()
    hardware = load_hardware("h100")
    pairs = [(7, 128 * K)] if arguments.quick else [(actor, length) for length in LENGTHS for actor in SIZES]
    worlds = WORLDS[:1] if arguments.quick else WORLDS
    found = [one for pair in pairs for one in results(*pair, hardware, worlds, arguments.budget)]
    finish(record_of(found), None if arguments.quick else arguments.output, save=not arguments.quick)


if __name__ == "__main__":
    main()
