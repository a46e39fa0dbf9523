"""Convert plans to and from YAML.

name: mine
offload: [ref, reward, actor.optimizer]
calls:
  actor_generate: {ranks: 0-3, tp: 4}
  actor_train: {ranks: 0-7, ulysses: 2, zero: 3, ac: full}     # dp_shard defaults to the remaining ranks
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from parallel import ParallelDims, format_ranks

from .plan import CallLayout, ExecutionPlan

PLAN_FILE = "plan.yaml"  # in the folder of a run
_DEGREES = tuple(field.name for field in fields(ParallelDims))
_OPTIONS = tuple(field.name for field in fields(CallLayout) if field.name not in ("ranks", "dims"))


def _values(layout: CallLayout) -> dict[str, Any]:
    degrees = {key: getattr(layout.dims, key) for key in _DEGREES}
    return degrees | {key: getattr(layout, key) for key in _OPTIONS}


_DEFAULTS = _values(CallLayout((), ParallelDims(dp_shard=1)))


def parse_ranks(value: object) -> tuple[int, ...]:
    """Parse 3, "0-3,6" or [0, 1, 2, 3, 6]. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, list) and all(type(rank) is int for rank in value):
        return tuple(value)
    ranks: list[int] = []
    for part in str(value).split(","):
        ends = [end.strip() for end in part.split("-")]
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise ValueError(f"ranks: {value!r} must be ranks and ranges, such as 0-3,6")
        ranks += range(int(ends[0]), int(ends[-1]) + 1)
    return tuple(ranks)


def to_mapping(plan: ExecutionPlan) -> dict[str, Any]:
    """Convert a plan to plain values for YAML, without defaults; the inverse of `from_mapping`."""

    def entry(layout: CallLayout) -> dict[str, Any]:
        changed = {key: value for key, value in _values(layout).items() if value != _DEFAULTS[key]}
        return {"ranks": format_ranks(layout.ranks), **changed}

    calls = {name: entry(layout) for name, layout in plan.calls.items()}
    return {"name": plan.name, "offload": sorted(plan.offload), "calls": calls}


def from_mapping(mapping: object) -> ExecutionPlan:
    """Convert a YAML mapping (see the module docstring) to a plan, with dp_shard resolved.

    Raises:
        ValueError: naming every unknown key and every invalid value.
    """
    if not isinstance(mapping, dict) or not isinstance(mapping.get("calls"), dict):
        raise ValueError("a plan must be a mapping with `calls`, the layout of each call by name")
    violations = [f"unknown key {key!r}" for key in mapping if key not in ("name", "offload", "calls")]
    offload = mapping.get("offload") or []
    if not isinstance(offload, list) or not all(isinstance(role, str) for role in offload):
        violations.append(f"offload: {offload!r} must be a list of roles, or of optimizers such as actor.optimizer")
    layouts: dict[str, CallLayout] = {}
    for name, entry in mapping["calls"].items():
        try:
            layouts[str(name)] = _layout(entry)
        except ValueError as error:
            violations.append(f"{name}: {error}")
    if violations:
        raise ValueError("plan: " + "; ".join(violations))
    return ExecutionPlan(str(mapping.get("name", "file")), layouts, frozenset(offload))


def _layout(entry: object) -> CallLayout:
    if not isinstance(entry, dict) or "ranks" not in entry:
        raise ValueError(f"{entry!r} must be a mapping with `ranks`")
    violations = [f"unknown key {key!r}" for key in entry if key != "ranks" and key not in _DEFAULTS]
    values = {key: value for key, value in entry.items() if key in _DEFAULTS}
    violations += [
        f"{key}: {value!r} must be {type(_DEFAULTS[key]).__name__}"
        for key, value in values.items()
        if type(value) is not type(_DEFAULTS[key])
    ]
    if violations:
        raise ValueError("; ".join(violations))
    ranks = parse_ranks(entry["ranks"])
    dims = ParallelDims(**{key: value for key, value in values.items() if key in _DEGREES})
    # Degrees that do not fit stay unresolved: `ExecutionPlan.violations` reports them with everything else.
    fits = dims.dp_shard == -1 and ranks and len(ranks) % (dims.pp * dims.dp_replicate * dims.sp * dims.tp) == 0
    dims = dims.resolve(len(ranks)) if fits else dims
    return CallLayout(ranks, dims, **{key: value for key, value in values.items() if key in _OPTIONS})
