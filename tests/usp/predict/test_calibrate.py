"""Calibration writes hardware files: the tiers of the ranks, rates that predict training, and how far to trust them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e.processes import ONE_THREAD
from tests.harness.ranks import RankPool
from usp.__main__ import main
from usp.parallel.cluster.hardware import AttentionRates, hardware_from_mapping
from usp.predict import calibrate
from usp.predict.calibrate import CallTimes, Plan, cautions, contents, measure
from usp.predict.rounds import Estimate, Rounds, Timed


def tiny(device: torch.device, host_size: int, heads: int = 2, head_dim: int = 16) -> Plan:
    return Plan(device, host_size, heads, head_dim, (16, 32), (32,), stream_bytes=1 << 16, rounds=6, seconds=0.002)


def on_hosts_of(host_size: int) -> dict[str, Any]:
    """With messages, and memory, of fewer bytes."""
    plan, nbytes = tiny(torch.device("cpu"), host_size), 1 << 16
    with patch.multiple(calibrate, LARGE=nbytes, CALLS={calibrate.SMALL: 2, nbytes: 1}, UNCACHED=1 << 18):
        measured = measure(plan)
        # Of tiny calls under load, not even which takes longer is certain.
        large = {name: Estimate(1.0, 0.0) for name in measured.times if f"of {nbytes} bytes" in name}
        times = {name: Estimate(one.seconds, 0.0) for name, one in measured.times.items()}
        slow = {name: Estimate(1.0, 0.0) for name in times if name.startswith("sdpa")}
        return contents(plan, "test", replace(measured, times={**times, **large, **slow}))


@pytest.mark.slow
def test_links_by_tier(ranks: RankPool) -> None:
    found = ranks.run(on_hosts_of, 4, 2)
    assert all(other.keys() == found[0].keys() for other in found)
    assert found[0]["measured"]["spread"] == found[1]["measured"]["spread"]
    two_hosts = hardware_from_mapping(found[0], "")
    assert [(tier.name, tier.devices) for tier in two_hosts.tiers] == [("inside a host", 2), ("between hosts", 0)]
    assert two_hosts.tiers[1].shared_bytes_per_second >= two_hosts.tiers[1].send.bytes_per_second
    assert all(0 <= tier.overlap <= 1 for tier in two_hosts.tiers)
    assert two_hosts.peak("float32") > 0 and not two_hosts.parallel_rings and not two_hosts.streams
    assert [x for x, _ in two_hosts.matmul] == [2 * 16**3, 2 * 32**3]
    assert two_hosts.attention.keys() == {"sdpa"}


@pytest.mark.slow
def test_a_single_process_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Plan, "of", tiny)
    monkeypatch.setattr("usp.predict.calibrate.USELESS", 1e9)
    monkeypatch.setattr("usp.predict.calibrate.WIDE", -1.0)
    monkeypatch.setattr("usp.predict.calibrate.TOLERANCE", 1e9)
    out = tmp_path / "machine.json"
    assert main(["calibrate", "--out", str(out), "--device", "cpu"], ONE_THREAD) == 0
    said = capsys.readouterr()
    assert "GFLOP/s in float32" in said.out
    assert f"warning: {out}: times of a call differ" in said.err and "product of 32 in float32 (" in said.err
    found = json.loads(out.read_text())
    assert found["name"] == "this machine" and "memory" in found["measured"]["spread"]
    assert main(["calibrate", "--out", str(tmp_path / "no" / "x.json")], {}) == 1
    assert f"{tmp_path / 'no'} is not a directory" in capsys.readouterr().err


def test_a_file_says_what_not_to_trust_and_nonsense_is_not_written() -> None:
    plan = tiny(torch.device("cpu"), 1)
    quick = ("product of 16 in float32", "product of 32 in float32", "memory")
    passes = [f"sdpa {name} of 32 tokens" for name in AttentionRates.__dataclass_fields__]
    fine = {**dict.fromkeys(quick, Estimate(1e-3, 0.0)), **dict.fromkeys(passes, Estimate(1.0, 0.0))}
    measured = CallTimes(fine, {"sdpa": "sdpa"}, [], other_load=0.0)
    found = contents(plan, "", measured)
    assert cautions(found) == [] and hardware_from_mapping(found, "").peak("float32") == 2 * 32**3 / 1e-3
    assert found["efficiency"]["attention"]["sdpa"]["backward"] == [[32, 5 * 2 * 2 * 16 * 528 / (2 * 32**3 / 1e-3)]]

    copies = {name: Estimate(1.0, 0.0) for name in ("copy to the host", "copy from the host", "launches")}
    gpu = hardware_from_mapping(contents(plan, "", replace(measured, times={**fine, **copies})), "")
    assert (gpu.host_devices, gpu.host_link_bytes_per_second, gpu.launch_seconds) == (1, 1 << 28, 1 / 256)

    def with_time(name: str, seconds: float, spread: float) -> dict[str, Any]:
        times = {**fine, name: Estimate(seconds, spread)}
        return contents(plan, "", replace(measured, times=times, other_load=0.3))

    # The measurement that once became the peak: attention's backward far above every product.
    with pytest.raises(
        ValueError, match=r"sdpa backward of 32 tokens is [\d.]+ times the fastest product.* Measure again"
    ):
        with_time("sdpa backward of 32 tokens", 1e-9, 0.0)
    with pytest.raises(ValueError, match=r"more than 60% between thirds of their turns: memory \(100%\)"):
        with_time("memory", 1.0, 1.0)
    assert "send of 1024 bytes (100%)" in cautions(with_time("inside a host, send of 1024 bytes", 1.0, 1.0))[0]
    wide, other = cautions(with_time("memory", 1.0, 0.2))
    assert "memory (20%)" in wide and "other programs used 30% of the processors" in other


def test_other_work_reaches_one_turn_of_many_calls() -> None:
    calls: list[str] = []
    timed = [Timed(name, lambda name=name: calls.append(name), 1) for name in "abc"]  # type: ignore[misc]
    turns = Rounds(torch.device("cpu"), 6, 0.001).turns(timed)
    assert calls[6:] == list("abc") * 6 and {len(each) for each in turns.values()} == {6}
    # A burst of other work in two of nine turns changes neither the estimate nor what its thirds say.
    assert Estimate.of([1.0] * 4 + [9.0] * 2 + [1.0] * 3) == Estimate(1.0, 0.0)
    assert Estimate.of([1.0, 1.0, 1.5] * 3).spread == 0.5
