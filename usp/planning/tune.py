"""The configurations that a run with --plan tries: the one that is predicted to be best, or several for the race of
`usp.train.tuning`, and with rates corrected by that race the one that the planner then prefers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from usp.config import TrainConfig
from usp.parallel import Hardware, Link
from usp.predict.job import Job
from usp.predict.seconds import step_seconds
from usp.run.launch import Launch
from usp.train.checkpoints import find_start
from usp.train.resolve import compiled_if_possible
from usp.train.tuning import Trial, Tuner, decided
from usp.train.validate import parallel_dims

from .choice import Choice, candidate_text, choose, plan_here, unplanned
from .question import from_rank_0
from .search import Candidate

TRIED = 4  # at first, and one more with corrected rates
_LINKS = [2.0**power for power in range(-4, 8)]  # factors of the time of messages that are tried
_WEIGHT = 1e-5  # of a factor's logarithm beside those of the errors: measurements that tell nothing change nothing


def tuner_for(config: TrainConfig, launch: Launch, compiles: bool) -> Tuner:
    """Return the configurations that --plan tries, the best first, all alike on every rank: one for auto on one host,
    and where the run that is resumed has chosen. compiles: with --compile where nothing is against it.

    Raise ConfigurationError on every rank as `choose`, and for unknown hardware, or hardware without a peak for
    --dtype. Without a store every rank plans, and all choose the same.
    """
    several = config.plan == "tune" or launch.world_size > launch.local_world_size
    choices: list[Choice] = []

    def trial(options: dict[str, Any], name: str, predicted: float) -> Trial:
        found = replace(unplanned(config), **options)
        return Trial(compiled_if_possible(found, launch.world_size) if compiles else found, name, predicted)

    def of(candidate: Candidate) -> dict[str, Any]:
        options = Trial(candidate.config, "", 0.0).options
        return {"options": options, "name": candidate_text(candidate), "predicted": candidate.seconds}

    def find() -> dict[str, Any]:
        start = find_start(config, launch)
        if several and start.checkpoint and (known := decided(start.checkpoint.parent.parent, launch.world_size)):
            if launch.rank == 0:
                print(f"plan: as the run has tuned it ({start.checkpoint.parent.parent})", flush=True)
            return {"trials": [{"options": known, "name": "tuned", "predicted": 0.0}]}
        choices.append(plan_here(config, launch))
        # Where the host updates the weights, a move would also have to send what it holds.
        others = [each for each in choices[0].shown[1:] if not each.config.optim_offload]
        most = 1 if choices[0].best.config.optim_offload or not several else TRIED
        return {"trials": [of(each) for each in [choices[0].best, *others][:most]]}

    def ask(trials: Sequence[Trial]) -> list[Trial]:
        better = replanned(choices[0], config, trials)
        return [trial(**of(each)) for each in better]

    trials = [trial(**each) for each in from_rank_0(launch, "plan", find)["trials"]]
    return Tuner(trials, config.steps, config.tune_budget, ask)


def replanned(choice: Choice, config: TrainConfig, trials: Sequence[Trial]) -> list[Candidate]:
    """Return the fastest configuration with rates corrected by trials, if it is none of them and predicted faster."""
    question, measured = choice.search.question, [each for each in trials if each.seconds and not each.failed]
    if not measured:
        return []
    configs = [replace(choice.best.config, **each.options) for each in measured]
    dims = [parallel_dims(config).resolve(question.world_size) for config in configs]
    jobs = [replace(choice.job, config=config, dims=each) for config, each in zip(configs, dims, strict=True)]
    hardware = corrected(question.hardware, jobs, [each.median for each in measured])
    found = choose(replace(config, device=question.base.device), question.world_size, hardware)
    tried = [{**each.options, "compile": None} for each in trials]
    best = min(each.median for each in measured)
    fresh = [c for c in found.result.best if {**Trial(c.config, "", 0.0).options, "compile": None} not in tried]
    return [each for each in fresh if each.seconds < best and not each.config.optim_offload][:1]


def corrected(hardware: Hardware, jobs: Sequence[Job], measured: Sequence[float]) -> Hardware:
    """Return hardware with the two factors, of the time of all compute and of all messages, by which the steps of jobs
    are predicted closest to what they took. From one job the former follows alone."""

    def fit(links: float) -> tuple[float, float]:
        """Return (the error, the factor of compute) with a factor of messages."""
        compute, errors = 1.0, [0.0]
        for _ in range(3):  # it converges fast: the compute is most of a step
            slower = slowed(hardware, compute, links)
            predicted = [step_seconds(job, slower).total for job in jobs]
            errors = [math.log(took / each) for took, each in zip(measured, predicted, strict=True)]
            compute *= math.exp(sum(errors) / len(errors))
        return sum(error**2 for error in errors) + _WEIGHT * math.log(links) ** 2, compute

    fits = {links: fit(links) for links in (_LINKS if len(jobs) > 1 else [1.0])}
    links = min(fits, key=lambda each: fits[each][0])
    return slowed(hardware, fits[links][1], links)


def slowed(hardware: Hardware, compute: float, links: float) -> Hardware:
    """Return hardware whose compute and whose messages take as many times as long."""

    def link(each: Link) -> Link:
        return Link(each.alpha_seconds * links, each.bytes_per_second / links)

    tiers = []
    for tier in hardware.tiers:
        kinds: dict[str, Any] = {kind: link(getattr(tier, kind)) for kind in ("send", "gather", "reduce", "exchange")}
        tiers.append(replace(tier, shared_bytes_per_second=tier.shared_bytes_per_second / links, **kinds))
    return replace(
        hardware,
        peak_flops={dtype: peak / compute for dtype, peak in hardware.peak_flops.items()},
        memory_bytes_per_second=hardware.memory_bytes_per_second / compute,
        launch_seconds=hardware.launch_seconds * compute,
        tiers=tuple(tiers),
    )
