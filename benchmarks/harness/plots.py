"""The plots of docs/benchmarks, from the JSON files in benchmarks/results."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.harness.record import Record

MEMORY = {
    "ours": "ours, all activations saved",
    "ours, saving": "ours, attention saved, tiled MLPs",
    "plain": "transformers + FSDP2",
    "plain, checkpointing": "transformers + FSDP2, checkpointing",
}
SCORES = {
    "grpo": "GRPO: share of correct answers",
    "ppo": "PPO: score from the trained reward model",
    "tools": "GRPO with a tool: share of right answers",
}


def plot_memory(record: Record, path: Path) -> None:
    """Plot peak memory by sequence length: for each grid with ideal scaling, and for each system on 8 ranks."""
    figure, (left, right) = _panels(2, (11, 4.4), sharey=True)
    for (u, r), rows in _by([row for row in record.data if row["system"] == "ours"], "ulysses", "ring"):
        _line(left, rows, label=f"ulysses {u} x ring {r}")
        if u * r == 1:
            ideal = [row["peak_bytes"] / 8 / 2**20 for row in rows]
            left.plot([row["seq_len"] for row in rows], ideal, "k:", label="one rank / 8")
    left.set_title("All activations saved: memory shrinks as 1 / (ulysses x ring)")
    for (system,), rows in _by([row for row in record.data if (row["ulysses"], row["ring"]) == (4, 2)], "system"):
        _line(right, rows, label=MEMORY[system])
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


def plot_learning(record: Record, path: Path) -> None:
    """Plot for each algorithm and seed the score of every step, and its mean over the last ten steps; a line marks the
    level of correct answers that the table names."""
    algorithms = _by(record.data, "algorithm")
    figure, panels = _panels(len(algorithms), (5.5 * len(algorithms), 4.0))
    for axes, ((algorithm,), runs) in zip(panels, algorithms, strict=True):
        for run in runs:
            scores, steps = run["scores"], range(1, len(run["scores"]) + 1)
            parts = [scores[max(0, at - 10) : at] for at in steps]
            (line,) = axes.plot(steps, [sum(part) / len(part) for part in parts], label=f"seed {run['seed']}")
            axes.plot(steps, scores, ".", color=line.get_color(), alpha=0.25)
            if run["level"]:
                axes.axhline(run["level"], color="k", linestyle=":")
                axes.set_ylim(0, 1.02)
        axes.set(title=SCORES[algorithm], xlabel="step")
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


def _by(rows: list[dict[str, Any]], *names: str) -> list[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    return [(value, list(group)) for value, group in groupby(sorted(rows, key=key), key)]


def _line(axes: Any, rows: list[dict[str, Any]], label: str) -> None:
    rows = sorted(rows, key=lambda row: row["seq_len"])
    axes.plot([r["seq_len"] for r in rows], [r["peak_bytes"] / 2**20 for r in rows], "o-", label=label, markersize=4)
