"""rlhf.py: train a language model with RLHF."""

from __future__ import annotations

from collections.abc import Callable

from usp.rlhf.config import SEARCH, RlhfConfig
from usp.run.launch import Launch
from usp.run.signals import StopRequest

from .command import Command


def _load() -> Callable[[RlhfConfig, Launch, StopRequest, str | None], None]:
    from usp.rlhf.trainer import train_rlhf

    def train(config: RlhfConfig, launch: Launch, stop: StopRequest, error_file: str | None) -> None:
        planner = None
        if config.plan == SEARCH:
            from usp.cost.rlhf.run_plan import SearchedPlan  # takes seconds

            planner = SearchedPlan()
        replanner = None
        if config.replan:
            from usp.cost.replanning.run_planner import run_planner

            replanner = run_planner
        train_rlhf(config, launch, stop, error_file, planner=planner, replanner=replanner)

    return train


program = Command("rlhf.py", RlhfConfig, _load)
main = program.main
