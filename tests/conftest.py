"""Fixtures for the whole test run."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.e2e.processes import Run
from tests.harness.ranks import RankPool

gc.disable()  # until all tests are imported
os.environ["RES_OPTIONS"] = "timeout:1"  # torch asks DNS for the names of connections, and a lost answer took 5 seconds
torch.set_num_threads(1)  # more of them, and the ranks beside them, would wait for each other by turning in loops

# How long an example takes depends on what else the machine does.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="all plans and mixtures of degrees, not a choice of them"
    )
    parser.addoption(
        "--full", action="store_true", help="the tests marked slow, which the fast lane leaves out, and no others"
    )
    parser.addoption(
        "--random-order", type=int, metavar="SEED", help="shuffle the files, and the tests inside of each, by this seed"
    )
    parser.addoption(
        "--adversarial", action="store_true", help="messages between ranks behave as on GPUs at their worst"
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Take back the threads of a program that ran in this process."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether a test that has a choice of cases shall take them all."""
    return bool(request.config.getoption("--exhaustive"))


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Warm gloo ranks: `ranks.run(fn, world_size, *args)`; every file has its own.

    Ranks grow: a process group leaves memory and threads behind, and after hundreds a step takes three times as long.
    """
    with RankPool(adversarial=request.config.getoption("--adversarial")) as pool:
        yield pool


@pytest.fixture
def launch(exhaustive: bool) -> Callable[..., Run]:
    """`launch(args, folder, ranks)` starts a program under torchrun: with --exhaustive as a user does, else its
    processes are forked from the server of `ranks`, because a rank takes five seconds to import what it needs."""
    return partial(Run, forked=not exhaustive)


def by_name(config: pytest.Config) -> bool:
    """Whether files or tests are asked for by name, rather than folders."""
    return all(Path(argument.partition("::")[0]).is_file() for argument in config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means: a file or a test by name in this process, folders by at least two workers.

    A worker's ranks use up to eight cores.
    """
    if by_name(config):
        return 0
    return max(2, min(8, len(os.sched_getaffinity(0)) // 8))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server that the ranks of all pools are forked from, which imports for all what some of them need."""
    gc.freeze()  # what is imported by now stays: looking for garbage in it takes a second each time
    gc.enable()
    starting = any({"ranks", "launch"} & {*getattr(item, "fixturenames", ())} for item in session.items)
    if starting and not session.config.option.collectonly:
        forkserver.set_forkserver_preload(["tests.harness.preloaded"])
        forkserver.ensure_running()


def slow_tests(items: Sequence[pytest.Item], bound: str = "but") -> set[pytest.Item]:
    """Return the tests marked slow, without the first cases of each that its mark leaves to the fast lane; with the
    bound `full`, only those that it leaves to --exhaustive."""
    cases, slow = Counter[str](), set()
    for item in items:
        if (mark := item.get_closest_marker("slow")) is not None:
            cases[test := item.nodeid.partition("[")[0]] += 1
            slow |= {item} if cases[test] > mark.kwargs.get(bound, 0 if bound == "but" else cases[test]) else set()
    return slow


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    exhaustive = config.getoption("--exhaustive")
    left_out = {item for item in items if item.get_closest_marker("exhaustive") and not exhaustive}
    left_out |= set() if exhaustive else slow_tests([item for item in items if item not in left_out], "full")
    slow = slow_tests([item for item in items if item not in left_out])
    if config.getoption("--full"):
        left_out |= {*items} - slow
    elif not exhaustive and not by_name(config):
        left_out |= slow
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    if config.getoption("--adversarial"):
        reasons = {
            "measures_memory": "it copies messages",
            "compiles": "torch.compile does nothing in its dispatch mode",
        }
        for item in items:
            for name, reason in reasons.items():
                if item.get_closest_marker(name):
                    item.add_marker(pytest.mark.skip(reason=f"the adversarial transport: {reason}"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU"))
    seed = config.getoption("--random-order")
    if seed is not None:
        draw = random.Random(seed)
        files = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (files[item.path], draw.random()))
        return
    # The longest files first: those that start programs, then those that start ranks.
    starting = {item.path for item in items if {"ranks", "launch"} & {*getattr(item, "fixturenames", ())}}
    items.sort(key=lambda item: (item.path.parent.name != "e2e", item.path not in starting))
