"""Fixtures for the whole test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel.testing import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """One pool of warm gloo ranks for the whole run: `ranks.run(fn, world_size, *args)`."""
    with RankPool(preload=("transformers", "torch.distributed.fsdp")) as pool:
        yield pool
