"""Peak memory by formula (usp/predict/memory.py) against the dry run (usp/train/dry_run.py), at full scale.

llama3-8b, llama2-70b and mixtral-8x7b with 32K, 208K and 1M tokens on 8 to 1,024 ranks, covering every axis and every
option that affects memory. Nothing is timed: both count the tensor storage of one rank in one step.

    python -m benchmarks.footprint            # about half an hour on one core
    python -m benchmarks.footprint --keep     # reuse saved dry runs, recompute the formulas
    python -m benchmarks.footprint --quick    # two cases of the tiny model; saves nothing
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.harness.record import RESULTS, Record
from usp.config import TrainConfig
from usp.hf.models import load_model_config
from usp.predict.memory import Footprint, footprint
from usp.train.dry_run import DryRun, dry_run
from usp.train.resolve import job_of

LENGTHS = {"32K": 32 * 1024, "208K": 208 * 1024, "1M": 1024 * 1024}
TARGET = 0.05
_SP8 = {"sp_ulysses": 8}
_GRID16, _GRID64 = _SP8 | {"sp_ring": 2}, _SP8 | {"sp_ring": 8}
_FOURS, _TWOS = {"batch_size": 4, "micro_batches": 4, "zero": 1}, {"batch_size": 2, "micro_batches": 2}
_EIGHTS = {"batch_size": 8, "micro_batches": 8}
_TP8 = {"tp": 8, "tp_sequence_parallel": True}
# Model, tokens, ranks, the observed rank, and train.py's flags.
_FULL: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("llama3-8b", "32K", 8, 0, _SP8),
    ("llama3-8b", "32K", 8, 0, _SP8 | {"ac": "attention-saved"}),
    ("llama3-8b", "32K", 8, 0, {"sp_ring": 8, "ac": "full", "mlp_tile": 2048}),
    ("llama3-8b", "32K", 8, 0, {"sp_ulysses": 4, "sp_ring": 2, "zero": 0}),
    ("llama3-8b", "32K", 8, 0, {"sp_ulysses": 4, "dp_shard": 2, "zero": 2} | _TWOS),
    ("llama3-8b", "32K", 8, 0, {"sp_ring": 4, "dp_replicate": 2, "ac": "attention-saved"}),
    ("llama3-8b", "32K", 8, 0, _SP8 | {"ac": "full", "zero": 1} | _TWOS),
    ("llama3-8b", "32K", 8, 0, _SP8 | {"ac": "full"} | _TWOS),
    ("llama3-8b", "32K", 8, 3, {"tp": 8, "zero": 1}),
    ("llama3-8b", "32K", 8, 5, {"tp": 4, "tp_sequence_parallel": True, "sp_ulysses": 2}),
    ("llama3-8b", "32K", 8, 0, {"pp": 4, "sp_ulysses": 2} | _FOURS),
    ("llama3-8b", "32K", 8, 7, {"pp": 4, "sp_ulysses": 2, "ac": "full"} | _FOURS),
    ("llama3-8b", "32K", 8, 0, {"pp": 2, "sp_ulysses": 4, "pp_schedule": "interleaved-1f1b"} | _FOURS),
    ("llama3-8b", "32K", 8, 7, {"pp": 2, "sp_ulysses": 4, "pp_schedule": "zero-bubble"} | _FOURS),
    ("llama3-8b", "32K", 8, 0, {"pp": 4, "sp_ring": 2, "pp_schedule": "zero-bubble", "zero": 0} | _EIGHTS),
    ("llama3-8b", "208K", 16, 0, _GRID16 | {"ac": "full"}),
    ("llama3-8b", "208K", 16, 0, _GRID16 | {"zero": 2}),
    ("llama3-8b", "208K", 16, 0, {"sp_ulysses": 4, "sp_ring": 4}),
    ("llama3-8b", "208K", 16, 0, _TP8 | {"sp_ring": 2, "zero": 1, "ac": "attention-saved"}),
    ("llama3-8b", "208K", 16, 9, {"tp": 8, "sp_ring": 2, "ac": "full"}),
    ("llama3-8b", "208K", 16, 15, _SP8 | {"pp": 2, "ac": "attention-saved"} | _FOURS | {"zero": 3}),
    ("llama3-8b", "208K", 32, 31, _SP8 | {"pp": 4, "pp_schedule": "zero-bubble", "zero": 1} | _EIGHTS),
    ("llama3-8b", "1M", 64, 0, _GRID64 | {"ac": "attention-saved"}),
    ("llama3-8b", "1M", 64, 0, _GRID64 | {"ac": "full", "ac_offload": True, "mlp_tile": 4096}),
    ("llama3-8b", "1M", 64, 0, {"sp_ring": 64, "ac": "full", "mlp_tile": 2048}),
    ("llama2-70b", "32K", 16, 0, {"tp": 8, "sp_ulysses": 2, "ac": "full"}),
    ("llama2-70b", "208K", 64, 0, _TP8 | {"sp_ulysses": 8}),
    ("llama2-70b", "1M", 1024, 0, _TP8 | {"sp_ulysses": 8, "sp_ring": 16, "ac": "full"}),
    ("llama2-70b", "1M", 1024, 0, _SP8 | {"pp": 8, "sp_ring": 16, "ac": "full"} | _EIGHTS),
    ("mixtral-8x7b", "32K", 16, 0, _SP8 | {"ep": 8, "ac": "full"}),
    ("mixtral-8x7b", "208K", 16, 0, _GRID16 | {"ep": 8}),
    ("llama3-8b", "32K", 8, 0, _SP8 | {"ac": "selective"}),
    ("llama3-8b", "32K", 8, 0, _SP8 | {"ac": "selective", "ac_offload": True}),
    ("llama3-8b", "32K", 8, 0, _SP8 | {"ac": "full", "optim_offload": True}),
    ("llama3-8b", "32K", 8, 0, {"sp_ulysses": 4, "dp_shard": 2, "zero": 2, "optim_offload": True} | _TWOS),
    ("llama3-8b", "32K", 8, 7, {"pp": 4, "sp_ulysses": 2, "ac": "selective", "optim_offload": True} | _FOURS),
    ("llama3-8b", "208K", 16, 0, _GRID16 | {"ac": "attention-saved", "ac_offload": True, "optim_offload": True}),
    ("llama3-8b", "208K", 16, 9, _TP8 | {"sp_ring": 2, "ac": "selective", "zero": 1}),
    ("llama2-70b", "208K", 64, 0, _TP8 | {"sp_ulysses": 8, "ac": "full", "ac_offload": True, "optim_offload": True}),
    ("mixtral-8x7b", "32K", 16, 0, _SP8 | {"ep": 8, "ac": "selective", "optim_offload": True}),
)
_QUICK: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("tiny", "32K", 8, 0, {"sp_ulysses": 4, "sp_ring": 2}),
    ("tiny", "32K", 4, 3, {"pp": 2, "ac": "full"} | _TWOS),
)
_SHOWN = tuple(field.name for field in fields(TrainConfig) if field.name not in ("model", "seq_len"))
COLUMNS = ("model", "tokens", "ranks", "degrees and options", "formula GiB", "dry run GiB", "difference")


@dataclass(frozen=True)
class Case:
    """One training step, as seen by one rank."""

    config: TrainConfig
    world_size: int
    rank: int

    @property
    def options(self) -> str:
        """Return the fields that differ from train.py's defaults, and the rank if it is not 0."""
        default = TrainConfig()
        changed = {name: getattr(self.config, name) for name in _SHOWN}
        words = [
            name if value is True else f"{name}={value}"
            for name, value in changed.items()
            if value != getattr(default, name)
        ]
        return " ".join([*(word.removeprefix("sp_") for word in words), *([f"rank={self.rank}"] if self.rank else [])])

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.config.model, self.config.seq_len, self.world_size, self.options


def key(row: Mapping[str, Any]) -> tuple[str, int, int, str]:
    """Return the `Case.key` of a row's case."""
    return row["model"], row["tokens"], row["ranks"], row["options"]


def cases(*, quick: bool) -> list[Case]:
    return [
        Case(TrainConfig(model=model, seq_len=LENGTHS[length], **flags), world_size, rank)
        for model, length, world_size, rank, flags in (_QUICK if quick else _FULL)
    ]


def compare(case: Case, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a row of the formula's footprint and the dry run's, in bytes; the latter from `known` if given."""
    model_config = load_model_config(case.config.model)
    predicted = footprint(job_of(case.config, model_config, case.world_size), case.rank)
    counted = known or dried(dry_run(case.config, case.world_size, case.rank))
    named = dict(zip(("model", "tokens", "ranks", "options"), case.key, strict=True))
    kept = {name: value for name, value in counted.items() if name.startswith("dry_run")}
    return {**named, **formula(predicted), **kept}


def formula(predicted: Footprint) -> dict[str, Any]:
    peak = predicted.peak
    return {"formula": peak.total, "formula_parts": peak._asdict(), "formula_host": predicted.host}


def dried(run: DryRun) -> dict[str, Any]:
    return {
        "dry_run": run.peak_bytes,
        "dry_run_parts": dict(run.by_category),
        "dry_run_host": run.host_bytes,
        "dry_run_process_bytes": run.process_bytes,
    }


def difference(row: Mapping[str, Any]) -> float:
    return float(row["formula"] / row["dry_run"] - 1)


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = (f"{row[name] / 2**30:.2f}" for name in ("formula", "dry_run"))
    tokens = next(name for name, tokens in LENGTHS.items() if tokens == row["tokens"])
    return (row["model"], tokens, f"{row['ranks']:,}", row["options"], *sizes, f"{difference(row):+.2%}")


def notes(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    errors = [abs(difference(row)) for row in rows]
    worst = max(rows, key=lambda row: abs(difference(row)))
    missed = [row for row in rows if abs(difference(row)) > TARGET]
    where = "; ".join(f"{' '.join(cells(row)[:4])}: {difference(row):+.1%}" for row in missed)
    return (
        f"Mean absolute difference over {len(rows)} cases: {statistics.mean(errors):.2%}, worst {max(errors):.2%} "
        f"({' '.join(cells(worst)[:4])}).",
        f"Within {TARGET:.0%}: {len(rows) - len(missed)} of {len(rows)}." + (f" Beyond: {where}." if missed else ""),
        "Tensor storage at the peak of one optimizer step of one rank, in bfloat16 with float32 weights and AdamW, "
        "regardless of GPU capacity. Unless stated, zero is 3 and ac is none; other flags are train.py's defaults.",
    )


def record_of(rows: Sequence[dict[str, Any]]) -> Record:
    question = "Peak memory of a rank: the formula and the dry run of the real step"
    return Record.of("footprint", question, COLUMNS, map(cells, rows), notes(rows), list(rows))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases of the tiny model; save nothing")
    parser.add_argument("--keep", action="store_true", help="reuse the dry runs that the output file contains")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON file")
    args = parser.parse_args(argv)
    output = args.output or (None if args.quick else RESULTS / "footprint.json")
    asked = cases(quick=args.quick)
    known = {key(row): row for row in Record.load(output).data} if output and output.exists() else {}
    for case in asked:
        known[case.key] = compare(case, known.get(case.key) if args.keep else None)
        print(*cells(known[case.key]), sep="  ", flush=True)
        if output:  # saved after every case, because all of them take half an hour
            record_of([known[case.key] for case in asked if case.key in known]).save(output)
    record_of([known[case.key] for case in asked]).print()


if __name__ == "__main__":
    main()
