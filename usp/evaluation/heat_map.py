"""The results of a needle probe: as a table, as JSON, and as the heat map of length by depth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from usp.cost.grid import Grid
from usp.run.metrics import short

# Colours of none and all found: they differ in lightness and from yellow alike for all kinds of colour vision.
COLOURS = ("#dd5f43", "#f8e7a1", "#45b094")


@dataclass(frozen=True)
class Found:
    """What a model made of one prompt.

    logprob: of the right answer after the prompt, the sum over its tokens; None if it was not asked for.
    """

    length: int
    depth: float
    sample: int
    answer: str
    response: str
    right: bool
    logprob: float | None


@dataclass(frozen=True)
class NeedleResult:
    """All responses of a probe. asked: the flags that it was made with."""

    asked: dict[str, Any]
    found: tuple[Found, ...]

    @property
    def lengths(self) -> list[int]:
        return sorted({one.length for one in self.found})

    @property
    def depths(self) -> list[float]:
        return sorted({one.depth for one in self.found})

    def score(self, length: int | None = None, depth: float | None = None) -> float:
        """Return the part of the responses that is right, of a length, a depth, both, or all."""
        chosen = [one.right for one in self.found if length in (None, one.length) and depth in (None, one.depth)]
        return sum(chosen) / len(chosen)

    def to_json(self) -> dict[str, Any]:
        """Return the flags, and for each length and depth the score, the mean log-probability and the responses."""
        cells = []
        for length in self.lengths:
            for depth in self.depths:
                here = [one for one in self.found if (one.length, one.depth) == (length, depth)]
                known = [one.logprob for one in here if one.logprob is not None]
                cells.append(
                    {
                        "length": length,
                        "depth": depth,
                        "score": self.score(length, depth),
                        "answer_logprob": sum(known) / len(known) if known else None,
                        "responses": [
                            {name: value for name, value in asdict(one).items() if name not in ("length", "depth")}
                            for one in here
                        ],
                    }
                )
        return {"asked": self.asked, "score": self.score(), "cells": cells}

    def table(self) -> Grid:
        """Return scores in percent: a line for each depth, a column for each length."""
        rows = [
            (f"{depth:g}%", *(f"{100 * self.score(length, depth):.0f}" for length in self.lengths))
            for depth in self.depths
        ]
        rows.append(("all", *(f"{100 * self.score(length):.0f}" for length in self.lengths)))
        return Grid("", ("depth", *map(short, self.lengths)), tuple(rows))


def plot_heat_map(result: NeedleResult, title: str, mark: int | None = None) -> Any:
    """Return a matplotlib figure: lengths from left to right, depths from top to bottom, percent in each cell.

    mark: a dashed line stands behind the last length up to this one.
    """
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    lengths, depths = result.lengths, result.depths
    figure = Figure(figsize=(2.4 + 0.75 * len(lengths), 1.9 + 0.42 * len(depths)), layout="constrained")
    axes = figure.subplots()
    scores = [[100 * result.score(length, depth) for length in lengths] for depth in depths]
    colours = LinearSegmentedColormap.from_list("found", COLOURS)
    image = axes.imshow(scores, cmap=colours, vmin=0, vmax=100, aspect="auto")
    for row, line in enumerate(scores):
        for column, score in enumerate(line):
            axes.text(column, row, f"{score:.0f}", ha="center", va="center", fontsize="small")
    axes.set_xticks(range(len(lengths)), map(short, lengths))
    axes.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths])
    axes.set_xticks([column + 0.5 for column in range(len(lengths) - 1)], minor=True)
    axes.set_yticks([row + 0.5 for row in range(len(depths) - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("length of the prompt in tokens")
    axes.set_ylabel("depth of the needle")
    axes.set_title(title, fontsize="medium", pad=18)
    if mark is not None and lengths[0] <= mark < lengths[-1]:
        behind = sum(length <= mark for length in lengths) - 0.5
        axes.axvline(behind, color="black", linestyle="--", linewidth=1.5)
        aligned: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": "small"}
        axes.annotate(f"up to {short(mark)} ", (behind, 1), xycoords=("data", "axes fraction"), **aligned)
    figure.colorbar(image, ax=axes, label="found, %", pad=0.02)
    return figure


def write_files(result: NeedleResult, figure: Any, out: Path) -> Sequence[Path]:
    """Write the heat map to `out`, and the results next to it; return both paths."""
    figure.savefig(out, dpi=130)
    beside = out.with_suffix(".json")
    beside.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    return out, beside
