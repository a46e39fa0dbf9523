"""Hardware descriptions: rates of devices and links, for known nodes or from a user's JSON file.

Each file of `nodes/` describes one node; a user's file may name one as "base" and override parts of it. Rates are those
of one device, in one direction, as in datasheets; `efficiency` is the fraction that programs achieve. Where devices
share a link, such as one network adapter per host, the shared rate is given next to the rate of one device.

What a file does not state of the host is assumed: `host_devices` are those of the outermost tier that states a number,
the host link is PCIe 4.0 x16, the host's memory that of one socket with eight channels of DDR4-3200 and of any size,
and launches take no time.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from .json_objects import ValueRule, from_json

NODES = Path(__file__).with_name("nodes")
Curve = tuple[tuple[float, float], ...]
PCIE4_X16 = 25e9  # bytes per second in one direction, as copies of pinned memory reach
DDR4_SOCKET = 204.8e9  # bytes per second: eight channels of DDR4-3200

# Dense bfloat16 tensor-core peak in FLOP/s by substring of the device name; the first match counts.
PEAK_BF16: dict[str, float] = json.loads(Path(__file__).with_name("peaks.json").read_text())

POSITIVE = {"rule": ValueRule("positive and finite", lambda number: 0 < number < math.inf)}
ANY_SIZE = {"rule": ValueRule("positive", lambda number: number > 0)}
NOT_NEGATIVE = {"rule": ValueRule("0 or more, and finite", lambda number: 0 <= number < math.inf)}
FRACTION = {"rule": ValueRule("above 0 and at most 1", lambda number: 0 < number <= 1)}
RATES = {"rule": ValueRule("positive and finite", lambda rates: all(0 < rate < math.inf for rate in rates.values()))}
OVERLAP = {"rule": ValueRule("from 0 to 1", lambda number: 0 <= number <= 1)}
CURVE = {
    "rule": ValueRule(
        "[size, fraction] pairs: sizes ascending, fractions in (0, 1]",
        lambda curve: (
            bool(curve)
            and all(0 < x < math.inf and 0 < y <= 1 for x, y in curve)
            and all(a < b for (a, _), (b, _) in pairwise(curve))
        ),
    )
}


@dataclass(frozen=True)
class Link:
    """Cost of a message: n bytes take alpha_seconds + n / bytes_per_second."""

    alpha_seconds: float = field(metadata=NOT_NEGATIVE)
    bytes_per_second: float = field(metadata=POSITIVE)


@dataclass(frozen=True)
class Tier:
    """One level of the interconnect, and the devices that it connects.

    Attributes:
        devices: number of devices, including those of inner tiers; 0 for any number.
        send: a message to another device.
        gather: a step of an all-gather or all-reduce.
        reduce: a step of a reduce-scatter, which some libraries implement as an all-reduce.
        exchange: the message to one peer in an all-to-all.
        shared_bytes_per_second: rate at which all devices of one inner tier can `send` out together; inf if limited
            only by their links.
        overlap: fraction of a transfer that overlaps with compute without slowing it down; below 1 where CPUs copy
            the data.
        on_host_link: messages pass the link between a device and its host, as those of a network adapter on the
            device's PCIe link do, and share its rate with copies to and from the host.
    """

    name: str
    devices: int = field(metadata=NOT_NEGATIVE)
    send: Link = field(metadata={"inline": True})
    gather: Link = field(metadata={"inline": True})
    reduce: Link = field(metadata={"inline": True})
    exchange: Link = field(metadata={"inline": True})
    shared_bytes_per_second: float = field(default=math.inf, metadata=ANY_SIZE)
    overlap: float = field(default=1.0, metadata=OVERLAP)
    on_host_link: bool = False


@dataclass(frozen=True)
class AttentionRates:
    """Efficiency of an attention kernel by tokens of the shorter side, per pass and mask.

    Attributes:
        forward, backward: of masked attention; masked pairs do not count as work.
        forward_full, backward_full: of unmasked attention; None for those of masked attention.
    """

    forward: Curve = field(metadata=CURVE)
    backward: Curve = field(metadata=CURVE)
    forward_full: Curve | None = field(default=None, metadata=CURVE)
    backward_full: Curve | None = field(default=None, metadata=CURVE)

    def efficiency(self, tokens: float, *, backward: bool, full: bool) -> float:
        """Return the fraction of the peak that the kernel achieves with `tokens` on its shorter side."""
        masked, unmasked = (self.backward, self.backward_full) if backward else (self.forward, self.forward_full)
        return interpolate(unmasked or masked if full else masked, tokens)

    def scaled(self, factor: float) -> AttentionRates:
        """Return these rates times a factor."""
        curves = (getattr(self, each.name) for each in fields(self))
        return AttentionRates(*(curve and tuple((x, y * factor) for x, y in curve) for curve in curves))


@dataclass(frozen=True)
class Hardware:
    """A kind of device and its interconnect.

    Attributes:
        compute_capability: of an NVIDIA GPU, which decides what attention kernels run on it; None if unknown.
        peak_flops: dense FLOP/s by dtype.
        memory_bytes, memory_bytes_per_second: capacity and bandwidth, reads and writes together, of the device memory.
        tiers: tiers of the interconnect, innermost first.
        matmul: efficiency by FLOPs of the product.
        attention: efficiency of attention kernels by name.
        memory_efficiency, link_efficiency: fraction of the stated rates that is achieved.
        parallel_rings: a ring collective uses every device's link out of a tier (NCCL), not just one (gloo).
        streams: collectives run concurrently with compute (CUDA), instead of blocking the calling thread (CPU).
        host_devices: devices of one host, which share its memory.
        host_memory_bytes, host_memory_bytes_per_second: of a host: capacity, inf if unknown, and bandwidth as above.
        host_link_bytes_per_second: rate of a copy between a device and pinned host memory, in one direction; inf for a
            CPU, where nothing is copied.
        launch_seconds: time in which a host thread issues one operator in eager execution.
        wait_fraction: time that ranks wait for the slowest at collectives of layers, as a fraction of their compute.
    """

    name: str
    device: str
    peak_flops: Mapping[str, float] = field(metadata=RATES)
    memory_bytes: int = field(metadata=POSITIVE)
    memory_bytes_per_second: float = field(metadata=POSITIVE)
    tiers: tuple[Tier, ...]
    matmul: Curve = field(metadata={"key": "efficiency.matmul", **CURVE})
    attention: Mapping[str, AttentionRates] = field(metadata={"key": "efficiency.attention"})
    compute_capability: tuple[int, int] | None = None
    memory_efficiency: float = field(default=1.0, metadata={"key": "efficiency.memory", **FRACTION})
    link_efficiency: float = field(default=1.0, metadata={"key": "efficiency.links", **FRACTION})
    parallel_rings: bool = True
    streams: bool = True
    host_devices: int = field(default=1, metadata=POSITIVE)
    host_memory_bytes: float = field(default=math.inf, metadata=ANY_SIZE)
    host_memory_bytes_per_second: float = field(default=DDR4_SOCKET, metadata=POSITIVE)
    host_link_bytes_per_second: float = field(default=PCIE4_X16, metadata=ANY_SIZE)
    launch_seconds: float = field(default=0.0, metadata=NOT_NEGATIVE)
    wait_fraction: float = field(default=0.0, metadata=NOT_NEGATIVE)

    def peak(self, dtype: str) -> float:
        """Return the dense peak of a dtype in FLOP/s. Raise ValueError for a dtype that is not listed."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise ValueError(f"{self.name} states no peak_flops for {dtype}, only for {known}: add it to its file")
        return self.peak_flops[dtype]

    def matmul_seconds(self, flops: float, dtype: str, calls: float = 1) -> float:
        """Return the time of `calls` matrix products of `flops` each."""
        return calls * flops / (self.peak(dtype) * interpolate(self.matmul, flops))

    def rated_as(self, kernel: str) -> str:
        """Return the kernel whose rates stand for those of `kernel`: itself, or the first where it has none."""
        return kernel if kernel in self.attention else next(iter(self.attention))

    def attention_seconds(
        self, kernel: str, flops: float, tokens: float, dtype: str, *, backward: bool, full: bool
    ) -> float:
        """Return the time of `flops` of a kernel whose shorter side has `tokens`; `full` means unmasked."""
        rates = self.attention[self.rated_as(kernel)]
        return flops / (self.peak(dtype) * rates.efficiency(tokens, backward=backward, full=full))

    def memory_seconds(self, nbytes: float) -> float:
        """Return the time of memory accesses, reads and writes, of `nbytes` in total."""
        return nbytes / (self.memory_bytes_per_second * self.memory_efficiency)

    def host_memory_seconds(self, nbytes: float, devices: int) -> float:
        """Return the time in which each of `devices` that share a host reads and writes `nbytes` of its memory."""
        return devices * nbytes / (self.host_memory_bytes_per_second * self.memory_efficiency)

    def host_copy_seconds(self, out: float, back: float, devices: int) -> float:
        """Return the time in which each of `devices` that share a host copies `out` bytes to its memory and `back` from
        it at once; 0 on a CPU."""
        if math.isinf(self.host_link_bytes_per_second):
            return 0.0
        return max(max(out, back) / self.host_link_bytes_per_second, self.host_memory_seconds(out + back, devices))


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a GPU in FLOP/s; None for unknown devices and CPUs."""
    return next((peak for part, peak in PEAK_BF16.items() if part in device_name), None)


def interpolate(curve: Curve, x: float) -> float:
    """Return the curve's value at x: linear in log x between points, constant beyond the ends."""
    index = bisect_left(curve, (x,))
    if index == 0 or index == len(curve):
        return curve[min(index, len(curve) - 1)][1]
    (left, low), (right, high) = curve[index - 1], curve[index]
    return low + (high - low) * math.log(x / left) / math.log(right / left)


def node_names() -> tuple[str, ...]:
    """Return the names of known nodes."""
    return tuple(sorted(path.stem for path in NODES.glob("*.json")))


def node_of(device_name: str) -> str | None:
    """Return the node with this kind of device; None for others, including PCIe and NVL cards, whose links differ."""
    if re.search(r"PCIe|NVL", device_name, re.IGNORECASE):
        return None
    return next((name for name in node_names() if re.search(rf"\b{name}\b", device_name, re.IGNORECASE)), None)


def load_hardware(name_or_path: str) -> Hardware:
    """Load a known node by name (case-insensitive), or a JSON file. Raise ValueError for an unknown name, or listing
    everything that is missing or inconsistent in a file."""
    return hardware_from_mapping(hardware_values(name_or_path), name_or_path)


def hardware_values(name_or_path: str) -> dict[str, Any]:
    """Return the values of a known node or a JSON file, with those of its base. Raise ValueError if there are none."""
    known = NODES / f"{name_or_path.lower()}.json"
    path = known if known.is_file() else Path(name_or_path)
    if not path.is_file():
        raise ValueError(f"hardware {name_or_path!r} must be a file or one of {', '.join(node_names())}")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"hardware file {path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"hardware file {path} must contain one object, got a {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return values
    if str(base).lower() not in node_names():
        raise ValueError(f"hardware file {path}: base={base!r} must be one of {', '.join(node_names())}")
    return _merged(hardware_values(str(base)), values, levels=3)


def _merged(base: Any, values: Any, levels: int) -> Any:
    """Return `values` with what they lack from `base`, down to the kernels of attention, which are replaced whole."""
    if not (levels and isinstance(base, dict) and isinstance(values, dict)):
        return values
    return {**base, **{key: _merged(base.get(key), value, levels - 1) for key, value in values.items()}}


def hardware_from_mapping(values: Mapping[str, Any], where: str) -> Hardware:
    """Build hardware from the values of a file. A tier may have one link for all kinds of messages or one per kind.
    Raise ValueError listing everything that is missing, unknown or inconsistent."""
    values = {key: value for key, value in values.items() if key not in ("source", "measured")}  # for people
    device = str(values.setdefault("device", values.get("name")))
    if device == "CPU":
        values.setdefault("host_link_bytes_per_second", math.inf)
    peak, stated = peak_flops(device), values.get("peak_flops", {})
    if isinstance(stated, Mapping):
        values["peak_flops"] = {**({} if peak is None else {"bfloat16": peak}), **stated}
    if isinstance(values.get("tiers"), list):
        values["tiers"] = [
            {"reduce": tier["gather"], **tier} if isinstance(tier, Mapping) and "gather" in tier else tier
            for tier in values["tiers"]
        ]
    efficiency, problems = values.pop("efficiency", {}), []
    if isinstance(efficiency, Mapping):
        values |= {f"efficiency.{key}": value for key, value in efficiency.items()}
    else:
        problems.append(f"efficiency={efficiency!r} must be an object")
    hardware = from_json(Hardware, values, "", problems)
    problems += [] if hardware is None else _inconsistencies(hardware)
    if problems:
        raise ValueError(f"hardware {where}: {'; '.join(dict.fromkeys(problems))}")
    hosts = max((tier.devices for tier in hardware.tiers), default=0) or 1
    return hardware if "host_devices" in values else replace(hardware, host_devices=hosts)


def _inconsistencies(hardware: Hardware) -> list[str]:
    found = [] if hardware.tiers else ["tiers must contain at least one tier"]
    if not hardware.peak_flops:
        found.append(f"peak_flops is missing, and the peak of device={hardware.device!r} is unknown")
    if not hardware.attention:
        found.append("efficiency.attention must have at least one kernel")
    inner = 1
    for tier in hardware.tiers:
        if tier.devices == 0 and tier is not hardware.tiers[-1]:
            found.append(f"tier {tier.name}: only the last tier may have devices=0 (any number)")
        elif tier.devices and (tier.devices <= inner or tier.devices % inner):
            found.append(f"tier {tier.name}: devices={tier.devices} must be a larger multiple of the inner {inner}")
        inner = tier.devices or inner
        if not tier.shared_bytes_per_second >= tier.send.bytes_per_second:
            found.append(
                f"tier {tier.name}: one device's {tier.send.bytes_per_second:g} B/s is more than the "
                f"{tier.shared_bytes_per_second:g} B/s that all devices share"
            )
    return found
