"""The file of a profile, and the keys of layouts under which it has factors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from usp.parallel import ParallelDims
from usp.planning.corrections import VERSION, Corrections, Profile
from usp.planning.estimates import layout_key
from usp.rlhf.plan.plan import CallLayout


def layout(first: int, size: int, **options) -> CallLayout:
    return CallLayout(tuple(range(first, first + size)), ParallelDims(dp_shard=size), **options)


def test_a_profile_is_read(tmp_path: Path) -> None:
    made, factors = {"version": VERSION, "hardware": "A100"}, {"actor_train": {"dp=2": 1.5, "tp=2": 2}}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**made, "factors": factors}))
    assert Profile.load(path, "A100") == Profile(made, Corrections(factors))
    with pytest.raises(ValueError, match="it corrects predictions for --hardware A100, not H100"):
        Profile.load(path, "H100")
    for text in ("{}", "no JSON", '{"version": 7, "factors": {}}', '{"version": 3, "factors": {"train": 1.5}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"profile\.json is not a profile of python -m examples\.rlhf_profile"):
            Profile.load(path, "A100")


def test_keys_tell_what_runs_differently() -> None:
    assert layout_key(layout(0, 2)) == layout_key(layout(6, 2)) == layout_key(layout(0, 2, micro_batch_tokens=7))
    replicas = CallLayout((0, 1), ParallelDims(dp_replicate=2, dp_shard=1))
    assert layout_key(replicas) == layout_key(layout(0, 2))
    keys = {layout_key(layout(0, 2, **one)) for one in ({}, {"zero": 1}, {"zero": 3}, {"ac": "full"}, {"mlp_tile": 8})}
    assert len(keys) == 5
    four = CallLayout((0, 1, 2, 3), ParallelDims(dp_replicate=2, dp_shard=2))
    assert layout_key(four) == layout_key(layout(0, 4))
    assert layout_key(replace(four, zero=1)) != layout_key(layout(0, 4, zero=1))
