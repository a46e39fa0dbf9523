"""Calibration writes hardware files: the tiers of the ranks, and the rates that predict training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.cluster.hardware import hardware_from_mapping
from parallel.testing import RankPool
from usp.__main__ import main
from usp.cost.time.calibrate import Plan, calibrate


def tiny(device: torch.device, host_size: int, heads: int = 2, head_dim: int = 16) -> Plan:
    return Plan(device, host_size, heads, head_dim, sizes=(16, 32), lengths=(32,), stream_bytes=1 << 16, seconds=0.01)


def on_hosts_of(host_size: int) -> dict[str, Any]:
    return calibrate(tiny(torch.device("cpu"), host_size), "test")


def test_links_by_tier(ranks: RankPool) -> None:
    found = ranks.run(on_hosts_of, 4, 2)
    assert all(other.keys() == found[0].keys() for other in found)
    two_hosts = hardware_from_mapping(found[0], "")
    assert [(tier.name, tier.devices) for tier in two_hosts.tiers] == [("inside a host", 2), ("between hosts", 0)]
    assert two_hosts.tiers[1].shared_bytes_per_second >= two_hosts.tiers[1].send.bytes_per_second
    assert two_hosts.crowding >= 1
    assert all(0 <= tier.overlap <= 1 for tier in two_hosts.tiers)
    assert two_hosts.peak("float32") > 0 and not two_hosts.parallel_rings and not two_hosts.streams
    assert [x for x, _ in two_hosts.matmul] == [2 * 16**3, 2 * 32**3]
    assert two_hosts.attention.keys() == {"sdpa"}


def test_a_single_process_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Plan, "of", tiny)
    out = tmp_path / "machine.json"
    assert main(["calibrate", "--out", str(out), "--device", "cpu"], {}) == 0
    assert "GFLOP/s in float32" in capsys.readouterr().out
    assert json.loads(out.read_text())["name"] == "this machine"
    assert main(["calibrate", "--out", str(tmp_path / "no" / "x.json")], {}) == 1
    assert f"{tmp_path / 'no'} is not a directory" in capsys.readouterr().err
