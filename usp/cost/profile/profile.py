"""A profile: measured seconds of the parts of calls, as a file, and what lies between the measurements.

The seconds of a part are linear in layers, sequences and tokens between neighbouring measurements, and continue the
last two beyond them; where there is one measurement, they are proportional (layers must then be as measured). This is
ReaL's profile (arXiv 2406.14088, section 5.1), with the calls of the toolkit in place of single blocks.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from .parts import Part

VERSION = 2


class Timing(NamedTuple):
    """Seconds, and the seconds of processors that all ranks use meanwhile; 0 where each rank has a device."""

    seconds: float
    processors: float

    def plus(self, other: Timing, times: float = 1.0) -> Timing:
        """Return the sum with `times` the other."""
        return Timing(self.seconds + times * other.seconds, self.processors + times * other.processors)


NOTHING = Timing(0.0, 0.0)


@dataclass(frozen=True)
class Point:
    """A measurement: layers of the model, sequences of a data-parallel rank, and tokens of each."""

    layers: int
    sequences: int
    tokens: int
    timing: Timing


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure.

    Attributes:
        layers: depths of the models; a pipeline of more stages has a layer for each. Empty: their own depth.
        samples: of a mini-batch or call, over all data-parallel ranks. tokens: of each. prompts: tokens of a prompt.
        counted: the fraction of them that are the response.
        decoded: steps of a timed generation.
    """

    layers: tuple[int, ...] = (1, 2)
    samples: tuple[int, ...] = (8, 32)
    tokens: tuple[int, ...] = (256, 1024)
    prompts: tuple[int, ...] = (256, 1024)
    counted: float = 0.5
    decoded: int = 16


@dataclass(frozen=True)
class Profile:
    """What was measured on a machine.

    Attributes:
        device: its name. dtype: of the calls. ranks: in the launch.
        cores: processors that the ranks share; 0: each has a device.
        sizes: that were measured of every part.
        points: by part.
        step: of all that a step takes beside its calls and the movement of weights: see `measure_profile`.
        moves: seconds of a reallocation: a constant, and for each message and byte of the busiest rank.
    """

    device: str
    dtype: str
    ranks: int
    cores: int
    sizes: Sizes
    points: Mapping[Part, tuple[Point, ...]] = field(hash=False)
    step: Timing = NOTHING
    moves: tuple[float, float, float] | None = None

    def at(self, part: Part, layers: int, sequences: float, tokens: float) -> Timing | None:
        """Return the timing of a part; None if it was not measured, or at another depth alone."""
        grid = self._grids.get(part)
        if grid is None or (len(grid) == 1 and layers not in grid):
            return None
        by_layers = {
            depth: _along({n: _along(of_n, tokens) for n, of_n in grid[depth].items()}, sequences) for depth in grid
        }
        return by_layers[layers] if layers in by_layers else _along(by_layers, layers)

    @cached_property
    def _grids(self) -> dict[Part, dict[int, dict[int, dict[int, Timing]]]]:
        found: dict[Part, dict[int, dict[int, dict[int, Timing]]]] = {}
        for part, points in self.points.items():
            grid = found.setdefault(part, {})
            for point in points:
                grid.setdefault(point.layers, {}).setdefault(point.sequences, {})[point.tokens] = point.timing
        return found

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        parts = [
            {**asdict(part), "points": [[p.layers, p.sequences, p.tokens, *p.timing] for p in points]}
            for part, points in sorted(self.points.items())
        ]
        values = {name: getattr(self, name) for name in ("device", "dtype", "ranks", "cores", "step", "moves")}
        values["sizes"] = asdict(self.sizes)
        lines = ",\n  ".join(json.dumps(part) for part in parts)
        path.write_text(f'{{"version": {VERSION}, {json.dumps(values)[1:-1]}, "parts": [\n  {lines}\n]}}\n')

    @staticmethod
    def load(path: Path) -> Profile:
        """Read a profile. Raises ValueError for a file that is none."""
        try:
            values = json.loads(path.read_text())
            if values.pop("version") != VERSION:
                raise ValueError(f"its version must be {VERSION}")
            points = {_part(part): tuple(map(_point, part["points"])) for part in values.pop("parts")}
            step, moves = Timing(*values.pop("step")), values.pop("moves")
            moves = None if moves is None else tuple(moves)
            asked = values.pop("sizes")
            layers, samples, tokens, prompts = (
                tuple(asked.pop(each)) for each in ("layers", "samples", "tokens", "prompts")
            )
            sizes = Sizes(layers, samples, tokens, prompts, **asked)
            return Profile(**values, sizes=sizes, points=points, step=step, moves=moves)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a profile of python -m usp rlhf-profile: {error!r}") from error


def _part(values: Mapping[str, Any]) -> Part:
    return Part(values["model"], values["work"], values["layout"])


def _point(values: Sequence[float]) -> Point:
    layers, sequences, tokens, seconds, processors = values
    return Point(int(layers), int(sequences), int(tokens), Timing(seconds, processors))


def _along(known: Mapping[int, Timing], x: float) -> Timing:
    """Return what lies at x: on the line through the two nearest known ones, or in proportion to a single one."""
    xs = sorted(known)
    if len(xs) == 1:
        return NOTHING.plus(known[xs[0]], x / xs[0])
    right = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    low, high = xs[right - 1], xs[right]
    share = (x - low) / (high - low)

    def between(value: Callable[[Timing], float]) -> float:
        return max(0.0, value(known[low]) + share * (value(known[high]) - value(known[low])))

    return Timing(between(lambda timing: timing.seconds), between(lambda timing: timing.processors))
