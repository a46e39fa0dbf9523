"""The plots of docs/benchmarks, from the JSON files in benchmarks/results."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.harness.record import Record


def plot_memory(record: Record, path: Path) -> None:
    """Plot peak memory by sequence length: for each grid with ideal scaling, and for each system on 8 ranks."""
    figure, (left, right) = _panels(2, (11, 4.4), sharey=True)
    ours = [row for row in record.data if row["system"] == "ours"]
    for (u, r), rows in _by(ours, "ulysses", "ring"):
        _line(left, rows, label=f"ulysses {u} x ring {r}")
    single = [row for row in ours if row["ulysses"] * row["ring"] == 1]
    left.plot(
        [row["seq_len"] for row in single],
        [row["peak_bytes"] / 8 / 2**20 for row in single],
        "k:",
        label="one rank / 8",
    )
    left.set_title("All activations saved: memory shrinks as 1 / (ulysses x ring)")
    eight = [
        row for row in record.data if row["ulysses"] * row["ring"] == 8 and (row["ulysses"], row["ring"]) == (4, 2)
    ]
    names = {
        "ours": "ours, all activations saved",
        "ours, saving": "ours, attention saved, tiled MLPs",
        "plain": "transformers + FSDP2",
        "plain, checkpointing": "transformers + FSDP2, checkpointing",
    }
    for (system,), rows in _by(eight, "system"):
        _line(right, rows, label=names[system])
    right.set_title("8 ranks: ours shards one sequence, plain has one per rank")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="sequence length in tokens")
        ticks = sorted({row["seq_len"] for row in record.data})
        axes.set_xticks(ticks, [f"{tick // 1024}K" for tick in ticks])
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=8)
    left.set_ylabel("peak MiB per rank, excluding sharded parameters")
    _save(figure, path)


def plot_learning(record: Record, path: Path, level: float = 0.9) -> None:
    """Plot for each algorithm and seed the score of every step, and its mean over the last ten steps. level: of correct
    answers, that a line marks."""
    titles = {"grpo": "GRPO: share of correct answers", "ahead": "GRPO with --staleness 1"}
    titles |= {"ppo": "PPO: score from the trained reward model"}
    shown = {name: title for name, title in titles.items() if any(run["algorithm"] == name for run in record.data)}
    figure, panels = _panels(len(shown), (5.5 * len(shown), 4.0))
    for axes, (algorithm, title) in zip(panels, shown.items(), strict=True):
        for run in (run for run in record.data if run["algorithm"] == algorithm):
            scores = run["scores"]
            (line,) = axes.plot(*_smoothed(scores), label=f"seed {run['seed']}")
            axes.plot(range(1, len(scores) + 1), scores, ".", color=line.get_color(), alpha=0.25)
        axes.set(title=title, xlabel="step")
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=8)
        if algorithm != "ppo":
            axes.axhline(level, color="k", linestyle=":")
            axes.set_ylim(0, 1.02)
    _save(figure, path)


def plot_long_rollouts(record: Record, path: Path) -> None:
    """Plot for each number of devices a step's seconds by tokens of a sample, with sequence parallelism and without."""
    worlds = sorted({row["case"]["devices"] for row in record.data})
    figure, panels = _panels(len(worlds), (5.5 * len(worlds), 4.4), sharey=True)
    lengths = sorted({row["case"]["length"] for row in record.data})
    for axes, world in zip(panels, worlds, strict=True):
        rows = sorted(record.data, key=lambda row: row["case"]["length"])
        for number, actor in enumerate(sorted({row["case"]["actor"] for row in rows})):
            own = [row for row in rows if (row["case"]["actor"], row["case"]["devices"]) == (actor, world)]
            for system, line in (("parallel", "o-"), ("plain", "x:")):
                fits = [(row["case"]["length"], row[system]["seconds"]) for row in own if row[system]["seconds"]]
                label = f"actor of {actor}B" if system == "parallel" else None
                axes.plot(*zip(*fits, strict=True), line, color=f"C{number}", label=label) if fits else None
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="tokens of a sample",
            title=f"{world} H100; dotted: no sequence parallelism",
        )
        axes.set_xticks(lengths, ["1M" if length == 2**20 else f"{length // 1024}K" for length in lengths])
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("predicted seconds of a step")
    _save(figure, path)


def plot_long_tails(record: Record, path: Path) -> None:
    """Plot the seconds of every step of each system, sorted, with their means; and the scores of every step."""
    figure, (axes, right) = _panels(2, (12.0, 4.2))
    for row in record.data:
        for number, scores in enumerate(row["scores"]):
            label = None if number else row["system"]
            right.plot(*_smoothed(scores), color=f"C{record.data.index(row)}", label=label)
    right.set(xlabel="step", ylabel="share of letters, means of ten steps; three seeds")
    right.grid(True, alpha=0.3)
    right.legend(fontsize=8)
    for row in record.data:
        seconds = sorted(row["seconds"])
        (line,) = axes.plot([(n + 0.5) / len(seconds) for n in range(len(seconds))], seconds, ".-", label=row["system"])
        axes.axhline(sum(seconds) / len(seconds), color=line.get_color(), linestyle=":", alpha=0.6)
    axes.set(xlabel="share of steps that take at most as long", ylabel="seconds of a step; dotted: means")
    axes.set_ylim(0)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def _panels(columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Create a figure with a row of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    return figure, figure.subplots(1, columns, squeeze=False, **options)[0]


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _smoothed(scores: list[float], window: int = 10) -> tuple[list[int], list[float]]:
    """Return the steps, and for each the mean of the last `window` scores, fewer at the start."""
    parts = [scores[max(0, at - window) : at] for at in range(1, len(scores) + 1)]
    return list(range(1, len(scores) + 1)), [sum(part) / len(part) for part in parts]


def _by(rows: list[dict[str, Any]], *names: str) -> list[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    return [(value, list(group)) for value, group in groupby(sorted(rows, key=key), key)]


def _line(axes: Any, rows: list[dict[str, Any]], label: str) -> None:
    rows = sorted(rows, key=lambda row: row["seq_len"])
    axes.plot([r["seq_len"] for r in rows], [r["peak_bytes"] / 2**20 for r in rows], "o-", label=label, markersize=4)
