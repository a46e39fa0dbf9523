"""Tables 6 and 7 of the USP paper with the plain node file, and why the order of Table 6 is what it is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from benchmarks.baselines.paper_rows import ROWS, job
from benchmarks.baselines.paper_rows import Row as PaperRow
from benchmarks.paper_tables import kendall_tau, predict
from usp.parallel import load_hardware
from usp.predict.seconds import model_flops
from usp.predict.traffic import step_traffic

from .row import K, Row, Source

CHOSEN = tuple(row for row in ROWS if row.table in ("Table 6", "Table 7"))


def tau(rows: Iterable[PaperRow], predicted: dict[PaperRow, float]) -> float:
    return kendall_tau([(row.measured, predicted[row]) for row in rows])


def source() -> Source:
    node = load_hardware("a800")
    predicted = {row: predict(row, job(row), node) for row in CHOSEN}
    rows = tuple(Row(row.name, "TFLOP/s", row.measured, predicted[row]) for row in CHOSEN)
    return Source("USP, Llama3-8B on 16 x A800", "arXiv 2405.07719v5, Tables 6 and 7", rows, tuple(_notes(predicted)))


def _notes(predicted: dict[PaperRow, float]) -> Iterable[str]:
    six = [row for row in CHOSEN if row.table == "Table 6"]
    parts: tuple[tuple[str, Callable[[PaperRow], bool]], ...] = (
        ("all rows", lambda row: True),
        ("without tp 2", lambda row: row.tp != 2),
        ("tp 1", lambda row: row.tp == 1),
        ("tp above 2", lambda row: row.tp > 2),
    )
    taus = ", ".join(f"{name} {tau(filter(chosen, six), predicted):.2f}" for name, chosen in parts)
    yield f"USP, Table 6's order, Kendall's tau of measured and predicted: {taus}."
    means = ", ".join(f"tp {tp} {_mean(six, tp):.0f}" for tp in (1, 2, 4, 8))
    slow = {row.seq_len // K: row for row in six if (row.tp, row.ulysses) == (2, 4)}
    lost = {length: _seconds(row, row.measured) - _seconds(row, predicted[row]) for length, row in slow.items()}
    excess = ", ".join(f"{length}K {seconds:.1f} s" for length, seconds in lost.items())
    rates = ", ".join(f"{_sent(slow[length]) / seconds / 1e9:.0f}" for length, seconds in lost.items())
    eight = next(row for row in six if (row.tp, row.seq_len, row.batch) == (8, 64 * K, 1))
    times, error = _sent(eight) / _sent(slow[64]), predicted[eight] / eight.measured - 1
    yield (
        f"USP, Table 6: tp 2 alone breaks the order. At 64K the rows reach {means} TFLOP/s on average, and tp 2 is "
        "lowest at every length. From tp 1 to 2 to 4 the traffic of tp grows by 1 and 2 parts, that of Ulysses shrinks "
        "by 1 and 2, that of parameters by 2 and 1, and the ring's stays: no sum of them is largest at 2. What tp 2 x "
        f"ulysses 4 x ring 2 takes beyond its prediction, {excess}, shrinks with the length, while traffic and compute "
        f"grow. Put down to the messages of tp, it would be a link of {rates} GB/s, where NVLink has 200, and "
        f"tp 8 x ring 2 at 64K, which sends {times:.0f} times as many bytes, is predicted to {error:+.1%}. Memory is "
        "no cause, for tp 1 needs more of it and is on time. The paper does not say why."
    )


def _mean(rows: Iterable[PaperRow], tp: int) -> float:
    return statistics.mean(row.measured for row in rows if (row.tp, row.seq_len, row.batch) == (tp, 64 * K, 1))


def _sent(row: PaperRow) -> int:
    """Return the bytes of tensor parallelism that a rank sends in a step."""
    return sum(sent.nbytes for sent in step_traffic(job(row), 0) if sent.axis == "tp")


def _seconds(row: PaperRow, rate: float) -> float:
    """Return the time of a step at `rate` TFLOP/s per GPU."""
    return model_flops(job(row)) / row.devices / rate / 1e12
