"""What devices compute and how they reach each other, as data: nodes of known vendors, or a file of your own.

A file of `nodes/` holds one node; a user's file may name one as "base" and give only what differs. Rates are one way,
of one device, as datasheets have them; `efficiency` says what part of them programs reach. Where a tier's links are
shared, such as one network adapter for a whole host, the sharing is stated beside what one device can send.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

NODES = Path(__file__).with_name("nodes")
Curve = tuple[tuple[float, float], ...]

# Dense bfloat16 tensor-core peak in FLOP/s, by a part of the device's name; the first match counts.
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
    """A message of n bytes takes alpha + n / rate."""

    alpha_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Tier:
    """One kind of link, and the devices that it joins.

    Attributes:
        devices: how many, those of inner tiers included; 0 for any number.
        send: one message to another device. gather: a step of an all-gather, or of an all-reduce. reduce: a step of a
            reduce-scatter, which some libraries make of an all-reduce. exchange: what an all-to-all sends to one peer.
        shared_bytes_per_second: what all devices of one inner tier can `send` out together; inf for as much as their
            links take.
        overlap: part of a transfer beside compute that takes nothing from it; less than 1 where processors copy what
            is sent.
    """

    name: str
    devices: int
    send: Link
    gather: Link
    reduce: Link
    exchange: Link
    shared_bytes_per_second: float = math.inf
    overlap: float = 1.0


@dataclass(frozen=True)
class Hardware:
    """A device, and how many of it are joined.

    Attributes:
        peak_flops: dense, by dtype, FLOP/s. memory_bytes, memory_bytes_per_second: of the device's own memory.
        tiers: innermost first.
        parallel_rings: whether a ring collective uses every device's link out of a tier (NCCL) or one (gloo).
        crowding: how much faster a device computes while all others wait; above 1 where processes share processors.
        streams: whether collectives run beside compute (CUDA), or hold up the thread that asks for them (processors).
        matmul: part of the peak by a product's FLOPs. attention_forward, attention_backward: of masked attention, by
            tokens of the shorter side; what the mask hides is not counted as work. attention_forward_full,
            attention_backward_full: without a mask.
        memory_efficiency, link_efficiency: part of the stated rates.
    """

    name: str
    device: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    tiers: tuple[Tier, ...]
    matmul: Curve
    attention_forward: Curve
    attention_backward: Curve
    attention_forward_full: Curve
    attention_backward_full: Curve
    memory_efficiency: float = 1.0
    link_efficiency: float = 1.0
    parallel_rings: bool = True
    streams: bool = True
    crowding: float = 1.0

    def peak(self, dtype: str) -> float:
        """Dense peak of a dtype in FLOP/s.

        Raises:
            ValueError: for a dtype that is not stated.
        """
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise ValueError(f"{self.name} states no peak_flops for {dtype} (it does for {known}): add it to its file")
        return self.peak_flops[dtype]

    def matmul_seconds(self, flops: float, dtype: str, calls: float = 1) -> float:
        """`calls` matrix products of `flops` each."""
        return calls * flops / (self.peak(dtype) * interpolate(self.matmul, flops))

    def attention_seconds(self, flops: float, tokens: float, dtype: str, *, backward: bool, full: bool) -> float:
        """One call of an attention kernel of `flops`, whose shorter side has `tokens`; `full` is without a mask."""
        masked, unmasked = (
            (self.attention_backward, self.attention_backward_full)
            if backward
            else (self.attention_forward, self.attention_forward_full)
        )
        curve = unmasked if full else masked
        return flops / (self.peak(dtype) * interpolate(curve, tokens))

    def memory_seconds(self, nbytes: float) -> float:
        """Reading and writing `nbytes` altogether."""
        return nbytes / (self.memory_bytes_per_second * self.memory_efficiency)


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak of a GPU in FLOP/s; None where it is not known, and for CPUs."""
    return next((peak for part, peak in PEAK_BF16 if part in device_name), None)


def interpolate(curve: Curve, x: float) -> float:
    """The curve at x: straight between its points over log x, level beyond its ends."""
    place = bisect_left(curve, (x,))
    if place == 0 or place == len(curve):
        return curve[min(place, len(curve) - 1)][1]
    (left, low), (right, high) = curve[place - 1], curve[place]
    return low + (high - low) * math.log(x / left) / math.log(right / left)


def node_names() -> tuple[str, ...]:
    """The nodes that are known by name."""
    return tuple(sorted(path.stem for path in NODES.glob("*.json")))


def node_of(device_name: str) -> str | None:
    """The node whose devices call themselves so; None for others, PCIe and NVL cards with other links among them."""
    if re.search(r"PCIe|NVL", device_name, re.IGNORECASE):
        return None
    return next((name for name in node_names() if re.search(rf"\b{name}\b", device_name, re.IGNORECASE)), None)


def load_hardware(name_or_path: str) -> Hardware:
    """A node by its name, whatever the case, or a JSON file.

    Raises:
        ValueError: for an unknown name, and naming everything that a file lacks or contradicts.
    """
    return hardware_from_mapping(_read(name_or_path), name_or_path)


def _read(name_or_path: str) -> dict[str, Any]:
    known = NODES / f"{name_or_path.lower()}.json"
    path = known if known.is_file() else Path(name_or_path)
    if not path.is_file():
        raise ValueError(f"hardware {name_or_path!r} is no file and none of {', '.join(node_names())}")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware file {path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"hardware file {path} must hold one object, not a {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return values
    if str(base).lower() not in node_names():
        raise ValueError(f"hardware file {path}: base={base!r} must be one of {', '.join(node_names())}")
    under = _read(str(base))
    for key in ("peak_flops", "efficiency"):
        if not isinstance(values.get(key, {}), dict):
            raise ValueError(f"hardware file {path}: {key} must be an object, not {values[key]!r}")
    merged = {key: {**under.get(key, {}), **values.get(key, {})} for key in ("peak_flops", "efficiency")}
    return {**under, **values, **merged}


_NEEDED = ("name", "memory_bytes", "memory_bytes_per_second", "tiers", "efficiency")
_KNOWN = (*_NEEDED, "source", "device", "peak_flops", "parallel_rings", "streams", "crowding")
_MASKED = ("attention_forward", "attention_backward")
_CURVES = ("matmul", *_MASKED, *(f"{name}_full" for name in _MASKED))
_TIER = ("name", "devices", "alpha_seconds", "bytes_per_second", "send", "gather", "reduce", "exchange")


def hardware_from_mapping(values: Mapping[str, Any], where: str) -> Hardware:
    """The hardware that a file's values describe. A tier's link may be one for all, or one for each kind.

    Raises:
        ValueError: naming everything that is missing, unknown, or contradicts the rest.
    """
    problems = [f"{key} is missing" for key in _NEEDED if key not in values]
    problems += [f"{key} is unknown" for key in values if key not in _KNOWN]
    if not problems:
        try:
            hardware = _build(values)
            problems = hardware_violations(hardware)
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
            problems = [f"it cannot be read: {error}"]
    if problems:
        raise ValueError(f"hardware {where}: " + "; ".join(problems))
    return hardware


def _build(values: Mapping[str, Any]) -> Hardware:
    device, efficiency = str(values.get("device", values["name"])), values["efficiency"]
    unknown = set(efficiency) - {*_CURVES, "memory", "links"}
    if unknown:
        raise ValueError(f"efficiency of {', '.join(sorted(unknown))} is unknown")
    stated = values.get("peak_flops", {})
    peaks = {dtype: _number(stated, dtype) for dtype in stated}
    known = peak_flops(device)
    if known is not None:
        peaks.setdefault("bfloat16", known)
    given = {**{f"{name}_full": efficiency[name] for name in _MASKED}, **efficiency}
    curves = {name: tuple((_finite(x, name), _finite(y, name)) for x, y in given[name]) for name in _CURVES}
    return Hardware(
        name=str(values["name"]),
        device=device,
        peak_flops=peaks,
        memory_bytes=_whole(values, "memory_bytes"),
        memory_bytes_per_second=_number(values, "memory_bytes_per_second"),
        tiers=tuple(map(_tier, values["tiers"])),
        memory_efficiency=_number(efficiency, "memory", 1.0),
        link_efficiency=_number(efficiency, "links", 1.0),
        parallel_rings=_switch(values, "parallel_rings"),
        streams=_switch(values, "streams"),
        crowding=_number(values, "crowding", 1.0),
        **curves,
    )


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    return float(value)


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A finite number, or the default, stated or not."""
    value = values[name] if default is None else values.get(name, default)
    return default if default is not None and value == default else _finite(value, name)


def _whole(values: Mapping[str, Any], name: str) -> int:
    number = _number(values, name)
    if not number.is_integer():
        raise ValueError(f"{name}={number:g} must be a whole number")
    return int(number)


def _switch(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name, True)
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value


def _tier(values: Mapping[str, Any]) -> Tier:
    def link(kind: str) -> Link:
        own = values.get(kind, values.get("gather", values) if kind == "reduce" else values)
        return Link(_number(own, "alpha_seconds"), _number(own, "bytes_per_second"))

    unknown = set(values) - {*_TIER, "shared_bytes_per_second", "overlap"}
    if unknown:
        raise ValueError(f"tier {values.get('name')}: {', '.join(sorted(unknown))} is unknown")
    return Tier(
        name=str(values["name"]),
        devices=_whole(values, "devices"),
        send=link("send"),
        gather=link("gather"),
        reduce=link("reduce"),
        exchange=link("exchange"),
        shared_bytes_per_second=_number(values, "shared_bytes_per_second", math.inf),
        overlap=_number(values, "overlap", 1.0),
    )


def hardware_violations(hardware: Hardware) -> list[str]:
    """Everything that cannot be true of a machine."""
    positive = {
        "memory_bytes": hardware.memory_bytes,
        "memory_bytes_per_second": hardware.memory_bytes_per_second,
        **{f"peak_flops of {dtype}": peak for dtype, peak in hardware.peak_flops.items()},
    }
    found = [f"{name}={value:g} must be positive" for name, value in positive.items() if not value > 0]
    if not hardware.peak_flops:
        found.append(f"peak_flops is missing, and device={hardware.device!r} is not a known one")
    if not 1 <= hardware.crowding < math.inf:
        found.append(f"crowding={hardware.crowding:g} must be at least 1: a device alone is no slower")
    for name, part in (("memory", hardware.memory_efficiency), ("links", hardware.link_efficiency)):
        if not 0 < part <= 1:
            found.append(f"efficiency of {name}={part:g} must be above 0 and at most 1")
    for name in _CURVES:
        curve: Curve = getattr(hardware, name)
        ascending = all(x > 0 for x, _ in curve) and all(a < b for (a, _), (b, _) in pairwise(curve))
        if not curve or not ascending or not all(0 < part <= 1 for _, part in curve):
            found.append(f"efficiency of {name} must be [size, part] pairs: sizes ascending, parts up to 1")
    return found + _tier_violations(hardware.tiers)


def _tier_violations(tiers: Sequence[Tier]) -> list[str]:
    found = [] if tiers else ["tiers must name at least one kind of link"]
    inner = 1
    for number, tier in enumerate(tiers):
        last = number + 1 == len(tiers)
        if tier.devices == 0 and not last:
            found.append(f"tier {tier.name}: devices=0 (any number) is for the last tier alone")
        elif tier.devices and (tier.devices <= inner or tier.devices % inner):
            found.append(f"tier {tier.name}: devices={tier.devices} must be a multiple of the {inner} inside it")
        inner = tier.devices or inner
        links = (("send", tier.send), ("gather", tier.gather), ("reduce", tier.reduce), ("exchange", tier.exchange))
        for kind, link in links:
            if not (link.alpha_seconds >= 0 and 0 < link.bytes_per_second < math.inf):
                found.append(f"tier {tier.name}: {kind} needs alpha_seconds of 0 or more and positive bytes_per_second")
        if not tier.shared_bytes_per_second >= tier.send.bytes_per_second:
            found.append(
                f"tier {tier.name}: one device's {tier.send.bytes_per_second:g} B/s is more than the "
                f"{tier.shared_bytes_per_second:g} B/s that all share"
            )
        if not 0 <= tier.overlap <= 1:
            found.append(f"tier {tier.name}: overlap={tier.overlap:g} must be from 0 to 1")
    return found
