"""rlhf.py: train a language model with RLHF."""

from __future__ import annotations

from usp.rlhf.config import SEARCH, RlhfConfig
from usp.run.launch import Launch, StopRequest

from .flags import Command


def _run(config: RlhfConfig, launch: Launch, stop: StopRequest, error_file: str | None) -> None:
    from usp.rlhf.trainer import train_rlhf

    planner = replanner = None
    if config.plan == SEARCH:
        from usp.planning.run_plan import SearchedPlan

        planner = SearchedPlan()
    if config.replan:
        from usp.planning.run_plan import run_planner

        replanner = run_planner
    train_rlhf(config, launch, stop, error_file, planner=planner, replanner=replanner)


program = Command("rlhf.py", RlhfConfig, _run)
main = program.main
