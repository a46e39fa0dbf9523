"""Hardware files: known nodes, a user's file, inconsistent files; and the time of messages on them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from usp.parallel import load_hardware, node_names, peak_flops, transfer_seconds
from usp.parallel.cluster.hardware import hardware_from_mapping, interpolate

HOST = {"name": "host", "devices": 4, "alpha_seconds": 0.0, "bytes_per_second": 1000.0}
NETWORK = {"name": "network", "devices": 0, "alpha_seconds": 0.5, "bytes_per_second": 100.0}
SHARED = {**NETWORK, "shared_bytes_per_second": 100.0}
CURVE = [[1, 0.5], [100, 1.0]]
CURVES: dict[str, Any] = {"matmul": CURVE, "attention": {"sdpa": {"forward": CURVE, "backward": CURVE}}}
SMALL: dict[str, Any] = {
    "name": "small",
    "memory_bytes": 1000,
    "memory_bytes_per_second": 1e9,
    "peak_flops": {"float32": 1e9},
    "parallel_rings": False,
    "tiers": [HOST, SHARED],
    "efficiency": CURVES,
}


def test_every_known_node_is_consistent() -> None:
    assert set(node_names()) == {"a100", "a800", "b200", "h100", "h200", "l20"}
    for name in node_names():
        node = load_hardware(name.upper())
        assert node.peak("bfloat16") == peak_flops(node.device)
        assert node.tiers[-1].devices == 0
        inside, outside = (transfer_seconds(node, (0, peer), "send", 2**30, 1, range(16)) for peer in (1, 8))
        assert inside < outside
    a800, h200 = load_hardware("a800"), load_hardware("h200")
    assert (a800.peak("bfloat16"), h200.peak("bfloat16")) == (312e12, 989e12)
    hosts = {name: load_hardware(name).host_link_bytes_per_second for name in node_names()}
    assert hosts == {**dict.fromkeys(("a100", "a800", "l20"), 25e9), **dict.fromkeys(("b200", "h100", "h200"), 55e9)}
    assert a800.tiers[0].send.bytes_per_second == 200e9 and h200.memory_bytes == 141e9


def test_peaks_are_known_by_device_name() -> None:
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("Some CPU") is None


def test_a_file_may_override_a_known_node(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    fast = {"flash-attn-3": {"forward": CURVE, "backward": CURVE}}
    path.write_text(json.dumps({"base": "H100", "name": "mine", "efficiency": {"links": 0.5, "attention": fast}}))
    mine, h100 = load_hardware(str(path)), load_hardware("h100")
    assert (mine.name, mine.link_efficiency, mine.matmul) == ("mine", 0.5, h100.matmul)
    assert mine.attention["cudnn"] == h100.attention["cudnn"]
    assert mine.attention["flash-attn-3"].forward == ((1.0, 0.5), (100.0, 1.0))


def test_a_host_is_described_or_assumed() -> None:
    described = {"host_devices": 2, "host_memory_bytes": 4000, "host_memory_bytes_per_second": 300.0}
    small = hardware_from_mapping({**SMALL, **described, "host_link_bytes_per_second": 200.0}, "")
    assert small.host_copy_seconds(600.0, 200.0, 1) == 3.0 and small.host_copy_seconds(600.0, 0.0, 2) == 4.0
    assert small.host_memory_seconds(600.0, 2) == 4.0 and small.launch_seconds == 0.0
    old, cpu = hardware_from_mapping(SMALL, ""), hardware_from_mapping({**SMALL, "device": "CPU"}, "")
    assert (old.host_devices, old.host_memory_bytes, old.host_copy_seconds(25e9, 0.0, 4)) == (4, math.inf, 1.0)
    assert cpu.host_copy_seconds(25e9, 25e9, 4) == 0.0
    with pytest.raises(ValueError, match=r"host_memory_bytes=0 must be positive; launch_seconds=-1 must be 0 or more"):
        hardware_from_mapping({**SMALL, "host_memory_bytes": 0, "launch_seconds": -1}, "")


def test_inconsistencies_are_reported_in_one_message() -> None:
    values: dict[str, Any] = {"memory_bytes": 0, "efficiency": {**CURVES, "links": 2, "matmul": [[2, 0.5], [1, 0.5]]}}
    tiers = {"tiers": [{**HOST, "devices": 0}, {**NETWORK, "shared_bytes_per_second": 10.0}]}
    with pytest.raises(ValueError, match=r"mine.json: memory_bytes=0 .*efficiency.matmul=.*efficiency.links=2 must be"):
        hardware_from_mapping({**SMALL, **values}, "mine.json")
    with pytest.raises(ValueError, match=r"mine.json: tier host: .*devices=0.*100 B/s is more than the 10 B/s"):
        hardware_from_mapping({**SMALL, **tiers}, "mine.json")


CONTENTS: list[tuple[dict[str, Any], str]] = [
    ({"speed": 1, "name": 3}, r"speed is unknown, only name, device, .*; name=3 must be a text"),
    (
        {"tiers": [{"name": "host"}]},
        r"tiers\[0\].devices is missing; tiers\[0\].alpha_seconds is missing; tiers\[0\].bytes_per_second is missing$",
    ),
    ({"efficiency": {**CURVES, "speed": CURVE}}, r"efficiency.speed is unknown, only efficiency.matmul, "),
    (
        {"efficiency": {**CURVES, "attention": {"sdpa": {"forward": CURVE, "backward": CURVE, "sideways": CURVE}}}},
        r"efficiency.attention.sdpa.sideways is unknown, only forward, backward, forward_full, backward_full are known",
    ),
    ({"efficiency": {**CURVES, "attention": {}}}, r"efficiency.attention must have at least one kernel"),
    ({"compute_capability": 9.0}, r"compute_capability=9 must be a list"),
]


@pytest.mark.parametrize(("wrong", "message"), CONTENTS, ids=str)
def test_keys_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hardware_from_mapping({**SMALL, **wrong}, "mine.json")


def test_invalid_hardware_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine.json: tiers is missing$"):
        hardware_from_mapping({k: v for k, v in SMALL.items() if k != "tiers"}, "mine.json")
    with pytest.raises(ValueError, match="must be a file or one of a100, a800"):
        load_hardware("h1000")
    (tmp_path / "x.json").write_text("x")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_hardware(str(tmp_path / "x.json"))
    with pytest.raises(ValueError, match="no peak_flops for bfloat16"):
        hardware_from_mapping(SMALL, "").peak("bfloat16")


HUGE = 10**400


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"efficiency": [1]}, r"efficiency=\[1\] must be an object"),
        ({"efficiency": None}, "efficiency=None must be an object"),
        ({"peak_flops": None}, "peak_flops=None must be an object"),
        ({"peak_flops": {"bfloat16": "fast"}}, "peak_flops.bfloat16='fast' must be a number"),
        ({"memory_bytes": math.inf}, "memory_bytes=inf must be an integer"),
        ({"memory_bytes": HUGE}, "memory_bytes=10000.* must be an integer"),
        ({"memory_bytes": 0.5}, "memory_bytes=0.5 must be an integer"),
        ({"memory_bytes_per_second": math.inf}, "memory_bytes_per_second=inf must be positive and finite"),
        ({"parallel_rings": "false"}, "parallel_rings='false' must be true or false"),
        ({"streams": "no"}, "streams='no' must be true or false"),
        ({"launch_seconds": "1"}, "launch_seconds='1' must be a number"),
        (
            {"efficiency": {"matmul": [[1, 0.5], [math.inf, 1]]}},
            r"efficiency.matmul=.* must be \[size, fraction\] pairs",
        ),
        ({"tiers": [{**HOST, "devices": 2.7}]}, r"tiers\[0\].devices=2.7 must be an integer"),
        ({"tiers": [{**HOST, "devices": math.inf}]}, "devices=inf must be an integer"),
        ({"tiers": [{**HOST, "alpha_seconds": math.inf}]}, "alpha_seconds=inf must be 0 or more, and finite"),
        ({"tiers": [{**HOST, "bytes_per_second": "1e9"}]}, "bytes_per_second='1e9' must be a number"),
    ],
    ids=str,
)
def test_values_of_the_wrong_type_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": "h100", **wrong}))
    with pytest.raises(ValueError, match=message):
        load_hardware(str(path))


def test_transfer_times_by_tier() -> None:
    small = hardware_from_mapping(SMALL, "")

    def seconds(ranks: range, kind: str, nbytes: float, steps: int = 0) -> float:
        return transfer_seconds(small, ranks, kind, nbytes, steps, active=range(8))

    assert seconds(range(4), "gather", 1000.0) == 1.0
    assert seconds(range(1), "gather", 1000.0) == 0.0
    # A ring over all eight ranks: one rank of each host sends all data over the network.
    assert seconds(range(8), "gather", 1000.0, steps=7) == 10.0 + 3.5
    # Four pairs across hosts share the network.
    assert seconds(range(0, 8, 4), "send", 1000.0) == 40.0
    # In an all-to-all over eight ranks, 4 of 7 messages leave the host, from four ranks at once.
    assert math.isclose(seconds(range(8), "exchange", 700.0), 4 * 400 / 100)
    # With one adapter per device and parallel rings, the ranks of a host share the crossing.
    nccl = hardware_from_mapping({**SMALL, "tiers": [HOST, NETWORK], "parallel_rings": True}, "")
    assert transfer_seconds(nccl, range(8), "gather", 1000.0, 0, range(8)) == 2.5
    # Fewer ranks that send at once leave each of them more of the network.
    assert transfer_seconds(small, (0, 4), "send", 1000.0, 0, (0, 1, 4, 5)) == 20.0
    with pytest.raises(ValueError, match="connects 4 devices, too few for rank 4"):
        transfer_seconds(hardware_from_mapping({**SMALL, "tiers": [HOST]}, ""), range(8), "send", 1.0, 1, range(8))


def test_unmasked_attention_uses_its_own_efficiency_if_given() -> None:
    rates = {"sdpa": {**CURVES["attention"]["sdpa"], "backward_full": [[1, 1.0]]}}
    own = hardware_from_mapping({**SMALL, "efficiency": {**CURVES, "attention": rates}}, "")

    def seconds(backward: bool, full: bool) -> float:
        return own.attention_seconds("sdpa", 1e9, 1, "float32", backward=backward, full=full)

    assert seconds(True, full=True) == 1.0
    assert seconds(True, full=False) == seconds(False, full=True) == seconds(False, full=False) == 2.0


def test_curves_are_interpolated_in_log_x_and_constant_beyond_their_ends() -> None:
    curve = ((1.0, 0.5), (100.0, 1.0))
    assert [interpolate(curve, x) for x in (0.1, 1, 10, 100, 1000)] == [0.5, 0.5, 0.75, 1.0, 1.0]
