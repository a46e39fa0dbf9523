"""Process groups stay few on many ranks, and none of one rank makes a communicator."""

from __future__ import annotations

import pytest

from benchmarks import communicators


@pytest.mark.parametrize("what", communicators.WHAT)
@pytest.mark.slow(but=2)
def test_groups_are_few_on_1024_ranks(what: str) -> None:
    made = communicators.measure(communicators.WHAT[what], 1024, ranks=2)
    assert made.calls <= communicators.MOST_CALLS and made.used <= communicators.MOST_OF_A_RANK and not made.alone
