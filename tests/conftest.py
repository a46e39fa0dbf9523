"""Fixtures for the whole test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from parallel.testing import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-plan", action="store_true", help="RLHF numerics: five steps under all plans")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """One pool of warm gloo ranks for the whole run: `ranks.run(fn, world_size, *args)`."""
    families = (
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "mixtral",
        "qwen3_moe",
    )  # imported once, not by each of eight workers
    models = (f"transformers.models.{family}.modeling_{family}" for family in families)
    with RankPool(preload=("usp.trainer", "parallel.pipeline", *models)) as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU"))
