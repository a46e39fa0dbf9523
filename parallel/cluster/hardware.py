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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

NODES = Path(__file__).with_name("nodes")
Curve = tuple[tuple[float, float], ...]
PCIE4_X16 = 25e9  # bytes per second in one direction, as copies of pinned memory reach
DDR4_SOCKET = 204.8e9  # bytes per second: eight channels of DDR4-3200

# Dense bfloat16 tensor-core peak in FLOP/s by substring of the device name; the first match counts.
PEAK_BF16: tuple[tuple[str, float], ...] = (
    ("B300", 2250e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 150e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L20", 119.5e12),
    ("L4", 121e12),
    ("RTX 5090", 209e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307e12),
    ("MI250X", 383e12),
)


@dataclass(frozen=True)
class Link:
    """Cost of a message: n bytes take alpha_seconds + n / bytes_per_second."""

    alpha_seconds: float
    bytes_per_second: float


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
    """

    name: str
    devices: int
    send: Link
    gather: Link
    reduce: Link
    exchange: Link
    shared_bytes_per_second: float = math.inf
    overlap: float = 1.0

    def faster(self, bandwidth: float, latency: float = 1.0) -> Tier:
        """Return the tier with `bandwidth` times the rates, and 1 / `latency` of the time of an empty message."""

        def fast(link: Link) -> Link:
            return Link(link.alpha_seconds / latency, link.bytes_per_second * bandwidth)

        return replace(
            self,
            send=fast(self.send),
            gather=fast(self.gather),
            reduce=fast(self.reduce),
            exchange=fast(self.exchange),
            shared_bytes_per_second=self.shared_bytes_per_second * bandwidth,
        )


@dataclass(frozen=True)
class AttentionRates:
    """Efficiency of an attention kernel by tokens of the shorter side, per pass and mask.

    Attributes:
        forward, backward: of masked attention; masked pairs do not count as work.
        forward_full, backward_full: of unmasked attention.
    """

    forward: Curve
    backward: Curve
    forward_full: Curve
    backward_full: Curve

    def efficiency(self, tokens: float, *, backward: bool, full: bool) -> float:
        """Return the fraction of the peak that the kernel achieves with `tokens` on its shorter side."""
        curve = getattr(self, f"{'backward' if backward else 'forward'}{'_full' if full else ''}")
        return interpolate(curve, tokens)

    def scaled(self, factor: float) -> AttentionRates:
        """Return these rates times a factor."""
        return AttentionRates(*(tuple((x, y * factor) for x, y in getattr(self, name)) for name in PASSES))


PASSES = ("forward", "backward", "forward_full", "backward_full")


@dataclass(frozen=True)
class Hardware:
    """A kind of device and its interconnect.

    Attributes:
        compute_capability: of an NVIDIA GPU, which decides what attention kernels run on it; None if unknown.
        peak_flops: dense FLOP/s by dtype.
        memory_bytes, memory_bytes_per_second: capacity and bandwidth of the device memory.
        tiers: tiers of the interconnect, innermost first.
        matmul: efficiency by FLOPs of the product.
        attention: efficiency of attention kernels by name.
        memory_efficiency, link_efficiency: fraction of the stated rates that is achieved.
        parallel_rings: a ring collective uses every device's link out of a tier (NCCL), not just one (gloo).
        streams: collectives run concurrently with compute (CUDA), instead of blocking the calling thread (CPU).
        crowding: speedup of a device while all others wait; above 1 where processes share CPUs.
        host_devices: devices of one host, which share its memory.
        host_memory_bytes: capacity of a host's memory; inf if unknown.
        host_memory_bytes_per_second: bandwidth of a host's memory, reads and writes together.
        host_link_bytes_per_second: rate of a copy between a device and pinned host memory, in one direction; inf for a
            CPU, where nothing is copied.
        launch_seconds: time in which a host thread issues one operator in eager execution.
    """

    name: str
    device: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    tiers: tuple[Tier, ...]
    matmul: Curve
    attention: Mapping[str, AttentionRates]
    compute_capability: tuple[int, int] | None = None
    memory_efficiency: float = 1.0
    link_efficiency: float = 1.0
    parallel_rings: bool = True
    streams: bool = True
    crowding: float = 1.0
    host_devices: int = 1
    host_memory_bytes: float = math.inf
    host_memory_bytes_per_second: float = DDR4_SOCKET
    host_link_bytes_per_second: float = PCIE4_X16
    launch_seconds: float = 0.0

    def peak(self, dtype: str) -> float:
        """Return the dense peak of a dtype in FLOP/s.

        Raises:
            ValueError: for a dtype that is not listed.
        """
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
    return next((peak for part, peak in PEAK_BF16 if part in device_name), None)


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
    """Load a known node by name (case-insensitive), or a JSON file.

    Raises:
        ValueError: for an unknown name, or listing everything that is missing or inconsistent in a file.
    """
    return hardware_from_mapping(_read(name_or_path), name_or_path)


def _read(name_or_path: str) -> dict[str, Any]:
    known = NODES / f"{name_or_path.lower()}.json"
    path = known if known.is_file() else Path(name_or_path)
    if not path.is_file():
        raise ValueError(f"hardware {name_or_path!r} must be a file or one of {', '.join(node_names())}")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware file {path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"hardware file {path} must contain one object, got a {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return values
    if str(base).lower() not in node_names():
        raise ValueError(f"hardware file {path}: base={base!r} must be one of {', '.join(node_names())}")
    defaults = _read(str(base))
    for key in ("peak_flops", "efficiency"):
        if not isinstance(values.get(key, {}), dict):
            raise ValueError(f"hardware file {path}: {key} must be an object, got {values[key]!r}")
    merged = {key: {**defaults.get(key, {}), **values.get(key, {})} for key in ("peak_flops", "efficiency")}
    if isinstance(merged["efficiency"]["attention"], dict):
        merged["efficiency"]["attention"] = {**defaults["efficiency"]["attention"], **merged["efficiency"]["attention"]}
    return {**defaults, **values, **merged}


_REQUIRED = ("name", "memory_bytes", "memory_bytes_per_second", "tiers", "efficiency")
_HOST = ("host_devices", "host_memory_bytes", "host_memory_bytes_per_second", "host_link_bytes_per_second")
_NOTES = ("source", "measured")  # for people
_KNOWN = (
    *(*_REQUIRED, *_HOST, *_NOTES, "device", "compute_capability", "peak_flops", "parallel_rings", "streams"),
    *("crowding", "launch_seconds"),
)
KINDS = ("send", "gather", "reduce", "exchange")
_TIER = ("name", "devices", "alpha_seconds", "bytes_per_second", "shared_bytes_per_second", "overlap", *KINDS)


def hardware_from_mapping(values: Mapping[str, Any], where: str) -> Hardware:
    """Build hardware from the values of a file. A tier may have one link for all kinds of messages or one per kind.

    Raises:
        ValueError: listing everything that is missing, unknown or inconsistent.
    """
    problems = [f"{key} is missing" for key in _REQUIRED if key not in values]
    problems += [f"{key} is unknown" for key in values if key not in _KNOWN]
    if not problems:
        try:
            hardware = _build(values)
            problems = _violations(hardware)
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
            problems = [f"missing key {error}" if isinstance(error, KeyError) else f"invalid value: {error}"]
    if problems:
        raise ValueError(f"hardware {where}: " + "; ".join(problems))
    return hardware


def _build(values: Mapping[str, Any]) -> Hardware:
    device, efficiency = str(values.get("device", values["name"])), values["efficiency"]
    known = ("matmul", "attention", "memory", "links")
    if unknown := set(efficiency) - {*known}:
        raise ValueError(f"efficiency of {', '.join(sorted(unknown))} is unknown, only that of {', '.join(known)}")
    stated = values.get("peak_flops", {})
    peaks = {dtype: _number(stated, dtype) for dtype in stated}
    if (peak := peak_flops(device)) is not None:
        peaks.setdefault("bfloat16", peak)
    tiers = tuple(map(_tier, values["tiers"]))
    return Hardware(
        name=str(values["name"]),
        device=device,
        peak_flops=peaks,
        memory_bytes=_integer(values, "memory_bytes"),
        memory_bytes_per_second=_number(values, "memory_bytes_per_second"),
        tiers=tiers,
        matmul=_curve(efficiency["matmul"], "matmul"),
        attention={str(kernel): _rates(given, kernel) for kernel, given in efficiency["attention"].items()},
        compute_capability=_capability(values.get("compute_capability")),
        memory_efficiency=_number(efficiency, "memory", 1.0),
        link_efficiency=_number(efficiency, "links", 1.0),
        parallel_rings=_boolean(values, "parallel_rings"),
        streams=_boolean(values, "streams"),
        crowding=_number(values, "crowding", 1.0),
        host_devices=_integer(values, "host_devices", float(max((tier.devices for tier in tiers), default=0) or 1)),
        host_memory_bytes=_number(values, "host_memory_bytes", math.inf),
        host_memory_bytes_per_second=_number(values, "host_memory_bytes_per_second", DDR4_SOCKET),
        host_link_bytes_per_second=_number(
            values, "host_link_bytes_per_second", math.inf if device == "CPU" else PCIE4_X16
        ),
        launch_seconds=_number(values, "launch_seconds", 0.0),
    )


def _curve(points: Any, name: str) -> Curve:
    return tuple((_finite(x, name), _finite(y, name)) for x, y in points)


def _rates(given: Mapping[str, Any], kernel: str) -> AttentionRates:
    """Build a kernel's rates; those without a mask are those with one if they are not given."""
    if unknown := set(given) - {*PASSES}:
        raise ValueError(f"attention of {kernel} has {', '.join(sorted(unknown))}, only {', '.join(PASSES)} are known")
    whole = {**{f"{name}_full": given[name] for name in ("forward", "backward")}, **given}
    return AttentionRates(**{name: _curve(whole[name], f"attention of {kernel}") for name in PASSES})


def _capability(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    if not (isinstance(given, list) and len(given) == 2 and all(type(part) is int for part in given)):
        raise ValueError(f"compute_capability={given!r} must be [major, minor]")
    return given[0], given[1]


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    return float(value)


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a finite number, or the default (which may be infinite) if it is given or the name is missing."""
    value = values[name] if default is None else values.get(name, default)
    return default if default is not None and value == default else _finite(value, name)


def _integer(values: Mapping[str, Any], name: str, default: float | None = None) -> int:
    number = _number(values, name, default)
    if not number.is_integer():
        raise ValueError(f"{name}={number:g} must be an integer")
    return int(number)


def _boolean(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name, True)
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value


def _tier(values: Mapping[str, Any]) -> Tier:
    def link(kind: str) -> Link:
        own = values.get(kind, values.get("gather", values) if kind == "reduce" else values)
        return Link(_number(own, "alpha_seconds"), _number(own, "bytes_per_second"))

    if unknown := set(values) - set(_TIER):
        raise ValueError(f"tier {values.get('name')}: {', '.join(sorted(unknown))} is unknown")
    return Tier(
        name=str(values["name"]),
        devices=_integer(values, "devices"),
        **{kind: link(kind) for kind in KINDS},
        shared_bytes_per_second=_number(values, "shared_bytes_per_second", math.inf),
        overlap=_number(values, "overlap", 1.0),
    )


def _violations(hardware: Hardware) -> list[str]:
    positive = {
        "memory_bytes": hardware.memory_bytes,
        "memory_bytes_per_second": hardware.memory_bytes_per_second,
        **{name: getattr(hardware, name) for name in _HOST},
        **{f"peak_flops of {dtype}": peak for dtype, peak in hardware.peak_flops.items()},
    }
    found = [f"{name}={value:g} must be positive" for name, value in positive.items() if not value > 0]
    if not hardware.peak_flops:
        found.append(f"peak_flops is missing, and the peak of device={hardware.device!r} is unknown")
    if not 1 <= hardware.crowding < math.inf:
        found.append(f"crowding={hardware.crowding:g} must be at least 1")
    if hardware.launch_seconds < 0:
        found.append(f"launch_seconds={hardware.launch_seconds:g} must be 0 or more")
    for name, part in (("memory", hardware.memory_efficiency), ("links", hardware.link_efficiency)):
        if not 0 < part <= 1:
            found.append(f"efficiency of {name}={part:g} must be above 0 and at most 1")
    curves = {"matmul": hardware.matmul}
    for kernel, rates in hardware.attention.items():
        curves.update({f"attention, {kernel}, {name}": getattr(rates, name) for name in PASSES})
    if not hardware.attention:
        found.append("efficiency of attention must have at least one kernel")
    for name, curve in curves.items():
        ascending = all(x > 0 for x, _ in curve) and all(a < b for (a, _), (b, _) in pairwise(curve))
        if not curve or not ascending or not all(0 < part <= 1 for _, part in curve):
            found.append(f"efficiency of {name} must be [size, fraction] pairs: sizes ascending, fractions in (0, 1]")
    return found + _tier_violations(hardware.tiers)


def _tier_violations(tiers: Sequence[Tier]) -> list[str]:
    found = [] if tiers else ["tiers must contain at least one tier"]
    inner = 1
    for number, tier in enumerate(tiers):
        last = number + 1 == len(tiers)
        if tier.devices == 0 and not last:
            found.append(f"tier {tier.name}: only the last tier may have devices=0 (any number)")
        elif tier.devices and (tier.devices <= inner or tier.devices % inner):
            found.append(f"tier {tier.name}: devices={tier.devices} must be a larger multiple of the inner {inner}")
        inner = tier.devices or inner
        for kind in KINDS:
            link: Link = getattr(tier, kind)
            if not (link.alpha_seconds >= 0 and 0 < link.bytes_per_second < math.inf):
                found.append(f"tier {tier.name}: {kind} needs alpha_seconds of 0 or more and positive bytes_per_second")
        if not tier.shared_bytes_per_second >= tier.send.bytes_per_second:
            found.append(
                f"tier {tier.name}: one device's {tier.send.bytes_per_second:g} B/s is more than the "
                f"{tier.shared_bytes_per_second:g} B/s that all devices share"
            )
        if not 0 <= tier.overlap <= 1:
            found.append(f"tier {tier.name}: overlap={tier.overlap:g} must be from 0 to 1")
    return found
