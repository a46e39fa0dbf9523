"""The configurations that a run with --plan tries: the one that is predicted to be best, or several for the race of
`usp.train.tuning`, and with rates corrected by that race the one that the planner then prefers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from usp.config import CHOSEN, TrainConfig
from usp.parallel import Hardware
from usp.predict.seconds import step_seconds
from usp.run.launch import Launch
from usp.train.checkpoints import find_start
from usp.train.resolve import compiled_if_possible
from usp.train.tuning import Trial, Tuner, decided
from usp.train.validate import parallel_dims

from .choice import Choice, candidate_text, choose, plan_here, unplanned
from .corrections import Measured, fitted
from .question import from_rank_0
from .search import Candidate

TRIED = 4  # at first, and one more with corrected rates


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
        return [trial(**of(each)) for each in replanned(choices[0], config, trials)]

    trials = [trial(**each) for each in from_rank_0(launch, "plan", find)["trials"]]
    return Tuner(trials, config.tune_budget, ask)


def replanned(choice: Choice, config: TrainConfig, trials: Sequence[Trial]) -> list[Candidate]:
    """Return the fastest configuration with rates corrected by trials, if it is none of them and predicted faster."""
    question, ran = choice.search.question, [each for each in trials if each.seconds and not each.failed]
    if not ran:
        return []
    configs = [replace(choice.best.config, **each.options) for each in ran]
    jobs = [replace(choice.job, config=c, dims=parallel_dims(c).resolve(question.world_size)) for c in configs]

    def predict(hardware: Hardware) -> Iterator[float]:
        return (step_seconds(job, hardware).total for job in jobs)

    measured = [Measured("step", each.name, each.median, each.predicted) for each in ran]
    hardware = fitted(question.hardware, measured, predict)
    found = choose(replace(config, device=question.base.device), question.world_size, hardware)
    chosen, best = attrgetter(*CHOSEN), min(each.seconds for each in measured)
    fresh = [each for each in found.result.best if chosen(each.config) not in [chosen(t.config) for t in trials]]
    return [each for each in fresh if each.seconds < best and not each.config.optim_offload][:1]
