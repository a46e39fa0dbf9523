"""Fixtures for the whole test run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.testing import RankPool

_STARTS_RANKS = r"^from (parallel\.testing|benchmarks\.harness\.cluster|tests\.e2e\.processes) import"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="all plans and mixtures of degrees, not a choice of them"
    )


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether a test that has a choice of cases shall take them all."""
    return bool(request.config.getoption("--exhaustive"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Warm gloo ranks: `ranks.run(fn, world_size, *args)`; every file has its own.

    Ranks grow: a process group leaves memory and threads behind, and after hundreds a step takes three times as long.
    """
    # Imported once, not by each of eight workers.
    families = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")
    models = (f"transformers.models.{family}.modeling_{family}" for family in families)
    often = ("usp.train.trainer", "usp.rlhf.trainer", "parallel.pipeline", "peft", "tests.usp.hf.test_every_model")
    with RankPool(preload=(*often, *models)) as pool:
        yield pool


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means: a file or a test by name in this process, folders by at least two workers."""
    if all(Path(argument.partition("::")[0]).is_file() for argument in config.args):
        return 0
    return max(2, _launching_workers())


def _launching_workers() -> int:
    """Return how many workers may start ranks: each has up to eight, and ranks of two workers on two cores take three
    times as long together as one after the other."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 8))


def _starts_ranks(file: Path) -> bool:
    return file.parent.name == "e2e" or re.search(_STARTS_RANKS, file.read_text(), re.MULTILINE) is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What `--dist loadscope` means: files go to workers whole, and, where cores are few, all that start ranks to one.

    --dist loadgroup of pytest-xdist 3.8 groups nothing with pytest 9.2, whose tests keep their ids.
    """
    from xdist.scheduler import LoadFileScheduling

    together = _launching_workers() == 1

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "ranks" if together and _starts_ranks(config.rootpath / file) else file

    return Scheduling(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    more = [item for item in items if item.get_closest_marker("exhaustive")]
    if more and not config.getoption("--exhaustive"):
        config.hook.pytest_deselected(items=more)
        items[:] = [item for item in items if item not in more]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU"))
    starts = {path: _starts_ranks(path) for path in {item.path for item in items}}
    items.sort(key=lambda item: not starts[item.path])  # which take longest
